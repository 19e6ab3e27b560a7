"""ModelFile: a model file that is open, complete or still growing. FORMAT.md, sections 1 and 4.

Its numbers are read and checked when they are asked for. It reads instead of mapping: a mapped file that another
program cuts short would end the process. Used by file.py, run and inspect. May be shared between threads.
"""

from __future__ import annotations

import os
import stat
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from anyprec.errors import (
    BadGraph,
    BadTensor,
    ChecksumMismatch,
    ModelFileError,
    NotAModelFile,
    TruncatedFile,
    UnknownLayer,
    UnsupportedBits,
)
from anyprec.format.check import check_checksums, check_graph, check_tensors
from anyprec.format.content import check_content
from anyprec.format.graph import Graph, GraphProfile, Weight
from anyprec.format.header import header_length, parse_header, parse_json
from anyprec.format.planes import PlaneCodes
from anyprec.format.record import from_record, planes_of, profile_from
from anyprec.format.sizes import Sizes, sizes_of
from anyprec.widths import FLOAT, check_bits

GRAPH_KEY, CHECKSUM_KEY, CASCADE_KEY = "anyprec", "anyprec.crc32", "anyprec.cascade"
CHUNK = 1 << 20
SEEKING = threading.Lock()  # where the system can only read at a file's own position


