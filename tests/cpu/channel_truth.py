"""The norms by channel and their gradients as the definitions read, in more precision than float64, and PyTorch's own
answer. The rule that compares them is that of `truth.py`; a row is a channel, or a group of channels of one sample."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import warpnorm
from cpu.truth import Wide, assert_accurate, widen

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "batch_norm": warpnorm.batch_norm,
    "group_norm": warpnorm.group_norm,
    "instance_norm": warpnorm.instance_norm,
}
PYTORCH: dict[str, Callable[..., Any]] = {
    "batch_norm": F.batch_norm,
    "group_norm": F.group_norm,
    "instance_norm": F.instance_norm,
}
TENSORS = ("input", "weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class Arguments:
    """One call of one norm. `is_training` is what each function calls by its own name."""

    norm: str
    input: torch.Tensor
    groups: int = 0
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    running_mean: torch.Tensor | None = None
    running_var: torch.Tensor | None = None
    is_training: bool = True
    momentum: float = 0.1
    eps: float = 1e-5

    @property
    def keywords(self) -> dict[str, Any]:
        shared = {"input": self.input, "weight": self.weight, "bias": self.bias, "eps": self.eps}
        if self.norm == "group_norm":
            return shared | {"num_groups": self.groups}
        flag = "training" if self.norm == "batch_norm" else "use_input_stats"
        running = {"running_mean": self.running_mean, "running_var": self.running_var}
        return shared | running | {flag: self.is_training, "momentum": self.momentum}

    @property
    def wanted(self) -> dict[str, torch.Tensor]:
        """The leaves that want a gradient."""
        tensors = {name: getattr(self, name) for name in ("input", "weight", "bias")}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad}

    def copy(self, dtype: torch.dtype | None = None) -> "Arguments":
        """With tensors of their own, in their own strides, or in another dtype."""

        def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype)
            return fresh.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

        return replace(self, **{name: copied(getattr(self, name)) for name in TENSORS})


def ours(a: Arguments, **keywords: Any) -> Any:
    return FUNCTIONS[a.norm](**a.keywords, **keywords)


def pytorch(a: Arguments) -> torch.Tensor:
    """PyTorch's operator; without statistics of its own, an instance is normalized by batch norm."""
    if a.norm == "instance_norm" and not a.is_training:
        a = replace(a, norm="batch_norm")
    if a.weight is None and a.bias is not None and (a.norm == "group_norm" or a.input.is_cuda):
        a = replace(a, weight=torch.ones_like(a.bias))  # without a weight its gradient fails
    return PYTORCH[a.norm](**a.keywords)


def run(a: Arguments, output: torch.Tensor, grad_output: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, the gradients of what wants one, and the running statistics as they are now."""
    results = {"output": output.detach()}
    if a.wanted:
        found = torch.autograd.grad(output, list(a.wanted.values()), grad_output.to(output.dtype))
        results |= {f"grad_{name}": gradient for name, gradient in zip(a.wanted, found, strict=True)}
    if a.running_mean is not None and a.running_var is not None:
        results |= {"running_mean": a.running_mean.detach(), "running_var": a.running_var.detach()}
    return results


def groups_of(a: Arguments) -> int:
    """0 where a row is a channel of all samples."""
    if a.norm == "instance_norm":
        return a.input.shape[1] if a.is_training else 0
    return a.groups


def rows_of(a: Arguments, values: Any) -> Any:
    """A tensor or an array of the shape of the input, as (rows, cols)."""
    groups = groups_of(a)
    if groups:
        return values.reshape(a.input.shape[0] * groups, -1)
    moved = values.movedim(1, 0) if isinstance(values, torch.Tensor) else np.moveaxis(values, 1, 0)
    return moved.reshape(a.input.shape[1], -1)


def truth(a: Arguments, grad_output: torch.Tensor) -> dict[str, Wide]:
    """Output, statistics, gradients and running statistics; the statistics are flat, one number a row."""
    samples, channels, *positions = a.input.shape
    groups = groups_of(a)
    shape = (samples, groups, channels // groups, *positions) if groups else tuple(a.input.shape)
    cols = tuple(range(2, len(shape))) if groups else (0, *range(2, len(shape)))
    of_channel = (*((groups, channels // groups) if groups else (channels,)), *(1 for _ in positions))

    def parameter(tensor: torch.Tensor | None, default: float) -> Wide:
        return np.longdouble(default) if tensor is None else widen(tensor).reshape(of_channel)

    def mean(values: Wide) -> Wide:
        return values.mean(cols, keepdims=True)

    def over_all_but_channels(values: Wide) -> Wide:
        return values.reshape(a.input.shape).sum((0, *range(2, a.input.ndim)))

    c, grad = (widen(tensor).reshape(shape) for tensor in (a.input, grad_output))
    results = {}
    if a.is_training:
        row_mean, variance = mean(c), mean((c - mean(c)) ** 2)
        if a.running_mean is not None and a.running_var is not None:
            count = a.input.numel() // row_mean.size
            for name, new in (("running_mean", row_mean), ("running_var", variance * count / (count - 1))):
                new = new.reshape(-1, channels).mean(0)
                results[name] = (1 - a.momentum) * widen(getattr(a, name)) + np.longdouble(a.momentum) * new
    else:
        assert a.running_mean is not None
        assert a.running_var is not None
        row_mean, variance = parameter(a.running_mean, 0), parameter(a.running_var, 1)
        results |= {"running_mean": widen(a.running_mean), "running_var": widen(a.running_var)}
    rstd = 1 / np.sqrt(variance + np.longdouble(a.eps))
    xhat = (c - row_mean) * rstd
    grad_xhat = grad_c = grad * parameter(a.weight, 1)
    if a.is_training:
        grad_c = grad_xhat - mean(grad_xhat) - xhat * mean(grad_xhat * xhat)
    return results | {
        "mean": row_mean.reshape(-1),
        "rstd": rstd.reshape(-1),
        "output": (xhat * parameter(a.weight, 1) + parameter(a.bias, 0)).reshape(a.input.shape),
        "grad_input": (grad_c * rstd).reshape(a.input.shape),
        "grad_weight": over_all_but_channels(grad * xhat),
        "grad_bias": over_all_but_channels(grad),
    }


def check(a: Arguments, grad_output: torch.Tensor, **keywords: Any) -> None:
    """Every result by the rule, against PyTorch's operator in the dtype of computation, whose results are not rounded."""
    tensors = [tensor for name in TENSORS if (tensor := getattr(a, name)) is not None]
    compute = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    true, wide = truth(a, grad_output), a.copy(compute)
    expected = run(wide, pytorch(wide), grad_output)
    mine = a.copy()
    for name, found in run(mine, ours(mine, **keywords), grad_output).items():
        of = name.removeprefix("grad_")
        assert found.dtype == getattr(a, of, a.input).dtype, name
        as_rows = [found, expected[name], true[name]]
        if name in ("output", "grad_input"):
            as_rows = [rows_of(a, values) for values in as_rows]
        assert_accurate(*as_rows, dims=1, what=name)
