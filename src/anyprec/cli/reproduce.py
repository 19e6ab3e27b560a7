"""`anyprec reproduce NAME|list|all --scale SCALE --out DIR`: the paper's experiments. The work is pool.py's."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from anyprec.arguments import whole
from anyprec.errors import AnyprecError
from anyprec.files import locked
from anyprec.report.page import write_report
from anyprec.report.record import load
from anyprec.reproduce.catalog import EXPERIMENTS, find, is_done, note_run, trainings_of
from anyprec.reproduce.cost import estimate, rates_of
from anyprec.reproduce.dry import dry_run, dry_text
from anyprec.reproduce.experiment import Experiment
from anyprec.reproduce.job import made_up_folder, training_record
from anyprec.reproduce.pool import DONE, Task, run_jobs
from anyprec.reproduce.scales import SCALES
from anyprec.reproduce.store import Store
from anyprec.training.processes import usable_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="experiments such as table1; list; or all")
    parser.add_argument(
        "--scale", choices=SCALES, default="small", help="paper, small (2 CPU cores) or tiny (default: small)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for trainings, results and the report")
    parser.add_argument(
        "--data", metavar="DIR", help="folder that holds the data sets, or a folder for each by its name"
    )
    parser.add_argument(
        "--jobs",
        type=whole(0, 1024),
        default=0,
        metavar="N",
        help="trainings at a time, a thread each (default: cores; 1 on a GPU)",
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument(
        "--again", action="store_true", help="run these experiments anew; trainings that are done are kept"
    )
    parser.add_argument("--dry-run", action="store_true", help="try out one step of everything, say what it would cost")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    if "list" in args.names:
        return show_list(args)
    experiments = find(args.names)
    if args.dry_run:
        quiet = args.json
        found = dry_run(
            experiments, args.scale, lambda line: None if quiet else print(line, file=sys.stderr, flush=True)
        )
        print(json.dumps(found) if args.json else dry_text(found))
        return 0
    if not args.out:
        raise AnyprecError("reproduce needs a folder for what it makes: --out DIR, for example --out runs/small")
    if args.device:
        usable_device(args.device)
    with locked(args.out):
        return reproduce(experiments, args)


def show_list(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps({name: {"title": e.title, "found": e.found} for name, e in EXPERIMENTS.items()}))
        return 0
    for name, experiment in EXPERIMENTS.items():
        count = len(trainings_of([experiment], args.scale))
        print(f"{name:<11} {experiment.title} ({count} training{'s' * (count != 1)} at scale {args.scale})")
    return 0


def reproduce(experiments: list[Experiment], args: argparse.Namespace) -> int:
    started = time.monotonic()
    out = Path(args.out)
    check_folder(out, args.scale)
    data = Path(args.data).expanduser().resolve() if args.data else None
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    store = Store(out / "trainings", data, device, made_up_folder(args.scale, out))
    tasks = tasks_of(experiments, args.scale, out, data, store, args.again)
    workers = args.jobs or (min(os.cpu_count() or 1, 8) if device == "cpu" else 1)
    note_run(out, args.scale, command=command(args), workers=workers)
    failed: list[Task] = []
    if tasks:
        print(f"{len(tasks)} jobs, about {sum(t.seconds for t in tasks) / 3600:.1f} core-hours", file=sys.stderr)

        def ended(task: Task) -> None:
            if task.state == DONE and task.job["kind"] == "experiment":
                write_report(out)  # so that a run that is cut off has one, too

        failed = run_jobs(tasks, workers, ended, out / "log.txt")
    page = write_report(out)
    summary = summarize(experiments, args.scale, out)
    if args.json:
        print(json.dumps({"report": str(page), "seconds": time.monotonic() - started, "experiments": summary,
                          "failed": {t.name: t.error for t in failed}}))  # fmt: skip
    else:
        print_summary(summary)
        for task in failed:
            print(f"failed: {task.name}: {task.error}", file=sys.stderr)
        print(f"report: {page}")
    return 1 if failed else 0


def command(args: argparse.Namespace) -> str:
    parts = ["anyprec", "reproduce", *args.names, "--scale", args.scale, "--out", args.out]
    return " ".join(
        [*parts, *(["--data", args.data] if args.data else []), *(["--jobs", str(args.jobs)] if args.jobs else [])]
    )


def check_folder(out: Path, scale: str) -> None:
    """One folder, one scale: a report over two of them would compare what cannot be compared."""
    try:
        then = json.loads((out / "run.json").read_text())["scale"]
    except (OSError, ValueError, KeyError):
        return
    if then != scale:
        raise AnyprecError(f"{out} holds a run at scale {then}; give --scale {then}, or another --out")


def tasks_of(
    experiments: list[Experiment],
    scale: str,
    out: Path,
    data: Path | None,
    store: Store,
    again: bool,
) -> list[Task]:
    """What is still to do, in the order of the experiments; each after its trainings."""
    shared: dict[str, Any] = {
        "scale": scale,
        "out": str(out),
        "data": str(data) if data else None,
        "device": store.device,
    }
    todo = [e for e in experiments if again or not is_done(e, scale, out)]
    missing = [t for t in trainings_of(todo, scale) if not store.done(t)]
    rates = rates_of(missing, out / "rates.json") if missing else {}
    tasks: dict[str, Task] = {}
    for experiment in todo:
        needs = trainings_of([experiment], scale)
        for training in needs:
            if training in missing and training.name not in tasks:
                job = {"kind": "train", "training": training_record(training), **shared}
                before = (training.after.name,) if training.after is not None else ()
                tasks[training.name] = Task(training.name, job, estimate(training, rates), before)
        job = {"kind": "experiment", "name": experiment.name, **shared}
        names = tuple(t.name for t in needs)
        tasks[experiment.name] = Task(experiment.name, job, experiment.seconds.get(scale, 10.0), names)
    return list(tasks.values())


def summarize(experiments: list[Experiment], scale: str, out: Path) -> dict[str, Any]:
    summary = {}
    for experiment in experiments:
        if is_done(experiment, scale, out):
            result = load(out / experiment.name)
            claims = [{"sentence": c.sentence, "holds": c.holds, "numbers": c.numbers} for c in result.claims]
            summary[experiment.name] = {"title": result.title, "claims": claims, "seconds": result.seconds}
    return summary


def print_summary(summary: dict[str, Any]) -> None:
    words = {True: "holds", False: "does not hold", None: "not tested"}
    for record in summary.values():
        print(record["title"])
        for claim in record["claims"]:
            print(f"  {words[claim['holds']]}: {claim['sentence']} {claim['numbers']}")
