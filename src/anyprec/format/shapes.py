"""Shape of the value each op makes, from the shapes it reads: ARITHMETIC.md. Used by check.py and inspect.

Sizes are per image: (h, w, c) of an image, 1 to 6 sizes of other values. A size is None where the input's is free or
it follows from a free one; whatever is known must fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyprec.errors import BadGraph
from anyprec.format.schema import BIG, GATES, MAX_AXES, SCHEMAS

MAX_ELEMENTS = 2**40
MAX_TAPS = 2**29  # of all output pixels of a convolution together: the engine has tables of 4 bytes for each


class Shape(tuple["int | None", ...]):
    """Sizes per image, None where unknown. The last axis has the channels; an image is h, w, c."""

    @property
    def h(self) -> int | None:
        return self[0]

    @property
    def w(self) -> int | None:
        return self[1]

    @property
    def c(self) -> int | None:
        return self[-1]

    def __str__(self) -> str:
        return " x ".join("?" if size is None else str(size) for size in self)


Record = Mapping[str, Any]  # an op or weight as it stands in the file


def value_shape(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Shape:
    """Raises BadGraph where op and inputs do not fit; the op's attributes have been checked."""
    if SCHEMAS[op["op"]].image:
        for shape in [*inputs, *([like] if like else [])]:
            if len(shape) != 3:
                raise BadGraph(f"{title(op)} reads a value of {len(shape)} axes, {shape}; it takes images: 3 axes")
    made = Shape(RULES[op["op"]](op, inputs, weight, like))
    if len(made) > MAX_AXES:
        raise BadGraph(f"{title(op)} would make a value of {len(made)} axes; {MAX_AXES} are the most")
    if any(size is not None and not 1 <= size < BIG for size in made):
        raise BadGraph(f"{title(op)} would make a value of {made}; every size must be from 1 to 2^31 - 1")
    if math.prod(1 if size is None else size for size in made) >= MAX_ELEMENTS:
        raise BadGraph(f"{title(op)} would make a value of {made}; the limit is 2^40 numbers")
    return made


def title(op: Record) -> str:
    return f"op {op['name']!r} ({op['op']})"


Sizes = tuple["int | None", ...]
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
    if op["op"] == "linear":
        places: Sizes = x[:-1]
    else:
        along = transposed_size if transposed(op) else windows
        if "toom_cook" in op and not fits_toom_cook(op):
            raise BadGraph(
                f"{title(op)} has toom_cook, which needs groups, strides and dilations of 1, 3 or 4 kernel lines and "
                "columns, and no transposition"
            )
        places = along(op, x.h, 0), along(op, x.w, 1)
    pixels = math.prod(1 if size is None else size for size in places)
    if pixels * kh * kw >= MAX_TAPS:
        raise BadGraph(
            f"{title(op)} reads {kh * kw:,} taps for each of {pixels:,} output pixels; together they must be below 2^29"
        )
    return *places, out


def fits_toom_cook(op: Mapping[str, Any]) -> bool:
    """Whether a conv may have the attribute `toom_cook`: ARITHMETIC.md, section 4."""
    alone = op["groups"] == 1 and not op.get("transposed")
    return alone and all(n == 1 for n in (*op["stride"], *op["dilation"])) and all(3 <= k <= 4 for k in op["kernel"])


def transposed(op: Record) -> bool:
    if ("transposed" in op) != ("output_pad" in op):
        raise BadGraph(f"{title(op)}: transposed and output_pad go together; give both or neither")
    return "transposed" in op


def transposed_size(op: Record, size: int | None, axis: int) -> int | None:
    """Output size of a transposed convolution along H (axis 0) or W (axis 1)."""
    stride, dilation, extra = op["stride"][axis], op["dilation"][axis], op["output_pad"][axis]
    if extra >= max(stride, dilation):
        raise BadGraph(f"{title(op)}: output_pad {extra} must be below stride {stride} or dilation {dilation}")
    reach = dilation * (op["kernel"][axis] - 1) + 1
    if reach >= BIG:
        raise BadGraph(f"{title(op)}: kernel {op['kernel'][axis]} with dilation {dilation} reaches over 2^31")
    if size is None:
        return None
    made: int = (size - 1) * stride - op["pad"][axis] - op["pad"][axis + 2] + reach + extra
    return made


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


def same_rank(op: Record, inputs: Sequence[Shape]) -> int:
    ranks = {len(x) for x in inputs}
    if len(ranks) > 1:
        raise BadGraph(f"{title(op)}: its inputs have {sorted(ranks)} axes; they must have equally many")
    return ranks.pop()


def check_axis(op: Record, axes: Sequence[int], rank: int) -> None:
    if max(axes) >= rank:
        raise BadGraph(f"{title(op)}: axis {max(axes)} is beyond the last of a value of {rank} axes, {rank - 1}")


