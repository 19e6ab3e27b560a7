"""How much of the limit of the CPU's vector ports each kernel reaches inside ResNet-50: one image, one thread.

    python bench/kernel_limits.py [--isa avx2] [--bits 1,2,4,8] [--rounds 20] [--cpu NAME] | --sums

Every step of a run is timed (PackedModel.steps) and convolutions are summed by kernel, stage and kind of layer. Of the
rounds the best tenth counts: what else the machine does only ever adds time. The clock is that of a chain of
multiplications whose cycles are known, the median over the rounds. It runs right after the steps, because Intel's
servers leave the lower clock of wide vectors half a millisecond later (Cascade Lake: 2.4 GHz, then 3.1). Writes
bench/results/kernel_limits_CPU.csv; rows of instruction sets and widths not measured now stay as they are. --sums
measures nothing: of the rows that are there, the time of all layers, and what the ports alone would take for them.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import mmap
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

import anyprec
from anyprec.bench import random_networks as graphs
from anyprec.format.file import write
from anyprec.format.graph import Graph, Op
from anyprec.progress import Progress
from anyprec.run.cpu import cpu_name
from anyprec.run.model import PackedModel

RESULTS = Path(__file__).resolve().parent / "results"
BLOCKS = (3, 4, 6, 3)  # of ResNet-50, by stage
BEST = 0.1  # of the rounds

# --- Limits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    """What the inner loop of a kernel issues for so many products: multiplications (or look-ups), and additions."""

    products: int
    multiplies: int = 1
    additions: int = 0
    fewer: float = 1  # products of the plain way that one product of this one stands for


WINOGRAD = 36 / 16  # F(2x2, 3x3): 16 products in place of 36; its transforms are not in the limit
TOOM_COOK = 49 * 16 / (49 * 4)  # 4 x 4 outputs of a 7x7 kernel: 49 products of 2 x 2 pixels in place of 49 x 16
INNERS = {
    "avx2": {
        "fma": Inner(8),
        "toom-cook fma": Inner(8, fewer=TOOM_COOK),
        "vpmaddwd": Inner(16, 1, 1),
        "vpmaddubsw, 4 bit": Inner(32, 1, 1),
        "vpmaddubsw, 5 bit": Inner(32, 1, 1),
        "vpmaddubsw, 6 bit": Inner(32, 1, 1),
        "vpmaddubsw, 7 bit": Inner(32, 2, 1),  # widened at once, by a vpmaddwd
        "vpmaddubsw, 8x7 bit": Inner(32, 2, 1),
        "vpmaddubsw, 8 bit": Inner(32, 2, 1),  # extra steps are not in the limit
        "vpshufb, 2 bit": Inner(64, 1, 1),
        "vpshufb, 1 bit": Inner(768, 3, 6),  # two pixels; three, added up, then their halves parted and added
        "winograd vpmaddwd": Inner(16, 1, 1, WINOGRAD),
        "winograd vpmaddubsw": Inner(96, 4, 3, WINOGRAD),  # three, then a vpmaddwd that widens
    },
    "avxvnni": {
        "fma": Inner(8),
        "toom-cook fma": Inner(8, fewer=TOOM_COOK),
        "vpdpbusd": Inner(32),
        "vpdpbusd, 8 bit": Inner(32),
        "vpshufb, 2 bit": Inner(64, 1, 1),
        "vpshufb, 1 bit": Inner(768, 3, 6),
        "winograd vpdpbusd, 4 bit": Inner(32, fewer=WINOGRAD),
    },
    "avx512vnni": {
        "fma": Inner(16),
        "toom-cook fma": Inner(16, fewer=TOOM_COOK),
        "vpdpbusd": Inner(64),
        "vpdpbusd, 8 bit": Inner(64),
        "vpshufb, 1 bit": Inner(1536, 3, 6),
        "winograd vpdpbusd, 3 bit": Inner(64, fewer=WINOGRAD),
        "winograd vpdpbusd, 4 bit": Inner(64, fewer=WINOGRAD),
    },
    "avx512": {
        "fma": Inner(16),
        "toom-cook fma": Inner(16, fewer=TOOM_COOK),
        "vpdpbusd": Inner(64),
        "vpdpbusd, 8 bit": Inner(64),
        "vpermb, 2 bit": Inner(192, 1, 1),
        "vpermb, 1 bit": Inner(384, 1, 1),
        "vpopcntd, 1 bit": Inner(512, 1, 2),  # with an and
        "winograd vpdpbusd, 3 bit": Inner(64, fewer=WINOGRAD),
        "winograd vpdpbusd, 4 bit": Inner(64, fewer=WINOGRAD),
    },
    "amx": {
        "fma": Inner(16),
        "toom-cook fma": Inner(16, fewer=TOOM_COOK),
        "vpermb, 1 bit": Inner(384, 1, 1),
        "vpopcntd, 1 bit": Inner(512, 1, 2),
        "tdpbusd": Inner(16 * 16 * 64, 32),  # 16 cycles: the time in which two ports start 32
        "tdpbusd, 8 bit": Inner(16 * 16 * 64, 32),
    },
}


@dataclass(frozen=True)
class Ports:
    """Vector instructions a core starts in a cycle: of all kinds, multiplications, and lookups or counts of bits."""

    all: int
    multiplies: int
    lookups: int


PORTS = {
    ("Haswell", "avx2"): Ports(3, 2, 1),  # and later, to Cascade Lake
    ("Haswell", "avx512vnni"): Ports(2, 2, 1),
    ("Ice Lake", "avx2"): Ports(3, 2, 2),  # and later
    ("Ice Lake", "avxvnni"): Ports(3, 2, 2),
    ("Ice Lake", "avx512vnni"): Ports(2, 2, 1),  # ports 0 and 1 together, and 5, which alone looks up
    ("Ice Lake", "avx512"): Ports(2, 2, 1),
    ("Ice Lake", "amx"): Ports(2, 2, 1),
    ("Zen 3", "avx2"): Ports(4, 2, 2),  # additions have pipes of their own
    ("Zen 4", "avx2"): Ports(4, 2, 2),
    ("Zen 4", "avx512vnni"): Ports(2, 1, 1),  # an instruction of 512 bits takes two turns of such a pipe
    ("Zen 4", "avx512"): Ports(2, 1, 1),
    ("Zen 5", "avx2"): Ports(4, 2, 2),
    ("Zen 5", "avxvnni"): Ports(4, 2, 2),
    ("Zen 5", "avx512vnni"): Ports(4, 2, 2),  # in servers its pipes have 512 bits; measured
    ("Zen 5", "avx512"): Ports(4, 2, 2),
}
CORES = tuple(dict.fromkeys(core for core, _ in PORTS))


def port_limit(isa: str, kernel: str, core: str) -> float | None:
    """Products a cycle, none waiting for memory; None where this CPU's ports are not in the table."""
    inner, ports = INNERS[isa].get(kernel), PORTS.get((core, isa))
    if inner is None or ports is None:
        return None
    starts = ports.lookups if kernel.startswith(("vpermb", "vpshufb", "vpopcntd")) else ports.multiplies
    cycles = max(inner.multiplies / starts, (inner.multiplies + inner.additions) / ports.all)
    return inner.products * inner.fewer / cycles


