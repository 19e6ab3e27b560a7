"""Layers: convolutions, linear layers, norms, embeddings; where an any-layer's input and output lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anyprec.nn.layers import AnyLinear
from anyprec.packing.codes import turned
from anyprec.packing.layout import MAX_AXES, cells, reshape_view, separate, settle
from anyprec.packing.operations.build import affine, binary, like, pointwise, scaled
from anyprec.packing.operations.call import OperationCall
from anyprec.packing.operations.movement import copied_positions
from anyprec.packing.steps import Refused, Shape
from anyprec.packing.views import Axes, Axis, View

if TYPE_CHECKING:
    from anyprec.packing.recorder import Recorder


# --- Where values have to lie -----------------------------------------------------------------------------


def last_axis(recorder: Recorder, view: View, dim: int) -> View:
    """The view of a value whose last axis is this dimension, all of it and nothing else."""
    axes = view.dims[dim]
    if any(axis.kind == "batch" for axis in axes):
        raise Refused("it works across the images of a batch")
    found = cells(recorder, view)
    if found[-1] == axes:
        return view
    groups = [rest for cell in found if (rest := [axis for axis in cell if axis not in axes])]
    while len(groups) >= MAX_AXES:
        groups[0:2] = [groups[0] + groups[1]]
    return settle(recorder, view, (*groups, axes))


def with_last(view: View, dim: int, value: str, size: int) -> View:
    """Of a step that made `size` numbers of those along the last axis, which is dimension `dim`."""
    made = (Axis(size),) if size > 1 else ()
    axes = tuple(axis for axis in view.axes if axis not in view.dims[dim])
    return View(value, (*axes, *made), tuple(made if d == dim % len(view.dims) else a for d, a in enumerate(view.dims)))


def image_input(recorder: Recorder, view: View) -> View:
    """(N, C, H, W) or (N, C, L) as images (H, W, C)."""
    if len(view.dims) not in (3, 4):
        raise Refused("only 1-d and 2-d convolutions have an operation")
    if view.dims[0] != (recorder.batch,):
        raise Refused("it convolves parts of an image as if they were images of the batch, which has no operation")
    channels, *places = view.dims[1:]
    height, width = places if len(places) == 2 else ((), places[0])
    return settle(recorder, view, (height, width, channels))


def image_output(recorder: Recorder, value: str, made: Tensor) -> tuple[Shape, View]:
    """Of a convolution that made this tensor."""
    _, channels, *places = made.shape
    axes = [(Axis(n),) if n > 1 else () for n in (channels, *places)]
    shape = (*((1,) * (2 - len(places))), *places, channels)
    order: Axes = tuple(axis for part in (*axes[1:], axes[0]) for axis in part)
    return shape, View(value, order, ((recorder.batch,), *axes))


def layer_input(recorder: Recorder, module: nn.Module, view: View) -> View:
    """What an any-layer reads."""
    return last_axis(recorder, view, -1) if isinstance(module, AnyLinear) else image_input(recorder, view)


def layer_output(recorder: Recorder, module: nn.Module, reads: View, made: Tensor) -> tuple[Shape, View]:
    if not isinstance(module, AnyLinear):
        return image_output(recorder, "", made)
    shape = (*recorder.shape(reads.value)[:-1], made.shape[-1])
    return shape, with_last(reads, len(reads.dims) - 1, "", made.shape[-1])


def borders(module: nn.Module, shape: Shape) -> dict[int, list[int]]:
    """Axis -> where its numbers come from, once padding_mode='reflect', 'replicate' or 'circular' has padded it."""
    how = getattr(module, "padding_mode", "zeros")
    if how == "zeros":
        return {}
    pads = zip(*layer_pads(module), strict=True)
    return {i: copied_positions(shape[i], *both, how) for i, both in enumerate(pads) if any(both)}


def layer_pads(layer: nn.Module) -> tuple[list[int], list[int]]:
    """Before and after, [h, w], of a convolution."""
    assert isinstance(layer, nn.modules.conv._ConvNd)
    line = len(layer.kernel_size) == 1
    kernel, dilation = ([1, *v] if line else list(v) for v in (layer.kernel_size, layer.dilation))
    if layer.padding == "same":  # torch puts the odd one at the end
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before = [n // 2 for n in reach]
        return before, [n - b for n, b in zip(reach, before, strict=True)]
    given = [0] * (2 - line) if layer.padding == "valid" else [int(p) for p in layer.padding]
    both = [0, *given] if line else given
    return both, both


# --- Layers -----------------------------------------------------------------------------------------------


def pair(numbers: Sequence[int], missing: int) -> list[int]:
    """[h, w] of a convolution's setting; a 1-d one runs along W."""
    numbers = [int(n) for n in numbers]
    return [missing, *numbers] if len(numbers) == 1 else numbers


