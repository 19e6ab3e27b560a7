"""Quantizers: a float tensor and a width in, codes, scale and a straight-through gradient out.

Weights: `Nested` (default), `DoReFa`, `Lsq`, listed in QUANTIZERS. Activations: `ActQuantizer`, unsigned or
signed. Every weight quantizer works in two halves, so that a joint step pays for the first one once, whatever
the number of widths: `normalize(w) -> x` in [0, 1] and `magnitude(w)` know no width; `weight(x, w, bits)`
snaps x to the grid of one. Equations: paper, section "Training"; `nested` is ours; docs/quantizers.md. Called
by layers.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from anyprec.errors import AnyprecError, DataError, UncalibratedBits, UnsupportedBits
from anyprec.widths import FLOAT, INTEGER_WIDTHS


class _StraightThrough(torch.autograd.Function):
    """Forward: the value v that x was snapped to. Backward: that of 2x - 1, as if nothing were snapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad, None


class _ClipRound(torch.autograd.Function):
    """round(clip(y, 0, 1) * levels) / levels; the gradient passes where 0 <= y <= 1, and is zero elsewhere.

    Keeps y, as clamp would. A mask of one byte an element is smaller, but on CPUs making and applying it
    nearly doubles the time: 7.5 ms against 4.2 ms for 128 x 16 x 32 x 32 on one core.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, levels: int) -> Tensor:
        ctx.save_for_backward(y)
        code = y.clamp(0, 1)
        return code.round_() if levels == 1 else code.mul_(levels).round_().div_(levels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        # hardtanh leaves its two ends out, the paper has them in: move each end out by the least normal step.
        step = torch.finfo(y.dtype)
        return torch.ops.aten.hardtanh_backward(grad, y, -step.tiny, 1 + step.eps), None


class _ScaleGradient(torch.autograd.Function):
    """Identity forward; the gradient is multiplied by `factor`. LSQ balances step and weight gradients so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def width_table(widths: Iterable[int], value: float, learned: bool) -> nn.ParameterDict:
    """One scalar per integer width, as a parameter (learned) or a constant; keys are '1'..'8'."""
    keys = [str(k) for k in widths if k != FLOAT]
    return nn.ParameterDict({key: nn.Parameter(torch.tensor(value), requires_grad=learned) for key in keys})


def nearest_width(bits: int, known: Iterable[int]) -> int:
    """The known width closest to `bits`, the wider one of two at equal distance: 3 of (1, 2, 4, 8) -> 4."""
    return min(known, key=lambda k: (abs(k - bits), -k))


# --- Weights ------------------------------------------------------------------------------------------------


