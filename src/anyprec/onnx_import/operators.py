"""What each ONNX operator becomes: a torch layer where it has weights or a name in torch.nn, else a function.

OPERATORS maps an operator to a function of (NetworkBuilder, node). Nodes that read only constants and shapes never come
here: they are folded when the network is built. Semantics: https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyprec.onnx_import.network import NetworkBuilder, Step

# By the number of spatial axes, norms by the rank of their input
CONVS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
INSTANCE_NORMS: dict[int, Any] = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
MAX_POOLS: dict[int, Any] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
MEAN_POOLS: dict[int, Any] = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
GLOBAL_POOLS: dict[int, Any] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}

Operator = Callable[[NetworkBuilder, Any], None]


# --- Layers with weights --------------------------------------------------------------------------------------------


def window_pads(b: NetworkBuilder, node: Any, at: dict[str, Any], kernel: Sequence[int]) -> list[int]:
    """Padding before all axes, then after all; auto_pad worked out."""
    size, strides = len(kernel), at.get("strides", [1] * len(kernel))
    dilations, way = at.get("dilations", [1] * size), at.get("auto_pad", "NOTSET")
    if way in ("NOTSET", ""):
        return list(at.get("pads", [0] * 2 * size))
    if way == "VALID":
        return [0] * 2 * size
    before, after = [], []
    for i, length in enumerate(b.shape(node.input[0])[2:]):
        reach = dilations[i] * (kernel[i] - 1) + 1
        total = max((-(-length // strides[i]) - 1) * strides[i] + reach - length, 0)
        small = total // 2
        before.append(total - small if way == "SAME_LOWER" else small)
        after.append(small if way == "SAME_LOWER" else total - small)
    return before + after


def padded(b: NetworkBuilder, node: Any, pads: list[int], value: float = 0.0) -> tuple[str, list[int]]:
    """The input, padded by a step of its own where the two sides differ; and the padding that is left to the layer."""
    size = len(pads) // 2
    if pads[:size] == pads[size:]:
        return node.input[0], pads[:size]
    around = [pad for i in reversed(range(size)) for pad in (pads[i], pads[size + i])]
    name = f"{node.output[0]}.padded"
    b.add(Step((name,), (node.input[0],), function=lambda x: F.pad(x, around, value=value)))
    return name, [0] * size


def conv(b: NetworkBuilder, node: Any) -> None:
    at, weight = b.attributes(node), b.weight(node, 1)
    kernel = list(weight.shape[2:])
    if len(kernel) not in CONVS:
        raise b.refuse(node, f"it has {len(kernel)} spatial axes; 1 to 3 are supported")
    name, pads = padded(b, node, window_pads(b, node, at, kernel))
    group = at.get("group", 1)
    layer = CONVS[len(kernel)](
        weight.shape[1] * group, weight.shape[0], kernel, at.get("strides", 1), pads, at.get("dilations", 1), group,
        bias=b.has(node, 2),
    )  # fmt: skip
    fill(b, node, layer, weight)
    b.layer(node, layer, name)


def fill(b: NetworkBuilder, node: Any, layer: Any, weight: Tensor) -> None:
    layer.weight.data = weight
    if b.has(node, 2):
        layer.bias.data = b.weight(node, 2, "bias").reshape(-1)


def conv_transpose(b: NetworkBuilder, node: Any) -> None:
    at, weight = b.attributes(node), b.weight(node, 1)
    kernel, group = list(weight.shape[2:]), at.get("group", 1)
    size = len(kernel)
    if size not in TRANSPOSED or at.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or "output_shape" in at:
        raise b.refuse(node, "output_shape, auto_pad and more than 3 axes are not supported; give pads")
    pads, extra = at.get("pads", [0] * 2 * size), list(at.get("output_padding", [0] * size))
    for i in range(size):  # less padding after than before is output padding
        extra[i] += pads[i] - pads[size + i]
    if min(extra) < 0:
        raise b.refuse(node, f"padding {pads} after is larger than before")
    layer = TRANSPOSED[size](
        weight.shape[0], weight.shape[1] * group, kernel, at.get("strides", 1), pads[:size], extra, group,
        bias=b.has(node, 2), dilation=at.get("dilations", 1),
    )  # fmt: skip
    fill(b, node, layer, weight)
    b.layer(node, layer)


def linear(b: NetworkBuilder, node: Any, weight: Tensor, bias: Tensor | None, output: str = "") -> None:
    """weight: (out, in)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight.data = weight.contiguous()
    if bias is not None:
        layer.bias.data = bias
    b.layer(node, layer, output=output)


