"""The same load from several processes, for more requests than one can send. Called by cli/loadtest.py.

Each sends every n-th request at its own time; the clock they share is the machine's, so that the whole is one load.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np

from anyprec.errors import LoadTestError
from anyprec.loadtest.client import LOOK_S, LoadPlan, Sender, Tick, check, clock, send
from anyprec.loadtest.outcome import LoadOutcome, merge

START_S = 0.05  # from the moment all are ready to the first request


def send_from_processes(plan: LoadPlan, times: np.ndarray, processes: int, tick: Tick | None = None) -> LoadOutcome:
    """The same load, dealt out to several processes in turn: request i is sent by process i modulo their number."""
    check(plan, times)
    processes = max(1, min(processes, len(times)))
    if processes == 1:
        return send(plan, times, tick)
    context = multiprocessing.get_context("spawn")
    workers, pipes = [], []
    try:
        for i in range(processes):
            pipe, far = context.Pipe()
            part = replace(plan, first=plan.first + i, stride=processes)
            worker = context.Process(target=worker_main, args=(far, part, times[i::processes]), daemon=True)
            worker.start()
            far.close()
            workers.append(worker)
            pipes.append(pipe)
        for pipe in pipes:
            receive(pipe)  # ready
        start = clock() + START_S
        for pipe in pipes:
            pipe.send(start)
        outcomes = []
        for pipe in pipes:
            while not pipe.poll(LOOK_S):
                if tick is not None:
                    tick(clock() - start)
            outcomes.append(receive(pipe))
    finally:
        for worker in workers:
            worker.join(1)
            if worker.is_alive():
                worker.terminate()
    return merge([(np.arange(i, len(times), processes), outcome) for i, outcome in enumerate(outcomes)])


def receive(pipe: Pipe) -> Any:
    try:
        found = pipe.recv()
    except EOFError as error:
        raise LoadTestError("a process of the load generator ended early; its message stands above") from error
    if isinstance(found, LoadTestError):
        raise found
    return found


def worker_main(pipe: Pipe, plan: LoadPlan, times: np.ndarray) -> None:
    try:
        sender = Sender(plan, times)
        sender.warm()
        pipe.send("ready")
        pipe.send(sender.run(pipe.recv()))
    except LoadTestError as error:
        pipe.send(error)
    except (EOFError, KeyboardInterrupt):
        pass  # the parent was interrupted and has said so
