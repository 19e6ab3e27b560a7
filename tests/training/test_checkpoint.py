"""Checkpoints: a full disk, files of unknown origin, two trainings into one folder."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch

from anyprec.cli import main
from anyprec.errors import CheckpointError, OutputError
from anyprec.files import locked
from anyprec.training.checkpoint import load_model, load_state, save_model, save_state
from anyprec.training.recipe import Recipe
from anyprec.training.run import train
from anyprec.zoo import build

RECIPE = Recipe(net="resnet8", data="digits", widths=(2, 32), epochs=2, limit=64, batch_size=32, eval_batch_size=500)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The checkpoint of a model as a dict, to be spoilt."""
    path = tmp_path_factory.mktemp("model") / "model.pt"
    save_model(build("resnet8", widths=(2, 32), in_channels=1), path, {"test": {"2": {"accuracy": 50.0}}})
    return load_state(path)


# --- Files of unknown origin ---


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state_dict": None}, "it has no 'state_dict'"),
        ({"net_options": None}, "it has no 'net_options'"),
        ({"kind": None}, "its kind is None"),
        ({"kind": "other"}, "its kind is 'other', not one of model, run"),
        ({"state_dict": [1]}, "its 'state_dict' is a list"),
        ({"state_dict": {"conv0.weight": 3}}, "weight 'conv0.weight' is a int, not a tensor"),
        ({"extra": [1]}, "its 'extra' is a list"),
        ({"extra": {"test": {"two": {}}}}, "test result of 'two' bit is not a table"),
        ({"extra": {"test": {"2": {"accuracy": "high"}}}}, "test result of '2' bit is not a number"),
        ({"extra": {"recipe": 3}}, "noted of its training is not a table"),
        ({"widths": [0, 99]}, "widths: bits=0 is not a bit-width"),
        ({"net_options": {"num_classes": 10**12}}, "none of its weights has num_classes=1000000000000"),
        ({"net_options": {"num_classes": "many"}}, "none of its weights has num_classes='many'"),
        ({"net_options": {"depth": "x"}}, "its network 'resnet8' cannot be built again: resnet8 has no option 'depth'"),
        ({"net_options": {"multiplier": "x"}}, "its network 'resnet8' cannot be built again"),
        ({"net_options": {"multiplier": -1}}, "cannot be built again"),
        ({"net_options": {3: 4}}, "cannot be built again"),
        ({"net": "nosuch"}, "network 'nosuch' is not in the zoo"),
        ({"net": 7}, "its 'net' is a int"),
        ({"conversion": {"widths": "x"}}, "cannot be built again"),
        ({"conversion": 3}, "its 'conversion' is not a table"),
        ({"state_dict": {}, "net_options": {}}, "was made for another network"),
    ],
)
def test_a_checkpoint_that_cannot_be(record, tmp_path, change, says):
    """With None a field is left out. Every verb that reads a model says the same line."""
    spoilt = {**record, **change}
    path = tmp_path / "odd.pt"
    torch.save({name: value for name, value in spoilt.items() if value is not None or name == "conversion"}, path)
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    assert says in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("verb", ["evaluate", "calibrate", "attack", "pack", "ptq"])
def test_every_verb_refuses_it_in_one_line(record, tmp_path, capsys, verb):
    path = tmp_path / "odd.pt"
    torch.save({name: value for name, value in record.items() if name != "state_dict"}, path)
    more = ["--out", str(tmp_path / "x.apm")] if verb == "pack" else ["--dataset", "digits"]
    assert main([verb, str(path), *more]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("anyprec: error: ") and str(path) in error


def test_a_run_in_progress_is_no_model(tmp_path):
    run = {"kind": "run", "recipe": {}, "epoch": 0, "step": 0, "totals": {}, "log_bytes": 0, "model": {},
           "optimizer": {}, "scaler": None}  # fmt: skip
    save_state(run, tmp_path / "last.pt")
    with pytest.raises(CheckpointError, match=r"is a training in progress, not a model; finish it with `anyprec train"):
        load_model(tmp_path / "last.pt")
    for change in ({"epoch": -1}, {"model": {"a": 1}}, {"optimizer": 3}):
        save_state({**run, **change}, tmp_path / "last.pt")
        with pytest.raises(CheckpointError, match="is damaged or was made by another program"):
            load_state(tmp_path / "last.pt")


# --- No room ---


@pytest.fixture
def small_disk(mount_disk):
    return mount_disk("size=3m")


def fill(disk, leave):
    free = os.statvfs(disk)
    (disk / "rest").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - leave)))


