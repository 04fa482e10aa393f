"""What warpnorm is measured against. A rival that is not installed is listed with the reason, never left out in silence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from warpnorm import functional
from warpnorm.bench import block
from warpnorm.bench.cases import (
    ADD_RMS,
    BATCH,
    BATCH_EVAL,
    EPS,
    GROUP,
    INSTANCE,
    LAYER,
    MOMENTUM,
    NUM_GROUPS,
    QK,
    RMS,
    Workload,
)
from warpnorm.blocks import QKNorm
from warpnorm.fuse import fuse

Forward = Callable[..., Any]  # of the operands of a workload


@dataclass(frozen=True)
class Rival:
    """`build` gives a workload as one function of its operands, or nothing if it has none like it; `missing` says why it
    cannot run here, or nothing."""

    name: str
    build: Callable[[Workload], Forward | None]
    missing: Callable[[str], str | None]


FUNCTIONS: dict[Workload, Forward] = {
    LAYER: lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b, EPS),
    RMS: lambda x, w: functional.rms_norm(x, x.shape[-1:], w, EPS),
    BATCH: lambda x, w, b, mean, var: functional.batch_norm(x, mean, var, w, b, True, MOMENTUM, EPS),
    BATCH_EVAL: lambda x, w, b, mean, var: functional.batch_norm(x, mean, var, w, b, False, MOMENTUM, EPS),
    GROUP: lambda x, w, b: functional.group_norm(x, NUM_GROUPS, w, b, EPS),
    INSTANCE: lambda x, w, b: functional.instance_norm(x, None, None, w, b, True, MOMENTUM, EPS),
}


def _ours(workload: Workload) -> Forward:
    if workload is QK:
        return _packed_qk_norm
    if workload in block.FUNCTIONS:
        function = block.FUNCTIONS[workload]
        return _whole(function) if workload in block.COMPILED else function
    return FUNCTIONS.get(workload) or fuse(workload.function)


@lru_cache(maxsize=8)
def _qk_module(head_dim: int, heads: int) -> QKNorm:
    return QKNorm(head_dim, heads, heads, EPS, device="meta")


def _packed_qk_norm(x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> Any:
    module = _qk_module(x.shape[-1], x.shape[-2] // 3)
    return torch.func.functional_call(module, {"q_weight": q_weight, "k_weight": k_weight}, x)[:2]


def _eager(workload: Workload) -> Forward:
    return workload.function


def _compiled(workload: Workload) -> Forward:
    return _whole(workload.function)


def _whole(function: Forward) -> Forward:
    import torch._functorch.config as config

    torch.compiler.reset()  # its cache is per function and small: past eight shapes it would run eager
    config.donated_buffer = False  # or a backward could run only once
    return torch.compile(function, dynamic=False, fullgraph=True)


def _liger(workload: Workload) -> Forward | None:
    operations: Any = import_module("liger_kernel.ops")
    if workload is LAYER:
        return lambda x, w, b: operations.LigerLayerNormFunction.apply(x, w, b, EPS)
    # not in place: its backward would write into the caller's gradient, which the next call is given again
    if workload is RMS:
        return lambda x, w: operations.LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)
    if workload is ADD_RMS:
        return lambda x, r, w: operations.LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False)
    return None


def _quack(workload: Workload) -> Forward | None:
    library: Any = import_module("quack.rmsnorm")
    if workload is LAYER:  # which takes float32 parameters, and has no backward
        return lambda x, w, b: library.layernorm_fwd(x, w.float(), b.float(), EPS)
    if workload is RMS:
        return lambda x, w: library.rmsnorm(x, w, eps=EPS)
    if workload is ADD_RMS:
        return lambda x, r, w: library.rmsnorm(x, w, residual=r, eps=EPS, prenorm=True)
    return None


def _apex(workload: Workload) -> Forward | None:
    library: Any = import_module("apex.normalization.fused_layer_norm")
    if workload is LAYER:
        return lambda x, w, b: library.fused_layer_norm_affine(x, w, b, x.shape[-1:], EPS)
    if workload is RMS:
        return lambda x, w: library.fused_rms_norm_affine(x, w, x.shape[-1:], EPS)
    return None


def _flash_attention(workload: Workload) -> Forward | None:
    library: Any = import_module("flash_attn.ops.triton.layer_norm")
    if workload is LAYER:
        return lambda x, w, b: library.layer_norm_fn(x, w, b, eps=EPS)
    if workload is RMS:
        return lambda x, w: library.rms_norm_fn(x, w, None, eps=EPS)
    if workload is ADD_RMS:
        return lambda x, r, w: library.rms_norm_fn(x, w, None, residual=r, eps=EPS, prenorm=True)
    return None


def _needs(*modules: str) -> Callable[[str], str | None]:
    """A GPU, and these modules."""

    def missing(device: str) -> str | None:
        if device != "cuda":
            return "needs a GPU"
        try:
            for module in modules:
                import_module(module)
        except Exception as error:  # a library for another version of PyTorch may raise anything
            return f"not installed ({type(error).__name__}: {error})"
        return None

    return missing


def _always(device: str) -> str | None:
    return None


def build(rival: Rival, workload: Workload) -> Forward:
    function = rival.build(workload)
    if function is None:
        raise MissingFunctionError(f"{rival.name} has no {workload.name}")
    return function


class MissingFunctionError(NotImplementedError):
    """A rival does not do this."""


OURS = Rival("warpnorm", _ours, _always)
EAGER = Rival("eager", _eager, _always)
ALL = (
    EAGER,
    Rival("torch.compile", _compiled, _always),
    Rival("liger", _liger, _needs("liger_kernel.ops")),
    Rival("quack", _quack, _needs("quack.rmsnorm")),
    Rival("apex", _apex, _needs("apex.normalization.fused_layer_norm", "fused_layer_norm_cuda")),
    Rival("flash-attn", _flash_attention, _needs("flash_attn.ops.triton.layer_norm")),
)


def chosen(names: Sequence[str] | None) -> tuple[Rival, ...]:
    known = {rival.name: rival for rival in ALL}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"no rival is called {', '.join(unknown)}; there are {', '.join(known)}")
    return ALL if names is None else tuple(known[name] for name in names)
