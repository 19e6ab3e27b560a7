"""`anyprec bench MODEL`: latency, bytes and memory at each width, beside ONNX Runtime, OpenVINO and PyTorch.

A table, --json or a picture of what bench.py measures. Called by anyprec.cli.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from anyprec.arguments import duration, whole
from anyprec.bench import rivals
from anyprec.bench.race import OURS, BenchResult, BenchSettings, RaceRow, RivalFailure, bench
from anyprec.bench.rivals import ISA_SWITCHES, TITLES
from anyprec.bench.timing import TIMEOUT_S
from anyprec.cli.output import print_json
from anyprec.cli.plot_file import check_picture
from anyprec.errors import AnyprecError
from anyprec.format.model_file import ModelFile
from anyprec.models.catalog import find
from anyprec.progress import Progress
from anyprec.widths import parse_widths

EXAMPLE = "anyprec bench digits.apm --bits 1,2,4,8 --threads 1,2"

NO_RIVAL = (
    "no other engine can run here, only anyprec is timed; pip install 'anyprec[bench]' installs ONNX Runtime, OpenVINO "
    "and what PyTorch needs to take part; --rivals none goes without"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL.apm",
        nargs="?",
        help="a model file (.apm) of `anyprec pack`, or a name of `anyprec models`",
    )
    parser.add_argument(
        "--suite", action="store_true", help="instead of MODEL: six networks with random weights, in one table"
    )
    parser.add_argument("--csv", metavar="FILE.csv", help="with --suite: keep all rows in this file")
    parser.add_argument("--bits", metavar="BITS", help="for example 1,2,4,8 or 1-8,32 (default: all the file has)")
    parser.add_argument("--profile", action="append", default=[], metavar="NAME", help="also this mixed profile")
    parser.add_argument("--batch", default="1", metavar="N,N", help="images per call (default: 1)")
    parser.add_argument("--threads", default="1", metavar="N,N", help="threads per call (default: 1)")
    parser.add_argument(
        "--rivals", default=",".join(TITLES), metavar="A,B", help=f"of {', '.join(TITLES)}; or none (default: all)"
    )
    parser.add_argument(
        "--size", type=int, metavar="N", help="height and width of the images, if the network takes any size"
    )
    parser.add_argument(
        "--rounds",
        type=whole(1, 1_000_000),
        default=30,
        metavar="N",
        help="rounds; each engine has one turn per round (default: 30)",
    )
    parser.add_argument("--isa", choices=sorted(ISA_SWITCHES), help="limit all engines to this instruction set")
    parser.add_argument("--onnx", metavar="FILE.onnx", help="the rivals' float network (default: made from the model)")
    parser.add_argument(
        "--timeout", type=duration, default=TIMEOUT_S, metavar="TIME",
        help="give up a rival after this time without an answer (default: 5m)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--picture", metavar="FILE.png", help="also draw accuracy, or bits, against latency")


def run(args: argparse.Namespace) -> int:
    if args.suite:
        return run_suite(args)
    if args.model is None:
        raise AnyprecError("give a model file, or --suite for six networks with random weights")
    if args.csv:
        raise AnyprecError("--csv goes with --suite; for one model give --json")
    settings = BenchSettings(
        model=str(find(args.model)),
        profiles=(*(str(bits) for bits in (parse_widths(args.bits) if args.bits else ())), *args.profile),
        batches=counts(args.batch, "--batch"),
        threads=counts(args.threads, "--threads"),
        rivals=rival_names(args.rivals),
        size=args.size,
        rounds=args.rounds,
        isa=args.isa,
        onnx=args.onnx,
        timeout_s=args.timeout,
    )
    if args.picture:
        check_picture(args.picture)
    if settings.rivals and all(rivals.missing(name) for name in settings.rivals):
        ModelFile(settings.model).close()  # a wrong file is told first
        print(f"anyprec: note: {NO_RIVAL}", file=sys.stderr)
    total = settings.rounds * len(settings.batches) * len(settings.threads)
    with Progress("bench", total=total, unit="round") as progress:
        done = bench(settings, progress.update)
    if args.json:
        print_json(done.record())
    else:
        print(table(done))
    if args.picture:
        from anyprec.bench.plot import draw

        draw(done, args.picture)
    if done.failures:
        print(f"anyprec: error: {failure_line(done.failures, settings.rivals)}", file=sys.stderr)
    return 1 if done.failures else 0


def run_suite(args: argparse.Namespace) -> int:
    from anyprec.bench import suite

    # The suite has its own networks, widths and sizes, at batch 1 and one thread.
    given = {"MODEL": args.model, "--bits": args.bits, "--profile": args.profile, "--size": args.size}
    given |= {"--onnx": args.onnx, "--picture": args.picture}
    given |= {"--batch": args.batch != "1", "--threads": args.threads != "1"}
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise AnyprecError(f"{wrong[0]} does not go with --suite, which has networks and settings of its own")
    names = rival_names(args.rivals)
    results = {}
    with tempfile.TemporaryDirectory(prefix="anyprec-suite-") as folder:
        for name in suite.SUITE:
            results[name] = suite.measure(name, Path(folder), names, args.rounds, args.isa, only_first=True)
    if args.csv:
        suite.save(Path(args.csv), results)
    if args.json:
        print_json({name: done.record() for name, done in results.items()})
    else:
        print(suite.suite_table(results))
    failures = [failure for done in results.values() for failure in done.failures]
    if failures:
        print(f"anyprec: error: {failure_line(failures, names)}", file=sys.stderr)
    return 1 if failures else 0


def failure_line(failures: list[RivalFailure], asked: tuple[str, ...]) -> str:
    """Who failed, once each, whatever the number of races; how to go without them."""
    names = {failure.title: failure.reason for failure in failures}
    told = "; ".join(f"{title} {reason}" for title, reason in names.items())
    rest = [name for name in asked if name not in {failure.engine for failure in failures}]
    return f"the comparison is incomplete: {told}; leave it out with --rivals {','.join(rest) or 'none'}"


def counts(text: str, option: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 4096 for part in parts):
        raise AnyprecError(f"{option} {text!r} is not a list of numbers from 1 to 4096; write for example 1,8")
    return tuple(dict.fromkeys(map(int, parts)))


def rival_names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == ("none",):
        return ()
    unknown = [name for name in names if name not in TITLES]
    if unknown:
        raise AnyprecError(f"--rivals: {unknown[0]!r} is not known; choose from {', '.join(TITLES)}, or none")
    return names


def table(done: BenchResult) -> str:
    at = done.machine
    lines = [
        f"{done.model}, {done.size[0]} x {done.size[1]}; median of {at['rounds']} rounds, everyone in turn",
        f"{at['cpu']}, {at['cores']} cores, {at['isa']}; "
        + ", ".join(f"{name} {version}" for name, version in at["versions"].items()),
    ]
    for (batch, threads), rows in groupby(done.rows, key=lambda row: (row.batch, row.threads)):
        lines += ["", *race_table(list(rows), batch, threads)]
        for failure in done.failures:
            if (failure.batch, failure.threads) == (batch, threads):
                lines.append(f"{failure.title:<22} {failure.reason}")
        if best := done.best_int8(batch, threads):
            lines.append(f"x int8 compares with {best}")
    lines += kernel_lines(done.rows)
    if not all(row.limited for row in done.rows):
        lines.append(f"* cannot be held to {at['isa']}: it asks the CPU itself; left out of the comparison")
    lines += [f"note: {note}" for note in done.notes]
    return "\n".join(lines)


def kernel_lines(rows: list[RaceRow]) -> list[str]:
    """What each engine really ran on, once for each of its variants; all widths of ours run on the same."""
    told = {row.engine if row.engine == OURS else row.title: row.kernels for row in rows}
    if len(told) < 2:
        return []
    return ["", "kernels used", *(f"{title:<22}{kernels or 'does not tell'}" for title, kernels in told.items())]


def race_table(rows: list[RaceRow], batch: int, threads: int) -> list[str]:
    head = f"batch {batch}, {threads} thread{'s' * (threads > 1)}"
    lines = [
        f"{head:<22}{'p50 ms':>9}{'p10':>9}{'p90':>9}{'images/s':>10}{'x int8':>8}"
        f"{'cold ms':>9}{'disk MB':>9}{'memory MB':>11}"
    ]
    known = any(row.accuracy is not None for row in rows)
    lines[0] += f"{'accuracy':>10}" if known else ""
    for row in rows:
        speedup = "" if row.speedup is None else f"{row.speedup:.2f}"
        memory = "" if row.resident_bytes is None else f"{row.resident_bytes / 1e6:.0f}"
        cold = "" if row.cold_ms is None else f"{row.cold_ms:.0f}"
        accuracy = "" if row.accuracy is None else f"{row.accuracy:>10.2f}"
        lines.append(
            f"{row.title + ('' if row.limited else ' *'):<22}{row.p50_ms:>9.3f}{row.p10_ms:>9.3f}{row.p90_ms:>9.3f}"
            f"{row.images_per_s:>10.1f}{speedup:>8}{cold:>9}{row.disk_bytes / 1e6:>9.2f}{memory:>11}{accuracy}"
        )
    return lines
