"""Plans of pattern `held`: rows that lie in pieces, and stay in registers between their statistic and their result.
Percentages are of copy speed, measured on an H200, in square brackets what pattern `column` takes: BatchNorm is of 64 x 256
x 56 x 56, GroupNorm of 32 x 320 x 64 x 64."""

from collections.abc import Callable
from typing import NamedTuple

from warpnorm.norms import CHANNEL
from warpnorm.plan import needs
from warpnorm.plan.device import Device
from warpnorm.plan.plan import HELD, Plan
from warpnorm.problem import VECTOR_BYTES, BackwardProblem, ForwardProblem, Operand, is_varying
from warpnorm.space import Space

MOST_PROGRAMS = (1, 16, 32, 64, 256)  # of a team; each needs another kernel
LARGEST_BLOCK = 1024
FEW_ELEMENTS = 1 << 21  # moved alone
MOST_IMAGES = 512  # whose lines begin at half vectors; in backward twice as many
ELEMENTS = 13  # that a thread has of some lines where it moves them alone, which blocks pad to 16
# Rounds of teams that are so few that it pays to have more programs and no pipeline, if the last is nearly full
FEW_ROUNDS, NEARLY = 2, 0.9


class Share(NamedTuple):
    """Of a program with so many warps: the bytes that a thread has of some lines; how many programs a multiprocessor has by
    the bytes of a thread, of one line if need be, and how many where there are few rounds; how deep the pipeline of loads
    is; and how few teams on the device hide each other's waiting. Up to `kept` bytes of a thread, what was computed of them
    stays in registers until the results. Up to `ahead` bytes, where there are many rounds, a row is begun before the one
    before it is finished, and what was computed is not kept. Larger teams than `members` are for the next share."""

    warps: int
    held: int
    programs: dict[int, int]
    few: int
    stages: int
    teams: int = 8
    kept: int = 0
    ahead: int = 0
    members: int = MOST_PROGRAMS[-1]


