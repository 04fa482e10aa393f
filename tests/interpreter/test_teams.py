"""Programs that run at the same time and exchange sums, patterns `team` and `held`, or wait for each other, `column`: as
threads that take turns, in an order that is drawn. On a GPU they run in tests/gpu, with teams of every size."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import pytest
import torch

from interpreter import together
from kernel_contracts import channel_plan_contract
from kernel_contracts.channel_plan_contract import check
from kernel_contracts.channel_running import (
    BATCH,
    GROUPS,
    ONE_GROUP,
    Layout,
    Mode,
    arguments,
    call_of,
    check_accuracy,
    gradient_for,
    random,
    run_torchs,
)
from kernel_contracts.channel_running import run_planned as run_channels
from kernel_contracts.running import EPS, NORMS, call_for, operands_for, run_planned
from kernel_contracts.running import check_accuracy as check_rows
from warpnorm import pipeline, settings
from warpnorm.kernels import messages
from warpnorm.norms import LAYER_NORM, Norm
from warpnorm.plan import device as devices
from warpnorm.plan.plan import HELD, ROW, TEAM, Plan
from warpnorm.problem import View

TEAMS = (
    Plan(TEAM, 1, 128, 2, programs=3, splits=2, stages=3),
    Plan(TEAM, 1, 32, 1, programs=2, splits=3, chunks=4),
    Plan(TEAM, 1, 32, 1, programs=1, splits=8),
    Plan(TEAM, 1, 32, 1, programs=2, splits=4, chunks=2, keeps=True),
    Plan(TEAM, 1, 32, 1, programs=2, splits=9, ahead=1, early=True, asks=True),
    Plan(TEAM, 1, 8, 1, programs=1, splits=33, ahead=1, keeps=True, asks=True),
)
HOLDERS = (
    Plan(HELD, 4, 32, 4, programs=8, splits=4),
    Plan(HELD, 8, 8, 1, programs=6, splits=2),
    Plan(HELD, 4, 32, 4, programs=8, splits=4, ahead=1),
    Plan(HELD, 8, 8, 1, programs=6, splits=64, ahead=1, recomputes=True),
)
TAILS = Layout("tails", (13, 6, 5, 8), why="neither lines nor columns fill their blocks")
FULL = Layout("full", (16, 4, 4, 8), why="all do")
HALF = Layout("half_vectors", (13, 6, 6, 6), why="lines of halves begin at 8 bytes, not at 16")
ODD = Layout("elements", (11, 6, 5, 7), why="and here at any")


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    with together.at_once():
        yield


def whole(plan: Plan, layout: Layout) -> Plan:
    return replace(plan, chunks=-(-prod(layout.shape[2:]) // plan.block_cols))


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [(1, 256, torch.float32), (2, 200, torch.float32), (7, 200, torch.bfloat16), (5, 256, torch.bfloat16)],
)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize(
    "plan", TEAMS, ids=["two", "three", "eight", "four that keep", "nine that hurry", "two words to a thread"]
)
def test_rows(plan: Plan, norm: Norm, rows: int, cols: int, dtype: torch.dtype) -> None:
    """Whether all parts are equal, and are merged by sums, or not; means of bfloat16 have nothing to correct."""

    def make(seed: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)

    check_rows(norm, 1, make, lambda operands, grad: run_planned(norm, operands, grad, plan, plan))


ALONE = (
    Plan(TEAM, 1, 128, 1, programs=2, splits=3, ahead=1, keeps=True, asks=True),
    Plan(TEAM, 1, 128, 1, programs=2, splits=3, ahead=1, early=True),
)


def test_rows_moved_alone() -> None:
    """Of 303 columns, which are not aligned: two lines of memory to a part of halves, of which two lie in a register until
    the row is finished; four to one of float32. Rows further apart than they are long too."""

    def make(seed: int, dtype: torch.dtype, cols: int) -> torch.Tensor:
        return torch.randn(7, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)[:, :303]

    for dtype, norm, (forward, backward), cols in (
        (torch.bfloat16, NORMS[0], ALONE, 303),
        (torch.float16, NORMS[1], ALONE, 400),
        (torch.float32, NORMS[0], ALONE[::-1], 303),
    ):
        check_rows(
            norm, 1, lambda seed, dtype=dtype, cols=cols: make(seed, dtype, cols),
            lambda operands, grad, norm=norm, forward=forward, backward=backward: run_planned(
                norm, operands, grad, forward, backward
            ),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mode", [BATCH, GROUPS, ONE_GROUP], ids=str)
@pytest.mark.parametrize(
    ("plan", "layout"),
    [
        (HOLDERS[0], TAILS),
        (HOLDERS[1], FULL),
        (HOLDERS[2], TAILS),
        (HOLDERS[3], FULL),
        (HOLDERS[2], HALF),
        (HOLDERS[3], ODD),
    ],
    ids=["tails", "full", "tails ahead", "full ahead", "half vectors", "elements"],
)
def test_channels(plan: Plan, layout: Layout, mode: Mode, dtype: torch.dtype, device: str) -> None:
    plan = whole(plan, layout)
    check(layout, mode, dtype, device, plan, plan)


MANY = Layout("many", (41, 2, 4, 8), why="more programs share a row than a warp has threads")


@pytest.mark.parametrize(
    ("splits", "cols", "dtype"), [(64, 256, torch.bfloat16), (64, 256, torch.float32), (50, 198, torch.bfloat16)]
)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_rows_of_many(norm: Norm, splits: int, cols: int, dtype: torch.dtype) -> None:
    """Their sums are merged with a correction, and by counts."""
    plan = Plan(TEAM, 1, 4, 1, programs=1, splits=splits)

    def make(seed: int) -> torch.Tensor:
        return torch.randn(2, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)

    check_rows(norm, 1, make, lambda operands, grad: run_planned(norm, operands, grad, plan, plan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_channels_of_many(dtype: torch.dtype, device: str) -> None:
    plan = whole(Plan(HELD, 1, 32, 1, programs=64, splits=64), MANY)
    check(MANY, BATCH, dtype, device, plan, plan)


def test_a_mean_is_rounded_once() -> None:
    """Those of parts are rounded too, and what they are off by is told beside them."""
    plan = replace(HOLDERS[0], programs=8, chunks=2)
    x = (torch.randn(13, 16, 4, 9, dtype=torch.float64) * 0.1 + 1e3).float()
    call, operands = call_of(arguments(BATCH, x, seed=0))
    mean = pipeline.forward(call, operands, plan=plan)[1][0]
    truth = x.double().mean((0, 2, 3))
    assert (mean.double() - truth).abs().max() <= 0.51 * torch.finfo(torch.float32).eps * 512


AT_ONCE = (
    Plan(ROW, 1, 64, 2, chunks=4, late=True, recomputes=True),
    Plan(TEAM, 1, 32, 1, programs=2, splits=2, chunks=4, recomputes=True),
    Plan(TEAM, 1, 8, 1, programs=1, splits=4, chunks=8, recomputes=True),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", AT_ONCE, ids=["row", "two", "four"])
def test_one_visit_loses_few_digits(plan: Plan, dtype: torch.dtype) -> None:
    """Also where the value that deviations are taken from is far from all others, and where all are far from zero."""
    row = torch.randn(256, generator=torch.Generator().manual_seed(0))
    first, ramp = torch.zeros(256), torch.linspace(-1.0, 1.0, 256)
    first[0] = 2.0**14
    x = torch.stack([row, row + first, row - first, row + first.roll(77), ramp * 6e4, row + 1e3, first, -first]).to(
        dtype
    )
    operands = operands_for(LAYER_NORM, x, 1)
    mean, rstd = pipeline.forward(call_for(LAYER_NORM, 1, *operands), operands, plan=plan)[1]
    true = x.double().mean(1), (x.double().var(1, correction=0) + EPS).rsqrt()
    assert ((mean - true[0]).abs() * true[1]).max() < 2.0**-20
    assert (rstd / true[1] - 1).abs().max() < 2.0**-17


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_one_value_give_zeros(dtype: torch.dtype) -> None:
    """As parts, which are merged, and as lanes of them."""
    for plan, cols in ((TEAMS[1], 200), (TEAMS[1], 384), (TEAMS[2], 256), *((plan, 256) for plan in AT_ONCE)):
        operands = operands_for(LAYER_NORM, torch.full((2, cols), 3.3).to(dtype), 1)
        call = call_for(LAYER_NORM, 1, *operands)
        (output,), _ = pipeline.forward(call, operands, plan=plan)
        assert output.equal(operands[2].expand(2, cols)), (plan, cols)
    for shape in ((13, 2, 5, 8), (16, 2, 4, 32), (13, 2, 7, 8), (9, 2, 3, 24)):
        a = arguments(BATCH, torch.full(shape, 3.3).to(dtype))
        call, operands = call_of(a)
        plan = Plan(HELD, 4, 16, 1, programs=8, splits=4, chunks=-(-prod(shape[2:]) // 16))
        (output,), _ = pipeline.forward(call, operands, plan=plan)
        assert output.equal(operands[2].detach().view(1, 2, 1, 1).expand(shape)), shape


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_the_order_of_programs_changes_nothing(norm: Norm) -> None:
    """Not a bit, launch after launch of different lengths: messages have numbers that go on."""
    plan, found = TEAMS[1], []
    inputs = [torch.randn(rows, 256) for rows in (1, 6, 3)]
    for seed in range(2):
        with together.at_once(seed):
            calls = [operands_for(norm, input, 1) for input in inputs]
            runs = [run_planned(norm, operands, operands[0], plan, plan) for operands in calls]
            found.append([t for run in runs for t in (run.output, *run.gradients)])
    for other in found[1:]:
        assert all(a.equal(b) for a, b in zip(found[0], other, strict=True))


def test_nor_does_it_of_those_that_hold() -> None:
    """Nor whether a row is begun before the one before it is finished."""
    call = arguments(BATCH, torch.randn(13, 4, 5, 8), seed=0)
    plan, found = whole(replace(HOLDERS[0], programs=4), TAILS), []
    for seed, ahead in ((0, 0), (1, 0), (0, 1), (1, 1)):
        with together.at_once(seed):
            this = replace(plan, ahead=ahead)
            found.append(run_channels(call, gradient_for(call), this, this))
    for other in found[1:]:
        assert all(found[0][name].equal(other[name]) for name in found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nor_do_launches_of_other_lengths_before(dtype: torch.dtype) -> None:
    """Rows begun ahead or not, by one team, one launch after another: the numbers of messages go on."""
    plan, found = whole(replace(HOLDERS[0], programs=4), TAILS), []
    images = [torch.randn(13, channels, 5, 8).to(dtype) for channels in (2, 3, 5)]
    for order in ((0, 1, 2), (2, 0, 1, 0)):
        with together.at_once(len(order)):
            for turn, number in enumerate(order):
                this, call = replace(plan, ahead=turn % 2), arguments(BATCH, images[number], seed=number)
                found.append((number, run_channels(call, gradient_for(call), this, this)))
    first = dict(reversed(found))
    for number, other in found:
        assert all(first[number][name].equal(other[name]) for name in other)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_nan_stays_in_its_row(norm: Norm) -> None:
    operands = operands_for(norm, torch.randn(5, 200), 1)
    operands[0][3, 7] = float("nan")
    found = run_planned(norm, operands, torch.randn(5, 200), TEAMS[1], TEAMS[1])
    for result in (found.output, found.gradients[0]):
        assert result.isnan().all(1).tolist() == [False, False, False, True, False]
        assert result.isnan().any(1).tolist() == [False, False, False, True, False]


@pytest.mark.usefixtures("as_chosen")
@pytest.mark.parametrize(
    ("cols", "dtype"), [(20_000, torch.float32), (50_257, torch.bfloat16), (65_536, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_rows_as_a_gpu_would(norm: Norm, cols: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so few multiprocessors that a team has several rows."""
    gpu = replace(devices.KNOWN["sm_90"], backend="interpreter", arch="cpu", units=8)
    monkeypatch.setattr(devices, "_numbers", lambda device: gpu)
    operands = operands_for(norm, torch.randn(5, cols).to(dtype), 1)
    views = tuple(View.of(t) for t in (*operands, operands[0]))
    wanted = tuple(range(len(operands)))
    launch = pipeline.prepare_backward(call_for(norm, 1, *operands), views, operands[0].device, (0,), wanted, None)
    assert launch.plan.pattern == TEAM
    assert launch.plan.programs < 5
    check_rows(norm, 1, lambda seed: torch.randn(5, cols, generator=torch.Generator().manual_seed(seed)).to(dtype))