class WeightQuantizer(nn.Module):
    """What all weight quantizers share: tanh to [0, 1], a scale per layer (and width), codes, gradients.

    scale="mean" uses mean|w|, as the paper does (no gradient through it, as its authors run it);
    scale="learned" keeps one parameter per width, started at the least-squares fit to w by `fit`. Its absolute value
    counts: a norm behind the layer takes the scale out, so it drifts, and below 0 it would turn every weight round.
    """

    nests = False  # codes(w, k) == codes(w, 8) >> (8 - k)
    sign_window = 0.0  # see `set_sign_window`

    def __init__(self, widths: Iterable[int], scale: str = "mean") -> None:
        super().__init__()
        if scale not in ("mean", "learned"):
            raise AnyprecError(f"scale={scale!r} is not known; choose 'mean' or 'learned'")
        self.scales = width_table(widths, 1.0, learned=True) if scale == "learned" else nn.ParameterDict()
        self.learned = scale == "learned"

    def normalize(self, w: Tensor) -> Tensor:
        """x = tanh(w) / (2 max|tanh(w)|) + 1/2, in [0, 1] (equation 4). An all-zero layer gives 1/2."""
        t = torch.tanh(_at_least_float(w))
        top = t.abs().amax()
        # Below the least normal number a layer counts as zero: 1 / top would overflow in the backward pass.
        return t / (2 * torch.where(top < torch.finfo(t.dtype).tiny, 1.0, top)) + 0.5

    def magnitude(self, w: Tensor) -> Tensor:
        """mean|w|, the scale of the paper; like `normalize`, the same for every width."""
        return w.detach().abs().mean()

    @torch.no_grad()
    def codes(self, w: Tensor, bits: int) -> Tensor:
        """Integer codes 0 .. 2^bits - 1."""
        _check_integer_width(bits)
        return self._code(self.normalize(w), bits).to(torch.uint8)

    def values(self, codes: Tensor, bits: int) -> Tensor:
        """Codes -> values in [-1, 1], before the scale."""
        _check_integer_width(bits)
        return self._value(codes.to(torch.float32), bits)

    def scale(self, w: Tensor, bits: int, magnitude: Tensor | None = None) -> Tensor:
        """s_k: the factor between values and weights. `magnitude` saves computing it again."""
        if not self.learned:
            return self.magnitude(w) if magnitude is None else magnitude
        if str(bits) not in self.scales:
            known = ", ".join(self.scales)
            raise UncalibratedBits(f"bits={bits} has no learned scale here (only {known}); calibrate it first")
        return self.scales[str(bits)].abs()

    def weight(self, x: Tensor, w: Tensor, bits: int, magnitude: Tensor | None = None) -> Tensor:
        """The weight at `bits`: s_k * v_k, straight-through to x = normalize(w) and so to w."""
        if bits == 1 and self.sign_window:
            x = _ScaleGradient.apply(x, (1 - (2 * x.detach() - 1).abs() / self.sign_window).clamp_(min=0))
        v = _StraightThrough.apply(x, self._value(self._code(x.detach(), bits), bits))
        return (self.scale(w, bits, magnitude) * v).to(w.dtype)

    def float_weight(self, w: Tensor, x: Tensor | None = None, magnitude: Tensor | None = None) -> Tensor:
        """The weight at 32 bits. `x` and `magnitude` save computing them again where they are needed."""
        return w

    @torch.no_grad()
    def fit(self, w: Tensor, widths: Iterable[int]) -> None:
        """Start learned scales where s_k v_k is the least-squares fit to w; scale="mean" has none."""
        if not self.learned:
            return
        for bits in widths:
            if bits != FLOAT:
                v = self.values(self.codes(w, bits), bits)
                fitted = (w * v).sum() / (v * v).sum()  # never negative: v has the sign of w
                self._set_scale(bits, fitted.clamp_min(torch.finfo(w.dtype).tiny).to(w.dtype))

    @torch.no_grad()
    def add_width(self, bits: int) -> None:
        """Give a width that was not trained the learned scale of its nearest trained neighbor."""
        if self.learned and bits != FLOAT and str(bits) not in self.scales:
            if not self.scales:
                raise UncalibratedBits(f"bits={bits}: no width has a learned scale to start from; train one first")
            near = nearest_width(bits, map(int, self.scales))
            self._set_scale(bits, self.scales[str(near)].detach().clone())

    def _set_scale(self, bits: int, value: Tensor) -> None:
        if str(bits) in self.scales:
            self.scales[str(bits)].copy_(value)
        else:
            self.scales[str(bits)] = nn.Parameter(value)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if self.learned:
            add_missing_entries(self.scales, state_dict, prefix + "scales.", learned=True)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _code(self, x: Tensor, bits: int) -> Tensor:
        raise AssertionError("a subclass defines the grid")

    def _value(self, code: Tensor, bits: int) -> Tensor:
        raise AssertionError("a subclass defines the grid")

    def extra_repr(self) -> str:
        return f"scale={'learned' if self.learned else 'mean'}"


class Nested(WeightQuantizer):
    """c_8 = min(floor(256 x), 255); c_k = c_8 >> (8 - k); v_k = (2 c_k + 1 - 2^k) / 2^k; weight s_k v_k.

    The k-bit codes are the k most significant bits of the 8-bit ones, for every k, and 1 bit is the sign.
    Worked: x = 0.7 -> c_8 = 179 = 0b10110011; c_2 = 0b10 = 2, v_2 = (4 + 1 - 4)/4 = 1/4; c_1 = 1, v_1 = 1/2.
    """

    nests = True

    def _code(self, x: Tensor, bits: int) -> Tensor:
        # floor(2^k x) is floor(256 x) >> (8 - k) exactly: scaling by a power of two does not round.
        return (x * 2**bits).floor_().clamp_(0, 2**bits - 1)

    def _value(self, code: Tensor, bits: int) -> Tensor:
        return (2 * code + (1 - 2**bits)) / 2**bits


class DoReFa(WeightQuantizer):
    """c_k = round(x (2^k - 1)); weight mean|w| (2 c_k / (2^k - 1) - 1). The paper's, as its authors run it.

    These codes do not nest. At 32 bits the authors' weight is tanh(w) / max|tanh(w)| * mean|w|, not w.
    """

    def _code(self, x: Tensor, bits: int) -> Tensor:
        return (x * (2**bits - 1)).round_()

    def _value(self, code: Tensor, bits: int) -> Tensor:
        return 2 * (code / (2**bits - 1)) - 1

    def float_weight(self, w: Tensor, x: Tensor | None = None, magnitude: Tensor | None = None) -> Tensor:
        x = self.normalize(w) if x is None else x
        magnitude = self.magnitude(w) if magnitude is None else magnitude
        return ((2 * x - 1) * magnitude).to(w.dtype)


