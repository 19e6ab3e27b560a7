"""The textbook CIFAR ResNet (He et al., 2015, section 4.2): post-activation, shortcuts of option A.

It takes published float weights (`load_float` in weights.py) and then gives exactly their outputs at 32 bits.
Its activations do not lie in [0, 1]: each convolution quantizes its own input in a range that is calibrated
from data per width, then learned. Module names are those of the published files. Built by registry.build.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.errors import AnyprecError
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import AnyConv2d
from anyprec.zoo.parts import Parts, ZooNetwork


def rectified(y: Tensor) -> Tensor:
    """ReLU; in training in place of y, which nothing else reads: 8 MB less to write and to keep a layer."""
    return torch.relu_(y) if torch.is_grad_enabled() and y.requires_grad else torch.relu(y)


class HeBlock(nn.Module):
    """conv, norm, ReLU, conv, norm, plus the shortcut, ReLU. The shortcut carries the unquantized input."""

    def __init__(self, parts: Parts, channels_in: int, channels: int, stride: int, clip: str) -> None:
        super().__init__()

        def conv(channels_in: int, stride: int) -> AnyConv2d:
            # rectify=False: the network has its own ReLU, and at 32 bits the input passes as it is.
            act = ActQuantizer(parts.widths, clip=clip, rectify=False)
            return parts.conv(channels_in, channels, 3, act=act, stride=stride, padding=1)

        self.stride, self.extra = stride, channels - channels_in
        self.conv1 = conv(channels_in, stride)
        self.bn1 = parts.norm(channels, clipped=False)
        self.conv2 = conv(channels, 1)
        self.bn2 = parts.norm(channels, clipped=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(rectified(self.bn1(self.conv1(x)))))
        if self.extra:  # every second pixel; half of the new channels, all zero, before the old ones and half after
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return rectified(y + x)


class HeResNet(ZooNetwork):
    """`depth` = 6n + 2: n blocks each of 16, 32 and 64 channels."""

    def __init__(
        self, parts: Parts, num_classes: int, in_channels: int, *, depth: int = 20, clip: str = "learned"
    ) -> None:
        super().__init__()
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 8 or depth % 6 != 2:
            raise AnyprecError(f"depth={depth!r} is not a CIFAR ResNet's; give 6n + 2, such as 20, 32, 44, 56 or 110")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = parts.norm(16, clipped=False)
        self.layer1 = self.stage(parts, 16, 16, 1, blocks, clip)
        self.layer2 = self.stage(parts, 16, 32, 2, blocks, clip)
        self.layer3 = self.stage(parts, 32, 64, 2, blocks, clip)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)

    @staticmethod
    def stage(parts: Parts, channels_in: int, channels: int, stride: int, blocks: int, clip: str) -> nn.Sequential:
        first = HeBlock(parts, channels_in, channels, stride, clip)
        return nn.Sequential(first, *(HeBlock(parts, channels, channels, 1, clip) for _ in range(blocks - 1)))

    def stem(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv1(x)
        return y

    def body(self, z: Tensor) -> Tensor:
        z = rectified(self.bn1(z))
        z = self.layer3(self.layer2(self.layer1(z)))
        y: Tensor = self.linear(z.mean(dim=(2, 3)))
        return y
