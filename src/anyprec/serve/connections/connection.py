"""One client's connection: uvicorn's HTTP/1.1 protocol with limits on time, headers and connections, and JSON errors.

Requests whose ends could be understood in two ways are refused, upgrades are ignored. Slow clients are found by a sweep
twice a second (server.py), so that a request costs no timer. Tells the application when a request was complete, when
its client is gone, and whether it came over the control socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from anyprec.serve.connections.arrival import arrival_time
from anyprec.serve.connections.probes import answer_probe, no_answer, peek
from anyprec.serve.connections.table import ConnectionTable, TrackedConnection, address_group, named_by_proxy
from anyprec.serve.http.quick import KnownHead, QuickInfer
from anyprec.serve.monitoring.logs import log


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on connections: times, number and sizes."""

    header_s: float = 10.0  # to send a request's headers
    body_s: float = 30.0  # longest that a body may fall behind BODY_RATE
    write_s: float = 30.0  # for the client to read part of an answer
    idle_s: float = 75.0  # between two requests
    connections: int = 1024
    per_address: int | None = None  # of them; None: half
    header_bytes: int = 64 << 10  # beyond what comes with the first read, at most 256 KiB
    message_bytes: int = 64 << 20  # of one request, chunk sizes and trailers included


BODY_RATE = 16 << 10  # bytes a second
HURRY_S = 1.0  # a request this late may be dropped when slots or memory are short
HURRY_WRITE_S = 5.0  # likewise an answer of which nothing was read for this long
PIPELINED = 128  # unanswered requests per connection
HEALTH = (b"/v2/health/live", b"/v2/health/ready")
HOST = re.compile(rb"([\w.~!$&'()*+,;=%-]*|\[[0-9A-Fa-fv:.]+\])(:[0-9]{0,5})?", re.ASCII)
NOT_HTTP = (400, "this is not an HTTP request")
FULL = (503, "the server has as many connections as it takes", "retry-after: 1\r\n")


@dataclass(slots=True)
class RequestState:
    """What the connection tells the application of a request (exchange.py), and whom to call when its client goes away.

    Not uvicorn's own object, which refers to the scope: the two would keep each other until a garbage collection, and
    after an attack by a thousand connections that one takes 50 ms.
    """

    control: bool  # came over the control socket
    address: str  # to count by
    trusted: bool = False  # its connection is a proxy of ours, ...
    named: str | None = None  # ... which says that the client is this
    arrived: float | None = None  # when it was complete
    head: bytes | None = None  # as it came, where its begin and its end are beyond doubt
    gone: Callable[[], None] | None = None  # set by the application
    disconnected: bool = False


class NoEvent:
    """Of a request that nobody waits for in a task."""

    @staticmethod
    def set() -> None:
        pass


class QuickCycle:
    """What uvicorn and we need to know of a request that QuickInfer answers."""

    __slots__ = ("disconnected", "keep_alive", "response_complete", "state")
    more_body = response_started = False
    message_event = NoEvent()

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.keep_alive = True
        self.disconnected = self.response_complete = False


