"""The kernels on a real GPU; skipped where there is none. Memory is poisoned with NaN."""

from collections.abc import Iterator

import pytest
import torch

from selection import select_sanitized
from warpnorm import settings

if settings.is_interpreting() or not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select_sanitized(config, items, "gpu")


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms("unpoisoned" not in request.keywords)  # torch.empty is then filled with NaN
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
