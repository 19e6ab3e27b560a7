"""TraceStep and NetworkTrace: what a network runs, operation by operation, before it has numbers for any profile.

Made by trace.py with operations/, read by lower.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anyprec.format.graph import INPUT
from anyprec.format.schema import SCHEMAS
from anyprec.packing.views import View

REFUSED = "refused"  # the kind of a step that the model file cannot have

Shape = tuple[int, ...]  # sizes of a value in file order, without the batch


class Refused(Exception):
    """An operation that cannot be a step, and why; recorder.py adds its name and place."""


@dataclass(frozen=True, eq=False)
class TraceStep:
    """One operation as it was run: a kind of FORMAT.md section 3, or a leaf ("any", "activation").

    `constants` are what the kind's table and weight are made of. `at[p]` are those of profile p, once the network has
    been run in every profile: a switched norm has other numbers in each. `reads` says how the value that a layer or an
    activation reads lies in the tensor the module gave it.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    shape: Shape
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    module: nn.Module | None = None
    reads: View | None = None
    where: str = ""  # operation, module and source line, for messages
    at: tuple[dict[str, Tensor], ...] = ()

    def same_but_for_size(self, other: TraceStep) -> bool:
        """The same step, in runs on inputs of two sizes, but for attributes that may follow the size."""
        return self.same_but_for_numbers(other, SIZED.get(self.kind, ())) and self.same_numbers(other)

    def same_numbers(self, other: TraceStep) -> bool:
        return all(torch.equal(value, other.constants[key]) for key, value in self.constants.items())

    def same_but_for_numbers(self, other: TraceStep, free: Sequence[str] = ()) -> bool:
        """The same step, in runs at other bits."""
        mine, theirs = ({k: v for k, v in s.attributes.items() if k not in free} for s in (self, other))
        return (
            (self.name, self.kind, self.inputs, mine) == (other.name, other.kind, other.inputs, theirs)
            and self.module is other.module
            and self.constants.keys() == other.constants.keys()
        )

    @property
    def needs_format_3(self) -> bool:
        if self.kind in ("any", "activation"):
            transposed = isinstance(self.module, nn.modules.conv._ConvTransposeNd)
            return len(self.shape) != 3 or transposed or getattr(self.module, "padding_mode", "zeros") != "zeros"
        schema = SCHEMAS.get(self.kind)
        return schema is None or schema.format == 3 or any(key in self.attributes for key in schema.later)


# Attributes that may differ between runs at two sizes: free_sizes.py finds the one that serves all.
SIZED = {"resize": ("size",), "reshape": ("shape",), "slice": ("start", "stop"), "input": ("shape",)}


@dataclass(frozen=True)
class InputValue:
    """One input of the network: a tensor of the example, and the value of the file that it is."""

    name: str
    shape: Shape  # in file order
    integer: bool
    free: tuple[bool, ...] = ()  # of `shape`, those of any size

    @property
    def free_shape(self) -> tuple[int | None, ...]:
        free = self.free or (False,) * len(self.shape)
        return tuple(None if any_size else n for n, any_size in zip(self.shape, free, strict=True))


@dataclass(frozen=True)
class Example:
    """Tensors a network is called with, and how: by place, or by name."""

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]  # of the arguments; the first is always called `input` in the file
    by_name: bool
    others: Mapping[str, Any] = field(default_factory=dict)  # arguments that are no tensors

    def call(self, tensors: Sequence[Tensor] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = self.tensors if tensors is None else tensors
        if self.by_name:
            return (), {**dict(zip(self.names, given, strict=True)), **self.others}
        return tuple(given), dict(self.others)

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the inputs in the file."""
        return (INPUT, *(f"{name}_" if name == INPUT else name for name in self.names[1:]))


@dataclass(frozen=True)
class NetworkTrace:
    steps: tuple[TraceStep, ...]
    outputs: tuple[str, ...]
    inputs: tuple[InputValue, ...]
    free: bool  # the same steps serve inputs of other sizes
    example: Example  # what it was run on
    added: frozenset[str]  # steps that no operation made: the vector input of a file of format 3
    results: tuple[tuple[Tensor, ...], ...]  # the outputs in each profile, of the first images where they are large
    barred: frozenset[tuple[int, int]] = frozenset()  # Recorder.shortcut: those that do not apply in every profile

    @property
    def is_image(self) -> bool:
        return self.example.tensors[0].dim() == 4

    @property
    def size(self) -> tuple[int, int]:
        """H, W of the images it was run on; of sequences the first is the length."""
        height, width, *_ = (*self.inputs[0].shape, 1)
        return height, width
