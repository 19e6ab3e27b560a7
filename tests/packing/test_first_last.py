"""`pack(..., first_last="8bit")`: which layers, from what ranges, how close to float; the command's --first-last."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyprec
from anyprec.cli import main
from anyprec.errors import AnyprecError, DataError
from anyprec.format.file import read
from anyprec.nn.calibrate import calibrate
from anyprec.nn.layers import AnyActivation, AnyConv2d
from anyprec.nn.switching import bits
from anyprec.packing.codes import channel_codes
from anyprec.packing.packing import make_graph, pack
from anyprec.run.oracle import run_graph
from anyprec.widths import Profile
from anyprec.zoo import build

X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
IMAGE = ([0.02, 0.016, 0.018], [-2.4, -2.0, -2.3])  # up to 2.7 and down to -2.4


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build("resnet8", widths=(1, 2, 4, 8, 32), multiplier=0.5).eval()


def fixed(graph):
    return {name for name, weight in graph.weights.items() if weight.bits == 8}


def op(graph, name):
    return next(op for op in graph.ops if op.name == name)


def nhwc(x):
    return np.ascontiguousarray(x.permute(0, 2, 3, 1).numpy())


# --- Which layers, and their numbers ---


@pytest.mark.thorough
def test_first_and_last_layer(model):
    graph = make_graph(model, example=X, keep_float=True, first_last="8bit")
    assert fixed(graph) == {"conv0", "fc"} == fixed(make_graph(model, example=X, first_last="8bit"))
    assert not fixed(make_graph(model, example=X)) and not fixed(
        make_graph(model, example=X, widths=(32,), first_last="8bit")
    )
    stem, last = op(graph, "conv0.in"), op(graph, "fc.in")
    assert stem.inputs == ("input",) and stem.bits == last.bits == 8
    assert stem.attributes["signed"] and op(graph, "conv0").attributes["signed"]
    r = X.abs().max().item()
    np.testing.assert_allclose(graph.tables["conv0.in"][0], np.repeat([[127.5 / r], [127.5]], 3, axis=1), rtol=1e-6)
    assert np.array_equal(graph.tables["conv0.in"][-1], [[1, 1, 1], [0, 0, 0]])  # float: as it is
    # Every profile has its own range of the last layer's input.
    assert len({row.tobytes() for row in graph.tables["fc.in"]}) == 5


def test_all_layers_before_the_first_quantized_one():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 25, 5),
    )  # fmt: skip
    x = torch.rand(4, 3, 8, 8)
    model = anyprec.convert(net, widths=(1, 8), example=x, keep=("0", "2", "7")).eval()
    assert fixed(make_graph(model, example=x, first_last="8bit")) == {"0", "2", "7"}


@pytest.mark.thorough
def test_ranges_of_the_image(model):
    graph = make_graph(model, example=X, image=IMAGE, first_last="8bit")
    assert graph.tables["conv0.in"][0, 0, 0] == np.float32(127.5 / (255 * 0.02 - 2.4))
    plain = make_graph(model, example=X, image=([1 / 255] * 3, [0.0] * 3), first_last="8bit")
    assert not op(plain, "conv0.in").attributes["signed"]
    assert np.array_equal(plain.tables["conv0.in"][0, :, 0], np.float32([255, 0]))
    codes = run_graph(plain, np.arange(192, dtype=np.uint8).reshape(1, 8, 8, 3), "1", all_values=True)["conv0.in"]
    assert np.array_equal(codes.reshape(-1), np.arange(192))  # pixels, exactly


def test_codes_of_a_weight():
    values = np.random.default_rng(0).standard_normal((5, 3, 3, 2)).astype(np.float32)
    values[1] *= 100
    values[2] = 0
    codes, step = channel_codes(values)
    back = (2.0 * codes - 255) * step[:, None, None, None]
    largest = np.abs(values).max(axis=(1, 2, 3))
    assert codes.dtype == np.uint8 and step[2] == 0 and (codes.max(axis=(1, 2, 3)) >= 127).sum() >= 4
    assert (np.abs(back - values).max(axis=(1, 2, 3)) <= 1.0001 * largest / 255).all()
    ends = np.abs(values) == largest[:, None, None, None]
    np.testing.assert_allclose(back[ends], values[ends], rtol=1e-6)


# --- The network they make ---


@pytest.mark.thorough
def test_near_the_float_edges(model):
    plain, ours = (
        make_graph(model, example=X, keep_float=True, first_last=first_last) for first_last in ("float", "8bit")
    )
    x = nhwc(X)
    for profile in ("8", "32"):
        a, b = (run_graph(graph, x, profile, all_values=True) for graph in (plain, ours))
        for name, most in (("conv0", 0.05), ("fc", 0.1)):
            assert np.abs(a[name] - b[name]).max() < most * a[name].std() + 1e-9, (profile, name)
        if profile == "32":
            assert np.array_equal(a["fc"], b["fc"])


def test_agrees_with_torch_on_rounded_edges():
    """The packed network is the module with its first and last layers rounded: simulated here in torch."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    ).eval()  # fmt: skip
    model = anyprec.convert(net, widths=(2, 8), example=X)
    graph = make_graph(model, example=X, first_last="8bit")
    assert fixed(graph) == {"0", "8"} and not op(graph, "8.in").attributes["signed"]
    seen = {}
    for width in (2, 8):
        hooks = [model[i].register_forward_pre_hook(lambda m, x: seen.update({m: x[0]})) for i in (0, 8)]
        with torch.no_grad(), bits(model, width):
            model(X)
            for hook in hooks:
                hook.remove()
            r = float(seen[model[0]].abs().max())
            x = ((X / r * 127.5 + 127.5).round().clip(0, 255) * 2 - 255) * r / 255
            y = F.conv2d(x, rounded(model[0].weight), model[0].bias, 2, 2)
            for layer in list(model)[1:8]:
                y = layer(y)
            top = float(seen[model[8]].max())
            y = (y / top * 255).round().clip(0, 255) * top / 255
            wanted = F.linear(y, rounded(model[8].weight[:, :, None, None])[:, :, 0, 0], model[8].bias).numpy()
        given = run_graph(graph, nhwc(X), str(width))["8"].reshape(wanted.shape)
        gap = np.abs(given - wanted) / wanted.std()
        assert np.median(gap) < 1e-3 and gap.max() < 0.3, (width, np.median(gap), gap.max())