def add(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    return tuple(agreed(op, [x[i] for x in inputs], f"axis {i}") for i in range(same_rank(op, inputs)))


def concat(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    rank = same_rank(op, inputs)
    axis = op.get("axis", rank - 1)
    check_axis(op, [axis], rank)
    sizes = [x[axis] for x in inputs]
    joined = None if None in sizes else sum(size for size in sizes if size is not None)
    return tuple(joined if i == axis else agreed(op, [x[i] for x in inputs], f"axis {i}") for i in range(rank))


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


# --- Format 3 -----------------------------------------------------------------------------------------------


def given(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    """Of a constant or a further input: the shape it names."""
    shape: list[int | None] = op["shape"]
    if weight is not None and math.prod(weight["shape"]) != math.prod(size or 1 for size in shape):
        raise BadGraph(f"{title(op)}: shape {shape} is not that of weight {op['weight']!r}, {weight['shape']}")
    return tuple(shape)


def reshape(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    shape, x = op["shape"], inputs[0]
    known = math.prod(size or 1 for size in shape)
    if None in x:
        return tuple(shape)
    count = math.prod(size or 1 for size in x)
    if count % known if None in shape else count != known:
        raise BadGraph(f"{title(op)}: {x} numbers do not fit the shape {shape}")
    return tuple(count // known if size is None else size for size in shape)


def transpose(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    if len(op["order"]) != len(inputs[0]):
        raise BadGraph(
            f"{title(op)}: order {op['order']} is for {len(op['order'])} axes, the value has {len(inputs[0])}"
        )
    return tuple(inputs[0][axis] for axis in op["order"])


def with_axis(x: Shape, axis: int, size: int | None) -> Sizes:
    return *x[:axis], size, *x[axis + 1 :]


def slice_(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    x, axis = inputs[0], op["axis"]
    check_axis(op, [axis], len(x))
    size = x[axis]
    return with_axis(x, axis, None if size is None else len(positions(op, size)))


def positions(op: Record, size: int) -> range:
    """Of a slice along an axis of `size`; at least one."""

    def inside(end: int) -> int:
        return min(max(end + size if end < 0 else end, 0), size)

    found = range(inside(op["start"]), size if op["stop"] is None else inside(op["stop"]), op["step"])
    if not found:
        raise BadGraph(f"{title(op)}: from {op['start']} to {op['stop']} there is nothing in an axis of size {size}")
    return found


def gather(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    x, axis = inputs[0], op["axis"]
    check_axis(op, [axis], len(x))
    size = x[axis]
    if size is not None and max(op["index"]) >= size:
        raise BadGraph(f"{title(op)}: position {max(op['index'])} is beyond an axis of size {size}")
    return with_axis(x, axis, len(op["index"]))


def broadcast(op: Record, a: int | None, b: int | None, axis: int) -> int | None:
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if a is None or b is None:
        return b if a is None else a  # the unknown one turns out to be 1 or the same
    raise BadGraph(f"{title(op)}: sizes {a} and {b} of axis {axis} are neither equal nor 1")


def binary(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    same_rank(op, inputs)
    return tuple(broadcast(op, a, b, i) for i, (a, b) in enumerate(zip(*inputs, strict=True)))


def reduce(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    check_axis(op, op["axes"], len(inputs[0]))
    return tuple(1 if i in op["axes"] else size for i, size in enumerate(inputs[0]))


def norm(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    check_axis(op, op["axes"], len(inputs[0]))
    return inputs[0]


def matmul(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    rank = same_rank(op, inputs)
    if rank < 2:
        raise BadGraph(f"{title(op)}: its inputs have 1 axis; a matrix has 2")
    a, b = inputs
    k, n = (b[-1], b[-2]) if op["transposed"] else (b[-2], b[-1])
    agreed(op, [a[-1], k], "the axis that is summed")
    leading = [broadcast(op, x, y, i) for i, (x, y) in enumerate(zip(a[:-2], b[:-2], strict=True))]
    return *leading, a[-2], n


def embedding(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    assert weight is not None
    if weight["shape"][1:3] != [1, 1]:
        raise BadGraph(f"{title(op)}: weight {op['weight']!r} is {weight['shape']}; it must be [rows, 1, 1, C]")
    return *inputs[0], weight["shape"][3]


def recurrent(op: Record, inputs: Sequence[Shape], weight: Record | None, like: Shape | None) -> Sizes:
    assert weight is not None
    x, gates = inputs[0], GATES[op["function"]]
    rows, *rest, columns = weight["shape"]
    if rest != [1, 1] or rows != gates * (columns - 1):
        raise BadGraph(
            f"{title(op)}: weight {op['weight']!r} is {weight['shape']}; it must be [{gates} H, 1, 1, H + 1]"
        )
    if len(x) < 2 or x.c not in (None, rows):
        raise BadGraph(f"{title(op)} reads {x}; it takes sequences of {rows} channels: 2 axes or more")
    return *x[:-1], columns - 1


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
    "constant": given,
    "input": given,
    "reshape": reshape,
    "transpose": transpose,
    "slice": slice_,
    "gather": gather,
    "pointwise": same,
    "binary": binary,
    "reduce": reduce,
    "norm": norm,
    "matmul": matmul,
    "embedding": embedding,
    "recurrent": recurrent,
}
