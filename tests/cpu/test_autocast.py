"""Under autocast the norms return the dtypes that PyTorch's own return: on a CPU those of their inputs, on a GPU float32 for
what this version of PyTorch lists so. Tensors of a GPU are fakes here; `tests/gpu/test_autocast_gpu.py` has real ones."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import warpnorm

NORMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda library, x: library.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda library, x: library.rms_norm(x, x.shape[-1:]),
    "batch_norm": lambda library, x: library.batch_norm(x, None, None, training=True),
    "group_norm": lambda library, x: library.group_norm(x, 4),
    "instance_norm": lambda library, x: library.instance_norm(x),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture
def gpu_autocast() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_of_a_gpu(name: str, dtype: torch.dtype, gpu_autocast: None) -> None:
    with FakeTensorMode():
        x = torch.empty(4, 8, 16, 64, device="cuda", dtype=dtype)
        assert NORMS[name](warpnorm, x).dtype == NORMS[name](F, x).dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_of_a_cpu(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, 16, 2048).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        expected = NORMS[name](F, x)
        for _ in range(2):  # the second one was seen before
            assert NORMS[name](warpnorm, x).dtype == expected.dtype
