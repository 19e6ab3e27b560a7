"""QuickInfer: small inference requests whose head was seen before, answered without reading it again.

A client sends the same head with every request of a connection, and the same JSON in front of a binary tensor; only the
tensor changes. Both are known after the first, so the parser, the ASGI task, the route and the keys, most of what a
small request costs, are passed over. Whatever is not byte for byte as before takes the ordinary way (app.py), and so
does every error before a request is queued. A connection (connections/connection.py) offers its requests here first.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from anyprec.errors import AnyprecError, Draining, InputError
from anyprec.serve.http.answers import ONE_PIECE, about_answer, small_answer
from anyprec.serve.http.exchange import JSON, Header, HttpExchange, Refusal, length_header, to_json
from anyprec.serve.http.protocol import (
    SMALL,
    InferRequest,
    RequestedOutput,
    answer_size,
    from_bytes,
    parse_json,
    read_infer_request,
)
from anyprec.serve.models import LoadedModel, ServedModel
from anyprec.serve.monitoring.logs import log
from anyprec.serve.monitoring.metrics import ServedRun
from anyprec.serve.monitoring.recent import CLIENT_GONE
from anyprec.serve.scheduling.answer import Outcome
from anyprec.serve.scheduling.queue import Request

if TYPE_CHECKING:
    from anyprec.serve.http.app import App

MOST_BYTES = 16 << 10  # of a request: what waits for its rest is not counted among the bytes held
MOST_HEAD = 4096
MOST_KNOWN = 1024  # heads, and JSON texts of a model
# A head with one of these is read every time
NOT_LEARNED = (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"x-request-id")


@dataclass(frozen=True)
class KnownHead:
    """What the ordinary way has found a head to mean."""

    served: ServedModel
    client: str | None  # the name of its key, or as a trusted proxy tells it; None: the connection's address
    start: int  # of the body, in bytes
    size: int  # of the whole request
    json: int  # bytes of JSON that the body begins with


@dataclass(frozen=True)
class KnownCall:
    """What the JSON in front of a binary tensor says."""

    datatype: str
    shape: tuple[int, ...]
    wanted: tuple[RequestedOutput, ...]
    bits: int | str | None
    min_bits: int
    deadline_s: float | None
    held: int  # bytes of all outputs


class QuickConnection(Protocol):
    """What an exchange needs of its connection."""

    def write_answer(self, status: int, fields: tuple[Header, ...], body: bytes) -> None: ...


class QuickInfer:
    def __init__(self, app: App) -> None:
        self.app = app
        # By digest, since a head may hold a key, which is kept nowhere; from trusted proxies or not.
        self.heads: dict[tuple[bool, bytes], KnownHead] = {}
        self.calls: dict[str, tuple[LoadedModel, dict[bytes, KnownCall]]] = {}  # of each model, by JSON
        self.keys = app.keys
        self.secret = os.urandom(16)

    # --- learning ---

    def learn(self, http: HttpExchange) -> None:
        """This request was answered. Its connection kept the head, if where that ends was beyond doubt."""
        state = http.state
        if state is None or state.head is None or http.served is None or len(state.head) > MOST_HEAD:
            return
        if state.control:  # its owner needs no key: the same head over the network does
            return
        if any(name in http.headers for name in NOT_LEARNED):
            return
        length, json_bytes = http.headers.get(b"content-length", b""), length_header(http.headers)
        start: int = len(state.head)
        if not length.isdigit() or not json_bytes or start + int(length) > MOST_BYTES:
            return
        self._forget_old_keys()
        if len(self.heads) >= MOST_KNOWN:
            self.heads.clear()
        client = None if http.caller is None else http.caller.name
        self.heads[state.trusted, self._digest(state.head)] = KnownHead(
            http.served, client or state.named, start, start + int(length), min(json_bytes, int(length))
        )

    def _digest(self, head: bytes) -> bytes:
        return hashlib.blake2b(head, digest_size=16, key=self.secret).digest()

    def _forget_old_keys(self) -> None:
        if self.keys is not self.app.keys:
            self.heads.clear()
            self.keys = self.app.keys

    # --- answering ---

    def find(self, data: bytes, trusted: bool) -> KnownHead | None:
        """The head that these bytes begin with, if it is known. trusted: they come from a proxy of ours."""
        if not self.heads or self.app.log_requests:
            return None
        end = data.find(b"\r\n\r\n", 0, MOST_HEAD)
        if end < 0:
            return None
        self._forget_old_keys()
        return self.heads.get((trusted, self._digest(data[: end + 4])))

    def submit(
        self, known: KnownHead, data: bytes, connection: QuickConnection, address: str, arrived: float
    ) -> QuickExchange | None:
        """Queue a whole request; None: it must take the ordinary way, and nothing has happened."""
        app, loaded = self.app, known.served.now
        if loaded is None or app.draining:
            return None
        try:
            found = self._read(loaded, known, data)
        except InputError:
            return None
        if found is None or app.bodies.held + known.size + found[1] > app.limits.held:
            return None
        call, held = found[0], known.size + found[1]
        request = app.request_of(call, known.client or address, arrived)
        exchange = QuickExchange(app, connection, known.served, loaded, call, request, held)
        try:
            loaded.scheduler.submit(request, exchange.done)
        except Draining:  # perhaps another file has taken its place at this moment
            return None
        except AnyprecError as error:
            asyncio.get_running_loop().call_soon(exchange.done, error)
        app.bodies.held += held
        return exchange

    def _read(self, loaded: LoadedModel, known: KnownHead, data: bytes) -> tuple[InferRequest, int] | None:
        """The request, and the bytes of its outputs. None: there are too many, or no tensor. Raises InputError."""
        start = known.start + known.json
        if start == known.size:
            return None
        name = known.served.name
        of, calls = self.calls.get(name, (None, {}))
        if of is not loaded:
            calls = {}
            self.calls[name] = loaded, calls
        text = data[known.start : start]
        found = calls.get(text)
        if found is not None:
            x = from_bytes(memoryview(data)[start:], found.datatype, found.shape)
            return InferRequest(x, found.wanted, None, found.bits, found.min_bits, found.deadline_s), found.held
        call = read_infer_request(data[known.start :], known.json, loaded.signature)
        shapes = loaded.output_shapes(call.x)
        held = 4 * sum(map(math.prod, shapes))
        if answer_size(call, shapes)[0] > SMALL or held > ONE_PIECE // 2:
            return None
        if call.id is None:
            if len(calls) >= MOST_KNOWN:
                calls.clear()
            datatype = parse_json(text)["inputs"][0]["datatype"]
            calls[text] = KnownCall(
                datatype, call.x.shape, call.wanted, call.bits, call.min_bits, call.deadline_s, held
            )
        return call, held


class QuickExchange:
    """One such request, from the queue to its answer. Its connection counts it among its cycles."""

    __slots__ = ("app", "call", "connection", "held", "loaded", "over", "request", "served")

    def __init__(
        self,
        app: App,
        connection: QuickConnection,
        served: ServedModel,
        loaded: LoadedModel,
        call: InferRequest,
        request: Request,
        held: int,
    ) -> None:
        self.app, self.connection, self.served, self.loaded = app, connection, served, loaded
        self.call, self.request, self.held = call, request, held
        self.over = False

    def gone(self) -> None:
        """Its client went away."""
        if not self.over:
            self.loaded.scheduler.cancel(self.request)
            self._end(CLIENT_GONE, [])

    def done(self, outcome: Outcome) -> None:
        if self.over:
            return
        runs: list[ServedRun] = []
        status = 200
        fields: tuple[Header, ...]
        if isinstance(outcome, Exception):
            refusal = Refusal.of(outcome)
            if refusal is None:
                id = self.app.next_id()
                log.error("the engine failed", exc_info=outcome, id=id.decode(), model=self.served.name)
                refusal = Refusal(500, {"error": f"internal error; request {id.decode()}"})
            status, body = refusal.status, to_json(refusal.body)
            fields = (JSON, *refusal.headers)
        else:
            request = self.request
            about = about_answer(self.served.name, outcome, time.monotonic() - request.arrived)
            fields, body = small_answer(about, self.call, self.loaded.signature, outcome.outputs)
            runs.append(ServedRun.of(outcome, request.images))
        self.connection.write_answer(status, (*fields, (b"x-request-id", self.app.next_id())), body)
        self._end(status, runs)

    def _end(self, status: int, runs: list[ServedRun]) -> None:
        self.over = True
        self.app.bodies.held -= self.held
        request = self.request
        self.app.count_inference(self.served, status, request.arrived, request.deadline, runs)