@pytest.mark.usefixtures("as_chosen")
@pytest.mark.parametrize("scales", [(-6, 6), (0, 0)], ids=["mixed", "alike"])
def test_deviations_as_a_gpu_would(scales: tuple[int, int]) -> None:
    """Of long mantissas, whose statistics programs send each other: a word has room for less, and a root has an error of its
    own."""
    factors = torch.logspace(*scales, 8, dtype=torch.float64).view(-1, 1)
    errors = []
    for seed in range(12):
        x = (random((2, 8, 4500), torch.float64, "cpu", 100 * seed) * factors).float()
        call, operands = call_of(arguments(GROUPS, x))
        found = pipeline.forward(call, operands)[1][1].double()
        variance = x.double().reshape(found.numel(), -1).var(1, unbiased=False)
        errors.append((found * (variance + call.eps).sqrt() - 1).abs())
    error = torch.cat(errors) / torch.finfo(torch.float32).eps
    assert error.max() <= 0.75
    assert error.mean() <= 0.25


@pytest.mark.usefixtures("as_chosen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_channels_as_a_gpu_would(dtype: torch.dtype) -> None:
    shape = (32, 2, 28, 28)
    call, operands = call_of(arguments(BATCH, torch.randn(shape).to(dtype)))
    views = (*map(View.of, operands), View.of(operands[0]))
    assert pipeline.prepare_forward(call, views, operands[0].device, None).plan.pattern == HELD
    check_accuracy(lambda seed: arguments(BATCH, random(shape, dtype, "cpu", seed), seed=seed))


ODD_IMAGES = (
    Layout("elements", (6, 3, 7, 7), why="images begin anywhere"),
    Layout("lines", (5, 3, 50), why="of one dimension"),
    Layout("volumes", (3, 2, 2, 5, 5), why="of three"),
    Layout("every_other_line", (3, 2, 14, 14), view=lambda t: t[:, :, ::2], why="two axes of columns"),
    Layout("half_the_channels", (5, 6, 7, 7), view=lambda t: t[:, ::2], why="with gaps between them"),
    Layout("expanded_batch", (1, 3, 7, 7), view=lambda t: t.expand(4, -1, -1, -1), why="samples share memory"),
    Layout("half_vectors", (5, 3, 10, 10), why="images of halves begin at 8 bytes; of float32 at 16"),
)


@pytest.mark.usefixtures("as_chosen")
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(layout, dtype) for layout in ODD_IMAGES for dtype in (torch.float16, torch.float32)][:-1],
    ids=str,
)
def test_odd_images_as_a_gpu_would(layout: Layout, dtype: torch.dtype) -> None:
    """Few of them stay in registers, whatever they begin at, if memory runs along their lines."""
    call, operands = call_of(arguments(BATCH, layout.make(dtype, "cpu", 1)))
    views = (*map(View.of, operands), View.of(operands[0]))
    assert pipeline.prepare_forward(call, views, operands[0].device, None).plan.pattern == HELD
    check_accuracy(lambda seed: arguments(BATCH, layout.make(dtype, "cpu", seed), seed=seed))


