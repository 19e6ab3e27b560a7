"""`import_onnx`: a float ONNX model in, an nn.Module out that answers as the model does: both are run to see it.

`describe` and `rebuild` are for checkpoints: the graph without its weights as bytes, the weights in the state dict, and
no code. Called by users, cli/import_.py and training/checkpoint.py.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyprec.errors import CheckpointError, MissingExtra, UnsupportedOperation, VerificationFailed
from anyprec.onnx_import.network import NetworkBuilder, OnnxNetwork, example
from anyprec.onnx_import.operators import OPERATORS

NET = "onnx"  # what checkpoints call such a network
TOLERANCE = 1e-3  # largest difference over the largest output; sums in another order give about 1e-6
LEAST_STRIPPED = 64  # numbers: smaller constants stay in the graph, which may need them to be built
KINDS = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool}  # TensorProto.DataType


@dataclass(frozen=True)
class ImportReport:
    """What was read, and how it compares: `difference` is the largest of any output over the largest output."""

    network: str
    opset: int
    nodes: int
    layers: int  # with weights
    parameters: int
    inputs: tuple[tuple[int, ...], ...]  # without the batch
    difference: float | None  # None: not compared
    compared_with: str


def import_onnx(path: str | Path, *, input_shape: Sequence[int] | None = None, check: bool = True) -> OnnxNetwork:
    """A float ONNX model as an nn.Module in eval mode, for `convert`, training and `pack`; `.imported` is its report.

    input_shape: sizes of the first input without the batch, where the model leaves them free.
    check: runs the model (in ONNX Runtime, or ONNX's own reference) and the module on random inputs, and refuses a
        module that answers otherwise.

    Layers are those of torch.nn, named as in the graph. The batch is free even where the model fixed it.
    """
    onnx = onnx_package()
    model = read_model(onnx, path)
    builder = make_builder(onnx, model, input_shape)
    net = builder.build(OPERATORS)
    net.onnx_graph = torch.frombuffer(bytearray(stripped(onnx, model, builder.used)), dtype=torch.uint8)
    difference, engine = compare(onnx, model, net, builder.fixed_batch) if check else (None, "")
    if difference is not None and not difference <= TOLERANCE:
        raise VerificationFailed(
            f"{path}: the module differs from the model by {difference:.1e} of its largest output; please report it"
        )
    layers = [m for m in net.modules() if any(p.dim() > 1 for p in m.parameters(recurse=False)) and m is not net]
    net.imported = ImportReport(
        model.graph.name or Path(path).stem, builder.opset, len(model.graph.node), len(layers),
        sum(p.numel() for p in net.parameters()), net.input_shapes, difference, engine,
    )  # fmt: skip
    return net


def onnx_package() -> Any:
    try:
        return importlib.import_module("onnx")
    except ModuleNotFoundError as error:
        raise MissingExtra("importing an ONNX model needs onnx: pip install 'anyprec[onnx]'") from error


def read_model(onnx: Any, path: str | Path) -> Any:
    try:
        model = onnx.load(str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # whatever protobuf raises on damaged bytes
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is not a valid ONNX model: {first}") from error
    if not model.graph.node or not model.graph.output:
        raise CheckpointError(f"{path} is not a valid ONNX model: it has no operators, or no output")
    return model


def free_input_shape(path: str | Path) -> tuple[int | None, ...]:
    """Sizes of a model's first input without the batch; None where the model leaves one free."""
    model = read_model(onnx_package(), path)
    constants = {one.name for one in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in constants:
            return tuple(dim.dim_value or None for dim in value.type.tensor_type.shape.dim)[1:]
    raise UnsupportedOperation("the model has no input")


def make_builder(onnx: Any, model: Any, input_shape: Sequence[int] | None) -> NetworkBuilder:
    constants = {one.name for one in model.graph.initializer}
    inputs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    fixed = False
    for value in model.graph.input:
        if value.name in constants:
            continue
        kind, dims = value.type.tensor_type.elem_type, value.type.tensor_type.shape.dim
        if kind not in KINDS:
            name = onnx.TensorProto.DataType.Name(kind)
            raise UnsupportedOperation(f"input {value.name!r} is {name}; float, int32, int64 and bool are supported")
        sizes = [dim.dim_value or None for dim in dims]
        if input_shape is not None and not inputs:
            sizes = [sizes[0] if sizes else None, *input_shape]
        if not sizes or None in sizes[1:]:
            raise UnsupportedOperation(
                f"input {value.name!r} has free sizes {sizes[1:]}; give them: input_shape=(3, 64, 64), --size 3,64,64"
            )
        fixed |= sizes[0] is not None
        inputs[value.name] = (tuple(size for size in sizes[1:] if size is not None), KINDS[kind])
    if not inputs:
        raise UnsupportedOperation("the model has no input")
    return NetworkBuilder(onnx, model, inputs, fixed)


def compare(onnx: Any, model: Any, net: OnnxNetwork, fixed_batch: bool) -> tuple[float, str]:
    """The largest difference over the largest output, and who computed the other side."""
    rng = torch.Generator().manual_seed(1)
    kinds = [KINDS[v.type.tensor_type.elem_type] for v in model.graph.input if v.name in net.input_names]
    count = 1 if fixed_batch else 2
    fed = [example(s, k, count, rng) for s, k in zip(net.input_shapes, kinds, strict=True)]
    feeds = {name: tensor.numpy() for name, tensor in zip(net.input_names, fed, strict=True)}
    engine = "ONNX Runtime" if importlib.util.find_spec("onnxruntime") is not None else "the reference of ONNX"
    try:
        theirs = RUN[engine](model, feeds)
    except Exception as error:  # an engine's own; the module was built, so it is the model that is odd
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{engine} refuses the model: {first}") from error
    with torch.no_grad():
        made = net(*fed)
    worst = 0.0
    for ours, other in zip(made if isinstance(made, tuple) else (made,), theirs, strict=True):
        if tuple(ours.shape) != np.shape(other):
            raise VerificationFailed(
                f"the module gives {tuple(ours.shape)}, the model {np.shape(other)}; please report it"
            )
        if np.size(other):
            difference = np.abs(ours.numpy().astype(np.float64) - other).max() / max(float(np.abs(other).max()), 1e-12)
            worst = max(worst, float(np.nan_to_num(difference, nan=np.inf)))
    return worst, engine


def run_onnxruntime(model: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def run_reference(model: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(importlib.import_module("onnx.reference").ReferenceEvaluator(model).run(None, feeds))


RUN = {"ONNX Runtime": run_onnxruntime, "the reference of ONNX": run_reference}


def stripped(onnx: Any, model: Any, used: set[str]) -> bytes:
    """The model without the numbers of weights that are parameters of the module."""
    kept = onnx.ModelProto()
    kept.CopyFrom(model)
    for one in kept.graph.initializer:
        if one.name in used and one.data_type == onnx.TensorProto.FLOAT and np.prod(one.dims) > LEAST_STRIPPED:
            one.ClearField("raw_data")
            one.ClearField("float_data")
    return bytes(kept.SerializeToString())


def describe(net: OnnxNetwork) -> dict[str, Any]:
    """What `rebuild` needs, for a checkpoint."""
    return {"graph": net.onnx_graph, "input_shape": list(net.input_shapes[0])}


def rebuild(options: Mapping[str, Any]) -> nn.Module:
    """The network that `describe` told of, with weights of 0: they come with the state dict."""
    onnx, graph = onnx_package(), options["graph"]
    if not isinstance(graph, Tensor) or graph.dtype != torch.uint8:
        raise CheckpointError("its graph is no ONNX model")
    model = onnx.load_model_from_string(graph.numpy().tobytes())
    net = make_builder(onnx, model, options["input_shape"]).build(OPERATORS)
    net.onnx_graph = graph
    return net
