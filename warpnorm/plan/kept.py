"""Plans of pattern `kept`: what is loaded of a norm by channel, where memory runs across the lines, stays in shared memory
until the statistics are there, as far as there is room for it. The offline search tries them; none is chosen yet."""

from collections.abc import Iterator
from itertools import product

from warpnorm.plan import needs
from warpnorm.plan.device import Device
from warpnorm.plan.plan import KEPT, Plan
from warpnorm.problem import VECTOR_BYTES, BackwardProblem, ForwardProblem

TALLEST = 256  # lines of a block
PROGRAM_BYTES = 1024  # of shared memory, of every program on a multiprocessor, that are not its own
WAYS = ((5, 8), (4, 8), (3, 8), (2, 16), (8, 4), (6, 4))  # programs of a multiprocessor, and their warps


def alternatives(problem: ForwardProblem | BackwardProblem, device: Device) -> Iterator[Plan]:
    for (per_unit, warps), stages in product(WAYS, (1, 2, 4)):
        plan = of(problem, device, per_unit, warps, stages)
        if plan is not None:
            yield plan


def of(
    problem: ForwardProblem | BackwardProblem, device: Device, per_unit: int, warps: int, stages: int
) -> Plan | None:
    """Nothing where a block does not fit, or nothing can be kept."""
    tiles = needs.kept_tiles(problem)
    is_computed = problem.norm.is_by_channel and problem.norm.is_computed and problem.has_tasks
    if not device.has_teams or not tiles or not is_computed or problem.cols_class == 1:
        return None
    elements = warps * device.warp_size * VECTOR_BYTES // tiles[0].dtype.itemsize
    block_rows = min(problem.rows_divisor, TALLEST)
    block_cols = min(elements // block_rows, problem.cols_class)
    block_bytes = needs.loaded_bytes(tiles, elements)
    # Numbers that threads of other warps have are summed through shared memory: two of a line at a time
    own_bytes = needs.SPARE_SHARED_BYTES + 2 * 4 * block_rows * warps
    slots = ((device.shared_bytes + PROGRAM_BYTES) // per_unit - PROGRAM_BYTES - own_bytes) // block_bytes
    if slots < 1 or block_rows * block_cols != elements:
        return None
    return Plan(
        KEPT, block_rows, block_cols, warps, device.units * per_unit, chunks=0, stages=stages, held=slots,
        per_unit=per_unit, why=f"{slots} blocks of each program stay in shared memory until the statistics are there",
    )  # fmt: skip
