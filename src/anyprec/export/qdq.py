"""A Graph as an ONNX model of integers: QuantizeLinear -> Clip -> DequantizeLinear around layers with int8 weights.

    float --QuantizeLinear--> uint8 --Clip(0, n)--> codes --DequantizeLinear(1, 0)--> a --.
                                                                                           Conv --> float
    int8 m (2c + 1 - 2^k) --DequantizeLinear(|scale| / m, 0), per output channel-----------'

Activations are counted in codes (step 1, zero point 0); tables are folded into weight scales and biases. A negative
scale negates its channel's weights, since engines want positive ones. m = floor(127 / (2^k - 1)) spreads few-bit
weights over int8 (over -64 .. 64 where codes have 8 bits): the step of the int32 bias, which is |scale| / m, becomes as
small as int8 allows, and two products still fit the 16 bits of vpmaddubsw, which saturates. 2c + 1 - 256 does not fit
int8: 8-bit weights are written as floats, and their layers run in float. So do convolutions of signed codes with
padding, for 2 code - n is never 0. Called by export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anyprec.export.any_axes import AnyAxesWriter
from anyprec.export.onnx_writer import Value
from anyprec.format.graph import Graph, Op
from anyprec.format.shapes import Shape
from anyprec.widths import FLOAT

INT8 = 127
INT16 = 32767
LARGEST_SUM = 2**31 - 1
MOST_MOVED = 1e-3  # of a layer's codes that may differ from ours; layers of few products and 5 to 7 bits can have more
TINY = 1e-37  # steps below this leave float32's range


@dataclass(frozen=True)
class Int8Fit:
    """A layer as int8 weights factor (2c + 1 - 2^k), the step they count in, and a bias: in steps if `whole`."""

    factor: np.ndarray  # (out,)
    step: np.ndarray
    bias: np.ndarray
    whole: bool
    after: np.ndarray | None = None  # a float that is added to the result


class QdqWriter(AnyAxesWriter):
    """After writing, `int8_layers` are the names of the layers with int8 weights."""

    def __init__(self, graph: Graph, size: tuple[int, int] | Mapping[str, Shape], profile: str) -> None:
        self.int8_layers: list[str] = []
        super().__init__(graph, size, profile)

    def quantize(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        if op.attributes["affine"] and op.name not in self.folded:
            x = self.scale_shift(op, x, *self.step(op))
        bits = self.profile.act_bits(op.name, op.bits)
        if bits == FLOAT:
            return replace(x, name=self.node("Relu", op, [x.name])) if op.attributes["rectify"] else x
        codes = self.node("QuantizeLinear", op, [x.name, *self.unit_step()], "codes")
        levels = 2**bits - 1
        if bits < 8:
            ends = [self.constant(f"(code {end})", np.array(end), np.uint8) for end in (0, levels)]
            codes = self.node("Clip", op, [codes, *ends], "clipped")
        return replace(x, name=codes, levels=levels, signed=op.attributes["signed"])

    def unit_step(self) -> list[str]:
        """Scale and zero point of codes."""
        return [self.constant("(code step)", np.array(1.0)), self.constant("(code 0)", np.array(0), np.uint8)]

    def dequantize(self, op: Op) -> Value:
        x = self.values[op.inputs[0]]
        if x.levels is None:
            return x
        name = self.read_codes(op, replace(x, signed=False), integer=False)
        s, t = self.table(op)
        name = self.node("Mul", op, [name, self.constant(f"{op.name}.scale", np.array(s))], "scaled")
        made = self.node("Add", op, [name, self.constant(f"{op.name}.shift", np.array(t))])
        return replace(x, name=made, levels=None, signed=False)

    def read_codes(self, op: Op, x: Value, integer: bool) -> str:
        """Codes as floats: as they are for an integer layer, 2 code - n where they are signed for a float one.

        A float layer reads them through Cast: behind DequantizeLinear, ONNX Runtime rounds float weights to int8.
        """
        if integer:
            return self.node("DequantizeLinear", op, [x.name, *self.unit_step()], "read")
        name = self.node("Cast", op, [x.name], "read", to=self.onnx.TensorProto.FLOAT)
        if not x.signed:
            return name
        doubled = self.node("Add", op, [name, name], "doubled")
        levels = self.constant(f"(levels {x.levels})", np.array(float(x.levels or 0)))
        return self.node("Sub", op, [doubled, levels], "signed")

    def conv(self, op: Op) -> Value:
        at, x, shape = op.attributes, self.values[op.inputs[0]], self.shape(op)
        scale, shift, last = self.folded_table(op)
        weight, fit = self.weight(at["weight"]), None
        after: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        rows = op.kind == "linear" and x.axes
        flat = op.kind == "linear" and not rows and shape[:2] == (1, 1)
        name = self.rows(op, x) if rows else x.name if flat else self.image(op, x)
        if x.levels is not None:
            fit = self.fit_int8(op, weight, scale, shift, last, x)
            name = self.read_codes(op, replace(x, name=name), integer=fit is not None)
        matrix = weight[:, 0, 0, :].T if rows or flat else weight.transpose(0, 3, 1, 2)  # (in, out), (out, in, kh, kw)
        if fit is not None:
            read, after = self.int8_layer(op, matrix, fit), (None, fit.after)
        else:
            factor, shift, after = self.float_numbers(x, weight, scale, shift, last)
            scaled = matrix * (factor if rows or flat else factor[:, None, None, None])
            if at.get("transposed"):
                scaled = transposed_weight(scaled, at["groups"])
            read = [self.constant(f"{op.name}.weight", scaled)]
            read += [] if at.get("transposed") else [self.constant(f"{op.name}.bias", shift)]
        if rows:
            return self.finish(op, Value(self.node("Gemm", op, [name, *read]), shape, rank=2, axes=True), *after)
        if flat:
            if x.rank == 4:
                name = self.node("Flatten", op, [name], "flat", axis=1)
            return self.finish(op, Value(self.node("Gemm", op, [name, *read]), shape, rank=2), *after)
        how = {"dilations": list(at.get("dilation", (1, 1))), "group": at.get("groups", 1), **self.window(op)}
        if at.get("transposed"):
            return self.finish(op, Value(self.transposed_conv(op, name, read[0], shift, how), shape), *after)
        return self.finish(op, Value(self.node("Conv", op, [name, *read], **how), shape), *after)

    def matmul(self, op: Op) -> Value:
        """Of codes: whole numbers in float, then the scale and the shift of the product."""
        read = [self.values[name] for name in op.inputs]
        if read[0].levels is None:
            return super().matmul(op)
        a, b = (self.read_codes(op, replace(x, name=self.full(op, x)), integer=False) for x in read)
        made, (s, t) = self.product(op, a, b, "sums"), self.table(op)
        made = self.node("Mul", op, [made, self.constant(f"{op.name}.scale", np.array(s))], "scaled")
        if t:
            made = self.node("Add", op, [made, self.constant(f"{op.name}.shift", np.array(t))], "shifted")
        return self.axes_value(op, made)

    def float_numbers(
        self, x: Value, weight: np.ndarray, scale: np.ndarray, shift: np.ndarray, last: Op
    ) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray | None, np.ndarray | None]]:
        """Of a layer that runs in float: factors of its weights, its bias, and what is done to its result.

        Sums of signed codes whose result is no code are kept whole, and scaled afterwards: so 0 stays 0 (see fit_int8).
        """
        if not x.signed or x.levels is None or last.kind == "quantize":
            return scale, shift, (None, None)
        if np.abs(weight).sum((1, 2, 3)).max() * x.levels >= 2**24:  # beyond, float has no whole numbers
            return scale, shift, (None, None)
        return np.ones_like(scale), np.zeros_like(shift), (scale, shift)

    def finish(self, op: Op, made: Value, scale: np.ndarray | None, shift: np.ndarray | None) -> Value:
        """scale y + shift of a layer's result, where that is not part of the layer."""
        channels = (1, -1) if made.rank == 2 else (1, -1, 1, 1)
        if scale is not None:
            factors = self.constant(f"{op.name}.scale", scale.reshape(channels))
            made = replace(made, name=self.node("Mul", op, [made.name, factors], "scaled"))
        if shift is not None and shift.any():
            terms = self.constant(f"{op.name}.shift", shift.reshape(channels))
            made = replace(made, name=self.node("Add", op, [made.name, terms], "shifted"))
        return made

    def transposed_conv(self, op: Op, x: str, weight: str, shift: np.ndarray, how: dict[str, Any]) -> str:
        """Output padding first undoes padding. What is left lies beyond all taps, where only the shift is."""
        pads, extra = how["pads"], list(op.attributes["output_pad"])
        for axis in (0, 1):
            undone = min(extra[axis], pads[2 + axis])
            pads[2 + axis], extra[axis] = pads[2 + axis] - undone, extra[axis] - undone
        if not any(extra):
            bias = self.constant(f"{op.name}.bias", shift)
            return self.node("ConvTranspose", op, [x, weight, bias], **how)
        made = self.node("ConvTranspose", op, [x, weight], "taps", **how)
        ends = self.constant(f"{op.name}.ends", np.array([0, 0, 0, 0, 0, 0, *extra]))
        column = self.constant(f"{op.name}.column", shift.reshape(1, -1, 1, 1))
        return self.node("Add", op, [self.node("Pad", op, [made, ends], "padded"), column])

    def fit_int8(
        self, op: Op, weight: np.ndarray, scale: np.ndarray, shift: np.ndarray, last: Op, x: Value
    ) -> Int8Fit | None:
        """The numbers of a layer in int8, or None where it must stay float to give our codes."""
        assert x.levels is not None
        bits = self.weight_bits(op.attributes["weight"])
        padded, transposed = any(op.attributes.get("pad", ())), op.attributes.get("transposed")
        if bits == 8 or transposed or (x.signed and padded) or self.is_also_quantized(last):
            return None
        # Two products fit 16 bits. With codes of 8 bits, up to 255, weights must then stay below 65.
        spread, total = min(INT8, INT16 // (2 * x.levels)) // (2**bits - 1), weight.sum((1, 2, 3))
        if spread < 1:
            return None
        plain = shift
        if x.signed:  # a = 2 code - n
            shift, scale = shift - x.levels * scale * total, 2 * scale
            spread -= spread % 2 if spread > 1 else 0
        dead = scale == 0  # a channel that ignores its input: all weights 0, the bias exact in any step
        step = np.where(dead, np.maximum(np.abs(shift), 1e-30) / 2**20, np.abs(scale) / spread)
        factor = spread * np.where(dead, 0, np.sign(scale))
        acts = self.profile.act_bits(last.name, last.bits) if last.kind == "quantize" else FLOAT
        if acts == FLOAT and x.signed:
            # -n sum(w) is a whole number of steps: added as such, a sum of 0 stays 0, which in a signed value that is
            # quantized next lies in the middle of two codes.
            bias = -factor * x.levels * total / 2
            fits = np.array_equal(bias, np.rint(bias)) and self.sums_fit(weight, spread, x.levels, bias)
            return Int8Fit(factor, step, bias, whole=True, after=plain) if fits else None
        if acts == FLOAT:
            return Int8Fit(factor, step, shift, whole=False)
        bias, live = np.rint(shift / step), np.flatnonzero(~dead)
        step[live], bias[live], moved = same_codes(np.abs(scale[live]), shift[live], spread, 2**acts - 1)
        usable = moved <= MOST_MOVED and self.sums_fit(weight, spread, x.levels, bias) and np.all(step > TINY)
        return Int8Fit(factor, step, bias, whole=True) if usable else None

    def sums_fit(self, weight: np.ndarray, spread: int, levels: int, bias: np.ndarray) -> bool:
        """32 bits hold every sum."""
        largest = np.abs(weight).sum((1, 2, 3)) * spread * levels + np.abs(bias)
        return bool(np.all(largest <= LARGEST_SUM))

    def is_also_quantized(self, op: Op) -> bool:
        """A float result that is also quantized as it is: ONNX Runtime would round the float bias of such a layer."""
        readers = [other for other in self.graph.ops if op.name in other.inputs] if op.kind != "quantize" else []
        return any(other.kind == "quantize" and not other.attributes["affine"] for other in readers)

    def int8_layer(self, op: Op, matrix: np.ndarray, fit: Int8Fit) -> list[str]:
        """Names of weight and bias. The bias is int32 where codes are made of the result: engines then run the layer in
        integers from end to end. Elsewhere it is float, and so is the result."""
        self.int8_layers.append(op.name)
        axis = 1 if matrix.ndim == 2 else 0  # of the output channels
        zeros = np.zeros(len(fit.step))
        step = self.constant(f"{op.name}.weight_step", fit.step)
        codes = matrix * fit.factor.reshape((1, -1) if axis else (-1, 1, 1, 1))
        names = [
            self.constant(f"{op.name}.weight", codes, np.int8), step,
            self.constant(f"{op.name}.weight_zero", zeros, np.int8),
        ]  # fmt: skip
        weight = self.node("DequantizeLinear", op, names, "weight_read", axis=axis)
        if not fit.whole:
            return [weight, self.constant(f"{op.name}.bias", fit.bias)]
        names = [
            self.constant(f"{op.name}.bias", fit.bias, np.int32), step,
            self.constant(f"{op.name}.bias_zero", zeros, np.int32),
        ]  # fmt: skip
        return [weight, self.node("DequantizeLinear", op, names, "bias_read", axis=0)]


def transposed_weight(weight: np.ndarray, groups: int) -> np.ndarray:
    """(out, in / groups, kh, kw) -> (in, out / groups, kh, kw), as ConvTranspose has it."""
    out, inside, *kernel = weight.shape
    split = weight.reshape(groups, out // groups, inside, *kernel).swapaxes(1, 2)
    return split.reshape(groups * inside, out // groups, *kernel)


def same_codes(scale: np.ndarray, shift: np.ndarray, spread: int, levels: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(step, bias) per channel, bias a whole number, such that round(step (spread acc + bias)) is the code
    round(scale acc + shift) for every integer acc; and the share of codes that move all the same.

    Merely rounding shift / step moves one threshold in `spread` past an integer; at 2 bits that is one code in 10,000,
    and 1 % of the answers. Up to 4 bits step and bias can nearly always be chosen so that none moves; beyond, they are
    chosen so that few do.
    """
    if not len(scale):
        return scale, shift, 0.0
    made = [best_step(s, t, spread, levels) for s, t in zip(scale.tolist(), shift.tolist(), strict=True)]
    step, bias = (np.array(numbers) for numbers in zip(*made, strict=True))
    ends = np.arange(levels) + 0.5
    wanted = np.floor((ends - shift[:, None]) / scale[:, None])  # (C, n): the last acc before each threshold
    got = np.floor((ends / step[:, None] - bias[:, None]) / spread)
    # A threshold that moved by one takes one acc to another code; a code has 1 / scale of them.
    moved = np.abs(wanted - got).mean(1) * np.minimum(scale, 1)
    return step, bias, float(moved.mean())


def best_step(scale: float, shift: float, spread: int, levels: int) -> tuple[float, float]:
    """Code j + 1 starts where acc exceeds F_j = floor((j + 1/2 - shift) / scale). With g = 1 / step, (j + 1/2) g - bias
    must lie between spread F_j and spread (F_j + 1): a range of g for each j and bias. Of the g that lie in most of
    these ranges (low codes count more: there are more of them), the one farthest from their ends.
    """
    ends = np.arange(levels) + 0.5  # (n,)
    first = spread * np.floor((ends - shift) / scale)
    rounded = float(np.rint(shift / scale * spread))
    exact = spread / scale
    found, best = (0.0, 0.0), (exact, rounded)
    for bias in rounded + np.arange(-max(spread, 2), max(spread, 2) + 1):
        low, high = (first + bias) / ends, (first + bias + spread) / ends
        edges = np.unique(np.concatenate([low, high]))
        edges = edges[(edges > 0.9 * exact) & (edges < 1.1 * exact)]
        if len(edges) < 2:
            continue
        middles = (edges[:-1] + edges[1:]) / 2
        inside = (low < middles[:, None]) & (middles[:, None] < high)  # (candidates, n)
        right = inside @ (1 / ends)
        room = np.where(inside, np.minimum(middles[:, None] - low, high - middles[:, None]) * ends, np.inf).min(1)
        at = np.lexsort((room, right))[-1]
        if (right[at], room[at]) > found:
            found, best = (float(right[at]), float(room[at])), (float(middles[at]), float(bias))
    return 1 / best[0], best[1]
