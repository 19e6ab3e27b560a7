"""The server with models of format 3: vectors and sequences as outputs, and several inputs, which it refuses."""

import numpy as np
import pytest
import torch
from serving import SMALL
from torch import nn

import anyprec
from anyprec.errors import ServeError
from anyprec.serve.models import Settings, open_model

SETTINGS = Settings(slo_s=2.0, warm_up_s=0.05, limits=SMALL)
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def packed(net, folder, example=X, **options):
    torch.manual_seed(0)
    anyprec.pack(anyprec.convert(net.eval(), example=example), folder / "net.apm", example=example, **options)
    return str(folder / "net.apm")


def layers(*last):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), *last)


@pytest.mark.parametrize(
    "last, shape",
    [
        ((nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), (-1, 5)),
        ((nn.GroupNorm(2, 8), nn.Conv2d(8, 5, 1)), (-1, 5, 16, 16)),
        ((nn.Flatten(2), nn.Linear(256, 4)), (-1, 8, 4)),
    ],
)
def test_outputs_of_any_rank(last, shape, tmp_path):
    path = packed(layers(*last), tmp_path)
    opened = open_model(path, SETTINGS)
    assert opened.signature.outputs[0].shape == shape
    made = opened.model(X.numpy(), bits=2)
    assert made.shape[1:] == shape[1:]


def test_several_inputs_are_refused(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.head = layers(), nn.Linear(12, 5)

        def forward(self, x, v):
            return self.head(torch.cat([self.image(x).mean((2, 3)), v], 1))

    path = packed(Two(), tmp_path, (X, torch.zeros(2, 4)))
    with pytest.raises(ServeError, match=r"takes 2 inputs \(input, v\)"):
        open_model(path, SETTINGS)


def test_a_map_of_one_pixel_is_a_map(tmp_path):
    path = packed(layers(nn.Conv2d(8, 5, 1)), tmp_path)
    opened = open_model(path, SETTINGS)
    assert opened.signature.outputs[0].shape == (-1, 5, -1, -1)
    for height, width in ((1, 1), (1, 2), (3, 2)):
        x = np.zeros((2, 3, height, width), np.float32)
        assert opened.model(x, bits=4).shape == (2, 5, height, width)
        assert opened.model(x.transpose(0, 2, 3, 1), bits=4, layout="NHWC").shape == (2, height, width, 5)
        assert opened.model.output_shapes(2, height, width) == [(2, 5, height, width)]
    pooled = packed(layers(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 5, 1)), tmp_path)
    assert anyprec.load(pooled)(X.numpy(), bits=4).shape == (2, 5)
