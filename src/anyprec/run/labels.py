"""Scores into answers: one image's output in, its most likely classes with label and probability out. No torch.

The one place that makes them, for `PackedModel.predict` (predict.py), `anyprec run` (cli/run.py) and the server's
/classify (serve/routes.py): all three give the same labels and probabilities for the same scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Prediction(NamedTuple):
    """One class that an image may be of. `score` is the network's own output, `class_index` its number."""

    label: str | None  # None where the file has no labels
    probability: float
    class_index: int
    score: float


@dataclass(frozen=True, eq=False)
class LabelMap:
    """What a segmentation says of an image."""

    classes: npt.NDArray[np.integer[Any]]  # (H, W), the class of each pixel
    labels: tuple[str, ...]  # of the classes, in order; empty where the file has none
    shares: Mapping[str | int, float]  # class -> share of the pixels, most first; those that occur

    def __repr__(self) -> str:
        height, width = self.classes.shape
        most = ", ".join(f"{name} {100 * share:.1f} %" for name, share in list(self.shares.items())[:5])
        return f"LabelMap({height} x {width}: {most}{', ...' if len(self.shares) > 5 else ''})"


def labeled(y: np.ndarray, labels: Sequence[str], top: int, layout: str) -> list[dict[str, Any]]:
    """Of one image's output: the `top` classes with score and probability, best first; of a map, with their share.

    The score is the network's own output. The probability is its softmax, unless the network has made it already; of
    a single score there is none.
    """
    if y.ndim == 1:
        likely = probabilities(y)
        order = np.argsort(-y, kind="stable")[:top]
        return [
            {
                "class": int(i),
                "label": name_of(labels, i),
                "score": number(y[i]),
                "probability": number(likely[i]) if len(y) > 1 else None,
            }
            for i in order
        ]
    axis = 0 if layout == "NCHW" else 2
    count = y.shape[axis]
    shares = np.bincount(np.argmax(y, axis=axis).ravel(), minlength=count) / (y.size // count)
    most = [int(i) for i in np.argsort(-shares, kind="stable")[:top] if shares[i] > 0]
    return [{"class": i, "label": name_of(labels, i), "share": round(float(shares[i]), 6)} for i in most]


def predictions(y: np.ndarray, labels: Sequence[str], top: int) -> list[Prediction]:
    """`labeled` of one score a class, for Python."""
    nan = float("nan")
    return [
        Prediction(one["label"], one["probability"], one["class"], nan if one["score"] is None else one["score"])
        for one in labeled(y, labels, top, "NHWC")
    ]


def label_map(y: np.ndarray, labels: Sequence[str]) -> LabelMap:
    """`labeled` of a map (H, W, classes), for Python, with the map itself."""
    shares = {
        one["class"] if one["label"] is None else one["label"]: one["share"]
        for one in labeled(y, labels, y.shape[2], "NHWC")
    }
    kind = np.uint8 if y.shape[2] <= 256 else np.int64
    return LabelMap(np.argmax(y, axis=2).astype(kind), tuple(labels), shares)


def name_of(labels: Sequence[str], i: int) -> str | None:
    return labels[i] if i < len(labels) else None


def probabilities(y: np.ndarray) -> np.ndarray:
    finite = np.nan_to_num(y.astype(np.float64), nan=-np.inf, posinf=1e30)
    if finite.min() >= 0 and abs(finite.sum() - 1) < 1e-3:
        return finite
    if not np.isfinite(finite).any():
        return np.full(len(y), 1 / len(y))
    powers = np.exp(finite - finite.max())
    return np.asarray(powers / powers.sum())


def number(value: float) -> float | None:
    """None for NaN and infinity, which JSON does not have. 7 digits are all that float32 holds."""
    return float(f"{value:.7g}") if np.isfinite(value) else None
