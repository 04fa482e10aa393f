"""Fused functions as calls that were seen before: the compiled launcher is told of them."""

from collections.abc import Sequence
from typing import Any

import torch

from warpnorm import pipeline, repeat, routing, settings
from warpnorm.launch.autograd import gradients_of
from warpnorm.problem import Call, Running, View

_offered: dict[Any, Any] = {}  # what stands for the functions


def offer(
    kind: Any,
    call: Call,
    operands: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    is_tuple: bool,
    differentiable: Sequence[int],
    running: Running | None,
) -> None:
    """A call: `kind` stands for all but the layouts of the `tensors`, which the operands are, but for views, and after them
    the running statistics. It returns the outputs, in a tuple or the only one; gradients of other operands than the
    `differentiable` ones need more than is known here."""
    if not all(map(_is_same_memory, operands, tensors)):
        return
    module = repeat.launcher_for(tensors[0])
    if module is None:
        return
    averaged = () if running is None else (running.mean, running.variance)
    views = tuple(map(View.of, operands))
    key = (id(kind), settings.current(), views, tuple(map(View.of, averaged)))
    if key in _offered:
        return
    if len(_offered) >= repeat.LARGEST_CACHE:
        _offered.clear()
    _offered[key] = kind
    views += tuple(map(View.of, outputs))
    launch: Any = pipeline.prepare_forward(call, views, tensors[0].device, None, tuple(t.dtype for t in averaged))
    numbers = range(len(operands), len(operands) + len(averaged))
    how = repeat.described(launch, tensors[0], outputs, range(len(operands)), is_tuple, numbers)
    if how is None:
        return
    found = None
    if differentiable and not call.detached and all(output.is_floating_point() for output in outputs):
        found = FusedRepeat(call, operands, tensors, len(operands) + len(averaged))
    saved, mask = found.saved if found else (), sum(1 << i for i in differentiable)
    is_plain = found is not None and found.kept is None and len(outputs) == 1
    number = () if running is None else running.momentum
    module.remember(
        (kind, None, number, *tensors, *averaged), *how, tuple(numbers), saved, mask, call.norm.is_by_channel, found,
        (launch, how[-2]), is_plain,
    )  # fmt: skip


def _is_same_memory(operand: Any, tensor: torch.Tensor) -> bool:
    """Whether it is the tensor itself, or a vector seen as more dimensions."""
    if operand is tensor:
        return True
    is_view = isinstance(operand, torch.Tensor) and operand.numel() == tensor.numel() and tensor.ndim == 1
    return is_view and operand.is_contiguous() and tensor.is_contiguous() and operand.data_ptr() == tensor.data_ptr()


class FusedRepeat(repeat.Backwards):
    """The backward of a fused call that was seen before. `call` is that of the tensors that are kept: `saved` are numbers of
    operands, and from -1 down those of outputs; `kept` says of each whose gradient its own is, among `count` tensors."""

    def __init__(self, call: Call, operands: Sequence[Any], tensors: Sequence[torch.Tensor], count: int) -> None:
        short = pipeline.shortcut(call, operands)
        super().__init__(call if short is None else short.call, routing.is_native(tensors[0].device))
        self.count = count
        self.saved: tuple[int, ...] = tuple(range(len(operands)))
        self.kept: tuple[tuple[int, ...], ...] | None = None
        if short is not None:
            self.saved = (*[-1 - short.output] * len(short.kinds), *short.others)
            self.kept = tuple(short.kept)
        self.shapes = {i: o.shape for i, (o, t) in enumerate(zip(operands, tensors, strict=True)) if o is not t}

    def gradients(
        self, operands: Sequence[Any], statistics: Sequence[torch.Tensor], grads: Sequence[Any], wanted: tuple[int, ...],
        handle: Any = None,
    ) -> dict[int, Any]:  # fmt: skip
        shaped = [o.view(self.shapes[i]) if i in self.shapes else o for i, o in zip(self.saved, operands, strict=True)]
        if self.kept is None and len(self.call.outputs) == 1:
            found = super().gradients(shaped, statistics, grads, wanted, handle)
        else:
            found = gradients_of(pipeline, self.call, shaped, grads, statistics, wanted, self.kept)
        return {i: g.view(-1) if i in self.shapes and g is not None else g for i, g in found.items()}
