"""What a capture does with the norms and with dropout, each as PyTorch defines it: a marker in the place of the
normalization, then the affine in ordinary operators."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from warpnorm.errors import InputError, InputTypeError
from warpnorm.norms import BATCH_NORM, FIXED_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM, TRACKED_NORM, Norm
from warpnorm.trace.fakes import fixed_size
from warpnorm.trace.record import average, normalize, refuse, relabel
from warpnorm.trace.record import dropout as drop


@cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def layer_norm(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _norm(LAYER_NORM, _operator(torch.layer_norm, F.layer_norm, func, args, kwargs))


def rms_norm(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    given = _bound(F.rms_norm if func is torch.rms_norm else func, args, kwargs)
    if given.get("eps") is None:
        given["eps"] = torch.finfo(torch.float64 if given["input"].dtype == torch.float64 else torch.float32).eps
    return _norm(RMS_NORM, given)


def _autocast(operator: str, c: torch.Tensor) -> torch.Tensor:
    """In float32 where this version of PyTorch has an operator among what autocast computes so."""
    if c.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return c
    is_wide = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "AutocastCUDA")
    return c.to(torch.promote_types(c.dtype, torch.float32)) if is_wide else c


def _operator(operator: Any, function: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of the operator or the function, which has no flag for cuDNN after the rest."""
    is_operator = func is operator
    return _bound(function if is_operator else func, args[:5] if is_operator else args, kwargs)


def _bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = {name: value for name, value in kwargs.items() if name not in ("cudnn_enable", "cudnn_enabled")}
    ranks = kwargs.pop("ranks", "")
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments | {"ranks": ranks}


def _norm(norm: Norm, given: dict[str, Any]) -> torch.Tensor:
    c: torch.Tensor = given["input"]
    if given.get("out") is not None or given.get("return_stats"):
        raise refuse(f"{norm.name} with out= or return_stats=", "a kernel writes its results only", "leave it away")
    if not c.is_floating_point():
        raise InputError(f"{norm.name}: input has dtype {c.dtype}, but must be floating point")
    shape = _normalized_shape(norm, given, c)
    weight, bias = given.get("weight"), given.get("bias")
    for what, parameter in (("weight", weight), ("bias", bias)):
        if isinstance(parameter, torch.Tensor) and parameter.ndim and tuple(parameter.shape) != shape:
            raise InputError(f"{norm.name}: {what} has shape {tuple(parameter.shape)}, but normalized_shape is {shape}")
    c = _autocast(norm.name, c)
    output = normalize(c, len(shape), norm.name, float(given["eps"]), 0, given.get("ranks", ""))
    if given.get("weight_offset") and weight is None:
        offset = given["weight_offset"]
        raise InputError(f"{norm.name}: weight_offset is {offset}, but there is no weight to add it to")
    if weight is not None:
        output = output * (weight + given["weight_offset"] if given.get("weight_offset") else weight)
    if bias is not None:
        output = output + bias
    return output if output.dtype == c.dtype else relabel(output, c.dtype)


def _normalized_shape(norm: Norm, given: dict[str, Any], c: torch.Tensor) -> tuple[int, ...]:
    wanted, dim = given["normalized_shape"], given.get("normalized_dim")
    if (wanted is None) == (dim is None):
        which = "neither" if dim is None else "both"
        raise InputError(f"{norm.name}: give normalized_shape or normalized_dim, but {which} was given")
    if dim is not None:
        if not -c.ndim <= dim < c.ndim:
            raise InputError(f"{norm.name}: normalized_dim is {dim}, but input has {c.ndim} dimensions")
        return tuple(fixed_size(c, d) for d in range(c.ndim)[dim:])
    shape = tuple(int(size) for size in ((wanted,) if isinstance(wanted, int | torch.SymInt) else wanted))
    own = tuple(fixed_size(c, dim) for dim in range(max(c.ndim - len(shape), 0), c.ndim)) if shape else ()
    if not shape or own != shape:
        raise InputError(
            f"{norm.name}: normalized_shape is {shape}, but input has shape {tuple(c.shape)}, which does not end with it"
        )
    return shape


