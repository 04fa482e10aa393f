"""Contract: values at the ends of a dtype, and noise upon a large mean. Others are in accuracy_contract.py and
channel_contract.py, beside the layouts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from cpu.channel_truth import Arguments
from kernel_contracts import channel_running
from kernel_contracts.channel_running import BATCH, GROUPS, INSTANCE, Layout, Mode, arguments, random
from kernel_contracts.running import NORMS, check_accuracy
from warpnorm import settings
from warpnorm.norms import RMS_NORM, Norm


@dataclass(frozen=True)
class Values:
    name: str
    dtype: torch.dtype
    change: Callable[[torch.Tensor], torch.Tensor]
    why: str

    def __str__(self) -> str:
        return self.name


VALUES = (
    Values("noise_on_10000", torch.float32, lambda x: x * 1e-3 + 1e4, why="a deviation of one last place of the mean"),
    Values("subnormals", torch.float32, lambda x: x * 1e-40, why="every value is below the smallest normal float32"),
    Values("half_subnormals", torch.float16, lambda x: x * 1e-6, why="subnormal in float16, and normal where computed"),
    Values("bfloat16_subnormals", torch.bfloat16, lambda x: x * 1e-39, why="subnormal in both"),
    Values("half_squares", torch.float16, lambda x: x * 400, why="squares are past the end of float16"),
    Values("one_value", torch.float32, lambda x: torch.full_like(x, 1234.5678), why="no deviation at all"),
    Values("one_half_value", torch.float16, lambda x: torch.full_like(x, 6e4), why="and a sum past the end of float16"),
    Values("one_outlier", torch.float32, lambda x: torch.where(x == x.amax(), 1e6, x), why="one value is all there is"),
)  # fmt: skip


def skip_what_is_not_here(values: Values) -> None:
    if values.name == "bfloat16_subnormals" and settings.is_interpreting():
        pytest.skip("the interpreter loads and stores other numbers than these")


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [200, 8_201])  # one tile, and a walk
@pytest.mark.parametrize("values", VALUES, ids=str)
def test_values_of_rows(values: Values, cols: int, norm: Norm, device: str) -> None:
    skip_what_is_not_here(values)
    if values.name == "one_value" and norm == RMS_NORM:
        pytest.skip("all elements have the same rounding, so that the mean of their errors is luck")
    check_accuracy(
        norm, 1, lambda seed: values.change(random((5, cols), torch.float64, "cpu", seed)).to(device, values.dtype)
    )


@pytest.mark.parametrize("is_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("mode", [BATCH, GROUPS, INSTANCE], ids=str)
@pytest.mark.parametrize("values", VALUES, ids=str)
def test_values_of_channels(values: Values, mode: Mode, is_last: bool, device: str) -> None:
    skip_what_is_not_here(values)

    def make(seed: int) -> Arguments:
        input = values.change(random((4, 6, 9, 10), torch.float64, "cpu", seed)).to(device, values.dtype)
        return arguments(mode, channel_running.last(input) if is_last else input, seed=seed)

    channel_running.check_accuracy(make)


@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_a_batch_far_from_zero(mean: float, device: str) -> None:
    """Many values of one channel, whose mean is far above their deviation: sums that run on lose it. Several channels, as
    what a weight's gradient is off by is that of the mean, which is rounded."""

    def make(seed: int) -> Arguments:
        return arguments(
            BATCH, (random((16, 8, 64, 33), torch.float64, "cpu", seed) * 0.1 + mean).to(device, torch.float32)
        )

    channel_running.check_accuracy(make)


SMALL_PIECES = (
    Layout("crop", (63, 16, 9), view=lambda t: t[..., 1:8], why="7 values of each sample"),
    Layout("images", (63, 8, 2, 4), why="8 values, and memory runs along them"),
    Layout("odd_images", (64, 8, 7, 7), why="64 values of each position, as memory runs across them"),
    Layout("many_positions", (9, 4, 31, 33), why="9 values of each, and more pieces than are merged at once"),
)