def core_of(cpuinfo: str) -> str:
    """The first core with such ports, from the text of /proc/cpuinfo; "unknown": of no known kind."""
    known = dict(re.findall(r"^(vendor_id|cpu family|flags)\s*: (.*)$", cpuinfo, re.MULTILINE))
    flags = known.get("flags", "").split()
    match known.get("vendor_id"), known.get("cpu family"):
        case "AuthenticAMD", "26":
            return "Zen 5"
        case "AuthenticAMD", "25":
            return "Zen 4" if "avx512f" in flags else "Zen 3"
        case "GenuineIntel", "6" if "avx2" in flags:
            return "Ice Lake" if "gfni" in flags else "Haswell"
    return "unknown"


def this_core() -> str:
    path = Path("/proc/cpuinfo")
    return core_of(path.read_text()) if path.exists() else "unknown"


# --- The clock --------------------------------------------------------------------------------------------------------


class Clock:
    """Times a chain of multiplications: each waits for the one before, 3 cycles on every x86 CPU since 2008.

    Additions would not do: newer cores add small constants without taking a cycle for it.
    """

    CHAIN, CYCLES = 20, 3
    LOOPS = 5000  # 0.1 ms at 3 GHz; the call itself takes less than a hundredth of it

    def __init__(self) -> None:
        if platform.machine() != "x86_64" or sys.platform == "win32":
            raise SystemExit("the clock is measured with x86-64 instructions, on Linux or macOS")
        body = bytes.fromhex("48 0f af c0" * self.CHAIN + "ff cf")  # imul rax, rax; dec edi, the argument
        code = body + bytes([0x75, 256 - len(body) - 2, 0xC3])  # jnz to the start; ret
        self._page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._page.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_int)(address)

    def ghz(self) -> float:
        start = time.perf_counter()
        self._run(self.LOOPS)
        return self.LOOPS * self.CHAIN * self.CYCLES / (time.perf_counter() - start) / 1e9


