"""The norms as functions: PyTorch's signatures and semantics, and more by keyword. The modules are in `nn.py`."""

from collections.abc import Sequence

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from warpnorm import arguments, pipeline, reference, settings
from warpnorm.norms import LAYER_NORM, RMS_NORM, Norm
from warpnorm.problem import COLUMN, FULL, NUMBER, SCALAR, Call
from warpnorm.reference import Affine, Itself

Shape = int | Sequence[int]
# What PyTorch's operators raise on input that the checked path below either takes or refuses in one clear sentence.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)


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
    if has_torch_function_unary(input):
        return handle_torch_function(
            layer_norm, (input,), input, normalized_shape, weight, bias, eps,
            normalized_dim=normalized_dim, out=out, weight_offset=weight_offset, return_stats=return_stats,
        )  # fmt: skip
    is_plain = out is None and normalized_dim is None and not return_stats and _is_zero(weight_offset)
    if is_plain and _takes_operators(input):
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
    if pipeline.route(input, weight, bias) == "kernels":
        results = _by_kernels(LAYER_NORM, input, shape, weight, bias, eps, weight_offset, out)
    else:
        results = reference.layer_norm(input, shape, weight, bias, eps, weight_offset)
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
    if has_torch_function_unary(input):
        return handle_torch_function(
            rms_norm, (input,), input, normalized_shape, weight, eps,
            normalized_dim=normalized_dim, out=out, weight_offset=weight_offset, return_stats=return_stats,
        )  # fmt: skip
    is_plain = out is None and normalized_dim is None and not return_stats and _is_zero(weight_offset)
    if is_plain and _takes_operators(input) and (weight is None or getattr(weight, "dtype", None) is input.dtype):
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
    if pipeline.route(input, weight) == "kernels":
        results = _by_kernels(RMS_NORM, input, shape, weight, None, eps, weight_offset, out)
        return results if return_stats else results[0]
    output = reference.rms_norm(input, shape, weight, eps, weight_offset)
    # before out is written, which may be the input
    statistics = (reference.rms_statistic(input, shape, weight, eps),) if return_stats else ()
    if out is not None:
        output = out.copy_(output)
    return (output, *statistics) if return_stats else output


def _is_zero(weight_offset: float) -> bool:
    return type(weight_offset) is float and weight_offset == 0.0


def _takes_operators(input: torch.Tensor) -> bool:
    """Whether a call without extras may go to PyTorch's operator unchecked: it is quicker than to check, and what the
    operator refuses is checked after all."""
    is_plain = isinstance(input, torch.Tensor) and input.is_cpu and settings.current().route != "kernels"
    return is_plain and not torch.compiler.is_compiling()  # a compiler would not see the refusal


def _spread(parameter: torch.Tensor) -> torch.Tensor:
    """An expanded parameter, which the kernels would take for a scalar, with a value for each column."""
    return parameter.contiguous() if 0 in parameter.stride() else parameter


def _by_kernels(
    norm: Norm,
    input: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | float | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """(output, *statistics): the affine is the epilogue, weight and bias are its operands."""
    operands: list[torch.Tensor | float] = [input]
    axes = [FULL]
    if weight is not None:
        operands.append(_spread(weight) if isinstance(weight, torch.Tensor) else float(weight))
        axes.append(NUMBER if not isinstance(weight, torch.Tensor) else SCALAR if weight.ndim == 0 else COLUMN)
    if bias is not None:
        operands.append(_spread(bias))
        axes.append(COLUMN)
    epilogue = Affine(weight is not None, bias is not None, weight_offset)
    call = Call(norm, len(shape), eps, Itself(), epilogue, tuple(axes), (input.dtype,))
    output, *statistics = pipeline.normalize(call, operands, out)
    stat_shape = (*input.shape[: input.ndim - len(shape)], *(1 for _ in shape))
    return output, *(statistic.view(stat_shape) for statistic in statistics)
