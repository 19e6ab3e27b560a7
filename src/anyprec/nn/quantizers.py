"""Weight quantizers: a float weight and a width in, codes, scale and a straight-through gradient out.

`Nested` (default), `DoReFa`, `Lsq`, listed in QUANTIZERS; act_quantizer.py has that of activations. Every quantizer
works in two halves, so that a joint step pays for the first one once, whatever the number of widths: `normalize(w)`,
x in [0, 1], and `magnitude(w)` know no width; `weight(x, w, bits)` snaps x to the grid of one. Equations: paper,
section "Training"; `nested` is ours; docs/concepts/quantizers.md. Called by layers.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anyprec import choices
from anyprec.errors import AnyprecError, UncalibratedBits, UnsupportedOperation
from anyprec.nn.act_quantizer import sample_values
from anyprec.nn.gradients import scale_gradient, straight_through
from anyprec.nn.width_tables import add_missing_entries, check_integer_width, nearest_width, width_table
from anyprec.widths import FLOAT

FIT_SAMPLES = 2**18  # weights a range is fitted to: all of most layers


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
        if scale not in choices.SCALES:
            raise AnyprecError(f"scale={scale!r} is not known; choose {' or '.join(map(repr, choices.SCALES))}")
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
        check_integer_width(bits)
        return self._code(self.normalize(w), bits).to(torch.uint8)

    def values(self, codes: Tensor, bits: int) -> Tensor:
        """Codes -> values in [-1, 1], before the scale."""
        check_integer_width(bits)
        return self._value(codes.to(torch.float32), bits)

    def scale(self, w: Tensor, bits: int, magnitude: Tensor | None = None) -> Tensor:
        """s_k: the factor between values and weights. `magnitude` saves computing it again."""
        if not self.learned:
            return self.magnitude(w) if magnitude is None else magnitude
        if str(bits) not in self.scales:
            known = ", ".join(self.scales)
            raise UncalibratedBits(f"bits={bits} has no learned scale here (only {known}); calibrate it first")
        scale: Tensor = self.scales[str(bits)]
        return scale.abs()

    def weight(self, x: Tensor, w: Tensor, bits: int, magnitude: Tensor | None = None) -> Tensor:
        """The weight at `bits`: s_k * v_k, straight-through to x = normalize(w) and so to w."""
        if bits == 1 and self.sign_window:
            x = scale_gradient(x, (1 - (2 * x.detach() - 1).abs() / self.sign_window).clamp_(min=0))
        v = straight_through(x, self._value(self._code(x.detach(), bits), bits))
        return (self.scale(w, bits, magnitude) * v).to(w.dtype)

    def bias(self, bias: Tensor | None, bits: int) -> Tensor | None:
        """The layer's bias at `bits`: the same at every width, as long as nothing else is said."""
        return bias

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

    def fit_trained(self, w: Tensor, widths: Iterable[int]) -> None:
        """`fit` to weights that are to be kept as they are, as `convert` is given them."""
        self.fit(w, widths)

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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.learned:
            add_missing_entries(self.scales, state_dict, prefix + "scales.", learned=True)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def grid(self, bits: int) -> int:
        """d: code c stands for (2c + 1 - 2^bits) / d, times the scale. `pack` reads it.

        A class that defines it vouches for all its methods; a subclass that replaces one has to define it again.
        """
        raise UnsupportedOperation(f"weight quantizer {type(self).__name__} has no grid, so its codes mean nothing")

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

    def grid(self, bits: int) -> int:
        return 1 << bits

    def _code(self, x: Tensor, bits: int) -> Tensor:
        # floor(2^k x) is floor(256 x) >> (8 - k) exactly: scaling by a power of two does not round.
        grid = self.grid(bits)
        return (x * grid).floor_().clamp_(0, grid - 1)

    def _value(self, code: Tensor, bits: int) -> Tensor:
        grid = self.grid(bits)
        return (2 * code + (1 - grid)) / grid


class DoReFa(WeightQuantizer):
    """c_k = round(x (2^k - 1)); weight mean|w| (2 c_k / (2^k - 1) - 1). The paper's, as its authors run it.

    These codes do not nest. At 32 bits the authors' weight is tanh(w) / max|tanh(w)| * mean|w|, not w.
    """

    def grid(self, bits: int) -> int:
        return (1 << bits) - 1

    def _code(self, x: Tensor, bits: int) -> Tensor:
        return (x * self.grid(bits)).round_()

    def _value(self, code: Tensor, bits: int) -> Tensor:
        return 2 * (code / self.grid(bits)) - 1

    def float_weight(self, w: Tensor, x: Tensor | None = None, magnitude: Tensor | None = None) -> Tensor:
        x = self.normalize(w) if x is None else x
        magnitude = self.magnitude(w) if magnitude is None else magnitude
        return ((2 * x - 1) * magnitude).to(w.dtype)


