"""`torch.compile` with graphs of its own: what is kept between calls does not lie in their memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm.launch import shared

Function = Callable[..., torch.Tensor]


def add_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return warpnorm.rms_norm(x * 2.0, x.shape[-1:], weight)


def batch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return warpnorm.batch_norm(x, None, None, weight, training=True)


def group_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return warpnorm.group_norm(x, 4, weight)


@warpnorm.fuse
def fused(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, training=True) + x)


CASES: dict[str, tuple[Function, tuple[int, ...], int]] = {
    "row": (add_rms_norm, (300, 512), -1),
    "team": (add_rms_norm, (6, 65_536), -1),
    "held": (batch_norm, (16, 64, 16, 16), 1),
    "by_turns": (batch_norm, (64, 256, 56, 56), 1),
    "groups": (group_norm, (8, 64, 32, 32), 1),
    "groups_last": (group_norm, (8, 64, 32, 32), 1),
    "fused": (fused, (16, 64, 30, 30), 1),
}


@pytest.mark.unpoisoned
@pytest.mark.parametrize("name", CASES)
def test_reduce_overhead(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_mailboxes", "_lenders"):
        monkeypatch.setattr(shared, table, {})  # so that they are made while a graph is warmed up
    function, shape, dim = CASES[name]
    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    for step in range(6):
        torch.manual_seed(step)
        x, weight = torch.randn(shape, device=device), torch.randn(shape[dim], device=device)
        if name.endswith("_last"):
            x = x.to(memory_format=torch.channels_last)
        grad = torch.randn_like(x)
        found, expected = [], []
        for results, call in ((found, compiled), (expected, function)):
            torch.compiler.cudagraph_mark_step_begin()
            leaves = [t.detach().requires_grad_() for t in (x, weight)]
            y = call(*leaves)
            results += [t.clone() for t in (y, *torch.autograd.grad(y, leaves, grad))]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
