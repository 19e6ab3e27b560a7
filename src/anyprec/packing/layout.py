"""Layout: values moved into the order an operation needs, with as few reshapes and transposes as it takes.

Views (views.py) in, views of values in a wanted order out, with the steps for it added to the Recorder. Constants are
laid out here too: they cost no step but their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anyprec.packing.steps import Refused, Shape
from anyprec.packing.views import Axes, Axis, Mixed, View, common_axes, count, reshaped

if TYPE_CHECKING:
    from anyprec.packing.recorder import Recorder

MAX_AXES = 6
MAX_INDEX = 65536  # positions of a gather

Groups = Sequence[Sequence[Axis]]


@dataclass(frozen=True, eq=False)
class Constant(View):
    """A tensor that does not come from the input, as a view: one dimension of `numbers` for each of `axes`."""

    numbers: Tensor = field(kw_only=True)


# --- Steps that move numbers ------------------------------------------------------------------------------


def reshape_value(recorder: Recorder, value: str, shape: Shape) -> str:
    if recorder.shape(value) == tuple(shape):
        return value
    if len(shape) > MAX_AXES:
        raise Refused(f"it needs a value of {len(shape)} axes besides the batch; {MAX_AXES} have an operation")
    return recorder.add("reshape", (value,), tuple(shape), helper=True, attributes={"shape": list(shape)})


def cells(recorder: Recorder, view: View) -> list[Axes]:
    """The view's axes by the axes of the value as it is stored; none of them for a size of 1."""
    rest, found = list(view.axes), []
    for size in recorder.shape(view.value):
        taken: list[Axis] = []
        while count(taken) < size:
            taken.append(rest.pop(0))
        found.append(tuple(taken))
    assert not rest, (view, recorder.shape(view.value))
    return found


def neighbors(axes: Sequence[Axis], order: Sequence[Axis]) -> list[Axes]:
    """`axes` in runs that stay together in `order`."""
    place = {axis: i for i, axis in enumerate(order)}
    runs: list[list[Axis]] = []
    for axis in axes:
        if runs and place[axis] == place[runs[-1][-1]] + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return [tuple(run) for run in runs]


def settle(recorder: Recorder, view: View, groups: Groups) -> View:
    """The view of a value with one axis for each of `groups`, in this order; all axes of the view are in one."""
    order = tuple(axis for group in groups for axis in group)
    shape = tuple(count(group) for group in groups)
    if isinstance(view, Constant):
        return _settle_constant(recorder, view, order, shape)
    for axis in [axis for axis in order if axis.kind == "repeat"]:
        view, stored = _with_repeat(recorder, view, axis)
        order = tuple(stored if other is axis else other for other in order)
    assert set(order) == set(view.axes), (order, view.axes)
    value = view.value
    if order != view.axes:
        units = [run for cell in cells(recorder, view) for run in (neighbors(cell, order) if cell else [()])]
        if len(units) > MAX_AXES:
            units = neighbors(view.axes, order)
        if len(units) > MAX_AXES:
            return replace(view, value=reshape_value(recorder, _sorted(recorder, view, order), shape), axes=order)
        if len(units) != len(recorder.shape(value)):  # there is a reshape anyway: sizes of 1 need no place
            units = [unit for unit in units if unit]
        value = reshape_value(recorder, value, tuple(map(count, units)))
        ones = [i for i, unit in enumerate(units) if not unit]
        place = {axis: i for i, axis in enumerate(order)}
        moved = ones + sorted((i for i, unit in enumerate(units) if unit), key=lambda i: place[units[i][0]])
        if moved != list(range(len(units))):
            made = tuple(count(units[i]) for i in moved)
            value = recorder.add("transpose", (value,), made, helper=True, attributes={"order": moved})
    value = reshape_value(recorder, value, shape)
    return replace(view, value=value, axes=order)


