"""A server for tests: small networks as model files, the server in a thread or as a process, a plain HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from anyprec.cascade.cascade import Cascade, Stage
from anyprec.format import Graph, GraphProfile, Op, Weight, nested_planes, write
from anyprec.run.model import load
from anyprec.serve.connections.connection import ConnectionLimits
from anyprec.serve.connections.server import DrainTimes, Server, Tls, is_local, listen, new_loop
from anyprec.serve.http.app import App, make_app
from anyprec.serve.http.bodies import RequestLimits
from anyprec.serve.http.keys import Keys
from anyprec.serve.models import ModelRepository, Settings, make_scheduler
from anyprec.serve.scheduling.queue import QueueLimits

LABELS = ("cat", "dog", "bird", "ship")


def graph(seed: int = 0, size: tuple[int | None, int | None] = (8, 8), widths: tuple[int, ...] = (1, 2, 4, 8)) -> Graph:
    """Float stem, one quantized convolution, mean, float head of four classes; takes RGB bytes."""
    draw = np.random.default_rng(seed)
    profiles = tuple(GraphProfile(str(bits), bits, bits, 80.0 + bits) for bits in widths)
    codes = draw.integers(0, 256, (6, 3, 3, 5), np.uint8)

    def values(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(np.float32)

    def conv(name: str, x: str, affine: bool) -> Op:
        rest = {"kernel": (3, 3), "stride": (1, 1), "pad": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1}
        return Op(name, "conv", (x,), {"weight": name, **rest, "signed": False, "affine": affine})

    return Graph(
        name="small",
        input_shape=(*size, 3),
        profiles=profiles,
        planes=nested_planes(widths),
        weights={
            "stem": Weight((5, 3, 3, 3), values(5, 3, 3, 3)),
            "mid": Weight((6, 3, 3, 5), None, {bits: codes >> (8 - bits) for bits in widths}),
            "head": Weight((4, 1, 1, 6), values(4, 1, 1, 6)),
        },
        ops=(
            conv("stem", "input", affine=False),
            Op("codes", "quantize", ("stem",), {"signed": False, "rectify": True, "affine": True}),
            conv("mid", "codes", affine=True),
            Op("mean", "adaptive_avg_pool", ("mid",), {"size": (1, 1)}),
            Op("head", "linear", ("mean",), {"weight": "head", "signed": False, "affine": False}),
        ),
        outputs=("head",),
        tables={"codes": np.abs(values(len(widths), 2, 5)), "mid": values(len(widths), 2, 6)},
        image_scale=(1 / 255,) * 3,
        image_shift=(0.0,) * 3,
        labels=LABELS,
        made_by="tests",
    )


def save(path: Path, **rest: Any) -> Path:
    """Written beside and renamed, as a deployment does."""
    beside = path.with_suffix(".new")
    write(graph(**rest), beside)
    os.replace(beside, path)
    return path


def level_graph(seed: int = 0, accuracy: float | None = 87.0) -> Graph:
    """The same with a plan ("fast": weights of 2 bit, activations of 1) and a cascade, 1 bit and then 8."""
    plain = graph(seed)
    plan = GraphProfile("fast", {"mid": 2}, {"codes": 1}, 81.5)
    tables = {name: np.concatenate([table, table[1:2]]) for name, table in plain.tables.items()}
    stages = (Stage("1", 0.5, 1.0, 1.0), Stage("8", None, 1.0, 0.5))
    return replace(
        plain,
        profiles=(*plain.profiles, plan),
        tables=tables,
        cascade=Cascade("margin", stages, 97.0, accuracy).text(),
    )


def images(count: int = 1, seed: int = 0, size: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, size, size), np.uint8)


class SlowModel:
    """A PackedModel whose calls take `seconds` longer, for queues that fill. `calls` counts images that ran."""

    def __init__(self, model: Any, seconds: float) -> None:
        self.model, self.seconds, self.calls = model, seconds, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, x: np.ndarray, *args: Any, **rest: Any) -> Any:
        self.calls += len(x)
        time.sleep(self.seconds)
        return self.model(x, *args, **rest)


class Running:
    """A server in a thread of this process."""

    def __init__(self, server: Server, models: ModelRepository, thread: threading.Thread, port: int, loop: Any) -> None:
        self.server, self.models, self.thread, self.port, self.loop = server, models, thread, port, loop

    @property
    def app(self) -> App:
        return self.server.app

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.stop)
            self.thread.join(30)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(
    paths: dict[str, Path],
    *,
    settings: Settings | None = None,
    request_limits: RequestLimits | None = None,
    connection_limits: ConnectionLimits | None = None,
    keys: Keys | None = None,
    slow_s: float = 0.0,
    local: bool | None = None,
    drain_times: DrainTimes | None = None,
    tls: Tls | None = None,
    watch_s: float | None = None,
) -> Iterator[Running]:
    settings = settings or Settings(slo_s=2.0, warm_up_s=0.05)
    slow: list[SlowModel] = []

    def make(model: Any, levels: Any, settings: Settings, deliver: Any) -> Any:
        if slow_s:
            model = SlowModel(model, slow_s)
            slow.append(model)
        return make_scheduler(model, levels, settings, deliver)

    listener = listen("127.0.0.1", 0)
    app = make_app(
        {name: str(path) for name, path in paths.items()}, settings, keys=keys, limits=request_limits,
        local=is_local(listener) if local is None else local, make=make,
    )  # fmt: skip
    models = app.models
    models.load_all()
    server = Server(app, connection_limits, drain_times or DrainTimes(timeout_s=10.0), tls)
    ready = threading.Event()
    server.on_ready = ready.set
    loop = new_loop()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(server.serve([listener]))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=serve, name="test-server")
    thread.start()
    assert ready.wait(20)
    if watch_s is not None:
        models.watch(watch_s)
    found = Running(server, models, thread, listener.getsockname()[1], loop)
    found.slow = slow  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        found.stop()
        listener.close()


@contextlib.contextmanager
def process(*arguments: object, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`anyprec serve ARGUMENTS --port 0` as a process of its own, and its port."""
    command = [sys.executable, "-m", "anyprec", "serve", *map(str, arguments), "--port", "0", "--warm-up", "50ms"]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    try:
        assert child.stdout is not None and child.stderr is not None
        line = child.stdout.readline()
        found = re.search(r"://[^ ]+:(\d+),", line)
        assert found, line + child.stderr.read()
        yield child, int(found[1])
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


