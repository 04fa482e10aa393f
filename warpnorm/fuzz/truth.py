"""PyTorch's norms from its sums, for a truth in float64 that float64 is held against: its own operators add up one element
after another on a CPU, and are off by ten roundings for rows of 10,000. Sums in blocks are off by one or two."""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class Instead:
    """A module, but for some functions."""

    def __init__(self, module: ModuleType, *own: Any) -> None:
        self._module, self._own = module, {function.__name__: function for function in own}

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._module, name)


def moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Deviations, mean and variance. First from a mean that is rounded, where they are exact if they are small, and then
    from their own mean."""
    rounded = x.detach().mean(dims, keepdim=True)
    deviation = x - rounded
    left = deviation.mean(dims, keepdim=True)
    deviation = deviation - left
    return deviation, rounded + left, deviation.square().mean(dims, keepdim=True)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (-1, *(1 for _ in x.shape[2:]))
    return affine(x, *(None if p is None else p.reshape(shape) for p in (weight, bias)))


def layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    deviation, _, variance = moments(x, tuple(range(-len(shape), 0)))
    return affine(deviation / (variance + eps).sqrt(), weight, bias)


def native_layer_norm(x: Tensor, shape: Any, weight: None, bias: None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _, mean, variance = moments(x, tuple(range(-len(shape), 0)))
    return layer_norm(x, shape, weight, bias, eps), mean, 1 / (variance + eps).sqrt()


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    square = x.square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    return affine(x / (square + eps).sqrt(), weight, None)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    deviation, _, variance = moments(x.reshape(x.shape[0], groups, -1), (2,))
    return by_channel((deviation / (variance + eps).sqrt()).reshape(x.shape), weight, bias)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    return _by_channel(x, running_mean, running_var, weight, bias, training, momentum, eps, (0, *range(2, x.ndim)))


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    return _by_channel(
        x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps, tuple(range(2, x.ndim))
    )


def _by_channel(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    is_computed: bool, momentum: float, eps: float, dims: tuple[int, ...],
) -> Tensor:  # fmt: skip
    if not is_computed:
        assert running_mean is not None
        assert running_var is not None
        return by_channel(by_channel(x, None, -running_mean), 1 / (running_var + eps).sqrt() * _or_one(weight), bias)
    deviation, mean, variance = moments(x, dims)
    if running_mean is not None and running_var is not None:
        count = x.numel() // mean.numel()
        for running, new in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            new = new.detach().flatten(1).mean(0)
            running.copy_((1 - momentum) * running + momentum * new)
    return by_channel(deviation / (variance + eps).sqrt(), weight, bias)


def _or_one(weight: Tensor | None) -> Tensor | float:
    return 1.0 if weight is None else weight


NAMES = {
    "torch": Instead(torch, native_layer_norm),
    "F": Instead(F, layer_norm, rms_norm, group_norm, batch_norm, instance_norm),
}