# --- Measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    isa: str
    bits: int
    stage: str  # "stem", "1" .. "4", "head"
    layer: str  # "7x7", "1x1", "3x3", "linear"
    kernel: str
    layers: int
    million_products: float
    us: float  # of all of them
    prepare_us: float  # codes brought into the form the kernel reads, and summed; not in `us`
    products_per_ns: float
    ghz: float
    limit_per_cycle: float | None
    percent: float | None


def stage_of(name: str) -> str:
    found = re.match(r"blocks\.(\d+)\.", name)
    if not found:
        return "head" if name == "fc" else "stem"
    return str(next(i + 1 for i in range(4) if int(found[1]) < sum(BLOCKS[: i + 1])))


def layer_of(op: Op) -> str:
    return "linear" if op.kind == "linear" else "x".join(str(size) for size in op.attributes["kernel"])


def kernel_of(work: str) -> str:
    """A step's work without what follows the products: "vpmaddwd, add, codes" is vpmaddwd."""
    return re.sub(r"(, add)?(, float)?(, codes)?(, pool)?$", "", work)


def measure(model: PackedModel, graph: Graph, x: np.ndarray, bits: int, clock: Clock, rounds: int) -> list[Row]:
    ops = {op.name: op for op in graph.ops}
    times: list[list[float]] = []  # [round][step]
    ghz: list[float] = []
    for _ in range(rounds):
        steps = model.steps(x, bits, threads=1, repeat=5)
        times.append([step.seconds for step in steps])
        clock.ghz()  # the first tenth of a millisecond has what the steps left behind
        ghz.append(clock.ghz())
    best = np.quantile(times, BEST, axis=0)
    now = float(np.median(ghz))

    groups: dict[tuple[str, str, str], list[int]] = {}  # stage, layer, kernel -> steps
    prepare: dict[str, float] = {}  # op -> seconds
    for i, step in enumerate(steps):
        if step.products:
            key = stage_of(step.op), layer_of(ops[step.op]), kernel_of(step.work)
            groups.setdefault(key, []).append(i)
        elif step.work == "prepare":
            prepare[step.op] = float(best[i])

    rows = []
    for (stage, layer, kernel), members in groups.items():
        products, seconds = sum(steps[i].products for i in members), float(sum(best[i] for i in members))
        rate = products / seconds / 1e9
        limit = port_limit(model.isa, kernel, this_core())
        percent = None if limit is None else 100 * rate / (limit * now)
        extra = 1e6 * sum(prepare.get(steps[i].op, 0.0) for i in members)
        counts = len(members), products / 1e6, 1e6 * seconds, extra
        rows.append(Row(model.isa, bits, stage, layer, kernel, *counts, rate, now, limit, percent))
    return rows