class Lsq(Nested):
    """Nested codes of x = clip(w / (2 r), -1/2, 1/2) + 1/2, without tanh.

    The range r is learned per layer, the scale per layer and width, after LSQ (Esser et al., ICLR 2020,
    arXiv:1902.08153). One range serves all widths, or the codes would not nest. It starts at 3 times the root
    mean square of w, so that a constant layer lies inside. Only |r| counts: a step that takes r through 0
    does no harm.
    """

    def __init__(self, widths: Iterable[int], scale: str = "learned") -> None:
        super().__init__(widths, "learned")
        self.range = nn.Parameter(torch.tensor(1.0))

    def normalize(self, w: Tensor) -> Tensor:
        r = _ScaleGradient.apply(self.range, 1 / math.sqrt(w.numel() * 127)).abs()
        return (_at_least_float(w) / (2 * r) + 0.5).clamp(0, 1)

    def scale(self, w: Tensor, bits: int, magnitude: Tensor | None = None) -> Tensor:
        levels = max(2 ** (bits - 1) - 1, 1)
        return _ScaleGradient.apply(super().scale(w, bits), 1 / math.sqrt(w.numel() * levels))

    @torch.no_grad()
    def fit(self, w: Tensor, widths: Iterable[int]) -> None:
        spread = 3 * w.square().mean().sqrt()
        self.range.copy_(torch.where(spread < torch.finfo(w.dtype).tiny, 1.0, spread))
        super().fit(w, widths)


QUANTIZERS: dict[str, type[WeightQuantizer]] = {"nested": Nested, "dorefa": DoReFa, "lsq": Lsq}


def set_sign_window(model: nn.Module, window: float) -> None:
    """Let 1 bit move only weights near to a change of sign: its gradient times max(0, 1 - |2x - 1| / window), 1
    at the border and 0 from `window` on. window=0 leaves it as it is, as the paper does.

    At 1 bit a weight is its sign. A straight-through gradient pushes every weight, and where no sign will change this
    is noise in the numbers that wider widths read. For joint training: alone, 1 bit could bring no weight near to zero.
    Bi-Real Net (Liu et al., ECCV 2018, arXiv:1808.00278) gives the sign of activations such a gradient.
    """
    for module in model.modules():
        if isinstance(module, WeightQuantizer):
            module.sign_window = window


def kurtosis_penalty(weight: Tensor) -> Tensor:
    """(kurtosis - 1.8)^2 + skewness^2 of a layer's weights: 0 for even ones, 1.44 for normal ones.

    After KURE (Shkolnik et al., NeurIPS 2020, arXiv:2002.07686): evenly spread weights lose least by coarse grids.
    """
    centered = weight - weight.mean()
    deviation = centered.square().mean().sqrt().clamp_min(torch.finfo(weight.dtype).tiny)
    unit = centered / deviation
    return (unit.pow(4).mean() - 1.8).square() + unit.pow(3).mean().square()


def make_quantizer(name: str, widths: Iterable[int], scale: str = "mean") -> WeightQuantizer:
    if name not in QUANTIZERS:
        raise AnyprecError(f"quantizer={name!r} is not known; choose one of {', '.join(QUANTIZERS)}")
    return QUANTIZERS[name](tuple(widths), scale)


def _check_integer_width(bits: int) -> None:
    if bits not in INTEGER_WIDTHS:
        raise UnsupportedBits(f"bits={bits!r} has no integer codes; choose 1..8")


def _at_least_float(w: Tensor) -> Tensor:
    """Codes of half-precision weights are made in single precision: bfloat16 cannot hold 255.5."""
    return w.float() if w.dtype in (torch.float16, torch.bfloat16) else w


# --- Activations --------------------------------------------------------------------------------------------


