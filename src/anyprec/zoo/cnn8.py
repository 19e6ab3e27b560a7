"""CNN-8 for SVHN: the eight-layer network called model C in the DoReFa paper, as the paper's authors run it.

Seven convolutions and a linear layer on 40x40 images. Here the norm comes after its convolution, and the last
convolution has none. Images (N, C, 40, 40) float in, logits (N, classes) out. Built by registry.build.
"""

from __future__ import annotations

from torch import Tensor, nn

from anyprec.errors import AnyprecError, DataError
from anyprec.zoo.parts import Parts, ZooNetwork


class Cnn8(ZooNetwork):
    """Channels 6e, 8e, 8e, 16e, 16e, 16e, 64e for `expand` = e: 2 is model C, 8 is model A."""

    def __init__(
        self, parts: Parts, num_classes: int, in_channels: int, *, expand: int = 2, dropout: float = 0.5
    ) -> None:
        super().__init__()
        if isinstance(expand, bool) or not isinstance(expand, int) or not 1 <= expand <= 64:
            raise AnyprecError(
                f"expand={expand!r} is not a channel multiplier of CNN-8; give a whole number from 1 to 64"
            )
        e = expand
        self.conv0 = nn.Conv2d(in_channels, 6 * e, 5)  # 40 -> 36; the one with a bias, no norm follows it
        self.act0 = parts.act()
        self.conv1 = parts.conv(6 * e, 8 * e, 3, padding=1)  # 18, after the max-pool
        self.norm1 = parts.norm(8 * e)
        self.act1 = parts.act()
        self.conv2 = parts.conv(8 * e, 8 * e, 3, padding=1)
        self.norm2 = parts.norm(8 * e)
        self.act2 = parts.act()
        self.conv3 = parts.conv(8 * e, 16 * e, 3)  # 9 -> 7
        self.norm3 = parts.norm(16 * e)
        self.act3 = parts.act()
        self.conv4 = parts.conv(16 * e, 16 * e, 3, padding=1)
        self.norm4 = parts.norm(16 * e)
        self.act4 = parts.act()
        self.conv5 = parts.conv(16 * e, 16 * e, 3)  # 7 -> 5
        self.norm5 = parts.norm(16 * e)
        self.act5 = parts.act()
        self.dropout = nn.Dropout(check_dropout(dropout))
        self.conv6 = parts.conv(16 * e, 64 * e, 5)  # 5 -> 1
        self.act6 = parts.act(quantize=False)  # a float layer reads it: clipped, not rounded
        self.fc = nn.Linear(64 * e, num_classes)
        self.pool = nn.MaxPool2d(2)

    def stem(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (40, 40):
            raise DataError(f"CNN-8 reads 40x40 images, not {x.shape[-2]}x{x.shape[-1]}; resize them (SVHN: 32 -> 40)")
        y: Tensor = self.pool(self.conv0(x))
        return y

    def body(self, z: Tensor) -> Tensor:
        z = self.norm1(self.conv1(self.act0(z)))
        z = self.pool(self.norm2(self.conv2(self.act1(z))))
        z = self.norm3(self.conv3(self.act2(z)))
        z = self.norm4(self.conv4(self.act3(z)))
        z = self.norm5(self.conv5(self.act4(z)))
        z = self.conv6(self.dropout(self.act5(z)))  # (N, 64e, 1, 1)
        y: Tensor = self.fc(self.act6(z).flatten(1))
        return y


def check_dropout(dropout: float) -> float:
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise AnyprecError(f"dropout={dropout!r} is not a probability; give a number from 0 up to, not including, 1")
    return dropout
