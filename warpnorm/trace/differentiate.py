"""The gradients of a pointwise function as one more pointwise graph, from PyTorch's own derivatives."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from warpnorm.problem import Epilogue, Graph, Prologue, grad_output_name, operand_name
from warpnorm.space import Gradients
from warpnorm.trace import store
from warpnorm.trace.capture import forward_graphs, pointwise


def vjp(
    function: Callable[..., Any],
    inputs: Sequence[str],
    dtypes: Sequence[torch.dtype],
    wanted: Sequence[str],
    grad_outputs: Sequence[str],
    compute: torch.dtype,
) -> Graph:
    """The graph (inputs, grad_outputs) -> the gradient of each wanted input, elementwise and not yet summed
    over the axes along which that input is broadcast."""

    def gradients(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_name = dict(zip(inputs, values, strict=False))
        tangents = values[len(inputs) :]
        if not wanted:
            return ()
        by_name |= {name: by_name[name].detach().requires_grad_() for name in wanted}
        result = function(*by_name.values())
        results = result if isinstance(result, tuple) else (result,)
        reached = [(r, t.to(r.dtype).expand_as(r)) for r, t in zip(results, tangents, strict=True) if r.requires_grad]
        leaves = [by_name[name] for name in wanted]
        return torch.autograd.grad([r for r, _ in reached], leaves, [t for _, t in reached], materialize_grads=True)

    return pointwise(gradients, (*inputs, *grad_outputs), (*dtypes, *[compute] * len(grad_outputs)))


@lru_cache(maxsize=4096)
def backward_graphs(
    prologue: Prologue,
    epilogue: Epilogue,
    dtypes: tuple[torch.dtype, ...],
    compute: torch.dtype,
    gradients: Gradients,
) -> tuple[Graph, Graph, Graph]:
    """The prologue again, and the gradients of the epilogue and of the prologue by the wanted operands."""
    names = [operand_name(i) for i in range(len(dtypes))]
    reached = ["xhat"] * gradients.needs_grad_xhat + ["c"] * gradients.needs_grad_c

    def given_outputs(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = epilogue(*values)
        return tuple(results[i] for i in gradients.given)

    def trace() -> tuple[Graph, ...]:
        epilogue_vjp = vjp(
            given_outputs,
            ["xhat", "c", *names],
            [compute, compute, *dtypes],
            [*reached, *(names[i] for i in gradients.of_epilogue)],
            [grad_output_name(k) for k in range(len(gradients.given))],
            compute,
        )
        of_prologue = [names[i] for i in gradients.of_prologue]
        return epilogue_vjp, vjp(prologue, names, dtypes, of_prologue, ["grad_c"], compute)

    what = ("backward", prologue, epilogue, dtypes, compute, gradients)
    epilogue_vjp, prologue_vjp = store.kept(what, trace)
    return forward_graphs(prologue, epilogue, dtypes, compute)[0], epilogue_vjp, prologue_vjp
