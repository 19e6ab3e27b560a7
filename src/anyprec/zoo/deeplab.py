"""DeepLab V3: a classification ResNet without its end, atrous spatial pyramid pooling, a class for every pixel.

Chen et al., "Rethinking Atrous Convolution for Semantic Image Segmentation", 2017; the paper's Table 6. Images
(N, C, H, W) float in, logits (N, classes, H, W) out. Backbone and pyramid are any-precision, in the pre-activation form
of the ResNets here; the first and the last layer are float, and with skip="float" the skips. Stages that do not halve
the image any more dilate instead. Names and shapes of the backbone are those of the classification networks, so that
their weights fit (`load_backbone`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.errors import AnyprecError, CheckpointError
from anyprec.nn.switching import any_layers, widths_of
from anyprec.zoo.parts import Parts, ZooNetwork
from anyprec.zoo.resnet import BasicBlock, Bottleneck, check_blocks, scaled
from anyprec.zoo.weights import Source, load_exact, read_state_dict, spread_norms

BACKBONE = ("conv0.", "blocks.", "norm.")


class DeepLab(ZooNetwork):
    """What all have in common: `block`, `channels` and `default_blocks` are the backbone's, `rates` the pyramid's."""

    block: type[BasicBlock] | type[Bottleneck]
    channels: tuple[int, ...]
    default_blocks: tuple[int, ...]
    stem_kernel: int
    raw: bool  # how the backbone's skips are made, see resnet.Block
    default_rates: tuple[int, ...]
    default_stride: int

    def __init__(
        self,
        parts: Parts,
        num_classes: int,
        in_channels: int,
        *,
        blocks: Sequence[int] | None = None,
        multiplier: float = 1,
        skip: str = "float",
        output_stride: int | None = None,
        rates: Sequence[int] | None = None,
        pyramid: int = 256,
    ) -> None:
        super().__init__()
        counts = check_blocks(self.default_blocks if blocks is None else blocks, len(self.channels))
        channels = [scaled(c, multiplier) for c in self.channels]
        stride = self.default_stride if output_stride is None else output_stride
        if stride not in (4, 8, 16, 32):
            raise AnyprecError(f"output_stride={stride!r} is not known; choose 4, 8, 16 or 32")
        rates = check_rates(self.default_rates if rates is None else rates)
        if isinstance(pyramid, bool) or not isinstance(pyramid, int) or pyramid < 1:
            raise AnyprecError(f"pyramid={pyramid!r} is not a number of channels; give 1 or more, such as 256")
        self.conv0 = nn.Conv2d(in_channels, channels[0], self.stem_kernel, 2, self.stem_kernel // 2, bias=False)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.ModuleList()
        before, reached, dilation = channels[0], 4, 1  # the stem has come down to a quarter
        for stage, count in enumerate(counts):
            halves = stage > 0 and reached < stride
            reached *= 2 if halves else 1
            for i in range(count):
                # A dilated stage begins with the dilation of the one before: its input is still that fine.
                wide = dilation * (2 if stage > 0 and not halves and i > 0 else 1)
                step = 2 if halves and i == 0 else 1
                self.blocks.append(self.block(parts, before, channels[stage], step, skip, self.raw, wide))
                before = channels[stage] * self.block.expansion
            dilation *= 2 if stage > 0 and not halves else 1
        self.norm = parts.norm(before)
        self.act = parts.act()
        self.aspp = AtrousPyramid(parts, before, pyramid, rates)
        self.classifier = nn.Conv2d(pyramid, num_classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stem(self, x: Tensor) -> Tensor:
        y: Tensor = self.maxpool(self.conv0(x))
        return y

    def body(self, z: Tensor, size: Sequence[int] | None = None) -> Tensor:
        """Logits, brought to `size` where it is given: the stem's output does not tell that of the image."""
        for block in self.blocks:
            z = block(z)
        y: Tensor = self.classifier(self.aspp(self.act(self.norm(z))))
        if size is None:
            return y
        return F.interpolate(y, size=(int(size[0]), int(size[1])), mode="bilinear", align_corners=False)

    def split(self, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        size = images.shape[2:]
        return self.stem(images), lambda z: self.body(z, size)


class AtrousPyramid(nn.Module):
    """Atrous spatial pyramid pooling: a 1x1 convolution, dilated 3x3 ones, the mean of the image; then all mixed.

    Reads an activated input. The mean is taken behind its 1x1 convolution, where DeepLab has it before: both are
    linear, so it is the same, but a mean of codes would have to be rounded to codes again, which at 1 bit makes all
    images alike. The branches share one norm: per channel, so it is a norm for each of them.
    """

    def __init__(self, parts: Parts, channels_in: int, channels: int, rates: Sequence[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([parts.conv(channels_in, channels, 1)])
        self.convs += [parts.conv(channels_in, channels, 3, padding=rate, dilation=rate) for rate in rates]
        self.pool_conv = parts.conv(channels_in, channels, 1)
        self.norm0 = parts.norm(channels * (len(self.convs) + 1))
        self.act0 = parts.act()
        self.project = parts.conv(channels * (len(self.convs) + 1), channels, 1)
        self.norm1 = parts.norm(channels)
        self.act1 = parts.act()

    def forward(self, a: Tensor) -> Tensor:
        mean = self.pool_conv(a).mean(dim=(2, 3), keepdim=True)
        spread = F.interpolate(mean, size=a.shape[2:], mode="bilinear", align_corners=False)
        y = torch.cat([*(conv(a) for conv in self.convs), spread], dim=1)
        answer: Tensor = self.act1(self.norm1(self.project(self.act0(self.norm0(y)))))
        return answer


class DeepLabResNet50(DeepLab):
    block, channels, default_blocks = Bottleneck, (64, 128, 256, 512), (3, 4, 6, 3)
    stem_kernel, raw, default_rates, default_stride = 7, True, (6, 12, 18), 16


class DeepLabResNet18(DeepLab):
    block, channels, default_blocks = BasicBlock, (64, 128, 256, 512), (2, 2, 2, 2)
    stem_kernel, raw, default_rates, default_stride = 7, True, (6, 12, 18), 16


class DeepLabSmall(DeepLab):
    """On the stages of the CIFAR ResNets, with a stem that comes down to a quarter; for images of some 200 pixels."""

    block, channels, default_blocks = BasicBlock, (16, 32, 64), (1, 1, 1)
    stem_kernel, raw, default_rates, default_stride = 3, False, (3, 6, 9), 8


def check_rates(rates: Sequence[int]) -> tuple[int, ...]:
    whole = isinstance(rates, Sequence) and all(type(r) is int and 0 < r <= 512 for r in rates)
    if not whole or not 1 <= len(rates) <= 16:
        raise AnyprecError(f"rates={rates!r} is not a list of dilations; give whole numbers such as [6, 12, 18]")
    return tuple(rates)


def load_backbone(model: nn.Module, source: Source, what: str) -> None:
    """The weights of a classification network into the backbone of a DeepLab; the pyramid keeps what it has.

    From an any-precision network of the same widths come its norms and scales too; a float network's norms go to
    every width, and learned scales are fitted to its weights.
    """
    own = model.state_dict()
    state = {n: v for n, v in read_state_dict(source).items() if n.startswith(BACKBONE)}
    if not state:
        raise CheckpointError(f"{what} has no weights named conv0, blocks or norm; give those of a zoo ResNet")
    is_float = not any(".tables." in name for name in state)
    if is_float:
        state = spread_norms(model, state)
    # Widths of the checkpoint that the model does not have; what the model has and the checkpoint lacks is an error.
    state = {n: v for n, v in state.items() if n in own or not (".tables." in n or ".scales." in n)}
    kept = {n: v for n, v in own.items() if not n.startswith(BACKBONE) or (is_float and ".quantizer." in n)}
    load_exact(model, {**kept, **state}, what)
    if is_float:
        for layer in any_layers(model).values():
            layer.quantizer.fit(layer.weight, widths_of(model))
