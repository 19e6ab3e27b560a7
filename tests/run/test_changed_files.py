"""A model file that changes while a model of it is loaded: the model stays what it was, or says what is wrong.

In processes of their own: a file that is cut under a mapping ends the process by SIGBUS.
"""

import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from anyprec.bench import random_networks
from anyprec.errors import ChecksumMismatch, TruncatedFile
from anyprec.format import ModelFile, write
from anyprec.run.model import load

SCRIPT = """
import os, shutil, sys
import numpy as np
from anyprec.run.model import load

original, path, other, inputs, change = sys.argv[1:]
x = np.load(inputs)
want = {bits: load(original)(x, bits=bits) for bits in (1, 2, 4, 8, 32, "fast")}
m = load(path, memory_budget=1)  # panels of one width at a time: the others are built from the file's bytes
assert np.array_equal(m(x, bits=2), want[2])

if change == "cut":
    os.truncate(path, 1000)
elif change == "emptied":
    open(path, "wb").close()
elif change == "overwritten":
    with open(path, "r+b") as file:
        file.write(os.urandom(os.path.getsize(path)))
elif change == "another model in place":
    shutil.copyfile(other, path)  # keeps the inode
elif change == "replaced":
    shutil.copyfile(other, path + ".new")
    os.replace(path + ".new", path)
elif change == "deleted":
    os.remove(path)

for bits in (1, 8, 4, 32, "fast", 2):
    assert np.array_equal(m(x, bits=bits), want[bits]), bits
assert m.refresh() == (1, 2, 3, 4, 5, 6, 7, 8, 32)
"""


@pytest.fixture
def files(net, tmp_path):
    """A copy of the net, and a file as long whose planes and tails are others."""
    path, other = tmp_path / "net.apm", tmp_path / "other.apm"
    shutil.copyfile(net.path, path)
    raw = bytearray(net.path.read_bytes())
    with ModelFile(net.path) as file:
        begin = file.data_start + file.tensors[next(name for name in file.tensors if name.startswith("plane"))].begin
    raw[begin:] = np.random.default_rng(0).bytes(len(raw) - begin)
    other.write_bytes(raw)
    np.save(tmp_path / "x.npy", np.random.default_rng(1).standard_normal((1, 3, 9, 9)).astype(np.float32))
    return path, other, tmp_path / "x.npy"


@pytest.mark.parametrize("change", ["cut", "emptied", "overwritten", "another model in place", "replaced", "deleted"])
def test_a_loaded_model_stays_what_it_was(net, files, change):
    path, other, inputs = files
    command = [sys.executable, "-c", SCRIPT, net.path, path, other, inputs, change]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def freeing(net, files):
    """A model that frees the file's bytes, and the inputs and right answers."""
    x = np.load(files[2])
    right = load(net.path)
    return load(files[0], keep_copy=False), x, {bits: right(x, bits=bits) for bits in (1, 2, 3, 4, 8, 32, "fast")}


@pytest.mark.parametrize("change", ["nothing", "replaced", "deleted"])
def test_without_its_copy_a_model_reads_the_file_again(files, freeing, change):
    path, other, _ = files
    model, x, right = freeing
    assert np.array_equal(model(x, bits=2), right[2])
    if change == "replaced":
        other.replace(path)
    elif change == "deleted":
        path.unlink()
    for bits in (1, 8, 4, 32, "fast", 2, 3):
        assert np.array_equal(model(x, bits=bits), right[bits]), bits
    assert np.array_equal(model(np.concatenate([x, x]), bits=4), np.concatenate([right[4]] * 2))  # another plan


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("change", ["cut", "overwritten"])
def test_without_its_copy_a_model_refuses_a_file_that_was_rewritten(net, files, change, verify):
    path, other, inputs = files
    x, original = np.load(inputs), path.read_bytes()
    model = load(path, keep_copy=False, verify=verify)
    want = model(x, bits=2)
    if sys.platform != "linux":
        pytest.skip("the copy is freed on Linux only")
    if change == "cut":
        path.write_bytes(original[:1000])
    else:
        path.write_bytes(other.read_bytes())
    error, text = {
        "cut": (TruncatedFile, r"net\.apm: was cut short while it was read"),
        "overwritten": (ChecksumMismatch, r"net\.apm: was rewritten since it was loaded: tensor 'plane"),
    }[change]
    for _ in range(2):
        with pytest.raises(error, match=text):
            model(x, bits=8)
    assert np.array_equal(model(x, bits=2), want)  # its panels are there
    path.write_bytes(original)
    assert np.array_equal(model(x, bits=8), load(net.path)(x, bits=8))


