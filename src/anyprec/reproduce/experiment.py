"""What an experiment is, and what it is given: Experiment, Context. The list of experiments is in catalog.py.

`trainings(scale)` names what must be trained; `run(context)` reads the trained models, measures, and returns tables,
claims and pictures. It may be killed and run again at any moment: only its Result, written last, means that it is done.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyprec.data import batches
from anyprec.data.catalog import Data
from anyprec.nn.calibrate import calibrate
from anyprec.nn.switching import widths_of
from anyprec.report.record import PAPER, Claim, Picture, Result, Row, Table
from anyprec.reproduce.scales import CALIBRATION, IMAGES, PaperNetwork, default_net
from anyprec.reproduce.store import Training, TrainingStore, seeded, width_name
from anyprec.training.evaluate import evaluate, to_tensor
from anyprec.training.run import eval_augment
from anyprec.widths import DEFAULT_WIDTHS

BITS = tuple(width_name(bits) for bits in DEFAULT_WIDTHS)  # the usual columns
VERSION = 1  # of what experiments compute; raised when a stored result is no longer what they would give


@dataclass(frozen=True)
class Experiment:
    name: str  # "table1"
    title: str  # "Table 1: any-precision against dedicated models"
    found: str  # what the paper found, in a sentence or two
    trainings: Callable[[str], list[Training]]
    run: Callable[[Context], Finding]
    seconds: Mapping[str, float] = field(default_factory=dict)  # scale -> rough time of `run`, for the ETA

    def key(self, scale: str, seeds: int = 1) -> str:
        """A hash of what its result rests on: a result with another key is made anew."""
        keys = {seeded(t, seed).key for t in self.trainings(scale) for seed in range(seeds)}
        record = [VERSION, scale, sorted(keys)]
        return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Finding:
    """What `run` returns: the part of a Result that is the experiment's own."""

    tables: Sequence[Table] = ()
    claims: Sequence[Claim] = ()
    pictures: Sequence[Picture] = ()
    scaled: Sequence[str] = ()
    notes: Sequence[str] = ()

    def result(self, experiment: Experiment, scale: str, seeds: int = 1) -> Result:
        return Result(
            experiment.name, experiment.title, scale, experiment.found, tuple(self.tables), tuple(self.claims),
            tuple(self.pictures), tuple(self.scaled), tuple(self.notes), key=experiment.key(scale, seeds),
        )  # fmt: skip


@dataclass(frozen=True)
class Context:
    scale: str
    store: TrainingStore
    folder: Path  # of this experiment: pictures go here
    tell: Callable[[float, str], None] = lambda share, what: None  # share of the work done, and what is done now
    device: str = "cpu"

    @property
    def net(self) -> PaperNetwork:
        """The network of the ablations."""
        return default_net(self.scale)

    @property
    def images(self) -> int | None:
        """How many test images serve where each costs many passes; None is all."""
        return IMAGES[self.scale] or None

    def accuracy(self, training: Training, metric: str = "accuracy") -> dict[int, float]:
        return {bits: values[metric] for bits, values in self.store.test(training).items()}

    def model(self, training: Training) -> nn.Module:
        return self.store.model(training).to(self.device).eval()

    def test_data(self, training: Training, limit: int | None = None) -> Data:
        data = self.store.data(training, "test")
        return data if limit is None or limit >= len(data) else self.store.data(training, "test", limit)

    def calibration(self, training: Training) -> list[Tensor]:
        """Unlabeled training batches (n, C, H, W), augmented as in training."""
        count, size = CALIBRATION[self.scale]
        recipe = training.recipe
        data = self.store.data(training, "train", recipe.limit or None)
        source = batches(data, min(size, len(data)), augment=recipe.augment, train=True, seed=recipe.seed)
        return [to_tensor(images, self.device) for _, (images, _) in zip(range(count), source, strict=False)]

    def calibrated(self, training: Training, widths: Iterable[int]) -> nn.Module:
        """The trained model, made ready for `widths` it was not trained for."""
        model = self.model(training)
        missing = [bits for bits in widths if bits not in widths_of(model)]
        if missing:
            calibrate(model, self.calibration(training), missing)
        return model

    def evaluate(
        self, model: nn.Module, training: Training, widths: Sequence[int], limit: int | None = None
    ) -> dict[int, dict[str, float]]:
        """bits -> what `evaluate` measures on the test set of the training's data."""
        recipe = training.recipe
        with torch.no_grad():
            found = evaluate(
                model, self.test_data(training, limit), list(widths), augment=eval_augment(recipe.augment),
                batch_size=recipe.eval_batch_size, device=self.device,
            )  # fmt: skip
        return {int(bits): values for bits, values in found.items()}

    def at(self, folder: Path) -> Context:
        return replace(self, folder=folder)