class Connection(HttpToolsProtocol):
    """Each server makes a subclass with its own values of these."""

    limits = ConnectionLimits()
    table = ConnectionTable(1024, 512)
    control = False  # a connection over the control socket
    closing = False  # the server stops: this answer is the connection's last
    handshake: TrackedConnection | None = None  # its TLS is agreed on, and its slot is ours
    on_refused = staticmethod(lambda status: None)  # told of every refusal outside the application
    quick: QuickInfer | None = None  # answers what it knows, outside ASGI
    answer = staticmethod(no_answer)  # Server's: answers a health probe outside the application
    look_if_late = staticmethod(lambda: None)  # Acceptor's; called wherever a thousand connections make a turn long

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = time.monotonic()
        self.since: float | None = now  # a request is being read
        self.until = now + self.limits.header_s  # more must come by then
        self.silent = True  # has sent nothing yet
        self.in_headers = True
        self.received = 0  # bytes of this message so far, but for those of the read it began in
        self.body_bytes = 0  # of this message's body so far
        self.unsent_since: float | None = None
        self.idle_since: float | None = None
        self.closed_at: float | None = None  # noticed to be closing
        self.upgrade = False  # the parser is about to leave out a body; see _feed
        self.wrong: tuple[Any, ...] = NOT_HTTP  # status and message, once the parser has stopped
        self.broken = False  # nothing more is read; `wrong` is said after the answers to earlier requests
        self.cycles: deque[Any] = deque()  # requests whose answer is not complete, in order
        self.known: KnownHead | None = None  # of a request whose body is not complete; the parser has seen none of it
        self.begun = b""  # what has come of it
        self.socket = transport.get_extra_info("socket")
        host = self.client[0] if self.client else ""
        self.address, self.trusted = address_group(host), self.table.is_trusted(host)
        if self.handshake is not None:
            self.table.remove(self.handshake)
        self.for_health = not self.control and not self.table.admit(self, is_idle=False)
        if self.for_health:
            self.until = now + min(self.limits.header_s, 2 * HURRY_S)
        # What has come already is read in this turn or the next; who has sent nothing by then is idle.
        self.loop.call_soon(self.loop.call_soon, self._rest_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self.look_if_late()
        super().connection_lost(exc)
        self.table.remove(self)
        self.since = None
        for cycle in self.cycles:
            cycle.disconnected = cycle.state.disconnected = True
            if cycle.state.gone is not None:
                cycle.state.gone()
        self.cycles.clear()
        self.pipeline.clear()

    # --- reading ---

    def data_received(self, data: bytes) -> None:
        self.look_if_late()
        if self.transport.is_closing() or self.broken:
            return
        self._unset_keepalive_if_required()
        between = self.silent or (self.since is None and not self.cycles)  # two requests
        self.silent = False
        self.table.mark_busy(self)
        self.received += len(data)
        if self.since is not None and not self.in_headers:
            self.until = min(time.monotonic() + self.limits.body_s, self.until + len(data) / BODY_RATE)
        if self.quick is not None and (between or self.known is not None):
            data = self._take_known(self.quick, data)
            if not data:
                return
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.broken = True
            self._refuse_if_broken()
            return
        if between and len(self.cycles) == 1:
            self.cycles[0].state.head = self._head_of(data)
        if self.since is None:
            self._rest_if_done()
        elif self.in_headers:
            if self.received > self.limits.header_bytes:
                self.refuse(431, f"the headers have over {self.limits.header_bytes:,} bytes")
        elif self.received > self.limits.message_bytes:
            self.refuse(413, f"the request has over {self.limits.message_bytes:,} bytes")

    def _take_known(self, quick: QuickInfer, data: bytes) -> bytes:
        """What the parser must read: nothing where this is a known request, or its begin."""
        known, data = self.known or quick.find(data, self.trusted), self.begun + data
        self.known, self.begun = None, b""
        if known is None or self.closing or self.control or self.for_health:
            return data
        if len(data) < known.size:
            now = time.monotonic()
            if self.since is None or self.in_headers:
                self.since, self.until, self.in_headers, self.received = now, now + self.limits.body_s, False, 0
            self.known, self.begun, self.body_bytes = known, data, len(data) - known.start
            return b""
        if len(data) > known.size or self.flow.write_paused:
            return data
        state = RequestState(self.control, self.address, self.trusted)
        host = self.client[0] if self.client else ""
        exchange = quick.submit(known, data, self, host, arrival_time(self.socket))
        if exchange is None:
            return data
        state.gone = exchange.gone
        self.cycle = QuickCycle(state)  # type: ignore[assignment]
        self.cycles.append(self.cycle)
        self.since = None
        return b""

    def write_answer(self, status: int, fields: tuple[tuple[bytes, bytes], ...], body: bytes) -> None:
        """The whole answer to the request that `quick` took."""
        cycle = self.cycles[0]
        length = b"content-length: %d\r\n" % len(body)
        lines = [b"%b: %b\r\n" % field for field in (*self.server_state.default_headers, *fields)]
        last = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        self.transport.write(b"".join([STATUS_LINE[status], *lines, length, last, body]))
        cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    @property
    def has_quick(self) -> bool:
        """Whether a request that `quick` took has no answer yet."""
        return bool(self.cycles) and isinstance(self.cycles[0], QuickCycle)

    def _head_of(self, data: bytes) -> bytes | None:
        """The head that the parser has read from here, if every reader would see the same lines."""
        head = data[: data.find(b"\r\n\r\n") + 4]
        lines = len(self.headers) + 2
        plain = head.startswith(b"POST ") and head.count(b"\n") == head.count(b"\r\n") == head.count(b"\r") == lines
        return bytes(head) if plain and self.cycles[0].keep_alive else None

    def _feed(self, data: bytes) -> None:
        """No upgrade is taken: such a request is an ordinary one (RFC 9110, 7.8), with its body.

        The parser leaves the body of an upgrade to others, and cannot be told not to: what follows the headers would
        then run as the next request. So a new parser reads the same headers without `Upgrade`, and goes on from there.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                head = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.version().encode())
                fields = (b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
                self.upgrade = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's: left unread
                self.parser.feed_data(head + b"".join(fields) + b"\r\n")
                data = data[stopped.args[0] :]

    def version(self) -> str:
        found: str = self.parser.get_http_version()
        return found

    def on_message_begin(self) -> None:
        super().on_message_begin()
        now = time.monotonic()
        self.since, self.until, self.in_headers, self.received = now, now + self.limits.header_s, True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_headers:  # not a trailer, which nobody here wants
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.check_head()
        if self.parser.should_upgrade():
            self.upgrade = True
            return
        super().on_headers_complete()
        self.in_headers, self.body_bytes = False, 0
        self.until = time.monotonic() + self.limits.body_s
        cycle: Any = self.cycle
        cycle.state = RequestState(self.control, self.address, self.trusted)
        self.scope["extensions"] = {"anyprec": cycle.state}
        if self.trusted:
            named = named_by_proxy(self.headers, self.table.trusted)
            if named is not None:
                self.scope["client"] = (named, 0)
                cycle.state.named = named
        self.cycles.append(cycle)
        if len(self.cycles) > PIPELINED:
            self.stop(429, f"over {PIPELINED} requests wait on this connection")
        if self.closing or self.for_health:
            cycle.keep_alive = False

    def check_head(self) -> None:
        """Refuse what the parser accepts but another server might read differently."""
        version = self.version()
        if version not in ("1.1", "1.0"):
            self.stop(505, "HTTP/1.1 and HTTP/1.0 are spoken here")
        hosts, codings = [], []
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding":
                codings.append(value)
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            self.stop(400, f"a request has one Host header, not {len(hosts)}")
        if hosts and not HOST.fullmatch(hosts[0].strip()):
            self.stop(400, "the Host header is not a host and a port")
        if codings and (version == "1.0" or [one.strip().lower() for one in codings] != [b"chunked"]):
            self.stop(400, "Transfer-Encoding must be chunked, once, and in HTTP/1.1")
        if self.parser.get_method() == b"CONNECT":
            self.stop(405, "this is no proxy")
        if self.for_health and self.url.partition(b"?")[0] not in HEALTH:
            self.stop(*FULL)

    def stop(self, *why: Any) -> None:
        """Within the parser: it stops, and data_received refuses."""
        self.wrong = why
        raise ValueError

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.upgrade:
            return
        self.since = None
        if self.cycle is not None:
            arrived = arrival_time(self.socket)
            self.cycle.state.arrived = arrived  # type: ignore[attr-defined]
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()  # uvicorn stops at a large body, and would not see its client go away

    def on_response_complete(self) -> None:
        while self.cycles and self.cycles[0].response_complete:
            self.cycles.popleft()
        super().on_response_complete()
        self.look_if_late()
        if self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()  # uvicorn reads on after every answer, and the pipeline would grow without end
        self.idle_since = None
        self._rest_if_done()
        self._refuse_if_broken()

    def _refuse_if_broken(self) -> None:
        if self.broken and all(cycle.more_body for cycle in self.cycles):  # but for one whose body broke off
            self.refuse(*self.wrong)

    def _rest_if_done(self) -> None:
        if self.since is None and not self.cycles and not self.broken:
            if self.idle_since is None:  # an empty line between two requests does not count
                self.idle_since = time.monotonic()
            self.table.mark_idle(self)

    def _rest_if_silent(self) -> None:
        if self.silent and not self.transport.is_closing():
            self.table.mark_idle(self)

    def unfinished_bytes(self) -> int:
        return 0 if self.since is None or self.in_headers else self.body_bytes

    # --- writing ---

    def pause_writing(self) -> None:
        self.unsent_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.unsent_since = None
        super().resume_writing()

    def refuse(self, status: int, message: str, headers: str = "") -> None:
        """Answer outside the application, and close. Where an answer is on its way, only close."""
        if self.transport.is_closing():
            return
        self.table.remove(self)
        if any(cycle.response_started for cycle in self.cycles):
            self.transport.abort()
            return
        body = json.dumps({"error": message}).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}connection: close\r\n\r\n"
        self.on_refused(status)
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()
        log.debug("connection closed", status=status, why=message, client=self.client and self.client[0])

    # --- called by the server and the table ---

    def is_slow(self, now: float) -> bool:
        """Late enough to be dropped for others, not late enough to be refused outright."""
        if self.unsent_since is not None and now - self.unsent_since > HURRY_WRITE_S:
            return True
        if self.since is None or self.flow.read_paused:
            return False
        allowed = self.limits.header_s if self.in_headers else self.limits.body_s
        return now > self.until - allowed + min(HURRY_S, allowed)

    def evict(self) -> None:
        if self.silent and self._answer_unread():
            self.transport.close()
        elif self.since is not None and (self.received or not self.in_headers):
            self.refuse(503, "the server needed the place of a slow request; send it again", "retry-after: 1\r\n")
        elif self.transport.get_write_buffer_size() or self.cycles:
            self.transport.abort()
        else:
            self.transport.close()

    def _answer_unread(self) -> bool:
        """Whether a health probe has come that nobody read yet; it has its answer now. In a rush a probe may lose its
        place in the turn in which it comes."""
        try:
            with socket.socket(fileno=os.dup(self.socket.fileno())) as own:
                head = peek(own)
                return bool(head) and answer_probe(own, head or b"", self.answer, also_kept=True)
        except (OSError, AttributeError):  # closed already
            return False

    def sweep(self, now: float) -> None:
        limits = self.limits
        if self.transport.is_closing():  # but what was written is not taken
            self.closed_at = self.closed_at or now
            if now - self.closed_at > limits.write_s:
                self.transport.abort()
        elif self.unsent_since is not None and now - self.unsent_since > limits.write_s:
            self.transport.abort()
        elif self.flow.read_paused:  # by us: its time stands still
            self.until = max(self.until, now + HURRY_S)
        elif self.since is not None:
            if now > self.until:
                self.refuse(408, "the request took too long to come")
        elif not self.cycles and self.idle_since is not None and now - self.idle_since > limits.idle_s:
            self.transport.close()

    def shutdown(self) -> None:
        """Close if nothing is on its way; a request that has begun to come, or waits for its answer, gets it."""
        if self.cycles or (self.since is not None and self.received):
            for cycle in self.cycles:
                cycle.keep_alive = False
        else:
            self.transport.close()
