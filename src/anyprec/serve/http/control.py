"""Control: the precision of a model, and loading or unloading its file. Handlers of routes.py."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from anyprec.errors import InputError
from anyprec.serve.http.exchange import HttpExchange
from anyprec.serve.http.protocol import HttpError, parse_json, read_bits
from anyprec.serve.models import VERSION, ServedModel
from anyprec.serve.monitoring.logs import log

if TYPE_CHECKING:
    from anyprec.serve.http.app import App


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
    body = await app.bodies.read(http)
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
    await asyncio.get_running_loop().run_in_executor(None, app.models.load, http.model())
    await http.respond_json({"name": http.name, "state": http.model().state})


async def unload(app: App, http: HttpExchange) -> None:
    await maybe_object(app, http)
    await asyncio.get_running_loop().run_in_executor(None, app.models.unload, http.model())
    await http.respond_json({"name": http.name, "state": http.model().state})


async def maybe_object(app: App, http: HttpExchange) -> dict[str, Any]:
    """For control posts, whose body may be empty."""
    body = await app.bodies.read(http)
    return as_object(body) if body else {}


def as_object(body: bytes) -> dict[str, Any]:
    given = parse_json(body)
    if not isinstance(given, dict):
        raise InputError("the body is not a JSON object")
    return given
