"""Draws docs/img/overview.png, the picture of README.md: speed against accuracy of one file; ResNet-50 beside OpenVINO.

Left: times and accuracies of the card. Right: bench/results/engine_amd-epyc-zen-4_avx512.csv, batch 1, one thread. Both
were measured on the same machine. python docs/img/draw_overview.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from anyprec.colors import GRID, QUIET, width_color
from anyprec.models.catalog import card

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "bench" / "results"
WIDTHS = ("8", "4", "2", "1")


def one_file() -> dict[str, tuple[float, float]]:
    """bits -> milliseconds, percent."""
    profiles = card("cifar10-vgg").profiles
    return {bits: (profiles[bits].ms or 0.0, profiles[bits].accuracy) for bits in reversed(WIDTHS)}


def resnet50() -> tuple[dict[str, float], float]:
    path = RESULTS / "engine_amd-epyc-zen-4_avx512.csv"
    with open(path, newline="") as file:
        rows = [r for r in csv.DictReader(file) if (r["net"], r["batch"], r["threads"]) == ("resnet50", "1", "1")]
    ours = {r["variant"]: float(r["p50_ms"]) for r in rows if r["engine"] == "anyprec" and r["variant"] in WIDTHS}
    (rival,) = (float(r["p50_ms"]) for r in rows if r["engine"].lower() == "openvino" and r["variant"] == "int8")
    return ours, rival


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.5), dpi=150)
    points = one_file()
    left.plot(*zip(*points.values(), strict=True), color=GRID, linewidth=1, zorder=1)
    for bits, (ms, accuracy) in points.items():
        left.scatter(ms, accuracy, s=70, color=width_color(bits), zorder=2)
        left.annotate(f"{bits} bit", (ms, accuracy), textcoords="offset points", xytext=(8, -12), fontsize=9)
    left.set(
        xlim=(0, 1.2 * max(ms for ms, _ in points.values())),
        ylim=(88, 94.5),
        xlabel="milliseconds an image",
        ylabel="accuracy, %",
    )
    left.set_title("cifar10-vgg, four widths of one file", fontsize=10)

    ours, rival = resnet50()
    bars = right.barh([f"{k} bit" for k in ours], list(ours.values()), color=[width_color(k) for k in ours])
    right.bar_label(
        bars, fmt="%.1f", padding=-28, fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    )
    right.axvline(rival, color=QUIET, linewidth=1.2, linestyle="--")
    right.annotate(
        f"OpenVINO int8\n{rival:.1f} ms", (rival, 0.55), textcoords="offset points", xytext=(6, 0), fontsize=9
    )
    right.set(xlim=(0, 30), xlabel="milliseconds an image")
    right.set_title("ResNet-50 at 224 x 224 (random weights)", fontsize=10)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.text(
        0.5,
        0.005,
        "One core of an AMD EPYC (Zen 4), AVX-512",
        ha="center",
        fontsize=8,
        color=QUIET,
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(HERE / "overview.png")


if __name__ == "__main__":
    main()