class ActQuantizer(nn.Module):
    """Activations at a width, with n = 2^k - 1 levels above zero.

    unsigned: code round(n clip(y / r, 0, 1)), value r code / n.
    signed:   code round(n (clip(y / r, -1, 1) + 1) / 2), value r (2 code / n - 1); 1 bit is the sign.
    Gradient: straight-through inside the range, zero outside. The range r is 1 (clip="fixed", the paper's),
    calibrated per width from data (clip="calibrated") or calibrated and then trained (clip="learned").
    Of a learned range only |r| counts, so that a step that takes it through 0 does no harm.
    At 32 bits: ReLU (rectify=True, the paper's networks) or y itself (converted networks keep their own ReLU,
    and signed inputs are never rectified).
    """

    def __init__(
        self,
        widths: Iterable[int] = INTEGER_WIDTHS,
        *,
        signed: bool = False,
        clip: str = "fixed",
        rectify: bool = True,
    ) -> None:
        super().__init__()
        if clip not in ("fixed", "calibrated", "learned"):
            raise AnyprecError(f"clip={clip!r} is not known; choose 'fixed', 'calibrated' or 'learned'")
        self.signed, self.clip, self.rectify = signed, clip, rectify
        # A range of zero stands for "not calibrated yet".
        self.ranges = nn.ParameterDict() if clip == "fixed" else width_table(widths, 0.0, learned=clip == "learned")
        # Widths whose range was seen to be set: reading it at every call would stall a GPU and break a graph.
        self.calibrated: set[int] = set()

    def forward(self, y: Tensor, bits: int) -> Tensor:
        if bits == FLOAT:
            return torch.relu(y) if self.rectify and not self.signed else y
        levels = 2**bits - 1
        r = self.range(bits)
        a = y if r is None else y / r
        q = 2 * _ClipRound.apply((a + 1) / 2, levels) - 1 if self.signed else _ClipRound.apply(a, levels)
        return q if r is None else r * q

    def codes(self, y: Tensor, bits: int) -> Tensor:
        """Integer codes 0 .. 2^bits - 1 of y, as the engine stores them."""
        _check_integer_width(bits)
        r = self.range(bits)
        a = y if r is None else y / r
        a = (a + 1) / 2 if self.signed else a
        return (a.clamp(0, 1) * (2**bits - 1)).round_().to(torch.uint8)

    def range(self, bits: int) -> Tensor | None:
        if self.clip == "fixed":
            return None
        if bits not in self.calibrated:
            if str(bits) not in self.ranges or self.ranges[str(bits)].item() == 0:
                raise UncalibratedBits(
                    f"bits={bits} has no activation range here; give `convert` an example, or calibrate it "
                    f"first: anyprec.calibrate(model, loader, widths=({bits},))"
                )
            self.calibrated.add(bits)
        r = self.ranges[str(bits)]
        return r.abs() if self.clip == "learned" else r

    @torch.no_grad()
    def fit(self, values: Tensor, widths: Iterable[int]) -> None:
        """Set the range of each width to the one with the least squared error on `values`, unless fixed."""
        if self.clip == "fixed":
            return
        for bits in widths:
            if bits == FLOAT:
                continue
            value = best_range(values, bits, self.signed)
            if str(bits) in self.ranges:
                self.ranges[str(bits)].copy_(value)
            else:
                value = value.to(next(iter(self.ranges.values()), value))  # dtype and device of the other widths'
                self.ranges[str(bits)] = nn.Parameter(value, requires_grad=self.clip == "learned")

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.calibrated.clear()
        if self.clip != "fixed":
            add_missing_entries(self.ranges, state_dict, prefix + "ranges.", learned=self.clip == "learned")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"signed={self.signed}, clip={self.clip!r}, rectify={self.rectify}"


def add_missing_entries(table: nn.ParameterDict, state_dict: dict[str, Tensor], prefix: str, learned: bool) -> None:
    """A checkpoint may hold widths calibrated after the model was built: make room before loading."""
    for name, value in state_dict.items():
        key = name.removeprefix(prefix)
        if name.startswith(prefix) and key not in table:
            like = next(iter(table.values()), value)  # the model's dtype and device, not those of the checkpoint
            table[key] = nn.Parameter(torch.zeros_like(like), requires_grad=learned)


def sample(y: Tensor, most: int = 16384) -> Tensor:
    """At most `most` values of y, drawn at random: enough for a range, small enough to keep for every layer.

    Not every n-th: where n divides the row length that would look at the same few pixels or features only.
    """
    flat = y.detach().reshape(-1)
    if flat.numel() > most:
        dice = torch.Generator().manual_seed(flat.numel())  # its own: training's random numbers stay as they are
        flat = flat[torch.randint(flat.numel(), (most,), generator=dice).to(flat.device)]
    return flat.float().clone()


def best_range(values: Tensor, bits: int, signed: bool) -> Tensor:
    """The range with the least mean squared quantization error.

    Tried are 80 between 1/1000 of the largest |value| and that value, each 9 % above the last: one outlier
    must not decide the range of all others.
    """
    if not torch.isfinite(values).all():
        raise DataError("calibration met NaN or infinity in the activations; check the data and the weights")
    top = values.abs().amax() if signed else values.amax().clamp_min(0)
    if top <= 0:
        return torch.ones_like(top)  # a dead input says nothing about its range
    levels = 2**bits - 1
    low = -1.0 if signed else 0.0
    span = 1 - low

    def error(r: Tensor) -> Tensor:
        code = (((values / r).clamp_(low, 1) - low) * (levels / span)).round_()
        return (code.mul_(span / levels).add_(low).mul_(r) - values).square_().mean()

    # One candidate at a time: all at once would take 80 times the memory of the sample.
    ranges = top * torch.logspace(-3, 0, 80, device=values.device, dtype=values.dtype)
    return ranges[torch.stack([error(r) for r in ranges]).argmin()].clone()
