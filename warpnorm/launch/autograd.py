"""Forward and backward launches as one differentiable operation. Only the operands and the statistics are kept:
backward computes c again. Of operands whose sum is c and an output, that output is kept instead. The second derivative
goes through the composite of `reference.py`."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from warpnorm.problem import Call, Running
from warpnorm.reference import composite, differentiating
from warpnorm.trace.at_hand import ScaledSum, Shortcut


class Flow(Protocol):
    """The two directions of a call, as `pipeline.py` runs them."""

    def forward(
        self, call: Call, operands: Sequence[torch.Tensor | float], *, running: Running | None
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]: ...

    def backward(
        self,
        call: Call,
        operands: Sequence[torch.Tensor | float],
        grad_outputs: Sequence[torch.Tensor | None],
        statistics: Sequence[torch.Tensor],
        wanted: tuple[int, ...],
    ) -> dict[int, torch.Tensor]: ...

    def shortcut(self, call: Call, operands: Sequence[torch.Tensor | float]) -> Shortcut | None: ...


def without_gradient(call: Call, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [o for i, o in enumerate(outputs) if i in call.detached or not o.is_floating_point()]


def _saved(call: Call, statistics: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Those that backward reads."""
    return statistics[: len(call.norm.saved)]


def _kept(operands: Sequence[Any]) -> list[torch.Tensor | None]:
    """What is saved of operands: autograd refuses tensors of inference mode, of which it then has copies."""
    return [(o.clone() if o.is_inference() else o) if isinstance(o, torch.Tensor) else None for o in operands]


class Normalization(torch.autograd.Function):
    """(flow, call, running, *operands) -> (*outputs, *statistics)."""

    @staticmethod
    def forward(
        ctx: Any, flow: Flow, call: Call, running: Running | None, *operands: torch.Tensor | float
    ) -> tuple[torch.Tensor, ...]:
        outputs, statistics = flow.forward(call, operands, running=running)
        ctx.flow, ctx.call, ctx.count = flow, call, len(operands)
        ctx.kept = [(i,) for i in range(len(operands))]  # whose gradient that of each kept tensor is
        short = flow.shortcut(call, operands) if any(ctx.needs_input_grad[3:]) else None
        if short is not None:
            ctx.call, ctx.kept, operands = short.call, short.kept, tuple(short.of(outputs, operands))
        ctx.numbers = [None if isinstance(o, torch.Tensor) else o for o in operands]
        ctx.save_for_backward(*_kept(operands), *_saved(call, statistics))
        ctx.mark_non_differentiable(*without_gradient(call, outputs), *statistics)
        ctx.set_materialize_grads(False)  # no zeros for the statistics, which have no gradient
        return (*outputs, *statistics)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        count = len(ctx.numbers)
        grad_outputs = grads[: len(ctx.call.outputs)]
        if all(grad is None for grad in grad_outputs):
            return (None,) * (3 + ctx.count)
        saved = ctx.saved_tensors  # once: each read unpacks anew, which checkpointing refuses
        operands, statistics = _with_numbers(saved[:count], ctx.numbers), saved[count:]
        wanted = tuple([i for i in range(ctx.count) if ctx.needs_input_grad[3 + i]])
        found = gradients_of(ctx.flow, ctx.call, operands, grad_outputs, statistics, wanted, ctx.kept)
        return (None, None, None, *(found.get(i) for i in range(ctx.count)))


class RepeatedNormalization(torch.autograd.Function):
    """(flow, call, *operands) -> the one output, of tensors alone: what `Normalization` does, and returns no statistics."""

    @staticmethod
    def forward(ctx: Any, flow: Flow, call: Call, *operands: torch.Tensor) -> torch.Tensor:
        (output,), statistics = flow.forward(call, operands, running=None)
        ctx.flow, ctx.call = flow, call
        ctx.save_for_backward(*_kept(operands), *_saved(call, statistics))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        count = len(ctx.call.axes)
        operands, statistics = saved[:count], saved[count:]
        wanted = tuple([i for i in range(count) if ctx.needs_input_grad[2 + i]])
        found = gradients_of(ctx.flow, ctx.call, operands, grads, statistics, wanted)
        return (None, None, *[found.get(i) for i in range(count)])