BY_TURNS = [plan for plan in channel_plan_contract.PLANS if plan.held > 0]


@pytest.mark.usefixtures("as_chosen")
@pytest.mark.parametrize(("k", "mode"), [(0, BATCH), (1, GROUPS), (2, BATCH), (3, GROUPS)], ids=str)
def test_tasks_that_wait(k: int, mode: Mode) -> None:
    """Pattern `column`, whatever room there is: who waits began after those it waits for. Not a bit changes."""
    layout = channel_plan_contract.LAYOUTS[k % 4]
    call = arguments(mode, layout.make(torch.float32, "cpu", k), seed=k)
    grad_output, found = gradient_for(call), []
    plans = BY_TURNS[k], BY_TURNS[(k + 1) % len(BY_TURNS)]
    for room in (2, 1000):
        with together.at_once(room, room) as waits:
            found.append(run_channels(call, grad_output, *plans))
        assert room != 1000 or waits
    for other in found[1:]:
        assert all(found[0][name].equal(other[name]) for name in found[0])
    with settings.override(route="reference"):
        expected = run_torchs(call, grad_output)
    for name, result in found[0].items():
        torch.testing.assert_close(result, expected[name], rtol=1e-4, atol=1e-5)


def test_programs_that_all_wait_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One box less than the exchange takes: a message is overwritten before all have read it."""
    monkeypatch.setattr(messages, "BOXES", 1)
    operands = operands_for(NORMS[0], torch.randn(30, 256), 1)
    with pytest.raises(Exception, match="programs wait for what nobody sends"):
        run_planned(NORMS[0], operands, operands[0], TEAMS[1], TEAMS[1])
