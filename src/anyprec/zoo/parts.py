"""The any-precision parts every zoo network is built from: one `Parts` per network, made by registry.build.

It holds what all layers of a network share (widths, weight quantizer, scale) and gives out convolutions,
linear layers, switched norms and shared activations made with it. None has a bias: a norm follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from anyprec.train.layers import AnyActivation, AnyConv2d, AnyLinear
from anyprec.train.norms import SwitchBatchNorm1d, SwitchBatchNorm2d
from anyprec.train.quantizers import ActQuantizer, make_quantizer


@dataclass(frozen=True)
class Parts:
    widths: tuple[int, ...]
    quantizer: str = "nested"
    scale: str = "mean"

    def conv(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        act: ActQuantizer | None = None,
        **options: int,
    ) -> AnyConv2d:
        """Reads an input that a shared activation has quantised already, unless it is given its own `act`."""
        quantizer = make_quantizer(self.quantizer, self.widths, self.scale)
        return AnyConv2d(channels_in, channels_out, kernel, bias=False, quantizer=quantizer, act=act, **options)

    def linear(self, features_in: int, features_out: int) -> AnyLinear:
        quantizer = make_quantizer(self.quantizer, self.widths, self.scale)
        return AnyLinear(features_in, features_out, bias=False, quantizer=quantizer)

    def norm(self, channels: int) -> SwitchBatchNorm2d:
        return SwitchBatchNorm2d(channels, self.widths)

    def norm1d(self, features: int) -> SwitchBatchNorm1d:
        return SwitchBatchNorm1d(features, self.widths)

    def act(self, quantise: bool = True) -> AnyActivation:
        """The paper's activation: clip to [0, 1] and round; ReLU at 32 bits."""
        return AnyActivation(quantise=quantise)
