"""Views: how a torch tensor lies in a value of the file. Pure bookkeeping, no torch operations, no steps.

A value of the file has the batch N and up to six more axes in a fixed order; a torch tensor's dimensions are lists of
those axes, in any order. `view`, `permute`, `unsqueeze`, `expand` and the like only rewrite the lists: an axis is
split into two, two are listed in one dimension, and no number moves. layout.py moves numbers where an operation needs
them in some order.

    torch (N, C, H, W)             value (H, W, C)      dims [N] [C] [H] [W]
    .flatten(2).transpose(1, 2)    the same value       dims [N] [H W] [C]
    .view(N, -1, heads, d)         (C split in two)     dims [N] [H W] [heads] [d]
    .reshape(N * heads, -1, d)     after a transpose    dims [N heads] [H W] [d]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


class Axis:
    """A part of a dimension; `kind` is "stored" (in the value), "batch" (N) or "repeat" (the value has it once)."""

    __slots__ = ("kind", "size")

    def __init__(self, size: int, kind: str = "stored") -> None:
        self.size, self.kind = size, kind

    def __repr__(self) -> str:
        return f"{self.kind[0]}{self.size}"


Axes = tuple[Axis, ...]


@dataclass(frozen=True, eq=False)
class View:
    """A tensor: the value it is in, the value's axes in file order (none of size 1), and those of each dimension."""

    value: str
    axes: Axes
    dims: tuple[Axes, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(count(dim) for dim in self.dims)

    def with_value(self, value: str) -> View:
        return replace(self, value=value)

    def split(self, axis: Axis, parts: Sequence[int]) -> tuple[View, Axes]:
        """With this axis as several, which are given too; `parts` are their sizes, the slowest first."""
        made = tuple(Axis(size, axis.kind) for size in parts)
        dims = tuple(substitute(dim, (axis,), made) for dim in self.dims)
        return replace(self, axes=substitute(self.axes, (axis,), made), dims=dims), made

    def merged(self, axes: Axes) -> View:
        """Neighbors in the value and in one dimension, as one axis."""
        if len(axes) == 1:
            return self
        made = (Axis(count(axes)),)
        dims = tuple(substitute(dim, axes, made) for dim in self.dims)
        return replace(self, axes=substitute(self.axes, axes, made), dims=dims)

    def dim_of_batch(self) -> int:
        return next(i for i, dim in enumerate(self.dims) if any(a.kind == "batch" for a in dim))


class Mixed(Exception):
    """A reshape that splits axes across each other: they have to be one axis first. `axes`: which."""

    def __init__(self, axes: Axes) -> None:
        super().__init__("axes are mixed")
        self.axes = axes


def count(axes: Iterable[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def substitute(axes: Axes, old: Axes, new: Axes) -> Axes:
    """`old`, where it occurs as neighbors in this order, becomes `new`."""
    for i in range(len(axes) - len(old) + 1):
        if axes[i : i + len(old)] == old:
            return axes[:i] + new + axes[i + len(old) :]
    return axes


def reshaped(view: View, shape: Sequence[int]) -> View:
    """The view as torch's `view(shape)` makes it. Mixed where axes would have to be cut across each other."""
    dims: list[Axes] = []
    rest = [axis for dim in view.dims for axis in dim]
    for position, size in enumerate(shape):
        taken: list[Axis] = []
        while count(taken) < size:
            axis = rest.pop(0)
            need = size // count(taken)
            if size % count(taken) == 0 and need % axis.size == 0:
                taken.append(axis)
            elif size % count(taken) == 0 and axis.size % need == 0 and axis.kind != "batch":
                return reshaped(view.split(axis, (need, axis.size // need))[0], shape)
            else:
                raise Mixed(mixed_run([*taken, axis, *rest], shape[position:]))
        dims.append(tuple(taken))
    return replace(view, dims=tuple(dims))


def mixed_run(axes: list[Axis], shape: Sequence[int]) -> Axes:
    """The shortest run of axes, from the first, that a run of sizes covers."""
    for i in range(1, len(axes) + 1):
        for j in range(1, len(shape) + 1):
            if count(axes[:i]) == math.prod(shape[:j]):
                return tuple(axes[:i])
    return tuple(axes)


def common_axes(views: Sequence[View], lists: Sequence[Axes]) -> tuple[list[View], list[Axes]]:
    """The views with one dimension split alike; `lists` are its axes in each view, none empty. May raise Mixed."""
    views, lists = list(views), list(lists)
    position = 0
    while any(position < len(axes) for axes in lists):
        if any(position >= len(axes) for axes in lists):
            raise Mixed(max(lists, key=len))
        now = [axes[position] for axes in lists]
        size = min(axis.size for axis in now)
        batch = [axis.kind == "batch" for axis in now]
        if any(batch) and not (all(batch)):
            raise Mixed(lists[batch.index(False)])
        for i, axis in enumerate(now):
            if axis.size == size:
                continue
            if axis.size % size:
                raise Mixed(lists[i])
            views[i], made = views[i].split(axis, (size, axis.size // size))
            lists[i] = substitute(lists[i], (axis,), made)
        position += 1
    return views, lists
