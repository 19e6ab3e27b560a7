"""ActQuantizer: activations and a width in, rounded activations (or codes) and a straight-through gradient out.

Unsigned or signed, with a range that is fixed, calibrated from data (`fit`) or learned. Equations: paper, section
"Training"; docs/concepts/quantizers.md. Called by layers.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from anyprec.errors import AnyprecError, DataError, UncalibratedBits
from anyprec.nn.gradients import clip_round, clip_round_in_range
from anyprec.nn.width_tables import add_missing_entries, check_integer_width, width_table
from anyprec.widths import FLOAT, INTEGER_WIDTHS


class ActQuantizer(nn.Module):
    """Activations at a width, with n = 2^k - 1 levels above zero.

    unsigned: code round(n clip(y / r, 0, 1)), value r code / n.
    signed:   code round(n (clip(y / r, -1, 1) + 1) / 2), value r (2 code / n - 1); 1 bit is the sign.
    Gradient: straight-through inside the range, zero outside. The range r is 1 (clip="fixed", the paper's),
    calibrated per width from data (clip="calibrated") or calibrated and then trained (clip="learned").
    With divisors d per channel, y / d takes the place of y.
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
        # Divisors of the channels, broadcast against y, where channels differ too much for one range. The layer's codes
        # are then those of its weight times them, so only post-training quantization sets them (`ChosenCodes`).
        self.divisors: Tensor | None
        self.register_buffer("divisors", None)
        # Widths whose range was seen to be set: reading it at every call would stall a GPU and break a graph.
        self.calibrated: set[int] = set()

    observed = False  # True while `observe` looks at what it is given

    def forward(self, y: Tensor, bits: int) -> Tensor:
        if bits == FLOAT:
            return torch.relu(y) if self.rectify and not self.signed else y
        levels = (1 << bits) - 1
        r = self.range(bits)
        y = y if self.divisors is None else y / self.divisors
        if r is not None and r.dim() == 0 and not self.signed and torch.is_grad_enabled():
            return clip_round_in_range(y, r, levels)
        a = y if r is None else y / r
        q = 2 * clip_round((a + 1) / 2, levels) - 1 if self.signed else clip_round(a, levels)
        return q if r is None else r * q

    def codes(self, y: Tensor, bits: int) -> Tensor:
        """Integer codes 0 .. 2^bits - 1 of y, as the engine stores them."""
        check_integer_width(bits)
        r = self.range(bits)
        y = y if self.divisors is None else y / self.divisors
        a = y if r is None else y / r
        a = (a + 1) / 2 if self.signed else a
        return (a.clamp(0, 1) * ((1 << bits) - 1)).round_().to(torch.uint8)

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
        r: Tensor = self.ranges[str(bits)]
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.calibrated.clear()
        if (divisors := state_dict.get(prefix + "divisors")) is not None and self.divisors is None:
            self.divisors = torch.ones_like(divisors)
        if self.clip != "fixed":
            add_missing_entries(self.ranges, state_dict, prefix + "ranges.", learned=self.clip == "learned")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"signed={self.signed}, clip={self.clip!r}, rectify={self.rectify}"


def sample_values(y: Tensor, most: int = 16384) -> Tensor:
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
    levels = (1 << bits) - 1
    low = -1.0 if signed else 0.0
    span = 1 - low

    def error(r: Tensor) -> Tensor:
        code = (((values / r).clamp_(low, 1) - low) * (levels / span)).round_()
        return (code.mul_(span / levels).add_(low).mul_(r) - values).square_().mean()

    # One candidate at a time: all at once would take 80 times the memory of the sample.
    ranges = top * torch.logspace(-3, 0, 80, device=values.device, dtype=values.dtype)
    return ranges[torch.stack([error(r) for r in ranges]).argmin()].clone()
