"""Fused functions under autocast: the dtypes that PyTorch gives, and its values but for roundings."""

from collections.abc import Callable

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
