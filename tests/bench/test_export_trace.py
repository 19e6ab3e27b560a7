"""bench/export_trace.py: the first code that moved is found, with its distance from the border."""

import export_trace
import numpy as np
import pytest
import torch
from torch import nn

import anyprec
from anyprec.format.file import read


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip
    x = torch.randn(4, 3, 10, 10)
    path = tmp_path_factory.mktemp("trace") / "net.apm"
    anyprec.pack(anyprec.convert(net.eval(), (4,), example=x), path, example=x)
    return path


@pytest.fixture(scope="module")
def graph(model):
    return read(model)


def test_a_moved_code_is_found(graph):
    x = np.random.default_rng(0).standard_normal((3, 3, 10, 10), dtype=np.float32)
    run = export_trace.TracedRun(graph, np.ascontiguousarray(x.transpose(0, 2, 3, 1)), "4")
    for op in graph.ops:
        run.step(op)
    names = list(run.before)
    assert len(names) == 2
    outputs = [run.values[graph.outputs[0]].reshape(3, -1), *(run.values[n].transpose(0, 3, 1, 2) for n in names)]
    same = export_trace.trace(graph, "4", x, outputs, names)
    assert same["moved codes"] == same["images with moved codes"] == same["other answers"] == 0
    assert same["codes"] == sum(run.values[name].size for name in names)

    moved = [output.copy() for output in outputs]
    moved[1][2, 5, 1, 0] ^= 1  # image 2, then channel, row, column
    moved[2][2] ^= 1  # what comes after the first does not count
    found = export_trace.trace(graph, "4", x, moved, names)
    before = float(run.before[names[0]][2, 1, 0, 5])
    assert found["first moved in"] == f"{names[0]}:1" and found["images with moved codes"] == 1
    distance = abs(before - np.floor(before) - 0.5)
    assert float(found["farthest from a border, steps"]) == pytest.approx(distance, abs=0.06)


def test_exported_codes_become_outputs(graph, model, tmp_path):
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "net.onnx"
    anyprec.export_onnx(model, path, 4, check=False)
    names = export_trace.show_codes(path)
    quantizers = [op.name for op in graph.ops if op.kind == "quantize"]
    assert names == quantizers
    assert len(onnx.load(path).graph.output) == 1 + len(names)
