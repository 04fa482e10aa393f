"""Norms by channel as calls that were seen before: what `repeat.py` is for norms over rows. Parameters are vectors here, and
running statistics are averaged into, by a momentum that each call has of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import has_torch_function

from warpnorm import repeat, routing, settings
from warpnorm.launch.autograd import ChannelNormalization
from warpnorm.norms import Norm
from warpnorm.problem import Call, Running, View

_seen: dict[Any, "ChannelRepeat"] = {}


def again(kind: Any, norm: Norm, eps: Any, number: Any, momentum: Any, tensors: Sequence[Any]) -> Any:
    """The output of a plain call that was seen before; otherwise the key under which it may be remembered, or nothing.
    `kind` stands for whatever decides about the call beside eps, a number, and the tensors, some of which may be missing:
    the input; the running statistics, which are averaged into where there is a momentum; the parameters."""
    if repeat.has_hooks():
        return None
    if repeat.quick is not None:
        found = repeat.quick(kind, eps, number if momentum is None else momentum, *tensors)
        if found is not None:
            return found
    given = [tensor for tensor in tensors if tensor is not None]
    if has_torch_function(given):
        return None
    input = tensors[0]
    if not (getattr(input, "is_cuda", False) or settings.is_interpreting() or _is_large(norm, input, number)):
        return None
    if routing.is_seen_through(given):
        return None
    key = _key(kind, eps, number, momentum, tensors)
    seen = _seen.get(key)
    if seen is None:
        return key
    running = seen.running(given, momentum)
    if not repeat.is_repeatable(given) or (running and not seen.can_average(running, given)):
        return None
    if seen.averaged and running is None:  # without a momentum, which somebody else says
        return None
    if seen.offered is not settings.current():
        seen.offer((kind, eps, number if momentum is None else momentum, *tensors))
    operands = [given[i] for i in seen.saved]
    try:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            return ChannelNormalization.apply(seen, running, *operands)
        return seen.run(operands, running)[0]
    except RuntimeError as error:
        repeat.forget_refused(error, _seen, input.device)
        return key


def _is_large(norm: Norm, input: Any, number: Any) -> bool:
    """Whether a batch or a sample on a CPU is worth native code, and a look at what was seen before. `number`: of groups, or
    whatever that is of another norm."""
    is_there = isinstance(input, torch.Tensor) and input.is_cpu and input.ndim > 1 and input.numel() > 0
    return is_there and routing.is_large_input(norm, input, groups=number)


def _key(kind: Any, eps: Any, number: Any, momentum: Any, tensors: Sequence[Any]) -> Any:
    if type(eps) is not float or type(number) not in (int, type(None)) or type(momentum) not in (float, type(None)):
        return None
    try:
        layouts = tuple([None if tensor is None else repeat.layout(tensor) for tensor in tensors])
        is_autocast = tensors[0].is_cuda and torch.is_autocast_enabled("cuda")
    except (AttributeError, ValueError, RuntimeError, TypeError):  # not a tensor, or not a strided one with memory
        return None
    return kind, eps, number, layouts, is_autocast


def remember(
    key: Any, call: Call, tensors: Sequence[torch.Tensor | None], has_running: bool, output: torch.Tensor
) -> None:
    """A call that has just been made. `has_running`: the second and third tensor are averaged into."""
    given = [tensor for tensor in tensors if tensor is not None]
    if key is None or not repeat.is_repeatable(given) or any(0 in vector.stride() for vector in given[1:]):
        return
    if len(_seen) >= repeat.LARGEST_CACHE:
        _seen.clear()
    found = ChannelRepeat(call, given, has_running, View.of(output))
    if found.can_run:
        _seen[key] = found


class ChannelRepeat(repeat.Repeat):
    """`saved` are the numbers of the tensors that the call reads."""

    def __init__(self, call: Call, given: Sequence[torch.Tensor], has_running: bool, output: View) -> None:
        self.averaged = (1, 2) if has_running else ()
        self.saved = tuple(i for i in range(len(given)) if i not in self.averaged)
        self.vector = (-1, *[1] * (given[0].ndim - 2))
        self.running_dtypes = tuple(given[i].dtype for i in self.averaged)
        super().__init__(call, self._shaped([given[i] for i in self.saved]), output)
        self.count = len(given)

    def running(self, given: Sequence[torch.Tensor], momentum: float | None) -> Running | None:
        if not self.averaged or momentum is None:
            return None
        return Running(given[1], given[2], momentum, given[0].numel() // given[1].numel())

    def can_average(self, running: Running, given: Sequence[torch.Tensor]) -> bool:
        if torch.is_grad_enabled() and (running.mean.requires_grad or running.variance.requires_grad):
            return False
        return running.can_be_averaged_beside([given[i] for i in self.saved])

    def run(
        self, operands: Sequence[torch.Tensor], running: Running | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output, and the statistics."""
        output = self._empty(operands[0], self.dtype)
        statistics = self.launch.empty_statistics(output.device)
        self.launch.into(self._shaped(operands), (output,), statistics, running)
        if running is not None:
            torch.autograd.graph.increment_version((running.mean, running.variance))
        return output, statistics

    def gradients(
        self, operands: Sequence[Any], statistics: Sequence[torch.Tensor], grads: Sequence[Any], wanted: tuple[int, ...],
        handle: Any = None,
    ) -> dict[int, Any]:  # fmt: skip
        mine = tuple([self.saved.index(i) for i in wanted])
        found = super().gradients(self._shaped(operands), statistics, grads, mine, handle)
        return {self.saved[i]: g.view(-1) if i > 0 and g is not None else g for i, g in found.items()}

    def offer(self, key: tuple[Any, ...]) -> None:
        """To the compiled launcher, if it is there."""
        input: torch.Tensor = key[3]
        module = repeat.launcher_for(input)
        if module is None:
            return
        self.offered = settings.current()
        like = torch.empty_like(input, dtype=self.dtype, device="meta")
        described = repeat.described(self.launch, input, (like,), self.saved, False, self.averaged)
        if described is not None:
            mask = sum(1 << i for i in self.saved if self.is_differentiable(i))
            owners = self.launch, described[-2]
            module.remember(key, *described, self.averaged, self.saved, mask, True, self, owners, True)

    def is_differentiable(self, number: int) -> bool:
        """Not of running statistics that are only read."""
        return self.call.norm.is_computed or number not in (1, 2)

    def _shaped(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [operands[0], *[vector.view(self.vector) for vector in operands[1:]]]
