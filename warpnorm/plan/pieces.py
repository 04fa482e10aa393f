"""Plans of pattern `held`: rows that lie in pieces, and stay in registers between their statistic and their result.
Percentages are of copy speed, measured on an H200, in brackets those of pattern `column`: BatchNorm is of 64 x 256 x 56 x
56, GroupNorm of 32 x 320 x 64 x 64."""

from typing import NamedTuple

from warpnorm.norms import CHANNEL
from warpnorm.plan import needs
from warpnorm.plan.device import Device
from warpnorm.plan.plan import HELD, Plan
from warpnorm.problem import VECTOR_BYTES, BackwardProblem, ForwardProblem, is_varying
from warpnorm.space import Space

MOST_PROGRAMS = (1, 16, 64, 256)  # of a team; each needs another kernel
LARGEST_BLOCK, SMALLEST_BLOCK = 1024, 64
# Rounds of teams that are so few that it pays to have more programs and no pipeline, if the last is nearly full
FEW_ROUNDS, NEARLY = 2, 0.9


class Share(NamedTuple):
    """Of a program with so many warps: the bytes that a thread has of some lines; how many programs a multiprocessor has by
    the bytes of a thread, of one line if need be, and how many where there are few rounds; how deep the pipeline of loads
    is; and how few teams on the device hide each other's waiting. Up to `kept` bytes of a thread, what was computed of them
    stays in registers until the results."""

    warps: int
    held: int
    programs: dict[int, int]
    few: int
    stages: int
    teams: int = 8
    kept: int = 0


def held(problem: ForwardProblem | BackwardProblem, space: Space, device: Device) -> Plan | None:
    """Nothing where the pattern cannot, or where another is faster."""
    if not problem.norm.is_by_channel or not problem.has_tasks or space.pieces == 1 or not problem.has_vectors:
        return None
    if not device.has_teams or needs.words(problem) > 1:  # messages are float32 numbers
        return None
    loads = problem.operands + (problem.grad_outputs if isinstance(problem, BackwardProblem) else ())
    loaded = needs.loaded_bytes(loads, 1)
    for share in _shares(problem, sum(map(is_varying, loads))):
        threads = share.warps * device.warp_size
        at_once = threads * VECTOR_BYTES // needs.itemsize(problem)
        tile = _tile(space, threads * share.held // loaded, at_once)
        if tile is None and space.cols * loaded <= threads * max(share.programs):
            tile = _tile(space, threads * max(share.programs) // loaded, at_once)
        if tile is not None:
            return _plan(space, device, share, *tile, loaded, counts_rows=problem.norm.rows == CHANNEL)
    return None


def _shares(problem: ForwardProblem | BackwardProblem, tensors: int) -> tuple[Share, ...]:
    is_half = needs.itemsize(problem) <= 2
    is_quick = needs.is_quick(problem)
    if tensors > 2:
        return ()  # residual + BatchNorm + ReLU backward, fp16: 65 [71]
    if isinstance(problem, BackwardProblem):
        if not is_half:
            # BatchNorm fp32 86 [76], 81 with 5, computed again 82
            return Share(2, 200, {400: 6}, 6, 1, kept=400), Share(4, 200, {400: 3}, 3, 1, kept=400)
        if not is_quick:
            # GroupNorm + SiLU 55 [44], 47 with 4; computed again 46, and 52 with 4
            return (Share(4, 200, {260: 3}, 4, 3, kept=260),)
        # BatchNorm fp16 79 [63], 71 with 7, computed again 77; GroupNorm bf16 86 [70], 81 with 5, computed again 76. Of 8
        # images 59 [46], 44 with 6 and a pipeline. Longer lines: 32 x 64 x 112 x 112 66 [54]; of 8 images, which would be
        # one round, 58 [66]
        short = Share(2, 200, {128: 8, 160: 7, 260: 6}, 8, 3, kept=260), Share(4, 200, {128: 4, 260: 3}, 4, 3, kept=260)
        return *short, Share(4, 200, {400: 4}, 0, 1)
    if not is_quick:
        return ()  # GroupNorm + SiLU forward: 54 [71], as few warps have much to compute
    if is_half and tensors == 1:
        # BatchNorm fp16 74 [66], without a pipeline 68, and 69 with 8; GroupNorm bf16 77 [75]. Of 8 images 66 [45], and 52
        # with 6 and a pipeline. 32 x 64 x 112 x 112: 71 [57], and 67 with 3; of 256 images, in two teams, 67 [64]
        return Share(2, 200, {128: 8, 200: 6}, 10, 3), Share(4, 200, {200: 4}, 5, 3, 2)
    # BatchNorm fp32 81 [71], 76 with 12, in a pipeline 80; residual + BatchNorm + ReLU, fp16: 84 [72], 80 with 10, in a
    # pipeline 77; 256 x 64 x 112 x 112 fp32 68 [66] with two teams. Of 8 images fp32: 70 [56] with 8, of which there are as
    # many rounds as of 12, 65
    return Share(2, 200, {200: 12 if is_half else 10, 400: 8}, 8, 1, 2), Share(4, 200, {200: 6, 400: 4}, 4, 1, 2)


def _plan(
    space: Space,
    device: Device,
    share: Share,
    block_rows: int,
    block_cols: int,
    width: int,
    loaded: int,
    counts_rows: bool,
) -> Plan | None:
    """`counts_rows`: not of groups, where another number of samples should neither take another kernel nor change bits."""
    splits = next((most for most in MOST_PROGRAMS if space.pieces <= most * block_rows), 0)
    part = block_rows * width * loaded
    per_thread = block_rows * space.cols * loaded // (share.warps * device.warp_size)
    per_unit = next(count for most, count in share.programs.items() if per_thread <= most)
    stages = min(share.stages, 1 + (device.shared_bytes // per_unit - needs.SPARE_SHARED_BYTES) // part)
    members = -(-space.pieces // block_rows)
    if splits == 0 or stages < min(share.stages, 2) or device.units * per_unit < share.teams * members:
        return None
    if counts_rows and share.few == 0 and space.statistics <= device.units * per_unit // members:
        return None
    is_kept = per_thread <= share.kept
    if counts_rows and per_thread <= share.held and _are_few(space.statistics, device.units * share.few // members):
        is_kept = is_kept and share.few <= per_unit  # more programs have fewer registers
        per_unit, stages = share.few, 1
    why = "a row stays in registers from its statistic to its result, in those of a team's programs"
    return Plan(
        HELD, block_rows, block_cols, share.warps, device.units * per_unit, splits, width // block_cols, stages,
        recomputes=not is_kept, per_unit=per_unit, why=why,
    )  # fmt: skip


def _are_few(rows: int, teams: int) -> bool:
    """Whether so many teams have done all rows in a round, or in two."""
    return rows <= teams or NEARLY * FEW_ROUNDS * teams <= rows <= FEW_ROUNDS * teams


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
