"""write(graph, path), read(path) -> Graph, and the two ways to make a file smaller: truncate and rewrite.

FORMAT.md section 1. write checks the graph as a reader would; model_file.py is the reader. Called by pack and run.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anyprec.errors import BadTensor, ModelFileError, TruncatedFile
from anyprec.files import written_whole
from anyprec.format.check import Tensors, check_graph
from anyprec.format.content import check_content
from anyprec.format.graph import Graph, Weight
from anyprec.format.header import make_header
from anyprec.format.model_file import CASCADE_KEY, CHECKSUM_KEY, CHUNK, GRAPH_KEY, ModelFile
from anyprec.format.planes import split_codes
from anyprec.format.record import to_record
from anyprec.format.sizes import Sizes, sizes_of


def write(graph: Graph, path: str | Path) -> Sizes:
    """Writes the whole file or nothing (a temporary file is renamed), and says where its bytes went."""
    record = to_record(graph, {})
    needed = check_graph(record).tensors
    arrays = arrays_of(graph, needed)
    clips = {op.name for op in graph.ops if op.kind == "clip"}
    for name, array in arrays.items():
        check_content(name, array, record["weights"], clips)
    record["checksums"] = {name: f"{zlib.crc32(array.data):08x}" for name, array in arrays.items()}
    head = make_header(metadata_of(record, graph.cascade), [(name, *form) for name, form in needed.items()])
    write_whole(path, [head, *arrays.values()])
    return sizes_of(len(head), record, needed)


def metadata_of(record: Mapping[str, Any], cascade: str | None = None) -> dict[str, str]:
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    made = {GRAPH_KEY: text, CHECKSUM_KEY: f"{zlib.crc32(text.encode('utf-8')):08x}"}
    return made if cascade is None else made | {CASCADE_KEY: cascade}


def arrays_of(graph: Graph, needed: Tensors) -> dict[str, np.ndarray]:
    """Every tensor of the file, in file order, contiguous and little-endian."""
    made = {f"table.{op}": as_float32(f"table of op {op!r}", table) for op, table in graph.tables.items()}
    for name, weight in graph.weights.items():
        for bits, codes in (weight.codes or {}).items():
            if codes.shape != tuple(weight.shape):
                raise BadTensor(f"weight {name!r}: codes at {bits} bits are {codes.shape}, its shape is {weight.shape}")
        if weight.codes is not None and weight.bits is not None:
            made[f"codes.{name}"] = fixed_codes(name, weight)
        elif weight.codes is not None:
            for number, plane in split_codes(name, weight.codes, graph.planes).items():
                made[f"plane{number:02}.{name}"] = plane
        if weight.values is not None:
            values = as_float32(f"weight {name!r}", weight.values)
            if values.shape != tuple(weight.shape):
                raise BadTensor(f"weight {name!r}: values are {values.shape}, its shape is {weight.shape}")
            if weight.is_float:
                made[f"weight.{name}"] = values
            elif f"tail.{name}" in needed:  # without a float profile nobody could read them
                made[f"tail.{name}"] = values.reshape(-1).view(np.uint8)
    for name, (_, shape) in needed.items():
        if name not in made:
            raise BadTensor(f"the graph needs {name!r} of shape {list(shape)}, but brings no numbers for it")
        if made[name].shape != shape:
            raise BadTensor(f"{name!r} is {list(made[name].shape)}; the graph needs {list(shape)}")
    for name in made:
        if name not in needed:
            raise BadTensor(f"the graph brings {name!r}, which none of its ops reads; leave it out")
    return {name: made[name] for name in needed}


def fixed_codes(name: str, weight: Weight) -> np.ndarray:
    """One byte a weight: (weights,) uint8."""
    assert weight.codes is not None
    codes = weight.codes.get(weight.bits) if weight.bits is not None else None
    if codes is None or codes.dtype != np.uint8:
        found = "none" if codes is None else codes.dtype
        raise BadTensor(f"weight {name!r}: its codes at {weight.bits} bits are {found}; they must be uint8")
    return np.ascontiguousarray(codes).reshape(-1)


def as_float32(what: str, array: np.ndarray) -> np.ndarray:
    if array.dtype != np.float32:
        raise BadTensor(f"{what} is {array.dtype}; it must be float32")
    return np.ascontiguousarray(array, "<f4")


def write_whole(path: str | Path, parts: Iterable[Any]) -> None:
    """All parts, or no file at all: what stood at `path` before stays until the last byte is on the disk."""
    with written_whole(path, ModelFileError) as file:
        for part in parts:
            file.write(part)


def read(path: str | Path, max_bits: int | None = None, verify: bool = True) -> Graph:
    """The Graph of a file; with `max_bits` only the prefix that those weights need is read.

    An incomplete file gives the profiles that are there. `verify` compares all that is read with its checksums.
    Refuses what `anyprec.load` refuses, with the same error.
    """
    with ModelFile(path) as file:
        return file.graph(max_bits, verify)


def truncate(path: str | Path, out: str | Path, bits: int) -> int:
    """Copies the first bytes, up to the last plane `bits` needs; returns how many.

    It opens like a download that stopped there. The safetensors library refuses it; `rewrite` makes a file it takes.
    """
    with ModelFile(path) as file:
        length = file.bytes_for(bits)
        if length > file.size:
            raise TruncatedFile(f"{path}: has {file.size:,} bytes, {bits} bits need {length:,}; fetch it again")
        write_whole(out, (file.read(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)))
    return length


def rewrite(path: str | Path, out: str | Path, max_bits: int) -> Sizes:
    """Writes a complete file without the planes and profiles that need more than `max_bits` for their weights."""
    return write(read(path, max_bits), out)
