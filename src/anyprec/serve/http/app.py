"""App: the ASGI application. HTTP requests in, answers of the Open Inference Protocol out.

Finds the handler (routes.py), hands inference requests to the scheduler, and turns errors into {"error": ...}. Runs
under connections/server.py or any other ASGI server, such as Ray Serve. One event loop, no framework: docs/decisions.md
says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from anyprec.errors import AnyprecError, Draining
from anyprec.serve.http.answers import about_answer, check_answer, send_answer
from anyprec.serve.http.bodies import BodyReader, RequestLimits
from anyprec.serve.http.exchange import (
    CLOSE,
    DISCARD_S,
    JSON,
    ClientGone,
    Header,
    HttpExchange,
    Receive,
    Refusal,
    Scope,
    Send,
    discard,
    disconnected,
    length_header,
    to_json,
)  # fmt: skip
from anyprec.serve.http.keys import Keys
from anyprec.serve.http.protocol import HttpError, InferRequest
from anyprec.serve.http.quick import QuickInfer
from anyprec.serve.http.readers import RequestReaders
from anyprec.serve.models import (
    LoadedModel,
    MakeScheduler,
    ModelRepository,
    ServedModel,
    Settings,
    make_scheduler,
)
from anyprec.serve.monitoring.gauges import ModelGauges
from anyprec.serve.monitoring.logs import log
from anyprec.serve.monitoring.metrics import Metrics, ServedRun
from anyprec.serve.monitoring.recent import CLIENT_GONE
from anyprec.serve.scheduling.answer import Answer, Done, Outcome
from anyprec.serve.scheduling.queue import Request
from anyprec.serve.scheduling.scheduler import Scheduler

T = TypeVar("T")


class EventLoopDelivery:
    """Hands outcomes from engine threads to the event loop, with one wake-up per batch."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    def deliver(self, pairs: list[tuple[Done, Outcome]]) -> None:
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for an answer
                self.loop.call_soon_threadsafe(self._hand_out, pairs)

    @staticmethod
    def _hand_out(pairs: list[tuple[Done, Outcome]]) -> None:
        for done, outcome in pairs:
            done(outcome)


Handler = Callable[["App", HttpExchange], Awaitable[None]]