class ChannelNormalization(torch.autograd.Function):
    """(what was seen, running, *operands) -> the one output, of a norm by channel; `saved` numbers the operands among the
    tensors of the call."""

    @staticmethod
    def forward(ctx: Any, seen: Any, running: Running | None, *operands: torch.Tensor) -> torch.Tensor:
        output, statistics = seen.run(operands, running)
        ctx.seen = seen
        ctx.save_for_backward(*_kept(operands), *_saved(seen.call, statistics))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, numbers = ctx.saved_tensors, ctx.seen.saved
        count = len(numbers)
        wanted = tuple([number for i, number in enumerate(numbers) if ctx.needs_input_grad[2 + i]])
        found = ctx.seen.gradients(saved[:count], saved[count:], grads, wanted)
        return (None, None, *[found.get(number) for number in numbers])


class NormalizationBackward(torch.autograd.Function):
    """(flow, call, wanted, statistics, *grad_outputs, *operands) -> the wanted gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        flow: Flow,
        call: Call,
        wanted: tuple[int, ...],
        statistics: tuple[torch.Tensor, ...],
        *tensors: torch.Tensor | float | None,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.call, ctx.wanted = call, wanted
        ctx.numbers = [None if isinstance(t, torch.Tensor) else t for t in tensors]
        ctx.save_for_backward(*_kept(tensors))
        ctx.set_materialize_grads(False)
        grad_outputs, operands = tensors[: len(call.outputs)], tensors[len(call.outputs) :]
        found = flow.backward(call, operands, grad_outputs, statistics, wanted)  # type: ignore[arg-type]
        gradients: list[torch.Tensor | None] = []
        for i in wanted:
            gradient = found.get(i)
            is_there = any(gradient is g for g in gradients if g is not None)
            gradients.append(gradient.detach() if is_there and gradient is not None else gradient)  # each has a history
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *grad_gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = [i - 4 for i, need in enumerate(ctx.needs_input_grad) if need]
        tensors = _with_numbers(ctx.saved_tensors, ctx.numbers)
        found = second_gradients(ctx.call, ctx.wanted, tensors, grad_gradients, needed)
        return tuple(found.get(i - 4) for i in range(len(ctx.needs_input_grad)))


def second_gradients(
    call: Call,
    wanted: Sequence[int],
    tensors: Sequence[Any],
    grad_gradients: Sequence[torch.Tensor | None],
    needed: Sequence[int],
) -> dict[int, torch.Tensor | None]:
    """Of the gradients of the operands in `wanted`, by those of `tensors` that are `needed`: the gradients of the outputs,
    then the operands."""
    is_differentiated_again = torch.is_grad_enabled()
    count = len(call.outputs)
    with torch.enable_grad():
        inputs = [as_input(t) if isinstance(t, torch.Tensor) else t for t in tensors]
        grad_outputs, operands = inputs[:count], inputs[count:]
        outputs = composite(call, *operands)
        given = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None and o.requires_grad]
        first = [operands[i] for i in wanted]
        gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(
            [o for o, _ in given], first, [g for _, g in given], create_graph=True, allow_unused=True
        )
        pairs = [
            (gradient, grad)
            for gradient, grad in zip(gradients, grad_gradients, strict=True)
            if gradient is not None and grad is not None and gradient.requires_grad
        ]
        second: Sequence[torch.Tensor | None] = [None] * len(needed)
        if pairs:
            second = torch.autograd.grad(
                [gradient for gradient, _ in pairs],
                [inputs[i] for i in needed],
                [grad for _, grad in pairs],
                create_graph=is_differentiated_again,
                allow_unused=True,
            )
    return dict(zip(needed, second, strict=True))


def gradients_of(
    flow: Flow,
    call: Call,
    operands: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None],
    statistics: Sequence[torch.Tensor],
    wanted: tuple[int, ...],
    kept: Sequence[tuple[int, ...]] | None = None,
) -> dict[int, torch.Tensor | None]:
    """Those that are wanted, by the numbers of the user's operands. `kept` says for each operand of this call whose gradient
    its own is, where they are not the same."""
    needed = [tuple(i for i in which if i in wanted) for which in kept] if kept is not None else None
    mine = wanted if needed is None else tuple(k for k, which in enumerate(needed) if which)
    found: dict[int, Any]
    if not (is_differentiated() or are_batched(grad_outputs)):
        found = dict(flow.backward(call, operands, grad_outputs, statistics, mine))
    elif isinstance(call.prologue, ScaledSum):
        found = _of_kinds(flow, call, call.prologue, operands, grad_outputs, statistics, mine)
    elif are_batched(grad_outputs):
        found = composite_gradients(call, operands, grad_outputs, mine)
    else:
        gradients = NormalizationBackward.apply(flow, call, mine, tuple(statistics), *grad_outputs, *operands)
        found = dict(zip(mine, gradients, strict=True))
    return found if needed is None else {i: found.get(k) for k, which in enumerate(needed) for i in which}


def _of_kinds(
    flow: Flow,
    call: Call,
    scaled: ScaledSum,
    operands: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None],
    statistics: Sequence[torch.Tensor],
    wanted: tuple[int, ...],
) -> dict[int, Any]:
    """By way of the gradient of the sum, which is a tensor of its own then, and has a history."""
    last = len(scaled.firsts) - 1  # of the kinds, whose place the sum has among the other operands
    of_sum = tuple(dict.fromkeys(max(k - last, 0) for k in wanted))
    found = gradients_of(flow, scaled.plain(call), operands[last:], grad_outputs, statistics, of_sum)
    grad_sum = found.pop(0, None)
    found = {k + last: gradient for k, gradient in found.items()}
    if grad_sum is not None:
        found |= {k: g for k, g in enumerate(scaled.gradients(operands, grad_sum)) if k in wanted}
    return found


def are_batched(grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether they are many at once (`is_grads_batched`, `torch.vmap`), in tensors without memory of their own."""
    kinds = torch._C._functorch
    return any(g is not None and (kinds.is_legacy_batchedtensor(g) or kinds.is_batchedtensor(g)) for g in grads)


