"""Graph: a trained network as an ordered list of ops and their numbers, no torch in it. FORMAT.md, sections 2 and 3.

Made by pack (and by file.read), written by file.write, computed by run.oracle and, from the file, by the engine.
Everything here is plain data; check.py says whether it makes sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anyprec.bits import FLOAT

FORMAT = 1
INPUT = "input"  # the value every graph starts from


@dataclass(frozen=True)
class Op:
    """One operation; its value carries its name. `attributes` are those FORMAT.md lists for `kind`."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphProfile:
    """Bits of every quantised weight and of every quantize op: one number for all, or one for each."""

    name: str
    weights: int | Mapping[str, int]
    acts: int | Mapping[str, int]
    accuracy: float | None = None  # in percent, where it was measured

    def weight_bits(self, weight: str) -> int:
        return self.weights if isinstance(self.weights, int) else self.weights[weight]

    def act_bits(self, op: str) -> int:
        return self.acts if isinstance(self.acts, int) else self.acts[op]

    @property
    def is_float(self) -> bool:
        return self.weights == FLOAT


@dataclass(frozen=True)
class Weight:
    """A weight in the order (out, kh, kw, in / groups).

    Float in every profile: `values`. Quantised: `codes[bits]`, one uint8 array of that shape per width (where codes
    nest, the file keeps the widest alone), and `values` only if the float profile is kept.
    """

    shape: tuple[int, int, int, int]
    values: np.ndarray | None = None  # (out, kh, kw, in) float32
    codes: Mapping[int, np.ndarray] | None = None  # bits -> (out, kh, kw, in) uint8

    @property
    def is_float(self) -> bool:
        return self.codes is None


@dataclass(frozen=True)
class Graph:
    name: str
    input_shape: tuple[int | None, int | None, int]  # H, W, C
    profiles: tuple[GraphProfile, ...]
    planes: Mapping[int, tuple[int, ...]]  # bits -> plane numbers, most significant first
    weights: Mapping[str, Weight]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    tables: Mapping[str, np.ndarray]  # op name -> float32, one row a profile
    image_scale: tuple[float, ...] | None = None  # uint8 images become fma(u8, scale, shift), per channel
    image_shift: tuple[float, ...] | None = None
    labels: tuple[str, ...] | None = None
    made_by: str = ""

    def profile(self, name: str) -> int:
        """The number of the profile called `name` (a row of every table)."""
        return [p.name for p in self.profiles].index(name)
