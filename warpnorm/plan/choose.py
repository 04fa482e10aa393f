"""Which plan runs a problem. Decided by the columns, the dtypes and the device alone, never by the number of rows: a
row's bits do not depend on its neighbours. Percentages are of copy speed, bf16 unless said, measured on an H200."""

from dataclasses import replace

from warpnorm.norms import CHANNEL
from warpnorm.plan import grid, narrow, needs, pieces, teams, wide
from warpnorm.plan.device import Device
from warpnorm.plan.plan import COLUMN as COLUMN_PATTERN
from warpnorm.plan.plan import FIRST, JOINT, LAST, LONG_ROW, ROW, Plan
from warpnorm.problem import (
    COLUMN,
    FULL,
    TILES,
    VECTOR_BYTES,
    BackwardProblem,
    ForwardProblem,
    Operand,
    Problem,
    operand_name,
)
from warpnorm.space import Space

# Bytes of one tensor, in forward, or of two, in backward, that the programs of one multiprocessor load for one stage of
# their pipelines: as many programs share it as that leaves room for, however many tensors they load.
STAGE_BYTES = 16 * 1024
# Programs that share the columns of a line, of pattern `column`; columns of a row of a norm by channel up to which backward
# holds it in registers, where it lies in one piece. Neither is measured
LARGEST_PARTS = 1024
ROW_BY_CHANNEL = 4096
# Bytes that are loaded, of pattern `column`, between the first tasks of a row and its merging, and between that and the last
# tasks: what takes as long as the numbers need. BatchNorm of 64 x 256 x 56 x 56 fp16 forward: 67 with 8 MB, 65 with 6 or 14,
# 57 with 3; GroupNorm of 32 x 320 x 64 x 64: 77 with 8 MB, 67 with 6, 69 with 14; backward 72, 62 and 66
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
# Columns of rows that lie side by side up to which a tile has them whole. Not measured
SHORT_ROW = 64
# Operators that cost next to nothing to compute again
LIGHT = frozenset({"add", "sub", "neg"})


