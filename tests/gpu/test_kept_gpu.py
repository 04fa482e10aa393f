"""What backward keeps as halves of a tile from its first visit to its second, in every pattern that does: as accurate as the
one rule asks, also far from zero, where what is kept is close to nothing or to one."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.fuse_operators_contract import check_fused

ROWS = 40


def rms_of_gelu(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(F.gelu(x + bias), x.shape[-1:], weight)


def layer_of_gelu(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x), x.shape[-1:], weight, bias)


def of_two(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One in what is normalized, another beside it."""
    return F.rms_norm(F.gelu(x) + x, x.shape[-1:], weight) * F.gelu(x * 0.5 + bias)


def by_tanh(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(F.gelu(x + bias, approximate="tanh"), x.shape[-1:], weight)


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cols", [2048, 4096, 8192, 16384])
@pytest.mark.parametrize("function", [rms_of_gelu, layer_of_gelu, of_two, by_tanh], ids=lambda f: f.__name__)
def test_gradients_through_what_is_kept(
    function: Callable[..., torch.Tensor], cols: int, dtype: torch.dtype, scale: float, device: str
) -> None:
    def make(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        shapes = ((ROWS, cols), (cols,), (cols,))
        return [
            (torch.randn(shape, generator=generator, device=device) * size).to(dtype)
            for shape, size in zip(shapes, (scale, scale, 1.0), strict=True)
        ]

    check_fused(warpnorm.fuse(function), function, make, 2)


@pytest.mark.parametrize("cols", [4096, 8192, 16384])
def test_the_same_bits_twice_and_among_few_rows(cols: int, device: str) -> None:
    fused = warpnorm.fuse(rms_of_gelu)
    x = torch.randn(300, cols, device=device, dtype=torch.bfloat16)
    bias, weight = (torch.randn(cols, device=device, dtype=torch.bfloat16) for _ in range(2))
    grad = torch.randn_like(x)

    def gradient(rows: int) -> torch.Tensor:
        leaf = x[:rows].clone().requires_grad_()
        (found,) = torch.autograd.grad(fused(leaf, bias, weight), leaf, grad[:rows])
        return found

    assert gradient(300).equal(gradient(300))
    assert gradient(300)[:7].equal(gradient(7))
