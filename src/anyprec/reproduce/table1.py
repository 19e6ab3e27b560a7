"""Table 1: one any-precision network against five dedicated ones, for every network and data set of the paper."""

from __future__ import annotations

from anyprec.report.record import Claim, Picture, Row, Table
from anyprec.reproduce import paper
from anyprec.reproduce.experiment import BITS, Context, Experiment, Finding, gaps, paper_row, per_width, values_of
from anyprec.reproduce.plots import lines
from anyprec.reproduce.scales import PaperNetwork, nets
from anyprec.reproduce.store import Training
from anyprec.widths import DEFAULT_WIDTHS

CLOSE = 1.0  # points


def trainings(scale: str) -> list[Training]:
    found = []
    for net in nets(scale).values():
        if isinstance(net, PaperNetwork):
            found += [net.joint(), *net.all_dedicated().values()]
    return found


def run(context: Context) -> Finding:
    rows: list[Row] = []
    pictures, claims, scaled = [], [], []
    for name, net in nets(context.scale).items():
        dedicated_paper, any_paper = paper.TABLE1[name]
        if isinstance(net, str):
            rows += [Row((name, "dedicated"), (), note=net), Row((name, "any-precision"), (), note=net)]
        else:
            ours = context.accuracy(net.joint())
            dedicated = {bits: context.accuracy(t)[bits] for bits, t in net.all_dedicated().items()}
            rows.append(Row((net.what, "dedicated"), values_of(dedicated)))
            rows.append(Row((net.what, "any-precision"), values_of(ours)))
            claims.append(within(net.what, ours, dedicated))
            scaled += [f"{name}: {net.scaled}"] if net.scaled else []
            short = name.lower().replace(" ", "-")
            picture = Picture(short, net.what, "Test accuracy of one any-precision network and of five dedicated ones.")
            series = {"any-precision": values_of(ours), "dedicated": values_of(dedicated)}
            pictures.append(lines(context.folder, picture, BITS, series))
        rows += [paper_row((name, "dedicated"), dedicated_paper), paper_row((name, "any-precision"), any_paper)]
    table = Table(
        "accuracy", "Test accuracy", ("network", "model"), BITS, tuple(rows),
        note="The paper's rows name its own network and data; what stands for them here is named in our rows.",
    )  # fmt: skip
    for name, net in nets(context.scale).items():
        if isinstance(net, str):
            scaled.append(f"{name}: {net}.")
    return Finding([table], claims, pictures, scaled)


def within(what: str, ours: dict[int, float], dedicated: dict[int, float]) -> Claim:
    apart = gaps(ours, dedicated)
    return Claim(
        f"{what}: any-precision is within {CLOSE:g} point of the dedicated model at every width.",
        bool(apart) and len(apart) == len(DEFAULT_WIDTHS) and all(gap >= -CLOSE for gap in apart.values()),
        f"Any-precision minus dedicated, in points: {per_width(apart, sign=True)}.",
    )


EXPERIMENT = Experiment(
    "table1",
    "Table 1: any-precision against dedicated models",
    "One any-precision network reaches the accuracy of five dedicated ones, within a point in most cases and above "
    "them in some; on SVHN it loses up to 2.7 points at 1 bit.",
    trainings,
    run,
    {"paper": 60, "medium": 20, "small": 10, "tiny": 5},
)