@pytest.mark.parametrize(("samples", "channels", "size", "step"), [(5, 24, 512, 2), (1, 8, 12544, 1), (1, 8, 8255, 1)])
def test_means_that_are_small_beside_deviations(samples: int, channels: int, size: int, step: int, device: str) -> None:
    """A mean that is a result itself, of rows that lie in one piece, in registers or walked: it is rounded, so is that of
    the samples, and so is the average of both."""
    errors = []
    for seed in range(3):
        x = (random((samples, channels, size), torch.float64, "cpu", seed) * 6e3).float()[..., ::step]
        running = torch.zeros(2, channels, device=device)
        warpnorm.instance_norm(x.to(device), running[0], running[1], use_input_stats=True, momentum=1.0)
        truth = x.double().mean((0, 2))
        errors.append(((running[0].cpu().double() - truth).norm() / truth.norm()).item())
    assert max(errors) <= 3 * torch.finfo(torch.float32).eps / 2


def test_a_sample_whose_means_are_small_beside_deviations(device: str) -> None:
    """Deviations from a rounded mean are off by the same where values are of one size: a mean that they correct is worse."""
    errors = []
    for seed in range(3):
        x = (random((1, 24, 4096), torch.float64, "cpu", seed) * 6e3).float()
        running = torch.zeros(2, 24, device=device)
        warpnorm.batch_norm(x.to(device), running[0], running[1], training=True, momentum=1.0)
        truth = x.double().mean((0, 2))
        errors.append(((running[0].cpu().double() - truth).norm() / truth.norm()).item())
    assert max(errors) <= torch.finfo(torch.float32).eps, errors


@pytest.mark.parametrize("layout", SMALL_PIECES, ids=str)
def test_pieces_of_float64(layout: Layout, device: str) -> None:
    """The same where no dtype has more digits: held against fractions, which lose none."""
    ours, theirs = [], []
    for seed in range(3):
        whole = random(layout.shape, torch.float64, "cpu", seed) * 0.1 + 1e4
        input = layout.view(whole)
        of_channel = input.transpose(0, 1).flatten(1)
        exact = []
        for values in of_channel.tolist():
            mean = sum(map(Fraction, values)) / len(values)
            exact.append(float(sum((Fraction(value) - mean) ** 2 for value in values) / (len(values) - 1)))
        truth = torch.tensor(exact, dtype=torch.float64)
        for found, where, norm in ((ours, device, warpnorm.batch_norm), (theirs, "cpu", F.batch_norm)):
            x = layout.view(whole.to(where))
            running = torch.zeros(2, x.shape[1], dtype=torch.float64, device=where)
            norm(x, running[0], running[1], training=True, momentum=1.0)
            found.append(((running[1].cpu() - truth) / truth).square().mean().sqrt().item())
    assert max(ours) <= max(theirs) + torch.finfo(torch.float64).eps


@pytest.mark.parametrize(("mean", "deviation"), [(1e3, 0.1), (1e4, 0.1), (1e4, 1e-3)])
@pytest.mark.parametrize("layout", SMALL_PIECES, ids=str)
def test_pieces_far_from_zero(layout: Layout, mean: float, deviation: float, device: str) -> None:
    """Of many means, each of few values, what rounding leaves of them would be a variance of its own: in the running one, in
    what every value is divided by, and in the gradient of a weight."""

    def make(seed: int) -> Arguments:
        input = (random(layout.shape, torch.float64, "cpu", seed) * deviation + mean).to(device, torch.float32)
        a = arguments(BATCH, layout.view(input), seed=seed)
        running_mean, running_var = torch.zeros(2, a.input.shape[1], device=device)
        return replace(a, running_mean=running_mean, running_var=running_var)

    channel_running.check_accuracy(make)
