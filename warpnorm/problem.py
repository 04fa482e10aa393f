"""Frozen records of what is computed: the call a user made, its pointwise graphs, and the problem it poses.
A problem holds all that may change the compiled code, and nothing that may not: neither the number of rows nor
the value of a stride is in it. `describe` turns the exact layouts of one call's tensors into such classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch

from warpnorm.norms import Norm

# The axes along which an operand has values of its own. Along the others it is broadcast.
FULL = "full"  # every row, every column
COLUMN = "column"  # one value a column: a weight
SCALAR = "scalar"  # one value, in a tensor
NUMBER = "number"  # one value, a Python number handed over by value

VECTOR_BYTES = 16  # the widest load or store of one thread
LARGEST_CLASS = 1 << 30  # column counts above it need 64-bit column offsets


Value = str | float | int  # the name of an input or of an earlier node, or a literal


@dataclass(frozen=True)
class Node:
    name: str
    operator: str  # a key of the table in trace/operators.py
    args: tuple[Value, ...]


@dataclass(frozen=True)
class Graph:
    """Nodes in order; every value is elementwise over the iteration space."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]

    @property
    def used_inputs(self) -> tuple[str, ...]:
        """The inputs that some node or output reads, in their order."""
        read = {arg for node in self.nodes for arg in node.args} | set(self.outputs)
        return tuple(name for name in self.inputs if name in read)

    def __str__(self) -> str:
        lines = [f"{node.name} = {node.operator}({', '.join(map(str, node.args))})" for node in self.nodes]
        return "\n".join([f"({', '.join(self.inputs)}) ->", *lines, f"return {', '.join(map(str, self.outputs))}"])


def operand_name(index: int) -> str:
    """What operand `index` is called in graphs and generated source."""
    return f"operand{index}"


def grad_output_name(index: int) -> str:
    return f"grad_output{index}"


class Epilogue(Protocol):
    """An ordinary PyTorch function of (xhat, operands...), hashable by what it computes."""

    def __call__(self, xhat: torch.Tensor, *operands: torch.Tensor | float) -> torch.Tensor: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Call:
    """What the user asked for: this norm over the last `col_dims` dimensions of operand 0, then this epilogue
    of xhat and of the operands after it, which lie along `axes`."""

    norm: Norm
    col_dims: int
    eps: float
    epilogue: Epilogue
    axes: tuple[str, ...]


class View(NamedTuple):
    """The exact layout of one tensor; a number is a view without shape, strides or pointer."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_aligned: bool

    @staticmethod
    def of(tensor: "torch.Tensor | float") -> "View":
        if not isinstance(tensor, torch.Tensor):
            return View((), (), torch.float32, True)
        return View(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % VECTOR_BYTES == 0)


class Stride(NamedTuple):
    """Either a literal (0 or 1), or a runtime number at `slot` that `divisor` divides."""

    literal: int | None
    divisor: int
    slot: int


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads or writes, with one stride for each axis of the iteration space."""

    dtype: torch.dtype
    axes: str
    row_strides: tuple[Stride, ...]
    col_strides: tuple[Stride, ...]
    is_aligned: bool

    @property
    def has_vectors(self) -> bool:
        """Whether a thread may read 16 bytes at once wherever a row begins."""
        outer = (*self.row_strides, *self.col_strides[:-1])
        return (
            self.is_aligned
            and self.col_strides[-1].literal == 1
            and all(s.literal == 0 or s.divisor * self.dtype.itemsize >= VECTOR_BYTES for s in outer)
        )


@dataclass(frozen=True)
class Problem:
    """What forward and backward share. `cols_class` is the column count rounded up to a power of two,
    `cols_divisor` a power of two that divides it."""

    norm: Norm
    compute: torch.dtype
    cols_class: int
    cols_divisor: int
    operands: tuple[Operand, ...]
    prologue: Graph  # operands -> c

    @property
    def has_long_mantissas(self) -> bool:
        """Whether a sum over a row rounds bits away that a row of equal values needs: those of halves are too short."""
        return any(operand.dtype.itemsize > 2 for operand in self.operands if operand.axes == FULL)

    @property
    def has_vectors(self) -> bool:
        full = [operand for operand in self.operands if operand.axes == FULL]
        return all(o.has_vectors and self.cols_divisor * o.dtype.itemsize >= VECTOR_BYTES for o in full)


@dataclass(frozen=True)
class ForwardProblem(Problem):
    epilogue: Graph  # xhat, operands -> outputs
    outputs: tuple[Operand, ...]


@dataclass(frozen=True)
class BackwardProblem(Problem):
    """`wanted` are the operands whose gradient somebody needs; `gradients` lie in the same order."""

    epilogue_vjp: (
        Graph  # xhat, operands, grad_outputs -> grad of xhat if needed, then of the epilogue's wanted operands
    )
    prologue_vjp: Graph  # operands, grad_c -> grad of the prologue's wanted operands
    grad_outputs: tuple[Operand, ...]
    gradients: tuple[Operand, ...]
    wanted: tuple[int, ...]
    wanted_of_epilogue: tuple[int, ...]
    wanted_of_prologue: tuple[int, ...]

    @property
    def needs_grad_c(self) -> bool:
        return bool(self.wanted_of_prologue)

    @property
    def reduced(self) -> tuple[int, ...]:
        """Which of `gradients` are sums over rows, accumulated in registers."""
        return tuple(i for i, gradient in enumerate(self.gradients) if gradient.axes != FULL)


