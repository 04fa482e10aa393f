"""A call whose rows lie on several ranks, by the kernels: the statistics of what lies here, one exchange, and the results by
the statistics of all; backward the sums of what lies here, one exchange, and the gradients. Prologue and epilogue are those
of the call, whatever is fused into them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch

from warpnorm import pipeline
from warpnorm.launch.autograd import as_input, is_differentiated, without_gradient
from warpnorm.norms import CHANNEL, FIXED_NORM, RMS_NORM
from warpnorm.parallel import composite, exchange
from warpnorm.problem import Call, Epilogue, Prologue, View, compute_dtype, operand_name
from warpnorm.space import Gradients, shape_of
from warpnorm.trace import capture

Operands = Sequence[torch.Tensor | float]


@dataclass(frozen=True)
class Nothing:
    """The epilogue of a call that is made for its statistics."""

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        return ()


@dataclass(frozen=True)
class Alone:
    """A prologue, of the user's operands: the last ones are not."""

    prologue: Prologue
    count: int

    def __call__(self, *operands: Any) -> torch.Tensor:
        return self.prologue(*operands[: self.count])


@dataclass(frozen=True)
class Given:
    """An epilogue, of xhat by a mean, in two parts, and an rstd that are the last operands. `is_c_first`: the norm that
    carries it computes nothing, and has c in the place of xhat."""

    epilogue: Epilogue
    is_centered: bool
    is_c_first: bool

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        c, operands, deviation, rstd = self.taken_apart(values, 1)
        return self.epilogue(deviation * rstd, c, *operands)

    def taken_apart(self, values: Sequence[Any], more: int) -> tuple[Any, ...]:
        """c, the user's operands, the deviation from the mean, and what follows it, rstd first."""
        c, operands, last = values[0 if self.is_c_first else 1], values[2:-more], values[-more:]
        if not self.is_centered:
            return c, operands, c, *last
        return c, operands[:-2], (c - operands[-2]) - operands[-1], *last


@dataclass(frozen=True)
class Returned(Given):
    """The same, and one more output whose derivative by c is `offset + slope * (c - mean)`: what reaches c by way of the
    statistics. Never run forward."""

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        c, operands, deviation, rstd, *offset, slope = self.taken_apart(values, 3 if self.is_centered else 2)
        statistics = slope * 0.5 * deviation.square()
        for term in offset:
            statistics = statistics + term * c
        return *self.epilogue(deviation * rstd, c, *operands), statistics


def normalize(
    call: Call, operands: Operands, group: Any, takes_kernels: bool
) -> tuple[tuple[torch.Tensor, ...], exchange.Merged]:
    """The outputs, differentiable, and the statistics of whole rows. One collective, and one backward."""
    if torch.compiler.is_compiling():  # a fused function's mode would be traced once more, in backward
        with torch._C.DisableTorchFunction():
            return composite.composite(call, operands, group)
    if not takes_kernels:
        return composite.composite(call, operands, group)
    views = [View.of(operand) for operand in operands]
    prologue, _ = capture.forward_graphs(call.prologue, call.epilogue, *pipeline.inside(call, views))
    reaching = prologue.dependencies([0])
    needing = [isinstance(o, torch.Tensor) and o.requires_grad for o in operands]
    stance = exchange.stance(any(need and operand_name(i) in reaching for i, need in enumerate(needing)))
    with torch.no_grad():
        merged = exchange.merge_moments(*local_moments(call, operands), group, stance)
    anchor = None if any(needing) else exchange.anchor(merged, merged.variance)
    return SplitNormalization.apply(call, group, anchor, *merged, *operands), merged


