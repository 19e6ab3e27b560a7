"""Whether a graph makes sense: FORMAT.md sections 2 to 4. A parsed GRAPH in; out, the tensors it needs, or an error.

The writer and the reader call the same check_graph, so no file is written that would be refused. Parts that make sense
or not by themselves (input, labels, weights, planes, names of profiles) are looked at in check_parts.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anyprec.errors import BadGraph, BadTensor, UnsupportedVersion
from anyprec.format.check_parts import (
    check_input,
    check_input_shape,
    check_keys,
    check_labels,
    check_planes,
    check_profile_list,
    check_weights,
    need,
)
from anyprec.format.graph import FORMATS, INPUT, bits_of, product_fits
from anyprec.format.header import TensorPlace, show
from anyprec.format.planes import plane_bytes
from anyprec.format.schema import SCHEMAS, OpSchema, is_int, is_name
from anyprec.format.shapes import Shape, title, value_shape
from anyprec.widths import FLOAT, INTEGER_WIDTHS

KEYS = (
    "format", "name", "made_by", "input", "labels", "planes", "profiles", "weights", "ops", "outputs", "checksums",
)  # fmt: skip
MAX_OPS = 65_536

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape


@dataclass
class CheckedGraph:
    """What check_graph learned: the tensors the file must hold, in file order, and the shape of every value."""

    tensors: Tensors = field(default_factory=dict)
    values: dict[str, Shape] = field(default_factory=dict)
    codes_of: dict[str, str] = field(default_factory=dict)  # value -> the quantize op whose codes it is
    signed: dict[str, bool] = field(default_factory=dict)  # of each quantize op
    fixed: dict[str, int | None] = field(default_factory=dict)  # of each quantize op: its own bits, None: the profile's


def check_graph(graph: Any) -> CheckedGraph:
    """Raises BadGraph or UnsupportedVersion, naming the part that is wrong."""
    need(isinstance(graph, dict) and "format" in graph, "the graph is not a table with 'format'")
    if not is_int(graph["format"]) or graph["format"] not in FORMATS:
        raise UnsupportedVersion(
            f"format version {show(graph['format'])} is not 1, 2 or 3, those this anyprec reads; use the anyprec that "
            f"wrote it ({show(graph.get('made_by'))}), or pack the model again"
        )
    check_keys(graph, KEYS, "the graph")
    need(is_name(graph["name"]), f"name {show(graph['name'])} must be 1 to 200 printable ASCII characters")
    made_by = graph["made_by"]
    need(made_by == "" or is_name(made_by), f"made_by {show(made_by)} must be up to 200 printable ASCII characters")
    checked = CheckedGraph()
    checked.values[INPUT] = check_input(graph["input"], graph["format"])
    check_labels(graph["labels"])
    check_weights(graph["weights"])
    check_planes(graph["planes"])
    check_profile_list(graph["profiles"])
    check_ops(graph, checked)
    check_outputs(graph, checked)
    check_profiles(graph, checked)
    checked.tensors = needed_tensors(graph, checked)
    return checked


def check_tensors(needed: Tensors, found: Mapping[str, TensorPlace]) -> None:
    """The tensors of the file are those the graph needs: all, no others, and in that order."""
    for name, (dtype, shape) in needed.items():
        if name not in found:
            raise BadTensor(f"tensor {name!r} is missing; the graph needs it as {dtype} of shape {list(shape)}")
        place = found[name]
        if (place.dtype, place.shape) != (dtype, shape):
            raise BadTensor(
                f"tensor {name!r} is {place.dtype} of shape {show(list(place.shape))}; the graph needs {dtype} of "
                f"shape {list(shape)}"
            )
    for name, place in found.items():
        if name not in needed:
            raise BadTensor(f"tensor {show(name)} at offset {place.begin:,} is none that the graph needs")
    for name, wanted in zip(found, needed, strict=True):
        if name != wanted:
            raise BadTensor(
                f"tensor {name!r} stands where {wanted!r} belongs: wider dtypes come first, then names in order"
            )


def check_ops(graph: Mapping[str, Any], checked: CheckedGraph) -> None:
    ops = graph["ops"]
    need(isinstance(ops, list) and bool(ops), f"ops is {show(ops)}, not a list of at least one")
    need(len(ops) <= MAX_OPS, f"{len(ops):,} ops are over the limit, {MAX_OPS:,}")
    used: set[str] = set()
    constants: set[str] = set()
    others = False  # whether an op that is no input has come
    for number, op in enumerate(ops):
        need(
            isinstance(op, dict) and is_name(op.get("name")),
            f"op {number} is {show(op)}; its name must be 1 to 200 printable ASCII characters",
        )
        name, kind = op["name"], op.get("op")
        need(name not in checked.values, f"op {number}: the name {name!r} is taken; every op needs a name of its own")
        known = [one for one, schema in SCHEMAS.items() if schema.format <= graph["format"]]
        if not isinstance(kind, str) or kind not in known:
            raise BadGraph(f"op {name!r} has the unknown kind {show(kind)}; known are {', '.join(known)}")
        others = others or kind != "input"
        need(kind != "input" or not others, f"{title(op)} comes after another op; inputs come first")
        check_op(op, SCHEMAS[kind], graph, checked)
        if kind == "constant":
            constants.add(op["weight"])
        else:
            used.add(op.get("weight", ""))
        need(
            op.get("weight", "") not in constants & used,
            f"{title(op)}: weight {op.get('weight')!r} is also used elsewhere; a constant has its own",
        )
    for name in graph["weights"]:
        need(name in used | constants, f"weight {name!r} is used by no op; leave it out")


def check_op(op: Mapping[str, Any], schema: OpSchema, graph: Mapping[str, Any], checked: CheckedGraph) -> None:
    """One op: its attributes, what it reads, and the value it makes, which is added to `checked`."""
    optional = schema.attributes_in(graph["format"])
    check_keys(op, ("name", "op", "in", *schema.attributes), title(op), optional)
    for key, rule in (schema.attributes | optional).items():
        if key in op:
            need(rule.holds(op[key]), f"{title(op)}: {key} is {show(op[key])}; it must be {rule.allowed}")
    inputs, (least, most) = op["in"], schema.inputs
    need(
        isinstance(inputs, list) and least <= len(inputs) <= most,
        f"{title(op)}: 'in' is {show(inputs)}; it must name {least if least == most else f'{least} or more'} values",
    )
    for value in [*inputs, *([op["like"]] if op.get("like") is not None else [])]:
        need(
            isinstance(value, str) and value in checked.values,
            f"{title(op)} reads {show(value)}, which is neither 'input' nor the name of an earlier op",
        )
    weight = graph["weights"].get(op["weight"]) if "weight" in op else None
    need("weight" not in op or weight is not None, f"{title(op)}: there is no weight {show(op.get('weight'))}")
    need(
        schema.reads == "weight" or weight is None or weight["float"],
        f"{title(op)}: weight {op.get('weight')!r} is quantized; it must be float in every profile",
    )
    if op["op"] == "input":
        check_input_shape(op["shape"], op["integer"], title(op))
    check_codes(op, schema, weight, checked)
    shapes = [checked.values[value] for value in inputs]
    like = checked.values[op["like"]] if op.get("like") is not None else None
    checked.values[op["name"]] = value_shape(op, shapes, weight, like)


def check_codes(op: Mapping[str, Any], schema: OpSchema, weight: Any, checked: CheckedGraph) -> None:
    """Codes go from a quantize to ops that take them; `signed` means the same at both ends."""
    takes_codes = schema.reads == "codes" or (schema.reads == "weight" and not weight["float"])
    if schema.reads == "alike":
        takes_codes = reads_codes(op, checked)
    if schema.reads != "either":
        for value in op["in"]:
            wanted, found = ("codes" if codes else "floats" for codes in (takes_codes, value in checked.codes_of))
            need(wanted == found, f"{title(op)} reads {value!r}, which is {found}; it takes {wanted}")
    source = checked.codes_of.get(op["in"][0]) if op["in"] else None
    if op["op"] == "quantize":
        checked.codes_of[op["name"]] = op["name"]
        checked.fixed[op["name"]] = op.get("bits")
        checked.signed[op["name"]] = op["signed"]
    elif schema.reads == "either" and source is not None:
        checked.codes_of[op["name"]] = source
    elif schema.reads == "weight":
        stands_for = checked.signed[source] if source is not None else False
        need(
            op["signed"] == stands_for,
            f"{title(op)}: signed is {op['signed']}, what it reads is made with {stands_for}",
        )


def check_outputs(graph: Mapping[str, Any], checked: CheckedGraph) -> None:
    outputs = graph["outputs"]
    need(isinstance(outputs, list) and bool(outputs), f"outputs is {show(outputs)}, not a list of at least one")
    for value in outputs:
        known = isinstance(value, str) and value in checked.values and value != INPUT
        need(known, f"output {show(value)} is not the name of an op")
        need(value not in checked.codes_of, f"output {value!r} is codes; outputs are floats: dequantize it")
    need(len(set(outputs)) == len(outputs), f"outputs {show(outputs)} names one twice")


def check_profiles(graph: Mapping[str, Any], checked: CheckedGraph) -> None:
    """Bits of every profile: for the weights and quantize ops there are, of widths the file has, and small enough."""
    quantized = {name: weight for name, weight in graph["weights"].items() if not weight["float"]}
    in_planes = {name for name, weight in quantized.items() if "bits" not in weight}
    quantizers = {name for name, fixed in checked.fixed.items() if fixed is None}
    widths = {int(key) for key in graph["planes"]} | {FLOAT}
    for profile in graph["profiles"]:
        what = f"profile {profile['name']!r}"
        check_bits_of(profile["weights"], in_planes, widths if in_planes else {*INTEGER_WIDTHS, FLOAT}, what, "weights")
        check_bits_of(profile["acts"], quantizers, {*INTEGER_WIDTHS, FLOAT}, what, "acts")
    # Uniform profiles are the same for every op, so they are gone through once: 256 x 65,536 would take seconds.
    uniform = {(p["weights"], p["acts"]): p for p in graph["profiles"] if is_int(p["weights"]) and is_int(p["acts"])}
    mixed = [p for p in graph["profiles"] if not (is_int(p["weights"]) and is_int(p["acts"]))]
    for op in graph["ops"]:
        if SCHEMAS[op["op"]].reads == "alike" and reads_codes(op, checked):
            for profile in [*uniform.values(), *mixed]:
                check_product(op, profile, checked)
        if op.get("weight") not in quantized:
            continue
        weight = quantized[op["weight"]]
        terms = math.prod(weight["shape"][1:])
        source = checked.codes_of[op["in"][0]]
        for profile in [*uniform.values(), *mixed]:
            weight_bits = bits_of(profile["weights"], op["weight"], weight.get("bits"))
            act_bits = bits_of(profile["acts"], source, checked.fixed[source])
            what = f"{title(op)} in profile {profile['name']!r}"
            need(
                (weight_bits == FLOAT) == (act_bits == FLOAT),
                f"{what}: weights have {weight_bits} bits, the input {act_bits}; both must be 32 (float) or neither",
            )
            largest = terms * (2**weight_bits - 1) * (2**act_bits - 1)
            need(
                weight_bits == FLOAT or largest < 2**31,
                f"{what}: its sums may reach {largest:,}, which does not fit 32 bits; give it fewer bits",
            )
    for profile in graph["profiles"]:
        name = profile["name"]
        need(
            not name.isdigit() or (str(profile["weights"]), str(profile["acts"])) == (name, name),
            f"profile {name!r}: a number as its name means that weights and acts have that many bits",
        )


def check_product(op: Mapping[str, Any], profile: Mapping[str, Any], checked: CheckedGraph) -> None:
    """A product of two values of codes: both sides are integers in this profile, or none; its sums fit."""
    sources = [checked.codes_of[value] for value in op["in"]]
    left, right = (bits_of(profile["acts"], source, checked.fixed[source]) for source in sources)
    what = f"{title(op)} in profile {profile['name']!r}"
    need(
        (left == FLOAT) == (right == FLOAT),
        f"{what}: its inputs have {left} and {right} bits; both must be 32 (float) or neither",
    )
    terms = checked.values[op["in"][0]].c
    need(
        left == FLOAT or terms is None or product_fits(terms, left, right),
        f"{what}: sums of {terms} products at {left} and {right} bits do not fit 32 bits; give it fewer bits",
    )


def check_bits_of(bits: Any, names: set[str], widths: set[int], what: str, part: str) -> None:
    allowed = ", ".join(map(str, sorted(widths)))
    if not isinstance(bits, dict):
        need(is_int(bits) and bits in widths, f"{what}: {part} is {show(bits)}; this file has {allowed}")
        return
    for name, one in bits.items():
        need(name in names, f"{what}: {part} names {show(name)}, which is not quantized by profiles in this file")
        need(is_int(one) and one in widths, f"{what}: {part} of {name!r} is {show(one)}; this file has {allowed}")
    for name in sorted(names - set(bits))[:1]:
        raise BadGraph(f"{what}: {part} leaves out {name!r}; give a number for each, or one for all")


def needed_tensors(graph: Mapping[str, Any], checked: CheckedGraph) -> Tensors:
    """In file order: that of the safetensors library, wider dtypes first, then by name."""
    rows = len(graph["profiles"])
    floats: Tensors = {}
    bytes_: Tensors = {}
    for op in graph["ops"]:
        width = table_width(op, graph["weights"], checked)
        if width is not None:
            floats[f"table.{op['name']}"] = ("F32", (rows, *width))
    planes = {number for numbers in graph["planes"].values() for number in numbers}
    for name, weight in graph["weights"].items():
        count = math.prod(weight["shape"])
        if weight["float"]:
            floats[f"weight.{name}"] = ("F32", tuple(weight["shape"]))
            continue
        if "bits" in weight:
            bytes_[f"codes.{name}"] = ("U8", (count,))
        else:
            for number in planes:
                bytes_[f"plane{number:02}.{name}"] = ("U8", (plane_bytes(count),))
        if any(bits_of(profile["weights"], name, weight.get("bits")) == FLOAT for profile in graph["profiles"]):
            bytes_[f"tail.{name}"] = ("U8", (4 * count,))
    return {name: part[name] for part in (floats, bytes_) for name in sorted(part)}


def table_width(op: Mapping[str, Any], weights: Mapping[str, Any], checked: CheckedGraph) -> tuple[int, ...] | None:
    """Shape of one profile's row of an op's table, or None where it has no table."""
    form = SCHEMAS[op["op"]].table
    if not form or not op.get("affine", True) or (SCHEMAS[op["op"]].reads == "alike" and not reads_codes(op, checked)):
        return None
    if form == "2":
        return (2,)
    channels = weights[op["weight"]]["shape"][0] if form == "2 x out" else checked.values[op["in"][0]].c
    if channels is None:
        raise BadGraph(f"{title(op)}: its channels follow from a free input size; fix height and width of the input")
    return (2, channels)


def reads_codes(op: Mapping[str, Any], checked: CheckedGraph) -> bool:
    return op["in"][0] in checked.codes_of


def check_checksums(checksums: Any, tensors: Tensors) -> None:
    need(isinstance(checksums, dict), f"checksums is {show(checksums)}, not a table")
    for name in tensors:
        need(name in checksums, f"checksums has none for {name!r}")
    for name, digits in checksums.items():
        need(name in tensors, f"checksums has one for {show(name)}, which the graph does not need")
        need(is_checksum(digits), f"the checksum of {name!r} is {show(digits)}, not 8 hex digits")


def is_checksum(digits: object) -> bool:
    return isinstance(digits, str) and re.fullmatch("[0-9a-f]{8}", digits) is not None
