"""anyprec-run, the program without Python: the same numbers as anyprec.load, and every mistake in one line."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_check import usable_isas
from graph_builder import assert_same

from anyprec import _native
from anyprec.format import truncate, write
from anyprec.run.model import load

F32 = np.float32


def find_program():
    beside = Path(sys.executable).parent
    return shutil.which("anyprec-run", path=f"{beside}{os.pathsep}{beside / 'Scripts'}") or shutil.which("anyprec-run")


PROGRAM = find_program()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="anyprec-run is not installed; it comes with the wheel")


def run(*words, **environment):
    """Nothing of Python's in its environment."""
    kept = {name: os.environ[name] for name in ("SYSTEMROOT", "ASAN_OPTIONS") if name in os.environ}
    return subprocess.run(
        [PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=60, env={**kept, **environment}
    )


def succeeds(*words, **environment):
    done = run(*words, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.fixture
def images(net, tmp_path):
    np.save(tmp_path / "x.npy", net.x)  # NHWC
    return tmp_path / "x.npy"


# --- What it does ---------------------------------------------------------------------------------------------------


def test_it_needs_no_python():
    ldd = shutil.which("ldd")
    if ldd is None:
        pytest.skip("no ldd")
    assert "python" not in subprocess.run([ldd, PROGRAM], capture_output=True, text=True).stdout.lower()


@pytest.mark.parametrize("isa", usable_isas())
def test_the_same_outputs_as_in_python(net, images, tmp_path, isa):
    for name, want in net.wanted.items():
        out = tmp_path / "y.npy"
        assert succeeds(net.path, images, "--bits", name, "--layout", "NHWC", "--isa", isa, "--out", out) == ""
        assert_same(np.load(out), want, name)


def test_layouts_bytes_and_single_images(net, tmp_path):
    model, out = load(net.path), tmp_path / "y.npy"
    bytes_ = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 9), np.uint8)
    for x in (bytes_, net.x.transpose(0, 3, 1, 2).copy(), net.x.transpose(0, 3, 1, 2)[0].copy()):
        np.save(tmp_path / "x.npy", x)
        succeeds(net.path, tmp_path / "x.npy", "--bits", 4, "--threads", 2, "--out", out)
        assert_same(np.load(out), np.atleast_2d(model(x, 4)))
    # Written as version 2, whose length has four bytes
    with (tmp_path / "v2.npy").open("wb") as file:
        np.lib.format.write_array(file, bytes_, version=(2, 0))
    succeeds(net.path, tmp_path / "v2.npy", "--bits", 4, "--out", out)
    assert_same(np.load(out), model(bytes_, 4))


def test_several_outputs_and_maps(net, images, tmp_path):
    write(replace(net.graph, outputs=("norm", "fc", "pool"), labels=None), tmp_path / "three.apm")
    succeeds(tmp_path / "three.apm", images, "--layout", "NHWC", "--bits", 2, "--out", tmp_path / "y.npy")
    wanted = load(tmp_path / "three.apm")(net.x, 2, layout="NHWC")
    for name, want in zip(("y.npy", "y.1.npy", "y.2.npy"), wanted, strict=True):
        assert_same(np.load(tmp_path / name), want, name)


def test_it_names_the_best_class(net, images):
    lines = succeeds(net.path, images, "--layout", "NHWC", "--bits", "8").splitlines()
    best = net.wanted["8"].argmax(1)
    assert [line.split()[:3] for line in lines] == [[f"{i}:", str(k), net.graph.labels[k]] for i, k in enumerate(best)]


def test_the_widest_is_the_default(net, images, tmp_path):
    out = tmp_path / "y.npy"
    succeeds(net.path, images, "--layout", "NHWC", "--out", out)
    assert_same(np.load(out), net.wanted["32"])
    succeeds(net.path, images, "--layout", "NHWC", "--out", out, "--max-bits", "3", "--no-verify")
    assert_same(np.load(out), net.wanted["3"])


def test_it_lists_profiles(net, tmp_path):
    lines = succeeds(net.path, ANYPREC_ISA="scalar").splitlines()
    assert lines[0] == "resnet20, instruction set scalar, input any x any x 3"
    model = load(net.path)
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == list(model.profiles)
    assert [int(row[1]) for row in rows] == [model.bytes_needed(name) for name in model.profiles]
    assert rows[3][2:] == ["70.00", "%"] and rows[2][2:] == ["-"]
    truncate(net.path, tmp_path / "cut.apm", 2)
    cut = succeeds(tmp_path / "cut.apm").splitlines()[2:]
    assert [line.split()[0] for line in cut if "not loaded" not in line] == ["1", "2"]


def test_times(net, images):
    assert succeeds(net.path, images, "--layout", "NHWC", "--repeat", 3).startswith("first ")
    steps = succeeds(net.path, images, "--layout", "NHWC", "--steps", "--bits", 4).splitlines()
    assert any(line.startswith("blocks.0.conv0 ") for line in steps)
    assert succeeds("--help").startswith("usage: anyprec-run MODEL.apm")


# --- Mistakes -------------------------------------------------------------------------------------------------------


def fails(*words, says):
    done = run(*words)
    assert done.returncode == 2 and done.stdout == "", done
    (line,) = done.stderr.splitlines()
    assert line.startswith("anyprec-run: error: ") and says in line, line


