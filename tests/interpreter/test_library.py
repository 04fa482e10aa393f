"""That the stand-in for the mathematical library keeps dtypes, broadcasts, and has all that kernels may call."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice as library

import warpnorm
from interpreter.library import FUNCTIONS
from warpnorm.kernels import pointwise as ours

PACKAGE = Path(warpnorm.__file__).parent


@triton.jit
def power_kernel(x_ptr, y_ptr, out_ptr, exponent, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    offsets = rows[:, None] * COLS + cols[None, :]
    base = tl.load(x_ptr + offsets)
    by_one = library.pow(base, tl.full((1, 1), 2.0, base.dtype))
    by_column = library.pow(by_one, tl.load(y_ptr + cols)[None, :])
    by_number = library.pow(by_column, library.log2(exponent))
    root = library.pow(tl.load(y_ptr), 0.5)  # a value without a shape
    tl.store(out_ptr + offsets, by_number + root)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_shapes_are_broadcast_and_the_dtype_is_kept(dtype: torch.dtype) -> None:
    x, y = torch.rand(4, 64, dtype=dtype) + 0.5, torch.rand(64, dtype=dtype) + 0.5
    out = torch.empty_like(x)
    power_kernel[(1,)](x, y, out, 8.0, ROWS=4, COLS=64)
    expected = x.double().pow(2).pow(y.double()).pow(3) + y[0].double().sqrt()
    torch.testing.assert_close(out.double(), expected, rtol=8 * torch.finfo(dtype).eps, atol=0)


@triton.jit
def rint_kernel(x_ptr, out_ptr, COLS: tl.constexpr):
    cols = tl.arange(0, COLS)
    tl.store(out_ptr + cols, library.rint(tl.load(x_ptr + cols)))


def test_halves_are_rounded_to_even() -> None:
    x = torch.tensor([-1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 2.4, 2.6])
    out = torch.empty_like(x)
    rint_kernel[(1,)](x, out, COLS=8)
    assert out.tolist() == [-2.0, -0.0, 0.0, 2.0, 2.0, 4.0, 2.0, 3.0]


@triton.jit
def gelu_kernel(x_ptr, out_ptr, slope_ptr, COLS: tl.constexpr):
    cols = tl.arange(0, COLS)
    x = tl.load(x_ptr + cols)
    tl.store(out_ptr + cols, ours.quick_gelu(x))
    tl.store(slope_ptr + cols, ours.quick_gelu_slope(x))


def test_the_short_form_of_gelu_is_far_better_than_a_half() -> None:
    """In proportion to the result, also where that is small; a float16 rounds by 5e-4, and eager PyTorch does so once more
    than we do. So is its slope, except beside its zero."""
    x = torch.linspace(-13.0, 13.0, 1 << 14)
    found, slope = torch.empty_like(x), torch.empty_like(x)
    gelu_kernel[(1,)](x, found, slope, COLS=1 << 14)
    wide = x.double()
    share = torch.special.ndtr(wide)
    error = (found / (wide * share) - 1).abs()
    assert error[x > -2].max() < 1e-5
    assert error[x > -5].max() < 5e-5
    assert error[x > -6].max() < 4e-4
    true_slope = share + wide * torch.exp(-0.5 * wide * wide) / (2 * torch.pi) ** 0.5
    assert (slope - true_slope).abs().max() < 4e-6
    far = torch.tensor([float("-inf"), -1e30, -50.0, -20.0, 20.0, 1e30, float("inf"), float("nan")])
    gelu_kernel[(1,)](far, found, slope, COLS=8)
    true = torch.nn.functional.gelu(far[1:].double()).float()  # in float32 that of infinity is NaN on some processors
    torch.testing.assert_close(found[1:8], true, rtol=0, atol=1e-30, equal_nan=True)


@dataclass(frozen=True)
class Source:
    name: str
    path: str
    why: str


SOURCES = [
    Source("table", "trace/operators.py", "a row of it is written into the generated source"),
    Source("ours", "kernels/pointwise.py", "and calls these functions, which call the library themselves"),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_every_function_that_kernels_call_is_there(source: Source) -> None:
    called = set(re.findall(r"\blibrary\.(\w+)\(", (PACKAGE / source.path).read_text()))
    assert called, source.why
    assert called <= set(FUNCTIONS)
    assert all(hasattr(library, name) for name in called), "and the compiled kernels have it"
