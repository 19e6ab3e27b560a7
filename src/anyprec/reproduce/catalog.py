"""The list of experiments, and how one is brought to its end: run, its Result written, its place in the report."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anyprec.errors import AnyprecError, DataError
from anyprec.files import make_folder, write_text
from anyprec.report.record import RESULT, load, save
from anyprec.reproduce import authors, figures, gaps, robustness, table1, table2, table3, table4, table5, table6, uca
from anyprec.reproduce.experiment import Context, Experiment, over_seeds
from anyprec.reproduce.store import Training, TrainingStore, seeded
from anyprec.run.machine import collect

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (table1, table2, table3, gaps, table4, table5, authors, figures, table6, uca, robustness)
}


def find(names: Sequence[str]) -> list[Experiment]:
    """Experiments by name, in the order of the paper; "all" is all of them."""
    if "all" in names:
        return list(EXPERIMENTS.values())
    for name in names:
        if name not in EXPERIMENTS:
            near = difflib.get_close_matches(name, EXPERIMENTS, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise AnyprecError(f"there is no experiment {name!r}; {hint}There are {', '.join(EXPERIMENTS)}, and all")
    return [experiment for name, experiment in EXPERIMENTS.items() if name in names]


def trainings_of(experiments: Sequence[Experiment], scale: str, seeds: int = 1) -> list[Training]:
    """Every training once, those that others start from before them."""
    found: dict[Training, None] = {}

    def add(training: Training) -> None:
        if training.after is not None:
            add(training.after)
        found.setdefault(training)

    for experiment in experiments:
        for seed in range(seeds):
            for training in experiment.trainings(scale):
                add(seeded(training, seed))
    return list(found)


def is_done(experiment: Experiment, scale: str, out: Path, seeds: int = 1) -> bool:
    """Whether a result made with the same settings is there."""
    folder = out / experiment.name
    if not (folder / RESULT).exists():
        return False
    try:
        return load(folder).key == experiment.key(scale, seeds)
    except DataError:
        return False


def conclude(
    name: str, scale: str, out: Path, store: TrainingStore, tell: Callable[[float, str], None], seeds: int = 1
) -> None:
    """Run an experiment whose trainings are done, once for every seed, and write its result."""
    experiment = EXPERIMENTS[name]
    started = time.monotonic()
    folder = out / name
    make_folder(folder)
    (folder / RESULT).unlink(missing_ok=True)  # an old result beside new pictures would be neither
    found = []
    for seed in range(seeds if experiment.trainings(scale) else 1):
        torch.manual_seed(seed)
        place = folder if seed == 0 else make_folder(folder / f"seed{seed}")

        def share(done: float, what: str, seed: int = seed) -> None:
            tell((seed + done) / seeds, what if seeds == 1 else f"seed {seed}: {what}")

        found.append(experiment.run(Context(scale, store.at_seed(seed), place, share, store.device or "cpu")))
    result = over_seeds(found).result(experiment, scale, seeds)
    data = f" --data {store.data_root}" if store.data_root else ""
    trainings = [
        {"name": t.name, "seconds": store.seconds(t)} for t in trainings_of([experiment], scale, seeds)
    ]  # fmt: skip
    result = replace(
        result, trainings=tuple(trainings), seconds=time.monotonic() - started, machine=collect(),
        command=f"anyprec reproduce {name} --scale {scale} --seeds {seeds} --out {out}{data}",
    )  # fmt: skip
    save(result, folder)


def note_run(out: Path, scale: str, **fields: Any) -> None:
    """run.json: what the report says of the run as a whole."""
    titles = {name: experiment.title for name, experiment in EXPERIMENTS.items()}
    record = {"scale": scale, "experiments": titles, "machine": collect(), **fields}
    write_text(out / "run.json", json.dumps(record, indent=1) + "\n")
