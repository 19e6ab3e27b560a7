"""Workers: processes that parse untrusted bytes. A job in; its reply or an error out, never later than its deadline.

A process does one job at a time. If a job takes longer than `longest_s`, its process is killed and replaced. A request
that waits for a free process gets Expired at its deadline. worker_main.py is the program of a process. Called by
readers.py, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from anyprec.errors import Expired, Overloaded
from anyprec.serve.http.protocol import HttpError
from anyprec.serve.http.worker_main import LENGTHS
from anyprec.serve.monitoring.logs import log

MOST_WAITING = 64  # jobs; each may hold a body
START_S = 30.0  # until a new process must be ready; it takes 0.2 s on an idle machine
PROGRAM = "import sys; sys.path[:] = {path!r}; from anyprec.serve.http.worker_main import main; main()"


class WorkerDied(Exception):
    """The worker process has ended."""


class Worker:
    """One process, and our end of its socket."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        # One thread each: numpy's would only be more memory. Our own path, or the current folder would be in front.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM.format(path=sys.path)]
        with theirs:
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment)
        self.ready = False
        self.killed = False

    def kill(self) -> None:
        self.killed = True
        with contextlib.suppress(OSError):
            self.process.kill()

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self.socket.close()

    async def ask(self, job: str, longest_s: float, args: tuple[Any, ...], data: bytes) -> tuple[Any, bytearray]:
        loop = asyncio.get_running_loop()
        timer = None
        try:
            if not self.ready:
                timer = loop.call_later(START_S, self.kill)
                await self._receive()
                self.ready = True
                timer.cancel()
            timer = loop.call_later(longest_s, self.kill)
            head = pickle.dumps((job, longest_s + 1.0, args))
            await loop.sock_sendall(self.socket, LENGTHS.pack(len(head), len(data)) + head)
            if data:
                await loop.sock_sendall(self.socket, data)
            return await self._receive()
        except (OSError, EOFError) as error:
            raise WorkerDied from error
        except BaseException:  # part of a message was sent
            self.kill()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _receive(self) -> tuple[Any, bytearray]:
        head_length, data_length = LENGTHS.unpack(await self._exactly(LENGTHS.size))
        head = json.loads(await self._exactly(head_length))
        return head, await self._exactly(data_length)

    async def _exactly(self, count: int) -> bytearray:
        found = bytearray(count)
        view, at = memoryview(found), 0
        loop = asyncio.get_running_loop()
        while at < count:
            got = await loop.sock_recv_into(self.socket, view[at:])
            if not got:
                raise EOFError
            at += got
        return found


class Workers:
    """`start` brings the processes up before they are needed; else the first job does."""

    def __init__(self, count: int, longest_s: float, on_kill: Callable[[], None] = lambda: None) -> None:
        self.count, self.longest_s, self.on_kill = count, longest_s, on_kill
        self.waiting = 0
        self.came_up = False  # once: until then nobody's deadline counts, for it is we who are late
        self._all: set[Worker] = set()
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._jobs: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self) -> None:
        while len(self._all) < self.count and not self._closed:
            self._add()

    def _add(self) -> Worker:
        worker = Worker()
        self._all.add(worker)
        self._idle.put_nowait(worker)
        return worker

    def close(self) -> None:
        self._closed = True
        for worker in list(self._all):
            worker.close()
        self._all.clear()

    async def run(self, job: str, data: bytes, *args: Any, until: float) -> tuple[Any, bytearray]:
        """The reply's head and data. `until`: seconds of time.monotonic()."""
        if len(self._all) < self.count:
            self.start()
        if not self.came_up:
            until = max(until, time.monotonic() + START_S)
        if self._idle.empty():
            worker = await self._wait(until)
        else:
            worker = self._idle.get_nowait()
        if worker.process.poll() is not None:  # it ended while it had nothing to do
            await self._put_back(worker)
            return await self.run(job, data, *args, until=until)
        task = asyncio.get_running_loop().create_task(self._do(worker, job, data, args))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        done, _ = await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
        if not done:  # let the process finish or time out: replacing it would cost more
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise Expired("its deadline passed while it was read")
        return task.result()

    async def _wait(self, until: float) -> Worker:
        if self.waiting >= MOST_WAITING:
            raise Overloaded("too many images or long requests at once; try again", retry_after=1.0)
        self.waiting += 1
        try:
            return await asyncio.wait_for(self._idle.get(), max(0.0, until - time.monotonic()))
        except asyncio.TimeoutError:
            raise Expired("its deadline passed while it waited to be read") from None
        finally:
            self.waiting -= 1

    async def _do(self, worker: Worker, job: str, data: bytes, args: tuple[Any, ...]) -> tuple[Any, bytearray]:
        try:
            head, found = await worker.ask(job, self.longest_s, args, data)
        except WorkerDied:
            if self._closed:
                raise Expired("the server stopped while it was read") from None
            self.on_kill()
            late, worker.killed = worker.killed, True
            if not late:
                log.error("a worker process ended by itself", job=job, code=worker.process.poll())
                raise HttpError(400, f"the {job} cannot be read: it ended the process that tried to") from None
            log.warning("a job took too long", job=job, bytes=len(data), seconds=self.longest_s)
            raise HttpError(
                413, f"it takes more than {self.longest_s:g} s to read, too long; send a smaller or simpler one"
            ) from None
        finally:
            await self._put_back(worker)
        self.came_up = True
        if "error" in head:
            raise HttpError(head["status"], head["message"])
        return head, found

    async def _put_back(self, worker: Worker) -> None:
        if self._closed:
            return
        if worker.process.poll() is None and not worker.killed:
            self._idle.put_nowait(worker)
            return
        self._all.discard(worker)
        await asyncio.get_running_loop().run_in_executor(None, worker.close)
        if not self._closed and len(self._all) < self.count:
            self._add()