def convolution(call: OperationCall) -> View:
    weight, bias = call.constant("weight"), call.constant("bias")
    if weight is None or weight.dim() not in (3, 4):
        raise Refused("only 1-d and 2-d convolutions have an operation")
    weight = weight if weight.dim() == 4 else weight.unsqueeze(2)  # (out, in / groups, kh, kw)
    more: dict[str, Any] = {}
    if call["transposed"]:
        weight = turned(weight, int(call["groups"]))
        more = {"transposed": True, "output_pad": pair(call["output_padding"], 0)}
    down, right = pair(call["padding"], 0)
    reads = image_input(call.recorder, call.view("input"))
    shape, made = image_output(call.recorder, "", call.out)
    name = call.step(
        "conv",
        reads.value,
        shape=shape,
        reads=reads,
        constants={"weight": weight} if bias is None else {"weight": weight, "bias": bias},
        kernel=list(weight.shape[2:]),
        stride=pair(call["stride"], 1),
        pad=[down, right, down, right],
        dilation=pair(call["dilation"], 1),
        groups=int(call["groups"]),
        **more,
    )
    return made.with_value(name)


def windows(call: OperationCall) -> View:
    """im2col (nn.Unfold): a convolution whose every output channel is one tap of one channel."""
    r, channels = call.recorder, call.x.shape[1]
    kernel, weight = _taps(call, channels)
    reads = image_input(r, call.view())
    settings = {key: [int(n) for n in call[key]] for key in ("stride", "dilation")}
    down, right = (int(n) for n in call["padding"])
    reach = [d * (k - 1) + 1 for d, k in zip(settings["dilation"], kernel, strict=True)]
    sizes = [n + 2 * p for n, p in zip(call.x.shape[2:], (down, right), strict=True)]
    places = [(n - k) // s + 1 for n, k, s in zip(sizes, reach, settings["stride"], strict=True)]
    name = call.step(
        "conv", reads.value, shape=(*places, len(weight)), reads=reads, constants={"weight": weight}, kernel=kernel,
        pad=[down, right, down, right], groups=channels, **settings,
    )  # fmt: skip
    height, width, taps = ((Axis(n),) if n > 1 else () for n in (*places, len(weight)))
    return View(name, (*height, *width, *taps), ((r.batch,), taps, (*height, *width)))


def folded(call: OperationCall) -> View:
    """col2im (nn.Fold): a transposed convolution that puts every input channel at one tap of one channel."""
    r, (height, width) = call.recorder, (int(n) for n in call["output_size"])
    settings = {key: [int(n) for n in call[key]] for key in ("stride", "dilation")}
    down, right = (int(n) for n in call["padding"])
    channels = call.x.shape[1] // math.prod(call["kernel_size"])
    kernel, weight = _taps(call, channels)
    reach = [d * (k - 1) + 1 for d, k in zip(settings["dilation"], kernel, strict=True)]
    sizes = [height + 2 * down - reach[0], width + 2 * right - reach[1]]
    places = [n // s + 1 for n, s in zip(sizes, settings["stride"], strict=True)]
    x = reshape_view(r, call.view(), (call.x.shape[0], len(weight), *places))
    reads = image_input(r, x)
    constants = {"weight": turned(weight, channels)}
    name = call.step(
        "conv", reads.value, shape=(height, width, channels), reads=reads, constants=constants, kernel=kernel,
        pad=[down, right, down, right], groups=channels, **settings, transposed=True,
        output_pad=[n % s for n, s in zip(sizes, settings["stride"], strict=True)],
    )  # fmt: skip
    rows, columns, deep = ((Axis(n),) if n > 1 else () for n in (height, width, channels))
    return View(name, (*rows, *columns, *deep), ((r.batch,), deep, rows, columns))


def _taps(call: OperationCall, channels: int) -> tuple[list[int], Tensor]:
    kernel = [int(n) for n in call["kernel_size"]]
    taps = kernel[0] * kernel[1]
    return kernel, torch.eye(taps).reshape(taps, 1, *kernel).repeat(channels, 1, 1, 1)


def linear(recorder: Recorder, x: View, dim: int, weight: Tensor, bias: Tensor | None = None) -> View:
    """weight (out, in) times the numbers along a dimension."""
    dim %= len(x.dims)
    reads = last_axis(recorder, x, dim)
    shape = (*recorder.shape(reads.value)[:-1], weight.shape[0])
    constants = {"weight": weight[:, :, None, None]}  # (out, in, 1, 1)
    if bias is not None:
        constants["bias"] = bias
    name = recorder.add("linear", (reads.value,), shape, constants=constants, reads=reads)
    return with_last(reads, dim, name, weight.shape[0])


# --- Norms ------------------------------------------------------------------------------------------------


def normalized(recorder: Recorder, x: View, axes: Sequence[Axis], eps: float) -> View:
    """Mean 0 and deviation 1 along some axes of the value: `norm`."""
    if any(axis.kind != "stored" for axis in axes):
        raise Refused("it takes statistics over the images of a batch, or over repeated values")
    if not axes:
        raise Refused("it takes statistics over a single number")
    x, places = separate(recorder, x, axes)
    return like(recorder, "norm", x, axes=places, eps=float(eps))


def along(x: View, dim: int, numbers: Tensor | float) -> Tensor | float:
    """Numbers along a dimension, shaped to be broadcast."""
    return numbers if isinstance(numbers, float) else numbers.reshape(-1, *(1,) * (len(x.dims) - 1 - dim))


def batch_norm(call: OperationCall) -> View:
    r, x = call.recorder, call.view("input")
    mean, variance = call.constant("running_mean"), call.constant("running_var")
    gamma, beta = call.constant("weight"), call.constant("bias")
    eps = float(call["eps" if "eps" in call.given else "epsilon"])
    if mean is None or variance is None or call.given.get("training"):
        if not any(axis.kind == "batch" for axis in x.dims[1]):
            raise Refused(
                "a batch norm without running statistics takes them from the batch; track them, and train again"
            )
        # What an instance norm is: every image's channel is a channel.
        x = normalized(r, x, [axis for d, dim in enumerate(x.dims) if d != 1 for axis in dim], eps)
        return gain(r, x, 1, gamma, beta)
    scale = (variance.double() + eps).rsqrt() * (1 if gamma is None else gamma.double())
    shift = (0 if beta is None else beta.double()) - mean.double() * scale
    return affine(r, x, along(x, 1, scale), along(x, 1, shift))


def gain(recorder: Recorder, x: View, dim: int, gamma: Tensor | None, beta: Tensor | None) -> View:
    if gamma is None and beta is None:
        return x
    return affine(
        recorder,
        x,
        1.0 if gamma is None else along(x, dim, gamma.double()),
        0.0 if beta is None else along(x, dim, beta.double()),
    )


def layer_norm(call: OperationCall) -> View:
    r, x, rank = call.recorder, call.view("input"), len(call["normalized_shape"])
    axes = [axis for dim in x.dims[len(x.dims) - rank :] for axis in dim]
    gamma, beta = call.constant("weight"), call.constant("bias")
    x = normalized(r, x, axes, call["eps"])
    if gamma is None and beta is None:
        return x
    return affine(r, x, 1.0 if gamma is None else gamma, 0.0 if beta is None else beta)


def group_norm(call: OperationCall) -> View:
    r, groups = call.recorder, int(call["group"])
    x, shape = call.view("input"), tuple(call.x.shape)
    x = reshape_view(r, x, (shape[0], groups, shape[1] // groups, *shape[2:]))
    x = normalized(r, x, [axis for dim in x.dims[2:] for axis in dim], call["eps"])
    x = reshape_view(r, x, shape)
    return gain(r, x, 1, call.constant("weight"), call.constant("bias"))


def rms_norm(call: OperationCall) -> View:
    """x / sqrt(mean of x x + eps), times a weight."""
    from anyprec.packing.operations.reductions import reduced

    r, x, rank = call.recorder, call.view("input"), len(call["normalized_shape"])
    eps = torch.finfo(call.x.dtype).eps if call["eps"] is None else float(call["eps"])
    dims = list(range(len(x.dims) - rank, len(x.dims)))
    square = scaled(r, reduced(r, binary(r, "mul", x, x), "mean", dims, True), 1.0, eps)
    x = binary(r, "div", x, pointwise(r, "sqrt", square))
    weight = call.constant("weight")
    return x if weight is None else affine(r, x, weight, 0.0)


def embedding(call: OperationCall) -> View:
    weight, r = call.constant("weight"), call.recorder
    assert weight is not None
    x = call.view("indices")
    if any(axis.kind == "repeat" for dim in x.dims for axis in dim):
        x = settle(r, x, [axis for axis in x.dims if axis and axis[0].kind != "batch"])
    shape = (*r.shape(x.value), weight.shape[1])
    name = call.step("embedding", x.value, shape=shape, constants={"weight": weight})
    made = (Axis(weight.shape[1]),) if weight.shape[1] > 1 else ()
    return View(name, (*x.axes, *made), (*x.dims, made))


LAYERS: dict[str, Callable[[OperationCall], View]] = {
    "convolution": convolution,
    "im2col": windows,
    "col2im": folded,
    "native_batch_norm": batch_norm,
    "_native_batch_norm_legit": batch_norm,
    "_native_batch_norm_legit_no_training": batch_norm,
    "_batch_norm_impl_index": batch_norm,
    "cudnn_batch_norm": batch_norm,
    "native_layer_norm": layer_norm,
    "native_group_norm": group_norm,
    "_fused_rms_norm": rms_norm,
    "rms_norm": rms_norm,
    "embedding": embedding,
}
