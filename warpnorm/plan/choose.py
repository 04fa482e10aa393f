"""Which plan runs a problem. Decided by the columns, the dtypes and the device alone, never by the number of rows: a
row's bits do not depend on its neighbours. Percentages are of copy speed, bf16 unless said, measured on an H200."""

from warpnorm.plan import narrow, needs, pieces, teams, tiles, wide
from warpnorm.plan.device import Device
from warpnorm.plan.plan import LONG_ROW, ROW, Plan
from warpnorm.problem import COLUMN, FULL, BackwardProblem, ForwardProblem, Operand, Problem, is_varying, operand_name
from warpnorm.space import Space

# Bytes of one tensor, in forward, or of two, in backward, that the programs of one multiprocessor load for one stage of
# their pipelines: as many programs share it as that leaves room for, however many tensors they load.
STAGE_BYTES = 16 * 1024
# Columns of a row of a norm by channel up to which backward holds it in registers, where it lies in one piece. Not measured
ROW_BY_CHANNEL = 4096
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
        return tiles.column(problem, device, space)
    is_light = all(node.operator in LIGHT for node in problem.prologue.nodes)
    if is_light and (is_long or problem.width > 8192) and wide.can_lie_in_registers(problem, device):
        return (wide.is_read_often(problem) and teams.forward(problem, device)) or wide.forward(problem, device)
    if is_long and is_light and (team := teams.forward(problem, device)):
        return team
    if is_long:
        # Columns a block at 32k: LayerNorm 71 with 4096, 51 with 8192; RMSNorm, with one walk's arithmetic less, 70 and 85.
        # At 50257, where elements are moved alone, 35 and 39 with 16 warps
        block_cols, warps = (
            (4096 if problem.norm.is_centered else 8192, 8) if needs.moves_vectors(problem) else (2048, 16)
        )
        block_cols //= needs.words(problem)
        why = f"a row of up to {cols} columns with {live:g} words for each does not fit in registers"
        return Plan(LONG_ROW, 1, block_cols, warps, stages=_walk_stages(problem.operands, block_cols, device), why=why)
    if is_light and (blocks := narrow.blocks_of(problem)):
        return narrow.forward_by_blocks(problem, device, *blocks)
    if cols <= 512:
        return narrow.forward(problem, device)
    block_cols, chunks = _blocks(problem)
    is_half = needs.itemsize(problem) <= 2
    is_masked = chunks == 1 and needs.moves_vectors(problem) and not problem.is_exact and len(problem.varying) == 1
    is_plain = is_half and is_light and not problem.norm.is_by_channel
    if is_plain and is_masked and cols > 1024 and (problem.norm.is_centered or cols == 8192):
        # Only the last is masked. LayerNorm at 2000, 4000 and 7176: 99, 99 and 95, in one block 84, 79 and 91; RMSNorm 99,
        # 99 and 92 in one block, and 99 at 7176 in eight
        block_cols, chunks = cols // 8, 8
    # 32 elements a thread keep the loads of a whole row in flight. RMSNorm at 8192: 96 with 8 warps, 76 with 16. Fewer
    # where an element takes so many registers that they would not fit. How many operands vary by row does not count: an
    # operand with a value for each sample does or does not, by how many samples there are, and a row's bits shall not
    warps = min(max(2, cols * needs.words(problem) // 1024) * (2 if live > 5 * needs.words(problem) else 1), 32)
    if not needs.moves_vectors(problem):
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
    if is_half and cols == 16384 and needs.moves_vectors(problem) and not is_light:
        # The reductions leave a lone program idle: keep the next rows in flight. silu(x) * r -> LayerNorm: 96 in four
        # blocks, 92 in one, of which 40 bytes of a thread spill, and 76 with one program a row; gelu(x + b) -> RMSNorm 92,
        # and 90 in four blocks
        if problem.width == cols and problem.is_filled and len(problem.varying) > 1:
            block_cols, chunks = cols // 4, 4
        stages = needs.stages(
            device, 1, needs.loaded_bytes(problem.operands, cols), needs.IN_FLIGHT_BYTES * len(problem.varying)
        )
        why = f"persistent: {stages - 1} rows in flight while one is reduced"
        return Plan(ROW, 1, block_cols, warps, device.units, chunks=chunks, stages=stages, why=why)
    # Where weight and bias wait for the statistic, more programs fit: LayerNorm at 3072: 99, 95 otherwise, at 8192: 99 and
    # 94; at 4096: 98 and 100, and of 128 x 1024 1.9 microseconds and 2.1. RMSNorm is as fast either way
    is_late = (wide.epilogue_columns(problem) > 1 or not is_light) and (chunks > 1 or cols >= 8192) and cols > 1024
    # gelu(x + b) -> RMSNorm at 1024 and 4096: 90 and 88, 87 and 86 otherwise
    is_late = is_late or (is_half and not is_light and not problem.norm.is_centered and needs.moves_vectors(problem))
    # Where elements are moved alone, LayerNorm at 8191: 80, and 63 with c in registers; RMSNorm 84 and 82
    recomputes = is_light and is_half and cols == 8192 and not needs.moves_vectors(problem)
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
    if not needs.moves_vectors(problem):
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
        return tiles.column(problem, device, space)
    cols = problem.cols_class
    loads = problem.operands + problem.grad_outputs
    block_cols, chunks = _blocks(problem)
    if needs.moves_vectors(problem) and cols == 8192 and problem.width == 7168:
        block_cols, chunks = cols, 1  # LayerNorm 91, and 81 in blocks
    elif (
        needs.moves_vectors(problem)
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
    most = (
        12
        if chunks > 1 and not kept and needs.moves_vectors(problem)
        else 9
        if chunks > 1 or needs.moves_vectors(problem)
        else 4
    )
    is_half = needs.itemsize(problem) <= 2 and needs.moves_vectors(problem)
    if (
        kept
        and cols == problem.width == 8192
        and is_half
        and device.backend == "cuda"
        and not problem.norm.is_by_channel
    ):
        # In two blocks, for the want of registers. gelu(x + b) -> RMSNorm: 88, and 75 in one block;
        # silu(x) * r -> LayerNorm: 81, 79 with 8 warps or in one block, 75 by two programs; RMSNorm * silu(z): 96, 98 and 75
        why = "persistent: sums over rows stay in registers; the prologue is computed again, for the want of more"
        # gelu(x + b) -> RMSNorm: 88 with four stages, and 86 with three
        deepest, warps = (4, 8) if len(problem.varying) == 1 else (3, 16)
        in_flight = needs.IN_FLIGHT_BYTES * deepest // 2
        stages = min(deepest, needs.stages(device, 1, needs.loaded_bytes(loads, cols), in_flight))
        return Plan(ROW, 1, 4096, warps, device.units, chunks=2, stages=stages, recomputes=True, why=why)
    if live <= device.registers_per_unit * most // 16:
        return _row_backward(problem, device, loads, block_cols, chunks)
    if problem.norm.is_by_channel:  # the patterns below sum over rows, not along lines
        return tiles.column(problem, device, space)
    if kept and live <= device.registers_per_unit * 5 // 8 and needs.moves_vectors(problem):
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
        tiles.is_across(problem)
        and not problem.has_pieces
        and problem.norm.is_computed
        and problem.cols_class <= SHORT_ROW
    )


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
    if chunks > 1 and not needs.moves_vectors(problem):
        # LayerNorm and RMSNorm at 1023: 79 and 81, at 2047 79 and 82, at 4095 75 and 77 (in one block 35 and 39), fp32 98
        # and 99, at 8191: 51 and 54. There is no pipeline: elements are too small for it
        per_unit = max(1, 8192 // (cols * needs.words(problem)))
        moved = "alone" if problem.neighbours == 1 else f"{problem.neighbours} at a time"
        why = f"elements are moved {moved}: many threads, a row in {chunks} blocks, {per_unit} programs a unit"
        warps = min(max(cols * needs.words(problem) // 512, 1), 16)
        # LayerNorm at 1023, 2047 and 4095: 55, 51 and 46 where the compiler is not told how many programs there are to be,
        # and takes so many registers that there are fewer. With more tensors, or in float64, up to 1 KB would spill
        is_light = sum(map(is_varying, loads)) <= 2 and not needs.kept(problem) and needs.words(problem) == 1
        told = per_unit if is_light and len(problem.accumulated) <= 2 and not problem.has_groups else 0
        return Plan(ROW, 1, block_cols, warps, device.units * per_unit, chunks=chunks, per_unit=told, why=why)
    if chunks > 1:
        return _row_backward_by_blocks(problem, device, loads, block_cols, chunks)
    if plan := narrow.backward_by_blocks(problem, device):
        return plan
    if cols <= 512 and (plan := narrow.backward_beside_few(problem, device)):
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
        words = 1 if needs.moves_vectors(problem) or itemsize < 4 else 2  # addresses too need registers
        block_rows, warps = 1, min(cols * words // 512, 16)
    stage_bytes = needs.loaded_bytes(loads, block_rows * cols)
    tensors = max(1, stage_bytes // (block_rows * cols * itemsize))
    is_half = itemsize == 2 and tensors == 2 and needs.moves_vectors(problem)
    has_prologue = bool(needs.kept(problem))
    # With as much behind the norm up to 88 bytes of a thread would spill
    is_known = has_prologue and device.backend == "cuda" and needs.is_quick_after(problem)
    if is_half and cols == 2048 and is_known:
        # gelu(x + b) -> RMSNorm: 98, 92 with three stages, 90 by two programs of 8 warps, 80 by two or 72 by four of 4;
        # silu(x + b) 96, 87 by two of 8, gelu(x) -> LayerNorm 96 and 78, mish(x + b) 80 and 70,
        # gelu by tanh 87 and 71
        why = "persistent: sums over rows stay in registers; as many programs as these have room for"
        stages = needs.stages(device, 3, stage_bytes, needs.IN_FLIGHT_BYTES * 3 // 2)
        return Plan(ROW, 1, cols, 4, device.units * 3, stages=stages, per_unit=3, why=why)
    if is_half and cols == 2048 and has_prologue:
        warps = 8
    is_half = is_half and cols == 4096
    if is_half and has_prologue and not (is_known and needs.is_quick_again(problem)):
        why = "persistent: sums over rows stay in registers; many warps for a long prologue"
        stages = needs.stages(device, 1, stage_bytes, needs.IN_FLIGHT_BYTES * 2)
        return Plan(ROW, 1, cols, 16, device.units, stages=stages, why=why)
    if is_half and has_prologue:
        # In four blocks, computed again but for what gelu keeps. gelu(x + b) -> RMSNorm: 90, in two blocks 89, in one 87,
        # and 83 if it is computed once, by 16 warps; silu(x + b) 87 and 74, gelu(x) -> LayerNorm 90 and 75, but mish(x + b)
        # 56 and 67, gelu by tanh 56 and 69
        why = "persistent: sums over rows stay in registers; the prologue is computed again, for the want of more"
        stages = needs.stages(device, 2, stage_bytes, needs.IN_FLIGHT_BYTES)
        return Plan(ROW, 1, cols // 4, 4, device.units * 2, chunks=4, stages=stages, recomputes=True, why=why)
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
    least = narrow.least_backward(problem, device, cols)
    # Of fp32 the compiler has 48 registers to a thread at 64 on a B200, and stores one, unless it is told how many there are
    is_tight = cols <= 64 and itemsize == 4 and device.backend == "cuda"
    told = per_unit if is_tight else 0
    return Plan(
        ROW, block_rows, cols, warps, device.units * per_unit, stages=stages, least=least, per_unit=told, why=why
    )  # fmt: skip


def _row_backward_by_blocks(
    problem: BackwardProblem, device: Device, loads: tuple[Operand, ...], block_cols: int, chunks: int
) -> Plan:
    """LayerNorm and RMSNorm at 768: 98 and 95 (in one block 85 and 94), at 1536: 99 and 100 (80 and 90), at 2560: 92 and 92,
    at 3072: 96 and 98, at 5120: 94 and 93, at 6144: 90 and 94, at 12288: 90 and 93, RMSNorm at 14336: 94; fp32 at 1536: 99
    and 100, at 5120: 94 and 95, at 12288: 93 and 94."""
    tiles = sum(map(is_varying, loads))  # also an operand with a value for each sample, where there is one sample
    kept = sum(map(is_varying, needs.kept(problem)))
    is_light = needs.itemsize(problem) <= 2 and kept == 0 and tiles == 2
    is_short = is_light and problem.cols_class == 1024 and problem.eighths == 5
    if is_short:
        # LayerNorm and RMSNorm at 640: 95 and 97, in blocks of 256 94 and 97, with two warps 92 and 96, with four stages 92
        # and 92; at 520, which fills fewer of its blocks, 93 and 96 with four, 84 and 88 with three in blocks of 256
        block_cols, chunks = 128, 5
    width = block_cols * chunks
    words = width * needs.itemsize(problem) // 2
    per_unit = 8 if words <= 1024 else 4 if words <= 2560 else 2 if words <= 5120 else 1
    warps = min(max(problem.cols_class // 1024, 2), 16 if width == 16384 else 8)
    if kept > 1 and warps == 8:
        warps, per_unit = 4, 2  # silu(x) * r -> LayerNorm at 5120: 96, and 70 where c is kept
    elif warps == 8 and per_unit == 2 and tiles > 2:
        warps = 4  # h = x + r -> RMSNorm, both returned, at 5120: 103, and 87 with 8
    most = 2
    if is_short:
        warps, most = 1, 2 if problem.is_filled else 3
    elif is_light and width == 5120 and (len(problem.accumulated) == 2 or problem.is_filled):
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


def _largest_row(problem: ForwardProblem) -> int:
    """Columns of a row that one program holds in registers. Half as many fit where elements are moved alone, so that every
    one has an address of its own, or beside too few others, and where the mean is corrected."""
    is_tight = not needs.moves_vectors(problem) or (problem.norm.is_centered and problem.has_long_mantissas)
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