class SplitNormalization(torch.autograd.Function):
    """(call, group, what makes this rank take part, mean, variance, count, stances, *operands) -> outputs."""

    BEFORE = 7  # arguments that are no operands

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        group: Any,
        anchor: torch.Tensor | None,
        mean: torch.Tensor | None,
        variance: torch.Tensor,
        total: torch.Tensor,
        stances: torch.Tensor,
        *operands: torch.Tensor | float,
    ) -> tuple[torch.Tensor, ...]:
        statistics = applied_statistics(call, operands, exchange.Merged(mean, variance, total, stances))
        dims = len(shape_of([View.of(operand) for operand in operands]))
        outputs, carried = pipeline.forward(applied(call, Given, dims), [*operands, *statistics])
        ctx.call, ctx.group, ctx.count = call, group, len(operands)
        ctx.numbers = [None if isinstance(o, torch.Tensor) else o for o in operands]
        tensors = [o if isinstance(o, torch.Tensor) else None for o in operands]
        ctx.kept = len(statistics), len(carried)
        ctx.save_for_backward(*tensors, *statistics, *carried, total, stances)
        ctx.mark_non_differentiable(*without_gradient(call, outputs))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        before = SplitNormalization.BEFORE
        if all(grad is None for grad in grad_outputs):
            return (None,) * (before + ctx.count)
        saved = ctx.saved_tensors
        operands = [n if t is None else t for t, n in zip(saved[: ctx.count], ctx.numbers, strict=True)]
        wanted = tuple(i for i in range(ctx.count) if ctx.needs_input_grad[before + i])
        found: dict[int, Any]
        if is_differentiated():
            found = twice_differentiable(ctx.call, operands, grad_outputs, wanted, saved[-1], ctx.group)
        else:
            end = ctx.count + ctx.kept[0]
            kept = saved[ctx.count : end], saved[end:-2], saved[-2], saved[-1]
            found = gradients_of(ctx.call, operands, grad_outputs, kept, wanted, ctx.group)
        return (*[None] * before, *(found.get(i) for i in range(ctx.count)))


def reaching_c(
    call: Call, operands: Operands, grad_outputs: Sequence[torch.Tensor | None], wanted: tuple[int, ...]
) -> tuple[int, ...]:
    """Of `wanted`, those whose gradient comes by way of what is normalized."""
    given = tuple(i for i, grad in enumerate(grad_outputs) if grad is not None)
    dtypes = pipeline.inside(call, [View.of(operand) for operand in operands])
    return Gradients.of(capture.forward_graphs(call.prologue, call.epilogue, *dtypes), given, wanted).of_prologue


def local_moments(call: Call, operands: Operands) -> tuple[int, torch.Tensor | None, torch.Tensor]:
    """The count, mean and variance of every row here."""
    shape = shape_of([View.of(operand) for operand in operands])
    rows = shape[1] if call.norm.rows == CHANNEL else prod(shape[: len(shape) - call.col_dims])
    _, found = pipeline.forward(replace(call, eps=0.0, epilogue=Nothing(), outputs=(), detached=()), operands)
    named = dict(zip(call.norm.statistics, found, strict=True))
    variance = named["variance"] if call.norm.keeps_variance else named["rstd"].double().pow(-2).to(found[0].dtype)
    return prod(shape) // rows, named.get("mean"), variance


def applied_statistics(call: Call, operands: Operands, merged: exchange.Merged) -> list[torch.Tensor]:
    """The mean, if there is one, and rstd, as operands. A mean that is rounded once more would be off by more than one of a
    single process: what is rounded away comes after it."""
    shape = shape_of([View.of(operand) for operand in operands])
    compute = compute_dtype([call.compute, *(View.of(o).dtype for o in operands)])
    by_row = (-1, *[1] * (len(shape) - 2))
    if call.norm.rows != CHANNEL:
        by_row = (*shape[: len(shape) - call.col_dims], *[1] * call.col_dims)
    mean = () if merged.mean is None else exchange.in_two(merged.mean, compute)
    return [s.to(compute).view(by_row) for s in (*mean, torch.rsqrt(merged.variance + call.eps))]


