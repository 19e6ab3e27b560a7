"""Steps of arithmetic from views: pointwise functions, affine, clip, binary with broadcasting. Used by operations/.

Each function takes the Recorder and views or constants, adds steps, and gives the view of the result.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyprec.packing.layout import (
    Constant,
    align,
    alike,
    cells,
    constant_view,
    expanded,
    one_axis,
    reshape_value,
    settle,
)
from anyprec.packing.steps import Refused
from anyprec.packing.views import Axis, View, count

if TYPE_CHECKING:
    from anyprec.packing.recorder import Recorder

LARGE = 3e38  # stands for infinity in a constant, which is finite in a file
MERGED = 8192  # numbers of a table that spans several axes


def like(recorder: Recorder, kind: str, x: View, constants: dict[str, Tensor] | None = None, **attributes: Any) -> View:
    """A step that keeps the shape of what it reads."""
    shape = recorder.shape(x.value)
    return x.with_value(recorder.add(kind, (x.value,), shape, attributes=attributes, constants=constants or {}))


def pointwise(recorder: Recorder, function: str, x: View) -> View:
    return like(recorder, "pointwise", x, function=function)


def clip(recorder: Recorder, x: View, low: float | None, high: float | None) -> View:
    bounds = torch.tensor([-math.inf if low is None else low, math.inf if high is None else high], dtype=torch.float64)
    return like(recorder, "clip", x, {"bounds": bounds})


def scaled(recorder: Recorder, x: View, scale: float, shift: float = 0.0) -> View:
    """x scale + shift, for plain numbers."""
    if scale == 1 and shift == 0:
        return x
    return table(recorder, x, torch.tensor(float(scale)).double(), torch.tensor(float(shift)).double())


def table(recorder: Recorder, x: View, scale: Tensor, shift: Tensor) -> View:
    """An affine step; scale and shift are one number, or as many as the value's last axis has."""
    channels = recorder.shape(x.value)[-1]
    constants = {"scale": scale.double().expand(channels), "shift": shift.double().expand(channels)}
    return like(recorder, "affine", x, constants)


def finite(numbers: Tensor) -> Tensor:
    return numbers.clamp(-LARGE, LARGE) if numbers.is_floating_point() and not numbers.isfinite().all() else numbers


def along_last(recorder: Recorder, x: View, numbers: Constant, merge: bool) -> tuple[View, Tensor] | None:
    """The constant as one number for each position of the value's last axis, if it varies along that only.

    merge: axes at the end of the value may become one for it. The axes of `numbers` stand where those of x do.
    """
    place = {mine: other for mine, other in zip(_flat(numbers), _flat(x), strict=True) if mine in numbers.axes}
    theirs = [place[axis] for axis in numbers.axes]
    if any(axis.kind != "stored" for axis in theirs):
        return None
    last = cells(recorder, x)[-1]
    if not set(theirs) <= set(last):
        tail = x.axes[len(x.axes) - len(theirs) :]
        size = count(tail)
        whole = [cell for cell in cells(recorder, x) if cell and cell[0] not in tail]
        if not merge or set(tail) != set(theirs) or size > MERGED or any(set(cell) & set(tail) for cell in whole):
            return None
        x = x.with_value(reshape_value(recorder, x.value, (*map(count, whole), size)))
        last = tail
    spread = numbers.numbers.reshape([a.size for a in numbers.axes])
    order = [axis for axis in last if axis in theirs]
    spread = spread.permute([theirs.index(axis) for axis in order])
    shape = [axis.size if axis in theirs else 1 for axis in last]
    return x, spread.reshape(shape).expand([a.size for a in last]).reshape(-1)


def _flat(view: View) -> list[Axis]:
    return [axis for dim in view.dims for axis in dim]


def like_axes(recorder: Recorder, numbers: Tensor, x: View) -> Constant | None:
    """The constant with the axes of x, place by place; None where x would have to grow."""
    made = constant_view(recorder, numbers, x)
    if len(made.dims) != len(x.dims) or any(m and not o for m, o in zip(made.dims, x.dims, strict=True)):
        return None
    filled = [m or tuple(Axis(a.size, "repeat") for a in o) for m, o in zip(made.dims, x.dims, strict=True)]
    return replace(made, dims=tuple(filled))


