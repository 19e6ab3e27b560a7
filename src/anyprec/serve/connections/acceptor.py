"""Acceptor: accepts connections from a listening socket, health probes first. Made by server.py; TLS: handshake.py.

The event loop's own server takes one connection a turn, in order: behind a thousand others a health probe waited for a
thousand turns. To take one from the kernel and look at what it has sent costs 10 us, to serve it 50 to 100. So we take
hundreds a turn, answer probes at once (probes.py), and serve the others in order, some dozens a turn. A turn in which a
thousand clients are read is long, so connections call `look_if_late` meanwhile. In a rush, those that their client has
closed meanwhile without sending a whole request are not served at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from anyprec.serve.connections.probes import answer_probe, may_be_probe, no_answer, peek
from anyprec.serve.connections.table import RESERVE
from anyprec.serve.monitoring.logs import log

TAKEN = 256  # accepted per turn of the event loop, at most: 3 ms
BATCH = RESERVE // 2  # served in one turn: 3 ms. Two batches have a slot in the reserve, each until it is answered
WAITING = 1024  # accepted but not served yet; the rest wait in the kernel
CALM = 8  # when this few wait, all are served
PAUSE_S = 0.1  # after running out of file descriptors
LATE_S = 0.01  # between two looks at the listener while a turn lasts
# Where few slots are free, a connection that has sent nothing yet would soon lose the one it is given: it may be a
# probe whose process waits for a core. It is held here first, without a slot, until it sends something.
HOLD_S = 0.25  # at the longest
HELD = 1024  # at most; then the oldest is opened
LOOK_S = 0.005  # between two looks at those that are held, for every 256 of them: a look takes 2 us each
CLOSED_STATES = (7, 8)  # TCP_CLOSE, TCP_CLOSE_WAIT of Linux, the first byte of struct tcp_info
HEAD_BYTES = 4096
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06  # of Linux


class Acceptor:
    """Takes connections until it is closed, and the listener with it.

    `per_address`: slots that one address has in the connection table. `answer`: answers health probes (probes.py).
    `has_room`: whether an address would keep a slot for a while.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        per_address: int,
        answer: Callable[[str, str], bytes | None] = no_answer,
        has_room: Callable[[str], bool] = lambda host: True,
    ) -> None:
        self.listener, self.connect, self.answer, self.has_room = listener, connect, answer, has_room
        self.loop = asyncio.get_running_loop()
        # Nothing has been read from a new batch, so one as large as the table would push out its own connections.
        self.batch = max(1, min(BATCH, per_address // 8))
        self.silent: list[socket.socket] = []  # had sent nothing when taken; looked at again in the next turn
        self.held: deque[tuple[float, socket.socket]] = deque()  # still silent, and few slots are free; with their end
        self.waiting: deque[socket.socket] = deque()
        self.opening: set[asyncio.Task[Any]] = set()  # referenced so that they are not garbage-collected
        self.closed = False
        self._serving = False  # the next turn goes on with those that wait
        self._looked = time.monotonic()
        self._late = False  # the last look was over LATE_S ago
        self._looks = False  # a look at those that are held is planned
        self._listen()

    @property
    def pending(self) -> bool:
        """Whether accepted connections still wait for their protocol."""
        return bool(self.silent or self.held or self.waiting or self.opening)

    def close(self) -> None:
        """Accept no more; connections that wait, here and in the kernel, are still served."""
        drop_new_packets(self.listener)
        while self._take(TAKEN):
            pass
        self.closed = True
        self.loop.remove_reader(self.listener)
        self.listener.close()

    def look_if_late(self) -> None:
        """In the middle of a turn: answer the probes that have come, if the last look was long ago."""
        if time.monotonic() - self._looked > LATE_S and not self.closed:
            self._late = True
            self._look_again()
            self._take()
            self._late = False

    def _listen(self) -> None:
        if not self.closed:
            self.loop.add_reader(self.listener, self._take)

    def _take(self, most: int | None = None) -> bool:
        """Take up to `most` connections from the kernel; False: it has no more."""
        more, opened, had_silent = True, 0, bool(self.silent)
        room = WAITING - len(self.waiting) - len(self.silent)
        for _ in range(min(TAKEN, room) if most is None else most):
            try:
                taken, _ = self.listener.accept()
            except (BlockingIOError, InterruptedError):
                more = False
                break
            except ConnectionAbortedError:  # it is gone already
                continue
            except OSError as error:  # too many open files
                log.warning("a connection could not be taken", error=str(error))
                self.loop.remove_reader(self.listener)
                self.loop.call_later(PAUSE_S, self._listen)
                more = False
                break
            head = peek(taken)
            if head == b"":
                self.silent.append(taken)
            else:
                opened += self._place(taken, head, opened)
        self._looked = time.monotonic()
        if self.silent and not had_silent:
            self.loop.call_soon(self._look_again)
        if not self._serving:
            self._serve()
        return more

    def _look_again(self) -> None:
        """At those that had sent nothing: a probe has by now, as a rule."""
        now, opened = time.monotonic(), 0
        silent, self.silent = [(now + HOLD_S, taken) for taken in self.silent], []
        found = [*self.held, *silent]
        self.held.clear()
        for number, (end, taken) in enumerate(found):
            head = peek(taken)
            if head == b"" and now < end and len(found) - number <= HELD and not self._has_room(taken):
                self.held.append((end, taken))
            else:
                opened += self._place(taken, head, opened)
        if self.held and not self._looks:
            self._looks = True
            self.loop.call_later(LOOK_S * (1 + len(self.held) // 256), self._look_on)
        if not self._serving:
            self._serve()

    def _look_on(self) -> None:
        self._looks = False
        self._look_again()

    def _has_room(self, taken: socket.socket) -> bool:
        try:
            return self.closed or self.has_room(str(taken.getpeername()[0]))
        except OSError:  # gone
            return True

    def _place(self, taken: socket.socket, head: bytes | None, opened: int) -> bool:
        """Answer it, or open it now, which is True, or let it wait. `opened`: so many were, in this turn."""
        if head is None or not may_be_probe(head):
            self.waiting.append(taken)
            return False
        if answer_probe(taken, head, self.answer, self._late or len(self.waiting) >= CALM):
            return False
        if opened >= self.batch:
            self.waiting.append(taken)
            return False
        self._open(taken)
        return True

    def _serve(self) -> None:
        left = self.batch
        while self.waiting and left:
            taken = self.waiting.popleft()
            if len(self.waiting) >= CALM and is_abandoned(taken):
                taken.close()
            else:
                self._open(taken)
                left -= 1
        self._serving = bool(self.waiting)
        if self._serving:
            self.loop.call_soon(self._serve)

    def _open(self, taken: socket.socket) -> None:
        async def open_transport() -> None:
            with contextlib.suppress(OSError):  # gone already
                await self.loop.connect_accepted_socket(self.connect, taken)

        task = self.loop.create_task(open_transport())
        self.opening.add(task)
        task.add_done_callback(self.opening.discard)


def drop_new_packets(listener: socket.socket) -> None:
    """Drop what reaches the listener from now on. A connection made between our last look and the listener's end would
    be reset, with a request on its way; a dropped one is tried again by its client's kernel, and refused then.
    We can do it on Linux only: a packet filter of one instruction, "return 0".
    """
    if sys.platform != "linux" or listener.family not in (socket.AF_INET, socket.AF_INET6):
        return
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    with contextlib.suppress(OSError):
        program = struct.pack("HL", 1, ctypes.addressof(instruction))  # struct sock_fprog
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def is_abandoned(taken: socket.socket) -> bool:
    """Its client will send nothing more, and has sent less than a request's headers. We can tell on Linux only."""
    if sys.platform != "linux":
        return False
    try:
        if taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in CLOSED_STATES:
            return False
        head = taken.recv(HEAD_BYTES, socket.MSG_PEEK)
    except OSError:  # reset
        return True
    return len(head) < HEAD_BYTES and b"\r\n\r\n" not in head
