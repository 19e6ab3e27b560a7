"""The float twin of a Graph: the same network as a plain float ONNX model, for tools that know nothing of anyprec.

graph_to_onnx is called by rivals.py, which quantizes the twin with each rival's own tools. Its weights are those of the
float profile where the file keeps it, else the dequantized codes of the widest integer profile. Norms and steps are
folded into the convolution before or after them wherever possible, as a careful user of those tools would do it.
Codes become floats: rounding and the upper end of the range are left to the rival's own int8.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyprec.bench.rivals import BATCH
from anyprec.format.graph import INPUT, Graph, Op
from anyprec.format.shapes import Shape, value_shape
from anyprec.widths import FLOAT

OPSET = 18  # the first whose Resize can leave the batch alone


@dataclass(frozen=True)
class Value:
    """A value of the graph in the ONNX model. What ARITHMETIC.md calls `a` (code, or 2 code - n) is `unit` times it."""

    name: str
    shape: Shape  # of the graph: h, w, c
    rank: int = 4  # 4: (N, C, H, W); 2: (N, C), after a fully connected layer
    unit: float = 1.0


def twin_profile(graph: Graph) -> str:
    """The profile the twin is made from: float if the file keeps it, else the widest uniform one."""
    uniform = [p for p in graph.profiles if isinstance(p.weights, int) and isinstance(p.acts, int)]
    return max(uniform or graph.profiles[-1:], key=lambda p: p.weights if isinstance(p.weights, int) else 0).name


def graph_to_onnx(graph: Graph, size: tuple[int, int], profile: str | None = None) -> Any:
    """An onnx.ModelProto with input (N, C, H, W) float32 and the graph's outputs under their names."""
    return Twin(graph, size, profile or twin_profile(graph)).model()


