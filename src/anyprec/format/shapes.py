"""Shape of the value each op makes, from the shapes it reads: ARITHMETIC.md. Used by check.py and inspect.

Sizes are per image: (h, w, c). h and w are None where the input's size is free, c where it follows from such a size
(a flatten); whatever is known must fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anyprec.errors import BadGraph
from anyprec.format.schema import BIG

MAX_ELEMENTS = 2**40
MAX_TAPS = 2**29  # of all output pixels of a convolution together: the engine has tables of 4 bytes for each


class Shape(NamedTuple):
    h: int | None
    w: int | None
    c: int | None

    def __str__(self) -> str:
        return " x ".join("?" if size is None else str(size) for size in self)


Record = Mapping[str, Any]  # an op or weight as it stands in the file


def value_shape(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Shape:
    """Raises BadGraph where op and inputs do not fit; the op's attributes have been checked."""
    made = Shape(*RULES[op["op"]](op, inputs, weight, like))
    if any(size is not None and not 1 <= size < BIG for size in made):
        raise BadGraph(f"{title(op)} would make a value of {made}; every size must be from 1 to 2^31 - 1")
    if math.prod(1 if size is None else size for size in made) >= MAX_ELEMENTS:
        raise BadGraph(f"{title(op)} would make a value of {made}; the limit is 2^40 numbers")
    return made


def title(op: Record) -> str:
    return f"op {op['name']!r} ({op['op']})"


Sizes = tuple[int | None, int | None, int | None]
Rule = Callable[[Record, Sequence[Shape], "Record | None", "Shape | None"], Sizes]


def same(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    return inputs[0]


def conv(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    assert weight is not None
    x, (out, kh, kw, depth) = inputs[0], weight["shape"]
    kernel, groups = op.get("kernel", [1, 1]), op.get("groups", 1)
    if [kh, kw] != kernel:
        raise BadGraph(f"{title(op)}: kernel {kernel} is not that of weight {op['weight']!r}, {[kh, kw]}")
    if x.c is not None and x.c != depth * groups:
        raise BadGraph(
            f"{title(op)} reads {x.c} channels; weight {op['weight']!r} is for {depth * groups} "
            f"({depth} x {groups} groups)"
        )
    if out % groups:
        raise BadGraph(f"{title(op)}: {out} output channels cannot be split into {groups} groups")
    h, w = (x.h, x.w) if op["op"] == "linear" else (windows(op, x.h, 0), windows(op, x.w, 1))
    pixels = math.prod(1 if size is None else size for size in (h, w))
    if pixels * kh * kw >= MAX_TAPS:
        raise BadGraph(
            f"{title(op)} reads {kh * kw:,} taps for each of {pixels:,} output pixels; together they must be below 2^29"
        )
    return h, w, out


def windows(op: Record, size: int | None, axis: int, pool: bool = False) -> int | None:
    """How many windows lie along H (axis 0) or W (axis 1); pools must have a tap inside the image in each."""
    kernel, stride = op["kernel"][axis], op["stride"][axis]
    dilation = op["dilation"][axis] if "dilation" in op else 1
    before, after = op["pad"][axis], op["pad"][axis + 2]
    reach = dilation * (kernel - 1) + 1
    if reach >= BIG:
        raise BadGraph(f"{title(op)}: kernel {kernel} with dilation {dilation} reaches over 2^31")
    if pool and max(before, after) >= reach:
        raise BadGraph(f"{title(op)}: padding {max(before, after)} holds a whole window of {reach}; it must be smaller")
    if size is None:
        return None
    if pool and before and size < dilation:
        raise BadGraph(f"{title(op)}: dilation {dilation} steps over the whole value of size {size}")
    room = size + before + after - reach
    if size + before + after >= BIG or room < 0:
        raise BadGraph(f"{title(op)}: size {size} with padding {before} + {after} does not fit windows of {reach}")
    count: int = room // stride + 1
    if op.get("ceil") and room % stride and count * stride < size + before:
        count += 1
    return count


def pool(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    return windows(op, inputs[0].h, 0, pool=True), windows(op, inputs[0].w, 1, pool=True), inputs[0].c


def adaptive(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    return op["size"][0], op["size"][1], inputs[0].c


def agreed(op: Record, sizes: Sequence[int | None], what: str) -> int | None:
    known = {size for size in sizes if size is not None}
    if len(known) > 1:
        raise BadGraph(f"{title(op)}: its inputs differ in {what}: {sorted(known)[:4]}")
    return next(iter(known), None)


def add(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    h, w, c = (agreed(op, [x[i] for x in inputs], "HWC"[i]) for i in range(3))
    return h, w, c


def concat(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    h, w = (agreed(op, [x[i] for x in inputs], "HW"[i]) for i in range(2))
    channels = [x.c for x in inputs]
    return h, w, None if None in channels else sum(c for c in channels if c is not None)


def resize(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    x = inputs[0]
    if sum(op[way] is not None for way in ("size", "scale", "like")) != 1:
        raise BadGraph(f"{title(op)}: exactly one of size, scale and like must be given, the others null")
    if op["size"]:
        return op["size"][0], op["size"][1], x.c
    if like:
        return like.h, like.w, x.c
    h, w = (None if size is None else math.floor(size * by) for size, by in zip((x.h, x.w), op["scale"], strict=True))
    return h, w, x.c


def flatten(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    h, w, c = inputs[0]
    return 1, 1, None if h is None or w is None or c is None else h * w * c


def pad(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    h, w, c = (None if size is None else size + sum(op[axis]) for size, axis in zip(inputs[0], "hwc", strict=True))
    return h, w, c


RULES: dict[str, Rule] = {
    "quantize": same,
    "dequantize": same,
    "conv": conv,
    "linear": conv,
    "affine": same,
    "clip": same,
    "add": add,
    "concat": concat,
    "max_pool": pool,
    "avg_pool": pool,
    "adaptive_avg_pool": adaptive,
    "resize": resize,
    "softmax": same,
    "flatten": flatten,
    "pad": pad,
}
