"""What is measured, each with its reason."""

from dataclasses import dataclass
from math import prod

import torch

from warpnorm.norms import LAYER_NORM, RMS_NORM, Norm

FORWARD, BACKWARD = "forward", "backward"
DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class BenchCase:
    """A norm over the last dimension, with all its parameters."""

    norm: Norm
    direction: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    why: str

    @property
    def name(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.norm.name} {self.direction} {shape} {DTYPE_NAMES[self.dtype]}"

    @property
    def least_bytes(self) -> int:
        """Every input read once, every output written once; parameters and statistics are small beside them."""
        tensors = 2 if self.direction == FORWARD else 3
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


def grid(elements: int) -> tuple[BenchCase, ...]:
    """Both norms and directions over the widths of language models, at a fixed number of bytes: 2 x `elements`."""
    half, single = torch.bfloat16, torch.float32
    rows = [(cols, half, why) for cols, why in WIDTHS] + [(4096, single, "full precision")]
    return tuple(
        BenchCase(norm, direction, _rows(elements, cols, dtype), dtype, why)
        for direction in (FORWARD, BACKWARD)
        for norm in (RMS_NORM, LAYER_NORM)
        for cols, dtype, why in rows
    )


CPU_SHAPES = (((4096, 4096), "far larger than any cache"), ((8, 64), "nothing but the cost of a call"))


def all_cases(device: str, is_quick: bool) -> tuple[BenchCase, ...]:
    """On a GPU 2^27 half-precision elements, several times any L2; on a CPU 2^22, and two shapes of their own."""
    exponent = 27 if device == "cuda" else 22
    cases = grid(1 << (exponent - 3 if is_quick else exponent))
    if device == "cpu":
        cases += tuple(
            BenchCase(norm, direction, shape, torch.float32, why)
            for direction in (FORWARD, BACKWARD)
            for norm in (RMS_NORM, LAYER_NORM)
            for shape, why in CPU_SHAPES
        )
    return cases
