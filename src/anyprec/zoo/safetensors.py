"""Float weights from a safetensors file: names and tensors, as `torch.load` gives them for a state dict.

The format is a length, a JSON header and the bytes of the tensors; format/header.py, which model files use, checks the
header. No code is executed and no package is needed. Called by weights.py.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from anyprec.errors import BadHeader, BadTensor, CheckpointError, ModelFileError
from anyprec.format.header import METADATA, TensorPlace, header_length, is_numbers, ordered, parse_json, show

SUFFIX = ".safetensors"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of the file, half precision as float32; a CheckpointError says what is wrong with it."""
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        return tensors_of(raw)
    except ModelFileError as error:
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: {error}") from error


def tensors_of(raw: bytes) -> dict[str, Tensor]:
    if len(raw) < 8:
        raise BadHeader(f"it has {len(raw)} bytes, not even the 8 that say how long its header is")
    start = 8 + header_length(raw[:8])
    if len(raw) < start:
        raise BadHeader(f"it has {len(raw):,} bytes, its header alone needs {start:,}")
    try:
        text = raw[8:start].decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadHeader(f"its header is not UTF-8 at byte {error.start}") from None
    record = parse_json(text, "its header", BadHeader)
    if not isinstance(record, dict):
        raise BadHeader("its header is not a table of tensors")
    record.pop(METADATA, None)
    places = ordered({name: place_of(name, entry) for name, entry in record.items()})
    end = max((place.end for place in places.values()), default=0)
    if len(raw) - start != end:
        raise BadTensor(f"it has {len(raw) - start:,} bytes of tensors, its header tells of {end:,}")
    body = torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8) if end else torch.zeros(0, dtype=torch.uint8)
    made = {}
    for name, place in places.items():
        # A copy starts where its own type may: bytes of one tensor can lie anywhere in the file.
        tensor = body[place.begin : place.end].clone().view(DTYPES[place.dtype]).reshape(place.shape)
        made[name] = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
    return made


def place_of(name: str, entry: object) -> TensorPlace:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadTensor(f"tensor {show(name)}: its entry is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadTensor(f"tensor {show(name)}: dtype {show(dtype)} is not one of {', '.join(DTYPES)}")
    if not is_numbers(shape) or not all(0 <= size < 2**40 for size in shape):
        raise BadTensor(f"tensor {show(name)}: shape {show(shape)} is not a list of sizes")
    if not is_numbers(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise BadTensor(f"tensor {show(name)}: data_offsets {show(offsets)} is not [begin, end]")
    need = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != need:
        raise BadTensor(
            f"tensor {show(name)}: {dtype} {show(shape)} needs {need:,} bytes, not {offsets[1] - offsets[0]:,}"
        )
    return TensorPlace(dtype, tuple(shape), offsets[0], offsets[1])
