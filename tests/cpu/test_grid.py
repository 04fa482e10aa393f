"""How many programs run, and what they divide by."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import warpnorm
from warpnorm import pipeline
from warpnorm.norms import LAYER_NORM, RMS_NORM, Norm
from warpnorm.plan import choose, grid
from warpnorm.plan.device import KNOWN
from warpnorm.plan.plan import ROW, TEAM, Plan
from warpnorm.problem import COLUMN, FULL, Call, View
from warpnorm.reference import Affine, Itself

examples = settings(max_examples=2000, deadline=None, database=None, derandomize=True)


@examples
@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1) | st.integers(1, 300))
def test_reciprocals_divide(number: int, divisor: int) -> None:
    factor, shift = grid.reciprocal(divisor)
    assert 0 < factor < 2**32
    assert ((2 * number * factor) >> 32) >> shift == number // divisor
    multiple = number // divisor * divisor
    for near in {max(multiple - 1, 0), multiple, min(multiple + 1, 2**31 - 1)}:
        assert ((2 * near * factor) >> 32) >> shift == near // divisor


@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=lambda norm: norm.name)
@pytest.mark.parametrize("cols", [1, 2, 3, 16, 100, 512, 513, 4096, 65_536, 1 << 20])
def test_every_number_of_rows_has_programs(cols: int, norm: Norm) -> None:
    """As many rows as a GPU has memory for, in no more programs than a launch takes, and numbers of 64 bits."""
    rows = (1 << 36) // cols + 5
    call = Call(norm, 1, 1e-5, Itself(), Affine(True, False), (FULL, COLUMN), (torch.float16,))
    full, column = View((rows, cols), (cols, 1), torch.float16), View((cols,), (1,), torch.float32)
    forward, space = pipeline.forward_problem(call, (full, column, full))
    backward, of_backward = pipeline.backward_problem(call, (full, column, full), (0,), (0, 1))
    assert forward.has_long_numbers
    assert backward.has_long_numbers
    for device in KNOWN.values():
        plan = choose.forward(forward, device)
        programs = grid.forward(plan, space)
        assert 0 < programs[0] < 2**31
        assert 0 < programs[1] < 2**16
        assert plan.programs or programs[0] * plan.block_rows >= rows
        plan = choose.backward(backward, device)
        programs = grid.backward(plan, of_backward)
        assert 0 < programs[0] < 2**31
        assert 0 < programs[1] < 2**16
        sums = [grid.gradient_sum(plan, of_backward, backward, i) for i in backward.reduced]
        assert [s.width for s in sums] == [cols]
        assert sums[0].height <= min(rows, max(plan.programs, 1))


WIDTHS = [
    step * part + more for step in (8, 64, 128, 1024, 8192) for part in (9, 10, 12, 13, 15) for more in (-8, 0, 8)
]
BY_CHANNEL: dict[str, Callable[..., torch.Tensor]] = {
    "group_norm": lambda x: F.group_norm(x, 4),
    "instance_norm": F.instance_norm,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
}


def check(plan: Plan, width: int) -> None:
    """A kernel takes it: tiles and warps are powers of two, and all columns have a place."""
    assert all(size > 0 and size & (size - 1) == 0 for size in (plan.block_rows, plan.block_cols, plan.warps)), plan
    assert plan.pattern not in (ROW, TEAM) or plan.block_cols * plan.chunks * plan.splits >= width, plan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=lambda norm: norm.name)
def test_every_width_has_a_plan(norm: Norm, dtype: torch.dtype) -> None:
    call = Call(norm, 1, 1e-5, Itself(), Affine(True, False), (FULL, COLUMN), (dtype,))
    for cols in WIDTHS:
        full, column = View((64, cols), (cols, 1), dtype), View((cols,), (1,), dtype)
        for device in KNOWN.values():
            check(choose.forward(pipeline.forward_problem(call, (full, column, full))[0], device), cols)
            check(choose.backward(pipeline.backward_problem(call, (full, column, full), (0,), (0, 1))[0], device), cols)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", BY_CHANNEL)
def test_every_image_has_a_plan(name: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        x = torch.empty(2, 8, width, device="meta", dtype=dtype).requires_grad_()
        found = warpnorm.explain(BY_CHANNEL[name], x, target="sm_90")
        for direction in (found.forward, found.backward):
            assert direction is not None
            check(direction.plan, direction.problem.width)


def test_samples_one_after_another() -> None:
    """Channels last: those of a norm over samples lie side by side."""
    x = torch.empty(8, 64, 64, 64, device="meta", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
        "group_norm": lambda x: F.group_norm(x, 32),
        "instance_norm": lambda x: F.instance_norm(x),
    }
    found = {name: warpnorm.explain(f, x.requires_grad_(), target="sm_90") for name, f in functions.items()}
    for name, by_units in {"batch_norm": False, "group_norm": True, "instance_norm": True}.items():
        for direction in (found[name].forward, found[name].backward):
            assert direction is not None
            assert direction.plan.by_units == by_units, name


def test_columns_of_a_thread_are_merged_first_where_blocks_are_full() -> None:
    def together(x: torch.Tensor) -> list[int]:
        found = warpnorm.explain(lambda x: F.group_norm(x, 32), x.requires_grad_(), target="sm_90")
        assert found.forward is not None
        assert found.backward is not None
        return [found.forward.plan.together, found.backward.plan.together]

    def images(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(8, 320, size, size, device="meta", dtype=dtype).to(memory_format=torch.channels_last)

    assert together(images(64, torch.bfloat16)) == [4, 4]
    assert together(images(64, torch.float32)) == [1, 8]  # forward's means are corrected
    assert together(images(63, torch.bfloat16)) == [1, 1]
    assert together(torch.empty(8, 320, 200, 200, device="meta", dtype=torch.bfloat16)) == [1, 1]
