"""The checks of tensors past 2^31 elements, which only a GPU has room for, of small ones: they hold, and see a fault."""

from dataclasses import replace

import pytest
import torch

from kernel_contracts import limits
from kernel_contracts.running import NORMS
from warpnorm.norms import Norm

ROWS = 3001
SHAPES = {
    "images": (7, 4, 6, 8),
    "channels_last": (7, 4, 6, 8),
    "samples": (333, 4),
    "one_channel": (9, 1, 8, 8),
    "groups": (3, 8, 5, 5),
    "one_group": (1, 2, 300),
}
SMALL = [replace(batch, shape=SHAPES[batch.name]) for batch in limits.BATCHES]


@pytest.fixture(autouse=True)
def several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLICE", 1 << 9)


@pytest.fixture
def wrong_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last element of the input's gradient is off."""
    right = torch.autograd.grad

    def grad(*args: object) -> tuple[torch.Tensor, ...]:
        gradients = right(*args)  # type: ignore[arg-type]
        last = tuple(size - 1 for size in gradients[0].shape)
        gradients[0][last] += 0.1
        return gradients

    monkeypatch.setattr(torch.autograd, "grad", grad)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_one_column(norm: Norm, device: str) -> None:
    limits.check_one_column(norm, ROWS, device)


@pytest.mark.parametrize("batch", SMALL, ids=lambda batch: batch.name)
def test_by_channel(batch: limits.Batch, device: str) -> None:
    limits.check_batch(batch, device)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_a_wrong_row_is_seen(norm: Norm, device: str, wrong_end: None) -> None:
    with pytest.raises(AssertionError, match="not close"):
        limits.check_one_column(norm, ROWS, device)


@pytest.mark.parametrize("batch", SMALL, ids=lambda batch: batch.name)
def test_a_wrong_element_is_seen(batch: limits.Batch, device: str, wrong_end: None) -> None:
    with pytest.raises(AssertionError, match="not close"):
        limits.check_batch(batch, device)
