"""Plans of pattern `column`: tiles of lines, visited once, or for their statistic and again for their results. Percentages
are of copy speed, measured on an H200."""

from dataclasses import replace

from warpnorm.norms import CHANNEL
from warpnorm.plan import grid, needs
from warpnorm.plan.device import Device
from warpnorm.plan.plan import COLUMN, FIRST, JOINT, LAST, Plan
from warpnorm.problem import FULL, TILES, VECTOR_BYTES, BackwardProblem, ForwardProblem, Operand, Problem
from warpnorm.space import Space

# Programs that share the columns of a line. Not measured
LARGEST_PARTS = 1024
# Bytes that are loaded between the first tasks of a row and its merging, and between that and the last tasks: what takes as
# long as the numbers need. BatchNorm of 64 x 256 x 56 x 56 fp16 forward: 67 with 8 MB, 65 with 6 or 14, 57 with 3; GroupNorm
# of 32 x 320 x 64 x 64: 77 with 8 MB, 67 with 6, 69 with 14; backward 72, 62 and 66
AHEAD_BYTES = 8 * 1024 * 1024
# Bytes that a step of last tasks loads at the most
LAST_BYTES = 16 * 1024
# Bytes of the lines of a tile of last tasks, side by side, where there are as many
WIDE_BYTES = 256
# Lines, columns and warps of tiles of halves, where memory runs across the lines
WIDE_TILE = (64, 64, 4)
NARROW_TILES = ((64, 32, 2), (128, 8, 2), (128, 16, 2))
FEW_PIECES, MANY_CHANNELS = 256, 1024
# Lines of a tile whose rows every program may merge itself
TALLEST_MERGE = 64


def is_across(problem: Problem) -> bool:
    """Whether memory runs across lines of several columns."""
    lead = next((o for o in problem.operands if o.axes == FULL), None)
    runs = lead is not None and lead.row_strides[-1].literal == 1 and lead.col_strides[-1].literal != 1
    return runs and problem.cols_class > 1


def column(problem: ForwardProblem | BackwardProblem, device: Device, space: Space | None = None) -> Plan:
    """By turns where tiles stay in L2 between their tasks; on AMD's GPUs programs cannot wait for each other."""
    plan = _column(problem, device)
    is_apart = problem.has_tasks and not device.is_interpreter and (plan.held == 0 or device.backend == "hip")
    if not is_apart:
        return replace(plan, together=_together(problem, plan, device))
    is_by_two = space is not None and device.backend == "cuda" and _is_by_two_warps(problem, plan, space)
    plan = _by_two_warps(problem, plan) if is_by_two else plan
    return replace(plan, tasks=FIRST, together=_together(problem, plan, device))


