"""Memory that ends in the middle of a call: PyTorch's error, and nothing has changed."""

import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.scarce_contract import Allocations
from warpnorm import routing, settings
from warpnorm.cpu import build

pytestmark = pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")

COLS = 2048


@dataclass(frozen=True)
class Scarce:
    """A batch norm in training, by native code."""

    name: str
    is_last: bool  # channels lie side by side
    is_fused: bool
    why: str


SCARCE = [
    Scarce("contiguous", False, False, "along rows"),
    Scarce("channels_last", True, False, "across rows: running statistics are written before the results"),
    Scarce("fused", False, True, "elements of a row are kept"),
]


@pytest.mark.parametrize("case", SCARCE, ids=lambda c: c.name)
def test_memory_ends_at_every_allocation(case: Scarce, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    kind = warpnorm.nn.BatchNormReLU2d if case.is_fused else warpnorm.nn.BatchNorm2d
    ours, theirs = kind(16), torch.nn.BatchNorm2d(16)
    x = torch.randn(4, 16, 40, 40)
    x = x.contiguous(memory_format=torch.channels_last) if case.is_last else x
    grad = torch.randn_like(x)
    expected = torch.relu(theirs(x)) if case.is_fused else theirs(x)
    with settings.override(route="native", keep_bytes=0, launcher="python"):  # whose allocations are seen
        x.requires_grad_()
        ours.eval()(x).backward(grad)  # code is built before memory ends
        warm = kind(16)
        warm(x).backward(grad)
        x.grad = None
        ours.train().zero_grad()
        allocations = Allocations(monkeypatch)
        before = {name: value.clone() for name, value in (*ours.state_dict().items(), ("input", x.detach()))}
        versions = [value._version for value in (*ours.buffers(), x)]
        files = sorted(path.name for path in home.iterdir())
        for which in count():
            allocations.fail(which)
            try:
                output = ours(x)
            except torch.OutOfMemoryError:
                for name, value in (*ours.state_dict().items(), ("input", x.detach())):
                    assert torch.equal(value, before[name]), name
                assert versions == [value._version for value in (*ours.buffers(), x)]
            else:
                break
        assert which >= 2, "outputs and statistics at the least"
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(ours.running_var, theirs.running_var)
        for which in count():
            allocations.fail(which)
            try:
                output.backward(grad, retain_graph=True)
            except torch.OutOfMemoryError:
                assert x.grad is None
                assert all(parameter.grad is None for parameter in ours.parameters())
            else:
                break
        assert which >= 1
    assert sorted(path.name for path in home.iterdir()) == files
    allocations.fail(-1)
    leaf = x.detach().clone().requires_grad_()
    (torch.relu(theirs(leaf)) if case.is_fused else theirs(leaf)).backward(grad)
    torch.testing.assert_close(x.grad, leaf.grad, rtol=1e-4, atol=1e-5)


def test_memory_ends_in_one_of_two_threads(home: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """While the other averages its channels: running statistics are what they were."""
    load = build.load
    change = '#include "pointwise.h"\n#define malloc(size) (part == 1 ? 0 : malloc(size))\n'
    monkeypatch.setattr(build, "load", lambda text: load(text.replace('#include "pointwise.h"', change)))
    mean, variance = torch.randn(16), torch.rand(16) + 1
    before = mean.clone(), variance.clone()
    scale = 1.25 + os.getpid() * 1e-9  # one that no other test has code for

    @warpnorm.fuse
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(torch.sigmoid(x) * scale, mean, variance, training=True)

    torch.set_num_threads(2)
    try:
        with settings.override(route="native"), pytest.raises(torch.OutOfMemoryError, match="native code has to keep"):
            function(torch.randn(4, 16, 80, 80))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(mean, before[0])
    assert torch.equal(variance, before[1])
