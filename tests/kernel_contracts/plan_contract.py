"""Contract: every valid plan gives the right answer, not only the one that would be chosen."""

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from kernel_contracts.running import NORMS, call_for, check_accuracy, operands_for, run_planned
from warpnorm import pipeline
from warpnorm.norms import Norm
from warpnorm.plan import grid, totals
from warpnorm.plan.plan import LONG_ROW, ROW, Plan
from warpnorm.space import Space

ROWS = 11
# 200: a tile of 256, walks of 16 blocks and more, all with a tail; 256: all full, but for the tile of 512
WIDTHS = (200, 256)

FORWARD = (
    Plan(ROW, 1, 256, 1),
    Plan(ROW, 2, 256, 2),
    Plan(ROW, 8, 256, 4),
    Plan(ROW, 1, 512, 8),
    Plan(ROW, 1, 256, 2, programs=3),
    Plan(ROW, 4, 256, 4, programs=2, stages=2),
    Plan(ROW, 1, 256, 2, programs=5, stages=3),
    Plan(ROW, 1, 256, 2, programs=64, stages=4),
    Plan(ROW, 1, 256, 2, late=True),
    Plan(ROW, 1, 64, 1, chunks=4),
    Plan(ROW, 4, 128, 2, chunks=2, late=True),
    Plan(ROW, 1, 32, 1, chunks=8, late=True, recomputes=True),
    Plan(ROW, 1, 128, 4, chunks=2, recomputes=True),
    Plan(ROW, 2, 64, 2, programs=3, chunks=4, stages=2),
    Plan(LONG_ROW, 1, 16, 1),
    Plan(LONG_ROW, 1, 64, 2, stages=2),
    Plan(LONG_ROW, 1, 128, 4, stages=3),
    Plan(LONG_ROW, 1, 256, 8),
)
BACKWARD = (
    Plan(ROW, 1, 256, 1, programs=1),
    Plan(ROW, 1, 256, 4, programs=3, stages=3),
    Plan(ROW, 2, 256, 2, programs=2, stages=2),
    Plan(ROW, 8, 256, 8, programs=64),
    Plan(ROW, 1, 256, 4, programs=3, stages=2, recomputes=True),
    Plan(ROW, 1, 64, 1, programs=3, chunks=4, stages=3),
    Plan(ROW, 4, 32, 2, programs=2, chunks=8),
    Plan(ROW, 1, 128, 4, programs=4, chunks=2, stages=2, recomputes=True),
    Plan(LONG_ROW, 1, 32, 1, programs=1),
    Plan(LONG_ROW, 1, 64, 2, programs=16, stages=2),
    Plan(LONG_ROW, 1, 256, 4, programs=400, stages=3),
)

OF_MANY = list(zip(BACKWARD[:8], [torch.float32, torch.bfloat16] * 4, strict=True))


def check(cols: int, norm: Norm, dtype: torch.dtype, device: str, forward: Plan | None, backward: Plan | None) -> None:
    def make(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(ROWS, cols, generator=generator, dtype=torch.float64).to(device, dtype)

    check_accuracy(norm, 1, make, lambda operands, grad: run_planned(norm, operands, grad, forward, backward))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("plan", FORWARD, ids=str)
def test_every_forward_plan(plan: Plan, cols: int, norm: Norm, dtype: torch.dtype, device: str) -> None:
    check(cols, norm, dtype, device, plan, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("plan", BACKWARD, ids=str)
def test_every_backward_plan(plan: Plan, cols: int, norm: Norm, dtype: torch.dtype, device: str) -> None:
    check(cols, norm, dtype, device, None, plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [16, 48, 64, 72, 100, 112, 128, 200, 256, 320, 400, 640])
def test_narrow_rows_few_and_many(
    cols: int, norm: Norm, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has fewer rows where there are few: their bits are the same, and those of many are right."""
    generator = torch.Generator().manual_seed(cols)
    operands = operands_for(norm, (torch.randn(37, cols, generator=generator) * 3 + 1).to(device, dtype), 1)
    call = call_for(norm, 1, *operands)
    few = pipeline.forward(call, operands)[0][0]
    monkeypatch.setattr(grid, "FEW_PROGRAMS", 0)
    pipeline.prepare_forward.cache_clear()
    try:
        assert pipeline.forward(call, operands)[0][0].equal(few)
        check(cols, norm, dtype, device, None, None)
    finally:
        pipeline.prepare_forward.cache_clear()


def test_programs_of_narrow_rows() -> None:
    spaces = [Space(rows, 128, (), (), (), (), (), 128) for rows in (1, 5, 2048, 2049, 2064)]
    programs = [grid.forward(Plan(ROW, 16, 128, 2), space)[0] for space in spaces]
    assert programs == [1, 2, 512, 129, 129]
    assert [grid.few_rows(Plan(ROW, rows, 512, 1)) for rows in (1, 2)] == [1, 1]
    assert [grid.few_rows(Plan(ROW, 16, 128, 2, least=least)) for least in (256, 512)] == [4, 8]
    assert grid.few_rows(Plan(ROW, 2, 2048, 4)) == 2
    assert grid.few_rows(Plan(ROW, 4, 128, 1, programs=3)) == 4


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize(("plan", "dtype"), OF_MANY, ids=str)
def test_backward_plans_as_of_many_rows(
    plan: Plan, dtype: torch.dtype, norm: Norm, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of few rows are taken in the launch of their gradients; of many, each program leaves partial ones."""
    monkeypatch.setattr(grid, "FEW_ROWS", 0)
    pipeline.prepare_backward.cache_clear()
    try:
        check(WIDTHS[0], norm, dtype, device, None, plan)
    finally:
        pipeline.prepare_backward.cache_clear()


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 129])
def test_gradients_of_rows_few_and_many(rows: int, device: str) -> None:
    """The same rows give the same gradients, whoever sums over them."""
    generator = torch.Generator().manual_seed(rows)
    x, w, b, g = (torch.randn(s, generator=generator).to(device) for s in ((rows, 96), (96,), (96,), (rows, 96)))
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    found = torch.autograd.grad(warpnorm.layer_norm(x, (96,), w, b), (x, w, b), g)
    true = torch.autograd.grad(F.layer_norm(wide[0], (96,), *wide[1:]), wide, g.double())
    for ours, theirs in zip(found, true, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    alone = torch.autograd.grad(warpnorm.layer_norm(x[:1], (96,), w, b), x, g[:1])[0]
    assert alone[:1].equal(found[0][:1]), "a row's gradient does not know its neighbours"


@pytest.mark.parametrize("blocks", [(16, 64, 4), (128, 32, 8), (256, 16, 8)], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", WIDTHS)
def test_partial_rows_are_summed_by_blocks_of_any_size(
    cols: int, norm: Norm, blocks: tuple[int, int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(totals, "column", lambda problem, plan, device: Plan(ROW, *blocks))
    pipeline.prepare_backward.cache_clear()
    check(cols, norm, torch.float32, device, None, None)
    pipeline.prepare_backward.cache_clear()


def test_few_blocks_of_rows_have_few_programs() -> None:
    """Each leaves a partial row: as many as the rows would take longer to sum than the rows."""
    plan = Plan(ROW, 1, 1024, 2, programs=528)
    spaces = [Space(rows, 1024, (), (), (), (), (), 1024) for rows in (1, 100, 128, 512, 513, 2048, 4096)]
    programs = [grid.backward(plan, space)[0] for space in spaces]
    assert programs == [1, 100, 128, 128, 129, 512, 528]
