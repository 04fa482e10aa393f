"""Norms over rows as calls: the first of its kind, and one that was seen before, which is one look-up, its allocations and
the launch. Whatever decides about a call is in the key, so that what was checked, planned and bound at the first one holds;
what may change between two calls, settings, modes and gradients, is asked each time."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from warpnorm import pipeline, settings
from warpnorm.launch.autograd import RepeatedNormalization
from warpnorm.norms import Norm
from warpnorm.problem import COLUMN, FULL, NUMBER, SCALAR, VECTOR_BYTES, Call, Running, View
from warpnorm.reference import Affine, Itself

LARGEST_CACHE = 4096
# Bytes of statistics that nobody reads up to which they have a place of their own, instead of an allocation each time
LARGEST_SCRATCH = 1 << 20

_seen: dict[Any, "Repeat"] = {}
_scratch: dict[Any, tuple[torch.Tensor, ...]] = {}


def again(norm: Norm, input: Any, shape: Any, weight: Any, bias: Any, eps: float | None) -> Any:
    """The output of a plain call that was seen before; otherwise the key under which it may be remembered, or nothing."""
    if not (getattr(input, "is_cuda", False) or settings.is_interpreting() or _is_large(norm, input, shape)):
        return None
    operands = [operand for operand in (input, weight, bias) if operand is not None]
    if pipeline.is_seen_through(operands):  # and may have no memory to ask about
        return None
    key = _key(norm, input, shape, weight, bias, eps)
    found = _seen.get(key)
    if found is None:
        return key
    if not _is_repeatable(operands):
        return None
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return RepeatedNormalization.apply(found, found.call, *operands)
    return found(operands)


def _is_large(norm: Norm, input: Any, shape: Any) -> bool:
    """Whether a row on a CPU is worth native code, and a look at what was seen before."""
    if not getattr(input, "is_cpu", False):
        return False
    try:
        return (shape if type(shape) is int else prod(shape)) > pipeline.smallest_row(norm)
    except TypeError:  # no sizes; who checks the arguments says so
        return False


def _key(norm: Norm, input: Any, shape: Any, weight: Any, bias: Any, eps: float | None) -> Any:
    if eps is not None and type(eps) is not float and type(eps) is not int:
        return None
    kind = type(shape)
    if kind is list or kind is tuple:
        shape = tuple(shape)
        if not all(type(size) is int for size in shape):
            return None
    elif kind is not torch.Size and kind is not int:
        return None
    try:
        of_weight = None if weight is None else _layout(weight)
        return norm.name, shape, eps, _layout(input), of_weight, None if bias is None else _layout(bias)
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or not a strided one
        return None


def _layout(tensor: torch.Tensor) -> Any:
    is_aligned = tensor.data_ptr() % VECTOR_BYTES == 0
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, is_aligned


def _is_repeatable(operands: Sequence[Any]) -> bool:
    """Whether nothing that may change has changed."""
    input = operands[0]
    if settings.current().route not in (
        "auto",
        "native" if input.is_cpu and not settings.is_interpreting() else "kernels",
    ):
        return False
    if input.is_cuda and input.get_device() != torch.cuda.current_device():
        return False
    return not any(operand.is_neg() for operand in operands)


def first(
    norm: Norm,
    input: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | float | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out: torch.Tensor | None,
    key: Any = None,
) -> tuple[torch.Tensor, ...]:
    """(output, *statistics): the affine is the epilogue, weight and bias are its operands. Remembered under `key`."""
    operands: list[torch.Tensor | float] = [input]
    axes = [FULL]
    if weight is not None:
        operands.append(spread(weight) if isinstance(weight, torch.Tensor) else float(weight))
        axes.append(NUMBER if not isinstance(weight, torch.Tensor) else SCALAR if weight.ndim == 0 else COLUMN)
    if bias is not None:
        operands.append(spread(bias))
        axes.append(COLUMN)
    epilogue = Affine(weight is not None, bias is not None, weight_offset)
    call = Call(norm, len(shape), eps, Itself(), epilogue, tuple(axes), (input.dtype,))
    output, *statistics = pipeline.normalize(call, operands, out)
    given = [operand for operand in (input, weight, bias) if operand is not None]
    if key is not None and all(a is b for a, b in zip(operands, given, strict=True)) and _is_repeatable(given):
        if len(_seen) >= LARGEST_CACHE:
            _seen.clear()
        repeat = Repeat(call, given)  # type: ignore[arg-type]
        if repeat.can_run:
            _seen[key] = repeat
    stat_shape = (*input.shape[: input.ndim - len(shape)], *(1 for _ in shape))
    return output, *(statistic.view(stat_shape) for statistic in statistics)


def spread(parameter: torch.Tensor) -> torch.Tensor:
    """An expanded parameter, which the kernels would take for a scalar, with a value for each column."""
    return parameter.contiguous() if 0 in parameter.stride() else parameter


class Repeat:
    """A call with its forward launch, and the backward ones that were needed so far. Runs both directions for autograd."""

    def __init__(self, call: Call, operands: Sequence[torch.Tensor]) -> None:
        input = operands[0]
        self.call = call
        views = tuple(map(View.of, (*operands, _empty(input))))
        launch: Any = pipeline.prepare_forward(call, views, input.device, None)
        self.launch = launch
        self.can_run = hasattr(launch, "into")  # what the compiler did not build is nothing to repeat
        if not self.can_run:
            return
        self.is_native = pipeline.is_native(input.device)
        self.scratch_rows = 1 << max(launch.space.rows - 1, 0).bit_length()  # so that many batches share few places
        self.place = (input.device, self.scratch_rows, launch.problem.compute, call.norm.name)
        self._backward: dict[Any, Any] = {}

    def __call__(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output alone, where no gradient is needed."""
        output = self._empty(operands[0])
        scratch = _scratch.get(self.place)
        if scratch is None:
            scratch = self._new_scratch(output)
        self.launch.into(operands, (output,), scratch)
        return output

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        result = _empty(like)
        if self.is_native:
            pipeline.reuse_memory((result,))
        return result

    def _new_scratch(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scratch = self.launch.empty_statistics(like.device, self.scratch_rows)
        is_kept = sum(s.nbytes for s in scratch) <= LARGEST_SCRATCH
        if is_kept and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph's memory is its own
            _scratch[self.place] = scratch
        return scratch

    def forward(
        self, call: Call, operands: Sequence[Any], *, running: Running | None = None
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        output = self._empty(operands[0])
        statistics = self.launch.empty_statistics(output.device)
        self.launch.into(operands, (output,), statistics)
        return (output,), statistics

    def backward(
        self,
        call: Call,
        operands: Sequence[Any],
        grad_outputs: Sequence[torch.Tensor | None],
        statistics: Sequence[torch.Tensor],
        wanted: tuple[int, ...],
    ) -> dict[int, torch.Tensor]:
        grad = grad_outputs[0]
        if grad is None or grad.is_neg() or type(grad) is not torch.Tensor:
            return pipeline.backward(call, operands, grad_outputs, statistics, wanted)
        view = View.of(grad)
        views = tuple(map(View.of, operands))  # which may come back from where they were kept with other strides
        key = (wanted, view, views)
        launch = self._backward.get(key)
        if launch is None:
            launch = pipeline.prepare_backward(call, (*views, view), grad.device, (0,), wanted, None)
            problem = launch.problem
            is_plain = all(operands[i].dtype == g.dtype for i, g in zip(problem.wanted, problem.gradients, strict=True))
            if not is_plain or len(self._backward) >= LARGEST_CACHE:
                return pipeline.backward(call, operands, grad_outputs, statistics, wanted)
            self._backward[key] = launch
        which = launch.problem.wanted
        gradients = tuple([self._empty(operands[i]) for i in which])
        if gradients:
            launch(operands, (grad,), statistics, gradients)
        return dict(zip(which, gradients, strict=True))


def _empty(like: torch.Tensor) -> torch.Tensor:
    """Contiguous."""
    if like.is_contiguous():
        return torch.empty_like(like)  # the quicker of the two
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
