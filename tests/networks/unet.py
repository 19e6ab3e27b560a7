"""U-Net with transposed convolutions, as in https://arxiv.org/abs/1505.04597 but padded and with batch norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def double(inside: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inside, out):
        layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, channels: int = 32, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        sizes = [channels * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList([double(3 if i == 0 else sizes[i - 1], sizes[i]) for i in range(depth + 1)])
        self.pool = nn.MaxPool2d(2)
        self.rise = nn.ModuleList([nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in reversed(sizes[:-1])])
        self.up = nn.ModuleList([double(2 * n, n) for n in reversed(sizes[:-1])])
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else self.pool(x))
            skips.append(x)
        for rise, block, skip in zip(self.rise, self.up, reversed(skips[:-1]), strict=True):
            x = block(torch.cat([skip, rise(x)], 1))
        return self.head(x)
