"""Plans of pattern `team`: how many programs share a row that does not fit in the registers of one. Percentages are of copy
speed, bf16 unless said, measured on an H200."""

from typing import NamedTuple

from warpnorm.plan import needs
from warpnorm.plan.device import Device
from warpnorm.plan.plan import TEAM, Plan
from warpnorm.plan.wide import epilogue_columns
from warpnorm.problem import COLUMN, VECTOR_BYTES, BackwardProblem, ForwardProblem, Operand, Problem, is_varying

LARGEST_TEAM = 64  # programs
IN_FLIGHT_BYTES = 4 * needs.IN_FLIGHT_BYTES  # on one multiprocessor, where there is a pipeline
MOST_STAGES = 3


class Part(NamedTuple):
    """What one program of a team has of a row, in how many blocks, with how many warps; how many programs a multiprocessor
    has; whether each keeps what it loaded, prefetches the row after the next, loads a row again early, and asks for messages
    early."""

    cols: int
    warps: int
    per_unit: int
    chunks: int
    keeps: bool = False
    prefetches: bool = False
    early: bool = False
    asks: bool = False


def forward(problem: ForwardProblem, device: Device) -> Plan | None:
    """Every element is computed twice: silu(x) * r -> LayerNorm at 32768 is walked by one program, 61, and 52 by a team.
    Where they are moved by vectors it is loaded twice as well: kept in registers, LayerNorm at 131072 and 262144 takes 174
    and 178 microseconds instead of 151 and 152, RMSNorm 153 and 161 instead of 143."""
    is_half, is_centered = needs.itemsize(problem) <= 2, problem.norm.is_centered
    if not problem.has_vectors:
        part = _part_of_elements(problem, device)
    else:
        # LayerNorm and RMSNorm at 131072: 78 and 83, at 262144: 78 and 83, walked by one program 59 and 61, 54 and 56.
        # With 8 KB of a row LayerNorm at 131072 and 262144: 88 and 88, of the latter 87 with 16 KB, and 79 where messages of
        # 64 programs come in one vector. fp32 at 65536: 88 and 91, walked 63 and 68
        is_narrow = is_centered and is_half and problem.width <= LARGEST_TEAM * 4096
        part_bytes = 8192 if is_narrow else 16384
        warps = 4 if is_centered and is_half else 8
        chunks = part_bytes // (warps * device.warp_size * VECTOR_BYTES)
        per_unit = 4 if is_narrow else 3 if is_centered and not is_half else 2
        part = Part(part_bytes // needs.itemsize(problem), warps, per_unit, chunks)
        if is_narrow and problem.width <= 32 * 2048 and needs.loaded_bytes(problem.varying, 1) == 2:
            part = Part(2048, 2, 8, 4)  # LayerNorm at 65536: 90, and 89 with 4096 columns and 4 warps
        if not is_centered and is_half and epilogue_columns(problem) > 1:
            part = Part(4096, 8, 2, 2)  # not measured; with twice the columns 40 bytes of a thread spill
        part = _asking(problem, part)
    return _plan(problem, device, problem.operands, part, "statistics", recomputes=True)


def _part_of_elements(problem: ForwardProblem, device: Device) -> Part:
    """Where elements are moved alone, or few at a time. A row stays in registers until its sums are there, two halves to one
    of them. At 50257: RMSNorm 79, LayerNorm 70; loaded again 76 and 71; without prefetching 78 and 63; both in parts of 2048
    columns 71 and 57. fp32: 91 and 86, RMSNorm 86 with prefetching; in parts of 4096 columns 74 and 71. Moved by 16 bytes as
    they lie, by teams whose rows all begin at the same place of a vector: 60 and 45 if the next vector is loaded too, 70 and
    49 if it comes from the next thread; 83 and 57 if what is written is what lies there, and all is loaded twice."""
    is_half, is_centered = needs.itemsize(problem) <= 2, problem.norm.is_centered
    columns = sum(o.axes == COLUMN and not is_varying(o) for o in problem.operands)
    # With more beside the row in registers up to 344 bytes of a thread would spill
    is_light = len(problem.varying) == 1 and columns <= (2 if is_centered else 1)
    if is_light and problem.width <= LARGEST_TEAM * 1024:
        # The compiler needs more registers for an A100, where this is not measured: up to 96 bytes of a thread would spill.
        # Of pairs it needs fewer. LayerNorm and RMSNorm at 50258: 83 and 88, with 12 programs 78 and 84, moved alone 67 and
        # 77; at 50260 86 and 84, 78 and 84, 69 and 79
        fewer = 4 if isinstance(device.arch, int) and device.arch < 90 else 0
        is_alone = not is_half or problem.neighbours == 1
        per_unit = (12 if is_centered and is_alone else 16) - fewer
        asks = is_alone or not is_centered
        return Part(1024, 1, per_unit, 1, True, prefetches=is_half or is_centered, asks=asks)
    if is_half and problem.width <= LARGEST_TEAM * 2048:
        return _asking(problem, Part(2048, 2, 6 if is_centered else 8, 1))
    return _asking(problem, Part(4096, 4 if is_centered else 8, 3, 1))


def backward(problem: BackwardProblem, device: Device, loads: tuple[Operand, ...]) -> Plan | None:
    part = _backward_part(problem, loads)
    if part is None:
        return None
    is_heavy = bool(needs.kept(problem)) or len(problem.accumulated) > 2
    is_asking = not is_heavy and (problem.has_vectors or not part.prefetches)
    return _plan(problem, device, loads, _asking(problem, part) if is_asking else part, "sums")


def _backward_part(problem: BackwardProblem, loads: tuple[Operand, ...]) -> Part | None:
    cols, sums = problem.cols_class, len(problem.accumulated)
    kept, is_half = needs.kept(problem), needs.itemsize(problem) <= 2
    is_heavy, is_centered = bool(kept) or sums > 2, problem.norm.is_centered
    loaded = needs.loaded_bytes(loads, 1)
    if not problem.needs_grad_xhat or (is_heavy and not problem.has_vectors):
        return None
    if not problem.has_vectors:
        # At 50257: RMSNorm 72; if messages are asked for early 63, without prefetching too 67. LayerNorm 63, 62 if rows are
        # loaded again late. With 2048 columns and 4 warps 64 and 60, with one warp and if rows stay in registers 68 and 49,
        # by blocks of columns 36 and 37. Moved by 16 bytes as they lie: 58 and 44. fp32 81 and 75, RMSNorm 77 with
        # prefetching; by blocks of columns 46 and 46
        if is_half and cols <= LARGEST_TEAM * 1024:
            is_early, is_one = loaded <= 4, not is_centered and sums < 2
            if is_early and is_one and problem.neighbours >= 4:
                # RMSNorm at 12300, 16380 and 32772: 83, 79 and 79, loaded again 76, 78 and 77; at 50258 72, and 77
                return Part(1024, 1, 8, 2, True, prefetches=True)
            # Pairs, LayerNorm at 12300, 16380, 32772 and 50258: 72, 70, 73 and 70, without prefetching 67, 68, 68 and 66
            prefetches = is_early and (is_one or problem.neighbours > 1)
            return Part(1024, 2, 8, 1, prefetches=prefetches, early=is_early)
        is_light = not is_half and loaded <= 8
        return Part(2048, 4, 3, 1, prefetches=is_light and sums == 2, asks=is_light)
    keeps = not is_heavy and sums == 2 and is_half and loaded <= 4
    if is_half and not is_heavy and loaded <= 4 and cols <= 65536 and not problem.is_filled:
        # LayerNorm at 12296 and 15000: 76 and 76, with 2048 columns 70 and 73; in one block 77 and 77, at 20488 and 50256 76
        # and 79 (71 and 77 with 2048), but 48 bytes would spill on sm_100. RMSNorm, in one block, at 15000 and 20488: 83 and
        # 82, 77 by one program and 73 if rows are loaded again; at 50256 86, 78 with 1024 columns and 80
        is_wide = sums < 2 and cols == 65536
        return Part(2048, 2, 4, 4, True) if is_wide else Part(1024, 1, 8, 2, True)
    if is_half and (sums == 2 or (sums == 1 and kept)) and cols <= 65536:
        # LayerNorm at 16384, 32768 and 65536: 84, 84 and 83; if rows are loaded again 81, 80, 80; with 4096 columns 83, 83
        # and 82. silu(x) * r -> LayerNorm at 16384: 74, 71 with 4096 columns and 40 if they are kept; RMSNorm * silu(z) 83
        # and 79. gelu(x + b) -> RMSNorm 76, with 2048 columns 73
        if is_heavy and loaded <= 4 and cols <= 16384:
            return Part(1024, 1, 8, 4)
        return Part(2048, 2, 4, 4 if is_heavy or keeps else 1, keeps)
    if not is_heavy and sums <= 1 and is_half and loaded <= 4:
        # RMSNorm at 32768: 93, at 65536, 131072 and 262144: 91, 90 and 88; with two programs a unit and one block each, and
        # the sums of teams as they were, 84, 82, 79 and 67
        return Part(2048, 2, 6, 4) if cols <= 32768 else Part(4096, 4, 3, 4)
    if not is_heavy and not is_half and loaded <= 8 and cols <= 2048 * LARGEST_TEAM:
        # fp32 at 16384 and 65536: RMSNorm 95 and 92, LayerNorm 92 and 87; with 4096 columns and 4 warps 93 and 88, 86 and 82
        return Part(2048, 2, 4, 2)
    if is_heavy or loaded > 8:
        # In chunks of 1024: silu(x) * r -> LayerNorm at 16384 and 65536 84 and 83, of 2048 79 and 76, of 4096 40 and 41, for
        # the want of registers; fp32 at 16384: 93, and 67 with 4096 columns for each program
        team_cols = 2048 if sums > 2 or loaded > 8 else 4096
        return Part(team_cols, 4, 2, team_cols // 1024 if is_heavy else 1)
    if keeps:
        # LayerNorm at 131072: 82, 80 in one block, 79 with 2048 columns; at 262144: 77, 71 in four blocks; but at 151936 72
        # in four, and 56
        return Part(4096, 4, 2, 4 if cols <= 131072 or not problem.is_filled else 1, keeps)
    if sums == 2 and cols <= 131072:
        return Part(2048, 2, 4, 4)  # LayerNorm at 131072: 79, with the sums of teams as they were 70, 64 in two blocks
    return Part(4096, 4, 2, 1 if cols <= 131072 else 4)  # LayerNorm at 262144: 73


def _asking(problem: Problem, part: Part) -> Part:
    """Where each thread waits for two messages of two numbers. LayerNorm at 262144: backward 230 microseconds, 264 without,
    forward 147.3 and 149.6. For one message of a thread it is as fast or slower: LayerNorm backward at 65536 233 and 223."""
    asks = problem.norm.is_centered and needs.itemsize(problem) <= 2 and _splits(problem, part) > 32
    return part._replace(asks=True) if asks else part


def _splits(problem: Problem, part: Part) -> int:
    return -(-problem.width // part.cols)


def _plan(
    problem: Problem, device: Device, loads: tuple[Operand, ...], part: Part, what: str, recomputes: bool = False
) -> Plan | None:
    """Messages are two float32 numbers; all programs of a team run at the same time."""
    splits = _splits(problem, part)
    if not device.has_teams or needs.words(problem) > 1 or not 2 <= splits <= LARGEST_TEAM:
        return None
    teams = device.units * part.per_unit // splits
    stages = 1  # elements that are moved alone, or few at a time, are too small for a pipeline
    if problem.has_vectors:
        times = 1 if part.keeps else 2
        stages = needs.stages(device, part.per_unit, times * needs.loaded_bytes(loads, part.cols), IN_FLIGHT_BYTES)
        stages = min(stages, MOST_STAGES)
    if teams == 0 or (problem.has_vectors and stages == 1):
        return None
    why = f"{splits} programs that run at the same time share a row and exchange its {what}"
    return Plan(
        TEAM, 1, part.cols // part.chunks, part.warps, teams, splits, part.chunks, stages, ahead=int(part.prefetches),
        recomputes=recomputes, keeps=part.keeps, early=part.early, asks=part.asks, per_unit=part.per_unit, why=why,
    )  # fmt: skip
