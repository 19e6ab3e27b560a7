"""The store of trainings that all experiments share: a Training (a Recipe) in, its folder of `anyprec train` out.

A folder is named by what its recipe says and a hash of all of it, so the same training is never done twice, and one
with another setting never mistaken for it. A training that was cut off goes on; one that is done is read.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from anyprec.analysis.compliance import ObservedRun
from anyprec.data import load_data
from anyprec.data.catalog import Data
from anyprec.files import locked, write_text
from anyprec.reproduce import synthetic
from anyprec.training.checkpoint import load_model, load_state
from anyprec.training.processes import Processes
from anyprec.training.recipe import Recipe
from anyprec.training.recipe_catalog import FOLDER
from anyprec.training.run import TrainingRun
from anyprec.widths import FLOAT

TELL_S = 1.0  # seconds between reports of how far a training is
SAVE_MINUTES = 1.0  # between checkpoints: what a run that is killed has to do again
# Fields that change how a training is watched, not what comes out of it
NOT_HASHED = ("save_minutes", "eval_every", "eval_batch_size", "init")

DEFAULTS = Recipe(net="", data="").to_dict()

Tell = Callable[[int, int], None]  # (steps done, steps in all)


@dataclass(frozen=True)
class Training:
    """One run of `anyprec train`. `after` is the training whose model it starts from; `observe`: every so many steps
    the gradients of the widths are compared (Appendix A.1), which changes nothing in what is trained.
    """

    recipe: Recipe
    after: Training | None = None
    observe: int = 0

    @cached_property
    def key(self) -> str:
        # Fields at their default are left out: a field that a later version adds makes no new training.
        record = {k: v for k, v in self.recipe.to_dict().items() if k not in NOT_HASHED and v != DEFAULTS.get(k)}
        if self.after is not None:
            record["init"] = self.after.key
        elif self.recipe.init:
            record["init"] = self.recipe.init
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """cifar10-resnet8-1.2.4.8.32-recursive+label-3fa9c1d2; a dedicated model has no loss mode."""
        recipe = self.recipe
        widths = ".".join(map(str, recipe.widths))
        loss = [recipe.loss] if len(recipe.widths) > 1 else []
        return "-".join([recipe.data, recipe.net, widths, *loss, self.key])

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Training) and other.key == self.key


def training(recipe: str, *settings: str, after: Training | None = None) -> Training:
    """The recipe of that name with settings as `anyprec train --set` takes them."""
    return Training(Recipe.load(FOLDER / f"{recipe}.toml").override(settings), after)


def seeded(training: Training, seed: int) -> Training:
    """The same training with another seed, from its start on. 0: the seed of its recipe."""
    if seed == 0:
        return training
    after = None if training.after is None else seeded(training.after, seed)
    return replace(training, recipe=replace(training.recipe, seed=training.recipe.seed + seed), after=after)


def made_up(dataset: str, folder: Path) -> Path | None:
    """The data set of synthetic.py in folder/dataset, made if it is not there."""
    with locked(folder, wait=True):
        place, ready = folder / dataset, folder / f".{dataset}-ready"
        if dataset in synthetic.MAKERS and not ready.exists():
            shutil.rmtree(place, ignore_errors=True)  # half of it, from a start that was cut off
            synthetic.make(dataset, place)
            ready.touch()
    return place if dataset in synthetic.MAKERS else None


class TrainingStore:
    """`synthetic`: a folder for made-up data, where nothing else is to be had (tiny scale)."""

    def __init__(
        self, root: Path, data_root: Path | None, device: str | None = None, synthetic: Path | None = None
    ) -> None:
        self.root, self.data_root, self.device, self.synthetic = root, data_root, device, synthetic
        self.seed = 0

    def at_seed(self, seed: int) -> TrainingStore:
        """The same store, read for another seed: asked for a training, it answers of that one `seeded`."""
        other = copy.copy(self)
        other.seed = seed
        return other

    def folder(self, training: Training) -> Path:
        return self.root / seeded(training, self.seed).name

    def done(self, training: Training) -> bool:
        return (self.folder(training) / "model.pt").exists()

    def model(self, training: Training) -> nn.Module:
        return load_model(self.folder(training) / "model.pt")

    def test(self, training: Training) -> dict[int, dict[str, float]]:
        """bits -> what was measured on the test set when the training ended: accuracy, loss, ..."""
        record = load_state(self.folder(training) / "model.pt")["extra"]["test"]
        return {int(bits): values for bits, values in record.items()}

    def data(self, training: Training, split: str, limit: int | None = None) -> Data:
        return load_data(training.recipe.data, split, self.data_folder(training.recipe.data), limit=limit)

    def data_folder(self, dataset: str) -> Path | None:
        """Where a data set lies: DIR/cifar10 if there is such a folder, else DIR itself."""
        if self.synthetic is not None:
            return made_up(dataset, self.synthetic)
        if self.data_root is not None and (self.data_root / dataset).is_dir():
            return self.data_root / dataset
        return self.data_root

    def seconds(self, training: Training) -> float:
        """Spent on it so far, over all its starts."""
        try:
            return float(json.loads((self.folder(training) / "time.json").read_text())["seconds"])
        except (OSError, ValueError, KeyError):
            return 0.0

    def log(self, training: Training) -> list[dict[str, Any]]:
        try:
            lines = (self.folder(training) / "log.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines]

    def train(self, training: Training, tell: Tell | None = None) -> None:
        """Train, or go on, unless it is done. Two processes that want the same training wait for each other."""
        assert self.seed == 0, "a store for another seed is for reading"
        folder = self.folder(training)
        with locked(folder, wait=True):
            if self.done(training):
                return
            recipe = replace(training.recipe, save_minutes=SAVE_MINUTES)
            if training.after is not None:
                recipe = replace(recipe, init=str(self.folder(training.after).resolve() / "model.pt"))
            root = self.data_folder(recipe.data)
            processes = Processes(self.device)
            try:
                kind = ObservedRun if training.observe else TrainingRun
                run = kind(recipe, folder, processes, root, False, True, None, False)
                if isinstance(run, ObservedRun):
                    run.begin(training.observe)
                with watched(run, folder, self.seconds(training), tell):
                    run.go()
            finally:
                processes.close()


@contextmanager
def watched(run: TrainingRun, folder: Path, before: float, tell: Tell | None) -> Iterator[None]:
    """Once a second: tell how far the run is, and note the time it has taken."""
    started, stop = time.monotonic(), threading.Event()

    def note() -> None:
        seconds = before + time.monotonic() - started
        write_text(folder / "time.json", json.dumps({"seconds": round(seconds, 1)}) + "\n")

    def look() -> None:
        noted = 0
        while not stop.wait(TELL_S):
            if tell is not None:
                tell(run.epoch * run.steps + run.step, run.recipe.epochs * run.steps)
            noted += 1
            if noted % 10 == 0:
                note()

    thread = threading.Thread(target=look, name="anyprec-watch", daemon=True)
    thread.start()
    try:
        yield
        note()
    finally:
        stop.set()
        thread.join()


def width_name(bits: int) -> str:
    return "float" if bits == FLOAT else str(bits)
