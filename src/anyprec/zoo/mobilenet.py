"""MobileNetV2 for 32x32 images with group convolutions in place of the depth-wise ones, pre-activation.

The paper: binarised depth-wise convolutions may diverge, so group convolutions replace them. It does not give
the size of a group; ours is 8 channels (`group_size`). Norm and activation stand before each convolution, so
every quantized input lies in [0, 1] although bottleneck outputs are signed. Built by registry.build.
"""

from __future__ import annotations

from torch import Tensor, nn

from anyprec.errors import AnyprecError
from anyprec.zoo.parts import Parts, ZooNetwork
from anyprec.zoo.resnet import scaled

# (expansion, channels, blocks, stride): table 2 of the MobileNetV2 paper. For 32x32 images the stem and the
# first stage with a stride keep the size instead, so that the last maps are 4x4 and not 1x1.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedBlock(nn.Module):
    """1x1 up to `expansion` times the channels (none for 1), 3x3 in groups, 1x1 down; plus x if it fits."""

    def __init__(
        self, parts: Parts, channels_in: int, channels: int, expansion: int, stride: int, group_size: int
    ) -> None:
        super().__init__()
        inner = channels_in * expansion
        if inner % group_size:
            raise AnyprecError(
                f"group_size={group_size} does not divide the {inner} channels of a group convolution; "
                "choose 1, 2, 4 or 8"
            )
        self.identity = stride == 1 and channels_in == channels
        self.up = expansion > 1
        if self.up:
            self.norm0 = parts.norm(channels_in)
            self.act0 = parts.act()
            self.conv0 = parts.conv(channels_in, inner, 1)
        self.norm1 = parts.norm(inner)
        self.act1 = parts.act()
        self.conv1 = parts.conv(inner, inner, 3, stride=stride, padding=1, groups=inner // group_size)
        self.norm2 = parts.norm(inner)
        self.act2 = parts.act()
        self.conv2 = parts.conv(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv0(self.act0(self.norm0(x))) if self.up else x
        y = self.conv1(self.act1(self.norm1(y)))
        y = self.conv2(self.act2(self.norm2(y)))
        answer: Tensor = x + y if self.identity else y
        return answer


class MobileNetV2(ZooNetwork):
    """`multiplier` multiplies all channels, rounded to multiples of 8. group_size=1 is depth-wise again."""

    def __init__(
        self, parts: Parts, num_classes: int, in_channels: int, *, multiplier: float = 1, group_size: int = 8
    ) -> None:
        super().__init__()
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
            raise AnyprecError(f"group_size={group_size!r} is not a number of channels; choose 1, 2, 4 or 8")
        before = multiple_of_eight(32, multiplier)
        self.conv0 = nn.Conv2d(in_channels, before, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        for expansion, channels, count, stride in STAGES:
            for i in range(count):
                after = multiple_of_eight(channels, multiplier)
                self.blocks.append(InvertedBlock(parts, before, after, expansion, stride if i == 0 else 1, group_size))
                before = after
        last = max(1280, multiple_of_eight(1280, multiplier))  # the original never narrows the last layer
        self.norm0 = parts.norm(before)
        self.act0 = parts.act()
        self.conv1 = parts.conv(before, last, 1)
        self.norm1 = parts.norm(last)
        self.act1 = parts.act()
        self.fc = nn.Linear(last, num_classes)

    def stem(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv0(x)
        return y

    def body(self, z: Tensor) -> Tensor:
        for block in self.blocks:
            z = block(z)
        z = self.conv1(self.act0(self.norm0(z)))
        y: Tensor = self.fc(self.act1(self.norm1(z)).mean(dim=(2, 3)))
        return y


def multiple_of_eight(channels: int, multiplier: float) -> int:
    """Channels under a channel multiplier, to the nearest multiple of 8: 160 at 0.35 -> 56."""
    return max(8, 8 * round(scaled(channels, multiplier) / 8))
