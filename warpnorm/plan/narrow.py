"""Plans of rows of up to 1024 columns, of which a program may have several. Percentages are of copy speed, bf16 unless said,
measured on an H200."""

from collections.abc import Sequence

from warpnorm.plan import needs
from warpnorm.plan.device import Device
from warpnorm.plan.plan import ROW, Plan
from warpnorm.problem import NUMBER, VECTOR_BYTES, BackwardProblem, ForwardProblem, Operand, Problem, is_varying


def forward(problem: ForwardProblem, device: Device) -> Plan:
    """2 KB of rows for each warp. LayerNorm of fp32 at 64 and 128: 96 and 95, with 4 KB 82 and 83, with 1 KB 79; RMSNorm,
    which needs fewer registers, 97 with either; bf16 at 128: 95, with 1 KB 79. Two warps where one loads a row at once, or
    two rows. LayerNorm and RMSNorm of bf16 at 256: 98 and 99, with one 95 and 97, with four 95 and 96; at 128 95 and 98, 94
    and 97; of fp32 at 128 96 and 98, 95 and 97."""
    cols, itemsize = problem.cols_class, needs.itemsize(problem)
    warps = 2 if needs.moves_vectors(problem) and 256 <= cols * itemsize <= 512 else 1
    block_rows = max(1, warps * min(2048 // itemsize, 1024) // cols)
    is_alone = problem.neighbours == 1 and not problem.norm.is_by_channel
    if is_alone and itemsize <= 2 and cols <= 256 and needs.words(problem) == 1:
        # Of elements alone, each with an address: LayerNorm and RMSNorm at 127 59 and 75, of 2 KB 51 and 63; at 255 66 and
        # 77, 62 and 78
        block_rows = max(1, block_rows // 2)
    why = "narrow rows: a warp has some, and reduces without shared memory"
    return Plan(ROW, block_rows, cols, warps, least=_least(problem.operands + problem.outputs, device), why=why)


def _least(tensors: Sequence[Operand], device: Device) -> int:
    """Elements that a warp loads or stores at once, of the tensor with the smallest ones: with fewer to a tile, a thread
    would have a smaller part of a row than among many rows, and a sum would round in another way."""
    smallest = min(operand.dtype.itemsize for operand in tensors if operand.axes != NUMBER)
    return device.warp_size * max(8, VECTOR_BYTES // smallest)


def least_backward(problem: BackwardProblem, device: Device, block_cols: int) -> int:
    """The same of a warp that has few rows, backward. Warps of 32 threads lay out a lone row as they do several, if there is
    a column for each."""
    is_full = device.warp_size == 32 and block_cols >= device.warp_size
    return 1 if is_full else _least(problem.operands + problem.grad_outputs + problem.results, device)


def _rows_at_once(device: Device, warps: int, row_bytes: int) -> int:
    return warps * max(1, device.warp_size * VECTOR_BYTES // row_bytes)


def blocks_of(problem: Problem) -> tuple[int, int] | None:
    """Columns of a block, and how many of them a row is, where narrow rows would leave much of one block empty: five or
    seven eighths, or quarters. LayerNorm at 96, 160, 192, 320, 384, 448, 640 and 896: 99, 99, 99, 97, 98, 98, 97 and 99, in
    one block 75, 71, 82, 75, 85, 90, 70 and 88; RMSNorm at 320 99 and 96. Quarters are better where an eighth is a vector or
    two, RMSNorm at 72 and 112 99 and 82, and if the last of seven eighths is not full: LayerNorm at 200 94 and 91. So they
    are if all eighths are there, but not full: LayerNorm at 1000 97, in one block 90, but RMSNorm 99 either way."""
    cols, eighths = problem.cols_class, problem.eighths
    is_narrow = 64 <= cols <= 1024 and not problem.is_exact and not problem.norm.is_by_channel
    # Of elements alone too: LayerNorm and RMSNorm at 33 and 65 36 and 46, 50 and 46, in one block 17 and 25, 28 and 37
    is_alone = isinstance(problem, ForwardProblem) and problem.neighbours == 1 and cols <= 512 and eighths <= 6
    if not is_narrow or not (is_alone or needs.moves_vectors(problem)):
        return None
    if needs.words(problem) > 1 or len(problem.varying) > 2:
        return None
    if cols == 1024 and (eighths == 6 or (eighths > 6 and not problem.norm.is_centered)):
        return None
    is_fine = cols > 128 or (cols == 128 and problem.norm.is_centered)
    if needs.itemsize(problem) <= 2 and is_fine and (eighths == 5 or (eighths == 7 and problem.is_filled)):
        return cols // 8, eighths
    return cols // 4, -(-eighths // 2)


def forward_by_blocks(problem: ForwardProblem, device: Device, block_cols: int, chunks: int) -> Plan:
    """As many rows as a warp loads a block of at once. LayerNorm at 80 and 160: 95 and 99 with one warp, 92 and 94 with two;
    but at 192 and 200 96 and 92, 99 and 94, RMSNorm at 72 90 and 99, LayerNorm of fp32 at 96 and 320 97 and 99, 101 and
    100."""
    itemsize, is_alone = needs.itemsize(problem), problem.neighbours == 1
    is_lone = itemsize <= 2 and problem.norm.is_centered and (problem.cols_class, block_cols) != (256, 64)
    warps = 1 if is_lone or is_alone else 2
    block_rows = _rows_at_once(device, warps, block_cols * itemsize)
    if is_alone and is_lone:
        # LayerNorm at 33 and 65: 38 and 51, 35 and 46; RMSNorm with one warp 43 and 53
        block_rows = max(1, block_rows // 2)
    why = f"narrow rows, each in {chunks} blocks: a warp loads one of several rows at once"
    least = _least(problem.operands + problem.outputs, device)
    return Plan(ROW, block_rows, block_cols, warps, chunks=chunks, least=least, why=why)


def backward_by_blocks(problem: BackwardProblem, device: Device) -> Plan | None:
    """Where a row is five or six eighths of a block. LayerNorm at 48, 72, 96, 160, 192, 320 and 384: 86, 79, 93, 91, 90, 93
    and 95, in one block 81, 61, 79, 66, 78, 70 and 83; RMSNorm at 96 and 320 94 and 91, 88 and 81, but at 48 and 72 87 and
    69, 89 and 75. fp32 at 96 and 320: 98 and 99, in one block 91 and 61. Two warps are better for LayerNorm at 72, 96 and
    160 alone, 79, 93 and 91, with one 51, 70 and 84. At 320 more programs of half the rows: LayerNorm and RMSNorm 93 and 91,
    with four rows and eight programs a unit 90 and 88."""
    cols, itemsize, blocks = problem.cols_class, needs.itemsize(problem), blocks_of(problem)
    tensors = sum(map(is_varying, problem.operands + problem.grad_outputs))
    if blocks is None or problem.eighths > 6 or needs.kept(problem) or tensors > 2:  # for the want of registers
        return None
    if cols == 256 and not problem.has_vectors:
        # Not measured. Of LayerNorm at 130 four programs of eight would fit, and up to 48 bytes of a thread spill
        return None
    is_half, has_sums = itemsize <= 2, len(problem.accumulated) > 1
    if (cols == 128 and problem.eighths == 5 and not has_sums) or (
        cols == 64 and (problem.eighths == 5 or not has_sums)
    ):
        return None
    block_cols = blocks[0] if cols >= 256 and is_half else cols // 4
    per_unit, stages = 8, 3
    warps = 2 if cols == 128 and is_half and has_sums else 1
    if cols == 256 and is_half and problem.eighths == 5 and problem.norm.is_centered:
        rows = _rows_at_once(device, 2, block_cols * itemsize)
        loaded = needs.loaded_bytes(problem.operands + problem.grad_outputs, rows * problem.width)
        warps = 2 if per_unit * ((stages - 1) * loaded + needs.SPARE_SHARED_BYTES) <= device.shared_bytes else 1
    block_rows = _rows_at_once(device, warps, block_cols * itemsize)
    if is_half and cols == 512 and problem.eighths == 5:
        block_rows, per_unit = block_rows // 2, 12
    chunks = -(-problem.width // block_cols)
    why = f"persistent: sums over rows stay in registers; narrow rows, each in {chunks} blocks"
    least = least_backward(problem, device, block_cols)
    programs = device.units * per_unit
    return Plan(ROW, block_rows, block_cols, warps, programs, chunks=chunks, stages=stages, least=least, why=why)


def backward_beside_few(problem: BackwardProblem, device: Device) -> Plan | None:
    """Of halves that are moved alone or beside few others: tiles of few rows, each moved by its own instructions, and as
    many programs as the compiler is told. LayerNorm and RMSNorm alone at 33, 65, 127, 255 and 511: 29 and 37, 37 and 47, 65
    and 72, 66 and 74, 61 and 76; in tiles as of vectors 8 and 11, 8 and 11, 14 and 20, 45 and 53, 35 and 43. Beside others
    at 50 and 100: 43 and 56, 65 and 83; 35 and 51, 58 and 78; but at 20 and 36 25 and 38, 31 and 43; 50 and 69, 44 and 61.
    silu(x) * r -> LayerNorm and x + r -> RMSNorm alone at 33, 127, 255 and 511: 29 and 38, 59 and 78, 64 and 68, 56 and 78;
    10 and 11, 19 and 21, 49 and 57, 56 and 33; beside others at 50, 100 and 300 42 and 65, 65 and 86, 72 and 92; 39 and 61,
    53 and 83, 72 and 78."""
    cols, sums = problem.cols_class, len(problem.accumulated)
    tensors = sum(map(is_varying, problem.operands + problem.grad_outputs))
    is_heavy = tensors > 2 or bool(needs.kept(problem))
    if problem.has_vectors or problem.norm.is_by_channel or tensors > 3 or sums > 2 or needs.words(problem) > 1:
        return None
    if needs.itemsize(problem) != 2 or needs.draws(problem) or (is_heavy and cols == 512 and sums > 1):
        return None
    is_alone, is_full = problem.neighbours == 1, sums > 1 or bool(needs.kept(problem))
    warps, per_unit = (2, 8) if is_alone and cols == 512 and not is_heavy else (1, 12 if is_heavy else 16)
    if is_heavy:
        block_rows = max(1, (256 if is_full else 512) // cols)
    else:
        block_rows = max(4, 256 // cols) if cols <= 128 else 1 if sums > 1 else 2
    if not is_alone:
        if cols < 64 or cols == 256 or (cols == 64 and problem.neighbours > 2) or (cols == 512 and not is_heavy):
            return None
        block_rows, per_unit = min(block_rows, 4), 16 if cols == 64 and not is_heavy else 12
    why = f"persistent: sums over rows stay in registers; few rows at a time, {per_unit} programs a unit"
    return Plan(
        ROW, block_rows, cols, warps, device.units * per_unit, stages=1 if is_alone else 3,
        least=least_backward(problem, device, cols), per_unit=per_unit, why=why,
    )  # fmt: skip
