"""What the HTTP server costs a request: round trips of one 3 x 32 x 32 image against a network of almost no work.

    python bench/serve_overhead.py [--requests 3000] [--stacks]

Client and server are two processes on this machine, one connection, one request at a time. `engine` is the time the
server says the network ran; overhead = round trip - engine: HTTP in and out, scheduling, two threads' hand-over, the
client's own work. --stacks instead compares ways to build the server with a handler that does nothing (decisions.md).
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from anyprec.format import Graph, GraphProfile, Op, Weight, nested_planes, write

IMAGE = 3 * 32 * 32
HEADER = {
    "inputs": [
        {
            "name": "input",
            "shape": [1, 3, 32, 32],
            "datatype": "UINT8",
            "parameters": {"binary_data_size": IMAGE},
        }
    ],
    "parameters": {"binary_data_output": True},
}
NULL = b"x" * 300  # what the handlers of --stacks answer


def null_graph() -> Graph:
    """A mean over the image and a 3 x 10 product: what is left is the server."""
    widths = (1, 2, 4, 8)
    profiles = tuple(GraphProfile(str(bits), bits, bits, 90.0 + bits) for bits in widths)
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 256, (10, 1, 1, 3), np.uint8)
    table = np.ones((len(widths), 2, 3), np.float32)
    return Graph(
        name="null",
        input_shape=(32, 32, 3),
        profiles=profiles,
        planes=nested_planes(widths),
        weights={"head": Weight((10, 1, 1, 3), None, {bits: codes >> (8 - bits) for bits in widths})},
        ops=(
            Op("mean", "adaptive_avg_pool", ("input",), {"size": (1, 1)}),
            Op("codes", "quantize", ("mean",), {"signed": False, "rectify": True, "affine": True}),
            Op("head", "linear", ("codes",), {"weight": "head", "signed": False, "affine": False}),
        ),
        outputs=("head",),
        tables={"codes": table},
        image_scale=(1 / 255,) * 3,
        image_shift=(0.0,) * 3,
        labels=tuple(f"class {i}" for i in range(10)),
        made_by="bench/serve_overhead.py",
    )


def request(path: str, binary: bool = True) -> bytes:
    if binary:
        head = json.dumps(HEADER).encode()
        body = head + bytes(IMAGE)
        length = f"Inference-Header-Content-Length: {len(head)}\r\n"
    else:
        tensor = {"name": "input", "shape": [1, 3, 32, 32], "datatype": "UINT8", "data": [7] * IMAGE}
        body, length = json.dumps({"inputs": [tensor]}).encode(), ""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{length}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """One connection, blocking: nothing in it that takes longer than a system call."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, raw: bytes) -> tuple[float, bytes]:
        start = time.perf_counter()
        self.socket.sendall(raw)
        got = self.socket.recv(65536)
        while b"\r\n\r\n" not in got:
            got += self.socket.recv(65536)
        head, _, body = got.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert found is not None and b" 200 " in head[:16], got[:200]
        while len(body) < int(found[1]):
            body += self.socket.recv(65536)
        return time.perf_counter() - start, body


