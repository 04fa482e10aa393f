"""What is measured, each with its reason."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

FORWARD, BACKWARD = "forward", "backward"
DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


EPS = 1e-5


@dataclass(frozen=True)
class Workload:
    """An ordinary PyTorch function of `full` tensors of the case's shape, then of `columns` tensors of its last dimension.
    `forward_tensors` and `backward_tensors` are how many full-sized tensors must be moved at least."""

    name: str
    function: Callable[..., Any]
    full: int
    columns: int
    forward_tensors: int
    backward_tensors: int


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], weight, EPS), h


def _swish_layer_norm(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.silu(x) * r, x.shape[-1:], weight, bias, EPS)


def _gelu_rms_norm(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(F.gelu(x + bias), x.shape[-1:], weight, EPS)


# Backward of the sum needs no more than the sum, and gives both of its terms the same gradient.
RMS = Workload("rms_norm", _rms_norm, 1, 1, 2, 3)
LAYER = Workload("layer_norm", _layer_norm, 1, 2, 2, 3)
ADD_RMS = Workload("add_rms_norm", _add_rms_norm, 2, 1, 4, 4)
SWISH_LAYER = Workload("swish_layer_norm", _swish_layer_norm, 2, 2, 3, 5)
GELU_RMS = Workload("gelu_rms_norm", _gelu_rms_norm, 1, 2, 2, 3)
PLAIN = (RMS, LAYER)


@dataclass(frozen=True)
class BenchCase:
    workload: Workload
    direction: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    why: str

    @property
    def name(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.workload.name} {self.direction} {shape} {DTYPE_NAMES[self.dtype]}"

    @property
    def least_bytes(self) -> int:
        """Every input read once, every output written once; parameters and statistics are small beside them."""
        workload = self.workload
        tensors = workload.forward_tensors if self.direction == FORWARD else workload.backward_tensors
        return tensors * prod(self.shape) * self.dtype.itemsize


def _rows(elements: int, cols: int, dtype: torch.dtype) -> tuple[int, int]:
    return elements * 2 // dtype.itemsize // cols, cols


WIDTHS = (
    (128, "the head dimension of QK-norm"),
    (1024, "small models"),
    (2048, "models of one to three billion parameters"),
    (4096, "models of seven billion parameters"),
    (8192, "models of seventy billion parameters"),
    (16384, "the largest models"),
    (65536, "rows wider than a program's registers"),
)


FUSED = (
    (ADD_RMS, "the residual stream before each norm of a language model"),
    (SWISH_LAYER, "a gate and a norm"),
    (GELU_RMS, "an activation with a bias, and a norm"),
)


def grid(elements: int) -> tuple[BenchCase, ...]:
    """Norms and fused forms, in both directions, over the widths of language models, each of 2 x `elements` bytes."""
    half, single = torch.bfloat16, torch.float32
    rows = [(cols, half, why) for cols, why in WIDTHS] + [(4096, single, "full precision")]
    plain = tuple(
        BenchCase(workload, direction, _rows(elements, cols, dtype), dtype, why)
        for direction in (FORWARD, BACKWARD)
        for workload in PLAIN
        for cols, dtype, why in rows
    )
    fused = tuple(
        BenchCase(workload, direction, _rows(elements, cols, half), half, f"{what}; {why}")
        for direction in (FORWARD, BACKWARD)
        for workload, what in FUSED
        for cols, why in WIDTHS
        if 1024 <= cols <= 16384
    )
    return plain + fused


CPU_SHAPES = (((4096, 4096), "far larger than any cache"), ((8, 64), "nothing but the cost of a call"))


def all_cases(device: str, is_quick: bool) -> tuple[BenchCase, ...]:
    """On a GPU 2^27 half-precision elements, several times any L2; on a CPU 2^22, and two shapes of their own."""
    exponent = 27 if device == "cuda" else 22
    cases = grid(1 << (exponent - 3 if is_quick else exponent))
    if device == "cpu":
        cases += tuple(
            BenchCase(workload, direction, shape, torch.float32, why)
            for direction in (FORWARD, BACKWARD)
            for workload in PLAIN
            for shape, why in CPU_SHAPES
        )
    return cases
