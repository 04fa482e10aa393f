"""The iteration space of a call: from the exact layouts of its tensors to the classes of axes and strides that a problem
is made of, and the numbers that its kernel is told at run time."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from warpnorm.norms import CHANNEL, GROUPS, Norm
from warpnorm.problem import (
    ALIGNMENTS,
    ALONG,
    COLUMN,
    FULL,
    GROUP,
    GROUP_SCALAR,
    LARGEST_CLASS,
    NUMBER,
    ROW,
    SCALAR,
    TILES,
    VECTOR_BYTES,
    Axes,
    BackwardProblem,
    Call,
    ForwardProblem,
    Graph,
    Operand,
    Stride,
    View,
    compute_dtype,
    operand_name,
    width_step,
)

LARGEST_BLOCK = 4096  # of lines or columns, of a norm by channel, that may be known to divide their number
# Positions of an odd image up to which memory is read across them. BatchNorm of 256 x 2048 x 7 x 7 fp16, forward and
# backward: 49 and 53 percent of copy speed, along lines 6 and 7; of 256 x 1024 x 14 x 14 56 and 56; of 64 x 256 x 55 x 55
# 33 and 40. Between those nothing is measured, nor 55 x 55 along lines
LARGEST_ODD = 1024
FULL_BLOCK = 32  # columns of a block where memory runs across lines


class Space(NamedTuple):
    """Rows x cols, and what the kernel is told at run time. Rows come in `groups` of equal size: those that share the
    values of an operand whose gradient is wanted for each group. Of a norm by channel the rows here are lines: `pieces` of
    them share a statistic, every `inner_rows` lines one; `is_odd`: they are positions of images, which could be lines."""

    rows: int
    cols: int
    operands: tuple[Operand, ...]
    strides: tuple[int, ...]  # the values behind every Stride that is not a literal
    sizes: tuple[int, ...]  # of all row axes but the first, then of all column axes but the first
    row_order: tuple[int, ...]
    row_sizes: tuple[int, ...]
    cols_divisor: int
    groups: int = 1
    pieces: int = 1
    inner_rows: int = 1
    rows_divisor: int = 1
    size_divisors: tuple[int, ...] = ()
    is_odd: bool = False

    @property
    def statistics(self) -> int:
        """How many rows there are that have a statistic of their own."""
        return self.rows // self.pieces

    @property
    def cols_class(self) -> int:
        return 1 << max(self.cols - 1, 0).bit_length()


def shape_of(views: Sequence[View]) -> tuple[int, ...]:
    """Of the iteration space: what the operands broadcast to."""
    return broadcast_shapes(tuple(view.shape for view in views))


@lru_cache(maxsize=4096)
def broadcast_shapes(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """As `torch.broadcast_shapes`, which takes half a second the first time, and is asked where there is an error."""
    dims = max(map(len, shapes))
    found = []
    for sizes in zip(*((1,) * (dims - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        others = set(sizes) - {1}
        if len(others) > 1:
            return torch.broadcast_shapes(*shapes)
        found.append(others.pop() if others else 1)
    return tuple(found)


def describe_forward(
    call: Call, views: Sequence[View], graphs: tuple[Graph, Graph], is_along: bool = False
) -> tuple[ForwardProblem, Space]:
    """`views` are those of the operands, then of the outputs."""
    count = len(call.axes)
    space = _describe(call, views, (*call.axes, *[FULL] * len(call.outputs)), is_along)
    prologue, epilogue = graphs
    problem = ForwardProblem(
        *_head(call, views, space, prologue),
        epilogue=epilogue,
        outputs=space.operands[count:],
    )
    return problem, space


def _head(
    call: Call, views: Sequence[View], space: Space, prologue: Graph
) -> tuple[Norm, torch.dtype, int, int, bool, int, bool, tuple[Operand, ...], Graph, bool, int, tuple[int, ...], bool]:
    """What every problem begins with."""
    compute = compute_dtype([call.compute, *(view.dtype for view in views)])
    is_exact = space.cols == space.cols_class
    operands = space.operands[: len(call.axes)]
    step = width_step(call.norm, space.cols_class)
    width = -(-space.cols // step) * step
    head = (call.norm, compute, space.cols_class, space.cols_divisor, is_exact, width, width == space.cols, operands)
    divisors = space.size_divisors or (1,) * len(space.sizes)
    is_divided = call.norm.is_by_channel or len(space.row_sizes) > 1
    has_long_numbers = not is_divided or max(space.rows, space.cols) > LARGEST_CLASS
    return *head, prologue, space.pieces > 1, space.rows_divisor, divisors, has_long_numbers


class Gradients(NamedTuple):
    """Which outputs have a gradient, which operands want one, and by which of the two steps it reaches them."""

    given: tuple[int, ...]
    wanted: tuple[int, ...]
    of_epilogue: tuple[int, ...]
    of_prologue: tuple[int, ...]
    needs_grad_xhat: bool
    needs_grad_c: bool

    @staticmethod
    def of(graphs: tuple[Graph, Graph], given: tuple[int, ...], wanted: tuple[int, ...], kinds: int = 0) -> "Gradients":
        """`kinds`: so many of the first operands c depends on, whatever the prologue's graph reads."""
        prologue, epilogue = graphs
        by_prologue, by_epilogue = prologue.dependencies([0]), epilogue.dependencies(given)
        by_prologue |= {operand_name(i) for i in range(kinds)}
        of_epilogue = tuple(i for i in wanted if operand_name(i) in by_epilogue)
        reaches_c = bool(by_epilogue & {"xhat", "c"})
        of_prologue = tuple(i for i in wanted if operand_name(i) in by_prologue and reaches_c)
        return Gradients(
            given,
            tuple(i for i in wanted if i in of_epilogue or i in of_prologue),
            of_epilogue,
            of_prologue,
            bool(of_prologue) and "xhat" in by_epilogue,
            bool(of_prologue) and "c" in by_epilogue,
        )


