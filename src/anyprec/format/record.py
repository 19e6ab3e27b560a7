"""Graph <-> GRAPH, the JSON record of FORMAT.md section 2. Used by file.py; check.py checks the record, not this."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from anyprec import __version__
from anyprec.errors import BadGraph
from anyprec.format.graph import Graph, GraphProfile, Op, Weight
from anyprec.format.schema import SCHEMAS


def to_record(graph: Graph, checksums: Mapping[str, str]) -> dict[str, Any]:
    image = None
    if graph.image_scale is not None and graph.image_shift is not None:
        image = {"scale": as_float32(graph.image_scale), "shift": as_float32(graph.image_shift)}
    return {
        "format": version_of(graph),
        "name": graph.name,
        "made_by": graph.made_by or f"anyprec {__version__}",
        "input": {"shape": plain(graph.input_shape, "input_shape"), "image": image}
        | ({} if graph.image_size is None else {"size": plain(graph.image_size, "image_size")})
        | ({} if graph.resize is None else {"preprocessing": preprocessing_record(graph)})
        | ({"integer": True} if graph.integer_input else {}),
        "labels": None if graph.labels is None else list(graph.labels),
        "planes": {str(bits): plain(graph.planes[bits], "planes") for bits in sorted(graph.planes)},
        "profiles": [
            {
                "name": profile.name,
                "weights": plain(profile.weights, "profile weights"),
                "acts": plain(profile.acts, "profile acts"),
                "accuracy": plain(profile.accuracy, "profile accuracy"),
            }
            for profile in graph.profiles
        ],
        "weights": {
            name: {"shape": plain(weight.shape, "weight shape"), "float": weight.is_float}
            | ({} if weight.bits is None else {"bits": plain(weight.bits, "weight bits")})
            for name, weight in graph.weights.items()
        },
        "ops": [
            {"name": op.name, "op": op.kind, "in": list(op.inputs)}
            | {key: plain(value, f"{key} of op {op.name!r}") for key, value in op.attributes.items()}
            for op in graph.ops
        ],
        "outputs": list(graph.outputs),
        "checksums": dict(checksums),
    }


def version_of(graph: Graph) -> int:
    """The oldest format that has all of it."""
    new = any(op.kind in SCHEMAS and needs_3(op) for op in graph.ops)
    if new or len(graph.input_shape) != 3 or graph.integer_input:
        return 3
    return 1 if graph.resize is None else 2


def needs_3(op: Op) -> bool:
    schema = SCHEMAS[op.kind]
    return schema.format == 3 or any(key in op.attributes for key in schema.later)


def preprocessing_record(graph: Graph) -> dict[str, Any]:
    return {"resize": graph.resize, "to": plain(graph.resize_to, "resize_to"), "filter": graph.filter}


def as_float32(numbers: tuple[float, ...]) -> list[float]:
    """Rounded now, so that every reader gets the same float32 from the text."""
    return [float(np.float32(number)) for number in numbers]


def plain(value: Any, what: str) -> Any:
    """Numbers of numpy and tuples as JSON has them; anything else is a mistake of whoever made the graph."""
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, what) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, what) for item in value]
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.floating):
        return float(value)
    try:
        return operator.index(value)
    except TypeError:
        raise BadGraph(
            f"{what} holds {value!r} of {type(value).__name__}; only numbers, texts and lists of them fit"
        ) from None


def from_record(record: Mapping[str, Any], weights: Mapping[str, Weight], tables: Mapping[str, np.ndarray]) -> Graph:
    """The Graph of a checked record, with the numbers read from the file."""
    image, size = record["input"]["image"], record["input"].get("size")
    how = record["input"].get("preprocessing", {"resize": None, "to": None, "filter": None})
    return Graph(
        name=record["name"],
        input_shape=tuple(record["input"]["shape"]),
        profiles=tuple(profile_from(profile) for profile in record["profiles"]),
        planes=planes_of(record),
        weights=weights,
        ops=tuple(op_from(op) for op in record["ops"]),
        outputs=tuple(record["outputs"]),
        tables=tables,
        image_scale=None if image is None else tuple(map(float, image["scale"])),
        image_shift=None if image is None else tuple(map(float, image["shift"])),
        labels=None if record["labels"] is None else tuple(record["labels"]),
        image_size=None if size is None else tuple(size),
        made_by=record["made_by"],
        resize=how["resize"],
        resize_to=None if how["to"] is None else tuple(how["to"]),
        filter=how["filter"],
        integer_input=record["input"].get("integer", False),
    )


def planes_of(record: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    return {int(bits): tuple(numbers) for bits, numbers in sorted(record["planes"].items())}


def profile_from(profile: Mapping[str, Any]) -> GraphProfile:
    return GraphProfile(profile["name"], profile["weights"], profile["acts"], profile["accuracy"])


def op_from(op: Mapping[str, Any]) -> Op:
    attributes = {key: value for key, value in op.items() if key not in ("name", "op", "in")}
    return Op(
        name=op["name"],
        kind=op["op"],
        inputs=tuple(op["in"]),
        attributes={key: tuple(value) if isinstance(value, list) else value for key, value in attributes.items()},
    )
