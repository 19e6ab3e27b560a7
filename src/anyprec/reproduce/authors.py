"""The authors' quantizer and loss beside ours, on one network, at equal epochs. Not an experiment of the paper."""

from __future__ import annotations

from anyprec.report.record import Claim, Picture, Row, Table
from anyprec.reproduce.experiment import BITS, Context, Experiment, Finding, gaps, per_width, values_of
from anyprec.reproduce.plots import lines
from anyprec.reproduce.scales import default_net
from anyprec.reproduce.store import Training

AUTHORS = ("quantizer=dorefa", "scale=mean", "loss=recursive", "sign_window=0.0", "sign_window_end=0.0",
           "width_weights={}")  # fmt: skip
OURS = ("quantizer=lsq", "scale=learned", "loss=wider+label")  # where the recipe itself is the authors'


def compared(scale: str) -> dict[str, Training]:
    net = default_net(scale)
    own, theirs = net.joint(), net.joint(*AUTHORS)
    return {"ours": net.joint(*OURS) if own.recipe.quantizer == "dorefa" else own, "authors": theirs}


def trainings(scale: str) -> list[Training]:
    return list(compared(scale).values())


def run(context: Context) -> Finding:
    both = compared(context.scale)
    found = {name: context.accuracy(training) for name, training in both.items()}
    rows = tuple(Row((name, about(both[name])), values_of(row)) for name, row in found.items())
    table = Table(
        "accuracy", f"Test accuracy of {context.net.what}", ("method", "quantizer, scale, loss"), BITS, rows,
        note="Same network, start, epochs and learning rates. Codes of `dorefa` do not nest: cut to fewer bits, its "
        "model file would be another network.",
    )  # fmt: skip
    apart = gaps(found["ours"], found["authors"])
    claims = [
        Claim(
            f"{context.net.what}: nested codes with our loss are no more than 0.5 points below the authors' quantizer "
            "and loss at any width.",
            all(gap >= -0.5 for gap in apart.values()),
            f"Ours minus theirs, in points: {per_width(apart, sign=True)}.",
        )
    ]
    picture = Picture("methods", context.net.what, "Test accuracy with our and with the authors' quantizer and loss.")
    series = {name: values_of(row) for name, row in found.items()}
    drawn = lines(context.folder, picture, BITS, series)
    return Finding([table], claims, [drawn], [context.net.scaled] if context.net.scaled else [])


def about(training: Training) -> str:
    recipe = training.recipe
    return f"{recipe.quantizer}, {recipe.scale}, {recipe.loss}"


EXPERIMENT = Experiment(
    "authors",
    "The authors' quantizer and loss beside ours",
    "The paper has no such comparison: its network is trained with DoReFa codes, which do not nest, and recursive "
    "distillation.",
    trainings,
    run,
    {"paper": 10, "medium": 5, "small": 5, "tiny": 2},
)
