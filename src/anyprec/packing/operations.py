"""Operations: one call of an aten operation in, the Step it is in the model file out, or Refused. Called by trace.py.

torch breaks every spelling (module, function, method, operator) down to the few aten operations listed in OPERATIONS.
Layout: the file's values are (N, H, W, C); a torch tensor's place is told by its rank, see steps.Size. To support an
operation, add it to FORMAT.md section 3, ARITHMETIC.md, the engine and the oracle first; here it is one function and
one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyprec.packing.steps import Refused, size_of

if TYPE_CHECKING:
    from anyprec.packing.trace import Recorder

SUPPORTED = (
    "convolution, linear, batch norm, ReLU, ReLU6, clip, add, concatenate, scaling per channel, max, average and "
    "global pooling, flatten, bilinear and nearest resize, softmax over channels, zero padding, every n-th pixel"
)


def operation_name(func: Any) -> str:
    """aten.relu_.default -> 'relu'."""
    return str(func._schema.name).split("::")[-1].rstrip("_")


class OperationCall:
    """One call: its arguments by the names of its schema, `out` the tensor it made."""

    def __init__(self, recorder: Recorder, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        self.recorder, self.out = recorder, out
        self.name = operation_name(func)
        arguments = func._schema.arguments
        self.first: str = arguments[0].name
        self.given: dict[str, Any] = {a.name: a.default_value for a in arguments if a.has_default_value()}
        self.given.update({a.name: value for a, value in zip(arguments, args, strict=False)})
        self.given.update(kwargs)

    def __getitem__(self, argument: str) -> Any:
        return self.given[argument]

    @property
    def x(self) -> Tensor:
        """The first argument, whatever its schema calls it."""
        first: Tensor = self.given[self.first]
        return first

    def constant(self, argument: str) -> Tensor | None:
        item = self.given.get(argument)
        if not self.recorder.is_constant(item):
            raise Refused(f"its {argument} is computed from the input; only constant ones have an operation")
        return item

    def step(self, kind: str, *inputs: Any, constants: dict[str, Tensor] | None = None, **attributes: Any) -> str:
        names = tuple(i if isinstance(i, str) else self.recorder.name_of(i) for i in inputs)
        return self.recorder.add(kind, names, self.out, attributes=attributes, constants=constants or {})


def record(recorder: Recorder, func: Any, args: Any, kwargs: Any, out: Tensor) -> str:
    call = OperationCall(recorder, func, args, kwargs, out)
    if call.name not in OPERATIONS:
        raise Refused(f"the model file has no such operation; it has {SUPPORTED}")
    return OPERATIONS[call.name](call)


def pair(numbers: list[int], missing: int) -> list[int]:
    """[h, w] of a convolution's setting; a 1-d one runs along W."""
    numbers = [int(n) for n in numbers]
    return [missing, *numbers] if len(numbers) == 1 else numbers


def window(call: OperationCall) -> dict[str, Any]:
    """Kernel, stride and padding of a 2-d pool; torch breaks 1-d ones down to it. One number serves both ways."""

    def both(setting: Any) -> list[int]:
        numbers = [int(n) for n in (setting if isinstance(setting, (list, tuple)) else [setting])]
        return numbers * 2 if len(numbers) == 1 else numbers

    kernel, pads = both(call["kernel_size"]), both(call["padding"])
    return {"kernel": kernel, "stride": both(call["stride"]) if call["stride"] else kernel, "pad": pads * 2}


# --- Layers and norms -------------------------------------------------------------------------------------


