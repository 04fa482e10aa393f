"""The tests of this folder run on one thread each: two workers on two cores, whose spinning threads would triple the
time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from warpnorm import pipeline, settings


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
