"""Table 5: distillation on and off, in all loss modes of the package."""

from __future__ import annotations

from anyprec.report.record import Claim, Picture, Row, Table
from anyprec.reproduce import paper
from anyprec.reproduce.experiment import BITS, Context, Experiment, Finding, gaps, paper_row, per_width, values_of
from anyprec.reproduce.plots import lines
from anyprec.reproduce.scales import PaperNetwork, nets
from anyprec.reproduce.store import Training

# Loss mode -> what a narrower width learns from
MODES = {
    "hard": "labels (no distillation)",
    "soft": "the widest",
    "recursive": "the next wider",
    "recursive+label": "the next wider and labels",
    "wider": "the mean of all wider",
    "wider+label": "the mean of all wider and labels",
}
PAPERS = ("hard", "soft", "recursive", "recursive+label")  # those of scales paper and small
LOW = (1, 2)  # the low widths


def compared(scale: str) -> dict[str, PaperNetwork]:
    """The paper's two networks, where they are run."""
    return {row: net for row in paper.TABLE5 if isinstance(net := nets(scale)[row], PaperNetwork)}


def modes(scale: str) -> tuple[str, ...]:
    return PAPERS if scale in ("paper", "small") else tuple(MODES)


def trainings(scale: str) -> list[Training]:
    return [net.joint(f"loss={mode}") for net in compared(scale).values() for mode in modes(scale)]


def run(context: Context) -> Finding:
    rows, claims, pictures, scaled = [], [], [], []
    for name, net in compared(context.scale).items():
        found = {mode: context.accuracy(net.joint(f"loss={mode}")) for mode in modes(context.scale)}
        rows += [Row((net.what, mode, MODES[mode]), values_of(row)) for mode, row in found.items()]
        rows += [paper_row((name, mode, MODES[mode]), values) for mode, values in paper.TABLE5[name].items()]
        claims += [distillation_claim(net.what, mode, found) for mode in found if mode not in ("hard", "soft")]
        if (own := net.joint().recipe.loss) in found:
            claims.append(best_claim(net.what, own, found))
        picture = Picture(
            name.lower().replace(" ", "-"), net.what, "Test accuracy by what the narrower widths learn from."
        )
        series = {mode: values_of(row) for mode, row in found.items()}
        pictures.append(lines(context.folder, picture, BITS, series))
        scaled += [net.scaled] if net.scaled else []
    for name, why in nets(context.scale).items():
        if name in paper.TABLE5 and isinstance(why, str):
            rows.append(Row((name, "", ""), (), note=why))
            rows += [paper_row((name, mode, MODES[mode]), v) for mode, v in paper.TABLE5[name].items()]
            scaled.append(f"{name}: {why}.")
    table = Table(
        "accuracy", "Test accuracy by loss", ("network", "loss", "narrower widths learn from"), BITS, tuple(rows)
    )
    return Finding([table], claims, pictures, scaled)


def distillation_claim(what: str, mode: str, found: dict[str, dict[int, float]]) -> Claim:
    apart = gaps(found[mode], found["hard"])
    return Claim(
        f"{what}: distillation ({mode}) helps the low widths, 1 and 2 bit.",
        all(apart[bits] > 0 for bits in LOW),
        f"Above training on labels by, in points: {per_width(apart, sign=True)}.",
    )


def best_claim(what: str, own: str, found: dict[str, dict[int, float]]) -> Claim:
    """Not the paper's: whether the recipe's loss is the one these runs would choose."""
    mean = {mode: sum(row.values()) / len(row) for mode, row in found.items()}
    return Claim(
        f"{what}: the loss of the recipe ({own}) has the best mean over the widths, within 0.1 point.",
        mean[own] >= max(mean.values()) - 0.1,
        "Means: " + ", ".join(f"{mode} {value:.2f}" for mode, value in mean.items()) + ".",
    )


EXPERIMENT = Experiment(
    "table5",
    "Table 5: knowledge distillation",
    "Recursive distillation, each width learning from the next wider one, is better than labels at low widths: at 1 "
    "bit by 0.5 points (ResNet-20) and 0.8 points (ResNet-50).",
    trainings,
    run,
    {"paper": 30, "medium": 20, "small": 10, "tiny": 2},
)