def gemm(b: NetworkBuilder, node: Any) -> None:
    at = b.attributes(node)
    alpha, beta = at.get("alpha", 1.0), at.get("beta", 1.0)
    weight, bias = b.constant(node, 1), b.constant(node, 2)
    out = None if weight is None else weight.shape[0 if at.get("transB", 0) else 1]
    plain = weight is not None and not at.get("transA", 0) and (not b.has(node, 2) or bias is not None)
    if plain and (bias is None or bias.size in (1, out)):
        made = b.weight(node, 1) * alpha
        filled = None if bias is None else (b.weight(node, 2) * beta).reshape(-1).expand(out or 1).clone()
        linear(b, node, made if at.get("transB", 0) else made.T, filled)
        return

    def product(x: Tensor, y: Tensor, c: Tensor | None = None) -> Tensor:
        made: Tensor = alpha * ((x.T if at.get("transA", 0) else x) @ (y.T if at.get("transB", 0) else y))
        return made if c is None else made + beta * c

    b.function(node, product)


def matmul(b: NetworkBuilder, node: Any) -> None:
    """A Linear where the right side is a matrix of weights; the bias that an Add behind it brings, too."""
    weight = b.constant(node, 1)
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32:
        b.function(node, torch.matmul)
        return
    bias = bias_after(b, node, weight.shape[1])
    if bias is None:
        linear(b, node, b.weight(node, 1).T, None)
        return
    add, name = bias
    b.used.add(name)
    b.taken_in.add(add.output[0])
    linear(b, node, b.weight(node, 1).T, torch.from_numpy(np.array(b.known[name].arrays[0]).reshape(-1)), add.output[0])


def bias_after(b: NetworkBuilder, node: Any, out: int) -> tuple[Any, str] | None:
    """The Add that alone reads the product and adds a constant of `out` numbers."""
    if b.readers.get(node.output[0]) != 1:
        return None
    for other in b.graph.node:
        if node.output[0] in other.input and other.op_type == "Add":
            (name,) = [name for name in other.input if name != node.output[0]] or [""]
            known = b.known.get(name)
            if known is not None and known.same and known.arrays[0].shape[-1:] == (out,) == (known.arrays[0].size,):
                return other, name
    return None


def batch_norm(b: NetworkBuilder, node: Any) -> None:
    at, rank = b.attributes(node), len(b.shape(node.input[0]))
    if at.get("training_mode", 0) or rank not in NORMS:
        raise b.refuse(node, "training mode and more than 3 spatial axes are not supported")
    weight, bias, mean, var = (b.weight(node, i) for i in (1, 2, 3, 4))
    layer = NORMS[rank](len(weight), eps=at.get("epsilon", 1e-5), momentum=1 - at.get("momentum", 0.9))
    layer.weight.data, layer.bias.data = weight, bias
    layer.running_mean, layer.running_var = mean, var
    b.layer(node, layer)


def layer_norm(b: NetworkBuilder, node: Any) -> None:
    at, shape = b.attributes(node), b.shape(node.input[0])
    axis = at.get("axis", -1) % len(shape)
    sizes = list(shape[axis:])
    layer = nn.LayerNorm(sizes, eps=at.get("epsilon", 1e-5), bias=b.has(node, 2))
    fill(b, node, layer, b.weight(node, 1).reshape(sizes))
    if b.has(node, 2):
        layer.bias.data = layer.bias.data.reshape(sizes)
    b.layer(node, layer)


def instance_norm(b: NetworkBuilder, node: Any) -> None:
    at, rank = b.attributes(node), len(b.shape(node.input[0]))
    weight = b.weight(node, 1)
    layer = INSTANCE_NORMS[rank](len(weight), eps=at.get("epsilon", 1e-5), affine=True)
    fill(b, node, layer, weight)
    b.layer(node, layer)


