"""The Open Inference Protocol v2 as bytes: a request's body in, a InferRequest out; outputs in, a response's body out.

JSON tensors and binary ones (the "binary tensor data" extension), the "classification" extension, and our parameters
`bits`, `min_bits` and `deadline_ms`. Knows no HTTP. Called by readers.py and answers.py; a ModelSignature comes from
models.py.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from anyprec.errors import InputError
from anyprec.preprocessing import Preprocessing
from anyprec.run.model import json_numbers
from anyprec.widths import check_bits

# The protocol's names of the types an engine takes; other floats become float32.
DTYPES = {"UINT8": "u1", "FP32": "<f4", "FP16": "<f2", "FP64": "<f8"}
FLOATS = {"FP32", "FP16", "FP64"}
LONGEST_S = 3600.0  # longest deadline


class HttpError(InputError):
    """An error answered with its own HTTP status; other InputErrors are 400."""

    def __init__(self, status: int, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


@dataclass(frozen=True)
class TensorMetadata:
    """Description of a tensor in the metadata; -1 stands for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True)
class ModelSignature:
    """Inputs, outputs and levels of a served model."""

    input: TensorMetadata  # its first axis is the batch
    takes_uint8: bool
    outputs: tuple[TensorMetadata, ...]
    labels: tuple[str, ...]
    levels: tuple[str, ...]  # widths, mixed profiles, "auto"
    layout: str = "NCHW"
    max_batch: int = 32
    max_pixels: int = 1 << 20  # of one image, where the model leaves the size free
    image_size: tuple[int, int] | None = None  # H, W that posted images are resized to
    preprocessing: Preprocessing | None = None  # of posted images; None where the file does not say

    @property
    def datatypes(self) -> tuple[str, ...]:
        return ("UINT8", "FP32", "FP16", "FP64") if self.takes_uint8 else ("FP32", "FP16", "FP64")


@dataclass(frozen=True)
class RequestedOutput:
    """An output that the client asked for, and its form."""

    number: int
    binary: bool = False
    classes: int = 0  # send this many labels with scores instead of the tensor


@dataclass(frozen=True)
class InferRequest:
    """One inference request, checked against the signature."""

    x: np.ndarray  # (N, ...) uint8 or float32, aligned
    wanted: tuple[RequestedOutput, ...]
    id: str | None = None
    bits: int | str | None = None
    min_bits: int = 1
    deadline_s: float | None = None  # from arrival


# --- in ---


def read_infer_request(body: bytes, header_length: int | None, signature: ModelSignature) -> InferRequest:
    """header_length: of the JSON part, where binary tensors follow it; 0: the body is the one input, raw."""
    if header_length == 0:
        return InferRequest(raw_input(body, signature), all_outputs(signature, binary=True))
    if header_length is not None and not 0 < header_length <= len(body):
        raise InputError(
            f"Inference-Header-Content-Length is {header_length}, the body has {len(body)} bytes; it must be the "
            "length of the JSON in front of the tensors"
        )
    record = parse_json(body if header_length is None else body[:header_length])
    tensors = memoryview(body)[len(body) if header_length is None else header_length :]
    if not isinstance(record, dict):
        raise InputError("the body is not a JSON object; give {'inputs': [...]}")
    parameters = mapping(record, "parameters")
    id = record.get("id")
    if id is not None and (not isinstance(id, str) or len(id) > 256):
        raise InputError("id is not a string of up to 256 letters")
    return InferRequest(
        read_input(record.get("inputs"), tensors, signature),
        read_requested_outputs(record.get("outputs"), parameters, signature),
        id,
        read_bits(parameters.get("bits"), signature),
        read_min_bits(parameters.get("min_bits"), parameters.get("bits"), signature),
        read_deadline(parameters),
    )