def test_no_words():
    done = run()
    assert done.returncode == 2 and done.stderr.startswith("usage: anyprec-run")


def test_more_arrays_than_inputs(net, images):
    fails(net.path, images, images, says="2 arrays are given, the model takes 1")


@pytest.mark.parametrize(
    "words, says",
    [
        (["--bit", "4"], "option --bit is not known; see anyprec-run --help"),
        (["--bits"], "option --bits needs a value"),
        (["--bits", "9"], "--bits 9 is not in this model file, which has 1, 2, 3, 4, 5, 6, 7, 8, 32, fast"),
        (["--layout", "HWC"], "--layout HWC is not known; choose NCHW or NHWC"),
        (["--threads", "0"], "--threads 0 is not a number from 1 to 1024"),
        (["--threads", "2x"], "--threads 2x is not a number"),
        (["--threads", "99999999999999999999"], "is not a number from 1 to 1024"),
        (["--repeat", ""], "--repeat  is not a number from 1 to 1000000"),
        (["--max-bits", "9"], "--max-bits 9 is not a number from 1 to 8"),
        (["--isa", "sse9"], "sse9"),
        (["--out", "no/such/folder/y.npy"], "cannot write no/such/folder/y.npy"),
    ],
)
def test_options_that_go_wrong(net, images, words, says):
    layout = [] if words[0] == "--layout" else ["--layout", "NHWC"]
    fails(net.path, images, *layout, *words, says=says)


def test_files_that_go_wrong(net, images, tmp_path):
    fails(tmp_path / "none.apm", images, says="none.apm")
    fails(images, images, says="x.npy")
    fails(tmp_path, images, says=str(tmp_path))
    fails(net.path, tmp_path / "none.npy", says="cannot open")
    fails(net.path, net.path, says="is not a .npy file; write one with numpy.save")
    fails(net.path, tmp_path, says=str(tmp_path))
    flipped = bytearray(net.path.read_bytes())
    flipped[-1] ^= 1
    (tmp_path / "flipped.apm").write_bytes(flipped)
    fails(tmp_path / "flipped.apm", images, says="tail")
    if "neon" not in _native.built_isas():
        fails(net.path, images, "--isa", "neon", says="neon is not built into")


@pytest.mark.parametrize(
    "x, says",
    [
        (np.zeros((8, 8)), "neither float32 nor uint8; convert it with astype"),
        (np.zeros((8, 8), F32), "has 2 axes; give images of four (NCHW), or one image of three"),
        (np.zeros((1, 1, 3, 8, 8), F32), "has 5 axes"),
        (np.zeros((), F32), "has 0 axes"),
        (np.zeros((1, 3, 8, 8), ">f4"), "neither float32 nor uint8"),
        (np.zeros((1, 3, 8, 8), "<i4"), "neither float32 nor uint8"),
        (np.zeros((1, 3, 8, 8), [("a", "<f4")]), "neither float32 nor uint8"),
        (np.asfortranarray(np.zeros((2, 3, 8, 8), F32)), "is in Fortran order; save numpy.ascontiguousarray of it"),
        (np.zeros((1, 4, 8, 8), F32), "images have 4 channels, the model takes 3"),
        (np.zeros((0, 3, 8, 8), F32), "an input of 0 images of 8 x 8 pixels"),
        (np.zeros((1, 3, 0, 8), F32), "an input of 1 images of 0 x 8 pixels"),
    ],
)
def test_arrays_that_go_wrong(net, tmp_path, x, says):
    np.save(tmp_path / "x.npy", x)
    fails(net.path, tmp_path / "x.npy", says=says)


def forged(header: bytes, data: bytes = b"", version: int = 1) -> bytes:
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(2 if version == 1 else 4, "little") + header + data


SHAPE = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 3, 8, 8), }"


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "is not a .npy file"),
        (b"\x93NUMPY\x01", "is not a .npy file"),
        (b"\x93NUMPY\x09\x00\x10\x00", "is not a .npy file"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "is cut off in its header"),
        (b"\x93NUMPY\x02\x00\xff\xff", "is cut off in its header"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "is cut off in its header"),
        (forged(b""), "its header has no 'descr'"),
        (forged(b"{'descr': '<f4'}"), "its header has no 'fortran_order'"),
        (forged(b"{'descr': '<f4', 'fortran_order': False}"), "its header has no 'shape'"),
        (forged(SHAPE.replace(b"(", b"[")), "has no shape in its header"),
        (forged(SHAPE.replace(b")", b"]")), "has no shape in its header"),
        (forged(SHAPE, bytes(767)), "is cut off: it should have 768 bytes of data, and has 767"),
        (forged(SHAPE, bytes(767), version=3), "is cut off: it should have 768 bytes of data, and has 767"),
        (forged(SHAPE.replace(b"8, 8", b"99999999999, 8")), "has an axis of more than 2^31 - 1 entries"),
        (forged(SHAPE.replace(b"8, 8", b"2147483647, 2147483647")), "claims more than 2^40 entries"),
        (forged(SHAPE.replace(b"8, 8", b"2000000, 8")), "is cut off: it should have 192000000 bytes"),
    ],
)
def test_broken_npy_files(net, tmp_path, content, says):
    (tmp_path / "x.npy").write_bytes(content)
    fails(net.path, tmp_path / "x.npy", says=says)
