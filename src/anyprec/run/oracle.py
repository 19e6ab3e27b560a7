"""The oracle: a Graph, an image batch and a profile in, the outputs out, in numpy alone. ARITHMETIC.md.

It defines what the engine has to compute, to the last bit; tests compare the two. About a thousand times slower.
oracle_ops.py has the arithmetic; here each op's attributes, tables and bits are looked up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anyprec.format.graph import INPUT, Graph, Op, product_fits
from anyprec.format.shapes import positions
from anyprec.run import oracle_functions as functions
from anyprec.run import oracle_ops as ops
from anyprec.widths import FLOAT

F32 = np.float32


def run_graph(
    graph: Graph,
    x: np.ndarray,
    profile: str,
    *,
    more: Mapping[str, np.ndarray] | None = None,
    all_values: bool = False,
) -> dict[str, np.ndarray]:
    """The graph's outputs by name, or every value: float32, and uint8 where they are codes; x: (N, H, W, C).

    x is float32, or uint8 where the graph says how images become floats; in format 3 it may have other axes, and be of
    any integer type where the input holds indices. `more` has the further inputs by name.
    """
    run = OracleRun(graph, x, profile, more)
    for op in graph.ops:
        run.step(op)
    return dict(run.values) if all_values else {name: run.values[name] for name in graph.outputs}


def check_array(name: str, x: np.ndarray, shape: Sequence[int | None]) -> None:
    fits = x.ndim == 1 + len(shape) and all(want in (None, have) for want, have in zip(shape, x.shape[1:], strict=True))
    assert fits, f"{name} is {x.shape}, not (N, {', '.join('?' if n is None else str(n) for n in shape)})"


def as_numbers(name: str, x: np.ndarray, integer: bool) -> np.ndarray:
    if not integer:
        assert x.dtype == F32, f"{name} is {x.dtype}, not float32 or uint8"
        return x
    whole = np.issubdtype(x.dtype, np.integer) or bool((x == np.rint(x)).all())
    assert whole and (not x.size or np.abs(x).max() <= 2**24), f"{name} holds indices: whole numbers up to 2^24"
    return x.astype(F32)


class OracleRun:
    """One forward pass, op by op: the values made so far, and for those that are codes their bits."""

    def __init__(self, graph: Graph, x: np.ndarray, profile: str, more: Mapping[str, np.ndarray] | None = None) -> None:
        self.graph, self.row, self.more = graph, graph.profile(profile), dict(more or {})
        self.profile = graph.profiles[self.row]
        self.values: dict[str, np.ndarray] = {}
        self.bits: dict[str, int] = {}
        self.signed: set[str] = set()  # of the values that are codes, those that stand for 2 code - n
        with np.errstate(all="ignore"):
            self.values[INPUT] = self._image(x)

    def step(self, op: Op) -> np.ndarray:
        with np.errstate(all="ignore"):
            value = self.values[op.name] = OPS[op.kind](self, op)
        assert value.dtype == (np.uint8 if op.name in self.bits else F32), (op.name, value.dtype)
        return value

    def _image(self, x: np.ndarray) -> np.ndarray:
        check_array("input", x, self.graph.input_shape)
        if x.dtype != np.uint8 or self.graph.integer_input:
            return as_numbers("input", x, self.graph.integer_input)
        assert self.graph.image_scale is not None and self.graph.image_shift is not None, "no image scale for uint8"
        return ops.fma(x, np.array(self.graph.image_scale, F32), np.array(self.graph.image_shift, F32))

    @property
    def batch(self) -> int:
        return len(self.values[INPUT])

    def weight(self, op: Op) -> np.ndarray:
        """Of an op whose weight is float in every profile."""
        weight = self.graph.weights[op.attributes["weight"]]
        assert weight.is_float and weight.values is not None, f"{op.name}: its weight is not float"
        return weight.values

    def float_in(self, op: Op, i: int = 0) -> np.ndarray:
        assert op.inputs[i] not in self.bits, f"{op.kind} {op.name} reads codes ({op.inputs[i]})"
        return self.values[op.inputs[i]]

    def affine(self, op: Op, x: np.ndarray) -> np.ndarray:
        """fma(x, table[p, 0], table[p, 1]), the table one number a channel, or one for all."""
        table = self.graph.tables[op.name][self.row]
        return ops.fma(x, table[0], table[1])


def _quantize(run: OracleRun, op: Op) -> np.ndarray:
    t = run.float_in(op)
    if op.attributes["affine"]:
        t = run.affine(op, t)
    bits = run.profile.act_bits(op.name, op.bits)
    if bits == FLOAT:
        return ops.at_least_zero(t) if op.attributes["rectify"] else t
    run.bits[op.name] = bits
    if op.attributes["signed"]:
        run.signed.add(op.name)
    return ops.codes_of(t, 2**bits - 1)


def _dequantize(run: OracleRun, op: Op) -> np.ndarray:
    x = run.values[op.inputs[0]]
    return run.affine(op, x) if op.inputs[0] in run.bits else x


def _conv(run: OracleRun, op: Op) -> np.ndarray:
    at = op.attributes
    weight = run.graph.weights[at["weight"]]
    window: dict[str, Any]
    if op.kind == "linear":
        groups, window = 1, {"stride": (1, 1), "pad": (0, 0, 0, 0), "dilation": (1, 1)}
    else:
        assert tuple(at["kernel"]) == weight.shape[1:3], (op.name, at["kernel"], weight.shape)
        groups, window = at["groups"], {key: at.get(key) for key in ("stride", "pad", "dilation", "output_pad")}
    weight_bits = FLOAT if weight.is_float else run.profile.weight_bits(at["weight"], weight.bits)
    x = run.values[op.inputs[0]]
    places = x.shape[:-1]
    if op.kind == "linear":  # over the last axis, whatever the others are
        x = x.reshape(len(x), 1, math.prod(x.shape[1:-1]), x.shape[-1])
    if weight_bits == FLOAT:
        assert weight.values is not None, f"{op.name} has no float weight for profile {run.profile.name}"
        assert op.inputs[0] not in run.bits, f"{op.kind} {op.name} reads codes ({op.inputs[0]})"
        y = ops.conv_float(x, weight.values, groups, **window, toom_cook="toom_cook" in at)
    else:
        assert weight.codes is not None and op.inputs[0] in run.bits, f"{op.name}: integer weights, float input"
        a, levels = x.astype(np.int64), 2 ** run.bits[op.inputs[0]] - 1
        most = int(np.prod(weight.shape[1:])) * (2**weight_bits - 1) * levels
        assert most < 2**31, f"{op.name}: sums up to {most} leave 32-bit integers"
        a = 2 * a - levels if at["signed"] else a
        y = ops.conv_codes(a, weight.codes[weight_bits], weight_bits, groups, **window).astype(F32)
    y = y.reshape(*places, y.shape[-1]) if op.kind == "linear" else y
    return run.affine(op, y) if at["affine"] else y


def _affine(run: OracleRun, op: Op) -> np.ndarray:
    return run.affine(op, run.float_in(op))


def _clip(run: OracleRun, op: Op) -> np.ndarray:
    low, high = run.graph.tables[op.name][run.row]
    return ops.clip(run.float_in(op), low, high)


def _add(run: OracleRun, op: Op) -> np.ndarray:
    x, y = run.float_in(op, 0), run.float_in(op, 1)
    assert x.shape == y.shape, f"add {op.name}: {x.shape} and {y.shape}"
    made: np.ndarray = x + y
    return made


def _concat(run: OracleRun, op: Op) -> np.ndarray:
    axis = op.attributes.get("axis")
    return np.concatenate([run.float_in(op, i) for i in range(len(op.inputs))], axis=-1 if axis is None else 1 + axis)


def _keep_codes(run: OracleRun, op: Op) -> np.ndarray:
    """The input of an op that codes pass through; its value has the same bits."""
    if op.inputs[0] in run.bits:
        run.bits[op.name] = run.bits[op.inputs[0]]
        run.signed |= {op.name} if op.inputs[0] in run.signed else set()
    return run.values[op.inputs[0]]


def _max_pool(run: OracleRun, op: Op) -> np.ndarray:
    at = op.attributes
    return ops.max_pool(_keep_codes(run, op), at["kernel"], at["stride"], at["pad"], at["dilation"], at["ceil"])


def _avg_pool(run: OracleRun, op: Op) -> np.ndarray:
    at = op.attributes
    return ops.avg_pool(run.float_in(op), at["kernel"], at["stride"], at["pad"], at["ceil"], at["count_pad"])


def _adaptive_avg_pool(run: OracleRun, op: Op) -> np.ndarray:
    return ops.adaptive_avg_pool(run.float_in(op), op.attributes["size"])


def _resize(run: OracleRun, op: Op) -> np.ndarray:
    x, at = run.float_in(op), op.attributes
    scale = at.get("scale")
    if at.get("like") is not None:
        size = run.values[at["like"]].shape[1:3]
    else:
        size = at["size"] if scale is None else ops.scaled_size(x.shape, scale)
    return ops.resize(x, at["mode"], at["align"], size, scale)


def _softmax(run: OracleRun, op: Op) -> np.ndarray:
    return functions.softmax(run.float_in(op)) if op.attributes.get("single") else ops.softmax(run.float_in(op))


def _flatten(run: OracleRun, op: Op) -> np.ndarray:
    x = _keep_codes(run, op)
    return x.transpose(0, 3, 1, 2).reshape(x.shape[0], 1, 1, int(np.prod(x.shape[1:])))


def _pad(run: OracleRun, op: Op) -> np.ndarray:
    at = op.attributes
    return np.pad(run.float_in(op), [(0, 0), tuple(at["h"]), tuple(at["w"]), tuple(at["c"])])


# --- Format 3 -----------------------------------------------------------------------------------------------


def _constant(run: OracleRun, op: Op) -> np.ndarray:
    values = run.weight(op).reshape(op.attributes["shape"])
    return np.broadcast_to(values, (run.batch, *values.shape)).copy()


def _input(run: OracleRun, op: Op) -> np.ndarray:
    assert op.name in run.more, f"the input {op.name} is missing"
    x = run.more[op.name]
    check_array(op.name, x, op.attributes["shape"])
    assert len(x) == run.batch, f"{op.name} has {len(x)} rows, the input {run.batch}"
    return as_numbers(op.name, x, op.attributes["integer"])


def _reshape(run: OracleRun, op: Op) -> np.ndarray:
    x = _keep_codes(run, op)
    shape = list(op.attributes["shape"])
    if None in shape:
        shape[shape.index(None)] = math.prod(x.shape[1:]) // math.prod(n for n in shape if n is not None)
    return x.reshape(len(x), *shape)


def _transpose(run: OracleRun, op: Op) -> np.ndarray:
    x = _keep_codes(run, op)
    return np.ascontiguousarray(x.transpose(0, *(1 + axis for axis in op.attributes["order"])))


def _slice(run: OracleRun, op: Op) -> np.ndarray:
    x, at = _keep_codes(run, op), op.attributes
    axis = 1 + at["axis"]
    found = positions({"name": op.name, "op": op.kind, **at}, x.shape[axis])
    return x.take(list(found), axis)


def _gather(run: OracleRun, op: Op) -> np.ndarray:
    return _keep_codes(run, op).take(list(op.attributes["index"]), 1 + op.attributes["axis"])


def _pointwise(run: OracleRun, op: Op) -> np.ndarray:
    return functions.FUNCTIONS[op.attributes["function"]](run.float_in(op))


def _binary(run: OracleRun, op: Op) -> np.ndarray:
    return functions.BINARY[op.attributes["function"]](run.float_in(op, 0), run.float_in(op, 1))


def _reduce(run: OracleRun, op: Op) -> np.ndarray:
    return functions.reduce(run.float_in(op), op.attributes["function"], [1 + axis for axis in op.attributes["axes"]])


def _norm(run: OracleRun, op: Op) -> np.ndarray:
    return functions.norm(run.float_in(op), [1 + axis for axis in op.attributes["axes"]], op.attributes["eps"])


def _matmul(run: OracleRun, op: Op) -> np.ndarray:
    if op.inputs[0] in run.bits:
        assert op.inputs[1] in run.bits, f"matmul {op.name} reads codes and floats"
        widths = [run.bits[value] for value in op.inputs]
        sides = [run.values[value].astype(np.int64) for value in op.inputs]
        sides = [
            2 * x - (2**k - 1) if value in run.signed else x
            for x, k, value in zip(sides, widths, op.inputs, strict=True)
        ]
        terms = sides[0].shape[-1]
        assert product_fits(terms, *widths), f"{op.name}: sums of {terms} products leave 32-bit integers"
        product = sides[0] @ (sides[1].swapaxes(-1, -2) if op.attributes["transposed"] else sides[1])
        return run.affine(op, product.astype(F32))
    return functions.matmul(run.float_in(op, 0), run.float_in(op, 1), op.attributes["transposed"])


def _embedding(run: OracleRun, op: Op) -> np.ndarray:
    rows, index = run.weight(op), run.float_in(op)
    good = (index == np.rint(index)) & (index >= 0) & (index < len(rows))
    assert good.all(), f"embedding {op.name} reads {index[~good][0]}; it has rows 0 to {len(rows) - 1}"
    return rows.reshape(len(rows), -1)[index.astype(np.int64)]


def _recurrent(run: OracleRun, op: Op) -> np.ndarray:
    weight = run.weight(op)
    at = op.attributes
    return functions.recurrent(run.float_in(op), weight.reshape(len(weight), -1), at["function"], at["reverse"])


OPS: dict[str, Callable[[OracleRun, Op], np.ndarray]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "conv": _conv,
    "linear": _conv,
    "affine": _affine,
    "clip": _clip,
    "add": _add,
    "concat": _concat,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": _adaptive_avg_pool,
    "resize": _resize,
    "softmax": _softmax,
    "flatten": _flatten,
    "pad": _pad,
    "constant": _constant,
    "input": _input,
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "gather": _gather,
    "pointwise": _pointwise,
    "binary": _binary,
    "reduce": _reduce,
    "norm": _norm,
    "matmul": _matmul,
    "embedding": _embedding,
    "recurrent": _recurrent,
}
