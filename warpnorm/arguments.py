"""What the user passed is checked here, at the border: every refusal is one sentence that says what was given and what
is allowed, and is raised before anything is written."""

import math
import operator
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch

from warpnorm import routing, settings
from warpnorm.errors import InputError, InputTypeError

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float64, torch.float32, *HALVES)


def check_input(name: str, input: Any) -> None:
    if not isinstance(input, torch.Tensor):
        raise InputTypeError(f"{name}: input must be a tensor, but is of type {type(input).__name__}")
    check_layout(name, "input", input)
    if input.dtype not in DTYPES:
        raise InputError(f"{name}: input has dtype {input.dtype}, but must be float64, float32, float16 or bfloat16")


def check_layout(name: str, what: str, tensor: torch.Tensor) -> None:
    """What PyTorch's operators do not take is refused in words: the looks that follow are into plain memory."""
    if tensor.layout is torch.jagged:  # a class of its own, which PyTorch's operators see through
        return
    if tensor.is_nested:
        raise InputError(
            f"{name}: {what} is a nested tensor without a shape, which PyTorch's operator does not take in this call: make"
            " it one with layout=torch.jagged, pad it, or take its parts"
        )
    if tensor.layout is not torch.strided:
        raise InputError(f"{name}: {what} has layout {tensor.layout}, but must be strided: give {what}.to_dense()")
    if tensor.is_quantized:
        raise InputError(f"{name}: {what} is quantized, but must be of plain numbers: give {what}.dequantize()")


def output_dtype(name: str, input: torch.Tensor) -> torch.dtype:
    """float32 for 16 bits where this version of PyTorch has a norm among what autocast computes so, else the input's."""
    if input.is_cuda and input.dtype in HALVES and torch.is_autocast_enabled("cuda") and _is_widened(name):
        return torch.float32
    return input.dtype


