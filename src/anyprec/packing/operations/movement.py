"""Movement: torch's operations that only say where numbers are. Most change a view and add no step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anyprec.packing.layout import cells, one_axis, reshape_value, reshape_view, settle
from anyprec.packing.operations.build import grown, joined
from anyprec.packing.operations.call import OperationCall
from anyprec.packing.steps import Refused
from anyprec.packing.views import Axis, View, count

Views = View | Sequence[View]

UNBOUNDED = 2**31 - 1  # an end of a slice from here on is none: torch has 2**63 - 1 for x[5:]


def reshape(call: OperationCall) -> View:
    """view, unsqueeze, squeeze, flatten. A map laid out in a row for a linear layer is a `flatten`."""
    x, shape = call.view(), tuple(call.out.shape)
    if call.out.dtype != call.x.dtype:
        raise Refused("it reads the bits of numbers as another type, which has no operation")
    if is_image(call, x) and shape == (call.x.shape[0], call.x[0].numel()) and len(x.axes) > 1:
        height, width, channels = call.recorder.shape(x.value)
        name = call.step("flatten", x.value, shape=(1, 1, height * width * channels))
        axis = Axis(shape[1])
        return View(name, (axis,), ((call.recorder.batch,), (axis,)))
    return reshape_view(call.recorder, x, shape)


def is_image(call: OperationCall, x: View) -> bool:
    """(N, C, H, W) as images are stored: (H, W, C)."""
    if len(x.dims) != 4 or x.dims[0] != (call.recorder.batch,) or len(call.recorder.shape(x.value)) != 3:
        return False
    return cells(call.recorder, x) == [x.dims[2], x.dims[3], x.dims[1]]


def permuted(x: View, order: Sequence[int]) -> View:
    return replace(x, dims=tuple(x.dims[d] for d in order))


def permute(call: OperationCall) -> View:
    return permuted(call.view(), [d % call.x.dim() for d in call["dims"]])


def transpose(call: OperationCall) -> View:
    order = list(range(call.x.dim()))
    a, b = (0, 1) if call.name == "t" else (call["dim0"], call["dim1"])
    if call.x.dim() > 1:
        order[a], order[b] = order[b], order[a]
    return permuted(call.view(), order)


def expand(call: OperationCall) -> View:
    return grown(call.view(), tuple(call.out.shape))


def same(call: OperationCall) -> View:
    return retyped(call, call.x)


def retyped(call: OperationCall, x: Tensor) -> View:
    """The values of x in the type of what was made. Types of half precision are for networks that are all of it."""
    out, name = call.out, str(call.out.dtype).removeprefix("torch.")
    if out.dtype == torch.bool or (x.is_floating_point() and not out.is_floating_point()):
        raise Refused(f"it turns values into {name}, which has no operation")
    if x.is_floating_point() and out.itemsize < min(x.itemsize, 4) and not call.recorder.half:
        raise Refused(f"it rounds values to {name}, which has no operation; run it without autocast, in float32")
    return call.recorder.view_of(x)


def copied(call: OperationCall) -> View:
    """copy_: another tensor's values, written over this one; recorder.py spoils other views of its memory."""
    return grown(retyped(call, call["src"]), tuple(call.out.shape))


def restrided(call: OperationCall) -> View:
    """as_strided, where it says the strides that a tensor has anyway (pooling in channels_last does)."""
    x, out = call.x, call.out
    wide = (
        [(x.stride(d), out.stride(d)) for d in range(x.dim()) if x.shape[d] > 1] if x.shape == out.shape else [(0, 1)]
    )
    if any(before != after for before, after in wide) or x.storage_offset() != out.storage_offset():
        raise Refused("the model file has no such operation")
    return call.view()


def repeat(call: OperationCall) -> View:
    """tile: each dimension some times, one after another."""
    x, times = call.view(), [int(n) for n in call["repeats"]]
    dims = ((),) * (len(times) - len(x.dims)) + x.dims
    return replace(
        x, dims=tuple(((Axis(n, "repeat"), *dim) if n > 1 else dim) for n, dim in zip(times, dims, strict=True))
    )


