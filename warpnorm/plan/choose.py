"""Which plan runs a problem. Decided by the columns, the dtypes and the device alone, never by the number of rows: a
row's bits do not depend on its neighbours. Percentages are of copy speed, bf16 unless said, measured on an H200."""

from warpnorm.plan.device import Device
from warpnorm.plan.plan import LONG_ROW, ROW, Plan
from warpnorm.problem import FULL, BackwardProblem, ForwardProblem, Operand, Problem

# Bytes of loads in flight on one multiprocessor that hide the latency of memory while a program reduces. LayerNorm
# backward, 8192 columns: 60 % with 32 KB in flight, 94 with 64, 90 with 96; 2048 columns: 92 with 48.
IN_FLIGHT_BYTES = 48 * 1024
# Shared memory left for what a reduction needs.
SPARE_SHARED_BYTES = 4 * 1024


def forward(problem: ForwardProblem, device: Device) -> Plan:
    cols = problem.cols_class
    if cols > _largest_row(problem):
        # LayerNorm at 32k: 71 with 4096, 66 with 8192 columns a block; RMSNorm, one pass less: 77 and 85
        block_cols = (4096 if problem.norm.is_centered else 8192) if problem.has_vectors else 2048
        return Plan(LONG_ROW, 1, block_cols, 8, stages=_walk_stages(problem, device))
    if cols <= 512:
        # One warp reduces without shared memory. LayerNorm at 256: 94 with one warp, 88 with two
        return Plan(ROW, 1024 // cols, cols, 1)
    # 32 elements a thread keep the loads of a whole row in flight. RMSNorm at 8192: 96 with 8 warps, 88 with 16
    warps = max(2, cols // 1024)
    itemsize = _itemsize(problem)
    if cols >= 16384 and itemsize == 4:
        warps = 32  # LayerNorm fp32: 87 with 32 warps, 82 with 16
    # Two reductions in a row leave a lone program idle: keep the next rows in flight. LayerNorm at 4096: 92 persistent,
    # 81 with one program a row; RMSNorm at 8192: 92 and 96; fp32, with half the arithmetic a byte: 90 and 97
    if itemsize > 2 or cols < (2048 if problem.norm.is_centered else 16384):
        return Plan(ROW, 1, cols, warps)
    row_bytes = _loaded_bytes(problem.operands, cols)
    per_unit = max(1, 16 * 1024 // row_bytes)
    return Plan(ROW, 1, cols, warps, device.units * per_unit, stages=_stages(device, per_unit, row_bytes))


def backward(problem: BackwardProblem, device: Device) -> Plan:
    cols = problem.cols_class
    loads = problem.operands + problem.grad_outputs
    # xhat, its gradient and one accumulator for each sum over rows live at once, in half of the registers
    live = (2 + len(problem.reduced)) * cols * _words(problem)
    if live <= device.registers_per_unit // (2 if problem.has_vectors else 4):
        itemsize = _itemsize(problem)
        block_rows = max(1, 4096 // itemsize // cols)
        tile = block_rows * cols
        # Short rows take more threads. RMSNorm at 128: 95 with 8 warps, 88 with 4; at 1024: 95 with 4
        warps = min(max(tile // (256 if cols <= 512 else 512), 4), 16)
        tile_bytes = _loaded_bytes(loads, tile)
        per_unit = 2 if tile * itemsize <= 4096 else 1
        stages = _stages(device, per_unit, tile_bytes)
        return Plan(ROW, block_rows, cols, warps, device.units * per_unit, stages=stages)
    # Two programs share a row, each with half of the accumulators. At 16384: RMSNorm 82, LayerNorm 72, `long_row` 60;
    # with a pipeline of two stages 55 and 44, so it must have three, which fp32 has no room for
    row_bytes = _loaded_bytes(loads, cols)
    has_room = 2 * row_bytes + 2 * cols * _itemsize(problem) + SPARE_SHARED_BYTES <= device.shared_bytes
    if live // 2 <= device.registers_per_unit // 2 and problem.has_vectors and has_room:
        warps = 8 if len(problem.reduced) > 1 else 16  # LayerNorm 71 and 72, but 16 bytes spilled on sm_100 with 16
        return Plan(ROW, 1, cols // 2, warps, device.units // 2, splits=2, stages=3)
    # Two launches that read everything: 60 is what the bytes allow
    return Plan(LONG_ROW, 1, 1024, 4, device.units * 4, stages=_walk_stages(problem, device))


def column_sum(problem: BackwardProblem, device: Device) -> Plan:
    """Some hundred partial rows, all in L2: narrow blocks, so that there are enough programs."""
    return Plan(ROW, 16, 64, 4)


def _largest_row(problem: Problem) -> int:
    """Columns of a row that one program holds in registers: 16384 in fp32 take all that 16 warps have. Where rows do
    not begin at multiples of 16 bytes every element has an address of its own, and half as many fit."""
    return (16384 if problem.has_vectors else 8192) // _words(problem)


def _stages(device: Device, per_unit: int, stage_bytes: int) -> int:
    """Enough stages for the bytes in flight, as far as shared memory has room; n of them keep n - 1 in flight."""
    wanted = min(max(-(-IN_FLIGHT_BYTES // (per_unit * stage_bytes)), 1), 3)
    room = (device.shared_bytes // per_unit - SPARE_SHARED_BYTES) // stage_bytes
    return 1 + max(0, min(wanted, room))


def _walk_stages(problem: Problem, device: Device) -> int:
    """A walk loads the columns' operands anew for each block, so its stages are larger; three pay if they fit."""
    return 3 if device.shared_bytes >= 160 * 1024 else 1


def _loaded_bytes(operands: tuple[Operand, ...], elements: int) -> int:
    return sum(operand.dtype.itemsize for operand in operands if operand.axes == FULL) * elements


def _itemsize(problem: Problem) -> int:
    return max(operand.dtype.itemsize for operand in problem.operands if operand.axes == FULL)


def _words(problem: Problem) -> int:
    """Registers that one value takes."""
    return problem.compute.itemsize // 4
