"""How well answers fit masks: a confusion matrix that adds up over images, and what is read off it.

matrix[label, answer] counts pixels; IGNORED ones and VOID are left out. Called by train/evaluate and run/accuracy, so
that both count alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


def confusion(labels: npt.NDArray[np.integer], answers: npt.NDArray[np.integer], classes: int) -> Counts:
    """(classes, classes): how many pixels of each label got each answer. Labels outside 0..classes-1 do not count."""
    labels, answers = labels.ravel(), answers.ravel()
    counted = (labels >= 0) & (labels < classes)
    pairs = labels[counted].astype(np.int64) * classes + answers[counted]
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes).astype(np.int64)


def class_iou(matrix: Counts) -> npt.NDArray[np.float64]:
    """(classes,) percent: pixels rightly given a class, of all that have it or were given it; NaN where none is.

    Labels 3 x road, 1 x car, one road taken for car: road 2 / 3, car 1 / 2.
    """
    right = np.diag(matrix).astype(np.float64)
    union = matrix.sum(axis=0) + matrix.sum(axis=1) - right
    made: npt.NDArray[np.float64] = 100 * np.divide(right, union, out=np.full(len(matrix), np.nan), where=union > 0)
    return made


def mean_iou(matrix: Counts) -> float:
    """Percent: the mean over the classes that occur in labels or answers."""
    ious = class_iou(matrix)
    return float(np.nanmean(ious)) if not np.isnan(ious).all() else 0.0


def pixel_accuracy(matrix: Counts) -> float:
    """Percent of the labeled pixels that are right."""
    return float(100 * np.trace(matrix) / max(int(matrix.sum()), 1))
