"""Means of lines that are walked, where they are results themselves: what they are off by does not grow with the walk."""

import pytest
import torch

from kernel_contracts.channel_running import random
from warpnorm import pipeline
from warpnorm.norms import BATCH_NORM, TRACKED_NORM, Norm
from warpnorm.plan.plan import COLUMN, Plan
from warpnorm.problem import FULL, Call
from warpnorm.reference import Affine, Itself

LANES, ROWS = 128, 16


@pytest.mark.parametrize("norm", [BATCH_NORM, TRACKED_NORM], ids=lambda norm: norm.name)
@pytest.mark.parametrize("steps", [3, 13, 100])
def test_means_of_long_walks(steps: int, norm: Norm) -> None:
    """Of values that are far apart, in units of what one rounding of each value leaves of a mean. Without what the means of
    lanes are rounded off by it would be five times as much, and with the sum of all roundings more after every step."""
    cols = steps * LANES - 5
    x = (random((1, ROWS, cols), torch.float64, "cpu", steps) * 6e3).float()
    groups = ROWS if norm is TRACKED_NORM else 0
    call = Call(norm, 1, 1e-5, Itself(), Affine(False, False), (FULL,), (torch.float32,), groups=groups)
    plan = Plan(COLUMN, 2, LANES, 4, chunks=steps, held=16, ahead=1)
    _, (mean, _, variance) = pipeline.forward(call, [x], plan=plan)
    truth = x.double().mean(-1).flatten()
    unit = 2**-24 * 6e3 / cols**0.5
    off = (mean.double() - truth).square().mean().sqrt()
    assert off <= 2.5 * unit + 2**-24 * truth.abs().max()
    torch.testing.assert_close(variance.double(), x.double().var(-1, unbiased=False).flatten(), rtol=1e-6, atol=0)
