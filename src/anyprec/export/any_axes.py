"""The operations of format 3 as ONNX: values of any number of axes, further inputs, matrices, recurrent cells.

Values that an image operation made stay (N, C, H, W); those below have the axes of the graph, (N, *shape), or, between
a linear layer and what works number by number, all axes but the last as one: (rows, C). A constant has N = 1 and is
repeated only where ONNX does not broadcast. Completed by qdq.py, which settles layers and codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from anyprec.errors import UnsupportedOperation
from anyprec.export.onnx_writer import RESIZE_OPSET, OnnxWriter, Value
from anyprec.format.graph import INPUT, Graph, Op
from anyprec.format.shapes import Shape, positions

LATE = {"resize": RESIZE_OPSET, "reduce": 18, "norm": 18}  # operation -> the first opset that has it as it is written
PLAIN = {
    "abs": "Abs", "sqrt": "Sqrt", "reciprocal": "Reciprocal", "exp": "Exp", "log": "Log", "sigmoid": "Sigmoid",
    "tanh": "Tanh", "erf": "Erf",
}  # fmt: skip
BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "max": "Max", "min": "Min"}
REDUCE = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin"}
# Gates in the order of ONNX, as numbers of ours: i, f, g, o -> i, o, f, c; r, z, n -> z, r, h.
GATE_ORDER = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}


def needed_opset(graph: Graph, least: int) -> int:
    return max([least, *(LATE.get(op.kind, least) for op in graph.ops)])


class AnyAxesWriter(OnnxWriter):
    OPS: ClassVar[dict[str, str]] = {
        **OnnxWriter.OPS,
        "constant": "literal",
        "input": "further_input",
        "reshape": "reshape",
        "transpose": "transpose",
        "slice": "slice",
        "gather": "gather",
        "pointwise": "pointwise",
        "binary": "binary",
        "reduce": "reduce",
        "norm": "norm",
        "matmul": "matmul",
        "embedding": "embedding",
        "recurrent": "recurrent",
    }

    def write(self, op: Op) -> Value:
        if op.kind not in self.OPS:
            raise UnsupportedOperation(f"op {op.name!r} ({op.kind}) cannot be written as ONNX yet")
        made = super().write(op)
        single = made.single or (bool(op.inputs) and all(self.values[name].single for name in op.inputs))
        return replace(made, single=single)

    def output(self, name: str) -> Value:
        """As the engine gives it: (N, C) where an image has one pixel, (N, C, H, W), or the axes it has."""
        value, op = self.values[name], Op(f"{name}.out", "output", ())
        if value.single:
            value = self.repeated(op, value)
        if len(value.shape) != 3:
            return replace(value, name=self.full(op, value), rank=1 + len(value.shape), axes=True)
        if value.rank == 2 and not value.axes:
            return value
        made = self.image(op, value)
        if value.shape[:2] == (1, 1):
            return Value(self.node("Flatten", op, [made], "vector", axis=1), value.shape, 2)
        return Value(made, value.shape)

    # --- Parts -------------------------------------------------------------------------------------------------------

    def axes_value(self, op: Op, name: str, like: Value | None = None) -> Value:
        """A value in the order of the graph; codes as `like` is."""
        shape = self.shape(op)
        made = Value(name, shape, rank=1 + len(shape), axes=True)
        return made if like is None else replace(made, levels=like.levels, signed=like.signed)

    def rows(self, op: Op, value: Value) -> str:
        """The value's name as (rows, C)."""
        if value.axes and value.rank == 2:
            return value.name
        sizes = self.constant(f"{op.name}.row_sizes.{value.name}", np.array([-1, value.shape.c]))
        return self.node("Reshape", op, [self.full(op, value), sizes], f"rows.{value.name}")

    def repeated(self, op: Op, value: Value) -> Value:
        """A constant, once for each image of the batch."""
        sizes = self.node("Shape", op, [INPUT], f"shape.{value.name}")
        count = self.node("Gather", op, [sizes, self.constant("(first)", np.array([0]))], f"count.{value.name}")
        ones = self.constant(f"(ones {len(value.shape)})", np.ones(len(value.shape), np.int64))
        target = self.node("Concat", op, [count, ones], f"target.{value.name}", axis=0)
        made = self.node("Expand", op, [self.full(op, value), target], f"repeated.{value.name}")
        return replace(value, name=made, rank=1 + len(value.shape), axes=True, single=False)

    def alike(self, op: Op, values: Sequence[Value]) -> tuple[list[str], int]:
        """Names of values that meet number by number or broadcast, in one order; and their rank."""
        first = values[0]
        if all((v.shape, v.rank, v.single) == (first.shape, first.rank, first.single) and v.axes for v in values):
            return [value.name for value in values], first.rank
        return [self.full(op, value) for value in values], 1 + len(first.shape)

    def number(self, value: float) -> str:
        return self.constant(f"(number {value!r})", np.array(value))

    # --- Operations --------------------------------------------------------------------------------------------------

    def join(self, op: Op) -> Value:
        read = [self.values[name] for name in op.inputs]
        if not any(value.axes for value in read) and "axis" not in op.attributes:
            return super().join(op)
        if op.kind == "add":
            names, rank = self.alike(op, read)
            return replace(self.axes_value(op, self.node("Add", op, names)), rank=rank)
        if not all(value.single for value in read):
            read = [self.repeated(op, value) if value.single else value for value in read]
        axis = op.attributes.get("axis", len(read[0].shape) - 1)
        return self.axes_value(op, self.node("Concat", op, [self.full(op, value) for value in read], axis=1 + axis))

    def softmax(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        return replace(x, name=self.node("Softmax", op, [x.name], axis=-1)) if x.axes else super().softmax(op)

    def literal(self, op: Op) -> Value:
        values = self.weight(op.attributes["weight"]).reshape(1, *op.attributes["shape"])
        return replace(self.axes_value(op, self.constant(op.name, values)), single=True)

    def further_input(self, op: Op) -> Value:
        return self.given(op.name)

    def reshape(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        sizes = self.constant(f"{op.name}.sizes", np.array([-1, *self.shape(op)]))
        return self.axes_value(op, self.node("Reshape", op, [self.full(op, x), sizes]), x)

    def transpose(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        order = [0, *(1 + axis for axis in op.attributes["order"])]
        return self.axes_value(op, self.node("Transpose", op, [self.full(op, x)], perm=order), x)

    def slice(self, op: Op) -> Value:
        x, at = self.values[op.inputs[0]], op.attributes
        found = positions({"name": op.name, "op": op.kind, **at}, x.shape[at["axis"]] or 0)
        numbers = {"start": found.start, "stop": found.stop, "axis": 1 + at["axis"], "step": found.step}
        read = [self.constant(f"{op.name}.{key}", np.array([value])) for key, value in numbers.items()]
        return self.axes_value(op, self.node("Slice", op, [self.full(op, x), *read]), x)

    def gather(self, op: Op) -> Value:
        x, at = self.values[op.inputs[0]], op.attributes
        index = self.constant(f"{op.name}.index", np.array(at["index"]))
        return self.axes_value(op, self.node("Gather", op, [self.full(op, x), index], axis=1 + at["axis"]), x)

    def pointwise(self, op: Op) -> Value:
        x, function = self.values[op.inputs[0]], op.attributes["function"]
        made = self.node(PLAIN[function], op, [x.name]) if function in PLAIN else COMPOSED[function](self, op, x.name)
        return replace(x, name=made)

    def binary(self, op: Op) -> Value:
        names, rank = self.alike(op, [self.values[name] for name in op.inputs])
        return replace(self.axes_value(op, self.node(BINARY[op.attributes["function"]], op, names)), rank=rank)

    def reduce(self, op: Op) -> Value:
        axes = self.constant(f"{op.name}.axes", np.array([1 + axis for axis in op.attributes["axes"]]))
        read = [self.full(op, self.values[op.inputs[0]]), axes]
        return self.axes_value(op, self.node(REDUCE[op.attributes["function"]], op, read, keepdims=1))

    def norm(self, op: Op) -> Value:
        x, axes = self.values[op.inputs[0]], list(op.attributes["axes"])
        name, eps = self.full(op, x), float(op.attributes["eps"])
        if axes == list(range(axes[0], len(x.shape))):
            ones = self.constant(f"{op.name}.ones", np.ones([size or 0 for size in x.shape[axes[0] :]]))
            return self.axes_value(op, self.node("LayerNormalization", op, [name, ones], axis=1 + axes[0], epsilon=eps))
        along = self.constant(f"{op.name}.axes", np.array([1 + axis for axis in axes]))
        mean = self.node("ReduceMean", op, [name, along], "mean", keepdims=1)
        off = self.node("Sub", op, [name, mean], "off")
        square = self.node("Mul", op, [off, off], "square")
        variance = self.node("ReduceMean", op, [square, along], "variance", keepdims=1)
        deviation = self.node("Sqrt", op, [self.node("Add", op, [variance, self.number(eps)], "sum")], "deviation")
        return self.axes_value(op, self.node("Div", op, [off, deviation]))

    def matmul(self, op: Op) -> Value:
        a, b = (self.full(op, self.values[name]) for name in op.inputs)
        return self.axes_value(op, self.product(op, a, b))

    def product(self, op: Op, a: str, b: str, tag: str = "") -> str:
        """Of two values in the order of the graph."""
        if op.attributes["transposed"]:
            rank = 1 + len(self.values[op.inputs[1]].shape)
            b = self.node("Transpose", op, [b], "turned", perm=[*range(rank - 2), rank - 1, rank - 2])
        return self.node("MatMul", op, [a, b], tag)

    def embedding(self, op: Op) -> Value:
        x, weight = self.values[op.inputs[0]], self.weight(op.attributes["weight"])
        rows = self.constant(f"{op.name}.rows", weight.reshape(len(weight), -1))
        if op.inputs[0] in self.whole and x.axes:
            index = op.inputs[0]
        else:
            index = self.node("Cast", op, [self.full(op, x)], "index", to=self.onnx.TensorProto.INT64)
        return self.axes_value(op, self.node("Gather", op, [rows, index], axis=0))

    def recurrent(self, op: Op) -> Value:
        """The products of the input come with it: ONNX, which multiplies it once more, is given a permutation."""
        at, kind = op.attributes, op.attributes["function"]
        weight = self.weight(at["weight"]).reshape(len(self.weight(at["weight"])), -1)  # (G H, H + 1)
        count, units = len(weight), weight.shape[1] - 1
        order = np.concatenate([np.arange(units) + gate * units for gate in GATE_ORDER[kind]])
        bias = np.concatenate([np.zeros(count), weight[order, units]])
        arrays = {"pick": np.eye(count)[order], "weight": weight[order, :units], "bias": bias}
        read = [self.constant(f"{op.name}.{key}", array[None]) for key, array in arrays.items()]
        x = self.values[op.inputs[0]]
        name = self.full(op, x)
        if len(x.shape) > 2:  # several sequences an image: each is one of the batch
            sizes = self.constant(f"{op.name}.sequence_sizes", np.array([-1, *x.shape[-2:]]))
            name = self.node("Reshape", op, [name, sizes], "sequences")
        first = self.node("Transpose", op, [name], "steps", perm=[1, 0, 2])
        how: dict[str, Any] = {"hidden_size": units, "direction": "reverse" if at["reverse"] else "forward"}
        if kind == "gru":
            how["linear_before_reset"] = 1
        made = self.node(kind.upper(), op, [first, *read], "cells", **how)  # (L, 1, N, H)
        made = self.node("Squeeze", op, [made, self.constant("(axis 1)", np.array([1]))], "states")
        made = self.node("Transpose", op, [made], "turned", perm=[1, 0, 2])
        if len(x.shape) > 2:
            made = self.node("Reshape", op, [made, self.constant(f"{op.name}.sizes", np.array([-1, *self.shape(op)]))])
        return self.axes_value(op, made)


# --- Functions that ONNX does not have in every opset --------------------------------------------------------------


def gelu(writer: AnyAxesWriter, op: Op, x: str) -> str:
    """0.5 x (1 + erf(x / sqrt 2)), in the form that engines fuse."""
    ratio = writer.node("Div", op, [x, writer.number(float(np.sqrt(2)))], "ratio")
    more = writer.node("Add", op, [writer.node("Erf", op, [ratio], "erf"), writer.number(1.0)], "more")
    return writer.node("Mul", op, [writer.node("Mul", op, [x, more], "whole"), writer.number(0.5)])


def gelu_tanh(writer: AnyAxesWriter, op: Op, x: str) -> str:
    cube = writer.node("Mul", op, [writer.node("Mul", op, [x, x], "square"), x], "cube")
    part = writer.node("Mul", op, [cube, writer.number(0.044715)], "part")
    inner = writer.node("Mul", op, [writer.node("Add", op, [x, part], "sum"), writer.number(0.7978845608)], "inner")
    more = writer.node("Add", op, [writer.node("Tanh", op, [inner], "tanh"), writer.number(1.0)], "more")
    return writer.node("Mul", op, [writer.node("Mul", op, [x, more], "whole"), writer.number(0.5)])


def silu(writer: AnyAxesWriter, op: Op, x: str) -> str:
    return writer.node("Mul", op, [x, writer.node("Sigmoid", op, [x], "gate")])


def mish(writer: AnyAxesWriter, op: Op, x: str) -> str:
    soft = writer.node("Softplus", op, [x], "soft")
    return writer.node("Mul", op, [x, writer.node("Tanh", op, [soft], "gate")])


COMPOSED: dict[str, Callable[[AnyAxesWriter, Op, str], str]] = {
    "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "mish": mish,
}  # fmt: skip


def input_shapes(graph: Graph, first: Sequence[int]) -> dict[str, Shape]:
    """The shape of every input by name, `first` that of the first. A free size of a further input is that of the first
    along the same axis: the length of a text, say."""
    shapes = {INPUT: Shape(first)}
    for op in graph.ops:
        if op.kind == "input":
            sizes = op.attributes["shape"]
            shapes[op.name] = Shape(
                first[i] if size is None and i < len(first) else size for i, size in enumerate(sizes)
            )
    return shapes
