"""ACIQ: layers whose weights and inputs are clipped, given bits and rounded channel by channel.

`AciqSettings` says which parts of the method are used; `install_aciq` gives the two quantizers below to the any-layers
of a converted network. They switch widths like any others, but a model file has one width a layer, so they have no
codes and cannot be packed. Called by methods.py; the arithmetic is in channels.py and clipping.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anyprec.errors import AnyprecError, UncalibratedBits, UnsupportedOperation
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import AnyLayer
from anyprec.nn.quantizers import WeightQuantizer
from anyprec.nn.switching import any_layers, widths_of
from anyprec.post_training.channels import (
    QUOTAS,
    ChannelStatistics,
    allocate_bits,
    clip_range,
    correct_bias,
    round_to_levels,
)
from anyprec.post_training.clipping import check_prior
from anyprec.widths import FLOAT, INTEGER_WIDTHS


@dataclass(frozen=True)
class AciqSettings:
    """Which parts of ACIQ are used, and how."""

    prior: str = "laplace"  # of inputs: where they are clipped
    weight_prior: str | None = "laplace"  # of weights; None keeps their whole range, as the authors' own runs do
    allocation: bool = True  # bits per channel; off: the same for all
    quota: str = "steps"  # what channels share, see `allocate_bits`
    allocated_up_to: int = 4  # wider widths give all channels the same bits, as the authors' runs do: 8 is the most
    bias_correction: bool = True  # of weights

    def __post_init__(self) -> None:
        check_prior(self.prior)
        if self.weight_prior is not None:
            check_prior(self.weight_prior)
        if self.quota not in QUOTAS:
            raise AnyprecError(f"quota={self.quota!r} is not known; choose one of {', '.join(QUOTAS)}")

    def bits_of(self, spread: Tensor, bits: int) -> Tensor:
        """Bits of each channel, (C,) int64."""
        if self.allocation and bits <= self.allocated_up_to:
            return allocate_bits(spread, bits, self.quota)
        return torch.full_like(spread, bits, dtype=torch.int64)


def no_codes() -> UnsupportedOperation:
    return UnsupportedOperation(
        "this network was made by ACIQ, which gives every channel its own bits and range; a model file has one width a "
        "layer and cannot hold it; pack one made with method 'bs' or 'bc'"
    )


class ChannelWeights(WeightQuantizer):
    """The weight at k bits: each output channel in its own range and bits, then bias-corrected."""

    def __init__(self, layer: AnyLayer, settings: AciqSettings) -> None:
        super().__init__((), "mean")
        self.settings = settings
        # A transposed convolution has its output channels on axis 1, those of each group apart.
        self.groups = layer.groups if isinstance(layer, nn.ConvTranspose2d) else 0
        # Bits -> version of the weight, and what was made of it: to make it takes longer than the layer itself.
        self.made: dict[int, tuple[tuple[int, int], Tensor]] = {}

    def normalize(self, w: Tensor) -> Tensor:
        return w

    def weight(self, x: Tensor, w: Tensor, bits: int, magnitude: Tensor | None = None) -> Tensor:
        """No gradient: there is no training after this."""
        version = w.data_ptr(), w._version
        if bits not in self.made or self.made[bits][0] != version:
            rows = self._rows(w.detach())
            low, high, widths, mean = (t.to(rows)[:, None] for t in self.plan(rows, bits))
            made = round_to_levels(rows, low, high, widths, mean, middles=True)
            made = self._whole(correct_bias(made, rows) if self.settings.bias_correction else made, w)
            self.made[bits] = version, made
        return self.made[bits][1]

    def plan(self, rows: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both ends of the range, bits and mean of each channel."""
        seen = ChannelStatistics()
        seen.add(rows)
        widths = self.settings.bits_of(seen.scale("gauss", half=False), bits)
        low, high = clip_range(seen, widths, self.settings.weight_prior, half=False)
        return low, high, widths, seen.mean

    def channel_bits(self, w: Tensor, bits: int) -> Tensor:
        return self.plan(self._rows(w.detach()), bits)[2]

    def codes(self, w: Tensor, bits: int) -> Tensor:
        raise no_codes()

    def scale(self, w: Tensor, bits: int, magnitude: Tensor | None = None) -> Tensor:
        raise no_codes()

    def _rows(self, w: Tensor) -> Tensor:
        """(out, all weights of that output channel)"""
        if not self.groups:
            return w.flatten(1)
        split = w.reshape(self.groups, -1, *w.shape[1:]).transpose(1, 2)  # (groups, out / groups, in / groups, ...)
        return split.flatten(0, 1).flatten(1)

    def _whole(self, rows: Tensor, w: Tensor) -> Tensor:
        if not self.groups:
            return rows.reshape(w.shape)
        split = rows.reshape(self.groups, w.shape[1], -1, *w.shape[2:])
        return split.transpose(1, 2).reshape(w.shape)


