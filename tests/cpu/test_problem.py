"""The iteration space of a call: collapsed axes and the addresses they give, the classes of strides, and that a problem
does not know how many rows there are."""

from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from warpnorm import pipeline
from warpnorm.codegen import pointwise
from warpnorm.norms import LAYER_NORM
from warpnorm.plan import choose
from warpnorm.plan.device import KNOWN
from warpnorm.problem import (
    ALIGNMENTS,
    COLUMN,
    FULL,
    NUMBER,
    SCALAR,
    VECTOR_BYTES,
    BackwardProblem,
    Call,
    ForwardProblem,
    Operand,
    Stride,
    View,
)
from warpnorm.reference import Affine, Itself
from warpnorm.space import Space, describe, power_of_two_divisor

examples = settings(max_examples=200, deadline=None, database=None, derandomize=True)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16])


def offsets(operand: Operand, space: Space) -> np.ndarray:
    """(rows, cols) of the distances from the pointer, by the very expressions that kernels are generated with."""
    names = {"strides": space.strides, "sizes": space.sizes}
    names |= {"row_offsets": np.arange(space.rows), "col_offsets": np.arange(space.cols)}
    by_row, by_col = (pointwise._offset(operand, rows=rows) for rows in (True, False))
    zeros = np.zeros((space.rows, space.cols), dtype=np.int64)
    rows = eval(by_row, names)[:, None] if by_row else 0
    cols = eval(by_col, names)[None, :] if by_col else 0
    return zeros + rows + cols


def elements(tensor: torch.Tensor, space: Space) -> np.ndarray:
    """(rows, cols) of the distances of a tensor's elements from its first, in logical order."""
    index = torch.arange(tensor.storage_offset() + _reach(tensor) + 1)
    walked = index.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()) - tensor.storage_offset()
    return walked.reshape(space.rows, space.cols).numpy()


def _reach(tensor: torch.Tensor) -> int:
    return sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Contiguous, or a view: some axes expanded, some sliced with a step and a start, all in any order in memory."""
    if draw(st.booleans()):
        return torch.zeros(shape, dtype=dtype)
    order = draw(st.permutations(range(len(shape))))
    base, index = [], []
    is_expanded = [draw(st.integers(0, 4)) == 0 for _ in shape]
    for dim in order:
        start, step, spare = draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 1))
        if draw(st.booleans()):
            start, step, spare = 0, 1, 0
        size = 1 if is_expanded[dim] else shape[dim]
        base.append(start + step * size + spare)
        index.append(slice(start, start + step * size, step))
    view = torch.zeros(base, dtype=dtype)[tuple(index)]
    return view.permute([order.index(dim) for dim in range(len(shape))]).expand(shape)


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[torch.Tensor], int]:
    """Input, output, then a weight over the columns; and how many dimensions are columns."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    col_dims = draw(st.integers(1, len(shape)))
    shapes = (shape, shape, shape[len(shape) - col_dims :])
    return [draw(tensors(s, draw(DTYPES))) for s in shapes], col_dims


@given(calls())
@examples
def test_addresses_are_those_of_the_elements(call: tuple[list[torch.Tensor], int]) -> None:
    (input, output, weight), col_dims = call
    scalar = torch.ones(())
    views = [View.of(value) for value in (input, output, weight, scalar, 2.0)]
    space = describe(views, (FULL, FULL, COLUMN, SCALAR, NUMBER), input.shape, col_dims)
    assert space.rows * space.cols == input.numel()
    for tensor, operand in zip((input, output), space.operands, strict=False):
        np.testing.assert_array_equal(offsets(operand, space), elements(tensor, space))
    expanded = weight.expand(input.shape)
    np.testing.assert_array_equal(offsets(space.operands[2], space), elements(expanded, space))
    for operand in space.operands[3:]:
        assert not offsets(operand, space).any()


@dataclass(frozen=True)
class Collapse:
    name: str
    make: Callable[[], torch.Tensor]
    row_strides: tuple[int, ...]
    col_strides: tuple[int, ...]
    why: str


