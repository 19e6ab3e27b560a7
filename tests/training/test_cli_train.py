"""The verbs train, calibrate and evaluate from end to end, as a user types them."""

import json

import pytest

import anyprec
from anyprec.cli import main
from anyprec.training.checkpoint import load_model
from anyprec.training.recipe import Recipe
from anyprec.training.recipe_catalog import FOLDER

SMALL = ["--set", "epochs=1", "--set", "limit=256", "--set", "net_options.multiplier=0.25"]
TRAIN = ["train", "digits", *SMALL]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "run"
    assert main([*TRAIN, "--out", str(out), "--json"]) == 0
    return out


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


@pytest.fixture(scope="module", autouse=True)
def at_the_root_for_the_module(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(request.config.rootpath)
        yield


def test_train_prints_a_table(tmp_path, capsys):
    assert main([*TRAIN, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "epoch 1/1" in err  # progress goes to stderr
    rows = [line.split() for line in out.strip().splitlines()[-5:]]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "float"]


def test_recipes_are_stages(tmp_path, capsys, monkeypatch):
    """Float first, then all widths; a resumed run does not repeat a stage that is done."""
    both = []
    for name, widths in (("float", "[32]"), ("all", "[1, 8, 32]")):
        path = tmp_path / f"{name}.toml"
        text = (FOLDER / "digits.toml").read_text().splitlines()
        kept = [line for line in text if not line.startswith("widths") and "init" not in line]
        path.write_text("\n".join([f"widths = {widths}", *kept]))
        both.append(str(path))
    out = tmp_path / "run"
    stages = ["train", *both, *TRAIN[2:], "--out", str(out)]
    assert main(stages) == 0
    assert set(load_model(out / "model.pt").norm.tables) == {"1", "8", "32"}
    assert set(load_model(out / "stage-1" / "model.pt").norm.tables) == {"32"}
    assert Recipe.load(out / "recipe.toml").init == str(out / "stage-1" / "model.pt")
    (out / "stage-1" / "last.pt").unlink()  # so that running it again would fail
    assert main([*stages, "--resume"]) == 0
    capsys.readouterr()
    assert main(stages) == 2 and "holds a run already" in capsys.readouterr().err


def test_train_json_is_json_alone(tmp_path, capsys):
    assert main([*TRAIN, "--out", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    result = record["results"]
    assert record["out"] == str(tmp_path) and record["dataset"] == "digits"
    assert set(result) == {"1", "2", "4", "8", "32"} and 0 <= result["8"]["accuracy"] <= 100


def test_calibrate_then_evaluate(run_folder, tmp_path, capsys):
    assert main(["evaluate", str(run_folder), "--json", "--limit", "100"]) == 0
    before = json.loads(capsys.readouterr().out)["results"]
    full = tmp_path / "full.pt"
    arguments = ["--widths", "3,5-7", "--batches", "2", "--out", str(full), "--json"]
    assert main(["calibrate", str(run_folder), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["widths"] == [1, 2, 3, 4, 5, 6, 7, 8, 32]
    assert main(["evaluate", str(full), "--json", "--limit", "100"]) == 0
    after = json.loads(capsys.readouterr().out)["results"]
    assert set(after) == {str(k) for k in (*range(1, 9), 32)}
    assert {k: after[k] for k in before} == before


def test_evaluate_a_profile(run_folder, tmp_path, capsys):
    profile = {"name": "mine", "bits": {"blocks.0.conv0": 1, "blocks.2.conv1": [8, 4]}}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    full = str(tmp_path / "full.pt")
    arguments = ["--profile", str(tmp_path / "p.json"), "--json"]
    assert main(["calibrate", str(run_folder), "--widths", "3", "--batches", "2", "--out", full, *arguments]) == 0
    capsys.readouterr()
    assert main(["evaluate", full, "--widths", "8", "--limit", "50", *arguments]) == 0
    assert set(json.loads(capsys.readouterr().out)["results"]) == {"8", "mine"}


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
        (["calibrate", "RUN", "--profile", "nowhere.json"], "cannot read profile nowhere.json"),
        (["train", "nowhere.toml", "--out", "x"], "cannot read recipe nowhere.toml"),
        (["train", "digits", "--out", "RUN"], "holds a run already; add --resume"),
        (["train", "digits", "--out", "x", "--set", "net=resnet9"], "network 'resnet9' is not in the zoo"),
        (["train", "digits", "--out", "x", "--set", "data=digit"], "digit"),
    ],
)
def test_mistakes_end_with_one_line(run_folder, tmp_path, arguments, message, capsys):
    places = {"RUN": str(run_folder), "x": str(tmp_path / "x")}
    assert main([places.get(a, a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("anyprec: error: ") and err.count("\n") == 1
    assert message in err
