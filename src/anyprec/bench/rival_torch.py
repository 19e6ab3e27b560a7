"""ONNX nodes of a float twin (twin.py) as torch functions: what rivals.open_torch runs one after the other.

Knows the nodes that twin.py writes, no others. `torch` is passed in: nothing outside training imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Step = tuple[str, list[str], Callable[..., Any]]  # target, inputs, function


def functions(torch: Any, nodes: Iterable[Any], constants: dict[str, Any]) -> list[Step]:
    steps = []
    for node in nodes:
        attributes = {a.name: list(a.ints) if a.ints else a.s.decode() if a.s else a.i for a in node.attribute}
        inputs = [name for name in node.input if name]
        if node.op_type in FIXED:  # the last input is a constant that torch wants as numbers
            attributes["fixed"] = constants[inputs.pop()].tolist()
        steps.append((node.output[0], inputs, MAKE[node.op_type](torch.nn.functional, torch, attributes)))
    return steps


def symmetric_pads(pads: list[int]) -> list[int]:
    """ONNX pads [top, left, bottom, right] -> [h, w]."""
    assert pads[:2] == pads[2:], f"uneven padding {pads} is not run by this PyTorch rival"
    return pads[:2]


def conv(F: Any, torch: Any, at: dict[str, Any]) -> Callable[..., Any]:
    stride, dilation, groups = at["strides"], at["dilations"], at["group"]
    top, left, bottom, right = at["pads"]
    if (top, left) == (bottom, right):
        return lambda x, w, b: F.conv2d(x, w, b, stride, (top, left), dilation, groups)
    return lambda x, w, b: F.conv2d(F.pad(x, (left, right, top, bottom)), w, b, stride, 0, dilation, groups)


def max_pool(F: Any, torch: Any, at: dict[str, Any]) -> Callable[..., Any]:
    pad, ceil = symmetric_pads(at["pads"]), bool(at["ceil_mode"])
    return lambda x: F.max_pool2d(x, at["kernel_shape"], at["strides"], pad, at["dilations"], ceil)


def avg_pool(F: Any, torch: Any, at: dict[str, Any]) -> Callable[..., Any]:
    pad, ceil, count_pad = symmetric_pads(at["pads"]), bool(at["ceil_mode"]), bool(at["count_include_pad"])
    return lambda x: F.avg_pool2d(x, at["kernel_shape"], at["strides"], pad, ceil, count_pad)


def resize(F: Any, torch: Any, at: dict[str, Any]) -> Callable[..., Any]:
    size = at["fixed"]
    if at["mode"] == "nearest":
        return lambda x: F.interpolate(x, size=size)
    align = at["coordinate_transformation_mode"] == "align_corners"
    return lambda x: F.interpolate(x, size=size, mode="bilinear", align_corners=align)


def pad(F: Any, torch: Any, at: dict[str, Any]) -> Callable[..., Any]:
    _, c0, h0, w0, _, c1, h1, w1 = at["fixed"]
    return lambda x: F.pad(x, (w0, w1, h0, h1, c0, c1))


FIXED = {"Resize", "Pad", "Reshape"}
MAKE: dict[str, Callable[[Any, Any, dict[str, Any]], Callable[..., Any]]] = {
    "Conv": conv,
    "Gemm": lambda F, torch, at: F.linear,
    "BatchNormalization": lambda F, torch, at: lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False, 0.0, 0.0),
    "Relu": lambda F, torch, at: F.relu,
    "Clip": lambda F, torch, at: torch.clamp,
    "Add": lambda F, torch, at: torch.add,
    "Mul": lambda F, torch, at: torch.mul,
    "MatMul": lambda F, torch, at: torch.matmul,
    "Concat": lambda F, torch, at: lambda *x: torch.cat(x, 1),
    "MaxPool": max_pool,
    "AveragePool": avg_pool,
    "GlobalAveragePool": lambda F, torch, at: lambda x: x.mean((2, 3), keepdim=True),
    "Softmax": lambda F, torch, at: lambda x: F.softmax(x, 1),
    "Flatten": lambda F, torch, at: lambda x: torch.flatten(x, 1),
    "Reshape": lambda F, torch, at: lambda x: torch.reshape(x, at["fixed"]),
    "Resize": resize,
    "Pad": pad,
    "Identity": lambda F, torch, at: lambda x: x,
}
