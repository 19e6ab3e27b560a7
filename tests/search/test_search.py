"""The search itself: it finds plans that beat random ones, keeps to its limits, and chooses by what was asked."""

import itertools

import numpy as np
import pytest

from anyprec.errors import InputError
from anyprec.run.model import load
from anyprec.search import PlanLayers, SearchSettings, search
from anyprec.search.cost import layer_bytes
from anyprec.search.search import divergence, relative_error


@pytest.fixture(scope="module")
def result(vgg, vgg_path, images):
    with load(vgg_path) as model:
        settings = SearchSettings(cost="bytes", evaluations=60, random=6, rounds=1, seconds=0.05)
        return search(model, PlanLayers(vgg), images[:48], settings=settings)


@pytest.mark.thorough
def test_every_uniform_width_and_random_plan_is_beside_the_front(result):
    kinds = [point.kind for point in result.points]
    assert kinds.count("uniform") == 8
    assert 1 <= kinds.count("random") <= 6
    widest = next(p for p in result.points if p.plan == result.layers.uniform(8))
    assert widest.loss == 0 and widest.agreement == 100


def test_the_front_rises_and_falls(result):
    front = result.front("plan", "uniform")
    assert len(front) > 5
    for a, b in itertools.pairwise(front):
        assert a.bytes < b.bytes and a.loss > b.loss


def test_plans_beat_random_ones(result):
    plans = result.front("plan", "uniform")
    for point in (p for p in result.points if p.kind == "random"):
        assert min(p.loss for p in plans if p.bytes <= point.bytes) <= point.loss


def test_bytes_are_those_of_planes_tables_and_float_weights(result, vgg):
    costs = layer_bytes(result.layers)
    quantized = sum(int(np.prod(w.shape)) for w in vgg.weights.values() if not w.is_float)
    low, high = (costs.of(result.layers.uniform(bits), result.layers.widths) for bits in (1, 8))
    assert high - low == 7 * quantized / 8


def test_the_choice_keeps_to_its_limits(result):
    small = min(p.bytes for p in result.points)
    most = max(p.bytes for p in result.points)
    best = result.best(bytes=(small + most) // 2)
    assert best.bytes <= (small + most) // 2
    assert best.loss == min(p.loss for p in result.points if p.bytes <= (small + most) // 2 and p.kind != "random")
    cheap = result.best(agreement=90)
    assert cheap.agreement >= 90
    assert cheap.bytes == min(p.bytes for p in result.points if p.agreement >= 90 and p.kind != "random")
    with pytest.raises(InputError, match="no plan is within these limits; the fastest takes"):
        result.best(latency_ms=1e-9)
    with pytest.raises(InputError, match="an accuracy needs labels"):
        result.best(accuracy=50)
    with pytest.raises(InputError, match=r"no plan has an agreement of 100\.5"):
        result.best(agreement=100.5)


def test_the_record_names_layers_and_front(result):
    record = result.record()
    names = [layer.name for layer in result.layers.layers]
    assert list(record["layer_ms"]) == names
    assert all(list(point["plan"]) == names for point in record["points"])
    assert any(point["on_front"] and point["kind"] == "plan" for point in record["points"])


def test_losses():
    a = np.array([[2.0, 0.0], [0.0, 1.0]], np.float32)
    assert divergence(a, a + 3) == pytest.approx(0, abs=1e-12)
    p, q = np.exp([2, 0]) / np.exp([2, 0]).sum(), np.array([0.5, 0.5])
    assert divergence(a[:1], np.zeros((1, 2), np.float32)) == pytest.approx(float((p * np.log(p / q)).sum()))
    assert relative_error(a, 2 * a) == pytest.approx(1)
