"""The command line and the server as processes of their own, a plain HTTP client, and small model files."""

import contextlib
import http.client
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from anyprec.format import Graph, GraphProfile, Op, Weight, nested_planes, write

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def anyprec(*arguments, timeout=60, env=None, **options):
    command = [sys.executable, "-m", "anyprec", *map(str, arguments)]
    env = {**ENVIRONMENT, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, **options)


def python(program, *arguments, timeout=60):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


def said_in_one_line(done, *words):
    """Exit code 2 and one line that has these words, no traceback."""
    assert "Traceback" not in done.stderr, done.stderr[-500:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("anyprec: error: ")]
    assert (done.returncode, len(lines)) == (2, 1), f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    assert all(word in lines[0] for word in words), lines[0]


@contextlib.contextmanager
def serve(*arguments, env=None):
    """`anyprec serve` on a free port of this machine: (process, port)."""
    command = [sys.executable, "-m", "anyprec", "serve", *map(str, arguments), "--port", "0", "--warm-up", "50ms"]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**ENVIRONMENT, **(env or {})}
    )
    try:
        line = child.stdout.readline()
        found = re.search(r"://[^ ]+:(\d+),", line)
        assert found, line + child.stderr.read()
        yield child, int(found[1])
    finally:
        child.kill()
        child.communicate()


def ask(port, method, path, body=None, timeout=60, **headers):
    """(status, body)"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class Probe:
    """Asks for the server's health over and over until the block ends; `worst` is the longest it waited."""

    def __init__(self, port):
        self.port, self.worst, self.stop = port, 0.0, threading.Event()
        self.thread = threading.Thread(target=self.ask)

    def ask(self):
        while not self.stop.wait(0.02):
            began = time.monotonic()
            with contextlib.suppress(OSError):
                ask(self.port, "GET", "/v2/health/live", timeout=30)
            self.worst = max(self.worst, time.monotonic() - began)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


def save_mask(path, classes=21, depth=1):
    """A network of `depth` convolutions that takes pictures of any size and gives `classes` scores a pixel."""
    draw = np.random.default_rng(0)
    channels = [3, *[32] * (depth - 1), classes]
    rest = {"kernel": (3, 3), "stride": (1, 1), "pad": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1}
    ops, weights, tables, x = [], {}, {}, "input"
    for number, (before, after) in enumerate(itertools.pairwise(channels)):
        name, code = f"conv{number}", draw.integers(0, 256, (after, 3, 3, before), np.uint8)
        ops += [
            Op(f"{name}.codes", "quantize", (x,), {"signed": False, "rectify": True, "affine": True}),
            Op(name, "conv", (f"{name}.codes",), {"weight": name, **rest, "signed": False, "affine": True}),
        ]
        weights[name] = Weight(code.shape, None, {bits: code >> (8 - bits) for bits in (2, 8)})
        tables[f"{name}.codes"] = np.abs(draw.standard_normal((2, 2, before))).astype(np.float32)
        tables[name] = draw.standard_normal((2, 2, after)).astype(np.float32)
        x = name
    graph = Graph(
        name="mask",
        input_shape=(None, None, 3),
        profiles=(GraphProfile("2", 2, 2, 80.0), GraphProfile("8", 8, 8, 90.0)),
        planes=nested_planes((2, 8)),
        weights=weights,
        ops=tuple(ops),
        outputs=(x,),
        tables=tables,
        image_scale=(1 / 255,) * 3,
        image_shift=(0.0,) * 3,
        labels=tuple(f"class {i}" for i in range(classes)),
        made_by="tests",
    )
    write(graph, path)
    return path


def save_classifier(path, name="small"):
    """RGB pictures of 8 x 8 in, four classes out, at 2 and 8 bit."""
    draw = np.random.default_rng(0)
    code = draw.integers(0, 256, (4, 8, 8, 3), np.uint8)
    conv = {"kernel": (8, 8), "stride": (1, 1), "pad": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}
    graph = Graph(
        name=name,
        input_shape=(8, 8, 3),
        profiles=(GraphProfile("2", 2, 2, 80.0), GraphProfile("8", 8, 8, 90.0)),
        planes=nested_planes((2, 8)),
        weights={"head": Weight(code.shape, None, {bits: code >> (8 - bits) for bits in (2, 8)})},
        ops=(
            Op("codes", "quantize", ("input",), {"signed": False, "rectify": True, "affine": True}),
            Op("head", "conv", ("codes",), {"weight": "head", **conv, "signed": False, "affine": True}),
            Op("mean", "adaptive_avg_pool", ("head",), {"size": (1, 1)}),
            Op("flat", "flatten", ("mean",), {}),
        ),
        outputs=("flat",),
        tables={"codes": np.ones((2, 2, 3), np.float32), "head": np.ones((2, 2, 4), np.float32)},
        image_scale=(1 / 255,) * 3,
        image_shift=(0.0,) * 3,
        labels=("cat", "dog", "bird", "ship"),
        made_by="tests",
    )
    write(graph, path)
    return path


def resident_mb(pid="self"):
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024
