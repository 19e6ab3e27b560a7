"""Dry runs: every network of the experiments is built, trained for a step and tested on noise in the official layout.

`dry_run(experiments, scale)` goes through readers, augmentation, network, joint step, optimizer, checkpoint and
evaluation of the real run, at a batch of a few images, and measures what the whole would cost.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anyprec.reproduce import synthetic
from anyprec.reproduce.catalog import trainings_of
from anyprec.reproduce.cost import FACTS, StepTimes, estimate, group, make, measure, memory, steps
from anyprec.reproduce.experiment import Experiment
from anyprec.reproduce.store import Training
from anyprec.training.processes import Processes
from anyprec.training.run import TrainingRun

BATCH = 2  # of the step that goes through everything
SMALL, LARGE = (BATCH, 2 * BATCH), (8, 16)  # batches that are measured; the large ones where a step is quick
QUICK_S = 0.5


@dataclass(frozen=True)
class DryRunRow:
    """One network of the plan, tried out."""

    net: str
    data: str
    trainings: int
    parameters: int
    batch: int  # of the recipe
    measured: tuple[int, int]  # batches
    step_s: float  # a joint step at the recipe's batch, extrapolated from the measured ones
    steps: int  # of all its trainings
    hours: float  # of all its trainings on this machine, one at a time
    memory_mb: float  # of a step at the recipe's batch


def dry_run(
    experiments: Sequence[Experiment], scale: str, tell: Callable[[str], None] = lambda line: None, seeds: int = 1
) -> dict[str, Any]:
    """{"networks": [DryRunRow...], "experiments": {name: hours}, "hours": all, shared trainings counted once}."""
    trainings = trainings_of(experiments, scale, seeds)
    groups: dict[str, list[Training]] = {}
    for training in trainings:
        groups.setdefault(group(training), []).append(training)
    rates: dict[str, StepTimes] = {}
    rows: list[DryRunRow] = []
    with tempfile.TemporaryDirectory() as folder:
        for key, members in groups.items():
            widest = max(members, key=lambda t: len(t.recipe.widths))
            tell(f"{widest.recipe.net} on {widest.recipe.data}: one step, one evaluation")
            data = Path(folder) / widest.recipe.data
            root = data if data.exists() else synthetic.make(widest.recipe.data, data)
            train_one_step(widest, Path(folder) / "runs" / widest.key, root)
            rates[key] = careful_rate(widest)
            rows.append(row_of(members, widest, rates))
            tell(f"  {rows[-1].parameters:,} parameters, {rows[-1].step_s:.1f} s a step of {rows[-1].batch} images")
    # One training at a time; an experiment's hours count all it needs, shared or not.
    hours = {t: estimate(t, rates) / 3600 for t in trainings}
    each = {
        e.name: sum(hours[t] for t in trainings_of([e], scale, seeds)) + seeds * e.seconds.get(scale, 0) / 3600
        for e in experiments
    }
    total = sum(hours.values()) + seeds * sum(e.seconds.get(scale, 0) for e in experiments) / 3600
    return {
        "scale": scale,
        "seeds": seeds,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "networks": [asdict(row) for row in rows],
        "experiments": each,
        "trainings": len(trainings),
        "hours": total,
    }


def train_one_step(training: Training, out: Path, root: Path | None) -> None:
    """The run of the recipe as it stands, but for batch, number of images and epochs."""
    facts = FACTS[training.recipe.data]
    recipe = replace(
        training.recipe, batch_size=BATCH, limit=BATCH, epochs=1, eval_batch_size=BATCH, init="", warmup_epochs=0.0,
        milestones=(), net_options={"num_classes": facts.classes, **training.recipe.net_options},
    )  # fmt: skip
    processes = Processes(None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*extra_32x32.*")
            run = TrainingRun(recipe, out, processes, root, False, False, None, False)
        run.test_data = run.test_data.take(np.arange(min(BATCH, len(run.test_data))))
        run.go()
    finally:
        processes.close()


def careful_rate(training: Training) -> StepTimes:
    """Measured on larger batches where that is quick."""
    rate = measure(training, SMALL, repeat=1)
    if rate.step(SMALL[1], rate.widths) < QUICK_S:
        rate = measure(training, LARGE)
    return rate


def row_of(members: Sequence[Training], widest: Training, rates: dict[str, StepTimes]) -> DryRunRow:
    recipe, rate = widest.recipe, rates[group(widest)]
    fixed, each = memory(recipe, BATCH)
    return DryRunRow(
        net=recipe.net,
        data=recipe.data,
        trainings=len(members),
        parameters=sum(p.numel() for p in make(recipe).parameters()),
        batch=recipe.batch_size,
        measured=rate.batches,
        step_s=rate.step(recipe.batch_size, rate.widths),
        steps=sum(steps(t.recipe) for t in members),
        hours=sum(estimate(t, rates) for t in members) / 3600,
        memory_mb=(fixed + each * recipe.batch_size) / 1e6,
    )


def dry_text(found: dict[str, Any]) -> str:
    head = ["network", "data", "trainings", "parameters", "batch", "measured at", "s/step", "steps", "hours", "memory"]
    lines = [
        [
            d["net"], d["data"], str(d["trainings"]), f"{d['parameters']:,}", str(d["batch"]),
            "batch {} and {}".format(*d["measured"]), f"{d['step_s']:.2f}", f"{d['steps']:,}", f"{d['hours']:,.1f}",
            f"{d['memory_mb']:,.0f} MB",
        ]
        for d in found["networks"]
    ]  # fmt: skip
    columns = [max(len(row[i]) for row in [head, *lines]) for i in range(len(head))]
    text = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, columns, strict=True)) for row in [head, *lines]]
    text += [
        "",
        "hours of each experiment, if run by itself: "
        + ", ".join(f"{n} {h:,.1f}" for n, h in found["experiments"].items()),
    ]
    text.append(
        f"all together {found['hours']:,.1f} hours on this {found['device']} with {found['threads']} thread(s), one "
        f"training "
        "at a time, shared trainings counted once; a step is extrapolated along a line through the two batches measured"
    )
    return "\n".join(text)
