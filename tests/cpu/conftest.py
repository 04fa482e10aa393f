"""The tests of this folder run on one thread each: two workers on two cores, whose spinning threads would triple the
time. Of files whose cases compile one by one, a run has a fourth of the cases, of each test one at least;
WARPNORM_TEST_ALL=1 has all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from selection import select
from warpnorm import pipeline, settings

COMPILING = (
    "test_absorb.py", "test_blocks.py", "test_channel_training.py", "test_compile.py", "test_export.py", "test_models.py",
    "test_recognise.py", "test_together.py", "test_torch_library.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(config, items, "cpu", COMPILING, one_in=4, keeps_lone=True, every_but=())


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with settings.override(cache_dir=tmp_path / "cache"):
        yield tmp_path / "cache"


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing that a test prepares is there for the next."""
    forget()
    yield
    forget()


def forget() -> None:
    from warpnorm.cpu import run

    run._function.cache_clear()
    pipeline.prepare_forward.cache_clear()
    pipeline.prepare_backward.cache_clear()
