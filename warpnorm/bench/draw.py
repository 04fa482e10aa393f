"""A picture of how a kernel reduces one row, as text and as SVG: elements to threads, the butterfly of a warp on a worked
example, the exchange between warps. All of it follows from the reduction that was read off the compiled code."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from warpnorm.codegen.reduction import Reduction
from warpnorm.plan.plan import COLUMN, LONG_ROW, ROW, TEAM, Plan

SHOWN_RUNS = 4
SHOWN_MASKS = 30


@dataclass(frozen=True)
class Drawing:
    """`masks` are those found in the code, if it has any."""

    title: str
    plan: Plan
    reduction: Reduction
    masks: tuple[int, ...] | None

    @property
    def lanes(self) -> int:
        return self.reduction.lanes[1]

    @property
    def warps(self) -> int:
        return self.reduction.warps[1]

    @property
    def sum_of_warp(self) -> int:
        return self.lanes * (self.lanes + 1) // 2


def rounds(values: Sequence[int], masks: Sequence[int], stride: int = 1) -> list[list[int]]:
    """What each lane has after each round; lanes that lie along rows are left out, and with them the `stride` of masks."""
    found = [list(values)]
    for mask in masks:
        last = found[-1]
        found.append([value + last[lane ^ (mask // stride)] for lane, value in enumerate(last)])
    return found


def _stride(masks: Sequence[int]) -> int:
    return masks[-1] if masks else 1


def text(drawing: Drawing) -> str:
    return "\n".join(
        [drawing.title, "", *_held(drawing), "", *_butterfly(drawing), "", *_exchange(drawing), *_beyond(drawing.plan)]
    )


def _held(drawing: Drawing) -> Iterator[str]:
    reduction = drawing.reduction
    tile = f"{reduction.rows} x {reduction.cols}" if reduction.rows > 1 else f"{reduction.cols} columns"
    yield f"1  Elements to threads: a tile of {tile}, {drawing.warps} x {drawing.lanes} threads to a row"
    last_warp, last_lane = drawing.warps - 1, drawing.lanes - 1
    for warp, lane in dict.fromkeys([(0, 0), (0, 1), (0, last_lane), (last_warp, 0), (last_warp, last_lane)]):
        runs = reduction.columns(warp, lane)
        shown = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs[:SHOWN_RUNS])
        more = f" and {len(runs) - SHOWN_RUNS} more" if len(runs) > SHOWN_RUNS else ""
        yield f"   warp {warp:<2d} lane {lane:<2d}  columns {shown}{more}"
    count = reduction.elements
    yield (
        f"   Each thread adds its {count} elements in registers." if count > 1 else "   Each thread holds one element."
    )


def _butterfly(drawing: Drawing) -> Iterator[str]:
    masks, lanes = drawing.reduction.lane_masks, drawing.lanes
    if not masks:
        yield "2  In a warp: one lane has all of a row, and nothing is exchanged"
        return
    levels = rounds(range(1, lanes + 1), masks, _stride(masks))
    yield f"2  In a warp: {len(masks)} rounds, as if lane k had found k + 1"
    width = len(str(levels[-1][0])) + 1
    yield "   lane   " + "".join(f"{lane:>{width}d}" for lane in range(lanes))
    yield "   before " + "".join(f"{value:>{width}d}" for value in levels[0])
    for mask, before, level in zip(masks, levels[:-1], levels[1:], strict=True):
        other = mask // _stride(masks)
        yield (
            f"   xor {mask:<3d}"
            + "".join(f"{v:>{width}d}" for v in level)
            + f"   {before[0]} + {before[other]} = {level[0]}"
        )
    yield f"   Every lane ends with {levels[-1][0]}: no lane waits for another, and none has to hand the sum out."


def _exchange(drawing: Drawing) -> Iterator[str]:
    masks, total = drawing.reduction.warp_masks, drawing.sum_of_warp * drawing.warps
    if not masks:
        yield "3  Between warps: one warp has the whole row; no shared memory, no barrier"
    else:
        yield f"3  Between warps: {drawing.warps} of them, through shared memory"
        words = "  ".join(f"[{warp}] {drawing.sum_of_warp}" for warp in range(min(drawing.warps, 8)))
        yield f"   one lane of each warp writes   {words}" + "  ..." * (drawing.warps > 8)
        yield "   barrier; then the first lanes read one word each, and meet again"
        for mask, level in zip(masks, rounds([drawing.sum_of_warp] * drawing.warps, masks)[1:], strict=True):
            yield f"   xor {mask:<3d} {level[0]}"
        yield f"   one writes {total}; barrier; every thread reads it."
    yield f"   The kernel does this {_times(drawing.reduction.count)} for a tile."
    if drawing.masks:
        more = " and so on" if len(drawing.masks) > SHOWN_MASKS else ""
        yield f"   In its code: shuffles with masks {' '.join(map(str, drawing.masks[:SHOWN_MASKS]))}{more}"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _beyond(plan: Plan) -> Iterator[str]:
    """What is larger than a tile."""
    if plan.pattern == ROW and plan.chunks > 1:
        yield ""
        yield f"4  Along the row: it is {plan.chunks} tiles, which each thread adds before threads meet"
    if plan.pattern == LONG_ROW:
        yield ""
        yield f"4  Along the row: a program walks it {plan.block_cols} columns at a time; each thread keeps the statistic of"
        yield "   the columns that it has met, and threads meet once, at the end"
    if plan.pattern == TEAM:
        yield ""
        yield f"4  Between programs: {plan.splits} of them share a row and exchange their sums through L2"
    if plan.pattern == COLUMN:
        yield ""
        yield "4  Between tiles: each leaves a count, a mean and a sum of squares; merged by Chan's formula"


CELL, HEIGHT, LEFT, TOP = 30, 62, 96, 74
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #24292f; }
text.head { font: 600 14px system-ui, sans-serif; } text.note { font: 12px system-ui, sans-serif; fill: #57606a; }
text.value { font-size: 11px; text-anchor: middle; } rect.page { fill: #ffffff; }
rect.box { fill: #eaf4ef; stroke: #0b6e4f; }
line { stroke: #9aa4ad; stroke-width: 1; } line.first { stroke: #0b6e4f; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
 text { fill: #e6edf3; } text.note { fill: #9da7b1; } rect.page { fill: #0d1117; }
 rect.box { fill: #12261e; stroke: #3fb68b; }
 line { stroke: #57606a; } line.first { stroke: #3fb68b; } }
"""
WARP_FILLS = ("#0b6e4f", "#d08c00", "#7b6fb0", "#3b7ea1", "#b5533c", "#6b8e23", "#8c6d9e", "#5f6b73")


