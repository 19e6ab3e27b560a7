"""Small valid graphs for the format tests: `tiny` is one fixed network, `build` makes random ones of any ops."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyprec.format import Graph, GraphProfile, Op, Weight, nested_planes, separate_planes, write

Choose = Callable[[Sequence[Any]], Any]


class Builder:
    """Grows a graph op by op. Keeps what each value is: (h, w, c, the quantize op that made it or None)."""

    def __init__(self, choose: Choose, seed: int, profiles: Sequence[GraphProfile], planes: dict, size: tuple) -> None:
        self.choose, self.rng = choose, np.random.default_rng(seed)
        self.profiles, self.planes = profiles, planes
        self.keep_float = any(profile.is_float for profile in profiles)
        self.values = {"input": (*size, None)}
        self.ops: list[Op] = []
        self.weights: dict[str, Weight] = {}
        self.tables: dict[str, np.ndarray] = {}
        self.signed: dict[str, bool] = {}

    def table(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal((len(self.profiles), *shape)).astype(np.float32)

    def op(self, kind: str, inputs: Sequence[str], shape: tuple, **attributes: Any) -> str:
        name = f"{kind}{len(self.ops)}"
        self.ops.append(Op(name, kind, tuple(inputs), attributes))
        self.values[name] = shape
        return name

    def weight(self, shape: tuple[int, int, int, int], quantized: bool) -> str:
        name = f"w{len(self.weights)}"
        values = self.rng.standard_normal(shape).astype(np.float32)
        if not quantized:
            self.weights[name] = Weight(shape, values)
            return name
        widest = self.rng.integers(0, 256, shape, np.uint8)
        if self.choose([False, False, True]):
            self.weights[name] = Weight(shape, values if self.keep_float else None, {8: widest}, bits=8)
            return name
        nested = all(numbers[0] == 0 for numbers in self.planes.values())
        codes = {
            bits: widest >> (8 - bits) if nested else self.rng.integers(0, 1 << bits, shape, np.uint8)
            for bits in self.planes
        }
        self.weights[name] = Weight(shape, values if self.keep_float else None, codes)
        return name

    def quantize(self, x: str) -> str:
        h, w, c, _ = self.values[x]
        signed, affine = self.choose([False, True]), self.choose([False, True])
        name = self.op(
            "quantize", [x], (h, w, c, None), signed=signed, rectify=self.choose([True, False]), affine=affine,
            **self.choose([{}, {}, {"bits": 8}]),
        )  # fmt: skip
        self.values[name] = (h, w, c, name)
        self.signed[name] = signed
        if affine:
            self.tables[name] = self.table(2, c)
        return name

    def conv(self, x: str, kind: str = "conv") -> str:
        h, w, c, source = self.values[x]
        groups = self.choose([g for g in (1, 2, 3, c) if c % g == 0]) if kind == "conv" else 1
        out = groups * self.choose([1, 2, 3])
        k = self.choose([1, 3, 2] if min(h or 2, w or 2) > 1 else [1, 3]) if kind == "conv" else 1
        pad, stride = self.choose([0, 1]) + (k - 1) // 2, self.choose([1, 2])
        weight = self.weight((out, k, k, c // groups), quantized=source is not None)
        shared = {
            "weight": weight,
            "signed": source is not None and self.signed[source],
            "affine": self.choose([True, False]),
        }
        if kind == "linear":
            name = self.op("linear", [x], (h, w, out, None), **shared)
        else:
            sizes = tuple(None if size is None else (size + 2 * pad - k) // stride + 1 for size in (h, w))
            name = self.op(
                "conv", [x], (*sizes, out, None), **shared, kernel=(k, k), stride=(stride, stride), pad=(pad,) * 4,
                dilation=(1, 1), groups=groups,
            )  # fmt: skip
        if shared["affine"]:
            self.tables[name] = self.table(2, out)
        return name

    def step(self, x: str) -> str:
        """One random op on value x, which is float or codes."""
        h, w, c, source = self.values[x]
        kinds = ["conv", "linear", "max_pool"] + (["flatten"] if h and w else [])
        if source is not None:
            kinds += ["dequantize"]
        else:
            kinds += ["quantize", "affine", "clip", "add", "concat", "avg_pool", "adaptive", "resize", "softmax", "pad"]
        kind = self.choose(kinds)
        if kind in ("conv", "linear"):
            return self.conv(x, kind)
        if kind == "quantize":
            return self.quantize(x)
        if kind in ("dequantize", "clip", "affine"):
            name = self.op(kind, [x], (h, w, c, None))
            self.tables[name] = self.table(2, c) if kind == "affine" else self.table(2)
            return name
        if kind in ("max_pool", "avg_pool"):
            extra = {"dilation": (1, 1)} if kind == "max_pool" else {"count_pad": self.choose([True, False])}
            sizes = tuple(None if size is None else (size + 2 - 3) // 1 + 1 for size in (h, w))
            return self.op(
                kind, [x], (*sizes, c, source), kernel=(3, 3), stride=(1, 1), pad=(1, 1, 1, 1),
                ceil=self.choose([True, False]), **extra,
            )  # fmt: skip
        if kind == "flatten":
            return self.op("flatten", [x], (1, 1, c * h * w, source))
        if kind == "add":
            return self.op("add", [x, x], (h, w, c, None))
        if kind == "concat":
            return self.op("concat", [x, x], (h, w, 2 * c, None))
        if kind == "adaptive":
            return self.op("adaptive_avg_pool", [x], (2, 1, c, None), size=(2, 1))
        if kind == "resize":
            way = self.choose(["size", "scale", "like"])
            given = {
                "size": None,
                "scale": None,
                "like": None,
                way: {"size": (3, 4), "scale": (2.0, 1.5), "like": x}[way],
            }
            sizes = (3, 4) if way == "size" else (h, w)
            if way == "scale":
                sizes = tuple(
                    None if size is None else int(size * by) for size, by in zip((h, w), (2.0, 1.5), strict=True)
                )
            return self.op(
                "resize", [x], (*sizes, c, None), mode=self.choose(["bilinear", "nearest"]),
                align=self.choose([False, True]), **given,
            )  # fmt: skip
        if kind == "pad":
            sizes = (None if h is None else h + 1, None if w is None else w + 3)
            return self.op("pad", [x], (*sizes, c + 1, None), h=(1, 0), w=(1, 2), c=(0, 1))
        return self.op("softmax", [x], (h, w, c, None))

    def graph(self, last: str, **rest: Any) -> Graph:
        if self.values[last][3] is not None:
            last = self.conv(last)
        h, w, c, _ = self.values["input"]
        return Graph(
            name="net", input_shape=(h, w, c), profiles=tuple(self.profiles), planes=self.planes, weights=self.weights,
            ops=tuple(self.ops), outputs=(last,), tables=self.tables, made_by="tests", **rest,
        )  # fmt: skip


def build_graph(choose: Choose, seed: int, steps: int = 6) -> Graph:
    """A random chain of ops that check_graph accepts. `choose` picks one of a list."""
    widths = choose([(1, 2, 4, 8), (1,), (2, 3), (1, 2, 3, 4, 5, 6, 7, 8)])
    planes = choose([nested_planes, separate_planes])(widths)
    profiles = [GraphProfile(str(bits), bits, bits, 50.5 if bits > 1 else None) for bits in widths]
    if choose([False, True]):
        profiles.append(GraphProfile("32", 32, 32))
    size = (*choose([(6, 5), (None, None), (8, None)]), choose([1, 2, 3]))
    builder = Builder(choose, seed, profiles, planes, size)
    value = "input"
    for _ in range(steps):
        if builder.values[value][3] is None and choose([True, False]):
            value = builder.quantize(value)
        value = builder.step(value)
    scaled = choose([True, False])
    image = {"image_scale": (0.5,) * size[2], "image_shift": (-1.0,) * size[2]} if scaled else {}
    labels = choose([None, ("cat", "døg", "\U0001f426\n")])
    return builder.graph(value, labels=labels, **image)


def tiny_graph(
    widths: Sequence[int] = (1, 2, 4, 8), nested: bool = True, keep_float: bool = False, fixed: bool = False
) -> Graph:
    """Float stem, two quantized convs, one of them after a max_pool, float head; one mixed profile at the end.

    fixed: stem and head are 8 bit in every profile but the float one, the stem's input signed.
    """
    planes = nested_planes(widths) if nested else separate_planes(widths)
    profiles = [GraphProfile(str(bits), bits, bits, 10.0 + bits) for bits in widths]
    if keep_float:
        profiles.append(GraphProfile("32", 32, 32, 99.5))
    mixed = {"a": widths[0], "b": widths[min(1, len(widths) - 1)]}
    profiles.append(GraphProfile("fast", mixed, {"qa": widths[0], "qb": widths[-1]}))
    rng = np.random.default_rng(0)

    def table(*shape: int) -> np.ndarray:
        return rng.standard_normal((len(profiles), *shape)).astype(np.float32)

    def quantized(*shape: int) -> Weight:
        widest = rng.integers(0, 256, shape, np.uint8)
        codes = {
            bits: widest >> (8 - bits) if nested else rng.integers(0, 1 << bits, shape, np.uint8) for bits in widths
        }
        return Weight(shape, rng.standard_normal(shape).astype(np.float32) if keep_float else None, codes)

    def conv(name: str, x: str, weight: str, kernel: int, affine: bool = True) -> Op:
        return Op(
            name, "conv", (x,),
            {"weight": weight, "kernel": (kernel, kernel), "stride": (1, 1), "pad": (kernel // 2,) * 4,
             "dilation": (1, 1), "groups": 1, "signed": False, "affine": affine},
        )  # fmt: skip

    def quantize(name: str, x: str) -> Op:
        return Op(name, "quantize", (x,), {"signed": False, "rectify": True, "affine": True})

    pool = {"kernel": (2, 2), "stride": (2, 2), "pad": (0, 0, 0, 0), "dilation": (1, 1), "ceil": False}
    graph = Graph(
        name="tiny",
        input_shape=(6, 6, 2),
        profiles=tuple(profiles),
        planes=planes,
        weights={
            "stem": Weight((3, 3, 3, 2), rng.standard_normal((3, 3, 3, 2)).astype(np.float32)),
            "a": quantized(5, 3, 3, 3),  # 135 weights: 17 bytes a plane, one bit of the last used up to bit 6
            "b": quantized(4, 1, 1, 5),
            "head": Weight((3, 1, 1, 4), rng.standard_normal((3, 1, 1, 4)).astype(np.float32)),
        },
        ops=(
            conv("stem", "input", "stem", 3, affine=False),
            quantize("qa", "stem"),
            conv("conv_a", "qa", "a", 3),
            quantize("qb", "conv_a"),
            Op("pool", "max_pool", ("qb",), pool),
            conv("conv_b", "pool", "b", 1, affine=False),
            Op("mean", "adaptive_avg_pool", ("conv_b",), {"size": (1, 1)}),
            Op("head", "linear", ("mean",), {"weight": "head", "signed": False, "affine": True}),
        ),
        outputs=("head",),
        tables={"qa": table(2, 3), "conv_a": table(2, 5), "qb": table(2, 5), "head": table(2, 3)},
        image_scale=(1 / 128, 1 / 128),
        image_shift=(-1.0, -1.0),
        labels=("cat", "dog", "bird"),
        made_by="anyprec 0.0",
    )
    return with_fixed_edges(graph, keep_float, table) if fixed else graph


def with_fixed_edges(graph: Graph, keep_float: bool, table: Callable[..., np.ndarray]) -> Graph:
    rng = np.random.default_rng(1)
    weights, ops, tables = dict(graph.weights), list(graph.ops), dict(graph.tables)
    for name, source, channels, signed in (("stem", "input", 2, True), ("head", "mean", 4, False)):
        old, at = weights[name], next(i for i, op in enumerate(ops) if op.name == name)
        codes = {8: rng.integers(0, 256, old.shape, np.uint8)}
        weights[name] = Weight(old.shape, old.values if keep_float else None, codes, bits=8)
        ops[at] = replace(ops[at], inputs=(f"{name}.in",), attributes={**ops[at].attributes, "signed": signed})
        attributes = {"signed": signed, "rectify": False, "affine": True, "bits": 8}
        ops.insert(at, Op(f"{name}.in", "quantize", (source,), attributes))
        tables[f"{name}.in"] = table(2, channels)
    return replace(graph, weights=weights, ops=tuple(ops), tables=tables)


def assert_same(a: Graph, b: Graph) -> None:
    """Equal in every field and number; codes are compared at every width of `a`."""
    plain = [f for f in a.__dataclass_fields__ if f not in ("weights", "tables")]
    for field in plain:
        assert getattr(a, field) == getattr(b, field), field
    assert a.tables.keys() == b.tables.keys() and a.weights.keys() == b.weights.keys()
    for name, table in a.tables.items():
        np.testing.assert_array_equal(table, b.tables[name], strict=True)
    for name, weight in a.weights.items():
        other = b.weights[name]
        assert (weight.shape, weight.is_float, weight.bits) == (other.shape, other.is_float, other.bits)
        assert (weight.values is None) == (other.values is None)
        if weight.values is not None:
            np.testing.assert_array_equal(weight.values, other.values, strict=True)
        for bits in weight.codes or {}:
            np.testing.assert_array_equal(weight.codes[bits], other.codes[bits], strict=True)


@pytest.fixture(scope="session")
def tiny():
    return tiny_graph


@pytest.fixture(scope="session")
def build():
    return build_graph


@pytest.fixture(scope="session")
def same():
    return assert_same


@pytest.fixture
def tiny_path(tmp_path):
    path = tmp_path / "tiny.apm"
    write(tiny_graph(), path)
    return path


@pytest.fixture(scope="session")
def forge():
    """tests/format/forge.py, which the fuzzer imports too."""
    return module_here("forge")


@pytest.fixture(scope="session")
def verdicts():
    """tests/format/verdicts.py, which the fuzzer imports too."""
    return module_here("verdicts")


def module_here(name):
    """Tests are no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
