"""HttpExchange: one HTTP request and its answer, on the way through the application.

HttpExchange wraps what ASGI gives (scope, receive, send). App makes it; every handler gets it.
"""

from __future__ import annotations

import json
import math
import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anyprec.errors import AnyprecError, Draining, Expired, Overloaded
from anyprec.serve.http.keys import Caller
from anyprec.serve.http.protocol import HttpError
from anyprec.serve.models import ServedModel
from anyprec.serve.monitoring.metrics import ServedRun

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON: Header = (b"content-type", b"application/json")
BINARY: Header = (b"content-type", b"application/octet-stream")
CLOSE: Header = (b"connection", b"close")
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
LOCAL_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
DISCARD_S, DISCARD_BYTES = 2.0, 1 << 28  # what is still read of a refused body, so that its client sees why
FORWARDING = frozenset((b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip"))


class ClientGone(Exception):
    """The client closed its connection."""


@dataclass(frozen=True)
class Refusal:
    """The answer to a request that is not carried out."""

    status: int
    body: dict[str, Any]
    headers: tuple[Header, ...] = ()

    @staticmethod
    def of(error: Exception) -> Refusal | None:
        """None: the error is none that clients are told."""
        if not isinstance(error, AnyprecError):
            return None
        body: dict[str, Any] = {"error": " ".join(str(error).split())}
        if isinstance(error, HttpError):
            return Refusal(error.status, body, error.headers)
        if isinstance(error, (Overloaded, Draining)):
            after = getattr(error, "retry_after", 1.0)
            body["retry_after_ms"] = round(1e3 * after, 1)
            header = (b"retry-after", b"%d" % max(1, math.ceil(after)))
            return Refusal(429 if getattr(error, "over_share", False) else 503, body, (header,))
        return Refusal(504 if isinstance(error, Expired) else 400, body)


class HttpExchange:
    """One request, and how it is answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, fresh_id: bytes) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id")
        self.id = given if given is not None and REQUEST_ID.fullmatch(given) else fresh_id
        # Set by our own connection (connection.py): when the request was complete, and whether the client is gone.
        self.state = (scope.get("extensions") or {}).get("anyprec")
        self.by_socket: bool = getattr(self.state, "control", False)  # the control socket
        self.caller: Caller | None = None
        self.name = ""  # the model in the path
        self.served: ServedModel | None = None
        self.held = 0
        self.status = 0
        self.sent = False
        self.discard = False  # the request was refused before its body was read
        self.inference = False  # counts towards SLO attainment
        self.came: float | None = None
        self.deadline = math.inf
        self.runs: list[ServedRun] = []
        self.bits: int | str | None = None
        self.latency_s: float | None = None

    @property
    def client(self) -> str:
        """The client that queued images are counted for: its key's name, else its address."""
        if self.caller is not None and self.caller.name is not None:
            return self.caller.name
        address = self.scope.get("client")
        return address[0] if address else ""

    def model(self) -> ServedModel:
        """Of a path that names one: routes.py has found it."""
        assert self.served is not None
        return self.served

    def arrived(self) -> float:
        """When the last byte of the request arrived; first called when the body has been read."""
        if self.came is None:
            stamp: float | None = getattr(self.state, "arrived", None)
            self.came = time.monotonic() if stamp is None else stamp
        return self.came

    async def respond(
        self, status: int, body: bytes, kind: Header = JSON, headers: tuple[Header, ...] = (), more: bool = False
    ) -> None:
        self.status, self.sent = status, True
        length = (b"content-length", b"%d" % len(body))
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [kind, length, (b"x-request-id", self.id), *headers],
            }
        )
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def respond_pieces(
        self, pieces: AsyncIterator[bytes | memoryview], kind: Header, headers: tuple[Header, ...] = ()
    ) -> None:
        """Answer 200, piece by piece as the client reads them, so memory is bounded by one piece.

        Sent in chunks unless `headers` has a content-length.
        """
        self.status, self.sent = 200, True
        start = [kind, (b"x-request-id", self.id), *headers]
        await self.send({"type": "http.response.start", "status": 200, "headers": start})
        async for piece in pieces:
            if getattr(self.state, "disconnected", False):
                raise ClientGone
            await self.send({"type": "http.response.body", "body": piece, "more_body": True})
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond_json(self, value: Any, status: int = 200, headers: tuple[Header, ...] = ()) -> None:
        await self.respond(status, to_json(value), JSON, headers)


def is_forwarded(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a proxy passed this request on: its client may be anywhere."""
    return any(name in FORWARDING or name.startswith(b"x-forwarded-") for name in headers)


def key_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    given = headers.get(b"authorization")
    if given is not None and given[:7].lower() == b"bearer ":
        return given[7:].strip()
    return headers.get(b"x-api-key")


def length_header(headers: Mapping[bytes, bytes]) -> int | None:
    given = headers.get(b"inference-header-content-length")
    if given is None:
        return None
    if not re.fullmatch(rb"[0-9]{1,12}", given):
        raise HttpError(400, "Inference-Header-Content-Length is not a number")
    return int(given)


def inflate(body: bytes, gzipped: bool, most: int) -> bytes:
    """Decompress gzip, zlib, or raw deflate (which some clients send as "deflate"); at most `most` bytes."""
    ways = (31,) if gzipped else (15, -15)
    for way in ways:
        engine = zlib.decompressobj(way)
        try:
            found = engine.decompress(body, most + 1)
        except zlib.error as error:
            if way == ways[-1]:
                raise HttpError(400, f"the body cannot be decompressed: {error}") from error
            continue
        break
    if len(found) > most:
        raise HttpError(413, f"the body has over {most:,} bytes when decompressed, more than are taken")
    if not engine.eof:
        raise HttpError(400, "the compressed body is cut short")
    return found


async def discard(receive: Receive) -> None:
    left = DISCARD_BYTES
    while left > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return
        left -= len(message.get("body", b""))


async def disconnected(receive: Receive, gone: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()


def to_json(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:  # NaN or infinity somewhere, such as the accuracy of a width nobody measured
        return json.dumps(without_nan(value), separators=(",", ":")).encode()


def without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value
