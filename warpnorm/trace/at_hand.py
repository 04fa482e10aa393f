"""What need not be computed, read or written twice: a sum that is an output of its call, as of a residual stream, from which
its gradient follows without the summands, also where these are dropped here and there, or scaled; and gradients that are the
same tensor, as those of summands are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from warpnorm.problem import FULL, Call, Epilogue, Graph, Literal, Prologue, Value, operand_name
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
class ScaledSum:
    """The same where summands are multiplied by numbers that depend on none of them, as dropout does. Operands that are
    multiplied together are a kind, of which the first stands among `count` operands of the `prologue` at `firsts`: the
    sum is an operand for each, and its gradient by each is that of the kind. `others` is where the rest stood."""

    prologue: Prologue
    firsts: tuple[int, ...]
    others: tuple[int, ...]
    count: int

    def __call__(self, *operands: Any) -> torch.Tensor:
        return _KnownSum.apply(self, *operands)

    def gradients(self, operands: Sequence[Any], grad_sum: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of each kind, from that of the sum, by PyTorch's operators. They depend on no summand's value."""
        is_differentiated = torch.is_grad_enabled()
        given = [operands[0].detach()] * self.count
        for i, operand in zip((*self.firsts, *self.others), operands, strict=True):
            given[i] = operand.detach() if isinstance(operand, torch.Tensor) else operand
        firsts = [given[i].requires_grad_() for i in self.firsts]
        with torch.enable_grad():
            result = self.prologue(*given)
            return torch.autograd.grad(result, firsts, grad_sum, create_graph=is_differentiated)

    def plain(self, call: Call) -> Call:
        """`call`, of which this is the prologue, of the sum alone."""
        epilogue: Any = call.epilogue
        return replace(call, prologue=Sum(), epilogue=replace(epilogue, sums=1), axes=call.axes[len(self.firsts) - 1 :])


class _KnownSum(torch.autograd.Function):
    """(scaled, *operands) -> the sum."""

    @staticmethod
    def forward(ctx: Any, scaled: ScaledSum, *operands: Any) -> torch.Tensor:
        ctx.scaled = scaled
        ctx.numbers = [None if isinstance(o, torch.Tensor) else o for o in operands]
        ctx.save_for_backward(*(o if isinstance(o, torch.Tensor) else None for o in operands))
        return operands[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operands = [n if o is None else o for o, n in zip(ctx.saved_tensors, ctx.numbers, strict=True)]
        return (None, *ctx.scaled.gradients(operands, *grads), *(None for _ in ctx.scaled.others))


@dataclass(frozen=True)
class FromSum:
    """An epilogue that does not read the summands: the operands of the call that has the sum in their place, as `sums` of
    them, `others` being where the rest stood among `count`."""

    epilogue: Epilogue
    others: tuple[int, ...]
    count: int
    sums: int = 1

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        xhat, c, *rest = values
        operands = [c] * self.count
        for i, value in zip(self.others, rest[self.sums :], strict=True):
            operands[i] = value
        return self.epilogue(xhat, c, *operands)


class Shortcut(NamedTuple):
    """`call` is the same of the sum, which is this `output`, and the operands in `others`; it has the sum once for each of
    the `kinds` of summands, those that have the same gradient."""

    call: Call
    output: int
    kinds: tuple[tuple[int, ...], ...]
    others: tuple[int, ...]

    def of(self, outputs: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """The operands of `call`."""
        return [*[outputs[self.output]] * len(self.kinds), *(operands[i] for i in self.others)]

    @property
    def kept(self) -> list[tuple[int, ...]]:
        """Whose gradient that of each of them is."""
        return [*self.kinds, *((i,) for i in self.others)]


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
    factors = _summands(prologue, names)
    if len(factors) < 2 or any(operand_name(i) in epilogue.used_inputs for i in factors):
        return None
    dtype = dtypes[next(iter(factors))]
    is_whole = all(_is_full(call.axes[i]) and dtypes[i] == dtype for i in factors)
    output = next((k for k, o in enumerate(epilogue.outputs) if o == "c" and call.outputs[k] == dtype), None)
    if not is_whole or output is None or output in call.detached:
        return None
    kinds = tuple(tuple(i for i in factors if factors[i] == of) for of in dict.fromkeys(factors.values()))
    others = tuple(i for i in names.values() if i not in factors)
    count, firsts = len(dtypes), tuple(kind[0] for kind in kinds)
    sum_of = ScaledSum(call.prologue, firsts, others, count) if any(factors.values()) else Sum()
    axes = (*(call.axes[i] for i in firsts), *(call.axes[i] for i in others))
    short = Call(
        call.norm, call.col_dims, call.eps, sum_of, FromSum(call.epilogue, others, count, len(kinds)), axes, call.outputs,
        call.compute, call.detached,
    )  # fmt: skip
    return Shortcut(short, output, kinds, others)


def gradients(
    call: Call,
    inside: tuple[torch.dtype, ...],
    compute: torch.dtype,
    given: tuple[int, ...],
    wanted: tuple[int, ...],
) -> Gradients:
    """Of a call, which may be one of a sum."""
    graphs = forward_graphs(call.prologue, call.epilogue, inside, compute)
    kinds = len(call.prologue.firsts) if isinstance(call.prologue, ScaledSum) else 0
    return Gradients.of(graphs, given, wanted, kinds)


def _is_full(axes: Any) -> bool:
    return axes == FULL if isinstance(axes, str) else all(axes)


def _summands(prologue: Graph, names: dict[str, int]) -> dict[int, tuple[Value, ...]]:
    """The operands that a graph adds, each once, and where each is multiplied before, by masks of dropouts and numbers; if
    it does nothing else."""
    parts: dict[Any, dict[int, tuple[Value, ...]]] = {name: {i: ()} for name, i in names.items()}
    masks: set[Value] = set()
    for node in prologue.nodes:
        if node.operator == "keep":
            masks.add(node.name)
            continue
        added = [parts[arg] for arg in node.args if arg in parts]
        factors = tuple(arg for arg in node.args if arg in masks or isinstance(arg, Literal))
        found = {i: (*before, *[node.name] * len(factors)) for part in added for i, before in part.items()}
        is_linear = (node.operator, len(added), len(factors)) in (("add", 2, 0), ("mul", 1, 1))
        if not is_linear or len(found) < sum(map(len, added)):
            return {}
        parts[node.name] = found
    return parts.get(prologue.outputs[0], {})


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
