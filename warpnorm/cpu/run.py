"""One call by native code: pointers, numbers, and as many parts of the rows as there are threads."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from warpnorm.cpu import across, build, source
from warpnorm.cpu.writer import is_across
from warpnorm.problem import ALONG, COLUMN, GROUP, NUMBER, SCALAR, BackwardProblem, ForwardProblem, Operand, Running
from warpnorm.space import Space

# Elements for which a thread is woken; bytes of an output from which it asks for huge pages
PART = 1 << 15
HUGE = 4 << 20


@lru_cache(maxsize=1024)
def _function(text: str, name: str) -> int:
    function = getattr(build.load(text), name)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def prepare_forward(problem: ForwardProblem, space: Space, eps: float) -> "NativeForward | AcrossForward":
    if problem.norm.is_by_channel and is_across(problem):
        text = across.forward(problem)
        first = _function(text, "first") if problem.norm.is_computed else 0
        return AcrossForward(problem, space, first, _function(text, "last"), eps)
    return NativeForward(problem, space, _function(source.forward(problem), "forward"), eps)


def prepare_backward(problem: BackwardProblem, space: Space) -> "NativeBackward | AcrossBackward":
    if problem.norm.is_by_channel and is_across(problem):
        text = across.backward(problem)
        first = _function(text, "first") if problem.has_tasks else 0
        return AcrossBackward(problem, space, first, _function(text, "last"))
    return NativeBackward(problem, space, _function(source.backward(problem), "backward"))


@dataclass(frozen=True)
class NativeForward:
    problem: ForwardProblem
    space: Space
    function: int
    eps: float

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        outputs: Sequence[torch.Tensor],
        running: Running | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Writes the outputs, and averages the statistics, one number a row each, into running ones; returns them."""
        problem, space = self.problem, self.space
        units = space.rows // space.pieces
        statistics = tuple(torch.empty(units, dtype=problem.compute) for _ in problem.norm.statistics)
        for output in outputs:
            _ask_for_huge_pages(output)
        averaged = () if running is None else (running.mean, running.variance)
        factors = (0.0, 0.0, 0.0) if running is None else running.factors
        pointers = [*map(_pointer, operands), *map(_pointer, (*outputs, *statistics, *averaged))]
        reals = _reals(self.eps, operands, factors)
        _run(self.function, pointers, _numbers(space, operands), reals, _parts(space, units))
        return statistics


