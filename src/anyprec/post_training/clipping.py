"""Where to clip before rounding: closed forms of the error, and the clip that makes it least.

A prior ("laplace", "gauss") and a width in; the clip in units of the prior's scale out. After Banner et al.,
"Post training 4-bit quantization of convolutional networks for rapid-deployment" (NeurIPS 2019); derived in
docs/cli/ptq.md. Numbers alone, no tensors. Called by aciq.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from anyprec.errors import AnyprecError


def laplace_error(clip: float, bits: int) -> float:
    """Expected squared error of clip-and-round for a Laplace density of scale b = 1: what is cut off, and rounding."""
    return 2 * math.exp(-clip) + rounding_error(clip, bits)


def gauss_error(clip: float, bits: int) -> float:
    """The same for a Gaussian of sigma = 1."""
    return 2 * ((1 + clip * clip) * normal_tail(clip) - clip * normal_density(clip)) + rounding_error(clip, bits)


def rounding_error(clip: float, bits: int) -> float:
    """step^2 / 12 for 2^bits steps over [-clip, clip]."""
    return float((2 * clip / 2**bits) ** 2 / 12)


def normal_density(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def normal_tail(z: float) -> float:
    """P(x > z) of a Gaussian of sigma = 1."""
    return math.erfc(z / math.sqrt(2)) / 2


# The derivative of each error by the clip, over 2: negative below the best clip, positive above, so it has one root.
SLOPES: dict[str, Callable[[float, int], float]] = {
    "laplace": lambda clip, bits: clip / (3 * 4**bits) - math.exp(-clip),
    "gauss": lambda clip, bits: clip / (3 * 4**bits) - 2 * (normal_density(clip) - clip * normal_tail(clip)),
}
ERRORS: dict[str, Callable[[float, int], float]] = {"laplace": laplace_error, "gauss": gauss_error}
PRIORS = tuple(SLOPES)


def check_prior(prior: str) -> str:
    if prior not in SLOPES:
        raise AnyprecError(f"prior={prior!r} is not known; choose one of {', '.join(PRIORS)}")
    return prior


@cache
def best_clip(prior: str, bits: int, half: bool = False) -> float:
    """The clip of least error: alpha / b (laplace) or alpha / sigma (gauss). best_clip("laplace", 4) is 5.03.

    `half`: the values are those behind a ReLU, none below zero. All steps then lie on one side, as if there were one
    bit more: best_clip("laplace", 4, half=True) == best_clip("laplace", 5).
    """
    slope = SLOPES[check_prior(prior)]
    bits += half
    low, high = 0.0, 64.0  # 8 bit and one more: 11.2 for laplace, 4.2 for gauss
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle, bits) < 0 else (low, middle)
    return (low + high) / 2