# --- Parts ------------------------------------------------------------------------------------------------


def part(
    call: OperationCall,
    x: View,
    dim: int,
    start: int,
    stop: int,
    step: int = 1,
    given: tuple[int, int | None] | None = None,
) -> View:
    """Positions start, start + step, ... below stop of a dimension.

    given: both ends as the network gives them, which at other sizes may mean other positions; a negative one counts
    from the end, and those outside take all there is.
    """
    r, size = call.recorder, x.shape[dim]
    first, end = (start, None if stop >= size else stop) if given is None else given
    if (start, stop, step) == (0, size, 1) and first in (0, -size) and end in (None, size):
        return x
    wanted = len(range(start, stop, step))
    axes = x.dims[dim]
    if any(axis.kind == "batch" for axis in axes):
        raise Refused("it takes some images of a batch")
    if not wanted:
        raise Refused("it takes nothing of a value")
    if len(axes) == 1 and axes[0].kind == "repeat":
        made = (Axis(wanted, "repeat"),) if wanted > 1 else ()
        return replace(x, dims=tuple(made if d == dim else axis for d, axis in enumerate(x.dims)))
    inner = 1
    if len(axes) == 1 and step == 1 and any(cell[:1] == axes for cell in cells(r, x)):
        # The slowest part of an axis of the value: as many times more of it.
        inner = count(next(cell for cell in cells(r, x) if cell[:1] == axes)[1:])
    else:
        x = one_axis(r, x, dim)
    (axis,) = x.dims[dim]
    at = next(i for i, cell in enumerate(cells(r, x)) if axis in cell)
    shape = tuple(wanted * inner if i == at else n for i, n in enumerate(r.shape(x.value)))
    attributes = {"axis": at, "start": first * inner, "stop": None if end is None else end * inner, "step": step}
    name = r.add("slice", (x.value,), shape, attributes=attributes)
    made = (Axis(wanted),) if wanted > 1 else ()
    axes = tuple(a for old in x.axes for a in (made if old is axis else (old,)))
    return View(name, axes, tuple(made if d == dim else dim_axes for d, dim_axes in enumerate(x.dims)))


def slice_(call: OperationCall) -> View:
    x, dim, step = call.view(), call["dim"] % call.x.dim(), call["step"]
    size = call.x.shape[dim]
    first, end = max(call["start"] or 0, -UNBOUNDED), call["end"]
    start = min(max(first + (size if first < 0 else 0), 0), size)
    stop = size if end is None else min(max(end + (size if end < 0 else 0), 0), size)
    end = None if end is None or end >= UNBOUNDED else end
    whole = first in (0, -size) and end in (None, size)
    if whole and step > 1 and dim >= 2 and is_image(call, x):
        return _every(call, x, dim, step)
    return part(call, x, dim, start, stop, step, (first, end))


def _every(call: OperationCall, x: View, dim: int, step: int) -> View:
    """x[:, :, ::2]: a max pool of one tap, which all formats have."""
    r, stride, source = call.recorder, [step, 1] if dim == 2 else [1, step], x.value
    before = r.steps.get(source)
    if before is not None and before.kind == "max_pool" and before.attributes["kernel"] == [1, 1]:
        # x[:, :, ::2, ::2] comes as two slices; a step that nothing reads disappears later.
        source = before.inputs[0]
        stride = [a * b for a, b in zip(stride, before.attributes["stride"], strict=True)]
    _, channels, height, width = call.out.shape
    name = call.step(
        "max_pool", source, shape=(height, width, channels), kernel=[1, 1], stride=stride, pad=[0, 0, 0, 0],
        dilation=[1, 1], ceil=False,
    )  # fmt: skip
    return image_view(call, name, tuple(call.out.shape))


