"""The norms as functions: PyTorch's signatures and semantics, and more by keyword. The modules are in `nn.py`."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary, has_torch_function_variadic

from warpnorm import arguments, library, pipeline, reference, repeat, repeat_channels, routing
from warpnorm.library import is_sharded
from warpnorm.norms import BATCH_NORM, FIXED_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM, TRACKED_NORM, Norm
from warpnorm.problem import FULL, Axes, Call, Running, compute_dtype
from warpnorm.reference import Affine, FixedAffine, Itself
from warpnorm.trace import handlers
from warpnorm.trace.arrange import spread

Shape = int | Sequence[int]
# What PyTorch's operators raise on input that the checked path below either takes or refuses in one clear sentence.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
on_shards: Callable[..., Any] | None = None  # runs a function of this file on DTensors; `parallel` says how


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Shape | None = None,
    weight: torch.Tensor | float | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_dim: int | None = None,
    out: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Layer normalization, as `torch.nn.functional.layer_norm`: over the last dimensions, `normalized_shape` of them,
    `(x - mean) * rstd * weight + bias`.

    By keyword, beyond PyTorch:
        normalized_dim: normalize from this dimension to the last (negative counts from the end), instead of
            `normalized_shape`.
        out: write the result here; may be `input` itself. Refused where a gradient is needed.
        weight_offset: added to the weight; 1.0 gives `(1 + weight)`.
        return_stats: return `(output, mean, rstd)`; the statistics are float32 (float64 where input or parameters are),
            have size 1 along the normalized dimensions, and carry no gradient.

    `weight` may also be a number or a tensor without dimensions; weight and bias may have another dtype than `input`.
    The result has the dtype of `input`.
    """
    is_plain = out is None and normalized_dim is None and not return_stats and _is_zero(weight_offset)
    is_plain = is_plain and not torch.compiler.is_compiling()
    is_short = is_plain and type(input) is torch.Tensor and not has_torch_function_unary(input)
    is_short = is_short and input.is_cpu and routing.is_short(normalized_shape)
    if is_short:
        try:
            return torch.layer_norm(input, normalized_shape, weight, bias, eps)  # type: ignore[arg-type]
        except REFUSALS:
            pass
    if is_plain and repeat.quick is not None:
        found = repeat.quick(LAYER_NORM, eps, normalized_shape, input, weight, bias)
        if found is not None:
            return found
    if has_torch_function_unary(input) or is_sharded(input):
        return _elsewhere(
            layer_norm, (input,), input, normalized_shape, weight, bias, eps,
            normalized_dim=normalized_dim, out=out, weight_offset=weight_offset, return_stats=return_stats,
        )  # fmt: skip
    seen = repeat.again(LAYER_NORM, input, normalized_shape, weight, bias, eps) if is_plain else None
    if isinstance(seen, torch.Tensor):
        return seen
    if is_plain and not is_short and routing.takes_operators(input, normalized_shape):
        try:
            return torch.layer_norm(input, normalized_shape, weight, bias, eps)  # type: ignore[arg-type]
        except REFUSALS:
            pass
    name = "layer_norm"
    arguments.check_input(name, input)
    shape = arguments.resolve_shape(name, input, normalized_shape, normalized_dim)
    arguments.check_parameter(name, "weight", weight, input, shape)
    arguments.check_parameter(name, "bias", bias, input, shape)
    eps = arguments.check_eps(name, eps)
    weight_offset = arguments.check_weight_offset(name, weight_offset, weight)
    if out is not None:
        arguments.check_out(name, out, input, (weight, bias))
    dtype = arguments.output_dtype(name, input) if out is None else input.dtype
    is_large = routing.is_large_input(LAYER_NORM, input, prod(shape))
    if routing.route(input, weight, bias, is_large=is_large) != "reference":
        results = repeat.first(LAYER_NORM, input, shape, weight, bias, eps, weight_offset, dtype, out, seen)
    else:
        results = reference.layer_norm(input.to(dtype), shape, weight, bias, eps, weight_offset)
        if out is not None:
            results = (out.copy_(results[0]), *results[1:])
    return results if return_stats else results[0]


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Shape | None = None,
    weight: torch.Tensor | float | None = None,
    eps: float | None = None,
    *,
    normalized_dim: int | None = None,
    out: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Root mean square normalization, as `torch.nn.functional.rms_norm`: `x * rstd * weight`, with the mean square
    over the last dimensions, `normalized_shape` of them. `eps=None` is the machine epsilon of the dtype of
    computation: that of float32, or of float64 for float64.

    The keywords `normalized_dim`, `out`, `weight_offset` and `return_stats` (here `(output, rstd)`) are those of
    `layer_norm`, and so are the weights and dtypes that it takes.
    """
    is_plain = out is None and normalized_dim is None and not return_stats and _is_zero(weight_offset)
    is_plain = is_plain and not torch.compiler.is_compiling()
    if is_plain and repeat.quick is not None:
        found = repeat.quick(RMS_NORM, eps, normalized_shape, input, weight)
        if found is not None:
            return found
    if has_torch_function_unary(input) or is_sharded(input):
        return _elsewhere(
            rms_norm, (input,), input, normalized_shape, weight, eps,
            normalized_dim=normalized_dim, out=out, weight_offset=weight_offset, return_stats=return_stats,
        )  # fmt: skip
    seen = repeat.again(RMS_NORM, input, normalized_shape, weight, None, eps) if is_plain else None
    if isinstance(seen, torch.Tensor):
        return seen
    if (
        is_plain
        and routing.takes_operators(input, normalized_shape, RMS_NORM)
        and (weight is None or getattr(weight, "dtype", None) is input.dtype)
    ):
        try:
            if input.dtype in arguments.DTYPES:
                return torch.rms_norm(input, normalized_shape, weight, eps)  # type: ignore[arg-type]
        except REFUSALS:
            pass
    name = "rms_norm"
    arguments.check_input(name, input)
    shape = arguments.resolve_shape(name, input, normalized_shape, normalized_dim)
    arguments.check_parameter(name, "weight", weight, input, shape)
    if eps is None:
        eps = torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps
    eps = arguments.check_eps(name, eps)
    weight_offset = arguments.check_weight_offset(name, weight_offset, weight)
    if out is not None:
        arguments.check_out(name, out, input, (weight,))
    dtype = arguments.output_dtype(name, input) if out is None else input.dtype
    is_large = routing.is_large_input(RMS_NORM, input, prod(shape))
    if routing.route(input, weight, is_large=is_large) != "reference":
        results = repeat.first(RMS_NORM, input, shape, weight, None, eps, weight_offset, dtype, out, seen)
        return results if return_stats else results[0]
    output = reference.rms_norm(input.to(dtype), shape, weight, eps, weight_offset)
    # before out is written, which may be the input
    statistics = (reference.rms_statistic(input, shape, weight, eps),) if return_stats else ()
    if out is not None:
        output = out.copy_(output)
    return (output, *statistics) if return_stats else output


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Batch normalization, as `torch.nn.functional.batch_norm`: each channel of an input (N, C, ...) by its own mean and
    variance in training, by the running ones otherwise. In training the running statistics, where given, are updated in
    place: `(1 - momentum) * running + momentum * new`, of the unbiased variance.

    By keyword, beyond PyTorch:
        out: write the result here; may be `input` itself. Refused where a gradient is needed.
        return_stats: return `(output, mean, rstd)`; the statistics have shape (C,), are float32 (float64 where input or
            parameters are), and carry no gradient. In evaluation they are those of the running statistics.

    Weight, bias and running statistics may have other dtypes than `input`, and keep them. The result has the dtype and
    the memory format of `input`. A call that raises has not touched the running statistics.
    """
    is_plain = out is None and not return_stats and type(training) is bool and not torch.compiler.is_compiling()
    norm = BATCH_NORM if training is True else FIXED_NORM
    tensors = (input, running_mean, running_var, weight, bias)
    how: tuple[Any, Any] = (None, momentum) if training is True else (0, None)
    seen = repeat_channels.again(norm, norm, eps, *how, tensors) if is_plain else None
    if isinstance(seen, torch.Tensor):
        return seen
    if has_torch_function_variadic(*tensors) or is_sharded(input):
        return _elsewhere(batch_norm, tensors, *tensors, training, momentum, eps, out=out, return_stats=return_stats)
    if out is None and not return_stats and routing.takes_operators(input, None, norm):
        try:
            if training:
                is_safe = input.numel() > input.shape[1] and arguments.may_write(*tensors)
            else:
                is_safe = input.numel() > 0 and arguments.are_vectors(weight, bias)
            if is_safe and eps > 0:
                mean, var = (arguments.apart(t) if training else t for t in (running_mean, running_var))
                return torch.batch_norm(input, weight, bias, mean, var, training, momentum, eps, False)
        except REFUSALS:
            pass
    name = "batch_norm"
    channels = arguments.check_channels(name, input)
    training = arguments.check_flag(name, "training", training)
    momentum = arguments.check_number(name, "momentum", momentum)
    eps = arguments.check_batch_eps(name, eps, training)
    _check_tensors(name, input, channels, weight, bias, running_mean, running_var, training, out)
    if not training:
        return _by_running(input, running_mean, running_var, weight, bias, eps, out, return_stats, key=seen)
    count = arguments.check_several(name, "value per channel when training", input, input.shape[0])
    if takes_kernels(BATCH_NORM, input, weight, bias, running_mean, running_var):
        running = None
        if running_mean is not None and running_var is not None:
            running = Running(running_mean, running_var, momentum, count)
        output, mean, rstd, _ = _by_channel_kernels(
            BATCH_NORM, input, 0, weight, bias, eps, out, running=running, key=seen
        )
        return (output, mean, rstd) if return_stats else output
    statistics = _statistics(input, 0, weight, bias, eps) if return_stats else ()
    output = reference.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
    return _returned(output, out, statistics)


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Group normalization, as `torch.nn.functional.group_norm`: the channels of each sample of an input (N, C, ...) in
    `num_groups` groups of neighbours, each by its own mean and variance.

    The keywords are those of `batch_norm`, and so are the dtypes that it takes; the statistics have shape
    (N, num_groups).
    """
    is_plain = out is None and not return_stats and not torch.compiler.is_compiling()
    how = (GROUP_NORM, GROUP_NORM, eps, num_groups, None)
    seen = repeat_channels.again(*how, (input, weight, bias)) if is_plain else None
    if isinstance(seen, torch.Tensor):
        return seen
    if has_torch_function_variadic(input, weight, bias) or is_sharded(input):
        return _elsewhere(
            group_norm, (input, weight, bias), input, num_groups, weight, bias, eps, out=out, return_stats=return_stats
        )
    if out is None and not return_stats and routing.takes_operators(input, None, GROUP_NORM, num_groups):
        try:
            if input.numel() > num_groups and (weight is not None or bias is None):
                return torch.group_norm(input, num_groups, weight, bias, eps, False)
        except REFUSALS:
            pass
    name = "group_norm"
    channels = arguments.check_channels(name, input)
    groups = arguments.check_groups(name, num_groups, input, channels)
    eps = arguments.check_eps(name, eps)
    _check_tensors(name, input, channels, weight, bias, None, None, True, out)
    arguments.check_several(name, "value per group", input, input.shape[0] * channels // groups)
    dtype = arguments.output_dtype(name, input) if out is None else input.dtype
    if takes_kernels(GROUP_NORM, input, weight, bias, groups=groups):
        output, mean, rstd = _by_channel_kernels(
            GROUP_NORM, input, groups, weight, bias, eps, out, dtype=dtype, key=seen
        )
        return (output, mean.view(-1, groups), rstd.view(-1, groups)) if return_stats else output
    statistics = _statistics(input, groups, weight, bias, eps) if return_stats else ()
    return _returned(reference.group_norm(input.to(dtype), groups, weight, bias, eps), out, statistics)


def instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Instance normalization, as `torch.nn.functional.instance_norm`: each channel of each sample of an input (N, C, ...) by
    its own mean and variance, or without `use_input_stats` by the running ones. With it the running statistics, where
    given, are updated as in `batch_norm`, by what is new in the mean over all samples.

    The keywords are those of `batch_norm`, and so are the dtypes that it takes; the statistics have shape (N, C).
    """
    is_plain = out is None and not return_stats and running_mean is None and running_var is None
    is_plain = is_plain and use_input_stats is True and not torch.compiler.is_compiling()
    has_channels = type(input) in routing.PLAIN_TYPES and not input.is_nested and input.ndim > 1
    channels = input.shape[1] if has_channels else 0
    how = (instance_norm, GROUP_NORM, eps, channels, None)
    seen = repeat_channels.again(*how, (input, weight, bias)) if is_plain else None
    if isinstance(seen, torch.Tensor):
        return seen
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias) or is_sharded(input):
        return _elsewhere(
            instance_norm, (input, running_mean, running_var, weight, bias), input, running_mean, running_var, weight, bias,
            use_input_stats, momentum, eps, out=out, return_stats=return_stats,
        )  # fmt: skip
    if out is None and not return_stats and routing.takes_operators(input, None, GROUP_NORM, channels):
        try:
            flags = (use_input_stats, momentum, eps, False)
            if use_input_stats:
                is_safe = input.numel() > input.shape[0] * input.shape[1]
                if is_safe and arguments.may_write(input, running_mean, running_var, weight, bias):
                    output = torch.instance_norm(input, weight, bias, running_mean, running_var, *flags)
                    return reference.in_format_of(input, output)
            elif input.numel() > 0 and arguments.are_vectors(weight, bias):  # nothing is left that tells samples apart
                return torch.batch_norm(input, weight, bias, running_mean, running_var, *flags)
        except REFUSALS:
            pass
    name = "instance_norm"
    channels = arguments.check_channels(name, input)
    use_input_stats = arguments.check_flag(name, "use_input_stats", use_input_stats)
    momentum = arguments.check_number(name, "momentum", momentum)
    eps = arguments.check_eps(name, eps)
    _check_tensors(name, input, channels, weight, bias, running_mean, running_var, use_input_stats, out)
    if not use_input_stats:
        return _by_running(input, running_mean, running_var, weight, bias, eps, out, return_stats, input.shape[0])
    count = arguments.check_several(name, "spatial element when training", input)
    if takes_kernels(GROUP_NORM, input, weight, bias, running_mean, running_var, groups=channels):
        norm = GROUP_NORM if running_mean is None else TRACKED_NORM
        output, *rows = _by_channel_kernels(norm, input, channels, weight, bias, eps, out, key=seen)
        mean, rstd, *variance = (row.view(-1, channels) for row in rows)
        if variance:
            reference.update_running(running_mean, running_var, mean, variance[0], count, momentum)
        return (output, mean, rstd) if return_stats else output
    statistics = _statistics(input, channels, weight, bias, eps) if return_stats else ()
    output = reference.instance_norm(input, running_mean, running_var, weight, bias, momentum, eps)
    return _returned(output, out, statistics)


