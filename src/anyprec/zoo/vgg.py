"""A VGG for 32x32 images of the kind that wins training-speed contests on CIFAR-10: few epochs, few multiplications.

A fixed whitening convolution and one learned convolution make the float stem; then come 3x3 convolutions at any
precision, two a block, in the order convolution, max-pool, norm, clip. Images (N, C, H, W) float in, logits
(N, classes) out. The stem is fitted to training images by `fit_stem`. Built by registry.build.

Why two float layers: 24 whitened channels at 1 bit would throw most of the image away, and a layer that no width
changes is computed once a training step, not once a width. `anyprec pack --first-last 8bit` makes both of them 8 bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.errors import AnyprecError, DataError
from anyprec.nn.layers import StemConv2d
from anyprec.zoo.parts import Parts, ZooNetwork

PATCH = 2  # side of a whitened patch
SMALLEST = 9  # image side: 9 -> 8 -> 4 -> 2 -> 1
HEAD_START = 1 / 9  # gamma of the last norm: keeps the first logits, and the steps of the classifier, small
WHITENING_FLOOR = 5e-4  # added to the variances: components that are all noise must not be blown up


class VggBlock(nn.Module):
    """Two 3x3 convolutions, the first followed by a max-pool. Each reads a quantized input."""

    def __init__(self, parts: Parts, channels_in: int, channels: int) -> None:
        super().__init__()
        self.act0 = parts.act()
        self.conv0 = parts.conv(channels_in, channels, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.norm0 = parts.norm(channels)
        self.act1 = parts.act()
        self.conv1 = parts.conv(channels, channels, 3, padding=1)
        self.norm1 = parts.norm(channels)

    def forward(self, z: Tensor) -> Tensor:
        z = self.norm0(self.pool(self.conv0(self.act0(z))))
        y: Tensor = self.norm1(self.conv1(self.act1(z)))
        return y


class SpeedVgg(ZooNetwork):
    """`channels` of the three blocks; the first block's first convolution is the learned part of the stem."""

    stem_images = 5000  # enough for the covariance of a patch: 12 numbers, nearly a thousand patches an image

    def __init__(
        self, parts: Parts, num_classes: int, in_channels: int, *, channels: Sequence[int] = (64, 256, 256)
    ) -> None:
        super().__init__()
        a, b, c = check_channels(channels)
        components = in_channels * PATCH * PATCH
        self.whiten = nn.Conv2d(in_channels, 2 * components, PATCH)  # 31; every component and its negative
        self.whiten.weight.requires_grad_(False)
        self.conv0 = StemConv2d(2 * components, a, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)  # 15
        self.norm0 = parts.norm(a)
        self.act0 = parts.act()
        self.conv1 = parts.conv(a, a, 3, padding=1)
        self.norm1 = parts.norm(a)
        self.block1 = VggBlock(parts, a, b)  # 7
        self.block2 = VggBlock(parts, b, c)  # 3
        self.fc = nn.Linear(c, num_classes)
        for table in self.block2.norm1.tables.values():
            nn.init.constant_(table.weight, HEAD_START)  # type: ignore[arg-type]

    @torch.no_grad()
    def fit_stem(self, images: Tensor) -> None:
        """Set the first layer so that the components of the patches of `images` (N, C, H, W) have variance 1 and no
        correlation: eigenvectors of the patches' covariance, each divided by its standard deviation.
        """
        self._check_size(images)
        patches = F.unfold(images.double(), PATCH).transpose(1, 2).reshape(-1, self.whiten.weight[0].numel())
        patches = patches - patches.mean(0)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))  # ascending
        components = (vectors / (values + WHITENING_FLOOR).sqrt()).T.flip(0)  # widest first
        # eigh leaves the sign open: the largest entry is made positive, so that every machine has the same stem.
        largest = components.gather(1, components.abs().argmax(1, keepdim=True))
        components = components * torch.where(largest < 0, -1.0, 1.0)
        weight = torch.cat([components, -components]).reshape(self.whiten.weight.shape)
        self.whiten.weight.copy_(weight.to(self.whiten.weight))
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]

    def _check_size(self, x: Tensor) -> None:
        if min(x.shape[-2:]) < SMALLEST:
            raise DataError(
                f"this VGG reads images of at least {SMALLEST}x{SMALLEST}, not {x.shape[-2]}x{x.shape[-1]}; "
                "its three max-pools leave nothing of smaller ones"
            )

    def stem(self, x: Tensor) -> Tensor:
        self._check_size(x)
        y: Tensor = self.pool(self.conv0(torch.relu(self.whiten(x))))
        return y

    def body(self, z: Tensor) -> Tensor:
        z = self.norm1(self.conv1(self.act0(self.norm0(z))))
        z = torch.relu(self.block2(self.block1(z)))  # a float layer reads it: neither clipped nor rounded
        y: Tensor = self.fc(F.max_pool2d(z, z.shape[2:]).flatten(1))
        return y


def check_channels(channels: Sequence[int]) -> tuple[int, int, int]:
    counts = tuple(channels) if isinstance(channels, (list, tuple)) else ()
    if len(counts) != 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        raise AnyprecError(
            f"channels={channels!r} is not allowed; give three whole numbers of at least 1, such as [64, 256, 256]"
        )
    return counts