class ChannelInputs(ActQuantizer):
    """A layer's input at k bits, channel by channel. All features of a linear layer's are one channel.

    It is shown data (`see`), then fitted (`fit_channels`), then used.
    """

    low: Tensor  # (8, C): ends of the ranges, and bits, at 1 to 8 bit
    high: Tensor
    width: Tensor
    mean: Tensor  # (C,)

    def __init__(self, layer: AnyLayer, settings: AciqSettings) -> None:
        super().__init__((), clip="fixed", rectify=False)
        self.settings = settings
        kernel = getattr(layer, "kernel_size", None)
        self.trailing = None if kernel is None else len(kernel)  # axes behind the channels; None: it has no channels
        self.statistics = ChannelStatistics()
        for name in ("low", "high", "width", "mean"):
            self.register_buffer(name, torch.zeros(0))

    def see(self, y: Tensor) -> None:
        rows = y.reshape(1, -1) if self.trailing is None else y.movedim(-1 - self.trailing, 0).flatten(1)
        self.statistics.add(rows)

    def fit_channels(self) -> None:
        seen, settings, home = self.statistics, self.settings, self.low.device
        if not seen.count:
            return  # never ran
        self.signed = bool((seen.low < 0).any())
        half = not self.signed
        widths = [settings.bits_of(seen.scale(settings.prior, half), k) for k in INTEGER_WIDTHS]
        ends = [clip_range(seen, w, settings.prior, half) for w in widths]
        self.low = torch.stack([low for low, _ in ends]).float().to(home)
        self.high = torch.stack([high for _, high in ends]).float().to(home)
        self.width = torch.stack(widths).float().to(home)
        self.mean = seen.mean.float().to(home)
        self.statistics = ChannelStatistics()

    def forward(self, y: Tensor, bits: int) -> Tensor:
        if bits == FLOAT:
            return y
        if not len(self.low):
            raise UncalibratedBits(
                f"bits={bits}: this layer never ran on the data ACIQ was given; give data that uses it"
            )
        axes = (1,) * (self.trailing or 0)
        tables = (self.low[bits - 1], self.high[bits - 1], self.width[bits - 1], self.mean)
        low, high, width, mean = (table.to(y.dtype).reshape(-1, *axes) for table in tables)
        return round_to_levels(y, low, high, width, mean)

    def codes(self, y: Tensor, bits: int) -> Tensor:
        raise no_codes()

    def range(self, bits: int) -> Tensor | None:
        raise no_codes()


def install_aciq(layers: Iterable[AnyLayer], settings: AciqSettings) -> list[ChannelInputs]:
    """New quantizers for these layers; those of their inputs come back, to be shown data."""
    made = []
    for layer in layers:
        layer.quantizer = ChannelWeights(layer, settings).to(layer.weight.device)
        layer.act = inputs = ChannelInputs(layer, settings).to(layer.weight.device)
        made.append(inputs)
    return made


def mean_bits(model: nn.Module) -> dict[int, tuple[float, float]]:
    """Width -> what channels got there, on average: over all weights, and over all input channels."""
    layers = [layer for layer in any_layers(model).values() if isinstance(layer.quantizer, ChannelWeights)]
    return {k: _mean_bits(layers, k) for k in widths_of(model) if k != FLOAT}


def _mean_bits(layers: list[AnyLayer], bits: int) -> tuple[float, float]:
    spent = weights = given = channels = 0.0
    for layer in layers:
        quantizer, act = layer.quantizer, layer.act
        assert isinstance(quantizer, ChannelWeights) and isinstance(act, ChannelInputs)
        spent += float(quantizer.channel_bits(layer.weight, bits).double().mean()) * layer.weight.numel()
        weights += layer.weight.numel()
        if len(act.width):
            given += float(act.width[bits - 1].sum())
            channels += act.width.shape[1]
    return spent / max(weights, 1), given / max(channels, 1)