class Twin:
    def __init__(self, graph: Graph, size: tuple[int, int], profile: str) -> None:
        self.onnx = importlib.import_module("onnx")
        self.graph, self.row = graph, graph.profile(profile)
        self.profile = graph.profiles[self.row]
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.folded: set[str] = set()  # affine and quantize ops whose numbers went into the convolution before them
        self.values = {INPUT: Value(INPUT, Shape(*size, graph.input_shape[2]))}
        for op in graph.ops:
            self.values[op.name] = EMIT[op.kind](self, op)

    def model(self) -> Any:
        make, floats = self.onnx.helper, self.onnx.TensorProto.FLOAT
        shape = self.values[INPUT].shape
        inputs = [make.make_tensor_value_info(INPUT, floats, [BATCH, shape.c, shape.h, shape.w])]
        outputs = []
        for name in self.graph.outputs:
            value = self.values[name]
            self.nodes.append(make.make_node("Identity", [value.name], [f"output.{name}"]))
            sizes = [value.shape.c, value.shape.h, value.shape.w][: value.rank - 1]
            outputs.append(make.make_tensor_value_info(f"output.{name}", floats, [BATCH, *sizes]))
        body = make.make_graph(self.nodes, self.graph.name, inputs, outputs, self.constants)
        model = make.make_model(body, opset_imports=[make.make_opsetid("", OPSET)], ir_version=8)
        return self.onnx.shape_inference.infer_shapes(model)

    # --- Pieces ------------------------------------------------------------------------------------------------------

    def shape(self, op: Op) -> Shape:
        at = dict(op.attributes)
        record = {"name": op.name, "op": op.kind, **at}
        weight = {"shape": self.graph.weights[at["weight"]].shape} if "weight" in at else None
        for key in ("kernel", "stride", "pad", "dilation", "size", "scale"):
            if record.get(key) is not None:
                record[key] = list(record[key])
        like = self.values[at["like"]].shape if at.get("like") else None
        return value_shape(record, [self.values[name].shape for name in op.inputs], weight, like)

    def constant(self, name: str, array: np.ndarray) -> str:
        kind = np.int64 if np.issubdtype(array.dtype, np.integer) else np.float32
        self.constants.append(self.onnx.numpy_helper.from_array(np.ascontiguousarray(array, kind), name))
        return name

    def node(self, kind: str, op: Op, inputs: list[str], tag: str = "", **attributes: Any) -> str:
        made = f"{op.name}.{tag}" if tag else op.name
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [made], name=f"{kind}:{made}", **attributes))
        return made

    def table(self, op: Op) -> tuple[np.ndarray, np.ndarray]:
        first, second = self.graph.tables[op.name][self.row].astype(np.float64)
        return first, second

    def step(self, op: Op) -> tuple[np.ndarray, np.ndarray]:
        """(s, t) so that what follows reads s x + t: of an affine, or of a quantize without clip and rounding."""
        s, t = self.table(op) if op.kind == "affine" or op.attributes["affine"] else (np.array(1.0), np.array(0.0))
        if op.kind == "quantize" and op.attributes["signed"] and self.profile.act_bits(op.name, op.bits) != FLOAT:
            return np.multiply(2, s), 2 * t - (2 ** self.profile.act_bits(op.name, op.bits) - 1)
        return s, t

    def weight(self, name: str) -> np.ndarray:  # (out, kh, kw, in) float64
        weight = self.graph.weights[name]
        bits = FLOAT if weight.is_float else self.profile.weight_bits(name, weight.bits)
        if bits == FLOAT:
            assert weight.values is not None
            return weight.values.astype(np.float64)
        assert weight.codes is not None
        made: np.ndarray = 2.0 * weight.codes[bits] + 1 - 2**bits
        return made

    def only_reader(self, op: Op) -> Op | None:
        readers = [other for other in self.graph.ops if op.name in (*other.inputs, other.attributes.get("like"))]
        return readers[0] if len(readers) == 1 and op.name not in self.graph.outputs else None

    def image(self, op: Op, value: Value) -> str:
        """The value's name with rank 4."""
        if value.rank == 4:
            return value.name
        sizes = self.constant(f"{op.name}.sizes.{value.name}", np.array([-1, value.shape.c, 1, 1]))
        return self.node("Reshape", op, [value.name, sizes], f"image.{value.name}")

    # --- One method an op --------------------------------------------------------------------------------------------

    def conv(self, op: Op) -> Value:
        at, x, shape = op.attributes, self.values[op.inputs[0]], self.shape(op)
        weight = self.weight(at["weight"]) * x.unit
        scale, shift = self.table(op) if at["affine"] else (np.ones(len(weight)), np.zeros(len(weight)))
        last = op
        while last.kind != "quantize" and (after := self.only_reader(last)) and after.kind in ("affine", "quantize"):
            s, t = self.step(after)
            scale, shift, last = scale * s, shift * s + t, after
            self.folded.add(after.name)
        weight = weight * scale[:, None, None, None]
        bias = self.constant(f"{op.name}.bias", shift)
        if op.kind == "linear" and (shape.h, shape.w) == (1, 1):
            flat = x.name if x.rank == 2 else self.node("Flatten", op, [x.name], "flat", axis=1)
            matrix = self.constant(f"{op.name}.weight", weight[:, 0, 0, :])
            return Value(self.node("Gemm", op, [flat, matrix, bias], transB=1), shape, rank=2)
        kernel = self.constant(f"{op.name}.weight", weight.transpose(0, 3, 1, 2))
        return Value(
            self.node(
                "Conv",
                op,
                [self.image(op, x), kernel, bias],
                kernel_shape=list(weight.shape[1:3]),
                strides=list(at.get("stride", (1, 1))),
                pads=list(at.get("pad", (0, 0, 0, 0))),
                dilations=list(at.get("dilation", (1, 1))),
                group=at.get("groups", 1),
            ),
            shape,
        )

    def scale_shift(self, op: Op, x: Value, s: np.ndarray, t: np.ndarray) -> Value:
        """A norm that could not be folded: one number a channel, as rivals' own importers write it."""
        channels = (x.shape.c or 0,)
        numbers = {"scale": s, "shift": t, "mean": np.array(0.0), "var": np.array(1.0)}
        names = [self.constant(f"{op.name}.{k}", np.broadcast_to(v, channels)) for k, v in numbers.items()]
        return Value(self.node("BatchNormalization", op, [x.name, *names], "norm", epsilon=0.0), x.shape, x.rank)

    def affine(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        return x if op.name in self.folded else self.scale_shift(op, x, *self.step(op))

    def quantize(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        if op.name not in self.folded:
            s, t = self.step(op)
            if np.all(s == np.ravel(s)[0]) and np.ravel(s)[0] > 0 and np.allclose(t, 0, atol=1e-3):
                x = Value(x.name, x.shape, x.rank, float(np.ravel(s)[0]))  # relu(s x) = s relu(x): s goes to the reader
            else:
                x = self.scale_shift(op, x, s, t)
        if not op.attributes["rectify"]:
            return x
        return Value(self.node("Relu", op, [x.name]), x.shape, x.rank, x.unit)

    def dequantize(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        source = next(o for o in self.graph.ops if o.name == self.quantizer(op.inputs[0]))
        bits = self.profile.act_bits(source.name, source.bits)
        s, t = (np.array(1.0), np.array(0.0)) if bits == FLOAT else self.table(op)
        s = s * x.unit
        if source.attributes["signed"] and bits != FLOAT:  # a = 2 code - n, and the table is for code
            s, t = s / 2, t + s / x.unit * (2**bits - 1) / 2
        name = x.name
        if s != 1:
            name = self.node("Mul", op, [name, self.constant(f"{op.name}.scale", np.array(s))], "scaled")
        if t != 0:
            name = self.node("Add", op, [name, self.constant(f"{op.name}.shift", np.array(t))])
        return Value(name, x.shape, x.rank)

    def quantizer(self, value: str) -> str:
        """The quantize op whose codes arrive in `value`, through pools and flattens."""
        by_name = {op.name: op for op in self.graph.ops}
        while by_name[value].kind != "quantize":
            value = by_name[value].inputs[0]
        return value

    def clip(self, op: Op) -> Value:
        x, (low, high) = self.values[op.inputs[0]], self.table(op)
        if low == 0 and high == np.inf:
            return Value(self.node("Relu", op, [x.name]), x.shape, x.rank)
        largest = np.finfo(np.float32).max
        ends = [
            self.constant(f"{op.name}.{end}", np.clip(value, -largest, largest))
            for end, value in (("low", low), ("high", high))
        ]
        return Value(self.node("Clip", op, [x.name, *ends]), x.shape, x.rank)

    def join(self, op: Op) -> Value:
        read = [self.values[name] for name in op.inputs]
        rank = max(value.rank for value in read)
        names = [value.name if value.rank == rank else self.image(op, value) for value in read]
        made = self.node("Add", op, names) if op.kind == "add" else self.node("Concat", op, names, axis=1)
        return Value(made, self.shape(op), rank)

    def pool(self, op: Op) -> Value:
        at, x = op.attributes, self.values[op.inputs[0]]
        window: dict[str, Any] = {
            "kernel_shape": list(at["kernel"]),
            "strides": list(at["stride"]),
            "pads": list(at["pad"]),
        }
        if op.kind == "max_pool":
            kind, window["dilations"] = "MaxPool", list(at["dilation"])
        else:
            kind, window["count_include_pad"] = "AveragePool", int(at["count_pad"])
        made = self.node(kind, op, [self.image(op, x)], ceil_mode=int(at["ceil"]), **window)
        return Value(made, self.shape(op), unit=x.unit)

    def adaptive_avg_pool(self, op: Op) -> Value:
        x, shape, out = self.values[op.inputs[0]], self.values[op.inputs[0]].shape, tuple(op.attributes["size"])
        name = self.image(op, x)
        if out == (1, 1):
            return Value(self.node("GlobalAveragePool", op, [name]), self.shape(op))
        rows, columns = window_means(shape.h, out[0]), window_means(shape.w, out[1])
        across = self.node("MatMul", op, [name, self.constant(f"{op.name}.columns", columns.T)], "across")
        return Value(self.node("MatMul", op, [self.constant(f"{op.name}.rows", rows), across]), self.shape(op))

    def resize(self, op: Op) -> Value:
        at, x, shape = op.attributes, self.values[op.inputs[0]], self.shape(op)
        sizes = self.constant(f"{op.name}.sizes", np.array([shape.h, shape.w]))
        read = [self.image(op, x), "", "", sizes]
        if at["mode"] == "nearest":
            how: dict[str, Any] = {
                "mode": "nearest",
                "coordinate_transformation_mode": "asymmetric",
                "nearest_mode": "floor",
            }
        else:
            where = "align_corners" if at["align"] else "half_pixel"
            how = {"mode": "linear", "coordinate_transformation_mode": where}
        return Value(self.node("Resize", op, read, axes=[2, 3], **how), shape)

    def softmax(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        return Value(self.node("Softmax", op, [x.name], axis=1), x.shape, x.rank)

    def flatten(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        name = x.name if x.rank == 2 else self.node("Flatten", op, [x.name], axis=1)
        return Value(name, self.shape(op), 2, x.unit)

    def pad(self, op: Op) -> Value:
        at, x = op.attributes, self.values[op.inputs[0]]
        around = [(0, 0), *(at[axis] for axis in "chw")]
        pads = np.array([before for before, _ in around] + [after for _, after in around])
        return Value(self.node("Pad", op, [self.image(op, x), self.constant(f"{op.name}.pads", pads)]), self.shape(op))


def window_means(size: int | None, count: int) -> np.ndarray:
    """(count, size): row i averages window floor(i size / count) .. ceil((i + 1) size / count)."""
    assert size is not None
    means = np.zeros((count, size))
    for i in range(count):
        first, end = i * size // count, -(-(i + 1) * size // count)
        means[i, first:end] = 1 / (end - first)
    return means


EMIT: dict[str, Callable[[Twin, Op], Value]] = {
    "conv": Twin.conv,
    "linear": Twin.conv,
    "affine": Twin.affine,
    "quantize": Twin.quantize,
    "dequantize": Twin.dequantize,
    "clip": Twin.clip,
    "add": Twin.join,
    "concat": Twin.join,
    "max_pool": Twin.pool,
    "avg_pool": Twin.pool,
    "adaptive_avg_pool": Twin.adaptive_avg_pool,
    "resize": Twin.resize,
    "softmax": Twin.softmax,
    "flatten": Twin.flatten,
    "pad": Twin.pad,
}