@dataclass(frozen=True)
class NativeBackward:
    problem: BackwardProblem
    space: Space
    function: int

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        grad_outputs: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Writes every gradient."""
        problem, space = self.problem, self.space
        has_groups = any(problem.gradients[k].axes == GROUP for k in problem.reduced)
        parts = _parts(space, space.groups if has_groups else space.rows // space.pieces)
        partials = {k: _partial(problem.gradients[k], space, parts) for k in problem.reduced}
        written = [gradients[k] for k in problem.written]
        for gradient in written:
            _ask_for_huge_pages(gradient)
        tensors = (*grad_outputs, *written, *statistics, *partials.values())
        pointers = [*map(_pointer, operands), *map(_pointer, tensors)]
        _run(self.function, pointers, _numbers(space, operands), _reals(0.0, operands), parts)
        for k, partial in partials.items():
            _settle(problem.gradients[k], space, partial, gradients[k])


@dataclass(frozen=True)
class AcrossForward:
    """Where memory runs across the lines: statistics of parts of them, which are merged here, then results."""

    problem: ForwardProblem
    space: Space
    first: int
    last: int
    eps: float

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        outputs: Sequence[torch.Tensor],
        running: Running | None = None,
    ) -> tuple[torch.Tensor, ...]:
        problem, space = self.problem, self.space
        for output in outputs:
            _ask_for_huge_pages(output)
        numbers, reals = _numbers(space, operands), _reals(self.eps, operands)
        read = [*map(_pointer, operands)]
        bands, width = _bands(space)
        parts = _parts(space, bands * space.cols)
        statistics: tuple[torch.Tensor, ...] = ()
        of_lines: list[torch.Tensor] = []
        if problem.norm.is_computed:
            mean, squares = torch.zeros(2, parts, space.rows, dtype=torch.float64)
            _run(self.first, [*read, _pointer(mean), _pointer(squares)], numbers, reals, parts)
            merged, variance = _merged(space, mean.view(parts, bands, width), squares.view(parts, bands, width), parts)
            rstd = (variance + self.eps).rsqrt()
            found = [t.to(problem.compute) for t in (merged, rstd, variance)]
            statistics = tuple(found[: len(problem.norm.statistics)])
            of_lines = [_of_lines(space, t) for t in found[:2]]
            if running is not None:
                _average(running, merged, variance)
        _run(self.last, [*read, *map(_pointer, outputs), *map(_pointer, of_lines)], numbers, reals, parts)
        return statistics


@dataclass(frozen=True)
class AcrossBackward:
    problem: BackwardProblem
    space: Space
    first: int
    last: int

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        grad_outputs: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Writes every gradient."""
        problem, space = self.problem, self.space
        numbers, reals = _numbers(space, operands), _reals(0.0, operands)
        read = [*map(_pointer, operands), *map(_pointer, grad_outputs)]
        bands, _width = _bands(space)
        parts = _parts(space, bands * space.cols)
        of_lines = [_of_lines(space, t) for t in statistics[:2]] if problem.norm.is_computed else []
        merged: list[torch.Tensor] = []
        if problem.has_tasks:
            sums = torch.zeros(2, parts, space.rows, dtype=torch.float64)
            _run(self.first, [*read, *map(_pointer, (*sums, *of_lines))], numbers, reals, parts)
            count = space.cols * space.pieces
            merged = [_of_lines(space, (_of_rows(space, t.sum(0)).sum(1) / count).to(problem.compute)) for t in sums]
        written = [gradients[k] for k in problem.written]
        for gradient in written:
            _ask_for_huge_pages(gradient)
        partials = {k: torch.zeros(parts, space.rows, dtype=torch.float64) for k in problem.reduced}
        tensors = (*written, *partials.values(), *merged, *of_lines)
        _run(self.last, [*read, *map(_pointer, tensors)], numbers, reals, parts)
        for k, partial in partials.items():
            _settle(problem.gradients[k], space, partial.sum(0), gradients[k])


def _bands(space: Space) -> tuple[int, int]:
    width = space.row_sizes[-1]
    return space.rows // width, width


def _of_rows(space: Space, lines: torch.Tensor) -> torch.Tensor:
    """(rows, pieces) of what there is for each line."""
    inner = max(space.inner_rows, 1) if space.pieces > 1 else 1
    outer = space.rows // (space.pieces * inner)
    return lines.reshape(outer, space.pieces, inner).transpose(1, 2).reshape(-1, space.pieces)


def _of_lines(space: Space, rows: torch.Tensor) -> torch.Tensor:
    """For each line what there is for its row."""
    inner = max(space.inner_rows, 1) if space.pieces > 1 else 1
    outer = space.rows // (space.pieces * inner)
    return rows.reshape(outer, 1, inner).expand(outer, space.pieces, inner).reshape(-1).contiguous()


