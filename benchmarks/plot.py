"""Draws a result file of `warpnorm bench`: percent of copy speed by width, one panel for each norm and direction.

python benchmarks/plot.py benchmarks/results/h200.json docs/h200.svg
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLORS = {"warpnorm": "#0b6e4f", "torch.compile": "#d08c00", "liger": "#7b6fb0", "eager": "#9a9a9a"}
PANELS = [("rms_norm", "forward"), ("layer_norm", "forward"), ("rms_norm", "backward"), ("layer_norm", "backward")]


def main(source: Path, target: Path) -> None:
    run = json.loads(source.read_text())
    results = [r for r in run["results"] if r["dtype"] == "bf16"]
    rivals = [name for name in COLORS if any(m["rival"] == name for m in results[0]["measurements"])]
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.2), sharey=True, layout="constrained")
    for axis, (norm, direction) in zip(axes, PANELS, strict=True):
        rows = [r for r in results if (r["norm"], r["direction"]) == (norm, direction)]
        widths = [r["shape"][-1] for r in rows]
        for name in reversed(rivals):
            by_row = [{m["rival"]: m["percent_of_copy"] for m in r["measurements"]}.get(name) for r in rows]
            heights = [value if value is not None else float("nan") for value in by_row]
            line = 2.6 if name == "warpnorm" else 1.4
            axis.plot(range(len(rows)), heights, marker="o", ms=4, lw=line, color=COLORS[name], label=name)
        axis.set_xticks(range(len(rows)), [f"{w // 1024}k" if w >= 1024 else str(w) for w in widths])
        axis.set_title(f"{norm}, {direction}")
        axis.set_xlabel("columns")
        axis.set_ylim(0, 105)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("% of the speed of a copy")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="lower left")
    figure.suptitle(f"{run['device']}, bf16, torch {run['torch']}", fontsize=10)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
