"""Frozen records of what is computed: the call a user made, its pointwise graphs, and the problem it poses.
A problem holds all that may change the compiled code, and nothing that may not: neither the number of rows nor
the value of a stride is in it. `space.py` makes problems of the tensors of a call."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from warpnorm.errors import InputError
from warpnorm.norms import Norm

# The axes along which an operand has values of its own. Along the others it is broadcast.
FULL = "full"  # every row, every column
GROUP = "group"  # some of the row axes, every column: AdaLN's scale, one for each sample
COLUMN = "column"  # one value a column: a weight
ROW = "row"  # one value a row
GROUP_SCALAR = "group_scalar"  # one value for each sample
SCALAR = "scalar"  # one value, in a tensor
NUMBER = "number"  # one value, a Python number handed over by value

TILES = (FULL, GROUP)  # loaded for every element of a tile
BY_ROW = (FULL, GROUP, ROW, GROUP_SCALAR)  # not the same for all rows
ALONG = (ROW, GROUP_SCALAR)  # of these, the same for all columns

VECTOR_BYTES = 16  # the widest load or store of one thread
NEIGHBOURS = (8, 4, 2)  # elements
ALIGNMENTS = (VECTOR_BYTES, 8, 4)  # of addresses, as far as it makes a difference
LOWEST_ADDRESS = 1 << 40
SHARED_CLASS = 8192  # columns above which programs share rows as a rule
LARGEST_CLASS = 1 << 30  # column counts above it need 64-bit column offsets


@dataclass(frozen=True)
class Literal:
    """A number in a graph. Equal by how it is written: 1, 1.0 and True differ, and so do 0.0 and -0.0; NaN equals NaN."""

    text: str
    value: float | int | bool = field(compare=False)

    @staticmethod
    def of(value: float | int | bool) -> "Literal":
        """Of the number itself, however a class of its own would spell it: the text becomes source."""
        if not isinstance(value, bool):
            value = int.__int__(value) if isinstance(value, int) else float.__float__(value)
        return Literal(repr(value), value)

    def __str__(self) -> str:
        return self.text


Value = str | Literal  # the name of an input or of an earlier node, or a number


@dataclass(frozen=True)
class Node:
    """`operator` is a key of the table in trace/operators.py. `dtype` is what PyTorch gives the result; every floating
    one stands for the dtype of computation, unless the node is a cast, which rounds to it."""

    name: str
    operator: str
    args: tuple[Value, ...]
    dtype: torch.dtype


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

    def dependencies(self, which: Iterable[int]) -> frozenset[str]:
        """The inputs that these outputs depend on."""
        found = {self.outputs[i] for i in which}
        for node in reversed(self.nodes):
            if node.name in found:
                found.update(node.args)
        return frozenset(name for name in self.inputs if name in found)

    def __str__(self) -> str:
        lines = [f"{node.name} = {node.operator}({', '.join(map(str, node.args))})" for node in self.nodes]
        return "\n".join([f"({', '.join(self.inputs)}) ->", *lines, f"return {', '.join(map(str, self.outputs))}"])


def operand_name(index: int) -> str:
    """What operand `index` is called in graphs and generated source."""
    return f"operand{index}"


def grad_output_name(index: int) -> str:
    return f"grad_output{index}"


class Prologue(Protocol):
    """An ordinary PyTorch function of the operands, hashable by what it computes."""

    def __call__(self, *operands: Any) -> torch.Tensor: ...

    def __hash__(self) -> int: ...


class Epilogue(Protocol):
    """The same of xhat, c and the operands, with a tuple of results."""

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]: ...

    def __hash__(self) -> int: ...


Axes = str | tuple[bool, ...]  # one of the names above, or for each dimension whether there are values of its own


@dataclass(frozen=True)
class Call:
    """What the user asked for: `prologue` of the operands, which lie along `axes`, this norm of the result over its last
    `col_dims` dimensions, then `epilogue`, whose results have the dtypes `outputs`; those in `detached` carry no gradient.
    Computed at least in `compute`. A norm by channel finds its dimensions itself; `groups` are those of GroupNorm."""

    norm: Norm
    col_dims: int
    eps: float
    prologue: Prologue
    epilogue: Epilogue
    axes: tuple[Axes, ...]
    outputs: tuple[torch.dtype, ...]
    compute: torch.dtype = torch.float32
    detached: tuple[int, ...] = ()
    groups: int = 0


class Running(NamedTuple):
    """Running statistics, one number a row each, into which a call averages its own, each of `size` values."""

    mean: torch.Tensor
    variance: torch.Tensor
    momentum: float
    size: int

    @property
    def factors(self) -> tuple[float, float, float]:
        """Of what they were, of the mean, and of the biased variance."""
        return 1.0 - self.momentum, self.momentum, self.momentum * (self.size / (self.size - 1))

    @property
    def arguments(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[float, float, float]]:
        """What a kernel is told."""
        return (self.mean, self.variance), self.factors

    def can_be_averaged_beside(self, operands: "Sequence[torch.Tensor | float]") -> bool:
        """Whether a kernel that reads the operands may write these meanwhile: they share no memory."""
        if not (self.mean.is_contiguous() and self.variance.is_contiguous()):
            return False
        mean, variance = self.mean.untyped_storage().data_ptr(), self.variance.untyped_storage().data_ptr()
        others = [o.untyped_storage().data_ptr() for o in operands if isinstance(o, torch.Tensor)]
        return mean != variance and mean not in others and variance not in others


def address_of(tensor: torch.Tensor) -> int:
    """Of a storage that was freed it is the offset from nothing; no memory lies so low."""
    address = tensor.data_ptr()
    if address < LOWEST_ADDRESS and address == tensor.storage_offset() * tensor.element_size():
        is_freed = tensor.numel() > 0 and not tensor.is_meta and tensor.untyped_storage().data_ptr() == 0
        if is_freed:
            shape = tuple(tensor.shape)
            raise InputError(
                f"a tensor of shape {shape} has no memory: its storage was freed, as of sharded parameters"
            )
    return address


def alignment_of(tensor: torch.Tensor) -> int:
    """Bytes that its address is a multiple of, as far as it makes a difference."""
    address = address_of(tensor)
    return next((size for size in ALIGNMENTS if address % size == 0), 1)


class View(NamedTuple):
    """The exact layout of one tensor; a number is a view without shape, strides or pointer. `alignment` is that of its
    address, in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    alignment: int = VECTOR_BYTES  # as what PyTorch allocates has

    @staticmethod
    def of(tensor: "torch.Tensor | float") -> "View":
        if not isinstance(tensor, torch.Tensor):
            return NUMBERS[type(tensor)]
        return View(tensor.shape, tensor.stride(), tensor.dtype, alignment_of(tensor))


