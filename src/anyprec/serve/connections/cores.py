"""Cores under `--pin`: one for HTTP, the others for engines. Called by cli/serve.py, models.py and scheduler.py.

Left alone, the system may wake the thread that sends an answer on the core where the next batch has just begun; it then
waits for some milliseconds beside an idle core. What a thread starts keeps to the same cores as itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import dataclass

from anyprec.errors import ServeError


@dataclass(frozen=True)
class Cores:
    http: frozenset[int] | None = None  # None: any
    engines: frozenset[int] | None = None


def split_cores() -> Cores:
    """Of the cores that this process may use."""
    if not hasattr(os, "sched_setaffinity"):
        raise ServeError("--pin: this system does not let a process choose its cores; leave it out")
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < 2:
        raise ServeError("--pin: one core for HTTP and another for engines are needed, there is 1; leave it out")
    return Cores(frozenset(ours[:1]), frozenset(ours[1:]))


def pin_thread(cores: frozenset[int] | None) -> None:
    """The calling thread, from now on; None: any core."""
    if cores is not None:
        os.sched_setaffinity(0, cores)


BEHIND_HTTP = 4  # steps of nice: about 0.4 of the weight


def run_behind_http() -> None:
    """Let this engine thread give way to the thread that reads requests and sends answers.

    On one core an answer otherwise waits until the next batch has run, or the engine's slice of time is over.
    """
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + BEHIND_HTTP)