def convolution(call: OperationCall) -> str:
    weight, bias = call.constant("weight"), call.constant("bias")
    if call["transposed"]:
        raise Refused("transposed convolutions have no operation; resize and convolve instead")
    if weight is None or weight.dim() not in (3, 4):
        raise Refused(f"only 1-d and 2-d convolutions have an operation; it has {SUPPORTED}")
    weight = weight if weight.dim() == 4 else weight.unsqueeze(2)  # (out, in / groups, kh, kw)
    down, right = pair(call["padding"], 0)
    return call.step(
        "conv",
        call["input"],
        constants={"weight": weight} if bias is None else {"weight": weight, "bias": bias},
        kernel=list(weight.shape[2:]),
        stride=pair(call["stride"], 1),
        pad=[down, right, down, right],
        dilation=pair(call["dilation"], 1),
        groups=int(call["groups"]),
    )


def matrix_product(call: OperationCall) -> str:
    """mm(x, w) and addmm(bias, x, w), w being (in, out): what F.linear becomes on (N, C)."""
    x, name = (call["mat1"], "mat2") if call.name == "addmm" else (call["self"], "mat2")
    weight = call.constant(name)
    assert weight is not None
    constants = {"weight": weight.t()[:, :, None, None]}  # (out, in, 1, 1)
    if call.name == "addmm":
        bias = call.constant("self")
        if call["alpha"] != 1 or call["beta"] != 1 or bias is None or bias.dim() != 1:
            raise Refused("only x @ w + bias, with one bias a channel, has an operation")
        constants["bias"] = bias
    return call.step("linear", x, constants=constants)


def batch_norm(call: OperationCall) -> str:
    mean, variance = call.constant("running_mean"), call.constant("running_var")
    if mean is None or variance is None or call.given.get("training"):
        raise Refused("a batch norm without running statistics takes them from the batch; track them, and train again")
    gamma, beta = call.constant("weight"), call.constant("bias")
    eps = float(call["eps" if "eps" in call.given else "epsilon"])
    scale = (variance.double() + eps).rsqrt() * (1 if gamma is None else gamma.double())
    return affine(call, call["input"], scale, (0 if beta is None else beta.double()) - mean.double() * scale)


# --- Arithmetic -------------------------------------------------------------------------------------------


def affine(call: OperationCall, x: Tensor, scale: Tensor | float, shift: Tensor | float) -> str:
    constants = {
        key: torch.as_tensor(value, dtype=torch.float64).expand(size_of(x)[0]) for key, value in
        (("scale", scale), ("shift", shift))
    }  # fmt: skip
    return call.step("affine", x, constants=constants)


def per_channel(call: OperationCall, x: Tensor, constant: Any) -> Tensor:
    """A number, or a tensor that differs from channel to channel only, as (C,) or () float64."""
    value = torch.as_tensor(constant).double().to(x.device)
    if value.numel() == 1:
        return value.reshape(())
    shape = (*(1,) * (x.dim() - value.dim()), *value.shape)
    if len(shape) != x.dim() or any(n != 1 for i, n in enumerate(shape) if i != 1) or call.out.shape != x.shape:
        raise Refused(f"a constant of shape {tuple(value.shape)} is not one number a channel")
    return value.reshape(-1)


def add(call: OperationCall) -> str:
    """add, sub and rsub: of two values, or of a value and a constant."""
    x, y = call["self"], call["other"]
    factors = {"add": (1.0, call["alpha"]), "sub": (1.0, -call["alpha"]), "rsub": (-call["alpha"], 1.0)}[call.name]
    constant = call.recorder.is_constant
    if constant(y):
        return affine(call, x, factors[0], factors[1] * per_channel(call, x, y))
    if constant(x):
        return affine(call, y, factors[1], factors[0] * per_channel(call, y, x))
    if x.shape != y.shape:
        raise Refused(f"it adds values of shapes {tuple(x.shape)} and {tuple(y.shape)}; only equal ones can be added")
    signed = [
        call.recorder.name_of(value) if factor == 1 else affine(call, value, factor, 0.0)
        for value, factor in zip((x, y), factors, strict=True)
    ]
    return call.step("add", *signed)


