"""The oracle: a Graph, an image batch and a profile in, the outputs out, in numpy alone. ARITHMETIC.md.

It defines what the engine has to compute, to the last bit; tests compare the two. About a thousand times slower.
oracle_ops.py has the arithmetic; here each op's attributes, tables and bits are looked up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anyprec.format.graph import INPUT, Graph, Op
from anyprec.run import oracle_ops as ops
from anyprec.widths import FLOAT

F32 = np.float32


def run_graph(graph: Graph, x: np.ndarray, profile: str, *, all_values: bool = False) -> dict[str, np.ndarray]:
    """The graph's outputs by name, or every value: float32, and uint8 where they are codes; x: (N, H, W, C).

    x is float32, or uint8 where the graph says how images become floats.
    """
    run = OracleRun(graph, x, profile)
    for op in graph.ops:
        run.step(op)
    return dict(run.values) if all_values else {name: run.values[name] for name in graph.outputs}


class OracleRun:
    """One forward pass, op by op: the values made so far, and for those that are codes their bits."""

    def __init__(self, graph: Graph, x: np.ndarray, profile: str) -> None:
        self.graph, self.row = graph, graph.profile(profile)
        self.profile = graph.profiles[self.row]
        self.values: dict[str, np.ndarray] = {}
        self.bits: dict[str, int] = {}
        with np.errstate(all="ignore"):
            self.values[INPUT] = self._image(x)

    def step(self, op: Op) -> np.ndarray:
        with np.errstate(all="ignore"):
            value = self.values[op.name] = OPS[op.kind](self, op)
        assert value.dtype == (np.uint8 if op.name in self.bits else F32), (op.name, value.dtype)
        return value

    def _image(self, x: np.ndarray) -> np.ndarray:
        assert x.ndim == 4 and x.shape[3] == self.graph.input_shape[2], f"input {x.shape} is not (N, H, W, C)"
        if x.dtype != np.uint8:
            assert x.dtype == F32, f"input is {x.dtype}, not float32 or uint8"
            return x
        assert self.graph.image_scale is not None and self.graph.image_shift is not None, "no image scale for uint8"
        return ops.fma(x, np.array(self.graph.image_scale, F32), np.array(self.graph.image_shift, F32))

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
    return ops.codes_of(t, 2**bits - 1)


def _dequantize(run: OracleRun, op: Op) -> np.ndarray:
    x = run.values[op.inputs[0]]
    return run.affine(op, x) if op.inputs[0] in run.bits else x


def _conv(run: OracleRun, op: Op) -> np.ndarray:
    at = op.attributes
    weight = run.graph.weights[at["weight"]]
    if op.kind == "linear":
        groups, window = 1, {"stride": (1, 1), "pad": (0, 0, 0, 0), "dilation": (1, 1)}
    else:
        assert tuple(at["kernel"]) == weight.shape[1:3], (op.name, at["kernel"], weight.shape)
        groups, window = at["groups"], {key: at[key] for key in ("stride", "pad", "dilation")}
    weight_bits = FLOAT if weight.is_float else run.profile.weight_bits(at["weight"], weight.bits)
    if weight_bits == FLOAT:
        assert weight.values is not None, f"{op.name} has no float weight for profile {run.profile.name}"
        y = ops.conv_float(run.float_in(op), weight.values, groups, **window)
    else:
        assert weight.codes is not None and op.inputs[0] in run.bits, f"{op.name}: integer weights, float input"
        a, levels = run.values[op.inputs[0]].astype(np.int64), 2 ** run.bits[op.inputs[0]] - 1
        most = int(np.prod(weight.shape[1:])) * (2**weight_bits - 1) * levels
        assert most < 2**31, f"{op.name}: sums up to {most} leave 32-bit integers"
        a = 2 * a - levels if at["signed"] else a
        y = ops.conv_codes(a, weight.codes[weight_bits], weight_bits, groups, **window).astype(F32)
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
    return np.concatenate([run.float_in(op, i) for i in range(len(op.inputs))], axis=3)


def _keep_codes(run: OracleRun, op: Op) -> np.ndarray:
    """The input of an op that codes pass through; its value has the same bits."""
    if op.inputs[0] in run.bits:
        run.bits[op.name] = run.bits[op.inputs[0]]
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
    return ops.softmax(run.float_in(op))


def _flatten(run: OracleRun, op: Op) -> np.ndarray:
    x = _keep_codes(run, op)
    return x.transpose(0, 3, 1, 2).reshape(x.shape[0], 1, 1, int(np.prod(x.shape[1:])))


def _pad(run: OracleRun, op: Op) -> np.ndarray:
    at = op.attributes
    return np.pad(run.float_in(op), [(0, 0), tuple(at["h"]), tuple(at["w"]), tuple(at["c"])])


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
}