def _sorted(recorder: Recorder, view: View, order: Axes) -> str:
    """More axes than a value has: run after run comes to its place, by a transpose of neighbors each."""
    value, now = view.value, list(view.axes)
    for i, axis in enumerate(order):
        j = now.index(axis)
        if j == i:
            continue
        k = j + 1
        while k < len(now) and now[k] is order[i + k - j]:
            k += 1
        a, b, c, d = (count(part) for part in (now[:i], now[i:j], now[j:k], now[k:]))
        value = reshape_value(recorder, value, (a, b, c, d))
        value = recorder.add("transpose", (value,), (a, c, b, d), helper=True, attributes={"order": [0, 2, 1, 3]})
        now = [*now[:i], *now[j:k], *now[i:j], *now[k:]]
    return value


def _settle_constant(recorder: Recorder, view: Constant, order: Axes, shape: Shape) -> View:
    numbers = view.numbers.reshape([axis.size for axis in view.axes])
    missing = [axis for axis in order if axis not in view.axes]  # the same all along them
    numbers = numbers.expand([*(axis.size for axis in missing), *numbers.shape])
    axes = (*missing, *view.axes)
    numbers = numbers.permute([axes.index(axis) for axis in order]).reshape(shape)
    return View(recorder.add_constant(numbers), order, view.dims)


def _with_repeat(recorder: Recorder, view: View, axis: Axis) -> tuple[View, Axis]:
    """A repeated axis as one of the value: position 0 of an axis of size 1, as often as needed."""
    if axis.size > MAX_INDEX:
        raise Refused(f"it repeats a value {axis.size} times; up to {MAX_INDEX} have an operation")
    shape = recorder.shape(view.value)
    value = reshape_value(recorder, view.value, (1, *shape))
    attributes = {"axis": 0, "index": [0] * axis.size}
    value = recorder.add("gather", (value,), (axis.size, *shape), helper=True, attributes=attributes)
    stored = Axis(axis.size)
    dims = tuple(tuple(stored if other is axis else other for other in dim) for dim in view.dims)
    return View(value, (stored, *view.axes), dims), stored


def separate(recorder: Recorder, view: View, chosen: Sequence[Axis]) -> tuple[View, list[int]]:
    """The view of a value in which `chosen` axes share none with others, and the numbers of theirs."""
    wanted = set(chosen)
    units: list[Axes] = []
    for cell in cells(recorder, view):
        if not cell:
            units.append(())
        run: list[Axis] = []
        for axis in cell:
            if run and (axis in wanted) != (run[-1] in wanted):
                units.append(tuple(run))
                run = []
            run.append(axis)
        if run:
            units.append(tuple(run))
    if len(units) > MAX_AXES:
        units = _joined([unit for unit in units if unit], wanted)
    value = reshape_value(recorder, view.value, tuple(map(count, units)))
    return view.with_value(value), [i for i, unit in enumerate(units) if unit and unit[0] in wanted]


def _joined(units: list[Axes], wanted: set[Axis]) -> list[Axes]:
    made: list[Axes] = []
    for unit in units:
        if made and (made[-1][0] in wanted) == (unit[0] in wanted):
            made[-1] = made[-1] + unit
        else:
            made.append(unit)
    return made


def _as_one(found: list[Axes], wanted: set[Axis]) -> Shape:
    """Sizes of the cells, with the axes `wanted`, which are neighbors, as one."""
    sizes: list[int] = []
    before = False  # the last size is one of `wanted`
    for cell in found:
        for run in neighbors(cell, cell) if not (set(cell) & wanted) else [(axis,) for axis in cell]:
            inside = run[0] in wanted
            same = inside == before and bool(sizes) and (inside or run[0] is not cell[0])
            if same:
                sizes[-1] *= count(run)
            else:
                sizes.append(count(run))
            before = inside
    return tuple(sizes)