def composite_gradients(
    call: Call, operands: Sequence[Any], grad_outputs: Sequence[torch.Tensor | None], wanted: Sequence[int]
) -> dict[int, torch.Tensor | None]:
    """By PyTorch's operators."""
    is_differentiated_again = torch.is_grad_enabled()
    with differentiating():
        inputs = [as_input(o) if isinstance(o, torch.Tensor) else o for o in operands]
        outputs = composite(call, *inputs)
        given = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None and o.requires_grad]
        gradients = torch.autograd.grad(
            [o for o, _ in given], [inputs[i] for i in wanted], [g for _, g in given],
            create_graph=is_differentiated_again, allow_unused=True,
        )  # fmt: skip
    return dict(zip(wanted, gradients, strict=True))


def is_differentiated() -> bool:
    """Whether gradients may be differentiated again: by a backward of their own, or by forward gradients, which are
    refused."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def _with_numbers(tensors: Sequence[torch.Tensor | None], numbers: Sequence[float | None]) -> list[Any]:
    return [n if t is None else t for t, n in zip(tensors, numbers, strict=True)]


def as_input(tensor: torch.Tensor | None) -> Any:
    """A tensor to differentiate by. An alias where it is part of a graph: the saved tensors may depend on each other,
    and what is wanted are partial derivatives, which stop here."""
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
