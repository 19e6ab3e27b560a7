"""Draws docs/img/quantizers.png: the weight grids of the three quantizers and the activation staircases.

Every line is computed by the package itself. Run by hand when a quantizer changes: pip install matplotlib,
then python docs/img/draw_quantizers.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from anyprec.colors import QUIET, TEXT, width_color
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.quantizers import make_quantizer

TOP = 1.5  # the largest weight of the layer drawn: wide enough for tanh to bend


def draw_weights(staircase: Axes, cells: Axes, name: str) -> None:
    w = torch.linspace(-TOP, TOP, 6001)
    quantizer = make_quantizer(name, range(1, 9))
    if name == "lsq":
        with torch.no_grad():
            quantizer.range.fill_(1.0)
    for bits in (8, 3, 2, 1):
        codes = quantizer.codes(w, bits)
        label = f"{bits} bit"
        staircase.plot(
            w, quantizer.values(codes, bits), color=width_color(bits), lw=1.6 if bits < 8 else 1.2, label=label
        )
        if bits < 8:  # where one code ends and the next begins
            edges = w[:-1][codes.int().diff() > 0]
            cells.vlines(edges, 3 - bits, 4 - bits, color=width_color(bits), lw=1.8)
    staircase.set(title=name, ylim=(-1.1, 1.1), xlim=(-TOP, TOP))
    staircase.tick_params(labelbottom=False)
    cells.set(xlim=(-TOP, TOP), ylim=(-0.1, 3.1), xlabel="weight w", yticks=[0.5, 1.5, 2.5])
    cells.set_yticklabels(["3 bit", "2 bit", "1 bit"])


def draw_activations(axes: Axes, bits: int) -> None:
    y = torch.linspace(-1.6, 1.6, 3201)
    axes.plot(y, y, color=QUIET, lw=1, ls=":", label="input")
    axes.plot(y, ActQuantizer(signed=True)(y, bits), color=TEXT, lw=1.4, ls="--", label="signed")
    axes.plot(y, ActQuantizer()(y, bits), color=width_color(bits), lw=1.8, label="unsigned")
    axes.set(title=f"activations, {bits} bit", xlabel="input y", ylim=(-1.3, 1.3))
    axes.legend(loc="upper left", frameon=False)


def main() -> None:
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(3, 3, figsize=(10, 7.6), layout="constrained", gridspec_kw={"height_ratios": [3, 1, 3]})
    for column, name in enumerate(("nested", "dorefa", "lsq")):
        draw_weights(axes[0, column], axes[1, column], name)
    axes[0, 0].set_ylabel("value, before the scale")
    axes[1, 0].set_ylabel("cell edges")
    axes[0, 0].legend(loc="upper left", frameon=False)
    for column, bits in enumerate((1, 2, 3)):
        draw_activations(axes[2, column], bits)
    axes[2, 0].set_ylabel("quantized")
    figure.savefig(Path(__file__).with_name("quantizers.png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