def one_axis(recorder: Recorder, view: View, dim: int) -> View:
    """The view with this dimension as one axis that the value has by itself (or none, if its size is 1)."""
    axes = view.dims[dim]
    if any(axis.kind == "batch" for axis in axes):
        raise Refused("it takes a part of, or works across, the images of a batch")
    if not axes:
        return view
    if len(axes) > 1 or axes[0].kind == "repeat":
        rest = [axis for axis in view.axes if axis not in axes]
        first = next((i for i, axis in enumerate(view.axes) if axis in axes), 0)
        at = sum(axis not in axes for axis in view.axes[:first])
        if (*rest[:at], *axes, *rest[at:]) != view.axes:
            groups = [*([axis] for axis in rest[:at]), axes, *([axis] for axis in rest[at:])]
            if len(groups) > MAX_AXES:
                groups = [g for g in (rest[:at], axes, rest[at:]) if g]
            view = settle(recorder, view, groups)
        else:
            view = view.with_value(reshape_value(recorder, view.value, _as_one(cells(recorder, view), set(axes))))
        view = view.merged(view.dims[dim])
    return separate(recorder, view, view.dims[dim])[0]


def reshape_view(recorder: Recorder, view: View, shape: Sequence[int]) -> View:
    """torch's view(shape); what is cut across its axes is brought into one axis first."""
    while True:
        try:
            return reshaped(view, shape)
        except Mixed as mixed:
            if any(axis.kind == "batch" for axis in mixed.axes):
                raise Refused("it mixes the images of a batch with one another") from None
            if len(mixed.axes) == 1:
                raise Refused(f"it makes {tuple(shape)} of {view.shape}") from None
            row = replace(view, dims=(*_around(view, mixed.axes),))
            merged = one_axis(recorder, row, next(i for i, dim in enumerate(row.dims) if dim == mixed.axes))
            view = merged


def _around(view: View, axes: Axes) -> list[Axes]:
    """All axes of the view in torch's order, as dimensions, of which one is `axes`."""
    row = [axis for dim in view.dims for axis in dim]
    at = row.index(axes[0])
    return [*((a,) for a in row[:at]), axes, *((a,) for a in row[at + len(axes) :])]


# --- Several values in one order --------------------------------------------------------------------------


@dataclass(frozen=True)
class Aligned:
    """Values with equally many axes, those of equal place meaning the same; `view` is that of a result of them."""

    values: tuple[str, ...]
    shape: Shape
    view: View  # its value is not made yet


def expanded(view: View, rank: int) -> View:
    """With dimensions of size 1 in front, as torch broadcasts."""
    return replace(view, dims=((),) * (rank - len(view.dims)) + view.dims)


def align(recorder: Recorder, views: Sequence[View]) -> Aligned:
    """For operations on numbers at equal places of several tensors, with broadcasting."""
    rank = max(len(view.dims) for view in views)
    aligned = [expanded(view, rank) for view in views]
    dims: list[Axes] = []  # of the result
    own: list[dict[Axis, Axis]] = [{} for _ in views]  # axis of the result -> that of the view
    for d in range(rank):
        wide = [i for i, view in enumerate(aligned) if view.dims[d]]
        lists = alike(recorder, aligned, wide, d)
        made: list[Axis] = []
        for axes in zip(*lists, strict=True):
            stored = any(axis.kind == "stored" for axis in axes)
            axis = axes[0] if axes[0].kind == "batch" else Axis(axes[0].size, "stored" if stored else "repeat")
            made.append(axis)
            for i, mine in zip(wide, axes, strict=True):
                if mine.kind == "stored":
                    own[i][axis] = mine
        dims.append(tuple(made))
    stored_axes = [axis for dim in dims for axis in dim if axis.kind == "stored"]
    lead = max(range(len(views)), key=lambda i: (not isinstance(aligned[i], Constant), count(aligned[i].axes), -i))
    groups = _common_cells(recorder, aligned[lead], own, lead, stored_axes)
    values = []
    for i, view in enumerate(aligned):
        mine = [[own[i][axis] for axis in group if axis in own[i]] for group in groups]
        values.append(settle(recorder, view, mine).value)
    order = tuple(axis for group in groups for axis in group)
    return Aligned(tuple(values), tuple(count(group) for group in groups), View("", order, tuple(dims)))


