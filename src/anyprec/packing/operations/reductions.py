"""Reductions: sums, means and extremes over dimensions, softmax, pooling, resizing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from anyprec.packing.layout import separate, settle
from anyprec.packing.operations.build import binary, like, pointwise, scaled
from anyprec.packing.operations.call import OperationCall
from anyprec.packing.operations.layers import last_axis, linear
from anyprec.packing.operations.movement import is_image
from anyprec.packing.steps import Refused
from anyprec.packing.views import Axis, View, count

if TYPE_CHECKING:
    from anyprec.packing.recorder import Recorder


def reduced(recorder: Recorder, x: View, function: str, dims: Sequence[int], keep: bool) -> View:
    """sum, mean, max or min over dimensions."""
    chosen = [axis for d in dims for axis in x.dims[d]]
    if any(axis.kind == "batch" for axis in chosen):
        raise Refused("it works across the images of a batch")
    repeats = count(axis for axis in chosen if axis.kind == "repeat")
    stored = [axis for axis in chosen if axis.kind == "stored"]
    if stored:
        x, places = separate(recorder, x, stored)
        shape = tuple(1 if i in places else n for i, n in enumerate(recorder.shape(x.value)))
        value = recorder.add("reduce", (x.value,), shape, attributes={"function": function, "axes": places})
        x = View(value, tuple(axis for axis in x.axes if axis not in stored), x.dims)
    kept = tuple(() if d in dims else axes for d, axes in enumerate(x.dims) if keep or d not in dims)
    x = View(x.value, x.axes, kept)
    return scaled(recorder, x, repeats) if function == "sum" else x


def dims_of(call: OperationCall, name: str = "dim") -> list[int]:
    given, rank = call.given.get(name), call.x.dim()
    listed = [given] if isinstance(given, int) else list(given or range(rank))
    return sorted(d % rank for d in listed)


def total(call: OperationCall) -> View:
    """sum, mean, amax, amin; the mean of an image over H and W is its global average pool."""
    x, dims, keep = call.view(), dims_of(call), bool(call.given.get("keepdim", False))
    if call.name == "mean" and is_image(call, x):
        wide = {d for d in (2, 3) if x.dims[d]}
        if wide <= set(dims) <= {2, 3}:
            channels = call.x.shape[1]
            name = call.step("adaptive_avg_pool", x.value, shape=(1, 1, channels), size=[1, 1])
            return View(
                name, x.dims[1], tuple(a for d, a in enumerate((x.dims[0], x.dims[1], (), ())) if keep or d not in dims)
            )
    function = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "max": "max", "min": "min"}[call.name]
    if call.name in ("max", "min") and "dim" not in call.given:
        raise Refused("it works across the images of a batch")
    return reduced(call.recorder, x, function, dims, keep)


def variance(call: OperationCall) -> View | list[View]:
    """var, std and var_mean."""
    r, x, dims = call.recorder, call.view(), dims_of(call)
    keep, correction = bool(call.given.get("keepdim", False)), call.given.get("correction")
    if correction is None:
        correction = 1 if call.given.get("unbiased", True) else 0
    number = count(axis for d in dims for axis in x.dims[d])
    mean = reduced(r, x, "mean", dims, True)
    apart = binary(r, "sub", x, mean)
    made = reduced(r, binary(r, "mul", apart, apart), "mean", dims, keep)
    made = scaled(r, made, number / (number - float(correction)))
    if call.name.startswith("std"):
        made = pointwise(r, "sqrt", made)
    if call.name.endswith("_mean"):
        return [made, reduced(r, x, "mean", dims, keep)]
    return made


def vector_norm(call: OperationCall) -> View:
    """linalg_vector_norm and norm, of order 1, 2 and infinity."""
    r, x, dims = call.recorder, call.view(), dims_of(call)
    order, keep = call.given.get("ord", call.given.get("p")), bool(call.given.get("keepdim", False))
    order = 2.0 if order is None else float(order)
    if order == 2:
        return pointwise(r, "sqrt", reduced(r, binary(r, "mul", x, x), "sum", dims, keep))
    if order not in (1, float("inf")):
        raise Refused(f"a norm of order {order:g} has no operation; 1, 2 and infinity have one")
    return reduced(r, pointwise(r, "abs", x), "sum" if order == 1 else "max", dims, keep)


def softmax(call: OperationCall) -> View:
    dim = call["dim"] % call.x.dim()
    x = last_axis(call.recorder, call.view(), dim)
    if dim == 1 and call.x.dim() in (2, 4):  # classes of an image or of its pixels
        return like(call.recorder, "softmax", x)
    return like(call.recorder, "softmax", x, single=True)


def log_softmax(call: OperationCall) -> View:
    """x - top - log(sum of exp(x - top))."""
    r, x, dim = call.recorder, call.view(), call["dim"] % call.x.dim()
    x = binary(r, "sub", x, reduced(r, x, "max", [dim], True))
    return binary(r, "sub", x, pointwise(r, "log", reduced(r, pointwise(r, "exp", x), "sum", [dim], True)))


def log_sum(call: OperationCall) -> View:
    """logsumexp."""
    r, x, dims = call.recorder, call.view(), dims_of(call)
    top = reduced(r, x, "max", dims, True)
    added = reduced(r, pointwise(r, "exp", binary(r, "sub", x, top)), "sum", dims, True)
    made = binary(r, "add", pointwise(r, "log", added), top)
    keep = bool(call.given.get("keepdim", False))
    return made if keep else View(made.value, made.axes, tuple(a for d, a in enumerate(made.dims) if d not in dims))


def running_sum(call: OperationCall) -> View:
    """cumsum: a triangle of ones."""
    dim = call["dim"] % call.x.dim()
    if not call.x.is_floating_point():
        raise Refused("a running sum of whole numbers has no operation")
    return linear(call.recorder, call.view(), dim, torch.ones(call.x.shape[dim], call.x.shape[dim]).tril())


# --- Pooling ----------------------------------------------------------------------------------------------


def window(call: OperationCall) -> dict[str, Any]:
    """Kernel, stride and padding of a 2-d pool; torch breaks 1-d ones down to it. One number serves both ways."""

    def both(setting: Any) -> list[int]:
        numbers = [int(n) for n in (setting if isinstance(setting, (list, tuple)) else [setting])]
        return numbers * 2 if len(numbers) == 1 else numbers

    kernel, pads = both(call["kernel_size"]), both(call["padding"])
    return {"kernel": kernel, "stride": both(call["stride"]) if call["stride"] else kernel, "pad": pads * 2}


def pooled(call: OperationCall, kind: str, **attributes: Any) -> View:
    """A step on images (..., H, W); all other dimensions are channels."""
    r, x = call.recorder, call.view()
    lead = [axis for dim in x.dims[:-2] for axis in dim if axis.kind != "batch"]
    x = settle(r, x, (x.dims[-2], x.dims[-1], lead))
    lead = [axis for dim in x.dims[:-2] for axis in dim if axis.kind != "batch"]
    height, width = call.out.shape[-2:]
    name = call.step(kind, x.value, shape=(height, width, count(lead)), **attributes)
    rows, columns = ((Axis(n),) if n > 1 else () for n in (height, width))
    return View(name, (*rows, *columns, *lead), (*x.dims[:-2], rows, columns))


def max_pool(call: OperationCall) -> View:
    dilation = call["dilation"] if isinstance(call["dilation"], list) else [call["dilation"]]
    dilation = [int(n) for n in dilation] * (2 if len(dilation) == 1 else 1)
    return pooled(call, "max_pool", **window(call), dilation=dilation, ceil=bool(call["ceil_mode"]))


def average_pool(call: OperationCall) -> View:
    if call.given.get("divisor_override"):
        raise Refused("a divisor of its own has no operation; multiply afterwards")
    places = window(call)
    if places["pad"] == [0, 0, 0, 0] and tuple(places["kernel"]) == tuple(call.x.shape[-2:]):
        return pooled(call, "adaptive_avg_pool", size=[1, 1])  # the whole map, whatever its size
    counted = bool(call["count_include_pad"])
    return pooled(call, "avg_pool", **places, ceil=bool(call["ceil_mode"]), count_pad=counted)


def adaptive_pool(call: OperationCall) -> View:
    return pooled(call, "adaptive_avg_pool", size=[int(n) for n in call["output_size"]])


def adaptive_max_pool(call: OperationCall) -> View:
    """The largest of all, or windows of equal size."""
    sizes, made = tuple(call.x.shape[-2:]), [int(n) for n in call["output_size"]]
    if made == [1, 1]:
        rank = call.x.dim()
        return reduced(call.recorder, call.view(), "max", [rank - 2, rank - 1], True)
    if any(size % out for size, out in zip(sizes, made, strict=True)):
        raise Refused(f"it pools {sizes} to {tuple(made)}; only windows of equal size have an operation")
    kernel = [size // out for size, out in zip(sizes, made, strict=True)]
    return pooled(call, "max_pool", kernel=kernel, stride=kernel, pad=[0, 0, 0, 0], dilation=[1, 1], ceil=False)


def resize(call: OperationCall) -> View:
    line = call.name.endswith("1d")
    given = [call.given.get(name) for name in (("scales",) if line else ("scales_h", "scales_w"))]
    scales = [float(n) for n in given if n is not None]
    attributes: dict[str, Any] = {
        "mode": "nearest" if "nearest" in call.name else "bilinear",
        "align": bool(call.given.get("align_corners", False)),
        "size": None if len(scales) == len(given) else [int(n) for n in call.out.shape[2:]],
        "scale": scales if len(scales) == len(given) else None,
        "like": None,
    }
    if not line:
        return pooled(call, "resize", **attributes)
    x, r = call.view(), call.recorder
    x = settle(r, x, ((), x.dims[2], (*x.dims[0][1:], *x.dims[1])))
    for name in ("size", "scale"):
        if attributes[name] is not None:
            attributes[name] = [1 if name == "size" else 1.0, *attributes[name]]
    _, channels, width = call.out.shape
    name = call.step("resize", x.value, shape=(1, width, channels), **attributes)
    columns = (Axis(width),) if width > 1 else ()
    return View(name, (*columns, *x.dims[1]), (*x.dims[:2], columns))


def resize_by_matrices(call: OperationCall) -> View:
    """Bicubic, antialiased and exact nearest ones: along each axis a matrix, which torch itself tells."""
    x = call.view()
    for dim, scale in ((2, "scales_h"), (3, "scales_w")):
        size, made = call.x.shape[dim], call.out.shape[dim]
        if size == made:
            continue
        line = torch.eye(size, dtype=call.x.dtype)[:, None, :, None].expand(-1, -1, -1, 8)  # the same in 8 columns
        line = line if dim == 2 else line.transpose(2, 3)
        scales = {"scales_h": None, "scales_w": None, scale: call.given.get(scale)}
        sizes = {"output_size": [made, 8] if dim == 2 else [8, made]}
        found = call.func(**{**call.given, call.first: line.contiguous(), **scales, **sizes})
        matrix = found[:, 0, :, 0] if dim == 2 else found[:, 0, 0]
        x = linear(call.recorder, x, dim, matrix.t().contiguous())
    return x


REDUCTIONS: dict[str, Callable[[OperationCall], View | list[View]]] = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min"), total),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), variance),
    "linalg_vector_norm": vector_norm,
    "norm": vector_norm,
    "_softmax": softmax,
    "_safe_softmax": softmax,
    "_log_softmax": log_softmax,
    "logsumexp": log_sum,
    "cumsum": running_sum,
    "max_pool2d_with_indices": max_pool,
    "avg_pool2d": average_pool,
    "_adaptive_avg_pool2d": adaptive_pool,
    "adaptive_max_pool2d": adaptive_max_pool,
    "upsample_bilinear2d": resize,
    "upsample_nearest2d": resize,
    "upsample_linear1d": resize,
    **dict.fromkeys(("upsample_bicubic2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"), resize_by_matrices),
    "_upsample_nearest_exact2d": resize_by_matrices,
    "upsample_nearest1d": resize,
}