def held(problem: ForwardProblem | BackwardProblem, space: Space, device: Device) -> Plan | None:
    """Nothing where the pattern cannot, or where another is faster."""
    if not problem.norm.is_by_channel or not problem.has_tasks or space.pieces == 1:
        return None
    if not device.has_teams or needs.words(problem) > 1:  # messages are float32 numbers
        return None
    loads = _loads(problem)
    loaded = needs.loaded_bytes(loads, 1)
    if needs.itemsize(problem) == 1:
        return None  # the 200 values of a thread would take more registers than it has
    tensors = sum(map(is_varying, loads))
    for access in (Access(VECTOR_BYTES, 64, 7, _shares),) if problem.has_vectors else _accesses(problem, space):
        for share in access.shares(problem, tensors):
            threads = share.warps * device.warp_size
            at_once = threads * access.bytes // needs.itemsize(problem)
            tile = _tile(space, threads * share.held // loaded, at_once, access)
            if tile is None and space.cols * loaded <= threads * max(share.programs):
                tile = _tile(space, threads * max(share.programs) // loaded, at_once, access)
            if tile is None or -(-space.pieces // tile[0]) > share.members:
                continue
            if plan := _plan(problem, space, device, share, *tile, loads):
                return plan
    return None


def _loads(problem: ForwardProblem | BackwardProblem) -> tuple[Operand, ...]:
    return problem.operands + (problem.grad_outputs if isinstance(problem, BackwardProblem) else ())


class Access(NamedTuple):
    """How a line is read: so many bytes at once, in blocks of no fewer columns than `narrowest`, which pad it by no more
    than one `padding`th of its columns."""

    bytes: int
    narrowest: int
    padding: int
    shares: Callable[[ForwardProblem | BackwardProblem, int], tuple[Share, ...]]


def _accesses(problem: ForwardProblem | BackwardProblem, space: Space) -> tuple[Access, ...]:
    """Of lines that do not begin at whole vectors, but halves at half of one: 14 x 14 images. Of others, elements alone."""
    if problem.norm.rows != CHANNEL or not needs.is_quick(problem):
        return ()
    if needs.itemsize(problem) == 2 and problem.has_vectors_of(VECTOR_BYTES // 2):
        if space.pieces > MOST_IMAGES * (2 if isinstance(problem, BackwardProblem) else 1):
            return ()
        half = VECTOR_BYTES // 2
        return Access(half, 32, 7, _shares_of_half_vectors), Access(half, 16, 7, _lone_of_half_vectors)
    if problem.has_vectors_of(needs.itemsize(problem)) and space.rows * space.cols <= FEW_ELEMENTS:
        return (Access(needs.itemsize(problem), 64, 3, _shares_of_elements),)
    return ()


def _shares_of_half_vectors(problem: ForwardProblem | BackwardProblem, tensors: int) -> tuple[Share, ...]:
    """BatchNorm fp16, forward and backward, in microseconds, and what pattern `column` takes: 256 x 1024 x 14 x 14 72
    [87] and 100 [135], in blocks of 16 columns 75; 32 x 1024 x 14 x 14 9.5 [29] and 10.8 [34], by teams 10.9 and 12.7; 8
    x 1024 x 14 x 14 3.8 [13] and 4.2 [14]; but 1024 x 512 x 14 x 14 171 [159] and 220 [246], and 2048 x 256 x 14 x 14
    192 [175] and 244 [241]; 64 x 512 x 22 x 22 21.8 [51], begun ahead 24.5, and 35 [65]; 128 x 256 x 18 x 18 13.7 [26],
    15.6 if rows are not begun ahead, and 23.5 [34], of 512 images 72 [79] and 91 [111]; 32 x 256 x 38 x 38 16 [32] and
    24 [43], of 256 images 149 [212] and 210 [280]; but by teams of 128 256 x 64 x 62 x 62 128 [91]. Residual + BatchNorm
    + ReLU, 256 x 1024 x 14 x 14: 97 [110], of 32 images 11.4 [31.6]; backward 207 [204]."""
    if tensors > 2:
        return ()
    if isinstance(problem, BackwardProblem):
        return (
            *_lone_of_half_vectors(problem, tensors),
            Share(2, 200, {200: 8, 260: 6}, 8, 1, members=64),
            Share(4, 200, {200: 4, 260: 3}, 4, 1, teams=3, members=64),
        )
    if tensors == 2:
        return (
            *_lone_of_half_vectors(problem, tensors),
            Share(1, 200, {200: 16}, 16, 1, members=64),
            Share(2, 200, {200: 8, 260: 6}, 8, 1, members=64),
        )
    return (
        *_lone_of_half_vectors(problem, tensors),
        Share(1, 130, {130: 16}, 16, 1, ahead=110, members=32),
        Share(2, 130, {130: 8}, 8, 1, ahead=110, members=32),
        # Of more than 32, with as many programs, up to 32 bytes of a thread would spill
        Share(2, 130, {130: 6}, 6, 1, ahead=110, members=64),
        Share(4, 130, {130: 3, 260: 3}, 3, 1, teams=3, ahead=110, members=64),
    )


def _lone_of_half_vectors(problem: ForwardProblem | BackwardProblem, tensors: int) -> tuple[Share, ...]:
    """In narrow blocks these alone: 64 x 512 x 10 x 10 7.9 [12.7] and 9.2 [14.1], by teams 256 x 512 x 10 x 10 26 [25] and
    35 [35]."""
    is_one = tensors == 1 and not isinstance(problem, BackwardProblem)
    return _lone(130 if is_one else 200, 1, 2, 4) if tensors <= 2 else ()


def _lone(held: int, *of_warps: int) -> tuple[Share, ...]:
    """Programs that have whole rows, and tell nobody, of as few warps as that takes: 16 warps a multiprocessor."""
    return tuple(Share(warps, held, {held: 16 // warps}, 16 // warps, 1, members=1) for warps in of_warps)


def _shares_of_elements(problem: ForwardProblem | BackwardProblem, tensors: int) -> tuple[Share, ...]:
    """Every element has an address of its own, and a register, whatever its size: for few of them. BatchNorm fp16, forward
    and backward, in microseconds, in brackets pattern `column`: 8 x 2048 x 7 x 7 4.4 [12.5] and 5.8 [12.8], 16 x 2048 x 7 x
    7 12.0 [18.2] and 13.4 [16.8], 16 x 256 x 13 x 13 4.1 [13.2] and 4.6 [13.4], but 32 x 2048 x 7 x 7 21 [19] and 25 [20],
    and 64 x 2048 x 7 x 7 46 [16] and 59 [19]."""
    return _lone(ELEMENTS * needs.loaded_bytes(_loads(problem), 1), 1, 2, 4, 8) if tensors <= 2 else ()


def _shares(problem: ForwardProblem | BackwardProblem, tensors: int) -> tuple[Share, ...]:
    """Times in microseconds, in brackets those of rows that are not begun ahead, with the best other numbers."""
    is_half = needs.itemsize(problem) <= 2
    is_quick = needs.is_quick(problem)
    if tensors > 2:
        return ()  # residual + BatchNorm + ReLU backward, fp16: 65 % [71]
    if isinstance(problem, BackwardProblem):
        if not is_half:
            # BatchNorm fp32 87 % [76], 81 with 5, computed again 82, begun ahead 84. Longer lines, 32 x 64 x 112 x 112: 95
            # by 8 warps, pattern `column` 124; of 256 images 911 and 935
            return (
                Share(2, 200, {400: 6}, 6, 1, kept=400),
                Share(4, 200, {400: 3}, 3, 1, kept=400),
                Share(8, 200, {400: 2}, 0, 1, teams=1),
            )
        if not is_quick:
            # GroupNorm + SiLU 62 % [44], 60 with 3; begun ahead 60, 55 with 3. BatchNorm + SiLU was not timed: with 4
            # programs 408 bytes of a thread spill, with 3 136
            return (Share(4, 200, {260: 3 if problem.norm.rows == CHANNEL else 4}, 4, 3, kept=260),)
        # BatchNorm fp16 88 (92), with three stages 91, with 5 programs 106; of 128 and 256 images by 4 warps 183 and 378
        # (225 and 439 by 2). GroupNorm bf16 68 (70). 32 x 64 x 112 x 112: 49 (50); of 256 images 345 (425, `column` 475)
        return (
            Share(2, 200, {128: 8, 160: 7, 260: 6}, 8, 2, ahead=400, members=64),
            Share(4, 200, {128: 4, 260: 3}, 4, 3, teams=3, ahead=400),
            Share(4, 200, {400: 2}, 0, 3, teams=1, ahead=400),
        )
    if not is_quick:
        # GroupNorm + SiLU 51 [56], 55 with two stages, begun ahead 54; fp32 not measured, and with dropout 3 KB of a thread
        # would spill
        return (Share(2, 200, {128: 8, 200: 6}, 10, 3),) if is_half and not needs.draws(problem) else ()
    if is_half and tensors == 1:
        # BatchNorm fp16 57 (60), with 5 programs 64; of 256 images, by 4 warps, 230 (264), 255 by 2, 254 with 4 programs.
        # GroupNorm bf16 47 (48). 32 x 64 x 112 x 112: 33 (33); of 256 images, in two teams, 251 (282), in one 275
        return (
            Share(2, 200, {128: 8, 200: 6}, 10, 2, ahead=400, members=64),
            Share(4, 200, {200: 3}, 5, 2, teams=6, ahead=400),
            Share(4, 200, {200: 4}, 5, 2, teams=2, ahead=400),
        )
    if is_half:
        # Residual + BatchNorm + ReLU, fp16: 88, begun ahead 93; 80 % [72] with 10, in a pipeline 77
        return Share(2, 200, {200: 12, 400: 8}, 8, 1, 2), Share(4, 200, {200: 6, 400: 4}, 4, 1, 2)
    # BatchNorm fp32 110 (120), with three stages 112. 32 x 64 x 112 x 112: 60 (62); of 256 images, one team, 513 (569)
    return (
        Share(2, 200, {200: 6}, 8, 2, kept=200, ahead=400, members=64),
        Share(4, 200, {200: 6}, 4, 1, members=16),  # not measured ahead
        Share(4, 200, {128: 5, 200: 3}, 4, 2, teams=3, kept=200, ahead=400),
        Share(4, 400, {400: 2}, 4, 2, teams=1, kept=400, ahead=400),
    )


def _plan(
    problem: ForwardProblem | BackwardProblem,
    space: Space,
    device: Device,
    share: Share,
    block_rows: int,
    block_cols: int,
    width: int,
    loads: tuple[Operand, ...],
) -> Plan | None:
    # Not of groups, where another number of samples should neither take another kernel nor change bits
    counts_rows = problem.norm.rows == CHANNEL
    loaded = needs.loaded_bytes(loads, 1)
    # Bytes are carried one by one, each in a register, and integers take more to widen: up to 2 KB of a thread would spill
    is_carried = all(o.dtype.is_floating_point and o.dtype.itemsize > 1 for o in loads if is_varying(o))
    splits = next((most for most in MOST_PROGRAMS if space.pieces <= most * block_rows), 0)
    part = block_rows * width * loaded
    per_thread = block_rows * space.cols * loaded // (share.warps * device.warp_size)
    per_unit = next(count for most, count in share.programs.items() if per_thread <= most)
    stages = min(share.stages, 1 + (device.shared_bytes // per_unit - needs.SPARE_SHARED_BYTES) // part)
    members = -(-space.pieces // block_rows)
    if splits == 0 or stages < min(share.stages, 2) or device.units * per_unit < share.teams * members:
        return None
    # In a round or two there is nobody else to compute meanwhile: of 8 images pattern `column` is as fast
    if counts_rows and share.few == 0 and space.statistics <= FEW_ROUNDS * (device.units * per_unit // members):
        return None
    is_kept, ahead = per_thread <= share.kept, int(splits > 1 and is_carried and per_thread <= share.ahead)
    if counts_rows and per_thread <= share.held and _are_few(space.statistics, device.units * share.few // members):
        is_kept = is_kept and share.few <= per_unit  # more programs have fewer registers
        per_unit, stages, ahead = share.few, 1, 0
    if ahead and problem.prologue.nodes:
        is_kept = False  # what was loaded is carried already: with c beside it up to 370 bytes of a thread spill
    why = "a row stays in registers from its statistic to its result, in those of a team's programs"
    return Plan(
        HELD, block_rows, block_cols, share.warps, device.units * per_unit, splits, width // block_cols, stages,
        recomputes=not is_kept, per_unit=per_unit, ahead=ahead, why=why,
    )  # fmt: skip


def _are_few(rows: int, teams: int) -> bool:
    """Whether so many teams have done all rows in a round, or in two."""
    return rows <= teams or NEARLY * FEW_ROUNDS * teams <= rows <= FEW_ROUNDS * teams


def _tile(space: Space, room: int, at_once: int, access: Access) -> tuple[int, int, int] | None:
    """As many lines as there is room for, in blocks of columns, and their width."""
    block_rows = LARGEST_BLOCK
    while block_rows > 0:
        block_cols = max(at_once // block_rows, access.narrowest)
        width = -(-space.cols // block_cols) * block_cols
        is_padded = width - space.cols > space.cols // access.padding
        fits = block_rows * space.cols <= room and block_rows < 2 * space.pieces
        if fits and not is_padded and block_cols <= LARGEST_BLOCK:
            return block_rows, block_cols, width
        block_rows //= 2
    return None
