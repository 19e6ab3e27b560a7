"""Whether the parts of a graph that need no other part make sense: input, labels, weights, planes, profiles by name.

FORMAT.md section 2. Parts of a parsed GRAPH in; nothing out, or BadGraph. Called by check.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from anyprec.errors import BadGraph
from anyprec.format.header import show
from anyprec.format.schema import BIG, FIXED, PAIR, is_int, is_name, is_shape
from anyprec.format.shapes import MAX_ELEMENTS, Shape
from anyprec.preprocessing import FILTERS, RESIZES
from anyprec.widths import INTEGER_WIDTHS

MAX_WEIGHTS = 65_536
MAX_PROFILES = 256
MAX_PLANES = 100  # two digits
LARGEST_FLOAT = 3.4028234663852886e38


def need(holds: bool, message: str) -> None:
    if not holds:
        raise BadGraph(message)


def check_keys(record: Any, keys: tuple[str, ...], what: str, optional: Iterable[str] = ()) -> None:
    need(isinstance(record, dict), f"{what} is {show(record)}, not a table")
    for key in keys:
        need(key in record, f"{what} has no {key!r}; it needs {', '.join(keys)}")
    for key in record:
        allowed = (*keys, *optional)
        need(key in allowed, f"{what} has an unknown {show(key)}; it takes {', '.join(allowed)}")


def check_input(record: Any, version: int) -> Shape:
    keys = ("shape", "image", *(("preprocessing",) if version == 2 else ()))
    check_keys(record, keys, "input", ("size", *(("preprocessing", "integer") if version >= 3 else ())))
    shape, image = record["shape"], record["image"]
    if version < 3:
        need(
            is_shape(shape) and len(shape) == 3 and shape[2] is not None and elements(shape) < MAX_ELEMENTS,
            f"input shape {show(shape)} is not [H, W, C], each from 1 (H and W may be null), below 2^40 numbers in all",
        )
    check_input_shape(shape, record.get("integer", False), "input")
    if len(shape) != 3 or record.get("integer"):
        need(
            image is None and "size" not in record and "preprocessing" not in record,
            f"input shape {show(shape)} is not that of images; it goes without image, size and preprocessing",
        )
        return Shape(shape)
    if "size" in record:
        size = record["size"]
        need(
            isinstance(size, list)
            and len(size) == 2
            and all(is_size(one) for one in size)
            and math.prod(size) * shape[2] < MAX_ELEMENTS
            and all(fixed in (None, one) for fixed, one in zip(shape, size, strict=False)),
            f"input size {show(size)} is not [H, W] that input shape {show(shape)} allows",
        )
    if image is not None:
        check_keys(image, ("scale", "shift"), "input image")
        for key in ("scale", "shift"):
            numbers = image[key]
            need(
                isinstance(numbers, list) and len(numbers) == shape[2] and all(is_number(n) for n in numbers),
                f"input image {key} {show(numbers)} is not {shape[2]} float32 numbers, one a channel",
            )
    if "preprocessing" in record:
        check_preprocessing(record)
    return Shape(shape)


def check_input_shape(shape: Any, integer: Any, what: str) -> None:
    """Of the first input, or of an op `input`."""
    need(isinstance(integer, bool), f"{what}: integer is {show(integer)}, not true or false")
    need(
        is_shape(shape) and (shape[-1] is not None or integer) and elements(shape) < MAX_ELEMENTS,
        f"{what}: shape {show(shape)} is not a list of 1 to 6 sizes, each from 1 or null, below 2^40 numbers in all; "
        "the last may be null only where integer is true",
    )


def elements(shape: Iterable[int | None]) -> int:
    """How many numbers at least."""
    return math.prod(size or 1 for size in shape)


def check_preprocessing(record: Mapping[str, Any]) -> None:
    how, shape, image = record["preprocessing"], record["shape"], record["image"]
    check_keys(how, ("resize", "to", "filter"), "preprocessing")
    need(how["resize"] in RESIZES, f"preprocessing resize {show(how['resize'])} is none of {', '.join(RESIZES)}")
    need(
        image is not None and shape[2] in (1, 3) and all(scale > 0 for scale in image["scale"]),
        "preprocessing needs an image of 1 or 3 channels whose scales are above 0",
    )
    to, size = how["to"], record.get("size")
    if how["resize"] == "none":
        need(
            to is None and how["filter"] is None and size is None and shape[:2] == [None, None],
            "preprocessing 'none' goes with a free H and W, and without 'size', 'to', 'filter'",
        )
        return
    need(
        size is not None
        and PAIR.holds(to)
        and all(one >= least for one, least in zip(to, size, strict=True))
        and math.prod(to) * shape[2] < MAX_ELEMENTS,
        f"preprocessing to {show(to)} is not [H, W], each at least that of the input's size {show(size)}, which is "
        "needed, and not too large",
    )
    need(how["filter"] in FILTERS, f"preprocessing filter {show(how['filter'])} is none of {', '.join(FILTERS)}")


def is_size(value: object) -> bool:
    return type(value) is int and 1 <= value < BIG


def is_number(value: object) -> bool:
    return type(value) in (int, float) and -LARGEST_FLOAT <= value <= LARGEST_FLOAT  # type: ignore[operator]


def check_labels(labels: Any) -> None:
    need(labels is None or isinstance(labels, list), f"labels is {show(labels)}, not a list of texts or null")
    for label in labels or ():
        need(
            isinstance(label, str) and not any("\ud800" <= char <= "\udfff" for char in label),
            f"label {show(label)} is not a text",
        )


def check_weights(weights: Any) -> None:
    need(isinstance(weights, dict), f"weights is {show(weights)}, not a table")
    need(len(weights) <= MAX_WEIGHTS, f"{len(weights):,} weights are over the limit, {MAX_WEIGHTS:,}")
    for name, weight in weights.items():
        need(is_name(name), f"weight name {show(name)} must be 1 to 200 printable ASCII characters")
        check_keys(weight, ("shape", "float"), f"weight {name!r}", optional=("bits",))
        shape = weight["shape"]
        need(
            isinstance(shape, list)
            and len(shape) == 4
            and all(map(is_size, shape))
            and math.prod(shape) < MAX_ELEMENTS,
            f"weight {name!r}: shape {show(shape)} is not [out, kh, kw, in], each from 1, below 2^40 numbers in all",
        )
        need(isinstance(weight["float"], bool), f"weight {name!r}: float is {show(weight['float'])}, not true or false")
        if "bits" in weight:
            need(
                FIXED.holds(weight["bits"]) and not weight["float"],
                f"weight {name!r}: bits is {show(weight['bits'])}; it must be {FIXED.allowed}, of no float weight",
            )


def check_planes(planes: Any) -> None:
    """Every width has as many planes as bits; wider widths end later, so each width is a prefix of the file."""
    need(isinstance(planes, dict), f"planes is {show(planes)}, not a table")
    used: set[int] = set()
    last = -1
    for key in sorted(planes):
        numbers = planes[key]
        need(key in map(str, INTEGER_WIDTHS), f"planes has the width {show(key)}; widths are '1' to '8'")
        need(
            isinstance(numbers, list)
            and len(numbers) == int(key)
            and all(is_int(number) and 0 <= number < MAX_PLANES for number in numbers)
            and sorted(set(numbers)) == numbers,
            f"planes of {key} bits are {show(numbers)}, not {key} rising plane numbers below {MAX_PLANES}",
        )
        need(numbers[-1] > last, f"planes of {key} bits end at {numbers[-1]}, no later than a narrower width's")
        last = numbers[-1]
        used.update(numbers)
        need(
            len(used) == last + 1, f"planes up to {key} bits are {sorted(used)}, which leaves out a number below {last}"
        )


def check_profile_list(profiles: Any) -> None:
    need(isinstance(profiles, list) and bool(profiles), f"profiles is {show(profiles)}, not a list of at least one")
    need(len(profiles) <= MAX_PROFILES, f"{len(profiles):,} profiles are over the limit, {MAX_PROFILES}")
    names: set[str] = set()
    for number, profile in enumerate(profiles):
        check_keys(profile, ("name", "weights", "acts", "accuracy"), f"profile {number}")
        name, accuracy = profile["name"], profile["accuracy"]
        need(is_name(name), f"profile name {show(name)} must be 1 to 200 printable ASCII characters")
        need(
            name != "random" and not name.startswith("random:"),
            f"profile {name!r}: no profile may be called that, for bits='random' draws a width; choose another name",
        )
        need(name not in names, f"two profiles are called {name!r}; each needs a name of its own")
        names.add(name)
        need(
            accuracy is None or (is_number(accuracy) and 0 <= accuracy <= 100),
            f"profile {name!r}: accuracy {show(accuracy)} is not a percentage or null",
        )
