"""Random graphs that FORMAT.md allows, for comparing the engine with the oracle: a seed in, a Graph and an input out.

random_graph draws a chain of BLOCKS and a head; graph_builder.py has the parts they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from graph_builder import Builder

from anyprec.format.graph import INPUT, Graph
from anyprec.widths import FLOAT

LARGEST_VALUE = 20_000  # numbers in one image of a value: keeps a graph at tens of milliseconds


def random_graph(
    seed: int,
    kinds: Sequence[str] | None = None,
    blocks: int = 3,
    widths: Sequence[int] | None = None,
    nests: bool | None = None,
    max_channels: int = 130,
    special: bool = False,
    float_layers: bool = False,
) -> tuple[Graph, np.ndarray]:
    """A valid Graph and an input (N, H, W, C) float32 for it.

    kinds: names of BLOCKS to draw from (default: all). widths: uniform profiles (default: drawn, 32 among them); every
    graph has mixed profiles too. nests: whether codes nest (default: drawn). special: NaN, infinity and the like in
    the input. float_layers: mixed profiles with some layers float.
    """
    rng = np.random.default_rng(seed)
    if widths is None:
        some = rng.choice(8, rng.integers(2, 6), replace=False) + 1
        widths = [*(int(k) for k in some), FLOAT] if rng.random() < 0.8 else [int(k) for k in some]
    nests = bool(rng.random() < 0.7) if nests is None else nests
    b = Builder(rng, sorted(widths), nests, max_channels, special, float_layers)
    names = list(BLOCKS) if kinds is None else list(kinds)
    value = INPUT
    for _ in range(blocks):
        value = BLOCKS[names[rng.integers(len(names))]](b, value)
    return b.finish(head(b, value))


# --- Blocks: a float value in, a float value out ----------------------------------------------------------------


def block_conv(b: Builder, x: str) -> str:
    return b.conv(b.quantize(x))


def block_chain(b: Builder, x: str) -> str:
    """conv -> quantize -> conv, the norm in the first one's table."""
    return b.conv(b.conv_to_codes(b.quantize(x)))


