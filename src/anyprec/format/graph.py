"""Graph: a trained network as an ordered list of ops and their numbers, no torch in it. FORMAT.md, sections 2 and 3.

Made by pack (and by file.read), written by file.write, computed by run.oracle and, from the file, by the engine.
Everything here is plain data; check.py says whether it makes sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anyprec.preprocessing import Preprocessing
from anyprec.widths import FLOAT

FORMATS = (1, 2, 3)  # 2 says how pictures become images of the input; 3 has values of any rank and more operations
INPUT = "input"  # the value every graph starts from
FIXED_BITS = 8  # the one width a weight or quantize can be fixed at


@dataclass(frozen=True)
class Op:
    """One operation; its value carries its name. `attributes` are those FORMAT.md lists for `kind`."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bits(self) -> int | None:
        """Of a quantize that has the same bits in every profile but the float ones."""
        return self.attributes.get("bits")


def bits_of(bits: int | Mapping[str, int], name: str, fixed: int | None) -> int:
    """What a profile's `weights` or `acts` mean for one of them; `fixed` are its own bits, None if it has none."""
    if fixed is not None:
        return FLOAT if bits == FLOAT else fixed
    return bits if isinstance(bits, int) else bits[name]


def product_fits(terms: int, left: int, right: int) -> bool:
    """Whether 32-bit integers hold twice the sum of so many products of codes of so many bits: ARITHMETIC.md, 8.6."""
    return terms << (left + right) < 1 << 30


@dataclass(frozen=True)
class GraphProfile:
    """Bits of every quantized weight and of every quantize op: one number for all, or one for each.

    Those that have bits of their own (`fixed`) are not among them: they are float where the profile is the number 32.
    """

    name: str
    weights: int | Mapping[str, int]
    acts: int | Mapping[str, int]
    accuracy: float | None = None  # in percent, where it was measured

    def weight_bits(self, weight: str, fixed: int | None = None) -> int:
        return bits_of(self.weights, weight, fixed)

    def act_bits(self, op: str, fixed: int | None = None) -> int:
        return bits_of(self.acts, op, fixed)

    @property
    def is_float(self) -> bool:
        return self.weights == FLOAT


@dataclass(frozen=True)
class Weight:
    """A weight in the order (out, kh, kw, in / groups).

    Float in every profile: `values`. Quantized: `codes[bits]`, one uint8 array of that shape per width (where codes
    nest, the file keeps the widest alone), and `values` only if the float profile is kept. Fixed: `bits` is 8 and
    `codes` has that width alone, for every profile but the float one.
    """

    shape: tuple[int, int, int, int]
    values: np.ndarray | None = None  # (out, kh, kw, in) float32
    codes: Mapping[int, np.ndarray] | None = None  # bits -> (out, kh, kw, in) uint8
    bits: int | None = None

    @property
    def is_float(self) -> bool:
        return self.codes is None


@dataclass(frozen=True)
class Graph:
    name: str
    input_shape: tuple[int | None, ...]  # H, W, C of images; in format 3 any 1 to 6 sizes
    profiles: tuple[GraphProfile, ...]
    planes: Mapping[int, tuple[int, ...]]  # bits -> plane numbers, most significant first
    weights: Mapping[str, Weight]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    tables: Mapping[str, np.ndarray]  # op name -> float32, one row a profile
    image_scale: tuple[float, ...] | None = None  # uint8 images become fma(u8, scale, shift), per channel
    image_shift: tuple[float, ...] | None = None
    labels: tuple[str, ...] | None = None
    image_size: tuple[int, int] | None = None  # H, W it was made for, where input_shape leaves them free
    made_by: str = ""
    resize: str | None = None  # of pictures: "cover", "stretch" or "none"; None where nothing is known of it
    resize_to: tuple[int, int] | None = None  # H, W that are covered or stretched to; then the middle image_size
    filter: str | None = None
    integer_input: bool = False  # it holds whole numbers, such as indices
    cascade: str | None = None  # text of FORMAT.md, section 5; checked where it is used (anyprec.cascade)

    @property
    def preprocessing(self) -> Preprocessing | None:
        if self.resize is None or self.image_scale is None or self.image_shift is None:
            return None
        return Preprocessing.from_image(
            self.image_scale, self.image_shift, size=self.image_size, resize=self.resize, to=self.resize_to,
            filter=self.filter or "bilinear",
        )  # fmt: skip

    def profile(self, name: str) -> int:
        """The number of the profile called `name` (a row of every table)."""
        return [p.name for p in self.profiles].index(name)
