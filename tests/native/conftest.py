"""The contracts of the kernels by native code: what they promise holds on a CPU too. Memory is poisoned with NaN."""

from collections.abc import Iterator

import pytest
import torch

from warpnorm import settings
from warpnorm.cpu import build

if not build.is_there() or settings.is_interpreting():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture(autouse=True)
def native_on_poisoned_memory() -> Iterator[None]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty is then filled with NaN
    with settings.override(route="native"):
        yield
    torch.use_deterministic_algorithms(False)