def forward(problem: ForwardProblem, device: Device, space: Space | None = None) -> Plan:
    """`space`: of a norm by channel whose rows may be held in registers, for which their number counts."""
    if space is not None and (plan := pieces.held(problem, space, device)):
        return plan
    cols = problem.cols_class
    live = _live_words(problem)
    is_long = cols > _largest_row(problem) or live * cols > device.registers_per_unit * 3 // 4
    if problem.norm.is_by_channel and _is_short_across(problem):
        block_rows = min(4096 // needs.words(problem) // cols, 512)
        return Plan(ROW, block_rows, cols, 4, why="short rows that lie side by side: a tile has them whole")
    if problem.norm.is_by_channel and (is_long or not _has_whole_rows(problem)):
        return column(problem, device, space)
    is_light = all(node.operator in LIGHT for node in problem.prologue.nodes)
    if is_light and (is_long or problem.width > 8192) and wide.can_lie_in_registers(problem, device):
        return (wide.is_read_often(problem) and teams.forward(problem, device)) or wide.forward(problem, device)
    if is_long and is_light and (team := teams.forward(problem, device)):
        return team
    if is_long:
        # Columns a block at 32k: LayerNorm 71 with 4096, 51 with 8192; RMSNorm, with one walk's arithmetic less, 70 and 85.
        # At 50257, where elements are moved alone, 35 and 39 with 16 warps
        block_cols, warps = (4096 if problem.norm.is_centered else 8192, 8) if problem.has_vectors else (2048, 16)
        block_cols //= needs.words(problem)
        why = f"a row of up to {cols} columns with {live:g} words for each does not fit in registers"
        return Plan(LONG_ROW, 1, block_cols, warps, stages=_walk_stages(problem.operands, block_cols, device), why=why)
    if is_light and (blocks := narrow.blocks_of(problem)):
        return narrow.forward_by_blocks(problem, device, *blocks)
    if cols <= 512:
        return narrow.forward(problem, device)
    block_cols, chunks = _blocks(problem)
    is_half = needs.itemsize(problem) <= 2
    is_masked = chunks == 1 and problem.has_vectors and not problem.is_exact and len(problem.varying) == 1
    is_plain = is_half and is_light and not problem.norm.is_by_channel
    if is_plain and is_masked and cols > 1024 and (problem.norm.is_centered or cols == 8192):
        # Only the last is masked. LayerNorm at 2000, 4000 and 7176: 99, 99 and 95, in one block 84, 79 and 91; RMSNorm 99,
        # 99 and 92 in one block, and 99 at 7176 in eight
        block_cols, chunks = cols // 8, 8
    # 32 elements a thread keep the loads of a whole row in flight. RMSNorm at 8192: 96 with 8 warps, 76 with 16. Fewer
    # where an element takes so many registers that they would not fit. How many operands vary by row does not count: an
    # operand with a value for each sample does or does not, by how many samples there are, and a row's bits shall not
    warps = min(max(2, cols * needs.words(problem) // 1024) * (2 if live > 5 * needs.words(problem) else 1), 32)
    if not problem.has_vectors:
        warps = max(1, cols * needs.words(problem) // 1024)
    elif is_half and chunks > 1 and is_light:
        # At 768 (of three blocks), LayerNorm: 98 with one warp, 91 with two; at 5120: 98 with 4, 97 with 8; at 2000 and 4000
        # (of eight) best with one and two; at 2056 95 with two and 91 with 4
        warps = min(cols // 1024, 4)
        if chunks == 8:
            warps = cols // 2048 if problem.norm.is_centered else 8
        elif chunks == 5 and cols == 4096 and problem.norm.is_centered:
            warps = 2
    elif is_half and cols == 8192 and is_light and problem.norm.is_centered:
        warps = 4  # LayerNorm 99, and 95 with 8
    elif is_half and cols in (2048, 4096) and not is_light:
        warps = cols // 512  # silu(x) * r -> LayerNorm at 2048: 100, and 90 with 2; gelu(x + b) -> RMSNorm 94 and 90
    if is_half and cols == 16384 and problem.has_vectors and not is_light:
        # The reductions leave a lone program idle: keep the next rows in flight. silu(x) * r -> LayerNorm: 92, 91 with 8
        # warps, and 76 with one program a row; gelu(x + b) -> RMSNorm 84 and 76
        stages = needs.stages(
            device, 1, needs.loaded_bytes(problem.operands, cols), needs.IN_FLIGHT_BYTES * len(problem.varying)
        )
        why = f"persistent: {stages - 1} rows in flight while one is reduced"
        return Plan(ROW, 1, block_cols, warps, device.units, chunks=chunks, stages=stages, why=why)
    # Where weight and bias wait for the statistic, more programs fit: LayerNorm at 3072: 99, 95 otherwise, at 8192: 99 and
    # 94; at 4096: 98 and 100, and of 128 x 1024 1.9 microseconds and 2.1. RMSNorm is as fast either way
    is_late = (wide.epilogue_columns(problem) > 1 or not is_light) and (chunks > 1 or cols >= 8192) and cols > 1024
    # gelu(x + b) -> RMSNorm at 1024 and 4096: 90 and 88, 87 and 86 otherwise
    is_late = is_late or (is_half and not is_light and not problem.norm.is_centered and problem.has_vectors)
    # Where elements are moved alone, LayerNorm at 8191: 80, and 63 with c in registers; RMSNorm 84 and 82
    recomputes = is_light and is_half and cols == 8192 and not problem.has_vectors
    why = "a program for each row: its loads are enough to hide their latency"
    return Plan(ROW, 1, block_cols, warps, chunks=chunks, late=is_late or recomputes, recomputes=recomputes, why=why)


def _blocks(problem: Problem) -> tuple[int, int]:
    """Columns of a block, and how many of them a row is. One; or where the width is not near a power of two as many eighths
    or quarters of that as it takes, of 256 columns at least, which a warp loads at once; or where elements are moved alone
    always eighths: only the last has to be masked. LayerNorm and RMSNorm at 4095: 83 and 88, in one block 58 and 76; at
    1023 83 and 86, 68 and 86; at 8191 63 and 82, 52 and 69."""
    cols, eighths = problem.cols_class, problem.eighths
    if problem.norm.is_by_channel or cols <= 512:
        return cols, 1
    if not problem.has_vectors:
        return cols // 8, eighths
    if cols == 1024 and eighths <= 6:
        return 256, 3
    if eighths == 8 or cols // 8 < 256:
        return cols, 1
    return (cols // 4, 3) if eighths == 6 else (cols // 8, eighths)


def backward(problem: BackwardProblem, device: Device, space: Space | None = None) -> Plan:
    if space is not None and (plan := pieces.held(problem, space, device)):
        return plan
    is_row = _is_short_across(problem) or (_has_whole_rows(problem) and problem.cols_class <= ROW_BY_CHANNEL)
    if problem.norm.is_by_channel and not is_row:
        return column(problem, device, space)
    cols = problem.cols_class
    loads = problem.operands + problem.grad_outputs
    block_cols, chunks = _blocks(problem)
    if problem.has_vectors and cols == 8192 and problem.width == 7168:
        block_cols, chunks = cols, 1  # LayerNorm 91, and 81 in blocks
    elif (
        problem.has_vectors
        and cols == 16384
        and problem.eighths == 8
        and needs.itemsize(problem) <= 2
        and not problem.norm.is_by_channel
    ):
        is_masked = not problem.is_filled and bool(problem.accumulated)
        if is_masked and (team := teams.backward(problem, device, loads)):
            return team  # RMSNorm at 15000: 83, and 77 by one program
        block_cols, chunks = 4096, 4  # RMSNorm: 95, and 85 by a team
    # xhat, its gradient and one accumulator for each sum over rows live at once, in half of the registers; beside them, in
    # their own dtype, the operands by which the prologue is differentiated
    width = block_cols * chunks
    kept = needs.kept(problem)
    kept_words = needs.loaded_bytes(kept, width) // 4
    live = (2 + len(problem.accumulated)) * width * needs.words(problem) + kept_words
    # gelu(x + b) -> RMSNorm at 8192 is past the half by an eighth, and faster than in two halves; so is LayerNorm at 12288
    # by a quarter: 89, and 57 by a team
    most = 12 if chunks > 1 and not kept and problem.has_vectors else 9 if chunks > 1 or problem.has_vectors else 4
    is_half = needs.itemsize(problem) <= 2 and problem.has_vectors
    if (
        kept
        and cols == problem.width == 8192
        and is_half
        and device.backend == "cuda"
        and not problem.norm.is_by_channel
    ):
        # In two blocks, for the want of registers. gelu(x + b) -> RMSNorm: 68, and 53 in one block with c kept;
        # silu(x) * r -> LayerNorm: 81, 79 with 8 warps or in one block, 75 by two programs; RMSNorm * silu(z): 96, 98 and 75
        why = "persistent: sums over rows stay in registers; the prologue is computed again, for the want of more"
        stages = min(3, needs.stages(device, 1, needs.loaded_bytes(loads, cols), needs.IN_FLIGHT_BYTES * 3 // 2))
        warps = 8 if len(problem.varying) == 1 else 16
        return Plan(ROW, 1, 4096, warps, device.units, chunks=2, stages=stages, recomputes=True, why=why)
    if live <= device.registers_per_unit * most // 16:
        return _row_backward(problem, device, loads, block_cols, chunks)
    if problem.norm.is_by_channel:  # the patterns below sum over rows, not along lines
        return column(problem, device, space)
    if kept and live <= device.registers_per_unit * 5 // 8 and problem.has_vectors:
        # silu(x) * r -> LayerNorm at 8192: 92; 86 with 16 warps, 75 in two halves, 63 by blocks
        why = "persistent: sums over rows stay in registers; the prologue is computed again, for the want of more"
        stages = needs.stages(device, 1, needs.loaded_bytes(loads, cols), needs.IN_FLIGHT_BYTES * 3 // 2)
        return Plan(ROW, 1, cols, 8, device.units, stages=stages, recomputes=True, why=why)
    if team := teams.backward(problem, device, loads):
        return team
    # Two launches that read everything: 60 is what the bytes allow
    why = f"a row of up to {cols} columns and {len(problem.accumulated)} sums over rows do not fit in registers"
    return Plan(LONG_ROW, 1, 1024, 4, device.units * 4, stages=_walk_stages(loads, 1024, device), why=why)


def _has_whole_rows(problem: Problem) -> bool:
    """Whether memory runs along rows, which lie in one piece and have a statistic."""
    lead = next((o for o in problem.operands if o.axes == FULL), None)
    is_along = lead is not None and (lead.col_strides[-1].literal == 1 or problem.cols_class == 1)
    return is_along and not problem.has_pieces and problem.norm.is_computed


def _is_short_across(problem: Problem) -> bool:
    """Whether rows lie in one piece, of few columns, and memory runs across them."""
    return (
        _is_across(problem) and not problem.has_pieces and problem.norm.is_computed and problem.cols_class <= SHORT_ROW
    )


def _is_across(problem: Problem) -> bool:
    """Whether memory runs across lines of several columns."""
    lead = next((o for o in problem.operands if o.axes == FULL), None)
    is_across = lead is not None and lead.row_strides[-1].literal == 1 and lead.col_strides[-1].literal != 1
    return is_across and problem.cols_class > 1


def _row_backward(
    problem: BackwardProblem, device: Device, loads: tuple[Operand, ...], block_cols: int, chunks: int
) -> Plan:
    cols, itemsize = problem.cols_class, needs.itemsize(problem)
    if problem.norm.is_by_channel and cols > 512:
        # There are no sums over rows, but more along them. InstanceNorm of 32 x 320 x 64 x 64: 90, 89 with half as many
        # programs, 86 with rows in flight and 41 with a lone program
        warps = max(1, cols * needs.words(problem) // 1024)
        per_unit = max(1, 32 // warps)
        why = f"persistent: {per_unit} programs a unit hide each other's reductions"
        return Plan(ROW, 1, cols, warps, device.units * per_unit, why=why)
    if chunks > 1 and not problem.has_vectors:
        # LayerNorm and RMSNorm at 1023: 79 and 82, at 4095: 73 and 77 (in one block 35 and 39), fp32 98 and 99, at 8191: 49
        # and 53. There is no pipeline: elements are too small for it
        per_unit = max(1, 8192 // (cols * needs.words(problem)))
        why = f"elements are moved alone: many threads, a row in {chunks} blocks, {per_unit} programs a unit"
        warps = min(max(cols * needs.words(problem) // 512, 1), 16)
        return Plan(ROW, 1, block_cols, warps, device.units * per_unit, chunks=chunks, why=why)
    if chunks > 1:
        return _row_backward_by_blocks(problem, device, loads, block_cols, chunks)
    if plan := narrow.backward_by_blocks(problem, device):
        return plan
    if cols <= 128:
        # Several rows for each warp. At 128: RMSNorm 95, LayerNorm 92; with 4 warps at the most 88 and 80
        block_rows, warps = 4096 // itemsize // cols, 8
    elif cols <= 512:
        # A tile with warps above and beside each other is laid out anew for every row. At 256: RMSNorm 88, LayerNorm 89
        # with two rows and one warp, 51 and 32 with eight and eight; at 512: 93 and 93, 73 and 48 with four and eight
        # One row where more than that is kept, or in float64: of two, up to 2 KB of a thread would spill
        words = needs.words(problem)
        is_heavy = words > 1 or (cols > 256 and bool(needs.kept(problem)))
        block_rows, warps = (1, words if cols > 256 else 1) if is_heavy else (2, 1)
    else:
        # RMSNorm and LayerNorm at 1024: 93 and 93; at 2048: 97 and 90; at 8192: 97 and 94
        words = 1 if problem.has_vectors or itemsize < 4 else 2  # addresses too need registers
        block_rows, warps = 1, min(cols * words // 512, 16)
    stage_bytes = needs.loaded_bytes(loads, block_rows * cols)
    tensors = max(1, stage_bytes // (block_rows * cols * itemsize))
    if cols == 2048 and itemsize == 2 and tensors == 2 and problem.has_vectors and needs.kept(problem):
        warps = 8  # gelu(x + b) -> RMSNorm: 86, and 84 with 4
    is_half = cols == 4096 and itemsize == 2 and tensors == 2 and problem.has_vectors
    if is_half and needs.kept(problem):
        # gelu(x + b) -> RMSNorm: 79, 77 with 8 warps, 72 with two programs a unit
        why = "persistent: sums over rows stay in registers; many warps for a long prologue"
        stages = needs.stages(device, 1, stage_bytes, needs.IN_FLIGHT_BYTES * 2)
        return Plan(ROW, 1, cols, 16, device.units, stages=stages, why=why)
    if is_half and len(problem.accumulated) > 1:
        # Two accumulators keep one program busy while the other loads: LayerNorm 93, with one program 89; RMSNorm 90, 93.
        # In four blocks 98, and at 4000, of which only the last is masked, 97, in one 75
        why = "persistent: one program computes while another loads"
        stages = needs.stages(device, 2, stage_bytes)
        return Plan(ROW, 1, cols // 4, 8, device.units * 2, chunks=4, stages=stages, why=why)
    per_unit = max(1, STAGE_BYTES // (2 * block_rows * cols * itemsize))
    # A lone program needs more in flight: silu(x) * r -> LayerNorm at 4096: 99 with 72 KB, 87 with 48
    in_flight = needs.IN_FLIGHT_BYTES * max(tensors, 2) // 2 if per_unit == 1 else needs.IN_FLIGHT_BYTES
    stages = needs.stages(device, per_unit, stage_bytes, in_flight)
    why = f"persistent: sums over rows stay in registers; {stages - 1} blocks of rows in flight, {per_unit} programs a unit"
    least = narrow.least_backward(problem, device)
    return Plan(ROW, block_rows, cols, warps, device.units * per_unit, stages=stages, least=least, why=why)


def _row_backward_by_blocks(
    problem: BackwardProblem, device: Device, loads: tuple[Operand, ...], block_cols: int, chunks: int
) -> Plan:
    """LayerNorm and RMSNorm at 768: 98 and 95 (in one block 85 and 94), at 1536: 99 and 100 (80 and 90), at 2560: 92 and 92,
    at 3072: 96 and 98, at 5120: 94 and 93, at 6144: 90 and 94, at 12288: 90 and 93, RMSNorm at 14336: 94; fp32 at 1536: 99
    and 100, at 5120: 94 and 95, at 12288: 93 and 94."""
    width = block_cols * chunks
    words = width * needs.itemsize(problem) // 2
    per_unit = 8 if words <= 1024 else 4 if words <= 2560 else 2 if words <= 5120 else 1
    warps = min(max(problem.cols_class // 1024, 2), 16 if width == 16384 else 8)
    kept, tiles = (sum(o.axes in TILES for o in operands) for operands in (needs.kept(problem), loads))
    if kept > 1 and warps == 8:
        warps, per_unit = 4, 2  # silu(x) * r -> LayerNorm at 5120: 96, and 70 where c is kept
    elif warps == 8 and per_unit == 2 and tiles > 2:
        warps = 4  # h = x + r -> RMSNorm, both returned, at 5120: 103, and 87 with 8
    most = 2
    if needs.itemsize(problem) <= 2 and kept == 0 and tiles == 2:
        if problem.cols_class == 1024 and problem.eighths == 5:
            warps = 1  # LayerNorm and RMSNorm at 640: 95 and 97, with two 92 and 96; at 520 85 and 88, 80 and 87
        elif width == 5120 and (len(problem.accumulated) == 2 or problem.is_filled):
            # LayerNorm at 5120 and 5000: 98 and 91, with two programs of 8 92 and 79; RMSNorm 99 and 91, 94 and 96
            warps, per_unit, most = 4, 1, 3
    recomputes = (kept > 1 and warps == 4 and width > 4096) or width > 8192
    stage_bytes = max(needs.loaded_bytes(loads, width), 1)
    room = (device.shared_bytes // per_unit - needs.SPARE_SHARED_BYTES) // stage_bytes
    stages = 1 + max(0, min(most, room, -(-most * needs.IN_FLIGHT_BYTES // (per_unit * stage_bytes))))
    why = f"persistent: sums over rows stay in registers, a row in {chunks} blocks; {per_unit} programs a unit"
    return Plan(
        ROW, 1, block_cols, warps, device.units * per_unit, chunks=chunks, stages=stages, recomputes=recomputes, why=why
    )  # fmt: skip


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
    if problem.norm.rows == CHANNEL or not _is_across(problem) or not is_full or not plan.is_walked:
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
    return is_wide and is_short and _is_across(problem) and problem.norm.rows == CHANNEL


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
    is_whole = plan.is_walked and _is_across(problem) and not problem.has_pieces and needs.itemsize(problem) <= 2
    is_joint = is_little and (plan.chunks == 0 or is_whole)
    is_joint = is_joint and grid.column_parts(plan, space) * space.pieces <= grid.LARGEST_MERGE
    plan = replace(plan, tasks=JOINT if is_joint else LAST, together=1)
    if isinstance(problem, BackwardProblem) and problem.left_last:  # in as many parts as the others
        return plan
    if (plan.block_rows, plan.block_cols, plan.warps) in NARROW_TILES and _is_across(problem) and plan.chunks == 0:
        rows, cols, warps = WIDE_TILE
        plan = replace(plan, block_rows=rows, block_cols=cols, warps=warps, programs=plan.programs // 2)
    is_long = is_joint and (plan.chunks == 0 or isinstance(problem, ForwardProblem))
    if is_long or (plan.chunks > 0 and not (_is_across(problem) and needs.is_quick(problem))):
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
        return Plan(COLUMN_PATTERN, 32, min(cols, 256), 4, 3, chunks=chunks, ahead=1, held=16, why="few programs")
    if _is_across(problem):
        # BatchNorm of 64 x 256 x 56 x 56, channels last, fp16, forward and backward: 56 and 57; with 3 programs 55 and 56,
        # with 32 columns 55 and 55. What is loaded between two visits does not stay in L2: by turns 33; GroupNorm and
        # InstanceNorm of 32 x 320 x 64 x 64 by turns, in microseconds, 90 and 101, one task after the other 75 and 86
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
            COLUMN_PATTERN, block_rows, block_cols, 4, device.units * per_unit, chunks=chunks, stages=stages,
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
        return Plan(COLUMN_PATTERN, block_rows, cols, warps, ahead=ahead, held=held, streams=True, why=why)
    # BatchNorm of 256 x 64 x 112 x 112 fp16, forward and backward: 63 and 61, with one line of 2048 columns 63 and 60
    block_rows, block_cols = 2, 1024 // words
    chunks = max(13312 // words // block_cols, cols // (block_cols * LARGEST_PARTS))
    stages = min(4, _walk_depth(loads, block_rows * block_cols, 4, device))
    return Plan(COLUMN_PATTERN, block_rows, block_cols, 4, chunks=chunks, stages=stages, streams=True, why=why)


def _across_once(problem: ForwardProblem | BackwardProblem, device: Device) -> Plan:
    """Evaluation, where memory runs across the lines and tiles are visited once. BatchNorm of 65536 x 1024 and of 64 x 256 x
    56 x 56, channels last, fp16, forward: 95 and 93, in long walks 79 and 89; if what is written stays in L2 91 and 88.
    Backward: 94 and 89, in long walks 88 and 87."""
    words, why = needs.words(problem), "memory runs across the lines, and tiles are visited once"
    if isinstance(problem, ForwardProblem):
        block_cols = min(problem.cols_class, 64)
        return Plan(COLUMN_PATTERN, 4096 // words // block_cols, block_cols, 4, streams=True, why=why)
    # Four numbers for each line are read beside, and sums are taken: larger tiles would not fit in registers
    block_cols = min(problem.cols_class, 32)
    block_rows = 2048 // words // block_cols
    stages = min(4, _walk_depth(_loads(problem), block_rows * block_cols, 3, device))
    return Plan(COLUMN_PATTERN, block_rows, block_cols, 4, chunks=8, stages=stages, why=why)


def _walk_depth(loads: tuple[Operand, ...], elements: int, per_unit: int, device: Device) -> int:
    """As many stages as shared memory has room for."""
    stage_bytes = max(needs.loaded_bytes(loads, elements), 1)
    return 1 + max(0, (device.shared_bytes // per_unit - needs.SPARE_SHARED_BYTES) // stage_bytes)


def _largest_row(problem: ForwardProblem) -> int:
    """Columns of a row that one program holds in registers. Half as many fit where rows do not begin at multiples of 16
    bytes, so that every element has an address of its own, and where the mean is corrected."""
    is_tight = not problem.has_vectors or (problem.norm.is_centered and problem.has_long_mantissas)
    return (8192 if is_tight else 16384) // needs.words(problem)


def _walk_stages(operands: tuple[Operand, ...], block_cols: int, device: Device) -> int:
    """A walk loads the columns' operands anew for each block, so its stages are larger; three pay if they fit."""
    columns = sum(o.dtype.itemsize for o in operands if o.axes == COLUMN) * block_cols
    needed = 2 * (needs.loaded_bytes(operands, block_cols) + columns) + needs.SPARE_SHARED_BYTES
    return 3 if device.shared_bytes >= max(160 * 1024, needed) else 1


def _live_words(problem: ForwardProblem) -> float:
    """Registers for one element: c, what is loaded for it, and for the columns that the epilogue reads."""
    read = problem.epilogue.used_inputs
    varying = problem.varying
    columns = [
        o for i, o in enumerate(problem.operands) if o.axes == COLUMN and o not in varying and operand_name(i) in read
    ]
    return needs.words(problem) + sum(o.dtype.itemsize for o in (*varying, *columns)) / 4
