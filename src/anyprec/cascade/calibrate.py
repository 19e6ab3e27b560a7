"""Calibration of a cascade: outputs of every profile on some images in, stages and threshold of least mean time out.

For each first stage: a temperature (least cross-entropy), then the lowest threshold that reaches the wanted agreement
with the widest width, or the wanted accuracy. Called by cli/cascade.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anyprec.cascade.cascade import Cascade, Stage, scores
from anyprec.errors import CascadeError

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
TEMPERATURES = np.geomspace(0.25, 8.0, 41)
CURVE = 21  # points of a printed curve


@dataclass(frozen=True)
class CascadePoint:
    """One threshold: what it gives on the calibration images."""

    threshold: float
    share: float  # of inputs that go on, 0..1
    agreement: float  # percent, with the widest width
    accuracy: float | None
    ms: float  # mean time of an input, expected


@dataclass(frozen=True)
class Measured:
    """Outputs (N, C) and milliseconds an image of each profile; `widest` is what agreement is with."""

    outputs: Mapping[str, Array]
    ms: Mapping[str, float]
    widest: str
    labels: Labels | None = None

    def reached(self, answers: npt.NDArray[np.integer]) -> tuple[float, float | None]:
        """(agreement, accuracy) in percent."""
        agreement = 100 * float((answers == self.outputs[self.widest].argmax(1)).mean())
        return agreement, None if self.labels is None else 100 * float((answers == self.labels).mean())


def fit_temperature(y: Array, answers: npt.NDArray[np.integer]) -> float:
    """The one of least cross-entropy: what it calls 90 % sure is then right about 9 times in 10."""
    losses = []
    for heat in TEMPERATURES:
        z = y.astype(np.float64) / heat
        z -= z.max(axis=1, keepdims=True)
        losses.append(float((np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(z)), answers]).mean()))
    return float(TEMPERATURES[int(np.argmin(losses))])


def curve(found: Measured, first: str, last: str, score: str) -> tuple[float, list[CascadePoint]]:
    """The temperature of the first stage, and every threshold that changes something, lowest first."""
    y = found.outputs[first]
    truth = found.outputs[found.widest].argmax(1) if found.labels is None else found.labels
    heat = fit_temperature(y, truth)
    sure = np.nan_to_num(scores(y, heat, score))
    order = np.argsort(sure, kind="stable")
    thresholds = np.unique(np.concatenate([[0.0], sure, [1.0]]))
    goes_on = np.searchsorted(sure[order], thresholds, "left")  # so many, the least sure ones
    before, after = y.argmax(1)[order], found.outputs[last].argmax(1)[order]

    def percent(wanted: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """How often the cascade gives this answer, for every threshold."""
        first_right = np.concatenate([[0], np.cumsum(before == wanted[order])])
        last_right = np.concatenate([[0], np.cumsum(after == wanted[order])])
        made: npt.NDArray[np.float64] = 100 * (last_right[goes_on] + first_right[-1] - first_right[goes_on]) / len(y)
        return made

    agreement = percent(found.outputs[found.widest].argmax(1)).tolist()
    accuracy = [None] * len(thresholds) if found.labels is None else percent(found.labels).tolist()
    shares = (goes_on / len(y)).tolist()
    points = [
        CascadePoint(threshold, share, agrees, right, found.ms[first] + share * found.ms[last])
        for threshold, share, agrees, right in zip(thresholds.tolist(), shares, agreement, accuracy, strict=True)
    ]
    return heat, points


def best_cascade(
    found: Measured,
    *,
    agreement: float | None = None,
    accuracy: float | None = None,
    stages: Sequence[str] = (),
    score: str = "margin",
) -> tuple[Cascade, CascadePoint, list[CascadePoint]]:
    """The first stage and threshold of least expected time that reach what is wanted, and the curve of that pair.

    The last stage is the widest width, unless `stages` says otherwise. Choosing it by accuracy as well picks the
    profile that is lucky on these images: docs/results.md.
    """
    if (agreement is None) == (accuracy is None):
        raise CascadeError("give a wanted agreement with the widest width, or a wanted accuracy: one of the two")
    if accuracy is not None and found.labels is None:
        raise CascadeError("a wanted accuracy needs labels; give --dataset instead of images, or an agreement")
    pairs = [(name, found.widest) for name in found.outputs if name != found.widest]
    if stages:
        pairs = [(stages[0], stages[1])]
    best: tuple[Cascade, CascadePoint, list[CascadePoint]] | None = None
    most = 0.0
    for first, last in pairs:
        heat, points = curve(found, first, last, score)
        for point in points:
            value = point.agreement if accuracy is None else point.accuracy
            wanted = agreement if accuracy is None else accuracy
            assert value is not None and wanted is not None
            most = max(most, value)
            if value >= wanted - 1e-9 and (best is None or point.ms < best[1].ms):
                made = (Stage(first, point.threshold, heat, 1.0), Stage(last, None, 1.0, point.share))
                best = Cascade(score, made, point.agreement), point, points
    if best is None:
        what = "agreement" if accuracy is None else "accuracy"
        raise CascadeError(f"no cascade reaches an {what} of {wanted:g} %; the best has {most:.2f} %: ask for less")
    return best


def thinned(points: Sequence[CascadePoint]) -> list[CascadePoint]:
    """A curve to print: about CURVE points, evenly spread over the share that goes on."""
    shares = np.array([p.share for p in points])
    picks = [int(np.abs(shares - at).argmin()) for at in np.linspace(0, shares.max(), CURVE)]
    return [points[i] for i in dict.fromkeys(picks)]
