"""Draws docs/img/engine.png: speed against the best int8 rival, batch 1, one thread, of the CPU with which the section
"Speed of the engine" of docs/results.md begins.
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from anyprec.colors import QUIET

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "bench" / "results"
NETS = {"resnet50": "ResNet-50", "resnet18": "ResNet-18"}
COLORS = {"resnet50": "#1f6feb", "resnet18": "#8fb8f6"}
WIDTHS = ("8", "4", "2", "1")


def main() -> None:
    files = [RESULTS / f"engine_intel-xeon-processor_{isa}.csv" for isa in ("avx2", "avx512")]
    figure, panels = plt.subplots(1, len(files), figsize=(3.9 * len(files), 3.4), dpi=150, sharey=True, squeeze=False)
    for axes, path in zip(panels[0], files, strict=True):
        with open(path, newline="") as file:
            rows = [r for r in csv.DictReader(file) if (r["engine"], r["batch"], r["threads"]) == ("anyprec", "1", "1")]
        for i, (net, title) in enumerate(NETS.items()):
            speed, wide = (
                {r["variant"]: float(r["speedup"]) for r in rows if r["net"] == name}
                for name in (net, f"{net}-wide-distribution")
            )
            places = [k + 0.4 * (i - 0.5) for k in range(len(WIDTHS))]
            bars = axes.bar(places, [speed[k] for k in WIDTHS], 0.38, color=COLORS[net], label=title)
            if path.stem.endswith("avx2"):  # nowhere else do weights matter: docs/results.md
                axes.hlines(
                    wide["8"], places[0] - 0.19, places[0] + 0.19, color="black", linewidth=1.5,
                    label="8 bit, weights of wide distribution" if net == list(NETS)[-1] else None,
                )  # fmt: skip
            axes.bar_label(bars, fmt="%.2f", fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        axes.axhline(1, color=QUIET, linewidth=1)
        axes.set_xticks(range(len(WIDTHS)), [f"{k} bit" for k in WIDTHS])
        axes.set_title(
            {"avx2": "everyone held to AVX2", "avx512": "AVX-512 VNNI"}[path.stem.split("_")[-1]], fontsize=11
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0][0].set_ylabel("times as fast as the best int8 rival")
    panels[0][0].set_ylim(0, 5.6)  # room for the legend
    panels[0][0].legend(frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(HERE / "engine.png")


if __name__ == "__main__":
    main()