# --- Several seeds ---------------------------------------------------------------------------------------------------


def over_seeds(found: Sequence[Finding]) -> Finding:
    """What one experiment found with each seed, as one: means and deviations; a claim holds if it does every time."""
    if len(found) == 1:
        return found[0]
    first = found[0]
    tables = [mean_table([f.tables[i] for f in found]) for i in range(len(first.tables))]
    claims = [joint_claim([f.claims[i] for f in found]) for i in range(len(first.claims))]
    drawn = f"With the first of {len(found)} seeds."
    pictures = [replace(picture, caption=f"{picture.caption} {drawn}".strip()) for picture in first.pictures]
    notes = list(dict.fromkeys(note for f in found for note in f.notes))
    return Finding(tables, claims, pictures, first.scaled, notes)


def mean_table(tables: Sequence[Table]) -> Table:
    """Our rows as the mean over the seeds, each with its deviation (of a sample: n - 1) under it."""
    rows: list[Row] = []
    for same in zip(*(table.rows for table in tables), strict=True):
        row = same[0]
        assert all(other.labels == row.labels and other.of == row.of for other in same), "seeds gave other rows"
        if row.of == PAPER or not row.values:
            rows.append(row)
            continue
        columns = list(zip(*(other.values for other in same), strict=True))
        known = [[v for v in column if v is not None] for column in columns]
        whole = [values if len(values) == len(same) else [] for values in known]
        rows.append(replace(row, values=tuple(statistics.mean(v) if v else None for v in whole)))
        spread = tuple(statistics.stdev(v) if v else None for v in whole)
        rows.append(replace(row, labels=(*row.labels[:-1], f"{row.labels[-1]}, deviation".lstrip(", ")), values=spread))
    note = f"Means over {len(tables)} seeds, and the deviation of a run."
    return replace(tables[0], rows=tuple(rows), note=f"{tables[0].note} {note}".strip())


def joint_claim(claims: Sequence[Claim]) -> Claim:
    assert len({claim.sentence for claim in claims}) == 1, "seeds gave other claims"
    tested = [claim.holds for claim in claims]
    holds = None if None in tested else all(tested)
    each = " ".join(f"Seed {i} ({claim.verdict}): {claim.numbers}" for i, claim in enumerate(claims))
    return Claim(claims[0].sentence, holds, f"With {tested.count(True)} of {len(tested)} seeds. {each}")


# --- Words and numbers ------------------------------------------------------------------------------------------------


def values_of(found: Mapping[int, float], widths: Sequence[int] = DEFAULT_WIDTHS) -> tuple[float | None, ...]:
    return tuple(found.get(bits) for bits in widths)


def paper_row(labels: Sequence[str], values: Sequence[float | None]) -> Row:
    return Row(tuple(labels), tuple(values), PAPER)


def per_width(found: Mapping[int, float], digits: int = 2, sign: bool = False) -> str:
    """{1: 48.2, 32: 57.1} -> '1 bit 48.20, float 57.10'."""
    form = f"{'+' if sign else ''}.{digits}f"
    return ", ".join(f"{width_name(b)}{'' if b == 32 else ' bit'} {v:{form}}" for b, v in sorted(found.items()))


def gaps(ours: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
    """Points that `ours` is above `others`, where both are there."""
    return {bits: ours[bits] - others[bits] for bits in sorted(ours) if bits in others}


def chance(data: Any) -> float:
    """Percent right of a constant answer."""
    return float(100.0 / data.num_classes)


def groups(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
