"""Every scale's recipes load and are shared as they should be; paper scale is the recipes as they stand."""

import pytest

from anyprec.choices import EXPERIMENT_SCALES
from anyprec.errors import AnyprecError
from anyprec.reproduce.catalog import EXPERIMENTS, find, trainings_of
from anyprec.reproduce.cost import FACTS
from anyprec.reproduce.paper import TABLE1
from anyprec.reproduce.scales import PaperNetwork, default_net, nets
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
    assert len(of["table5"] & of["table1"]) == len(of["table5"]) // 4  # one loss mode is the one of Table 1
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


def test_experiments_by_name():
    assert [e.name for e in find(["uca", "table1"])] == ["table1", "uca"]
    assert find(["all"]) == list(EXPERIMENTS.values())
    with pytest.raises(AnyprecError, match=r"no experiment 'tabel1'; did you mean 'table1'\? There are table1, "):
        find(["tabel1"])


def test_a_result_is_known_by_what_it_rests_on():
    keys = {e.key(scale) for e in EXPERIMENTS.values() for scale in EXPERIMENT_SCALES}
    assert len(keys) >= 3 * len(EXPERIMENTS) - 3  # gaps and uca rest on the same training
