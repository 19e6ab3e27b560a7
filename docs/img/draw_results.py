"""Draws docs/img/cifar10.png from bench/results/cifar10_resnet8.csv: one any-precision network, five dedicated ones."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from anyprec.colors import GRID, QUIET, TEXT, width_color

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "bench" / "results"


def main() -> None:
    with open(RESULTS / "cifar10_resnet8.csv", newline="") as file:
        table = {row.pop("row"): {int(k): float(v) for k, v in row.items() if v} for row in csv.DictReader(file)}
    with open(RESULTS / "cifar10_calibrated.csv", newline="") as file:
        calibrated = {int(row["bits"]): float(row["accuracy"]) for row in csv.DictReader(file)}
    order = [1, 2, 3, 4, 5, 6, 7, 8, 32]
    place = {k: i for i, k in enumerate(order)}
    figure, axes = plt.subplots(figsize=(6.4, 3.8), dpi=150)
    axes.plot([place[k] for k in order], [calibrated[k] for k in order], color=QUIET, linewidth=1.5, zorder=2,
              label="one any-precision network")  # fmt: skip
    trained = [k for k in order if k in table["dedicated"]]
    axes.scatter([place[k] for k in trained], [calibrated[k] for k in trained], c=[width_color(k) for k in trained],
                 s=52, zorder=3)  # fmt: skip
    between = [k for k in order if k not in trained]
    axes.scatter([place[k] for k in between], [calibrated[k] for k in between], s=45, facecolors="white",
                 edgecolors=[width_color(k) for k in between], linewidths=1.5, zorder=3,
                 label="the same, calibrated widths")  # fmt: skip
    axes.scatter([place[k] for k in trained], [table["dedicated"][k] for k in trained], marker="x", color=TEXT,
                 s=55, linewidths=2, zorder=4, label="five dedicated networks")  # fmt: skip
    axes.set_xticks(range(len(order)), [*(f"{k}" for k in order[:-1]), "float"])
    axes.set_xlabel("bits of weights and activations")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("CIFAR-10, ResNet-8, 5 epochs each", fontsize=11)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(HERE / "cifar10.png")


if __name__ == "__main__":
    main()
