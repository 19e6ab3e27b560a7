"""The rivals: ONNX Runtime, OpenVINO and PyTorch, given the float twin of a model (twin.py), each at its best.

`prepare` writes the twin and quantizes it with the rival's own tools: static, 8-bit weights per channel, a few made-up
images to calibrate (speed does not depend on them). `open_rival` loads one and gives a function that runs it once. Both
are called in processes of their own (contestant.py). Rivals are imported by name: none is needed by anything else.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anyprec.bench.kernels_used import onednn_kernels, openvino_kernels
from anyprec.export.onnx_writer import BATCH
from anyprec.format.graph import INPUT

TWIN = "twin"  # `prepare`: the float network itself

Runner = Callable[[], Any]


@dataclass(frozen=True)
class OpenedRival:
    """`run` runs the input once and gives the first output; `kernels` says what does its products, where it tells."""

    run: Runner
    kernels: Callable[[], str | None] = lambda: None  # asked after memory was measured: the answer takes some


# rival -> what it needs to be installed besides itself. The twin is written, and PyTorch reads it, by onnx.
NEEDS = {"onnxruntime": ("onnxruntime", "onnx"), "openvino": ("openvino", "onnx"), "torch": ("torch", "onnx")}
TITLES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "torch": "PyTorch"}
VARIANTS = {"onnxruntime": ("fp32", "int8"), "openvino": ("fp32", "int8"), "torch": ("fp32",)}
CALIBRATION = 4  # images

# What holds a rival to an instruction set of ours. ONNX Runtime asks the CPU itself and has no such switch.
ISA_SWITCHES: dict[str, dict[str, dict[str, str]]] = {
    "avx2": {
        "openvino": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        "torch": {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    },
    "avx512vnni": {
        "openvino": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
        "torch": {
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
            "ATEN_CPU_CAPABILITY": "avx512",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1",  # with VNNI
        },
    },
}


def missing(rival: str) -> list[str]:
    """The packages this rival still needs."""
    return [package for package in NEEDS[rival] if not has(package)]


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def versions(rivals: list[str]) -> dict[str, str]:
    found = {}
    for package in [*rivals, *(["nncf"] if "openvino" in rivals else [])]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


# --- Files -----------------------------------------------------------------------------------------------------------


def int8_makers(rivals: Sequence[str]) -> dict[str, str]:
    """Rival -> whose tools make its int8. OpenVINO reads that of ONNX Runtime too, where NNCF is not installed."""
    makers = {}
    for rival in rivals:
        if "int8" in VARIANTS[rival]:
            makers[rival] = rival if rival != "openvino" or has("nncf") or not has("onnxruntime") else "onnxruntime"
    return makers


def prepare(
    what: str, model: str, folder: str, size: tuple[int, int], onnx: str | None = None, vocabulary: int | None = None
) -> None:
    """Writes one file to `folder`, unless it is there: the twin of `model` (or the float network `onnx`), or its int8
    form, made by the tools of `what`.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    float_model = place / "twin.onnx"
    if what == TWIN:
        if not float_model.exists():
            new = place / "new.onnx"
            importlib.import_module("onnx").save(
                given_network(onnx, size, vocabulary) if onnx else twin_of(model, size), new
            )
            os.replace(new, float_model)  # so that what has the name is complete
        return
    name, quantize = INT8[what]
    if not (place / name).exists():
        channels = input_shape(float_model)[0]
        images = [random_input(1, channels, size, vocabulary, seed) for seed in range(CALIBRATION)]
        quantize(float_model, place / f"new-{name}", images)
        for made in sorted(place.glob(f"new-{Path(name).stem}.*")):  # the .bin of OpenVINO before its .xml
            os.replace(made, place / made.name.removeprefix("new-"))


def twin_of(model: str, size: tuple[int, int]) -> Any:
    from anyprec.bench.twin import graph_to_onnx
    from anyprec.format.file import read

    return graph_to_onnx(read(model), size)


def given_network(path: str, size: tuple[int, int], vocabulary: int | None = None) -> Any:
    """A user's ONNX model, its one input named and shaped as a twin's, or (N, length) where it takes tokens."""
    onnx = importlib.import_module("onnx")
    model = onnx.load(path)
    constants = {c.name for c in model.graph.initializer}
    (given,) = (value for value in model.graph.input if value.name not in constants)
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == given.name:
                node.input[i] = INPUT
    given.name = INPUT
    dims = given.type.tensor_type.shape.dim
    dims[0].dim_param = BATCH
    if vocabulary is None:
        dims[2].dim_value, dims[3].dim_value = size
    else:
        dims[1].dim_value = size[0]
    del model.graph.value_info[:]  # sizes for the batch it was exported with
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model)


def quantize_onnxruntime(source: Path, target: Path, images: list[np.ndarray]) -> None:
    quantization = importlib.import_module("onnxruntime.quantization")

    class Images(quantization.CalibrationDataReader):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.rest = iter(images)

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.rest, None)
            return None if image is None else {INPUT: image}

    quantization.quantize_static(
        str(source),
        str(target),
        Images(),
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        per_channel=True,
    )