def image_view(call: OperationCall, value: str, shape: tuple[int, ...]) -> View:
    """Of a step that makes images (H, W, C)."""
    axes = [(Axis(n),) if n > 1 else () for n in shape[1:]]
    return View(value, (*axes[1], *axes[2], *axes[0]), ((call.recorder.batch,), *axes))


def without(x: View, dim: int) -> View:
    """Without a dimension of size 1."""
    return replace(x, dims=x.dims[:dim] + x.dims[dim + 1 :])


def select(call: OperationCall) -> View:
    dim = call["dim"] % call.x.dim()
    index = int(call["index"]) % call.x.shape[dim]
    return without(part(call, call.view(), dim, index, index + 1), dim)


def unbind(call: OperationCall) -> list[View]:
    x, dim = call.view(), call["dim"] % call.x.dim()
    return [without(part(call, x, dim, i, i + 1), dim) for i in range(call.x.shape[dim])]


def split(call: OperationCall) -> list[View]:
    """split, chunk and their unsafe kinds: as long as what they made."""
    x, dim, start, made = call.view(), call["dim"] % call.x.dim(), 0, []
    for piece in call.made:
        made.append(part(call, x, dim, start, start + piece.shape[dim]))
        start += piece.shape[dim]
    return made


def roll(call: OperationCall) -> View:
    x, shifts, dims = call.view(), list(call["shifts"]), list(call["dims"])
    if not dims:
        raise Refused("only a roll along named dimensions has an operation")
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= call.x.dim()
        size = call.x.shape[dim]
        cut = (-shift) % size
        if cut:
            x = joined(call.recorder, [part(call, x, dim, cut, size), part(call, x, dim, 0, cut)], dim)
    return x


# --- Joining and picking ----------------------------------------------------------------------------------


def concatenate(call: OperationCall) -> View:
    tensors = [t for t in call["tensors"] if t.numel()]
    r, dim = call.recorder, call["dim"] % call.out.dim()
    parts = [t if r.is_constant(t) else r.view_of(t) for t in tensors]
    return joined(r, parts, dim) if len(parts) > 1 else parts[0]


def stack(call: OperationCall) -> View:
    r, dim = call.recorder, call["dim"] % call.out.dim()
    parts: list[Any] = []
    for t in call["tensors"]:
        if r.is_constant(t):
            parts.append(t.unsqueeze(dim))
        else:
            view = r.view_of(t)
            parts.append(replace(view, dims=(*view.dims[:dim], (), *view.dims[dim:])))
    return joined(r, parts, dim) if len(parts) > 1 else parts[0]


def picked(call: OperationCall, x: View, dim: int, index: list[int]) -> View:
    """Positions along a dimension, in any order: `gather`."""
    size = x.shape[dim]
    if index == list(range(size)):
        return x
    r = call.recorder
    if len(index) > 65536:
        raise Refused(f"it picks {len(index)} positions; up to 65,536 have an operation")
    x = one_axis(r, x, dim)
    if not x.dims[dim]:
        dims = tuple((Axis(len(index), "repeat"),) if d == dim else axes for d, axes in enumerate(x.dims))
        return replace(x, dims=dims)
    (axis,) = x.dims[dim]
    at = next(i for i, cell in enumerate(cells(r, x)) if axis in cell)
    shape = tuple(len(index) if i == at else n for i, n in enumerate(r.shape(x.value)))
    name = r.add("gather", (x.value,), shape, attributes={"axis": at, "index": index})
    made = (Axis(len(index)),) if len(index) > 1 else ()
    axes = tuple(a for old in x.axes for a in (made if old is axis else (old,)))
    return View(name, axes, tuple(made if d == dim else dim_axes for d, dim_axes in enumerate(x.dims)))


def flip(call: OperationCall) -> View:
    x = call.view()
    for dim in call["dims"]:
        dim %= call.x.dim()
        x = picked(call, x, dim, list(range(call.x.shape[dim]))[::-1])
    return x


