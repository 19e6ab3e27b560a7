"""Codes <-> bit planes: what FORMAT.md section 1 calls planes. Codes (uint8, any shape) in, packed bytes out, and back.

Plane 00 is the most significant bit of every code. Used by file.py; the engine has its own in C++.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from anyprec.errors import BadGraph

PlaneMap = Mapping[int, Sequence[int]]  # bits -> plane numbers, most significant first


def nested_planes(widths: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Planes of a quantizer whose codes nest: (1, 2, 4) -> {1: (0,), 2: (0, 1), 4: (0, 1, 2, 3)}."""
    return {bits: tuple(range(bits)) for bits in sorted(widths)}


def separate_planes(widths: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Planes where codes do not nest, each width its own: (1, 2, 4) -> {1: (0,), 2: (1, 2), 4: (3, 4, 5, 6)}."""
    planes: dict[int, tuple[int, ...]] = {}
    start = 0
    for bits in sorted(widths):
        planes[bits] = tuple(range(start, start + bits))
        start += bits
    return planes


def plane_bytes(count: int) -> int:
    return -(-count // 8)


def split_codes(name: str, codes: Mapping[int, np.ndarray], planes: PlaneMap) -> dict[int, np.ndarray]:
    """Every plane of one weight: plane number -> (ceil(weights / 8),) uint8. Widths that share planes must agree.

    A width may be left out of `codes` if wider ones supply its planes.
    """
    made: dict[int, np.ndarray] = {}
    for bits in sorted(planes, reverse=True):  # widest first: it supplies most planes where codes nest
        if bits not in codes:
            continue
        flat = np.ascontiguousarray(codes[bits]).reshape(-1)
        if flat.dtype != np.uint8:
            raise BadGraph(f"weight {name!r}: codes at {bits} bits are {flat.dtype}; they must be uint8")
        if flat.size and int(flat.max()) >= 1 << bits:
            raise BadGraph(f"weight {name!r}: code {int(flat.max())} does not fit {bits} bits")
        for position, number in enumerate(planes[bits]):
            plane = np.packbits((flat >> (bits - 1 - position)) & 1, bitorder="little")
            if not np.array_equal(made.setdefault(number, plane), plane):
                raise BadGraph(
                    f"weight {name!r}: the codes at {bits} bits differ from a wider width's in plane {number:02}, "
                    "which they share; give each width planes of its own (separate_planes)"
                )
    for bits, numbers in planes.items():
        missing = [number for number in numbers if number not in made]
        if missing:
            raise BadGraph(
                f"weight {name!r}: no codes at {bits} bits, and no other width supplies plane {missing[0]:02}"
            )
    return made


def join_codes(planes: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """Codes from their planes, most significant first: -> (out, kh, kw, in) uint8."""
    count = int(np.prod(shape, dtype=np.int64))
    codes = np.zeros(count, np.uint8)
    for plane in planes:
        codes <<= 1
        codes |= np.unpackbits(plane, bitorder="little", count=count)
    return codes.reshape(tuple(shape))


class PlaneCodes(Mapping[int, np.ndarray]):
    """bits -> codes of one weight, made from packed planes at every look-up: 8 widths cost the memory of one."""

    def __init__(self, shape: Sequence[int], planes: Mapping[int, np.ndarray], widths: PlaneMap) -> None:
        self.shape, self.planes, self.widths = tuple(shape), planes, widths

    def __getitem__(self, bits: int) -> np.ndarray:
        return join_codes([self.planes[number] for number in self.widths[bits]], self.shape)

    def __iter__(self) -> Iterator[int]:
        return iter(self.widths)

    def __len__(self) -> int:
        return len(self.widths)
