"""Finding 2: `anyprec bench` with a rival that crashes."""

import json

import pytest
from blackbox import anyprec, save_classifier

ONNX = """
from types import SimpleNamespace as N
def save(model, path): open(path, "wb").write(b"twin")
def load(path):
    shape = N(dim=[N(dim_value=n, dim_param="") for n in (1, 3, 8, 8)])
    given = N(name="input", type=N(tensor_type=N(shape=shape)))
    return N(graph=N(input=[given], initializer=[], node=[], value_info=[], output=[]))
shape_inference = N(infer_shapes=lambda model: model)
"""
ORT = """
class SessionOptions:
    add_free_dimension_override_by_name = add_session_config_entry = lambda *args: None
class InferenceSession:
    def __init__(self, *args, **options): pass
    def run(self, names, inputs): return [0]
"""
QUANTIZATION = """
from types import SimpleNamespace as N
CalibrationDataReader = object
QuantFormat, QuantType = N(QDQ=0), N(QUInt8=0, QInt8=0)
def quantize_static(source, target, reader, **options): open(target, "wb").write(b"int8")
"""
OPENVINO = """
import os, signal
from pathlib import Path
class Tensor:
    def __init__(self, x): self.data = 0
class Model:
    def __init__(self, path): self.int8 = "int8" in path
    def reshape(self, shape): pass
class Request:
    def set_input_tensor(self, tensor): pass
    def infer(self): pass
    def get_output_tensor(self, i): return Tensor(0)
class Compiled:
    def create_infer_request(self): return Request()
class Core:
    def read_model(self, path): return Model(path)
    def compile_model(self, model, *args):
        if model.int8: os.kill(os.getpid(), signal.SIGILL)
        return Compiled()
def save_model(model, path):
    Path(path).write_text("x")
    Path(path).with_suffix(".bin").write_text("x")
"""
NNCF = """
from types import SimpleNamespace as N
Dataset, QuantizationPreset = (lambda images: None), N(MIXED=0)
def quantize(model, *args, **options): return model
"""


@pytest.fixture
def bench(tmp_path):
    """Runs the command beside an ONNX Runtime that is well and an OpenVINO whose int8 dies of SIGILL."""
    packages = tmp_path / "packages"
    (packages / "onnxruntime").mkdir(parents=True)
    for name, text in {
        "onnx": ONNX, "openvino": OPENVINO, "nncf": NNCF, "onnxruntime/__init__": ORT,
        "onnxruntime/quantization": QUANTIZATION,
    }.items():  # fmt: skip
        (packages / f"{name}.py").write_text(text)
    (tmp_path / "float.onnx").touch()
    model = save_classifier(tmp_path / "net.apm")
    fixed = ["bench", model, "--rivals", "onnxruntime,openvino", "--rounds", "2", "--onnx", tmp_path / "float.onnx"]
    return lambda *more: anyprec(*fixed, *more, env={"PYTHONPATH": str(packages)})


def test_a_rival_that_dies_is_named_in_the_table(bench):
    """The rival was left out, and the second best was called the best int8, with exit code 0."""
    done = bench()
    assert "OpenVINO fp32" in done.stdout and "ONNX Runtime int8" in done.stdout
    assert done.returncode != 0
    assert "OpenVINO int8" in done.stdout and "SIGILL" in done.stdout
    assert "OpenVINO int8" in done.stderr.splitlines()[-1] and "SIGILL" in done.stderr.splitlines()[-1]


def test_a_rival_that_dies_is_named_in_json(bench):
    """Its signal was nowhere in the JSON."""
    record = json.loads(bench("--json").stdout)
    assert "SIGILL" in json.dumps(record)
