"""Codes of activations and weights, as lower.py and first_last.py need them: torch tensors in, numpy arrays out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from anyprec.format.graph import FIXED_BITS
from anyprec.nn.layers import AnyLayer
from anyprec.nn.own_forward import ComputedWeightLayer
from anyprec.widths import FLOAT

SUM_LIMIT = 2**31  # ARITHMETIC.md: integer sums are exact in 32 bits
FIXED_LEVELS = 2**FIXED_BITS - 1


@dataclass(frozen=True)
class ActivationGrid:
    """What a value's codes stand for, profile by profile."""

    bits: tuple[int, ...]
    ranges: np.ndarray  # (P,) r, 1 where float
    signed: bool
    divisors: np.ndarray | None = None  # of channels, before rounding at integer widths; as the module broadcasts them

    @property
    def levels(self) -> np.ndarray:
        """n, and 1 where float."""
        return np.array([1.0 if b == FLOAT else 2.0**b - 1 for b in self.bits])

    @property
    def is_float(self) -> np.ndarray:
        return np.array([b == FLOAT for b in self.bits])

    @property
    def step(self) -> np.ndarray:
        return np.where(self.is_float, 1.0, self.ranges / self.levels)


class CodesByWidth(Mapping[int, np.ndarray]):
    """bits -> codes of one weight. Where they nest, the widest are kept and the others shifted out of them."""

    def __init__(self, layer: AnyLayer, widths: Iterable[int]) -> None:
        self.widths = sorted(widths)
        nests = layer.quantizer.nests
        keep = self.widths[-1:] if nests else self.widths
        self.kept = {k: to_file_order(layer_weight(layer, layer.codes(k))) for k in keep}

    def __getitem__(self, bits: int) -> np.ndarray:
        if bits not in self.widths:
            raise KeyError(bits)
        return self.kept[bits] if bits in self.kept else self.kept[self.widths[-1]] >> (self.widths[-1] - bits)

    def __iter__(self) -> Any:
        return iter(self.widths)

    def __len__(self) -> int:
        return len(self.widths)


def to_file_order(weight: Tensor) -> np.ndarray:
    """A weight as torch has it -> (out, kh, kw, in)."""
    weight = weight.detach().cpu()
    weight = weight.reshape(*weight.shape[:2], *(1,) * (4 - weight.dim()), *weight.shape[2:])  # (out, in, kh, kw)
    return np.ascontiguousarray(weight.permute(0, 2, 3, 1).numpy())


def layer_weight(layer: AnyLayer, weight: Tensor) -> Tensor:
    """As (out, in / groups, ...), which that of a transposed convolution is not, nor always a computed one."""
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return turned(weight, layer.groups)
    if isinstance(layer, ComputedWeightLayer) and layer.in_first:
        return weight.t()
    return weight


def turned(weight: Tensor, groups: int) -> Tensor:
    """The weight of a transposed convolution, (in, out / groups, ...), as (out, in / groups, ...)."""
    parts = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2)
    return parts.reshape(groups * weight.shape[1], weight.shape[0] // groups, *weight.shape[2:])


def weight_key(weight: Tensor) -> tuple[Any, ...]:
    """Tells a constant tensor from others: a layer that runs twice has one weight."""
    return weight.data_ptr(), tuple(weight.shape), weight.stride()


def channel_codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """8-bit codes of a weight (out, kh, kw, in) and each output channel's step: w is about (2c - 255) step[o].

    The ends of the codes are the channel's largest weight, so no weight is off by more than 1/255 of that.
    """
    largest = np.abs(values.astype(np.float64)).max(axis=(1, 2, 3))
    step = largest / FIXED_LEVELS
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint((values / step[:, None, None, None] + FIXED_LEVELS) / 2)
    codes = np.where(step[:, None, None, None] > 0, codes, 0)  # a channel of zeros: any code, times a step of 0
    return np.clip(codes, 0, FIXED_LEVELS).astype(np.uint8), step
