"""Graphs of one convolution, at every pair of weight and input bits or in floats: they reach every kernel.

Used by test_engine.py, test_toom_cook.py and sanitize.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anyprec.format import INPUT, Graph, GraphProfile, Op, Weight, nested_planes
from anyprec.widths import INTEGER_WIDTHS

F32 = np.float32
PAIRS = [(w, a) for w in INTEGER_WIDTHS for a in INTEGER_WIDTHS]
ONE = {"stride": [1, 1], "dilation": [1, 1]}
# One pair for each kernel there is
KERNEL_PAIRS = [(1, 1), (2, 2), (4, 4), (5, 5), (6, 6), (7, 7), (8, 7), (8, 8)]

# Channels in and out, kernel, ending, signed, groups: around full vectors and groups of channels, and far from them.
SHAPES = [
    (12, 64, 1, "all", False, 1),
    (12, 128, 1, "codes", False, 1),
    (24, 129, 1, "sums", True, 1),
    (13, 63, 3, "all", True, 1),
    (6, 200, 3, "codes", False, 1),
    (65, 33, 1, "all", False, 1),
    (7, 17, 3, "sums", False, 1),
    (1, 1, 3, "codes", True, 1),
    (3, 5, 5, "all", False, 1),
    (36, 48, 3, "all", False, 3),
    (130, 66, 1, "codes", True, 2),
    (8, 8, 3, "codes", False, 8),
    (19, 19, 3, "all", True, 19),
    (16, 16, 3, "all", False, 1),
    (15, 40, 1, "codes", False, 1),
    (32, 24, 3, "codes", True, 1),
    (31, 32, 3, "sums", False, 1),
    (83, 83, 3, "all", True, 83),
    (64, 64, 3, "codes", False, 64),
    (54, 54, 7, "sums", False, 54),
]

# Float convolutions computed by Toom-Cook: kernel, stride, pad (top, left, bottom, right), dilation
TOOM_COOK = {
    "7x7": ([7, 7], [2, 2], [3] * 4, [1, 1]),
    "5x6": ([5, 6], [2, 2], [2, 0, 1, 3], [1, 1]),
    "6x5": ([6, 5], [2, 2], [0, 2, 3, 1], [1, 1]),
    "8x8": ([8, 8], [2, 2], [5, 1, 3, 4], [1, 1]),
    "8x7": ([8, 7], [2, 2], [4, 3, 4, 3], [1, 1]),
    "mostly padding": ([5, 5], [2, 2], [9, 41, 30, 40], [1, 1]),
}
TOOM_COOK_STRIDE_1 = {  # with the attribute toom_cook
    "3x3": ([3, 3], [1, 1], [1] * 4, [1, 1]),
    "3x4": ([3, 4], [1, 1], [0, 2, 1, 0], [1, 1]),
    "4x3": ([4, 3], [1, 1], [2, 0, 0, 3], [1, 1]),
    "4x4": ([4, 4], [1, 1], [1, 3, 2, 0], [1, 1]),
    "3x3, mostly padding": ([3, 3], [1, 1], [9, 41, 30, 40], [1, 1]),
}


def pair_graph(
    c: int, out: int, kernel: int = 1, ending: str = "sums", signed: bool = False, groups: int = 1,
    pairs: Sequence[tuple[int, int]] = PAIRS, seed: int = 0,
) -> Graph:  # fmt: skip
    """quantize -> conv, with a profile for every pair of weight and input bits.

    ending: "sums" (as they are), "codes" (its table makes codes), or "all" (table, add, clip, float and codes).
    Output channel 0 has the least weight everywhere, channel 1 the largest: sums as large as they come.
    """
    rng = np.random.default_rng(seed)
    widest = max(w for w, _ in pairs)
    shape = (out, kernel, kernel, c // groups)
    codes = rng.integers(0, 2**widest, shape, np.uint8)
    codes[0], codes[1:2] = 0, 2**widest - 1
    weights = {"w": Weight(shape, None, {k: codes >> (widest - k) for k in sorted({w for w, _ in pairs})})}
    levels = np.array([2.0**a - 1 for _, a in pairs])
    deviation = np.sqrt(np.prod(shape[1:])) * np.array([2.0**w for w, _ in pairs]) * levels * (0.6 if signed else 0.3)
    level_column, ones = levels[:, None], np.ones((len(pairs), out))

    def table(scale, shift):  # (P, 1 or C) each -> (P, 2, C)
        return np.stack(np.broadcast_arrays(scale, shift), 1).astype(F32)

    tables = {"q": table(level_column / 3 * np.ones(c), level_column / 2)}
    window = {"kernel": [kernel, kernel], "pad": [kernel // 2] * 4, **ONE}
    attributes = {"weight": "w", "groups": groups, "signed": signed, **window}
    quantizer = {"signed": signed, "rectify": False, "affine": True}
    ops = [Op("q", "quantize", (INPUT,), quantizer)]
    outputs = ["conv"]
    spread = (levels / 4 / deviation)[:, None] * np.where(rng.random(out) < 0.3, -1, 1)
    if ending == "sums":
        ops.append(Op("conv", "conv", ("q",), {**attributes, "affine": False}))
    elif ending == "codes":
        tables["conv"] = table(spread, level_column / 2)
        ops.append(Op("conv", "conv", ("q",), {**attributes, "affine": True}))
        ops.append(Op("again", "quantize", ("conv",), {"signed": False, "rectify": True, "affine": False}))
    else:
        weights["float"] = Weight((out, 1, 1, c), rng.standard_normal((out, 1, 1, c)).astype(F32))
        same = {"kernel": [1, 1], "pad": [0] * 4, **ONE, "groups": 1}
        tables |= {
            "conv": table(ones / deviation[:, None], rng.standard_normal(out)),
            "clip": np.tile(np.array([-1, 1.5], F32), (len(pairs), 1)),
            "again": table(spread * deviation[:, None], level_column / 2),
        }
        ops += [
            Op("skip", "conv", (INPUT,), {"weight": "float", "signed": False, "affine": False, **same}),
            Op("conv", "conv", ("q",), {**attributes, "affine": True}),
            Op("add", "add", ("conv", "skip")),
            Op("clip", "clip", ("add",)),
            Op("again", "quantize", ("clip",), {"signed": False, "rectify": True, "affine": True}),
        ]
        outputs = ["clip"]
    if ending != "sums":
        tables["back"] = np.stack([1 / levels, np.zeros(len(pairs))], 1).astype(F32)
        ops.append(Op("back", "dequantize", ("again",)))
        outputs = [*outputs, "back"] if ending == "all" else ["back"]
    profiles = tuple(GraphProfile(f"w{w}a{a}", w, a) for w, a in pairs)
    planes = nested_planes({w for w, _ in pairs})
    return Graph("pairs", (None, None, c), profiles, planes, weights, tuple(ops), tuple(outputs), tables)


def float_graph(
    place: Sequence[Sequence[int]], channels: int, out: int, ending: str = "sums", seed: int = 0,
    toom_cook: bool = False,
) -> Graph:  # fmt: skip
    """A float convolution of the input; ending: "sums", "float" (a table and clips) or "added" (a residual too)."""
    rng = np.random.default_rng(seed)
    kernel, stride, pad, dilation = place
    window = {"kernel": kernel, "stride": stride, "pad": pad, "dilation": dilation}
    conv = {"groups": 1, "signed": False, "affine": ending != "sums", **window}
    if toom_cook:
        conv["toom_cook"] = True
    shape = (out, *kernel, channels)
    weights = {"w": Weight(shape, rng.standard_normal(shape).astype(F32))}
    ops, tables, end = [], {}, "conv"
    table = np.stack([rng.uniform(0.1, 0.2, (1, out)), rng.standard_normal((1, out))], 1).astype(F32)
    if ending == "added":
        weights["skip"] = Weight(shape, rng.standard_normal(shape).astype(F32))
        ops.append(Op("skip", "conv", (INPUT,), {"weight": "skip", **conv}))
        tables["skip"] = table
    ops.append(Op("conv", "conv", (INPUT,), {"weight": "w", **conv}))
    if ending != "sums":
        tables |= {"conv": table, "clip": np.array([[-1, 2]], F32)}
        if ending == "added":
            ops.append(Op("added", "add", ("skip", "conv")))
            end = "added"
        ops.append(Op("clip", "clip", (end,)))
        end = "clip"
    size, profile = (None, None, channels), GraphProfile("32", 32, 32)
    return Graph("float", size, (profile,), {}, weights, tuple(ops), (end,), tables)


def images(*sizes, c, seed=0):
    """Normal numbers, but the last pixel of each image is as large as codes get, the one before as small."""
    rng = np.random.default_rng(seed)
    made = [rng.standard_normal((n, h, w, c)).astype(F32) for n, h, w in sizes]
    for x in made:
        x[:, -1, -1], x[:, -1, -2:-1] = 9, -9
    return made
