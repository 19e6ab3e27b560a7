"""`anyprec quantize` from end to end, as a user types it."""

import json
import sys

import numpy as np
import pytest
import torch

import anyprec
from anyprec.cli import main

NETWORK = """
import torch
from torch import nn

import anyprec


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()


def with_preprocessing():
    return make(), anyprec.Preprocessing((0.5,) * 3, (0.5,) * 3, size=10, to=12, filter="bicubic")


def nothing():
    return None


def fails():
    return {}["weights"]


def wants(weights):
    return None


class Sorts(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make()

    def forward(self, x):
        return self.net(x).sort().values


def sorts():
    return Sorts().eval()


number = 3
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    dice = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for i in range(12):
        image.fromarray(dice.integers(0, 256, (16, 20, 3), dtype=np.uint8)).save(tmp_path / "photos" / f"{i:02}.png")
    (tmp_path / "my_net.py").write_text(NETWORK)
    (tmp_path / "broken.py").write_text("def make(:")
    (tmp_path / "three.txt").write_text("a\nb\nc\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


QUICK = ["--images", "photos", "--out", "net.apm", "--widths", "2,8", "--tune-steps", "2"]


def test_json(place, capsys):
    assert main(["quantize", "my_net.py:make", "--size", "12", *QUICK, "--json"]) == 0
    text, log = capsys.readouterr()
    record = json.loads(text)
    assert log == "" and (record["images"], record["held_out"]) == (10, 2)
    assert set(record["results"]) == {"2", "8"} and set(record["results"]["8"]) == {"agreement", "error", "bytes"}
    assert record["results"]["8"]["error"] < 0.2 and record["pack"]["check"] is not None
    model = anyprec.load("net.apm")
    assert model.name == "make" and model.preprocessing.mean == pytest.approx((0.485, 0.456, 0.406), abs=1e-6)


def test_the_table_and_what_a_function_says(place, capsys):
    (place / "labels.txt").write_text("a\nb\nc\nd\n")
    arguments = ["--labels", "labels.txt", "--filter", "lanczos", "--count", "6"]
    assert main(["quantize", "my_net:with_preprocessing", *QUICK, *arguments]) == 0
    out, log = capsys.readouterr()
    assert out.startswith("net.apm: with_preprocessing, fitted to 6 images") and "same answer" in out
    assert "next: anyprec run net.apm photo.jpg" in log and "tune" in log
    how = anyprec.load("net.apm").preprocessing
    assert (how.size, how.to, how.filter) == ((10, 10), (12, 12), "lanczos")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_net:make"], "give it with --size"),
        (["my_net:missing", "--size", "12"], "give module:function"),
        (["no_such_module:make", "--size", "12"], "give module:function"),
        (["other.py:make", "--size", "12"], "there is no file other.py"),
        (["my_net:nothing", "--size", "12"], "gives a NoneType"),
        (["my_net:number", "--size", "12"], "is a int; it must be an nn.Module"),
        (["my_net:fails", "--size", "12"], "my_net:fails does not make a network: KeyError: 'weights'"),
        (["my_net:wants", "--size", "12"], "missing 1 required positional argument"),
        (["broken.py:make", "--size", "12"], "SyntaxError"),
        ([":make", "--size", "12"], "names no module"),
        (["my_net.py", "--size", "12"], "names no function; give my_net.py:make"),
        (["weights.pth", "--size", "12"], "holds weights and no network"),
        (["packed.apm", "--size", "12"], "is a packed model file already"),
        (["my_net:make", "--size", "12", "--weights", "w.pt"], "are for timm names"),
        (["my_net:make", "--size", "12", "--out", "none/net.apm"], "make the folder first"),
        (["my_net:make", "--size", "12", "--out", "photos"], "that is a folder"),
        (["my_net:make", "--size", "12", "--resize", "10"], "is smaller than size"),
        (["my_net:make", "--size", "12", "--mean", "0.5", "--std", "0.5"], "does not run through Sequential"),
        (["my_net:make", "--size", "12", "--labels", "three.txt"], "3 labels for a network with 4 classes"),
        (["my_net:sorts", "--size", "12"], "has no such operation"),
        (["my_net:make", "--size", "12", "--mean", "a,b,c"], "is not numbers"),
        (["my_net:make", "--size", "12", "--images", "none"], "there is no folder none"),
    ],
)
def test_mistakes(place, capsys, arguments, message):
    assert main(["quantize", arguments[0], *QUICK, *arguments[1:]]) == 2
    assert message in capsys.readouterr().err
    assert not (place / "net.apm").exists()


def test_timm_names_need_timm(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["quantize", "mobilenetv1_100", *QUICK]) == 2
    assert "pip install timm" in capsys.readouterr().err


@pytest.fixture
def timm():
    pytest.importorskip("torchvision_operators").declare()
    return pytest.importorskip("timm")


def test_a_timm_network(place, capsys, timm):
    net = timm.create_model("test_resnet", num_classes=1000)
    torch.save(net.state_dict(), "weights.pth")
    arguments = ["--weights", "weights.pth", "--size", "32", "--widths", "8"]
    assert main(["quantize", "test_resnet", *QUICK, *arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["results"]["8"]["error"] < 0.1 and not record["normalization_assumed"]
    assert tuple(record["preprocessing"]["mean"]) == net.pretrained_cfg["mean"]
    assert anyprec.load("net.apm").name == "test_resnet"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["test_resnett"], "'test_resnett' is not a network of timm"),
        (["tf_efficientnet_lit"], "did you mean tf_efficientnet_lite0"),
        (["test_resnet", "--weights", "none.pth"], "there is no file none.pth"),
        (["test_resnet", "--weights", "three.txt"], "three.txt does not fit test_resnet"),
    ],
)
def test_mistakes_with_timm(place, capsys, timm, arguments, message):
    assert main(["quantize", arguments[0], *QUICK, *arguments[1:]]) == 2
    assert message in capsys.readouterr().err


def test_weights_that_cannot_be_fetched(place, capsys, timm, monkeypatch):
    def offline(*args, **options):
        raise OSError("no route to the host\nand more")

    monkeypatch.setattr(timm, "create_model", offline)
    assert main(["quantize", "test_resnet", *QUICK]) == 2
    error = capsys.readouterr().err
    assert "give them with --weights FILE): no route to the host" in error and "and more" not in error


# --- ONNX ---


@pytest.fixture
def onnx_file(place):
    """input (N, 3, 12, 12) or another, a network of two convolutions -> its path"""
    onnx = pytest.importorskip("onnx")
    dice = np.random.default_rng(0)

    def make(*sizes, inputs=1):
        helper, channels = onnx.helper, sizes[0] or 3
        weights = {
            "a": dice.standard_normal((8, channels, 3, 3)), "b": dice.standard_normal((8, 8, 3, 3)),
            "c": dice.standard_normal((4, 8)),
        }  # fmt: skip
        nodes = [
            helper.make_node("Conv", ["x", "a"], ["1"]), helper.make_node("Relu", ["1"], ["2"]),
            helper.make_node("Conv", ["2", "b"], ["3"]), helper.make_node("Relu", ["3"], ["4"]),
            helper.make_node("GlobalAveragePool", ["4"], ["5"]), helper.make_node("Flatten", ["5"], ["6"]),
            helper.make_node("Gemm", ["6", "c"], ["7"], transB=1),
        ]  # fmt: skip
        given = [helper.make_tensor_value_info("x", 1, ["N", *(n or f"any{i}" for i, n in enumerate(sizes))])]
        if inputs == 2:
            given.append(helper.make_tensor_value_info("more", 1, ["N", 4]))
            nodes.append(helper.make_node("Add", ["7", "more"], ["8"]))
        last = helper.make_tensor_value_info(nodes[-1].output[0], 1, ["N", 4])
        tensors = [onnx.numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()]
        graph = helper.make_graph(nodes, "g", given, [last], tensors)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "net.onnx")

    return make


def test_an_onnx_file(onnx_file, capsys):
    onnx_file(3, 12, 12)
    assert main(["quantize", "net.onnx", *QUICK]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("net.apm: net, fitted to 10 images") and "cover 12 x 12" in out
    assert "does not say how pictures are normalized" in out
    model = anyprec.load("net.apm")
    assert (model.name, model.preprocessing.size) == ("net", (12, 12))

    report = anyprec.quantize("net.onnx", "photos", "again.apm", widths=(8,), preprocessing=model.preprocessing)
    assert report.error[8] < 0.1 and report.network == "net"


def test_an_onnx_file_of_any_size(onnx_file, capsys):
    onnx_file(None, None, None)
    assert main(["quantize", "net.onnx", *QUICK]) == 2
    assert "takes pictures of any size (N, any, any, any); give one, such as --size 224" in capsys.readouterr().err
    options = ["--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--json"]
    assert main(["quantize", "net.onnx", *QUICK, "--size", "14", *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["preprocessing"]["size"] == [14, 14] and not record["normalization_assumed"]


def test_a_gray_onnx_file(onnx_file, capsys):
    onnx_file(1, 12, 12)
    assert main(["quantize", "net.onnx", *QUICK]) == 2
    assert "takes gray pictures; give --mean and --std" in capsys.readouterr().err
    assert main(["quantize", "net.onnx", *QUICK, "--mean", "0.5,0.5,0.5", "--std", "1,1,1"]) == 2
    assert "--mean has 3 numbers, net.onnx takes 1 channels" in capsys.readouterr().err
    assert main(["quantize", "net.onnx", *QUICK, "--mean", "0.5", "--std", "0.5", "--json"]) == 0
    assert anyprec.load("net.apm").preprocessing.channels == 1


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        ({"sizes": (3, 12, 12)}, ["--size", "14"], "takes pictures of 12 x 12 only, not 14 x 14"),
        ({"sizes": (5, 12, 12)}, [], "takes (N, 5, 12, 12), and a picture is (N, 3, H, W)"),
        ({"sizes": (3, 12, 12), "inputs": 2}, [], "has 2 inputs (x, more), quantize takes networks of one"),
        ({"sizes": (3, 12, 12)}, ["--weights", "w.pt"], "an ONNX file brings its weights"),
    ],
)
def test_mistakes_with_onnx(onnx_file, capsys, make, arguments, message):
    onnx_file(*make.pop("sizes"), **make)
    assert main(["quantize", "net.onnx", *QUICK, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_no_onnx(place, capsys):
    pytest.importorskip("onnx")
    assert main(["quantize", "none.onnx", *QUICK]) == 2
    assert "cannot read none.onnx: No such file" in capsys.readouterr().err
    (place / "net.onnx").write_bytes(b"no model")
    assert main(["quantize", "net.onnx", *QUICK]) == 2
    assert "net.onnx is not a valid ONNX model" in capsys.readouterr().err
