"""What tracing refuses, and with which words; what it sees of a network's Python."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anyprec.errors import DataError, UnsupportedOperation
from anyprec.nn.convert import convert
from anyprec.nn.layers import AnyActivation, AnyConv2d
from anyprec.packing.packing import make_graph, pack, unsupported
from anyprec.packing.trace import example_of, trace
from anyprec.run.model import load

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A convolution, whatever `between` does with its output, and another convolution."""

    def __init__(self, between):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 2, 1)
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)
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


def across_images(net, y):
    return y - y.mean(0, keepdim=True)


def products_of_images(net, y):
    return (y.flatten(1) @ y.flatten(1).t()).sum(1)[:, None, None, None] * y


def by_the_batch(net, y):
    return y / y.shape[0]


REFUSED = {
    "sin in the network's own forward, test_trace.py:": lambda net, y: torch.sin(y),
    "sort": lambda net, y: y.sort(1).values,
    "upsample_trilinear3d": lambda net, y: F.interpolate(y[:, None], scale_factor=1, mode="trilinear")[:, 0],
    "without running statistics": lambda net, y: net.norm(y),
    "copy in .*test_trace.py:.* writes a value into a part of a constant": wide,
    "changes another view": in_place_on_a_view,
    "mean.* across the images of a batch": across_images,
    "select.* some images of a batch": lambda net, y: y - y[0],
    "roll.* some images of a batch": lambda net, y: y.roll(1, 0),
    "flip.* images of a batch": lambda net, y: y.flip(0),
    "mm.* different images of a batch": lambda net, y: (
        (y.flatten(1) @ y.flatten(1).t()).sum(1)[:, None, None, None] * y
    ),
    "follow the number of images": by_the_batch,
    "_to_copy.* into int64": lambda net, y: y.long().float(),
    "gt.* no such operation": lambda net, y: y * (y > 0),
    "convolution.* 1-d and 2-d": lambda net, y: F.conv3d(y[:, None], torch.ones(1, 1, 1, 3, 3), padding=(0, 1, 1))[
        :, 0
    ],
    "draws random numbers": lambda net, y: y + torch.randn(1),
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
            return torch.sin(x)

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Sequential(Block()), nn.Conv2d(4, 2, 1))
    model = convert(net.eval(), widths=(2, 8), example=X)
    with pytest.raises(
        UnsupportedOperation, match=r"sin in module '2\.0' \(Block\), test_trace.py:\d+: .*nearest resize"
    ):
        make_graph(model, example=X)


def test_deciding_by_values_is_refused():
    model = convert(Net(lambda net, y: y if y.sum() > 0 else -y).eval(), widths=(2, 8), example=X)
    line = r"decides by the values of its input \(.* test_trace.py:\d+\)"
    with pytest.raises(UnsupportedOperation, match=line):
        make_graph(model, example=X)


def test_all_that_cannot_be_packed_is_named():
    def between(net, y):
        y = torch.sin(y) + 1
        y = torch.sort(y, 1).values
        torch.cos(y)  # read by nothing
        return torch.sin(torch.sin(y))

    model = convert(Net(between).eval(), widths=(2, 8), example=X)
    with pytest.raises(UnsupportedOperation) as error:
        make_graph(model, example=X)
    text = str(error.value)
    assert text.startswith("2 operations cannot be packed: (1) sin in") and "(and at 2 other places)" in text
    assert "(2) sort in" in text and "cos" not in text and "\n" not in text
    assert len(unsupported(model, X)) == 2
    assert unsupported(convert(Net(lambda net, y: y).eval(), widths=(2, 8), example=X), X) == []


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
    [None, X.int(), (X, X), {"a": X, "b": X}, (X, X[:1]), torch.zeros(3), torch.zeros(1, 3, 0, 4), "image"],
    ids=lambda value: type(value).__name__,
)
def test_examples_that_are_none(example):
    model = convert(Net(lambda net, y: y).eval(), widths=(2, 8), example=X)
    with pytest.raises(
        DataError, match=r"the example (holds these tensors|does not run|is .* int32; images are float)"
    ):
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
    assert trace(model, example_of(model, X[[0, 0]]), [8]).free == free


