"""One call by native code: pointers, numbers, and as many parts of the rows as there are threads."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from warpnorm.cpu import build, source
from warpnorm.problem import ALONG, COLUMN, GROUP, NUMBER, SCALAR, BackwardProblem, ForwardProblem, Operand, Running
from warpnorm.space import Space

# Elements for which a thread is woken; bytes of an output from which it asks for huge pages
PART = 1 << 15
HUGE = 4 << 20

TASK = ctypes.c_void_p


@lru_cache(maxsize=1024)
def _function(text: str, name: str) -> int:
    function = getattr(build.load(text), name)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def forward_function(problem: ForwardProblem) -> int:
    return _function(source.forward(problem), "forward")


def backward_function(problem: BackwardProblem) -> int:
    return _function(source.backward(problem), "backward")


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
        pointers = [*map(_pointer, operands), *map(_pointer, outputs), *map(_pointer, statistics)]
        _run(self.function, pointers, _numbers(space, operands), _reals(self.eps, operands), _parts(space, units))
        if running is not None:
            _average(running, statistics)
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


def _reals(eps: float, operands: Sequence[torch.Tensor | float]) -> list[float]:
    return [eps, 0.0, 0.0, 0.0, *(o for o in operands if isinstance(o, float))]


def _ask_for_huge_pages(tensor: torch.Tensor) -> None:
    size = tensor.numel() * tensor.element_size()
    if size >= HUGE and tensor.is_contiguous():
        build.pool().ask_for_huge_pages(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size))


def _average(running: Running, statistics: Sequence[torch.Tensor]) -> None:
    kept, of_mean, of_variance = running.factors
    for old, new, gained in ((running.mean, statistics[0], of_mean), (running.variance, statistics[2], of_variance)):
        with torch.no_grad():
            old.copy_(old.to(new.dtype) * kept + new * gained)


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
