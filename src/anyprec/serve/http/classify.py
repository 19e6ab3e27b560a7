"""POST /v2/models/NAME/classify: a JPEG or PNG file in; labels with probabilities out, at one width or at every one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anyprec.run.labels import labeled
from anyprec.serve.http.answers import stages_of, written
from anyprec.serve.http.exchange import HttpExchange
from anyprec.serve.http.hints import refuse_form
from anyprec.serve.http.protocol import SMALL, read_bits, read_min_bits
from anyprec.serve.http.query import query_of, seconds, whole_number
from anyprec.serve.models import VERSION, LoadedModel
from anyprec.serve.scheduling.queue import Request

if TYPE_CHECKING:
    from anyprec.serve.http.app import App

ALL_WIDTHS_S = 5.0  # an image at every width is for people: it may wait longer than the target
TOP = 5  # labels, unless the query says how many


async def classify(app: App, http: HttpExchange) -> None:
    """A posted JPEG or PNG: labels with scores, at one width or at every one."""
    refuse_form(http)
    http.inference = True
    app.loaded(http)
    query = query_of(http, "bits", "min_bits", "deadline_ms", "top")
    top = whole_number(query, "top", TOP, 1, 1000)
    body = await app.bodies.read(http)
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
    for width in signature.levels if every else (bits,):
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
                **stages_of(answer),
                "labels": labels,
            }
        )
    return results
