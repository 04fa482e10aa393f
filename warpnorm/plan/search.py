"""The plans that could run a problem beside the one that is chosen: what the offline search tries. Some of them may turn out
not to fit on a device, which the compiler or the launch says."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from warpnorm.plan.device import Device
from warpnorm.plan.plan import COLUMN, HELD, LONG_ROW, ROW, TEAM, Plan
from warpnorm.problem import BackwardProblem, ForwardProblem

WARPS = (1, 2, 4, 8, 16, 32)
# Elements of a tile for each thread: fewer leave it idle, more do not fit in registers
FEWEST_ELEMENTS, MOST_ELEMENTS = 4, 128
LARGEST_TILE = 4096  # of several rows
PROGRAMS_A_UNIT = (1, 2, 4)
MANY_A_UNIT = (8, 16)  # backward, of few warps
MOST_WARPS = 32  # of them all: each has 64 registers for a thread then
STAGES = (2, 3, 4)


def alternatives(problem: ForwardProblem | BackwardProblem, chosen: Plan, device: Device) -> tuple[Plan, ...]:
    """The chosen plan first, then others of its pattern, and for rows that may be walked of that pattern too."""
    is_backward = isinstance(problem, BackwardProblem)
    cols = problem.cols_class
    found = [chosen]
    if chosen.pattern == COLUMN:
        found += _columns(chosen)
    elif chosen.pattern == TEAM:
        found += _hurried(chosen, problem.has_vectors, is_backward)
        found += _teams(chosen, device, problem.has_vectors)
    elif chosen.pattern == HELD:
        found += _held(chosen, device)
    if chosen.pattern == ROW:
        if chosen.programs:
            told = 0 if chosen.per_unit else chosen.programs // device.units
            found.append(replace(chosen, per_unit=told, why="tried"))
        found += _rows(chosen, cols, device, is_backward)
    if chosen.pattern == LONG_ROW or (
        chosen.pattern in (ROW, TEAM) and cols >= 4096 and not problem.norm.is_by_channel
    ):
        found += _walks(cols, device, is_backward)
    return tuple(dict.fromkeys(found))


def _held(chosen: Plan, device: Device) -> Iterator[Plan]:
    """As many programs as give every scheduler as many warps as another, as far as warps go."""
    step = max(1, 4 // chosen.warps)
    of_ahead = dict.fromkeys((chosen.ahead, 0))
    for per_unit, stages, ahead in product(range(step, 24 // chosen.warps + 1, step), (1, *STAGES), of_ahead):
        yield replace(
            chosen, programs=device.units * per_unit, per_unit=per_unit, stages=stages, ahead=ahead, why="tried"
        )


def _rows(chosen: Plan, cols: int, device: Device, is_backward: bool) -> Iterator[Plan]:
    for block_rows, warps in product((1, 2, 4, 8, 16, 32), WARPS):
        tile = block_rows * chosen.block_cols * chosen.chunks
        is_held = FEWEST_ELEMENTS <= tile // (warps * device.warp_size) <= MOST_ELEMENTS
        if not is_held or (block_rows > 1 and tile > LARGEST_TILE):
            continue
        plan = replace(chosen, block_rows=block_rows, warps=warps, why="tried")
        if not is_backward:
            for late, recomputes in product((False, True), repeat=2):
                yield replace(plan, programs=0, stages=1, late=late, recomputes=recomputes)
            plan = replace(plan, late=False)
        many = [a_unit for a_unit in MANY_A_UNIT if is_backward and a_unit * warps <= MOST_WARPS]
        of_units = (*PROGRAMS_A_UNIT, *many)
        for a_unit, stages in product(of_units, dict.fromkeys((chosen.stages, *STAGES) if is_backward else STAGES)):
            # That so many fit the compiler has to be told where it would take more registers
            told = a_unit if chosen.per_unit else 0
            yield (persistent := replace(plan, programs=a_unit * device.units, stages=stages, per_unit=told))
            if is_backward and chosen.recomputes:
                yield replace(persistent, recomputes=False)


def _walks(cols: int, device: Device, is_backward: bool) -> Iterator[Plan]:
    for block_cols, warps, stages in product((1024, 2048, 4096, 8192), (4, 8, 16), (1, 2, 3)):
        if block_cols <= cols:
            for programs in (2, 4, 8) if is_backward else (0,):
                yield Plan(LONG_ROW, 1, block_cols, warps, programs * device.units, stages=stages, why="tried")


def _teams(chosen: Plan, device: Device, has_vectors: bool) -> Iterator[Plan]:
    """Elements that are moved alone, or few at a time, have no pipeline, and smaller programs."""
    of_warps, of_units, of_stages = (
        ((2, 4, 8), (1, 2, 3, 4), (2, 3)) if has_vectors else ((1, 2, 4), (4, 8, 12, 16), (1,))
    )
    part = chosen.block_cols * chosen.chunks
    for half_parts, chunks in product((1, 2, 4), (1, 2, 4, 8)):  # half of what a program has, as much, and twice
        splits, block_cols = -(-2 * chosen.splits // half_parts), part * half_parts // (2 * chunks)
        if splits < 2 or not 512 <= block_cols <= 4096 or block_cols & (block_cols - 1):
            continue
        for warps, a_unit, stages in product(of_warps, of_units, of_stages):
            if teams := device.units * a_unit // splits:
                per_unit = a_unit if chosen.per_unit else 0
                yield replace(
                    chosen, block_cols=block_cols, warps=warps, programs=teams, splits=splits, chunks=chunks, stages=stages,
                    per_unit=per_unit, why="tried",
                )  # fmt: skip


def _hurried(chosen: Plan, has_vectors: bool, is_backward: bool) -> Iterator[Plan]:
    of_ahead = (0,) if has_vectors else (0, 1)
    of_early = (False, True) if is_backward and not chosen.keeps else (False,)
    for ahead, early, asks in product(of_ahead, of_early, (False, True)):
        yield replace(chosen, ahead=ahead, early=early, asks=asks, why="tried")


def _columns(chosen: Plan) -> Iterator[Plan]:
    of_stages = STAGES if chosen.is_walked else (chosen.stages,)  # only a walk has a pipeline
    of_ahead = (0.5, 0.75, 1.0, 1.5, 2.0) if chosen.ahead else (1.0,)
    of_together = dict.fromkeys((chosen.together, 1))
    for rows, warps, times, stages, together in product((0.5, 1.0, 2.0), (2, 4, 8), of_ahead, of_stages, of_together):
        block_rows = max(1, int(chosen.block_rows * rows))
        ahead = int(chosen.ahead * times)
        yield replace(
            chosen, block_rows=block_rows, warps=warps, ahead=ahead, stages=stages, together=together, why="tried"
        )