COLLAPSES = [
    Collapse("contiguous", lambda: torch.zeros(2, 3, 4, 5), (20,), (1,), "one axis each"),
    Collapse(
        "ones", lambda: torch.zeros(2, 1, 3, 4, 8)[:, :, ::2], (96, 64), (1,), "a row axis of size one is dropped"
    ),
    Collapse("packed_qkv", lambda: torch.zeros(2, 3, 3, 4, 5)[:, :, 1], (60,), (1,), "rows three widths apart"),
    Collapse("transposed", lambda: torch.zeros(3, 2, 4, 5).transpose(0, 1), (20, 40), (1,), "rows out of order"),
    Collapse("channels_last", lambda: torch.zeros(2, 3, 5, 4).transpose(2, 3), (20,), (1, 4), "columns out of order"),
    Collapse("cropped", lambda: torch.zeros(2, 3, 4, 8)[..., :5], (32,), (8, 1), "columns with a gap"),
    Collapse("expanded", lambda: torch.zeros(1, 1, 4, 5).expand(2, 3, 4, 5), (0,), (1,), "a broadcast of two axes"),
]


@pytest.mark.parametrize("case", COLLAPSES, ids=lambda case: case.name)
def test_axes_collapse(case: Collapse) -> None:
    tensor = case.make()
    space = describe([View.of(tensor)], (FULL,), tensor.shape, 2)
    (operand,) = space.operands
    assert tuple(_value(stride, space) for stride in operand.row_strides) == case.row_strides
    assert tuple(_value(stride, space) for stride in operand.col_strides) == case.col_strides


@given(calls())
@examples
def test_operands_walk_the_same_axes(call: tuple[list[torch.Tensor], int]) -> None:
    """One set of sizes serves every operand, and neighbours that could be one axis for all of them are one."""
    (input, output, weight), col_dims = call
    space = describe([View.of(t) for t in (input, output, weight)], (FULL, FULL, COLUMN), input.shape, col_dims)
    (row_axes,) = {len(operand.row_strides) for operand in space.operands}
    (col_axes,) = {len(operand.col_strides) for operand in space.operands}
    assert len(space.sizes) == row_axes + col_axes - 2
    row_sizes, col_sizes = space.sizes[: row_axes - 1], space.sizes[row_axes - 1 :]
    for inner_sizes, strides in (
        (row_sizes, [operand.row_strides for operand in space.operands]),
        (col_sizes, [operand.col_strides for operand in space.operands]),
    ):
        for axis, size in enumerate(inner_sizes):
            assert size > 1
            assert any(_value(s[axis], space) != _value(s[axis + 1], space) * size for s in strides)


def _value(stride: Stride, space: Space) -> int:
    return space.strides[stride.slot] if stride.literal is None else stride.literal


@given(calls())
@examples
def test_classes_of_strides_are_true(call: tuple[list[torch.Tensor], int]) -> None:
    """A literal is the stride; a divisor divides it, is a power of two, and fills at most one vector."""
    (input, output, weight), col_dims = call
    space = describe([View.of(t) for t in (input, output, weight)], (FULL, FULL, COLUMN), input.shape, col_dims)
    slots = []
    for operand in space.operands:
        for stride in (*operand.row_strides, *operand.col_strides):
            if stride.literal is not None:
                assert stride.literal in (0, 1)
                continue
            value = space.strides[stride.slot]
            slots.append(stride.slot)
            assert value not in (0, 1)
            largest = VECTOR_BYTES // operand.dtype.itemsize
            assert stride.divisor == max(d for d in (1, 2, 4, 8) if d <= largest and value % d == 0)
    assert slots == list(range(len(space.strides)))


@given(calls())
@examples
def test_vectors_are_promised_only_where_rows_begin_aligned(call: tuple[list[torch.Tensor], int]) -> None:
    (input, output, _), col_dims = call
    space = describe([View.of(t) for t in (input, output)], (FULL, FULL), input.shape, col_dims)
    for tensor, operand in zip((input, output), space.operands, strict=True):
        found = next((size for size in ALIGNMENTS if operand.has_vectors_of(size)), 0)
        assert operand.has_vectors == (found == VECTOR_BYTES)
        if not found:
            continue
        run = space.cols if len(operand.col_strides) == 1 else space.sizes[-1]  # of adjacent columns
        starts = tensor.data_ptr() + offsets(operand, space)[:, ::run] * tensor.element_size()
        assert (starts % found == 0).all()
        assert (np.diff(offsets(operand, space).reshape(-1, run), axis=1) == 1).all()


