"""Teams: programs that run at the same time and exchange sums. What tests/interpreter/test_teams.py has of small ones, here
as a GPU runs them: every size of a team, launch after launch, on two streams at once, and in graphs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.running import (
    NORMS,
    call_for,
    check_accuracy,
    gradient_for,
    operands_for,
    ours,
    run,
    run_planned,
)
from warpnorm import pipeline, settings
from warpnorm.norms import LAYER_NORM, RMS_NORM, Norm
from warpnorm.plan.plan import TEAM, Plan
from warpnorm.problem import View

PLANS = (
    Plan(TEAM, 1, 128, 2, programs=8, splits=2),
    Plan(TEAM, 1, 128, 4, programs=3, splits=2, stages=3),
    Plan(TEAM, 1, 64, 1, programs=5, splits=4, stages=2),
    Plan(TEAM, 1, 32, 1, programs=4, splits=8, stages=3),
    Plan(TEAM, 1, 16, 1, programs=2, splits=16),
    Plan(TEAM, 1, 32, 1, programs=3, splits=2, chunks=4, stages=3),
    Plan(TEAM, 1, 16, 1, programs=4, splits=8, chunks=2, stages=2),
    Plan(TEAM, 1, 64, 2, programs=3, splits=5, stages=2),
    Plan(TEAM, 1, 32, 1, programs=2, splits=3, chunks=4, stages=3),
    Plan(TEAM, 1, 64, 1, programs=3, splits=2, chunks=2, stages=3, keeps=True),
    Plan(TEAM, 1, 32, 1, programs=4, splits=4, chunks=2, stages=1, keeps=True),
    Plan(TEAM, 1, 128, 1, programs=3, splits=2, ahead=1, early=True, asks=True),
    Plan(TEAM, 1, 128, 1, programs=3, splits=2, ahead=1, keeps=True, asks=True),
    Plan(TEAM, 1, 8, 1, programs=2, splits=33, asks=True),
)


@pytest.mark.parametrize("cols", [200, 256])
@pytest.mark.parametrize("rows", [1, 2, 3, 11, 64])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_team(plan: Plan, norm: Norm, rows: int, cols: int, device: str) -> None:
    def make(seed: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(device)

    check_accuracy(norm, 1, make, lambda operands, grad: run_planned(norm, operands, grad, plan, plan))


@pytest.mark.parametrize("cols", [10_007, 20_001, 131_072])
def test_rows_of_one_value(cols: int, device: str) -> None:
    """Threads that merge the means of parts all find the same one, which is that value."""
    values = torch.randn(4096, 1, generator=torch.Generator().manual_seed(cols)).to(device)
    bias = torch.randn(cols, device=device)
    with settings.override(route="kernels"):
        output, mean, _ = warpnorm.layer_norm(values.expand(-1, cols), (cols,), bias=bias, return_stats=True)
    assert mean.equal(values)
    assert all(row.equal(bias) for row in output)


@pytest.mark.parametrize(("cols", "parts"), [(15_360, 4), (15_359, 4), (65_536, 16)])
def test_a_mean_far_above_the_deviation(cols: int, parts: int, device: str) -> None:
    """It is rounded, and so are those of its parts: each is off by 0.29 units on average. Found by fuzzing."""
    x = (torch.randn(256, cols, generator=torch.Generator().manual_seed(cols), dtype=torch.float64) * 0.1 + 1e4).float()
    with settings.override(route="kernels"):
        _, mean, _ = warpnorm.layer_norm(x.to(device), (cols,), return_stats=True)
    off = (mean.cpu().double() - x.double().mean(1, keepdim=True)) / 2**-10
    assert off.square().mean().sqrt() < 1.15 * ((1 + 1 / parts) / 12) ** 0.5


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_no_rows(norm: Norm, device: str) -> None:
    """A team begins with a row, and there is none: sums over rows are zero."""
    for cols, dtype in ((32768, torch.bfloat16), (65536, torch.float32), (24576, torch.bfloat16)):
        operands = operands_for(norm, torch.empty(0, cols, device=device, dtype=dtype), 1)
        with settings.override(route="kernels"):
            found = run(ours, norm, 1, operands, gradient_for(operands[0]))
        torch.cuda.synchronize()
        assert found.output.shape == (0, cols)
        assert all(not gradient.count_nonzero() for gradient in found.gradients)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_many_launches_of_different_lengths(norm: Norm, device: str) -> None:
    """The numbers of exchanges go on from launch to launch, and every launch leaves them elsewhere."""
    plan = PLANS[1]
    for rows in (1, 2, 3, 4, 5, 7, 100, 3, 1, 1000, 6):
        operands = operands_for(norm, torch.randn(rows, 256, device=device), 1)
        grad = gradient_for(operands[0])
        found = run_planned(norm, operands, grad, plan, plan)
        expected = run_planned(norm, operands, grad, None, Plan("row", 1, 256, 4, programs=3))
        torch.testing.assert_close(found.output, expected.output, rtol=1e-5, atol=1e-5)
        for a, b in zip(found.gradients, expected.gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        again = run_planned(norm, operands, grad, plan, plan)
        assert again.output.equal(found.output)
        assert all(a.equal(b) for a, b in zip(again.gradients, found.gradients, strict=True))


def test_two_streams_at_once(device: str) -> None:
    plan = Plan(TEAM, 1, 2048, 8, programs=33, splits=4, stages=2)
    operands = operands_for(RMS_NORM, torch.randn(4000, 8192, device=device).bfloat16(), 1)
    grad = gradient_for(operands[0])
    expected = _results(run_planned(RMS_NORM, operands, grad, plan, plan))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(_results(run_planned(RMS_NORM, operands, grad, plan, plan)))
    torch.cuda.synchronize()
    for results in found:
        assert all(a.equal(b) for a, b in zip(results, expected, strict=True))


def _results(run: Any) -> list[torch.Tensor]:
    return [run.output, *run.gradients]


def test_replayed_graphs(device: str) -> None:
    plan = Plan(TEAM, 1, 64, 2, programs=3, splits=4, stages=2)
    operands = operands_for(RMS_NORM, torch.randn(50, 256, device=device), 1)
    grad = gradient_for(operands[0])
    call = call_for(RMS_NORM, 1, *operands)
    _, statistics = pipeline.forward(call, operands)
    (output,), _ = pipeline.forward(call, operands, plan=plan)
    expected = pipeline.backward(call, operands, (grad,), statistics, (0, 1), plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [pipeline.forward(call, operands, plan=plan)[0][0] for _ in range(3)]
        results = [pipeline.backward(call, operands, (grad,), statistics, (0, 1), plan=plan) for _ in range(3)]
    for _ in range(4):
        for result in results:
            for gradient in result.values():
                gradient.fill_(float("nan"))
        for again in outputs:
            again.fill_(float("nan"))
        graph.replay()
        assert all(again.equal(output) for again in outputs)
        for result in results:
            assert all(result[i].equal(expected[i]) for i in (0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [20_480, 32_768, 65_536, 262_144])
def test_widths_that_choose_a_team(cols: int, norm: Norm, dtype: torch.dtype, device: str) -> None:
    input = torch.randn(300, cols, device=device).to(dtype)
    operands = operands_for(norm, input, 1)
    call = call_for(norm, 1, *operands)
    views = tuple(View.of(t) for t in (*operands, gradient_for(input)))
    wanted = tuple(range(len(operands)))
    assert pipeline.prepare_backward(call, views, input.device, (0,), wanted, None).plan.pattern == TEAM
    check_accuracy(norm, 1, lambda seed: torch.randn(30, cols, device=device).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [131_072, 200_008, 262_144, 500_000])
def test_widths_that_choose_a_team_forward(cols: int, norm: Norm, dtype: torch.dtype, device: str) -> None:
    if cols * dtype.itemsize > 1 << 20:
        pytest.skip("more than the largest team")
    input = torch.randn(3, cols, device=device).to(dtype)
    operands = operands_for(norm, input, 1)
    views = (*map(View.of, operands), View.of(torch.empty_like(input)))
    call = call_for(norm, 1, *operands)
    assert pipeline.prepare_forward(call, views, input.device, None).plan.pattern == TEAM
    check_accuracy(norm, 1, lambda seed: torch.randn(30, cols, device=device).to(dtype))
    check_accuracy(norm, 1, lambda seed: (1000 + torch.randn(5, cols, device=device)).to(dtype))
    whole = ours(norm, 1, *operands)
    for rows in (1, 2):
        assert ours(norm, 1, input[:rows], *operands[1:]).equal(whole[:rows])
    if norm is LAYER_NORM:
        assert not warpnorm.layer_norm(torch.full((2, cols), 3.3, device=device).to(dtype), (cols,)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [16_383, 33_001, 50_257])
def test_widths_whose_elements_are_moved_alone(cols: int, norm: Norm, dtype: torch.dtype, device: str) -> None:
    """So many rows that every team has several: it keeps them, asks for messages early and brings rows to L2."""
    input = torch.randn(1200, cols, device=device).to(dtype)
    operands = operands_for(norm, input, 1)
    call, views = call_for(norm, 1, *operands), tuple(map(View.of, operands))
    wanted = tuple(range(len(operands)))
    plans = (
        pipeline.prepare_forward(call, (*views, views[0]), input.device, None).plan,
        pipeline.prepare_backward(call, (*views, views[0]), input.device, (0,), wanted, None).plan,
    )
    assert all(plan.pattern == TEAM and 3 * plan.programs < 1200 for plan in plans)
    check_accuracy(norm, 1, lambda seed: torch.randn(1200, cols, device=device).to(dtype))


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [12_298, 12_300, 16_378, 30_522, 50_258, 50_260])
def test_wide_rows_that_begin_at_few_bytes(cols: int, norm: Norm, device: str) -> None:
    """Their elements are moved by pairs or fours; a row has the same bits wherever it begins."""
    input = torch.randn(300, cols, device=device).bfloat16()
    operands = operands_for(norm, input, 1)
    check_accuracy(norm, 1, lambda seed: torch.randn(300, cols, device=device).bfloat16())
    grad = torch.randn(300, cols, device=device).bfloat16()
    whole = run(ours, norm, 1, operands, grad)
    for row in (1, 2, 3):
        alone = run(ours, norm, 1, [input[row : row + 1], *operands[1:]], grad[row : row + 1])
        assert alone.output.equal(whole.output[row : row + 1])
        assert alone.gradients[0].equal(whole.gradients[0][row : row + 1])


@pytest.mark.parametrize("samples", [3, 300])
@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm], ids=lambda norm: norm.__name__)
def test_a_gradient_for_each_sample_where_elements_are_moved_alone(norm: Any, samples: int, device: str) -> None:
    """More samples than there are teams, or fewer: a team's messages go on from one to the next."""

    def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return norm(x, x.shape[-1:]) * scale

    rows, cols = 600 // samples, 50_257
    x = torch.randn(samples, rows, cols, device=device).bfloat16().requires_grad_()
    scale = torch.randn(samples, 1, 1, device=device).bfloat16().requires_grad_()
    grad = torch.randn(samples, rows, cols, device=device).bfloat16()
    found = torch.autograd.grad(warpnorm.fuse(scaled)(x, scale), (x, scale), grad)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, scale)]
    expected = torch.autograd.grad(scaled(*wide), wide, grad.double())
    for gradient, truth in zip(found, expected, strict=True):
        assert (gradient.double() - truth).norm() <= 4e-3 * truth.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", [512, 1000, 4096, 8192, 12_288, 24_576, 65_536, 131_072])