class App:
    """`local`: without any keys, requests that seem to come from this machine may control."""

    def __init__(
        self,
        models: ModelRepository,
        metrics: Metrics,
        delivery: EventLoopDelivery,
        keys: Keys | None = None,
        limits: RequestLimits | None = None,
        local: bool = True,
        log_requests: bool = False,
    ) -> None:
        from anyprec.serve.http import routes, static

        self.models, self.metrics, self.delivery = models, metrics, delivery
        self.keys = keys or Keys()
        self.limits = limits or RequestLimits()
        self.local, self.log_requests = local, log_requests
        self.draining = False
        self.bodies = BodyReader(self.limits)
        self.streams = 0
        self._looked = 0  # the second in which `look` last ran
        self.readers = RequestReaders(self.limits.image_s, metrics.killed.inc)
        self.writers = ThreadPoolExecutor(2, "anyprec-answer")  # write large answers as JSON, a piece at a time
        self._ids = itertools.count(1)
        self._boot = os.urandom(4).hex()
        self.quick = QuickInfer(self)
        self.find = routes.Routes(static.read_files()).find
        for served in models:
            metrics.add_model(served.name)
        ModelGauges(models, metrics)

    def start(self) -> None:
        """Called on the event loop that will serve."""
        self.delivery.loop = asyncio.get_running_loop()

    def next_id(self) -> bytes:
        return b"%s-%x" % (self._boot.encode(), next(self._ids))

    def look(self) -> None:
        """Log overloads and changes of width, at most once a second."""
        now = time.time()
        if int(now) == self._looked:
            return
        self._looked = int(now)
        for served in self.models:
            name = served.name
            self.metrics.overloads[name].look(now, self.metrics.recent[name].over(now))
            if served.now is not None:
                self.metrics.precisions[name].look(now, served.now.scheduler.precision)

    # --- every request ---

    @property
    def unready(self) -> str | None:
        """Why no inference should be sent here now; None: all is ready."""
        if self.draining:
            return "the server is stopping"
        return None if self.models.ready else "a model is not loaded"

    def probe(self, path: str, client: str) -> tuple[tuple[Header, ...], bytes] | None:
        """Headers and body for a health probe that is answered outside an event loop's turn; None: not with 200."""
        if path == "/v2/health/ready" and self.unready:
            return None
        body = to_json({path.rpartition("/")[2]: True})
        id = self.next_id()
        self.metrics.finished("", 200)
        if self.log_requests:
            log.info("request", id=id.decode(), client=client, method="GET", path=path, status=200)
        return (JSON, (b"content-length", b"%d" % len(body)), (b"x-request-id", id)), body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        if self.delivery.loop is None:
            self.start()
        http = HttpExchange(scope, receive, send, self.next_id())
        try:
            handler = self.find(self, http)
            await handler(self, http)
        except ClientGone:
            http.status = CLIENT_GONE
        except AnyprecError as error:
            await self._refuse(http, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.error("internal error", exc_info=error, id=http.id.decode(), method=http.method, path=http.path)
            if http.sent:
                raise  # part of an answer was sent: the connection is closed
            await http.respond_json({"error": f"internal error; request {http.id.decode()}"}, 500)
        finally:
            self.bodies.release(http)
            self._count(http)
            if self.log_requests:
                self._log(http)

    async def _refuse(self, http: HttpExchange, error: AnyprecError) -> None:
        refusal = Refusal.of(error)
        assert refusal is not None
        status, body, extra = refusal.status, refusal.body, refusal.headers
        if http.sent:
            raise error
        if not http.discard:
            await http.respond(status, to_json(body), JSON, extra)
            return
        # We answer at once, then read some of the body: otherwise the client might see a reset instead of the answer.
        await http.respond(status, to_json(body), JSON, (*extra, CLOSE), more=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(discard(http.receive), DISCARD_S)
        await http.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _count(self, http: HttpExchange) -> None:
        """Count a request after its answer was sent, so its latency includes reading, waiting, running and sending."""
        if http.inference and http.served is not None:
            self.count_inference(http.served, http.status, http.arrived(), http.deadline, http.runs)
        else:
            self.metrics.finished(http.name if http.served else "", http.status)

    def count_inference(
        self, served: ServedModel, status: int, arrived: float, deadline: float, runs: list[ServedRun]
    ) -> None:
        now = time.monotonic()
        self.metrics.finished(served.name, status)
        self.metrics.ended(served.name, status, now <= deadline, now - arrived, runs)
        if status == 200 and len(runs) == 1 and served.now is not None:
            served.now.scheduler.sent(max(0.0, now - arrived - runs[0].queue_s - runs[0].run_s))
        self.look()

    def _log(self, http: HttpExchange) -> None:
        fields: dict[str, Any] = {
            "id": http.id.decode(),
            "client": http.client,
            "method": http.method,
            "path": http.path,
            "status": http.status,
        }
        if http.latency_s is not None:
            fields |= {"bits": http.bits, "latency_ms": round(1e3 * http.latency_s, 3)}
        log.info("request", **fields)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                self.draining = True
                await asyncio.get_running_loop().run_in_executor(None, self.close)
                await send({"type": "lifespan.shutdown.complete"})
                return

    def close(self, timeout_s: float | None = 30.0) -> None:
        self.models.close(timeout_s)
        self.readers.close()
        self.bodies.close()
        self.writers.shutdown(wait=False, cancel_futures=True)

    # --- inference ---

    def loaded(self, http: HttpExchange) -> LoadedModel:
        assert http.served is not None
        if http.served.now is None:
            raise HttpError(503, f"model {http.name!r} is not loaded: {http.served.reason}", ((b"retry-after", b"1"),))
        return http.served.now

    async def by_current(self, http: HttpExchange, work: Callable[[LoadedModel], Awaitable[T]]) -> T:
        """Call `work` with the loaded model; again if a new file replaces it at this very moment."""
        loaded = self.loaded(http)
        try:
            return await work(loaded)
        except Draining:
            if http.served is None or http.served.now in (None, loaded):
                raise
        return await work(self.loaded(http))

    async def infer(self, http: HttpExchange) -> None:
        body = await self.bodies.read(http)
        arrived = http.arrived()
        header_length = length_header(http.headers)
        if (len(body) if header_length is None else min(header_length, len(body))) > self.limits.json:
            raise HttpError(413, f"more than {self.limits.json:,} bytes of JSON; send binary tensors")
        if header_length == 0 and http.headers.get(b"content-type", b"").startswith(b"application/json"):
            raise HttpError(
                400, "Inference-Header-Content-Length is 0, which means no JSON, but the content-type says JSON"
            )

        async def answer_by(loaded: LoadedModel) -> tuple[LoadedModel, InferRequest, Answer]:
            call = await self.readers.call(body, header_length, loaded.signature)
            check_answer(self, http, call, loaded)
            request = self.request_of(call, http.client, arrived)
            return loaded, call, await self.run(http, loaded.scheduler, request)

        loaded, call, answer = await self.by_current(http, answer_by)
        about = about_answer(http.name, answer, http.latency_s or 0.0)
        await send_answer(self, http, about, call, loaded.signature, answer.outputs)
        self.quick.learn(http)

    def request_of(self, call: InferRequest, client: str, arrived: float) -> Request:
        deadline_s = self.models.settings.slo_s if call.deadline_s is None else call.deadline_s
        return Request(
            call.x, arrived + deadline_s, bits=call.bits, min_bits=call.min_bits, client=client, arrived=arrived
        )

    async def run(self, http: HttpExchange, scheduler: Scheduler, request: Request) -> Answer:
        """Wait for the answer; if the client goes away, its request leaves the queue."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        def gone() -> None:
            if not future.done():
                scheduler.cancel(request)
                future.set_result(ClientGone())

        http.deadline = request.deadline
        scheduler.submit(request, done)
        watch = None
        if http.state is not None:
            http.state.gone = gone
            if http.state.disconnected:
                gone()
        else:
            watch = asyncio.ensure_future(disconnected(http.receive, gone))
        try:
            outcome = await future
        except asyncio.CancelledError:
            scheduler.cancel(request)
            raise
        finally:
            if watch is not None:
                watch.cancel()
            if http.state is not None:
                http.state.gone = None
        if isinstance(outcome, Exception):
            if not isinstance(outcome, (AnyprecError, ClientGone)):
                log.error("the engine failed", exc_info=outcome, id=http.id.decode(), model=http.name)
            raise outcome
        now = time.monotonic()
        http.bits, http.latency_s = outcome.bits, now - request.arrived
        http.runs.append(ServedRun.of(outcome, request.images))
        return outcome


def make_app(
    paths: Mapping[str, str],
    settings: Settings | None = None,
    *,
    keys: Keys | None = None,
    limits: RequestLimits | None = None,
    local: bool = False,
    log_requests: bool = False,
    make: MakeScheduler = make_scheduler,
) -> App:
    """The application for these model files, for any ASGI server; `app.models.load_all()` loads them."""
    metrics, delivery = Metrics(time.time), EventLoopDelivery()

    def count(name: str, good: bool) -> None:
        metrics.reloads.labels(name, "loaded" if good else "refused").inc()

    models = ModelRepository(paths, settings or Settings(), delivery.deliver, make, count)
    return App(models, metrics, delivery, keys, limits, local, log_requests)
