"""Contract: every valid plan of the norms by channel gives the right answer, not only the one that would be chosen."""

from dataclasses import replace
from math import prod

import pytest
import torch

from kernel_contracts.channel_running import (
    BATCH,
    EVALUATION,
    GROUPS,
    INSTANCE,
    ONE_GROUP,
    Layout,
    Mode,
    arguments,
    check_accuracy,
    last,
    run_planned,
)
from warpnorm.plan.plan import COLUMN, FIRST, HELD, Plan

# With pieces: lines of 25 or 32 columns; channels last, batch norm: of 75 or 128
LAYOUTS = (
    Layout("nchw_tails", (3, 6, 26), view=lambda t: t[..., 1:], why="neither lines nor columns fill their blocks"),
    Layout("nchw_full", (4, 8, 4, 8), why="all do"),
    Layout("last_tails", (3, 6, 5, 5), view=last, why="the same where memory runs across the lines"),
    Layout("last_full", (4, 8, 4, 8), view=last, why="all do"),
    Layout("odd_images", (19, 6, 5, 5), why="memory runs across positions, the pieces of a row, of 19 columns"),
    Layout("odd_images_full", (16, 16, 3, 3), why="and fills their blocks"),
)

PLANS = (
    Plan(COLUMN, 4, 16, 1),
    Plan(COLUMN, 64, 8, 4),
    Plan(COLUMN, 8, 256, 4),
    Plan(COLUMN, 8, 8, 2, chunks=2, stages=2, tasks=FIRST),
    Plan(COLUMN, 2, 16, 4, chunks=64, stages=3),
    Plan(COLUMN, 8, 8, 4, programs=6, chunks=0, stages=3),
    Plan(COLUMN, 16, 16, 8, programs=1000, chunks=0),
    Plan(COLUMN, 8, 8, 4, programs=6, chunks=0, stages=3, tasks=FIRST),
    Plan(COLUMN, 1, 16, 4, programs=1000, chunks=0, tasks=FIRST),
    Plan(COLUMN, 2, 16, 4, ahead=1, held=1000),
    Plan(COLUMN, 1, 8, 1, chunks=2, stages=2, ahead=9, held=1000),
    Plan(COLUMN, 4, 32, 4, ahead=0, held=1000),
    Plan(COLUMN, 2, 16, 4, tasks=FIRST),
    Plan(COLUMN, 8, 8, 4, chunks=2, stages=2, ahead=2, held=1000),
    Plan(COLUMN, 32, 32, 2, programs=8, chunks=0, stages=3, tasks=FIRST),
    Plan(COLUMN, 64, 32, 2, programs=8, chunks=0, stages=3, tasks=FIRST),
)


def check(layout: Layout, mode: Mode, dtype: torch.dtype, device: str, forward: Plan, backward: Plan) -> None:
    check_accuracy(
        lambda seed: arguments(mode, layout.make(dtype, device, seed), seed=seed),
        run_ours=lambda a, grad_output: run_planned(a, grad_output, forward, backward),
    )


EACH = [
    pytest.param(plan, layout, mode, id=f"{mode}-{layout}-{i}")
    for i, plan in enumerate(PLANS)
    for k, layout in enumerate(LAYOUTS)
    for mode in (BATCH, GROUPS)
    if (i + k) % 2 == (mode is GROUPS)  # every plan with every norm, and on layouts of both kinds
]


@pytest.mark.parametrize(("plan", "layout", "mode"), EACH)
def test_every_plan_by_channel(plan: Plan, layout: Layout, mode: Mode, device: str) -> None:
    """Backward by the next plan, so that nothing hangs on both being the same."""
    following = PLANS[(PLANS.index(plan) + 1) % len(PLANS)]
    dtype = torch.bfloat16 if plan.block_rows == 8 or layout.name == "odd_images" else torch.float32
    check(layout, mode, dtype, device, plan, following)


