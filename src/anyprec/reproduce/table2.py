"""Table 2: bytes of five dedicated models against one any-precision model: real files, and the paper's accounting.

Sizes need no training: networks are built, saved by PyTorch and packed untrained.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anyprec.colors import SERIES
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.switching import any_layers
from anyprec.packing.packing import PackReport, pack
from anyprec.report.record import Claim, Picture, Row, Table, write_csv
from anyprec.reproduce import paper
from anyprec.reproduce.experiment import BITS, Context, Experiment, Finding, paper_row
from anyprec.reproduce.plots import figure
from anyprec.reproduce.store import Training
from anyprec.widths import DEFAULT_WIDTHS, FLOAT
from anyprec.zoo import build

MB = 1e6
# scale -> (network, options, input (C, H, W))
NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "paper": ("resnet50", {"num_classes": 1000}, (3, 224, 224)),
    "medium": ("resnet50", {"num_classes": 1000}, (3, 224, 224)),
    "small": ("resnet50", {"num_classes": 1000}, (3, 224, 224)),
    "tiny": ("resnet8", {"num_classes": 10, "in_channels": 1}, (1, 8, 8)),
}
COLUMNS = ("shared", *BITS, "total")


def trainings(scale: str) -> list[Training]:
    return []


def run(context: Context) -> Finding:
    name, options, shape = NETWORKS[context.scale]
    torch.manual_seed(0)
    example = torch.zeros(1, *shape)
    joint = build(name, widths=DEFAULT_WIDTHS, **options)
    rows = []
    account_dedicated, account_any = accounting(joint)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        state: dict[int, float] = {}
        packed: dict[int, float] = {}
        for i, bits in enumerate(DEFAULT_WIDTHS):
            context.tell(i / 7, f"{name}, {bits} bit")
            model = build(name, widths=(bits,), **options)
            state[bits] = state_bytes(model, here / "state.pt")
            report = pack(model, here / "net.apm", example=example, keep_float=bits == FLOAT)
            packed[bits] = report.file_bytes / MB
        context.tell(5 / 7, f"{name}, all widths")
        any_state = state_bytes(joint, here / "state.pt")
        with_float = pack(joint, here / "net.apm", example=example, keep_float=True)
        integers = pack(joint, here / "net.apm", example=example)
    if context.scale != "tiny":
        rows += [paper_row(("the paper's table", kind), values) for kind, values in paper.TABLE2.items()]
    widths = DEFAULT_WIDTHS
    rows += [
        Row(("the paper's accounting, our network", "dedicated"), total(account_dedicated)),
        Row(("the paper's accounting, our network", "any-precision"), account_any),
        Row(("PyTorch files", "dedicated"), total(state)),
        Row(("PyTorch files", "any-precision"), (any_state, *[None] * len(widths), any_state)),
        Row(("our model files (.apm)", "dedicated"), total(packed)),
        Row(("our model file, with float", "any-precision"), prefix_row(with_float.bytes, with_float.file_bytes)),
        Row(("our model file, integers alone", "any-precision"), prefix_row(integers.bytes, integers.file_bytes)),
    ]
    table = Table(
        "sizes", f"Model sizes in megabytes: {name}", ("what is counted", "model"), COLUMNS, tuple(rows),
        3 if context.scale == "tiny" else 1, "MB",
        note="The paper counts weights of quantized layers at their bits and everything else as float32: first and "
        "last layer, convolutions of the skips, four numbers a channel and norm. PyTorch stores float32 whatever the "
        "width. In a model file of ours the bytes under a width are the first bytes of the one file, all that this "
        "width needs.",
    )  # fmt: skip
    claims = [
        half_size_claim("By the paper's accounting", account_any[-1], sum(account_dedicated.values())),
        half_size_claim("In our model files, float included", with_float.file_bytes / MB, sum(packed.values())),
        half_size_claim(
            "In our model files of integers alone",
            integers.file_bytes / MB,
            sum(size for bits, size in packed.items() if bits != FLOAT),
            "four",
        ),
    ]
    if context.scale != "tiny":
        claims.insert(0, same_accounting(account_dedicated, account_any))
    picture = draw(context.folder, name, state, packed, any_state, with_float, integers)
    scaled = ["Tiny scale: ResNet-8 in place of ResNet-50."] if context.scale == "tiny" else []
    return Finding(
        [table], claims, [picture], scaled,
        ["The networks are packed untrained: how many bytes there are does not depend on the values."],
    )  # fmt: skip


def accounting(model: nn.Module) -> tuple[dict[int, float], tuple[float | None, ...]]:
    """The paper's: (bits -> MB of a dedicated model, its row of the any-precision model)."""
    quantized = sum(layer.weight.numel() for layer in any_layers(model).values())
    channels = sum(len(next(n.parameters())) for n in model.modules() if isinstance(n, SwitchNorm))
    norm = 4 * channels  # gamma, beta, mean, variance
    tables = {id(p) for n in model.modules() if isinstance(n, SwitchNorm) for p in n.parameters()}
    scales = {id(p) for layer in any_layers(model).values() for p in layer.quantizer.parameters()}
    everything = sum(p.numel() for p in model.parameters() if id(p) not in tables | scales)
    rest = everything - quantized
    dedicated = {k: (4 * (rest + norm) + quantized * (4 if k == FLOAT else k / 8)) / MB for k in DEFAULT_WIDTHS}
    shared, each = 4 * everything / MB, 4 * norm / MB
    return dedicated, (shared, *[each] * len(DEFAULT_WIDTHS), shared + len(DEFAULT_WIDTHS) * each)


