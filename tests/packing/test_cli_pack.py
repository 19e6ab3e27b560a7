"""`anyprec pack`: a run of `anyprec train` in, a model file out; its report, its mistakes, the command it names."""

import json

import numpy as np
import pytest
import torch

import anyprec
from anyprec.cli import main
from anyprec.format.file import read
from anyprec.nn.switching import bits
from anyprec.run.oracle import run_graph
from anyprec.training.checkpoint import load_model


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("pack") / "run"
    sets = ["epochs=1", "limit=256", "net_options.multiplier=0.25"]
    assert main(["train", "digits", *(a for s in sets for a in ("--set", s)), "--out", str(out), "--json"]) == 0
    return out


@pytest.mark.thorough
def test_command(run_folder, tmp_path, capsys):
    out = tmp_path / "digits.apm"
    capsys.readouterr()
    assert main(["pack", str(run_folder), "--out", str(out), "--float", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    graph = read(out)
    assert (report["model"], report["out"]) == (str(run_folder / "model.pt"), str(out))
    assert report["profiles"] == [p.name for p in graph.profiles] and report["profiles"][-1] == "32"
    assert graph.labels == tuple("0123456789") and all(p.accuracy is not None for p in graph.profiles)
    # uint8 images become what the network was trained on
    model = load_model(run_folder / "model.pt").eval()
    data = anyprec.data.load_data("digits", "test", limit=20)
    batch = next(anyprec.data.batches(data, 20))[0]
    with torch.no_grad(), bits(model, 8):
        wanted = model(torch.from_numpy(batch).permute(0, 3, 1, 2)).numpy()
    images = data.read(np.arange(20))
    (given,) = run_graph(graph, images, "8").values()
    assert (np.abs(given.reshape(wanted.shape) - wanted).max(axis=1) < 1e-4).mean() > 0.8


def test_command_with_fewer_widths_and_labels(run_folder, tmp_path, capsys):
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(f"digit {i}" for i in range(10)))
    out = tmp_path / "two.apm"
    assert (
        main(["pack", str(run_folder / "model.pt"), "--out", str(out), "--widths", "1,2", "--labels", str(labels)]) == 0
    )
    assert "layers quantized" in capsys.readouterr().out
    graph = read(out)
    assert [p.name for p in graph.profiles] == ["1", "2"] and graph.labels[3] == "digit 3"


@pytest.mark.parametrize(
    "more, words",
    [
        (["--widths", "3"], "bits=3 is not one of this model's widths"),
        (["--dataset", "cifar"], "--dataset 'cifar' is not known"),
        (["--labels", "missing.txt"], "cannot read labels missing.txt"),
        (["--profile", "missing.json"], "cannot read profile missing.json"),
    ],
)
def test_command_mistakes(run_folder, tmp_path, one_line_error, more, words):
    assert words in one_line_error("pack", run_folder, "--out", tmp_path / "net.apm", *more)
    assert not (tmp_path / "net.apm").exists()


def test_it_ends_with_the_next_command(run_folder, tmp_path, capsys):
    out = str(tmp_path / "my net.apm")
    assert main(["pack", str(run_folder), "--out", out]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"next: anyprec run '{out}' --dataset digits"
    assert main(["run", out, "--dataset", "digits", "--limit", "5"]) == 0


def test_command_without_a_model(tmp_path, capsys):
    assert main(["pack", str(tmp_path / "none.pt"), "--out", str(tmp_path / "net.apm")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
