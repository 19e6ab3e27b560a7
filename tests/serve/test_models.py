"""Several models, replaced files, broken files, signatures; with the real scheduler, without HTTP."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from serving import expected, images, level_graph, save

from anyprec.errors import AnyprecError, Draining, ModelFileError, ServeError, TruncatedFile
from anyprec.format import write
from anyprec.serve.models import ModelRepository, Settings, metadata, named_paths, open_model, triton_config
from anyprec.serve.scheduling.queue import Request

SETTINGS = Settings(slo_s=2.0, warm_up_s=0.05)


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / "net.apm")


@pytest.fixture
def models(path):
    loads = []
    found = ModelRepository({"net": str(path)}, SETTINGS, on_load=lambda name, good: loads.append(good))
    found.loads = loads
    found.load_all()
    yield found
    found.close(5.0)


def answer(models, x, bits=8):
    request = Request(x, time.monotonic() + 5, bits=bits)
    return models.get("net").now.scheduler.submit(request).result(10)


def test_names():
    assert named_paths(["a/net.apm", "b=c/d=e.apm"]) == {"net": "a/net.apm", "b": "c/d=e.apm"}
    for given, says in ((["net.apm", "x/net.apm"], "two models"), (["a b=x.apm"], "cannot be"), (["stats=x"], "stats")):
        with pytest.raises(ServeError, match=says):
            named_paths(given)


def test_signature_and_metadata(path):
    opened = open_model(str(path), SETTINGS)
    signature = opened.signature
    assert signature.input.shape == (-1, 3, 8, 8) and signature.outputs[0].record() == {
        "name": "head",
        "datatype": "FP32",
        "shape": [-1, 4],
    }
    nhwc = open_model(str(path), Settings(layout="NHWC")).signature
    assert nhwc.input.shape == (-1, 8, 8, 3)
    free = open_model(str(save(path.with_name("free.apm"), size=(None, None))), SETTINGS).signature
    assert free.input.shape == (-1, 3, -1, -1) and free.image_size is None
    assert opened.model.widths == (1, 2, 4, 8)
    assert opened.levels.names == signature.levels == ("1", "2", "4", "8")


def test_layers_of_every_level(tmp_path):
    write(level_graph(), tmp_path / "net.apm")
    layers = open_model(str(tmp_path / "net.apm"), SETTINGS).layers
    assert layers.names == ("mid",)
    assert layers.bits["8"] == ((8,),) and layers.bits["fast"] == ((2,),) and layers.bits["auto"] == ((1,), (8,))


def test_a_replaced_file_answers_next(models, path):
    x = images(2)
    np.testing.assert_array_equal(answer(models, x).outputs[0], expected(path, x, 8))
    before = models.get("net").now
    save(path, seed=1)
    models.check()
    assert models.get("net").now is before  # seen once: a copy may still be running
    models.check()
    after = models.get("net").now
    assert after is not before and after.scheduler is before.scheduler
    np.testing.assert_array_equal(answer(models, x).outputs[0], expected(path, x, 8))
    assert models.loads == [True, True] and models.get("net").loads == 2
    models.check(at_once=True)
    assert models.get("net").now is after


def test_another_shape_gets_another_scheduler_and_the_old_one_answers_what_it_took(models, path):
    before = models.get("net").now
    before.scheduler.set_policy("fixed", 4)
    request = Request(images(1), time.monotonic() + 5)
    future = before.scheduler.submit(request)
    save(path, size=(16, 16))
    models.check(at_once=True)
    after = models.get("net").now
    assert after.signature.input.shape == (-1, 3, 16, 16) and after.scheduler is not before.scheduler
    assert after.scheduler.policy == ("fixed", 4)  # what was set stays
    assert future.result(10).bits == 4
    assert answer(models, images(1, size=16)).outputs[0].shape == (1, 4)
    for _ in range(200):
        try:
            before.scheduler.submit(Request(images(1), time.monotonic() + 5))
        except Draining:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the old scheduler was not drained")


def damaged(path, how):
    raw = bytearray(path.read_bytes())
    if how == "cut":
        raw = raw[: len(raw) - 3]
    elif how == "empty":
        raw = bytearray()
    elif how == "flipped":
        raw[-3] ^= 1
    else:
        raw = bytearray(b"no model at all" * 100)
    beside = path.with_suffix(".new")
    beside.write_bytes(raw)
    os.replace(beside, path)


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "other"])
def test_a_broken_file_is_refused_and_the_old_one_stays(models, path, how, caplog):
    x = images(1)
    right = expected(path, x, 8)
    damaged(path, how)
    with caplog.at_level("ERROR", "anyprec.serve"):
        for _ in range(4):
            models.check()
    assert [record.message for record in caplog.records] == ["new model file refused, the old one stays"]
    np.testing.assert_array_equal(answer(models, x).outputs[0], right)
    assert models.loads == [True, False]
    save(path, seed=3)
    models.check(at_once=True)
    np.testing.assert_array_equal(answer(models, x).outputs[0], expected(path, x, 8))


IN_PLACE = """
import logging, os, shutil, sys
import numpy as np
from serving import expected, images, level_graph, save
from test_models import SETTINGS, answer
from pathlib import Path
from anyprec.format import write
from anyprec.serve.models import ModelRepository

