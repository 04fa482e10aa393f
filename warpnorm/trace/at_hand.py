"""What need not be computed, read or written twice: a sum that is an output of its call, as of a residual stream, from which
its gradient follows without the summands; and gradients that are the same tensor, as those of summands are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from warpnorm.problem import FULL, Call, Epilogue, Graph, operand_name
from warpnorm.space import Gradients
from warpnorm.trace import differentiate
from warpnorm.trace.capture import forward_graphs
from warpnorm.trace.expression import CAST


@dataclass(frozen=True)
class Sum:
    """The prologue of that call."""

    def __call__(self, *operands: Any) -> torch.Tensor:
        return operands[0]


@dataclass(frozen=True)
class FromSum:
    """An epilogue that does not read the summands: the operands of the call that has the sum in their place, `others` being
    where the rest stood among `count`."""

    epilogue: Epilogue
    others: tuple[int, ...]
    count: int

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        xhat, c, _, *rest = values
        operands = [c] * self.count
        for i, value in zip(self.others, rest, strict=True):
            operands[i] = value
        return self.epilogue(xhat, c, *operands)


class Shortcut(NamedTuple):
    """`call` is the same of the sum, which is this `output`, and the operands in `others`; `summed` are the summands."""

    call: Call
    output: int
    summed: tuple[int, ...]
    others: tuple[int, ...]


@lru_cache(maxsize=4096)
def shortcut(
    call: Call, dtypes: tuple[torch.dtype, ...], inside: tuple[torch.dtype, ...], compute: torch.dtype
) -> Shortcut | None:
    """The way from the sum, if a call has it: the prologue adds operands that are full and of one dtype, one output is
    its result in that dtype, and the epilogue reads none of them. `inside` are the dtypes inside a kernel."""
    if call.norm.is_by_channel:
        return None
    prologue, epilogue = forward_graphs(call.prologue, call.epilogue, inside, compute)
    names = {operand_name(i): i for i in range(len(dtypes))}
    summed = _summands(prologue, names)
    if len(summed) < 2 or any(operand_name(i) in epilogue.used_inputs for i in summed):
        return None
    dtype = dtypes[summed[0]]
    is_whole = all(_is_full(call.axes[i]) and dtypes[i] == dtype for i in summed)
    output = next((k for k, o in enumerate(epilogue.outputs) if o == "c" and call.outputs[k] == dtype), None)
    if not is_whole or output is None or output in call.detached:
        return None
    others = tuple(i for i in names.values() if i not in summed)
    axes = (call.axes[summed[0]], *(call.axes[i] for i in others))
    short = Call(
        call.norm, call.col_dims, call.eps, Sum(), FromSum(call.epilogue, others, len(dtypes)), axes, call.outputs,
        call.compute, call.detached,
    )  # fmt: skip
    return Shortcut(short, output, summed, others)


def _is_full(axes: Any) -> bool:
    return axes == FULL if isinstance(axes, str) else all(axes)


def _summands(prologue: Graph, names: dict[str, int]) -> tuple[int, ...]:
    """The operands that a graph adds, each once, if it does nothing else."""
    parts: dict[Any, tuple[int, ...]] = {name: (i,) for name, i in names.items()}
    for node in prologue.nodes:
        if node.operator != "add" or not all(arg in parts for arg in node.args):
            return ()
        parts[node.name] = tuple(i for arg in node.args for i in parts[arg])
    found = parts.get(prologue.outputs[0], ())
    return found if len(set(found)) == len(found) else ()


@lru_cache(maxsize=4096)
def twins(
    call: Call, inside: tuple[torch.dtype, ...], compute: torch.dtype, gradients: Gradients, fresh: Sequence[Any]
) -> dict[int, int]:
    """Which of the wanted gradients is the same tensor as an earlier one, as in PyTorch, where a cast makes another of it.
    `fresh` says where each would be written."""
    if any(step.target == CAST for step in getattr(call.prologue, "steps", ())):
        return {}
    prologue_vjp = differentiate.backward_graphs(call.prologue, call.epilogue, inside, compute, gradients)[2]
    found: dict[int, int] = {}
    seen: dict[Any, int] = {}
    for i, value in zip(gradients.of_prologue, prologue_vjp.outputs, strict=True):
        if i in gradients.of_epilogue or not _is_full(call.axes[i]):
            continue
        first = seen.setdefault((value, fresh[gradients.wanted.index(i)]), i)
        if first != i:
            found[i] = first
    return found
