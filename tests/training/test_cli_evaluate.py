"""`anyprec evaluate`: accuracy at every width, and its mistakes."""

import json

import pytest

import anyprec
from anyprec.cli import main


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


@pytest.mark.thorough
def test_evaluate_a_profile(run_folder, tmp_path, capsys):
    profile = {"name": "mine", "bits": {"blocks.0.conv0": 1, "blocks.2.conv1": [8, 4]}}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    full = str(tmp_path / "full.pt")
    arguments = ["--profile", str(tmp_path / "p.json"), "--json"]
    assert main(["calibrate", str(run_folder), "--widths", "3", "--batches", "2", "--out", full, *arguments]) == 0
    capsys.readouterr()
    assert main(["evaluate", full, "--widths", "8", "--limit", "50", *arguments]) == 0
    assert set(json.loads(capsys.readouterr().out)["results"]) == {"8", "mine"}


@pytest.mark.thorough
def test_saved_accuracies_are_packed(run_folder, tmp_path, capsys):
    full, packed = str(tmp_path / "full.pt"), str(tmp_path / "net.apm")
    assert main(["calibrate", str(run_folder), "--widths", "3", "--batches", "2", "--out", full]) == 0
    capsys.readouterr()
    assert main(["evaluate", full, "--widths", "3,8", "--save", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert main(["pack", full, "--out", packed]) == 0
    model = anyprec.load(packed)
    assert model.accuracy(3) == pytest.approx(found["3"]["accuracy"])
    assert model.accuracy(1) is not None  # as the training left it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "RUN", "--save", "--limit", "5"], "--save notes the accuracy on the whole test set"),
        (["evaluate", "RUN", "--widths", "3"], "bits=3 is not one of this model's widths (1, 2, 4, 8, 32)"),
        (["evaluate", "RUN", "--widths", "9"], "bits=9 is not a bit-width"),
        (["evaluate", "RUN", "--widths", "two"], "'two' in widths 'two' is not a bit-width"),
        (["evaluate", "nowhere.pt"], "there is no checkpoint nowhere.pt"),
        (["evaluate", "RUN", "--dataset", "cifar10", "--data", "docs"], "docs has no CIFAR-10 test_batch"),
    ],
)
def test_mistakes_end_with_one_line(run_folder, tmp_path, one_line_error, arguments, message):
    paths = {"RUN": run_folder, "x": tmp_path / "x"}
    assert message in one_line_error(*(paths.get(a, a) for a in arguments))
