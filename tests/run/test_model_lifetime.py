"""PackedModel as an object: closed, copied, pickled, with an empty batch, and with files that are no model files."""

import copy
import pickle
import random
import shutil
import threading

import numpy as np
import pytest
from graph_builder import assert_same

import anyprec
from anyprec.errors import InputError, ModelClosed, ModelFileError, NotAModelFile


@pytest.fixture
def path(net, tmp_path):
    return shutil.copy(net.path, tmp_path / "mine.apm")


def x_of(net):
    return np.ascontiguousarray(net.x.transpose(0, 3, 1, 2))


def test_with_closes_the_model(net):
    with anyprec.load(net.path) as model:
        assert_same(model(x_of(net), 2), net.wanted["2"])
        assert not model.closed
    assert model.closed and "closed" in repr(model)
    model.close()  # again: nothing happens
    for use in (lambda: model(x_of(net)), lambda: model.name, lambda: model.predict([]), lambda: copy.copy(model),
                lambda: pickle.dumps(model), lambda: model.__enter__(), lambda: model.refresh()):  # fmt: skip
        with pytest.raises(ModelClosed, match=r"net\.apm\) is closed; load it again"):
            use()


def test_a_call_that_has_begun_ends_as_usual(net):
    model, x = anyprec.load(net.path), np.repeat(x_of(net), 64, axis=0)
    found, begun = [], threading.Event()

    def work():
        try:
            while True:
                found.append(model(x, 8))
                begun.set()
        except ModelClosed:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    model.close()
    thread.join(60)
    assert not thread.is_alive()
    assert all(np.array_equal(y, found[0]) for y in found)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_its_own_settings_and_end(net, make):
    model = anyprec.load(net.path, threads=2, layout="NHWC", check_finite=False)
    model.bits, model.random = 2, random.Random(5)
    other = make(model)
    assert (other.bits, other.threads, other.layout, other.check_finite) == (2, 2, "NHWC", False)
    assert [other.random.random() for _ in range(3)] == [model.random.random() for _ in range(3)]
    other.bits = 8
    assert model.bits == 2
    model.close()
    assert_same(other(net.x), net.wanted["8"])


def test_a_copy_needs_no_file_and_a_pickle_does(net, path):
    model = anyprec.load(path)
    kept = pickle.dumps(model)
    path.unlink()
    assert_same(copy.copy(model)(x_of(net), 4), net.wanted["4"])
    with pytest.raises(
        ModelFileError, match=r"holds the path of its file, and that cannot be opened here \(.*mine.apm"
    ):
        pickle.loads(kept)


def test_a_pickle_of_a_file_that_was_replaced(path):
    kept = pickle.dumps(anyprec.load(path))
    shutil.copy(anyprec.load("cifar10-vgg-small")._source.name, path)
    with pytest.raises(ModelFileError, match=r"mine\.apm is another model than when this one was pickled"):
        pickle.loads(kept)


def test_a_relative_path_is_found_from_elsewhere(net, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = pickle.dumps(anyprec.load("mine.apm"))
    monkeypatch.chdir("/")
    assert_same(pickle.loads(kept)(x_of(net), 1), net.wanted["1"])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_an_empty_batch_gives_an_empty_answer(net, layout):
    model = anyprec.load(net.path, layout=layout)
    x = net.x[:0] if layout == "NHWC" else x_of(net)[:0]
    y = model(x, 2)
    assert y.shape == (0, 10) and y.dtype == np.float32
    assert anyprec.load("cifar10-vgg-small").predict([]) == []
    with pytest.raises(InputError, match="images have 5 channels, the model takes 3"):
        model(np.zeros((0, 9, 11, 5) if layout == "NHWC" else (0, 5, 9, 11), np.float32))


@pytest.mark.parametrize("axes", [3, 4])
def test_the_other_layout_is_named(net, axes):
    model, x = anyprec.load(net.path), net.x if axes == 4 else net.x[0]
    with pytest.raises(InputError, match=r"is not layout='NCHW': .* it fits with layout='NHWC'"):
        model(x)
    with pytest.raises(InputError, match=r"is not layout='NHWC': .* it fits with layout='NCHW'"):
        model(np.moveaxis(x, -1, -3), layout="NHWC")


def test_a_checkpoint_is_not_packed_yet(tmp_path):
    run = tmp_path / "my run"
    run.mkdir()
    (run / "model.pt").write_bytes(b"PK\x03\x04 and so on")
    for given in (run / "model.pt", run):
        with pytest.raises(
            NotAModelFile, match=f"this is a checkpoint, not packed yet; .*: anyprec pack '{given}' --out"
        ):
            anyprec.load(given)
