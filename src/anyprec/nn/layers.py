"""Any-layers: one float weight that can act at any width.

`AnyConv1d/2d/3d`, `AnyConvTranspose1d/2d/3d`, `AnyLinear` are subclasses of the torch layers they stand for,
with two quantizers: one for the weight and, unless the network shares one between layers (`act=None`), one
for their own input. So an identity shortcut around them stays unquantized. Built by zoo/ and convert.py;
switched by switching.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from anyprec.errors import AnyprecError
from anyprec.nn import winograd
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.quantizers import ChosenCodes, Nested, WeightQuantizer
from anyprec.widths import DEFAULT_WIDTHS, FLOAT, LayerBits, check_layer_bits, split_bits

WEIGHT_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)  # hooks of torch that set `weight` before each call


class AnyLayer(nn.Module):
    """The part all any-layers share: current bits, the two quantizers, and the weight at the current bits."""

    weight: Tensor
    knows_weight_before_call = True  # False: only a forward of its own makes the weight

    def __init__(
        self,
        *args: Any,
        quantizer: WeightQuantizer | None = None,
        act: ActQuantizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)  # the torch layer's: its class comes next in the order of bases
        self.init_any(quantizer, act)

    def init_any(self, quantizer: WeightQuantizer | None, act: ActQuantizer | None) -> None:
        self.quantizer = quantizer if quantizer is not None else Nested(DEFAULT_WIDTHS)
        self.act = act
        if not self.weight.is_meta:
            self.quantizer.fit(self.full_weight(), [int(k) for k in self.quantizer.scales])
        self.weight_bits, self.act_bits = FLOAT, FLOAT
        # Set while `normalize_weights_once` is active: what does not depend on the width.
        self.normalized: Tensor | None = None
        self.magnitude: Tensor | None = None

    @property
    def bits(self) -> LayerBits:
        return self.weight_bits if self.weight_bits == self.act_bits else (self.weight_bits, self.act_bits)

    @bits.setter
    def bits(self, bits: LayerBits) -> None:
        self.weight_bits, self.act_bits = split_bits(check_layer_bits(bits))

    def full_weight(self) -> Tensor:
        """The float weight that is quantized: the parameter, or what a parametrization, weight_norm, spectral_norm,
        pruning or the layer's own forward makes of the parameters as they are now."""
        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, WEIGHT_HOOKS):
                hook(self, ())
        return self.weight

    def quantized_input(self, x: Tensor) -> Tensor:
        return x if self.act is None else self.act(x, self.act_bits)

    def quantized_weight(self) -> Tensor:
        if self.weight_bits == FLOAT:
            return self.quantizer.float_weight(self.weight, self.normalized, self.magnitude)
        x = self.normalized if self.normalized is not None else self.quantizer.normalize(self.weight)
        return self.quantizer.weight(x, self.weight, self.weight_bits, self.magnitude)

    def quantized_bias(self) -> Tensor | None:
        bias = cast("Tensor | None", self.bias)
        return bias if self.weight_bits == FLOAT else self.quantizer.bias(bias, self.weight_bits)

    def codes(self, bits: int = 8) -> Tensor:
        """The weight's integer codes at `bits`, shaped like the weight."""
        return self.quantizer.codes(self.full_weight(), bits)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Codes that post-training quantization chose come with the checkpoint, and stay with the layer.
        chosen = state_dict.get(prefix + "quantizer.chosen")
        if chosen is not None and not isinstance(self.quantizer, ChosenCodes):
            start = prefix + "quantizer.scales."
            widths = [int(name[len(start) :]) for name in state_dict if name.startswith(start)]
            like = self.weight.new_ones(self.weight.shape[0], *(1,) * (self.weight.dim() - 1))
            room = torch.zeros_like(self.weight, dtype=torch.uint8)
            self.quantizer = ChosenCodes(room, {bits: like.clone() for bits in widths})
            for bits in [k for k in self.quantizer.shifts if f"{prefix}quantizer.shifts.{k}" not in state_dict]:
                del self.quantizer.shifts[bits]  # a width calibrated later
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        return self.at_bits(x)

    def at_bits(self, x: Tensor) -> Tensor:
        """What `forward` computes, at the current bits. `pack` writes this one call as a layer of the file, so that
        whatever a subclass, a hook or a replaced forward does around it is packed as operations of their own."""
        raise AssertionError("a subclass defines the layer")


