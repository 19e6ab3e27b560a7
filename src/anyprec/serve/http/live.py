"""GET /v2/models/NAME/live: the last seconds of one model, as JSON or as a stream of events. The page reads it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from anyprec.errors import Overloaded
from anyprec.serve.http.exchange import HttpExchange
from anyprec.serve.http.query import query_of, whole_number
from anyprec.serve.models import LoadedModel
from anyprec.serve.monitoring.condition import verdict
from anyprec.serve.monitoring.recent import KEEP, WINDOW, window_record

if TYPE_CHECKING:
    from anyprec.serve.http.app import App

STREAM = (b"content-type", b"text/event-stream")


async def recent(app: App, http: HttpExchange) -> None:
    """The last seconds, as JSON; a client that accepts text/event-stream gets every further second as it ends."""
    query = query_of(http, "seconds", "window")
    count = whole_number(query, "seconds", 60, 1, KEEP - 1)
    window_s = whole_number(query, "window", WINDOW, 1, KEEP - 1)
    if b"text/event-stream" not in http.headers.get(b"accept", b""):
        await http.respond_json(live_record(app, http, count, window_s))
        return
    if app.streams >= app.limits.streams:
        raise Overloaded("as many clients watch as may; ask without text/event-stream", retry_after=5.0)
    app.streams += 1
    try:
        http.sent, http.status = True, 200
        headers = [STREAM, (b"cache-control", b"no-store"), (b"x-request-id", http.id)]
        await http.send({"type": "http.response.start", "status": 200, "headers": headers})
        while not app.draining:
            event = b"data: " + json.dumps(live_record(app, http, count, window_s)).encode() + b"\n\n"
            await http.send({"type": "http.response.body", "body": event, "more_body": True})
            count = 1
            if await is_gone(http, 1.0 - time.time() % 1.0 + 0.02):
                return
        await http.send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        app.streams -= 1


async def is_gone(http: HttpExchange, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while (left := end - time.monotonic()) > 0:
        try:
            message = await asyncio.wait_for(http.receive(), left)
        except asyncio.TimeoutError:
            return False
        if message["type"] == "http.disconnect":
            return True
        if not message.get("more_body"):  # a body of a GET: read, and not wanted
            await asyncio.sleep(0)
    return False


def level_records(loaded: LoadedModel) -> list[dict[str, Any]]:
    """What each level costs and gives, and its bits: a list of layers for each stage."""
    return [{**level, "bits": loaded.layers.bits[level["name"]]} for level in loaded.scheduler.levels]


def live_record(app: App, http: HttpExchange, count: int, window_s: int) -> dict[str, Any]:
    served = http.model()
    loaded = served.now
    now = time.time()
    accuracies = {} if loaded is None else loaded.accuracies
    recent = app.metrics.recent[served.name]
    total = recent.over(now, window_s)
    overloaded = app.metrics.overloads[served.name].since is not None
    level, words = verdict(total, overloaded, window_s)
    if loaded is None:
        level, words = "bad", f"not loaded: {served.reason}"
    elif app.draining:
        level, words = "warn", f"stopping; {words}"
    found: dict[str, Any] = {
        "model_name": served.name,
        "state": served.state,
        "condition": {"level": level, "words": words, "overloaded": overloaded},
        "time": int(now),
        "target_ms": 1e3 * app.models.settings.slo_s,
        "levels": [] if loaded is None else level_records(loaded),
        "layers": [] if loaded is None else list(loaded.layers.names),
        "window": window_record(total, window_s, lambda bits: accuracies.get(str(bits))),
        "seconds": recent.series(now, count, lambda bits: accuracies.get(str(bits))),
    }
    if loaded is not None:
        found["precision"] = dict(zip(("policy", "bits"), loaded.scheduler.policy, strict=True))
        found["queue"] = loaded.scheduler.waiting
        found["last_level"] = loaded.scheduler.precision.last
    return found
