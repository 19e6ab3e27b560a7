"""Where the bytes of a model file go. Made by file.write and ModelFile.sizes, printed by inspect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyprec.format.check import Tensors
from anyprec.format.header import DTYPE_BYTES


@dataclass(frozen=True)
class Sizes:
    """In bytes, of the complete file."""

    header: int  # length field and padding included
    tables: int
    floats: int  # layers that are float in every profile
    codes: int  # layers that are 8 bit in every profile
    planes: tuple[int, ...]  # plane 00, 01, ...
    tails: int  # float32 of the quantized layers, for the float profile
    packed: int  # the weights in planes at the widest width of the file, were every bit used

    @property
    def total(self) -> int:
        return self.header + self.tables + self.floats + self.codes + sum(self.planes) + self.tails

    @property
    def ratio(self) -> float:
        """The file's size over what its numbers need: 1.0 would be no header, no rounding up, no plane twice."""
        return self.total / (self.packed + self.tables + self.floats + self.codes + self.tails)


def sizes_of(header: int, graph: Mapping[str, Any], tensors: Tensors) -> Sizes:
    by_kind: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        kind = name.partition(".")[0]
        by_kind[kind] = by_kind.get(kind, 0) + math.prod(shape) * DTYPE_BYTES[dtype]
    in_planes = [weight for weight in graph["weights"].values() if not weight["float"] and "bits" not in weight]
    quantized = sum(math.prod(weight["shape"]) for weight in in_planes)
    widest = max(map(int, graph["planes"]), default=0)
    return Sizes(
        header=header,
        tables=by_kind.get("table", 0),
        floats=by_kind.get("weight", 0),
        codes=by_kind.get("codes", 0),
        planes=tuple(by_kind[kind] for kind in sorted(by_kind) if kind.startswith("plane")),
        tails=by_kind.get("tail", 0),
        packed=-(-quantized * widest // 8),
    )