def affine(recorder: Recorder, x: View, scale: Any, shift: Any) -> View:
    """x scale + shift with constants that broadcast to x: one table if they vary along the last axis, else binary."""
    plain = [torch.as_tensor(number).double().cpu() for number in (scale, shift)]
    views = [like_axes(recorder, finite(number), x) for number in plain]
    if None not in views:
        wide = max((v for v in views if v is not None), key=lambda v: len(v.axes))
        one_dim = sum(any(axis in wide.axes for axis in dim) for dim in wide.dims) == 1
        if (found := along_last(recorder, x, wide, one_dim)) is not None:
            rows = [along_last(recorder, found[0], v, False) for v in views if v is not None]
            if None not in rows:
                return table(recorder, found[0], *(row[1] for row in rows if row is not None))
    if not recorder.shortcut(bool((plain[0] == 1).all())):
        x = binary(recorder, "mul", x, plain[0])
    return x if recorder.shortcut(bool((plain[1] == 0).all())) else binary(recorder, "add", x, plain[1])


def as_view(recorder: Recorder, item: View | Any, other: View) -> View:
    if isinstance(item, View):
        return item
    numbers = torch.as_tensor(item)
    return constant_view(recorder, finite(numbers.float() if not numbers.is_floating_point() else numbers), other)


def binary(recorder: Recorder, function: str, x: View | Any, y: View | Any) -> View:
    """Of two views, or of a view and a constant tensor or number; torch's broadcasting."""
    if isinstance(x, View) and not isinstance(y, View):
        y = as_view(recorder, y, x)
    elif isinstance(y, View) and not isinstance(x, View):
        x = as_view(recorder, x, y)
    aligned = align(recorder, [x, y])
    a, b = (recorder.shape(value) for value in aligned.values)
    kind, attributes = ("add", {}) if function == "add" and a == b else ("binary", {"function": function})
    name = recorder.add(kind, aligned.values, aligned.shape, attributes=attributes)
    return aligned.view.with_value(name)


def grown(x: View, shape: tuple[int, ...]) -> View:
    """expand: dimensions of size 1 repeated; no number moves."""
    x = expanded(x, len(shape))
    dims = tuple(dim if dim or size == 1 else (Axis(size, "repeat"),) for dim, size in zip(x.dims, shape, strict=True))
    return replace(x, dims=dims)


def joined(recorder: Recorder, parts: list[View | Any], dim: int) -> View:
    """Values and constants one after another along a dimension: `concat`, in the order of the largest value."""
    known = [part for part in parts if isinstance(part, View)]
    largest = max(known, key=lambda view: count(view.axes))
    if any(axis.kind == "batch" for axis in largest.dims[dim]):
        raise Refused("it joins the images of one batch with those of another")
    across = replace(largest, dims=tuple(() if d == dim else axes for d, axes in enumerate(largest.dims)))
    views = [part if isinstance(part, View) else constant_view(recorder, finite(part), across) for part in parts]
    lead, sizes = views.index(largest), [view.shape[dim] for view in views]
    views[lead] = one_axis(recorder, largest, dim)
    others = [d for d in range(len(largest.dims)) if d != dim]
    for d in others:
        alike(recorder, views, [i for i, view in enumerate(views) if view.dims[d]], d)
    first = views[lead]
    groups = [list(cell) for cell in cells(recorder, first)]
    groups = [[axis] for d in others for axis in first.dims[d] if axis.kind == "repeat"] + groups
    if first.dims[dim]:
        at = next(i for i, group in enumerate(groups) if first.dims[dim][0] in group)
    elif [] in groups:  # an axis of size 1
        at = groups.index([])
    else:
        at = 0
        groups.insert(0, [])
    place = {axis: (d, k) for d in others for k, axis in enumerate(first.dims[d])}
    values = []
    for view in views:
        mine = [
            list(view.dims[dim]) if i == at else [view.dims[place[axis][0]][place[axis][1]] for axis in group]
            for i, group in enumerate(groups)
        ]
        values.append(settle(recorder, view, mine).value)
    fresh = {axis: Axis(axis.size) for group in groups for axis in group}
    along = Axis(sum(sizes))
    dims = tuple(
        (along,) if d == dim else tuple(fresh.get(a, a) for a in first.dims[d]) for d in range(len(first.dims))
    )
    axes = [[along] if i == at else [fresh[axis] for axis in group] for i, group in enumerate(groups)]
    shape = tuple(count(group) for group in axes)
    attributes = {} if at == len(groups) - 1 else {"axis": at}
    name = recorder.add("concat", tuple(values), shape, attributes=attributes)
    return View(name, tuple(axis for group in axes for axis in group), dims)