class Lsq(Nested):
    """Nested codes of x = clip(w / (2 r), -1/2, 1/2) + 1/2, without tanh.

    The range r is learned per layer, the scale per layer and width, after LSQ (Esser et al., ICLR 2020,
    arXiv:1902.08153). One range serves all widths, or the codes would not nest. For training from scratch (`fit`) it
    starts at 3 times the root mean square of w, so that a constant layer lies inside; for weights that `convert` is
    given (`fit_trained`), where the product of all widths' errors is least. Only |r| counts: a step that takes r
    through 0 does no harm.
    """

    grid = Nested.grid  # said again, for the x of its own

    def __init__(self, widths: Iterable[int], scale: str = "learned") -> None:
        super().__init__(widths, "learned")
        self.range = nn.Parameter(torch.tensor(1.0))

    def normalize(self, w: Tensor) -> Tensor:
        r = scale_gradient(self.range, 1 / math.sqrt(w.numel() * 127)).abs()
        return (_at_least_float(w) / (2 * r) + 0.5).clamp(0, 1)

    def scale(self, w: Tensor, bits: int, magnitude: Tensor | None = None) -> Tensor:
        levels = max(2 ** (bits - 1) - 1, 1)
        return scale_gradient(super().scale(w, bits), 1 / math.sqrt(w.numel() * levels))

    @torch.no_grad()
    def fit(self, w: Tensor, widths: Iterable[int]) -> None:
        spread = 3 * w.square().mean().sqrt()
        self.range.copy_(torch.where(spread < torch.finfo(w.dtype).tiny, 1.0, spread))
        super().fit(w, widths)

    @torch.no_grad()
    def fit_trained(self, w: Tensor, widths: Iterable[int]) -> None:
        """The range with the least product of all widths' errors: what one more percent costs one width, it has to save
        another. 3 times the root mean square clips 2 % of the norm of normal weights at 8 bit, 27 % of depth-wise ones;
        the largest weight leaves 2 bit hardly more than the sign.
        """
        widths = [k for k in widths if k != FLOAT]
        top = _at_least_float(w).abs().amax()
        if not widths or top < torch.finfo(torch.float32).tiny:
            return self.fit(w, widths)
        sample = sample_values(w, FIT_SAMPLES)  # the largest weight counts through `top`
        ranges = top * torch.logspace(-2.5, 0, 48, device=w.device, dtype=sample.dtype)  # each 13 % above the last
        products = [sum(_log_error(sample, r, self.grid(k)) for k in widths) for r in ranges.tolist()]
        self.range.copy_(ranges[min(range(len(ranges)), key=products.__getitem__)])
        super().fit(w, widths)


def _log_error(w: Tensor, r: float, grid: int) -> float:
    """log of |w - s v|^2 at the best s: that of w less its part along v."""
    v = 2 * (w * (grid / (2 * r)) + grid / 2).floor_().clamp_(0, grid - 1) + (1 - grid)
    whole, along = w.square().sum(), (w * v).sum().square() / v.square().sum()
    return math.log(max(float(whole - along), 1e-12 * float(whole)))


class ChosenCodes(Nested):
    """Nested codes that are kept, not computed: those that post-training quantization chose, with a scale per output
    channel and width, and a shift of the bias. Weight s_k v_k as in `Nested`, s_k of shape (out, 1, ...).

    The float weight stays beside them for 32 bits, and gets no gradient from other widths: codes are fixed. Scales and
    what follows the layer can still learn. Not in QUANTIZERS: it cannot be made from a weight alone. Loading a
    checkpoint that has it puts it in its place (layers.py).
    """

    grid = Nested.grid
    chosen: Tensor  # (out, in, ...) uint8, 8 bit each

    def __init__(self, chosen: Tensor, scales: Mapping[int, Tensor]) -> None:
        super().__init__((), "learned")
        self.register_buffer("chosen", chosen)
        self.shifts = nn.ParameterDict()
        for bits, scale in scales.items():
            self.scales[str(bits)] = nn.Parameter(scale)
            self.shifts[str(bits)] = nn.Parameter(torch.zeros_like(scale).flatten())  # (out,)

    def normalize(self, w: Tensor) -> Tensor:
        return w.detach()

    @torch.no_grad()
    def codes(self, w: Tensor, bits: int) -> Tensor:
        check_integer_width(bits)
        return self.chosen >> (8 - bits)

    def weight(self, x: Tensor, w: Tensor, bits: int, magnitude: Tensor | None = None) -> Tensor:
        return (self.scale(w, bits) * self.values(self.codes(w, bits), bits)).to(w.dtype)

    def bias(self, bias: Tensor | None, bits: int) -> Tensor | None:
        shift: Tensor | None = self.shifts.get(str(bits))
        return bias if shift is None else shift if bias is None else bias + shift

    @torch.no_grad()
    def fit(self, w: Tensor, widths: Iterable[int]) -> None:
        """Scales of least squared error, each channel's own."""
        axes = tuple(range(1, w.dim()))
        for bits in widths:
            if bits != FLOAT:
                v = self.values(self.codes(w, bits), bits)
                fitted = (w * v).sum(axes, keepdim=True) / (v * v).sum(axes, keepdim=True)
                self._set_scale(bits, fitted.clamp_min(torch.finfo(w.dtype).tiny).to(w.dtype))


QUANTIZERS: dict[str, type[WeightQuantizer]] = {name: globals()[kind] for name, kind in choices.QUANTIZERS.items()}


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


def _at_least_float(w: Tensor) -> Tensor:
    """Codes of half-precision weights are made in single precision: bfloat16 cannot hold 255.5."""
    return w.float() if w.dtype in (torch.float16, torch.bfloat16) else w