def group_norm(b: NetworkBuilder, node: Any) -> None:
    at, channels = b.attributes(node), b.shape(node.input[0])[1]
    groups = at["num_groups"]
    layer = nn.GroupNorm(groups, channels, eps=at.get("epsilon", 1e-5))
    weight, bias = b.weight(node, 1), b.weight(node, 2)
    repeat = channels // len(weight)  # before opset 21 there was one number for each group
    layer.weight.data, layer.bias.data = weight.repeat_interleave(repeat), bias.repeat_interleave(repeat)
    b.layer(node, layer)


def prelu(b: NetworkBuilder, node: Any) -> None:
    slope = b.weight(node, 1, "slope").reshape(-1)
    layer = nn.PReLU(len(slope))
    layer.weight.data = slope
    b.layer(node, layer)


# --- Layers without weights -----------------------------------------------------------------------------------------


def plain(make: Callable[[dict[str, Any]], nn.Module]) -> Operator:
    """A layer that follows from the node's attributes."""
    return lambda b, node: b.layer(node, make(b.attributes(node)), weight=None)


def function(run: Callable[..., Any]) -> Operator:
    return lambda b, node: b.function(node, run)


def clip(b: NetworkBuilder, node: Any) -> None:
    at = b.attributes(node)
    low, high = at.get("min"), at.get("max")
    if b.opset >= 11:
        low, high = (float(b.needed(node, i, "bound")) if b.has(node, i) else None for i in (1, 2))
    if (low, high) == (0.0, None):
        layer: nn.Module = nn.ReLU()
    elif (low, high) == (0.0, 6.0):
        layer = nn.ReLU6()
    else:
        layer = nn.Hardtanh(-np.inf if low is None else low, np.inf if high is None else high)
    b.layer(node, layer, weight=None)


def hard_sigmoid(b: NetworkBuilder, node: Any) -> None:
    at = b.attributes(node)
    alpha, beta = at.get("alpha", 0.2), at.get("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        b.layer(node, nn.Hardsigmoid(), weight=None)
    else:
        b.function(node, lambda x: torch.clamp(alpha * x + beta, 0, 1))


def softmax(b: NetworkBuilder, node: Any) -> None:
    axis = b.attributes(node).get("axis", -1 if b.opset >= 13 else 1)
    if b.opset < 13 and axis % len(b.shape(node.input[0])) != len(b.shape(node.input[0])) - 1:
        raise b.refuse(node, "before opset 13 only over the last axis")
    b.layer(node, nn.Softmax(axis), weight=None)


def max_pool(b: NetworkBuilder, node: Any) -> None:
    at = b.attributes(node)
    kernel = list(at["kernel_shape"])
    if len(node.output) > 1 and node.output[1]:
        raise b.refuse(node, "indices as a second output are not supported")
    strides = list(at.get("strides", [1] * len(kernel)))
    name, pads = padded(b, node, window_pads(b, node, at, kernel), -np.inf)
    layer = MAX_POOLS[len(kernel)](
        kernel, strides, pads, at.get("dilations", 1), ceil_mode=bool(at.get("ceil_mode", 0))
    )
    b.layer(node, layer, name, weight=None, output=node.output[0])


def average_pool(b: NetworkBuilder, node: Any) -> None:
    at = b.attributes(node)
    kernel = list(at["kernel_shape"])
    counted, pads = bool(at.get("count_include_pad", 0)), window_pads(b, node, at, kernel)
    if any(step != 1 for step in at.get("dilations", [])):
        raise b.refuse(node, "dilation is not supported")
    if pads[: len(kernel)] != pads[len(kernel) :] and not counted:
        raise b.refuse(node, f"padding {pads} that differs on two sides and is not counted is not supported")
    name, left = padded(b, node, pads)
    strides, ceil = list(at.get("strides", [1] * len(kernel))), bool(at.get("ceil_mode", 0))
    b.layer(node, MEAN_POOLS[len(kernel)](kernel, strides, left, ceil, counted), name, weight=None)


def global_pool(b: NetworkBuilder, node: Any) -> None:
    size = len(b.shape(node.input[0])) - 2
    if node.op_type == "GlobalMaxPool":
        b.function(node, lambda x: x.amax(tuple(range(2, x.dim())), keepdim=True))
    else:
        b.layer(node, GLOBAL_POOLS[size](1), weight=None)


def dropout(b: NetworkBuilder, node: Any) -> None:
    ratio = b.attributes(node).get("ratio", 0.5)
    if b.has(node, 1) and (given := b.constant(node, 1)) is not None:
        ratio = float(given)
    b.layer(node, nn.Dropout(ratio), weight=None)


# --- Shapes -----------------------------------------------------------------------------------------------------------


def axes_of(b: NetworkBuilder, node: Any, since: int, index: int = 1) -> list[int] | None:
    """Axes: an input from opset `since` on, an attribute before."""
    if b.opset >= since and "axes" not in b.attributes(node):
        return b.needed(node, index, "axes").reshape(-1).tolist() if b.has(node, index) else None
    return b.attributes(node).get("axes")


def reshape(b: NetworkBuilder, node: Any) -> None:
    if b.attributes(node).get("allowzero", 0):
        raise b.refuse(node, "allowzero is not supported")
    sizes, fixed = b.sizes(node, 1), b.constant(node, 1)
    # A model that was exported with a batch of 1 says 1 where it means the batch.
    batch_first = b.fixed_batch and fixed is not None and fixed.size > 0 and int(fixed.reshape(-1)[0]) == 1

    def run(x: Tensor) -> Tensor:
        found = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes(x))]
        if batch_first:
            found[0] = x.shape[0]
        return x.reshape(found)

    b.function(node, run, node.input[:1])