def svg(drawing: Drawing) -> str:
    """Light or dark, as the reader has it."""
    levels = rounds(range(1, drawing.lanes + 1), drawing.reduction.lane_masks, _stride(drawing.reduction.lane_masks))
    width = LEFT + drawing.lanes * CELL + 60
    parts = [*_svg_row(drawing, width), *_svg_butterfly(drawing, levels)]
    below = TOP + 130 + HEIGHT * (len(levels) - 1)
    parts += _svg_exchange(drawing, below)
    height = below + 100
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{_escaped(drawing.title)}</title><style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
        _text(16, 26, drawing.title, "head"),
        *parts,
        "</svg>\n",
    ])  # fmt: skip


def _svg_row(drawing: Drawing, width: int) -> Iterator[str]:
    """The columns of a row as a bar, each run of a warp in that warp's colour."""
    reduction = drawing.reduction
    scale = (width - LEFT - 60) / reduction.cols
    yield _text(16, TOP + 16, "columns", "note")
    span = reduction.per_thread[1] * drawing.lanes
    for start in range(0, reduction.cols, span):
        warp = (start // span) % drawing.warps
        size = min(span, reduction.cols - start) * scale
        fill = WARP_FILLS[warp % len(WARP_FILLS)]
        yield f'<rect x="{LEFT + start * scale:.1f}" y="{TOP}" width="{max(size - 1, 0.5):.1f}" height="22" fill="{fill}"/>'
    runs = ", ".join(f"{first}-{last}" for first, last in reduction.columns(0, 0)[:SHOWN_RUNS])
    more = ", ..." if len(reduction.columns(0, 0)) > SHOWN_RUNS else ""
    yield _text(LEFT, TOP - 10, f"{reduction.cols} columns, a colour for each of {drawing.warps} warps", "note")
    yield _text(
        LEFT, TOP + 42, f"lane 0 of warp 0 holds {runs}{more}, and adds its {reduction.elements} in registers", "note"
    )


def _svg_butterfly(drawing: Drawing, levels: Sequence[Sequence[int]]) -> Iterator[str]:
    masks = drawing.reduction.lane_masks
    top = TOP + 90
    yield _text(LEFT, top - 22, "a warp, as if lane k had found k + 1", "note")

    def at(lane: int, level: int) -> tuple[int, int]:
        return LEFT + lane * CELL + CELL // 2, top + level * HEIGHT

    for level, mask in enumerate(masks):
        for lane in range(drawing.lanes):
            for other in (lane, lane ^ (mask // _stride(masks))):
                (x, y), (x2, y2) = at(other, level), at(lane, level + 1)
                kind = ' class="first"' if lane == 0 else ""
                yield f'<line{kind} x1="{x}" y1="{y + 5}" x2="{x2}" y2="{y2 - 13}"/>'
        yield _text(16, at(0, level)[1] + HEIGHT // 2, f"xor {mask}")
    for level, values in enumerate(levels):
        for lane, value in enumerate(values):
            x, y = at(lane, level)
            yield f'<text class="value" x="{x}" y="{y}">{value}</text>'


def _svg_exchange(drawing: Drawing, top: int) -> Iterator[str]:
    masks = drawing.reduction.warp_masks
    if not masks:
        yield _text(LEFT, top + 20, "One warp has the whole row: no shared memory, no barrier.", "note")
        return
    yield _text(16, top + 22, "shared", "note")
    box = min(64, 900 // drawing.warps)
    for warp in range(drawing.warps):
        x = LEFT + warp * (box + 6)
        yield f'<rect class="box" x="{x}" y="{top}" width="{box}" height="34" rx="4"/>'
        yield f'<text class="value" x="{x + box // 2}" y="{top + 22}">{drawing.sum_of_warp}</text>'
    rest = " and ".join(f"xor {mask}" for mask in masks)
    total = drawing.sum_of_warp * drawing.warps
    yield _text(
        LEFT,
        top + 58,
        f"one word for each warp; barrier; {rest} over them: {total}; barrier; every thread reads it",
        "note",
    )


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    of_class = f' class="{kind}"' if kind else ""
    return f'<text{of_class} x="{x}" y="{y}">{_escaped(words)}</text>'


def _escaped(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;")
