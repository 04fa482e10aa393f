"""What a capture does with the norms and with dropout, each as PyTorch defines it: a marker in the place of the
normalization, then the affine in ordinary operators."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from warpnorm.errors import InputError
from warpnorm.norms import LAYER_NORM, RMS_NORM, Norm
from warpnorm.trace.record import dropout as drop
from warpnorm.trace.record import normalize, refuse, relabel


@cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def layer_norm(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    given = _bound(F.layer_norm if func is torch.layer_norm else func, args, kwargs)
    return _norm(LAYER_NORM, given)


def rms_norm(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    given = _bound(F.rms_norm if func is torch.rms_norm else func, args, kwargs)
    if given.get("eps") is None:
        given["eps"] = torch.finfo(torch.float64 if given["input"].dtype == torch.float64 else torch.float32).eps
    return _norm(RMS_NORM, given)


def _bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs.pop("cudnn_enable", None)
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


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
    if c.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        c = c.to(torch.promote_types(c.dtype, torch.float32))  # norms are among what autocast computes in float32
    output = normalize(c, len(shape), norm.name, float(given["eps"]))
    if weight is not None:
        output = output * (weight + given["weight_offset"] if given.get("weight_offset") else weight)
    if bias is not None:
        output = output + bias
    return output if output.dtype == c.dtype else relabel(output, c.dtype)


def _normalized_shape(norm: Norm, given: dict[str, Any], c: torch.Tensor) -> tuple[int, ...]:
    if given.get("normalized_dim") is not None:
        return tuple(int(size) for size in c.shape[given["normalized_dim"] :])
    wanted = given["normalized_shape"]
    shape = tuple(int(size) for size in ((wanted,) if isinstance(wanted, int | torch.SymInt) else wanted))
    own = c.shape[c.ndim - len(shape) :] if shape else ()
    if not shape or len(shape) > c.ndim or tuple(int(size) for size in own) != shape:
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


def unsupported(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    raise refuse(func.__name__, "its rows do not lie along the last dimensions", "use layer_norm or rms_norm")


TORCH: dict[Any, Callable[..., torch.Tensor]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.dropout: dropout,
    torch.dropout: dropout,
    F.batch_norm: unsupported,
    F.group_norm: unsupported,
    F.instance_norm: unsupported,
    torch.batch_norm: unsupported,
    torch.group_norm: unsupported,
    torch.instance_norm: unsupported,
}
