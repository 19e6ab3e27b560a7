"""bits="random": a width drawn for every call, in Python and on the command line; which one, can be asked."""

import json
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from graph_builder import assert_same

from anyprec import errors
from anyprec.bench.random_networks import resnet20_graph
from anyprec.cli import main
from anyprec.format import GraphProfile, write
from anyprec.run.model import is_random, load

WIDTHS = tuple(range(1, 9))


@pytest.fixture
def model(net):
    model = load(net.path, layout="NHWC")
    model.random = random.Random(0)
    return model


def test_the_output_is_that_of_the_width_drawn(net, model):
    assert model.last_bits is None
    seen = set()
    for _ in range(40):
        y = model(net.x, bits="random")
        assert_same(y, net.wanted[str(model.last_bits)])
        seen.add(model.last_bits)
    assert seen == set(WIDTHS)  # never float, never the mixed profile
    assert model.bits == 32  # what other calls run at is left alone


def test_last_bits_of_any_call(net, model):
    model(net.x, 4)
    assert model.last_bits == 4
    model(net.x, "fast")
    assert model.last_bits == "fast"
    model(net.x)
    assert model.last_bits == 32
    model.steps(net.x, "random", repeat=1)
    assert model.last_bits in WIDTHS


def test_random_as_the_models_own_setting(net, model):
    model.bits = "random"
    assert model.bits == "random" == model.profile and "bits=random" in repr(model)
    drawn = []
    for _ in range(12):
        y = model(net.x)
        drawn.append(model.last_bits)
        assert_same(y, net.wanted[str(drawn[-1])])
    assert len(set(drawn)) > 2
    assert_same(model(net.x, 2), net.wanted["2"])
    model.profile = "random:2,4"
    assert model.bits == "random:2,4"
    model.bits = 3
    assert_same(model(net.x), net.wanted["3"])


def test_draws_are_uniform(model):
    """8,000 draws of 8 widths, fixed seed. Chi-square of 7 degrees of freedom is below 24.3 in 99.9 % of all cases."""
    counts = Counter(model._choose("random") for _ in range(8000))
    assert set(counts) == set(map(str, WIDTHS))
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 24.3
    # And independent of the draw before: 64 pairs, 63 degrees of freedom, 103.4.
    draws = [model._choose("random") for _ in range(16001)]
    pairs = Counter(pairwise(draws))
    assert sum((pairs[a, b] - 250) ** 2 / 250 for a in counts for b in counts) < 103.4


