"""The contracts of the kernels by native code: what they promise holds on a CPU too. Memory is poisoned with NaN.

Nearly every case is compiled, so that a run has one of 64 of the contracts' cases, and of nearly each test one at
least; WARPNORM_TEST_ALL=1 has all."""

from collections.abc import Iterator

import pytest
import torch

from selection import select
from warpnorm import settings
from warpnorm.cpu import build, fallback

if not build.is_there() or settings.is_interpreting():
    collect_ignore_glob = ["test_*.py"]


CONTRACTS = ("test_contracts.py", "test_channels.py")
LONG = (  # each of their cases compiles many kernels
    "test_every_row_of_the_operator_table_is_reached", "test_random_functions",
    "test_fused_several_normalized_dimensions",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(config, items, "native", CONTRACTS, one_in=64, every_but=LONG)


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two workers share two cores, and the contracts' cases are too small for a second thread."""
    before = torch.get_num_threads()
    if request.path.name in CONTRACTS:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device() -> str:
    return "cpu"


def refuse(*_: object) -> None:
    raise AssertionError("the compiler refused")


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler does not build would be right, by PyTorch's operators, and nobody would see it."""
    for kind in (fallback.FallbackForward, fallback.FallbackBackward):
        monkeypatch.setattr(kind, "__call__", refuse)


@pytest.fixture(autouse=True)
def native_on_poisoned_memory() -> Iterator[None]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty is then filled with NaN
    with settings.override(route="native"):
        yield
    torch.use_deterministic_algorithms(False)
