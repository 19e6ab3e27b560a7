"""Appendix A.1: update compliance average, the mean cosine of the gradients of two widths over steps and layers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from anyprec.analysis.compliance import Compliance
from anyprec.colors import SERIES
from anyprec.report.record import Claim, Picture, Row, Table, write_csv
from anyprec.reproduce import paper
from anyprec.reproduce.experiment import BITS, Context, Experiment, Finding, paper_row
from anyprec.reproduce.plots import figure, heat
from anyprec.reproduce.scales import default_net
from anyprec.reproduce.store import Training, width_name
from anyprec.widths import DEFAULT_WIDTHS

EPOCHS = 50  # the paper's average is over the first 50 epochs
LOW, HIGH = 0.9, 1.0  # the range of the paper


def trainings(scale: str) -> list[Training]:
    return [default_net(scale).joint()]


def run(context: Context) -> Finding:
    training = context.net.joint()
    record = Compliance.load(context.store.folder(training))
    recipe = training.recipe
    epoch_steps = max(1, round((record.steps[-1] + training.observe) / recipe.epochs))
    count = sum(step < EPOCHS * epoch_steps for step in record.steps)
    found = record.table(first=count)
    rows = []
    for i, a in enumerate(DEFAULT_WIDTHS):
        values = [None if j < i else found[a][b] for j, b in enumerate(DEFAULT_WIDTHS)]
        rows.append(Row((width_name(a),), tuple(values)))
    for a in DEFAULT_WIDTHS:
        rows.append(paper_row((width_name(a),), [paper.UCA[a].get(b) for b in DEFAULT_WIDTHS]))
    table = Table(
        "uca", f"Update compliance average of {context.net.what}, {count:,} steps observed", ("bits",), BITS,
        tuple(rows), 3, "",
        note=f"Every {training.observe}th step of the training; over all convolutions and linear layers.",
    )  # fmt: skip
    square = np.array([[found[a][b] for b in DEFAULT_WIDTHS] for a in DEFAULT_WIDTHS])
    pictures = [
        heat(context.folder, Picture("uca-matrix", "Update compliance between widths"), BITS, square, "{:.3f}"),
        over_time(context, record),
    ]
    scaled = [context.net.scaled] if context.net.scaled else []
    if recipe.epochs < EPOCHS:
        scaled.append(f"The average is over all {recipe.epochs} epochs of the training; the paper's is over {EPOCHS}.")
    return Finding([table], claims(found), pictures, scaled)


def claims(found: dict[int, dict[int, float]]) -> list[Claim]:
    pairs = [(a, b) for i, a in enumerate(DEFAULT_WIDTHS) for b in DEFAULT_WIDTHS[i + 1 :]]
    low, high = min(pairs, key=lambda p: found[p[0]][p[1]]), max(pairs, key=lambda p: found[p[0]][p[1]])
    nearest: dict[int, int] = {}
    beside: dict[int, bool] = {}
    for i, a in enumerate(DEFAULT_WIDTHS):
        neighbors = [DEFAULT_WIDTHS[j] for j in (i - 1, i + 1) if 0 <= j < len(DEFAULT_WIDTHS)]
        # Neighbors first: of two that comply alike, max takes the first.
        nearest[a] = max([*neighbors, *(b for b in DEFAULT_WIDTHS if b != a)], key=found[a].__getitem__)
        beside[a] = nearest[a] in neighbors
    return [
        Claim(
            f"Update compliance between all widths lies in {LOW:g} to {HIGH:g}.",
            all(LOW <= found[a][b] <= HIGH for a, b in pairs),
            f"From {found[low[0]][low[1]]:.3f} ({name(low)}) to {found[high[0]][high[1]]:.3f} ({name(high)}).",
        ),
        Claim(
            "Neighboring widths comply most: for every width, the one it complies with most is a neighbor of it.",
            all(beside.values()),
            "Most compliant: "
            + ", ".join(f"{width_name(a)} with {width_name(b)} ({found[a][b]:.3f})" for a, b in nearest.items())
            + ".",
        ),
    ]


def name(pair: tuple[int, int]) -> str:
    return f"{width_name(pair[0])} and {width_name(pair[1])}"


def over_time(context: Context, record: Compliance) -> Picture:
    """Neighbors, and the two ends, through the training; a running mean."""
    pairs = [*pairwise(DEFAULT_WIDTHS), (DEFAULT_WIDTHS[0], DEFAULT_WIDTHS[-1])]
    window = max(1, len(record.steps) // 20)
    with figure(context.folder / "uca-steps.png") as axes:
        for i, pair in enumerate(pairs):
            values = np.convolve(record.cosines[pair], np.ones(window) / window, "valid")
            axes.plot(record.steps[window - 1 :], values, color=SERIES[i], label=name(pair))
        axes.set_xlabel("training step")
        axes.set_ylabel("cosine, mean over layers")
        axes.legend(frameon=False, fontsize=8)
    head = ["step", *(name(pair) for pair in pairs)]
    rows = [[step, *(record.cosines[pair][i] for pair in pairs)] for i, step in enumerate(record.steps)]
    write_csv(context.folder / "uca-steps.csv", head, rows)
    return Picture("uca-steps", "Compliance over the training", f"A running mean over {window} observed steps.")


EXPERIMENT = Experiment(
    "uca",
    "Appendix A.1: update compliance average",
    "Gradients of different widths point the same way: all averages lie in 0.9 to 1, and those of neighboring "
    "widths are the highest.",
    trainings,
    run,
    {"paper": 10, "medium": 10, "small": 5, "tiny": 2},
)
