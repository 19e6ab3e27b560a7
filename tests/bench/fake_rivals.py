"""Packages onnx, onnxruntime, openvino and nncf that do nothing, for tests of `anyprec bench`: no rival is installed.

ONNX Runtime is well. OpenVINO's int8 does what the environment variable FATE says, as KIND@PLACE: KIND is a signal,
hang, exit, garbage or error; PLACE is file, start or race.
"""

from pathlib import Path

FAKE_ONNX = """
from types import SimpleNamespace as N
def save(model, path): open(path, "wb").write(b"twin")
def load(path):
    dims = [N(dim_value=n, dim_param="") for n in INPUT_SHAPE]
    given = N(name="input", type=N(tensor_type=N(shape=N(dim=dims, ClearField=None))))
    return N(graph=N(input=[given], initializer=[], node=[], value_info=[], output=[]))
shape_inference = N(infer_shapes=lambda model: model)
"""
FAKE_ORT = """
class SessionOptions:
    add_free_dimension_override_by_name = add_session_config_entry = lambda *args: None
class InferenceSession:
    def __init__(self, *args, **options): pass
    def run(self, names, inputs): return [0]
"""
FAKE_QUANTIZATION = """
from types import SimpleNamespace as N
CalibrationDataReader = object
QuantFormat, QuantType = N(QDQ=0), N(QUInt8=0, QInt8=0)
def quantize_static(source, target, reader, **options): open(target, "wb").write(b"int8")
"""
FAKE_OPENVINO = """
import os, signal, sys, time
from pathlib import Path
PreviousRuns = []
def fate(where):
    kind, place = os.environ["FATE"].split("@")
    if place != where: return
    if kind.startswith("SIG"):
        print("the last words of", where, file=sys.stderr, flush=True)
        os.kill(os.getpid(), getattr(signal, kind))
    if kind == "hang": time.sleep(600)
    if kind == "exit": os._exit(3)
    if kind == "garbage":
        for fd in map(int, os.listdir("/proc/self/fd")):  # the answers' pipe is among them
            try: os.write(fd, b"\\xff no JSON\\n") if fd > 2 else None
            except OSError: pass
        time.sleep(600)
    raise RuntimeError("could not create a primitive\\nin detail")
class Tensor:
    def __init__(self, x): self.data = 0
class Model:
    def reshape(self, shape): pass
    def __init__(self, path): self.int8 = "int8" in path
class Request:
    def __init__(self, model): self.model, self.runs = model, 0
    def set_input_tensor(self, tensor): pass
    def infer(self):
        self.runs += 1
        if self.model.int8 and self.runs > 6: fate("race")
    def get_output_tensor(self, i): return Tensor(0)
class Node:
    def __init__(self, kind, kernel): self.facts = {"layerType": kind, "primitiveType": kernel}
    def get_rt_info(self): return self.facts
class Runtime:
    def get_ordered_ops(self):
        return [Node("Const", "unknown_I8"), *[Node("Convolution", "jit_avx2_I8")] * 3, Node("MatMul", "jit_gemm_I8")]
class Compiled:
    def __init__(self, model): self.model = model
    def create_infer_request(self): return Request(self.model)
    def get_runtime_model(self): return Runtime()
class Core:
    def read_model(self, path): return Model(path)
    def compile_model(self, model, *args):
        if model.int8: fate("start")
        return Compiled(model)
def save_model(model, path):
    fate("file")
    Path(path).write_text("x"); Path(path).with_suffix(".bin").write_text("x")
"""
FAKE_NNCF = """
from types import SimpleNamespace as N
Dataset, QuantizationPreset = (lambda images: None), N(MIXED=0)
class IgnoredScope:
    def __init__(self, names): self.names = names
def quantize(model, *args, ignored_scope=None, **options):
    # What NNCF says of a layer of constants.
    if ignored_scope is None: raise KeyError("188 /token types/Gather")
    if ignored_scope.names != ["/token types/Gather"]: raise RuntimeError(ignored_scope.names)
    return model
"""


def write_packages(folder: Path, input_shape: tuple[int, ...]) -> Path:
    """The packages in `folder`, to be put in PYTHONPATH; onnx says that every file has an input of this shape."""
    files = {
        "onnx": f"INPUT_SHAPE = {input_shape}\n{FAKE_ONNX}",
        "onnxruntime/__init__": FAKE_ORT,
        "onnxruntime/quantization": FAKE_QUANTIZATION,
        "openvino/__init__": FAKE_OPENVINO,
        "nncf": FAKE_NNCF,
    }
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
