"""Every operation of FORMAT.md section 3 in one table: what it reads, its attributes, its table. Used by check.py.

An attribute's type is a Rule: a test and the words for what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anyprec.format.graph import FIXED_BITS

BIG = 2**31  # any dimension is below this
MAX_AXES = 6
MAX_INDEX = 65_536  # positions a gather lists


@dataclass(frozen=True)
class AttributeRule:
    allowed: str
    holds: Callable[[Any], bool]


def is_int(value: object) -> bool:
    return type(value) is int  # a bool is not a number


def ints(count: int, least: int) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and len(value) == count and all(is_int(v) and least <= v < BIG for v in value)

    return holds


def or_null(rule: AttributeRule) -> AttributeRule:
    return AttributeRule(f"{rule.allowed}, or null", lambda value: value is None or rule.holds(value))


def is_scale(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(v) in (int, float) and 0 < v < BIG for v in value)


def is_name(value: object) -> bool:
    """1 to 200 printable ASCII bytes."""
    return isinstance(value, str) and 1 <= len(value) <= 200 and all(" " <= char <= "~" for char in value)


def one_of(*names: str) -> AttributeRule:
    return AttributeRule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def is_axes(value: Any) -> bool:
    """Rising axis numbers, at least one."""
    return (
        isinstance(value, list)
        and 1 <= len(value) <= MAX_AXES
        and all(is_int(v) and 0 <= v < MAX_AXES for v in value)
        and sorted(set(value)) == value
    )


def is_shape(value: Any) -> bool:
    """1 to 6 sizes, null where free."""
    return (
        isinstance(value, list)
        and 1 <= len(value) <= MAX_AXES
        and all(size is None or (is_int(size) and 1 <= size < BIG) for size in value)
    )


def is_index(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= MAX_INDEX and all(is_int(v) and 0 <= v < BIG for v in value)


def is_position(value: Any) -> bool:
    return is_int(value) and -BIG < value < BIG


FLAG = AttributeRule("true or false", lambda value: isinstance(value, bool))
COUNT = AttributeRule("a whole number from 1", lambda value: is_int(value) and 1 <= value < BIG)
PAIR = AttributeRule("[h, w], each from 1", ints(2, 1))
PADS = AttributeRule("[top, left, bottom, right], each from 0", ints(4, 0))
AROUND = AttributeRule("[before, after], each from 0", ints(2, 0))
SCALE = AttributeRule("[h, w], each above 0", is_scale)
NAME = AttributeRule("1 to 200 printable ASCII characters", is_name)
FIXED = AttributeRule(f"{FIXED_BITS}", lambda value: is_int(value) and value == FIXED_BITS)
MODE = AttributeRule("'bilinear' or 'nearest'", lambda value: value in ("bilinear", "nearest"))
TRUE = AttributeRule("true, or left out", lambda value: value is True)
FROM_0 = AttributeRule("[h, w], each from 0", ints(2, 0))
AXIS = AttributeRule(f"an axis, 0 to {MAX_AXES - 1}", lambda value: is_int(value) and 0 <= value < MAX_AXES)
AXES = AttributeRule(f"rising axes, each 0 to {MAX_AXES - 1}", is_axes)
ORDER = AttributeRule(
    "a permutation of the axes",
    lambda value: (
        isinstance(value, list)
        and 1 <= len(value) <= MAX_AXES
        and all(map(is_int, value))
        and sorted(value) == list(range(len(value)))
    ),
)
FULL_SHAPE = AttributeRule(f"1 to {MAX_AXES} sizes, each from 1", lambda value: is_shape(value) and None not in value)
FREE_SHAPE = AttributeRule(f"1 to {MAX_AXES} sizes, each from 1 or null", is_shape)
ONE_FREE = AttributeRule(
    f"1 to {MAX_AXES} sizes, each from 1, one of them perhaps null",
    lambda value: is_shape(value) and value.count(None) <= 1,
)
POSITION = AttributeRule("a whole number above -2^31 and below 2^31", is_position)
INDEX = AttributeRule(f"1 to {MAX_INDEX:,} positions, each from 0", is_index)
EPS = AttributeRule("a number from 0 and below 1", lambda value: type(value) in (int, float) and 0 <= value < 1)
FUNCTIONS = (
    "abs", "sqrt", "reciprocal", "exp", "log", "sigmoid", "tanh", "erf", "gelu", "gelu_tanh", "silu", "mish",
)  # fmt: skip
GATES = {"lstm": 4, "gru": 3}


@dataclass(frozen=True)
class OpSchema:
    """`reads`: "float", "codes", "either" (and makes what it reads), "alike" (all floats, or all codes) or "weight":
    codes if its weight is quantized.
    `format` is the first one that has the op; `later` are attributes that format 3 adds, and `image` says that it reads
    images, which have three axes.

    `table` is the shape of one profile's row: "", "2", "2 x C" (C of the input) or "2 x out" (of the weight); an op
    with an attribute `affine` has it only where that is true, one that reads "alike" only where it reads codes.
    """

    reads: str
    attributes: dict[str, AttributeRule] = field(default_factory=dict)
    table: str = ""
    inputs: tuple[int, int] = (1, 1)  # least, most
    optional: dict[str, AttributeRule] = field(default_factory=dict)  # attributes that may be left out
    later: dict[str, AttributeRule] = field(default_factory=dict)  # likewise, from format 3 on
    format: int = 1
    image: bool = False

    def attributes_in(self, version: int) -> dict[str, AttributeRule]:
        """Those that may be left out."""
        return self.optional | self.later if version >= 3 else self.optional


WINDOW = {"kernel": PAIR, "stride": PAIR, "pad": PADS}

# fmt: off
SCHEMAS: dict[str, OpSchema] = {
    # kind                       reads     attributes                                                        table
    "quantize":          OpSchema("float",  {"signed": FLAG, "rectify": FLAG, "affine": FLAG},              "2 x C",
                                  optional={"bits": FIXED}),
    "dequantize":        OpSchema("codes",  {},                                                             "2"),
    "conv":              OpSchema("weight", {"weight": NAME, **WINDOW, "dilation": PAIR, "groups": COUNT,
                                             "signed": FLAG, "affine": FLAG},                             "2 x out",
                                  later={"transposed": TRUE, "output_pad": FROM_0, "toom_cook": TRUE}, image=True),
    "linear":            OpSchema("weight", {"weight": NAME, "signed": FLAG, "affine": FLAG},               "2 x out"),
    "affine":            OpSchema("float",  {},                                                             "2 x C"),
    "clip":              OpSchema("float",  {},                                                             "2"),
    "add":               OpSchema("float",  {}, inputs=(2, 2)),
    "concat":            OpSchema("float",  {}, inputs=(1, 65536), later={"axis": AXIS}),
    "max_pool":          OpSchema("either", {**WINDOW, "dilation": PAIR, "ceil": FLAG}, image=True),
    "avg_pool":          OpSchema("float",  {**WINDOW, "ceil": FLAG, "count_pad": FLAG}, image=True),
    "adaptive_avg_pool": OpSchema("float",  {"size": PAIR}, image=True),
    "resize":            OpSchema("float",  {"mode": MODE, "align": FLAG, "size": or_null(PAIR),
                                             "scale": or_null(SCALE), "like": or_null(NAME)}, image=True),
    "softmax":           OpSchema("float",  {}, later={"single": TRUE}),
    "flatten":           OpSchema("either", {}, image=True),
    "pad":               OpSchema("float",  {"h": AROUND, "w": AROUND, "c": AROUND}, image=True),
    "constant":          OpSchema("float",  {"weight": NAME, "shape": FULL_SHAPE}, inputs=(0, 0), format=3),
    "input":             OpSchema("float",  {"shape": FREE_SHAPE, "integer": FLAG}, inputs=(0, 0), format=3),
    "reshape":           OpSchema("either", {"shape": ONE_FREE}, format=3),
    "transpose":         OpSchema("either", {"order": ORDER}, format=3),
    "slice":             OpSchema("either", {"axis": AXIS, "start": POSITION, "stop": or_null(POSITION), "step": COUNT},
                                  format=3),
    "gather":            OpSchema("either", {"axis": AXIS, "index": INDEX}, format=3),
    "pointwise":         OpSchema("float",  {"function": one_of(*FUNCTIONS)}, format=3),
    "binary":            OpSchema("float",  {"function": one_of("add", "sub", "mul", "div", "max", "min")},
                                  inputs=(2, 2), format=3),
    "reduce":            OpSchema("float",  {"function": one_of("sum", "mean", "max", "min"), "axes": AXES}, format=3),
    "norm":              OpSchema("float",  {"axes": AXES, "eps": EPS}, format=3),
    "matmul":            OpSchema("alike",  {"transposed": FLAG}, "2", inputs=(2, 2), format=3),
    "embedding":         OpSchema("float",  {"weight": NAME}, format=3),
    "recurrent":         OpSchema("float",  {"function": one_of(*GATES), "weight": NAME, "reverse": FLAG}, format=3),
}
# fmt: on
