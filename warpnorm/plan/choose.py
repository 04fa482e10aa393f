"""Which plan runs a problem. Decided by the columns, the dtypes and the device alone, never by the number of rows: a
row's bits do not depend on its neighbours. Percentages are of copy speed, bf16 unless said, measured on an H200."""

from warpnorm.plan.device import Device
from warpnorm.plan.plan import LONG_ROW, ROW, Plan
from warpnorm.problem import FULL, BackwardProblem, ForwardProblem, Operand, Problem

# Bytes of loads in flight on one multiprocessor that hide the latency of memory while a program reduces. LayerNorm
# backward, 8192 columns: 60 % with 32 KB in flight, 94 with 64, 90 with 96.
IN_FLIGHT_BYTES = 48 * 1024
# Bytes that the programs of one multiprocessor load for one stage of their pipelines.
STAGE_BYTES = 16 * 1024
# Shared memory left for what a reduction needs.
SPARE_SHARED_BYTES = 4 * 1024


def forward(problem: ForwardProblem, device: Device) -> Plan:
    cols = problem.cols_class
    if cols > _largest_row(problem):
        # Columns a block at 32k: LayerNorm 71 with 4096, 51 with 8192; RMSNorm, with one walk's arithmetic less, 70 and 85
        block_cols = (4096 if problem.norm.is_centered else 8192) if problem.has_vectors else 2048
        return Plan(LONG_ROW, 1, block_cols // _words(problem), 8, stages=_walk_stages(device))
    if cols <= 512:
        # One warp reduces without shared memory. LayerNorm at 256: 94 with one warp, 88 with two
        return Plan(ROW, 1024 // cols, cols, 1)
    # 32 elements a thread keep the loads of a whole row in flight. RMSNorm at 8192: 96 with 8 warps, 76 with 16
    warps = max(2, cols * _words(problem) // 1024)
    # The reductions of a centred norm leave a lone program idle: keep the next rows in flight. LayerNorm at 4096: 92
    # persistent, 77 with one program a row; RMSNorm at 8192: 91 and 96, at 16384: 90 and 71; in fp32, which has half the
    # arithmetic for a byte, RMSNorm at 4096: 92 and 97, at 16384: 88 and 93
    if _itemsize(problem) > 2 or cols < (2048 if problem.norm.is_centered else 16384):
        return Plan(ROW, 1, cols, warps)
    row_bytes = _loaded_bytes(problem.operands, cols)
    per_unit = max(1, STAGE_BYTES // row_bytes)
    return Plan(ROW, 1, cols, warps, device.units * per_unit, stages=_stages(device, per_unit, row_bytes))


def backward(problem: BackwardProblem, device: Device) -> Plan:
    cols = problem.cols_class
    loads = problem.operands + problem.grad_outputs
    # xhat, its gradient and one accumulator for each sum over rows live at once, in half of the registers
    live = (2 + len(problem.reduced)) * cols * _words(problem)
    if live <= device.registers_per_unit // (2 if problem.has_vectors else 4):
        return _row_backward(problem, device, loads)
    # Two programs share a row, each with half of the accumulators. At 16384: RMSNorm 63 to 82 from run to run, LayerNorm
    # 70 to 72, `long_row` 60; with a pipeline of two stages 55 and 44, so it must have three, which fp32 has no room for
    row_bytes = _loaded_bytes(loads, cols)
    has_room = 2 * row_bytes + 2 * cols * _itemsize(problem) + SPARE_SHARED_BYTES <= device.shared_bytes
    if live // 2 <= device.registers_per_unit // 2 and problem.has_vectors and has_room:
        warps = 8 if len(problem.reduced) > 1 else 16  # LayerNorm 71 and 72, but 16 bytes spilled on sm_100 with 16
        return Plan(ROW, 1, cols // 2, warps, device.units // 2, splits=2, stages=3)
    # Two launches that read everything: 60 is what the bytes allow
    return Plan(LONG_ROW, 1, 1024, 4, device.units * 4, stages=_walk_stages(device))


def _row_backward(problem: BackwardProblem, device: Device, loads: tuple[Operand, ...]) -> Plan:
    cols, itemsize = problem.cols_class, _itemsize(problem)
    if cols <= 128:
        # Several rows for each warp. At 128: RMSNorm 95, LayerNorm 92; with 4 warps at the most 88 and 80
        block_rows, warps = 4096 // itemsize // cols, 8
    elif cols <= 512:
        # A tile with warps above and beside each other is laid out anew for every row. At 256: RMSNorm 88, LayerNorm 89
        # with two rows and one warp, 51 and 32 with eight and eight; at 512: 93 and 93, 73 and 48 with four and eight
        block_rows, warps = 2, 1
    else:
        # RMSNorm and LayerNorm at 1024: 93 and 93; at 2048: 97 and 90; at 8192: 97 and 94
        words = 1 if problem.has_vectors else _words(problem)  # addresses and float64 together would spill
        block_rows, warps = 1, min(cols * words // 512, 16)
    stage_bytes = _loaded_bytes(loads, block_rows * cols)
    if cols == 4096 and itemsize == 2 and len(problem.reduced) > 1 and problem.has_vectors:
        # Two accumulators keep one program busy while the other loads: LayerNorm 91, and 79 with one program of 8 warps;
        # RMSNorm 89 and 94
        return Plan(ROW, 1, cols, 4, device.units * 2, stages=_stages(device, 2, stage_bytes))
    per_unit = max(1, STAGE_BYTES // stage_bytes)
    return Plan(ROW, block_rows, cols, warps, device.units * per_unit, stages=_stages(device, per_unit, stage_bytes))


def column_sum(problem: BackwardProblem, device: Device) -> Plan:
    """Some hundred partial rows, all in L2: narrow blocks, so that there are enough programs; the interpreter runs
    programs one after another, so few of them."""
    return Plan(ROW, 16, 4096 if device.is_interpreter else 64, 4)


def _largest_row(problem: ForwardProblem) -> int:
    """Columns of a row that one program holds in registers. Half as many fit where rows do not begin at multiples of 16
    bytes, so that every element has an address of its own, and where the mean is corrected."""
    is_tight = not problem.has_vectors or (problem.norm.is_centered and problem.has_long_mantissas)
    return (8192 if is_tight else 16384) // _words(problem)


def _stages(device: Device, per_unit: int, stage_bytes: int) -> int:
    """Enough stages for the bytes in flight, as far as shared memory has room; n of them keep n - 1 in flight."""
    wanted = min(max(-(-IN_FLIGHT_BYTES // (per_unit * stage_bytes)), 1), 3)
    room = (device.shared_bytes // per_unit - SPARE_SHARED_BYTES) // stage_bytes
    return 1 + max(0, min(wanted, room))


def _walk_stages(device: Device) -> int:
    """A walk loads the columns' operands anew for each block, so its stages are larger; three pay if they fit."""
    return 3 if device.shared_bytes >= 160 * 1024 else 1


def _loaded_bytes(operands: tuple[Operand, ...], elements: int) -> int:
    return sum(operand.dtype.itemsize for operand in operands if operand.axes == FULL) * elements


def _itemsize(problem: Problem) -> int:
    return max(operand.dtype.itemsize for operand in problem.operands if operand.axes == FULL)


def _words(problem: Problem) -> int:
    """Registers that one value takes."""
    return problem.compute.itemsize // 4
