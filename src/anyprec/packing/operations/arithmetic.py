"""Arithmetic: torch's element-wise operations as steps. What the file has no function for is made of those it has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyprec.packing.operations.build import affine, binary, clip, pointwise, scaled
from anyprec.packing.operations.call import OperationCall
from anyprec.packing.steps import Refused
from anyprec.packing.views import View

POINTWISE = {
    name: name for name in ("abs", "sqrt", "reciprocal", "exp", "log", "sigmoid", "tanh", "erf", "silu", "mish")
}  # fmt: skip


def function(call: OperationCall) -> View:
    return pointwise(call.recorder, POINTWISE[call.name], call.view())


def gelu(call: OperationCall) -> View:
    return pointwise(call.recorder, "gelu" if call["approximate"] == "none" else "gelu_tanh", call.view())


def number_of(item: Any) -> float | None:
    """A plain number, or None for a tensor of several."""
    if isinstance(item, Tensor):
        return float(item) if item.numel() == 1 else None
    return float(item)


# --- Two operands -----------------------------------------------------------------------------------------


def add(call: OperationCall) -> View:
    """add, sub and rsub: of two values, or of a value and a constant."""
    x, y = call.operand("self"), call.operand("other")
    alpha = call.given.get("alpha", 1)
    factors = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[call.name]
    r = call.recorder
    if not isinstance(y, View):
        return affine(r, x, factors[0], factors[1] * torch.as_tensor(y).double())
    if not isinstance(x, View):
        return affine(r, y, factors[1], factors[0] * torch.as_tensor(x).double())
    if factors == (1.0, -1) and x.shape != y.shape:
        return binary(r, "sub", x, y)
    return binary(r, "add", scaled(r, x, factors[0]), scaled(r, y, factors[1]))


def multiply(call: OperationCall) -> View:
    """mul and div of two values, or of a value and a constant."""
    x, y = call.operand("self"), call.operand("other")
    r = call.recorder
    if call.given.get("rounding_mode"):
        raise Refused("a division that rounds has no operation")
    if isinstance(x, View) and isinstance(y, View):
        return binary(r, call.name, x, y)
    if isinstance(x, View):
        numbers = torch.as_tensor(y).double()
        return affine(r, x, 1 / numbers if call.name == "div" else numbers, 0.0)
    if call.name == "mul":
        return affine(r, y, torch.as_tensor(x).double(), 0.0)
    inverse = pointwise(r, "reciprocal", y)
    return inverse if number_of(x) == 1 else affine(r, inverse, torch.as_tensor(x).double(), 0.0)


def extreme(call: OperationCall) -> View:
    """maximum and minimum."""
    return binary(call.recorder, call.name[:3], call.operand("self"), call.operand("other"))


def negative(call: OperationCall) -> View:
    return scaled(call.recorder, call.view(), -1.0)


def add_product(call: OperationCall) -> View:
    """addcmul and addcdiv: x + value a b, x + value a / b."""
    r, x, a, b = call.recorder, call.operand("self"), call.operand("tensor1"), call.operand("tensor2")
    what = "mul" if call.name == "addcmul" else "div"
    if isinstance(a, View) or isinstance(b, View):
        made: View | Tensor = binary(r, what, a, b)
        made = scaled(r, made, float(call["value"])) if isinstance(made, View) else made
    else:
        made = call["value"] * (a * b if what == "mul" else a / b)
    return binary(r, "add", x, made)


def where(call: OperationCall) -> View:
    """x m + y (1 - m) for a constant mask m."""
    mask = call.constant("condition")
    assert mask is not None
    return mixed(call, mask, call.operand("self"), call.operand("other"))


def mixed(call: OperationCall, mask: Tensor, x: View | Any, y: View | Any) -> View:
    r, keep = call.recorder, mask.double()
    sides: list[View | Tensor] = []
    for side, part in ((x, keep), (y, 1 - keep)):
        if isinstance(side, View):
            sides.append(side if r.shortcut(bool((part == 1).all())) else binary(r, "mul", side, part))
        else:
            numbers = torch.as_tensor(side).double().nan_to_num(posinf=3e38, neginf=-3e38)
            sides.append(torch.where(part.bool(), numbers, 0.0))
    return binary(r, "add", *sides)


def masked_fill(call: OperationCall) -> View:
    mask = call.constant("mask")
    assert mask is not None
    return mixed(call, mask, call.operand("value"), call.operand("self"))


# --- Activations ------------------------------------------------------------------------------------------


def clamp(call: OperationCall) -> View:
    """relu, clamp and hardtanh (ReLU6 is one)."""
    names = {"clamp": ("min", "max"), "clamp_min": ("min", None), "clamp_max": (None, "max"),
             "hardtanh": ("min_val", "max_val")}  # fmt: skip
    low: Any = 0.0
    high: Any = None
    r, x = call.recorder, call.view()
    if call.name == "relu6":
        high = 6.0
    elif call.name != "relu":
        low, high = (None if name is None else call[name] for name in names[call.name])
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        for bound, name in ((low, "max"), (high, "min")):
            if bound is not None:
                x = binary(r, name, x, bound if r.is_constant(bound) else r.view_of(bound))
        return x
    return clip(r, x, low, high)


def hard(call: OperationCall) -> View:
    """hardsigmoid and hardswish."""
    r, x = call.recorder, call.view()
    gate = clip(r, scaled(r, x, 1 / 6, 0.5), 0.0, 1.0)
    return gate if call.name == "hardsigmoid" else binary(r, "mul", x, gate)


def leaky(call: OperationCall) -> View:
    """max(x, a x) where a is at most 1."""
    r, x, slope = call.recorder, call.view(), float(call["negative_slope"])
    return binary(r, "max" if slope <= 1 else "min", x, scaled(r, x, slope))


def prelu(call: OperationCall) -> View:
    """relu(x) + w min(x, 0); one comparison where no slope is above 1."""
    r, x, weight = call.recorder, call.view(), call.constant("weight")
    assert weight is not None
    if weight.dim() == 1 and len(x.dims) > 1:
        weight = weight.reshape(-1, *(1,) * (len(x.dims) - 2))
    if r.shortcut(bool((weight <= 1).all())):
        return binary(r, "max", x, affine(r, x, weight, 0.0))
    return binary(r, "add", clip(r, x, 0.0, None), affine(r, clip(r, x, None, 0.0), weight, 0.0))


def elu(call: OperationCall) -> View:
    """scale (max(x, 0) + alpha (exp(input_scale min(x, 0)) - 1)); SELU and CELU are ones."""
    r, x = call.recorder, call.view()
    alpha, scale = float(call["alpha"]), float(call.given.get("scale", 1))
    inner = 1 / alpha if call.name == "celu" else float(call["input_scale"])
    bent = pointwise(r, "exp", scaled(r, clip(r, x, None, 0.0), inner))
    return binary(r, "add", scaled(r, clip(r, x, 0.0, None), scale), scaled(r, bent, alpha * scale, -alpha * scale))


def softplus(call: OperationCall) -> View:
    """max(x, 0) + log(1 + exp(-|x|)), of beta x. torch gives x itself above a threshold, where it is no different."""
    r, beta, threshold = call.recorder, float(call.given.get("beta", 1)), float(call.given.get("threshold", 20))
    if threshold < 15:
        raise Refused(f"a threshold of {threshold:g} makes a step; from 15 on it has an operation")
    x = scaled(r, call.view(), beta)
    return scaled(r, binary(r, "add", clip(r, x, 0.0, None), log_one_more(call, x)), 1 / beta)


def log_one_more(call: OperationCall, x: View) -> View:
    r = call.recorder
    small = pointwise(r, "exp", scaled(r, pointwise(r, "abs", x), -1.0))
    return pointwise(r, "log", scaled(r, small, 1.0, 1.0))


def log_sigmoid(call: OperationCall) -> View:
    r, x = call.recorder, call.view()
    return binary(r, "sub", clip(r, x, None, 0.0), log_one_more(call, x))


def power(call: OperationCall) -> View:
    """By a constant: whole numbers by products, halves by a root."""
    exponent = number_of(call.given.get("exponent", 2))
    if call.recorder.is_constant(call["self"]) or exponent is None:
        raise Refused("only powers by a constant number have an operation")
    return raised(call, call.view(), exponent)


def raised(call: OperationCall, x: View, exponent: float) -> View:
    r = call.recorder
    if exponent < 0:
        return pointwise(r, "reciprocal", raised(call, x, -exponent))
    whole, rest = math.floor(exponent), exponent - math.floor(exponent)
    if rest not in (0, 0.5) or whole > 8 or exponent == 0:
        raise Refused(f"x ** {exponent:g} has no operation; whole numbers up to 8 and their halves have one")
    made = pointwise(r, "sqrt", x) if rest else None
    for _ in range(whole):
        made = x if made is None else binary(r, "mul", made, x)
    assert made is not None
    return made


def shifted(call: OperationCall) -> View:
    """expm1, log1p and exp2."""
    r, x = call.recorder, call.view()
    if call.name == "expm1":
        return scaled(r, pointwise(r, "exp", x), 1.0, -1.0)
    if call.name == "exp2":
        return pointwise(r, "exp", scaled(r, x, math.log(2)))
    return pointwise(r, "log", scaled(r, x, 1.0, 1.0))


def root(call: OperationCall) -> View:
    return pointwise(call.recorder, "reciprocal", pointwise(call.recorder, "sqrt", call.view()))


ARITHMETIC: dict[str, Callable[[OperationCall], View]] = {
    **dict.fromkeys(POINTWISE, function),
    "gelu": gelu,
    "add": add,
    "sub": add,
    "rsub": add,
    "mul": multiply,
    "div": multiply,
    "true_divide": multiply,
    "maximum": extreme,
    "minimum": extreme,
    "neg": negative,
    "addcmul": add_product,
    "addcdiv": add_product,
    "where": where,
    "masked_fill": masked_fill,
    "relu": clamp,
    "relu6": clamp,
    "clamp": clamp,
    "clamp_min": clamp,
    "clamp_max": clamp,
    "hardtanh": clamp,
    "hardsigmoid": hard,
    "hardswish": hard,
    "leaky_relu": leaky,
    "_prelu_kernel": prelu,
    "elu": elu,
    "celu": elu,
    "softplus": softplus,
    "log_sigmoid_forward": log_sigmoid,
    "pow": power,
    "square": power,
    "rsqrt": root,
    "expm1": shifted,
    "log1p": shifted,
    "exp2": shifted,
}