def with_skip(net, y):
    """Takes sizes that are divisible by 4: odd ones cannot show what follows."""
    return y + F.interpolate(F.max_pool2d(y, 4), scale_factor=4.0)


def padded_to_8(net, y):
    y = with_skip(net, y)
    return F.avg_pool2d(F.pad(y, (0, -y.shape[3] % 8, 0, -y.shape[2] % 8)), 8)


def cropped_to_32(net, y):
    y = with_skip(net, y)
    return y[:, :, : max(y.shape[2] // 32 * 32, 1), : max(y.shape[3] // 32 * 32, 1)].mean((2, 3), keepdim=True)


@pytest.mark.parametrize(
    "between",
    [
        padded_to_8,
        cropped_to_32,
        lambda net, y: F.avg_pool2d(y, 2) if max(y.shape[2:]) > 100 else y,  # only where it is larger
        lambda net, y: F.interpolate(y, scale_factor=2) if min(y.shape[2:]) < 9 else y,  # and smaller
        lambda net, y: y.narrow(2, 0, min(50, y.shape[2])),
    ],
)
def test_what_happens_at_other_sizes_only_fixes_the_size(between):
    model = convert(Net(between).eval(), example=X)
    assert not trace(model, example_of(model, X[[0, 0]]), [8]).free


@pytest.mark.parametrize(
    "cut",
    [
        lambda y: y[:, :, :50, -40:],  # beyond the example's 12
        lambda y: y[:, :, 3:-2, 1:30:2],
        lambda y: y[:, :, :40:2, ::3],
        lambda y: y[..., 2:100],
        lambda y: y[:, :, y.shape[2] - 5 :],
        lambda y: y[:, None, ..., :13][:, 0],
    ],
)
def test_slices_mean_the_same_at_any_size(cut, tmp_path):
    model = convert(Net(lambda net, y: cut(y)).eval(), example=X)
    pack(model, tmp_path / "n.apm", example=X, keep_float=True)
    packed = load(tmp_path / "n.apm")
    for height, width in ((12, 12), (7, 9), (45, 60), (70, 51)):
        x = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(height))
        with torch.no_grad():
            want = model(x)
        got = packed(x.numpy(), bits=32)
        assert got.shape == tuple(want.shape)
        np.testing.assert_allclose(got, want.numpy(), atol=1e-5)


def test_tokens_beyond_a_limit(tmp_path):
    """The first 32 tokens, as text classifiers take them, with an example of 12."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.first, self.last = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 5)

        def forward(self, t):
            return self.last(torch.relu(self.first(self.table(t[:, :32])))).mean(1)

    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (2, 100))
    model = convert(Tokens().eval(), example=tokens[:, :12], keep=())
    pack(model, tmp_path / "t.apm", example=tokens[:, :12], keep_float=True)
    packed = load(tmp_path / "t.apm")
    for length in (3, 12, 32, 33, 100):
        with torch.no_grad():
            want = model(tokens[:, :length]).numpy()
        np.testing.assert_allclose(packed(tokens[:, :length].numpy(), bits=32), want, atol=1e-5)


class Merging(nn.Module):
    """Swin's: four neighboring pixels become one, then a layer norm over all their channels."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.LayerNorm(16)
        self.middle, self.last = nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        x = x.reshape(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.last(self.middle(self.norm(x)).mean((1, 2)))


def test_numbers_of_one_width_do_not_decide_the_steps(tmp_path):
    model = convert(Merging().eval(), widths=(2, 4, 8), example=X)
    before = pack(model, tmp_path / "net.apm", example=X).ops
    with torch.no_grad():
        model.norm.tables["4"].weight.uniform_(0.5, 1.5)
        model.norm.tables["8"].bias.uniform_(-0.5, 0.5)
    after = pack(model, tmp_path / "net.apm", example=X)  # at 2 bit the norm still has ones and zeros
    assert after.ops >= before
    assert all(found.led_same_answers == found.led_answers > 0 for found in after.check.profiles.values())
