"""One call by native code: pointers, numbers, and as many parts of the rows as there are threads."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from warpnorm.codegen import along
from warpnorm.cpu import across, build, memory, source
from warpnorm.cpu.settle import KINDS, SETTLED, Sum
from warpnorm.cpu.writer import is_across
from warpnorm.locks import is_child
from warpnorm.problem import GROUP, NUMBER, BackwardProblem, ForwardProblem, Running
from warpnorm.space import Space

# Elements for which a thread is woken: where every part has sums of its own, and where none has. There a row counts for
# some more: LayerNorm of 256 x 64 takes 20 us by two threads and 30 by one
PART, LONE_PART, OF_A_ROW = 1 << 15, 1 << 13, 64
NO_FACTORS = (0.0, 0.0, 0.0)


_function = lru_cache(maxsize=1024)(build.Address.of)


def text_of(problem: ForwardProblem | BackwardProblem) -> str:
    """The C that runs a problem."""
    module = across if _is_across(problem) else source
    return module.forward(problem) if isinstance(problem, ForwardProblem) else module.backward(problem)


def _is_across(problem: ForwardProblem | BackwardProblem) -> bool:
    return problem.norm.is_by_channel and is_across(problem)


def prepare_forward(problem: ForwardProblem, space: Space, eps: float) -> "NativeForward | AcrossForward":
    text = text_of(problem)
    if _is_across(problem):
        first, merge = (_function(text, name) if problem.norm.is_computed else 0 for name in ("first", "merge"))
        return AcrossForward(problem, space, first, merge, _function(text, "last"), eps)
    return NativeForward(problem, space, _function(text, "forward"), eps, "alloc(" in text)


def prepare_backward(problem: BackwardProblem, space: Space) -> "NativeBackward | AcrossBackward":
    text = text_of(problem)
    if _is_across(problem):
        first, merge = (_function(text, name) if problem.has_tasks else 0 for name in ("first", "merge"))
        sums = len(along.sums(problem).summands)
        return AcrossBackward(problem, space, first, merge, _function(text, "last"), sums, across.kept_in(problem))
    return NativeBackward(problem, space, _function(text, "backward"))


@dataclass(frozen=True)
class _Launch:
    """What all calls have in common: numbers that are the same for each of them."""

    problem: ForwardProblem | BackwardProblem
    space: Space

    @cached_property
    def numbers(self) -> list[int]:
        space = self.space
        return [
            space.rows, space.cols, space.pieces, max(space.inner_rows, 1), space.groups, *space.sizes, *space.strides,
        ]  # fmt: skip

    @cached_property
    def in_memory(self) -> Any:
        return (ctypes.c_int64 * len(self.numbers))(*self.numbers)

    @cached_property
    def takes_numbers(self) -> bool:
        return any(operand.axes == NUMBER for operand in self.problem.operands)

    @cached_property
    def units(self) -> int:
        """Rows that have a statistic of their own."""
        return self.space.rows // self.space.pieces

    @cached_property
    def places(self) -> int:
        """Where memory runs across the lines: the columns of all bands."""
        return self.space.rows // self.space.row_sizes[-1] * self.space.cols

    def wide_zeros(self, count: int, parts: int) -> tuple[torch.Tensor, ...]:
        """A number for each line of each part, of double precision, or of 16 bytes where that is the computation's."""
        words = 2 if self.problem.compute == torch.float64 else 1
        return torch.zeros(count, parts, self.space.rows * words, dtype=torch.float64, device="cpu").unbind()

    def parts(self, units: int) -> int:
        return max(1, min(torch.get_num_threads(), units, self.space.rows * self.space.cols // PART))

    def run(
        self, function: int, operands: Sequence[torch.Tensor | float], tensors: Sequence[torch.Tensor], parts: int,
        eps: float = 0.0, factors: Sequence[float] = (0.0, 0.0, 0.0),
    ) -> None:  # fmt: skip
        """Hands a function the operands, tensors, and numbers."""
        pointers = [o.data_ptr() if isinstance(o, torch.Tensor) else 0 for o in operands]
        pointers += [tensor.data_ptr() for tensor in tensors]
        numbers, reals = self.in_memory, _reals(eps, *factors)
        if self.takes_numbers:
            whole = [o for o in operands if isinstance(o, int) and not isinstance(o, bool)]
            numbers = (ctypes.c_int64 * (len(self.numbers) + len(whole)))(*self.numbers, *whole)
            reals = _in_memory(eps, *factors, *(o for o in operands if isinstance(o, float)))
        pointed = (ctypes.c_void_p * len(pointers))(*pointers)
        if _pool()(function, pointed, numbers, reals, parts):
            raise torch.OutOfMemoryError("there is no memory for the elements of a row that native code has to keep")


@dataclass(frozen=True)
class NativeForward(_Launch):
    problem: ForwardProblem
    function: int
    eps: float
    has_arrays: bool = False  # for which there may be no memory

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        outputs: Sequence[torch.Tensor],
        running: Running | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Writes the outputs, and averages the statistics, one number a row each, into running ones; returns them."""
        statistics = _statistics(self)
        self.into(operands, outputs, statistics, running)
        return statistics

    @cached_property
    def most_parts(self) -> int:
        """With any number of threads."""
        work = self.space.rows * self.space.cols + self.units * OF_A_ROW
        return max(1, min(self.units, work // LONE_PART))

    def into(
        self,
        operands: Sequence[torch.Tensor | float],
        outputs: Sequence[torch.Tensor],
        statistics: tuple[torch.Tensor, ...],
        running: Running | None = None,
    ) -> None:
        parts = min(torch.get_num_threads(), self.most_parts)
        memory.ask_for_huge_pages(outputs, parts if self.problem.norm.is_by_channel else 1)
        averaged = () if running is None else (running.mean, running.variance)
        factors = NO_FACTORS if running is None else running.factors
        before = [t.clone() for t in averaged] if self.has_arrays else []
        try:
            self.run(self.function, operands, (*outputs, *statistics, *averaged), parts, self.eps, factors)
        except torch.OutOfMemoryError:  # of one part, while others have averaged their rows
            for t, value in zip(averaged, before, strict=True):
                t.copy_(value)
            raise

    def described(self, operands: Sequence[int], outputs: int, running: Sequence[int] = ()) -> tuple[Any, ...] | None:
        """This call, of as many tensors, by the numbers that the compiled launcher knows them by, as it takes it, and that
        nothing is shared; nothing where it does not keep the memory of large results."""
        numel = self.space.rows * self.space.cols
        if self.takes_numbers or not memory.are_kept([numel * o.dtype.itemsize for o in self.problem.outputs]):
            return None
        if running and self.has_arrays:  # for which there may be no memory
            return None
        first = len(operands) + len(running)
        results = range(first, first + outputs + len(self.problem.norm.statistics))
        addresses = map(build.Address.to, (_pool(), self.in_memory, self.reals))
        size = numel // self.units
        ratio = size / (size - 1) if running else 0.0
        slots = tuple((i, 0) for i in (*operands, *results, *running))
        return ((self.function, *addresses, self.most_parts, ratio, slots),), ((), 4, 0)

    @cached_property
    def reals(self) -> Any:
        return _in_memory(self.eps, *NO_FACTORS)

    def empty_statistics(self, device: torch.device, rows: int | None = None) -> tuple[torch.Tensor, ...]:
        """Of this call, or of more rows."""
        return _statistics(self, rows)


@dataclass(frozen=True)
class NativeBackward(_Launch):
    problem: BackwardProblem
    function: int

    @cached_property
    def shared(self) -> int:
        """What threads share: groups, where a gradient has a value for each, or rows."""
        has_groups = any(self.problem.gradients[k].axes == GROUP for k in self.problem.reduced)
        return self.space.groups if has_groups else self.units

    @cached_property
    def sums(self) -> tuple[Sum, ...]:
        problem = self.problem
        by_line, merged = (problem.settled_first, problem.merged) if problem.norm.is_by_channel else ((), ())
        return tuple(Sum.of(problem.gradients[k], self.space, k, k in by_line, k in merged) for k in problem.reduced)

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        grad_outputs: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Writes every gradient."""
        parts = self.parts(self.shared)
        partials = [of.partial(parts, gradients) for of in self.sums]
        written = [gradients[k] for k in self.problem.written]
        memory.ask_for_huge_pages(written, parts if self.problem.norm.is_by_channel else 1)
        saved = statistics[: len(self.problem.norm.saved)]
        self.run(self.function, operands, (*grad_outputs, *written, *saved, *partials), parts)
        for of, partial in zip(self.sums, partials, strict=True):
            of.settle(partial, gradients[of.which])

    def described(self, operands: int) -> tuple[Any, ...] | None:
        """This call as `NativeForward.described` has it, by as many threads as there are now, and the sizes of its partial
        sums: where these are of columns, and few."""
        problem, of_sums, parts = self.problem, self.sums, self.parts(self.shared)
        if problem.norm.is_by_channel or self.takes_numbers or len(problem.given) != 1:
            return None
        numel = self.space.rows * self.space.cols
        sizes = [numel * problem.gradients[k].dtype.itemsize for k in problem.written]
        if parts * sum(of.width for of in of_sums) > SETTLED or not memory.are_kept(sizes):
            return None
        if any(of.shape[0] or not of.width or problem.gradients[of.which].dtype not in KINDS for of in of_sums):
            return None
        grad = operands + len(problem.norm.saved)
        read, statistics, gradients = (
            range(operands),
            range(operands, grad),
            range(grad + 1, grad + 1 + len(problem.wanted)),
        )
        partials = range(gradients.stop, gradients.stop + len(of_sums))
        slots = (*read, grad, *(gradients[k] for k in problem.written), *statistics, *partials)
        launches = [self._described(self.function, self.in_memory, parts, slots)]
        if of_sums:
            pairs = [slot for k, of in enumerate(of_sums) for slot in (partials[k], gradients[of.which])]
            of_each = [n for of in of_sums for n in (of.width, KINDS[problem.gradients[of.which].dtype])]
            numbers = (ctypes.c_int64 * (2 + len(of_each)))(len(of_sums), parts, *of_each)
            before = self._described(build.Address.to(build.pool().clear), numbers, 1, partials)
            after = self._described(build.Address.to(build.pool().settle), numbers, 1, pairs)
            launches = [before, *launches, after]
        words = torch.float64.itemsize // problem.compute.itemsize
        return tuple(parts * of.width * words for of in of_sums), tuple(launches), ((), 4, 0)

    def _described(self, function: int, numbers: Any, parts: int, slots: Sequence[int]) -> tuple[Any, ...]:
        addresses = map(build.Address.to, (_pool(), numbers, self.reals))
        return (function, *addresses, parts, 0.0, tuple((slot, 0) for slot in slots))

    @cached_property
    def reals(self) -> Any:
        return _in_memory(0.0, *NO_FACTORS)


@dataclass(frozen=True)
class AcrossForward(_Launch):
    """Where memory runs across the lines: sums of parts of them, which are merged, then results."""

    problem: ForwardProblem
    first: int
    merge: int
    last: int
    eps: float

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        outputs: Sequence[torch.Tensor],
        running: Running | None = None,
    ) -> tuple[torch.Tensor, ...]:
        space, compute = self.space, self.problem.compute
        parts = self.parts(self.places)
        memory.ask_for_huge_pages(outputs, parts)
        statistics: tuple[torch.Tensor, ...] = ()
        of_lines: tuple[torch.Tensor, ...] = ()
        if self.problem.norm.is_computed:
            sums = self.wide_zeros(2, parts)
            self.run(self.first, operands, sums, parts)
            of_lines = torch.empty(3, space.rows, dtype=compute, device="cpu").unbind()
            statistics = _statistics(self)
            averaged = () if running is None else (running.mean, running.variance)
            factors = NO_FACTORS if running is None else running.factors
            self.run(self.merge, operands, (*sums, *of_lines, *statistics, *averaged), parts, self.eps, factors)
        self.run(self.last, operands, (*outputs, *of_lines), parts)
        return statistics


@dataclass(frozen=True)
class AcrossBackward(_Launch):
    problem: BackwardProblem
    first: int
    merge: int
    last: int
    summands: int
    kept: tuple[int, ...]

    @cached_property
    def sums(self) -> tuple[tuple[Sum, ...], tuple[Sum, ...]]:
        """Of gradients: those that are settled first, and last."""
        problem = self.problem
        first, last = (
            tuple(Sum.of(problem.gradients[k], self.space, k, True, k in problem.merged) for k in which)
            for which in (problem.settled_first, problem.left_last)
        )
        return first, last

    def __call__(
        self,
        operands: Sequence[torch.Tensor | float],
        grad_outputs: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Writes every gradient."""
        problem, space = self.problem, self.space
        parts = self.parts(self.places)
        of_lines = [self._of_lines(t) for t in statistics[:2]] if problem.norm.is_computed else []
        merged: tuple[torch.Tensor, ...] = ()
        first, last = self.sums
        partials = [of.partial(parts, gradients) for of in first]
        written = [gradients[k] for k in problem.written]
        memory.ask_for_huge_pages(written, parts)
        if problem.has_tasks:
            sums = self.wide_zeros(self.summands, parts)
            kept = [gradients[k] for k in self.kept]
            self.run(self.first, operands, (*grad_outputs, *kept, *sums, *of_lines), parts)
            merged = torch.empty(2, space.rows, dtype=problem.compute, device="cpu").unbind()
            self.run(self.merge, operands, (*grad_outputs, *sums, *merged, *partials), parts)
        of_parts = [torch.zeros(parts, space.rows, dtype=torch.float64, device="cpu") for _ in last]
        self.run(self.last, operands, (*grad_outputs, *written, *of_parts, *merged, *of_lines), parts)
        partials += [sums.sum(0) for sums in of_parts]
        for of, partial in zip((*first, *last), partials, strict=True):
            of.settle(partial, gradients[of.which])

    def _of_lines(self, rows: torch.Tensor) -> torch.Tensor:
        """For each line what there is for its row."""
        pieces, inner = self.space.pieces, max(self.space.inner_rows, 1)
        if pieces == 1:
            return rows.contiguous()
        return rows.reshape(-1, 1, inner).expand(-1, pieces, inner).reshape(-1).contiguous()


def _statistics(launch: NativeForward | AcrossForward, units: int | None = None) -> tuple[torch.Tensor, ...]:
    problem = launch.problem
    return tuple(
        [torch.empty(units or launch.units, dtype=problem.compute, device="cpu") for _ in problem.norm.statistics]
    )


def _in_memory(*reals: float) -> Any:
    return (ctypes.c_double * len(reals))(*reals)


_reals = lru_cache(maxsize=256)(_in_memory)  # nobody writes them


@cache
def _pool() -> Any:
    run = build.pool().run
    run.restype = ctypes.c_int
    run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64]
    threads = None if is_child() else _threads_of_torch()  # which the child's OpenMP would wait for
    if threads is not None:
        build.pool().use(ctypes.c_void_p(threads))
    return run


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
