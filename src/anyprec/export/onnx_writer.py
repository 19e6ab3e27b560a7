"""A Graph becomes an ONNX model: the parts that do not depend on how codes are written, and float operations on images.

OnnxWriter is completed by its children, which settle convolutions and codes: any_axes.py (the operations of format 3)
and qdq.py (integers) for `anyprec export`, bench/twin.py (a plain float network) for the rivals of `anyprec bench`.
Values are (N, C, H, W), or (N, C) after a fully connected layer, or have the axes of the graph (Value.axes). The onnx
package is imported when a writer is made.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from anyprec.errors import MissingExtra, UnsupportedOperation
from anyprec.format.graph import INPUT, Graph, Op
from anyprec.format.record import needs_3, version_of
from anyprec.format.shapes import Shape, value_shape
from anyprec.widths import FLOAT

BATCH = "N"  # the free dimension of a model
RESIZE_OPSET = 18  # the first whose Resize can leave the batch alone


def import_onnx_package() -> Any:
    try:
        return importlib.import_module("onnx")
    except ModuleNotFoundError as error:
        raise MissingExtra("reading and writing ONNX models needs onnx: pip install 'anyprec[onnx]'") from error


@dataclass(frozen=True)
class Value:
    """A value of the graph in the ONNX model."""

    name: str
    shape: Shape  # of the graph: h, w, c, or other axes
    rank: int = 4  # 4: (N, C, H, W); 2: (N, C)
    unit: float = 1.0  # float twins: what ARITHMETIC.md calls `a` (code, or 2 code - n) is `unit` times this value
    levels: int | None = None  # of codes, uint8: the largest one, n; None: float
    signed: bool = False  # codes stand for 2 code - n
    axes: bool = False  # in the graph's order, (N, *shape); or of rank 2, all axes but the last as one: (rows, C)
    single: bool = False  # of constants: N is 1


def check_images_only(graph: Graph) -> None:
    """Files of format 3 hold operations that only any_axes.py has methods for."""
    if version_of(graph) < 3:
        return
    new = sorted({op.kind for op in graph.ops if needs_3(op)})
    raise UnsupportedOperation(
        f"{graph.name} has no twin in ONNX: it has {', '.join(new) or 'an input that is not an image'} (format 3); "
        "only networks of images with the operations of formats 1 and 2 have one"
    )


class OnnxWriter(ABC):
    """Writes `graph` at one profile, for inputs of one size. `model()` is the onnx.ModelProto."""

    OPS: ClassVar[Mapping[str, str]] = {
        "quantize": "quantize",
        "dequantize": "dequantize",
        "conv": "conv",
        "linear": "conv",
        "affine": "affine",
        "clip": "clip",
        "add": "join",
        "concat": "join",
        "max_pool": "max_pool",
        "avg_pool": "avg_pool",
        "adaptive_avg_pool": "adaptive_avg_pool",
        "resize": "resize",
        "softmax": "softmax",
        "flatten": "flatten",
        "pad": "pad",
    }  # op of the format -> the method that writes it

    def __init__(self, graph: Graph, size: tuple[int, int] | Mapping[str, Shape], profile: str) -> None:
        """size: of the images, height and width; or the shape of every input by name."""
        self.onnx = import_onnx_package()
        self.graph, self.row = graph, graph.profile(profile)
        self.profile = graph.profiles[self.row]
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.constant_names: dict[str, str] = {}  # as asked for -> as it is called in the model
        self.inputs: dict[str, Shape] = (
            dict(size) if isinstance(size, Mapping) else {INPUT: Shape((*size, graph.input_shape[-1]))}
        )
        self.whole = {op.name for op in graph.ops if op.kind == "input" and op.attributes["integer"]}
        self.whole |= {INPUT} if graph.integer_input else set()
        self.taken = {*self.inputs, *(f"output.{name}" for name in graph.outputs)}  # names; ops may be called anything
        self.folded: set[str] = set()  # affine and quantize ops whose numbers went into the convolution before them
        self.values = {INPUT: self.given(INPUT)}
        for op in graph.ops:
            self.values[op.name] = self.write(op)

    def write(self, op: Op) -> Value:
        made: Value = getattr(self, self.OPS[op.kind])(op)
        return made

    def model(self, opset: int = RESIZE_OPSET) -> Any:
        """Outputs are called output.NAME; (N, C) where a value has one pixel."""
        make, floats = self.onnx.helper, self.onnx.TensorProto.FLOAT
        inputs = []
        for name, shape in self.inputs.items():
            kind = self.onnx.TensorProto.INT64 if name in self.whole else floats
            inputs.append(make.make_tensor_value_info(name, kind, [BATCH, *outer_sizes(shape)]))
        outputs = []
        for name in self.graph.outputs:
            value = self.output(name)
            self.nodes.append(make.make_node("Identity", [value.name], [f"output.{name}"]))
            sizes = value.shape if value.axes else [value.shape.c, *value.shape[:2]][: value.rank - 1]
            outputs.append(make.make_tensor_value_info(f"output.{name}", floats, [BATCH, *sizes]))
        body = make.make_graph(self.nodes, self.graph.name, inputs, outputs, self.constants)
        opsets = [make.make_opsetid("", opset)]
        made = make.make_model(body, opset_imports=opsets, ir_version=make.find_min_ir_version_for(opsets))
        return self.onnx.shape_inference.infer_shapes(made)

    def output(self, name: str) -> Value:
        return self.values[name]

    # --- Parts -------------------------------------------------------------------------------------------------------

    def given(self, name: str) -> Value:
        """An input: images as (N, C, H, W), others with the axes they have; whole numbers as floats."""
        shape, read = self.inputs[name], name
        if name in self.whole:
            read = self.fresh(f"{name}.float")
            self.nodes.append(self.onnx.helper.make_node("Cast", [name], [read], to=self.onnx.TensorProto.FLOAT))
        return Value(read, shape, rank=1 + len(shape), axes=len(shape) != 3)

    def shape(self, op: Op) -> Shape:
        at = dict(op.attributes)
        record = {"name": op.name, "op": op.kind, **at}
        weight = {"shape": list(self.graph.weights[at["weight"]].shape)} if "weight" in at else None
        record = {key: list(value) if isinstance(value, tuple) else value for key, value in record.items()}
        like = self.values[at["like"]].shape if at.get("like") else None
        return value_shape(record, [self.values[name].shape for name in op.inputs], weight, like)

    def fresh(self, name: str) -> str:
        """The name, or one made of it that no value has yet."""
        made, number = name, 1
        while made in self.taken:
            made, number = f"{name}~{number}", number + 1
        self.taken.add(made)
        return made

    def constant(self, name: str, array: np.ndarray, kind: Any = None) -> str:
        """Adds a constant, unless this one is there; int64 or float32 unless `kind` says otherwise."""
        if name not in self.constant_names:
            self.constant_names[name] = self.fresh(name)
            kind = kind or (np.int64 if np.issubdtype(array.dtype, np.integer) else np.float32)
            with np.errstate(over="ignore"):
                numbers = np.asarray(array, kind, order="C")
            self.constants.append(self.onnx.numpy_helper.from_array(numbers, self.constant_names[name]))
        return self.constant_names[name]

    def node(self, kind: str, op: Op, inputs: list[str], tag: str = "", **attributes: Any) -> str:
        made = self.fresh(f"{op.name}.{tag}" if tag else op.name)
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [made], name=f"{kind}:{made}", **attributes))
        return made

    def table(self, op: Op) -> tuple[np.ndarray, np.ndarray]:
        first, second = self.graph.tables[op.name][self.row].astype(np.float64)
        return first, second

    def weight_bits(self, name: str) -> int:
        weight = self.graph.weights[name]
        return FLOAT if weight.is_float else self.profile.weight_bits(name, weight.bits)

    def weight(self, name: str) -> np.ndarray:
        """(out, kh, kw, in) float64: float values, or 2c + 1 - 2^k."""
        weight, bits = self.graph.weights[name], self.weight_bits(name)
        if bits == FLOAT:
            assert weight.values is not None
            return weight.values.astype(np.float64)
        assert weight.codes is not None
        made: np.ndarray = 2.0 * weight.codes[bits] + 1 - 2**bits
        return made

    def only_reader(self, op: Op) -> Op | None:
        readers = [other for other in self.graph.ops if op.name in (*other.inputs, other.attributes.get("like"))]
        return readers[0] if len(readers) == 1 and op.name not in self.graph.outputs else None

    def folded_table(self, op: Op) -> tuple[np.ndarray, np.ndarray, Op]:
        """(scale, shift) of a convolution, with those of the affine and quantize ops that alone read it, and the last
        op that was taken in."""
        out = self.graph.weights[op.attributes["weight"]].shape[0]
        scale, shift = self.table(op) if op.attributes["affine"] else (np.ones(out), np.zeros(out))
        last = op
        while last.kind != "quantize" and (after := self.only_reader(last)) and after.kind in ("affine", "quantize"):
            s, t = self.step(after)
            scale, shift, last = scale * s, shift * s + t, after
            self.folded.add(after.name)
        return scale, shift, last

    def step(self, op: Op) -> tuple[np.ndarray, np.ndarray]:
        """(s, t) so that what follows reads s x + t: of an affine, or of a quantize before clip and rounding."""
        if op.kind == "affine" or op.attributes["affine"]:
            return self.table(op)
        return np.array(1.0), np.array(0.0)

    def image(self, op: Op, value: Value) -> str:
        """The value's name as (N, C, H, W)."""
        if value.axes:
            return self.node("Transpose", op, [self.full(op, value)], f"image.{value.name}", perm=[0, 3, 1, 2])
        if value.rank == 4:
            return value.name
        sizes = self.constant(f"{op.name}.sizes.{value.name}", np.array([-1, value.shape.c, 1, 1]))
        return self.node("Reshape", op, [value.name, sizes], f"image.{value.name}")

    def full(self, op: Op, value: Value) -> str:
        """The value's name as (N, *shape), in the order of the graph."""
        if value.axes and value.rank == 1 + len(value.shape):
            return value.name
        if value.rank == 4 and not value.axes:
            return self.node("Transpose", op, [value.name], f"full.{value.name}", perm=[0, 2, 3, 1])
        sizes = self.constant(f"{op.name}.full_sizes.{value.name}", np.array([-1, *value.shape]))
        return self.node("Reshape", op, [value.name, sizes], f"full.{value.name}")

    def window(self, op: Op) -> dict[str, Any]:
        """Attributes of a convolution or pool. Pools that round up become such that do not, with more padding."""
        at = op.attributes
        pads = list(at.get("pad", (0, 0, 0, 0)))
        if at.get("ceil"):
            made, x = self.shape(op), self.values[op.inputs[0]].shape
            for axis, (out, size) in enumerate(((made.h, x.h), (made.w, x.w))):
                assert out is not None and size is not None
                reach = list(at.get("dilation", (1, 1)))[axis] * (at["kernel"][axis] - 1) + 1
                pads[2 + axis] = max(pads[2 + axis], (out - 1) * at["stride"][axis] + reach - size - pads[axis])
        return {
            "kernel_shape": list(at.get("kernel", (1, 1))),
            "strides": list(at.get("stride", (1, 1))),
            "pads": pads,
            **({"ceil_mode": 0} if "ceil" in at else {}),
        }

    # --- Operations --------------------------------------------------------------------------------------------------

    @abstractmethod
    def conv(self, op: Op) -> Value: ...

    @abstractmethod
    def quantize(self, op: Op) -> Value: ...

    @abstractmethod
    def dequantize(self, op: Op) -> Value: ...

    def scale_shift(self, op: Op, x: Value, s: np.ndarray, t: np.ndarray) -> Value:
        """s x + t, one number a channel, where it could not be folded."""
        channels = (1,) * (x.rank - 1) + (-1,) if x.axes else (1, -1, 1, 1)[: x.rank]
        scale = self.constant(f"{op.name}.scale", s.reshape(channels))
        shift = self.constant(f"{op.name}.shift", t.reshape(channels))
        product = self.node("Mul", op, [x.name, scale], "scaled")
        return replace(x, name=self.node("Add", op, [product, shift], "norm"))

    def affine(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        return x if op.name in self.folded else self.scale_shift(op, x, *self.step(op))

    def clip(self, op: Op) -> Value:
        x, (low, high) = self.values[op.inputs[0]], self.table(op)
        if low == 0 and high == np.inf:
            return replace(x, name=self.node("Relu", op, [x.name]))
        largest = np.finfo(np.float32).max
        ends = [
            self.constant(f"{op.name}.{end}", np.clip(value, -largest, largest))
            for end, value in (("low", low), ("high", high))
        ]
        return replace(x, name=self.node("Clip", op, [x.name, *ends]))

    def join(self, op: Op) -> Value:
        read = [self.values[name] for name in op.inputs]
        rank = max(value.rank for value in read)
        names = [value.name if value.rank == rank else self.image(op, value) for value in read]
        made = self.node("Add", op, names) if op.kind == "add" else self.node("Concat", op, names, axis=1)
        return Value(made, self.shape(op), rank)

    def max_pool(self, op: Op) -> Value:
        """Of codes, too: ONNX has it for uint8."""
        x = self.values[op.inputs[0]]
        dilations = list(op.attributes["dilation"])
        made = self.node("MaxPool", op, [self.image(op, x)], dilations=dilations, **self.window(op))
        return Value(made, self.shape(op), unit=x.unit, levels=x.levels, signed=x.signed)

    def avg_pool(self, op: Op) -> Value:
        at, x, shape, window = op.attributes, self.values[op.inputs[0]], self.shape(op), self.window(op)
        counted = int(at["count_pad"])
        name = self.node("AveragePool", op, [self.image(op, x)], "mean", count_include_pad=counted, **window)
        if counted and window["pads"] != list(at["pad"]):
            # The padding that rounding up added is not counted: 2 of 3 taps inside make the mean of three 3/2 as large.
            sizes, around = zip(x.shape[:2], shape[:2], strict=True), zip(at["pad"][:2], at["pad"][2:], strict=True)
            axes = zip(sizes, at["kernel"], at["stride"], around, strict=True)
            counts = [axis_counts(size or 0, count or 0, k, s, *pads) for (size, count), k, s, pads in axes]
            area = at["kernel"][0] * at["kernel"][1]
            factors = area / np.outer(*counts)[None, None]  # (1, 1, OH, OW)
            name = self.node("Mul", op, [name, self.constant(f"{op.name}.factors", factors)])
        return Value(name, shape)

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
        name = self.image(op, x)
        if at.get("scale") is not None and any(
            size * by != out for size, by, out in zip((x.shape.h, x.shape.w), at["scale"], shape[:2], strict=True)
        ):
            # 1 / scale is the ratio even where the size was rounded down. Engines differ there: written as products.
            rows, columns = (axis_resize(x.shape[i] or 0, shape[i] or 0, at["scale"][i], op) for i in (0, 1))
            across = self.node("MatMul", op, [name, self.constant(f"{op.name}.columns", columns.T)], "across")
            return Value(self.node("MatMul", op, [self.constant(f"{op.name}.rows", rows), across]), shape)
        read = [name, "", "", self.constant(f"{op.name}.sizes", np.array([shape.h, shape.w]))]
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
        """Of codes, too."""
        x = self.values[op.inputs[0]]
        name = x.name if x.rank == 2 and not x.axes else self.node("Flatten", op, [self.image(op, x)], axis=1)
        return Value(name, self.shape(op), 2, unit=x.unit, levels=x.levels, signed=x.signed)

    def pad(self, op: Op) -> Value:
        at, x = op.attributes, self.values[op.inputs[0]]
        around = [(0, 0), *(at[axis] for axis in "chw")]
        pads = np.array([before for before, _ in around] + [after for _, after in around])
        return Value(self.node("Pad", op, [self.image(op, x), self.constant(f"{op.name}.pads", pads)]), self.shape(op))


def outer_sizes(shape: Shape) -> list[int | None]:
    """Of an input or output, without N: images are (C, H, W) outside."""
    return [shape.c, shape.h, shape.w] if len(shape) == 3 else list(shape)


def window_means(size: int | None, count: int) -> np.ndarray:
    """(count, size): row i averages window floor(i size / count) .. ceil((i + 1) size / count)."""
    assert size is not None
    means = np.zeros((count, size))
    for i in range(count):
        first, end = i * size // count, -(-(i + 1) * size // count)
        means[i, first:end] = 1 / (end - first)
    return means


def axis_resize(size: int, count: int, scale: float, op: Op) -> np.ndarray:
    """(count, size): the weights of each output along one axis, as ARITHMETIC.md section 5 has them."""
    weights, places = np.zeros((count, size)), np.arange(count)
    if op.attributes["mode"] == "nearest":
        weights[places, np.minimum(np.floor(places / scale), size - 1).astype(int)] = 1
        return weights
    if op.attributes["align"]:
        at = places * (size - 1) / max(count - 1, 1)
    else:
        at = np.maximum((places + 0.5) / scale - 0.5, 0)
    first = np.minimum(np.floor(at), size - 1).astype(int)
    weights[places, first] += 1 - (at - first)
    weights[places, np.minimum(first + 1, size - 1)] += at - first
    return weights


def axis_counts(size: int, count: int, kernel: int, stride: int, before: int, after: int) -> np.ndarray:
    """How many taps of each of `count` windows lie inside the padded image, along one axis."""
    starts = np.arange(count) * stride
    counts: np.ndarray = np.minimum(starts + kernel, size + before + after) - starts
    return counts
