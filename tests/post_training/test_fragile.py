"""Layers that do little and lose most stay float, and no others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyprec
from anyprec.nn.layers import AnyLayer
from anyprec.post_training import GptqSettings, ptq
from anyprec.post_training.fragile import fragile_layers, round_values


class Differences(nn.Module):
    """A cheap depth-wise layer that takes differences of neighbors, 20-fold; its inputs lie far from 0."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.edges = nn.Conv2d(8, 8, (1, 2), groups=8)
        self.wide, self.deep = nn.Conv2d(8, 32, 3), nn.Conv2d(32, 32, 3)
        self.fc = nn.Linear(32, 5)
        with torch.no_grad():
            self.edges.weight.copy_(torch.tensor([1.0, -1.0]) * gain if gain else torch.tensor([0.6, 0.4]))

    def forward(self, x):
        x = self.edges(0.2 * F.relu(self.stem(x)) + 4)
        return self.fc(F.relu(self.deep(F.relu(self.wide(x)))).mean((2, 3)))


def images(count, seed):
    return torch.randn(count, 3, 10, 10, generator=torch.Generator().manual_seed(seed))


def made(gain):
    torch.manual_seed(0)
    return Differences(gain).eval()


@pytest.mark.parametrize(("gain", "wanted"), [(20.0, ["edges"]), (0.0, [])])
def test_the_layer_that_loses_most_is_found(gain, wanted):
    x = images(8, 1)
    model = anyprec.convert(made(gain), (8, 32), example=x, clip="calibrated")
    assert fragile_layers(model, ((x,), {})) == wanted


@pytest.mark.thorough
def test_it_stays_float_and_the_report_says_so(tmp_path):
    net, x = made(20.0), images(32, 1)
    model = ptq(net, [x], "gptq", (4, 8), gptq=GptqSettings(tune_steps=0))
    assert not isinstance(model.edges, AnyLayer) and isinstance(model.wide, AnyLayer)
    assert "rounding its input" in model.conversion.kept["edges"]
    report = anyprec.pack(model, tmp_path / "net.apm", example=x[:4])
    assert report.check is not None
    others = images(32, 2)
    with torch.no_grad(), anyprec.bits(model, 8):
        off = float((model(others) - net(others)).norm() / net(others).norm())
    assert off < 0.02, off
    assert isinstance(ptq(net, [x], "bs", (8,)).edges, AnyLayer)  # the baselines are those of the paper


def test_values_are_rounded_as_a_quantizer_does():
    for x in (torch.tensor([0.0, 0.5, 255.0]), torch.tensor([-255.0, 0.6, 255.0])):
        assert torch.allclose(round_values(x), x, atol=1.01)