def test_without_its_copy_a_model_may_be_pickled_and_called_from_threads(freeing):
    model, x, right = freeing
    again = pickle.loads(pickle.dumps(model))
    with ThreadPoolExecutor(8) as pool:
        calls = [(bits, pool.submit(again, x, bits=bits)) for _ in range(4) for bits in right]
        assert all(np.array_equal(call.result(), right[bits]) for bits, call in calls)


def test_a_growing_file_that_turns_into_another(net, files):
    """By default: what was read goes on, what came later is refused by its checksum, at every look."""
    path, other, _ = files
    with ModelFile(net.path) as file:
        size = file.bytes_for(2)
    path.write_bytes(net.path.read_bytes()[:size])
    model = load(path)
    x = net.x.transpose(0, 3, 1, 2)
    want = model(x, bits=2)
    with open(path, "ab") as file:
        file.write(other.read_bytes()[size:])
    for _ in range(2):
        with pytest.raises(ChecksumMismatch, match=r"net\.apm: tensor 'plane02\..*' at byte \d+ has checksum"):
            model.refresh()
    with pytest.raises(ChecksumMismatch):
        model(x, bits=4)
    assert model.widths == (1, 2) and np.array_equal(model(x, bits=2), want)
    with pytest.raises(ChecksumMismatch):
        load(path)
    path.write_bytes(net.path.read_bytes())
    assert model.refresh() == (1, 2, 3, 4, 5, 6, 7, 8, 32)


def test_a_growing_file_that_is_cut(net, files):
    path, _, _ = files
    raw = net.path.read_bytes()
    with ModelFile(net.path) as file:
        size = file.bytes_for(2)
    path.write_bytes(raw[:size])
    model = load(path)
    x = net.x.transpose(0, 3, 1, 2)
    want = model(x, bits=1)
    path.write_bytes(raw[:100])
    with pytest.raises(TruncatedFile, match=r"net\.apm: has 100 bytes now, and had .* when it was read"):
        model.refresh()
    assert np.array_equal(model(x, bits=1), want) and model.widths == (1, 2)


def test_max_bits_reads_only_the_first_planes(net, files):
    """Bytes behind the second plane may be anything: they are not looked at."""
    path, _, _ = files
    with ModelFile(net.path) as file:
        size = file.bytes_for(2)
    raw = net.path.read_bytes()
    path.write_bytes(raw[:size] + bytes(len(raw) - size))
    x = net.x.transpose(0, 3, 1, 2)
    assert np.array_equal(load(path, max_bits=2)(x, bits=2), load(net.path)(x, bits=2))
    with pytest.raises(ChecksumMismatch):
        load(path)


def test_memory_says_what_is_held_of_the_file(net):
    whole, part = load(net.path), load(net.path, max_bits=2)
    assert whole.memory["file"] == net.path.stat().st_size
    assert part.memory["file"] == whole.bytes_needed(2)


@pytest.mark.skipif(sys.platform != "linux", reason="the copy is freed on Linux only")
def test_memory_without_the_copy(tmp_path):
    path = tmp_path / "large.apm"  # planes of many pages
    write(random_networks.resnet20_graph(), path)
    whole, freeing = load(path), load(path, keep_copy=False)
    x = np.zeros((1, 3, 32, 32), np.float32)
    assert np.array_equal(whole(x, bits=8), freeing(x, bits=8))
    assert freeing.memory["file"] < 0.3 * whole.memory["file"] == 0.3 * path.stat().st_size
