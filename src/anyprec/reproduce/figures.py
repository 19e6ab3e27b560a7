"""The paper's pictures: activations of a random layer and of a trained AlexNet, and how weights truncate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from anyprec.analysis.distributions import (
    Histogram,
    Truncated,
    histogram,
    layer_histograms,
    toy_activations,
    truncate_weights,
)
from anyprec.colors import width_color
from anyprec.nn.switching import any_layers
from anyprec.report.record import Claim, Picture, Row, Table, write_csv
from anyprec.reproduce.experiment import Context, Experiment, Finding, values_of
from anyprec.reproduce.plots import figure
from anyprec.reproduce.scales import PaperNetwork, nets
from anyprec.reproduce.store import Training, width_name

ROW = "CIFAR-10 AlexNet"
WIDTHS = (1, 2, 4, 8)
LAYERS = ("conv1", "conv2", "conv3")  # the second convolution of the network and the two after it
KERNEL_LAYER = "conv2"  # the first of 3x3
IMAGES = 500


def network(scale: str) -> PaperNetwork:
    net = nets(scale)[ROW]
    assert isinstance(net, PaperNetwork)
    return net


def trainings(scale: str) -> list[Training]:
    return [network(scale).joint()]


def run(context: Context) -> Finding:
    net = network(context.scale)
    training = net.joint()
    model = context.model(training)
    toy = histogram(toy_activations(WIDTHS), bins=30)
    context.tell(0.2, "activations of AlexNet")
    images = context.calibration(training)
    some = [batch[:IMAGES] for batch in images[:1]]
    layers = layer_histograms(model, some, LAYERS, WIDTHS, bins=80)
    context.tell(0.8, "weights")
    kernel = truncate_weights(model, KERNEL_LAYER, (0, 0), WIDTHS)
    shifted = {
        name: {k: t.shifted for k, t in truncate_weights(model, name, (), WIDTHS).items()} for name in any_layers(model)
    }
    pictures = [
        draw_toy(context.folder, toy),
        draw_layers(context.folder, net.what, layers),
        draw_kernel(context.folder, kernel),
    ]
    tables = [toy_table(toy), layer_table(net.what, layers)]
    claims = [toy_claim(toy), *layer_claims(layers), shift_claim(net.what, shifted)]
    return Finding(tables, claims, pictures, [net.scaled] if net.scaled else [])


# --- Numbers ----------------------------------------------------------------------------------------------------------


def width_distance(found: Histogram, bits: int, wide: int = 8) -> float:
    """How far a width's values are from 8 bit's: difference of means in its deviations, and of log deviations."""
    scale = max(found.std[wide], 1e-12)
    return abs(found.mean[bits] - found.mean[wide]) / scale + abs(math.log(max(found.std[bits], 1e-12) / scale))


def toy_table(found: Histogram) -> Table:
    rows = (
        Row(("mean",), values_of(found.mean, WIDTHS)),
        Row(("deviation",), values_of(found.std, WIDTHS)),
        Row(("distance from 8 bit",), tuple(width_distance(found, bits) for bits in WIDTHS)),
    )
    note = "Distance: the difference of means in deviations of 8 bit, plus that of the deviations' logarithms."
    return Table("toy", "A random layer: its activations", ("",), tuple(map(str, WIDTHS)), rows, 3, "", note)


def layer_table(what: str, layers: dict[str, dict[str, Histogram]]) -> Table:
    rows = tuple(
        Row((name, f"{place} the norm"), tuple(width_distance(found, bits) for bits in WIDTHS))
        for name, places in layers.items()
        for place, found in places.items()
    )
    return Table("layers", f"{what}: distance from 8 bit", ("layer", ""), tuple(map(str, WIDTHS)), rows, 3, "")


def toy_claim(found: Histogram) -> Claim:
    far = {bits: width_distance(found, bits) for bits in WIDTHS}
    return Claim(
        "A random layer's activations shift most at 1 bit, and visibly at 2 (a tenth of a deviation or more).",
        far[1] == max(far.values()) and far[2] > 0.1 and far[2] > far[4],
        "Distance from 8 bit: " + ", ".join(f"{width_name(b)} bit {v:.3f}" for b, v in far.items()) + ".",
    )


def layer_claims(layers: dict[str, dict[str, Histogram]]) -> list[Claim]:
    before = {name: width_distance(places["before"], 1) for name, places in layers.items()}
    after = {name: width_distance(places["after"], 1) for name, places in layers.items()}
    others = {name: max(width_distance(places["before"], b) for b in (2, 4)) for name, places in layers.items()}
    return [
        Claim(
            "AlexNet: after the convolutions, 1-bit activations are further off than those of the other widths.",
            all(before[name] > others[name] for name in layers),
            "Distance from 8 bit, 1 bit and the further of 2 and 4 bit: "
            + "; ".join(f"{name} {before[name]:.2f} and {others[name]:.2f}" for name in layers)
            + ".",
        ),
        Claim(
            "AlexNet: the switched norms bring 1-bit activations closer to those of 8 bit.",
            all(after[name] < before[name] for name in layers),
            "Distance before and after: "
            + "; ".join(f"{name} {before[name]:.2f} and {after[name]:.2f}" for name in layers)
            + ".",
        ),
    ]


def shift_claim(what: str, shifted: dict[str, dict[int, bool]]) -> Claim:
    right = [name for name, widths in shifted.items() if all(widths.values())]
    return Claim(
        f"{what}: the codes of fewer bits are those of 8 bit, shifted right.",
        len(right) == len(shifted),
        f"True of all weights of {len(right)} of {len(shifted)} layers.",
    )


# --- Pictures ---------------------------------------------------------------------------------------------------------


def steps(axes: Any, found: Histogram) -> None:
    for bits in WIDTHS:
        axes.stairs(found.density(bits), found.edges, color=width_color(bits), linewidth=1.4, label=f"{bits} bit")


def histogram_rows(name: str, found: Histogram) -> list[list[object]]:
    return [
        [name, float(low), float(high), *(float(found.density(bits)[i]) for bits in WIDTHS)]
        for i, (low, high) in enumerate(zip(found.edges, found.edges[1:], strict=False))
    ]


def draw_toy(folder: Path, found: Histogram) -> Picture:
    with figure(folder / "toy-layer.png") as axes:
        steps(axes, found)
        axes.set_xlabel("activation")
        axes.set_ylabel("density")
        axes.legend(frameon=False, fontsize=8)
    write_csv(folder / "toy-layer.csv", ["layer", "from", "to", *map(str, WIDTHS)], histogram_rows("random", found))
    return Picture(
        "toy-layer",
        "Activations of a random layer",
        "One channel, 16 inputs, 1,000 samples; weights and inputs at the same bits.",
    )


def draw_layers(folder: Path, what: str, layers: dict[str, dict[str, Histogram]]) -> Picture:
    count = len(layers)
    with figure(folder / "alexnet-norms.png", 2, count, (3.6 * count, 5.2)) as axes:
        for j, (name, places) in enumerate(layers.items()):
            for i, (place, found) in enumerate(places.items()):
                steps(axes[i][j], found)
                axes[i][j].set_title(f"{name}, {place} its norm", fontsize=9)
                axes[i][j].tick_params(labelsize=8)
        axes[0][0].legend(frameon=False, fontsize=8)
    rows = [
        row
        for name, places in layers.items()
        for place, found in places.items()
        for row in histogram_rows(f"{name} {place}", found)
    ]
    write_csv(folder / "alexnet-norms.csv", ["layer", "from", "to", *map(str, WIDTHS)], rows)
    caption = "Above: after the convolution. Below: after the switched norm that follows it. Density over values."
    return Picture("alexnet-norms", f"Activations at each width, {what}", caption, wide=True)


def draw_kernel(folder: Path, kernel: dict[int, Truncated]) -> Picture:
    """One 3x3 kernel: codes as signed integers, with their bits."""
    first = next(iter(kernel.values()))
    with figure(folder / "weights.png", 1, len(kernel), (3.1 * len(kernel), 3.4)) as axes:
        for axis, (bits, found) in zip(axes, kernel.items(), strict=True):
            axis.imshow(found.values, cmap="RdBu", vmin=-1, vmax=1)
            for y, x in np.ndindex(*found.codes.shape):
                ink = "white" if abs(found.values[y, x]) > 0.45 else "black"
                text = f"{found.bits[y, x]}\n{found.signed[y, x]}"
                axis.text(x, y, text, ha="center", va="center", fontsize=8, family="monospace", color=ink)
            axis.set_title(f"{bits} bit" + ("" if bits == 8 or not found.shifted else ": first bits of 8"), fontsize=9)
            axis.set_xticks([])
            axis.set_yticks([])
    rows = [
        [bits, y, x, found.bits[y, x], int(found.signed[y, x]), float(found.values[y, x]), float(found.weights[y, x])]
        for bits, found in kernel.items()
        for y, x in np.ndindex(*first.codes.shape)
    ]
    write_csv(folder / "weights.csv", ["bits", "row", "column", "code", "signed", "value", "weight"], rows)
    return Picture(
        "weights",
        "How a kernel loses its bits",
        f"The first kernel of {KERNEL_LAYER}: bits, and the signed integer they are; colors are the values, -1 to 1.",
        wide=True,
    )


EXPERIMENT = Experiment(
    "figures",
    "Figures: activations under different widths, and how weights truncate",
    "At 1 bit, and less so at 2, the activations behind a layer are distributed otherwise than at 8 bit; switched "
    "norms put that right in a trained AlexNet. A weight of fewer bits is that of more, shifted.",
    trainings,
    run,
    {"paper": 30, "medium": 60, "small": 20, "tiny": 4},
)
