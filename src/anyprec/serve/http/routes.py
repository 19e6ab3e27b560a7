"""Routes: a request's path and method in, its handler out; the key is checked on the way. Called by app.py.

Also the handlers for health, metadata and statistics. The others are in app.py (infer), classify.py, live.py (the
page's data) and control.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anyprec import __version__
from anyprec.serve.http.access import authorize
from anyprec.serve.http.classify import classify
from anyprec.serve.http.control import get_precision, index, load, set_precision, unload
from anyprec.serve.http.exchange import HttpExchange, key_of, to_json
from anyprec.serve.http.hints import wrong_method
from anyprec.serve.http.live import recent
from anyprec.serve.http.openapi import describe
from anyprec.serve.http.protocol import HttpError
from anyprec.serve.http.static import StaticFile
from anyprec.serve.models import VERSION, ServedModel, metadata, triton_config

if TYPE_CHECKING:
    from anyprec.serve.http.app import App, Handler

EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "model_repository", "statistics", "bits"]
PLAIN = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class Routes:
    def __init__(self, files: Mapping[str, StaticFile]) -> None:
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
            raise wrong_method(http, allowed)
        handler, control = methods[method]
        if control is not None:
            authorize(http, app.keys, control, app.local)
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


def file_handler(file: StaticFile) -> Handler:
    async def send(app: App, http: HttpExchange) -> None:
        if http.headers.get(b"if-none-match") == file.tag:
            await http.respond(304, b"", file.kind, file.headers)
        else:
            await http.respond(200, file.body, file.kind, file.headers)

    return send


# --- about the server and its models ---


async def server_metadata(app: App, http: HttpExchange) -> None:
    await http.respond_json({"name": "anyprec", "version": __version__, "extensions": EXTENSIONS})


async def live(app: App, http: HttpExchange) -> None:
    await http.respond_json({"live": True})


async def ready(app: App, http: HttpExchange) -> None:
    if app.unready:
        raise HttpError(503, f"not ready: {app.unready}", ((b"retry-after", b"1"),))
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
    await http.respond_json({"model_stats": [stats_of(app, http.model())]})


async def all_stats(app: App, http: HttpExchange) -> None:
    await http.respond_json({"model_stats": [stats_of(app, served) for served in app.models]})


def stats_of(app: App, served: ServedModel) -> dict[str, Any]:
    """Triton's form; `anyprec` holds the scheduler's own numbers."""
    found = {"name": served.name, "version": VERSION, **app.metrics.totals(served.name)}
    if served.now is not None:
        found["anyprec"] = served.now.scheduler.stats()
    return found


async def prometheus(app: App, http: HttpExchange) -> None:
    app.metrics.held.set(app.bodies.held)
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