def times(port: int, raw: bytes, count: int) -> tuple[list[float], list[float]]:
    """Round trips and, where the answer tells it, the engine's part; seconds."""
    client = Client(port)
    trips, engine = [], []
    for number in range(count + count // 10):
        seconds, body = client.ask(raw)
        if number < count // 10:
            continue  # the first ones warm caches
        trips.append(seconds)
        found = re.search(rb'"run_ms":\s*([0-9.e-]+)', body)
        engine.append(float(found[1]) / 1e3 if found else 0.0)
    client.socket.close()
    return trips, engine


def show(name: str, trips: list[float], engine: list[float]) -> dict[str, float]:
    over = sorted(trip - run for trip, run in zip(trips, engine, strict=True))
    found = {
        "round_trip_p50_ms": 1e3 * statistics.median(trips),
        "engine_p50_ms": 1e3 * statistics.median(engine),
        "overhead_p10_ms": 1e3 * over[len(over) // 10],
        "overhead_p50_ms": 1e3 * statistics.median(over),
        "overhead_p90_ms": 1e3 * over[int(0.9 * len(over))],
        "overhead_p99_ms": 1e3 * over[int(0.99 * len(over))],
    }
    print(f"{name:<22}" + "  ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def measure_server(count: int) -> dict[str, dict[str, float]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "null.apm"
        write(null_graph(), path)
        command = [sys.executable, "-m", "anyprec", "serve", str(path), "--port", "0", "--warm-up", "1s"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(re.search(r":(\d+),", server.stdout.readline())[1])  # type: ignore[index]
            try:
                for name, raw in (
                    ("binary tensor", request("/v2/models/null/infer")),
                    ("JSON tensor", request("/v2/models/null/infer", binary=False)),
                ):
                    found[name] = show(name, *times(port, raw, count))
            finally:
                server.terminate()
    return found


# --- ways to build it ---


def measure_stacks(count: int) -> None:
    for kind in ("sockets", "asgi", "asgi, asyncio", "starlette", "fastapi"):
        port = free_port()
        with subprocess.Popen([sys.executable, __file__, "--serve-stack", kind, str(port)]) as server:
            try:
                for _ in range(200):
                    try:
                        socket.create_connection(("127.0.0.1", port)).close()
                        break
                    except OSError:
                        time.sleep(0.05)
                show(kind, *times(port, request("/v2/models/null/infer"), count))
            finally:
                server.terminate()


def serve_stack(kind: str, port: int) -> None:
    import uvicorn

    if kind == "sockets":
        serve_sockets(port)
        return
    app: object
    if kind == "fastapi":
        from fastapi import FastAPI, Request, Response

        async def handle(name: str, request: Request) -> Response:
            json.loads((await request.body())[: int(request.headers["inference-header-content-length"])])
            return Response(NULL, media_type="application/octet-stream")

        handle.__annotations__ = {"name": str, "request": Request, "return": Response}  # FastAPI reads them as types
        app = FastAPI()
        app.post("/v2/models/{name}/infer")(handle)
    elif kind == "starlette":
        from starlette.applications import Starlette
        from starlette.requests import Request as StarletteRequest
        from starlette.responses import Response as StarletteResponse
        from starlette.routing import Route

        async def answer(request: StarletteRequest) -> StarletteResponse:
            json.loads((await request.body())[: int(request.headers["inference-header-content-length"])])
            return StarletteResponse(NULL, media_type="application/octet-stream")

        app = Starlette(routes=[Route("/v2/models/{name}/infer", answer, methods=["POST"])])
    else:
        app = plain_asgi
    loop = "asyncio" if "asyncio" in kind else "uvloop"
    uvicorn.run(
        app, port=port, log_level="warning", access_log=False, lifespan="off", proxy_headers=False, http="httptools",
        loop=loop, ws="none",
    )  # fmt: skip


async def plain_asgi(scope, receive, send):  # type: ignore[no-untyped-def]
    headers = dict(scope["headers"])
    body = b""
    more = True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    json.loads(body[: int(headers[b"inference-header-content-length"])])
    kind = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % len(NULL))]
    await send({"type": "http.response.start", "status": 200, "headers": kind})
    await send({"type": "http.response.body", "body": NULL})


def serve_sockets(port: int) -> None:
    """The least there is: read the bytes, send the bytes."""
    import asyncio

    import uvloop

    whole = len(request("/v2/models/null/infer"))
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(NULL) + NULL

    class Echo(asyncio.Protocol):
        def connection_made(self, transport):  # type: ignore[no-untyped-def]
            self.transport, self.seen = transport, 0

        def data_received(self, data: bytes) -> None:
            self.seen += len(data)
            if self.seen >= whole:
                self.seen = 0
                self.transport.write(answer)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port)
        await server.serve_forever()

    loop = uvloop.new_event_loop()
    loop.run_until_complete(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--stacks", action="store_true", help="compare ways to build the server")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers")
    parser.add_argument("--serve-stack", nargs=2, metavar=("KIND", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_stack:
        serve_stack(args.serve_stack[0], int(args.serve_stack[1]))
    elif args.stacks:
        measure_stacks(args.requests)
    else:
        found = measure_server(args.requests)
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
