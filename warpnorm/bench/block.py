"""A stack of transformer blocks, forward and backward: what norms are worth inside a model. Each norm has a residual add
before it. Three kinds of norms, each run as it is and compiled whole."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from warpnorm import functional
from warpnorm.bench.cases import EPS, STEP, BenchCase, Workload, add_rms_norm
from warpnorm.fuse import fuse

BLOCKS, HEAD_DIM = 2, 64
AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def shapes(width: int) -> list[tuple[int, ...]]:
    """Of each block: a norm, queries, keys and values packed, what follows attention, a norm, up and down. Then a norm."""
    block = [(width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width)]
    return [*block * BLOCKS, (width,)]


def stack(add_norm: AddNorm, x: torch.Tensor, residual: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    for i in range(BLOCKS):
        before, packed, out, between, up, down = parameters[6 * i : 6 * i + 6]
        y, residual = add_norm(x, residual, before)
        heads = F.linear(y, packed).unflatten(-1, (3, -1, min(HEAD_DIM, y.shape[-1]))).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y, residual = add_norm(F.linear(attended.transpose(1, 2).flatten(2), out), residual, between)
        x = F.linear(F.gelu(F.linear(y, up)), down)
    return add_norm(x, residual, parameters[-1])[0]


def _add_our_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    h = x + residual
    return functional.rms_norm(h, h.shape[-1:], weight, EPS), h


add_fused_norm: Any = fuse(add_rms_norm)


def plain(*operands: torch.Tensor) -> torch.Tensor:
    return stack(add_rms_norm, *operands)


def ours(*operands: torch.Tensor) -> torch.Tensor:
    return stack(_add_our_norm, *operands)


def fused(*operands: torch.Tensor) -> torch.Tensor:
    return stack(add_fused_norm, *operands)


def _workload(name: str, rival: str) -> Workload:
    return Workload(name, plain, 2, len(shapes(1)), 3, 3, parameter_shapes=shapes, rivals=(rival,))


BLOCK, FUSED_BLOCK = (_workload(name, "eager") for name in ("block", "fused_block"))
COMPILED_BLOCK, COMPILED_FUSED_BLOCK = (
    _workload(name, "torch.compile") for name in ("compiled_block", "compiled_fused_block")
)
WHY = {
    BLOCK: "norms as modules, nothing compiled",
    FUSED_BLOCK: "the residual add in the norm, nothing compiled",
    COMPILED_BLOCK: "norms as modules in a compiled model",
    COMPILED_FUSED_BLOCK: "the residual add in the norm, in a compiled model",
}
FUNCTIONS = {BLOCK: ours, FUSED_BLOCK: fused, COMPILED_BLOCK: ours, COMPILED_FUSED_BLOCK: fused}
COMPILED = (COMPILED_BLOCK, COMPILED_FUSED_BLOCK)
GPU_SIZES = (((8, 1024, 2048), torch.bfloat16),)
CPU_SIZES = (((16, 64, 128), torch.float32), ((2, 256, 1024), torch.float32))


def cases(device: str, is_quick: bool) -> tuple[BenchCase, ...]:
    sizes = CPU_SIZES if device == "cpu" else GPU_SIZES
    return tuple(
        BenchCase(workload, STEP, (max(shape[0] // (8 if is_quick else 1), 1), *shape[1:]), dtype, why)
        for shape, dtype in sizes
        for workload, why in WHY.items()
    )
