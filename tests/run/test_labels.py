"""Scores into labels, probabilities and label maps, against values worked out by hand."""

import numpy as np
import pytest

from anyprec.run.labels import label_map, labeled, predictions, probabilities


def test_labels():
    y = np.array([1.0, 3.0, 3.0, -np.inf], np.float32)
    found = labeled(y, ("a", "b", "c"), 3, "NCHW")
    assert [one["label"] for one in found] == ["b", "c", "a"] and found[0]["score"] == 3.0
    assert found[0]["probability"] == pytest.approx(np.exp(3) / (2 * np.exp(3) + np.exp(1)), rel=1e-5)
    assert labeled(y, (), 4, "NCHW")[-1] == {"class": 3, "label": None, "score": None, "probability": 0.0}
    maps = np.zeros((2, 4, 4), np.float32)
    maps[1, :3] = 1.0
    assert labeled(maps, ("road", "sky"), 5, "NCHW") == [
        {"class": 1, "label": "sky", "share": 0.75},
        {"class": 0, "label": "road", "share": 0.25},
    ]


def test_a_softmax_is_not_taken_twice():
    np.testing.assert_allclose(probabilities(np.array([0.25, 0.75], np.float32)), [0.25, 0.75])
    np.testing.assert_allclose(probabilities(np.array([np.nan, np.nan], np.float32)), [0.5, 0.5])


def test_a_single_score_has_no_probability():
    assert labeled(np.array([2.5], np.float32), (), 3, "NCHW") == [
        {"class": 0, "label": None, "score": 2.5, "probability": None}
    ]


def test_predictions():
    first, second = predictions(np.array([np.log(3), 0.0, -np.inf], np.float32), ("a", "b", "c"), 2)
    assert first[:3] == ("a", pytest.approx(0.75), 0) and second[:3] == ("b", pytest.approx(0.25), 1)
    assert first.score == pytest.approx(np.log(3), rel=1e-6)
    last = predictions(np.array([0.0, -np.inf], np.float32), (), 2)[1]
    assert last.label is None and last.class_index == 1 and np.isnan(last.score)


def test_label_map():
    scores = np.zeros((2, 4, 3), np.float32)
    scores[0, :, 2] = scores[1, 0, 1] = 1.0
    found = label_map(scores, ("sky", "road", "car"))
    assert found.classes.dtype == np.uint8
    np.testing.assert_array_equal(found.classes, [[2, 2, 2, 2], [1, 0, 0, 0]])
    assert list(found.shares.items()) == [("car", 0.5), ("sky", 0.375), ("road", 0.125)]
    assert repr(found) == "LabelMap(2 x 4: car 50.0 %, sky 37.5 %, road 12.5 %)"
    assert list(label_map(scores, ()).shares) == [2, 0, 1]