def parse_json(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not JSON: {error or 'nested too deep'}") from error


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number; send such values as binary tensors")


def mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{key} is not a JSON object")
    return value


def read_input(inputs: Any, tensors: memoryview, signature: ModelSignature) -> np.ndarray:
    expected = signature.input
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise InputError(f"inputs must be a list of one object, the tensor {expected.name!r}")
    given = inputs[0]
    if given.get("name") != expected.name:
        raise InputError(f"input {str(given.get('name'))[:64]!r} is not known; this model takes {expected.name!r}")
    datatype = given.get("datatype")
    if not isinstance(datatype, str) or datatype not in signature.datatypes:
        raise InputError(f"datatype {str(datatype)[:64]!r} is not taken; give one of {', '.join(signature.datatypes)}")
    shape = check_shape(given.get("shape"), signature)
    size = mapping(given, "parameters").get("binary_data_size")
    if size is None:
        if "data" not in given:
            raise InputError(f"input {expected.name!r} has no data; give data, or binary_data_size and bytes")
        if len(tensors):
            raise InputError(f"{len(tensors)} bytes follow the JSON, and no input has a binary_data_size")
        return as_array(given["data"], datatype, shape)
    if "data" in given:
        raise InputError(f"input {expected.name!r} has both data and binary_data_size; give one of them")
    if isinstance(size, bool) or not isinstance(size, int) or size != len(tensors):
        raise InputError(f"binary_data_size is {str(size)[:32]}, and {len(tensors)} bytes follow the JSON")
    return from_bytes(tensors, datatype, shape)


def check_shape(shape: Any, signature: ModelSignature) -> tuple[int, ...]:
    if (
        not isinstance(shape, list)
        or len(shape) > 4
        or not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 31 for size in shape)
    ):
        raise InputError(f"shape {str(shape)[:64]} is not a list of up to 4 sizes")
    expected = signature.input.shape
    fits = len(shape) == len(expected) and all(e in (-1, g) for e, g in zip(expected, shape, strict=True))
    if not fits:
        raise InputError(f"shape {shape} does not fit; {signature.input.name!r} is {list(expected)}, -1 for any")
    if shape[0] > signature.max_batch:
        raise InputError(f"{shape[0]} images in a request; at most {signature.max_batch} are taken")
    if -1 in expected[1:]:
        height, width = (shape[2], shape[3]) if signature.layout == "NCHW" else (shape[1], shape[2])
        if height * width > signature.max_pixels:
            raise InputError(f"images of {height} x {width}; at most {signature.max_pixels:,} pixels are taken")
    return tuple(shape)


