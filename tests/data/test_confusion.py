"""The confusion matrix and what is read off it, against counting pixel by pixel."""

import numpy as np
import pytest

from anyprec.data import IGNORED, VOID
from anyprec.data.confusion import class_iou, confusion, mean_iou, pixel_accuracy


def test_matches_counting_pixel_by_pixel() -> None:
    rng = np.random.default_rng(0)
    labels, answers = rng.integers(-1, 6, (3, 7, 5)), rng.integers(0, 5, (3, 7, 5))
    labels[labels == -1] = IGNORED
    labels[labels == 5] = VOID
    expected = np.zeros((5, 5), int)
    for label, answer in zip(labels.ravel(), answers.ravel(), strict=True):
        if 0 <= label < 5:
            expected[label, answer] += 1
    assert np.array_equal(confusion(labels, answers, 5), expected)
    for k in range(5):
        union = ((labels == k) | (answers == k)) & (labels >= 0) & (labels < 5)
        right = ((labels == k) & (answers == k)).sum()
        assert class_iou(expected)[k] == pytest.approx(100 * right / union.sum())


def test_worked_example() -> None:
    matrix = confusion(np.array([3, 3, 3, 1]), np.array([3, 3, 1, 1]), 4)
    ious = class_iou(matrix)
    assert np.isnan(ious[[0, 2]]).all() and ious[3] == pytest.approx(200 / 3) and ious[1] == 50
    assert mean_iou(matrix) == pytest.approx((200 / 3 + 50) / 2) and pixel_accuracy(matrix) == 75


def test_bytes_do_not_overflow() -> None:
    labels = np.full(10, 20, np.uint8)
    assert confusion(labels, labels, 21)[20, 20] == 10


def test_nothing_labeled() -> None:
    matrix = confusion(np.full(3, IGNORED), np.zeros(3, int), 2)
    assert matrix.sum() == 0 and mean_iou(matrix) == 0 and pixel_accuracy(matrix) == 0
