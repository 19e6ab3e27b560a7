"""Well-known networks at 8 and 1 bit beside ONNX Runtime and OpenVINO: the speed columns of docs/networks.md.

    python bench/networks.py [--nets resnet18,deit] [--rounds 30] [--isa avx2] [--rivals none] [--quick]

One thread, one image (or text) at a time, all contestants in turn in every round, medians. Ours are real networks of
timm and transformers (`make networks` installs them) as `convert` and `pack` make them; rivals get the float network as
torch exports it to ONNX, and their own tools make int8 of it. Weights are random, batch norms settled on noise. Beside
each width it prints the share of time in steps that handle numbers one by one (`StepInfo.scalar`), and the steps that
take most. Results go to bench/results/networks_speed_CPU_ISA.csv; tests/networks/wall.py --page puts them on the page.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "networks"))

from catalog import Network, build  # noqa: E402

import anyprec  # noqa: E402
from anyprec.bench.race import BenchResult, BenchSettings, RaceRow, bench  # noqa: E402
from anyprec.bench.rivals import ISA_SWITCHES, random_input  # noqa: E402
from anyprec.cli.bench import rival_names, table  # noqa: E402
from anyprec.progress import Progress  # noqa: E402

RIVALS = "onnxruntime,openvino"
WIDTHS = (1, 8)
BERT_SMALL = {
    "config": "BertConfig", "vocab_size": 30522, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "intermediate_size": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class Net:
    """A network of the catalog at the size it was made for; `page` is its row in docs/networks.md."""

    page: str
    size: int = 224
    options: dict[str, Any] = field(default_factory=dict)
    vocabulary: int | None = None

    @property
    def network(self) -> Network:
        source, name = self.page.split("/")
        return Network(source, name, self.size, "packs", self.options)


NETS = {
    "resnet18": Net("timm/resnet18"),
    "resnet50": Net("timm/resnet50"),
    "mobilenetv2": Net("timm/mobilenetv2_100"),
    "mobilenetv3": Net("timm/mobilenetv3_large_100"),
    "efficientnet-b0": Net("timm/efficientnet_b0"),
    "regnety-002": Net("timm/regnety_002"),
    "densenet121": Net("timm/densenet121"),
    "convnext-atto": Net("timm/convnext_atto"),
    "deit-tiny": Net("timm/deit_tiny_patch16_224"),
    "swin-tiny": Net("timm/swin_tiny_patch4_window7_224"),
    "bert-small": Net("transformers/BertForSequenceClassification", 128, BERT_SMALL, 30522),
    "unet": Net("paper/UNet", 128, {"channels": 32}),
}
COLUMNS = ("net", "page", "size", *(f.name for f in fields(RaceRow)), "scalar_share", "most")


def settle(net: nn.Module, example: Any) -> None:
    """Batch norms get the statistics of the example: without, values of a deep random network are tiny or huge."""
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        net.train()(**example) if isinstance(example, dict) else net.train()(example)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    net.eval()


class Answer(nn.Module):
    """The first tensor of a network's output, by place: what an exporter understands."""

    def __init__(self, net: nn.Module, example: Any) -> None:
        super().__init__()
        self.net, self.names = net, tuple(example) if isinstance(example, dict) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x) if self.names is None else self.net(**{self.names[0]: x})
        made: torch.Tensor = out if isinstance(out, torch.Tensor) else out[0]
        return made


def make_files(net: Net, folder: Path) -> tuple[Path, Path]:
    """The model file of ours and the float ONNX model of the same network; kept in `folder`."""
    packed, onnx = folder / "net.apm", folder / "float.onnx"
    if packed.exists() and onnx.exists():
        return packed, onnx
    folder.mkdir(parents=True, exist_ok=True)
    made, example = build(net.network)
    settle(made, example)
    first = next(iter(example.values())) if isinstance(example, dict) else example
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Answer(made, example).eval(), (first[:1],), str(onnx), dynamo=False, opset_version=18, input_names=["x"]
        )
    model = anyprec.convert(made, WIDTHS, example=example)
    anyprec.pack(model, packed, example=example)
    return packed, onnx


