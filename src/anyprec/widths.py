"""Bit-widths and profiles: the vocabulary every other part shares. Imports nothing but the standard library.

A width is 1..8, or 32 for float. `Widths` are the ordered widths one model is trained for. A `Profile` names the
bits of every layer; `1`..`8` are the uniform ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import SupportsIndex

from anyprec.errors import ProfileError, UnsupportedBits
from anyprec.files import write_text

FLOAT = 32
INTEGER_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)
DEFAULT_WIDTHS = (1, 2, 4, 8, FLOAT)


def check_bits(bits: object) -> int:
    """The one place that decides what a width is: 1..8 or 32, of any integer type (numpy's too), but not a bool."""
    # int stands first: the protocol takes 10 us to ask, at every call of a model.
    if not isinstance(bits, bool) and isinstance(bits, (int, SupportsIndex)):
        width = index(bits)
        if width in INTEGER_WIDTHS or width == FLOAT:
            return width
    raise UnsupportedBits(f"bits={bits!r} is not a bit-width; choose 1..8, or 32 for float")


def check_widths(widths: Iterable[int]) -> tuple[int, ...]:
    """Ordered, distinct, valid widths: (8, 1, 32) -> (1, 8, 32)."""
    if isinstance(widths, (int, str)):
        raise UnsupportedBits(f"widths={widths!r} is not a list of bit-widths; write for example (1, 2, 4, 8, 32)")
    given = [check_bits(b) for b in widths]
    if not given:
        raise UnsupportedBits("widths is empty; give at least one bit-width, for example (1, 2, 4, 8, 32)")
    if len(set(given)) != len(given):
        raise UnsupportedBits(f"widths={given} names a bit-width twice; give each once")
    return tuple(sorted(given))


def parse_widths(text: str) -> tuple[int, ...]:
    """'1,2,4,8,32' -> (1, 2, 4, 8, 32); '1-8' -> 1..8; 'float' is 32. For the command line."""
    widths: list[int] = []
    for part in (p.strip() for p in text.split(",")):
        span = re.fullmatch(r"([0-9]{1,2})-([0-9]{1,2})", part)
        if part.lower() in ("float", "fp32"):
            widths.append(FLOAT)
        elif span:
            if int(span[1]) > int(span[2]):
                raise UnsupportedBits(f"{part!r} in widths {text!r} runs backwards; write {span[2]}-{span[1]}")
            widths.extend(range(int(span[1]), int(span[2]) + 1))
        elif re.fullmatch(r"-?[0-9]+", part):
            widths.append(int(part))
        else:
            raise UnsupportedBits(f"{part!r} in widths {text!r} is not a bit-width; write 1,2,4,8,32 or 1-8,32")
    return check_widths(widths)


# The bits of one layer: a width for weights and activations alike, or (weight_bits, act_bits).
LayerBits = int | tuple[int, int]


def check_layer_bits(bits: object) -> LayerBits:
    if isinstance(bits, (tuple, list)):
        if len(bits) != 2:
            raise UnsupportedBits(f"bits={bits!r} is not a pair (weight_bits, act_bits), for example (8, 7)")
        weight_bits, act_bits = check_bits(bits[0]), check_bits(bits[1])
        return weight_bits if weight_bits == act_bits else (weight_bits, act_bits)
    return check_bits(bits)


def split_bits(bits: LayerBits) -> tuple[int, int]:
    """4 -> (4, 4); (8, 7) -> (8, 7)."""
    return bits if isinstance(bits, tuple) else (bits, bits)


@dataclass(frozen=True)
class Profile:
    """A name and the bits of every any-layer: layer name -> width, or (weight_bits, act_bits)."""

    name: str
    bits: Mapping[str, LayerBits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"(?=.*[A-Za-z_-])[A-Za-z0-9_-]+", self.name):
            raise ProfileError(
                f"profile name {self.name!r} is not allowed; use letters, digits, '-' or '_' (a plain number names "
                "a uniform profile)"
            )
        if self.name == "random":
            raise ProfileError("profile name 'random' is not allowed: bits='random' draws a width; choose another")
        if not self.bits:
            raise ProfileError(f"profile {self.name!r} sets no layer; give at least one layer name and its bits")
        object.__setattr__(self, "bits", {str(layer): check_layer_bits(b) for layer, b in self.bits.items()})

    def save(self, path: str | Path) -> None:
        write_text(path, json.dumps({"name": self.name, "bits": dict(self.bits)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        try:
            record = json.loads(Path(path).read_text())
        except OSError as error:
            raise ProfileError(f"cannot read profile {path}: {error.strerror}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ProfileError(f"{path} is not a profile: {error}; expected JSON with 'name' and 'bits'") from error
        if not isinstance(record, dict) or set(record) != {"name", "bits"} or not isinstance(record["bits"], dict):
            raise ProfileError(f'{path} is not a profile; expected {{"name": "...", "bits": {{"layer": 2, ...}}}}')
        return cls(record["name"], record["bits"])
