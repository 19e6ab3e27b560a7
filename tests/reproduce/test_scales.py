"""Every scale's recipes load and are shared as they should be; paper scale is the recipes as they stand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from anyprec.choices import EXPERIMENT_SCALES, LOSSES
from anyprec.errors import AnyprecError
from anyprec.reproduce import authors, table5
from anyprec.reproduce.catalog import EXPERIMENTS, find, trainings_of
from anyprec.reproduce.cost import FACTS
from anyprec.reproduce.paper import TABLE1
from anyprec.reproduce.scales import PaperNetwork, default_net, nets
from anyprec.training.build import build_network
from anyprec.training.checkpoint import save_model
from anyprec.training.recipe import Recipe
from anyprec.zoo import ZOO


@pytest.mark.parametrize("scale", EXPERIMENT_SCALES)
def test_every_training_can_be_made(scale):
    trainings = trainings_of(list(EXPERIMENTS.values()), scale)
    assert len(trainings) == len({t.name for t in trainings})
    for training in trainings:
        assert training.recipe.net in ZOO and training.recipe.data in FACTS
    for training in trainings:
        if training.after is not None:
            assert trainings.index(training.after) < trainings.index(training)


@pytest.mark.parametrize("scale", EXPERIMENT_SCALES)
def test_the_rows_are_the_papers(scale):
    assert set(nets(scale)) == set(TABLE1)


@pytest.mark.parametrize("scale", EXPERIMENT_SCALES)
def test_experiments_share_trainings(scale):
    of = {name: set(trainings_of([e], scale)) for name, e in EXPERIMENTS.items()}
    assert of["gaps"] == of["uca"] <= of["robustness"] <= of["table1"]
    assert of["figures"] <= of["table1"] and of["table3"] <= of["table1"]
    joint = {t for t in of["table5"] if len(t.recipe.widths) > 1}  # without float stages
    assert len(joint & of["table1"]) == len(joint) // len(table5.modes(scale))  # one loss mode is the one of Table 1
    assert len(of["authors"] - of["table1"]) == 1
    assert not of["table2"]


def test_paper_scale_is_the_recipes():
    for name, net in nets("paper").items():
        assert isinstance(net, PaperNetwork)
        assert net.joint().recipe == Recipe.load(net.recipe), name
    resnet18 = nets("paper")["ImageNet ResNet-18"]
    assert isinstance(resnet18, PaperNetwork)
    alone = resnet18.dedicated(2).recipe
    assert (alone.widths, alone.epochs, alone.lr, alone.milestones) == ((2,), 120, 0.1, (30, 60, 85, 95, 105))
    resnet20 = default_net("paper")
    assert resnet20.dedicated(1).recipe.epochs == 400 and resnet20.joint("widths=[1,8]").recipe.widths == (1, 8)


def test_the_one_width_of_a_dedicated_model_is_not_weighed():
    net = default_net("small")
    assert net.joint().recipe.width_weights["32"] == 3
    assert not net.dedicated(32).recipe.width_weights


def test_gradients_are_observed_in_the_shared_joint_training_alone():
    net = default_net("small")
    assert net.joint().observe == 8
    assert net.joint("loss=hard") == net.joint() and net.joint("loss=hard").observe == 8
    assert net.joint("loss=soft").observe == 0 == net.dedicated(8).observe


def test_medium_scale_is_cifar10_in_full_at_equal_epochs():
    """Dedicated models get the float start and the epochs of the joint one; figures are of the test set."""
    for name, net in nets("medium").items():
        if isinstance(net, PaperNetwork):
            joint = net.joint()
            assert joint.recipe.data == "cifar10" and joint.recipe.limit == joint.recipe.validation == 0, name
            for alone in net.all_dedicated().values():
                assert alone.recipe.epochs == joint.recipe.epochs and alone.after == joint.after, name
    vgg = default_net("medium")
    assert vgg.joint().after.recipe.widths == (32,) and vgg.joint().after.recipe.validation == 0
    assert set(table5.modes("medium")) == set(LOSSES)
    theirs = authors.compared("medium")["authors"].recipe
    assert (theirs.quantizer, theirs.scale, theirs.loss) == ("dorefa", "mean", "recursive")
    assert theirs.epochs == vgg.joint().recipe.epochs and not theirs.width_weights


@pytest.mark.thorough
def test_every_medium_training_can_start_from_its_float_stage(tmp_path):
    """The authors' network once could not: the stage's quantizer has a range, which theirs has not."""
    data = SimpleNamespace(shape=(32, 32, 3), num_classes=10)
    trainings = {t.name: t for t in trainings_of(find(["table1", "table5", "authors"]), "medium", 1) if t.after}
    assert len(trainings) == 12  # the joint one with six losses, five dedicated ones, the authors'
    for training in trainings.values():
        before, _ = build_network(training.after.recipe, data)
        save_model(before, tmp_path / "model.pt")
        model, new = build_network(replace(training.recipe, init=str(tmp_path / "model.pt")), data)
        assert torch.equal(model.block1.conv0.weight, before.block1.conv0.weight)
        assert set(new) == set(training.recipe.widths) - {32}


def test_every_seed_is_a_training_of_its_own():
    one, two = (trainings_of(find(["gaps"]), "medium", seeds) for seeds in (1, 2))
    assert two[: len(one)] == one and len({t.key for t in two}) == 2 * len(one) == 4
    assert [t.recipe.seed for t in two] == [0, 0, 1, 1] and two[3].after == two[2]
    gaps = EXPERIMENTS["gaps"]
    assert gaps.key("medium") != gaps.key("medium", 2) and gaps.key("medium", 1) == gaps.key("medium")


def test_experiments_by_name():
    assert [e.name for e in find(["uca", "table1"])] == ["table1", "uca"]
    assert find(["all"]) == list(EXPERIMENTS.values())
    with pytest.raises(AnyprecError, match=r"no experiment 'tabel1'; did you mean 'table1'\? There are table1, "):
        find(["tabel1"])


def test_a_result_is_known_by_what_it_rests_on():
    keys = {e.key(scale) for e in EXPERIMENTS.values() for scale in EXPERIMENT_SCALES}
    assert len(keys) >= 3 * len(EXPERIMENTS) - 3  # gaps and uca rest on the same training
