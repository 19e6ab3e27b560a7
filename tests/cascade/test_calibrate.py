"""Thresholds from outputs: the lowest that reaches the aim, the pair of least time."""

import numpy as np
import pytest

from anyprec.cascade.calibrate import Measured, best_cascade, curve, fit_temperature, thinned
from anyprec.cascade.cascade import scores
from anyprec.errors import CascadeError


def made_up(noise, seed=0, count=2000):
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 5, count)
    return labels, (3 * np.eye(5)[labels] + noise * draw.standard_normal((count, 5))).astype(np.float32)


@pytest.fixture
def found():
    labels, wide = made_up(0.8, 1)
    _, narrow = made_up(1.6, 1)
    return Measured({"1": narrow, "2": (wide + narrow) / 2, "8": wide}, {"1": 1.0, "2": 1.9, "8": 4.0}, "8", labels)


def test_the_aim_is_reached_at_the_lowest_threshold(found):
    cascade, point, points = best_cascade(found, agreement=97, stages=["1", "8"])
    assert point.agreement >= 97
    assert all(p.agreement < 97 for p in points if p.threshold < point.threshold)
    first, last = cascade.stages
    goes_on = scores(found.outputs["1"], first.temperature, "margin") < first.threshold
    answers = np.where(goes_on, found.outputs["8"].argmax(1), found.outputs["1"].argmax(1))
    assert 100 * (answers == found.outputs["8"].argmax(1)).mean() == pytest.approx(point.agreement)
    assert last.share == pytest.approx(goes_on.mean()) and point.ms == pytest.approx(1 + 4 * goes_on.mean())


def test_the_best_first_stage_takes_least_time(found):
    cascade, best, _ = best_cascade(found, agreement=95)
    assert cascade.last == "8"
    times = [best_cascade(found, agreement=95, stages=(first, "8"))[1].ms for first in ("1", "2")]
    assert best.ms == min(times) < max(times)


def test_accuracy_needs_labels_and_is_reached(found):
    wanted = 100 * float((found.outputs["8"].argmax(1) == found.labels).mean()) - 1
    assert best_cascade(found, accuracy=wanted)[1].accuracy >= wanted
    with pytest.raises(CascadeError, match="needs labels"):
        best_cascade(Measured(found.outputs, found.ms, "8"), accuracy=90)
    with pytest.raises(CascadeError, match="no cascade reaches an accuracy of 100 %; the best has"):
        best_cascade(found, accuracy=100)
    with pytest.raises(CascadeError, match="one of the two"):
        best_cascade(found)


@pytest.mark.parametrize("score", ["margin", "confidence"])
def test_the_curve_runs_from_the_first_stage_to_the_last(found, score):
    points = curve(found, "1", "8", score)[1]
    assert points[0].share == 0 and points[-1].share > 0.99 and points[-1].agreement == 100
    assert points[0].agreement == pytest.approx(found.reached(found.outputs["1"].argmax(1))[0])
    shown = thinned(points)
    assert 10 <= len(shown) <= 21 and [p.share for p in shown] == sorted(p.share for p in shown)


def test_temperature_makes_confidence_true():
    """Scores three times too large are divided by about three."""
    draw = np.random.default_rng(0)
    y = draw.standard_normal((4000, 5)) * 2
    p = np.exp(y) / np.exp(y).sum(1, keepdims=True)
    answers = np.array([draw.choice(5, p=row) for row in p])
    assert fit_temperature((3 * y).astype(np.float32), answers) == pytest.approx(3, rel=0.12)
