"""Plans of rows that lie in the registers of one program as they do in memory. Percentages are of copy speed, bf16 unless
said, measured on an H200."""

from warpnorm.plan import needs
from warpnorm.plan.device import Device
from warpnorm.plan.plan import ROW, Plan
from warpnorm.problem import COLUMN, TILES, VECTOR_BYTES, ForwardProblem, is_varying, operand_name

MOST_READ = 57344  # columns of a row up to which one program reads weight and bias for it


def can_lie_in_registers(problem: ForwardProblem, device: Device) -> bool:
    """Whether a row fits there as it lies in memory, of elements that are widened each time they are read."""
    if (
        device.backend == "hip"
        or not needs.moves_vectors(problem)
        or problem.norm.is_by_channel
        or needs.words(problem) > 1
    ):
        return False
    return needs.loaded_bytes(problem.varying, problem.width) // 4 <= device.registers_per_unit // 2


def is_read_often(problem: ForwardProblem) -> bool:
    """Whether every row reads so much of weight and bias anew, from L2, that a team does better, whose programs keep them.
    LayerNorm at 65536 and 61440: 90 and 89, and 87 and 86 in the registers of one program; at 49152 and 57344 there is no
    difference. Not if columns are masked: 85."""
    is_half = needs.itemsize(problem) <= 2
    return problem.width > MOST_READ and problem.is_filled and is_half and epilogue_columns(problem) > 1


def forward(problem: ForwardProblem, device: Device) -> Plan:
    # LayerNorm and RMSNorm at 12288: 97 and 98 (LayerNorm with 16 warps four less); at 16384 with 16 as with 8 warps,
    # LayerNorm by one more; at 32768: 95 and 97 with 16, 77 and 97 with 32; at 65536: 87 and 95. With c in registers at
    # 12288: 87 and 97. fp32 at 16384: 96 and 97
    row_bytes = problem.width * needs.itemsize(problem)
    warps = 8 if row_bytes < 32768 else 16 if row_bytes <= 65536 else 32
    itemsize = max(o.dtype.itemsize for o in problem.operands if o.axes in (*TILES, COLUMN))
    block_cols = warps * device.warp_size * VECTOR_BYTES // itemsize
    while problem.eighths * (problem.cols_class // 8) % block_cols:
        block_cols //= 2
    why = "a row lies in registers as it does in memory, and is widened each time it is read"
    chunks = -(-problem.width // block_cols)
    return Plan(ROW, 1, block_cols, warps, chunks=chunks, late=True, recomputes=True, why=why)


def epilogue_columns(problem: ForwardProblem) -> int:
    """Those that are the same for all rows, however many samples there are."""
    read = [o for i, o in enumerate(problem.operands) if operand_name(i) in problem.epilogue.used_inputs]
    return sum(o.axes == COLUMN and not is_varying(o) for o in read)