@dataclass(frozen=True)
class StepShares:
    """Where the time of one width goes."""

    scalar: float  # in steps that handle numbers one by one
    most: str  # the kinds that take most of the time, in percent

    def __str__(self) -> str:
        return f"{100 * self.scalar:.1f} % in scalar steps; {self.most}"


def step_shares(path: Path, x: np.ndarray, bits: int, repeat: int) -> StepShares:
    steps = anyprec.load(path, threads=1).steps(x, bits, repeat=repeat)
    total = sum(step.seconds for step in steps)
    kinds: Counter[str] = Counter()
    for step in steps:
        kinds[step.work.split(",")[0] + (" (scalar)" if step.scalar else "")] += step.seconds
    most = ", ".join(f"{kind} {100 * s / total:.0f} %" for kind, s in kinds.most_common(6))
    return StepShares(sum(step.seconds for step in steps if step.scalar) / total, most)


def measure(name: str, args: argparse.Namespace, cache: Path) -> tuple[BenchResult, dict[str, StepShares]]:
    net = NETS[name]
    packed, onnx = make_files(net, cache / name)
    rounds = 3 if args.quick else args.rounds
    with Progress(name, total=rounds, unit="round") as progress:
        wish = BenchSettings(
            str(packed), size=net.size, vocabulary=net.vocabulary, rounds=rounds, isa=args.isa, onnx=str(onnx),
            rivals=rival_names(args.rivals), folder=str(cache / name / "rivals"),
        )  # fmt: skip
        found = bench(wish, progress.update)
    x = random_input(1, 3, (net.size, net.size), net.vocabulary)
    return found, {str(k): step_shares(packed, x, k, 3 if args.quick else 10) for k in WIDTHS}


def save(path: Path, results: dict[str, tuple[BenchResult, dict[str, StepShares]]]) -> None:
    """Rows of networks that were not measured now stay as they are."""
    kept: list[dict[str, str]] = []
    if path.exists():
        with open(path, newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["net"] not in results]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name, net in NETS.items():
            writer.writerows(row for row in kept if row["net"] == name)
            found, shares = results.get(name, (None, {}))
            for row in found.rows if found else ():
                numbers = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}
                share = shares.get(row.variant) if row.engine == "anyprec" else None
                more = {"scalar_share": round(share.scalar, 4), "most": share.most} if share else {}
                writer.writerow({"net": name, "page": net.page, "size": net.size, **numbers, **more})


def check_scalar(results: dict[str, tuple[BenchResult, dict[str, StepShares]]]) -> list[str]:
    """Networks that spend more than a tenth of their time in scalar steps."""
    return [
        f"{name} at {bits} bit: {share}"
        for name, (_, shares) in results.items()
        for bits, share in shares.items()
        if share.scalar > 0.1
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(NETS), help="default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--isa", choices=sorted(ISA_SWITCHES), help="hold everyone to this instruction set")
    parser.add_argument("--rivals", default=RIVALS, help=f"default: {RIVALS}; or none")
    parser.add_argument("--quick", action="store_true", help="three rounds; the saved results stay")
    parser.add_argument("--make", action="store_true", help="only make the models")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "build" / "bench", help="made models are kept here")
    args = parser.parse_args(arguments)
    names = args.nets.split(",")
    if unknown := [name for name in names if name not in NETS]:
        parser.error(f"--nets: {unknown[0]!r} is not known; choose from {', '.join(NETS)}")

    version = zlib.crc32(Path(__file__).read_bytes())  # models made by other versions of this file are not reused
    cache = args.cache / f"networks-{version:08x}"
    torch.set_num_threads(1)
    results = {}
    for name in names:
        if args.make:
            make_files(NETS[name], cache / name)
            print(f"made {name}", flush=True)
            continue
        results[name] = measure(name, args, cache)
        print(table(results[name][0]), flush=True)
        for bits, share in results[name][1].items():
            print(f"  {bits} bit: {share}", flush=True)
    for line in check_scalar(results):
        print(f"more than a tenth in scalar steps: {line}")
    if results and not args.quick:
        machine = next(iter(results.values()))[0].machine
        cpu = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", machine["cpu"]).lower()).strip("-")
        path = HERE / "results" / f"networks_speed_{cpu}_{machine['isa']}.csv"
        save(path, results)
        print(f"saved {path}")


if __name__ == "__main__":
    main()
