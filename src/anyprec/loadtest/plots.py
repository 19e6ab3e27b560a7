"""Plot of a load test: requests a second, the widths they were answered at, and their latency, over one time axis.

draw(rows, slo_ms, title, path) takes the rows of report.timeline. Called by `anyprec loadtest`; needs Matplotlib.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anyprec.colors import GRID, IN_TIME, QUIET, REFUSED, TARGET, width_color
from anyprec.files import written_whole
from anyprec.loadtest.report import by_width

ABOVE: dict[str, Any] = {
    "loc": "lower right",
    "bbox_to_anchor": (1.0, 0.97),
    "ncols": 3,
    "fontsize": 10,
    "handlelength": 1.2,
    "columnspacing": 1.0,
    "frameon": False,
}


def draw(rows: Sequence[Mapping[str, float | None]], slo_ms: float, title: str, path: str | Path) -> None:
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(6.8, 6.8), dpi=150, sharex=True, height_ratios=(1, 1, 1)
    )
    seconds = column(rows, "second")
    top.plot(seconds, column(rows, "load"), color=QUIET, linewidth=2, label="asked", drawstyle="steps-post")
    top.plot(
        seconds, column(rows, "in_time"), color=IN_TIME, linewidth=2, label="answered in time", drawstyle="steps-post"
    )
    if np.nansum(column(rows, "rejected")) > 0:
        top.plot(
            seconds, column(rows, "rejected"), color=REFUSED, linewidth=1.5, label="rejected", drawstyle="steps-post"
        )
    top.set_ylabel("requests / s")
    top.set_ylim(bottom=0)
    top.legend(**ABOVE)
    draw_bits(middle, rows, seconds)
    bottom.plot(seconds, column(rows, "p50_ms"), color=QUIET, linewidth=2, linestyle=":", label="p50")
    bottom.plot(seconds, column(rows, "p99_ms"), color=IN_TIME, linewidth=2, label="p99")
    bottom.axhline(slo_ms, color=TARGET, linewidth=1.4, linestyle="--", label=f"target {slo_ms:g} ms")
    bottom.set_ylabel("latency, ms")
    highest = np.nanmax([slo_ms, *column(rows, "p99_ms")])
    if highest > 10 * slo_ms:
        bottom.set_yscale("log")
    else:
        bottom.set_ylim(0, 1.1 * highest)
    bottom.set_xlabel("seconds")
    bottom.legend(**ABOVE)
    for axes in (top, middle, bottom):
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    with written_whole(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:])
    plt.close(figure)


def draw_bits(axes: Any, rows: Sequence[Mapping[str, float | None]], seconds: np.ndarray) -> None:
    """Shares of the widths, stacked, the narrowest at the bottom."""
    names = [name.removeprefix("share_") for name in (rows[0] if rows else {}) if name.startswith("share_")]
    names.sort(key=by_width)
    below = np.zeros(len(rows))
    for name in names:
        above = below + 100 * np.nan_to_num(column(rows, f"share_{name}"))
        label = f"{name} bit" if name.isdigit() and name != "32" else "float" if name == "32" else name
        axes.fill_between(seconds, below, above, color=width_color(name), step="post", linewidth=0, label=label)
        below = above
    axes.set_ylabel("% answered at")
    axes.set_ylim(0, 100)
    if names:
        axes.legend(**{**ABOVE, "ncols": len(names)})


def column(rows: Sequence[Mapping[str, float | None]], name: str) -> np.ndarray:
    return np.array([np.nan if row[name] is None else row[name] for row in rows], np.float64)
