"""One client's connection: uvicorn's HTTP/1.1 protocol with limits on time, headers and connections, and JSON errors.

Slow clients are found by a sweep twice a second (server.py), so that a request costs no timer. Tells the application
when a request was complete and when its client is gone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from anyprec.serve.logs import log


@dataclass(frozen=True)
class Patience:
    """How long, how many, how large: of connections."""

    header_s: float = 10.0  # to send a request's headers
    body_s: float = 30.0  # to send its body, and more for one that comes at BODY_RATE or faster
    write_s: float = 30.0  # to take some of an answer
    connections: int = 1024
    header_bytes: int = 64 << 10  # beyond what comes with the first read, at most 256 KiB
    message_bytes: int = 64 << 20  # of one request, chunk sizes and trailers included


BODY_RATE = 16 << 10  # bytes a second
PIPELINED = 128  # requests of one connection that wait for their answer


class Connection(HttpToolsProtocol):
    """A server makes a subclass of its own, which holds these two."""

    patience = Patience()
    closing = False  # the server stops: this answer is the connection's last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since: float | None = time.monotonic()  # a request is being read
        self.in_headers = True
        self.received = 0  # bytes of this message so far, but for those of the read it began in
        self.unsent_since: float | None = None
        self.cycles: deque[Any] = deque()  # requests whose answer is not complete, in order
        if len(self.connections) > self.patience.connections:
            self.refuse(503, "the server has as many connections as it takes", "retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.since = None
        for cycle in self.cycles:
            cycle.disconnected = True
            if cycle.gone is not None:
                cycle.gone()
        self.cycles.clear()

    # --- reading ---

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self.received += len(data)
        super().data_received(data)
        if self.since is None:
            return
        if self.in_headers:
            if self.received > self.patience.header_bytes:
                self.refuse(431, f"the headers have over {self.patience.header_bytes:,} bytes")
        elif self.received > self.patience.message_bytes:
            self.refuse(413, f"the request has over {self.patience.message_bytes:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.since, self.in_headers, self.received = time.monotonic(), True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_headers:  # not a trailer, which nobody here wants
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.in_headers = False
        cycle: Any = self.cycle
        cycle.arrived = cycle.gone = None
        self.scope["extensions"] = {"anyprec": cycle}
        self.cycles.append(cycle)
        if len(self.cycles) > PIPELINED:
            raise ValueError  # the parser stops, and data_received refuses
        if self.closing:
            cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self.since = None
        if self.cycle is not None:
            self.cycle.arrived = time.monotonic()  # type: ignore[attr-defined]
        super().on_message_complete()

    def on_response_complete(self) -> None:
        while self.cycles and self.cycles[0].response_complete:
            self.cycles.popleft()
        super().on_response_complete()
        if self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()  # uvicorn reads on after every answer, and the pipeline would grow without end

    # --- writing ---

    def pause_writing(self) -> None:
        self.unsent_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.unsent_since = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "this is not an HTTP request")

    def refuse(self, status: int, message: str, headers: str = "") -> None:
        """Answer outside the application, and close. Where an answer is on its way, only close."""
        if self.transport.is_closing():
            return
        if any(cycle.response_started for cycle in self.cycles):
            self.transport.abort()
            return
        body = json.dumps({"error": message}).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}connection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()
        log.debug("connection closed", status=status, why=message, client=self.client and self.client[0])

    # --- called by the server ---

    def sweep(self, now: float) -> None:
        patience = self.patience
        if self.unsent_since is not None and now - self.unsent_since > patience.write_s:
            self.transport.abort()
        elif self.since is not None:
            allowed = patience.header_s if self.in_headers else patience.body_s + self.received / BODY_RATE
            if now - self.since > allowed:
                self.refuse(408, "the request took too long to come")

    def shutdown(self) -> None:
        """Close if nothing is on its way; a request that has begun to come, or waits for its answer, gets it."""
        if self.cycles or (self.since is not None and self.received):
            for cycle in self.cycles:
                cycle.keep_alive = False
        else:
            self.transport.close()
