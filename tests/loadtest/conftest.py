"""A tiny inference server whose answers are scripted: when they come, with which status, at how many bits."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

ABOUT = {
    "name": "net",
    "versions": ["1"],
    "platform": "anyprec",
    "inputs": [{"name": "input", "datatype": "UINT8", "shape": [-1, 3, 4, 4]}],
    "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 10]}],
    "parameters": {"datatypes": ["UINT8", "FP32"], "accuracy": {"8": 93.0, "1": 85.0, "2": None}},
}


@dataclass
class Answer:
    """What the script says to one request. hold: an absolute time before which nothing is sent back."""

    status: int = 200
    bits: int | str = 8
    label: int | None = None  # None: the label that the image's first byte names
    hold: float = 0.0
    headers: str = ""
    vanish: bool = False  # close the connection instead
    raw: bytes | None = None  # these bytes instead
    chunked: bool = False
    split: int = 0  # send so many bytes first, the rest a moment later


@dataclass
class Server:
    script: Callable[[int], Answer] = lambda i: Answer()  # number of the request, in order of arrival
    barrier: int = 0  # answer nothing until so many requests have come
    port: int = 0
    got: list[dict] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    peers: set[int] = field(default_factory=set)
    talks: set[asyncio.Transport] = field(default_factory=set)
    held: list[Callable[[], None]] = field(default_factory=list)
    about: dict = field(default_factory=lambda: dict(ABOUT))
    index: list | None = field(default_factory=lambda: [{"name": "net"}])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Talk(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self.server, self.data = server, b""

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.server.talks.add(transport)
        self.server.peers.add(transport.get_extra_info("peername")[1])

    def connection_lost(self, error) -> None:
        self.server.talks.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].decode()
            found = re.search(r"\ncontent-length: (\d+)", head, re.I)
            size = int(found[1]) if found else 0
            if len(self.data) < end + 4 + size:
                return
            body, self.data = self.data[end + 4 : end + 4 + size], self.data[end + 4 + size :]
            self.handle(head, body)

    def handle(self, head: str, body: bytes) -> None:
        server = self.server
        path = head.split(" ")[1]
        if not path.endswith("/infer"):
            known = {"/v2/models/net": server.about, "/v2/repository/index": server.index}
            found = known.get(path)
            text = json.dumps(found if found is not None else {"error": "not here"}).encode()
            self.write(200 if found is not None else 404, text)
            return
        split = int(re.search(r"inference-header-content-length: (\d+)", head, re.I)[1])
        number = len(server.got)
        server.got.append({**json.loads(body[:split]), "head": head})
        server.bodies.append(body[split:])
        self.answer(server.script(number), body[split:])

    def answer(self, answer: Answer, image: bytes) -> None:
        if answer.vanish:
            self.transport.abort()
            return
        if answer.status == 200:
            label = image[0] % 10 if answer.label is None else answer.label
            scores = struct.pack("<10f", *(1.0 if i == label else 0.0 for i in range(10)))
            record = {
                "model_name": "net",
                "parameters": {"bits": answer.bits, "queue_ms": 1.5, "run_ms": 2.5, "batch": 3},
            }
            text = json.dumps(record).encode()
            extra = f"Inference-Header-Content-Length: {len(text)}\r\n{answer.headers}"
            send = lambda: self.write(200, text + scores, extra, answer)  # noqa: E731
        else:
            send = lambda: self.write(answer.status, b'{"error":"busy"}', answer.headers, answer)  # noqa: E731
        if self.server.barrier:
            self.server.held.append(send)
            if len(self.server.held) >= self.server.barrier:
                for one in self.server.held:
                    one()
        elif answer.hold:
            self.wait(answer.hold, send)
        else:
            send()

    def wait(self, until: float, send: Callable[[], None]) -> None:
        # Timers may fire early by the clock's resolution; an answer must not.
        left = until - time.perf_counter()
        if left <= 0:
            send()
        else:
            asyncio.get_running_loop().call_later(left + 0.001, self.wait, until, send)

    def write(self, status: int, body: bytes, headers: str = "", answer: Answer | None = None) -> None:
        answer = answer or Answer()
        if answer.chunked:
            middle = len(body) // 2
            parts = [body[:middle], body[middle:], b""]
            framed = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
            data = f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n{headers}\r\n".encode() + framed
        else:
            data = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body
        data = data if answer.raw is None else answer.raw
        if answer.split:
            self.transport.write(data[: answer.split])
            asyncio.get_running_loop().call_later(0.01, self.transport.write, data[answer.split :])
        else:
            self.transport.write(data)
        if "connection: close" in headers:
            self.transport.close()


@pytest.fixture
def server() -> Iterator[Server]:
    """Running on a free port of this machine, in a thread."""
    found = Server()
    ready = threading.Event()
    loop = asyncio.new_event_loop()

    over = asyncio.Event()

    async def serve() -> None:
        listening = await loop.create_server(lambda: Talk(found), "127.0.0.1", 0, backlog=512)
        found.port = listening.sockets[0].getsockname()[1]
        ready.set()
        await over.wait()
        listening.close()
        while found.talks:
            for transport in list(found.talks):
                transport.abort()
            await asyncio.sleep(0.001)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    yield found
    loop.call_soon_threadsafe(over.set)
    thread.join(10)
    loop.close()


@pytest.fixture
def answer() -> type[Answer]:
    return Answer