@dataclass(frozen=True)
class StrideCase:
    name: str
    make: Callable[[], torch.Tensor]
    literal: int | None
    divisor: int
    why: str


STRIDES = [
    StrideCase("contiguous", lambda: torch.zeros(4, 64), None, 4, "64 floats are whole vectors"),
    StrideCase("odd", lambda: torch.zeros(4, 63), None, 1, "no row but the first begins aligned"),
    StrideCase("even", lambda: torch.zeros(4, 66), None, 2, "half a vector"),
    StrideCase("half_precision", lambda: torch.zeros(4, 8, dtype=torch.float16), None, 8, "eight halves are a vector"),
    StrideCase("double_precision", lambda: torch.zeros(4, 8, dtype=torch.float64), None, 2, "two doubles are a vector"),
    StrideCase("expanded", lambda: torch.zeros(1, 64).expand(4, 64), 0, 1, "every row is the first"),
    StrideCase("column_major", lambda: torch.zeros(64, 4).t(), 1, 1, "rows are neighbours"),
]


@pytest.mark.parametrize("case", STRIDES, ids=lambda case: case.name)
def test_class_of_a_row_stride(case: StrideCase) -> None:
    tensor = case.make()
    space = describe([View.of(tensor)], (FULL,), tensor.shape, 1)
    (stride,) = space.operands[0].row_strides
    assert (stride.literal, stride.divisor) == (case.literal, case.divisor)


def test_power_of_two_divisor() -> None:
    for number in range(1, 200):
        assert power_of_two_divisor(number, 8) == max(d for d in (1, 2, 4, 8) if number % d == 0)
    assert power_of_two_divisor(0, 8) == 8


@dataclass(frozen=True)
class Layout:
    """`make` gives the input of this many rows."""

    name: str
    make: Callable[[int], torch.Tensor]
    why: str
    dtype: torch.dtype = torch.bfloat16


LAYOUTS = [
    Layout("contiguous", lambda rows: torch.zeros(rows, 96), "the common call"),
    Layout("odd_width", lambda rows: torch.zeros(rows, 41), "no whole vectors"),
    Layout("one_column", lambda rows: torch.zeros(rows, 1), "a row stride of one"),
    Layout("batch", lambda rows: torch.zeros(rows, 3, 96), "two row axes that collapse"),
    Layout("tokens", lambda rows: torch.zeros(3, rows, 96), "the inner one grows"),
    Layout("packed_qkv", lambda rows: torch.zeros(rows, 3, 96)[:, 0], "rows three widths apart"),
    Layout("packed_qkv_odd", lambda rows: torch.zeros(rows, 3, 41)[:, 1], "and of odd width"),
    Layout("packed_batch", lambda rows: torch.zeros(2, rows, 3, 96)[:, :, 2], "two axes of such rows"),
    Layout(
        "packed_pair", lambda rows: torch.zeros(rows, 2, 41)[:, 0], "gate and up: the stride is even, the width odd"
    ),
    Layout(
        "grouped_query", lambda rows: torch.zeros(rows, 600)[:, 500:], "the stride is 8 times something, the width 4"
    ),
    Layout("cropped_odd", lambda rows: torch.zeros(rows, 97)[:, :96], "whole vectors, but rows begin unaligned"),
    Layout("cropped", lambda rows: torch.zeros(rows, 128)[:, :100], "a padded buffer"),
]