def alike(recorder: Recorder, views: list[View], wide: list[int], d: int) -> list[Axes]:
    """The axes of dimension d, split alike in all views that have it; changes `views`."""
    if not wide:
        return []
    for attempt in range(2):
        try:
            changed, lists = common_axes([views[i] for i in wide], [views[i].dims[d] for i in wide])
        except Mixed as mixed:
            if attempt or any(axis.kind == "batch" for i in wide for axis in views[i].dims[d]):
                raise Refused("it combines values of different images of a batch") from mixed
            for i in wide:
                views[i] = one_axis(recorder, views[i], d)
            continue
        for i, view in zip(wide, changed, strict=True):
            views[i] = view
        return lists
    raise AssertionError


def _common_cells(
    recorder: Recorder, lead: View, own: list[dict[Axis, Axis]], number: int, axes: list[Axis]
) -> list[list[Axis]]:
    """The axes of the result in the order and the cells of the leading view, those it lacks in front."""
    back = {mine: axis for axis, mine in own[number].items()}
    if isinstance(lead, Constant):
        found = [[back[axis]] for axis in lead.axes if axis in back]
    else:
        found = [[back[axis] for axis in cell] for cell in cells(recorder, lead)]
    groups: list[list[Axis]] = [[axis] for axis in axes if axis not in own[number]]
    for cell in found:
        owners = [tuple(axis in mine for mine in own) for axis in cell]
        if len(set(owners)) <= 1:
            groups.append(cell)
        else:
            groups.extend([axis] for axis in cell)
    if len(groups) > MAX_AXES:
        groups = [group for group in groups if group]
        while len(groups) > MAX_AXES:
            alike = [
                i
                for i in range(len(groups) - 1)
                if len({tuple(axis in mine for mine in own) for axis in (*groups[i], *groups[i + 1])}) == 1
            ]
            if not alike:
                raise Refused(f"it needs values of {len(groups)} axes besides the batch; {MAX_AXES} have an operation")
            groups[alike[0] : alike[0] + 2] = [groups[alike[0]] + groups[alike[0] + 1]]
    return groups or [[]]


# --- Constants --------------------------------------------------------------------------------------------


def constant_view(recorder: Recorder, numbers: Tensor, like: View) -> Constant:
    """A constant that is broadcast with `like`, as a view; what is the same for every image is kept once."""
    numbers = numbers.detach()
    rank = max(numbers.dim(), len(like.dims))
    like_dims = expanded(like, rank).dims
    sizes = (1,) * (rank - numbers.dim()) + tuple(numbers.shape)
    dims: list[Axes] = []
    axes: list[Axis] = []
    batch: int | None = None
    for size, dim in zip(sizes, like_dims, strict=True):
        if size == 1:
            dims.append(())
            continue
        made = tuple(a if a.kind == "batch" else Axis(a.size) for a in dim) if dim else (Axis(size),)
        if count(made) != size:
            raise Refused(f"a constant of shape {tuple(numbers.shape)} does not fit a value of {like.shape}")
        for axis in made:
            batch = len(axes) if axis.kind == "batch" else batch
            axes.append(axis)
        dims.append(made)
    numbers = numbers.reshape([axis.size for axis in axes])
    if batch is not None:
        first = numbers.select(batch, 0)
        if not torch.equal(numbers, first.unsqueeze(batch).expand_as(numbers)):
            raise Refused("a constant differs from image to image of a batch")
        numbers = first
        axes.pop(batch)
    for i in reversed(range(len(axes))):  # what is the same along an axis is kept once
        first = numbers.select(i, 0)
        once = axes[i].size > 1 and torch.equal(numbers, first.unsqueeze(i).expand_as(numbers))
        if recorder.shortcut(once):
            numbers = first
            gone = axes.pop(i)
            dims = [tuple(Axis(a.size, "repeat") if a is gone else a for a in dim) for dim in dims]
    return Constant("", tuple(axes), tuple(dims), numbers=numbers)
