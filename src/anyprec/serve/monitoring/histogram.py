"""Latency histogram with bins that grow by 3 %, from 10 us to over 100 s: quantiles in little memory, never too low.

A histogram is a plain Counter, bin -> count, so that several can be added. Used by recent.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

FIRST_S = 1e-5
GROWTH = 1.03
BINS = 550
_RATIO = math.log(GROWTH)


def bin_of(seconds: float) -> int:
    return min(BINS, max(0, int(math.log(max(seconds, FIRST_S) / FIRST_S) / _RATIO)))


def quantile(bins: Mapping[int, int], q: float) -> float:
    """Seconds: the upper end of the quantile's bin, so at most 3 % too high. `bins` is not empty."""
    rank, seen = q * sum(bins.values()), 0
    for place in sorted(bins):
        seen += bins[place]
        if seen >= rank:
            break
    return FIRST_S * math.exp(_RATIO * (place + 1))
