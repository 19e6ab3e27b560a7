"""Networks as others write them, small and random: norms that are activations too, weights computed in forward, padding
by the size of the image, hooks, branches, skips. Used by bench/pack_check.py and tests/packing/test_verify_networks.py.

`FOREIGN[name]()` gives a float network in eval mode with settled batch norms, and images for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BatchNormAct2d(nn.BatchNorm2d):
    """timm's kind: the norm calls its activation itself."""

    def __init__(self, channels: int, act: bool = True) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.act(self.drop(x))


class ConvNormAct(nn.Module):
    def __init__(self, inside: int, out: int, kernel: int = 3, stride: int = 1, act: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, out, kernel, stride, kernel // 2, bias=False)
        self.bn = BatchNormAct2d(out, act)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class ResidualNormAct(nn.Module):
    """Bottlenecks of ConvNormAct, the last without an activation, as in timm's ResNets and CSP networks."""

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv1 = ConvNormAct(channels, channels // 2, 1)
            self.conv2 = ConvNormAct(channels // 2, channels // 2)
            self.conv3 = ConvNormAct(channels // 2, channels, 1, act=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.conv3(self.conv2(self.conv1(x))) + x)

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNormAct(3, 32, 5, 2)
        self.blocks = nn.Sequential(self.Block(32), ConvNormAct(32, 64, 3, 2), self.Block(64))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class DenseNormAct(nn.Module):
    """DenseNet: norm-act first, all that was made so far is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([BatchNormAct2d(16 + 12 * i) for i in range(4)])
        self.convs = nn.ModuleList([nn.Conv2d(16 + 12 * i, 12, 3, padding=1, bias=False) for i in range(4)])
        self.last = BatchNormAct2d(64)
        self.transition = nn.Conv2d(64, 32, 1, bias=False)
        self.pool = nn.AvgPool2d(2, 2)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(norm(x))], 1)
        return self.fc(F.relu(self.pool(self.transition(self.last(x)))).mean((2, 3)))


class StdConv2dSame(nn.Conv2d):
    """Weight standardization, and padding by the size of the image as TensorFlow has it."""

    def forward(self, x: Tensor) -> Tensor:
        pads = []
        for size, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            pads += [total // 2, total - total // 2]
        mean, var = self.weight.mean((1, 2, 3), keepdim=True), self.weight.var((1, 2, 3), keepdim=True, correction=0)
        return F.conv2d(F.pad(x, pads), (self.weight - mean) / (var + 1e-6).sqrt(), self.bias, self.stride)


class BitStyle(nn.Module):
    """Some layers are such StdConv2dSame (left float), some plain, one is parametrised by weight_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = StdConv2dSame(3, 16, 7, 2)
        self.norm = nn.BatchNorm2d(16)
        self.mid = nn.Conv2d(16, 16, 3, padding="same", groups=4)
        self.std = StdConv2dSame(16, 24, 3, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(24, 24, 1))
        self.wide = nn.Conv2d(24, 48, (1, 3), padding=(0, 1))
        self.fc = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.mid(F.relu(self.norm(self.stem(x)))))
        x = self.wide(F.relu(self.normed(F.relu(self.std(x)))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class VggHooked(nn.Module):
    """VGG with batch norm, no affine parameters in one, a shared convolution, and hooks that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32, affine=False), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.twice = nn.Conv2d(32, 32, 3, padding=1)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(), nn.Linear(32 * 64, 64), nn.ReLU(), nn.Linear(64, 10)
        )
        self.features[1].register_forward_hook(doubled)
        self.twice.register_forward_pre_hook(shifted)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.classifier(F.relu(self.twice(F.relu(self.twice(x)))))


def doubled(module: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
    return 2 * out


def shifted(module: nn.Module, given: tuple[Tensor]) -> Tensor:
    return given[0] - 0.1


class Inception(nn.Module):
    """Branches of other shapes, average pools that do not count padding, ceil mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24, eps=1e-3), nn.ReLU())
        self.one = nn.Conv2d(24, 16, 1)
        self.five = nn.Sequential(nn.Conv2d(24, 12, 1), nn.ReLU(), nn.Conv2d(12, 16, 5, padding=2))
        self.line = nn.Sequential(nn.Conv2d(24, 16, (1, 7), padding=(0, 3)), nn.Conv2d(16, 16, (7, 1), padding=(3, 0)))
        self.pooled = nn.Conv2d(24, 16, 1)
        self.norm = nn.BatchNorm2d(64, momentum=None)
        self.down = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.fc = nn.Conv2d(64, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        pool = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        x = torch.cat([self.one(x), self.five(x), self.line(x), self.pooled(pool)], 1)
        return self.fc(self.down(F.relu(self.norm(x)))).mean((2, 3))


class UNet(nn.Module):
    """A class for every pixel: resized maps beside earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = ConvNormAct(3, 16), ConvNormAct(16, 32, 3, 2), ConvNormAct(32, 48, 3, 2)
        self.up1, self.up2 = ConvNormAct(80, 32), ConvNormAct(48, 16)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        x = F.interpolate(self.c(b), size=b.shape[-2:], mode="bilinear", align_corners=False)
        x = F.interpolate(self.up1(torch.cat([x, b], 1)), size=a.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(self.up2(torch.cat([x, a], 1)))


class Audio(nn.Module):
    """1-d: strided convolutions along time."""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for inside, out, kernel, stride in ((1, 16, 16, 4), (16, 32, 3, 1), (32, 32, 3, 2), (32, 64, 3, 1)):
            layers += [nn.Conv1d(inside, out, kernel, stride, kernel // 2), nn.BatchNorm1d(out), nn.ReLU()]
        self.layers, self.fc = nn.Sequential(*layers), nn.Linear(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.max_pool1d(self.layers(x), 2).mean(2))


def transformers_resnet() -> nn.Module:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 2, 1], layer_type="bottleneck", num_labels=10
    )
    return transformers.ResNetForImageClassification(config)


def transformers_mobilenet() -> nn.Module:
    import transformers

    config = transformers.MobileNetV2Config(depth_multiplier=0.35, image_size=64, num_labels=10)
    return transformers.MobileNetV2ForImageClassification(config)


def settled(make: Callable[[], nn.Module], *shape: int) -> Callable[[], tuple[nn.Module, Tensor]]:
    def made() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        net = make()
        batch_norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        with torch.no_grad():
            for norm in batch_norms:
                if norm.affine:
                    norm.weight.uniform_(0.5, 1.5)
                    norm.bias.uniform_(-0.3, 0.5)
            for _ in range(8):
                net.train()(torch.randn(16, *shape))
        return net.eval(), torch.randn(8, *shape)

    return made


FOREIGN: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "norm-act ResNet": settled(ResidualNormAct, 3, 64, 64),
    "norm-act DenseNet": settled(DenseNormAct, 3, 48, 48),
    "BiT-style": settled(BitStyle, 3, 64, 64),
    "VGG with hooks": settled(VggHooked, 3, 32, 32),
    "Inception": settled(Inception, 3, 64, 64),
    "U-Net": settled(UNet, 3, 48, 64),
    "audio, 1-d": settled(Audio, 1, 2000),
    "transformers ResNet": settled(transformers_resnet, 3, 64, 64),
    "transformers MobileNetV2": settled(transformers_mobilenet, 3, 64, 64),
}
