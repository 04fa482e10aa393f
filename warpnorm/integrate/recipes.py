"""What a module computes that is one norm over its last dimension, or over its channels, and little else, as data."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from warpnorm import functional
from warpnorm.fuse import fuse

LAYER, RMS = "layer_norm", "rms_norm"
# Which dtype a result has: that of the input, that of the weight, what the two are promoted to, or these and the gate; or
# float32 always
INPUT, WEIGHT, PROMOTED, WITH_GATE, SINGLE = "input", "weight", "promoted", "with the gate", "float32"
# A gate: silu(gate) times what comes into the norm, or what comes out of it
BEFORE, AFTER = "before", "after"
# How a result over channels lies in memory: as it comes, as the input does, or contiguous whatever the input
ANYHOW, ALIKE, DENSE = "anyhow", "alike", "dense"

USUAL_DIMS = 3  # (batch, sequence, hidden): who has a recipe for less has to be told


class Recipe(NamedTuple):
    """`weight` and `bias` are names of parameters, or none; `offset` is added to the weight. `eps` is the name of an
    attribute, or a number. `ndims`: of inputs that it was found by; others are the module's own affair. `by_channel`: those
    of them that are normed over dimension 1, as (N, C, H, W) is, instead of the last; `layout`: how these results lie."""

    norm: str
    weight: str | None
    bias: str | None
    eps: str | float
    offset: float = 0.0
    gate: str | None = None
    result: str = INPUT
    ndims: tuple[int, ...] = ()
    by_channel: tuple[int, ...] = ()
    layout: str = ANYHOW

    def __str__(self) -> str:
        words = [self.norm]
        if self.gate is not None:
            words.append("of x * silu(gate)" if self.gate == BEFORE else "* silu(gate)")
        if self.weight:
            words.append(f"with {'1 + ' if self.offset else ''}{self.weight}{f' and {self.bias}' if self.bias else ''}")
        if self.by_channel:
            is_mixed = any(ndim not in self.by_channel for ndim in self.ndims if ndim >= USUAL_DIMS)
            words.append(f"over channels{f' of inputs of {_either(self.by_channel)} dimensions' if is_mixed else ''}")
        elif self.ndims and max(self.ndims) < USUAL_DIMS:
            words.append(f"of inputs of {_either(self.ndims)} dimensions")
        return " ".join(words)

    def run(self, module: torch.nn.Module, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        weight = getattr(module, self.weight) if self.weight else None
        bias = getattr(module, self.bias) if self.bias else None
        eps = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        dtype = self._dtype(x, gate, weight)
        if dtype.itemsize > x.dtype.itemsize:  # never a narrower one before the norm
            x = x.to(dtype)
        if (
            x.is_cpu and x.dtype.itemsize == 2 and self.norm == LAYER
        ):  # whose gradients PyTorch would sum in 16 bits there
            x = x.float()
        if gate is not None:
            gated = _gated_before if self.gate == BEFORE else _gated_after
            found = gated(x, gate, weight, float(eps))
        else:
            found = self._alone(x, weight, bias, eps)
        return found if found.dtype is dtype else found.to(dtype)

    def _alone(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        is_by_channel = x.ndim in self.by_channel
        is_dense = self.layout == DENSE or (self.layout == ALIKE and x.is_contiguous())
        if is_by_channel:
            x = x.movedim(1, -1)
        cols = x.shape[-1:]
        if self.norm == LAYER:
            found = functional.layer_norm(x, cols, weight, bias, eps, weight_offset=self.offset)
        else:
            found = functional.rms_norm(x, cols, weight, eps, weight_offset=self.offset)
        assert isinstance(found, torch.Tensor)
        if not is_by_channel:
            return found
        found = found.movedim(-1, 1)
        return found.contiguous() if is_dense else found

    def _dtype(self, x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None) -> torch.dtype:
        dtype = x.dtype
        if self.result == SINGLE:
            return torch.promote_types(dtype, torch.float32)
        if self.result in (PROMOTED, WITH_GATE):
            for other in (weight, gate if self.result == WITH_GATE else None):
                dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
        if self.result == WEIGHT and weight is not None and dtype != torch.float64:
            return weight.dtype
        return dtype


def _either(ndims: tuple[int, ...]) -> str:
    return " or ".join(map(str, ndims))


@fuse
def _gated_before(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide) * F.silu(gate.to(wide)), x.shape[-1:], weight.to(wide), eps).to(x.dtype)


@fuse
def _gated_after(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (F.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), eps) * F.silu(gate.to(wide))).to(x.dtype)