def as_array(data: Any, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Of JSON numbers, flat or nested as the shape says."""
    try:
        found = np.array(data)
    except (ValueError, OverflowError, RecursionError) as error:
        raise InputError("data is not a list of numbers, flat or nested as the shape says") from error
    if found.dtype.kind not in ("iu" if datatype == "UINT8" else "iuf"):
        allowed = "integers from 0 to 255" if datatype == "UINT8" else "numbers"
        raise InputError(f"data of datatype {datatype} must be {allowed}, and no number must be too large")
    if found.shape not in (shape, (math.prod(shape),)):
        raise InputError(f"data has shape {list(found.shape)[:8]}, not {list(shape)}")
    if datatype == "UINT8" and not (found.min() >= 0 and found.max() <= 255):
        raise InputError("data of datatype UINT8 must be integers from 0 to 255")
    with np.errstate(over="ignore"):  # 1e300 is infinite in float32
        return found.astype(np.uint8 if datatype == "UINT8" else np.float32).reshape(shape)


def from_bytes(data: memoryview, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = np.dtype(DTYPES[datatype])
    need = math.prod(shape) * dtype.itemsize
    if len(data) != need:
        raise InputError(f"{list(shape)} of {datatype} are {need:,} bytes, got {len(data):,}")
    found = np.frombuffer(data, dtype).reshape(shape)
    if datatype in FLOATS:
        with np.errstate(over="ignore"):
            found = found.astype(np.float32, copy=False)
    # Behind a JSON header of any length floats lie anywhere; the engine reads them as floats do lie.
    return np.require(found, requirements="A")


def raw_input(body: bytes, signature: ModelSignature) -> np.ndarray:
    """The whole body is the input, in the metadata's datatype; its length says how many images it has."""
    shape = signature.input.shape
    if -1 in shape[1:]:
        raise InputError("the body has no JSON, and the model leaves the size of images free; say it in a JSON header")
    one = math.prod(shape[1:]) * np.dtype(DTYPES[signature.input.datatype]).itemsize
    if not body or len(body) % one:
        raise InputError(f"the body has {len(body):,} bytes; images of this model have {one:,} each")
    whole = check_shape([len(body) // one, *shape[1:]], signature)
    return from_bytes(memoryview(body), signature.input.datatype, whole)


def all_outputs(signature: ModelSignature, binary: bool) -> tuple[RequestedOutput, ...]:
    return tuple(RequestedOutput(number, binary) for number in range(len(signature.outputs)))


def read_requested_outputs(
    outputs: Any, parameters: Mapping[str, Any], signature: ModelSignature
) -> tuple[RequestedOutput, ...]:
    binary = flag(parameters, "binary_data_output")
    if outputs is None or outputs == []:
        return all_outputs(signature, binary)
    names = [tensor.name for tensor in signature.outputs]
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise InputError("outputs must be a list of objects, each with a name")
    wanted = []
    for output in outputs:
        if output.get("name") not in names:
            raise InputError(f"output {str(output.get('name'))[:64]!r} is not known; this model has {', '.join(names)}")
        settings = mapping(output, "parameters")
        if "shared_memory_region" in settings:
            raise InputError("outputs in shared memory are not offered; ask for binary_data")
        number = names.index(output["name"])
        classes = settings.get("classification", 0)
        if isinstance(classes, bool) or not isinstance(classes, int) or classes < 0:
            raise InputError("classification must be the number of classes to send")
        if classes and len(signature.outputs[number].shape) != 2:
            raise InputError(f"output {output['name']!r} has no scores of classes but a map; leave classification out")
        wanted.append(RequestedOutput(number, flag(settings, "binary_data", binary), classes))
    if len({one.number for one in wanted}) != len(wanted):
        raise InputError("outputs names one of them twice")
    return tuple(wanted)


def flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false")
    return value


def read_bits(bits: Any, signature: ModelSignature) -> int | str | None:
    """A level: a width as a number, or a name; "4" is 4."""
    if bits is None:
        return None
    if not isinstance(bits, str):
        bits = check_bits(bits)
    if str(bits) not in signature.levels:
        raise InputError(f"bits={str(bits)[:64]!r} is not in this model, which has {', '.join(signature.levels)}")
    return int(bits) if str(bits).isdigit() else bits


def read_min_bits(least: Any, bits: Any, signature: ModelSignature) -> int:
    if least is None:
        return 1
    least = check_bits(least)
    if not any(name.isdigit() and int(name) >= least for name in signature.levels):
        raise InputError(f"min_bits={least} is above what this model has: {', '.join(signature.levels)}")
    if isinstance(bits, int) and bits < least:
        raise InputError(f"bits={bits} is below min_bits={least}; give one of them")
    return int(least)


def read_deadline(parameters: Mapping[str, Any]) -> float | None:
    """deadline_ms; else the `timeout` of standard clients, in microseconds."""
    for name, per_second in (("deadline_ms", 1e3), ("timeout", 1e6)):
        given = parameters.get(name)
        if given is None or (name == "timeout" and given == 0):
            continue
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not number or not 0 < given <= LONGEST_S * per_second:
            raise InputError(f"{name}={str(given)[:32]} must be above 0 and at most {LONGEST_S * per_second:.0f}")
        return float(given / per_second)
    return None


# --- out ---


COMPACT = json.JSONEncoder(separators=(",", ":"))
MOST_DIGITS = 17  # bytes of a number in JSON and its comma (native/run/json_numbers.h)
PIECE = 1 << 15  # numbers that become JSON at a time: half a MB
LABEL_BYTES = 64  # of a label with its score, as a rule
SMALL = 4096  # numbers or labels of an answer that is written at once, in less than a ms


@dataclass(frozen=True)
class AnswerBody:
    """An answer to be sent: its JSON, in which outputs may still be floats, and binary tensors that follow it."""

    json: list[bytes | np.ndarray]
    tensors: list[memoryview]

    @property
    def numbers(self) -> int:
        """That are still to be written as JSON."""
        return sum(len(part) for part in self.json if isinstance(part, np.ndarray))

    def pieces(self) -> Iterator[bytes | np.ndarray]:
        """The JSON, at most PIECE numbers at a time; `as_text` writes them."""
        for part in self.json:
            if isinstance(part, bytes):
                yield part
                continue
            for first in range(0, len(part), PIECE):
                if first:
                    yield b","
                yield part[first : first + PIECE]


def as_text(piece: bytes | np.ndarray) -> bytes:
    """Without the GIL where it takes long; null stands for NaN and infinity, which JSON does not have."""
    return piece if isinstance(piece, bytes) else json_numbers(piece)


def answer_size(call: InferRequest, shapes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Numbers or labels that go out as JSON, and the most bytes they can take there; `shapes`: of all outputs."""
    numbers = labels = 0
    for one in call.wanted:
        if one.classes:
            labels += shapes[one.number][0] * min(one.classes, shapes[one.number][1])
        elif not one.binary:
            numbers += math.prod(shapes[one.number])
    return numbers + labels, MOST_DIGITS * numbers + LABEL_BYTES * labels


def write_answer(
    about: Mapping[str, Any], call: InferRequest, signature: ModelSignature, outputs: Sequence[np.ndarray]
) -> AnswerBody:
    """`about`: name, version, parameters."""
    head = dict(about) if call.id is None else {**about, "id": call.id}
    json_parts: list[bytes | np.ndarray] = [compact(head)[:-1] + b',"outputs":[']
    tensors: list[memoryview] = []
    for number, one in enumerate(call.wanted):
        y = np.ascontiguousarray(outputs[one.number], "<f4")
        texts = classified(y, one.classes, signature.labels) if one.classes else None
        record: dict[str, Any] = {"name": signature.outputs[one.number].name}
        record["datatype"] = "FP32" if texts is None else "BYTES"
        record["shape"] = list(y.shape) if texts is None else [len(texts), len(texts[0])]
        if one.binary:
            labels = None if texts is None else b"".join(map(length_prefixed, itertools.chain(*texts)))
            tensors.append(memoryview(y.data if labels is None else labels).cast("B"))
            record["parameters"] = {"binary_data_size": len(tensors[-1])}
            json_parts.append((b"," if number else b"") + compact(record))
        else:
            json_parts.append((b"," if number else b"") + compact(record)[:-1] + b',"data":[')
            json_parts += [y.reshape(-1)] if texts is None else label_text(texts)
            json_parts.append(b"]}")
    json_parts.append(b"]}")
    return AnswerBody(json_parts, tensors)


def compact(value: Any) -> bytes:
    return COMPACT.encode(value).encode()


def label_text(rows: Sequence[Sequence[str]]) -> list[bytes]:
    """A row at a time: json.dumps lets no other thread run meanwhile."""
    texts = [compact(row)[1:-1] for row in rows]
    return [text if number == 0 else b"," + text for number, text in enumerate(texts)]


def classified(y: np.ndarray, count: int, labels: Sequence[str]) -> list[list[str]]:
    """'12.5:3:cat': score, class, label; the highest first, equal ones in order of class."""
    rows = []
    for scores in y:
        best = np.argsort(-scores, kind="stable")[:count]
        named = [(f"{scores[i]:.7g}:{i}", f":{labels[i]}" if i < len(labels) else "") for i in best]
        rows.append([score + label for score, label in named])
    return rows


def length_prefixed(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<I", len(raw)) + raw
