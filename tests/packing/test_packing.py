"""`anyprec.pack` and `anyprec pack` from end to end: the file, the report, the mistakes."""

import numpy as np
import pytest
import torch
from torch import nn

import anyprec
from anyprec.errors import AnyprecError, DataError, Diverged, ProfileError, UncalibratedBits
from anyprec.format.file import read, truncate
from anyprec.format.record import version_of
from anyprec.nn.calibrate import calibrate
from anyprec.nn.switching import any_layers
from anyprec.packing.packing import make_graph, pack
from anyprec.run.oracle import run_graph
from anyprec.widths import Profile
from anyprec.zoo import build

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build("resnet8", widths=(1, 2, 4, 8, 32), multiplier=0.5).eval()


def test_pack_from_end_to_end(model, tmp_path):
    path = tmp_path / "net.apm"
    report = anyprec.pack(
        model, path, example=X, image=([0.02] * 3, [-2.0] * 3), accuracy={8: 91.0, "1": 80}, name="net"
    )
    assert type(report) is anyprec.PackReport
    graph = read(path, verify=True)
    assert (graph.name, graph.input_shape, graph.image_size) == ("net", (None, None, 3), tuple(X.shape[2:]))
    assert [(p.name, p.accuracy) for p in graph.profiles] == [("1", 80.0), ("2", None), ("4", None), ("8", 91.0)]
    assert report.file_bytes == path.stat().st_size == report.bytes["8"]
    assert "net, input any x any x 3" in str(report) and report.to_dict()["profiles"] == ("1", "2", "4", "8")


@pytest.mark.thorough
def test_the_file_gives_the_graph_back(model, tmp_path):
    graph = make_graph(model, example=X, keep_float=True)
    pack(model, tmp_path / "net.apm", example=X, keep_float=True)
    again = read(tmp_path / "net.apm")
    assert again.ops == graph.ops and again.outputs == graph.outputs and again.planes == graph.planes
    assert all(np.array_equal(again.tables[name], table) for name, table in graph.tables.items())
    x = X.permute(0, 2, 3, 1).contiguous().numpy()
    for profile in graph.profiles:
        a, b = (run_graph(g, x, profile.name)["fc"] for g in (graph, again))
        assert np.array_equal(a, b)


@pytest.mark.thorough
@pytest.mark.parametrize("quantizer", ["nested", "dorefa", "lsq"])
def test_a_prefix_is_the_narrower_model(quantizer, tmp_path):
    torch.manual_seed(0)
    model = build("resnet8", widths=(1, 2, 4, 8, 32), quantizer=quantizer, scale="mean", multiplier=0.5).eval()
    report = pack(model, tmp_path / "net.apm", example=X, keep_float=True)
    assert list(report.bytes.values()) == sorted(report.bytes.values())
    x = X.permute(0, 2, 3, 1).contiguous().numpy()
    whole = read(tmp_path / "net.apm")
    for k in (1, 2, 4, 8):
        assert truncate(tmp_path / "net.apm", tmp_path / "part.apm", k) == report.bytes[str(k)]
        part = read(tmp_path / "part.apm", max_bits=k)
        assert np.array_equal(run_graph(part, x, str(k))["fc"], run_graph(whole, x, str(k))["fc"])


def test_small(tmp_path):
    """The file of a network of some size is little more than its weights."""
    model = build("resnet8", widths=(1, 2, 4, 8), multiplier=4)
    report = pack(model, tmp_path / "net.apm", example=X)
    tables = sum(table.nbytes for table in read(tmp_path / "net.apm").tables.values())
    assert report.file_bytes < 1.05 * (report.quantized_weights + 4 * report.float_weights + tables)


def test_weights_in_their_order(model):
    graph = make_graph(model, example=X, keep_float=True)
    layer = any_layers(model)["blocks.1.conv1"]
    weight = graph.weights["blocks.1.conv1"]
    assert np.array_equal(weight.values, layer.weight.detach().permute(0, 2, 3, 1).numpy())
    for k in (1, 2, 4, 8):
        assert np.array_equal(weight.codes[k], layer.codes(k).permute(0, 2, 3, 1).numpy())
    with pytest.raises(KeyError):
        weight.codes[3]