@settings.constant
def _is_widened(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")


def resolve_shape(name: str, input: torch.Tensor, normalized_shape: Any, normalized_dim: Any) -> tuple[int, ...]:
    """The normalized shape, whichever way it was given."""
    if (normalized_shape is None) == (normalized_dim is None):
        given = "neither" if normalized_shape is None else "both"
        raise InputTypeError(f"{name}: give normalized_shape or normalized_dim, but {given} was given")
    if normalized_dim is not None:
        if not isinstance(normalized_dim, Integral) or isinstance(normalized_dim, bool):
            raise InputTypeError(
                f"{name}: normalized_dim must be an int, but is of type {type(normalized_dim).__name__}"
            )
        if input.ndim == 0:
            raise InputError(f"{name}: normalized_dim is {normalized_dim}, but input has no dimensions")
        if not -input.ndim <= int(normalized_dim) < input.ndim:
            raise InputError(
                f"{name}: normalized_dim is {normalized_dim}, but input has {input.ndim} dimensions: it must be from "
                f"{-input.ndim} to {input.ndim - 1}"
            )
        return tuple(input.shape[int(normalized_dim) :])
    if isinstance(normalized_shape, Integral) and not isinstance(normalized_shape, bool):
        normalized_shape = (normalized_shape,)
    try:
        if not isinstance(normalized_shape, Sequence):
            raise TypeError
        is_traced = torch.compiler.is_compiling()  # where sizes may be symbols
        shape = tuple(normalized_shape) if is_traced else tuple(operator.index(size) for size in normalized_shape)
    except TypeError:
        raise InputTypeError(
            f"{name}: normalized_shape must be an int or a sequence of ints, but is {normalized_shape!r}"
        ) from None
    if not shape:
        raise InputError(f"{name}: normalized_shape is empty, but must have at least one dimension")
    if tuple(input.shape[-len(shape) :]) != shape:
        raise InputError(
            f"{name}: normalized_shape is {shape}, but input has shape {tuple(input.shape)}, which does not end with it"
        )
    return shape


def check_parameter(name: str, what: str, parameter: Any, input: torch.Tensor, shape: tuple[int, ...]) -> None:
    """A weight or a bias; a weight may also be a number or a tensor without dimensions."""
    is_weight = what == "weight"
    if parameter is None:
        return
    if not isinstance(parameter, torch.Tensor):
        if is_weight and isinstance(parameter, Real) and not isinstance(parameter, bool):
            return
        allowed = "a tensor or a number" if is_weight else "a tensor"
        raise InputTypeError(f"{name}: {what} must be {allowed}, but is of type {type(parameter).__name__}")
    check_layout(name, what, parameter)
    if parameter.dtype not in DTYPES:
        raise InputError(
            f"{name}: {what} has dtype {parameter.dtype}, but must be float64, float32, float16 or bfloat16"
        )
    if tuple(parameter.shape) != shape and not (is_weight and parameter.ndim == 0):
        raise InputError(f"{name}: {what} has shape {tuple(parameter.shape)}, but normalized_shape is {shape}")
    if parameter.device != input.device:
        raise InputError(f"{name}: {what} is on {parameter.device}, but input is on {input.device}")


def check_channels(name: str, input: Any) -> int:
    """The number of channels of an input (N, C, ...). PyTorch also takes one of no elements in one dimension."""
    check_input(name, input)
    if input.ndim < 2 and input.numel() != 0:
        raise InputError(
            f"{name}: input has shape {tuple(input.shape)}, but must have at least 2 dimensions: (N, C) or (N, C, ...)"
        )
    return input.shape[1] if input.ndim > 1 else 0


def check_vector(name: str, what: str, vector: Any, input: torch.Tensor, channels: int) -> None:
    """A weight, a bias or a running statistic: one number for each channel."""
    if vector is None:
        return
    if not isinstance(vector, torch.Tensor):
        raise InputTypeError(f"{name}: {what} must be a tensor, but is of type {type(vector).__name__}")
    check_layout(name, what, vector)
    if vector.dtype not in DTYPES:
        raise InputError(f"{name}: {what} has dtype {vector.dtype}, but must be float64, float32, float16 or bfloat16")
    if tuple(vector.shape) != (channels,):
        raise InputError(
            f"{name}: {what} has shape {tuple(vector.shape)}, but input has {channels} channels, in shape"
            f" {tuple(input.shape)}: {what} must have shape ({channels},)"
        )
    if vector.device != input.device:
        raise InputError(f"{name}: {what} is on {vector.device}, but input is on {input.device}")


def check_running(
    name: str, running_mean: Any, running_var: Any, input: torch.Tensor, channels: int, is_updated: bool
) -> None:
    """The running statistics: written where `is_updated`, needed where they are not."""
    buffers = {"running_mean": running_mean, "running_var": running_var}
    missing = [what for what, buffer in buffers.items() if buffer is None]
    if missing and not is_updated:
        flag = "training" if name == "batch_norm" else "use_input_stats"
        raise InputError(
            f"{name}: running_mean and running_var must be given where {flag} is False, but {' and '.join(missing)} "
            f"{'are' if len(missing) == 2 else 'is'} None"
        )
    if len(missing) == 1:
        raise InputError(
            f"{name}: running_mean and running_var must both be given or both be None, but {missing[0]} is None and"
            " the other is not"
        )
    for what, buffer in buffers.items():
        if buffer is None:
            continue
        check_vector(name, what, buffer, input, channels)
        if buffer.requires_grad and torch.is_grad_enabled():
            raise InputError(f"{name}: {what} requires a gradient, but a running statistic has none: detach it")
        if is_updated and overlaps_itself(buffer):
            raise InputError(
                f"{name}: {what} has elements that share memory (strides {buffer.stride()}), so it cannot be updated"
            )


def check_groups(name: str, num_groups: Any, input: torch.Tensor, channels: int) -> int:
    try:
        if isinstance(num_groups, bool):
            raise TypeError
        groups = operator.index(num_groups)
    except TypeError:
        raise InputTypeError(f"{name}: num_groups must be an int, but is of type {type(num_groups).__name__}") from None
    if groups <= 0:
        raise InputError(f"{name}: num_groups is {groups}, but must be positive")
    if channels % groups:
        raise InputError(
            f"{name}: num_groups is {groups}, but must divide the {channels} channels of an input of shape "
            f"{tuple(input.shape)}"
        )
    return groups


def check_several(name: str, of_what: str, input: torch.Tensor, count: int = 1) -> int:
    """How many values share a statistic, `count` at each position. One alone would become zero, whatever it is; the words
    are PyTorch's, for those who look for them."""
    count *= math.prod(input.shape[2:])
    if count == 1:
        raise InputError(f"{name}: Expected more than 1 {of_what}, but input has shape {tuple(input.shape)}")
    return count


def check_total(name: str, of_what: str, count: int, given: str) -> None:
    """The same of what all ranks hold together."""
    if count == 1:
        raise InputError(f"{name}: Expected more than 1 {of_what}, but there is one on all ranks, and {given}")


def are_vectors(weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    return (weight is None or weight.ndim == 1) and (bias is None or bias.ndim == 1)


def may_write(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> bool:
    """Whether PyTorch's operators, if they refuse these tensors, do so before they write the running statistics: they do
    not where a bias has another dtype, a weight lies elsewhere, or the elements of running_var share memory."""
    if running_mean is None or running_var is None:
        return are_vectors(weight, bias)
    dtype = running_mean.dtype
    return (
        (dtype is input.dtype or (dtype is torch.float32 and input.dtype in HALVES))
        and running_var.dtype is dtype
        and (weight is None or (weight.dtype is dtype and weight.ndim == 1 and weight.is_cpu))
        and (bias is None or (bias.dtype is dtype and bias.ndim == 1 and bias.is_cpu))
        and (running_mean.is_cpu and (running_mean.is_contiguous() or running_mean.stride(0) > 0))
        and (running_var.is_cpu and (running_var.is_contiguous() or running_var.stride(0) > 0))
    )


def apart(running: torch.Tensor | None) -> torch.Tensor | None:
    """A running statistic as PyTorch's operator should have it in training: it saves it, though backward does not read it,
    and a later call of ours averages into it, which autograd would take for a mistake."""
    is_plain = isinstance(running, torch.Tensor) and not running.requires_grad and not routing.is_seen_through(())
    return running.data if running is not None and is_plain else running


def check_flag(name: str, what: str, flag: Any) -> bool:
    if not isinstance(flag, bool):
        raise InputTypeError(f"{name}: {what} must be a bool, but is of type {type(flag).__name__}")
    return flag


def check_number(name: str, what: str, number: Any) -> float:
    is_scalar = isinstance(number, torch.Tensor) and number.ndim == 0 and not number.is_complex()
    if not (is_scalar or isinstance(number, Real)):
        raise InputTypeError(f"{name}: {what} must be a float, but is of type {type(number).__name__}")
    return float(number)


def check_eps(name: str, eps: Any) -> float:
    return check_number(name, "eps", eps)


def check_batch_eps(name: str, eps: Any, training: bool) -> float:
    eps = check_eps(name, eps)
    if eps < 0 or (training and eps == 0):
        allowed = "positive in training" if training else "non-negative"
        raise InputError(f"{name}: eps must be {allowed}, but is {eps}")
    return eps


def check_weight_offset(name: str, weight_offset: Any, weight: Any) -> float:
    if not isinstance(weight_offset, Real) or isinstance(weight_offset, bool):
        raise InputTypeError(f"{name}: weight_offset must be a float, but is of type {type(weight_offset).__name__}")
    if weight_offset - weight_offset != 0:  # not finite, in a way that compilers can follow
        raise InputError(f"{name}: weight_offset is {weight_offset}, but must be finite")
    if weight_offset and weight is None:
        raise InputError(f"{name}: weight_offset is {weight_offset}, but there is no weight to add it to")
    return float(weight_offset)


def check_out(name: str, out: Any, input: torch.Tensor, operands: Sequence[torch.Tensor | float | None]) -> None:
    """`out` may be the input itself; any other overlap would be read after it was written. `operands` are weight, bias
    and the running statistics, or the first of these."""
    if not isinstance(out, torch.Tensor):
        raise InputTypeError(f"{name}: out must be a tensor, but is of type {type(out).__name__}")
    for what, given, wanted in (
        ("shape", tuple(out.shape), tuple(input.shape)),
        ("dtype", out.dtype, input.dtype),
        ("device", out.device, input.device),
    ):
        if given != wanted:
            raise InputError(f"{name}: out has {what} {given}, but input has {what} {wanted}")
    tensors = [tensor for tensor in (input, *operands) if isinstance(tensor, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (out, *tensors)):
        raise InputError(
            f"{name}: out= cannot be used where a gradient is needed; call it under torch.no_grad() or leave out= away"
        )
    if torch.compiler.is_compiling():  # there is no memory to look at
        return
    if out.is_neg():
        raise InputError(f"{name}: out is a negated view (of a conjugate), but must be plain memory")
    if overlaps_itself(out):
        raise InputError(
            f"{name}: out has elements that share memory (strides {out.stride()}), so it cannot be written"
        )
    names = ("input", "weight", "bias", "running_mean", "running_var")
    for what, tensor in zip(names, (input, *operands), strict=False):
        if (
            isinstance(tensor, torch.Tensor)
            and overlap(out, tensor)
            and not (what == "input" and is_same_view(out, tensor))
        ):
            raise InputError(f"{name}: out overlaps {what} in memory; it may be the input itself, or lie apart from it")


def is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory; sorted by stride, every axis must step over all inner ones."""
    if tensor.numel() == 0 or tensor.is_contiguous():  # which symbolic sizes, that cannot be sorted, say too
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the two share memory. Exact for two slices of one packed tensor; otherwise by the ranges they span."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device or a.is_meta:
        return False
    if a.data_ptr() + _span(a) <= b.data_ptr() or b.data_ptr() + _span(b) <= a.data_ptr():
        return False
    if a.dtype != b.dtype or a.stride() != b.stride() or a.shape != b.shape or overlaps_itself(a):
        return True
    # Equal strides: they share an element where their distance is a sum of strides, each taken at most size - 1 times.
    # Every stride exceeds what the inner axes reach, so from the largest down there are two candidates to try.
    distance = abs(a.data_ptr() - b.data_ptr())
    if distance % a.element_size():
        return True
    axes = sorted(((st, size) for st, size in zip(a.stride(), a.shape, strict=True) if size > 1), reverse=True)
    return _is_reachable(distance // a.element_size(), axes)


def _is_reachable(distance: int, axes: list[tuple[int, int]]) -> bool:
    if not axes:
        return distance == 0
    (stride, size), inner = axes[0], axes[1:]
    steps = distance // stride
    return any(abs(step) < size and _is_reachable(abs(distance - step * stride), inner) for step in (steps, steps + 1))


def _span(tensor: torch.Tensor) -> int:
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (reach + 1) * tensor.element_size()
