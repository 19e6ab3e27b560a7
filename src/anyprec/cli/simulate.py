"""`anyprec simulate MODEL --arrivals gamma:400:4 --slo 20ms`: a server, or a fleet, in virtual time.

Takes a model file, which is timed first, or a latency table (docs/cli/simulate.md). Answers what attainment and
accuracy a load gets, how many servers it needs (--find-servers), what load they hold (--find-rate), and how policies
compare over loads and bursts (--grid). Called by anyprec.cli.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from anyprec.arguments import delay, duration, names, real, seed, span, whole
from anyprec.cli.output import print_json
from anyprec.cli.plot_file import check_picture
from anyprec.cli.tables import table
from anyprec.errors import ArrivalsError, ServeError
from anyprec.files import write_text
from anyprec.loadtest import arrivals
from anyprec.progress import Progress
from anyprec.serve.scheduling.latency import GoesOn, read_table
from anyprec.serve.scheduling.queue import QueueLimits
from anyprec.serve.simulation import capacity
from anyprec.serve.simulation.simulate import (
    BALANCES,
    QUIET,
    Autoscale,
    Simulation,
    SimulationResult,
    SimulationSetup,
    TimingNoise,
    simulate,
)

EXAMPLE = "anyprec simulate digits.apm --arrivals gamma:400:4 --slo 20ms --servers 2"
GRID = "0.5,0.8,1,1.5,2,3@1,2,4,8"
HEAD = (
    "policy",
    "in time",
    "accuracy",
    "right and in time",
    "in time / s",
    "p50 ms",
    "p99 ms",
    "batch",
    "busy",
    "bits",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL.apm",
        help="a model (.apm, or a name of `anyprec models`), which is timed first, or a latency table (.json)",
    )
    parser.add_argument(
        "--arrivals",
        default="poisson:100",
        metavar="FORM",
        help="poisson:RATE, gamma:RATE:CV2, uniform:RATE, steps:RATE@SECONDS,..., ramp:RATE:RATE or trace:FILE "
        "(default: poisson:100)",
    )
    parser.add_argument(
        "--seconds",
        type=span,
        default=60.0,
        metavar="TIME",
        help="simulated duration (default: 60s; steps define their own)",
    )
    parser.add_argument(
        "--slo", default="50ms", metavar="TIME", help="latency target: 50ms, or 3x for three times the widest width"
    )
    parser.add_argument(
        "--policy",
        default="adaptive",
        metavar="NAME,NAME",
        help="one or more of adaptive, accuracy, 8, 4, ... (default: adaptive)",
    )
    parser.add_argument(
        "--servers", type=whole(1, 10_000), default=1, metavar="N", help="replicas behind a balancer (default: 1)"
    )
    parser.add_argument(
        "--engines", type=whole(1, 1024), default=1, metavar="N", help="engine threads per server (default: 1)"
    )
    parser.add_argument(
        "--balance",
        choices=BALANCES,
        default="two",
        help="how requests are spread; two: the less busy of two random servers (default)",
    )
    parser.add_argument("--autoscale", metavar="MIN-MAX", help="start and stop servers within these limits")
    parser.add_argument(
        "--starts-in", type=delay, default=30.0, metavar="TIME", help="time a new server takes to start (default: 30s)"
    )
    parser.add_argument(
        "--fail",
        type=parse_times,
        metavar="TIME,TIME",
        default=(),
        help="times at which a server fails, such as 10s,30s",
    )
    parser.add_argument(
        "--max-batch", type=whole(1, 4096), default=32, metavar="N", help="images per batch (default: 32)"
    )
    parser.add_argument(
        "--margin",
        type=delay,
        metavar="TIME",
        help="reserved from each deadline (default: a tenth of the SLO, at most 5ms)",
    )
    parser.add_argument("--quiet", action="store_true", help="no network, no jitter, no hiccups")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of arrivals and jitter (default: 0)")
    parser.add_argument(
        "--find-servers",
        type=real,
        metavar="PERCENT",
        help="find the smallest number of servers that keeps this share in time",
    )
    parser.add_argument(
        "--accuracy", type=real, metavar="PERCENT", help="with --find-servers: mean accuracy to keep, in percent"
    )
    parser.add_argument(
        "--find-rate", type=real, metavar="PERCENT", help="find the highest load with this share in time"
    )
    parser.add_argument(
        "--grid",
        nargs="?",
        const=GRID,
        metavar="LOADS@CV2S",
        help=f"compare policies over loads (relative to the capacity at the widest width) and bursts (default: {GRID})",
    )
    parser.add_argument(
        "--requests",
        type=whole(1, 100_000_000),
        default=20_000,
        metavar="N",
        help="requests per cell of --grid and per step of --find-rate",
    )
    parser.add_argument(
        "--threads",
        type=whole(1, 1024),
        default=1,
        metavar="N",
        help="threads per call, when a model is timed (default: 1)",
    )
    parser.add_argument(
        "--levels", type=names, metavar="NAMES", help="levels to use, such as 1,2,8,auto (default: all there are)"
    )
    parser.add_argument("--save-table", metavar="FILE.json", help="keep the measured latency table")
    parser.add_argument("--picture", metavar="FILE.png", help="load, widths and latency over time (needs Matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    if args.picture:
        check_picture(args.picture)
    setup = setup_of(args, read(args))
    policies = [policy_of(name) for name in args.policy.split(",")]
    for name, bits in policies:  # a wrong name shall be told now, not after minutes
        Simulation(np.zeros(0), replace(setup, policy=name, bits=bits), args.seed)
    if args.grid:
        record, text = run_grid(args, setup)
    elif args.find_rate is not None:
        record, text = run_find_rate(args, setup, policies)
    else:
        record, text = run_once(args, setup, policies)
    record = {"slo_ms": 1e3 * setup.slo, "table": table_record(setup.times, setup.accuracies, setup.cascades), **record}
    if args.json:
        print_json(record)
    else:
        print(text)
    return 0


# --- What the user typed ------------------------------------------------------------------------------------------


Levels = tuple[dict[str, dict[int, float]], dict[str, float | None], dict[str, GoesOn]]  # as of read_table


def read(args: argparse.Namespace) -> Levels:
    found = read_table(args.model) if str(args.model).endswith(".json") else measure_latency(args)
    if args.save_table:
        write_text(args.save_table, json.dumps(table_record(*found), indent=2) + "\n")
    return found


def measure_latency(args: argparse.Namespace) -> Levels:
    from anyprec.run.model import load
    from anyprec.serve.scheduling.engine import measure_latency as measure
    from anyprec.serve.scheduling.engine import served_levels

    model = load(args.model)
    levels = served_levels(model, args.levels)
    with Progress("timing", unit="run") as progress:
        # Half a second a batch at most: which batches are of use depends on an SLO that may be given in their terms.
        measured = measure(
            model, slo=0.25, max_batch=args.max_batch, threads=args.threads, progress=progress, levels=levels
        )
    return measured.now(), levels.accuracies, levels.cascades


def setup_of(args: argparse.Namespace, found: Levels) -> SimulationSetup:
    times, accuracies, cascades = found
    slo = slo_of(args.slo, times)
    for name in args.levels or ():
        if name not in times:
            raise ServeError(f"--levels: {name!r} is not in the latency table, which has {', '.join(times)}")
    scale = None
    if args.autoscale:
        least, dash, most = args.autoscale.partition("-")
        if not (dash and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
            raise ServeError(f"--autoscale {args.autoscale!r} is not a range of servers; write for example 1-10")
        scale = Autoscale(int(most), int(least), starts_in=args.starts_in)
    return SimulationSetup(
        times=times,
        accuracies=accuracies,
        cascades=cascades,
        levels=args.levels,
        slo=slo,
        limits=QueueLimits(max_batch=args.max_batch),
        margin=args.margin,
        engines=args.engines,
        servers=max(args.servers, scale.least) if scale else args.servers,
        balance=args.balance,
        noise=QUIET if args.quiet else TimingNoise(),
        autoscale=scale,
        failures=tuple(sorted(args.fail)),
    )


def parse_times(text: str) -> list[float]:
    return [delay(part) for part in text.split(",") if part]


def slo_of(text: str, times: dict[str, dict[int, float]]) -> float:
    if not text.endswith("x"):
        try:
            return duration(text)
        except argparse.ArgumentTypeError as error:
            raise ServeError(f"--slo: {error}") from None
    widest = max((int(name) for name in times if name.isdigit() and int(name) <= 8), default=None)
    try:
        factor = float(text[:-1])
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf or widest is None:
        raise ServeError(f"--slo {text!r} is not a target; write 50ms, or 3x for three times the widest width")
    return factor * times[str(widest)][1]


def policy_of(name: str) -> capacity.PolicySetting:
    name = name.strip()
    if name in ("adaptive", "accuracy"):
        return name, None
    if not name:
        raise ServeError("--policy has an empty name in it; write adaptive, accuracy, a width such as 4, or a level")
    return "fixed", int(name) if name.isdigit() else name


def arrivals_of(args: argparse.Namespace) -> np.ndarray:
    times = arrivals.parse(args.arrivals, args.seconds, args.seed)
    if not len(times):
        raise ArrivalsError(f"arrivals {args.arrivals!r} give no request in {args.seconds:g} s; ask for more of them")
    return times


# --- Answers ------------------------------------------------------------------------------------------------------


def run_once(
    args: argparse.Namespace, setup: SimulationSetup, policies: Sequence[capacity.PolicySetting]
) -> tuple[dict[str, Any], str]:
    times = arrivals_of(args)
    results: list[SimulationResult] = []
    with Progress("simulate", total=None if args.find_servers else len(times) * len(policies), unit="request") as bar:
        for name, bits in policies:
            mine = replace(setup, policy=name, bits=bits)
            if args.find_servers is None:
                results.append(simulate(times, mine, args.seed, bar.update))
            else:
                share = share_of(args.find_servers, "--find-servers")
                found = capacity.fewest_servers(
                    times, mine, share, args.accuracy, args.seed, lambda result: bar.update(len(result.sent))
                )
                results.append(found)
    if args.picture:
        draw(results[0], args.picture)
    rate = len(times) / max(results[0].seconds, 1e-9)
    text = f"{len(times)} requests, {rate:.1f} a second, target {1e3 * setup.slo:g} ms\n" + rows_of(results)
    if args.find_servers is not None:
        text += "\n" + "\n".join(
            f"{label(r.setup)}: {r.setup.servers} servers keep {100 * r.attainment:.3f} % in time" for r in results
        )
    return {"results": [result.record() for result in results]}, text


def run_find_rate(
    args: argparse.Namespace, setup: SimulationSetup, policies: Sequence[capacity.PolicySetting]
) -> tuple[dict[str, Any], str]:
    share = share_of(args.find_rate, "--find-rate")
    kind, _, rest = args.arrivals.partition(":")
    if kind not in ("poisson", "gamma"):
        raise ServeError("--find-rate sends poisson or gamma:RATE:CV2 arrivals; their RATE is what it looks for")
    arrivals.parse(args.arrivals, 1e-6, args.seed)  # refuses a form that cannot be read
    cv2 = float(rest.split(":")[1]) if kind == "gamma" and ":" in rest else 1.0
    rates = {}
    for name, bits in policies:
        mine = replace(setup, policy=name, bits=bits)
        rates[label(mine)] = capacity.highest_rate(mine, share, cv2, args.requests, args.seed)
    text = "\n".join(
        f"{name}: {rate:.1f} requests a second with {100 * share:g} % in time" for name, rate in rates.items()
    )
    return {"rates": rates, "attainment": share, "cv2": cv2}, text


def run_grid(args: argparse.Namespace, setup: SimulationSetup) -> tuple[dict[str, Any], str]:
    loads, cv2s = grid_of(args.grid)
    levels = Simulation(np.zeros(0), setup, args.seed).servers[0].core.levels
    widest = levels[-1].name
    policies: list[capacity.PolicySetting] = [
        ("adaptive", None),
        *(("fixed", level.bits) for level in reversed(levels)),
    ]
    cells: list[capacity.GridCell] = []
    with Progress("simulate", total=len(loads) * len(cv2s) * len(policies), unit="cell") as bar:
        base = capacity.highest_rate(
            replace(setup, policy="fixed", bits=widest), 0.99, requests=args.requests, seed=args.seed
        )
        for cell in capacity.grid(setup, base, loads, cv2s, policies, args.requests, args.seed + 1):
            cells.append(cell)
            bar.update()
    dominated = capacity.dominated_cells(cells)
    labels = [label(replace(setup, policy=name, bits=bits)) for name, bits in policies]
    rows = [("CV^2", "load", *labels)]
    for i in range(0, len(cells), len(policies)):
        part = cells[i : i + len(policies)]
        shown = (f"{missed_percent(cell.result)} / {cell.result.accuracy:.2f}" for cell in part)
        rows.append((f"{part[0].cv2:g}", f"{part[0].load:g}", *shown))
    text = (
        f"target {1e3 * setup.slo:g} ms; load 1 is {base:.1f} requests a second, where fixed {widest} bit has 99 % in "
        f"time (Poisson)\nmissed, % / mean accuracy of answers, %\n{table(rows, right=range(len(rows[0])))}\n"
    )
    text += (
        "\n".join(
            f"at load {cell.load:g}, CV^2 {cell.cv2:g}: fixed {other.policy[1]} bit is better in both"
            for cell, other in dominated
        )
        or "no fixed width is better than adaptive in both, in any cell"
    )
    record = {"base_rate": base, "cells": [cell.record() for cell in cells], "beaten": len(dominated)}
    return record, text


def grid_of(text: str) -> tuple[list[float], list[float]]:
    loads, at, cv2s = text.partition("@")
    try:
        found = [float(x) for x in loads.split(",")], [float(x) for x in (cv2s if at else "1").split(",")]
    except ValueError:
        found = [], []
    if not found[0] or not all(0 < x <= 1e6 for x in (*found[0], *found[1])):
        raise ServeError(f"--grid {text!r} is not LOADS@CV2S; write for example {GRID}")
    return found


def share_of(percent: float, option: str) -> float:
    if not 0 < percent <= 100:
        raise ServeError(f"{option} {percent:g} is not a percentage; give for example 99.9")
    return percent / 100


# --- Text ---------------------------------------------------------------------------------------------------------


def rows_of(results: Sequence[SimulationResult]) -> str:
    rows: list[Sequence[str]] = [HEAD]
    for result in results:
        record = result.record()
        bits = ", ".join(f"{name}: {100 * share:.1f} %" for name, share in reversed(result.histogram.items()))
        rows.append(
            (
                label(result.setup),
                f"{100 * result.attainment:.3f} %",
                f"{result.accuracy:.2f}",
                f"{result.effective:.2f}",
                f"{result.goodput:.1f}",
                f"{1e3 * result.percentile(50):.2f}",
                f"{1e3 * result.percentile(99):.2f}",
                f"{record['mean_batch']:.2f}",
                f"{100 * record['busy']:.0f} %",
                bits,
            )
        )
    text = table(rows, right=range(1, len(HEAD) - 1))
    if any(result.setup.autoscale or result.setup.failures for result in results):
        for result in results:
            counts = ", ".join(f"{servers} from {at:.0f} s" for at, servers in result.servers)
            text += f"\n{label(result.setup)}: servers {counts}; {result.record()['servers']:.2f} on average"
    return text


def label(setup: SimulationSetup) -> str:
    return setup.policy if setup.bits is None else f"{setup.bits} bit" if str(setup.bits).isdigit() else str(setup.bits)


def missed_percent(result: SimulationResult) -> str:
    """Percent; as many digits as the number of requests can tell."""
    return f"{100 * (1 - result.attainment):.3f}"


def table_record(
    times: Mapping[str, Mapping[int, float]],
    accuracies: Mapping[str, float | None],
    cascades: Mapping[str, GoesOn],
) -> dict[str, Any]:
    """What read_table reads."""
    record: dict[str, Any] = {
        "ms": {name: {str(n): round(1e3 * s, 5) for n, s in cells.items()} for name, cells in times.items()},
        "accuracy": dict(accuracies),
    }
    return record | ({"cascades": {name: asdict(way) for name, way in cascades.items()}} if cascades else {})


def draw(result: SimulationResult, path: str) -> None:
    from anyprec.loadtest.plots import draw as draw_rows

    title = f"{label(result.setup)}, simulated: {100 * result.attainment:.2f} % in time"
    draw_rows(result.timeline(), 1e3 * result.setup.slo, title, path)