class ModelFile:
    """Opens and checks a model file. `with ModelFile(path) as file:` closes it.

    `graph_json` is the checked GRAPH, `tensors` are the places of the tensors in file order, `size` the bytes that are
    there, `total` those of the complete file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        with self._naming_file():
            self._file = open_regular(self.path)
            try:
                self._open()
            except BaseException:
                self._file.close()
                raise

    def _open(self) -> None:
        self.size = os.fstat(self._file.fileno()).st_size
        if self.size < 8:
            raise TruncatedFile(f"has {self.size} bytes, not even the 8 that say how long its header is")
        length = header_length(self.read(0, 8))
        if self.size < 8 + length:
            if self.size > 8 and self.read(8, 9) != b"{":
                parse_header(self.read(8, min(self.size, 72)))  # raises: no header starts like that
            raise TruncatedFile(
                f"has {self.size:,} bytes, its header alone needs {8 + length:,}; wait for more, or fetch it again"
            )
        self.data_start = 8 + length
        metadata, self.tensors = parse_header(self.read(8, 8 + length))
        self.graph_json: dict[str, Any] = read_graph(metadata)
        self.cascade = metadata.get(CASCADE_KEY)
        self.checked = check_graph(self.graph_json)
        check_tensors(self.checked.tensors, self.tensors)
        if self.data_start % 4:  # an engine reads float32 where they lie
            raise BadTensor(
                f"its tensors start at byte {self.data_start:,}, which is not a multiple of 4; write the file again"
            )
        check_checksums(self.graph_json["checksums"], self.checked.tensors)
        self.total = self.data_start + max((place.end for place in self.tensors.values()), default=0)
        self.planes = planes_of(self.graph_json)
        self.profiles = tuple(profile_from(profile) for profile in self.graph_json["profiles"])
        weights = self.graph_json["weights"]
        self.quantized = tuple(name for name, w in weights.items() if not w["float"])
        self.fixed = {name: w["bits"] for name, w in weights.items() if "bits" in w}  # quantized, but not in planes
        self._clips = {op["name"] for op in self.graph_json["ops"] if op["op"] == "clip"}
        self._plane_ends, self._tails_end = self._ends()
        self._check_size()
        least = min(map(self.bytes_for_profile, self.profiles))
        if self.size < least:
            raise TruncatedFile(
                f"has {self.size:,} bytes, its narrowest profile needs {least:,}; wait for more, or fetch it again"
            )

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        """Errors of the parts that know no path get it in front."""
        try:
            yield
        except ModelFileError as error:
            raise type(error)(f"{self.path}: {error}") from None

    # --- how much of it is there ---

    def refresh(self) -> bool:
        """Looks again how long the file is; True if widths or profiles were gained."""
        before = (self.widths, self.available_profiles, self.available_planes)
        with self._naming_file():
            self.size = os.fstat(self._file.fileno()).st_size
            self._check_size()
        return (self.widths, self.available_profiles, self.available_planes) != before

    def _check_size(self) -> None:
        if self.size > self.total:
            raise BadTensor(f"has {self.size - self.total:,} bytes after its last tensor, which end at {self.total:,}")

    @property
    def complete(self) -> bool:
        return self.size == self.total

    @property
    def available_planes(self) -> int:
        """How many planes, from plane 00 on, are there for every weight."""
        return sum(end <= self.size for end in self._plane_ends)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths whose codes (32: float values) are there for every quantized weight."""
        widths = [*self.planes, *([FLOAT] if self._tails_end is not None else [])]
        return tuple(bits for bits in widths if self.bytes_for(bits) <= self.size)

    @property
    def available_profiles(self) -> tuple[GraphProfile, ...]:
        return tuple(profile for profile in self.profiles if self.bytes_for_profile(profile) <= self.size)

    def bytes_for(self, bits: int) -> int:
        """Length of the prefix of the file that holds all a width needs; 32 stands for the float weights."""
        bits = check_bits(bits)
        if bits == FLOAT and self._tails_end is not None:
            return self._tails_end
        if bits not in self.planes:
            have = ", ".join(map(str, [*self.planes, *([FLOAT] if self._tails_end is not None else [])]))
            raise UnsupportedBits(f"bits={bits} is not one of the widths of {self.path}: {have}")
        return self._plane_ends[self.planes[bits][-1]]

    def bytes_for_profile(self, profile: GraphProfile) -> int:
        return max((self.bytes_for(bits) for bits in self.weight_widths(profile)), default=self._head_end)

    def weight_widths(self, profile: GraphProfile) -> set[int]:
        """Of the weights in planes; 32 of fixed ones too, whose codes every other profile has."""
        if self.quantized and profile.is_float:
            return {FLOAT}
        if len(self.quantized) == len(self.fixed):
            return set()
        return {profile.weights} if isinstance(profile.weights, int) else set(profile.weights.values())

    def _ends(self) -> tuple[list[int], int | None]:
        """Where each plane ends, and the tails (None without). Without quantized weights, all is in the head."""
        ends: dict[str, int] = {}
        for name, place in self.tensors.items():
            ends[name.partition(".")[0]] = self.data_start + place.end  # in file order: the last one stays
        self._head_end = ends.get("codes", ends.get("weight", ends.get("table", self.data_start)))
        count = 1 + max((numbers[-1] for numbers in self.planes.values()), default=-1)
        return [ends.get(f"plane{n:02}", self._head_end) for n in range(count)], ends.get("tail")

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.data_start, self.graph_json, self.checked.tensors)

    # --- numbers ---

    def codes(self, weight: str, bits: int) -> np.ndarray:
        """Codes of one quantized weight: (out, kh, kw, in) uint8."""
        if weight not in self.quantized:
            known = ", ".join(self.quantized[:3])
            raise UnknownLayer(f"{weight!r} is not a quantized weight of {self.path}; it has {known}, ...")
        if bits == FLOAT:
            raise UnsupportedBits("bits=32 has no codes; values(weight) are the float ones")
        if weight in self.fixed:
            if bits != self.fixed[weight]:
                raise UnsupportedBits(f"bits={bits}: {weight!r} has only codes of {self.fixed[weight]} bits")
            with self._naming_file():
                return self._array(f"codes.{weight}").reshape(self.graph_json["weights"][weight]["shape"])
        if self.bytes_for(bits) > self.size:
            raise TruncatedFile(
                f"{self.path}: has {self.size:,} bytes, {bits} bits need {self.bytes_for(bits):,}; wait for more"
            )
        with self._naming_file():
            numbers = self.planes[bits]
            packed = {number: self._array(f"plane{number:02}.{weight}") for number in numbers}
            return PlaneCodes(self.graph_json["weights"][weight]["shape"], packed, {bits: numbers})[bits]

    def table(self, op: str) -> np.ndarray:
        """The table of one op: one row a profile, float32."""
        with self._naming_file():
            return self._array(f"table.{op}")

    def values(self, weight: str) -> np.ndarray:
        """Float values of a weight, (out, kh, kw, in) float32: of a float one, or from the tail of a quantized one."""
        with self._naming_file():
            if weight not in self.quantized:
                return self._array(f"weight.{weight}")
            return self._array(f"tail.{weight}").view("<f4").reshape(self.graph_json["weights"][weight]["shape"])

    def _array(self, name: str, verify: bool = True) -> np.ndarray:
        """A tensor, compared with its checksum (unless told otherwise) and with what its numbers may be."""
        if name not in self.tensors:
            raise UnknownLayer(f"{self.path} has no tensor {name!r}; it has {', '.join(list(self.tensors)[:3])}, ...")
        place = self.tensors[name]
        begin = self.data_start + place.begin
        raw = self.read(begin, self.data_start + place.end)
        if verify and (crc := f"{zlib.crc32(raw):08x}") != self.graph_json["checksums"][name]:
            stored = self.graph_json["checksums"][name]
            raise ChecksumMismatch(
                f"tensor {name!r} at byte {begin:,} has checksum {crc}, written was {stored}; fetch the file again"
            )
        array = np.frombuffer(raw, "<f4" if place.dtype == "F32" else np.uint8).reshape(place.shape)
        check_content(name, array, self.graph_json["weights"], self._clips)
        return array

    def read(self, begin: int, end: int) -> bytearray:
        if end > self.size:  # before anything of that length is allocated
            raise TruncatedFile(f"has {self.size:,} bytes; {end:,} are needed; wait for more, or fetch it again")
        raw = bytearray(end - begin)
        view, got = memoryview(raw), 0
        while got < len(raw):  # the system may hand out less than asked, above 2 GB always
            count = read_at(self._file, view[got:], begin + got)
            if not count:
                raise TruncatedFile(f"was cut short while it was read, at byte {begin + got:,}; fetch it again")
            got += count
        return raw

    def verify(self) -> int:
        """Compares all tensors that are there with their checksums; returns how many."""
        with self._naming_file():
            names = self._names_there(self.total)
            for name in names:
                self._array(name)
        return len(names)

    def _names_there(self, limit: int) -> list[str]:
        """The tensors that end before `limit` and the end of the file, in file order."""
        end = min(self.size, limit) - self.data_start
        return [name for name, place in self.tensors.items() if place.end <= end]

    # --- all of it ---

    def graph(self, max_bits: int | None = None, verify: bool = True) -> Graph:
        """The Graph, as far as it is there and needs at most `max_bits` for its weights; nothing beyond is read.

        Tables keep the rows of the profiles that are left.
        """
        most = FLOAT if max_bits is None else check_bits(max_bits)
        planes = {bits: self.planes[bits] for bits in self.planes if bits in self.widths and bits <= most}
        allowed = [self.bytes_for(bits) for bits in self.planes if bits <= most]
        limit = self.total if most == FLOAT else max(allowed, default=self._head_end)
        with self._naming_file():  # of a plane that has come in part, what is there is checked too
            arrays = {name: self._array(name, verify) for name in self._names_there(limit)}
        kept = [
            row
            for row, profile in enumerate(self.profiles)
            if self.bytes_for_profile(profile) <= self.size and max(self.weight_widths(profile), default=0) <= most
        ]
        if not kept:
            narrowest = min(max(self.weight_widths(profile), default=0) for profile in self.profiles)
            raise UnsupportedBits(f"max_bits={most} leaves no profile of {self.path}; its narrowest needs {narrowest}")
        float_weights = {
            name
            for name in self.quantized
            if any(self.profiles[row].weight_bits(name, self.fixed.get(name)) == FLOAT for row in kept)
        }
        weights = {
            name: weight_from(name, weight, arrays, planes, name in float_weights)
            for name, weight in self.graph_json["weights"].items()
        }
        tables = {name[6:]: array[kept] for name, array in arrays.items() if name.startswith("table.")}
        record = {
            **self.graph_json,
            "profiles": [self.graph_json["profiles"][row] for row in kept],
            "planes": {str(bits): numbers for bits, numbers in planes.items()},
        }
        return replace(from_record(record, weights, tables), cascade=self.cascade)


