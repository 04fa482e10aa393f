"""Contract: where memory ends in the middle of a call, at whichever allocation, it is PyTorch's error; inputs, running
statistics and gradients are as they were, and the next call is right."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import settings


@dataclass(frozen=True)
class Scarce:
    name: str
    ours: Callable[[], torch.nn.Module]
    theirs: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
    shape: tuple[int, ...]
    why: str
    is_last: bool = False


class Swish(torch.nn.Module):
    """A fused function with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(40))

    @warpnorm.fuse
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(F.silu(x), x.shape[-1:], self.weight)


def in_training(ours: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, ours.weight, ours.bias, training=True)


SCARCE = [
    Scarce("row", lambda: warpnorm.nn.LayerNorm(40), lambda m, x: F.layer_norm(x, (40,), m.weight, m.bias), (200, 40),
           "partial rows of gradients, and their sums"),
    Scarce("fused", Swish, lambda m, x: F.rms_norm(F.silu(x), (40,), m.weight), (200, 40), "of a function"),
    Scarce("channels", lambda: warpnorm.nn.BatchNorm2d(3), in_training, (2, 3, 4, 5), "running statistics, by rows"),
    Scarce("channels_last", lambda: warpnorm.nn.BatchNorm2d(3), in_training, (2, 3, 4, 5),
           "and across them, where they are written before the results", is_last=True),
]  # fmt: skip


class Allocations:
    """The one with this number fails, if there are so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing, self.seen = -1, 0
        for name in ("empty", "zeros", "empty_like", "zeros_like"):
            monkeypatch.setattr(torch, name, partial(self.allocate, getattr(torch, name)))

    def allocate(self, make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen += 1
        if self.seen - 1 == self.failing:
            raise torch.OutOfMemoryError(f"allocation {self.failing}")
        return make(*args, **kwargs)

    def fail(self, which: int) -> None:
        self.failing, self.seen = which, 0

    def until_done(self, work: Callable[[], Any], unchanged: Callable[[], None], least: int) -> Any:
        """Of `work` with one failure at each allocation, then with none."""
        for which in count():
            self.fail(which)
            try:
                found = work()
            except torch.OutOfMemoryError:
                unchanged()
            else:
                break
        assert which >= least
        self.failing = -1
        return found


@pytest.mark.parametrize("case", SCARCE, ids=lambda case: case.name)
def test_memory_ends_at_any_allocation(case: Scarce, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(case.shape, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if case.is_last else x
    grad = torch.randn_like(x)
    x.requires_grad_()
    with settings.override(launcher="python"):  # the compiled one has allocations of its own
        case.ours().to(device)(x).backward(grad)  # code is there before memory ends
        x.grad = None
        module = case.ours().to(device)
        before = [t.clone() for t in (x.detach(), *module.state_dict().values())]
        versions = [t._version for t in (x, *module.state_dict().values())]

        def unchanged() -> None:
            now = (x.detach(), *module.state_dict().values())
            assert all(map(torch.equal, now, before))
            assert [t._version for t in (x, *module.state_dict().values())] == versions
            assert all(t.grad is None for t in (x, *module.parameters()))

        allocations = Allocations(monkeypatch)
        output = allocations.until_done(lambda: module(x), unchanged, least=2)
        before = [t.clone() for t in (x.detach(), *module.state_dict().values())]
        versions = [t._version for t in (x, *module.state_dict().values())]
        allocations.until_done(lambda: output.backward(grad, retain_graph=True), unchanged, least=1)
    leaves = [x, *module.parameters()]
    found = [output.detach(), *(t.grad for t in leaves)]
    expected = case.theirs(module, x)
    right = [expected.detach(), *torch.autograd.grad(expected, leaves, grad)]
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    if case.name.startswith("channels"):
        mean = x.detach().mean((0, 2, 3))
        torch.testing.assert_close(module.running_mean, 0.1 * mean, rtol=1e-4, atol=1e-5)
        assert int(module.num_batches_tracked) == 1