def index_select(call: OperationCall) -> View:
    index = call.constant("index")
    assert index is not None
    return picked(call, call.view(), call["dim"] % call.x.dim(), [int(i) for i in index.reshape(-1)])


def index(call: OperationCall) -> View:
    """x[:, i, j] with constant tensors of positions for neighboring dimensions."""
    r, x = call.recorder, call.view()
    given = [(d, t) for d, t in enumerate(call["indices"]) if t is not None]
    if any(not r.is_constant(t) for _, t in given):
        raise Refused("its positions are computed from the input; only constant ones have an operation")
    dims = [d for d, _ in given]
    if dims != list(range(dims[0], dims[0] + len(dims))) or any(t.dtype in (torch.bool, torch.uint8) for _, t in given):
        raise Refused("only constant positions of neighboring dimensions have an operation")
    sizes = [call.x.shape[d] for d in dims]
    tensors = torch.broadcast_tensors(*(t.cpu() for _, t in given))  # type: ignore[no-untyped-call]
    flat = torch.zeros_like(tensors[0])
    for size, t in zip(sizes, tensors, strict=True):
        flat = flat * size + t % size
    shape = call.x.shape
    whole = 1
    for size in sizes:
        whole *= size
    x = reshape_view(r, x, (*shape[: dims[0]], whole, *shape[dims[-1] + 1 :]))
    x = picked(call, x, dims[0], [int(i) for i in flat.reshape(-1)])
    return reshape_view(r, x, tuple(call.out.shape))


# --- Padding ----------------------------------------------------------------------------------------------