def _elsewhere(function: Callable[..., Any], relevant: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
    """A call on tensors of another class, which takes it over; those on DTensors go to `parallel`. Of our own keywords
    those that say nothing are left away: jagged tensors know an `rms_norm` by name, and only PyTorch's arguments of it."""
    if is_sharded(args[0]) and on_shards is not None:
        return on_shards(function, *args, **kwargs)
    given = {name: value for name, value in kwargs.items() if not (value is None or value is False or _is_zero(value))}
    return handle_torch_function(function, relevant, *args, **given)


def normalize_and_average(
    call: Call, operands: Sequence[torch.Tensor | float], out: torch.Tensor | None, running: Running | None
) -> tuple[torch.Tensor, ...]:
    """By the kernels, which average the statistics of batch norm into running ones, unless these are also read."""
    read = operands if out is None else [*operands, out]
    if running is None or running.can_be_averaged_beside(read):
        return pipeline.normalize(call, operands, out, running)
    results = pipeline.normalize(call, operands, out)
    mean, _, variance = (statistic.detach() for statistic in results[len(call.outputs) :])
    reference.update_running(running.mean, running.variance, mean, variance, running.size, running.momentum)
    return results


def _is_zero(weight_offset: float) -> bool:
    return type(weight_offset) is float and weight_offset == 0.0


def takes_kernels(
    norm: Norm, input: torch.Tensor, *tensors: torch.Tensor | None, cols: int = 0, groups: int = 0
) -> bool:
    """Whether kernels or native code run a norm alone; `cols` are those of a norm over rows."""
    is_large = input.numel() > 0 and routing.is_large_input(norm, input, cols, groups)
    return routing.route(input, *tensors, is_large=is_large) != "reference" and input.numel() > 0


def _check_tensors(
    name: str,
    input: torch.Tensor,
    channels: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    is_updated: bool,
    out: torch.Tensor | None,
) -> None:
    arguments.check_vector(name, "weight", weight, input, channels)
    arguments.check_vector(name, "bias", bias, input, channels)
    arguments.check_running(name, running_mean, running_var, input, channels, is_updated)
    if out is not None:
        arguments.check_out(name, out, input, (weight, bias, running_mean, running_var))


def _statistics(
    input: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.channel_statistics(input, groups, eps, _dtype_of_statistics(input, weight, bias))


def _dtype_of_statistics(*tensors: torch.Tensor | None) -> torch.dtype:
    return compute_dtype([tensor.dtype for tensor in tensors if tensor is not None])


def _returned(
    output: torch.Tensor, out: torch.Tensor | None, statistics: tuple[torch.Tensor, ...]
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    if out is not None:
        output = out.copy_(output)
    return (output, *statistics) if statistics else output


def _by_running(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    return_stats: bool,
    samples: int | None = None,
    key: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """By the running statistics, which are returned once, or for each of `samples`."""
    assert running_mean is not None
    assert running_var is not None
    statistics: tuple[torch.Tensor, ...] = ()
    if return_stats:
        dtype = _dtype_of_statistics(input, weight, bias)
        statistics = reference.fixed_statistics(running_mean, running_var, eps, dtype)
        if samples is not None:
            statistics = tuple(statistic.repeat(samples, 1) for statistic in statistics)
    if takes_kernels(FIXED_NORM, input, weight, bias, running_mean, running_var):
        fixed = (running_mean, running_var)
        output = _by_channel_kernels(BATCH_NORM, input, 0, weight, bias, eps, out, fixed, key=key)[0]
        return (output, *statistics) if return_stats else output
    output = reference.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    return _returned(output, out, statistics)


def _by_channel_kernels(
    norm: Norm,
    input: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    fixed: tuple[torch.Tensor, torch.Tensor] | None = None,
    running: Running | None = None,
    dtype: torch.dtype | None = None,
    key: Any = None,
) -> tuple[torch.Tensor, ...]:
    """(output, mean, rstd), and the biased variance where the norm keeps it, with one number a row; of `fixed` statistics
    the output alone. `groups` is 0 for batch norm; `fixed` are its running statistics in evaluation, and `running` in
    training. Remembered under `key`."""
    dtype = dtype or input.dtype
    mask = (False, True, *[False] * (input.ndim - 2))
    parameters = [_by_channel(p, input) for p in (*(fixed or ()), weight, bias) if p is not None]
    axes: tuple[Axes, ...] = (FULL, *[mask] * len(parameters))
    if torch.compiler.is_compiling():
        dtypes = [tensor.dtype for tensor in (input, *parameters)]
        flags = (weight is not None, bias is not None, 0.0, axes, dtypes, dtype, groups, fixed is not None)
        text = library.affine_text(norm.name, 1, eps, *flags)
        own = FIXED_NORM if fixed is not None else norm
        output, *statistics = library.normalize(own, text, [input, *parameters], out=out, running=running)
    else:
        epilogue: Affine | FixedAffine = Affine(weight is not None, bias is not None)
        if fixed is not None:
            norm, epilogue = FIXED_NORM, FixedAffine(eps, weight is not None, bias is not None)
        call = Call(norm, 1, eps, Itself(), epilogue, axes, (dtype,), groups=groups)
        output, *statistics = normalize_and_average(call, [input, *parameters], out, running)
        if key is not None:
            averaged = () if running is None else (running.mean, running.variance)
            tensors = (input, *averaged, *(fixed or ()), weight, bias)
            repeat_channels.remember(key, call, tensors, running is not None, output)
    return output, *statistics


def _by_channel(parameter: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return spread(parameter).view(-1, *[1] * (input.ndim - 2))


# What a capture does with each of these
HANDLERS = handlers.TORCH | {
    layer_norm: handlers.layer_norm,
    rms_norm: handlers.rms_norm,
    batch_norm: handlers.batch_norm,
    group_norm: handlers.group_norm,
    instance_norm: handlers.instance_norm,
}
