"""The safetensors part of a model file: FORMAT.md section 1. Bytes in, metadata and tensor places out, and back.

Nothing is believed: every number is compared with the file's length before it is used. Called by file.py.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyprec.errors import BadHeader, BadTensor, ModelFileError

MAX_HEADER = 100_000_000
ALIGN = 64  # of the tensor data, for the sake of vector loads from a mapped file
DTYPE_BYTES = {"F32": 4, "U8": 1}
METADATA = "__metadata__"
Bytes = bytes | bytearray
# Of JSON, the same in native/format/json.cpp
MAX_DIGITS = 24  # of an integer: 2^64 has 20, and long ones cost quadratic time
MAX_REAL = 400  # characters of any other number
MAX_DEPTH = 64
MAX_VALUES = 2**24  # keys among them
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class TensorPlace:
    """One row of the header; offsets count from the start of the tensor data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def show(value: object) -> str:
    """A value from a file, short enough for a message whatever it is."""
    return reprlib.repr(value)


def parse_json(text: str, what: str, error: type[ModelFileError]) -> Any:
    """JSON as the standard has it: no NaN or infinity, no key twice, no endless depth."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise error(f"{what} has the key {show(twice)} twice; write the file again")
        return made

    def integer(digits: str) -> int:
        if len(digits.lstrip("-")) > MAX_DIGITS:
            raise error(f"{what} has an integer of {len(digits)} digits; no number there is that large")
        return int(digits)

    def real(digits: str) -> float:
        if len(digits) > MAX_REAL:
            raise error(f"{what} has a number of {len(digits)} characters; at most {MAX_REAL} are read")
        value = float(digits)
        if not math.isfinite(value):
            raise error(f"{what} has the number {show(digits)}, which is too large")
        return value

    def constant(name: str) -> None:
        raise error(f"{what} has the number {name}, which is not JSON")

    try:
        record = json.loads(
            text, object_pairs_hook=unique, parse_int=integer, parse_float=real, parse_constant=constant
        )
        if "\\ud" in text.lower():  # an escape may be half a surrogate pair, which is no text: no UTF-8 has it
            json.dumps(record, ensure_ascii=False).encode("utf-8")
        check_extent(text, what, error)
        return record
    except ModelFileError:
        raise
    except RecursionError:
        raise error(f"{what} is nested too deeply to be one of ours") from None
    except UnicodeEncodeError:
        raise error(f"{what} has half a surrogate pair in a text; the file is damaged") from None
    except ValueError as problem:
        raise error(f"{what} is not JSON: {problem}") from None


def check_extent(text: str, what: str, error: type[ModelFileError]) -> None:
    """Depth and number of values of a JSON text that is well-formed."""
    bare = STRING.sub('"', text)
    if len(bare) > MAX_VALUES:
        bare = re.sub(r"\s+", "", bare)
        containers = bare.count("[") + bare.count("{") - bare.count("[]") - bare.count("{}")  # that are not empty
        if 1 + bare.count(",") + bare.count(":") + containers > MAX_VALUES:
            raise error(f"{what} has more than {MAX_VALUES:,} values; no model file needs so many")
    brackets = re.sub(r"[^][]", "", bare.replace("{", "[").replace("}", "]"))
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace("[]", "")  # the innermost level
    if brackets:
        raise error(f"{what} is nested too deeply to be one of ours: more than {MAX_DEPTH} levels")


def header_length(first: Bytes) -> int:
    """The length field, checked against the limit."""
    (length,) = struct.unpack("<Q", first)
    if length > MAX_HEADER:
        raise BadHeader(
            f"its first 8 bytes say the header has {length:,} bytes, the limit is {MAX_HEADER:,}; is it a model file?"
        )
    if length < 2:
        raise BadHeader(f"its first 8 bytes say the header has {length} bytes; '{{}}' is the shortest there is")
    return int(length)


def parse_header(raw: Bytes) -> tuple[dict[str, str], dict[str, TensorPlace]]:
    """Metadata, and the tensors in the order of their bytes, which follow each other without gap or overlap."""
    if not raw.startswith(b"{"):
        raise BadHeader(f"the header starts with {show(raw[:8])} instead of '{{'; is it a model file?")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise BadHeader(f"the header is not UTF-8 at byte {problem.start}; the file is damaged") from None
    if text.rstrip(" ")[-1] != "}":
        raise BadHeader("the header does not end in '}' and spaces; the file is damaged")
    record = parse_json(text, "the header", BadHeader)
    metadata = record.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadHeader(f"{METADATA} in the header is not a table of strings; write the file again")
    return metadata, ordered({name: parse_tensor(name, entry) for name, entry in record.items()})


def parse_tensor(name: str, entry: object) -> TensorPlace:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadTensor(
            f"tensor {show(name)}: its header entry is not dtype, shape and data_offsets; write the file again"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BadTensor(f"tensor {show(name)}: dtype {show(dtype)} is not one of {', '.join(DTYPE_BYTES)}")
    if not is_numbers(shape) or not 1 <= len(shape) <= 4 or not all(1 <= size < 2**40 for size in shape):
        raise BadTensor(f"tensor {show(name)}: shape {show(shape)} is not 1 to 4 sizes, each from 1 to 2^40")
    if not is_numbers(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise BadTensor(f"tensor {show(name)}: data_offsets {show(offsets)} is not [begin, end] with 0 <= begin <= end")
    need = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != need:
        raise BadTensor(
            f"tensor {show(name)}: {dtype} of shape {show(shape)} needs {need:,} bytes, data_offsets give it "
            f"{offsets[1] - offsets[0]:,}"
        )
    return TensorPlace(dtype, tuple(shape), offsets[0], offsets[1])


def is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # a bool is not a number


def ordered(tensors: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    by_place = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    end, before = 0, "the header"
    for name, place in by_place:
        if place.begin != end:
            what = "overlaps" if place.begin < end else f"leaves {place.begin - end:,} bytes after"
            raise BadTensor(
                f"tensor {show(name)} at offset {place.begin:,} {what} {show(before)}, which ends at {end:,}"
            )
        end, before = place.end, name
    return dict(by_place)


def make_header(metadata: Mapping[str, str], tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Length field and header for (name, dtype, shape) in file order; the data then starts at a multiple of 64."""
    record: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        record[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > MAX_HEADER:
        raise BadHeader(
            f"the header would have {len(text):,} bytes, the limit is {MAX_HEADER:,}; the network has too many ops"
        )
    return struct.pack("<Q", len(text)) + text
