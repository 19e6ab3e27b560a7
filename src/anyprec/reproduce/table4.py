"""Table 4: which widths to train at. Four lists of widths, tested at 1..8 bit; those not trained are calibrated."""

from __future__ import annotations

from anyprec.report.record import Claim, Picture, Row, Table
from anyprec.reproduce import paper
from anyprec.reproduce.experiment import Context, Experiment, Finding, paper_row, values_of
from anyprec.reproduce.plots import lines
from anyprec.reproduce.scales import default_net
from anyprec.reproduce.store import Training
from anyprec.widths import INTEGER_WIDTHS

LISTS = tuple(paper.TABLE4)  # (1, 2, 4, 8), (1, 8), (2, 8), (4, 8)
COLUMNS = tuple(map(str, INTEGER_WIDTHS))


def train_at(scale: str, widths: tuple[int, ...]) -> Training:
    return default_net(scale).joint(f"widths={list(widths)}")


def trainings(scale: str) -> list[Training]:
    return [train_at(scale, widths) for widths in LISTS]


def run(context: Context) -> Finding:
    found: dict[tuple[int, ...], dict[int, float]] = {}
    for i, widths in enumerate(LISTS):
        context.tell(i / len(LISTS), f"trained at {width_list(widths)}")
        training = train_at(context.scale, widths)
        model = context.calibrated(training, INTEGER_WIDTHS)
        tested = context.evaluate(model, training, INTEGER_WIDTHS)
        found[widths] = {bits: v["accuracy"] for bits, v in tested.items()}
    rows = []
    for widths, row in found.items():
        rows.append(Row((width_list(widths),), values_of(row, INTEGER_WIDTHS)))
        rows.append(paper_row((width_list(widths),), paper.TABLE4[widths]))
    table = Table("accuracy", f"Test accuracy of {context.net.what}", ("trained at",), COLUMNS, tuple(rows))
    picture = lines(
        context.folder,
        Picture("lists", "Accuracy by the widths trained at", "Widths that were not trained are calibrated."),
        COLUMNS,
        {width_list(widths): values_of(row, INTEGER_WIDTHS) for widths, row in found.items()},
    )
    return Finding([table], claims(found), [picture], [context.net.scaled] if context.net.scaled else [])


def claims(found: dict[tuple[int, ...], dict[int, float]]) -> list[Claim]:
    mean = {widths: sum(row.values()) / len(row) for widths, row in found.items()}
    worst = {widths: min(row.values()) for widths, row in found.items()}
    most = LISTS[0]
    return [
        Claim(
            "Training at more widths generalizes better: 1, 2, 4, 8 has the best mean over 1..8 bit.",
            all(mean[most] >= mean[other] for other in LISTS[1:]),
            f"Mean accuracy: {listed(mean)}.",
        ),
        Claim(
            "Training at more widths generalizes better: 1, 2, 4, 8 has the best worst width.",
            all(worst[most] >= worst[other] for other in LISTS[1:]),
            f"Worst accuracy: {listed(worst)}.",
        ),
        Claim(
            "The list should cover the extremes: 1, 8 is more stable over all widths than 2, 8 and 4, 8.",
            all(worst[1, 8] > worst[other] for other in ((2, 8), (4, 8))),
            f"Worst accuracy: {listed({w: worst[w] for w in LISTS[1:]})}.",
        ),
    ]


def listed(values: dict[tuple[int, ...], float]) -> str:
    return "; ".join(f"{width_list(widths)}: {value:.2f}" for widths, value in values.items())


def width_list(widths: tuple[int, ...]) -> str:
    return ", ".join(map(str, widths))


EXPERIMENT = Experiment(
    "table4",
    "Table 4: the list of widths in training",
    "Training at more widths generalizes better to the others, and the list should cover the extremes: trained at 1, 8 "
    "the network is usable everywhere, trained at 2, 8 or 4, 8 it fails at 1 bit.",
    trainings,
    run,
    {"paper": 900, "medium": 300, "small": 240, "tiny": 6},
)