def test_a_sample_is_the_same_among_others(cols: int, dtype: torch.dtype, device: str) -> None:
    """Scale and shift of each sample, of another dtype too: loaded once, for each sample, or for each row."""

    def adaptive(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift

    fused = warpnorm.fuse(adaptive)
    x = torch.randn(4, 3, cols, device=device).bfloat16()
    scale, shift = (torch.randn(4, 1, cols, device=device).to(dtype) for _ in range(2))
    whole = fused(x, scale, shift)
    for samples, positions in ((1, 3), (2, 3), (4, 1), (3, 2), (1, 1)):
        some = fused(x[:samples, :positions], scale[:samples], shift[:samples])
        assert some.equal(whole[:samples, :positions]), (samples, positions)


def test_a_formula_in_chunks(device: str) -> None:
    def block(x: torch.Tensor, r: torch.Tensor, gain: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.silu(x) * r * gain, x.shape[-1:], w)

    shapes = ((70, 16_384), (70, 16_384), (70, 1), (16_384,))
    operands = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    wide = [o.detach().double().requires_grad_() for o in operands]
    grad = gradient_for(operands[0].detach())
    output, expected = warpnorm.fuse(block)(*operands), block(*wide)
    output.backward(grad)
    expected.backward(grad.double())
    for found, truth in zip((output, *(o.grad for o in operands)), (expected, *(o.grad for o in wide)), strict=True):
        assert (found.double() - truth).norm() <= 4e-3 * truth.norm()


def test_more_groups_than_teams(device: str) -> None:
    """One gradient for each of more samples than there are teams at the same time."""

    def adaptive(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:]) * (1 + scale)

    x = torch.randn(300, 2, 16_384, device=device, requires_grad=True)
    scale = torch.randn(300, 1, 16_384, device=device, requires_grad=True)
    grad = torch.randn(300, 2, 16_384, device=device)
    found = torch.autograd.grad(warpnorm.fuse(adaptive)(x, scale), (x, scale), grad)
    expected = torch.autograd.grad(adaptive(x, scale), (x, scale), grad)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_nan_travels(norm: Norm, device: str) -> None:
    """A sum of both infinities, in one part of one row, is NaN in all of it and nowhere else."""
    plan = PLANS[0]
    operands = operands_for(norm, torch.randn(5, 256, device=device), 1)
    grad = torch.randn(5, 256, device=device)
    grad[2, :2] = torch.tensor([float("inf"), -float("inf")], device=device)
    found = run_planned(norm, operands, grad, plan, plan).gradients[0]
    expected = run_planned(norm, operands, grad, None, Plan("row", 1, 256, 4, programs=3)).gradients[0]
    assert found[2].isnan().equal(expected[2].isnan())
    assert found[[0, 1, 3, 4]].isfinite().all()
    operands[0][3, 7] = float("nan")
    output = run_planned(norm, operands, torch.randn(5, 256, device=device), plan, plan).output
    assert output.isnan().all(1).tolist() == [False, False, False, True, False]