def state_bytes(model: nn.Module, path: Path) -> float:
    torch.save(model.state_dict(), path)
    return path.stat().st_size / MB


def total(each: dict[int, float]) -> tuple[float | None, ...]:
    return (0.0, *(each[bits] for bits in DEFAULT_WIDTHS), sum(each.values()))


def prefix_row(needs: dict[str, int], file_bytes: int) -> tuple[float | None, ...]:
    found = [needs.get(str(bits)) for bits in DEFAULT_WIDTHS]
    return (None, *(None if n is None else n / MB for n in found), file_bytes / MB)


def half_size_claim(how: str, one: float | None, many: float, count: str = "five") -> Claim:
    assert one is not None
    return Claim(
        f"{how}, one any-precision model takes less than half of {count} dedicated ones.",
        one < many / 2,
        f"{one:.1f} MB against {many:.1f} MB: {100 * (1 - one / many):.0f} % less.",
    )


def same_accounting(dedicated: dict[int, float], ours: tuple[float | None, ...]) -> Claim:
    then = paper.TABLE2["dedicated"][1:-1]
    apart = {bits: dedicated[bits] - mb for bits, mb in zip(DEFAULT_WIDTHS, then, strict=True)}
    total_apart = (ours[-1] or 0) - paper.TABLE2["any-precision"][-1]
    worst = max(abs(v) for v in (*apart.values(), total_apart))
    return Claim(
        "Our ResNet-50, counted as the paper counts, has the sizes of its Table 2, within 0.5 MB.",
        worst <= 0.5,
        f"The largest difference is {worst:.2f} MB.",
    )


def draw(
    folder: Path,
    name: str,
    state: dict[int, float],
    packed: dict[int, float],
    any_state: float,
    with_float: PackReport,
    integers: PackReport,
) -> Picture:
    """Bars, five models stacked beside one."""
    bars: list[tuple[str, list[float]]] = [
        ("five dedicated,\nPyTorch files", [state[bits] for bits in DEFAULT_WIDTHS]),
        ("one any-precision,\nPyTorch file", [any_state]),
        ("five dedicated,\n.apm", [packed[bits] for bits in DEFAULT_WIDTHS]),
        ("one any-precision,\n.apm with float", [with_float.file_bytes / MB]),
        ("one any-precision,\n.apm, integers", [integers.file_bytes / MB]),
    ]
    with figure(folder / "files.png") as axes:
        for at, (_, parts) in enumerate(bars):
            bottom = 0.0
            for i, part in enumerate(parts):
                label = f"{BITS[i]}" if at == 0 else None
                color = SERIES[i] if len(parts) > 1 else SERIES[-1]
                axes.bar(at, part, 0.6, bottom, color=color, edgecolor="white", label=label)
                bottom += part
            axes.text(at, bottom, f"{bottom:.1f}", ha="center", va="bottom", fontsize=9)
        axes.set_xticks(range(len(bars)), [title for title, _ in bars], fontsize=8)
        axes.set_ylabel("megabytes")
        axes.margins(y=0.15)
        axes.legend(title="dedicated, bits", frameon=False, fontsize=8, title_fontsize=8)
    write_csv(folder / "files.csv", ["files", *BITS], [[title.replace("\n", " "), *parts] for title, parts in bars])
    return Picture(
        "files", f"Bytes of {name} on disk", "Five dedicated models, one a color, against one any-precision."
    )


EXPERIMENT = Experiment(
    "table2",
    "Table 2: model sizes",
    "One any-precision ResNet-50 takes 104.0 MB, five dedicated ones 220.1 MB: more than half is saved.",
    trainings,
    run,
    {"paper": 120, "medium": 60, "small": 40, "tiny": 3},
)
