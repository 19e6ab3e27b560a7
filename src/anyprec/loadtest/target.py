"""Target of a load test: a model on a server of the Open Inference Protocol v2, and the bytes of one request.

`find(url, model)` asks the server what the model takes; `fit(images, target)` brings images into that form;
`messages(target, images, ...)` makes the requests, ready to be sent. Called by cli/loadtest.py and bench/serve.py.
"""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from anyprec.errors import LoadTestError

DTYPES: dict[str, np.dtype] = {"UINT8": np.dtype(np.uint8), "FP32": np.dtype(np.float32)}
OUTPUT_DTYPES: dict[str, np.dtype] = {
    **DTYPES,
    "FP16": np.dtype(np.float16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
}
ANSWER_S = 10.0  # timeout of the requests for metadata before the load


@dataclass(frozen=True)
class Target:
    """One model of one server. Shapes are without the batch axis; -1 is any size."""

    host: str
    port: int
    path: str  # of the infer endpoint
    model: str
    input_name: str
    datatypes: tuple[str, ...]  # accepted, preferred first
    shape: tuple[int, ...]
    output_name: str
    output_datatype: str
    accuracy: Mapping[str, float] = field(default_factory=dict)  # profile -> percent, as the model file notes it
    image_size: tuple[int, int] | None = None  # H, W it was made for, where our server says so


def find(url: str, model: str | None = None, headers: Mapping[str, str] | None = None) -> Target:
    """Ask the server at `url` about `model`; without a name, about the only one it has."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:
        raise LoadTestError(f"{url}: {error}; write for example http://127.0.0.1:8000") from error
    if parts.scheme != "http" or not host:
        raise LoadTestError(f"{url} is not an address of plain HTTP; write for example http://127.0.0.1:8000")
    prefix = parts.path.rstrip("/")
    try:
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    except http.client.InvalidURL as error:
        raise LoadTestError(f"{url!r} is not an address ({error}); write for example http://127.0.0.1:8000") from error
    try:
        if model is None:
            model = only_model(connection, prefix, headers)
        path = f"{prefix}/v2/models/{quote(model, safe='')}"
        about = ask(connection, "GET", path, headers)
    except (OSError, http.client.HTTPException) as error:
        raise LoadTestError(f"{url}: no server answers there ({error}); is `anyprec serve` running?") from error
    except UnicodeError as error:  # of the host name, of a header or of the model
        raise LoadTestError(
            f"{url}: the address, --model or a --header has letters HTTP cannot carry ({error})"
        ) from error
    finally:
        connection.close()
    return described(about, host=host, port=port, path=f"{path}/infer", model=model)


def only_model(connection: http.client.HTTPConnection, prefix: str, headers: Mapping[str, str] | None) -> str:
    index = ask(connection, "POST", f"{prefix}/v2/repository/index", headers, may_lack=True)
    names = [entry.get("name") for entry in index] if isinstance(index, list) else []
    if len(names) != 1:
        listed = f"it has {', '.join(map(str, names))}" if names else "the server does not list its models"
        raise LoadTestError(f"which model? {listed}; add --model NAME")
    return str(names[0])


def ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    headers: Mapping[str, str] | None,
    may_lack: bool = False,
) -> Any:
    body = b"{}" if method == "POST" else None
    connection.request(method, path, body=body, headers={"Content-Type": "application/json", **(headers or {})})
    answer = connection.getresponse()
    text = answer.read(16 << 20)
    if answer.status != 200:
        if may_lack:
            return {}
        raise LoadTestError(f"{path}: the server answers {answer.status} {text[:200].decode(errors='replace')}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise LoadTestError(
            f"{path}: the answer is not JSON; is this a server of the Open Inference Protocol?"
        ) from error


def described(about: Any, **where: Any) -> Target:
    try:
        first_in, first_out = about["inputs"][0], about["outputs"][0]
        shape = tuple(int(size) for size in first_in["shape"])[1:]
        own = about.get("parameters") or {}
        datatypes = tuple(dict.fromkeys([first_in["datatype"], *(own.get("datatypes") or ())]))
        target = Target(
            **where,
            input_name=str(first_in["name"]),
            datatypes=tuple(name for name in datatypes if name in DTYPES),
            shape=shape,
            output_name=str(first_out["name"]),
            output_datatype=str(first_out["datatype"]),
            accuracy=accuracies(own),
            image_size=image_size(own),
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise LoadTestError(f"{where['path']}: the model's metadata cannot be read ({error!r})") from error
    if not target.datatypes:
        raise LoadTestError(f"model {target.model} takes {datatypes[0]}; a load of {' or '.join(DTYPES)} can be sent")
    return target


def accuracies(parameters: Mapping[str, Any]) -> dict[str, float]:
    """Profile -> percent, where the model file notes it; servers other than ours say nothing of it."""
    noted = parameters.get("accuracy")
    if not isinstance(noted, dict):
        return {}
    return {str(name): float(value) for name, value in noted.items() if isinstance(value, (int, float))}


def image_size(parameters: Mapping[str, Any]) -> tuple[int, int] | None:
    said = parameters.get("image_size")
    if not (isinstance(said, list) and len(said) == 2 and all(type(n) is int and 0 < n < 1 << 16 for n in said)):
        return None
    return said[0], said[1]


def fit_images(images: np.ndarray, target: Target) -> np.ndarray:
    """Images (N, H, W, C) uint8 or float32, or already in the model's own shape -> what the model takes, (N, ...)."""
    name = next((name for name in target.datatypes if DTYPES[name] == images.dtype), None)
    if name is None:
        raise LoadTestError(
            f"images are {images.dtype}, model {target.model} takes {' or '.join(target.datatypes)}; "
            "give an .npy of that type"
        )
    if images.ndim == 4 and not matches(images.shape[1:], target.shape):
        images = images.transpose(0, 3, 1, 2)
    if not matches(images.shape[1:], target.shape):
        raise LoadTestError(
            f"images are {images.shape[1:]}, model {target.model} takes {list(target.shape)} (-1: any size)"
        )
    return np.ascontiguousarray(images)


def matches(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(shape) == len(wanted) and all(w in (-1, s) for s, w in zip(shape, wanted, strict=True))


def noise(target: Target, count: int, seed: int = 0) -> np.ndarray:
    """Random images where none are given: the latency of a packed model does not depend on the content."""
    one, free = list(target.shape), [axis for axis, size in enumerate(target.shape) if size < 1]
    if target.image_size is not None and len(free) == 2:  # height comes before width in every layout
        one[free[0]], one[free[1]] = target.image_size
    if any(size < 1 for size in one):
        raise LoadTestError(f"model {target.model} takes images of any size; say which with --images FILE.npy")
    draw = np.random.default_rng(seed)
    shape = (count, *one)
    if "UINT8" in target.datatypes:
        return draw.integers(0, 256, shape, np.uint8)
    return draw.standard_normal(shape, np.float32)


def messages(
    target: Target,
    images: np.ndarray,  # as from fit: (N, ...)
    *,
    batch: int = 1,
    deadline_ms: float | None = None,
    bits: int | str | None = None,
    min_bits: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> list[bytes]:
    """One whole HTTP request per `batch` images, built beforehand so that sending is one system call.

    Images that do not fill a batch are left out.
    """
    shape = [batch, *images.shape[1:]]
    size = math.prod(shape) * images.itemsize
    datatype = next(name for name, dtype in DTYPES.items() if dtype == images.dtype)
    chosen = {"deadline_ms": deadline_ms, "bits": bits, "min_bits": min_bits}
    body = {
        "inputs": [
            {
                "name": target.input_name,
                "shape": shape,
                "datatype": datatype,
                "parameters": {"binary_data_size": size},
            }
        ],
        "outputs": [{"name": target.output_name, "parameters": {"binary_data": True}}],
        "parameters": {name: value for name, value in chosen.items() if value is not None},
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [
        f"POST {target.path} HTTP/1.1",
        f"Host: {host}:{target.port}",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(text)}",
        f"Content-Length: {len(text) + size}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + text
    return [head + images[i : i + batch].tobytes() for i in range(0, len(images) - batch + 1, batch)]
