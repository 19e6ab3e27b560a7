"""One line where there was a traceback, a unit for times, NaN in an image."""

import os
import resource
import subprocess

import numpy as np
import pytest
from blackbox import anyprec, python, said_in_one_line
from bombs import save_mask
from serving import infer_binary, process, save

pytestmark = pytest.mark.slow

SMALL = 'net = "resnet8"\ndata = "digits"\nwidths = [8, 32]\nepochs = 1\nlimit = 64\nbatch_size = 32\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a grey network, one epoch of a few digits."""
    folder = tmp_path_factory.mktemp("grey")
    (folder / "recipe.toml").write_text(SMALL)
    assert anyprec("train", folder / "recipe.toml", "--out", folder / "run").returncode == 0
    return folder / "run"


@pytest.fixture
def read_only(mount_disk):
    return mount_disk("size=1m,ro")


@pytest.fixture(scope="module")
def colour(tmp_path_factory):
    """CIFAR-10's files, of zeros: black pictures of class 0."""
    root = tmp_path_factory.mktemp("cifar")
    for stem in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        with open(root / f"{stem}.bin", "wb") as file:
            file.truncate(10_000 * 3073)
    return root


@pytest.mark.parametrize("verb", ["evaluate", "attack"])
def test_a_grey_network_with_a_colour_data_set(run, colour, verb):
    """A traceback of torch."""
    done = anyprec(verb, run, "--dataset", "cifar10", "--data", colour, "--limit", "16")
    said_in_one_line(done, "gray", "color")


@pytest.mark.parametrize("verb", ["pack", "report"])
def test_a_read_only_file_system(run, read_only, verb):
    """A traceback of pathlib."""
    said_in_one_line(anyprec(verb, run, "--out", read_only / "x.out"), "Read-only file system")


def test_a_path_that_is_not_utf8(tmp_path):
    """A traceback of the binding."""
    path = save(tmp_path / "net.apm")
    odd = tmp_path / os.fsdecode(b"\xff\xfe.apm")
    os.rename(path, odd)
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 8, 8), np.float32))
    done = anyprec("run", odd, tmp_path / "x.npy", "--bits", "2")
    assert "Traceback" not in done.stderr, done.stderr[-300:]
    assert done.returncode == 0


def test_help_without_torch():
    """help(anyprec) was a traceback where torch is not installed."""
    done = python("import sys; sys.modules['torch'] = None; import anyprec, pydoc; pydoc.render_doc(anyprec)")
    assert done.returncode == 0, done.stderr.splitlines()[-1]


def test_a_size_beyond_reason_is_refused_at_once(tmp_path):
    """It ran for minutes, until it was killed for its memory. Here it may have 6 GB."""
    pil = pytest.importorskip("PIL.Image")
    pil.new("RGB", (20, 20)).save(tmp_path / "x.png")
    model = save_mask(tmp_path / "mask.apm")
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # noqa: E731
    try:
        done = anyprec("run", model, tmp_path / "x.png", "--size", "100000", timeout=30, preexec_fn=limit)
    except subprocess.TimeoutExpired:
        raise AssertionError("still running after 30 s") from None
    said_in_one_line(done, "100000")


def test_a_time_needs_a_unit(tmp_path):
    """`serve --slo 50` was taken for 50 seconds: a server that keeps every target."""
    try:
        done = anyprec("serve", save(tmp_path / "net.apm"), "--port", "0", "--slo", "50", timeout=15)
    except subprocess.TimeoutExpired:
        raise AssertionError("it serves, with a target of 50 s") from None
    said_in_one_line(done, "--slo", "unit")


def test_nan_in_a_request_is_refused(tmp_path):
    """An image with NaN got an answer like any other."""
    x = np.full((1, 3, 8, 8), np.nan, np.float32)
    with process(save(tmp_path / "net.apm"), "--slo", "5s") as (_, port):
        reply = infer_binary(port, x)
    assert reply.status == 400 and b"NaN" in reply.body, (reply.status, reply.body[:200])


def test_nan_in_a_file_is_refused_or_said(tmp_path):
    """`anyprec run` answered it, without a word."""
    np.save(tmp_path / "x.npy", np.full((1, 3, 8, 8), np.nan, np.float32))
    done = anyprec("run", save(tmp_path / "net.apm"), tmp_path / "x.npy", "--bits", "8")
    assert "nan" in done.stderr.lower(), done.stdout + done.stderr
