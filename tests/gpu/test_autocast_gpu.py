"""Norms and fused functions under autocast: the dtypes that PyTorch gives, and its values but for roundings."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "layer_norm": lambda x, w: F.layer_norm(x * 2, x.shape[-1:]),
    "rms_norm": lambda x, w: F.rms_norm(x * 2, x.shape[-1:]),
    "group_norm": lambda x, w: F.group_norm(x * 2, 4, w),
    "instance_norm": lambda x, w: F.instance_norm(x * 2, weight=w),
    "batch_norm": lambda x, w: F.batch_norm(x * 2, None, None, w, training=True),
    "activation": lambda x, w: F.layer_norm(F.softplus(x), x.shape[-1:]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_plain_pytorch(name: str, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(4, 8, 6, 64, device=device).to(dtype)
    weight = torch.randn(8, device=device, dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        expected = FUNCTIONS[name](x, weight)
        found = warpnorm.fuse(FUNCTIONS[name])(x, weight)
    assert found.dtype == expected.dtype
    tolerance = 1e-3 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


NORMS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda library, x, w: library.layer_norm(x, x.shape[-1:], w),
    "rms_norm": lambda library, x, w: library.rms_norm(x, x.shape[-1:], w),
    "group_norm": lambda library, x, w: library.group_norm(x, 4),
    "batch_norm": lambda library, x, w: library.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_alone(name: str, dtype: torch.dtype, device: str) -> None:
    """Before, inside and after: what was seen without autocast is not what runs with it."""
    x = torch.randn(4, 8, 6, 64, device=device).to(dtype).requires_grad_()
    weight = torch.randn(64, device=device)
    for is_enabled in (False, True, True, True, False):
        with torch.autocast("cuda", torch.bfloat16, enabled=is_enabled):
            found = NORMS[name](warpnorm, x, weight)
            expected = NORMS[name](F, x, weight if is_enabled else weight.to(dtype))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        grad = torch.randn_like(expected)
        ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (found, expected))
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
