"""`convert` on networks that were never trained: no width is dead, in train or eval mode, and all train."""

import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import nn

from anyprec.nn.calibrate import calibrate
from anyprec.nn.convert import convert
from anyprec.nn.observe import untrained_norms
from anyprec.nn.switching import any_layers, bits, switch_norms
from anyprec.training.joint import joint_step

WIDTHS = (1, 2, 4, 8, 32)
INTEGERS = WIDTHS[:-1]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def unit(inputs, outputs, kernel=3, groups=1):
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    nn.init.normal_(conv.weight, std=0.02)  # small, as transformers starts its convolutions: the norms make up for it
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU6())


class Head(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def deep():
    return nn.Sequential(unit(3, 16), *(unit(16, 16) for _ in range(11)), Head(), nn.Linear(16, 5))


def depthwise():
    blocks = [layer for _ in range(4) for layer in (unit(16, 32, 1), unit(32, 32, 3, groups=32), unit(32, 16, 1))]
    return nn.Sequential(unit(3, 16), *blocks, Head(), nn.Linear(16, 5))


NETS = {"deep": deep, "depthwise": depthwise}


def images(n=16):
    return torch.randn(n, 3, 8, 8)


@pytest.mark.thorough
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_every_width_is_alive(name, training):
    net, x = NETS[name]().train(training), images()
    with torch.no_grad():
        faded = net.eval()(x).std(0).mean()  # running statistics are 0 and 1: the input does not get through
    assert faded < 1e-6
    model = convert(net.train(training), example=x)
    assert torch.equal(model.eval()(x), net.eval()(x))  # float is what it was, dead or not
    assert not any("carry nothing" in note for note in model.conversion.notes)
    for k in INTEGERS:
        for mode in (True, False):
            with bits(model, k), torch.no_grad():
                spread = model.train(mode)(x).std(0).mean()
            assert spread > 1e-3, (k, mode)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sampled(NETS, 1, slow=["deep"]))
def test_a_few_joint_steps_train_every_width(name):
    x = images(32)
    labels = (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, 0].mean((1, 2)) > 0).long()
    x = x + labels.view(-1, 1, 1, 1) * 0.7
    model = convert(NETS[name](), example=x).train()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    first = last = {}
    for _ in range(15):
        optimizer.zero_grad()
        last = joint_step(model, x, labels, WIDTHS)
        optimizer.step()
        first = first or last
    for k in WIDTHS:
        assert last[k][0] < 0.8 * first[k][0], (k, float(first[k][0]), float(last[k][0]))


def test_ranges_are_those_of_a_training_batch():
    net, x = deep(), images()
    model = convert(net, example=x)
    inputs = {}
    for name in any_layers(model):
        net.get_submodule(name).register_forward_pre_hook(lambda m, given, name=name: inputs.update({name: given[0]}))
    net.train()(x)
    for name, layer in any_layers(model).items():
        reach = float((layer.act.ranges["8"] / inputs[name].amax()).detach())
        assert 0.5 < reach < 1.01, name


def test_norms_that_were_trained_are_read_as_they_are():
    net, x = deep(), images()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -1, 1)  # num_batches_tracked stays 0, as other frameworks leave it
            nn.init.uniform_(module.running_var, 1e-4, 2e-4)
    assert not untrained_norms(net)
    model = convert(net.eval(), example=x)
    assert not any("not trained yet" in note for note in model.conversion.notes)
    for norm in switch_norms(model).values():
        assert torch.equal(norm.tables["1"].running_var, norm.tables["32"].running_var)


def test_one_run_before_is_no_training():
    net, x = deep(), images()
    net.train()(x)
    assert len(untrained_norms(net)) == 12
    for _ in range(30):
        net(x)
    assert not untrained_norms(net)


def test_float_keeps_its_statistics_and_integers_count_no_batch():
    model = convert(deep(), example=images())
    for norm in switch_norms(model).values():
        assert not norm.tables["32"].running_mean.any() and (norm.tables["32"].running_var == 1).all()
        assert not (norm.tables["8"].running_var == 1).all()
        assert all(table.num_batches_tracked == 0 for table in norm.tables.values())
    note = next(note for note in model.conversion.notes if "not trained yet" in note)
    assert "12 batch norms" in note and "0.1" in note


def test_one_value_a_channel_is_said():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = convert(net, example=torch.randn(1, 6))
    assert any("give a batch of several" in note for note in model.conversion.notes)
    assert torch.equal(model.eval()(torch.ones(1, 6)), net.eval()(torch.ones(1, 6)))


@pytest.mark.thorough
def test_calibrate_finds_the_ranges_of_a_network_converted_without_an_example():
    x = images()
    model = convert(deep(), widths=WIDTHS)
    calibrate(model, [x], INTEGERS)
    for k in INTEGERS:
        with bits(model, k), torch.no_grad():
            assert model.eval()(x).std(0).mean() > 1e-3


class Silent(nn.Module):
    """`mute` gets zeros only."""

    def __init__(self):
        super().__init__()
        self.first, self.mute = nn.Linear(6, 8), nn.Linear(8, 8)
        self.fine, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = F.relu(self.first(x))
        return self.last(F.relu(self.fine(x)) + self.mute(0 * x))


def test_a_layer_that_carries_nothing_is_named():
    model = convert(Silent(), example=torch.randn(16, 6))
    (note,) = (note for note in model.conversion.notes if "carry nothing" in note)
    assert "mute (at every width, float too)" in note and "fine" not in note


def test_a_layer_that_loses_its_input_to_rounding_is_named():
    net = nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        net[0].weight.mul_(1e-3)  # about 0.5 everywhere: one code at every width but float
        net[0].bias.zero_()
    model = convert(net, widths=(1, 32), example=torch.randn(16, 6))
    assert any("2 (at 1 bit)" in note for note in model.conversion.notes)
