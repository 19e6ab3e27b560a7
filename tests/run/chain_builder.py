"""Random graphs of format 3: values of any number of axes, several inputs, codes through reshapes and transposes.

A Chain is built op by op; every profile's oracle runs along, so that shapes are known and tables fit what they see.
Used by test_format3.py and sanitize.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from anyprec.errors import BadGraph
from anyprec.format import Graph, GraphProfile, Op, Weight
from anyprec.format.check import check_graph
from anyprec.format.planes import nested_planes
from anyprec.format.record import to_record
from anyprec.format.schema import FUNCTIONS, GATES
from anyprec.run.oracle import OracleRun
from anyprec.widths import FLOAT

F32 = np.float32
WIDTHS = (1, 2, 4, 8)
MOST = 6000  # numbers of a value


class Chain:
    def __init__(self, seed: int, shape: tuple[int, ...], batch: int, more: dict[str, tuple[int, ...]] | None = None):
        self.rng = np.random.default_rng(seed)
        self.widths = (*WIDTHS, FLOAT)
        self.profiles = tuple(GraphProfile(str(k), k, k) for k in self.widths)
        self.weights: dict[str, Weight] = {}
        self.tables: dict[str, np.ndarray] = {}
        self.ops: list[Op] = []
        self.codes: dict[str, Op] = {}  # value -> the quantize it comes from
        self.shape_given = shape
        self.arrays = {"input": self.normal((batch, *shape))}
        for name, sizes in (more or {}).items():
            self.arrays[name] = self.normal((batch, *sizes))
        graph = Graph("chain", (*(None for _ in shape[:-1]), shape[-1]), self.profiles, nested_planes(WIDTHS),
                      self.weights, (), (), self.tables)  # fmt: skip
        others = {name: x for name, x in self.arrays.items() if name != "input"}
        self.graph = graph
        self.runs = [OracleRun(graph, self.arrays["input"], p.name, others) for p in self.profiles]
        for name, sizes in (more or {}).items():
            self.op("input", name=name, shape=(*(None for _ in sizes[:-1]), sizes[-1]), integer=False)

    def finish(self, *outputs: str) -> tuple[Graph, dict[str, np.ndarray]]:
        """Sizes of the inputs are free in every other graph, where its tables allow it."""
        free = replace(self.graph, ops=tuple(self.ops), outputs=outputs)
        if self.chance(0.5):
            try:
                check_graph(to_record(free, {}))
                return free, self.arrays
            except BadGraph:
                pass
        fixed = tuple(
            replace(op, attributes={**op.attributes, "shape": self.arrays[op.name].shape[1:]})
            if op.kind == "input" else op
            for op in self.ops
        )  # fmt: skip
        return replace(free, ops=fixed, input_shape=self.shape_given), self.arrays

    # --- Draws ------------------------------------------------------------------------------------------------------

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(F32)

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def whole(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def shape(self, value: str) -> tuple[int, ...]:
        return self.runs[0].values[value].shape[1:]

    # --- Ops --------------------------------------------------------------------------------------------------------

    def op(self, kind: str, *inputs: str, table: np.ndarray | None = None, name: str = "", **attributes: Any) -> str:
        name = name or f"{kind}.{len(self.ops)}"
        op = Op(name, kind, inputs, attributes)
        if table is not None:
            self.tables[name] = np.asarray(table, F32)
        for run in self.runs:
            with np.errstate(all="ignore"):
                run.step(op)
        if kind == "quantize":
            self.codes[name] = op
        elif kind in ("reshape", "transpose", "slice", "gather", "max_pool") and inputs[0] in self.codes:
            self.codes[name] = self.codes[inputs[0]]
        self.ops.append(op)
        return name

    def float_weight(self, *shape: int, scale: float = 1.0) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = Weight(shape, self.normal(shape) * F32(scale))
        return name

    def constant(self, *shape: int) -> str:
        flat = [1, 1, 1, math.prod(shape)]
        return self.op("constant", weight=self.float_weight(*flat), shape=shape)

    def layer_weight(self, shape: tuple[int, ...], x: str) -> str:
        if x not in self.codes:
            return self.float_weight(*shape, scale=1 / math.sqrt(math.prod(shape[1:])))
        name = f"w{len(self.weights)}"
        widest = self.rng.integers(0, 256, shape, np.uint8)
        codes = {k: widest >> (8 - k) for k in WIDTHS}
        self.weights[name] = Weight(shape, self.normal(shape), codes)
        return name

    def fit(self, values: list[np.ndarray], levels: bool) -> np.ndarray:
        """(P, 2, C): spreads a value over the codes of each profile, or to about 1."""
        table = np.empty((len(values), 2, values[0].shape[-1]))
        for row, (x, bits) in enumerate(zip(values, self.widths, strict=True)):
            flat = np.where(np.isfinite(x), x, 0).astype(np.float64).reshape(-1, x.shape[-1])
            top = 2**bits - 1 if levels and bits != FLOAT else 1
            table[row, 0] = top * self.rng.uniform(0.2, 0.5) / np.maximum(flat.std(), 1e-6)
            table[row, 1] = (0.5 * top if levels else 0) - flat.mean() * table[row, 0]
        return table.astype(F32)

    def quantize(self, x: str) -> str:
        signed = self.chance(0.4)
        table = self.fit([run.values[x] for run in self.runs], True)
        return self.op("quantize", x, signed=signed, rectify=not signed, affine=True, table=table)

    def layer(self, kind: str, x: str, shape: tuple[int, ...], **attributes: Any) -> str:
        """A linear or conv; quantized where x is codes."""
        signed = x in self.codes and self.codes[x].attributes["signed"]
        attributes = {"weight": self.layer_weight(shape, x), "signed": signed, **attributes}
        probe = Op("probe", kind, (x,), {**attributes, "affine": False})
        table = self.fit([run.step(probe) for run in self.runs], False)
        for run in self.runs:
            del run.values["probe"]
        return self.op(kind, x, **attributes, affine=True, table=table)

    def linear(self, x: str, out: int | None = None) -> str:
        return self.layer("linear", x, (out or self.pick(1, 5, 16, 33), 1, 1, self.shape(x)[-1]))

    def transposed_conv(self, x: str) -> str:
        h, w, c = self.shape(x)
        groups = self.pick(1, 1, c, *(g for g in (2, 3) if c % g == 0))
        out = groups * self.pick(1, 2, 5) if groups < c else self.pick(c, 2 * c)
        kernel, stride, dilation, before, after, extra = [], [], [], [], [], []
        for size in (h, w):
            k, s, d = self.whole(1, 4), self.whole(1, 3), self.whole(1, 2)
            most = (size - 1) * s + d * (k - 1)  # one pixel must be left
            kernel.append(k), stride.append(s), dilation.append(d)
            before.append(self.whole(0, min(most, d * (k - 1) + 1)))
            after.append(self.whole(0, min(most - before[-1], d * (k - 1) + 1)))
            extra.append(self.whole(0, max(s, d) - 1))
        return self.layer(
            "conv", x, (out, *kernel, c // groups), kernel=tuple(kernel), stride=tuple(stride),
            pad=(*before, *after), dilation=tuple(dilation), groups=groups, transposed=True, output_pad=tuple(extra),
        )  # fmt: skip

    # --- Random ops, each from a value to a value -------------------------------------------------------------------

    def reshape(self, x: str) -> str:
        left, sizes = math.prod(self.shape(x)), []
        for _ in range(self.whole(0, 4)):
            sizes.append(self.pick(*(n for n in range(1, min(left, 40) + 1) if left % n == 0)))
            left //= sizes[-1]
        sizes.insert(self.whole(0, len(sizes)), left)
        if self.chance(0.5):
            sizes[self.whole(0, len(sizes) - 1)] = None
        return self.op("reshape", x, shape=tuple(sizes))

    def transpose(self, x: str) -> str:
        rank = len(self.shape(x))
        return self.op("transpose", x, order=tuple(int(i) for i in self.rng.permutation(rank)))

    def slice(self, x: str) -> str:
        axis = self.whole(0, len(self.shape(x)) - 1)
        size = self.shape(x)[axis]
        start = self.whole(0, size - 1)
        stop = self.pick(None, self.whole(start + 1, size + 3), size)
        if stop is not None and stop < size and self.chance(0.5):
            stop -= size
        return self.op("slice", x, axis=axis, start=self.pick(start, start - size), stop=stop, step=self.whole(1, 3))

    def gather(self, x: str) -> str:
        axis = self.whole(0, len(self.shape(x)) - 1)
        size = self.shape(x)[axis]
        index = tuple(self.whole(0, size - 1) for _ in range(self.whole(1, min(2 * size, 9))))
        return self.op("gather", x, axis=axis, index=index)

    def pointwise(self, x: str) -> str:
        return self.op("pointwise", x, function=self.pick(*FUNCTIONS))

    def binary(self, x: str) -> str:
        shape = self.shape(x)
        other = tuple(1 if self.chance(0.4) else n for n in shape)
        function = self.pick("add", "sub", "mul", "div", "max", "min")
        y = self.pick(*(v for v in self.runs[0].values if self.shape(v) == shape and v not in self.codes))
        if self.chance(0.7):
            y = self.constant(*other)
        return self.op("binary", *(self.pick((x, y), (y, x))), function=function)

    def wider(self, x: str) -> str:
        """A value of which some axes have size 1, against one of other sizes."""
        shape = self.shape(x)
        if math.prod(shape) > MOST // 8:
            return self.pointwise(x)
        other = tuple(self.whole(1, 3) if n == 1 else self.pick(1, n) for n in shape)
        return self.op("binary", x, self.constant(*other), function="mul")

    def axes(self, x: str) -> tuple[int, ...]:
        rank = len(self.shape(x))
        return tuple(sorted(int(i) for i in self.rng.choice(rank, self.whole(1, rank), replace=False)))

    def reduce(self, x: str) -> str:
        return self.op("reduce", x, function=self.pick("sum", "mean", "max", "min"), axes=self.axes(x))

    def norm(self, x: str) -> str:
        return self.op("norm", x, axes=self.axes(x), eps=self.pick(0, 1e-5, 0.5))

    def softmax(self, x: str) -> str:
        return self.op("softmax", x, **self.pick({}, {"single": True}))

    def concat(self, x: str) -> str:
        axis = self.whole(0, len(self.shape(x)) - 1)
        part = self.op("slice", x, axis=axis, start=0, stop=self.whole(1, self.shape(x)[axis]), step=1)
        return self.op("concat", *self.pick((x, part), (part, x, part)), axis=axis)

    def matmul(self, x: str) -> str:
        shape = self.shape(x)
        if len(shape) < 2:
            return self.linear(x)
        k, n, transposed = shape[-1], self.pick(1, 3, 17, 40), self.chance(0.5)
        leading = tuple(self.pick(1, size) for size in shape[:-2])
        y = self.constant(*leading, *((n, k) if transposed else (k, n)))
        if self.chance(0.5):  # of a value that depends on the image
            y = self.op("pointwise", y, function="tanh")
        if transposed and self.chance(0.4):
            y = x
        return self.op("matmul", x, y, transposed=transposed)

    def codes_product(self, a: str, b: str, transposed: bool) -> str:
        """Of two values of codes."""
        table = self.rng.uniform(0.001, 0.01, (len(self.widths), 2))
        return self.op("matmul", a, b, transposed=transposed, table=table)

    def integer_matmul(self, x: str) -> str:
        shape = self.shape(x)
        if len(shape) < 2:
            return self.linear(x)
        k, n, transposed = shape[-1], self.pick(1, 3, 17, 40), self.chance(0.5)
        leading = tuple(self.pick(1, size) for size in shape[:-2])
        y = self.op("pointwise", self.constant(*leading, *((n, k) if transposed else (k, n))), function="tanh")
        a, b = self.quantize(x), self.quantize(y)
        if len(shape) == 3 and transposed:  # codes brought into their order behind the quantize
            b = self.op("transpose", self.op("transpose", b, order=(1, 0, 2)), order=(1, 0, 2))
        return self.codes_product(a, b, transposed)

    def recurrent(self, x: str) -> str:
        function, hidden = self.pick("lstm", "gru"), self.pick(1, 4, 18)
        count = math.prod(self.shape(x)[:-1])
        if count > 40 or count * GATES[function] * hidden > MOST:
            return self.pointwise(x)
        rows = GATES[function] * hidden
        if self.chance(0.5) or len(self.shape(x)) < 2:  # else its leading axes are sequences
            x = self.op("reshape", x, shape=(None, self.shape(x)[-1]))
        x = self.linear(x, rows)
        weight = self.float_weight(rows, 1, 1, hidden + 1, scale=0.5)
        return self.op("recurrent", x, function=function, weight=weight, reverse=self.chance(0.5))

    def quantized(self, x: str) -> str:
        """Codes, moved about, then read by a layer or turned to floats."""
        x = self.quantize(x)
        for _ in range(self.whole(0, 3)):
            x = self.pick(self.reshape, self.transpose, self.slice, self.gather)(x)
        if len(self.shape(x)) == 3 and self.chance(0.6):
            return self.transposed_conv(x)
        if self.chance(0.2):
            return self.op("dequantize", x, table=self.rng.uniform(0.1, 1, (len(self.widths), 2)))
        return self.linear(x)

    def images(self, x: str) -> str:
        count = math.prod(self.shape(x))
        sizes = [n for n in (1, 2, 3, 5, 8, 16) if count % n == 0]
        c = self.pick(*sizes)
        w = self.pick(*(n for n in (1, 2, 3, 4, 5, 7) if count // c % n == 0))
        x = self.op("reshape", x, shape=(None, w, c))
        return self.transposed_conv(x) if self.shape(x)[0] * w <= 80 else x

    def affine(self, x: str) -> str:
        return self.op("affine", x, table=self.fit([run.values[x] for run in self.runs], False))

    def clip(self, x: str) -> str:
        return self.op("clip", x, table=np.tile([-0.5, 1.5], (len(self.widths), 1)))

    def add(self, x: str) -> str:
        same = [v for v in self.runs[0].values if self.shape(v) == self.shape(x) and v not in self.codes]
        return self.op("add", x, self.pick(*same))

    def any(self, x: str) -> str:
        """One drawn op; values stay small and tame."""
        makers: list[Callable[[str], str]] = [
            self.reshape, self.transpose, self.slice, self.gather, self.pointwise, self.binary, self.wider, self.reduce,
            self.norm, self.softmax, self.concat, self.matmul, self.recurrent, self.quantized, self.quantized,
            self.integer_matmul, self.images, self.affine, self.clip, self.add, self.linear, self.reshape,
        ]  # fmt: skip
        x = self.pick(*makers)(x)
        if math.prod(self.shape(x)) > MOST:
            axis = int(np.argmax(self.shape(x)))
            x = self.op("slice", x, axis=axis, start=0, stop=self.shape(x)[axis] // 3, step=1)
        values = [run.values[x] for run in self.runs]
        if not all(np.isfinite(v).all() and np.abs(v).max() < 1e4 for v in values) and self.chance(0.7):
            x = self.op("pointwise", x, function="tanh")
        return x


def random_chain(seed: int) -> tuple[Graph, dict[str, np.ndarray]]:
    """A graph of about ten random ops, and its inputs."""
    rng = np.random.default_rng((seed, 1))
    rank = int(rng.integers(1, 6))
    most = {1: 60, 2: 19, 3: 9, 4: 5, 5: 4}[rank]
    shape = tuple(int(n) for n in rng.integers(1, most + 1, rank))
    more = {"other": shape} if rng.random() < 0.4 else {}
    chain = Chain(seed, shape, int(rng.integers(1, 4)), more)
    value = "input"
    if more:
        value = chain.op("binary", "input", "other", function=chain.pick("add", "mul", "max"))
    seen = [value]
    for _ in range(int(rng.integers(3, 12))):
        value = chain.any(value)
        seen.append(value)
    made = [op.name for op in chain.ops if op.name in seen and op.name not in chain.codes]
    outputs = [value] if rng.random() < 0.5 else [*{value: 0, made[int(rng.integers(len(made)))]: 0}]
    return chain.finish(*outputs)
