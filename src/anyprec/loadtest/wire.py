"""One connection's worth of HTTP/1.1: bytes that arrived in, whole answers out. Called by client.py for every read.

Only what an inference server answers: a status, a length or chunks, a JSON head of which four numbers matter, and
the tensor behind it. About 4 microseconds an answer; a general parser takes ten times that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEAD_LIMIT = 64 << 10  # bytes of headers; more is no HTTP
BODY_LIMIT = 1 << 30
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*(?=\r\n|$)", re.I)
JSON_LENGTH = re.compile(rb"\r\ninference-header-content-length:[ \t]*(\d{1,15})", re.I)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r]*chunked", re.I)
CLOSE = re.compile(rb"\r\nconnection:[^\r]*close", re.I)
RETRY_AFTER = re.compile(rb"\r\nretry-after:[ \t]*(\d{1,9}(?:\.\d+)?)", re.I)
NUMBERS = re.compile(rb'"(bits|queue_ms|run_ms|batch)"\s*:\s*"?([^",}\s]+)')
RETRY_AFTER_MS = re.compile(rb'"retry_after_ms"\s*:\s*(\d{1,12}(?:\.\d+)?)')  # finer than the header's whole seconds


class BadAnswer(Exception):
    """Bytes that are no answer of HTTP/1.1."""


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    json_size: int  # the JSON is body[:json_size], tensors follow
    close: bool
    retry_after_s: float | None

    @property
    def tensor(self) -> bytes:
        return self.body[self.json_size :]

    def numbers(self) -> dict[bytes, bytes]:
        """What the server says of the run: bits, queue_ms, run_ms, batch."""
        return dict(NUMBERS.findall(self.body, 0, self.json_size))


def take(data: bytes | bytearray) -> tuple[Reply, int] | int:
    """A whole answer and the bytes it used, or how many bytes there must be before it is worth asking again."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > HEAD_LIMIT or not data.startswith(b"HTTP/1."[: len(data)]):
            raise BadAnswer("the answer is not HTTP/1.1")
        return len(data) + 1
    head = bytes(data[:end])
    if not head.startswith(b"HTTP/1.") or not head[9:12].isdigit():
        raise BadAnswer("the answer is not HTTP/1.1")
    status, start = int(head[9:12]), end + 4
    if 100 <= status < 200:
        rest = take(data[start:])
        return rest + start if isinstance(rest, int) else (rest[0], rest[1] + start)
    length = LENGTH.search(head)
    if length:
        stop = start + int(length[1])
        if stop > start + BODY_LIMIT:
            raise BadAnswer(f"an answer of {stop - start} bytes")
        if len(data) < stop:
            return stop
        body = bytes(data[start:stop])
    elif CHUNKED.search(head):
        found = unchunk(data, start)
        if isinstance(found, int):
            return found
        body, stop = found
    elif status in (204, 304):
        body, stop = b"", start
    else:
        raise BadAnswer("an answer without Content-Length")
    size = JSON_LENGTH.search(head)
    after = (RETRY_AFTER_MS.search(body) or RETRY_AFTER.search(head)) if status in (429, 503) else None
    reply = Reply(
        status,
        body,
        min(int(size[1]), len(body)) if size else len(body),
        b"\r\n" in head and CLOSE.search(head) is not None,
        None if not after else float(after[1]) * (1e-3 if after.re is RETRY_AFTER_MS else 1.0),
    )
    return reply, stop


def unchunk(data: bytes | bytearray, at: int) -> tuple[bytes, int] | int:
    parts: list[bytes] = []
    while True:
        line = data.find(b"\r\n", at)
        if line < 0:
            return len(data) + 1
        try:
            size = int(bytes(data[at:line]).split(b";")[0], 16)
        except ValueError as error:
            raise BadAnswer("a chunk without its size") from error
        at = line + 2
        if size < 0 or size > BODY_LIMIT:
            raise BadAnswer(f"a chunk of {size} bytes")
        if len(data) < at + size + 2:
            return at + size + 2
        if size == 0:
            # Trailers, which nobody sends us, would stand before this empty line.
            stop = data.find(b"\r\n", at)
            return b"".join(parts), stop + 2
        parts.append(bytes(data[at : at + size]))
        at += size + 2