def describe_backward(
    call: Call, views: Sequence[View], gradients: Gradients, graphs: tuple[Graph, Graph, Graph], is_along: bool = False
) -> tuple[BackwardProblem, Space]:
    """`views` are those of the operands, then of the given outputs' gradients, then of the wanted operands'."""
    count, given = len(call.axes), len(gradients.given)
    axes = (*call.axes, *[FULL] * given, *(call.axes[i] for i in gradients.wanted))
    space = _describe(call, views, axes, is_along, grouped_from=count + given)
    prologue, epilogue_vjp, prologue_vjp = graphs
    channel = tuple(dim == 1 for dim in range(len(shape_of(views[:count]))))
    is_by_row = [call.norm.rows == CHANNEL and call.axes[i] == channel for i in gradients.wanted]
    problem = BackwardProblem(
        *_head(call, views, space, prologue),
        epilogue_vjp=epilogue_vjp,
        prologue_vjp=prologue_vjp,
        grad_outputs=space.operands[count : count + given],
        gradients=space.operands[count + given :],
        given=gradients.given,
        wanted=gradients.wanted,
        wanted_of_epilogue=gradients.of_epilogue,
        wanted_of_prologue=gradients.of_prologue,
        needs_grad_xhat=gradients.needs_grad_xhat,
        needs_grad_c=gradients.needs_grad_c,
        row_order=space.row_order,
        by_row=tuple(k for k, is_one in enumerate(is_by_row) if is_one),
        has_row_factors=call.norm.rows == CHANNEL
        and all(o.axes not in ALONG or a == channel for o, a in zip(space.operands[:count], call.axes, strict=True)),
    )
    return problem, space


def _describe(
    call: Call, views: Sequence[View], axes: Sequence[Axes], is_along: bool, grouped_from: int | None = None
) -> Space:
    shape = shape_of(views[: len(call.axes)])
    if not call.norm.is_by_channel:
        space = describe(views, axes, shape, call.col_dims, grouped_from)
        return space._replace(operands=tuple(_as_aligned_as_rows(o, space.cols_divisor) for o in space.operands))
    return describe_lines(call, views, axes, shape, is_along)


def _as_aligned_as_rows(operand: Operand, cols_divisor: int) -> Operand:
    """Of a norm over rows: the first is taken to begin no better than all of them do, so that a problem does not hang on
    which one it is."""
    if operand.col_strides[-1].literal != 1:
        return operand
    others = [s.divisor for s in (*operand.row_strides, *operand.col_strides[:-1]) if s.literal != 0]
    size = min(cols_divisor, *others, VECTOR_BYTES) * operand.dtype.itemsize
    found = min(operand.alignment, size if size >= ALIGNMENTS[-1] else 1)
    return operand if operand.alignment == found else replace(operand, alignment=found)


