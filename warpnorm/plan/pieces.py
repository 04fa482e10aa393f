"""Plans of pattern `held`: rows that lie in pieces, and stay in registers between their statistic and their result.
Percentages are of copy speed, measured on an H200, in brackets those of pattern `column`: BatchNorm is of 64 x 256 x 56 x
56, GroupNorm of 32 x 320 x 64 x 64."""

from typing import NamedTuple

from warpnorm.plan import grid, needs
from warpnorm.plan.device import Device
from warpnorm.plan.plan import HELD, Plan
from warpnorm.problem import VECTOR_BYTES, BackwardProblem, ForwardProblem, is_varying
from warpnorm.space import Space

MOST_PROGRAMS = (1, 16, 64, 256)  # of a team; each needs another kernel
LARGEST_BLOCK, SMALLEST_BLOCK = 1024, 64
# What an element takes an instruction or two for. GroupNorm + SiLU forward: 54 [71], as few warps have much to compute
QUICK = frozenset({
    "add", "sub", "mul", "neg", "abs", "relu", "maximum", "minimum", "where", "convert",
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not",
})  # fmt: skip


class Share(NamedTuple):
    """What a thread has: bytes of some lines, or of one if it is longer; how deep the pipeline of loads is; the programs of
    two warps on a multiprocessor, and how few teams on the device hide each other's waiting."""

    held: int
    most: int
    stages: int
    per_unit: int
    teams: int = 8


def held(problem: ForwardProblem | BackwardProblem, space: Space, device: Device) -> Plan | None:
    """Nothing where the pattern cannot, or where another is faster."""
    if not problem.norm.is_by_channel or not problem.has_tasks or space.pieces == 1 or not problem.has_vectors:
        return None
    if not device.has_teams or needs.words(problem) > 1:  # messages are float32 numbers
        return None
    loads = problem.operands + (problem.grad_outputs if isinstance(problem, BackwardProblem) else ())
    share = _share(problem, sum(map(is_varying, loads)))
    if share is None:
        return None
    loaded = needs.loaded_bytes(loads, 1)
    for warps in (2, 4):
        threads = warps * device.warp_size
        tile = _tile(space, threads * share.held // loaded, threads * VECTOR_BYTES // needs.itemsize(problem))
        if tile is None and space.cols * loaded <= threads * share.most:
            tile = _tile(space, threads * share.most // loaded, threads * VECTOR_BYTES // needs.itemsize(problem))
        if tile is not None:
            return _plan(space, device, share, warps, *tile, loaded)
    return None


def _share(problem: ForwardProblem | BackwardProblem, tensors: int) -> Share | None:
    is_half = needs.itemsize(problem) <= 2
    if tensors > 2:
        return None  # residual + BatchNorm + ReLU backward, fp16: 65 [71]
    if isinstance(problem, BackwardProblem):
        # BatchNorm fp16 73 [61], fp32 83 [76]; GroupNorm bf16 78 [73], + SiLU 48 [43]
        return Share(200, 260, 3, 6) if is_half else Share(200, 400, 1, 6)
    if any(node.operator not in QUICK for graph in (problem.prologue, problem.epilogue) for node in graph.nodes):
        return None
    if is_half and tensors == 1:
        return Share(200, 200, 3, 6)  # BatchNorm fp16 77 [65], without a pipeline 68; GroupNorm bf16 80 [79]
    # BatchNorm fp32 83 [74], in a pipeline 80; residual + BatchNorm + ReLU, fp16: 82 [69], 77; 256 x 64 x 112 x 112 fp32 75
    # [66] with two teams
    return Share(200, 400, 1, 12, 2)


def _plan(
    space: Space, device: Device, share: Share, warps: int, block_rows: int, block_cols: int, width: int, loaded: int
) -> Plan | None:
    splits = next((most for most in MOST_PROGRAMS if space.pieces <= most * block_rows), 0)
    part = block_rows * width * loaded
    per_thread = block_rows * space.cols * loaded // (warps * device.warp_size)
    per_unit = share.per_unit * 2 // warps
    if share.stages == 1 and share.per_unit > 6 and per_thread > share.held:
        per_unit = per_unit * 2 // 3
    elif share.stages > 1 and per_thread <= 128:
        per_unit = per_unit * 4 // 3
    stages = min(share.stages, 1 + (device.shared_bytes // per_unit - needs.SPARE_SHARED_BYTES) // part)
    if splits == 0 or stages < min(share.stages, 2):
        return None
    why = "a row stays in registers from its statistic to its result, in those of a team's programs"
    plan = Plan(
        HELD, block_rows, block_cols, warps, device.units * per_unit, splits, width // block_cols, stages,
        recomputes=True, per_unit=per_unit, why=why,
    )  # fmt: skip
    return plan if plan.programs >= share.teams * grid.held(plan, space)[1] else None


def _tile(space: Space, room: int, at_once: int) -> tuple[int, int, int] | None:
    """As many lines as there is room for, in blocks of columns that pad them by a seventh at the most, and their width."""
    block_rows = LARGEST_BLOCK
    while block_rows > 0:
        block_cols = max(at_once // block_rows, SMALLEST_BLOCK)
        width = -(-space.cols // block_cols) * block_cols
        is_padded = width - space.cols > space.cols // 7
        fits = block_rows * space.cols <= room and block_rows < 2 * space.pieces
        if fits and not is_padded and block_cols <= LARGEST_BLOCK:
            return block_rows, block_cols, width
        block_rows //= 2
    return None