class Space(NamedTuple):
    """The iteration space of one call: rows x cols, and what its kernel is told at run time."""

    rows: int
    cols: int
    operands: tuple[Operand, ...]
    strides: tuple[int, ...]  # the values behind every Stride that is not a literal
    sizes: tuple[int, ...]  # of all row axes but the first, then of all column axes but the first

    @property
    def cols_class(self) -> int:
        return 1 << max(self.cols - 1, 0).bit_length()

    @property
    def cols_divisor(self) -> int:
        return power_of_two_divisor(self.cols, VECTOR_BYTES)


def describe_forward(call: Call, views: Sequence[View], graphs: tuple[Graph, Graph]) -> tuple[ForwardProblem, Space]:
    """`views` are those of the operands, then of the output."""
    count = len(call.axes)
    space = describe(views, (*call.axes, FULL), views[0].shape, call.col_dims)
    prologue, epilogue = graphs
    problem = ForwardProblem(
        call.norm,
        compute_dtype([view.dtype for view in views]),
        space.cols_class,
        space.cols_divisor,
        operands=space.operands[:count],
        prologue=prologue,
        epilogue=epilogue,
        outputs=space.operands[count:],
    )
    return problem, space


def describe_backward(
    call: Call, views: Sequence[View], wanted: tuple[int, ...], graphs: tuple[Graph, Graph, Graph]
) -> tuple[BackwardProblem, Space]:
    """`views` are those of the operands, then of the output's gradient, then of the wanted operands' gradients."""
    count = len(call.axes)
    axes = (*call.axes, FULL, *(call.axes[i] for i in wanted))
    space = describe(views, axes, views[0].shape, call.col_dims)
    prologue, epilogue_vjp, prologue_vjp = graphs
    problem = BackwardProblem(
        call.norm,
        compute_dtype([view.dtype for view in views]),
        space.cols_class,
        space.cols_divisor,
        operands=space.operands[:count],
        prologue=prologue,
        epilogue_vjp=epilogue_vjp,
        prologue_vjp=prologue_vjp,
        grad_outputs=space.operands[count : count + 1],
        gradients=space.operands[count + 1 :],
        wanted=wanted,
        wanted_of_epilogue=tuple(i for i in wanted if i != 0),
        wanted_of_prologue=tuple(i for i in wanted if i == 0),
    )
    return problem, space


def describe(views: Sequence[View], axes: Sequence[str], shape: Sequence[int], col_dims: int) -> Space:
    """Collapse the axes of `shape` (the last `col_dims` are columns) as far as every operand's strides allow."""
    row_dims = len(shape) - col_dims
    row_shape, col_shape = shape[:row_dims], shape[row_dims:]
    rows, cols = prod(row_shape), prod(col_shape)
    row_strides = [v.strides[:row_dims] if a == FULL else (0,) * row_dims for v, a in zip(views, axes, strict=True)]
    col_strides = [
        v.strides[-col_dims:] if a in (FULL, COLUMN) else (0,) * col_dims for v, a in zip(views, axes, strict=True)
    ]
    # Of an axis that vanishes the innermost stride stays, so that one row is of the class that more rows would be
    lone_row = [(s[-1] if s else cols) if a == FULL else 0 for s, a in zip(row_strides, axes, strict=True)]
    lone_col = [1 if a in (FULL, COLUMN) else 0 for a in axes]
    row_sizes, row_strides = _collapse(row_shape, row_strides, lone_row)
    col_sizes, col_strides = _collapse(col_shape, col_strides, lone_col)

    values: list[int] = []

    def classify(stride: int, itemsize: int) -> Stride:
        if stride in (0, 1):
            return Stride(stride, 1, -1)
        values.append(stride)
        return Stride(None, power_of_two_divisor(stride, VECTOR_BYTES // itemsize), len(values) - 1)

    operands = tuple(
        Operand(
            view.dtype,
            axis,
            tuple(classify(stride, view.dtype.itemsize) for stride in by_row),
            tuple(classify(stride, view.dtype.itemsize) for stride in by_col),
            view.is_aligned,
        )
        for view, axis, by_row, by_col in zip(views, axes, row_strides, col_strides, strict=True)
    )
    return Space(rows, cols, operands, tuple(values), (*row_sizes[1:], *col_sizes[1:]))


def _collapse(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], alone: Sequence[int]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Drop axes of size one and merge neighbours that every tensor walks as one. Where nothing is left, one axis of
    size one stays, with the strides in `alone`."""
    dims = [dim for dim, size in enumerate(sizes) if size != 1]
    if not dims:
        return (1,), [(stride,) for stride in alone]
    groups: list[list[int]] = []
    for dim in dims:
        if groups and all(s[groups[-1][-1]] == s[dim] * sizes[dim] for s in strides):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    merged = tuple(prod(sizes[dim] for dim in group) for group in groups)
    return merged, [tuple(s[group[-1]] for group in groups) for s in strides]


def power_of_two_divisor(number: int, largest: int) -> int:
    """The largest power of two, `largest` at most, that divides `number`."""
    return min(number & -number, largest) if number else largest


def compute_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Values inside a kernel are float32, or float64 where anything is float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