def test_a_seed_makes_the_widths_repeat(net):
    def drawn(seed):
        model = load(net.path)
        model.random = random.Random(seed)
        return [model._choose("random") for _ in range(20)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_the_system_draws_unless_told_otherwise(net):
    """A generator whose state can be worked out from past answers would be no defense."""
    assert isinstance(load(net.path).random, random.SystemRandom)


def test_among_some_widths(net, model):
    assert model.drawn_among("random:8,2") == (2, 8)
    assert {model._choose("random:8,2") for _ in range(50)} == {"2", "8"}
    assert {model._choose("random:2-4,32") for _ in range(100)} == {"2", "3", "4", "32"}  # float, where it is named
    assert model._choose("random:5") == "5"


def test_what_can_run_now(net):
    model = load(net.path, max_bits=2)
    assert model.drawn_among() == (1, 2)
    assert {model._choose("random") for _ in range(60)} == {"1", "2"}
    with pytest.raises(errors.UnsupportedBits, match="bits=4 is in the file but not loaded"):
        model(net.x, "random:2,4", layout="NHWC")


def test_what_the_file_says_of_it(net, model):
    noted = [model.accuracy(k) for k in (1, 2, 4)]
    assert model.accuracy("random:1,2,4") == pytest.approx(sum(noted) / 3)
    assert model.accuracy("random") is None  # of 3 bit nothing is noted
    assert model.bytes_needed("random") == model.bytes_needed(8)
    assert model.bytes_needed("random:1,2") == model.bytes_needed(2)
    model.bits = "random:2"
    assert model.accuracy() == noted[1]


def test_eight_threads_each_know_their_own(net):
    """Every output must be that of the width its own thread is told, whatever the others draw meanwhile."""
    model = load(net.path, layout="NHWC")
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        drawn = []
        for _ in range(60):
            y = model(net.x, bits="random")
            drawn.append(model.last_bits)
            assert_same(y, net.wanted[str(drawn[-1])])
        return drawn

    with ThreadPoolExecutor(8) as pool:
        counts = Counter(k for drawn in pool.map(work, range(8)) for k in drawn)
    assert set(counts) == set(WIDTHS) and sum(counts.values()) == 480
    assert model.last_bits is None  # this thread has not called


def test_mistakes(net, model, tmp_path):
    for call, message in (
        ("random:", "'' in widths '' is not a bit-width"),
        ("random:9", "bits=9 is not a bit-width"),
        ("random:2,2", "names a bit-width twice"),
        ("random:fast", "'fast' in widths 'fast' is not a bit-width"),
        ("randon", "bits='randon' is not in this model file"),
        ("Random", "bits='Random' is not in this model file"),
    ):
        with pytest.raises(errors.UnsupportedBits, match=message):
            model(net.x, call)
        with pytest.raises(errors.UnsupportedBits, match=message):
            model.bits = call
    assert model.bits == 32
    assert not is_random("randomly") and not is_random(4) and is_random("random:1")
    graph = resnet20_graph(multiplier=0.25, size=None, widths=(1, 2))
    fast = GraphProfile("fast", {n: 1 for n, w in graph.weights.items() if not w.is_float}, 1)
    tables = {name: table[:1] for name, table in graph.tables.items()}
    write(replace(graph, profiles=(fast,), tables=tables), tmp_path / "mixed.apm")
    with pytest.raises(errors.UnsupportedBits, match=r"draws among the widths 1\.\.8, and this .* has fast only"):
        load(tmp_path / "mixed.apm")(net.x, "random", layout="NHWC")


# --- The command line -----------------------------------------------------------------------------------------------


def test_run_draws_for_every_image(net, tmp_path, capsys):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    out = str(tmp_path / "y.npy")
    assert main(["run", str(net.path), str(tmp_path / "x.npy"), "--bits", "random", "--out", out, "--json"]) == 0
    images = json.loads(capsys.readouterr().out)["images"]
    drawn = [image["drawn"]["random"] for image in images]
    assert len(drawn) == 30 and len(set(drawn)) > 2 and set(drawn) <= set(WIDTHS)
    model, y = load(net.path), np.load(out)
    for i, bits in enumerate(drawn):
        assert_same(y[i], model(x[i], bits), f"image {i} at {bits}")
        assert images[i]["bits"]["random"][0]["class"] == int(np.argmax(y[i]))


def test_run_shows_what_was_drawn(net, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((3, 3, 8, 8), np.float32))
    assert main(["run", str(net.path), str(tmp_path / "x.npy"), "--bits", "random:2,4"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "x.npy[" in line]
    assert len(shown) == 3 and all("random:2,4: 2" in line or "random:2,4: 4" in line for line in shown)
    assert main(["run", str(net.path), str(tmp_path / "x.npy"), "--bits", "8,random", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["images"][0]
    assert set(first["bits"]) == {"8", "random"} and set(first["drawn"]) == {"random"}


@pytest.mark.parametrize(
    ("bits", "message"),
    [("random:9", "bits=9 is not a bit-width"), ("random:", "is not a bit-width"), ("randm", "bits='randm' is not in")],
)
def test_run_mistakes(net, tmp_path, one_line_error, bits, message):
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 8, 8), np.float32))
    assert message in one_line_error("run", net.path, tmp_path / "x.npy", "--bits", bits)