def problems(layout: Layout, rows: int) -> tuple[ForwardProblem, BackwardProblem]:
    """Forward and backward, with a weight and a bias."""
    view = layout.make(rows)
    buffer = torch.zeros(view.storage_offset() + _reach(view) + 1, dtype=layout.dtype)
    input = buffer.as_strided(view.shape, view.stride(), view.storage_offset())
    output, weight = torch.empty(view.shape, dtype=layout.dtype), torch.empty(view.shape[-1:], dtype=layout.dtype)
    call = Call(LAYER_NORM, 1, 1e-5, Itself(), Affine(True, True), (FULL, COLUMN, COLUMN), (layout.dtype,))
    views = [View.of(tensor) for tensor in (input, weight, weight, output)]  # the output's gradient lies as it does
    forward, _ = pipeline.forward_problem(call, views)
    backward, _ = pipeline.backward_problem(call, views, (0,), (0, 1))
    return forward, backward


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_problem_does_not_know_the_number_of_rows(layout: Layout) -> None:
    """Or a kernel would be compiled again for it."""
    many = problems(layout, 64)
    for rows in (2, 3, 7, 1000):
        assert problems(layout, rows) == many, f"{rows} rows"
    assert problems(layout, 1) == many, "one row"


@pytest.mark.parametrize(("cols", "neighbours"), [(41, 1), (42, 2), (1002, 2), (44, 4), (1004, 4), (48, 8)])
def test_problem_does_not_know_where_rows_begin(cols: int, neighbours: int) -> None:
    """A slice of rows is the problem that all of them are, and as many elements are moved at once."""
    rows = torch.zeros(8, cols, dtype=torch.bfloat16)
    assert rows.data_ptr() % VECTOR_BYTES == 0
    weight = torch.zeros(cols, dtype=torch.bfloat16)
    call = Call(LAYER_NORM, 1, 1e-5, Itself(), Affine(True, True), (FULL, COLUMN, COLUMN), (torch.bfloat16,))
    found = set()
    for row in range(8):
        views = [View.of(tensor) for tensor in (rows[row:], weight, weight, torch.empty_like(rows[row:]))]
        found.add(pipeline.forward_problem(call, views)[0])
    (problem,) = found
    assert (problem.neighbours, problem.has_vectors) == (neighbours, neighbours == 8)


@pytest.mark.parametrize(("offset", "neighbours"), [(0, 8), (8, 8), (4, 4), (2, 2), (6, 2), (1, 1)])
def test_rows_that_begin_elsewhere(offset: int, neighbours: int) -> None:
    """In whole vectors of a buffer that is not read from its beginning."""
    buffer = torch.zeros(8 * 64 + 8, dtype=torch.float16)
    input = buffer[offset : offset + 8 * 64].view(8, 64)
    call = Call(LAYER_NORM, 1, 1e-5, Itself(), Affine(False, False), (FULL,), (torch.float16,))
    problem = pipeline.forward_problem(call, [View.of(input), View.of(torch.empty_like(input))])[0]
    assert (problem.neighbours, problem.has_vectors) == (neighbours, neighbours == 8)


@pytest.mark.parametrize("device", KNOWN)
def test_plan_does_not_know_the_number_of_rows(device: str) -> None:
    """Or a row would have other bits next to others: here rows of 12288 that begin unaligned, all but the first."""
    layout = Layout("cropped_wide", lambda rows: torch.zeros(rows, 12289)[:, :12288], "whole vectors, odd stride")
    plans = [
        (choose.forward(forward, KNOWN[device]), choose.backward(backward, KNOWN[device]))
        for forward, backward in (problems(layout, rows) for rows in (1, 2, 5))
    ]
    assert plans[1] == plans[2]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("cols", [1, 3, 4, 12, 16, 40, 41])
def test_problem_knows_what_changes_the_code(cols: int) -> None:
    """Another width, dtype or layout is another problem, unless the same code serves both."""
    contiguous, packed = LAYOUTS[0], LAYOUTS[5]
    assert problems(contiguous, 8) == problems(packed, 8), "only the value of the row stride differs"
    wide = Layout("wide", lambda rows: torch.zeros(rows, cols), "this width")
    odd = Layout("odd", lambda rows: torch.zeros(rows, cols + 64), "another class of widths")
    assert problems(wide, 8) != problems(odd, 8)
    halves = Layout("halves", wide.make, "another dtype", torch.float16)
    assert problems(wide, 8) != problems(halves, 8)
    if cols > 1:
        turned = Layout("turned", lambda rows: torch.zeros(cols, rows).t(), "columns apart")
        assert problems(wide, 8) != problems(turned, 8)
