"""The picture of a search: loss against cost, plans beside uniform widths and random plans.

draw(result, title, path) is called by cli/search.py; Matplotlib is an extra.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from anyprec.colors import GRID, QUIET, width_color
from anyprec.files import written_whole
from anyprec.search.search import PlanPoint, SearchResult


def draw(result: SearchResult, title: str, path: str | Path) -> None:
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(6.0, 4.0), dpi=150)
    cost, has_labels = result.settings.cost, result.points[0].accuracy is not None

    def place(points: list[PlanPoint]) -> tuple[list[float], list[float]]:
        scale = 1.0 if cost == "latency" else 1e-3
        height = [p.accuracy if p.accuracy is not None else p.agreement for p in points]
        return [scale * p.cost(cost) for p in points], height

    axes.plot(*place([p for p in result.points if p.kind == "random"]), "x", color=QUIET, label="random plans")
    plans = sorted((p for p in result.points if p.kind == "plan"), key=lambda p: p.cost(cost))
    axes.plot(*place(plans), "o-", color="#333333", markersize=4, linewidth=1, label="plans of the search")
    for point in (p for p in result.points if p.kind == "uniform"):
        (x,), (y,) = place([point])
        axes.scatter([x], [y], s=56, color=width_color(str(point.plan[0])), zorder=3)
        axes.annotate(f"{point.plan[0]} bit", (x, y), xytext=(6, -10), textcoords="offset points", fontsize=8)
    axes.set_xlabel("ms an image" if cost == "latency" else "kB of weights and tables")
    axes.set_ylabel("accuracy on the images of the search, %" if has_labels else "agreement with the widest width, %")
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(loc="lower right", fontsize=8)
    axes.set_title(title, fontsize=11)
    figure.tight_layout()
    with written_whole(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:])
    plt.close(figure)
