"""A worker process: jobs come over the socket that is its standard input, answers go back the same way.

It does what an attacker's bytes could make slow or large: decoding images, reading long JSON. It ends when its parent
does, and may be killed at any time (workers.py). No job of it needs torch. Answers are JSON and raw bytes, never
pickles: its parent need not trust it.

    message = 8 bytes length of the head, 8 bytes length of the data, head, data
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from anyprec.errors import AnyprecError
from anyprec.serve.http.images import read_image
from anyprec.serve.http.protocol import HttpError, read_infer_request

LENGTHS = struct.Struct("<QQ")
MEMORY = 2 << 30  # bytes of address space; 40 million pixels of a progressive JPEG need 0.6 GB

JobReply = tuple[dict[str, Any], bytes | memoryview]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    connection = socket.socket(fileno=os.dup(0))
    connection.setblocking(True)
    limit_memory(MEMORY)
    send(connection, {"ready": True}, b"")
    while True:
        try:
            head, data = receive(connection)
            job, longest_s, args = pickle.loads(head)  # of our parent, not of a client
            signal.setitimer(signal.ITIMER_REAL, longest_s)  # kills us, should the parent not be there to do it
            reply = answer(job, args, bytes(data))
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(connection, *reply)
        except (EOFError, ConnectionError, BrokenPipeError):
            return


def answer(job: str, args: tuple[Any, ...], data: bytes) -> JobReply:
    try:
        return JOBS[job](data, *args)
    except MemoryError:
        return {"error": "TooLarge", "status": 413, "message": "it takes too much memory to decode; send less"}, b""
    except HttpError as error:
        return {"error": "HttpError", "status": error.status, "message": str(error)}, b""
    except AnyprecError as error:
        return {"error": type(error).__name__, "status": 400, "message": str(error)}, b""


def image_job(data: bytes, *args: Any) -> JobReply:
    return array_reply(read_image(data, *args), {})


def call_job(data: bytes, header_length: int | None, signature: Any) -> JobReply:
    call = read_infer_request(data, header_length, signature)
    fields = {
        "wanted": [asdict(one) for one in call.wanted],
        "id": call.id,
        "bits": call.bits,
        "min_bits": call.min_bits,
        "deadline_s": call.deadline_s,
    }
    return array_reply(call.x, fields)


def array_reply(x: np.ndarray, fields: dict[str, Any]) -> JobReply:
    x = np.ascontiguousarray(x)
    return {"shape": x.shape, "dtype": x.dtype.str, **fields}, memoryview(x.data).cast("B")


JOBS: dict[str, Callable[..., JobReply]] = {"image": image_job, "call": call_job}


def limit_memory(most: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def send(connection: socket.socket, head: dict[str, Any], data: bytes | memoryview) -> None:
    text = json.dumps(head).encode()
    connection.sendall(LENGTHS.pack(len(text), len(data)) + text)
    if len(data):
        connection.sendall(data)


def receive(connection: socket.socket) -> tuple[bytearray, bytearray]:
    head_length, data_length = LENGTHS.unpack(receive_exactly(connection, LENGTHS.size))
    return receive_exactly(connection, head_length), receive_exactly(connection, data_length)


def receive_exactly(connection: socket.socket, count: int) -> bytearray:
    found = bytearray(count)
    view, at = memoryview(found), 0
    while at < count:
        got = connection.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return found
