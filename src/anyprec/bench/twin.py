"""The float twin of a Graph: the same network as a plain float ONNX model, for tools that know nothing of anyprec.

graph_to_onnx is called by rivals.py, which quantizes the twin with each rival's own tools. Its weights are those of the
float profile where the file keeps it, else the dequantized codes of the widest integer profile. Norms and steps are
folded into the convolution before or after them wherever possible, as a careful user of those tools would do it.
Codes become floats: rounding and the upper end of the range are left to the rival's own int8. What float operations
look like in ONNX is onnx_writer.py's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anyprec.export.onnx_writer import OnnxWriter, Value, check_images_only
from anyprec.format.graph import Graph, Op
from anyprec.widths import FLOAT


def twin_profile(graph: Graph) -> str:
    """The profile the twin is made from: float if the file keeps it, else the widest uniform one."""
    uniform = [p for p in graph.profiles if isinstance(p.weights, int) and isinstance(p.acts, int)]
    return max(uniform or graph.profiles[-1:], key=lambda p: p.weights if isinstance(p.weights, int) else 0).name


def graph_to_onnx(graph: Graph, size: tuple[int, int], profile: str | None = None) -> Any:
    """An onnx.ModelProto with input (N, C, H, W) float32 and the graph's outputs under their names."""
    check_images_only(graph)
    return Twin(graph, size, profile or twin_profile(graph)).model()


class Twin(OnnxWriter):
    def step(self, op: Op) -> tuple[np.ndarray, np.ndarray]:
        """Of a signed quantize the step to 2 code - n."""
        s, t = super().step(op)
        if op.kind == "quantize" and op.attributes["signed"] and self.profile.act_bits(op.name, op.bits) != FLOAT:
            return np.multiply(2, s), 2 * t - (2 ** self.profile.act_bits(op.name, op.bits) - 1)
        return s, t

    def conv(self, op: Op) -> Value:
        at, x, shape = op.attributes, self.values[op.inputs[0]], self.shape(op)
        scale, shift, _ = self.folded_table(op)
        weight = self.weight(at["weight"]) * x.unit * scale[:, None, None, None]
        bias = self.constant(f"{op.name}.bias", shift)
        if op.kind == "linear" and (shape.h, shape.w) == (1, 1):
            flat = x.name if x.rank == 2 else self.node("Flatten", op, [x.name], "flat", axis=1)
            matrix = self.constant(f"{op.name}.weight", weight[:, 0, 0, :])
            return Value(self.node("Gemm", op, [flat, matrix, bias], transB=1), shape, rank=2)
        kernel = self.constant(f"{op.name}.weight", weight.transpose(0, 3, 1, 2))
        dilations, group = list(at.get("dilation", (1, 1))), at.get("groups", 1)
        read = [self.image(op, x), kernel, bias]
        return Value(self.node("Conv", op, read, dilations=dilations, group=group, **self.window(op)), shape)

    def window(self, op: Op) -> dict[str, Any]:
        """Pools that round up stay such: PyTorch takes no padding that differs on two sides."""
        made = super().window(op)
        if op.attributes.get("ceil"):
            made |= {"pads": list(op.attributes["pad"]), "ceil_mode": 1}
        return made

    def scale_shift(self, op: Op, x: Value, s: np.ndarray, t: np.ndarray) -> Value:
        """A norm that could not be folded, as rivals' own importers write it."""
        channels = (x.shape.c or 0,)
        numbers = {"scale": s, "shift": t, "mean": np.array(0.0), "var": np.array(1.0)}
        names = [self.constant(f"{op.name}.{k}", np.broadcast_to(v, channels)) for k, v in numbers.items()]
        return Value(self.node("BatchNormalization", op, [x.name, *names], "norm", epsilon=0.0), x.shape, x.rank)

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
