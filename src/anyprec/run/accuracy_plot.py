"""The picture of what `anyprec run --dataset` measures: accuracy and latency against bits, side by side.

draw(rows, title, path) is called by cli/run.py; Matplotlib is an extra.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anyprec.colors import GRID, QUIET, width_color
from anyprec.files import written_whole
from anyprec.run.accuracy import AccuracyRow


def draw(rows: Sequence[AccuracyRow], title: str, path: str | Path) -> None:
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.8, 3.2), dpi=150)
    values = [row.accuracy if row.miou is None else row.miou for row in rows]
    panel(left, rows, values)
    left.set_ylabel("test accuracy, %" if rows[0].miou is None else "mean IoU, %")
    least = min(values)
    most = 100 if rows[0].miou is None else min(100, max(values) + 10)
    left.set_ylim(max(0, least - max(2, (most - least) / 2)), most)  # a point less is a small step, not a cliff
    panel(right, rows, [1e3 * row.latency_ms for row in rows])
    right.set_ylabel("microseconds an image")
    right.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    with written_whole(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:])
    plt.close(figure)


def panel(axes: Any, rows: Sequence[AccuracyRow], values: Sequence[float]) -> None:
    axes.plot(range(len(rows)), values, "-", color=QUIET, linewidth=1.5, zorder=2)
    colors = [width_color(row.profile) for row in rows]
    axes.scatter(range(len(rows)), values, s=48, c=colors, clip_on=False, zorder=3)
    axes.set_xticks(range(len(rows)), ["float" if row.profile == "32" else row.profile for row in rows])
    axes.set_xlabel("bits of weights and activations")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
