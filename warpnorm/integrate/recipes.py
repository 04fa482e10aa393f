"""What a module computes that is one norm over its last dimension, or over its channels, and little else, as data."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from warpnorm import functional
from warpnorm.fuse import fuse

LAYER, RMS = "layer_norm", "rms_norm"
# Which dtype a result has: that of the input, that of the weight, or what the two are promoted to
INPUT, WEIGHT, PROMOTED = "input", "weight", "promoted"
# A gate: silu(gate) times what comes into the norm, or what comes out of it
BEFORE, AFTER = "before", "after"


class Recipe(NamedTuple):
    """`weight` and `bias` are names of parameters, or none; `offset` is added to the weight. `eps` is the name of an
    attribute, or a number. `is_by_channel`: over the dimension 1 of (N, C, H, W) instead of the last."""

    norm: str
    weight: str | None
    bias: str | None
    eps: str | float
    offset: float = 0.0
    result: str = INPUT
    is_by_channel: bool = False
    gate: str | None = None

    def __str__(self) -> str:
        words = [self.norm]
        if self.gate is not None:
            words.append("of x * silu(gate)" if self.gate == BEFORE else "* silu(gate)")
        if self.weight:
            words.append(f"with {'1 + ' if self.offset else ''}{self.weight}{f' and {self.bias}' if self.bias else ''}")
        if self.is_by_channel:
            words.append("over channels")
        return " ".join(words)

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether a call with these arguments is one that this recipe was found by."""
        count = 1 if self.gate is None else 2
        given = [value for value in values if value is not None]
        return len(given) == count and all(isinstance(value, torch.Tensor) for value in values[:count])

    def run(self, module: torch.nn.Module, values: Sequence[Any]) -> torch.Tensor:
        x = values[0]
        weight = getattr(module, self.weight) if self.weight else None
        bias = getattr(module, self.bias) if self.bias else None
        eps = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        dtype = self._dtype(x, weight)
        if dtype is not x.dtype:
            x = x.to(dtype)
        if self.gate is not None:
            gated = _gated_before if self.gate == BEFORE else _gated_after
            return gated(x, values[1], weight, float(eps))
        if self.is_by_channel:
            x = x.movedim(1, -1)
        cols = x.shape[-1:]
        if self.norm == LAYER:
            found = functional.layer_norm(x, cols, weight, bias, eps, weight_offset=self.offset)
        else:
            found = functional.rms_norm(x, cols, weight, eps, weight_offset=self.offset)
        assert isinstance(found, torch.Tensor)
        return found.movedim(-1, 1) if self.is_by_channel else found

    def _dtype(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype:
        if self.result == INPUT or weight is None:
            return x.dtype
        return weight.dtype if self.result == WEIGHT else torch.promote_types(x.dtype, weight.dtype)


@fuse
def _gated_before(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float() * F.silu(gate.float()), x.shape[-1:], weight.float(), eps).to(x.dtype)


@fuse
def _gated_after(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps) * F.silu(gate.float())).to(x.dtype)
