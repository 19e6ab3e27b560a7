"""Layers with a forward of their own: it runs as it is, and the one call in it that uses the weight is quantized.

    forward(x):  y = pad(x)                                 as it is
                 w = standardize(self.weight)               as it is: the weight is computed, then quantized
                 F.conv2d(y, w, bias, stride)   ->   F.conv2d(act(y), quantize(w), bias, stride)

`WeightCalls` sees every torch function that the forward calls and knows which tensors come from the weight. `probe`
(candidates.py) finds out on the example whether there is exactly one such call; convert.py then gives the module a
class of `own_forward_class`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anyprec.errors import AnyprecError
from anyprec.nn.layers import ANY_LAYERS, AnyLayer
from anyprec.nn.operations import tensors_in
from anyprec.widths import FLOAT

# A function that multiplies by a weight -> where its input and weight are, and the layer it makes of a module.
_Place = tuple[tuple[int, str], tuple[int, str], type[nn.Module]]
_BOTH = ((0, "input"), (1, "weight"))
_MATMUL: _Place = ((0, "input"), (1, "other"), nn.Linear)
PLACES: dict[Any, _Place] = {
    F.linear: (*_BOTH, nn.Linear),
    torch.addmm: ((1, "mat1"), (2, "mat2"), nn.Linear),
    torch.mm: ((0, "input"), (1, "mat2"), nn.Linear),
    torch.matmul: _MATMUL,
    Tensor.addmm: ((1, "mat1"), (2, "mat2"), nn.Linear),
    Tensor.mm: ((0, "self"), (1, "mat2"), nn.Linear),
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    F.conv1d: (*_BOTH, nn.Conv1d),
    F.conv2d: (*_BOTH, nn.Conv2d),
    F.conv3d: (*_BOTH, nn.Conv3d),
    F.conv_transpose1d: (*_BOTH, nn.ConvTranspose1d),
    F.conv_transpose2d: (*_BOTH, nn.ConvTranspose2d),
    F.conv_transpose3d: (*_BOTH, nn.ConvTranspose3d),
}
CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@dataclass
class WeightUse:
    """What `probe` found in the forward of one module."""

    calls: int = 0
    kind: type[nn.Module] | None = None  # the torch layer that the call is
    plain: bool = True  # the weight is the parameter, and `described`
    described: bool = True  # the call is the one that the module's attributes describe
    in_first: bool = False  # the weight of a linear layer is (in, out)
    shapes: list[Any] = field(default_factory=list)  # arguments of the forward, tensors by (shape, dtype)


class WeightCalls(TorchFunctionMode):
    """Active during one forward of `layer`: `use` makes the result of each call whose weight comes from `weight`."""

    def __init__(self, weight: Tensor, use: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.use = use
        self.made: dict[int, Tensor] = {id(weight): weight}  # held, so that no id is used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = PLACES.get(func)
        if place is not None and id(_argument(args, kwargs, place[1])) in self.made:
            return self.use(func, args, kwargs)
        out = func(*args, **kwargs)
        if any(id(t) in self.made for t in tensors_in((args, kwargs))):
            self.made.update({id(t): t for t in tensors_in(out)})
        return out


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: tuple[int, str]) -> Any:
    number, name = place
    return args[number] if number < len(args) else kwargs.get(name)


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], place: tuple[int, str], value: Any) -> Any:
    number, name = place
    if number < len(args):
        return (*args[:number], value, *args[number + 1 :]), kwargs
    return args, {**kwargs, name: value}


def probe(module: nn.Module, found: WeightUse) -> Callable[..., Any]:
    """The module's forward; when it runs, `found` learns how the weight is used. Nothing is changed."""
    forward = module.forward

    def probed(*args: Any, **kwargs: Any) -> Any:
        weight: Any = module.weight
        calls = 0

        def use(func: Any, call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> Any:
            nonlocal calls
            calls += 1
            found.kind = PLACES[func][2]
            is_plain = _argument(call_args, call_kwargs, PLACES[func][1]) is weight
            found.in_first = is_addmm_with_bias(module, func, call_args, call_kwargs)
            described = found.in_first or is_as_described(module, func, call_args, call_kwargs)
            found.described = found.described and described
            found.plain = found.plain and is_plain and found.described and not found.in_first
            return func(*call_args, **call_kwargs)

        found.shapes = [_shape(args), _shape(kwargs)]
        with WeightCalls(weight, use):
            output = forward(*args, **kwargs)
        found.calls = max(found.calls, calls) if calls else 0
        return output

    return probed


def is_as_described(module: nn.Module, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call is the one that the module's own stride, padding, ... stand for: `pack` reads those."""
    kind = PLACES[func][2]
    if not isinstance(module, kind) or kind not in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return False
    given = {**dict(zip(CONVOLUTION_ARGUMENTS, args, strict=False)), **kwargs}
    if given.get("bias") is not module.bias:
        return False
    if kind is nn.Linear:
        return True
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    places = len(module.kernel_size)
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    for name, default in defaults.items():
        value, own = given.get(name, default), getattr(module, name)
        if name != "groups":
            value, own = (_every(v, places) for v in (value, own))
        if value != own:
            return False
    return module.padding_mode == "zeros"


def is_addmm_with_bias(module: nn.Module, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """bias + x @ weight with the module's own bias and a weight (in, out), as transformers' Conv1D has it."""
    bias = getattr(module, "bias", None)
    plain = func is torch.addmm and not kwargs and len(args) == 3
    return plain and isinstance(bias, Tensor) and args[0] is bias and bias.dim() == 1


def _every(value: Any, places: int) -> Any:
    if isinstance(value, int):
        return (value,) * places
    return value if isinstance(value, str) else tuple(value) * (places if len(value) == 1 else 1)


@dataclass(frozen=True)
class _Stand:
    """Stands for a tensor argument, by what `full_weight` needs of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _shape(item: Any) -> Any:
    if isinstance(item, Tensor):
        return _Stand(tuple(item.shape), item.dtype)
    if isinstance(item, dict):
        return {name: _shape(value) for name, value in item.items()}
    return type(item)(map(_shape, item)) if type(item) in (tuple, list) else item


def _zeros(item: Any, device: torch.device) -> Any:
    if isinstance(item, _Stand):
        return torch.zeros(1, dtype=item.dtype, device=device).expand(item.shape)
    if isinstance(item, dict):
        return {name: _zeros(value, device) for name, value in item.items()}
    return type(item)(_zeros(value, device) for value in item) if type(item) in (tuple, list) else item


class _Captured(Exception):
    """Ends a forward at the call that uses the weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight


class OwnForwardLayer(AnyLayer):
    """Its weight is the parameter, and the call that uses it is the layer's own: `at_bits` is that of the torch layer,
    so what the forward does around it is packed as operations of their own."""

    own: type[nn.Module]  # the class it was

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with WeightCalls(self.weight, self.use_weight):
            return self.own.forward(self, *args, **kwargs)

    def use_weight(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, w, _ = PLACES[func]
        if _argument(args, kwargs, w) is self.weight and is_as_described(self, func, args, kwargs):
            return self.at_bits(_argument(args, kwargs, x))
        return _quantized_call(self, func, args, kwargs)


class ComputedWeightLayer(OwnForwardLayer):
    """Its forward computes the weight (`full_weight` gives it), or its stride, padding, ... are not those of the call
    (`described` is False): those `pack` refuses, as it reads the attributes."""

    knows_weight_before_call = False

    def init_own(self, use: WeightUse) -> None:
        self.shapes, self.described, self.in_first = use.shapes, use.described, use.in_first

    def use_weight(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.at_bits(_argument(args, kwargs, PLACES[func][0]), func, args, kwargs)

    def at_bits(self, x: Tensor, *call: Any) -> Tensor:
        return _quantized_call(self, *call)

    def full_weight(self) -> Tensor:
        """Found by running the forward on zeros, up to the call that uses the weight."""
        args, kwargs = (_zeros(shapes, self.weight.device) for shapes in self.shapes)

        def capture(func: Any, call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> Any:
            raise _Captured(_argument(call_args, call_kwargs, PLACES[func][1]))

        try:
            with WeightCalls(self.weight, capture):
                self.own.forward(self, *args, **kwargs)
        except _Captured as captured:
            return captured.weight
        raise AnyprecError(f"{type(self).__name__} no longer multiplies its input by its weight; convert it anew")

    def codes(self, bits: int = 8) -> Tensor:
        return self.quantizer.codes(self.full_weight(), bits)


def has_plain_weight(layer: AnyLayer) -> bool:
    """Whether the weight that is quantized is the layer's parameter itself, (out, in, ...)."""
    return not isinstance(layer, ComputedWeightLayer) and layer.full_weight() is layer.weight


def _quantized_call(layer: AnyLayer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x, w, _ = PLACES[func]
    weight: Tensor = _argument(args, kwargs, w)
    if layer.weight_bits == FLOAT:
        quantized = layer.quantizer.float_weight(weight)
    else:
        quantized = layer.quantizer.weight(layer.quantizer.normalize(weight), weight, layer.weight_bits)
    args, kwargs = _replaced(args, kwargs, w, quantized)
    args, kwargs = _replaced(args, kwargs, x, layer.quantized_input(_argument(args, kwargs, x)))
    output: Tensor = func(*args, **kwargs)
    return output


_classes: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}


def own_forward_class(own: type[nn.Module], use: WeightUse) -> type[nn.Module]:
    """The class for modules of class `own`; it stays an instance of it."""
    assert use.kind is not None
    key = own, use.plain
    if key not in _classes:
        stands_for = ANY_LAYERS[use.kind]
        first: type[nn.Module] = OwnForwardLayer if use.plain else ComputedWeightLayer
        bases = (first, stands_for, own) if issubclass(own, use.kind) else (first, own, stands_for)
        _classes[key] = type(f"Any{own.__name__}", bases, {"__module__": __name__, "own": own})
    return _classes[key]
