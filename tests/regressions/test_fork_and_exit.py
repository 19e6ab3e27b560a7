"""Fork while another thread runs the model, and exit with a daemon thread inside a call."""

import pytest
from blackbox import python
from bombs import save_mask

START = """
import os, signal, sys, threading, time
import numpy as np, anyprec
model = anyprec.load(sys.argv[1], threads=2, memory_budget=1)  # every change of width builds panels, under a lock
x = np.zeros((2, 3, 24, 24), np.uint8)
want = {bits: model(x, bits) for bits in (2, 8)}
def call():
    while True:
        for bits in (2, 8):
            model(x, bits)
for _ in range(3):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.05)
"""
FORK = """
ends = []
for _ in range(6):
    time.sleep(0.003)
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # a child that hangs is ended by it
        os._exit(0 if all(np.array_equal(model(x, bits), want[bits]) for bits in (8, 2)) else 1)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(ends, flush=True)
os._exit(0)
"""


def test_a_child_can_run_the_model(tmp_path):
    """A child of a fork waited for ever for a lock that a thread of its parent held (-14: ended by the alarm)."""
    done = python(START + FORK, save_mask(tmp_path / "mask.apm", depth=4))
    assert done.stdout == "[0, 0, 0, 0, 0, 0]\n"


@pytest.mark.thorough
def test_exit_is_quiet_while_a_daemon_thread_runs_the_model(tmp_path):
    """The process aborted ("terminate called without an active exception")."""
    path = save_mask(tmp_path / "mask.apm", depth=4)
    ends = [python(START, path) for _ in range(4)]
    assert [(done.returncode, done.stderr) for done in ends] == [(0, "")] * 4
