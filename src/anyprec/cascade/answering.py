"""Running a cascade: a batch in, each input's answer from the first stage that is sure of it out.

The inputs that are not sure go on together, and answers are merged in their order. `time_ratio` times the stages: where
fewer bits take no less time (more than PAYS of the last stage's), only the last stage runs. Called by run/model.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from anyprec.cascade.cascade import Cascade, check_threshold, scores
from anyprec.errors import CascadeError

Outputs = Sequence[npt.NDArray[np.float32]]
PAYS = 0.95  # largest time_ratio at which the stages run
TIMED = 5  # calls of each stage, of which the fastest counts


class Passes(Protocol):
    """The runs over one batch: run/model.py has the engine's."""

    def run(self, profile: str) -> Outputs:
        """All inputs, by themselves."""

    def begin(self, profile: str) -> Outputs:
        """All inputs, before others go on."""

    def go_on(self, rows: npt.NDArray[np.int64], profile: str) -> Outputs:
        """The inputs of these numbers."""


def with_threshold(cascade: Cascade, threshold: object) -> Cascade:
    """The same with another threshold at every stage but the last."""
    value = check_threshold(threshold)
    stages = tuple(s if s.threshold is None else replace(s, threshold=value) for s in cascade.stages)
    return replace(cascade, stages=stages)


def answer(cascade: Cascade, count: int, passes: Passes) -> tuple[list[npt.NDArray[np.float32]], npt.NDArray[np.int64]]:
    """(outputs, the number of the stage that each input stopped at), for a batch of `count`."""
    stopped = np.zeros(count, np.int64)
    rows = np.arange(count)  # inputs that are still unsure
    made = passes.begin(cascade.stages[0].profile)
    merged = list(made)
    for number, stage in enumerate(cascade.stages):
        if number:
            made = passes.go_on(rows, stage.profile)
            for whole, part in zip(merged, made, strict=True):
                whole[rows] = part
            stopped[rows] = number
        if stage.threshold is None:
            break
        sure = scores(class_scores(made[0]), stage.temperature, cascade.score)
        rows = rows[~(sure >= stage.threshold)]  # NaN goes on, too
        if not len(rows):
            break
    return merged, stopped


def class_scores(y: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(N, C), of vectors that may be images of one pixel."""
    if y[0].size != y.shape[-1] or y.shape[-1] < 2:
        raise CascadeError(
            f"a cascade needs one score a class to see how sure an answer is; this model gives {y.shape[1:]} an input"
        )
    return y.reshape(len(y), -1)


def time_ratio(cascade: Cascade, passes: Passes) -> float:
    """The time of an input, expected by the shares of calibration, over that of the last stage alone; timed here."""
    last = cascade.stages[-1].profile
    every = np.arange(1)
    best = [np.inf] * (len(cascade.stages) + 1)  # of the stages, then of the last one alone
    for _ in range(1 + TIMED):  # the first calls prepare weights
        for number in range(len(best)):
            start = time.perf_counter()
            if number == len(cascade.stages):
                passes.run(last)
            elif number:
                passes.go_on(every, cascade.stages[number].profile)
            else:
                passes.begin(cascade.stages[0].profile)
            best[number] = min(best[number], time.perf_counter() - start)
    return sum(s * stage.share for s, stage in zip(best, cascade.stages, strict=False)) / best[-1]