NUMBERS = {float: View((), (), torch.float32), int: View((), (), torch.int64)}


class Stride(NamedTuple):
    """Either a literal (0 or 1), or a runtime number at `slot` that `divisor` divides."""

    literal: int | None
    divisor: int
    slot: int


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads or writes, with one stride for each axis of the iteration space. `varies` says whether
    the call's axes are those of a tile: an operand with values for each sample has one row where there is one sample. Said
    of norms over rows. `is_flat`: it walks all row axes as one, which another operand does not. Said of norms by channel."""

    dtype: torch.dtype
    axes: str
    row_strides: tuple[Stride, ...]
    col_strides: tuple[Stride, ...]
    alignment: int
    varies: bool = False
    is_flat: bool = False

    @property
    def has_vectors(self) -> bool:
        """Whether a thread may read 16 bytes at once wherever a row begins."""
        return self.has_vectors_of(VECTOR_BYTES)

    def has_vectors_of(self, size: int) -> bool:
        """The same of another number of bytes."""
        return self._has_vectors(self.col_strides[-1], (*self.row_strides, *self.col_strides[:-1]), size)

    @property
    def has_vectors_across(self) -> bool:
        """The same where rows lie side by side, of those at the same column."""
        return self._has_vectors(self.row_strides[-1], (*self.row_strides[:-1], *self.col_strides), VECTOR_BYTES)

    def _has_vectors(self, along: Stride, others: tuple[Stride, ...], size: int) -> bool:
        are_whole = all(s.literal == 0 or s.divisor * self.dtype.itemsize >= size for s in others)
        return self.alignment >= size and along.literal == 1 and are_whole


def is_varying(operand: Operand) -> bool:
    return operand.axes in TILES or (operand.axes == COLUMN and operand.varies)


def inner_lines(gradient: Operand) -> int:
    """Along how many of the last axes of lines a gradient has values of its own; all, if it has along each."""
    kept = [stride.literal != 0 for stride in gradient.row_strides]
    return next((k for k, keeps in enumerate(reversed(kept)) if not keeps), len(kept))


def width_step(norm: Norm, cols_class: int) -> int:
    """What the width of a problem is a multiple of: an eighth of the power of two, or a thirty-second where programs may
    share a row, of which there would be too many otherwise. Columns of a norm by channel may be samples, whose number should
    not take another kernel."""
    if norm.is_by_channel:
        return cols_class
    return max(cols_class // (8 if cols_class <= SHARED_CLASS else 32), 1)


@dataclass(frozen=True)
class Problem:
    """What forward and backward share. `cols_class` is the column count rounded up to a power of two, `cols_divisor` a power
    of two that divides it; `is_exact` if nothing was rounded, so that no column of a tile has to be masked; `width` the
    count rounded up to a `width_step`, `is_filled` if nothing was. Of a norm by channel the rows here are lines, of
    which several may share a statistic (`has_pieces`), the width is that power, and also the number of lines and the sizes
    of axes have divisors."""

    norm: Norm
    compute: torch.dtype
    cols_class: int
    cols_divisor: int
    is_exact: bool
    width: int
    is_filled: bool
    operands: tuple[Operand, ...]
    prologue: Graph  # operands -> c
    has_pieces: bool
    rows_divisor: int
    size_divisors: tuple[int, ...]
    has_long_numbers: (
        bool  # 64 bits for the numbers of rows; of several axes they are divided, which costs less with 32
    )

    @property
    def tiles(self) -> tuple[Operand, ...]:
        """The operands that are loaded for every element."""
        return tuple(operand for operand in self.operands if operand.axes in TILES)

    @cached_property
    def varying(self) -> tuple[Operand, ...]:
        """Those that are, or would be with more samples: a row's bits must not depend on how many there are, so neither may
        anything that they depend on."""
        return tuple(operand for operand in self.operands if is_varying(operand))

    @property
    def results(self) -> tuple[Operand, ...]:
        """What is written for every element."""
        raise NotImplementedError

    @property
    def has_tasks(self) -> bool:
        """Whether something has to be summed over rows before there is any result."""
        raise NotImplementedError

    @property
    def is_half(self) -> bool:
        """Whether all results are rounded to 16 bits or less, so that an error of some 2^-22 before does not show."""
        return self.compute == torch.float32 and all(result.dtype.itemsize <= 2 for result in self.results)

    @property
    def has_long_mantissas(self) -> bool:
        """Whether a sum over a row rounds bits away that a row of equal values needs: those of halves are too short."""
        is_computed = bool(self.prologue.nodes) and not self.is_half
        return is_computed or any(operand.dtype.itemsize > 2 for operand in self.varying)

    @property
    def eighths(self) -> int:
        """Of `cols_class`, that the columns take."""
        return -(-self.width // max(self.cols_class // 8, 1))

    @cached_property
    def neighbours(self) -> int:
        """Elements that a thread may move at once, of each operand by at most 16 bytes, wherever a row begins."""
        return next((count for count in NEIGHBOURS if self._has_neighbours(count)), 1)

    def _has_neighbours(self, count: int) -> bool:
        are_whole = all(o.has_vectors_of(min(count * o.dtype.itemsize, VECTOR_BYTES)) for o in self.beside)
        return are_whole and self.cols_divisor >= count

    @property
    def beside(self) -> tuple[Operand, ...]:
        """Whose elements are moved beside each other, if those of all are."""
        return self.varying

    @property
    def has_vectors(self) -> bool:
        return self.has_vectors_of(VECTOR_BYTES)

    def has_vectors_of(self, size: int) -> bool:
        return all(o.has_vectors_of(size) and self.cols_divisor * o.dtype.itemsize >= size for o in self.varying)


@dataclass(frozen=True)
class ForwardProblem(Problem):
    epilogue: Graph  # xhat, c, operands -> outputs
    outputs: tuple[Operand, ...]
    running: tuple[torch.dtype, ...] = ()  # of the running statistics that are averaged on the way

    @property
    def results(self) -> tuple[Operand, ...]:
        return self.outputs

    @property
    def has_tasks(self) -> bool:
        return self.norm.is_computed


@dataclass(frozen=True)
class BackwardProblem(Problem):
    """`wanted` are the operands whose gradient somebody needs; `gradients` lie in the same order. `given` are the
    outputs that have a gradient; `grad_outputs` lie in that order. `row_order` says which row axis of forward each row
    axis is: those of a group come first here."""

    epilogue_vjp: Graph  # xhat, c, operands, grad_outputs -> grad of xhat and of c if needed, then of wanted operands
    prologue_vjp: Graph  # operands, grad_c -> grad of the prologue's wanted operands
    grad_outputs: tuple[Operand, ...]
    gradients: tuple[Operand, ...]
    given: tuple[int, ...]
    wanted: tuple[int, ...]
    wanted_of_epilogue: tuple[int, ...]
    wanted_of_prologue: tuple[int, ...]
    needs_grad_xhat: bool
    needs_grad_c: bool  # of c where the epilogue reads it
    row_order: tuple[int, ...]
    by_row: tuple[int, ...] = ()  # which of `gradients` are one number for each row of a norm by channel
    has_row_factors: bool = False  # of a norm by channel: operands that are the same along a line are so along a row

    @property
    def beside(self) -> tuple[Operand, ...]:
        """A sum's gradient is one number, expanded: its elements are loaded alone, and others would be laid out anew."""
        return self.varying + self.grad_outputs

    @cached_property
    def results(self) -> tuple[Operand, ...]:
        return tuple(self.gradients[i] for i in self.written)

    @cached_property
    def has_tasks(self) -> bool:
        return self.needs_grad_xhat and self.norm.is_computed

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Which of `gradients` are written where they lie."""
        return tuple(i for i, gradient in enumerate(self.gradients) if gradient.axes == FULL)

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """Which of `gradients` are sums, and leave partial sums behind."""
        return tuple(i for i, gradient in enumerate(self.gradients) if gradient.axes != FULL)

    @cached_property
    def settled_first(self) -> tuple[int, ...]:
        """Which of `reduced` the pattern `column` sums in its first task: those that the epilogue alone gives."""
        if not self.has_tasks:
            return ()
        return tuple(i for i in self.reduced if self.wanted[i] not in self.wanted_of_prologue)

    @cached_property
    def merged(self) -> tuple[int, ...]:
        """Which of these it can merge beside the sums of rows."""
        return tuple(i for i in self.settled_first if i in self.by_row)

    @property
    def is_alike(self) -> bool:
        """Whether what these are factors of can be summed over rows first."""
        return self.has_row_factors and not self.left_first

    @cached_property
    def left_first(self) -> tuple[int, ...]:
        """Which of these leave partial sums behind in any case."""
        return tuple(i for i in self.settled_first if i not in self.merged)

    @cached_property
    def left_last(self) -> tuple[int, ...]:
        return tuple(i for i in self.reduced if i not in self.settled_first)

    @cached_property
    def left(self) -> tuple[int, ...]:
        return (*self.left_first, *self.left_last)

    @property
    def has_groups(self) -> bool:
        """Whether some gradient has a value for each group of rows."""
        return any(gradient.axes in (GROUP, GROUP_SCALAR) for gradient in self.gradients)

    @cached_property
    def accumulated(self) -> tuple[int, ...]:
        """Which of `gradients` are sums over rows, accumulated in registers. Those of a norm by channel are sums over the
        columns of lines, and then over some of the lines."""
        return tuple(i for i in self.reduced if self.gradients[i].axes != ROW and not self.norm.is_by_channel)

    @property
    def sums_by_columns(self) -> bool:
        """Whether all sums over rows are of columns, and of what the epilogue alone gives: those need not wait for the
        gradients of rows."""
        return bool(self.accumulated) and all(
            self.gradients[i].axes == COLUMN and self.wanted[i] not in self.wanted_of_prologue for i in self.reduced
        )


def compute_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Values inside a kernel are float32, or float64 where anything is float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