def rounded(weight):
    codes, step = channel_codes(weight.detach().numpy())
    return torch.from_numpy((2.0 * codes - 255) * step[:, None, None, None]).float()


def test_codes_at_hand_are_read_as_they_are():
    """A classifier right behind an activation: its codes of k bits, not rounded a second time."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.mid = nn.Conv2d(3, 8, 3, 2), AnyConv2d(8, 8, 3)
            self.act0, self.act1 = AnyActivation(), AnyActivation()
            self.fc = nn.Linear(8 * 25, 10)

        def forward(self, x):
            return self.fc(self.act1(self.mid(self.act0(self.stem(x)))).flatten(1))

    torch.manual_seed(0)
    graph = make_graph(Net().eval(), example=X, widths=(2, 8, 32), first_last="8bit")
    assert fixed(graph) == {"stem", "fc"} and [o.name for o in graph.ops if o.bits] == ["stem.in"]
    plain = make_graph(Net().eval(), example=X, widths=(2, 8, 32))
    assert len(graph.ops) == len(plain.ops)  # a quantize more, a dequantize less


def test_two_heads_and_a_shared_weight():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.mid, self.a, self.b = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
            self.keep = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            x = torch.relu(self.mid(torch.relu(self.stem((x - 0.1) * 2))))
            x = torch.relu(self.keep(x)) + x
            return torch.softmax(self.a(x), 1), self.b(x), self.keep(x)

    model = anyprec.convert(Net().eval(), widths=(2, 8), example=X, keep=("stem", "a", "b", "keep"))
    graph = make_graph(model, example=X, first_last="8bit", image=IMAGE)
    assert fixed(graph) == {"stem", "a", "b"}  # keep works inside the network too
    assert graph.weights["keep"].is_float and len([o for o in graph.ops if o.bits == 8]) == 2  # a and b share one
    # The image is scaled before the stem, so its range is not the image's but the example's.
    r = ((X - 0.1) * 2).abs().max().item()
    np.testing.assert_allclose(graph.tables["stem.in"][0, 0], 2 * 127.5 / r, rtol=1e-6)


def test_zeros_around_the_image_are_padding():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.mid, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.last(torch.relu(self.mid(torch.relu(self.stem(F.pad(x, (1, 1, 1, 1)))))))

    model = anyprec.convert(Net().eval(), widths=(2, 8), example=X)
    graph = make_graph(model, example=X, first_last="8bit")
    assert "pad" not in {o.kind for o in graph.ops} and op(graph, "stem").attributes["pad"] == (1, 1, 1, 1)


def test_sums_that_would_leave_32_bits_stay_float():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 33026), nn.ReLU(), nn.Linear(33026, 2))
    x = torch.rand(4, 3)
    model = anyprec.convert(net.eval(), widths=(2, 8), example=x, keep=("0", "4"))
    assert fixed(make_graph(model, example=x, first_last="8bit")) == {"0"}


def test_mixed_profiles(model):
    torch.manual_seed(0)
    net = build("resnet8", widths=(2, 8, 32), multiplier=0.25).eval()
    fast = Profile("fast", {"blocks.0.conv0": 2, "blocks.1.conv0": 32})
    calibrate(net, [X], (), profiles=(fast,), progress=False)
    graph = make_graph(net, example=X, keep_float=True, profiles=[fast], first_last="8bit")
    profile = graph.profiles[-1]
    assert fixed(graph) == {"conv0", "fc"} and "conv0" not in profile.weights and "fc.in" not in profile.acts
    plain = make_graph(net, example=X, keep_float=True, profiles=[fast])
    a, b = (run_graph(g, nhwc(X), "fast")["fc"] for g in (plain, graph))
    assert np.abs(a - b).max() < 0.3 * a.std()


# --- The file, the command, the mistakes ---


@pytest.mark.thorough
def test_the_file_runs_natively(model, tmp_path):
    path = tmp_path / "net.apm"
    report = pack(model, path, example=X, keep_float=True, image=IMAGE, first_last="8bit")
    assert (report.fixed_layers, report.float_layers) == (2, 2) and "2 always 8 bit" in str(report)
    graph, packed = read(path, verify=True), anyprec.load(path)
    for x in (nhwc(X), np.random.default_rng(0).integers(0, 256, (3, 20, 12, 3), np.uint8)):
        for profile in graph.profiles:
            wanted = run_graph(graph, x, profile.name)["fc"]
            assert np.array_equal(packed(x, bits=profile.name, layout="NHWC").reshape(wanted.shape), wanted)


@pytest.mark.thorough
def test_command(tmp_path, capsys, request):
    sets = ["epochs=1", "limit=256", "net_options.multiplier=0.25"]
    run = tmp_path / "run"
    assert main(["train", "digits", *(a for s in sets for a in ("--set", s)), "--out", str(run), "--json"]) == 0
    capsys.readouterr()
    out = tmp_path / "digits.apm"
    assert main(["pack", str(run), "--out", str(out), "--first-last", "8bit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fixed_layers"] == 2
    graph = read(out)
    assert all(p.accuracy is None for p in graph.profiles)  # what was measured had float first and last layers
    assert main(["pack", str(run), "--out", str(out), "--edges", "8bit", "--json"]) == 0  # the old word
    done = capsys.readouterr()
    assert json.loads(done.out)["fixed_layers"] == 2 and "--edges is called --first-last now" in done.err
    assert main(["pack", str(run), "--out", str(out), "--first-last", "8bit", "--dataset", "cifar10"]) == 2
    assert "cifar10 has images of 3 channels, the network takes 1" in capsys.readouterr().err


def test_mistakes(model):
    with pytest.raises(AnyprecError, match="first_last='4bit' is not known; choose one of float, 8bit"):
        make_graph(model, example=X, first_last="4bit")
    with pytest.raises(DataError, match="layer 'conv0' reads only zeros on the example"):
        make_graph(model, example=torch.zeros(1, 3, 16, 16), first_last="8bit")
