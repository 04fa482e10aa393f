"""The picture of a result file for the README: percent of copy speed by width, a panel for each norm and direction. Widths
that are not whole vectors stand apart. A light card of its own, so that it reads on a light page and on a dark one; the same
file gives the same bytes."""

import io
from collections.abc import Mapping
from typing import Any

from warpnorm.bench.cases import BACKWARD, FORWARD
from warpnorm.bench.palette import in_order, look
from warpnorm.bench.results import ResultFile, Row, large_grid
from warpnorm.bench.rivals import OURS

DTYPE = "bf16"
NORMS = {"rms_norm": "RMSNorm", "layer_norm": "LayerNorm"}
VECTOR = 8  # columns of a whole vector, of 16 bytes
GAP = 0.8  # between widths of whole vectors and others, in widths
WIDER = 1.4  # the others are, with more digits
PANELS = tuple((norm, direction) for direction in (FORWARD, BACKWARD) for norm in NORMS)
INK, MUTED, RULE, CARD = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "warpnorm",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": RULE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def panels(file: ResultFile) -> dict[tuple[str, str], dict[int, Row]]:
    """Rows by width of each panel; none where the file has not several widths of any."""
    found = {
        (norm, direction): large_grid(
            [row for row in file.rows if (row.norm, row.direction, row.dtype) == (norm, direction, DTYPE)]
        )
        for norm, direction in PANELS
    }
    return found if any(len(rows) > 1 for rows in found.values()) else {}


def draw(file: ResultFile) -> bytes | None:
    """As SVG; nothing for a file without widths to draw."""
    by_panel = panels(file)
    if not by_panel:
        return None
    matplotlib, figures = _matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the reader's own settings are
        matplotlib.rcParams.update(STYLE)
        figure = figures.Figure(figsize=(10, 6.4), facecolor="none")
        figure.add_artist(_card(figure))
        axes = figure.subplots(2, 2, sharey=True)
        figure.subplots_adjust(left=0.075, right=0.975, bottom=0.085, top=0.8, wspace=0.06, hspace=0.3)
        libraries = in_order({m.library for rows in by_panel.values() for r in rows.values() for m in r.measured})
        highest = max(m.percent or 0 for rows in by_panel.values() for r in rows.values() for m in r.measured)
        for axis, (key, rows) in zip(axes.flat, by_panel.items(), strict=True):
            _panel(axis, f"{NORMS[key[0]]}, {key[1]}", rows, libraries)
            axis.set_ylim(0, max(105, highest * 1.04))
        for axis in axes[:, 0]:
            axis.set_ylabel("% of copy speed")
        for axis in axes[1]:
            axis.set_xlabel("columns")
        _heading(figure, file, axes.flat[0])
        written = io.BytesIO()
        figure.savefig(written, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    return written.getvalue()


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise ValueError("the picture needs matplotlib; `pip install matplotlib` brings it") from None
    return matplotlib, matplotlib.figure


def _card(figure: Any) -> Any:
    from matplotlib.patches import FancyBboxPatch

    inset, wide = 0.004, figure.get_figwidth() / figure.get_figheight()
    return FancyBboxPatch(
        (inset / wide, inset), 1 - 2 * inset / wide, 1 - 2 * inset, boxstyle="round,pad=0,rounding_size=0.02",
        mutation_aspect=wide, transform=figure.transFigure, facecolor=CARD, edgecolor=RULE, linewidth=1, zorder=-1,
    )  # fmt: skip


def _panel(axis: Any, title: str, rows: Mapping[int, Row], libraries: tuple[str, ...]) -> None:
    axis.set_facecolor("none")
    axis.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=8)
    axis.axhline(100, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    # Between widths of whole vectors a line says something, between others, each of its own kind, it would not
    even, odd = ([width for width in rows if (width % VECTOR == 0) == is_even] for is_even in (True, False))
    places = [*range(len(even)), *(len(even) + GAP + WIDER * k for k in range(len(odd)))]
    for name in reversed(libraries):
        heights = [_percent(rows[width], name) for width in even + odd]
        _line(axis, name, places[: len(even)], heights[: len(even)])
        _line(axis, name, places[len(even) :], heights[len(even) :], joined=False)
    if even and odd:
        axis.axvline(len(even) - 0.5 + GAP / 2, color=RULE, linewidth=1)
        axis.text(places[-1], 101.5, "not multiples of 8", color=MUTED, fontsize=8, ha="right", va="bottom")
    axis.set_xticks(places, [_columns(width) for width in even + odd])
    axis.set_yticks(range(0, 101, 25))
    axis.grid(axis="y", color=RULE, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelsize=10)
    axis.tick_params(axis="x", labelsize=min(10, 112 / max([1, *places])))  # so that they do not touch
    axis.spines[["top", "right", "left"]].set_visible(False)


def _line(axis: Any, name: str, places: list[float], heights: list[float], joined: bool = True) -> None:
    is_ours, looks = name == OURS.name, look(name)
    axis.plot(
        places, heights, color=looks.light, marker=looks.marker, label=name if joined else None, markeredgecolor=CARD,
        linewidth=(3.4 if is_ours else 1.5) * joined, markersize=8 if is_ours else 6.5, markeredgewidth=0.7,
        zorder=5 if is_ours else 3,
    )  # fmt: skip


def _heading(figure: Any, file: ResultFile, axis: Any) -> None:
    versions = [f"{key} {file.head[key]}" for key in ("torch", "triton") if key in file.head]
    figure.text(0.03, 0.945, f"Percent of the speed of a copy on {file.device}", fontsize=14, fontweight="bold")
    figure.text(0.97, 0.945, ", ".join([DTYPE, *versions]), ha="right", color=MUTED)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], ncols=len(labels), frameon=False, loc="upper left", bbox_to_anchor=(0.02, 0.93),
        columnspacing=1.6, handletextpad=0.5, labelcolor=INK,
    )  # fmt: skip


def _percent(row: Row, library: str) -> float:
    found = row.by(library)
    return found.percent if found is not None and found.percent is not None else float("nan")


def _columns(width: int) -> str:
    return f"{width // 1024}k" if width % 1024 == 0 else str(width)