def multiply(call: OperationCall) -> str:
    """mul and div by a constant."""
    x, y = call["self"], call["other"]
    if call.recorder.is_constant(x) and call.name == "mul":
        x, y = y, x
    if not call.recorder.is_constant(y) or call.recorder.is_constant(x) or call.given.get("rounding_mode"):
        raise Refused("the model file multiplies and divides values by constants only, one a channel")
    factor = per_channel(call, x, y)
    return affine(call, x, 1 / factor if call.name == "div" else factor, 0.0)


def negative(call: OperationCall) -> str:
    return affine(call, call.x, -1.0, 0.0)


def clip(call: OperationCall) -> str:
    """relu, clamp and hardtanh (ReLU6 is one)."""
    names = {"clamp": ("min", "max"), "clamp_min": ("min", None), "clamp_max": (None, "max"),
             "hardtanh": ("min_val", "max_val")}  # fmt: skip
    low: Any = 0.0
    high: Any = None
    if call.name != "relu":
        low, high = (None if name is None else call[name] for name in names[call.name])
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise Refused("its bounds are tensors; plain numbers have an operation")
    bounds = torch.tensor([-math.inf if low is None else low, math.inf if high is None else high], dtype=torch.float64)
    return call.step("clip", call.x, constants={"bounds": bounds})


def concatenate(call: OperationCall) -> str:
    tensors, dim = call["tensors"], call["dim"]
    if dim % call.out.dim() != 1:
        raise Refused(f"it concatenates along dimension {dim}; only channels (dimension 1) have an operation")
    return call.step("concat", *tensors)


def softmax(call: OperationCall) -> str:
    if call["dim"] % call.x.dim() != 1:
        raise Refused(f"it runs along dimension {call['dim']}; only channels (dimension 1) have an operation")
    return call.step("softmax", call.x)


# --- Pooling, sizes and places ----------------------------------------------------------------------------


def max_pool(call: OperationCall) -> str:
    dilation = call["dilation"] if isinstance(call["dilation"], list) else [call["dilation"]]
    dilation = [int(n) for n in dilation] * (2 if len(dilation) == 1 else 1)
    return call.step("max_pool", call.x, **window(call), dilation=dilation, ceil=bool(call["ceil_mode"]))


def average_pool(call: OperationCall) -> str:
    if call.given.get("divisor_override"):
        raise Refused("a divisor of its own has no operation; multiply afterwards")
    places = window(call)
    if places["pad"] == [0, 0, 0, 0] and tuple(places["kernel"]) == size_of(call.x)[1:]:
        return call.step("adaptive_avg_pool", call.x, size=[1, 1])  # the whole map, whatever its size
    counted = bool(call["count_include_pad"])
    return call.step("avg_pool", call.x, **places, ceil=bool(call["ceil_mode"]), count_pad=counted)


def adaptive_pool(call: OperationCall) -> str:
    return call.step("adaptive_avg_pool", call.x, size=[int(n) for n in call["output_size"]])


def mean(call: OperationCall) -> str:
    """Over H and W (L of a 1-d network): the global average pool."""
    x = call.x
    over = sorted(d % x.dim() for d in call.given.get("dim") or range(x.dim()))
    places = [d for d in range(2, x.dim()) if x.shape[d] > 1]
    if x.dim() < 3 or not set(places) <= set(over) <= set(range(2, x.dim())):
        raise Refused(
            f"it averages over dimensions {over} of {x.dim()}; only all of H and W together have an operation"
        )
    return call.step("adaptive_avg_pool", x, size=[1, 1])


def reshape(call: OperationCall) -> str:
    """view, unsqueeze, squeeze, flatten: no change of place, or all of C, H, W in a row."""
    x, out = call.x, call.out
    refused = Refused(
        f"it makes {tuple(out.shape)} of {tuple(x.shape)}; only flattening to (N, -1) and moving between (N, C), "
        "(N, C, L) and (N, C, 1, 1) have an operation"
    )
    if x.shape[0] != out.shape[0] or not 2 <= out.dim() <= 4:
        raise refused
    if size_of(x) == size_of(out):
        return call.recorder.name_of(x)
    if size_of(out) != (math.prod(size_of(x)), 1, 1):
        raise refused
    return call.step("flatten", x)


