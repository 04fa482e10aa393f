"""LayerNorm and RMSNorm over a hidden dimension that ranks share: PyTorch's classes with this rank's part of the weights.
SyncBatchNorm, which has all of its weights on every rank, is in `nn.py`."""

from typing import Any

import torch

from warpnorm.errors import InputError
from warpnorm.parallel import exchange, functional


class _Shared(torch.nn.Module):
    """A norm of PyTorch's, which the class after this one is, over `whole` columns: each rank of `group` has a part of them,
    as `torch.chunk` divides and DTensor's `Shard` does."""

    normalized_shape: tuple[int, ...]

    def __init__(self, normalized_shape: int, *args: Any, group: Any = None, **kwargs: Any) -> None:
        if not isinstance(normalized_shape, int):
            raise InputError(
                f"{type(self).__name__}: normalized_shape is {normalized_shape}, but must be one int: all ranks' columns"
            )
        start, end = part_of(normalized_shape, group)
        super().__init__(end - start, *args, **kwargs)
        self.whole, self.group = normalized_shape, group

    @classmethod
    def from_whole(cls, norm: Any, group: Any = None) -> Any:
        """This rank's part of a norm that has all weights, which are copied: one of torch.nn or warpnorm.nn."""
        shape: tuple[int, ...] = getattr(norm, "normalized_shape", ())
        if len(shape) != 1:
            raise InputError(
                f"{cls.__name__}.from_whole: takes a norm over one dimension, with normalized_shape, but got {norm}"
            )
        weight, bias = norm.weight, getattr(norm, "bias", None)
        has_bias = {} if issubclass(cls, torch.nn.RMSNorm) else {"bias": bias is not None}
        kind = {} if weight is None else {"device": weight.device, "dtype": weight.dtype}
        made = cls(shape[0], norm.eps, weight is not None, group=group, **has_bias, **kind)
        part = slice(*part_of(made.whole, group))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                whole = getattr(norm, name)
                parameter.copy_(whole[part])
                parameter.requires_grad_(whole.requires_grad)
        return made.train(norm.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, a part of {self.whole}"


class LayerNorm(_Shared, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` over `normalized_shape` columns, of which this rank has a part, run by
    `warpnorm.parallel.layer_norm`. The other arguments are those of `torch.nn.LayerNorm`, and `group`: None is all ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, group=self.group)


class RMSNorm(_Shared, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` in the same way, run by `warpnorm.parallel.rms_norm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps, group=self.group)


def part_of(whole: int, group: Any) -> tuple[int, int]:
    """From which column to which this rank's part goes."""
    ranks = exchange.world_size(group)
    size = -(-whole // ranks)
    start = min(exchange.rank_in(group) * size, whole)
    return start, min(start + size, whole)
