"""Products: matrix products of two values, and of a value with a constant, which is a linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyprec.packing.layout import MAX_AXES, Constant, alike, constant_view, settle
from anyprec.packing.operations.build import binary, scaled
from anyprec.packing.operations.call import OperationCall
from anyprec.packing.operations.layers import linear
from anyprec.packing.steps import Refused
from anyprec.packing.views import Axes, Axis, View, count

if TYPE_CHECKING:
    from anyprec.packing.recorder import Recorder


def product(recorder: Recorder, a: View | Any, b: View | Any) -> View:
    """(B, m, k) times (B, k, n); B may hold the batch and more."""
    if not isinstance(b, View):
        return _by_constant(recorder, a, b, 2) if _is_one(recorder, b) else _matmul(recorder, a, _lead(recorder, b, a))
    if not isinstance(a, View):
        return _by_constant(recorder, b, a, 1) if _is_one(recorder, a) else _matmul(recorder, _lead(recorder, a, b), b)
    return _matmul(recorder, a, b)


def _lead(recorder: Recorder, numbers: Tensor, other: View) -> Constant:
    return constant_view(recorder, numbers, View("", (), (other.dims[0], (), ())))


def _is_one(recorder: Recorder, numbers: Tensor) -> bool:
    """The same matrix for all of B."""
    return recorder.shortcut(bool((numbers == numbers[:1]).all()))


def _by_constant(recorder: Recorder, x: View, numbers: Tensor, dim: int) -> View:
    """x times a matrix (dim 2: (k, n)), or a matrix (dim 1: (m, k)) times x."""
    matrix = numbers[0]
    return linear(recorder, x, dim, matrix.t() if dim == 2 else matrix)


def _matmul(recorder: Recorder, a: View, b: View) -> View:
    views = [a, b]
    wide = [i for i, view in enumerate(views) if view.dims[0]]
    lists = dict(zip(wide, alike(recorder, views, wide, 0), strict=True))
    a, b = views
    lead: list[tuple[Axis, Axis | None, Axis | None]] = []  # result, a, b
    dims: list[Axis] = []
    for pair in zip(*lists.values(), strict=True):
        own = {i: axis if axis.kind == "stored" else None for i, axis in zip(lists, pair, strict=True)}
        if pair[0].kind == "batch":
            dims.append(pair[0])
            continue
        stored = any(axis is not None for axis in own.values())
        axis = Axis(pair[0].size, "stored" if stored else "repeat")
        dims.append(axis)
        if stored:
            lead.append((axis, own.get(0), own.get(1)))
    # N may lie along the rows of one side if the other is the same for every image.
    free = (*([] if isinstance(b, Constant) else [a.dims[1]]), *([] if isinstance(a, Constant) else [b.dims[2]]))
    for side in (*free, a.dims[2], b.dims[1]):
        if any(axis.kind == "batch" for axis in side):
            raise Refused("it multiplies values of different images of a batch")
    place = {axis: i for i, axis in enumerate((*a.axes, *b.axes))}
    lead.sort(key=lambda item: place[item[1] or item[2]])  # type: ignore[index]
    groups = _grouped(lead)
    transposed = bool(b.dims[1] and own_axes(b.dims[2])) and place_in(b, b.dims[1][0]) > place_in(
        b, own_axes(b.dims[2])[0]
    )
    ends = (own_axes(b.dims[2]), b.dims[1]) if transposed else (b.dims[1], own_axes(b.dims[2]))
    left = settle(recorder, a, [*([x for _, x, _ in g if x] for g in groups), own_axes(a.dims[1]), a.dims[2]])
    right = settle(recorder, b, [*([y for _, _, y in g if y] for g in groups), *ends])
    rows, columns = (tuple(a if a.kind == "batch" else Axis(a.size) for a in d) for d in (a.dims[1], b.dims[2]))
    axes = (*(axis for g in groups for axis, _, _ in g), *own_axes(rows), *own_axes(columns))
    shape = (*(count(axis for axis, _, _ in g) for g in groups), count(own_axes(rows)), count(own_axes(columns)))
    attributes = {"transposed": transposed}
    name = recorder.add("matmul", (left.value, right.value), shape, attributes=attributes)
    return View(name, axes, (tuple(dims), rows, columns))


def own_axes(axes: Axes) -> Axes:
    return tuple(axis for axis in axes if axis.kind != "batch")


def place_in(view: View, axis: Axis) -> int:
    return view.axes.index(axis) if axis in view.axes else -1


def _grouped(lead: list[tuple[Axis, Axis | None, Axis | None]]) -> list[list[Any]]:
    """Leading axes that both sides have become one; those of one side are repeated on the other."""
    groups: list[list[Any]] = []
    for item in lead:
        alike_before = groups and all((x is None) == (y is None) for x, y in zip(groups[-1][-1], item, strict=True))
        if alike_before:
            groups[-1].append(item)
        else:
            groups.append([item])
    if len(groups) + 2 > MAX_AXES:
        raise Refused("it multiplies matrices along too many dimensions")
    return groups


def batched(call: OperationCall) -> View:
    """bmm, and baddbmm: beta x + alpha a b."""
    r = call.recorder
    if call.name == "bmm":
        return product(r, call.operand("self"), call.operand("mat2"))
    made = scaled(r, product(r, call.operand("batch1"), call.operand("batch2")), float(call["alpha"]))
    return plus(call, made)


def plus(call: OperationCall, made: View) -> View:
    beta, x = float(call["beta"]), call.operand("self")
    if beta == 0:
        return made
    if isinstance(x, View):
        return binary(call.recorder, "add", made, scaled(call.recorder, x, beta))
    return binary(call.recorder, "add", made, beta * torch.as_tensor(x).double())


def matrix(call: OperationCall) -> View:
    """mm(x, w) and addmm(bias, x, w), w being (in, out): what F.linear becomes."""
    r = call.recorder
    x, w = call.operand("mat1" if call.name == "addmm" else "self"), call.operand("mat2")
    if isinstance(x, View) and not isinstance(w, View):
        if call.name == "mm":
            return linear(r, x, 1, w.t())
        bias = call.operand("self")
        if call["alpha"] == 1 and call["beta"] == 1 and not isinstance(bias, View) and bias.dim() == 1:
            return linear(r, x, 1, w.t(), bias.expand(w.shape[1]))
        return plus(call, scaled(r, linear(r, x, 1, w.t()), float(call["alpha"])))
    if isinstance(w, View) and not isinstance(x, View):
        made = linear(r, w, 0, x)
    else:
        sides = [View(v.value, v.axes, ((), *v.dims)) for v in (x, w)]
        made = _matmul(r, *sides)
        made = View(made.value, made.axes, made.dims[1:])
    return made if call.name == "mm" else plus(call, scaled(r, made, float(call["alpha"])))


def vector(call: OperationCall) -> View:
    """mv(x, w) with a constant w."""
    w = call.constant("vec")
    assert w is not None
    made = linear(call.recorder, call.view(), 1, w[None])
    return View(made.value, made.axes, made.dims[:1])


PRODUCTS: dict[str, Callable[[OperationCall], View]] = {
    "mm": matrix,
    "addmm": matrix,
    "bmm": batched,
    "baddbmm": batched,
    "mv": vector,
}