def _together(problem: ForwardProblem | BackwardProblem, plan: Plan, device: Device) -> int:
    """As many columns of a block as a thread has vectors, where memory runs across the lines and blocks are full: that takes
    half as many registers. GroupNorm + SiLU of 32 x 320 x 64 x 64, channels last, in microseconds, forward and backward: 76
    and 118, otherwise 78 and 125; InstanceNorm 83 and 119, 87 and 121; but BatchNorm of 64 x 256 x 56 x 56 fp16 82 and 123,
    81 and 123, and with a residual and ReLU 104 and 174, 103 and 171."""
    is_corrected = isinstance(problem, ForwardProblem) and problem.has_long_mantissas
    is_full = problem.cols_divisor % plan.block_cols == 0
    if problem.norm.rows == CHANNEL or not is_across(problem) or not is_full or not plan.is_walked:
        return 1
    if is_corrected or needs.words(problem) > 1:
        return 1
    tile_bytes = plan.block_rows * plan.block_cols * needs.itemsize(problem)
    return max(1, min(tile_bytes // (plan.warps * device.warp_size * VECTOR_BYTES), plan.block_cols))


def _is_by_two_warps(problem: ForwardProblem | BackwardProblem, plan: Plan, space: Space) -> bool:
    """First tasks of halves whose walks across the lines of a channel are short, as it takes long to merge the lanes of wide
    tiles; two warps take longer to merge pieces, which must be few, or those of many channels, of which there are few parts.
    BatchNorm, forward and backward, in microseconds, in brackets by wide tiles: images of an odd size, NCHW 256 x 2048 x 7 x
    7 43 [51] and 65 [72], 256 x 1024 x 14 x 14 87 [97] and 133 [134]; channels last 256 x 2048 x 7 x 7 41 [45] and 63 [67],
    65536 x 1024 105 [108] and 163 [166], but 64 x 256 x 56 x 56 83 [81] and 123 [123]."""
    is_wide = (plan.block_rows, plan.block_cols, plan.warps) == WIDE_TILE and needs.itemsize(problem) <= 2
    is_short = space.pieces <= FEW_PIECES if problem.has_pieces else space.rows >= MANY_CHANNELS
    return is_wide and is_short and is_across(problem) and problem.norm.rows == CHANNEL


def _by_two_warps(problem: ForwardProblem | BackwardProblem, plan: Plan) -> Plan:
    rows, cols, warps = NARROW_TILES[0 if not problem.has_pieces else 1 if isinstance(problem, ForwardProblem) else 2]
    # So many that the last tasks merge what they need of 1024 channels themselves
    programs = plan.programs if problem.has_pieces else min(2 * plan.programs, 16 * grid.LARGEST_MERGE)
    return replace(plan, block_rows=rows, block_cols=cols, warps=warps, programs=programs)


def last_tasks(problem: ForwardProblem | BackwardProblem, plan: Plan, space: Space) -> Plan | None:
    """Of those that have a kernel of their own; each of few programs may merge what it needs, if that is little."""
    if not plan.is_apart:
        return None
    # Of tall tiles there is much to merge at once: with 256 lines 280 bytes of a thread spill; 2048 took two minutes to
    # compile
    is_little = plan.block_rows <= TALLEST_MERGE
    # InstanceNorm of 32 x 320 x 64 x 64 bf16, channels last, in microseconds, forward and backward: 74 and 109, otherwise 80
    # and 113; not measured in fp32, where 8 bytes of a thread would spill on sm_100
    is_whole = plan.is_walked and is_across(problem) and not problem.has_pieces and needs.itemsize(problem) <= 2
    is_joint = is_little and (plan.chunks == 0 or is_whole)
    is_joint = is_joint and grid.column_parts(plan, space) * space.pieces <= grid.LARGEST_MERGE
    plan = replace(plan, tasks=JOINT if is_joint else LAST, together=1)
    if isinstance(problem, BackwardProblem) and problem.left_last:  # in as many parts as the others
        return plan
    if (plan.block_rows, plan.block_cols, plan.warps) in NARROW_TILES and is_across(problem) and plan.chunks == 0:
        rows, cols, warps = WIDE_TILE
        plan = replace(plan, block_rows=rows, block_cols=cols, warps=warps, programs=plan.programs // 2)
    is_long = is_joint and (plan.chunks == 0 or isinstance(problem, ForwardProblem))
    if is_long or (plan.chunks > 0 and not (is_across(problem) and needs.is_quick(problem))):
        return plan
    # Short walks. Channels last, in microseconds, in brackets by walks as those of first tasks: BatchNorm of 64 x 256 x 56 x
    # 56 fp32 forward and backward 155 [160] and 241 [245], fp16 83 [84] and 125 [128]; 256 x 64 x 112 x 112 fp32 582 [604]
    # and 941 [961]; residual + BatchNorm + ReLU fp16 105 [108] and 200 [205]; GroupNorm of 32 x 320 x 64 x 64 bf16 74.7
    # [75.6] and 118 [120], but + SiLU 77 [77] and 137 [131]
    block_rows, block_cols = plan.block_rows, plan.block_cols
    while needs.loaded_bytes(_loads(problem), block_rows * block_cols) > LAST_BYTES and block_cols > 1:
        block_cols //= 2
    is_narrow = block_rows * needs.itemsize(problem) < WIDE_BYTES and problem.rows_divisor % (2 * block_rows) == 0
    if is_narrow and problem.norm.rows == CHANNEL:
        # BatchNorm of 64 x 256 x 56 x 56 fp16 81.4 and 122.7, with half as many lines 83.4 and 123.7
        block_rows, block_cols = 2 * block_rows, max(block_cols // 2, 1)
    chunks = max(4 if is_joint else 2, min(64, problem.cols_class) // block_cols)
    return replace(
        plan, block_rows=block_rows, block_cols=block_cols, chunks=chunks, stages=2, programs=0, streams=True
    )  # fmt: skip


def _loads(problem: ForwardProblem | BackwardProblem) -> tuple[Operand, ...]:
    return problem.operands + (problem.grad_outputs if isinstance(problem, BackwardProblem) else ())


def _count_tiles(problem: ForwardProblem | BackwardProblem) -> int:
    return sum(operand.axes in TILES for operand in _loads(problem))


def _column(problem: ForwardProblem | BackwardProblem, device: Device) -> Plan:
    """Tiles of lines, wide where memory runs along a line, tall where it runs across lines."""
    cols, words = problem.cols_class, needs.words(problem)
    loads, tensors = _loads(problem), _count_tiles(problem)
    sums = len(problem.reduced) if isinstance(problem, BackwardProblem) else 0
    if device.is_interpreter:  # few programs, which run one after another
        chunks = 1 if cols <= 256 else 0 if problem.norm.rows == CHANNEL else 4
        return Plan(COLUMN, 32, min(cols, 256), 4, 3, chunks=chunks, ahead=1, held=16, why="few programs")
    if is_across(problem):
        # BatchNorm of 64 x 256 x 56 x 56, channels last, fp16, forward and backward: 56 and 57; with 3 programs 55 and 56,
        # with 32 columns 55 and 55. What is loaded between two visits does not stay in L2: by turns 33; GroupNorm and
        # InstanceNorm of 32 x 320 x 64 x 64 by turns, in microseconds, 90 and 101, one task after the other 75 and 86. Read
        # once, some channels of all positions held by all programs as one team, BatchNorm takes 172, 146 and 137 with 16, 32
        # and 64 channels, and without an exchange 152, 99 and 114: two visits of everything 81; backward 245, and 122. fp32
        # 286 and 248 with 16 and 32, without 195 and 206: 158. Memory alone, copied by slabs of 16, 32 and 64 channels,
        # takes 125, 85 and 58, and 52 of all channels: of 64 it is not memory that takes the time. GroupNorm read once, a
        # sample held by a team, 64 channels of 256 positions by each program and the next sample on its way, takes 70,
        # without waiting for each other 56, + SiLU 87; of 64 x 640 x 32 x 32 40. As it is, 71, 76 and 38
        if not problem.has_tasks and problem.norm.rows == CHANNEL:
            return _across_once(problem, device)
        is_light = problem.has_tasks and tensors <= 2 and sums <= 2
        block_cols, per_unit = (min(cols, 64), 2) if is_light else (min(cols, 32), 3)
        if is_light and sums and needs.itemsize(problem) == 4:
            per_unit = 3  # not faster, but sums of fewer numbers are more accurate
        # 2048 lines of two columns took four times as long to compile
        block_rows = min((4096 if is_light else 2048) // words // block_cols, 512)
        is_tall = sums > 0 and tensors == 3 and needs.itemsize(problem) == 2 and problem.norm.rows == CHANNEL
        is_tall = is_tall and problem.has_tasks and problem.rows_divisor % (2 * block_rows) == 0
        if is_tall:  # residual + BatchNorm + ReLU backward, fp16: 202 us, and 208 with half the lines and 3 programs
            block_rows, per_unit = 2 * block_rows, 2
        # By how many programs the columns of GroupNorm are shared must not depend on the number of samples
        chunks = 0 if problem.norm.rows == CHANNEL else max(1, min(8, cols // block_cols))
        stages = min(4, _walk_depth(loads, block_rows * block_cols, per_unit, device))
        # GroupNorm of 32 x 320 x 64 x 64, in microseconds, forward and backward: 71 and 107, a tile of each sample after
        # another 74 and 113; of 64 x 640 x 32 x 32 72 and 107, 77 and 118. A unit of BatchNorm lies beside the others
        is_by_samples = problem.norm.rows != CHANNEL
        why = "memory runs across the lines"
        return Plan(
            COLUMN, block_rows, block_cols, 4, device.units * per_unit, chunks=chunks, stages=stages,
            streams=is_tall, by_units=is_by_samples, why=why,
        )  # fmt: skip
    why = "memory runs along the lines"
    if cols <= 4096 // words:
        # BatchNorm of 64 x 256 x 56 x 56, forward and backward, by turns: fp16 67 and 63, fp32 75 and 77; one task after the
        # other 54 and 54, 60 and 60. Warps: fp32 71 and 75 with 4, fp16 forward 61; GroupNorm backward bf16 72, 70 with 2
        elements = 4096 if problem.has_vectors else 2048
        block_rows = max(1, elements // words // cols)
        is_light = tensors <= 2 and words == 1 and problem.has_vectors
        tile_bytes = max(needs.loaded_bytes(loads, block_rows * cols), 1)
        ahead, held = AHEAD_BYTES // tile_bytes, device.cache_bytes // 2 // tile_bytes
        warps = 2 if is_light and (tensors == 1 or needs.itemsize(problem) == 4) else 4
        return Plan(COLUMN, block_rows, cols, warps, ahead=ahead, held=held, streams=True, why=why)
    # BatchNorm of 256 x 64 x 112 x 112 fp16, forward and backward: 63 and 61, with one line of 2048 columns 63 and 60
    block_rows, block_cols = 2, 1024 // words
    chunks = max(13312 // words // block_cols, cols // (block_cols * LARGEST_PARTS))
    stages = min(4, _walk_depth(loads, block_rows * block_cols, 4, device))
    return Plan(COLUMN, block_rows, block_cols, 4, chunks=chunks, stages=stages, streams=True, why=why)


def _across_once(problem: ForwardProblem | BackwardProblem, device: Device) -> Plan:
    """Evaluation, where memory runs across the lines and tiles are visited once. BatchNorm of 65536 x 1024 and of 64 x 256 x
    56 x 56, channels last, fp16, forward: 95 and 93, in long walks 79 and 89; if what is written stays in L2 91 and 88.
    Backward: 94 and 89, in long walks 88 and 87."""
    words, why = needs.words(problem), "memory runs across the lines, and tiles are visited once"
    if isinstance(problem, ForwardProblem):
        block_cols = min(problem.cols_class, 64)
        return Plan(COLUMN, 4096 // words // block_cols, block_cols, 4, streams=True, why=why)
    # Four numbers for each line are read beside, and sums are taken: larger tiles would not fit in registers
    block_cols = min(problem.cols_class, 32)
    block_rows = 2048 // words // block_cols
    stages = min(4, _walk_depth(_loads(problem), block_rows * block_cols, 3, device))
    return Plan(COLUMN, block_rows, block_cols, 4, chunks=8, stages=stages, why=why)


def _walk_depth(loads: tuple[Operand, ...], elements: int, per_unit: int, device: Device) -> int:
    """As many stages as shared memory has room for."""
    stage_bytes = max(needs.loaded_bytes(loads, elements), 1)
    return 1 + max(0, (device.shared_bytes // per_unit - needs.SPARE_SHARED_BYTES) // stage_bytes)