def transpose(b: NetworkBuilder, node: Any) -> None:
    order = b.attributes(node).get("perm") or list(reversed(range(len(b.shape(node.input[0])))))
    b.function(node, lambda x: x.permute(*order))


def flatten(b: NetworkBuilder, node: Any) -> None:
    axis = b.attributes(node).get("axis", 1) % (len(b.shape(node.input[0])) + 1)
    if axis == 1:
        b.layer(node, nn.Flatten(), weight=None)
    else:
        b.function(node, lambda x: x.reshape(int(np.prod(x.shape[:axis])), -1))


def squeeze(b: NetworkBuilder, node: Any) -> None:
    axes = axes_of(b, node, 13)
    shape = b.shape(node.input[0])
    found = [i for i, size in enumerate(shape) if size == 1] if axes is None else [axis % len(shape) for axis in axes]
    b.function(node, lambda x: x.squeeze(tuple(found)), node.input[:1])


def unsqueeze(b: NetworkBuilder, node: Any) -> None:
    axes = axes_of(b, node, 13) or []
    rank = len(b.shape(node.input[0])) + len(axes)

    def run(x: Tensor) -> Tensor:
        for axis in sorted(axis % rank for axis in axes):
            x = x.unsqueeze(axis)
        return x

    b.function(node, run, node.input[:1])


def expand(b: NetworkBuilder, node: Any) -> None:
    sizes = b.sizes(node, 1)
    b.function(
        node, lambda x: torch.broadcast_to(x, np.broadcast_shapes(tuple(x.shape), tuple(sizes(x)))), node.input[:1]
    )


