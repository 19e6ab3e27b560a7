"""What tracing refuses, and with which words; what it sees of a network's Python."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anyprec.errors import DataError, UnsupportedOperation
from anyprec.nn.convert import convert
from anyprec.nn.layers import AnyActivation, AnyConv2d
from anyprec.packing.packing import make_graph
from anyprec.packing.trace import trace

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A convolution, whatever `between` does with its output, and another convolution."""

    def __init__(self, between):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 2, 1)
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)
        self.layer_norm = nn.LayerNorm(12)
        self.group_norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.wrapped = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
        self.between = between

    def forward(self, x):
        return self.last(self.between(self, self.middle(self.first(x))))


def wide(net, y):
    buffer = torch.zeros(*y.shape)
    buffer[:, :2] = y[:, :2]
    return buffer


def in_place_on_a_view(net, y):
    view = y.unsqueeze(0).squeeze(0)
    view.relu_()
    return y + 1


REFUSED = {
    "sigmoid": lambda net, y: torch.sigmoid(y) + y,
    "silu": lambda net, y: F.silu(y),
    "mul": lambda net, y: y * y.mean((2, 3), keepdim=True),
    "permute": lambda net, y: y.permute(0, 1, 3, 2).contiguous(),
    "matmul|bmm|expand|view": lambda net, y: y @ y,
    "pad": lambda net, y: F.pad(y, (-1, 1, 0, 0)),
    "reflection_pad2d": lambda net, y: F.pad(y, (1, 1, 1, 1), mode="reflect"),
    "constant_pad_nd": lambda net, y: F.pad(y, (1, 1), value=2.0),
    "slice": lambda net, y: y[:, :, 1:],
    "roll": lambda net, y: y.roll(1, 2),
    "cat": lambda net, y: torch.cat([y, y], 2),
    "softmax": lambda net, y: F.softmax(y, dim=-1),
    "mean": lambda net, y: y - y.mean(3, keepdim=True),
    "view": lambda net, y: y.reshape(y.shape[0], 2, 2, 12, 12).transpose(1, 2).reshape(y.shape),
    "upsample_bicubic2d": lambda net, y: F.interpolate(y, scale_factor=2, mode="bicubic"),
    "add": lambda net, y: y + torch.ones(1, 1, 12, 12),
    "batch_norm|batch norm": lambda net, y: net.norm(y),
    "LayerNorm": lambda net, y: net.layer_norm(y),
    "GroupNorm": lambda net, y: net.group_norm(y),
    "ConvTranspose2d": lambda net, y: net.up(y),
    "padding_mode": lambda net, y: net.wrapped(y),
    "written into a part of a constant": wide,
    "changes another view": in_place_on_a_view,
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    model = convert(Net(REFUSED[words]).eval(), widths=(2, 8, 32), example=X)
    with pytest.raises(UnsupportedOperation, match=words) as error:
        make_graph(model, example=X)
    assert "\n" not in str(error.value)


def test_the_error_names_operation_place_and_what_there_is():
    class Block(nn.Module):
        def forward(self, x):
            return F.gelu(x)

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Sequential(Block()), nn.Conv2d(4, 2, 1))
    model = convert(net.eval(), widths=(2, 8), example=X)
    with pytest.raises(UnsupportedOperation, match=r"gelu in module '2\.0'.*bilinear and nearest resize"):
        make_graph(model, example=X)


def test_deciding_by_values_is_refused():
    model = convert(Net(lambda net, y: y if y.sum() > 0 else -y).eval(), widths=(2, 8), example=X)
    with pytest.raises(UnsupportedOperation, match="decides by the values of its input"):
        make_graph(model, example=X)


def test_what_is_not_used_does_not_matter():
    def between(net, y):
        torch.sigmoid(y)  # computed, read by nothing
        return y

    model = convert(Net(between).eval(), widths=(2, 8), example=X)
    assert [op.kind for op in make_graph(model, example=X).ops] == ["conv", "quantize", "conv", "conv"]


def test_a_layer_called_past_its_hooks(agree):
    """`module.forward(x)` instead of `module(x)`: still an any-layer."""

    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.last = nn.Conv2d(3, 4, 3), AnyActivation(), AnyConv2d(4, 4, 3)

        def forward(self, x):
            return self.last.forward(self.act.forward(self.first.forward(x)))

    torch.manual_seed(0)
    graph = agree(Direct(), X)
    assert len(graph.profiles) == 9 and not graph.weights["last"].is_float


def test_quantized_weights_need_a_quantized_input():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), AnyConv2d(4, 4, 3))
    with pytest.raises(UnsupportedOperation, match="layer '2' has quantized weights but reads '1'"):
        make_graph(net, example=X, widths=(8,))


@pytest.mark.parametrize(
    "example",
    [None, X.int(), (X, X), {"a": X, "b": X}, torch.zeros(3), torch.zeros(1, 3, 0, 4), "image"],
    ids=lambda value: type(value).__name__,
)
def test_examples_that_are_none(example):
    model = convert(Net(lambda net, y: y).eval(), widths=(2, 8), example=X)
    with pytest.raises(DataError, match="one float tensor"):
        make_graph(model, example=example)


def test_an_example_that_does_not_fit():
    model = convert(Net(lambda net, y: y).eval(), widths=(2, 8), example=X)
    with pytest.raises(DataError, match="the example does not run"):
        make_graph(model, example=torch.zeros(1, 5, 12, 12))


def test_numpy_examples_and_half_precision():
    model = convert(Net(lambda net, y: y).eval(), widths=(2, 8), example=X)
    assert len(make_graph(model, example=X.double().numpy()).ops) == 4
    assert len(make_graph(model.bfloat16(), example=X).ops) == 4


@pytest.mark.parametrize(
    "free, between",
    [
        (True, lambda net, y: y),
        (True, lambda net, y: F.adaptive_avg_pool2d(y, 3)),
        (True, lambda net, y: F.interpolate(F.max_pool2d(y, 2), size=y.shape[2:])),
        (True, lambda net, y: F.avg_pool2d(y, y.shape[2:])),
        (True, lambda net, y: y + F.interpolate(F.max_pool2d(y, 4), scale_factor=4.0)),  # sizes divisible by 4 only
        (False, lambda net, y: F.avg_pool2d(y, 12)),
        (False, lambda net, y: F.pad(y, (0, y.shape[3] % 2))),
        (False, lambda net, y: y / y.shape[2]),
        (False, lambda net, y: F.interpolate(y, size=(y.shape[2] + 1, y.shape[3]))),
        (False, lambda net, y: y.flatten(1)[:, :, None, None][:, :4] if y.shape[2] != 12 else y),
    ],
)
def test_free_sizes(free, between):
    model = convert(Net(between).eval(), widths=(8, 32), example=X)
    assert trace(model, X[[0, 0]], None, [8]).free == free