change, path = sys.argv[1], Path(sys.argv[2])
said = []
handler = logging.Handler()
handler.setLevel("ERROR")
handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
logging.getLogger("anyprec.serve").addHandler(handler)
x = images(1)
save(path)
right = {bits: expected(path, x, bits) for bits in (1, 2, 4, 8)}
models = ModelRepository({"net": str(path)}, SETTINGS)
models.load_all()
times = os.stat(path)
if change == "cut":
    os.truncate(path, 1000)
elif change == "overwritten":
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
else:
    shutil.copyfile(save(path.with_name("other.apm"), seed=1), path)
    right = {bits: expected(path, x, bits) for bits in (1, 2, 4, 8)}
for _ in range(4):
    models.check()
for bits in (1, 8, 2, 4):
    np.testing.assert_array_equal(answer(models, x, bits).outputs[0], right[bits])
refused = [("ERROR", "new model file refused, the old one stays")]
assert said == ([] if change == "another model" else refused), said
assert models.get("net").loads == (2 if change == "another model" else 1)
models.close(5.0)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["cut", "overwritten", "another model"])
def test_a_file_rewritten_in_place(tmp_path, change):
    """In a process of its own, for it used to end by SIGBUS. Every width answers as one whole file does."""
    here = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", IN_PLACE, change, str(tmp_path / "net.apm")],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": here},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_file_that_is_gone_goes_on_being_served(models, path, caplog):
    x = images(1)
    right = answer(models, x).outputs[0]
    path.unlink()
    with caplog.at_level("WARNING", "anyprec.serve"):
        for _ in range(3):
            models.check()
    assert len(caplog.records) == 1
    np.testing.assert_array_equal(answer(models, x).outputs[0], right)
    save(path, seed=4)
    models.check(at_once=True)
    assert models.get("net").loads == 2


def test_unload_and_load(models, path):
    served = models.get("net")
    models.unload(served)
    assert served.state == "UNAVAILABLE" and not models.ready
    save(path, seed=5)
    models.check(at_once=True)
    assert served.now is None  # a new file does not undo it
    models.load(served)
    assert models.ready and answer(models, images(1)).bits == 8
    damaged(path, "cut")
    models.unload(served)
    with pytest.raises(TruncatedFile, match="fetch it again"):
        models.load(served)
    assert "log" in served.reason and str(path) not in served.reason


def test_a_server_does_not_start_with_a_broken_file(tmp_path, path):
    damaged(path, "flipped")
    for given, error in ((path, ModelFileError), (tmp_path / "none.apm", ServeError)):
        models = ModelRepository({"net": str(given)}, SETTINGS)
        with pytest.raises(error):
            models.load_all()


def test_the_watch_sees_a_new_file(models, path):
    models.watch(0.02)
    save(path, seed=6)
    end = time.monotonic() + 20
    while models.get("net").loads < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert models.get("net").loads == 2


def test_replacing_under_load_fails_no_request(models, path):
    """Every answer is that of one of the two files, whole."""
    x = images(1)
    other = save(path.with_name("other.apm"), seed=9)
    right = [expected(path, x, 8), expected(other, x, 8)]
    wrong, stop = [], threading.Event()

    def client():
        while not stop.is_set():
            try:
                y = answer(models, x).outputs[0]
            except AnyprecError as error:
                wrong.append(error)
            else:
                if not any(np.array_equal(y, one) for one in right):
                    wrong.append(y)

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    for seed in (9, 0, 9):
        save(path, seed=seed)
        models.check(at_once=True)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_descriptions(models):
    served = models.get("net")
    found = metadata("net", served.now, SETTINGS)
    assert found["inputs"] == [{"name": "input", "datatype": "UINT8", "shape": [-1, 3, 8, 8]}]
    assert found["parameters"]["accuracy"]["8"] == 88.0 and found["parameters"]["widths"] == [1, 2, 4, 8]
    config = triton_config("net", served.now)
    assert config["max_batch_size"] == 32 and config["input"][0]["dims"] == [3, 8, 8]