def describe_lines(
    call: Call, views: Sequence[View], axes: Sequence[Axes], shape: Sequence[int], is_along: bool = False
) -> Space:
    """A norm by channel. What the rows lie in is a dimension: the samples of a channel, or the channels of a group. Where it
    and the dimensions after the channel are walked as one, rows are lines. Otherwise every row lies in pieces, a line each:
    the channels of a group in their order, samples where they are further apart in memory before the channels. Images of an
    odd size are not read along these, which do not begin at whole vectors, but if `is_along`: every position is a piece,
    whose columns are the samples, and memory runs across all of them."""
    sizes: tuple[int, ...] = tuple(shape)
    masks = [(a == FULL,) * len(shape) if isinstance(a, str) else a for a in axes]
    strides = [_strides(view, mask) for view, mask in zip(views, masks, strict=True)]
    if call.norm.rows == GROUPS:
        width = sizes[1] // call.groups  # channels of a group
        sizes = (sizes[0], call.groups, width, *sizes[2:])
        strides = [(s[0], s[1] * width, *s[1:]) for s in strides]
        masks = [(m[0], m[1], *m[1:]) for m in masks]
        rows, pieces, inner = [0, 1], 2, list(range(3, len(sizes)))
    else:
        rows, pieces, inner = [1], 0, list(range(2, len(sizes)))
    cols = [pieces, *inner]
    merged = _collapse(
        [sizes[d] for d in cols], [[s[d] for d in cols] for s in strides], [[m[d] for d in cols] for m in masks],
        [0] * len(views), [(False,)] * len(views),
    )[0]  # fmt: skip
    is_odd = False
    is_whole = len(merged) == 1 and (call.norm.rows == CHANNEL or prod(sizes[d] for d in inner) > 1)
    lines = rows
    if is_whole:
        inner = cols
    else:
        whole = next(s for s, m in zip(strides, masks, strict=True) if all(m))
        is_first = call.norm.rows == CHANNEL and whole[1] < whole[pieces]
        lines = [pieces, *rows] if is_first else [*rows, pieces]
        are_columns = all(all(m) or not m[pieces] for m in masks)  # nobody has values by sample alone, to be summed
        itemsize = max(v.dtype.itemsize for v, m in zip(views, masks, strict=True) if all(m))
        is_odd = is_first and not is_along and are_columns and _is_odd(sizes, whole, itemsize)
        if is_odd:
            lines, inner = [*rows, *inner], [pieces]
        if not inner:  # a column of its own for every element
            sizes, inner = (*sizes, 1), [len(sizes)]
            strides = [(*s, 1) for s in strides]
            masks = [(*m, all(m)) for m in masks]
    order = [*lines, *inner]
    placed = [
        View(tuple(sizes[d] for d in order), tuple(s[d] for d in order), v.dtype, v.alignment)
        for v, s in zip(views, strides, strict=True)
    ]
    own: list[Axes] = [a if a == NUMBER else tuple(m[d] for d in order) for a, m in zip(axes, masks, strict=True)]
    # A lone sample is described as several are
    keeps_first = call.norm.rows == GROUPS and len(lines) > 1
    space = describe(placed, own, [sizes[d] for d in order], len(inner), keeps_first=keeps_first)
    flat = [is_odd and _walks_as_one(lines, sizes, s) for s in strides]
    space = space._replace(
        operands=tuple(replace(o, varies=False, is_flat=f) for o, f in zip(space.operands, flat, strict=True))
    )
    space = _with_divisors(space, sizes, lines, inner)
    if is_whole or sizes[pieces] == 1:
        return space._replace(inner_rows=space.rows)
    if is_odd:
        return space._replace(pieces=prod(sizes[d] for d in lines[1:]), inner_rows=1, is_odd=True)
    after = lines[lines.index(pieces) + 1 :]
    return space._replace(pieces=sizes[pieces], inner_rows=prod(sizes[d] for d in after))


