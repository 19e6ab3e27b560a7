"""Tables of plans: bit for bit the same in engine and oracle, statistics as wanted, nothing changed at uniform bits."""

import numpy as np
import pytest

from anyprec.format import read, write
from anyprec.run.model import load
from anyprec.run.oracle import run_graph
from anyprec.search.layers import PlanLayers
from anyprec.search.store import add_profile
from anyprec.search.tables import Moments, match
from anyprec.search.trial import PlanTrial


@pytest.fixture(scope="module")
def trial(vgg, images):
    return PlanTrial(PlanLayers(vgg), images)


@pytest.fixture(scope="module")
def resnet_trial(resnet, images):
    return PlanTrial(PlanLayers(resnet), images[:, :16, :16].astype(np.float32) / 128 - 1)


def random_plans(trial, count, seed=0):
    draw = np.random.default_rng(seed)
    layers = trial.layers
    return [tuple(int(b) for b in draw.choice(layers.widths, len(layers.layers))) for _ in range(count)]


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["trial", "resnet_trial"])
def test_any_stored_plan_is_bit_exact_against_the_oracle(which, request, tmp_path):
    trial = request.getfixturevalue(which)
    x = trial.images[:2]
    for number, plan in enumerate(random_plans(trial, 3)):
        path = tmp_path / f"{number}.apm"
        write(add_profile(trial.layers, "mixed", plan, trial.rows(plan)), path)
        graph = read(path)
        wanted = run_graph(graph, x, "mixed")[graph.outputs[0]]
        with load(path, layout="NHWC") as model:
            assert np.array_equal(model(x, bits="mixed"), wanted.reshape(len(x), -1))


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["trial", "resnet_trial"])
def test_pieces_compute_what_the_stored_plan_does(which, request):
    trial = request.getfixturevalue(which)
    plans = [*random_plans(trial, 3, seed=1), trial.layers.uniform(2)]
    with trial.opened(plans) as model:
        for number, made in enumerate(trial.outputs(plans)):
            whole = np.concatenate([model(trial.images[i : i + 32], bits=f"p{number}") for i in range(0, 96, 32)])
            gap = np.abs(whole - made) / whole.std()
            assert np.median(gap) < 1e-5 and gap.max() < 0.5, (plans[number], gap.max())


def test_uniform_plans_have_the_rows_of_the_file(trial, vgg):
    for bits in (1, 4, 8):
        rows = trial.rows(trial.layers.uniform(bits))
        for name, table in vgg.tables.items():
            assert np.array_equal(rows[name], table[bits - 1]), (name, bits)


def test_matching_makes_up_for_other_widths_before(trial):
    """Without it, the values behind a layer of other bits have the wrong mean and deviation, and answers are lost."""
    plan = (1, *trial.layers.uniform(8)[1:])
    wanted = trial.outputs([trial.layers.uniform(8)])[0]
    matched = trial.outputs([plan])[0]
    plain = {name: trial.tables.first(name, plan) for name in trial.layers.graph.tables}
    before, trial._fitted[plan] = trial._fitted[plan], plain
    try:
        with trial.opened([plan]) as model:
            unmatched = np.concatenate([model(trial.images[i : i + 32], bits="p0") for i in range(0, 96, 32)])
    finally:
        trial._fitted[plan] = before
    error = [float(np.square(y - wanted).mean()) for y in (matched, unmatched)]
    assert error[0] < 0.5 * error[1], error


def test_match_gives_the_wanted_moments():
    draw = np.random.default_rng(0)
    sums = draw.normal(3, 5, (1000, 4)).astype(np.float32)
    sums[:, 2] = 7  # a channel that never changes
    row = np.array([[0.5, -0.25, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]], np.float32)
    y = sums * row[0] + row[1]
    wanted = Moments(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 0.5]))
    made, change = match(row, Moments.of(y), wanted)
    found = Moments.of(sums * made[0] + made[1])
    alive = [0, 1, 3]
    assert np.allclose(found.mean[alive], wanted.mean[alive], atol=1e-4)
    assert np.allclose(found.std[alive], wanted.std[alive], rtol=1e-4)
    assert np.array_equal(made[:, 2], row[:, 2])
    assert np.sign(made[0, 1]) == -1  # a negative gamma stays negative
    assert np.allclose(y * change[0] + change[1], sums * made[0] + made[1], atol=1e-4)


def test_a_stored_plan_repeats_no_weights(trial, vgg_path, tmp_path):
    plan = random_plans(trial, 1)[0]
    path = tmp_path / "plan.apm"
    write(add_profile(trial.layers, "mixed", plan, trial.rows(plan)), path)
    tables = sum(4 * table[0].size for table in trial.layers.file_graph.tables.values())
    assert path.stat().st_size - vgg_path.stat().st_size < tables + 2000
    again = add_profile(PlanLayers(read(path)), "mixed", plan, trial.rows(plan))  # the same name: replaced
    assert [p.name for p in again.profiles].count("mixed") == 1
