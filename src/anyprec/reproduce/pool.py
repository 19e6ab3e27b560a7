"""Jobs done by worker processes, or one after the other in this one; with one line of progress and an ETA for all.

`run_jobs(jobs, ...)` takes jobs that name the jobs they need, starts each when those are done, and goes on with the
rest when one fails. Called by the command line.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyprec.errors import AnyprecError
from anyprec.progress import Progress
from anyprec.reproduce.job import Job, perform

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"


@dataclass
class Task:
    """A job in the queue. `seconds` is what it is thought to take on a core of its own: the unit of the bar, whose rate
    then shows how busy the machine is.
    """

    name: str
    job: Job
    seconds: float
    needs: tuple[str, ...] = ()
    state: str = WAITING
    share: float = 0.0  # done of it
    what: str = ""
    error: str = ""

    def heard(self, share: float, what: str) -> None:
        self.share, self.what = share, what

    @property
    def done_seconds(self) -> float:
        return self.seconds if self.state in (DONE, FAILED) else self.seconds * self.share


@dataclass
class TaskQueue:
    """The tasks, and the bar that shows them: core-seconds done of those thought to be needed."""

    tasks: Sequence[Task]
    bar: Progress
    ended: Callable[[Task], None]
    state: dict[str, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = {task.name: task for task in self.tasks}

    def next(self) -> Task | None:
        """The first task whose needs are met. One whose needs failed fails with them."""
        for task in self.tasks:
            if task.state != WAITING:
                continue
            needs = [self.state[name] for name in task.needs if name in self.state]
            broken = [need for need in needs if need.state == FAILED]
            if broken:
                self.end(task, f"{broken[0].name} failed")
            elif all(need.state == DONE for need in needs):
                return task
        return None

    def begin(self, task: Task) -> None:
        task.state = RUNNING
        self.show()

    def end(self, task: Task, error: str = "") -> None:
        task.state, task.error = (FAILED, error) if error else (DONE, "")
        left = sum(t.state in (WAITING, RUNNING) for t in self.tasks)
        self.bar.write(f"{task.state}: {task.name}" + (f": {error}" if error else "") + f" ({left} left)")
        self.show()
        self.ended(task)

    def show(self) -> None:
        self.bar.total = max(1, round(sum(task.seconds for task in self.tasks)))
        done = round(sum(task.done_seconds for task in self.tasks))
        running = [task for task in self.tasks if task.state == RUNNING]
        now = "; ".join(f"{t.name} {100 * t.share:.0f} % {t.what}".rstrip() for t in running)
        self.bar.update(done - self.bar.done, now=now)

    @property
    def failed(self) -> list[Task]:
        return [task for task in self.tasks if task.state == FAILED]


def run_jobs(
    tasks: Sequence[Task],
    workers: int,
    ended: Callable[[Task], None] = lambda task: None,
    log: Path | None = None,
) -> list[Task]:
    """Do all tasks; those that failed come back. `workers` < 2: in this process."""
    with Progress("reproduce", total=1, unit="core-s") as bar:
        board = TaskQueue(tasks, bar, ended)
        if workers < 2:
            run_in_this_process(board)
        else:
            with Pool(workers, log) as pool:
                pool.drain(board)
        return board.failed


def run_in_this_process(board: TaskQueue) -> None:
    while (task := board.next()) is not None:
        board.begin(task)
        current = task

        def tell(share: float, what: str, task: Task = current) -> None:
            task.heard(share, what)
            board.show()

        try:
            perform(task.job, tell)
        except AnyprecError as error:
            board.end(task, str(error))
        else:
            board.end(task)


class Pool:
    """Worker processes, one thread each."""

    def __init__(self, workers: int, log: Path | None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.said: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.log = open(log, "ab") if log is not None else None  # noqa: SIM115 (closed in __exit__)
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "anyprec.reproduce.job"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.log or subprocess.DEVNULL, text=True, env=environment,
            )
            for _ in range(workers)
        ]  # fmt: skip
        self.listeners = [threading.Thread(target=self._listen, args=(i,), daemon=True) for i in range(workers)]
        for listener in self.listeners:
            listener.start()

    def _listen(self, number: int) -> None:
        stream = self.processes[number].stdout
        assert stream is not None
        with stream:
            for line in stream:
                self.said.put((number, json.loads(line)))
        self.said.put((number, {"gone": True}))

    def drain(self, board: TaskQueue) -> None:
        busy: dict[int, Task] = {}
        alive = set(range(len(self.processes)))
        while True:
            for number in sorted(alive - set(busy)):
                task = board.next()
                if task is None:
                    break
                self._send(number, task.job)
                busy[number] = task
                board.begin(task)
            if not busy:
                return
            try:
                number, message = self.said.get(timeout=5)
            except queue.Empty:
                board.show()
                continue
            if message.get("gone"):
                alive.discard(number)
                if number in busy:  # killed from outside, most likely for want of memory
                    code = self.processes[number].wait()
                    board.end(
                        busy.pop(number), f"its process ended with code {code}; see log.txt, start again to resume"
                    )
                if not alive:
                    raise AnyprecError("all worker processes ended; see log.txt, start again to resume")
            elif number in busy:
                task = busy[number]
                if "share" in message:
                    task.heard(message["share"], message["what"])
                    board.show()
                else:
                    del busy[number]
                    board.end(task, message.get("error", ""))

    def _send(self, number: int, job: Job) -> None:
        stream = self.processes[number].stdin
        assert stream is not None
        stream.write(json.dumps(job) + "\n")
        stream.flush()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        """The workers end when their stdin closes, in the middle of a job too."""
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
        for process, listener in zip(self.processes, self.listeners, strict=True):
            process.wait()
            listener.join()
        if self.log is not None:
            self.log.close()