def test_equal_quantizers_are_one(tmp_path):
    """Two layers that read one value with equal ranges share its codes; with others they do not."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.last = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            x = torch.relu(self.first(x))
            return self.last(self.a(x) + self.b(x))

    model = anyprec.convert(Two().eval(), widths=(2, 8, 32), example=X)
    count = [sum(op.kind == "quantize" for op in make_graph(model, example=X).ops)]
    with torch.no_grad():
        model.b.act.ranges["8"] *= 2
    count.append(sum(op.kind == "quantize" for op in make_graph(model, example=X).ops))
    assert count == [1, 2]


# --- Mistakes ---


@pytest.mark.thorough
def test_mistakes(model, tmp_path):
    with pytest.raises(UncalibratedBits, match="bits=3 is not one of this model's widths"):
        make_graph(model, example=X, widths=(1, 3))
    with pytest.raises(AnyprecError, match="no any-precision layer"):
        make_graph(nn.Conv2d(3, 4, 3), example=X)
    with pytest.raises(AnyprecError, match="3 labels for a network with 10 classes"):
        make_graph(model, example=X, labels=("a", "b", "c"))
    with pytest.raises(AnyprecError, match="1 scales and 3 shifts"):
        make_graph(model, example=X, image=([1.0], [0.0] * 3))
    with pytest.raises(AnyprecError, match="accuracy is given for 3"):
        make_graph(model, example=X, accuracy={3: 1.0})
    with pytest.raises(UncalibratedBits, match="no norm tables yet"):
        make_graph(model, example=X, profiles=[Profile("fast", {"blocks.0.conv0": 2})])
    floats = build("resnet8", widths=(32,), multiplier=0.25, scale="mean")
    with pytest.raises(AnyprecError, match="nothing to pack"):
        make_graph(floats, example=X)
    whole = build("resnet8", widths=(2, 8), multiplier=0.25)
    with pytest.raises(UncalibratedBits, match="bits=32"):
        make_graph(whole, example=X, keep_float=True)
    with pytest.raises(AnyprecError, match="nowhere"):
        pack(model, tmp_path / "nowhere" / "net.apm", example=X)


def test_profiles_that_do_not_fit():
    torch.manual_seed(0)
    model = build("resnet8", widths=(2, 8, 32), multiplier=0.25)
    uneven = Profile("uneven", {"blocks.0.conv0": (32, 8)})
    fast = Profile("fast", {"blocks.0.conv0": 2})
    calibrate(model, [X], (), profiles=(uneven, fast), progress=False)
    with pytest.raises(ProfileError, match="32-bit weights and a 8-bit input"):
        make_graph(model, example=X, profiles=[uneven])
    with pytest.raises(ProfileError, match="a name twice"):
        make_graph(model, example=X, profiles=[fast, fast])


def test_sums_that_leave_32_bits():
    net = nn.Sequential(nn.Linear(3, 33026), nn.ReLU(), nn.Linear(33026, 2), nn.Linear(2, 2))
    x = torch.rand(2, 3)
    model = anyprec.convert(net.eval(), widths=(4, 8), example=x)
    with pytest.raises(AnyprecError, match="layer '2' sums 33026 products, which at 8 x 8 bits"):
        make_graph(model, example=x)
    assert [p.name for p in make_graph(model, example=x, widths=(4,)).profiles] == ["4"]


def test_not_calibrated_yet():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1))
    model = anyprec.convert(net.eval(), widths=(2, 8, 32))
    with pytest.raises(UncalibratedBits):
        make_graph(model, example=X)


def test_nan_is_found(model):
    broken = build("resnet8", widths=(2, 8), multiplier=0.25)
    with torch.no_grad():
        broken.blocks[0].norm1.tables["8"].bias.fill_(torch.nan)
    with pytest.raises(Diverged, match=r"at 8 bit nan is among its numbers"):
        make_graph(broken, example=X)


def test_no_example():
    with pytest.raises(DataError):
        make_graph(build("resnet8", multiplier=0.25), example=None)


def stem_net(*, inside=8, out=16, stride=1, kernel=3, groups=1):
    return nn.Sequential(
        nn.Conv2d(3, inside, 1), nn.ReLU(),
        nn.Conv2d(inside, out, kernel, stride=stride, padding=1, groups=groups), nn.ReLU(),
        nn.Conv2d(out, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


@pytest.mark.parametrize("options, expected", [
    ({}, True), ({"kernel": 4}, True), ({"stride": 2}, False), ({"inside": 4}, False), ({"groups": 2}, False),
    ({"kernel": 5}, False), ({"inside": 144, "out": 128}, False),
])  # fmt: skip
def test_float_convs_of_a_stem_by_toom_cook(options, expected, tmp_path):
    """Where it is faster; the file then has format 3, and still answers as the module does (pack verifies it)."""
    torch.manual_seed(0)
    model = anyprec.convert(stem_net(**options), (2, 8), example=X, keep=("0", "2", "last"))
    calibrate(model, [X])
    report = pack(model, tmp_path / "net.apm", example=X)
    graph = read(tmp_path / "net.apm")
    assert report.check is not None
    assert [op.name for op in graph.ops if "toom_cook" in op.attributes] == (["2"] if expected else [])
    assert version_of(graph) == (3 if expected else 1)
    x = X.permute(0, 2, 3, 1).contiguous().numpy()
    engine = anyprec.load(tmp_path / "net.apm", layout="NHWC")
    for profile in graph.profiles:
        (answer,) = run_graph(graph, x, profile.name).values()
        assert np.array_equal(engine(x, bits=profile.name), answer.reshape(len(x), -1))


@pytest.mark.parametrize(
    "given, complaint",
    [
        ({"image": "x"}, "image='x' is not known; give anyprec.Preprocessing"),
        ({"accuracy": {"1": "x"}}, "is not a table of percents; give one for each profile"),
        ({"accuracy": 5}, "accuracy=5 is not a table of percents"),
        ({"profiles": ["x"]}, "profiles='x' is not a profile; give anyprec.Profile"),
    ],
)
def test_wrong_kinds_of_arguments(model, tmp_path, given, complaint):
    with pytest.raises(AnyprecError, match=complaint):
        pack(model, tmp_path / "net.apm", example=X, **given)
    with pytest.raises(AnyprecError, match="is no name of a file"):
        pack(model, "", example=X)
