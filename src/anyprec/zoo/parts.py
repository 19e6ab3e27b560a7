"""What every zoo network is: a ZooNetwork, built from the any-precision layers of one `Parts` (made by registry.build).

Parts holds what all layers of a network share (widths, weight quantizer, scale) and gives out convolutions,
linear layers, switched norms and shared activations made with it. None has a bias: a norm follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import AnyActivation, AnyConv2d, AnyLinear
from anyprec.nn.norms import SwitchBatchNorm1d, SwitchBatchNorm2d, SwitchNorm
from anyprec.nn.quantizers import make_quantizer
from anyprec.nn.split import SplitNetwork
from anyprec.widths import FLOAT

# A norm's output has standard deviation gamma, and the activation behind it clips at 1. Started at 1, a third of the
# positive half is cut off and learns nothing; at 0.5 the clip is two deviations out, and 8 bit starts close to float.
# 1 bit keeps 1: its one border lies at 0.5. Under scale="mean" all starts as the paper's authors have it.
GAMMA_START = 0.5

Norm = TypeVar("Norm", bound=SwitchNorm)


class ZooNetwork(SplitNetwork):
    """Made by registry.build, which notes how to build its like; save_model writes that into checkpoints."""

    zoo_name: str
    zoo_options: dict[str, Any]  # plain JSON values


@dataclass(frozen=True)
class Parts:
    widths: tuple[int, ...]
    quantizer: str = "nested"
    scale: str = "learned"

    def conv(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        act: ActQuantizer | None = None,
        **options: int,
    ) -> AnyConv2d:
        """Reads an input that a shared activation has quantized already, unless it is given its own `act`."""
        quantizer = make_quantizer(self.quantizer, self.widths, self.scale)
        return AnyConv2d(channels_in, channels_out, kernel, bias=False, quantizer=quantizer, act=act, **options)

    def linear(self, features_in: int, features_out: int) -> AnyLinear:
        quantizer = make_quantizer(self.quantizer, self.widths, self.scale)
        return AnyLinear(features_in, features_out, bias=False, quantizer=quantizer)

    def norm(self, channels: int, clipped: bool = True) -> SwitchBatchNorm2d:
        """`clipped` says that the paper's activation follows, so that gamma may start to suit its clip."""
        norm = SwitchBatchNorm2d(channels, self.widths)
        return self._inside_the_clip(norm) if clipped else norm

    def norm1d(self, features: int) -> SwitchBatchNorm1d:
        return self._inside_the_clip(SwitchBatchNorm1d(features, self.widths))

    def act(self, quantize: bool = True) -> AnyActivation:
        """The paper's activation: clip to [0, 1] and round; ReLU at 32 bits."""
        return AnyActivation(quantize=quantize)

    def _inside_the_clip(self, norm: Norm) -> Norm:
        for key, table in norm.tables.items():
            if self.scale == "learned" and key not in ("1", str(FLOAT)):
                nn.init.constant_(table.weight, GAMMA_START)  # type: ignore[arg-type]
        return norm