def save(path: Path, rows: Sequence[Row]) -> None:
    kept: list[dict[str, object]] = []
    measured = {(row.isa, str(row.bits)) for row in rows}
    if path.exists():
        with open(path, newline="") as file:
            kept = [dict(row) for row in csv.DictReader(file) if (row["isa"], row["bits"]) not in measured]
    made = [{k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(row).items()} for row in rows]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(kept + made, key=lambda row: (str(row["isa"]), int(str(row["bits"])))))


def sums(path: Path) -> list[str]:
    """Lines: milliseconds of all layers at each width, measured, and at the limit of each core's ports."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [f"{'':19}{'measured':>10}" + "".join(f"{f'at {core} limit':>18}" for core in CORES) + "  ms"]
    for isa, bits in dict.fromkeys((row["isa"], row["bits"]) for row in rows):
        here = [row for row in rows if (row["isa"], row["bits"]) == (isa, bits)]
        line = f"{isa:11}{bits:>2} bit  {sum(float(row['us']) + float(row['prepare_us']) for row in here) / 1e3:10.1f}"
        for core in CORES:
            limits = [port_limit(isa, row["kernel"], core) for row in here]
            pairs = list(zip(here, limits, strict=True))
            least = [
                float(row["million_products"]) / (limit * float(row["ghz"]))
                for row, limit in pairs
                if limit is not None
            ]
            line += f"{'unknown':>18}" if None in limits else f"{sum(least):18.1f}"
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", choices=sorted(INNERS), help="default: the best this CPU can run")
    parser.add_argument("--bits", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sums", action="store_true", help="of the rows that are there; measures nothing")
    parser.add_argument("--cpu", default=cpu_name(), help="of the file's name, where several CPUs have the same name")
    args = parser.parse_args()
    name = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", args.cpu).lower()).strip("-")
    path = RESULTS / f"kernel_limits_{name}.csv"
    if args.sums:
        if not path.exists():
            there = sorted(file.name for file in RESULTS.glob("kernel_limits_*.csv"))
            raise SystemExit(f"no {path.name}; there are {', '.join(there)}: choose one's CPU by --cpu")
        print("\n".join(sums(path)))
        return
    widths = [int(k) for k in args.bits.split(",")]
    graph, clock = graphs.resnet_graph(50, widths=widths), Clock()
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, Progress("kernels", total=len(widths), unit="width") as progress:
        write(graph, f"{folder}/resnet50.apm")
        model = anyprec.load(f"{folder}/resnet50.apm", isa=args.isa)
        if model.isa not in INNERS:
            raise SystemExit(f"isa {model.isa}: no kernels with a known limit; choose from {', '.join(INNERS)}")
        for k in widths:
            rows += measure(model, graph, x, k, clock, args.rounds)
            progress.update()
    print(f"{'':9}{'stage':>6} {'layer':7}{'kernel':26}{'ms':>8}{'products/ns':>13}{'limit':>8}{'%':>6}")
    for row in rows:
        limit = "" if row.limit_per_cycle is None else f"{row.limit_per_cycle * row.ghz:.0f}"
        percent = "" if row.percent is None else f"{row.percent:.0f}"
        print(
            f"{row.bits:2} bit   {row.stage:>6} {row.layer:7}{row.kernel:26}{row.us / 1000:8.2f}"
            f"{row.products_per_ns:13.1f}{limit:>8}{percent:>6}"
        )
    save(path, rows)
    print(f"clock {rows[0].ghz:.2f} GHz; saved {path}")


if __name__ == "__main__":
    main()
