"""Builder: a Graph made op by op, with its tables fitted to the numbers they meet. Used by random_graphs.py.

It runs the oracle in every profile while it builds, so that codes spread over their range instead of sticking to an
end. assert_same is how tests compare values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from anyprec.format.graph import Graph, GraphProfile, Op, Weight
from anyprec.run.oracle import OracleRun
from anyprec.widths import FLOAT

F32 = np.float32
# Around the sizes kernels are made for: 8, 16, 32, 64, 128, and some between.
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 96, 100, 127, 128, 129, 130)
MOST_WORK = 1_500_000  # multiplications of one convolution, for the oracle's float profile
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 1e-42, -1e38, 3e38)


def assert_same(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    """Equal to the last bit, signs of zeros too; any NaN equals any NaN."""
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.dtype, got.shape, want.dtype, want.shape)
    if want.dtype == F32:
        got, want = (np.where(np.isnan(v), F32(np.nan), v).view(np.uint32) for v in (got, want))
    wrong = np.argwhere(got != want)
    assert not len(wrong), f"{what}: {len(wrong)} of {want.size} differ, first at {wrong[0].tolist()}"


class Builder:
    """A Graph in the making, and one oracle run of it per profile."""

    def __init__(
        self,
        rng: np.random.Generator,
        widths: Sequence[int],
        nests: bool,
        max_channels: int,
        special: bool,
        float_layers: bool,
    ) -> None:
        self.rng, self.widths, self.nests, self.max_channels = rng, widths, nests, max_channels
        self.integers = [k for k in widths if k != FLOAT]
        self.float_layers = float_layers and FLOAT in widths
        self.ops: list[Op] = []
        self.outputs: list[str] = []
        self.fixed_size = False
        self.tables: dict[str, np.ndarray] = {}
        self.weights: dict[str, Weight] = {}
        self.fixed: set[str] = set()  # quantize ops of 8 bits in every profile but the float one
        shape = (*rng.integers(1, 13, 2), self.draw_channels(12)) if self.chance(0.3) else (
            *rng.integers(5, 13, 2), self.draw_channels(12))  # fmt: skip
        self.x = rng.standard_normal((rng.integers(1, 4), *map(int, shape))).astype(F32)
        if special:
            places = rng.integers(0, self.x.size, max(1, self.x.size // 20))
            self.x.reshape(-1)[places] = rng.choice(SPECIAL, len(places)).astype(F32)
        mixed: list[GraphProfile] = []
        if self.integers:
            mixed = [GraphProfile(f"mix{i}", {}, {}) for i in range(2)]  # filled as layers come
            mixed.append(GraphProfile("pair", self.integers[-1], max(1, self.integers[-1] - 1)))
        self.profiles = (*(GraphProfile(str(k), k, k) for k in widths), *mixed)
        self.graph = Graph("random", (None, None, self.x.shape[3]), self.profiles, self._planes(), self.weights, (),
                           (), self.tables)  # fmt: skip
        self.runs = [OracleRun(self.graph, self.x, profile.name) for profile in self.profiles]

    def finish(self, value: str) -> tuple[Graph, np.ndarray]:
        h, w, c = (int(n) for n in self.x.shape[1:])
        free = not self.fixed_size and self.chance(0.5)
        outputs = [*dict.fromkeys([*self.outputs, value])]
        shape = (None, None, c) if free else (h, w, c)
        return replace(self.graph, input_shape=shape, ops=tuple(self.ops), outputs=tuple(outputs)), self.x

    # --- Draws ------------------------------------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def draw_channels(self, most: int | None = None) -> int:
        return self.pick(*(c for c in CHANNELS if c <= min(most or self.max_channels, self.max_channels)))

    def shape(self, value: str) -> tuple[int, int, int]:
        h, w, c = self.runs[0].values[value].shape[1:]
        return h, w, c

    def is_codes(self, value: str) -> bool:
        """Whether it is codes in the integer profiles."""
        source = self.source(value)
        return source is not None and source.kind == "quantize"

    def source(self, value: str) -> Op | None:
        """The op that made a value, or the quantize behind the max_pools and flattens that passed its codes on."""
        op = next((op for op in self.ops if op.name == value), None)
        while op is not None and op.kind in ("max_pool", "flatten"):
            op = next((o for o in self.ops if o.name == op.inputs[0]), None)
        return op

    def _planes(self) -> dict[int, tuple[int, ...]]:
        if self.nests:
            return {k: tuple(range(k)) for k in self.integers}
        before = [sum(self.integers[:i]) for i in range(len(self.integers))]
        return {k: tuple(range(first, first + k)) for k, first in zip(self.integers, before, strict=True)}

    # --- Ops --------------------------------------------------------------------------------------------------------

    def op(self, kind: str, *inputs: str, table: np.ndarray | None = None, name: str = "", **attributes: Any) -> str:
        name = name or self.name(kind)
        op = Op(name, kind, inputs, attributes)
        if table is not None:
            self.tables[name] = np.asarray(table, F32)
        for run in self.runs:
            run.step(op)
        self.ops.append(op)
        return name

    def name(self, kind: str) -> str:
        return f"{kind}.{len(self.ops)}"

    def levels(self, name: str) -> list[int]:
        """Of a quantize op to come, in each profile; in a mixed one its bits are drawn here. Float counts as 1."""
        for profile in self.profiles:
            if isinstance(profile.acts, dict) and name not in {*profile.acts, *self.fixed}:
                is_float = self.float_layers and self.chance(0.2)
                profile.acts[name] = FLOAT if is_float else self.pick(*range(1, 9))
        bits = [profile.act_bits(name, 8 if name in self.fixed else None) for profile in self.profiles]
        return [1 if k == FLOAT else 2**k - 1 for k in bits]

    def fit(self, value: str | list[np.ndarray], levels: Sequence[int] | None) -> np.ndarray:
        """A table (P, 2, C) that spreads a float value over 0 .. levels, or for None around 0 by about 1."""
        values = [run.values[value] for run in self.runs] if isinstance(value, str) else value
        c = values[0].shape[3]
        sign = np.where(self.rng.random(c) < 0.3, -1, 1)
        width, middle = self.rng.uniform(0.2, 0.5, c), self.rng.uniform(0.3, 0.6, c)
        dead = self.rng.random(c) < 0.03
        table = np.empty((len(values), 2, c))
        for row, x in zip(range(len(values)), values, strict=True):
            finite = np.where(np.isfinite(x) & (np.abs(x) < 1e30), x, 0).astype(np.float64).reshape(-1, c)
            mean, std = finite.mean(0), finite.std(0)
            std = np.maximum(std, max(0.3 * std.mean(), 1e-3 * np.abs(mean).mean(), 1e-20))
            n = 3.0 if levels is None else levels[row]
            table[row, 0] = np.where(dead, 0, sign * width * n / std)
            table[row, 1] = (0 if levels is None else middle * n) - mean * table[row, 0]
        return table.astype(F32)

    def quantize(self, x: str, affine: bool = True, name: str = "", signed: bool | None = None) -> str:
        name = name or self.name("quantize")
        signed = self.chance(0.3) if signed is None else signed
        levels = self.levels(name)
        return self.op(
            "quantize", x, name=name, signed=signed, rectify=not signed and self.chance(0.7), affine=affine,
            table=self.fit(x, levels) if affine else None, **({"bits": 8} if name in self.fixed else {}),
        )  # fmt: skip

    def conv(
        self,
        x: str,
        out: int | None = None,
        *,
        window: dict[str, Any] | None = None,
        groups: int | None = None,
        table: str = "",
        quantize: str = "",
        linear: bool = False,
        fixed: bool = False,
    ) -> str:
        """Of codes or floats. table: "" (drawn), "none" or "unit"; `quantize`: the op its table makes codes for.

        fixed: 8 bit weights in every profile but the float one; what it reads must then be codes in all of them.
        """
        h, w, c = self.shape(x)
        window = window or self.window(h, w)
        kh, kw = (1, 1) if linear else window["kernel"]
        if groups is None:
            groups = self.pick(1, 1, 1, c, *(g for g in (2, 3, 4, 8) if c % g == 0))
        if linear:
            groups = 1
        if out is None:
            out = self.draw_channels()
            out = max(groups, out // groups * groups)
            room = MOST_WORK // (h * w * kh * kw * (c // groups))
            out = max(groups, min(out, room // groups * groups))
        weight = self.weight((out, kh, kw, c // groups), x, fixed)
        attributes = {"weight": weight, "signed": False}
        if self.is_codes(x):
            attributes["signed"] = self.source(x).attributes["signed"]  # type: ignore[union-attr]
        if not linear:
            attributes |= window | {"groups": groups}
        kind = "linear" if linear else "conv"
        if not quantize and (table == "none" or (not table and self.chance(0.3))):
            return self.op(kind, x, **attributes, affine=False)
        probe = Op(self.name(kind), kind, (x,), {**attributes, "affine": False})
        values = [run.step(probe) for run in self.runs]
        fitted = self.fit(values, self.levels(quantize) if quantize else None)
        return self.op(kind, x, **attributes, affine=True, table=fitted, name=probe.name)

    def weight(self, shape: tuple[int, int, int, int], x: str, fixed: bool) -> str:
        """A new weight: quantized if x is codes. Its bits in a mixed profile are drawn; float where x is."""
        name = f"w{len(self.weights)}"
        values = (self.rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(F32)
        if not self.is_codes(x):
            self.weights[name] = Weight(shape, values)
            return name
        kept = values if FLOAT in self.widths else None
        codes = {8: self._codes(shape)}
        if fixed:
            self.weights[name] = Weight(shape, kept, codes, bits=8)
            return name
        codes = {k: codes[8] >> (8 - k) if self.nests else self._codes(shape, k) for k in self.integers}
        source = self.source(x)
        assert source is not None
        for profile in self.profiles:
            if isinstance(profile.weights, dict):
                is_float = profile.act_bits(source.name, source.bits) == FLOAT
                profile.weights[name] = FLOAT if is_float else self.pick(*self.integers)
        self.weights[name] = Weight(shape, kept, codes)
        return name

    def _codes(self, shape: tuple[int, ...], bits: int = 8) -> np.ndarray:
        top = 2**bits - 1
        how = self.rng.random()
        if how < 0.1:  # sums as large as they come: kernels that saturate would show
            return np.full(shape, self.pick(0, top), np.uint8)
        if how < 0.6:
            return self.rng.integers(0, top + 1, shape, np.uint8)
        bell = self.rng.normal(top / 2, top / 5, shape)
        return np.clip(np.rint(bell), 0, top).astype(np.uint8)

    def window(self, h: int, w: int, same: bool = False) -> dict[str, Any]:
        """Kernel, stride, pad and dilation of a convolution that fits; same: it keeps height and width."""
        parts: dict[str, list[int]] = {"kernel": [], "stride": [], "dilation": []}
        before, after = [], []
        for size in (h, w):
            kernel = parts["kernel"][0] if parts["kernel"] and self.chance(0.7) else self.pick(1, 1, 3, 3, 3, 5, 2)
            dilation = self.pick(1, 1, 1, 2)
            stride = 1 if same else self.pick(1, 1, 1, 2, 2, 3)
            reach = dilation * (kernel - 1)
            if same or self.chance(0.5):
                pads = [reach // 2, reach - reach // 2]
            else:
                pads = [
                    int(p) for p in self.rng.integers(0, reach + 2, 2)
                ]  # now and then a window in the padding alone
            if size + sum(pads) <= reach:
                pads[0] += reach + 1 - size - sum(pads)
            for key, one in (("kernel", kernel), ("stride", stride), ("dilation", dilation)):
                parts[key].append(one)
            before.append(pads[0])
            after.append(pads[1])
        return {**parts, "pad": [*before, *after]}

    def pool_window(self, h: int, w: int, dilated: bool) -> dict[str, Any]:
        """As torch's pools: at most half the kernel of padding, and some tap of each window in the image."""
        sides = []
        for size in (h, w):
            kernel = int(min(self.pick(1, 2, 2, 3, 3), size))
            dilation = 2 if dilated and kernel > 1 and 2 * (kernel - 1) < size and self.chance(0.3) else 1
            pad = int(self.rng.integers(0, kernel // 2 + 1))
            sides.append((kernel, int(self.pick(1, 2, 2, 3)), pad, dilation))
        kernel, stride, pad, dilation = (list(part) for part in zip(*sides, strict=True))
        window = {"kernel": kernel, "stride": stride, "pad": pad * 2, "ceil": self.chance(0.5)}
        return window | ({"dilation": dilation} if dilated else {})

    # --- Parts of blocks --------------------------------------------------------------------------------------------

    def fixed_quantize(self, x: str) -> str:
        """8 bits in every profile but the float one."""
        name = self.name("fixed")
        self.fixed.add(name)
        return self.quantize(x, name=name)

    def always_codes(self, value: str) -> bool:
        """Whether a value is codes in every profile but the uniform float one."""
        source = self.source(value)
        mixed = [p for p in self.profiles if isinstance(p.acts, dict)]
        return source is not None and all(p.act_bits(source.name, source.bits) != FLOAT for p in mixed)

    def conv_to_codes(self, x: str, out: int | None = None, fixed: bool = False, **options: Any) -> str:
        """conv -> quantize without affine: the table of the conv makes the codes, `fixed` ones always of 8 bits."""
        name = f"codes.{len(self.ops)}"
        if fixed:
            self.fixed.add(name)
        return self.quantize(self.conv(x, out, quantize=name, **options), affine=False, name=name)

    def like_shape(self, x: str, h: int, w: int, c: int) -> str:
        """A float value of height h, width w and c channels made of x."""
        if self.shape(x)[:2] != (h, w):
            mode, align = self.pick(("nearest", False), ("bilinear", False), ("bilinear", True))
            x = self.op("resize", x, mode=mode, align=align, size=[h, w], scale=None, like=None)
        if self.shape(x)[2] != c:
            one = {"kernel": [1, 1], "stride": [1, 1], "pad": [0] * 4, "dilation": [1, 1]}
            x = self.conv(self.quantize(x), c, window=one, groups=1)
        return x
