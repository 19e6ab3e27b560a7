"""bits="auto": every answer is that of the stage it stopped at; broken cascades and thresholds are refused."""

import copy
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from anyprec.cascade import answering
from anyprec.cascade.cascade import Cascade, scores
from anyprec.errors import AnyprecError, CascadeError, InputError
from anyprec.format import ModelFile, read, rewrite, write
from anyprec.run.model import load
from anyprec.run.oracle import run_graph


@pytest.fixture
def model(path):
    with load(path, layout="NHWC") as made:
        yield made


def test_answers_are_bit_exact_and_in_order(model, images, graph):
    y = model(images, bits="auto", threshold=0.6)
    stages = model.last_stages
    assert model.last_bits == "auto" and len(stages) == len(images)
    assert len(set(stages)) == 3, "all stages must be used, else this tests little"
    for bits in (1, 4, 8):
        rows = [i for i, stage in enumerate(stages) if stage == bits]
        assert np.array_equal(y[rows], model(images[rows], bits=bits))
    few = [stages.index(bits) for bits in (1, 4, 8)]
    for row in few:
        wanted = run_graph(graph, images[row : row + 1], str(stages[row]))["fc"][0, 0]
        assert np.array_equal(y[row : row + 1], wanted)


def test_stages_follow_from_the_scores(model, images, cascade):
    model(images, bits="auto", threshold=0.6)
    stages = np.array(model.last_stages)
    first = scores(model(images, bits=1), cascade.stages[0].temperature, "margin")
    assert np.array_equal(stages == 1, first >= 0.6)


def test_thresholds_at_the_ends(model, images):
    assert np.array_equal(model(images, bits="auto", threshold=0), model(images, bits=1))
    unsure = model(images, bits="auto", threshold=1)
    sure = [i for i, stage in enumerate(model.last_stages) if stage != 8]  # a margin of exactly 1
    rest = [i for i in range(len(images)) if i not in sure]
    assert len(rest) > 40
    assert np.array_equal(unsure[rest], model(images[rest], bits=8))


def test_batches_do_not_matter(model, images):
    whole = model(images, bits="auto", threshold=0.6)
    stages = model.last_stages
    assert np.array_equal(np.concatenate([model(x[None], bits="auto", threshold=0.6) for x in images]), whole)
    assert model(images[0], bits="auto", threshold=0.6).shape == (10,)
    assert model.last_stages == stages[:1]
    assert model(images[:0], bits="auto", threshold=0.6).shape == (0, 10)
    assert model.last_stages == ()


def test_layouts_agree(model, images):
    there = model(images.transpose(0, 3, 1, 2), bits="auto", layout="NCHW", threshold=0.6)
    assert np.array_equal(there, model(images, bits="auto", threshold=0.6))


def test_it_can_be_the_setting_of_a_model(model, images, path):
    model.bits = "auto"
    model.always_cascade = True
    assert model.bits == "auto"
    y = model(images)
    assert model.last_bits == "auto"
    for other in (copy.copy(model), pickle.loads(pickle.dumps(model))):
        other.always_cascade = True
        assert other.bits == "auto" and np.array_equal(other(images), y)
    assert model.accuracy() is None
    assert model.bytes_needed("auto") == model.bytes_needed(8)
    assert model.predict(images[0])[0].label in model.labels


def test_it_stays_at_one_width_where_bits_buy_no_time(model, images, monkeypatch):
    monkeypatch.setattr(answering, "PAYS", 0.0)
    with pytest.warns(UserWarning, match=r"fewer bits save no time here .* stays at 8") as told:
        y = model(images, bits="auto")
    assert len(told) == 1
    assert np.array_equal(y, model(images, bits=8)) and set(model.last_stages or ()) <= {8}
    y = model(images, bits="auto")  # told once
    assert set(model.last_stages) == {8}
    model(images, bits="auto", threshold=0.6)  # a threshold of one's own is obeyed
    assert len(set(model.last_stages)) > 1


