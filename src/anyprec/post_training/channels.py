"""Channels of a tensor, each with its own range and bits: statistics, bit allocation, rounding, bias correction.

Tensors (channels, values) in and out. The parts of ACIQ that know no network; aciq.py puts them into layers. Equations
are those of Banner et al. (2019); docs/cli/ptq.md derives them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyprec.post_training.clipping import best_clip

MOST_BITS = 8
QUOTAS = ("steps", "bits")


class ChannelStatistics:
    """What is known of each channel, gathered batch by batch, kept in double precision on the CPU.

    `scale` estimates the width of the prior. Two-sided: b = mean |x - mean|, sigma = the standard deviation. Behind a
    ReLU (`half`), of the positive values alone: b = their mean, sigma = their root mean square. These are the
    maximum-likelihood fits of a density cut at zero, however many values the ReLU has set to zero.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sums = torch.zeros(0)  # (6, C): of x, |x - its batch's mean|, x^2, positive x, their squares, their number
        self.low = torch.zeros(0)  # (C,)
        self.high = torch.zeros(0)

    def add(self, x: Tensor) -> None:
        """(C, n) values of one batch."""
        x = x.detach().float() if x.dtype in (torch.float16, torch.bfloat16) else x.detach()
        above = x.clamp_min(0)
        parts = (x, (x - x.mean(1, keepdim=True)).abs(), x * x, above, above * above, (x > 0).to(x.dtype))
        sums = torch.stack([part.sum(1) for part in parts]).cpu().double()
        low, high = x.amin(1).cpu().double(), x.amax(1).cpu().double()
        if self.count:
            sums, low, high = self.sums + sums, torch.minimum(self.low, low), torch.maximum(self.high, high)
        self.sums, self.low, self.high = sums, low, high
        self.count += x.shape[1]

    @property
    def mean(self) -> Tensor:
        return self.sums[0] / self.count

    def scale(self, prior: str, half: bool) -> Tensor:
        """b of prior "laplace", sigma of "gauss"; (C,)"""
        _, apart, squares, above, above_squares, number = self.sums.unbind()
        if half:
            number = number.clamp_min(1)
            return above / number if prior == "laplace" else (above_squares / number).sqrt()
        if prior == "laplace":
            return apart / self.count
        return (squares / self.count - self.mean.square()).clamp_min(0).sqrt()


def allocate_bits(spread: Tensor, bits: int, quota: str = "steps") -> Tensor:
    """Bits of each channel, so that all rounding errors together are least; (C,) in, (C,) int64 out, 0 to 8 each.

    quota="steps" (equation 11): channel i gets a share spread_i^(2/3) of n 2^bits steps; the logarithm is rounded.
    Worked, 2 bit: spreads 1 and 8 -> 1/5 and 4/5 of 8 steps -> log2 of 1.6 and 6.4 -> 1 and 3 bit.
    quota="bits": in the same proportion, with as many steps as make the mean of the bits `bits`, or just less. Spreads
    that differ have fewer than `bits` on average under the first.
    """
    share = spread.double().clamp_min(0) ** (2 / 3)
    total = share.sum()
    if total <= 0:  # nothing to round in any channel
        return torch.zeros_like(spread, dtype=torch.int64)
    ideal = (share / total * len(spread)).clamp_min(torch.finfo(torch.float64).tiny).log2()

    def rounded(more: float) -> Tensor:
        return (ideal + more).round().clamp(0, MOST_BITS).long()

    if quota == "steps":
        return rounded(bits)
    # The mean of the rounded bits only grows with `more`: 40 halvings find where it passes `bits`.
    low, high = float(bits), float(bits + 64)
    if rounded(low).double().mean() > bits:
        low = float(bits - 1)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rounded(middle).double().mean() <= bits else (low, middle)
    return rounded(low)


def clip_range(seen: ChannelStatistics, bits: Tensor, prior: str | None, half: bool) -> tuple[Tensor, Tensor]:
    """Ends of each channel's range at its bits: the analytical clip, never beyond what was seen. No prior: no clip."""
    if prior is None:
        return seen.low, seen.high
    factors = torch.tensor([best_clip(prior, int(b), half) for b in bits], dtype=torch.float64)
    reach = factors * seen.scale(prior, half)
    if half:
        return torch.zeros_like(reach), torch.minimum(reach, seen.high.clamp_min(0))
    return torch.maximum(seen.mean - reach, seen.low), torch.minimum(seen.mean + reach, seen.high)


def round_to_levels(x: Tensor, low: Tensor, high: Tensor, bits: Tensor, mean: Tensor, middles: bool = False) -> Tensor:
    """Each value to the nearest of 2^bits levels from `low` to `high`. A channel of 0 bits becomes its mean.

    The ends are levels, so that zero is one behind a ReLU; `middles`: levels are the middles of 2^bits equal bins, as
    in the analysis of the clip, and finer. `low`, `high`, `bits`, `mean` broadcast against x.
    """
    last = torch.exp2(bits) - 1
    step = (high - low) / (last + 1 if middles else last.clamp_min(1))
    # A channel that was constant has no step: whatever comes becomes `low`.
    code = (x - low).div_(torch.where(step > 0, step, torch.inf))  # in place from here: x may be a large map
    code = code.floor_() if middles else code.round_()
    code = code.clamp_(torch.zeros_like(last), last)
    code = code.add_(0.5) if middles else code
    made = code.mul_(step).add_(low)
    return made if bool((last > 0).all()) else torch.where(last > 0, made, mean)


def correct_bias(made: Tensor, w: Tensor) -> Tensor:
    """Give the rounded weights of each channel back the mean, and the norm around it, of the float ones (eq. 12, 13).

    (C, n) in and out. Each channel's scale and offset take it up; the number of levels stays.
    """
    mean, made_mean = w.mean(1, keepdim=True), made.mean(1, keepdim=True)
    norm, made_norm = (w - mean).norm(dim=1, keepdim=True), (made - made_mean).norm(dim=1, keepdim=True)
    # A channel that rounding has made constant has no direction left to stretch; rounding noise is no direction.
    usable = made_norm > 1e-6 * norm
    ratio = torch.where(usable, norm / torch.where(usable, made_norm, 1.0), 0.0)
    return (made - made_mean) * ratio + mean
