"""Rows held by teams: programs that run at the same time and exchange statistics or sums. As in test_team_gpu.py: sizes,
launch after launch, two streams at once, graphs, and one program more than fits."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.channel_plan_contract import check
from kernel_contracts.channel_running import BATCH, GROUPS, ONE_GROUP, Layout, Mode
from warpnorm.codegen.kernel import BoundKernel
from warpnorm.plan import device as devices
from warpnorm.plan.plan import COLUMN, HELD, Plan

LAYOUTS = (
    Layout("tails", (13, 6, 5, 8), why="neither lines nor columns fill their blocks"),
    Layout("full", (16, 8, 8, 8), why="all do"),
    Layout("many", (200, 3, 4, 8), why="more programs than a warp has lanes"),
    Layout("half_vectors", (26, 6, 6, 10), why="lines of halves that begin at 8 bytes, not at 16"),
    Layout("elements", (24, 6, 7, 7), why="and at any"),
)
PLANS = (
    Plan(HELD, 1, 16, 1, programs=200, splits=256, recomputes=True),
    Plan(HELD, 2, 64, 2, programs=264, splits=256, recomputes=True),
    Plan(HELD, 4, 32, 4, programs=100, splits=256, recomputes=True, stages=2),
    Plan(HELD, 8, 8, 1, programs=132, splits=32, stages=3),
    Plan(HELD, 2, 64, 2, programs=264, splits=256, stages=2, ahead=1),
    Plan(HELD, 8, 8, 1, programs=132, splits=32, ahead=1, recomputes=True),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mode", [BATCH, GROUPS, ONE_GROUP], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_every_team(plan: Plan, layout: Layout, mode: Mode, dtype: torch.dtype, device: str) -> None:
    plan = replace(plan, chunks=-(-prod(layout.shape[2:]) // plan.block_cols))
    check(layout, mode, dtype, device, plan, plan)


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)


def prepared(samples: int, device: str) -> list[torch.Tensor]:
    x = torch.randn(samples, 64, 28, 28, device=device).half()
    return [t.requires_grad_() for t in (x, *torch.randn(2, 64, device=device))]


def grad_of(output: torch.Tensor) -> torch.Tensor:
    """Any, but the same for both: one that the norm's gradient is not zero for."""
    numbers = torch.arange(output.numel(), device=output.device) % 1013
    return (numbers.view(output.shape) / 500 - 1).to(output.dtype)


def both(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    output = warpnorm.batch_norm(tensors[0], None, None, *tensors[1:], training=True)
    assert isinstance(output, torch.Tensor)
    return [output.detach(), *torch.autograd.grad(output, tensors, grad_of(output))]


def expected(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    output = norm(*(t.double() for t in tensors))
    return [output.detach(), *torch.autograd.grad(output, tensors, grad_of(output))]


def assert_close(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(found, right, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < 2e-3, error


def test_it_is_chosen() -> None:
    x, w, b = (t.to("meta").requires_grad_() for t in prepared(32, "cpu"))
    found = warpnorm.explain(norm, x, w, b, target="sm_90")
    assert (found.forward.plan.pattern, found.backward.plan.pattern) == (HELD, HELD)


@pytest.mark.parametrize("size", [7, 14])
def test_odd_images_of_different_batches(size: int, device: str) -> None:
    """By a program each, by teams, and of 7 x 7, where there are many, across positions."""
    for samples in (4, 31, 32, 33, 64, 200, 8):
        x = torch.randn(samples, 96, size, size, device=device).half()
        tensors = [t.requires_grad_() for t in (x, *torch.randn(2, 96, device=device))]
        found = both(tensors)
        assert_close(found, expected(tensors))
        assert all(a.equal(b) for a, b in zip(found, both(tensors), strict=True))


def test_many_launches_of_different_batches(device: str) -> None:
    for samples in (32, 8, 5, 64, 32, 200, 7, 32):
        tensors = prepared(samples, device)
        found = both(tensors)
        assert_close(found, expected(tensors))
        assert all(a.equal(b) for a, b in zip(found, both(tensors), strict=True))


def test_two_streams_at_once(device: str) -> None:
    sets = [prepared(64, device), prepared(48, device)]
    right = [both(tensors) for tensors in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    found: list[Any] = [[], []]
    for _ in range(30):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(both(sets[i]))
    torch.cuda.synchronize()
    for i, one in enumerate(right):
        for results in found[i]:
            assert all(a.equal(b) for a, b in zip(results, one, strict=True))


def test_beside_other_work(device: str) -> None:
    """A matrix product on another stream, which leaves room for some programs of a team at first."""
    tensors = prepared(64, device)
    right = both(tensors)
    a = torch.randn(8192, 8192, device=device).half()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(stream):
            a @ a
        assert all(x.equal(y) for x, y in zip(both(tensors), right, strict=True))
    torch.cuda.synchronize()


def test_graphs(device: str) -> None:
    """Also beside each other: each launch of a graph has a mailbox of its own."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensors = prepared(64, device)
        right = both(tensors)
        graphs, results = [], []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                results.append([both(tensors) for _ in range(3)])
            graphs.append(graph)
    torch.cuda.synchronize()
    others = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, other in zip(graphs, others, strict=True):
            with torch.cuda.stream(other):
                graph.replay()
    torch.cuda.synchronize()
    for of_graph in results:
        for found in of_graph:
            assert all(a.equal(b) for a, b in zip(found, right, strict=True))


def test_a_program_more_than_fits(device: str) -> None:
    """Is refused, and nothing hangs."""
    units = torch.cuda.get_device_properties(device).multi_processor_count
    layout = Layout("wide", (256, 16, 8, 8), why="as many programs as there are samples")
    plan = Plan(HELD, 1, 64, 32, programs=2 * units + 300, splits=256, chunks=1)
    with pytest.raises(RuntimeError, match="cooperative"):
        check(layout, BATCH, torch.float16, device, plan, plan)
    torch.cuda.synchronize()


def test_a_device_that_refuses_teams(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once; then another plan gives the result, and `explain` tells of that."""
    monkeypatch.setattr(devices, "_without_teams", set())
    tensors = prepared(64, device)
    asked = []
    launch = BoundKernel.launch

    def refuse(kernel: BoundKernel, *arguments: Any) -> None:
        if kernel.kernel.fn.__name__.startswith("held"):
            asked.append(kernel)
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
        launch(kernel, *arguments)

    monkeypatch.setattr(BoundKernel, "launch", refuse)
    running = [torch.zeros(64, device=device), torch.ones(64, device=device)]
    output = warpnorm.batch_norm(tensors[0], *running, *tensors[1:], training=True)
    assert isinstance(output, torch.Tensor)
    found = [output.detach(), *torch.autograd.grad(output, tensors, grad_of(output))]
    assert_close(found, expected(tensors))
    mean = tensors[0].double().mean((0, 2, 3))
    torch.testing.assert_close(running[0].double(), 0.1 * mean, rtol=1e-4, atol=1e-6)
    assert len(asked) == 1
    plan = warpnorm.explain(norm, *tensors).forward.plan
    assert plan.pattern == COLUMN
