"""`to_float_network`: any-precision networks as the plain torch networks they are at 32 bits."""

import pytest
import torch
from sampling import sampled
from torch import nn

import anyprec
from anyprec.errors import UncalibratedBits
from anyprec.nn.convert import convert
from anyprec.nn.layers import AnyActivation, AnyLayer
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.plain import to_float_network
from anyprec.zoo import ZOO, build

# One of each kind: the others differ in depth and width, or are too large for a quick test.
SMALL = {
    "resnet8": {"multiplier": 0.5},
    "alexnet": {"multiplier": 0.25, "hidden": 32},
    "mobilenetv2": {"multiplier": 0.25},
    "cnn8": {"expand": 1},
    "vgg-speed": {"channels": (8, 12, 16)},
    "resnet-he": {"depth": 8},
}


def scramble(model):
    """Statistics and parameters that differ between widths, so that a wrong table shows."""
    dice = torch.Generator().manual_seed(1)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point() and ("norm" in name or "bn" in name):
            value.data.copy_(torch.rand(value.shape, generator=dice) + 0.5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sampled(SMALL))
@pytest.mark.parametrize("quantizer", ["nested", "dorefa"])
def test_zoo_networks_give_the_same(name, quantizer):
    torch.manual_seed(0)
    model = build(name, widths=(1, 8, 32), quantizer=quantizer, **SMALL[name]).eval()
    scramble(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    net = to_float_network(model)
    assert not any(isinstance(m, (AnyLayer, AnyActivation, SwitchNorm)) for m in net.modules())
    assert all(type(m).__module__.startswith(("torch.", "anyprec.zoo")) for m in net.modules())
    height, width, channels = ZOO[name].shape
    x = torch.randn(1, channels, height, width)
    with torch.no_grad(), anyprec.bits(model, 32):
        assert torch.equal(net.eval()(x), model(x))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    convert(net, widths=(2, 32), example=x)  # it is a network like any other


def test_there_and_back():
    class Tied(nn.Conv2d):
        """A subclass of a torch layer."""

    shared = nn.BatchNorm2d(4)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), shared, nn.ReLU(), Tied(4, 4, 1), shared, nn.Flatten(), nn.Linear(144, 5))
    net[1].running_mean.fill_(0.1)
    x = torch.rand(2, 3, 8, 8)
    back = to_float_network(convert(net.eval(), widths=(2, 8, 32), example=x))
    assert [type(m) for m in back] == [type(m) for m in net]
    assert back[1] is back[4]
    assert torch.equal(back(x), net(x))
    assert set(back.state_dict()) == set(net.state_dict())


def test_a_plain_network_is_copied():
    net = nn.Sequential(nn.Linear(2, 2))
    copy = to_float_network(net)
    assert copy is not net and torch.equal(copy[0].weight, net[0].weight)


def test_without_a_float_width():
    with pytest.raises(UncalibratedBits, match=r"has no float width, only \(1, 8\)"):
        to_float_network(build("resnet8", widths=(1, 8), multiplier=0.25))
