"""Request bodies: ASGI messages in, whole decompressed bodies out, within RequestLimits. Owned by App.

BodyReader counts the bytes of all bodies held at once, and refuses what would exceed the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from anyprec.errors import Overloaded
from anyprec.preprocessing import MAX_PIXELS
from anyprec.serve.http.exchange import ClientGone, HttpExchange, inflate
from anyprec.serve.http.protocol import HttpError


@dataclass(frozen=True)
class RequestLimits:
    """Limits on the memory and time that requests may take, of one client or of all together."""

    body: int = 16 << 20  # bytes, after decompression too
    json: int = 4 << 20  # bytes of JSON: parsing holds up everybody else, 30 to 60 ms a MB
    held: int = 512 << 20  # bytes of all bodies at once
    image_pixels: int = MAX_PIXELS
    image_s: float = 5.0  # to decode a posted image
    aside: int = 64  # compressed bodies that wait for a thread
    streams: int = 64  # pages that watch
    answer_json: int = 64 << 20  # bytes of numbers in an answer, as JSON


class BodyReader:
    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.held = 0  # bytes of bodies in memory
        self.pool = ThreadPoolExecutor(2, "anyprec-aside")
        self.in_pool = 0  # bodies being decompressed, or waiting for it
        # Frees memory by closing connections whose bodies come slowly; set by the server, which knows them.
        self.make_room: Callable[[int, int, str], bool] = lambda size, limit, asking: False

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def hold(self, http: HttpExchange, size: int) -> None:
        """Count `size` more bytes for this request; raises Overloaded where that is too much."""
        if self.held + size > self.limits.held:
            http.discard = True
            raise Overloaded("the server holds as many bytes of requests as it may; try again", retry_after=1.0)
        self.held += size
        http.held += size

    def release(self, http: HttpExchange) -> None:
        """The request has ended."""
        self.held -= http.held

    async def hold_more(self, http: HttpExchange, size: int) -> None:
        """The same, but where memory is short, unfinished bodies that come too slowly are dropped first."""
        asking = getattr(http.state, "address", "")
        if self.held + size > self.limits.held and self.make_room(size, self.limits.held, asking):
            for _ in range(20):  # their tasks end within a few turns of the loop
                if self.held + size <= self.limits.held:
                    break
                await asyncio.sleep(0)
        self.hold(http, size)

    async def read(self, http: HttpExchange) -> bytes:
        """The whole body, decompressed. Bytes count when they have come: a length that is declared reserves nothing."""
        most = self.limits.body
        declared = http.headers.get(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > most:
            http.discard = True
            raise HttpError(413, f"the body has {int(declared):,} bytes; at most {most:,} are taken")
        body = await self._receive(http)
        encoding = http.headers.get(b"content-encoding")
        if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
            body = await self._decompress(http, body, encoding.strip().lower())
        return body

    async def _receive(self, http: HttpExchange) -> bytes:
        whole: bytes | bytearray = b""
        while True:
            message = await http.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece: bytes = message.get("body", b"")
            more = bool(message.get("more_body"))
            if len(whole) + len(piece) > self.limits.body:
                http.discard = more
                raise HttpError(413, f"the body has over {self.limits.body:,} bytes, more than are taken")
            await self.hold_more(http, len(piece))
            if not whole and not more:
                return piece
            whole = whole or bytearray()
            whole += piece
            if not more:
                return bytes(whole)

    async def _decompress(self, http: HttpExchange, body: bytes, encoding: bytes) -> bytes:
        if encoding not in (b"gzip", b"deflate"):
            raise HttpError(415, "content-encoding must be gzip or deflate", ((b"accept-encoding", b"gzip, deflate"),))
        found: bytes = await self._run_in_pool(inflate, body, encoding == b"gzip", self.limits.body)
        self.hold(http, len(found))
        return found

    async def _run_in_pool(self, work: Callable[..., Any], *args: Any) -> Any:
        """Work that would hold up the loop, in one of the pool's threads."""
        if self.in_pool >= self.limits.aside:
            raise Overloaded("too many compressed bodies at once; try again", retry_after=1.0)
        self.in_pool += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)
        finally:
            self.in_pool -= 1
