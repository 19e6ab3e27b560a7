"""Running a cascade: a batch in, each input's answer from the first stage that is sure of it out.

The inputs that are not sure go on together, and answers are merged in their order. `pays` times the stages once: where
fewer bits take no less time, only the last stage runs. Called by run/model.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from anyprec.cascade.cascade import Cascade, check_threshold, scores
from anyprec.errors import CascadeError

Outputs = Sequence[npt.NDArray[np.float32]]
Run = Callable[[Sequence[npt.NDArray[np.generic]], str], Outputs]  # (inputs, profile) -> outputs
PAYS = 0.95  # expected time over that of the last stage, at most
TIMED = 5  # calls of each stage, of which the fastest counts


def with_threshold(cascade: Cascade, threshold: object) -> Cascade:
    """The same with another threshold at every stage but the last."""
    value = check_threshold(threshold)
    stages = tuple(s if s.threshold is None else replace(s, threshold=value) for s in cascade.stages)
    return replace(cascade, stages=stages)


def answer(
    cascade: Cascade, inputs: Sequence[npt.NDArray[np.generic]], run: Run
) -> tuple[list[npt.NDArray[np.float32]], npt.NDArray[np.int64]]:
    """(outputs, the number of the stage that each input stopped at)."""
    merged: list[npt.NDArray[np.float32]] = []
    stopped = np.zeros(len(inputs[0]), np.int64)
    rows: npt.NDArray[np.int64] | None = None  # that go on; None: all, as for a batch of one, which is not copied
    for number, stage in enumerate(cascade.stages):
        made = run(inputs if rows is None else [x[rows] for x in inputs], stage.profile)
        if rows is None:
            merged = list(made)
            stopped[:] = number
        else:
            for whole, part in zip(merged, made, strict=True):
                whole[rows] = part
            stopped[rows] = number
        if stage.threshold is None:
            break
        sure = scores(class_scores(made[0]), stage.temperature, cascade.score)
        unsure = np.flatnonzero(~(sure >= stage.threshold))  # NaN goes on, too
        if not len(unsure):
            break
        if len(unsure) < len(sure):
            rows = unsure if rows is None else rows[unsure]
    return merged, stopped


def class_scores(y: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(N, C), of vectors that may be images of one pixel."""
    if y[0].size != y.shape[-1] or y.shape[-1] < 2:
        raise CascadeError(
            f"a cascade needs one score a class to see how sure an answer is; this model gives {y.shape[1:]} an input"
        )
    return y.reshape(len(y), -1)


def expected_share(cascade: Cascade, seconds: Sequence[float]) -> float:
    """The time of an input, expected by the shares of calibration, over that of the last stage alone."""
    return sum(s * stage.share for s, stage in zip(seconds, cascade.stages, strict=True)) / seconds[-1]


def pays(cascade: Cascade, inputs: Sequence[npt.NDArray[np.generic]], run: Run) -> tuple[bool, float]:
    """Whether the cascade saves time on this machine, for inputs like these; and expected_share."""
    best = [np.inf] * len(cascade.stages)
    for _ in range(1 + TIMED):  # the first calls prepare weights
        for number, stage in enumerate(cascade.stages):
            start = time.perf_counter()
            run(inputs, stage.profile)
            best[number] = min(best[number], time.perf_counter() - start)
    ratio = expected_share(cascade, best)
    return ratio <= PAYS, ratio
