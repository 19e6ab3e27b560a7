"""One model and many threads: the same outputs as one thread, whatever the others do; Python goes on meanwhile."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engine_check import usable_isas
from graph_builder import assert_same

from anyprec.bench.random_networks import resnet20_graph
from anyprec.format import write
from anyprec.run.model import load

F32 = np.float32
WORKERS = 8


def batches(seed=0):
    rng = np.random.default_rng(seed)
    sizes = [(1, 8, 8), (2, 8, 8), (1, 13, 7), (3, 5, 5), (1, 16, 17)]
    return [rng.standard_normal((n, 3, h, w)).astype(F32) for n, h, w in sizes]


def call_from_all(model, inputs, wanted, calls):
    """Each worker calls at random profiles, sizes and numbers of threads, all starting at once."""
    start = threading.Barrier(WORKERS)
    names = [name for name, _ in wanted]

    def work(seed):
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(calls):
            name, i = names[rng.integers(len(names))], int(rng.integers(len(inputs)))
            assert_same(model(inputs[i], name, threads=int(rng.integers(1, 4))), wanted[name, i], f"{name}, input {i}")
        return calls

    with ThreadPoolExecutor(WORKERS) as pool:
        assert sum(pool.map(work, range(WORKERS))) == WORKERS * calls


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("memory_budget", [None, 40_000])
def test_eight_threads_give_what_one_gives(net, isa, memory_budget):
    inputs, alone = batches(), load(net.path, isa=isa)
    wanted = {(name, i): alone(x, name) for name in alone.profiles for i, x in enumerate(inputs)}
    # Fresh, so that panels and plans are made while others run; a budget throws them away in between.
    model = load(net.path, isa=isa, memory_budget=memory_budget)
    call_from_all(model, inputs, wanted, calls=25)
    if memory_budget:
        model(inputs[0], 2)
        assert model.memory["panels"] <= memory_budget


def test_a_file_grows_while_eight_threads_call(net, tmp_path):
    whole, path = net.path.read_bytes(), tmp_path / "download.apm"
    inputs, alone = batches(), load(net.path)
    wanted = {(name, i): alone(x, name) for name in ("1", "2") for i, x in enumerate(inputs)}
    path.write_bytes(whole[: alone.bytes_needed(2)])
    model = load(path)
    done = threading.Event()

    def download():
        with path.open("ab", buffering=0) as file:
            step = 1 + (len(whole) - file.tell()) // 50
            while file.tell() < len(whole):
                file.write(whole[file.tell() : file.tell() + step])
                model.refresh()
        done.set()

    thread = threading.Thread(target=download)
    thread.start()
    call_from_all(model, inputs, wanted, calls=15)
    thread.join()
    assert done.is_set() and model.refresh() == alone.widths
    assert_same(model(inputs[0]), alone(inputs[0]))


@pytest.mark.parametrize("isa", usable_isas())
def test_the_number_of_threads_changes_nothing(net, isa):
    model = load(net.path, isa=isa)
    for x in batches(1):
        for name in ("1", "2", "8", "32", "fast"):
            want = model(x, name)
            for threads in (2, 3, 5, 16):
                assert_same(model(x, name, threads=threads), want, f"{threads} threads")
    model.threads = 3
    assert model.threads == 3
    assert_same(model(x, name), want)


def test_a_call_lets_other_threads_go_on(tmp_path):
    """The main thread notes when it ran. Were the GIL held, no note could fall into the middle of a call."""
    write(resnet20_graph(size=None), tmp_path / "net.apm")
    model = load(tmp_path / "net.apm", isa="scalar")
    x = np.zeros((4, 3, 32, 32), F32)
    spans: list[tuple[float, float]] = []
    stop = threading.Event()

    def call():
        while not stop.is_set():
            begin = time.perf_counter()
            model(x)
            spans.append((begin, time.perf_counter()))

    thread = threading.Thread(target=call)
    thread.start()
    notes: list[float] = []
    seen = False
    try:
        while not seen and len(spans) < 200 and thread.is_alive():
            notes.append(time.perf_counter())
            # The middle half of a call that is over: far from where Python held the GIL to start and end it.
            seen = any((3 * a + b) / 4 < note < (a + 3 * b) / 4 for a, b in spans[-3:] for note in notes[-2000:])
            notes = notes[-2000:]
    finally:
        stop.set()
        thread.join()
    assert seen, f"{len(spans)} calls, and Python stood still during each"


def test_models_come_and_go_while_others_run(net):
    """Each has a pool of its own, which ends with it."""
    x = batches()[1]
    want = load(net.path)(x, 2)

    def work(_):
        for _ in range(5):
            assert_same(load(net.path, threads=3)(x, 2), want)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


FORKED = """
import os, sys
import numpy as np
from anyprec.run.model import load

m = load(sys.argv[1])
x = np.load(sys.argv[2])
want = m(x, bits=2, threads=3)
child = os.fork()
if child == 0:  # has the pool's memory, but not its threads
    same = np.array_equal(m(x, bits=2, threads=3), want) and np.array_equal(m(x, bits=8, threads=3), m(x, bits=8))
    del m  # ends the pool
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert np.array_equal(m(x, bits=2, threads=3), want)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_can_call_the_model(net, tmp_path):
    np.save(tmp_path / "x.npy", batches()[4])
    subprocess.run([sys.executable, "-c", FORKED, str(net.path), str(tmp_path / "x.npy")], check=True, timeout=60)