class Reply:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    port: int,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    connection: Any = None,
    timeout_s: float = 60,
    **headers: str,
) -> Reply:
    """One request. Headers as x_api_key="..."."""
    own = connection is None
    connection = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    raw = json.dumps(body).encode() if isinstance(body, dict) else body
    try:
        connection.request(method, path, raw, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        if own:
            connection.close()


DATATYPES = {"uint8": "UINT8", "float32": "FP32", "float16": "FP16", "float64": "FP64"}


def tensor(x: np.ndarray, name: str = "input") -> dict[str, Any]:
    return {"name": name, "shape": list(x.shape), "datatype": DATATYPES[str(x.dtype)], "data": x.ravel().tolist()}


def binary_request(x: np.ndarray, **parameters: Any) -> tuple[bytes, int]:
    """The body of a request whose tensor follows its JSON, and the length of that JSON."""
    described = {"name": "input", "shape": list(x.shape), "datatype": DATATYPES[str(x.dtype)]}
    described["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [described], "parameters": parameters}).encode()
    return head + x.tobytes(), len(head)


def infer(port: int, x: np.ndarray, model: str = "net", connection: Any = None, **parameters: Any) -> Reply:
    body = {"inputs": [tensor(x)], "parameters": parameters}
    return ask(port, "POST", f"/v2/models/{model}/infer", body, connection)


def infer_binary(port: int, x: np.ndarray, model: str = "net", **parameters: Any) -> Reply:
    body, length = binary_request(x, **parameters)
    return ask(port, "POST", f"/v2/models/{model}/infer", body, inference_header_content_length=str(length))


def output(reply: Reply) -> np.ndarray:
    found = reply.json["outputs"][0]
    return np.array(found["data"], np.float32).reshape(found["shape"])


def expected(path: Path, x: np.ndarray, bits: int | str) -> np.ndarray:
    y = load(path)(x, bits)
    assert isinstance(y, np.ndarray)
    return y


def wait_for(done: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def memory_mb(pid: int, field: str = "VmRSS") -> float:
    """What /proc/PID/status says: VmRSS for now, VmHWM for the peak."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) / 1024


def has_ray() -> bool:
    """Whether Ray is installed. The folder tests/serve/ray is on the path as well, as a package without a file."""
    found = importlib.util.find_spec("ray")
    return found is not None and found.origin is not None


SMALL = QueueLimits(max_batch=4, max_queue=8)