def weight_from(
    name: str,
    weight: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    planes: Mapping[int, tuple[int, ...]],
    with_floats: bool,
) -> Weight:
    """One weight of GRAPH with its numbers; `planes` are those of the widths that are wanted and there."""
    shape = tuple(weight["shape"])
    if weight["float"]:
        return Weight(shape, arrays[f"weight.{name}"])
    values = arrays[f"tail.{name}"].view("<f4").reshape(shape) if with_floats else None
    codes: Mapping[int, np.ndarray]
    if "bits" in weight:
        codes = {weight["bits"]: arrays[f"codes.{name}"].reshape(shape)}
    else:
        numbers = {number for one in planes.values() for number in one}
        codes = PlaneCodes(shape, {number: arrays[f"plane{number:02}.{name}"] for number in numbers}, planes)
    return Weight(shape, values, codes, weight.get("bits"))


def read_at(file: FileIO, into: memoryview, offset: int) -> int:
    """Bytes from `offset` on, wherever other threads read; how many came."""
    if hasattr(os, "preadv"):  # without a lock, which a forked child could find held for ever
        return os.preadv(file.fileno(), [into], offset)
    with SEEKING:
        file.seek(offset)
        return file.readinto(into) or 0


def open_regular(path: str) -> FileIO:
    """Only regular files: a pipe would block, a device has no end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelFileError("is not a regular file; give the path of a model file (.apm)")
        return FileIO(path, "rb")
    except OSError as error:
        raise ModelFileError(f"cannot be opened: {error.strerror}") from None
    except ModelFileError:
        raise
    except ValueError as error:  # a path with a NUL in it
        raise ModelFileError(f"cannot be opened: {error}") from None


def read_graph(metadata: dict[str, str]) -> Any:
    """The parsed GRAPH; check_graph says whether it makes sense."""
    if GRAPH_KEY not in metadata:
        raise NotAModelFile("is a safetensors file without a graph of anyprec; make a model file with 'anyprec pack'")
    text = metadata[GRAPH_KEY]
    stored = metadata.get(CHECKSUM_KEY, "")
    crc = f"{zlib.crc32(text.encode('utf-8')):08x}"
    if crc != stored:
        raise ChecksumMismatch(f"its graph has checksum {crc}, written was {stored[:20]!r}; fetch it again")
    return parse_json(text, "the graph", BadGraph)
