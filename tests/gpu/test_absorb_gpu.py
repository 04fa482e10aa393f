"""The residual add in a graph of Inductor's, on a GPU."""

import pytest

from kernel_contracts.absorb_contract import *  # noqa: F403
from warpnorm import absorb


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorb, "DEVICES", ("cpu", "cuda"))
