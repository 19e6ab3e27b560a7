"""Table 3: post-training quantization of a float network (BS, BS + BC, ACIQ) against any-precision training."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import nn

from anyprec.packing.packing import pack
from anyprec.post_training import ptq
from anyprec.report.record import Claim, Picture, Row, Table
from anyprec.reproduce import paper
from anyprec.reproduce.experiment import (
    BITS,
    Context,
    Experiment,
    Finding,
    chance,
    paper_row,
    per_width,
    values_of,
)
from anyprec.reproduce.plots import lines
from anyprec.reproduce.scales import DEFAULT_ROW, PaperNetwork, nets
from anyprec.reproduce.store import Training
from anyprec.run.accuracy import measure
from anyprec.run.model import load
from anyprec.widths import DEFAULT_WIDTHS, FLOAT

METHODS = {"BS": "bs", "BS+BC": "bc", "ACIQ": "aciq"}
ABOUT = {
    "BS": "bit shifting",
    "BS+BC": "bit shifting, norms calibrated",
    "ACIQ": "clipping, bits per channel, bias correction",
    "any-precision": "trained at all widths",
}
WIDTHS = tuple(bits for bits in DEFAULT_WIDTHS if bits != FLOAT)
LOW = (1, 2)


def network(scale: str) -> PaperNetwork:
    """ResNet-50 on ImageNet in the paper; where that is not at hand, the network of the ablations."""
    own = nets(scale)["ImageNet ResNet-50"]
    net = own if isinstance(own, PaperNetwork) else nets(scale)[DEFAULT_ROW]
    assert isinstance(net, PaperNetwork)
    return net


def trainings(scale: str) -> list[Training]:
    net = network(scale)
    return [net.joint(), net.dedicated(FLOAT)]


def run(context: Context) -> Finding:
    net = network(context.scale)
    joint, source = net.joint(), net.dedicated(FLOAT)
    batches = context.calibration(source)
    plain = context.accuracy(source)[FLOAT]
    found: dict[str, dict[int, float]] = {}
    packed: dict[int, float] | str = {}
    for i, (name, method) in enumerate(METHODS.items()):
        context.tell(i / 4, name)
        model = ptq(context.model(source), batches, method, WIDTHS)
        tested = context.evaluate(model, source, WIDTHS)
        found[name] = {bits: values["accuracy"] for bits, values in tested.items()} | {FLOAT: plain}
        if method == "bs":
            packed = in_engine(context, model, source)
    found["any-precision"] = context.accuracy(joint)
    rows = [Row((name, ABOUT[name]), values_of(row)) for name, row in found.items()]
    if isinstance(packed, dict):
        rows.insert(1, Row(("BS", "the same, packed, run by the engine"), values_of(packed)))
    rows += [paper_row((name, ABOUT[name]), values) for name, values in paper.TABLE3.items()]
    table = Table(
        "accuracy",
        f"Test accuracy of {net.what}; the paper's: ResNet-50 on ImageNet",
        ("method", ""),
        BITS,
        tuple(rows),
    )
    floor = chance(context.store.data(source, "test"))
    claims = [collapses(name, found[name], floor) for name in METHODS]
    claims.append(no_collapse_claim(found["any-precision"], floor))
    claims.append(
        Claim(
            "When bits drop below what the float model was made for, any-precision is better than all of them (1, 2, "
            "4).",
            all(found["any-precision"][k] > found[name][k] for name in METHODS for k in (1, 2, 4)),
            "Above the best of them by, in points: "
            + per_width({k: found["any-precision"][k] - max(found[n][k] for n in METHODS) for k in WIDTHS}, sign=True)
            + ".",
        )
    )
    if isinstance(packed, dict):
        apart = {bits: packed[bits] - found["BS"][bits] for bits in packed}
        claims.append(
            Claim(
                "The bit-shifted network, packed, is as accurate in the engine as in PyTorch, within 0.1 point.",
                all(abs(gap) <= 0.1 for gap in apart.values()),
                f"Engine minus PyTorch, in points: {per_width(apart, sign=True)}.",
            )
        )
    picture = lines(
        context.folder, Picture("methods", "Accuracy by method", "All from one float network, but for "
        "any-precision."), BITS,
        {name: values_of(row) for name, row in found.items()},
    )  # fmt: skip
    scaled = []
    if context.scale != "paper":
        scaled.append(f"{net.what} in place of ResNet-50 on ImageNet. {net.scaled}")
    return Finding([table], claims, [picture], scaled, [packed] if isinstance(packed, str) else [])


def in_engine(context: Context, model: nn.Module, training: Training) -> dict[int, float]:
    """The network as a model file, over the test set: what `anyprec run` gives."""
    data = context.test_data(training)
    example = context.calibration(training)[0][:1]
    image = [1 / (255 * s) for s in data.std], [-m / s for m, s in zip(data.mean, data.std, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        pack(model, Path(folder) / "bs.apm", example=example, widths=WIDTHS, image=image)
        rows = measure(load(Path(folder) / "bs.apm"), data, [str(bits) for bits in WIDTHS], batch=64)
    return {int(row.profile): row.accuracy for row in rows}


def share_kept(found: dict[int, float], bits: int, floor: float) -> float:
    """Share of what float has above chance that is left."""
    return (found[bits] - floor) / max(found[FLOAT] - floor, 1e-9)


def collapses(name: str, found: dict[int, float], floor: float) -> Claim:
    return Claim(
        f"{name} collapses at 1 and 2 bit: less than half of what float has above chance is left.",
        all(share_kept(found, bits, floor) < 0.5 for bits in LOW),
        f"Accuracy: {per_width(found)}; chance is {floor:g} %.",
    )


def no_collapse_claim(found: dict[int, float], floor: float) -> Claim:
    return Claim(
        "Any-precision does not collapse at 1 and 2 bit: more than half of what float has above chance is left.",
        all(share_kept(found, bits, floor) > 0.5 for bits in LOW),
        f"Accuracy: {per_width(found)}; chance is {floor:g} %.",
    )


EXPERIMENT = Experiment(
    "table3",
    "Table 3: post-training quantization",
    "Cutting bits off a trained float ResNet-50 fails at 1 and 2 bit, with calibrated norms as with analytical "
    "clipping (ACIQ): below 0.4 % on ImageNet. Any-precision training keeps 63.2 and 73.2 %.",
    trainings,
    run,
    {"paper": 1800, "medium": 300, "small": 240, "tiny": 8},
)
