"""The networks of `anyprec bench --suite` and bench/engine.py: random weights, the shapes of known networks.

In: names of networks, settings. Out: a BenchResult each, a CSV of all rows, one table of ratios. Speed depends on the
weights only at 8 bit with AVX2, where large pairs of weights need extra steps: so ResNets also come with weights of
wide distribution. ResNet-50 and -18 of the zoo are pre-activation networks, whose norms after each sum no tool can fold
away. So that the comparison is not about those, their rivals get the ordinary post-activation ResNet of the same
layers, the form those tools are tuned for; other rivals get the float twin of the file itself.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from anyprec.bench import random_networks as graphs
from anyprec.bench.race import OURS, BenchResult, BenchSettings, RaceRow, bench, title_of
from anyprec.format.file import write
from anyprec.format.graph import INPUT, Graph
from anyprec.progress import Progress
from anyprec.widths import FLOAT


@dataclass(frozen=True)
class Net:
    make: Callable[[], Graph]
    races: tuple[tuple[int, int], ...] = ((1, 1),)  # batch, threads
    rivals: str = ""  # the network rivals get, of RIVAL_NETS; empty: the twin


WIDTHS = (1, 2, 4, 8, (8, 7))  # the last: 8-bit weights and 7-bit activations, which vpmaddubsw cannot saturate on
# Standard deviation of weights in [-1, 1], as in our CIFAR-10 networks that were trained at 1 bit as well. Without it
# weights are normally distributed and scaled so that the largest of a layer is 1.
WIDE_DEVIATION = 0.36
NETS = {
    "resnet50": Net(lambda: graphs.resnet_graph(50, widths=WIDTHS), ((1, 1), (8, 1), (1, 2)), "plain50"),
    "resnet50-8bit-first-last": Net(lambda: graphs.resnet_graph(50, first_last="8bit"), rivals="plain50"),
    "resnet50-float-skips": Net(lambda: graphs.resnet_graph(50, "float"), rivals="plain50"),
    "resnet50-wide-distribution": Net(lambda: graphs.resnet_graph(50, deviation=WIDE_DEVIATION), rivals="plain50"),
    "resnet18": Net(lambda: graphs.resnet_graph(18, widths=WIDTHS), ((1, 1), (8, 1), (1, 2)), "plain18"),
    "resnet18-8bit-first-last": Net(lambda: graphs.resnet_graph(18, first_last="8bit"), rivals="plain18"),
    "resnet18-float-skips": Net(lambda: graphs.resnet_graph(18, "float"), rivals="plain18"),
    "resnet18-wide-distribution": Net(lambda: graphs.resnet_graph(18, deviation=WIDE_DEVIATION), rivals="plain18"),
    "mobilenetv2": Net(graphs.mobilenetv2_graph, ((1, 1), (8, 1))),
    "mobilenetv2-224": Net(lambda: graphs.mobilenetv2_graph(1, 224, classes=1000, large=True), ((1, 1), (8, 1))),
    "resnet20": Net(graphs.resnet20_graph, ((1, 1), (8, 1))),
}
RIVAL_NETS = {"plain50": lambda: plain_resnet(50), "plain18": lambda: plain_resnet(18)}


def plain_resnet(depth: int, size: int = 224) -> Graph:
    """ResNet-18 or -50 as everybody has it: conv, norm, ReLU; sum, then ReLU; stride in the 3x3. Float."""
    net = graphs.Net(f"plain{depth}", size, (FLOAT,), 0)

    def conv(name: str, x: str, out: int, kernel: int, stride: int) -> str:
        return net.float_conv(name, x, out, kernel, stride, makes="norm")

    def relu(name: str, x: str) -> str:
        net.tables[name] = np.array([[0, np.inf]], np.float32)
        net.estimates[name] = [(0.4 * std, 0.6 * std) for _, std in net.estimates[x]]
        return net.op(name, "clip", x)

    x = net.max_pool("pool0", relu("relu0", conv("conv0", INPUT, 64, 7, 2)))
    for stage, count in enumerate({18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth]):
        channels = 64 << stage
        for i in range(count):
            name, stride = f"{stage}.{i}", 2 if stage and i == 0 else 1
            layers = [(channels, 3, stride), (channels, 3, 1)]
            if depth == 50:
                layers = [(channels, 1, 1), (channels, 3, stride), (4 * channels, 1, 1)]
            y = x
            for j, layer in enumerate(layers):
                y = conv(f"{name}.conv{j}", y, *layer)
                y = y if j == len(layers) - 1 else relu(f"{name}.relu{j}", y)
            if stride > 1 or net.channels[x] != net.channels[y]:
                x = conv(f"{name}.skip", x, net.channels[y], 1, stride)
            x = relu(f"{name}.relu", net.add(f"{name}.add", y, x))
    return net.graph(net.head(x, 1000))


def made_file(cache: Path, name: str, make: Callable[[], Graph]) -> Path:
    path = cache / f"{name}.apm"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        write(make(), path)
    return path


def made_onnx(cache: Path, name: str) -> Path:
    """The float network of RIVAL_NETS as ONNX."""
    path = cache / f"{name}.onnx"
    if not path.exists():
        import onnx

        from anyprec.bench.twin import graph_to_onnx

        cache.mkdir(parents=True, exist_ok=True)
        graph = RIVAL_NETS[name]()
        height, width, _ = graph.input_shape
        assert height is not None and width is not None
        onnx.save(graph_to_onnx(graph, (height, width)), path)
    return path


# What `--suite` measures: networks of three sizes, with and without depth-wise convolutions.
SUITE = ("resnet50", "resnet50-wide-distribution", "resnet18", "mobilenetv2-224", "mobilenetv2", "resnet20")


def cache_name() -> str:
    """Models made by other versions of these files are not reused."""
    made_by = (Path(__file__), Path(graphs.__file__))
    return f"{zlib.crc32(b''.join(path.read_bytes() for path in made_by)):08x}"


def measure(
    name: str, cache: Path, rivals: Sequence[str], rounds: int, isa: str | None = None, only_first: bool = False
) -> BenchResult:
    """The races of one network of NETS; only_first: batch 1, one thread. Models that are made are kept in `cache`."""
    net = NETS[name]
    races = net.races[:1] if only_first else net.races
    onnx = str(made_onnx(cache, net.rivals)) if net.rivals and rivals else None
    model = str(made_file(cache, name, net.make))
    found: BenchResult | None = None
    with Progress(name, total=rounds * len(races), unit="round") as progress:
        for batch, threads in races:
            wish = BenchSettings(
                model,
                batches=(batch,),
                threads=(threads,),
                rivals=tuple(rivals),
                rounds=rounds,
                isa=isa,
                onnx=onnx,
                folder=str(cache / (net.rivals or name)),
            )
            done = bench(wish, progress.update)
            if found is None:
                found = done
            else:
                found.rows += done.rows
                found.failures += done.failures
                found.notes += [note for note in done.notes if note not in found.notes]
    assert found is not None
    return found


def csv_name(machine: Mapping[str, str]) -> str:
    cpu = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", machine["cpu"]).lower()).strip("-")
    return f"engine_{cpu}_{machine['isa']}.csv"


def save(path: Path, results: Mapping[str, BenchResult]) -> None:
    """Rows of networks that were not measured now stay as they are."""
    columns = ["net", "size", *(field.name for field in fields(RaceRow))]
    kept: list[dict[str, str]] = []
    if path.exists():
        with open(path, newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["net"] not in results]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for net in NETS:
            writer.writerows(row for row in kept if row["net"] == net)
            for row in results[net].rows if net in results else ():
                numbers = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}
                writer.writerow({"net": net, "size": results[net].size[0], **numbers})


def suite_table(results: Mapping[str, BenchResult]) -> str:
    """One line for each network: the best int8 rival at batch 1 and one thread, and each width of ours beside it."""
    machine = next(iter(results.values())).machine
    lines = [
        f"{machine['cpu']}, {machine['isa']}; batch 1, 1 thread; median of {machine['rounds']} rounds, all in turn",
        "",
        f"{'':28}{'best int8 rival':>28}{'ms':>9}" + "".join(f"{f'{bits} bit':>18}" for bits in (8, 4, 2, 1)),
    ]
    kernels: dict[str, str] = {}
    for name, done in results.items():
        rows = [row for row in done.rows if (row.batch, row.threads) == (1, 1)]
        int8 = [row for row in rows if row.variant == "int8" and row.limited]
        best = min(int8, key=lambda row: row.p50_ms, default=None)
        line = f"{name:28}{best.title if best else 'none':>28}{f'{best.p50_ms:.2f}' if best else '':>9}"
        for bits in (8, 4, 2, 1):
            ours = next((row for row in rows if row.title == title_of(OURS, str(bits))), None)
            ratio = f" {ours.speedup:.2f} x" if ours and ours.speedup is not None else ""
            line += f"{f'{ours.p50_ms:.2f}{ratio}' if ours else '-':>18}"
        lines.append(line)
        kernels |= {row.title: row.kernels or "does not tell" for row in int8}
    lines += ["", *(f"{title}: {used}" for title, used in kernels.items())] if kernels else []
    failures = {failure.title: failure.reason for done in results.values() for failure in done.failures}
    lines += [f"{title} {reason}" for title, reason in failures.items()]
    return "\n".join(lines + list(dict.fromkeys(f"note: {note}" for done in results.values() for note in done.notes)))
