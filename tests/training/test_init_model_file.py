"""`init` with a model file: a training goes on from what was packed, or ends with one line before it begins."""

import shutil

import pytest
import torch

import anyprec
from anyprec.cli import main
from anyprec.data import load_data
from anyprec.errors import CheckpointError, UnknownModel
from anyprec.models import catalog
from anyprec.nn.switching import any_layers
from anyprec.packing import unpack as unpack_module
from anyprec.packing.packing import pack
from anyprec.run.accuracy import measure
from anyprec.training.build import model_file_of
from anyprec.training.checkpoint import load_model
from anyprec.training.recipe import Recipe
from anyprec.training.run import train

SMALL = Recipe(net="resnet8", data="digits", epochs=1, batch_size=64, limit=640,
               widths=(1, 2, 8, 32), quantizer="lsq", lr=0.01)  # fmt: skip
STILL = ["lr=1e-9", "optimizer=sgd", "momentum=0.0", "limit=128"]  # two steps that change next to nothing


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    train(SMALL.override(["epochs=3"]), folder, progress=False)
    model = load_model(folder / "model.pt")
    pack(model, folder / "net.apm", example=torch.rand(8, 1, 8, 8))
    return folder / "net.apm"


@pytest.mark.thorough
def test_training_goes_on_from_the_file(file, tmp_path):
    results = train(SMALL.override([f"init='{file}'", *STILL]), tmp_path, progress=False)
    data = load_data("digits", "test")
    packed = {int(row.profile): row.accuracy for row in measure(anyprec.load(file), data, ["1", "2", "8"], batch=100)}
    assert packed[8] > 50
    for bits, accuracy in packed.items():  # the running statistics have moved a little in two steps
        assert results[bits]["accuracy"] == pytest.approx(accuracy, abs=6), bits
    assert results[32]["accuracy"] == pytest.approx(packed[8], abs=10)
    again, first = load_model(tmp_path / "model.pt"), load_model(file.parent / "model.pt")
    for name, layer in any_layers(again).items():
        assert torch.equal(layer.codes(8), any_layers(first)[name].codes(8))


@pytest.mark.thorough
def test_by_name(file, tmp_path, monkeypatch):
    shutil.copy(file, tmp_path / "digits-net.apm")
    shutil.copy(catalog.FOLDER / "cifar10-vgg.json", tmp_path / "digits-net.json")
    monkeypatch.setattr(catalog, "FOLDER", tmp_path)
    assert model_file_of("digits-net") == tmp_path / "digits-net.apm"
    results = train(SMALL.override(["init=digits-net", *STILL]), tmp_path / "run", progress=False)
    assert results[8]["accuracy"] > 50


def test_what_is_a_model_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_file_of("cifar10-vgg") == catalog.FOLDER / "cifar10-vgg.apm"
    (tmp_path / "cifar10-vgg").touch()  # a path that exists goes first
    assert model_file_of("cifar10-vgg") is None
    assert model_file_of("runs/x/model.pt") is None and model_file_of("weights.safetensors") is None
    assert str(model_file_of("gone.apm")) == "gone.apm"  # whoever opens it says what is wrong


@pytest.mark.thorough
def test_resume_needs_the_file_no_more(file, tmp_path, monkeypatch):
    moved = tmp_path / "moved.apm"
    shutil.copy(file, moved)
    recipe = SMALL.override([f"init='{moved}'", *STILL])
    wanted = train(recipe, tmp_path / "run", progress=False)
    moved.unlink()
    monkeypatch.setattr(unpack_module, "unpack", None)
    assert train(recipe, tmp_path / "run", resume=True, progress=False) == wanted


@pytest.mark.thorough
def test_another_network_is_refused_before_training(file, tmp_path, capsys):
    recipe = SMALL.override([f"init='{file}'", "net_options.multiplier=2"])
    with pytest.raises(CheckpointError, match=r"net\.apm: the weight of 'conv0' is"):
        train(recipe, tmp_path / "a", progress=False)
    settings = ["--set", f"init={file}", "--set", "net=resnet20", "--out", str(tmp_path / "b")]
    assert main(["train", "digits", *settings]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("anyprec: error: a training of this network cannot start from") and "\n" not in error


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "broken.apm").write_bytes(b"nothing")
    with pytest.raises(anyprec.AnyprecError, match=r"broken\.apm"):
        train(SMALL.override([f"init='{tmp_path / 'broken.apm'}'"]), tmp_path / "a", progress=False)
    with pytest.raises(anyprec.AnyprecError, match=r"gone\.apm"):
        train(SMALL.override([f"init='{tmp_path / 'gone.apm'}'"]), tmp_path / "b", progress=False)


def test_a_model_that_is_not_downloaded(monkeypatch):
    monkeypatch.setattr(catalog, "FOLDER", catalog.FOLDER)
    monkeypatch.setattr(catalog, "names", lambda: ["far-away"])

    def missing(given):
        raise UnknownModel("run: anyprec models --fetch far-away")

    monkeypatch.setattr(catalog, "find", missing)
    with pytest.raises(UnknownModel, match="--fetch"):
        model_file_of("far-away")
