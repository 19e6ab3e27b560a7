"""`anyprec train` from end to end, as a user types it."""

import json
import shlex

import pytest

from anyprec.cli import main
from anyprec.training.checkpoint import load_model
from anyprec.training.recipe import Recipe
from anyprec.training.recipe_catalog import FOLDER

TRAIN = ["train", "digits", "--set", "epochs=1", "--set", "limit=256", "--set", "net_options.multiplier=0.25"]


def test_train_prints_a_table(tmp_path, capsys):
    assert main([*TRAIN, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "epoch 1/1" in err  # progress goes to stderr
    rows = [line.split() for line in out.strip().splitlines()[-5:]]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "float"]
    packed = tmp_path / f"{tmp_path.name}.apm"
    assert err.splitlines()[-1] == f"next: anyprec pack {tmp_path} --out {packed}"


@pytest.mark.thorough
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


def test_ctrl_c_names_the_command_that_goes_on(tmp_path, capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("anyprec.training.run.train", interrupted)
    out = str(tmp_path / "my run")
    assert main([*TRAIN, "--out", out, "--overwrite"]) == 130
    line = capsys.readouterr().err.splitlines()[-1]
    start = "anyprec: interrupted; go on with: anyprec "
    assert line.startswith(start) and "--overwrite" not in line
    seen = []

    def resumed(recipe, out, **options):
        seen.append((recipe, out, options))
        return {8: {"accuracy": 90.0, "loss": 0.1}}

    monkeypatch.setattr("anyprec.training.run.train", resumed)
    assert main(shlex.split(line.removeprefix(start))) == 0
    ((recipe, folder, options),) = seen
    assert (recipe.epochs, recipe.limit, str(folder), options["resume"]) == (1, 256, out, True)


def test_train_json_is_json_alone(tmp_path, capsys):
    assert main([*TRAIN, "--out", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    result = record["results"]
    assert record["out"] == str(tmp_path) and record["dataset"] == "digits"
    assert set(result) == {"1", "2", "4", "8", "32"} and 0 <= result["8"]["accuracy"] <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.toml", "--out", "x"], "cannot read recipe nowhere.toml"),
        (["train", "digits", "--out", "RUN"], "holds a run already; add --resume"),
        (["train", "digits", "--out", "x", "--set", "net=resnet9"], "network 'resnet9' is not in the zoo"),
        (["train", "digits", "--out", "x", "--set", "data=digit"], "digit"),
    ],
)
def test_mistakes_end_with_one_line(run_folder, tmp_path, one_line_error, arguments, message):
    paths = {"RUN": run_folder, "x": tmp_path / "x"}
    assert message in one_line_error(*(paths.get(a, a) for a in arguments))
