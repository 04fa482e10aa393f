"""Contract: a fused function has PyTorch's dtypes. Integers wrap around, what is written in place keeps its own, a number is
rounded where PyTorch rounds it: to what it is compared with, and to the tensor that is filled with it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.fuse_contract import layer

Tensors = tuple[torch.Tensor, ...]
ROWS, COLS = 8, 96


def added_in_place(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    kept = small.clone()
    kept += number
    return layer(x + kept), kept


def multiplied_in_place(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    kept = (small - 128).to(torch.int8)
    kept.mul_(number)
    return layer(x), kept


def answered_in_place(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    kept = x.clone()
    kept.logical_and_(number > 100)
    return layer(x - kept), kept + kept, kept - kept


def added_to_halves(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    kept = number.half()
    kept.add_(x)
    return layer(x), kept.float()


def hashed(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    mask = number * 6364136223846793005 > 0
    return layer(x), mask, number * 5 - (1 << 62), -number * (1 << 61)


def cast_from_integers(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    large = number + (1 << 24)
    return layer(x), large.float() - 16777216, number.bfloat16() - 256, number.half() * 3, x.double()


def halves_of_integers(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    return layer(x), number.bfloat16().float(), (number * 5).half().float()


def constants(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    filled = torch.empty_like(x, dtype=torch.bfloat16).fill_(0.3).float()
    whole = torch.full((), 0.3, dtype=torch.bfloat16, device=x.device).float()
    return layer(x), x * filled, number * whole


def returned_constants(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    integers = torch.full_like(x, (1 << 24) + 1, dtype=torch.int64), torch.full_like(x, -3, dtype=torch.int8)
    return layer(x), *integers, torch.ones_like(x, dtype=torch.bool), torch.full_like(x, 0.1, dtype=torch.float16)


def wide_constants(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    return layer(x), torch.full_like(x, 1e300, dtype=torch.float64)


def compared_with_wide(x: torch.Tensor, small: torch.Tensor, number: torch.Tensor) -> Tensors:
    tenth = torch.full((1,), 0.1, dtype=torch.float64, device=x.device)
    return layer(x), torch.full_like(x, 0.1) == tenth, x.double() > 0.1


FUNCTIONS: tuple[Callable[..., Tensors], ...] = (
    added_in_place, multiplied_in_place, answered_in_place, added_to_halves, hashed, cast_from_integers, halves_of_integers,
    constants, returned_constants, wide_constants, compared_with_wide,
)  # fmt: skip


def operands(device: str) -> Tensors:
    number = torch.arange(ROWS * COLS, device=device).view(ROWS, COLS)
    x = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)).to(device)
    return x, (number % 256).to(torch.uint8), number


def check_results(function: Callable[..., Any], given: Tensors) -> None:
    """The first result is the norm's; all others have PyTorch's bits."""
    wanted, found = function(*given), warpnorm.fuse(function)(*given)
    assert [result.dtype for result in found] == [result.dtype for result in wanted]
    torch.testing.assert_close(found[0], wanted[0])
    for k, (result, other) in enumerate(zip(found[1:], wanted[1:], strict=True), 1):
        assert result.equal(other), k


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_fused_dtypes(function: Callable[..., Tensors], device: str) -> None:
    check_results(function, operands(device))


def thresholds(x: torch.Tensor) -> Tensors:
    return layer(x), x == 0.7, x > 0.1, x <= 257, x != 0.7, F.hardshrink(x, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_comparisons_with_numbers(dtype: torch.dtype, device: str) -> None:
    numbers = torch.tensor([0.7, 0.1, 257.0, -3.0], dtype=dtype, device=device)
    check_results(thresholds, (numbers.repeat(ROWS, COLS // 4),))


@pytest.mark.parametrize("cols", [COLS, 5000])
def test_fused_gradients_beside_wide_constants(cols: int, device: str) -> None:
    """Forward computed in float64 for the constant's sake, and backward in float32 read half of its statistics."""
    x = torch.randn(4, cols, device=device, requires_grad=True)

    def beside(x: torch.Tensor) -> Tensors:
        return layer(x), torch.full_like(x, 2.5, dtype=torch.float64)

    grad = torch.randn(4, cols, device=device)
    wanted = torch.autograd.grad(beside(x)[0], x, grad)[0]
    torch.testing.assert_close(torch.autograd.grad(warpnorm.fuse(beside)(x)[0], x, grad)[0], wanted)
