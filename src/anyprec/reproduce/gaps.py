"""Filling the gaps (section 4.3): widths 3, 5, 6, 7, never trained, get their norms by calibration."""

from __future__ import annotations

from anyprec.report.record import Claim, Picture, Row, Table
from anyprec.reproduce import paper
from anyprec.reproduce.experiment import Context, Experiment, Finding, paper_row, per_width, values_of
from anyprec.reproduce.plots import lines
from anyprec.reproduce.scales import default_net
from anyprec.reproduce.store import Training, width_name
from anyprec.widths import DEFAULT_WIDTHS, FLOAT, INTEGER_WIDTHS

WIDTHS = (*INTEGER_WIDTHS, FLOAT)
CLOSE = 1.0  # points


def trainings(scale: str) -> list[Training]:
    return [default_net(scale).joint()]


def run(context: Context) -> Finding:
    training = context.net.joint()
    model = context.calibrated(training, INTEGER_WIDTHS)
    context.tell(0.3, "evaluation at 1..8 bit")
    found = {bits: v["accuracy"] for bits, v in context.evaluate(model, training, WIDTHS).items()}
    trained_before = context.accuracy(training)
    filled = {bits: found[bits] for bits in INTEGER_WIDTHS if bits not in DEFAULT_WIDTHS}
    # The nearest trained width below; a calibrated width should not be worse than it.
    below = {bits: found[max(w for w in DEFAULT_WIDTHS if w < bits)] for bits in filled}
    columns = tuple(map(width_name, WIDTHS))
    rows = (
        Row((context.net.what, "1, 2, 4, 8, float"), values_of(found, WIDTHS)),
        paper_row(("CIFAR-10 ResNet-20", "1, 2, 4, 8"), (*paper.TABLE4[1, 2, 4, 8], None)),
    )
    table = Table(
        "accuracy", "Test accuracy; 3, 5, 6 and 7 bit calibrated, not trained", ("network", "trained at"), columns,
        rows,
        note="The paper gives no numbers of its own for this; those beside ours are the first row of its Table 4.",
    )  # fmt: skip
    claims = [
        Claim(
            f"Every calibrated width is no more than {CLOSE:g} point below the next narrower trained one.",
            all(filled[bits] >= below[bits] - CLOSE for bits in filled),
            f"Above it by, in points: {per_width({b: filled[b] - below[b] for b in filled}, sign=True)}.",
        ),
        Claim(
            "Calibration leaves the trained widths as they were.",
            all(found[bits] == trained_before[bits] for bits in DEFAULT_WIDTHS),
            f"Accuracy after it: {per_width({b: found[b] for b in DEFAULT_WIDTHS})}.",
        ),
    ]
    picture = lines(
        context.folder, Picture("gaps", "Accuracy at every width", "3, 5, 6 and 7 bit are calibrated."), columns,
        {context.net.what: values_of(found, WIDTHS)},
    )  # fmt: skip
    return Finding([table], claims, [picture], [context.net.scaled] if context.net.scaled else [])


EXPERIMENT = Experiment(
    "gaps",
    "Filling the gaps: 3, 5, 6 and 7 bit by calibration",
    "After training at 1, 2, 4, 8 and 32 bit, forward passes over training images give the norms of the widths "
    "between, and every precision from 1 to 8 bit can be chosen at run time.",
    trainings,
    run,
    {"paper": 300, "medium": 80, "small": 60, "tiny": 3},
)