class AnyConv1d(AnyLayer, nn.Conv1d):
    def at_bits(self, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(self.quantized_input(x), self.quantized_weight(), self.quantized_bias())
        return y


class AnyConv2d(AnyLayer, nn.Conv2d):
    winograd = bf16_gradients = False  # set by `use_winograd`

    def at_bits(self, x: Tensor) -> Tensor:
        x, weight, bias = self.quantized_input(x), self.quantized_weight(), self.quantized_bias()
        if skips_pixels(self):
            return convolve_picked(self, x, weight, bias)
        if self.winograd and self.training and x.dim() == 4 and x.dtype == weight.dtype == torch.float32:
            return winograd.convolve(x, weight, bias, self.bf16_gradients)
        y: Tensor = self._conv_forward(x, weight, bias)
        return y


class StemConv2d(nn.Conv2d):
    """A float convolution of a stem: nn.Conv2d, but its training can go by Winograd."""

    winograd = bf16_gradients = False  # set by `use_winograd`

    def forward(self, x: Tensor) -> Tensor:
        if self.winograd and self.training and x.dim() == 4 and x.dtype == self.weight.dtype == torch.float32:
            return winograd.convolve(x, self.weight, self.bias, self.bf16_gradients)
        return super().forward(x)


def use_winograd(model: nn.Module, gradients: str = "float32") -> int:
    """Training computes the 3 x 3 convolutions for which it pays by Winograd; the number of them.

    gradients: "bf16" rounds the factors of the backward products to bfloat16.
    """
    if gradients == "bf16" and not winograd.has_bf16():
        raise AnyprecError(
            "gradients='bf16' needs a CPU that multiplies bfloat16 (avx512_bf16: AMD from Zen 4 on, Intel's Cooper "
            "Lake and servers from Sapphire Rapids on), and this one does not; set it to 'float32'"
        )
    found = [layer for layer in model.modules() if isinstance(layer, (AnyConv2d, StemConv2d)) and winograd.fits(layer)]
    for layer in found:
        layer.winograd, layer.bf16_gradients = True, gradients == "bf16"
    return len(found)


def skips_pixels(conv: nn.Conv2d) -> bool:
    """Whether it is a strided 1x1 convolution, which reads only some pixels."""
    return conv.kernel_size == (1, 1) and conv.stride != (1, 1) and conv.padding in ((0, 0), "valid")


def convolve_picked(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution that skips pixels, with those it reads picked first. The same sums; but in channels_last with few
    channels (below 8 with AVX2, 16 with AVX-512) the backward pass of the strided convolution writes outside its
    memory, or gives wrong gradients (oneDNN issue 6035, in torch 2.13).
    """
    return F.conv2d(x[..., :: conv.stride[0], :: conv.stride[1]], weight, bias, groups=conv.groups)


class PointwiseConv2d(nn.Conv2d):
    """A float 1x1 convolution that may have a stride: nn.Conv2d, but safe to train."""

    def forward(self, x: Tensor) -> Tensor:
        if skips_pixels(self) and self.weight.requires_grad and torch.is_grad_enabled():
            return convolve_picked(self, x, self.weight, self.bias)
        return super().forward(x)


class AnyConv3d(AnyLayer, nn.Conv3d):
    def at_bits(self, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(self.quantized_input(x), self.quantized_weight(), self.quantized_bias())
        return y


class _Transposed(AnyLayer):
    """What transposed convolutions share; `convolve` is torch's function, `places` the number of its axes."""

    convolve: Callable[..., Tensor]
    places: int

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        return self.at_bits(x, output_size)

    def at_bits(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        assert isinstance(self, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
        stride, padding, kernel, dilation = (
            cast(list[int], n) for n in (self.stride, self.padding, self.kernel_size, self.dilation)
        )
        extra = self._output_padding(x, output_size, stride, padding, kernel, self.places, dilation)
        return self.convolve(
            self.quantized_input(x),
            self.quantized_weight(),
            self.quantized_bias(),
            stride,
            padding,
            extra,
            self.groups,
            dilation,
        )


class AnyConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    convolve, places = staticmethod(F.conv_transpose1d), 1


class AnyConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    convolve, places = staticmethod(F.conv_transpose2d), 2


class AnyConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    convolve, places = staticmethod(F.conv_transpose3d), 3


class AnyLinear(AnyLayer, nn.Linear):
    def at_bits(self, x: Tensor) -> Tensor:
        return F.linear(self.quantized_input(x), self.quantized_weight(), self.quantized_bias())


class AnyActivation(nn.Module):
    """An activation of its own, for networks where several layers read one quantized input (the paper's).

    quantize=False clips but does not round: the last activation of CNN-8.
    """

    def __init__(self, act: ActQuantizer | None = None, quantize: bool = True) -> None:
        super().__init__()
        self.act = act if act is not None else ActQuantizer()
        self.quantize = quantize
        self.act_bits = FLOAT

    def forward(self, x: Tensor) -> Tensor:
        return self.at_bits(x)

    def at_bits(self, x: Tensor) -> Tensor:
        """As that of an any-layer."""
        if self.quantize or self.act_bits == FLOAT:
            y: Tensor = self.act(x, self.act_bits)
            return y
        return x.clamp(0, 1)


class ProductOperand(AnyActivation):
    """One operand of a product of two values (products.py), at the bits of the any-layer defined before it."""


ANY_LAYERS: dict[type[nn.Module], type[AnyLayer]] = {
    nn.Conv1d: AnyConv1d,
    nn.Conv2d: AnyConv2d,
    nn.Conv3d: AnyConv3d,
    nn.ConvTranspose1d: AnyConvTranspose1d,
    nn.ConvTranspose2d: AnyConvTranspose2d,
    nn.ConvTranspose3d: AnyConvTranspose3d,
    nn.Linear: AnyLinear,
}


def own_method(module: nn.Module, kind: type[nn.Module], methods: Iterable[str]) -> str | None:
    """The first of `methods` that this module does not have from `kind`: a subclass, or the instance, replaces it."""
    for method in methods:
        if method in module.__dict__ or getattr(type(module), method, None) is not getattr(kind, method, None):
            return method
    return None


@contextmanager
def normalize_weights_once(model: nn.Module) -> Iterator[None]:
    """Inside, every any-layer computes tanh, max and mean of its weight once, however many widths run.

    The graph is cut at the normalized weight: all widths add their gradients there, and on leaving one
    backward pass takes the sum on to the weight. The sum rule makes that the same gradient, up to rounding.
    So run the backward passes inside, and the optimizer after.
    """
    layers = [m for m in model.modules() if isinstance(m, AnyLayer) and m.knows_weight_before_call]
    before = [(layer.normalized, layer.magnitude) for layer in layers]
    whole: list[tuple[Tensor, Tensor]] = []  # (normalized weight with its graph, leaf without)
    try:
        for layer in layers:
            weight = layer.full_weight()
            x = layer.quantizer.normalize(weight)
            layer.normalized = x.detach().requires_grad_(x.requires_grad)
            layer.magnitude = layer.quantizer.magnitude(weight)
            whole.append((x, layer.normalized))
        yield
        used = [(x, leaf.grad) for x, leaf in whole if leaf.grad is not None]
        if used:
            torch.autograd.backward([x for x, _ in used], [grad for _, grad in used])
    finally:
        for layer, (normalized, magnitude) in zip(layers, before, strict=True):
            layer.normalized, layer.magnitude = normalized, magnitude
        for _, leaf in whole:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(_too_late)  # type: ignore[no-untyped-call]


def _too_late(leaf: Tensor) -> None:
    """A gradient that reaches the cut after the context was left would be lost without a word."""
    raise AnyprecError("backward() was called after `normalize_weights_once` was left; call it inside the with block")