def pad(call: OperationCall) -> View:
    """constant_pad_nd: zeros by `pad`, other numbers by `concat`, negative amounts by `slice`."""
    amounts = [int(n) for n in call["pad"]]
    x, value = call.view(), float(call.given.get("value") or 0)
    rank = call.x.dim()
    ends = {rank - 1 - i: amounts[2 * i : 2 * i + 2] for i in range(len(amounts) // 2)}
    for dim, (before, after) in ends.items():
        size = x.shape[dim]
        if before < 0 or after < 0:
            x = part(call, x, dim, max(-before, 0), size - max(-after, 0))
    ends = {dim: [max(n, 0) for n in both] for dim, both in ends.items() if max(both) > 0}
    if not ends:
        return x
    if value == 0 and is_image(call, x) and 0 not in ends:
        return _zeros_around(call, x, *(ends.get(dim, [0, 0]) for dim in (2, 3, 1)))
    for dim, both in ends.items():
        x = _filled(call, x, dim, both, value)
    return x


def _zeros_around(call: OperationCall, x: View, h: list[int], w: list[int], c: list[int]) -> View:
    shape = tuple(n + sum(both) for n, both in zip(call.recorder.shape(x.value), (h, w, c), strict=True))
    name = call.step("pad", x.value, shape=shape, h=h, w=w, c=c)
    return image_view(call, name, (call.recorder.batch.size, shape[2], shape[0], shape[1]))


def _filled(call: OperationCall, x: View, dim: int, both: list[int], value: float) -> View:
    r = call.recorder
    if any(axis.kind == "batch" for axis in x.dims[dim]):
        raise Refused("it adds images to a batch")
    if value == 0 and x.dims[dim]:
        x = one_axis(r, x, dim)
        (axis,) = x.dims[dim]
        at = x.axes.index(axis)
        shape = (count(x.axes[:at]), axis.size, count(x.axes[at + 1 :]))
        name = r.add(
            "pad", (reshape_value(r, x.value, shape),), (shape[0], shape[1] + sum(both), shape[2]),
            attributes={"h": [0, 0], "w": both, "c": [0, 0]},
        )  # fmt: skip
        made = Axis(axis.size + sum(both))
        axes = (*x.axes[:at], made, *x.axes[at + 1 :])
        return View(name, axes, tuple((made,) if d == dim else dim_axes for d, dim_axes in enumerate(x.dims)))
    blocks = [torch.full((*(n if d != dim else size for d, n in enumerate(x.shape)),), value) for size in both]
    parts: list[Any] = [blocks[0], x, blocks[1]]
    return joined(r, [p for p in parts if not isinstance(p, Tensor) or p.numel()], dim)


def copied_pad(call: OperationCall) -> View:
    """reflection_pad and replication_pad."""
    x, amounts, rank = call.view(), [int(n) for n in call["padding"]], call.x.dim()
    for i in range(len(amounts) // 2):
        dim, (before, after) = rank - 1 - i, amounts[2 * i : 2 * i + 2]
        x = picked(call, x, dim, copied_positions(x.shape[dim], before, after, call.name.split("_")[0]))
    return x


def copied_positions(size: int, before: int, after: int, how: str) -> list[int]:
    """Where the numbers of a padded axis come from; how: reflection, replication or circular."""
    found = range(-before, size + after)
    if how.startswith("repl"):
        return [min(max(i, 0), size - 1) for i in found]
    if how.startswith("circ"):
        return [i % size for i in found]
    top = max(size - 1, 1)
    return [top - abs(i % (2 * top) - top) if size > 1 else 0 for i in found]


# --- Shuffles ---------------------------------------------------------------------------------------------


def shuffle(call: OperationCall) -> View:
    """pixel_shuffle, pixel_unshuffle and channel_shuffle."""
    r, x, shape = call.recorder, call.view(), tuple(call.x.shape)
    *lead, channels, height, width = shape
    n = len(lead)
    if "channel" in call.name:
        groups = int(call["groups"])
        _, channels, *places = shape
        x = reshape_view(r, x, (shape[0], groups, channels // groups, *places))
        return reshape_view(r, permuted(x, [0, 2, 1, *range(3, 3 + len(places))]), shape)
    if call.name == "pixel_shuffle":
        by = int(call["upscale_factor"])
        x = reshape_view(r, x, (*lead, channels // by**2, by, by, height, width))
        order = [n, n + 3, n + 1, n + 4, n + 2]
    else:
        by = int(call["downscale_factor"])
        x = reshape_view(r, x, (*lead, channels, height // by, by, width // by, by))
        order = [n, n + 2, n + 4, n + 1, n + 3]
    return reshape_view(r, permuted(x, [*range(n), *order]), tuple(call.out.shape))


def glu(call: OperationCall) -> View:
    from anyprec.packing.operations.build import binary, pointwise

    x, dim = call.view(), call["dim"] % call.x.dim()
    half = call.x.shape[dim] // 2
    gate = pointwise(call.recorder, "sigmoid", part(call, x, dim, half, 2 * half))
    return binary(call.recorder, "mul", part(call, x, dim, 0, half), gate)


def settled_image(call: OperationCall, x: View) -> tuple[View, Sequence[Axis]]:
    """(..., H, W) as images: all other dimensions are channels. Also the axes of the channels."""
    lead = [axis for dim in x.dims[:-2] for axis in dim if axis.kind != "batch"]
    return settle(call.recorder, x, (x.dims[-2], x.dims[-1], lead)), lead


MOVEMENT: dict[str, Callable[[OperationCall], Views]] = {
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "unflatten"), reshape),
    "permute": permute,
    "transpose": transpose,
    "t": transpose,
    "expand": expand,
    **dict.fromkeys(("clone", "detach", "alias", "lift_fresh", "_to_copy", "contiguous"), same),
    "copy": copied,
    "as_strided": restrided,
    "repeat": repeat,
    "slice": slice_,
    "select": select,
    "unbind": unbind,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk"), split),
    "unsafe_chunk": split,
    "roll": roll,
    "cat": concatenate,
    "stack": stack,
    "flip": flip,
    "index_select": index_select,
    "index": index,
    "constant_pad_nd": pad,
    **dict.fromkeys(("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"), copied_pad),
    **dict.fromkeys(("replication_pad1d", "replication_pad2d", "replication_pad3d"), copied_pad),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"), shuffle),
    "glu": glu,
}