def _merged(space: Space, mean: torch.Tensor, squares: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the variance of each row, from those of the columns that each part has of each band."""
    bands, _width = _bands(space)
    places = bands * space.cols
    edges = torch.tensor([places * part // parts for part in range(parts + 1)])
    starts = torch.arange(bands) * space.cols
    first, end = edges[:-1, None].clamp(min=starts), edges[1:, None].clamp(max=starts + space.cols)
    count = (end - first).clamp(min=0).double()[:, :, None].expand_as(mean)
    count, mean, squares = (_pieces(space, t) for t in (count, mean, squares))
    total = float(space.cols * space.pieces)
    merged = (count * mean).sum(1, keepdim=True) / total
    deviation = mean - merged
    variance = (squares + count * deviation * deviation).sum(1) / total
    return merged[:, 0], variance


def _pieces(space: Space, parts: torch.Tensor) -> torch.Tensor:
    """(rows, pieces and parts of them)."""
    return torch.cat([_of_rows(space, part.reshape(-1)) for part in parts], 1)


def _run(function: int, pointers: Sequence[int], numbers: Sequence[int], reals: Sequence[float], parts: int) -> None:
    _pool()(
        ctypes.c_void_p(function),
        (ctypes.c_void_p * len(pointers))(*pointers),
        (ctypes.c_int64 * len(numbers))(*numbers),
        (ctypes.c_double * len(reals))(*reals),
        ctypes.c_int64(parts),
    )


@lru_cache(maxsize=1)
def _pool() -> Any:
    library = build.pool()
    library.run.restype = None
    threads = _threads_of_torch()
    if threads is not None:
        library.use(ctypes.c_void_p(threads))
    return library.run


def _threads_of_torch() -> int | None:
    """What runs a task on the threads of OpenMP that PyTorch has loaded, if it has."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for path in sorted({line.split()[-1] for line in lines if "omp" in line.rsplit("/", 1)[-1]}):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _parts(space: Space, units: int) -> int:
    return max(1, min(torch.get_num_threads(), units, space.rows * space.cols // PART))


def _pointer(tensor: torch.Tensor | float) -> int:
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else 0


def _numbers(space: Space, operands: Sequence[torch.Tensor | float]) -> list[int]:
    whole = [o for o in operands if isinstance(o, int) and not isinstance(o, bool)]
    head = (space.rows, space.cols, space.pieces, max(space.inner_rows, 1), space.groups)
    return [*head, *space.sizes, *space.strides, *whole]


def _reals(
    eps: float, operands: Sequence[torch.Tensor | float], factors: Sequence[float] = (0.0, 0.0, 0.0)
) -> list[float]:
    return [eps, *factors, *(o for o in operands if isinstance(o, float))]


def _ask_for_huge_pages(tensor: torch.Tensor) -> None:
    size = tensor.numel() * tensor.element_size()
    if size >= HUGE and tensor.is_contiguous():
        build.pool().ask_for_huge_pages(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size))


def _average(running: Running, mean: torch.Tensor, variance: torch.Tensor) -> None:
    kept, of_mean, of_variance = running.factors
    for old, new, gained in ((running.mean, mean, of_mean), (running.variance, variance, of_variance)):
        with torch.no_grad():
            old.copy_(old.double() * kept + new * gained)


def _partial(gradient: Operand, space: Space, parts: int) -> torch.Tensor:
    """Partial sums, in double precision: of every part, of every group, or of every line."""
    shape = {
        COLUMN: (parts, space.cols), GROUP: (space.groups, space.cols), SCALAR: (parts,), NUMBER: (parts,),
    }.get(gradient.axes, (space.rows,))  # fmt: skip
    return torch.zeros(shape, dtype=torch.float64)


def _settle(gradient: Operand, space: Space, partial: torch.Tensor, total: torch.Tensor) -> None:
    """Partial sums become the gradient, where it lies."""
    if gradient.axes == SCALAR:
        total.fill_(partial.sum())
        return
    row_sizes = space.row_sizes
    col_sizes = space.sizes[len(row_sizes) - 1 :]
    col_sizes = (space.cols // max(prod(col_sizes), 1), *col_sizes)
    row_strides, col_strides = (
        [space.strides[s.slot] if s.literal is None else s.literal for s in strides]
        for strides in (gradient.row_strides, gradient.col_strides)
    )
    if gradient.axes == COLUMN:
        sizes, strides, sums = col_sizes, col_strides, partial.sum(0)
    elif gradient.axes in ALONG:
        summed = [d for d, stride in enumerate(row_strides) if stride == 0 and row_sizes[d] > 1]
        kept = [d for d in range(len(row_sizes)) if d not in summed]
        sizes, strides = tuple(row_sizes[d] for d in kept), [row_strides[d] for d in kept]
        sums = partial.view(row_sizes)
        sums = sums.sum(summed) if summed else sums
    else:  # groups, whose axes come first
        kept = [d for d, stride in enumerate(row_strides) if stride != 0]
        sizes = (*(row_sizes[d] for d in kept), *col_sizes)
        strides, sums = [*(row_strides[d] for d in kept), *col_strides], partial
    with torch.no_grad():
        torch.as_strided(total.detach(), sizes, strides, total.storage_offset()).copy_(sums.reshape(sizes))
