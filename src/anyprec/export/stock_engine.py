"""ONNX models in ONNX Runtime or OpenVINO, in a process of its own: `python -m anyprec.export.stock_engine`.

run_elsewhere is what others call. On some CPUs an engine's int8 kernels end the process: only the child dies, and
EngineFailed says of what. Files go in by name, arrays as .npy beside them. Used by check.py and bench/export_parity.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anyprec.errors import AnyprecError
from anyprec.format.graph import INPUT

TITLES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
BATCH = 100  # images a run
TIMEOUT_S = 3600.0

Run = Callable[[dict[str, np.ndarray]], list[np.ndarray]]  # a batch, by input -> outputs


class EngineFailed(AnyprecError):
    """An engine that is not installed, refused the model or died."""


def is_installed(engine: str) -> bool:
    return importlib.util.find_spec(engine) is not None


def run_elsewhere(
    engine: str,
    models: Sequence[str | Path],
    x: np.ndarray | Mapping[str, np.ndarray],
    threads: int = 1,
    batch: int = BATCH,
) -> list[list[np.ndarray]]:
    """The outputs of each model for all of x: (N, C, H, W) float32, or every input by name."""
    if not is_installed(engine):
        raise EngineFailed(f"{TITLES[engine]} is not installed: pip install {engine}")
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {INPUT: x} if isinstance(x, np.ndarray) else dict(x)
        np.savez(Path(folder) / "inputs.npz", **given)
        order = {
            "engine": engine, "folder": folder, "threads": threads, "batch": batch,
            "models": [os.path.abspath(model) for model in models],
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "anyprec.export.stock_engine"],
            input=json.dumps(order), capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            raise EngineFailed(f"{TITLES[engine]} {reason(done.returncode, done.stderr)}")
        counts = json.loads((Path(folder) / "counts.json").read_text(encoding="utf-8"))
        return [[np.load(Path(folder) / f"{i}.{j}.npy") for j in range(count)] for i, count in enumerate(counts)]


def reason(code: int, said: str) -> str:
    if code < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"ended with {names.get(-code, f'signal {-code}')}: it has no working kernels for this CPU"
    last = (said.strip().splitlines() or ["no reason given"])[-1]
    return f"failed: {last}"


def main() -> None:
    order = json.loads(sys.stdin.read())
    folder = Path(order["folder"])
    size = order["batch"]
    with np.load(folder / "inputs.npz") as file:
        given = dict(file)
    total = len(next(iter(given.values())))
    counts = []
    for i, model in enumerate(order["models"]):
        run = OPEN[order["engine"]](model, order["threads"])
        parts = [run({name: x[at : at + size] for name, x in given.items()}) for at in range(0, total, size)]
        outputs = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        counts.append(len(outputs))
        for j, output in enumerate(outputs):
            np.save(folder / f"{i}.{j}.npy", output)
    (folder / "counts.json").write_text(json.dumps(counts), encoding="utf-8")


def open_onnxruntime(model: str, threads: int) -> Run:
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda given: list(session.run(None, given))


def open_openvino(model: str, threads: int) -> Run:
    ov = importlib.import_module("openvino")
    core = ov.Core()
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled: Any = core.compile_model(core.read_model(model), "CPU", settings)
    return lambda given: [np.array(value) for value in compiled(given).values()]


OPEN: dict[str, Callable[[str, int], Run]] = {"onnxruntime": open_onnxruntime, "openvino": open_openvino}

if __name__ == "__main__":
    main()
