"""A full disk, two trainings into one folder, checkpoints of unknown origin."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from blackbox import ENVIRONMENT, anyprec, said_in_one_line

pytestmark = pytest.mark.slow

RECIPE = 'net = "resnet8"\ndata = "digits"\nwidths = [2, 32]\nepochs = 2\nlimit = 64\nbatch_size = 32\n'


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def small_disk(mount_disk):
    return mount_disk("size=3m")


@pytest.mark.parametrize("room", [20_000, 300_000])
def test_a_training_on_a_full_disk_says_so_in_one_line(recipe, small_disk, room):
    """It ended with a traceback (of torch's zip writer, for a checkpoint)."""
    free = os.statvfs(small_disk)
    (small_disk / "rest").write_bytes(bytes(free.f_bavail * free.f_frsize - room))
    said_in_one_line(anyprec("train", recipe, "--out", small_disk / "run"), "No space left on device")


def test_a_second_training_into_one_folder_is_refused(recipe, tmp_path):
    """Both ran, and every line of the log was there twice."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "anyprec", "train", recipe, "--out", out, "--set", "epochs=500"]
    first = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 40
        while not (out / "log.jsonl").exists():
            assert first.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        for mode in ("--overwrite", "--resume"):
            more = ["--set", "epochs=500"]
            done = anyprec("train", recipe, "--out", out, mode, *(more if mode == "--resume" else []), timeout=60)
            said_in_one_line(done, "in use")
    except subprocess.TimeoutExpired:
        raise AssertionError("the second training runs beside the first") from None
    finally:
        first.kill()
        first.wait()


@pytest.fixture(scope="module")
def record(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("good") / "run"
    assert anyprec("train", recipe, "--out", out).returncode == 0
    return torch.load(out / "model.pt", weights_only=True)


@pytest.mark.parametrize(
    "change",
    [{"state_dict": None}, {"state_dict": [1]}, {"net_options": None}, {"extra": {"test": {"two": {}}}}],
    ids=json.dumps,
)
@pytest.mark.parametrize("verb", ["evaluate", "pack"])
def test_an_odd_checkpoint_is_refused_in_one_line(record, tmp_path, verb, change):
    """A .pt without state_dict or options gave a traceback; odd test results were taken, or gave one in `pack`."""
    odd = {name: value for name, value in {**record, **change}.items() if value is not None or name not in change}
    torch.save(odd, tmp_path / "odd.pt")
    more = ["--out", tmp_path / "x.apm"] if verb == "pack" else ["--dataset", "digits"]
    said_in_one_line(anyprec(verb, tmp_path / "odd.pt", *more), "odd.pt")
