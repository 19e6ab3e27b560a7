"""The engine at every width beside ONNX Runtime, OpenVINO and PyTorch: the tables of docs/cli/bench.md (`make bench`).

    python bench/engine.py [--nets resnet50,resnet18] [--rounds 30] [--isa avx2] [--rivals none] \\
        [--quick [--save]] [--cpu NAME] | --page

The networks are those of anyprec/bench/suite.py, which also says what their rivals get. Results go to
bench/results/engine_CPU_ISA.csv; --page measures nothing and makes docs/speed.md of all these files.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from anyprec.bench.race import BenchResult
from anyprec.bench.rivals import ISA_SWITCHES, TITLES
from anyprec.bench.suite import NETS, cache_name, csv_name, measure, save
from anyprec.cli.bench import rival_names, table

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "speed.md"
WIDTHS = ("8", "4", "2", "1")


def page() -> str:
    """All CSV files of bench/results as one page: batch 1 and one thread, then the other races."""
    lines = [
        "# Speed by CPU",
        "",
        "The engine at 8, 4, 2 and 1 bit beside the best int8 engine on the same machine: milliseconds (p50)",
        "and, in parentheses, how many times as fast, as the median over the rounds of one interleaved race.",
        "`python bench/engine.py` measures; with `--page` it makes this page from the CSV files in",
        "`bench/results`. Networks were measured on different days; [Results](results.md) says what the",
        "figures mean.",
    ]
    for path in sorted((HERE / "results").glob("engine_*.csv")):
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        cpu, isa = path.stem.removeprefix("engine_").rsplit("_", 1)
        lines += ["", f"## {cpu}, {isa}", "", "| network | batch | threads | best int8 rival | 8 | 4 | 2 | 1 |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for net, batch, threads in dict.fromkeys((row["net"], row["batch"], row["threads"]) for row in rows):
            here = [row for row in rows if (row["net"], row["batch"], row["threads"]) == (net, batch, threads)]
            int8 = [row for row in here if row["variant"] == "int8" and row["limited"] == "True"]
            best = min(int8, key=lambda row: float(row["p50_ms"]), default=None)
            rival = f"{TITLES[best['engine']]} {float(best['p50_ms']):.2f}" if best else "none"
            ours = {row["variant"]: row for row in here if row["engine"] == "anyprec"}
            cells = [cell(ours.get(bits)) for bits in WIDTHS]
            lines.append(f"| {net} | {batch} | {threads} | {rival} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(row: dict[str, str] | None) -> str:
    if row is None:
        return "-"
    ratio = f" ({float(row['speedup']):.2f})" if row["speedup"] else ""
    return f"{float(row['p50_ms']):.2f}{ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(NETS), help="default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--isa", choices=sorted(ISA_SWITCHES), help="hold everyone to this instruction set")
    parser.add_argument("--rivals", default=",".join(TITLES), help="default: all; or none")
    parser.add_argument("--quick", action="store_true", help="only batch 1, one thread; saved with --save")
    parser.add_argument("--save", action="store_true", help="with --quick: save these rows, too")
    parser.add_argument("--cpu", help="of the file's name, where several CPUs have the same, such as 'AMD EPYC Zen 4'")
    parser.add_argument("--page", action="store_true", help="make docs/speed.md of the saved results")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "build" / "bench", help="made models are kept here")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page())
        return
    names = args.nets.split(",")
    unknown = [name for name in names if name not in NETS]
    if unknown:
        parser.error(f"--nets: {unknown[0]!r} is not known; choose from {', '.join(NETS)}")

    results: dict[str, BenchResult] = {}
    for name in names:
        cache = args.cache / cache_name()
        results[name] = measure(name, cache, rival_names(args.rivals), args.rounds, args.isa, args.quick)
        print(table(results[name]), end="\n\n", flush=True)
    if args.save or not args.quick:
        machine = results[names[0]].machine
        path = HERE / "results" / csv_name(machine | {"cpu": args.cpu or machine["cpu"]})
        save(path, results)
        print(f"saved {path}")


if __name__ == "__main__":
    main()
