"""Draws docs/img/overview.png, the picture of README.md: speed against accuracy of one file; ResNet-50 beside OpenVINO.

Left: the wide ResNet-8 of docs/results.md, "Serving": its accuracies and the times of one image at AVX2. Right: the
engine's times from bench/results/engine_*_avx2.csv, batch 1, one thread. python docs/img/draw_overview.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "bench" / "results"
COLORS = {"8": "#0b3d91", "4": "#1f6feb", "2": "#5aa2f5", "1": "#a9cdf9"}  # dark to light: 8 to 1 bit
ONE_FILE = {"8": (5.1, 72.78), "4": (3.2, 72.75), "2": (2.6, 70.17), "1": (1.6, 63.20)}  # ms, %: docs/results.md


def resnet50() -> tuple[dict[str, float], float]:
    (path,) = RESULTS.glob("engine_*_avx2.csv")
    with open(path, newline="") as file:
        rows = [r for r in csv.DictReader(file) if (r["net"], r["batch"], r["threads"]) == ("resnet50", "1", "1")]
    ours = {r["variant"]: float(r["p50_ms"]) for r in rows if r["engine"] == "anyprec" and r["variant"] in COLORS}
    (rival,) = (float(r["p50_ms"]) for r in rows if r["engine"].lower() == "openvino" and r["variant"] == "int8")
    return ours, rival


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.5), dpi=150)
    left.plot(*zip(*ONE_FILE.values(), strict=True), color="#bbbbbb", linewidth=1, zorder=1)
    for bits, (ms, accuracy) in ONE_FILE.items():
        left.scatter(ms, accuracy, s=70, color=COLORS[bits], zorder=2)
        left.annotate(f"{bits} bit", (ms, accuracy), textcoords="offset points", xytext=(8, -12), fontsize=9)
    left.set(xlim=(0, 6), ylim=(60, 75), xlabel="milliseconds an image", ylabel="accuracy, %")
    left.set_title("One file, four of its widths (CIFAR-10)", fontsize=10)

    ours, rival = resnet50()
    bars = right.barh([f"{k} bit" for k in ours], list(ours.values()), color=[COLORS[k] for k in ours])
    right.bar_label(
        bars, fmt="%.1f", padding=-28, fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    )
    right.axvline(rival, color="#555555", linewidth=1.2, linestyle="--")
    right.annotate(
        f"OpenVINO int8\n{rival:.1f} ms", (rival, 0.55), textcoords="offset points", xytext=(6, 0), fontsize=9
    )
    right.set(xlim=(0, 75), xlabel="milliseconds an image")
    right.set_title("ResNet-50 at 224 x 224 (random weights)", fontsize=10)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.text(
        0.5, 0.005, "One core of an Intel Xeon, everyone held to AVX2", ha="center", fontsize=8, color="#555555"
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(HERE / "overview.png")


if __name__ == "__main__":
    main()
