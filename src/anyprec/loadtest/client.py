"""Open-loop load generator: requests are sent at planned times, whether or not earlier ones were answered.

    outcome = send(LoadPlan(host, port, messages), times)

Latency is counted from the planned time, so a server that stalls is charged for every request that should have been
sent meanwhile (no coordinated omission). One thread with plain sockets takes about 60 us of CPU per request: the
generator often shares its cores with the server it measures.
Called by processes.py and bench/serve.py.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyprec.errors import LoadTestError
from anyprec.loadtest import wire
from anyprec.loadtest.outcome import BROKEN, OK, UNANSWERED, LoadOutcome
from anyprec.loadtest.poller import READ, WRITE, poller

clock = time.perf_counter  # the same in all processes, so that they can agree on a start
BURST = 32  # sends before we read answers again
LOOK_S = 0.1  # between checks for timeouts and calls of `tick`
CHUNK = 1 << 16
NEVER = float("nan")
Tick = Callable[[float], None]
DIGITS = re.compile(r"\d+(\.\d+)?")  # errors that differ only in a number are counted together
NOT_ALLOWED = "not allowed to run in real time; the load was sent as usual"
CONNECTING = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK))


@dataclass(frozen=True)
class LoadPlan:
    """What to send, where and how; the times are given to `send`."""

    host: str
    port: int
    messages: Sequence[bytes]  # whole HTTP requests; request i sends number first + i, modulo their count
    timeout_s: float = 10.0
    connections: int = 4  # opened before the start; more are opened whenever all are busy
    limit: int = 4096  # connections at once; beyond it requests wait, which is reported
    keep_outputs: bool = False  # keep the bytes of the answers, to check them
    real_time: bool = False  # with real-time priority, where the system allows it
    first: int = 0
    stride: int = 1  # between the messages of consecutive requests: each of 2 processes sends every other one


class ClientConnection:
    __slots__ = ("data", "more", "number", "request", "since", "socket", "unsent", "used")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.number = sock.fileno()
        self.request = -1  # the one in flight; -1: idle
        self.since = 0.0
        self.unsent: memoryview | None = None
        self.data: bytearray | None = None  # of an incomplete answer
        self.more = 0  # length of `data` at which it is parsed again
        self.used = False  # has answered before, so the server may have closed it since


class Sender:
    """One run of one process. Requests are numbers, positions in `times`."""

    def __init__(self, plan: LoadPlan, times: np.ndarray) -> None:
        self.plan = plan
        self.planned = np.asarray(times, np.float64)
        count = len(self.planned)
        self.sent = [NEVER] * count
        self.done = [NEVER] * count
        self.status = [UNANSWERED] * count
        self.profile = [""] * count
        self.queue_s = [NEVER] * count
        self.run_s = [NEVER] * count
        self.batch = [0] * count
        self.retry_after_s = [NEVER] * count
        self.outputs: dict[int, bytes] = {}
        self.notes: dict[str, int] = {}
        self.poller = poller()
        self.all: dict[int, ClientConnection] = {}  # by file number
        self.idle: list[ClientConnection] = []  # used last in, first out: the others may be closed by the server
        self.waiting: deque[int] = deque()  # requests that found the pool at its limit
        self.again: set[int] = set()  # requests that were sent a second time
        self.left = count
        self.opened = self.waited = 0
        try:
            found = socket.getaddrinfo(plan.host, plan.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise LoadTestError(f"{plan.host}: {error}") from error
        self.family, self.address = found[0], found[4]

    def warm(self) -> None:
        """Open the first connections; fails here, once, if there is no server."""
        for _ in range(min(self.plan.connections, self.plan.limit)):
            try:
                sock = socket.create_connection((self.plan.host, self.plan.port), timeout=self.plan.timeout_s)
            except OSError as error:
                self.close()
                raise LoadTestError(f"{self.plan.host}:{self.plan.port}: no connection ({error})") from error
            self.idle.append(self.adopt(sock))

    def run(self, start: float, tick: Tick | None = None) -> LoadOutcome:
        """Send everything, `start` being second 0 on `clock`; returns when all is answered, broken or timed out."""
        cpu = time.process_time()
        usual = real_time() if self.plan.real_time else None
        if self.plan.real_time and usual is None:
            self.note(NOT_ALLOWED)
        collecting = gc.isenabled()
        gc.disable()  # a full collection takes tens of milliseconds
        try:
            self.loop(start, tick)
        finally:
            if collecting:
                gc.enable()
            if usual is not None:
                os.sched_setscheduler(0, *usual)
            self.close()
        return self.outcome(start, time.process_time() - cpu)

    def loop(self, start: float, tick: Tick | None) -> None:
        times = (self.planned + start).tolist()
        count, at = len(times), 0
        look = start + LOOK_S
        while self.left:
            now = clock()
            burst = 0
            while at < count and times[at] <= now and burst < BURST:
                self.dispatch(at)
                at += 1
                burst += 1
                now = clock()
            if now >= look:
                self.expire(now - self.plan.timeout_s, times)
                look = now + LOOK_S
                if tick is not None:
                    tick(now - start)
            until = min(times[at], look) if at < count else look
            for number, mask in self.poller.wait(until - now):
                connection = self.all.get(number)
                if connection is None:
                    continue  # dropped earlier in this very list
                if connection.unsent is not None and mask & ~READ:
                    self.push(connection)
                if mask & ~WRITE and self.all.get(number) is connection:
                    self.receive(connection)

    # --- Sending -------------------------------------------------------------------------------------------------

    def dispatch(self, request: int, fresh: bool = False) -> None:
        """Send a request on a free connection, or on a new one."""
        if self.idle and not fresh:
            connection = self.idle.pop()
        elif len(self.all) < self.plan.limit:
            opened = self.open(request)
            if opened is None:
                return
            connection = opened
        else:
            self.waited += 1
            self.waiting.append(request)
            return
        plan = self.plan
        message = plan.messages[(plan.first + request * plan.stride) % len(plan.messages)]
        connection.request = request
        connection.since = now = clock()
        if self.sent[request] != self.sent[request]:  # nan: not sent before
            self.sent[request] = now
        try:
            count = connection.socket.send(message)
        except (BlockingIOError, InterruptedError):
            count = 0
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # some systems say this while connecting
                self.drop(connection, error)
                return
            count = 0
        if count < len(message):
            connection.unsent = memoryview(message)[count:]
            self.poller.change(connection.number, READ | WRITE)

    def push(self, connection: ClientConnection) -> None:
        """Send what the socket's buffer had no room for."""
        assert connection.unsent is not None
        try:
            count = connection.socket.send(connection.unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.drop(connection, error)
            return
        connection.unsent = connection.unsent[count:]
        if not connection.unsent:
            connection.unsent = None
            self.poller.change(connection.number, READ)

    def open(self, request: int) -> ClientConnection | None:
        try:
            sock = socket.socket(self.family, socket.SOCK_STREAM)
        except OSError as error:  # out of file numbers: those that are open must do
            if not self.all:
                self.finish(request, BROKEN, str(error))
            else:
                self.waited += 1
                self.waiting.append(request)
            return None
        sock.setblocking(False)
        code = sock.connect_ex(self.address)
        if code not in CONNECTING:
            sock.close()
            self.sent[request] = clock()
            self.finish(request, BROKEN, errno.errorcode.get(code, str(code)))
            return None
        return self.adopt(sock)

    def adopt(self, sock: socket.socket) -> ClientConnection:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = ClientConnection(sock)
        self.all[connection.number] = connection
        self.poller.add(connection.number, READ)
        self.opened += 1
        return connection

    # --- Receiving -----------------------------------------------------------------------------------------------

    def receive(self, connection: ClientConnection) -> None:
        try:
            data: bytes | bytearray = connection.socket.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.drop(connection, error)
            return
        now = clock()
        if not data:
            self.drop(connection, "closed before the answer was complete")
            return
        if connection.data is not None:
            connection.data += data
            data = connection.data
            if len(data) < connection.more:
                return
        if connection.request < 0:
            self.drop(connection, "")  # an idle server has nothing to say: uvicorn's 408, say, and then the end
            return
        try:
            found = wire.take(data)
        except wire.BadAnswer as error:
            self.drop(connection, str(error), final=True)
            return
        if isinstance(found, int):
            connection.more = found
            if connection.data is None:
                connection.data = bytearray(data)
            return
        reply, used = found
        self.answered(connection.request, reply, now)
        connection.request = -1
        connection.data = None
        connection.used = True
        if reply.close or used != len(data) or connection.unsent is not None:
            self.drop(connection, "")
        else:
            self.idle.append(connection)
        while self.waiting and (self.idle or len(self.all) < self.plan.limit):
            self.dispatch(self.waiting.popleft())

    def answered(self, request: int, reply: wire.Reply, now: float) -> None:
        self.done[request] = now
        self.status[request] = reply.status
        self.left -= 1
        if reply.status == OK:
            self.note_run(request, reply.numbers())
            if self.plan.keep_outputs:
                self.outputs[request] = reply.tensor
            return
        if reply.retry_after_s is not None:
            self.retry_after_s[request] = reply.retry_after_s
        said = reply.body[:160].decode(errors="replace")
        self.note(f"{reply.status} {DIGITS.sub('#', said)}")

    def note_run(self, request: int, said: dict[bytes, bytes]) -> None:
        self.profile[request] = said.get(b"bits", b"").decode("latin-1")
        try:
            self.queue_s[request] = 1e-3 * float(said.get(b"queue_ms", b"nan"))
            self.run_s[request] = 1e-3 * float(said.get(b"run_ms", b"nan"))
            self.batch[request] = int(said.get(b"batch", b"0"))
        except ValueError:
            self.note("the answer's queue_ms, run_ms or batch is not a number")

    # --- Ends ----------------------------------------------------------------------------------------------------

    def drop(self, connection: ClientConnection, why: Exception | str, final: bool = False) -> None:
        """Close a connection. Its request goes out once more if the server may have closed it without seeing that."""
        del self.all[connection.number]
        self.poller.remove(connection.number)
        connection.socket.close()
        request, connection.request = connection.request, -1
        if request < 0:
            if connection in self.idle:
                self.idle.remove(connection)
            return
        if connection.used and connection.data is None and not final and request not in self.again:
            self.again.add(request)
            self.dispatch(request, fresh=True)  # the other idle ones may be as stale
        else:
            self.finish(request, BROKEN, str(why))

    def finish(self, request: int, status: int, why: str) -> None:
        self.status[request] = status
        self.left -= 1
        self.note(why)

    def expire(self, before: float, times: list[float]) -> None:
        for connection in list(self.all.values()):
            request = connection.request
            if request >= 0 and times[request] < before and connection.since < before:
                connection.request = -1
                self.drop(connection, "")
                self.finish(request, UNANSWERED, f"no answer within {self.plan.timeout_s:g} s")
        while self.waiting and times[self.waiting[0]] < before:
            self.finish(self.waiting.popleft(), UNANSWERED, "no free connection in time")

    def note(self, text: str) -> None:
        if text in self.notes or len(self.notes) < 20:
            self.notes[text] = self.notes.get(text, 0) + 1

    def close(self) -> None:
        for connection in self.all.values():
            connection.socket.close()
        self.all.clear()
        self.idle.clear()
        self.poller.close()

    def outcome(self, start: float, cpu_s: float) -> LoadOutcome:
        plan, count = self.plan, len(self.planned)
        return LoadOutcome(
            planned=self.planned,
            sent=np.array(self.sent, np.float64) - start,
            done=np.array(self.done, np.float64) - start,
            status=np.array(self.status, np.int16),
            profile=np.array(self.profile, np.str_),
            queue_s=np.array(self.queue_s, np.float64),
            run_s=np.array(self.run_s, np.float64),
            batch=np.array(self.batch, np.int32),
            retry_after_s=np.array(self.retry_after_s, np.float64),
            image=(plan.first + np.arange(count) * plan.stride) % max(1, len(plan.messages)),
            outputs=self.outputs,
            cpu_s=cpu_s,
            connections=self.opened,
            resent=len(self.again),
            waited=self.waited,
            notes=self.notes,
        )


def send(plan: LoadPlan, times: np.ndarray, tick: Tick | None = None) -> LoadOutcome:
    """One load from this process. `tick` is called ten times a second with the seconds since the start.

    It is called between two sends, and should be quick. A thread of its own to show progress would be worse: one that
    the system puts to sleep while it holds the interpreter holds up the sender, by 10 ms on a busy machine.
    """
    check(plan, times)
    sender = Sender(plan, times)
    sender.warm()
    return sender.run(clock(), tick)


def real_time() -> tuple[int, Any] | None:
    """Let this thread run before those of other programs; what it was before, or None where that is not allowed.

    It waits nearly all the time, so nobody starves. A generator on another machine would not wait for the server's
    cores either.
    """
    if not hasattr(os, "sched_setscheduler"):
        return None
    usual = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return None
    return usual


def check(plan: LoadPlan, times: np.ndarray) -> None:
    if not len(plan.messages):
        raise LoadTestError("there is nothing to send; give at least one image")
    if len(times) and (np.diff(times) < 0).any():
        raise LoadTestError("times of a load must never fall; sort them")
