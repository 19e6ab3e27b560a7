"""`anyprec quantize` from end to end, as a user types it."""

import json

import numpy as np
import pytest

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
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    dice = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for i in range(12):
        image.fromarray(dice.integers(0, 256, (16, 20, 3), dtype=np.uint8)).save(tmp_path / "photos" / f"{i:02}.png")
    (tmp_path / "my_net.py").write_text(NETWORK)
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
        (["net.onnx", "--size", "12"], "ONNX files are not read yet"),
        (["my_net:make", "--size", "12", "--mean", "a,b,c"], "is not numbers"),
        (["my_net:make", "--size", "12", "--images", "none"], "there is no folder none"),
    ],
)
def test_mistakes(place, capsys, arguments, message):
    assert main(["quantize", arguments[0], *QUICK, *arguments[1:]]) == 2
    assert message in capsys.readouterr().err
    assert not (place / "net.apm").exists()


def test_timm_names_need_timm(place, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    assert main(["quantize", "mobilenetv1_100", *QUICK]) == 2
    assert "pip install timm" in capsys.readouterr().err
