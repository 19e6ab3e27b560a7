"""Paths to handlers, and the handlers of everything but inference: metadata, health, stats, control, the page's data.

`Routes.find` is called by app.py for every request: it knows the path, sees to the key, and gives the handler.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from anyprec import __version__
from anyprec.errors import InputError, Overloaded
from anyprec.run.labels import labeled
from anyprec.serve.http.answers import written
from anyprec.serve.http.exchange import HttpExchange, key_of, to_json
from anyprec.serve.http.openapi import describe
from anyprec.serve.http.protocol import LONGEST_S, SMALL, HttpError, parse_json, read_bits, read_min_bits
from anyprec.serve.http.static import File
from anyprec.serve.models import VERSION, LoadedModel, ServedModel, metadata, triton_config
from anyprec.serve.monitoring.condition import verdict
from anyprec.serve.monitoring.logs import log
from anyprec.serve.monitoring.recent import KEEP, WINDOW, window_record
from anyprec.serve.scheduling.queue import Request

if TYPE_CHECKING:
    from anyprec.serve.http.app import App, Handler

EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "model_repository", "statistics", "bits"]
ALL_WIDTHS_S = 5.0  # an image at every width is for people: it may wait longer than the target
PLAIN = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
STREAM = (b"content-type", b"text/event-stream")
TOP = 5


class Routes:
    def __init__(self, files: Mapping[str, File]) -> None:
        open_, key, control = None, False, True
        self.fixed: dict[str, dict[str, tuple[Handler, bool | None]]] = {
            "/v2": {"GET": (server_metadata, key)},
            "/v2/health/live": {"GET": (live, open_)},
            "/v2/health/ready": {"GET": (ready, open_)},
            "/v2/models/stats": {"GET": (all_stats, key)},
            "/v2/repository/index": {"GET": (index, key), "POST": (index, key)},
            "/metrics": {"GET": (prometheus, key)},
            "/openapi.json": {"GET": (openapi, open_)},
        }
        for path, file in files.items():
            self.fixed[path] = {"GET": (file_handler(file), open_)}
        self.model: dict[str, dict[str, tuple[Handler, bool | None]]] = {
            "infer": {"POST": (infer, key)},
            "": {"GET": (model_metadata, key)},
            "ready": {"GET": (model_ready, key)},  # or names of models could be guessed
            "config": {"GET": (model_config, key)},
            "stats": {"GET": (model_stats, key)},
            "classify": {"POST": (classify, key)},
            "live": {"GET": (recent, key)},
            "precision": {"GET": (get_precision, key), "POST": (set_precision, control)},
        }
        self.repository: dict[str, dict[str, tuple[Handler, bool | None]]] = {
            "load": {"POST": (load, control)},
            "unload": {"POST": (unload, control)},
        }

    def find(self, app: App, http: HttpExchange) -> Handler:
        methods = self._methods(app, http)
        if methods is None:
            raise HttpError(404, f"there is nothing at {http.path[:200]!r}; /openapi.json lists what there is")
        method = "GET" if http.method == "HEAD" else http.method
        if method not in methods:
            allowed = [*methods, *(["HEAD"] if "GET" in methods else [])]
            raise HttpError(405, f"{http.method} is not for this path", ((b"allow", ", ".join(allowed).encode()),))
        handler, control = methods[method]
        if control is not None:
            app.authorize(http, control)
        if http.name and http.served is None:
            names = ", ".join(served.name for served in app.models)
            raise HttpError(404, f"there is no model {http.name[:128]!r}; there are {names}")
        return handler

    def _methods(self, app: App, http: HttpExchange) -> Mapping[str, tuple[Handler, bool | None]] | None:
        parts = http.path.split("/")
        if len(parts) > 3 and parts[1] == "v2" and parts[2] == "models" and http.path not in self.fixed:
            if len(parts) > 5 and parts[4] == "versions":
                if parts[5] != VERSION:
                    raise HttpError(404, f"models have the one version {VERSION}, not {parts[5][:64]!r}")
                del parts[4:6]
            if len(parts) > 5 or not parts[3]:
                return None
            http.name, http.served = parts[3], app.models.get(parts[3])
            return self.model.get(parts[4] if len(parts) == 5 else "")
        if len(parts) == 6 and parts[1:4] == ["v2", "repository", "models"]:
            http.name, http.served = parts[4], app.models.get(parts[4])
            return self.repository.get(parts[5])
        return self.fixed.get(http.path)


def file_handler(file: File) -> Handler:
    async def send(app: App, http: HttpExchange) -> None:
        if http.headers.get(b"if-none-match") == file.tag:
            await http.respond(304, b"", file.kind, file.headers)
        else:
            await http.respond(200, file.body, file.kind, file.headers)

    return send


def model_of(http: HttpExchange) -> ServedModel:
    assert http.served is not None
    return http.served


# --- about the server and its models ---


async def server_metadata(app: App, http: HttpExchange) -> None:
    await http.respond_json({"name": "anyprec", "version": __version__, "extensions": EXTENSIONS})


async def live(app: App, http: HttpExchange) -> None:
    await http.respond_json({"live": True})


async def ready(app: App, http: HttpExchange) -> None:
    if app.draining or not app.models.ready:
        why = "the server is stopping" if app.draining else "a model is not loaded"
        raise HttpError(503, f"not ready: {why}", ((b"retry-after", b"1"),))
    await http.respond_json({"ready": True})


async def model_ready(app: App, http: HttpExchange) -> None:
    app.loaded(http)
    if app.draining:
        raise HttpError(503, "not ready: the server is stopping", ((b"retry-after", b"1"),))
    await http.respond_json({"name": http.name, "ready": True})


async def model_metadata(app: App, http: HttpExchange) -> None:
    await http.respond_json(metadata(http.name, app.loaded(http), app.models.settings))


async def model_config(app: App, http: HttpExchange) -> None:
    await http.respond_json(triton_config(http.name, app.loaded(http)))


async def model_stats(app: App, http: HttpExchange) -> None:
    await http.respond_json({"model_stats": [stats_of(app, model_of(http))]})


async def all_stats(app: App, http: HttpExchange) -> None:
    await http.respond_json({"model_stats": [stats_of(app, served) for served in app.models]})


def stats_of(app: App, served: ServedModel) -> dict[str, Any]:
    """Triton's form; `anyprec` holds the scheduler's own numbers."""
    found = {"name": served.name, "version": VERSION, **app.metrics.totals(served.name)}
    if served.now is not None:
        found["anyprec"] = served.now.scheduler.stats()
    return found


async def prometheus(app: App, http: HttpExchange) -> None:
    app.metrics.held.set(app.held)
    await http.respond(200, app.metrics.text(), PLAIN)


async def openapi(app: App, http: HttpExchange) -> None:
    """Open to all; the names of models only to those who may call them."""
    keys = app.keys
    may_know = not keys.api or keys.caller(key_of(http.headers)).name is not None
    names = tuple(served.name for served in app.models) if may_know else None
    await http.respond(200, description(names, bool(keys.api), bool(keys.api or keys.control)))


@functools.lru_cache(maxsize=8)
def description(names: tuple[str, ...] | None, keys: bool, control: bool) -> bytes:
    """Kept: making it takes over 1 ms, and anybody may ask for it."""
    return to_json(describe(names, keys, control))


# --- inference ---


async def infer(app: App, http: HttpExchange) -> None:
    http.inference = True
    await app.infer(http)


async def classify(app: App, http: HttpExchange) -> None:
    """A posted JPEG or PNG: labels with scores, at one width or at every one."""
    http.inference = True
    app.loaded(http)
    query = query_of(http, "bits", "min_bits", "deadline_ms", "top")
    top = whole_number(query, "top", TOP, 1, 1000)
    body = await app.body(http)
    arrived = http.arrived()
    results = await app.by_current(http, lambda loaded: classified(app, http, loaded, query, body, top, arrived))
    await http.respond_json({"model_name": http.name, "model_version": VERSION, "results": results})


async def classified(
    app: App, http: HttpExchange, loaded: LoadedModel, query: Mapping[str, str], body: bytes, top: int, arrived: float
) -> list[dict[str, Any]]:
    signature = loaded.signature
    every = query.get("bits") == "all"
    bits = None if every else read_bits(query.get("bits"), signature)
    least = read_min_bits(whole_number(query, "min_bits", 1, 1, 32), bits, signature)
    within = seconds(query, "deadline_ms") or (ALL_WIDTHS_S if every else app.models.settings.slo_s)
    settings = app.models.settings
    until = arrived + within + settings.limits.grace * settings.slo_s  # as long as an answer would be given
    x = await app.readers.image(body, signature, app.limits.image_pixels, until)
    results = []
    for width in signature.profiles if every else (bits,):
        if every:
            arrived = time.monotonic()  # each width has its own time
        request = Request(
            x,
            arrived + within,
            bits=int(width) if isinstance(width, str) and width.isdigit() else width,
            min_bits=1 if every else least,
            client=http.client,
            arrived=arrived,
        )
        answer = await app.run(http, loaded.scheduler, request)
        y = answer.outputs[0][0]
        labels = await written(app, y.size <= SMALL, labeled, y, signature.labels, top, signature.layout)
        results.append(
            {
                "bits": answer.bits,
                "accuracy": loaded.accuracies.get(str(answer.bits)),
                "run_ms": round(1e3 * answer.run_s, 4),
                "queue_ms": round(1e3 * answer.queue_s, 4),
                "latency_ms": round(1e3 * (http.latency_s or 0.0), 4),
                "batch": answer.batch,
                "labels": labels,
            }
        )
    return results


def query_of(http: HttpExchange, *known: str) -> dict[str, str]:
    raw = http.scope.get("query_string", b"")
    if not raw:
        return {}
    try:
        given = parse_qs(raw.decode("ascii"), keep_blank_values=True, max_num_fields=32, errors="strict")
    except ValueError as error:
        raise InputError(f"the query cannot be read: {error}") from error
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InputError(f"{unknown[0][:64]!r} is not known here; the query may have {', '.join(known)}")
    return {name: values[-1] for name, values in given.items()}


def whole_number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    given = query.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 10 and least <= int(given) <= most):
        raise InputError(f"{name}={given[:32]!r} must be a whole number from {least} to {most}")
    return int(given)


def seconds(query: Mapping[str, str], name: str) -> float | None:
    given = query.get(name)
    if given is None:
        return None
    try:
        found = float(given) / 1e3
    except ValueError:
        found = -1.0
    if not 0 < found <= LONGEST_S:
        raise InputError(f"{name}={given[:32]!r} must be above 0 and at most {LONGEST_S * 1e3:.0f}")
    return found


# --- the page's data ---


async def recent(app: App, http: HttpExchange) -> None:
    """The last seconds, as JSON; a client that accepts text/event-stream gets every further second as it ends."""
    query = query_of(http, "seconds", "window")
    count = whole_number(query, "seconds", 60, 1, KEEP - 1)
    window_s = whole_number(query, "window", WINDOW, 1, KEEP - 1)
    if b"text/event-stream" not in http.headers.get(b"accept", b""):
        await http.respond_json(seen(app, http, count, window_s))
        return
    if app.streams >= app.limits.streams:
        raise Overloaded("as many clients watch as may; ask without text/event-stream", retry_after=5.0)
    app.streams += 1
    try:
        http.sent, http.status = True, 200
        headers = [STREAM, (b"cache-control", b"no-store"), (b"x-request-id", http.id)]
        await http.send({"type": "http.response.start", "status": 200, "headers": headers})
        while not app.draining:
            event = b"data: " + json.dumps(seen(app, http, count, window_s)).encode() + b"\n\n"
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


def seen(app: App, http: HttpExchange, count: int, window_s: int) -> dict[str, Any]:
    served = model_of(http)
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
        "widths": [{"bits": name, "accuracy": accuracy} for name, accuracy in accuracies.items()],
        "window": window_record(total, window_s, lambda bits: accuracies.get(str(bits))),
        "seconds": recent.series(now, count, lambda bits: accuracies.get(str(bits))),
    }
    if loaded is not None:
        found["precision"] = dict(zip(("policy", "bits"), loaded.scheduler.policy, strict=True))
        found["queue"] = loaded.scheduler.waiting
    return found


# --- control ---


async def get_precision(app: App, http: HttpExchange) -> None:
    policy, bits = app.loaded(http).scheduler.policy
    await http.respond_json({"policy": policy, "bits": bits})


async def set_precision(app: App, http: HttpExchange) -> None:
    """{"bits": 4} holds a width; {"policy": "adaptive"} or {"policy": "accuracy"} frees it."""
    loaded = app.loaded(http)
    given = await json_object(app, http)
    unknown = sorted(set(given) - {"bits", "policy"})
    if unknown:
        raise InputError(f"{unknown[0][:64]!r} is not known; give bits, or policy")
    bits, policy = given.get("bits"), given.get("policy")
    if bits is not None and policy in (None, "fixed"):
        policy, bits = "fixed", read_bits(bits, loaded.signature)
    elif bits is not None or policy not in ("adaptive", "accuracy"):
        raise InputError('give {"bits": 4}, {"policy": "adaptive"} or {"policy": "accuracy"}')
    before = loaded.scheduler.policy
    loaded.scheduler.set_policy(policy, bits)
    if before != (policy, bits):
        held = {} if bits is None else {"bits": bits}
        log.info("precision set", model=http.name, policy=policy, **held, before=before[0], client=http.client)
    await http.respond_json({"policy": policy, "bits": bits})


async def json_object(app: App, http: HttpExchange) -> dict[str, Any]:
    body = await app.body(http)
    if len(body) > app.limits.json:
        raise HttpError(413, f"more than {app.limits.json:,} bytes of JSON")
    return as_object(body)


async def index(app: App, http: HttpExchange) -> None:
    only_ready = False
    if http.method == "POST":
        given = await maybe_object(app, http)
        only_ready = given.get("ready", False)
        if not isinstance(only_ready, bool):
            raise InputError("ready must be true or false")
    await http.respond_json(
        [
            {"name": served.name, "version": VERSION, "state": served.state, "reason": reason_of(served)}
            for served in app.models
            if served.now is not None or not only_ready
        ]
    )


def reason_of(served: ServedModel) -> str:
    return served.reason if served.now is None else ""


async def load(app: App, http: HttpExchange) -> None:
    """Open the model's own file anew; a client cannot bring another."""
    given = await maybe_object(app, http)
    if set(given) - {"parameters"} or given.get("parameters") not in (None, {}):
        raise InputError("parameters are not taken: the file is the one the server was started with")
    await asyncio.get_running_loop().run_in_executor(None, app.models.load, model_of(http))
    await http.respond_json({"name": http.name, "state": model_of(http).state})


async def unload(app: App, http: HttpExchange) -> None:
    await maybe_object(app, http)
    await asyncio.get_running_loop().run_in_executor(None, app.models.unload, model_of(http))
    await http.respond_json({"name": http.name, "state": model_of(http).state})


async def maybe_object(app: App, http: HttpExchange) -> dict[str, Any]:
    """For control posts, whose body may be empty."""
    body = await app.body(http)
    return as_object(body) if body else {}


def as_object(body: bytes) -> dict[str, Any]:
    given = parse_json(body)
    if not isinstance(given, dict):
        raise InputError("the body is not a JSON object")
    return given
