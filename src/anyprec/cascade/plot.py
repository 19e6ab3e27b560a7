"""The picture of a cascade: accuracy (or agreement) against mean time, beside plain widths and plans.

draw(...) is called by cli/cascade.py; Matplotlib is an extra.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from anyprec.cascade.calibrate import CascadePoint, Measured
from anyprec.cascade.cascade import Cascade
from anyprec.colors import GRID, width_color
from anyprec.files import written_whole


def draw(found: Measured, cascade: Cascade, points: Sequence[CascadePoint], path: str | Path) -> None:
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(6.0, 4.0), dpi=150)
    heights = [p.agreement if p.accuracy is None else p.accuracy for p in points]
    first, last = cascade.stages[0].profile, cascade.last
    axes.plot([p.ms for p in points], heights, "-", color="#333333", label=f"cascade {first} to {last}")
    for name, y in found.outputs.items():
        agreement, accuracy = found.reached(y.argmax(1))
        place = (found.ms[name], agreement if accuracy is None else accuracy)
        axes.scatter(*[[at] for at in place], s=56, color=width_color(name), zorder=3)
        axes.annotate(name, place, xytext=(6, -10), textcoords="offset points", fontsize=8)
    axes.set_xlabel("mean ms an image")
    axes.set_ylabel("agreement with the widest width, %" if found.labels is None else "accuracy, %")
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    with written_whole(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:])
    plt.close(figure)
