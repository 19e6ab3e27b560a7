"""Every group of operations in one small network: the oracle's answers against torch, at float and integer widths."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anyprec.format.record import version_of
from anyprec.nn.convert import convert
from anyprec.packing.packing import make_graph, pack

X = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Between(nn.Module):
    """Two convolutions, an operation on their map of 8 channels, and another convolution."""

    def __init__(self, operation):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.operation, self.last = operation, nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.operation(self.second(self.first(x))))


def build(operation):
    torch.manual_seed(0)
    net = Between(copy.deepcopy(operation))
    if isinstance(operation, nn.Module):
        with torch.no_grad():
            for parameter in net.operation.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


def many_axes(y):
    """Nine at once."""
    parts = y.reshape(len(y), 2, 2, 2, 2, 2, 3, 3, 2, 2)
    return parts.permute(0, 9, 2, 5, 3, 7, 1, 8, 6, 4).reshape(y.shape)


def gated(y):
    return y * y.mean((2, 3)).view(y.shape[0], -1, 1, 1).sigmoid()


def standardized(y):
    return (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True) + 1e-5).sqrt()


def shuffled(y):
    return y.reshape(y.shape[0], 2, 4, 12, 12).transpose(1, 2).reshape(y.shape)


POINTWISE = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda y: F.gelu(y, approximate="tanh"),
    "mish": F.mish,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.1),
    "prelu": nn.PReLU(8),
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda y: F.celu(y, 1.3),
    "softplus": lambda y: F.softplus(y, 2.0),
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "cube": lambda y: y**3,
    "inverse root": lambda y: (y * y + 1) ** -0.5,
    "rsqrt": lambda y: (y * y + 1).rsqrt(),
    "log": lambda y: (y.abs() + 1).log(),
    "glu": lambda y: F.glu(torch.cat([y, y], 1), 1),
}

BINARY = {
    "maximum": lambda y: torch.maximum(y, y.flip(1)),
    "product": lambda y: y * (y + 1),
    "quotient": lambda y: y / (1 + y * y),
    "constant over value": lambda y: 2 / (1 + y * y),
    "gate of channels": gated,
    "constant map": lambda y: y + torch.linspace(0, 1, 144).reshape(1, 1, 12, 12),
    "where": lambda y: torch.where(torch.ones(12, 12).tril().bool(), y, y * 0.5),
    "masked_fill": lambda y: y.masked_fill(torch.ones(12, 12).triu(1).bool(), -1.0),
    "addcmul": lambda y: torch.addcmul(y, y, y, value=0.3),
    "clamp by tensor": lambda y: torch.clamp(y, min=torch.linspace(-1, 0, 8).view(8, 1, 1)),
    "outer sum": lambda y: y.mean(3, keepdim=True) - y.mean(2, keepdim=True),
}

REDUCTIONS = {
    "mean of a row": lambda y: y - y.mean(3, keepdim=True),
    "sum of channels": lambda y: y + y.sum(1, keepdim=True),
    "amax": lambda y: y - y.amax((2, 3), keepdim=True),
    "variance": standardized,
    "normalize": lambda y: F.normalize(y, dim=1),
    "logsumexp": lambda y: y - torch.logsumexp(y, 1, keepdim=True),
    "log_softmax": lambda y: F.log_softmax(y, 1),
    "softmax of rows": lambda y: F.softmax(y, -1),
    "cumsum": lambda y: y.cumsum(3),
    "largest of all": lambda y: y * F.adaptive_max_pool2d(y, 1),
    "adaptive max": lambda y: F.adaptive_max_pool2d(y, 4),
    "bicubic": lambda y: F.interpolate(y, scale_factor=1.5, mode="bicubic"),
    "antialiased": lambda y: F.interpolate(y, size=(7, 5), mode="bilinear", antialias=True),
    "nearest, exact": lambda y: F.interpolate(y, size=(9, 12), mode="nearest-exact"),
    "resize of a line": lambda y: F.interpolate(y.flatten(2), scale_factor=2.0)[:, :, ::2].reshape(y.shape),
}

NORMS = {
    "layer norm": nn.LayerNorm([8, 12, 12]),
    "layer norm of rows": nn.LayerNorm(12),
    "group norm": nn.GroupNorm(2, 8),
    "instance norm": nn.InstanceNorm2d(8, affine=True),
    "instance norm, plain": nn.InstanceNorm2d(8),
    "rms norm": nn.RMSNorm(12),
}

MOVEMENT = {
    "permute": lambda y: y.permute(0, 1, 3, 2).contiguous(),
    "slice": lambda y: y[:, :, 1:-2, 1::2],
    "crop": lambda y: F.pad(y, (-1, 1, 0, 0)),
    "chunk": lambda y: torch.cat(y.chunk(2, 1)[::-1], 1),
    "split": lambda y: torch.cat([part * i for i, part in enumerate(y.split([1, 3, 4], 1))], 1),
    "stack": lambda y: torch.stack([y, y + 1], 2).flatten(1, 2)[:, ::2],
    "concatenate rows": lambda y: torch.cat([y, y * 2, torch.ones(len(y), 8, 1, 12)], 2),
    "roll": lambda y: y.roll((1, -2), (2, 3)),
    "flip": lambda y: y.flip(2, 3),
    "positions": lambda y: y[:, [3, 1, 0, 2, 7, 6, 5, 4]],
    "pairs of positions": lambda y: y[:, :, [0, 1, 2], [2, 1, 0]][:, :, None].expand(-1, -1, 3, -1),
    "repeat": lambda y: y[:, 2:6].repeat(1, 2, 1, 1),
    "repeat_interleave": lambda y: y[:, :4].repeat_interleave(2, 1),
    "expand": lambda y: y.mean((2, 3), keepdim=True).expand(-1, -1, 5, 6),
    "shuffle by hand": shuffled,
    "channel shuffle": nn.ChannelShuffle(2),
    "pixel shuffle": lambda y: F.pixel_shuffle(y, 2).repeat(1, 4, 1, 1),
    "pixel unshuffle": lambda y: F.pixel_unshuffle(y[:, :2], 2),
    "reflect": lambda y: F.pad(y, (1, 2, 3, 1), mode="reflect"),
    "replicate": lambda y: F.pad(y, (1, 2, 3, 1), mode="replicate"),
    "circular": lambda y: F.pad(y, (1, 2, 3, 1), mode="circular"),
    "constant pad": lambda y: F.pad(y, (1, 1), value=2.0),
    "unflatten": lambda y: y.unflatten(1, (2, 4)).flatten(1, 2),
}

LAYERS = {
    "transposed": nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1),
    "transposed, groups": nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2, bias=False),
    "circular layer": nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
    "reflecting layer": nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
    "linear of channels": nn.Sequential(nn.Flatten(2), nn.Linear(144, 144), nn.Unflatten(2, (12, 12))),
    "unfold": lambda y: F.unfold(y[:, :2], 2, dilation=2, padding=1, stride=3).unflatten(2, (4, 4)),
    "fold": lambda y: F.fold(F.unfold(y, 3, padding=1, stride=2), (12, 12), 3, padding=1, stride=2),
    "fold, dilated": lambda y: F.fold(y.repeat(1, 4, 1, 1).flatten(2)[:, :, :20], (11, 10), 2, dilation=2, stride=2),
    "matrix product": lambda y: y @ y,
    "product with a transpose": lambda y: y @ y.transpose(-1, -2),
    "constant times value": lambda y: torch.linspace(0, 1, 144).view(12, 12) @ y,
    "einsum with a constant": lambda y: torch.einsum("nchw,hkw->nchk", y, torch.linspace(0, 1, 1728).view(12, 12, 12)),
    "many axes": many_axes,
    "einsum": lambda y: torch.einsum("nchw,ncwk->nchk", y, y),
}

ALL = {**POINTWISE, **BINARY, **REDUCTIONS, **NORMS, **MOVEMENT, **LAYERS}


@pytest.mark.parametrize("name", ALL)
def test_operation(matches, name):
    graph = matches(build(ALL[name]), X)
    assert len(graph.outputs) == 1


FREE = (
    "gelu", "gate of channels", "quotient", "amax", "instance norm", "permute", "slice", "roll", "circular",
    "transposed", "normalize", "softmax of rows",
)  # fmt: skip


@pytest.mark.parametrize("name", FREE)
def test_operations_of_any_size(matches, against, name):
    """A graph made from 12 x 12 images is right for others."""
    graph = matches(build(ALL[name]), X)
    assert graph.input_shape == (None, None, 3)
    model = convert(build(ALL[name]).eval(), widths=(2, 8, 32), example=X)
    against(model, graph, torch.randn(2, 3, 17, 22, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("name", ["reflect", "reflecting layer", "constant map", "concatenate rows", "cumsum"])
def test_operations_of_one_size(name):
    model = convert(build(ALL[name]).eval(), widths=(2, 8), example=X)
    assert make_graph(model, example=X).input_shape == (12, 12, 3)


@pytest.mark.parametrize(
    "name", ["gelu", "gate of channels", "transposed", "reflecting layer", "product with a transpose"]
)
def test_the_check_of_pack(name, tmp_path):
    model = convert(build(ALL[name]).eval(), widths=(2, 8, 32), example=X)
    report = pack(model, tmp_path / "net.apm", example=X, keep_float=True)
    assert all(found.alive for found in report.check.profiles.values())


@pytest.mark.parametrize("name", ["relu6", "unflatten", "hardsigmoid"])
def test_older_formats_where_they_do(name):
    """What formats 1 and 2 have is written as them."""
    model = convert(build(ALL[name]).eval(), widths=(2, 8), example=X)
    assert version_of(make_graph(model, example=X)) == 1
