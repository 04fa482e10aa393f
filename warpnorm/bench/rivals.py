"""What warpnorm is measured against. A rival that is not installed is listed with the reason, never left out in silence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from warpnorm import functional
from warpnorm.norms import Norm

Forward = Callable[..., torch.Tensor]  # of input, weight and, for LayerNorm, bias
EPS = 1e-5


@dataclass(frozen=True)
class Rival:
    """`build` gives the norm as one function of its operands; `missing` says why it cannot run here, or nothing."""

    name: str
    build: Callable[[Norm], Forward]
    missing: Callable[[str], str | None]


def _ours(norm: Norm) -> Forward:
    if norm.is_centered:
        return lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b, EPS)  # type: ignore[return-value]
    return lambda x, w: functional.rms_norm(x, x.shape[-1:], w, EPS)  # type: ignore[return-value]


def _eager(norm: Norm) -> Forward:
    if norm.is_centered:
        return lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS)
    return lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS)


def _compiled(norm: Norm) -> Forward:
    torch.compiler.reset()  # its cache is per function and small: past eight shapes it would run eager
    return torch.compile(_eager(norm), dynamic=False)


def _liger(norm: Norm) -> Forward:
    operations: Any = import_module("liger_kernel.ops")
    if norm.is_centered:
        return lambda x, w, b: operations.LigerLayerNormFunction.apply(x, w, b, EPS)
    # not in place: its backward would write into the caller's gradient, which the next call is given again
    return lambda x, w: operations.LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)


def _liger_missing(device: str) -> str | None:
    if device != "cuda":
        return "needs a GPU"
    try:
        import_module("liger_kernel.ops")
    except ImportError as error:
        return f"not installed ({error})"
    return None


def _always(device: str) -> str | None:
    return None


OURS = Rival("warpnorm", _ours, _always)
EAGER = Rival("eager", _eager, _always)
ALL = (EAGER, Rival("torch.compile", _compiled, _always), Rival("liger", _liger, _liger_missing))


def chosen(names: Sequence[str] | None) -> tuple[Rival, ...]:
    known = {rival.name: rival for rival in ALL}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"no rival is called {', '.join(unknown)}; there are {', '.join(known)}")
    return ALL if names is None else tuple(known[name] for name in names)