def _is_odd(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether images that fill the memory of their samples, several of these, do not begin at whole vectors. Those of
    float64 nobody has measured."""
    own = [d for d in range(1, len(sizes)) if sizes[d] != 1]
    positions = prod(sizes[2:])
    if sizes[0] == 1 or len(own) < 2 or positions > LARGEST_ODD:
        return False
    if itemsize > 4 or positions * itemsize % VECTOR_BYTES == 0:
        return False
    return strides[own[-1]] == 1 and _walks_as_one(own, sizes, strides)


def _walks_as_one(dims: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Several dimensions, in their order."""
    own = [d for d in dims if sizes[d] != 1]
    return len(own) > 1 and all(strides[a] == strides[b] * sizes[b] != 0 for a, b in pairwise(own))


def _with_divisors(space: Space, sizes: Sequence[int], lines: Sequence[int], inner: Sequence[int]) -> Space:
    """What divides the number of lines, of columns, and the sizes of axes, whatever the number of samples (the dimension 0):
    it should not take another kernel. Of columns that are samples too it is said whether blocks of them are full."""
    of_lines, of_cols = (prod(sizes[d] for d in dims if d != 0) for dims in (lines, inner))
    cols_divisor = power_of_two_divisor(of_cols, LARGEST_BLOCK)
    if 0 in inner and space.cols % FULL_BLOCK == 0:
        cols_divisor = max(cols_divisor, FULL_BLOCK)
    largest = LARGEST_BLOCK if 0 not in lines[1:] else 1
    divisors = tuple(power_of_two_divisor(size, largest) for size in space.sizes)
    rows_divisor = power_of_two_divisor(of_lines, LARGEST_BLOCK)
    return space._replace(cols_divisor=cols_divisor, rows_divisor=rows_divisor, size_divisors=divisors)


def describe(
    views: Sequence[View],
    axes: Sequence[Axes],
    shape: Sequence[int],
    col_dims: int,
    grouped_from: int | None = None,
    keeps_first: bool = False,
) -> Space:
    """Collapse the axes of `shape` (the last `col_dims` are columns) as far as every operand's strides allow. The operands
    from number `grouped_from` on are gradients: the row axes that one of them keeps of several come first. `keeps_first`:
    also where the first axis has size one, it is one."""
    dims = len(shape)
    row_dims = dims - col_dims
    rows, cols = prod(shape[:row_dims]), prod(shape[row_dims:])
    masks = [_mask(a, dims, row_dims) for a in axes]
    strides = [_strides(view, mask) for view, mask in zip(views, masks, strict=True)]
    # Of an axis that vanishes the innermost stride stays, so that one row is of the class that more rows would be
    lone_row = [
        ((s[row_dims - 1] if row_dims else cols) if _keeps_rows(m[:row_dims], a) else 0)
        for s, m, a in zip(strides, masks, axes, strict=True)
    ]
    lone_row_masks = [(_keeps_rows(m[:row_dims], a),) for m, a in zip(masks, axes, strict=True)]
    lone_col = [1 if any(m[row_dims:]) else 0 for m in masks]
    lone_col_masks = [(any(m[row_dims:]),) for m in masks]
    row_sizes, row_strides, row_masks = _collapse(
        shape[:row_dims], [s[:row_dims] for s in strides], [m[:row_dims] for m in masks], lone_row, lone_row_masks,
        keeps_first,
    )  # fmt: skip
    col_sizes, col_strides, col_masks = _collapse(
        shape[row_dims:], [s[row_dims:] for s in strides], [m[row_dims:] for m in masks], lone_col, lone_col_masks
    )
    kept = next((m for m in row_masks[grouped_from:] if any(m) and not all(m)), None) if grouped_from else None
    order = tuple(range(len(row_sizes)))
    groups = 1
    if kept is not None:
        order = tuple(sorted(order, key=lambda axis: (not kept[axis], axis)))
        groups = prod(size for size, keeps in zip(row_sizes, kept, strict=True) if keeps)
        row_sizes = tuple(row_sizes[axis] for axis in order)
        row_strides = [tuple(s[axis] for axis in order) for s in row_strides]

    values: list[int] = []

    def classify(stride: int, itemsize: int) -> Stride:
        if stride in (0, 1):
            return Stride(stride, 1, -1)
        values.append(stride)
        return Stride(None, power_of_two_divisor(stride, max(VECTOR_BYTES // itemsize, 1)), len(values) - 1)

    operands = tuple(
        Operand(
            view.dtype,
            NUMBER if a == NUMBER else _class(row_mask, col_mask),
            tuple(classify(stride, view.dtype.itemsize) for stride in by_row),
            tuple(classify(stride, view.dtype.itemsize) for stride in by_col),
            view.alignment,
            _class(row_mask, col_mask) in TILES or (any(mask[:row_dims]) and any(mask[row_dims:])),
        )
        for view, a, mask, by_row, by_col, row_mask, col_mask in zip(
            views, axes, masks, row_strides, col_strides, row_masks, col_masks, strict=True
        )
    )
    sizes = (*row_sizes[1:], *col_sizes[1:])
    divisor = power_of_two_divisor(cols, VECTOR_BYTES)
    return Space(rows, cols, operands, tuple(values), sizes, order, tuple(row_sizes), divisor, groups)


def _mask(axes: Axes, dims: int, row_dims: int) -> tuple[bool, ...]:
    """For each dimension whether the operand has values of its own along it."""
    if not isinstance(axes, str):
        return axes
    return (axes == FULL,) * row_dims + (axes in (FULL, COLUMN),) * (dims - row_dims)


def _keeps_rows(row_mask: tuple[bool, ...], axes: Axes) -> bool:
    """Whether rows have values of their own; where there are no row dimensions at all, what is said to be full does."""
    return any(row_mask) or axes == FULL or (not row_mask and not isinstance(axes, str))


def _strides(view: View, mask: tuple[bool, ...]) -> tuple[int, ...]:
    """One for each dimension of the space; the operand's own dimensions are its last ones."""
    missing = len(mask) - len(view.strides)
    own = (0,) * missing + tuple(view.strides)
    return tuple(stride if keeps else 0 for stride, keeps in zip(own, mask, strict=True))


def _class(row_mask: tuple[bool, ...], col_mask: tuple[bool, ...]) -> str:
    if any(col_mask):
        return FULL if all(row_mask) else GROUP if any(row_mask) else COLUMN
    return ROW if all(row_mask) else GROUP_SCALAR if any(row_mask) else SCALAR


def _collapse(
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    alone: Sequence[int],
    alone_masks: Sequence[tuple[bool, ...]],
    keeps_first: bool = False,
) -> tuple[tuple[int, ...], list[tuple[int, ...]], list[tuple[bool, ...]]]:
    """Drop axes of size one and merge neighbours that every tensor walks as one. Where nothing is left, one axis of
    size one stays, with the strides in `alone`."""
    dims = [dim for dim, size in enumerate(sizes) if size != 1 or (keeps_first and dim == 0)]
    if not dims:
        return (1,), [(stride,) for stride in alone], list(alone_masks)
    groups: list[list[int]] = []
    for dim in dims:
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and all(s[last] == s[dim] * sizes[dim] for s in strides)
            and all(m[last] == m[dim] for m in masks)
        ):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    merged = tuple(prod(sizes[dim] for dim in group) for group in groups)
    inner = [group[-1] for group in groups]
    return merged, [tuple(s[d] for d in inner) for s in strides], [tuple(m[d] for d in inner) for m in masks]


def power_of_two_divisor(number: int, largest: int) -> int:
    """The largest power of two, `largest` at most, that divides `number`."""
    return min(number & -number, largest) if number else largest


def fresh(view: View, norm: Norm) -> View:
    """A new tensor of the same shape and dtype, for a norm by channel also in the same memory format. Of an 8-bit float it
    is float32: PyTorch rounds it."""
    dtype = torch.float32 if view.dtype.is_floating_point and view.dtype.itemsize == 1 else view.dtype
    if norm.is_by_channel:
        strides = view.strides
        if not _is_dense(view):
            strides = torch.empty_like(torch.empty_strided(view.shape, view.strides, device="meta")).stride()
    else:
        strides = torch.empty(view.shape, device="meta").stride()
    return View(view.shape, strides, dtype)


def _is_dense(view: View) -> bool:
    """Whether its elements fill their memory, each once: then a tensor like it has the same strides."""
    expected = 1
    for stride, size in sorted(zip(view.strides, view.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
