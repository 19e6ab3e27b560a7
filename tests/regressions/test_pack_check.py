"""Finding 3: `pack` compares the file with the module before it returns."""

import numpy as np
import pytest
import torch
from torch import nn

import anyprec
from anyprec.errors import AnyprecError

X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class ByTheBatch(nn.Module):
    """Its trace has the number of images of the example as a constant."""

    def forward(self, x):
        return x / len(x)


def model_with(part):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), part, nn.ReLU(), nn.Conv2d(6, 4, 1))
    return anyprec.convert(net.eval(), widths=(2, 8), example=X)


def test_a_file_that_disagrees_is_not_left(tmp_path):
    """A module that the trace does not capture was packed as another network, without a word."""
    with pytest.raises(AnyprecError):
        anyprec.pack(model_with(ByTheBatch()), tmp_path / "net.apm", example=X)
    assert not list(tmp_path.iterdir())


def check_packed_answers(model, path):
    """The file at `path` answers as the module does, at 8 bit."""
    anyprec.set_bits(model, 8)
    with torch.no_grad():
        wanted = model(X).numpy()
    anyprec.pack(model, path, example=X)
    gap = np.abs(anyprec.load(path)(X.numpy(), bits=8) - wanted)
    assert np.median(gap) < 1e-4 * wanted.std()


def test_a_forward_of_its_own_is_packed(tmp_path):
    """A layer whose forward does more than its type says was packed by its type: the file answered something else."""
    model = model_with(nn.Identity())
    forward = model[2].forward
    model[2].forward = lambda x: forward(x) * 1.5 + 0.1
    check_packed_answers(model, tmp_path / "net.apm")


class NormAct(nn.BatchNorm2d):
    def forward(self, x):
        return torch.relu(super().forward(x))


def test_a_norm_with_a_forward_of_its_own_is_packed(tmp_path):
    """timm's BatchNormAct2d lost its activation (nothing that rectifies follows, which would hide it)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), NormAct(6), nn.Conv2d(6, 4, 1))
    model = anyprec.convert(net.eval(), widths=(2, 8), example=X)
    check_packed_answers(model, tmp_path / "net.apm")


def test_the_report_says_the_largest_difference(tmp_path):
    """The report said nothing of whether the file computes what the module does."""
    report = anyprec.pack(model_with(nn.Identity()), tmp_path / "net.apm", example=X)
    assert "largest difference" in str(report)