# Programs that have whole rows, and tell nobody
LONE_PROGRAMS = (
    Plan(HELD, 4, 16, 1, programs=2, chunks=2),
    Plan(HELD, 8, 8, 2, programs=3, chunks=4),
    Plan(HELD, 4, 32, 4, programs=100, recomputes=True),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [BATCH, GROUPS], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
@pytest.mark.parametrize("plan", LONE_PROGRAMS, ids=["two", "three", "many"])
def test_held_rows(plan: Plan, layout: Layout, mode: Mode, dtype: torch.dtype, device: str) -> None:
    check(layout, mode, dtype, device, plan, plan)


# Images of an odd size, which those read along their lines
ALONG = (
    Layout("half_vectors", (3, 6, 4, 5), why="lines of halves begin at 8 bytes, not at 16"),
    Layout("elements", (4, 6, 5, 5), why="and here at any"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ALONG, ids=str)
@pytest.mark.parametrize("plan", LONE_PROGRAMS, ids=["two", "three", "many"])
def test_held_odd_images(plan: Plan, layout: Layout, dtype: torch.dtype, device: str) -> None:
    plan = replace(plan, chunks=-(-prod(layout.shape[2:]) // plan.block_cols))
    check(layout, BATCH, dtype, device, plan, plan)


CROPPED = Layout("cropped", (3, 6, 6, 8), view=lambda t: t[:, :, ::2, 1:], why="two axes of columns in many parts")
CROPPED_LAST = Layout("cropped_last", (3, 6, 6, 8), view=lambda t: last(t)[:, :, ::2, 1:], why="the same, side by side")
LONE = Layout(
    "lone_sample", (6, 1, 6, 8), view=lambda t: t.transpose(0, 1)[..., 1:], why="pieces, of which there is one"
)
# in their own memory, so that what is read or written past their end is seen
LONE_ROW = Layout("lone_row", (1, 8, 4, 8), why="one row of many pieces, which fill their blocks")
ONE_CHANNEL = Layout("one_channel", (8, 1, 4, 8), why="the same, and blocks of it are samples")


@pytest.mark.parametrize(("mode", "layout"), [(ONE_GROUP, LONE_ROW), (BATCH, ONE_CHANNEL)], ids=str)
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[3], PLANS[8]], ids=["blocks", "chunks", "turns"])
def test_plans_of_a_lone_row(plan: Plan, mode: Mode, layout: Layout, device: str) -> None:
    check(layout, mode, torch.float32, device, plan, plan)


ALONE = [
    (EVALUATION, LAYOUTS[0]),
    (INSTANCE, LAYOUTS[3]),
    (INSTANCE, CROPPED),
    (INSTANCE, CROPPED_LAST),
    (BATCH, LONE),
    (GROUPS, LONE),
]


@pytest.mark.parametrize(("mode", "layout"), ALONE, ids=str)
@pytest.mark.parametrize("plan", [PLANS[3], PLANS[5]], ids=["chunks", "programs"])
def test_plans_without_pieces(plan: Plan, mode: Mode, layout: Layout, device: str) -> None:
    """Where a row lies in one piece, or there is no statistic: its columns still lie in parts."""
    check(layout, mode, torch.float32, device, plan, plan)


# Blocks of which a thread merges its own columns before all others. Where some are not full, it does not
TOGETHER = (
    Plan(COLUMN, 8, 8, 2, chunks=2, stages=2, tasks=FIRST, together=4, by_units=True),
    Plan(COLUMN, 8, 16, 2, chunks=2, tasks=FIRST, together=16),
    Plan(COLUMN, 8, 8, 4, chunks=2, stages=2, ahead=2, held=1000, together=2),
    Plan(COLUMN, 16, 8, 4, programs=6, chunks=0, stages=3, tasks=FIRST, together=2, by_units=True),
)
FAR = Layout("far_from_zero", (4, 8, 4, 8), view=lambda t: last(t + 300.0), why="M2 is a small difference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [BATCH, GROUPS, INSTANCE], ids=str)
@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[2], FAR], ids=str)
@pytest.mark.parametrize("plan", TOGETHER, ids=["four", "all", "turns", "programs"])
def test_columns_of_a_thread_first(plan: Plan, layout: Layout, mode: Mode, dtype: torch.dtype, device: str) -> None:
    check(layout, mode, dtype, device, plan, plan)
