"""Pre-activation any-precision ResNets: `CifarResNet` (ResNet-8/20) and `ImageNetResNet` (ResNet-18/50).

Structure of the paper's authors: first and last layer float; norm, activation, convolution in every block;
float skip convolutions. The families differ in the skip (CIFAR: reads the activated input, one plain norm for
all widths; ImageNet: reads the raw input, switched norm) and in the end (ImageNet: an activation before the
mean). Images (N, C, H, W) float in, logits (N, classes) out. Built by registry.build.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from anyprec.errors import AnyprecError
from anyprec.nn.layers import PointwiseConv2d
from anyprec.nn.norms import BatchNorm2d
from anyprec.zoo.parts import Parts, ZooNetwork


def scaled(channels: int, multiplier: float) -> int:
    """Channels under a multiplier: 16 at 0.25 -> 4."""
    if isinstance(multiplier, bool) or not isinstance(multiplier, (int, float)) or not 0 < multiplier <= 64:
        raise AnyprecError(f"multiplier={multiplier!r} is not a channel multiplier; give a number above 0, at most 64")
    return max(1, round(channels * multiplier))


def check_blocks(blocks: Sequence[int], stages: int) -> tuple[int, ...]:
    """Blocks per stage, as plain ints."""
    if (
        not isinstance(blocks, Sequence)
        or len(blocks) != stages
        or not all(isinstance(n, int) and 0 < n <= 200 for n in blocks)
    ):
        raise AnyprecError(f"blocks={blocks!r} is not a list of {stages} block counts, one a stage, each at least 1")
    return tuple(blocks)


class Block(nn.Module):
    """What both blocks share: the skip. `raw` is the ImageNet nets' skip (raw input, switched norm).

    A quantized skip always reads the activated input, since the raw one has neither sign nor range.
    """

    def make_skip(self, parts: Parts, channels: tuple[int, int], stride: int, skip: str, raw: bool) -> None:
        if skip not in ("float", "quantized"):
            raise AnyprecError(f"skip={skip!r} is not known; choose 'float' or 'quantized'")
        self.raw = raw and skip == "float"
        self.skip_conv: nn.Module | None = None
        self.skip_norm: nn.Module | None = None
        if stride == 1 and channels[0] == channels[1]:
            return
        if skip == "quantized":
            self.skip_conv = parts.conv(*channels, 1, stride=stride)
        else:
            self.skip_conv = PointwiseConv2d(*channels, 1, stride=stride, bias=False)
        self.skip_norm = (
            BatchNorm2d(channels[1]) if skip == "float" and not raw else parts.norm(channels[1], clipped=False)
        )

    def shortcut(self, x: Tensor, activated: Tensor) -> Tensor:
        if self.skip_conv is None or self.skip_norm is None:
            return x
        y: Tensor = self.skip_norm(self.skip_conv(x if self.raw else activated))
        return y


class BasicBlock(Block):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(
        self, parts: Parts, channels_in: int, channels: int, stride: int, skip: str, raw: bool, dilation: int = 1
    ) -> None:
        super().__init__()
        # Where a plain norm in the skip serves all widths, they have to reach it at about one scale.
        self.norm0 = parts.norm(channels_in, clipped=raw or skip == "quantized")
        self.act0 = parts.act()
        self.conv0 = parts.conv(channels_in, channels, 3, stride=stride, padding=dilation, dilation=dilation)
        self.norm1 = parts.norm(channels)
        self.act1 = parts.act()
        self.conv1 = parts.conv(channels, channels, 3, padding=dilation, dilation=dilation)
        self.make_skip(parts, (channels_in, channels), stride, skip, raw)

    def forward(self, x: Tensor) -> Tensor:
        a = self.act0(self.norm0(x))
        y = self.conv1(self.act1(self.norm1(self.conv0(a))))
        answer: Tensor = y + self.shortcut(x, a)
        return answer


class Bottleneck(Block):
    """1x1 down, 3x3, 1x1 up to four times the channels; the stride is in the 3x3."""

    expansion = 4

    def __init__(
        self, parts: Parts, channels_in: int, channels: int, stride: int, skip: str, raw: bool, dilation: int = 1
    ) -> None:
        super().__init__()
        self.norm0 = parts.norm(channels_in)
        self.act0 = parts.act()
        self.conv0 = parts.conv(channels_in, channels, 1)
        self.norm1 = parts.norm(channels)
        self.act1 = parts.act()
        self.conv1 = parts.conv(channels, channels, 3, stride=stride, padding=dilation, dilation=dilation)
        self.norm2 = parts.norm(channels)
        self.act2 = parts.act()
        self.conv2 = parts.conv(channels, 4 * channels, 1)
        self.make_skip(parts, (channels_in, 4 * channels), stride, skip, raw)

    def forward(self, x: Tensor) -> Tensor:
        a = self.act0(self.norm0(x))
        y = self.conv1(self.act1(self.norm1(self.conv0(a))))
        y = self.conv2(self.act2(self.norm2(y)))
        answer: Tensor = y + self.shortcut(x, a)
        return answer


class CifarResNet(ZooNetwork):
    """16, 32, 64 channels (times `multiplier`) at full, half and quarter size; blocks (3, 3, 3) is ResNet-20.

    Works on any image of at least 4x4, 8x8x1 digits among them.
    """

    def __init__(
        self,
        parts: Parts,
        num_classes: int,
        in_channels: int,
        *,
        blocks: Sequence[int] = (3, 3, 3),
        multiplier: float = 1,
        skip: str = "float",
    ) -> None:
        super().__init__()
        channels = [scaled(c, multiplier) for c in (16, 32, 64)]
        self.conv0 = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        before = channels[0]
        for stage, count in enumerate(check_blocks(blocks, 3)):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                self.blocks.append(BasicBlock(parts, before, channels[stage], stride, skip, raw=False))
                before = channels[stage]
        self.norm = parts.norm(before, clipped=False)
        self.fc = nn.Linear(before, num_classes)

    def stem(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv0(x)
        return y

    def body(self, z: Tensor) -> Tensor:
        for block in self.blocks:
            z = block(z)
        y: Tensor = self.fc(self.norm(z).mean(dim=(2, 3)))  # no activation here, as the authors have it
        return y


class ImageNetResNet(ZooNetwork):
    """64, 128, 256, 512 channels (times `multiplier` and the block's expansion) after a 7x7 stem and max-pool."""

    block: type[BasicBlock] | type[Bottleneck]
    default_blocks: tuple[int, ...]

    def __init__(
        self,
        parts: Parts,
        num_classes: int,
        in_channels: int,
        *,
        blocks: Sequence[int] | None = None,
        multiplier: float = 1,
        skip: str = "float",
    ) -> None:
        super().__init__()
        counts = check_blocks(self.default_blocks if blocks is None else blocks, 4)
        channels = [scaled(c, multiplier) for c in (64, 128, 256, 512)]
        self.conv0 = nn.Conv2d(in_channels, channels[0], 7, stride=2, padding=3, bias=False)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.ModuleList()
        before = channels[0]
        for stage, count in enumerate(counts):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                self.blocks.append(self.block(parts, before, channels[stage], stride, skip, raw=True))
                before = channels[stage] * self.block.expansion
        self.norm = parts.norm(before)
        self.act = parts.act()
        self.fc = nn.Linear(before, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stem(self, x: Tensor) -> Tensor:
        y: Tensor = self.maxpool(self.conv0(x))
        return y

    def body(self, z: Tensor) -> Tensor:
        for block in self.blocks:
            z = block(z)
        y: Tensor = self.fc(self.act(self.norm(z)).mean(dim=(2, 3)))
        return y


class ResNet18(ImageNetResNet):
    block, default_blocks = BasicBlock, (2, 2, 2, 2)


class ResNet50(ImageNetResNet):
    block, default_blocks = Bottleneck, (3, 4, 6, 3)
