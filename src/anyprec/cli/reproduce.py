"""`anyprec reproduce NAME|list|all --scale SCALE --out DIR`: the paper's experiments. The work is pool.py's."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyprec.arguments import whole
from anyprec.choices import EXPERIMENT_SCALES
from anyprec.cli.output import print_json
from anyprec.errors import AnyprecError, DataError
from anyprec.files import locked

if TYPE_CHECKING:
    from anyprec.reproduce.experiment import Experiment
    from anyprec.reproduce.pool import Task
    from anyprec.reproduce.store import Training, TrainingStore

EXAMPLE = "anyprec reproduce table1 --scale small --data DIR --out runs/small"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="experiments such as table1; list; or all")
    parser.add_argument(
        "--scale",
        choices=EXPERIMENT_SCALES,
        default="small",
        help="paper, medium (CIFAR-10 in full, days of 2 CPU cores), small (2 hours) or tiny (default: small)",
    )
    parser.add_argument("--out", metavar="DIR", help="folder for trainings, results and the report")
    parser.add_argument(
        "--data", metavar="DIR", help="folder that holds the data sets, together or each in a folder of its name"
    )
    parser.add_argument(
        "--jobs",
        type=whole(0, 1024),
        default=0,
        metavar="N",
        help="trainings in parallel, one thread each (default: one per core, at most 8; 1 on a GPU)",
    )
    parser.add_argument(
        "--seeds",
        type=whole(1, 100),
        metavar="N",
        help="train everything N times, and give means and deviations (default: 2 at scale medium, else 1)",
    )
    parser.add_argument(
        "--only",
        metavar="TEXT,...",
        help="only trainings whose name holds one of these texts, such as vgg-speed; the rest stays for later",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--again", action="store_true", help="run these experiments again; finished trainings are kept")
    parser.add_argument("--dry-run", action="store_true", help="try one step of everything and estimate the cost")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from anyprec.reproduce.catalog import find, is_done, trainings_of
    from anyprec.reproduce.scales import SEEDS
    from anyprec.training.processes import usable_device

    if "list" in args.names:
        return show_list(args)
    experiments = find(args.names)
    args.seeds = args.seeds or SEEDS[args.scale]
    if args.dry_run:
        return show_cost(experiments, args)
    if not args.out:
        raise AnyprecError("reproduce needs a folder for what it makes: --out DIR, for example --out runs/small")
    if args.device:
        usable_device(args.device)
    out, store = Path(args.out), store_of(args)
    check_folder(out, args.scale)
    todo = [e for e in experiments if args.again or not is_done(e, args.scale, out, args.seeds)]
    check_data(trainings_of(todo, args.scale), store)
    with locked(args.out):
        return reproduce(experiments, todo, store, args)


def show_list(args: argparse.Namespace) -> int:
    from anyprec.reproduce.catalog import EXPERIMENTS, trainings_of
    from anyprec.reproduce.scales import SEEDS

    if args.json:
        found = {name: {"title": e.title, "found": e.found} for name, e in EXPERIMENTS.items()}
        print_json({"experiments": found})
        return 0
    for name, experiment in EXPERIMENTS.items():
        count = len(trainings_of([experiment], args.scale, args.seeds or SEEDS[args.scale]))
        print(f"{name:<11} {experiment.title} ({count} training{'s' * (count != 1)} at scale {args.scale})")
    return 0


def show_cost(experiments: list[Experiment], args: argparse.Namespace) -> int:
    from anyprec.reproduce.dry import dry_run, dry_text

    quiet = args.json
    tell = lambda line: None if quiet else print(line, file=sys.stderr, flush=True)  # noqa: E731
    found = dry_run(experiments, args.scale, tell, args.seeds)
    if args.json:
        print_json(found)
    else:
        print(dry_text(found))
    return 0


def store_of(args: argparse.Namespace) -> TrainingStore:
    import torch

    from anyprec.reproduce.job import made_up_folder
    from anyprec.reproduce.store import TrainingStore

    out, data = Path(args.out), Path(args.data).expanduser().resolve() if args.data else None
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return TrainingStore(out / "trainings", data, device, made_up_folder(args.scale, out))


def reproduce(
    experiments: list[Experiment], todo: list[Experiment], store: TrainingStore, args: argparse.Namespace
) -> int:
    from anyprec.report.page import write_report
    from anyprec.reproduce.catalog import note_run
    from anyprec.reproduce.pool import DONE, run_jobs

    started = time.monotonic()
    out = Path(args.out)
    tasks = tasks_of(todo, args.scale, out, store, args.seeds)
    if args.only and tasks:
        tasks = chosen(tasks, args.only)
    workers = args.jobs or (min(os.cpu_count() or 1, 8) if store.device == "cpu" else 1)
    note_run(out, args.scale, seeds=args.seeds, command=command(args), workers=workers)
    failed: list[Task] = []
    if tasks:
        print(f"{len(tasks)} jobs, about {cost_text(tasks)}", file=sys.stderr)

        def ended(task: Task) -> None:
            if task.state == DONE and task.job["kind"] == "experiment":
                write_report(out)  # so that a run that is cut off has one, too

        failed = run_jobs(tasks, workers, ended, out / "log.txt")
    page = write_report(out)
    summary = summarize(experiments, args.scale, out, args.seeds)
    if args.json:
        print_json({"report": str(page), "seconds": time.monotonic() - started, "experiments": summary,
                    "failed": {t.name: t.error for t in failed}})  # fmt: skip
    else:
        print_summary(summary)
        for task in failed:
            print(f"failed: {task.name}: {task.error}", file=sys.stderr)
        print(f"report: {page}")
    return 1 if failed else 0


def command(args: argparse.Namespace) -> str:
    parts = ["anyprec", "reproduce", *args.names, "--scale", args.scale, "--out", args.out]
    return " ".join(
        [
            *parts, "--seeds", str(args.seeds), *(["--data", args.data] if args.data else []),
            *(["--jobs", str(args.jobs)] if args.jobs else []),
        ]
    )  # fmt: skip


def check_folder(out: Path, scale: str) -> None:
    """One folder, one scale: a report over two of them would compare what cannot be compared."""
    try:
        then = json.loads((out / "run.json").read_text())["scale"]
    except (OSError, ValueError, KeyError):
        return
    if then != scale:
        raise AnyprecError(f"{out} holds a run at scale {then}; give --scale {then}, or another --out")


def check_data(trainings: Sequence[Training], store: TrainingStore) -> None:
    """All data sets can be read, or one error names every one that cannot: now, not after hours of training."""
    from anyprec.data import load_data

    if store.synthetic is not None:  # scale tiny makes its own
        return
    missing = []
    for name in dict.fromkeys(training.recipe.data for training in trainings):
        folder = store.data_folder(name)
        try:
            for split in ("train", "test"):
                load_data(name, split, folder, limit=1)
        except DataError as error:
            looked = "no --data was given" if folder is None else f"looked in {folder}"
            missing.append(f"{name} ({looked}: {error})")
    if missing:
        raise DataError(
            f"these experiments need data that is not there: {'; '.join(missing)}. Put each data set into --data DIR, "
            "or into a folder of its own there, such as DIR/cifar10"
        )


def tasks_of(todo: list[Experiment], scale: str, out: Path, store: TrainingStore, seeds: int = 1) -> list[Task]:
    """What is still to do, in the order of the experiments; each after its trainings."""
    from anyprec.reproduce.catalog import trainings_of
    from anyprec.reproduce.cost import estimate, rates_of
    from anyprec.reproduce.job import training_record
    from anyprec.reproduce.pool import Task

    shared: dict[str, Any] = {
        "scale": scale,
        "seeds": seeds,
        "out": str(out),
        "data": str(store.data_root) if store.data_root else None,
        "device": store.device,
    }
    missing = [t for t in trainings_of(todo, scale, seeds) if not store.done(t)]
    rates = rates_of(missing, out / "rates.json") if missing else {}
    tasks: dict[str, Task] = {}
    for experiment in todo:
        needs = trainings_of([experiment], scale, seeds)
        for training in needs:
            if training in missing and training.name not in tasks:
                job = {"kind": "train", "training": training_record(training), **shared}
                before = (training.after.name,) if training.after is not None else ()
                tasks[training.name] = Task(training.name, job, estimate(training, rates), before)
        job = {"kind": "experiment", "name": experiment.name, **shared}
        names = tuple(t.name for t in needs)
        tasks[experiment.name] = Task(experiment.name, job, seeds * experiment.seconds.get(scale, 10.0), names)
    return list(tasks.values())


def chosen(tasks: list[Task], only: str) -> list[Task]:
    """The trainings whose names hold one of the texts, what those start from, and experiments that then have all they
    need."""
    texts = [text.strip() for text in only.split(",") if text.strip()]
    by_name = {task.name: task for task in tasks}
    trainings = [task for task in tasks if task.job["kind"] == "train"]
    keep = {task.name for task in trainings if any(text in task.name for text in texts)}
    if not keep:
        some = ", ".join(task.name for task in trainings[:3]) or "none"
        raise AnyprecError(
            f"--only {only}: no training that is left to do has such a name; {len(trainings)} are left: {some}, ..."
        )
    for task in reversed(trainings):  # a training comes after the one it starts from
        if task.name in keep:
            keep.update(name for name in task.needs if name in by_name)
    ready = [t.name for t in tasks if t.job["kind"] != "train" and all(n in keep or n not in by_name for n in t.needs)]
    left = len(tasks) - len(keep) - len(ready)
    print(f"--only {only}: {len(keep)} of {len(trainings)} trainings; {left} jobs stay for later", file=sys.stderr)
    return [task for task in tasks if task.name in keep or task.name in ready]


def cost_text(tasks: list[Task]) -> str:
    """'4.5 core-hours: vgg-speed-small on cifar10 4.2, measuring 0.3'; steps were timed before the start."""
    hours: dict[str, float] = {}
    for task in tasks:
        recipe = task.job["training"]["recipe"] if task.job["kind"] == "train" else None
        part = f"{recipe['net']} on {recipe['data']}" if recipe else "measuring"
        hours[part] = hours.get(part, 0.0) + task.seconds / 3600
    return f"{sum(hours.values()):.1f} core-hours: " + ", ".join(f"{part} {h:.1f}" for part, h in hours.items())


def summarize(experiments: list[Experiment], scale: str, out: Path, seeds: int = 1) -> dict[str, Any]:
    from anyprec.report.record import load
    from anyprec.reproduce.catalog import is_done

    summary = {}
    for experiment in experiments:
        if is_done(experiment, scale, out, seeds):
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
