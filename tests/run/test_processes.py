"""A process that forks, or ends, while its other threads are inside a model. In processes of their own: a fault there
would be a hang or an abort."""

import os
import subprocess
import sys

import numpy as np
import pytest

START = """
import os, signal, sys, threading, time
import numpy as np
from anyprec.run.model import load

m = load(sys.argv[1], threads=2, memory_budget=1)  # every change of width builds panels, under the lock
x = np.load(sys.argv[2])
want = {bits: m(x, bits=bits) for bits in m.widths}

def call(first):
    number = first
    while True:
        m(x, bits=m.widths[number % len(m.widths)])
        number += 1

def start(count):
    for i in range(count):
        threading.Thread(target=call, args=(3 * i,), daemon=True).start()
    time.sleep(0.05)

def right():  # a child that hangs is ended by the alarm
    signal.alarm(60)
    return all(np.array_equal(m(x, bits=bits), want[bits]) for bits in (8, 1, 2))
"""

FORK = """
start(3)
for _ in range(12):
    time.sleep(0.003)
    child = os.fork()
    if child == 0:
        code = 0 if right() and m.memory["arenas"] > 0 else 1
        del m  # ends its pool
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, code
assert right()
"""

FORK_TWICE = """
start(2)
child = os.fork()
if child == 0:
    start(2)
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(0 if right() else 1)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

MULTIPROCESSING = """
import multiprocessing

def work(_):
    return right()

start(2)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(work, range(4)) == [True] * 4
"""

LOADING = """
def load_again():
    while True:
        load(sys.argv[1])(x, bits=2, threads=2)

for _ in range(2):
    threading.Thread(target=load_again, daemon=True).start()
for _ in range(12):
    time.sleep(0.003)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if np.array_equal(load(sys.argv[1])(x, bits=2), want[2]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def run(net, tmp_path, script, timeout=120):
    x = np.random.default_rng(1).standard_normal((2, 3, 24, 24)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    return subprocess.run(
        [sys.executable, "-c", START + script, str(net.path), str(tmp_path / "x.npy")],
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    "script", [FORK, FORK_TWICE, MULTIPROCESSING, LOADING], ids=["fork", "twice", "pool", "loading"]
)
def test_fork_while_other_threads_run(net, tmp_path, script):
    done = run(net, tmp_path, script)
    assert (done.returncode, done.stderr) == (0, "")


EXITS = {
    "inside a call": "start(3)",
    "steps": "threading.Thread(target=lambda: m.steps(x, 2, repeat=10**6), daemon=True).start(); time.sleep(0.1)",
    "a model of the thread's own": (
        "threading.Thread(target=lambda m: [m(x, 2) for _ in iter(int, 1)], args=(m,), daemon=True).start()\n"
        "del m\n"
        "time.sleep(0.05)"
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", EXITS)
def test_exit_while_daemon_threads_run(net, tmp_path, case):
    for _ in range(3):
        done = run(net, tmp_path, EXITS[case])
        assert (done.returncode, done.stderr) == (0, "")