def block_depthwise(b: Builder, x: str) -> str:
    a = b.quantize(x)
    c = b.shape(a)[2]
    a = b.conv_to_codes(a, c * b.pick(1, 1, 2) if c <= b.max_channels // 2 else c, groups=c)
    return b.conv(a, groups=1)


def block_residual(b: Builder, x: str) -> str:
    """conv -> add; x is read by quantize and by the sum, or its codes by two convs."""
    h, w, c = b.shape(x)
    a = b.quantize(x)
    if b.chance(0.5):
        y = b.conv(b.conv_to_codes(a, window=b.window(h, w, same=True)), c, window=b.window(h, w, same=True), groups=1)
        skip = b.op("affine", x, table=b.fit(x, None)) if b.chance(0.2) else x
    else:
        window = b.window(h, w)
        y = b.conv(a, window=window)
        out = b.shape(y)[2]
        skip = b.conv(a if b.chance(0.7) else x, out, window=window, groups=1)
    return b.op("add", *(b.pick((y, skip), (skip, y))))


def block_two_residuals(b: Builder, x: str) -> str:
    """conv -> add -> (read by the next sum and by its own quantize): the pre-activation network."""
    return block_residual(b, block_residual(b, x))


def block_norm_clip(b: Builder, x: str) -> str:
    """conv -> affine -> clip -> quantize, as converted networks have it."""
    y = b.conv(b.quantize(x))
    if b.chance(0.8):
        y = b.op("affine", y, table=b.fit(y, None))
    y = clip(b, y)
    return b.conv(b.quantize(y, affine=b.chance(0.8)))


def block_two_readers(b: Builder, x: str) -> str:
    a = b.quantize(x)
    h, w, _ = b.shape(a)
    y, z = b.conv(a, window=b.window(h, w, same=True)), b.conv(a, window=b.window(h, w, same=True))
    if b.chance(0.5) and b.shape(y)[2] == b.shape(z)[2]:
        return b.op("add", y, z)
    return b.op("concat", y, z)


def block_output(b: Builder, x: str) -> str:
    """A conv whose result is an output of the graph and is quantized too."""
    name = f"codes.{len(b.ops) + 1}"
    a = b.quantize(x)
    y = b.conv(a, quantize=name)
    b.outputs.append(y)
    return b.conv(b.quantize(y, affine=False, name=name))


def block_code_pool(b: Builder, x: str) -> str:
    """max_pool of codes, with or without a conv before."""
    a = b.conv_to_codes(b.quantize(x)) if b.chance(0.5) else b.quantize(x)
    a = b.op("max_pool", a, **b.pool_window(*b.shape(a)[:2], dilated=True))
    return b.conv(a)


def block_float_conv(b: Builder, x: str) -> str:
    return b.conv(x)


def block_fixed(b: Builder, x: str) -> str:
    """Layers of 8 bits in every profile but the float one, as a stem and a classifier may be; next to ordinary ones."""
    a = b.fixed_quantize(x)
    if b.chance(0.5):
        a = b.conv_to_codes(a, fixed=b.chance(0.5))
    elif b.chance(0.3):
        a = b.op("max_pool", a, **b.pool_window(*b.shape(a)[:2], dilated=True))
    return b.conv(a, fixed=b.always_codes(a))


def block_pool(b: Builder, x: str) -> str:
    h, w, _ = b.shape(x)
    if b.chance(0.5):
        return b.op("max_pool", x, **b.pool_window(h, w, dilated=True))
    return b.op("avg_pool", x, **b.pool_window(h, w, dilated=False), count_pad=b.chance(0.5))


def block_adaptive(b: Builder, x: str) -> str:
    return b.op("adaptive_avg_pool", x, size=[int(n) for n in b.rng.integers(1, 9, 2)])


def block_resize(b: Builder, x: str) -> str:
    h, w, c = b.shape(x)
    mode, align = b.pick(("nearest", False), ("bilinear", False), ("bilinear", True))
    ways: dict[str, Any] = {"size": None, "scale": None, "like": None}
    most = max(1, min(16, int((LARGEST_VALUE / c) ** 0.5)))
    way = b.pick("size", "scale", "like")
    if way == "scale" and 2 * h <= most and 2 * w <= most:
        ways["scale"] = [b.pick(2, 1.5, 1.0, 1.7), b.pick(2.0, 1.25)]
    elif way == "like":
        ways["like"] = b.pick(INPUT, *(op.name for op in b.ops))
    else:
        ways["size"] = [int(n) for n in b.rng.integers(1, most + 1, 2)]
    return b.op("resize", x, mode=mode, align=align, **ways)


def block_concat(b: Builder, x: str) -> str:
    """Three parts, one of them x itself."""
    h, w, c = b.shape(x)
    if 3 * c > 2 * b.max_channels:
        x = b.like_shape(x, h, w, b.draw_channels(40))
    y = b.conv(b.quantize(x), window=b.window(h, w, same=True))
    z = b.op("max_pool", x, kernel=[3, 3], stride=[1, 1], pad=[1] * 4, dilation=[1, 1], ceil=False)
    parts = [x, y, z]
    b.rng.shuffle(parts)
    joined = b.op("concat", *parts)
    return b.like_shape(joined, h, w, b.draw_channels())


def block_pad(b: Builder, x: str) -> str:
    """Zeros around, or a narrower value put among more channels (the textbook ResNet's skip)."""
    around = {axis: [int(n) for n in b.rng.integers(0, 3, 2)] for axis in "hwc"}
    return b.op("pad", x, **around)


def block_dequantize(b: Builder, x: str) -> str:
    """Codes read by a conv and, as floats, by a sum."""
    a = b.quantize(x)
    y = floats_of(b, a)
    h, w, c = b.shape(y)
    z = b.conv(a, c, window=b.window(h, w, same=True), groups=1)
    return b.op("add", y, z)


def block_shortcut(b: Builder, x: str) -> str:
    """Codes read by a conv and, as floats, by a 1x1 conv of the same strides; now and then the floats are an output."""
    a = b.quantize(x)
    y = floats_of(b, a)
    c, stride = b.shape(y)[2], [b.pick(1, 2, 2, 3), b.pick(1, 2, 2, 3)]
    if b.chance(0.2):
        b.outputs.append(y)
    sides = {1: 0, 3: 1}
    z, skip = (
        b.conv(v, c, window={"kernel": [k, k], "stride": stride, "pad": [sides[k]] * 4, "dilation": [1, 1]}, groups=1)
        for v, k in ((a, 3), (y, 1))
    )
    return b.op("add", z, skip)


def floats_of(b: Builder, codes: str) -> str:
    signed, rows = b.source(codes).attributes["signed"], []  # type: ignore[union-attr]
    for n in b.levels(codes):
        step = float(b.rng.uniform(0.5, 2)) / n
        rows.append([2 * step, -n * step] if signed else [step, 0])
    return b.op("dequantize", codes, table=np.array(rows))


def block_softmax(b: Builder, x: str) -> str:
    return b.op("softmax", x)


def clip(b: Builder, x: str) -> str:
    low, high = b.pick((0, np.inf), (0, 6), (-1, 1), (-np.inf, 0.5))
    return b.op("clip", x, table=np.tile(np.array([low, high]), (len(b.profiles), 1)))


BLOCKS: dict[str, Callable[[Builder, str], str]] = {
    "conv": block_conv,
    "chain": block_chain,
    "depthwise": block_depthwise,
    "residual": block_residual,
    "two_residuals": block_two_residuals,
    "norm_clip": block_norm_clip,
    "two_readers": block_two_readers,
    "output": block_output,
    "code_pool": block_code_pool,
    "float_conv": block_float_conv,
    "fixed": block_fixed,
    "pool": block_pool,
    "adaptive": block_adaptive,
    "resize": block_resize,
    "concat": block_concat,
    "pad": block_pad,
    "dequantize": block_dequantize,
    "shortcut": block_shortcut,
    "clip": clip,
    "softmax": block_softmax,
}


def head(b: Builder, x: str) -> str:
    """Nothing, a float, a quantized or a fixed linear layer, with or without softmax."""
    way = b.pick("none", "float", "quantized", "flatten", "codes", "fixed")
    if way == "none":
        return block_conv(b, x) if x == INPUT else x
    if way in ("float", "quantized", "fixed"):
        x = b.op("adaptive_avg_pool", x, size=[1, 1])
    if way == "quantized" or way == "codes":
        x = b.quantize(x)
    if way == "fixed":
        x = b.fixed_quantize(x)
    if way in ("flatten", "codes"):
        h, w, c = b.shape(x)
        if h * w * c > 3000:  # a linear layer on all that would be slow, and reach 2^31 at 33,000
            x = b.op("max_pool", x, kernel=[h, w], stride=[1, 1], pad=[0] * 4, dilation=[1, 1], ceil=False)
        b.fixed_size = True
    if way != "float" or b.chance(0.5):
        x = b.op("flatten", x)
    y = b.conv(
        x, int(b.rng.integers(1, 40)), linear=True, table="unit" if b.chance(0.7) else "none", fixed=way == "fixed"
    )  # fmt: skip
    return b.op("softmax", y) if b.chance(0.4) else y