def dropout(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if func is torch.dropout:
        func = lambda input, p, train: None  # noqa: E731
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        input, p, is_training, is_inplace = given["input"], given["p"], given["train"], False
    else:
        given = _bound(F.dropout, args, kwargs)
        input, p, is_training, is_inplace = (given[name] for name in ("input", "p", "training", "inplace"))
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not is_training or p == 0.0:
        return input
    result = input * 0.0 if p == 1.0 else drop(input, float(p))
    return input.copy_(result) if is_inplace else result


def batch_norm(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    given = _by_name(torch.batch_norm, F.batch_norm, func, args, kwargs)
    return _channel_norm(BATCH_NORM, given, given["training"])


def group_norm(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    given = _operator(torch.group_norm, F.group_norm, func, args, kwargs)
    groups, channels = int(given["num_groups"]), fixed_size(_with_channels("group_norm", given["input"]), 1)
    if groups <= 0 or channels % groups:
        raise InputError(f"group_norm: num_groups is {groups}, but must divide the {channels} channels of the input")
    return _channel_norm(GROUP_NORM, given, True, groups)


def instance_norm(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    given = _by_name(torch.instance_norm, F.instance_norm, func, args, kwargs)
    groups = fixed_size(_with_channels("instance_norm", given["input"]), 1)
    return _channel_norm(GROUP_NORM, given, given["use_input_stats"], groups, "instance_norm")


def shared(handler: Callable[..., torch.Tensor], ranks: Callable[[Any], str]) -> Callable[..., torch.Tensor]:
    """The same of a function whose rows lie on several ranks: `ranks` names the process group that it is given."""

    def handle(func: Any, *args: Any, group: Any = None, **kwargs: Any) -> torch.Tensor:
        return handler(func, *args, group=group, ranks=ranks(group), **kwargs)

    return handle


def _by_name(operator: Any, function: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    if func is not operator:
        return _bound(func, args, kwargs)
    flag = "training" if function is F.batch_norm else "use_input_stats"
    names = ("input", "weight", "bias", "running_mean", "running_var", flag, "momentum", "eps", "cudnn_enabled")
    return dict(zip(names, args, strict=False)) | kwargs


def _channel_norm(
    norm: Norm, given: dict[str, Any], is_computed: bool, groups: int = 0, called: str | None = None
) -> torch.Tensor:
    """`called`: what the user called, where that is not the norm."""
    called = called or norm.name
    c = _with_channels(called, given["input"])
    if given.get("out") is not None or given.get("return_stats"):
        raise refuse(f"{called} with out= or return_stats=", "a kernel writes its results only", "leave it away")
    mean, variance, momentum = given.get("running_mean"), given.get("running_var"), given.get("momentum", 0.1)
    if momentum is None:
        raise InputTypeError(f"{called}: momentum must be a float, but is None; modules alone take None")
    for what in ("weight", "bias", "running_mean", "running_var"):
        if given.get(what) is not None and tuple(given[what].shape) != (c.shape[1],):
            raise InputError(
                f"{called}: {what} has shape {tuple(given[what].shape)}, but input has {c.shape[1]} channels"
            )
    is_grouped = "num_groups" in given
    c = _autocast("group_norm" if is_grouped else "batch_norm", c)
    shares = c.shape[1] if norm is BATCH_NORM else c.shape[0] * max(groups, 1)
    count = c.numel() // shares if c.numel() > 0 else 0
    if is_grouped:  # PyTorch asks for two in all groups of a number
        count *= c.shape[0]
    if is_computed and count == 1 and not given.get("ranks"):
        what = "group" if is_grouped else "channel when training"
        raise InputError(f"{called}: expected more than 1 value per {what}, got input {tuple(c.shape)}")
    eps = float(given["eps"])
    if is_computed:
        is_averaged = mean is not None and variance is not None
        name = TRACKED_NORM.name if is_averaged and norm is GROUP_NORM else norm.name
        output = normalize(c, 1, name, eps, groups, given.get("ranks", ""))
        if is_averaged:
            average(mean, variance, float(momentum))
    else:
        if mean is None or variance is None:
            raise InputError(f"{called}: evaluation needs running_mean and running_var, but one is None")
        output = normalize(c, 1, FIXED_NORM.name, eps, 0, "")
        output = (output - _along_channels(mean, c)) * torch.rsqrt(_along_channels(variance, c) + eps)
    if given.get("weight") is not None:
        output = output * _along_channels(given["weight"], c)
    if given.get("bias") is not None:
        output = output + _along_channels(given["bias"], c)
    return output if output.dtype == c.dtype else relabel(output, c.dtype)


def _with_channels(called: str, c: torch.Tensor) -> torch.Tensor:
    """It, if it may have any."""
    if not c.is_floating_point() or c.ndim < 2:
        raise InputError(
            f"{called}: input has dtype {c.dtype} and {c.ndim} dimensions, but must be floating point with at least 2"
        )
    return c


def _along_channels(parameter: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return parameter.view(-1, *[1] * (c.ndim - 2))


def prelu(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A kink at zero, the slope below it one number, or one for each channel."""
    given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
    x, weight = given["input"], given["weight"]
    if weight.numel() != 1:
        if x.ndim < 2 or weight.ndim != 1 or weight.shape[0] != fixed_size(x, 1):
            raise InputError(f"prelu: weight has shape {tuple(weight.shape)}, but input has shape {tuple(x.shape)}")
        weight = weight.view(-1, *[1] * (x.ndim - 2))
    return torch.where(x > 0, x, weight * x)


TORCH: dict[Any, Callable[..., torch.Tensor]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.prelu: prelu,
    torch.prelu: prelu,
    F.dropout: dropout,
    torch.dropout: dropout,
    F.batch_norm: batch_norm,
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
    torch.batch_norm: batch_norm,
    torch.group_norm: group_norm,
    torch.instance_norm: instance_norm,
}