@lru_cache(maxsize=1024)
def applied(call: Call, kind: type[Given], dims: int) -> Call:
    """The call by given statistics, on operands that have `dims` dimensions together. A norm over rows is carried by one
    whose own statistic nobody reads: the row is at hand when it is made."""
    is_by_channel = call.norm.rows == CHANNEL
    row_dims = dims - call.col_dims
    mask = tuple(dim == 1 if is_by_channel else dim < row_dims for dim in range(dims))
    more = (3 if call.norm.is_centered else 1) + (1 + call.norm.is_centered) * (kind is Returned)
    return replace(
        call,
        norm=FIXED_NORM if is_by_channel else RMS_NORM,
        prologue=Alone(call.prologue, len(call.axes)),
        epilogue=kind(call.epilogue, call.norm.is_centered, is_by_channel),
        axes=(*call.axes, *[mask] * more),
        outputs=(*call.outputs, call.compute) if kind is Returned else call.outputs,
    )


def gradients_of(
    call: Call,
    operands: Operands,
    grad_outputs: Sequence[torch.Tensor | None],
    kept: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor, torch.Tensor],
    wanted: tuple[int, ...],
    group: Any,
) -> dict[int, torch.Tensor]:
    """Those that do not depend on other ranks beside the sums that others need, then the rest. `kept` are the statistics by
    which forward went, what its carrier kept, how many values a row has, and what each rank does here."""
    statistics, carried, count, stances = kept
    shape = shape_of([View.of(operand) for operand in operands])
    through_c = reaching_c(call, operands, grad_outputs, wanted)
    first = tuple(i for i in wanted if i not in through_c)
    summed = [len(operands) + k for k in ((0, 2) if call.norm.is_centered else (0,))]  # mean and rstd
    takes_part = bool(through_c) or exchange.is_needed(stances)
    if takes_part:
        exchange.check_stances(stances)
        first += tuple(summed)
    of_given = [*operands, *statistics]
    found = pipeline.backward(applied(call, Given, len(shape)), of_given, grad_outputs, carried, first) if first else {}
    if not takes_part:
        return found
    own = [found.pop(i, torch.zeros_like(statistics[0])) for i in summed]
    rstd = statistics[-1]
    terms = exchange.gradient_terms(own, rstd, count, group)
    if not through_c:
        return found
    last_call = applied(call, Returned, len(shape))
    one = torch.ones((), dtype=call.compute, device=rstd.device).expand(shape)
    rest = pipeline.backward(last_call, [*of_given, *terms], [*grad_outputs, one], carried, through_c)
    return found | rest


def twice_differentiable(
    call: Call,
    operands: Operands,
    grad_outputs: Sequence[torch.Tensor | None],
    wanted: tuple[int, ...],
    stances: torch.Tensor,
    group: Any,
) -> dict[int, torch.Tensor | None]:
    """The gradients by PyTorch's operators, with a history. A rank that needs none of c computes one, if others do: the
    collectives of all are the same then."""
    of_all = tuple(i for i, o in enumerate(operands) if isinstance(o, torch.Tensor) and o.is_floating_point())
    through_c = reaching_c(call, operands, grad_outputs, wanted)
    more: tuple[int, ...] = ()
    if through_c or exchange.is_needed(stances):
        exchange.check_stances(stances)
        more = () if through_c else reaching_c(call, operands, grad_outputs, of_all)[:1]
    with torch.enable_grad():
        inputs: list[Any] = [as_input(o) if isinstance(o, torch.Tensor) else o for o in operands]
        outputs = composite.differentiable(call, inputs, group)
        given = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None and o.requires_grad]
        gradients = torch.autograd.grad(
            [o for o, _ in given], [inputs[i] for i in (*wanted, *more)], [g for _, g in given], create_graph=True,
            allow_unused=True,
        )  # fmt: skip
    return dict(zip(wanted, gradients, strict=False))