def quantize_openvino(source: Path, target: Path, images: list[np.ndarray]) -> None:
    ov, nncf = importlib.import_module("openvino"), importlib.import_module("nncf")
    model = ov.Core().read_model(str(source))
    model.reshape([1, *input_shape(source)])
    # MIXED lets activations be unsigned and uneven: a little faster than the default where both differ.
    preset, left_out = nncf.QuantizationPreset.MIXED, list[str]()
    while True:
        try:
            scope = nncf.IgnoredScope(names=left_out) if left_out else None
            done = nncf.quantize(
                model, nncf.Dataset(images), preset=preset, subset_size=len(images), ignored_scope=scope
            )
            break
        except KeyError as error:
            # "188 /bert/embeddings/token_type_embeddings/Gather": a layer of constants, which has no statistics. It is
            # no work at run time either, so it stays float.
            name = str(error.args[0]).partition(" ")[2]
            if not name or name in left_out:
                raise
            left_out.append(name)
    ov.save_model(done, str(target))


# rival -> the file of its int8, and what makes it
INT8: dict[str, tuple[str, Callable[[Path, Path, list[np.ndarray]], None]]] = {
    "onnxruntime": ("onnxruntime-int8.onnx", quantize_onnxruntime),
    "openvino": ("openvino-int8.xml", quantize_openvino),
}


def model_file(folder: str, rival: str, variant: str) -> Path:
    if variant == "fp32":
        return Path(folder) / "twin.onnx"
    own = Path(folder) / "openvino-int8.xml"
    return own if rival == "openvino" and own.exists() else Path(folder) / "onnxruntime-int8.onnx"


def disk_bytes(folder: str, rival: str, variant: str) -> int:
    path = model_file(folder, rival, variant)
    weights = path.with_suffix(".bin")
    return path.stat().st_size + (weights.stat().st_size if path.suffix == ".xml" else 0)


def input_shape(path: Path) -> list[int]:
    """C, H, W of the twin."""
    model = importlib.import_module("onnx").load(str(path))
    return [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim[1:]]


def random_input(
    batch: int, channels: int, size: tuple[int, int], vocabulary: int | None = None, seed: int = 0
) -> np.ndarray:
    """Images (N, C, H, W), or tokens (N, H) below `vocabulary`."""
    if vocabulary is None:
        return random_images(batch, channels, size, seed)
    return np.random.default_rng(seed).integers(0, vocabulary, (batch, size[0]), dtype=np.int64)


def random_images(batch: int, channels: int, size: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, channels, *size)).astype(np.float32)


# --- Running ---------------------------------------------------------------------------------------------------------


def open_rival(rival: str, variant: str, folder: str, x: np.ndarray, threads: int) -> OpenedRival:
    """x: (N, C, H, W) float32, or tokens."""
    return OPEN[rival](model_file(folder, rival, variant), x, threads)


def open_onnxruntime(path: Path, x: np.ndarray, threads: int) -> OpenedRival:
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_free_dimension_override_by_name(BATCH, len(x))
    # Its threads spin during a run, as always, but not after it: that would slow down whoever is next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return OpenedRival(lambda: session.run(None, {INPUT: x})[0])


def open_openvino(path: Path, x: np.ndarray, threads: int) -> OpenedRival:
    ov = importlib.import_module("openvino")
    core = ov.Core()
    model = core.read_model(str(path))
    model.reshape(list(x.shape))
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # no bfloat16 behind the back of "fp32"
        "ENABLE_CPU_PINNING": False,  # nobody else here is tied to a core
    }
    compiled = core.compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    request.set_input_tensor(ov.Tensor(x))

    def run() -> Any:
        request.infer()
        return request.get_output_tensor(0).data

    return OpenedRival(run, lambda: openvino_kernels(compiled))


def open_torch(path: Path, x: np.ndarray, threads: int) -> OpenedRival:
    """The twin's nodes as torch functions, eager, channels_last."""
    torch, onnx = importlib.import_module("torch"), importlib.import_module("onnx")
    from anyprec.bench.rival_torch import functions

    torch.set_num_threads(threads)
    model = onnx.load(str(path)).graph
    values = {c.name: torch.from_numpy(onnx.numpy_helper.to_array(c).copy()) for c in model.initializer}
    for name, value in values.items():
        if value.ndim == 4:
            values[name] = value.contiguous(memory_format=torch.channels_last)
    steps = functions(torch, model.node, values)
    image = torch.from_numpy(x).contiguous(memory_format=torch.channels_last)
    output = model.output[0].name

    def run() -> Any:
        with torch.inference_mode():
            made = {**values, INPUT: image}
            for target, inputs, function in steps:
                made[target] = function(*(made[name] for name in inputs))
            return made[output].numpy()

    return OpenedRival(run, lambda: onednn_kernels(run))


OPEN: dict[str, Callable[[Path, np.ndarray, int], OpenedRival]] = {
    "onnxruntime": open_onnxruntime,
    "openvino": open_openvino,
    "torch": open_torch,
}