def slice_(b: NetworkBuilder, node: Any) -> None:
    at = b.attributes(node)
    if b.opset < 10:
        starts, ends, axes, steps = at["starts"], at["ends"], at.get("axes"), None
    else:
        starts, ends = (b.needed(node, i, "range").reshape(-1).tolist() for i in (1, 2))
        axes = b.needed(node, 3, "axes").reshape(-1).tolist() if b.has(node, 3) else None
        steps = b.needed(node, 4, "steps").reshape(-1).tolist() if b.has(node, 4) else None
    shape = b.shape(node.input[0])
    axes = [axis % len(shape) for axis in (axes if axes is not None else range(len(starts)))]
    steps = steps or [1] * len(starts)
    if min(steps) < 1:
        raise b.refuse(node, "steps below 1 are not supported")
    cuts: list[slice] = [slice(None)] * len(shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        cuts[axis] = slice(start, None if end >= shape[axis] and end > 2**30 else end, step)
    b.function(node, lambda x: x[tuple(cuts)], node.input[:1])


def split(b: NetworkBuilder, node: Any) -> None:
    at = b.attributes(node)
    axis, count = at.get("axis", 0), len(node.output)
    length = b.shape(node.input[0])[axis]
    if b.has(node, 1):
        sizes = b.needed(node, 1, "sizes").reshape(-1).tolist()
    else:
        part = -(-length // at.get("num_outputs", count))
        sizes = at.get("split") or [min(part, length - part * i) for i in range(count)]
    b.function(node, lambda x: torch.split(x, sizes, axis), node.input[:1])


def concat(b: NetworkBuilder, node: Any) -> None:
    axis = b.attributes(node)["axis"]
    b.function(node, lambda *xs: torch.cat(xs, axis))


def gather(b: NetworkBuilder, node: Any) -> None:
    axis = b.attributes(node).get("axis", 0)
    indices = b.constant(node, 1)
    if indices is not None:
        axis %= len(b.shape(node.input[0]))
        if indices.ndim == 0:
            b.function(node, lambda x: x.select(axis, int(indices)), node.input[:1])
        else:
            b.function(node, lambda x, i: x.index_select(axis, i.reshape(-1)).unflatten(axis, i.shape))
        return
    table = b.constant(node, 0)
    if table is not None and axis == 0 and table.ndim == 2:
        layer = nn.Embedding(*table.shape)
        layer.weight.data = b.weight(node, 0)
        b.layer(node, layer, node.input[1], weight=0)
        return
    raise b.refuse(node, "computed indices are supported for tables of weights only (embeddings)")


def pad(b: NetworkBuilder, node: Any) -> None:
    at, rank = b.attributes(node), len(b.shape(node.input[0]))
    if b.opset < 11:
        pads, value = list(at["pads"]), at.get("value", 0.0)
    else:
        pads = b.needed(node, 1, "padding").reshape(-1).tolist()
        value = float(b.needed(node, 2, "value")) if b.has(node, 2) else 0.0
    axes = b.needed(node, 3, "axes").reshape(-1).tolist() if b.has(node, 3) else list(range(rank))
    around = [[0, 0] for _ in range(rank)]
    for i, axis in enumerate(axes):
        around[axis % rank] = [int(pads[i]), int(pads[len(axes) + i])]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate"}.get(at.get("mode", "constant"))
    if mode is None or (mode != "constant" and any(map(any, around[:-2]))):
        raise b.refuse(
            node, f"mode {at.get('mode')!r}, or such padding of other axes than the last two, is not supported"
        )
    axis_count = rank if mode == "constant" else min(2, rank - 2)
    flat = [n for pair in reversed(around[rank - axis_count :]) for n in pair]
    b.function(
        node, lambda x: F.pad(x, flat, mode, value) if mode == "constant" else F.pad(x, flat, mode), node.input[:1]
    )  # fmt: skip


def reduce(run: Callable[[Tensor, tuple[int, ...], bool], Tensor], since: int) -> Operator:
    def build(b: NetworkBuilder, node: Any) -> None:
        axes, keep = axes_of(b, node, since), bool(b.attributes(node).get("keepdims", 1))
        if not axes and b.attributes(node).get("noop_with_empty_axes", 0):
            b.function(node, lambda x: x, node.input[:1])
            return
        rank = len(b.shape(node.input[0]))
        found = tuple(axis % rank for axis in axes) if axes else tuple(range(rank))
        b.function(node, lambda x: run(x, found, keep), node.input[:1])

    return build


def resize(b: NetworkBuilder, node: Any) -> None:
    at, shape = b.attributes(node), b.shape(node.input[0])
    mode, where = at.get("mode", "nearest"), at.get("coordinate_transformation_mode", "half_pixel")
    scales_at, sizes_at = {"Upsample": (1, 9)}.get(node.op_type, (2, 3) if b.opset >= 11 else (1, 9))
    axes = at.get("axes", list(range(len(shape))))
    sizes: list[int] | None = None
    if b.has(node, sizes_at):
        got = b.sizes(node, sizes_at)(b.values[0][node.input[0]])
        sizes = list(shape)
        for axis, size in zip(axes, got, strict=True):
            sizes[axis] = size
        scales = [new / old for new, old in zip(sizes, shape, strict=True)]
    else:
        given = at["scales"] if "scales" in at else b.needed(node, scales_at, "scales").reshape(-1).tolist()
        scales = [1.0] * len(shape)
        for axis, scale in zip(axes, given, strict=True):
            scales[axis] = float(scale)
    if scales[:2] != [1.0, 1.0] or len(shape) != 4:
        raise b.refuse(node, "only height and width of (N, C, H, W) can be resized")
    if node.op_type == "Upsample" or b.opset < 11:
        where = "asymmetric"
    how: dict[str, Any]
    if mode == "nearest" and where == "asymmetric" and at.get("nearest_mode", "floor") == "floor":
        how = {"mode": "nearest"}
    elif mode == "nearest" and all(scale == int(scale) for scale in scales):
        how = {"mode": "nearest"}  # whole factors: every pixel is repeated, wherever its middle lies
    elif mode in ("linear", "cubic") and where in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        if mode == "cubic" and abs(at.get("cubic_coeff_a", -0.75) + 0.75) > 1e-6:
            raise b.refuse(node, "cubic_coeff_a other than -0.75 is not supported")
        how = {"mode": {"linear": "bilinear", "cubic": "bicubic"}[mode], "align_corners": where == "align_corners"}
    else:
        raise b.refuse(node, f"mode {mode} with coordinates {where} is not supported")
    if sizes is not None:
        b.function(node, lambda x: F.interpolate(x, size=sizes[2:], **how), node.input[:1])
    else:
        b.function(node, lambda x: F.interpolate(x, scale_factor=scales[2:], **how), node.input[:1])


def depth_to_space(b: NetworkBuilder, node: Any) -> None:
    at = b.attributes(node)
    side = at["blocksize"]
    if at.get("mode", "DCR") == "CRD":
        b.layer(node, nn.PixelShuffle(side), weight=None)
        return

    def run(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        made = x.reshape(n, side, side, c // side**2, h, w).permute(0, 3, 4, 1, 5, 2)
        return made.reshape(n, c // side**2, h * side, w * side)

    b.function(node, run)


def cast(b: NetworkBuilder, node: Any) -> None:
    kind = b.onnx.helper.tensor_dtype_to_np_dtype(b.attributes(node)["to"])
    target = torch.from_numpy(np.zeros(0, kind)).dtype
    b.function(node, lambda x: x.to(target))


def leaky(at: dict[str, Any]) -> nn.Module:
    return nn.LeakyReLU(at.get("alpha", 0.01))


def mean_of(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return x.mean(axes, keep)


def sum_of(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return x.sum(axes, keep)


def max_of(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return x.amax(axes, keep)


OPERATORS: dict[str, Operator] = {
    "Abs": function(torch.abs),
    "Add": function(torch.add),
    "AveragePool": average_pool,
    "BatchNormalization": batch_norm,
    "Cast": cast,
    "Clip": clip,
    "Concat": concat,
    "ConstantOfShape": function(torch.zeros),
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "DepthToSpace": depth_to_space,
    "Div": function(torch.div),
    "Dropout": dropout,
    "Elu": plain(lambda at: nn.ELU(at.get("alpha", 1.0))),
    "Equal": function(torch.eq),
    "Erf": function(torch.erf),
    "Exp": function(torch.exp),
    "Expand": expand,
    "Flatten": flatten,
    "Gather": gather,
    "Gelu": plain(lambda at: nn.GELU(at.get("approximate", "none"))),
    "Gemm": gemm,
    "GlobalAveragePool": global_pool,
    "GlobalMaxPool": global_pool,
    "GroupNormalization": group_norm,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": plain(lambda at: nn.Hardswish()),
    "Identity": function(lambda x: x),
    "InstanceNormalization": instance_norm,
    "LayerNormalization": layer_norm,
    "LeakyRelu": plain(leaky),
    "Log": function(torch.log),
    "MatMul": matmul,
    "MaxPool": max_pool,
    "Mul": function(torch.mul),
    "Neg": function(torch.neg),
    "Not": function(torch.logical_not),
    "PRelu": prelu,
    "Pad": pad,
    "Pow": function(torch.pow),
    "Range": function(torch.arange),
    "Reciprocal": function(torch.reciprocal),
    "ReduceMax": reduce(max_of, 18),
    "ReduceMean": reduce(mean_of, 18),
    "ReduceSum": reduce(sum_of, 13),
    "Relu": plain(lambda at: nn.ReLU()),
    "Reshape": reshape,
    "Resize": resize,
    "Sigmoid": plain(lambda at: nn.Sigmoid()),
    "Slice": slice_,
    "Softmax": softmax,
    "Softplus": plain(lambda at: nn.Softplus()),
    "Split": split,
    "Sqrt": function(torch.sqrt),
    "Squeeze": squeeze,
    "Sub": function(torch.sub),
    "Tanh": plain(lambda at: nn.Tanh()),
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
    "Upsample": resize,
    "Where": function(torch.where),
}
