"""Every operation of FORMAT.md section 3 in one table: what it reads, its attributes, its table. Used by check.py.

An attribute's type is a Rule: a test and the words for what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anyprec.format.graph import FIXED_BITS

BIG = 2**31  # any dimension is below this


@dataclass(frozen=True)
class AttributeRule:
    allowed: str
    holds: Callable[[Any], bool]


def is_int(value: object) -> bool:
    return type(value) is int  # a bool is no number


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


FLAG = AttributeRule("true or false", lambda value: isinstance(value, bool))
COUNT = AttributeRule("a whole number from 1", lambda value: is_int(value) and 1 <= value < BIG)
PAIR = AttributeRule("[h, w], each from 1", ints(2, 1))
PADS = AttributeRule("[top, left, bottom, right], each from 0", ints(4, 0))
AROUND = AttributeRule("[before, after], each from 0", ints(2, 0))
SCALE = AttributeRule("[h, w], each above 0", is_scale)
NAME = AttributeRule("1 to 200 printable ASCII characters", is_name)
FIXED = AttributeRule(f"{FIXED_BITS}", lambda value: is_int(value) and value == FIXED_BITS)
MODE = AttributeRule("'bilinear' or 'nearest'", lambda value: value in ("bilinear", "nearest"))


@dataclass(frozen=True)
class OpSchema:
    """`reads`: "float", "codes", "either" (and makes what it reads) or "weight": codes if its weight is quantized.

    `table` is the shape of one profile's row: "", "2", "2 x C" (C of the input) or "2 x out" (of the weight); an op
    with an attribute `affine` has it only where that is true.
    """

    reads: str
    attributes: dict[str, AttributeRule] = field(default_factory=dict)
    table: str = ""
    inputs: tuple[int, int] = (1, 1)  # least, most
    optional: dict[str, AttributeRule] = field(default_factory=dict)  # attributes that may be left out


WINDOW = {"kernel": PAIR, "stride": PAIR, "pad": PADS}

# fmt: off
SCHEMAS: dict[str, OpSchema] = {
    # kind                       reads     attributes                                                        table
    "quantize":          OpSchema("float",  {"signed": FLAG, "rectify": FLAG, "affine": FLAG},              "2 x C",
                                  optional={"bits": FIXED}),
    "dequantize":        OpSchema("codes",  {},                                                             "2"),
    "conv":              OpSchema("weight", {"weight": NAME, **WINDOW, "dilation": PAIR, "groups": COUNT,
                                             "signed": FLAG, "affine": FLAG},                             "2 x out"),
    "linear":            OpSchema("weight", {"weight": NAME, "signed": FLAG, "affine": FLAG},               "2 x out"),
    "affine":            OpSchema("float",  {},                                                             "2 x C"),
    "clip":              OpSchema("float",  {},                                                             "2"),
    "add":               OpSchema("float",  {}, inputs=(2, 2)),
    "concat":            OpSchema("float",  {}, inputs=(1, 65536)),
    "max_pool":          OpSchema("either", {**WINDOW, "dilation": PAIR, "ceil": FLAG}),
    "avg_pool":          OpSchema("float",  {**WINDOW, "ceil": FLAG, "count_pad": FLAG}),
    "adaptive_avg_pool": OpSchema("float",  {"size": PAIR}),
    "resize":            OpSchema("float",  {"mode": MODE, "align": FLAG, "size": or_null(PAIR),
                                             "scale": or_null(SCALE), "like": or_null(NAME)}),
    "softmax":           OpSchema("float",  {}),
    "flatten":           OpSchema("either", {}),
    "pad":               OpSchema("float",  {"h": AROUND, "w": AROUND, "c": AROUND}),
}
# fmt: on
