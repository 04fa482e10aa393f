"""Programs that must all run at the same time: where a device does not run them, other plans are made."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import pipeline
from warpnorm.norms import BATCH_NORM, GROUP_NORM, LAYER_NORM, Norm
from warpnorm.plan import choose, search
from warpnorm.plan import device as devices
from warpnorm.plan.device import KNOWN, Device
from warpnorm.plan.plan import COLUMN as COLUMN_PATTERN
from warpnorm.plan.plan import HELD, ROW, TEAM, Plan
from warpnorm.problem import FULL, Axes, BackwardProblem, Call, ForwardProblem, View
from warpnorm.reference import Affine, Itself
from warpnorm.space import Space

LONG_ROW = Call(
    LAYER_NORM, 1, 1e-5, Itself(), Affine(True, True), (FULL, (False, True), (False, True)), (torch.bfloat16,)
)
ROWS = View((64, 131_072), (131_072, 1), torch.bfloat16)
COLUMN = View((131_072,), (1,), torch.bfloat16)
CHANNEL: Axes = (False, True, False, False)
IMAGES = Call(BATCH_NORM, 1, 1e-5, Itself(), Affine(True, True), (FULL, CHANNEL, CHANNEL), (torch.float16,))
IMAGE = View((64, 256, 56, 56), (256 * 3136, 3136, 56, 1), torch.float16)
PARAMETER = View((256, 1, 1), (1, 1, 1), torch.float32)


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


def image_problem(
    norm: Norm, shape: tuple[int, ...], groups: int = 0, dtype: torch.dtype = torch.float16, is_backward: bool = False
) -> tuple[ForwardProblem | BackwardProblem, Plan]:
    strides = (prod(shape[1:]), prod(shape[2:]), shape[3], 1)
    image = View(shape, strides, dtype)
    parameter = View((shape[1], 1, 1), (1, 1, 1), torch.float32)
    call = replace(IMAGES, norm=norm, groups=groups, outputs=(dtype,))
    views = (image, parameter, parameter, image)
    if is_backward:
        backward, space = pipeline.backward_problem(call, views, (0,), (0, 1, 2))
        return backward, choose.backward(backward, KNOWN["sm_90"], space)
    forward, space = pipeline.forward_problem(call, views)
    return forward, choose.forward(forward, KNOWN["sm_90"], space)


def image_plan(*how: Any, **more: Any) -> Plan:
    return image_problem(*how, **more)[1]


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_rows_that_are_done_in_a_round_or_two_need_no_pipeline(is_backward: bool) -> None:
    few = image_plan(BATCH_NORM, (8, 256, 56, 56), is_backward=is_backward)
    many = image_plan(BATCH_NORM, (64, 256, 56, 56), is_backward=is_backward)
    assert (few.pattern, few.stages, few.ahead) == (HELD, 1, 0)
    assert (many.pattern, many.stages, many.ahead) == (HELD, 2, 1)
    assert few.per_unit > many.per_unit
    assert -(-256 // (few.programs // -(-8 // few.block_rows))) <= 2


def test_long_lines_of_one_round_are_not_held() -> None:
    assert image_plan(BATCH_NORM, (8, 64, 112, 112), is_backward=True).pattern == COLUMN_PATTERN
    assert image_plan(BATCH_NORM, (32, 64, 112, 112), is_backward=True).pattern == HELD


@pytest.mark.parametrize("shape", [(320, 64, 64), (64, 112, 112)], ids=str)
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_other_samples_of_groups_are_the_same_plan(shape: tuple[int, ...], is_backward: bool) -> None:
    plans = [
        image_plan(GROUP_NORM, (samples, *shape), 32, torch.bfloat16, is_backward) for samples in (1, 3, 8, 13, 32, 700)
    ]
    assert plans == [plans[0]] * len(plans)


@pytest.mark.parametrize("shape", [(64, 256, 56, 56), (32, 64, 112, 112), (256, 64, 112, 112)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_there_are_others_to_try(shape: tuple[int, ...], dtype: torch.dtype, is_backward: bool) -> None:
    """Of programs of any number of warps, up to eight."""
    device = KNOWN["sm_90"]
    problem, plan = image_problem(BATCH_NORM, shape, dtype=dtype, is_backward=is_backward)
    others = search.alternatives(problem, plan, device)
    assert (others[0], plan.pattern) == (plan, HELD)
    assert {other.ahead for other in others} == {plan.ahead, 0}
    assert len({other.per_unit for other in others}) > 2
    assert all(0 < other.programs == other.per_unit * device.units for other in others)


@pytest.mark.parametrize("cols", [127, 4095, 4096])
def test_others_of_rows_are_told_how_many_they_are(cols: int) -> None:
    """Or none of them is; but the chosen one is tried both ways. Where there is no pipeline, without one."""
    device = KNOWN["sm_90"]
    full, column = View((64, cols), (cols, 1), torch.bfloat16), View((cols,), (1,), torch.bfloat16)
    problem, _, plan = pipeline.plan_backward(LONG_ROW, (full, column, column, full), (0,), (0, 1, 2), device)
    chosen, turned, *others = search.alternatives(problem, plan, device)
    assert chosen == plan
    assert {chosen.per_unit, turned.per_unit} == {0, plan.programs // device.units}
    walks = [other for other in others if other.pattern == ROW]
    assert all(other.per_unit in (0, other.programs // device.units) for other in walks)
    assert (plan.per_unit > 0) == any(other.per_unit for other in walks)
    assert plan.stages in {other.stages for other in walks}


def odd_plans(shape: tuple[int, ...], device: Device, dtype: torch.dtype = torch.float16) -> list[tuple[Plan, Space]]:
    """Forward and backward."""
    strides = (prod(shape[1:]), prod(shape[2:]), shape[3], 1)
    image, parameter = View(shape, strides, dtype), View((shape[1], 1, 1), (1, 1, 1), torch.float32)
    views = (image, parameter, parameter, image)
    call = replace(IMAGES, outputs=(dtype,))
    _, space, plan = pipeline.plan_forward(call, views, device)
    _, lines, of_backward = pipeline.plan_backward(call, views, (0,), (0, 1, 2), device)
    return [(plan, space), (of_backward, lines)]


@pytest.mark.parametrize(
    ("shape", "members"),
    [((256, 1024, 14, 14), 0), ((32, 1024, 14, 14), 1), ((64, 512, 10, 10), 1), ((8, 64, 7, 7), 1)],
)
def test_odd_images_are_held_along_their_lines(shape: tuple[int, ...], members: int) -> None:
    """Where a device has teams; otherwise they are read across positions."""
    for plan, space in odd_plans(shape, KNOWN["sm_90"]):
        assert (plan.pattern, space.cols, space.pieces) == (HELD, shape[2] * shape[3], shape[0])
        assert not space.is_odd
        assert (-(-shape[0] // plan.block_rows) == 1) == (members == 1)
    for plan, space in odd_plans(shape, replace(KNOWN["sm_90"], has_teams=False)):
        assert (plan.pattern, space.cols, space.pieces) == (COLUMN_PATTERN, shape[0], shape[2] * shape[3])
        assert space.is_odd


def test_many_odd_images_are_read_across_positions() -> None:
    """A sum of elements moved alone takes longer than two visits; of float64 messages would have two words."""
    for shape, dtype in (((256, 2048, 7, 7), torch.float16), ((8, 64, 7, 7), torch.float64)):
        for plan, space in odd_plans(shape, KNOWN["sm_90"], dtype):
            assert plan.pattern == COLUMN_PATTERN
            assert space.is_odd == (dtype != torch.float64)


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(torch.where(mask, x, 0.0), None, None, training=True)


def dropped(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.batch_norm(x, None, None, training=True), 0.1, True)


def of_integers(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x.float(), None, None, training=True)


def test_what_would_not_fit_in_registers_is_not_carried_or_held() -> None:
    """Bytes take a register each, and integers more to widen; a mask of dropout is drawn for four elements at once."""
    images = torch.empty(64, 256, 56, 56, device="meta", dtype=torch.float16)
    plain = warpnorm.explain(masked, images.float(), images.bool(), target="sm_90").forward.plan
    assert (plain.pattern, plain.ahead) == (HELD, 0)
    integers = warpnorm.explain(of_integers, images.to(torch.int16), target="sm_90").forward.plan
    assert (integers.pattern, integers.ahead) == (HELD, 0)
    for function, x in ((of_integers, images.to(torch.uint8)), (dropped, images)):
        assert warpnorm.explain(function, x, target="sm_90").forward.plan.pattern == COLUMN_PATTERN


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
