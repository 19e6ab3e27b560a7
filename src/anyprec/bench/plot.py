"""The picture of a BenchResult: latency against accuracy where the file knows it for every width, else against bits.

draw(bench, path) is called by `anyprec bench --picture`; Matplotlib is an extra.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from anyprec.bench.race import OURS, BenchResult, RaceRow
from anyprec.colors import GRID, QUIET, width_color
from anyprec.files import written_whole

MARKERS = {"onnxruntime": "s", "openvino": "D", "torch": "^"}


def draw(done: BenchResult, path: str | Path) -> None:
    """The first race of the bench; later ones (other batches, other threads) are in its table."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    first = done.rows[0]
    rows = [row for row in done.rows if (row.batch, row.threads) == (first.batch, first.threads)]
    ours = [row for row in rows if row.engine == OURS]
    others = [row for row in rows if row.engine != OURS]
    figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=150)
    if all(row.accuracy is not None for row in ours):
        draw_accuracy(axes, ours, others)
    else:
        draw_bits(axes, ours, others)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"milliseconds a call, batch {first.batch}, {first.threads} thread{'s' * (first.threads > 1)}")
    axes.set_title(f"{done.model}, {done.size[0]} x {done.size[1]}, {done.machine['isa']}", fontsize=11)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=10, loc="lower right")
    figure.tight_layout()
    absent = [f"{f.title} {f.reason}" for f in done.failures if (f.batch, f.threads) == (first.batch, first.threads)]
    if absent:
        figure.text(0.01, 0.005, "not shown: " + "; ".join(absent), fontsize=6, color=QUIET)
    with written_whole(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:])
    plt.close(figure)


def draw_accuracy(axes: Any, ours: list[RaceRow], others: list[RaceRow]) -> None:
    """Rivals' accuracy is not measured: each is a line across, at its latency."""
    ordered = sorted(ours, key=lambda row: row.p50_ms)
    axes.plot([r.p50_ms for r in ordered], [r.accuracy for r in ordered], "-", color=QUIET, label=OURS, zorder=2)
    for row in ordered:
        dot(axes, row, row.accuracy)
        label(axes, row, row.accuracy)
    for row in others:
        axes.axvline(row.p50_ms, color=QUIET, linewidth=1, linestyle="--" if row.variant == "int8" else ":")
        axes.annotate(row.title, (row.p50_ms, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=9,
                      color=QUIET, ha="right", va="bottom")  # fmt: skip
    axes.set_ylabel("accuracy, %")


def draw_bits(axes: Any, ours: list[RaceRow], others: list[RaceRow]) -> None:
    names = sorted({bits_of(row) for row in [*ours, *others]}, key=lambda name: (not name.isdigit(), name.zfill(4)))
    place = {name: i for i, name in enumerate(names)}
    ordered = sorted(ours, key=lambda row: place[bits_of(row)])
    axes.plot([r.p50_ms for r in ordered], [place[bits_of(r)] for r in ordered], "-", color=QUIET, label=OURS, zorder=2)
    for row in ordered:
        dot(axes, row, place[bits_of(row)])
    for engine in dict.fromkeys(row.engine for row in others):
        its = [row for row in others if row.engine == engine]
        title = its[0].title.rpartition(" ")[0]
        axes.scatter([r.p50_ms for r in its], [place[bits_of(r)] for r in its], marker=MARKERS[engine], s=40,
                     facecolors="white", edgecolors=QUIET, linewidths=1.5, label=title, zorder=4)  # fmt: skip
    axes.set_yticks(range(len(names)), ["float" if name == "32" else name for name in names])
    axes.set_ylabel("bits")


def bits_of(row: RaceRow) -> str:
    return {"int8": "8", "fp32": "32"}.get(row.variant, row.variant)


def dot(axes: Any, row: RaceRow, y: float | None) -> None:
    axes.plot([row.p50_ms], [y], "o", color=width_color(bits_of(row)), markersize=7, zorder=3)


def label(axes: Any, row: RaceRow, y: float | None) -> None:
    axes.annotate(row.title.removeprefix(f"{OURS} "), (row.p50_ms, y), textcoords="offset points", xytext=(7, -11),
                  fontsize=10, color=width_color(bits_of(row)))  # fmt: skip
