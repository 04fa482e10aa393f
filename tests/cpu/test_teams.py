"""Programs that must all run at the same time: where a device does not run them, other plans are made."""

from dataclasses import replace

import pytest
import torch

from warpnorm import pipeline
from warpnorm.norms import BATCH_NORM, LAYER_NORM
from warpnorm.plan import choose
from warpnorm.plan import device as devices
from warpnorm.plan.device import KNOWN
from warpnorm.plan.plan import HELD, TEAM
from warpnorm.problem import FULL, Axes, Call, View
from warpnorm.reference import Affine, Itself

LONG_ROW = Call(
    LAYER_NORM, 1, 1e-5, Itself(), Affine(True, True), (FULL, (False, True), (False, True)), (torch.bfloat16,)
)
ROWS = View((64, 131_072), (131_072, 1), torch.bfloat16, True)
COLUMN = View((131_072,), (1,), torch.bfloat16, True)
CHANNEL: Axes = (False, True, False, False)
IMAGES = Call(BATCH_NORM, 1, 1e-5, Itself(), Affine(True, True), (FULL, CHANNEL, CHANNEL), (torch.float16,))
IMAGE = View((64, 256, 56, 56), (256 * 3136, 3136, 56, 1), torch.float16, True)
PARAMETER = View((256, 1, 1), (1, 1, 1), torch.float32, True)


@pytest.mark.parametrize(
    ("call", "views", "pattern"),
    [(LONG_ROW, (ROWS, COLUMN, COLUMN, ROWS), TEAM), (IMAGES, (IMAGE, PARAMETER, PARAMETER, IMAGE), HELD)],
    ids=["layer_norm", "batch_norm"],
)
def test_a_device_without_teams_gets_other_plans(call: Call, views: tuple[View, ...], pattern: str) -> None:
    forward, space = pipeline.forward_problem(call, views)
    backward, lines = pipeline.backward_problem(call, views, (0,), (0, 1, 2))
    device = KNOWN["sm_90"]
    alone = replace(device, has_teams=False)
    assert choose.forward(forward, device, space).pattern == pattern
    assert choose.forward(forward, alone, space).pattern not in (TEAM, HELD)
    assert choose.backward(backward, device, lines).pattern == pattern
    assert choose.backward(backward, alone, lines).pattern not in (TEAM, HELD)


def test_a_launch_that_was_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_without_teams", set())
    monkeypatch.setattr(devices, "_numbers", lambda device: KNOWN["sm_90"])
    gpu, other = torch.device("cuda", 0), torch.device("cuda", 1)
    refused = RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
    assert not pipeline.refuses_teams(RuntimeError("CUDA error: out of memory"), gpu)
    assert devices.of(gpu).has_teams
    assert pipeline.refuses_teams(refused, gpu)
    assert not devices.of(gpu).has_teams
    assert devices.of(other).has_teams
    assert not pipeline.refuses_teams(refused, gpu)  # nothing else is left to try
