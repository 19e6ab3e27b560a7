"""Answers of /infer: outputs of the engine in, bytes on the connection out. Called by app.py.

No answer blocks the event loop, however large: other threads write its JSON without the GIL, a piece at a time as the
client reads it; binary tensors are sent from the engine's own output. Answers that are too large are refused before the
run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from anyprec.serve.http.exchange import BINARY, JSON, Header, HttpExchange
from anyprec.serve.http.protocol import (
    SMALL,
    AnswerBody,
    HttpError,
    InferRequest,
    ModelSignature,
    answer_size,
    as_text,
    write_answer,
)
from anyprec.serve.models import VERSION, LoadedModel
from anyprec.serve.scheduling.answer import Answer

if TYPE_CHECKING:
    from anyprec.serve.http.app import App

T = TypeVar("T")
ONE_PIECE = 1 << 18  # bytes of a binary answer that are handed over at a time, uncopied


def about_answer(name: str, answer: Answer, latency_s: float) -> dict[str, Any]:
    """What an answer says beside its outputs."""
    return {
        "model_name": name,
        "model_version": VERSION,
        "parameters": {
            "bits": answer.bits,
            "latency_ms": round(1e3 * latency_s, 4),
            "queue_ms": round(1e3 * answer.queue_s, 4),
            "run_ms": round(1e3 * answer.run_s, 4),
            "batch": answer.batch,
            **stages_of(answer),
        },
    }


def stages_of(answer: Answer) -> dict[str, Any]:
    """For answers of a cascade: which stage answered each image."""
    return {} if answer.stages is None else {"stages": list(answer.stages)}


def check_answer(app: App, http: HttpExchange, call: InferRequest, loaded: LoadedModel) -> None:
    """Refuse a request whose answer would be too large; count its outputs among the bytes held."""
    shapes = loaded.output_shapes(call.x)
    count, json_bytes = answer_size(call, shapes)
    if json_bytes > app.limits.answer_json:
        raise HttpError(
            413,
            f"the answer would have {count:,} numbers, up to {json_bytes:,} bytes of JSON; at most "
            f"{app.limits.answer_json:,} are sent (--max-answer-json). Ask for binary tensors, 4 bytes a number: "
            '"parameters": {"binary_data_output": true}',
        )
    floats = 4 * sum(map(math.prod, shapes))
    if floats > app.limits.held:
        raise HttpError(
            413, f"the outputs would have {floats:,} bytes; at most {app.limits.held:,} are held (--max-held)"
        )
    app.bodies.hold(http, floats)


async def send_answer(
    app: App,
    http: HttpExchange,
    about: Mapping[str, Any],
    call: InferRequest,
    signature: ModelSignature,
    outputs: Sequence[np.ndarray],
) -> None:
    count, _ = answer_size(call, [y.shape for y in outputs])
    small = count <= SMALL
    body = await written(app, small, write_answer, about, call, signature, outputs)
    if not (small or body.tensors or http.scope.get("http_version") == "1.0"):  # which knows no chunks
        await http.respond_pieces(json_pieces(app, body), JSON)
        return
    head = b"".join([await written(app, small, as_text, piece) for piece in body.pieces()])
    if not body.tensors:
        await http.respond(200, head)
        return
    size = len(head) + sum(map(len, body.tensors))
    if size <= ONE_PIECE:
        await http.respond(200, b"".join([head, *body.tensors]), BINARY, (json_length(head),))
    else:
        lengths = ((b"content-length", b"%d" % size), json_length(head))
        await http.respond_pieces(binary_pieces(head, body.tensors), BINARY, lengths)


def small_answer(
    about: Mapping[str, Any], call: InferRequest, signature: ModelSignature, outputs: Sequence[np.ndarray]
) -> tuple[tuple[Header, ...], bytes]:
    """An answer of one piece: header fields and body."""
    body = write_answer(about, call, signature, outputs)
    head = b"".join(map(as_text, body.pieces()))
    if not body.tensors:
        return (JSON,), head
    return (BINARY, json_length(head)), b"".join([head, *body.tensors])


def json_length(head: bytes) -> Header:
    return b"inference-header-content-length", b"%d" % len(head)


async def json_pieces(app: App, body: AnswerBody) -> AsyncIterator[bytes]:
    for piece in body.pieces():
        yield await written(app, isinstance(piece, bytes), as_text, piece)


async def binary_pieces(head: bytes, tensors: Sequence[memoryview]) -> AsyncIterator[bytes | memoryview]:
    yield head
    for tensor in tensors:
        for first in range(0, len(tensor), ONE_PIECE):
            yield tensor[first : first + ONE_PIECE]


async def written(app: App, small: bool, work: Callable[..., T], *args: Any) -> T:
    """Call `work`, in another thread unless it is small."""
    if small:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(app.writers, work, *args)