def same(call: OperationCall) -> str:
    if call.out.shape != call.x.shape or not call.out.is_floating_point():
        raise Refused("it repeats values or turns them into another type, which has no operation")
    return call.recorder.name_of(call.x)


def resize(call: OperationCall) -> str:
    scales = [float(n) for n in (call.given.get("scales_h"), call.given.get("scales_w")) if n is not None]
    given = len(scales) == 2
    return call.step(
        "resize",
        call.x,
        mode="nearest" if "nearest" in call.name else "bilinear",
        align=bool(call.given.get("align_corners", False)),
        size=None if given else [int(n) for n in call.out.shape[2:]],
        scale=scales if given else None,
        like=None,
    )


def pad(call: OperationCall) -> str:
    amounts = [int(n) for n in call["pad"]]
    if not any(amounts):
        return call.recorder.name_of(call.x)
    if call.given.get("value") or any(n < 0 for n in amounts) or len(amounts) > 2 * (call.x.dim() - 1):
        raise Refused("only padding with zeros has an operation, and cropping (a negative pad) has none")
    ends = [amounts[i : i + 2] for i in range(0, len(amounts), 2)]  # last dimension first
    ends += [[0, 0]] * (call.x.dim() - 1 - len(ends))
    *places, channels = ends
    width, height = [*places, [0, 0], [0, 0]][:2]
    return call.step("pad", call.x, h=height, w=width, c=channels)


def slice_(call: OperationCall) -> str:
    """x[:, :, ::2]: a max pool of one tap; a slice that takes all is nothing."""
    x, dim, step = call.x, call["dim"] % call.x.dim(), call["step"]
    if call.out.shape == x.shape:
        return call.recorder.name_of(x)
    start = call["start"] or 0
    length = x.shape[dim]
    if start != 0 or dim < 2 or call.out.shape[dim] != -(-length // step):
        raise Refused("it cuts out a part; only every n-th row or column, from the first to the last, has an operation")
    stride = [step, 1] if dim == 2 and x.dim() == 4 else [1, step]
    source, name = call.recorder.name_of(x), None
    before = call.recorder.steps.get(source)
    if before is not None and before.kind == "max_pool" and before.attributes["kernel"] == [1, 1]:
        # x[:, :, ::2, ::2] comes as two slices; a step that nothing reads disappears later.
        name = before.inputs[0]
        stride = [a * b for a, b in zip(stride, before.attributes["stride"], strict=True)]
    return call.step(
        "max_pool", name or source, kernel=[1, 1], stride=stride, pad=[0, 0, 0, 0], dilation=[1, 1], ceil=False
    )


OPERATIONS: dict[str, Callable[[OperationCall], str]] = {
    "convolution": convolution,
    "mm": matrix_product,
    "addmm": matrix_product,
    "native_batch_norm": batch_norm,
    "_native_batch_norm_legit_no_training": batch_norm,
    "cudnn_batch_norm": batch_norm,
    "add": add,
    "sub": add,
    "rsub": add,
    "mul": multiply,
    "div": multiply,
    "neg": negative,
    "relu": clip,
    "clamp": clip,
    "clamp_min": clip,
    "clamp_max": clip,
    "hardtanh": clip,
    "cat": concatenate,
    "_softmax": softmax,
    "max_pool2d_with_indices": max_pool,
    "avg_pool2d": average_pool,
    "_adaptive_avg_pool2d": adaptive_pool,
    "mean": mean,
    "view": reshape,
    "_unsafe_view": reshape,
    "unsqueeze": reshape,
    "squeeze": reshape,
    "expand": same,
    "clone": same,
    "detach": same,
    "alias": same,
    "lift_fresh": same,
    "_to_copy": same,
    "upsample_bilinear2d": resize,
    "upsample_nearest2d": resize,
    "constant_pad_nd": pad,
    "slice": slice_,
}
