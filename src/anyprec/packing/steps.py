"""TraceStep and NetworkTrace: what a network runs, operation by operation, before it has numbers for any profile.

Made by trace.py with operations.py, read by lower.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Size = tuple[int, int, int]  # C, H, W of a value: a (N, C, L) tensor is C, 1, L, a (N, C) tensor C, 1, 1


class Refused(Exception):
    """An operation that cannot be a step, and why; trace.py adds its name and place."""


@dataclass(frozen=True, eq=False)
class TraceStep:
    """One operation as it was run: a kind of FORMAT.md section 3, or a leaf ("any", "activation").

    `constants` are what the kind's table and weight are made of. `at[p]` are those of profile p, once the network has
    been run in every profile: a switched norm has other numbers in each.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    size: Size
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    module: nn.Module | None = None
    at: tuple[dict[str, Tensor], ...] = ()

    def same_but_for_size(self, other: TraceStep) -> bool:
        """The same step, in runs on images of two sizes. A resize may follow the image's size."""
        return self.same_but_for_numbers(other) and all(
            torch.equal(value, other.constants[key]) for key, value in self.constants.items()
        )

    def same_but_for_numbers(self, other: TraceStep) -> bool:
        """The same step, in runs at other bits."""
        mine, theirs = ({**s.attributes, "size": None} if s.kind == "resize" else s.attributes for s in (self, other))
        return (
            (self.name, self.kind, self.inputs, mine) == (other.name, other.kind, other.inputs, theirs)
            and self.module is other.module
            and self.constants.keys() == other.constants.keys()
        )


@dataclass(frozen=True)
class NetworkTrace:
    steps: tuple[TraceStep, ...]
    outputs: tuple[str, ...]
    size: Size  # of the input
    free: bool  # the same steps serve images of any height and width
    x: Tensor  # the images it was run on, (N, C, ...)
    key: str | None  # the name of the argument that takes them; None: it is the first
    results: tuple[tuple[Tensor, ...], ...]  # the outputs in each profile, of the first images where they are large


def size_of(tensor: Tensor) -> Size:
    shape = tuple(tensor.shape[1:])
    if not 1 <= len(shape) <= 3:
        raise Refused(f"it makes a value of {tensor.dim()} dimensions; (N, C), (N, C, L) and (N, C, H, W) have a place")
    channels, *rest = shape
    height, width = (*(1,) * (2 - len(rest)), *rest)
    return channels, height, width