def test_the_ratio_follows_times_and_shares(cascade, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(answering.time, "perf_counter", lambda: now[0])

    class Passes:
        def run(self, profile):
            now[0] += {"8": 10.0}[profile]

        def begin(self, profile):
            now[0] += {"1": 1.0}[profile]

        def go_on(self, rows, profile):
            assert rows.tolist() == [0]
            now[0] += {"4": 1.0, "8": 7.0}[profile]

    assert answering.time_ratio(cascade, Passes()) == pytest.approx((1 + 0.6 * 1 + 0.3 * 7) / 10)


def test_always_means_always(model, images):
    model._cascade_ratio, model.always_cascade = 1.2, True
    model(images, bits="auto")
    assert len(set(model.last_stages)) > 1


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan"), float("inf"), "0.5", True, None, [0.5]])
def test_thresholds_that_are_none(model, images, threshold):
    if threshold is None:
        with pytest.raises(InputError, match="goes with bits='auto'"):
            model(images, bits=8, threshold=0.5)
        return
    with pytest.raises(CascadeError, match="is not a probability") as caught:
        model(images, bits="auto", threshold=threshold)
    assert "\n" not in str(caught.value)


def test_a_file_without_one_says_what_to_do(graph, images, tmp_path):
    path = tmp_path / "plain.apm"
    write(graph, path)
    with load(path, layout="NHWC") as model:
        for use in (lambda: model(images, bits="auto"), lambda: setattr(model, "bits", "auto"), lambda: model.cascade):
            with pytest.raises(CascadeError, match="this file has none; `anyprec cascade"):
                use()


def test_the_text_survives(cascade, graph, path, tmp_path):
    assert Cascade.from_text(cascade.text(), ("1", "4", "8")) == cascade
    assert read(path).cascade == cascade.text()
    out = tmp_path / "narrow.apm"
    rewrite(path, out, 4)  # the last stage is gone: only its use is refused
    with load(out, layout="NHWC") as model:
        assert model.widths == (1, 2, 3, 4)
        with pytest.raises(CascadeError, match=r"names the profile '8', and there are 1, 2, 3, 4 now"):
            model.bits = "auto"
    with ModelFile(path) as file:
        assert file.cascade == cascade.text()


def change(record, **changes):
    return {**record, **changes}


def stage(record, number, **changes):
    stages = [dict(s) for s in record["stages"]]
    stages[number].update(changes)
    return {**record, "stages": stages}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: change(r, score="entropy"),
        lambda r: change(r, stages=[]),
        lambda r: change(r, stages=r["stages"][:1]),
        lambda r: change(r, stages=5 * r["stages"]),
        lambda r: change(r, stages={"1": 2}),
        lambda r: change(r, agreement=101),
        lambda r: change(r, accuracy="high"),
        lambda r: change(r, more=1),
        lambda r: {k: v for k, v in r.items() if k != "score"},
        lambda r: [r],
        lambda r: stage(r, 0, profile="9"),
        lambda r: stage(r, 0, profile=1),
        lambda r: stage(r, 0, profile="8"),
        lambda r: stage(r, 0, threshold=2),
        lambda r: stage(r, 0, threshold="0.5"),
        lambda r: stage(r, 0, threshold=True),
        lambda r: stage(r, 0, temperature=0),
        lambda r: stage(r, 0, temperature=1e30),
        lambda r: stage(r, 1, share=-1),
        lambda r: stage(r, 2, threshold=0.5),
        lambda r: stage(r, 0, code="import os"),
    ],
)
def test_hostile_cascades_are_refused_when_used(spoil, cascade, graph, images, tmp_path):
    text = json.dumps(spoil(json.loads(cascade.text())))
    path = tmp_path / "bad.apm"
    write(replace(graph, cascade=text), path)
    with load(path, layout="NHWC") as model:
        assert model(images[:1], bits=8).shape == (1, 10)  # all else works
        with pytest.raises(CascadeError) as caught:
            model(images[:1], bits="auto")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"score": NaN}', '{"a": 1, "a": 2}', "\x00"])
def test_text_that_is_no_json(text):
    with pytest.raises(AnyprecError):
        Cascade.from_text(text, ("1", "8"))


def test_scores():
    y = np.array([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [np.nan, 1.0, 0.0], [1e30, 0.0, 0.0]], np.float32)
    p = np.exp([2, 1, 0]) / np.exp([2, 1, 0]).sum()
    margin, confidence = scores(y, 1.0, "margin"), scores(y, 1.0, "confidence")
    assert margin[:2] == pytest.approx([p[0] - p[1], 0]) and confidence[:2] == pytest.approx([p[0], 1 / 3])
    assert np.isnan(margin[2]) and np.isnan(confidence[2])  # goes on
    assert margin[3] == 1
    assert scores(y[:1], 100.0, "confidence")[0] < confidence[0]  # hot: less sure
