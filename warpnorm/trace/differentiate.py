"""The gradients of a pointwise function as one more pointwise graph, from PyTorch's own derivatives."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from warpnorm.problem import Epilogue, Graph, grad_output_name, operand_name
from warpnorm.trace.capture import forward_graphs, pointwise


def vjp(
    function: Callable[..., Any], inputs: Sequence[str], wanted: Sequence[str], grad_outputs: Sequence[str]
) -> Graph:
    """The graph (inputs, grad_outputs) -> the gradient of each wanted input, elementwise and not yet summed
    over the axes along which that input is broadcast."""

    def gradients(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        primals, tangents = values[: len(inputs)], values[len(inputs) :]
        by_name = dict(zip(inputs, primals, strict=True))

        def of_wanted(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = by_name | dict(zip(wanted, some, strict=True))
            result = function(*(given[name] for name in inputs))
            return result if isinstance(result, tuple) else (result,)

        pull_back = torch.func.vjp(of_wanted, *(by_name[name] for name in wanted))[1]
        return pull_back(tuple(tangents))

    return pointwise(gradients, (*inputs, *grad_outputs))


@cache
def backward_graphs(epilogue: Epilogue, operands: int, wanted: tuple[int, ...]) -> tuple[Graph, Graph, Graph]:
    """The prologue again, and the gradients of a plain norm's epilogue and prologue by the wanted operands."""
    names = [operand_name(i) for i in range(operands)]
    by_epilogue = ["xhat"] * (0 in wanted) + [names[i] for i in wanted if i != 0]
    epilogue_vjp = vjp(epilogue, ["xhat", *names[1:]], by_epilogue, [grad_output_name(0)])
    prologue_vjp = vjp(lambda c: c, names[:1], names[:1] if 0 in wanted else [], ["grad_c"])
    return forward_graphs(epilogue, operands)[0], epilogue_vjp, prologue_vjp
