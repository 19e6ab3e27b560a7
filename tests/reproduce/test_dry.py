"""Costs and dry runs: lines through measured steps, and one step of everything on made-up data."""

import pytest

from anyprec.reproduce.catalog import EXPERIMENTS, find
from anyprec.reproduce.cost import StepTimes, estimate, group, make, measure, memory, rates_of, steps
from anyprec.reproduce.dry import dry_run, dry_text, train_one_step
from anyprec.reproduce.scales import PaperNetwork, nets
from anyprec.reproduce.store import Training, training
from anyprec.reproduce.synthetic import make as make_data


def test_steps_of_the_papers_recipes():
    assert steps(training("cifar10-resnet20").recipe) == 400 * 390
    assert steps(training("imagenet-resnet50").recipe) == 80 * (1_281_167 // 256)
    assert steps(training("digits", "limit=128", "batch_size=64", "epochs=3").recipe) == 6


def test_a_step_lies_on_a_line_in_the_batch_and_in_the_widths():
    rate = StepTimes((0.1, 0.01), (0.3, 0.05), 5, (2, 4))
    assert rate.step(10, 1) == pytest.approx(0.2) and rate.step(10, 5) == pytest.approx(0.8)
    assert rate.step(10, 3) == pytest.approx(0.5)


def test_an_estimate_counts_tests_and_observed_steps():
    one = training("digits", "limit=128", "batch_size=64", "epochs=2", "eval_every=0")
    rates = {group(one): StepTimes((0.0, 1.0), (0.0, 1.0), 5, (2, 4))}
    plain = estimate(one, rates)
    assert plain == pytest.approx(4 * 64 + 0.35 * 400)  # a second an image
    assert estimate(Training(one.recipe, observe=2), rates) == pytest.approx(plain + 2 * 64)


def test_sampled_widths_and_winograd_count():
    every, some = training("cifar10-vgg-small", "sampling=all"), training("cifar10-vgg-small")
    rates = {group(some): StepTimes((0.0, 1.0), (0.0, 5.0), 5, (2, 4))}
    assert estimate(some, rates) == pytest.approx(0.6 * estimate(every, rates))  # 3 of 5 widths a step
    assert group(training("cifar10-vgg-small", "amp=off", "winograd=true")) != group(some)
    assert measure(training("cifar10-vgg-small", "amp=off", "winograd=true", "widths=[2]"), (2, 4), 1).one[1] > 0


def test_rates_are_measured_once(tmp_path, monkeypatch):
    one = training("digits", "net_options.multiplier=0.25")
    first = rates_of([one, training("digits", "widths=[2]", "net_options.multiplier=0.25")], tmp_path / "rates.json")
    assert list(first) == [group(one)] and first[group(one)].widths == 5
    assert all(v > 0 for v in (first[group(one)].one[1], first[group(one)].all[1]))
    monkeypatch.setattr("anyprec.reproduce.cost.measure", lambda *_: pytest.fail("it is known"))
    assert rates_of([one], tmp_path / "rates.json") == first


def test_memory_grows_with_the_network():
    narrow, wide = (memory(training("digits", f"net_options.multiplier={w}").recipe, 2) for w in (0.5, 1))
    assert narrow[0] < wide[0] and narrow[1] < wide[1]
    parameters = sum(p.numel() for p in make(training("digits").recipe).parameters())
    assert wide[0] == 4 * 4 * parameters  # float32: weights, gradients and Adam's two


def test_a_dedicated_network_is_measured_at_its_width():
    rate = measure(training("digits", "widths=[2]", "net_options.multiplier=0.25"), (2, 4), 1)
    assert rate.widths == 1 and rate.one == rate.all


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["svhn-cnn8", "camvid-deeplab-cpu"])
def test_a_recipe_goes_through_the_whole_pipeline(name, tmp_path):
    one = training(name)
    train_one_step(one, tmp_path / "run", make_data(one.recipe.data, tmp_path / "data"))
    assert (tmp_path / "run" / "model.pt").exists()


@pytest.mark.thorough
def test_dry_run_at_tiny_scale():
    found = dry_run(find(["gaps", "table2"]), "tiny")
    assert found["trainings"] == 1 and set(found["experiments"]) == {"gaps", "table2"}
    row = found["networks"][0]
    assert (row["net"], row["batch"], row["steps"]) == ("resnet8", 64, 12) and row["parameters"] > 70_000
    assert 0 < found["hours"] < 1
    text = dry_text(found)
    assert "resnet8" in text and "all together" in text


@pytest.mark.slow
@pytest.mark.parametrize("row", list(nets("paper")))
def test_every_paper_recipe_goes_through(row, tmp_path):
    net = nets("paper")[row]
    assert isinstance(net, PaperNetwork)
    for one in (net.joint(), net.dedicated(1)):
        train_one_step(one, tmp_path / one.key, make_data(one.recipe.data, tmp_path / f"{one.key}-data"))


@pytest.mark.slow
def test_dry_run_at_paper_scale_has_every_network():
    found = dry_run(list(EXPERIMENTS.values()), "paper")
    nets_found = {row["net"] for row in found["networks"]}
    assert nets_found == {
        "resnet20x5", "alexnet", "mobilenetv2", "resnet8", "cnn8", "resnet18", "resnet50", "deeplab-resnet50"
    }  # fmt: skip