def test_a_disk_that_fills_up_keeps_the_checkpoint(record, small_disk):
    path = small_disk / "model.pt"
    save_state(record, path)
    before = path.read_bytes()
    fill(small_disk, 100_000)
    with pytest.raises(CheckpointError, match=r"cannot write .*model\.pt: No space left on device; make room"):
        save_state(record, path)
    assert path.read_bytes() == before and sorted(os.listdir(small_disk)) == ["model.pt", "rest"]


@pytest.mark.parametrize("leave", [0, 20_000, 300_000])
def test_a_training_on_a_full_disk_ends_with_one_line(small_disk, capfd, leave):
    """Whichever of recipe, log, TensorBoard and checkpoint comes to the end of the disk."""
    recipe = small_disk.parent / "recipe.toml"
    RECIPE.save(recipe)
    fill(small_disk, leave)
    assert main(["train", str(recipe), "--out", str(small_disk / "run"), "--json"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "No space left on device; make room" in error
    assert not list((small_disk / "run").glob("*.partial")) if (small_disk / "run").exists() else True


def test_a_report_on_a_full_disk(small_disk, capsys, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    line = {"epoch": 1, "lr": 0.1, "train": {"2": {"loss": 1.0, "accuracy": 50.0}}, "test": {}}
    (run / "log.jsonl").write_text(json.dumps(line) + "\n")
    page = small_disk / "report.html"
    page.write_text("old")
    fill(small_disk, 0)
    assert main(["report", str(run), "--out", str(page)]) == 2
    assert "No space left on device" in capsys.readouterr().err and page.read_text() == "old"


# --- Two at once ---


def test_a_second_training_into_the_folder_is_refused(tmp_path, capsys):
    recipe, out = tmp_path / "recipe.toml", tmp_path / "run"
    RECIPE.save(recipe)
    with locked(out):
        for more in ([], ["--overwrite"], ["--resume"]):
            assert main(["train", str(recipe), "--out", str(out), *more]) == 2
            error = capsys.readouterr().err
            assert f"is in use by process {os.getpid()} on " in error and error.count("\n") == 1
        assert main(["reproduce", "table1", "--scale", "tiny", "--out", str(out)]) == 2
        assert "is in use by process" in capsys.readouterr().err


def test_changes_of_a_model_in_use_are_refused(record, tmp_path, capsys):
    save_state(record, tmp_path / "model.pt")
    before = (tmp_path / "model.pt").read_bytes()
    with locked(tmp_path):
        for verb in (["evaluate", "--save", "--widths", "2"], ["calibrate", "--widths", "4", "--batches", "1"]):
            assert main([verb[0], str(tmp_path / "model.pt"), "--dataset", "digits", *verb[1:]]) == 2
            assert "is in use by process" in capsys.readouterr().err
    assert (tmp_path / "model.pt").read_bytes() == before


TRAIN = """
import sys
from anyprec.training.recipe import Recipe
from anyprec.training.run import train
train(Recipe.load(sys.argv[1]), sys.argv[2], resume=True, progress=False)
"""


@pytest.mark.slow  # another process that imports torch
def test_the_folder_of_a_training_that_was_killed_is_free(tmp_path):
    recipe, out = tmp_path / "recipe.toml", tmp_path / "run"
    RECIPE.override(["epochs=1000", "save_minutes=0.0"]).save(recipe)
    with subprocess.Popen([sys.executable, "-c", TRAIN, str(recipe), str(out)]) as process:
        while process.poll() is None and not (out / "last.pt").exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        with pytest.raises(OutputError, match=f"in use by process {process.pid} on"):
            train(RECIPE, out, resume=True)
        process.kill()
    short = RECIPE.override(["epochs=1000", "save_minutes=0.0"])
    with locked(out):
        assert load_state(out / "last.pt")["recipe"] == short.to_dict()


def test_options_under_their_old_names(tmp_path):
    """Checkpoints of 0.3.0 and before call a network's channel multiplier `width`, and spell "quantised"."""
    old = build("resnet8", widths=(2, 32), multiplier=0.5, skip="quantized")
    path = tmp_path / "model.pt"
    save_model(old, path, {"recipe": {"net_options": {"width": 0.5}}})
    record = load_state(path)
    options = record["net_options"]
    record["net_options"] = {**options, "width": options["multiplier"], "skip": "quantised"}
    del record["net_options"]["multiplier"]
    save_state(record, path)
    assert load_state(path)["extra"]["recipe"]["net_options"] == {"multiplier": 0.5}
    assert load_model(path).zoo_options == old.zoo_options
