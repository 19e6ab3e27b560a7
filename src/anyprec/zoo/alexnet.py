"""AlexNet for 32x32 images: five convolutions, two hidden linear layers, a linear classifier.

The paper trains an AlexNet on CIFAR-10 but does not give its layers. This one keeps the original's channels
(64, 192, 384, 256, 256) and three max-pools, with kernels for small images, a switched norm after every layer
but the last, and hidden layers of 1024 (a 32x32 image leaves 4096 inputs, not 9216). Built by registry.build.
"""

from __future__ import annotations

from torch import Tensor, nn

from anyprec.errors import AnyprecError, DataError
from anyprec.zoo.cnn8 import check_dropout
from anyprec.zoo.parts import Parts, ZooNetwork
from anyprec.zoo.resnet import scaled


class AlexNet(ZooNetwork):
    """`size` is the side of the image, a multiple of 8.

    Dropout stands only before the float classifier: before a layer with a norm it would make the statistics
    the norm gathers in training differ from those it meets in use.
    """

    def __init__(
        self,
        parts: Parts,
        num_classes: int,
        in_channels: int,
        *,
        multiplier: float = 1,
        hidden: int = 1024,
        dropout: float = 0.5,
        size: int = 32,
    ) -> None:
        super().__init__()
        if not isinstance(size, int) or size < 8 or size % 8:
            raise AnyprecError(f"size={size!r} is not an image side for this AlexNet; give a multiple of 8, such as 32")
        if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
            raise AnyprecError(f"hidden={hidden!r} is not a layer size; give a whole number of at least 1")
        c = [scaled(n, multiplier) for n in (64, 192, 384, 256, 256)]
        self.size = size
        self.conv0 = nn.Conv2d(in_channels, c[0], 5, padding=2, bias=False)  # 32
        self.norm0 = parts.norm(c[0])
        self.act0 = parts.act()
        self.conv1 = parts.conv(c[0], c[1], 5, padding=2)  # 16, after the max-pool
        self.norm1 = parts.norm(c[1])
        self.act1 = parts.act()
        self.conv2 = parts.conv(c[1], c[2], 3, padding=1)  # 8
        self.norm2 = parts.norm(c[2])
        self.act2 = parts.act()
        self.conv3 = parts.conv(c[2], c[3], 3, padding=1)
        self.norm3 = parts.norm(c[3])
        self.act3 = parts.act()
        self.conv4 = parts.conv(c[3], c[4], 3, padding=1)
        self.norm4 = parts.norm(c[4])
        self.act4 = parts.act()
        self.linear0 = parts.linear(c[4] * (size // 8) ** 2, hidden)  # 4 x 4, after the last max-pool
        self.norm5 = parts.norm1d(hidden)
        self.act5 = parts.act()
        self.linear1 = parts.linear(hidden, hidden)
        self.norm6 = parts.norm1d(hidden)
        self.act6 = parts.act()
        self.dropout = nn.Dropout(check_dropout(dropout))
        self.fc = nn.Linear(hidden, num_classes)
        self.pool = nn.MaxPool2d(2)

    def stem(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.size, self.size):
            raise DataError(
                f"this AlexNet reads {self.size}x{self.size} images, not {x.shape[-2]}x{x.shape[-1]}; "
                f"resize them, or build it with size={x.shape[-1]}"
            )
        y: Tensor = self.pool(self.conv0(x))
        return y

    def body(self, z: Tensor) -> Tensor:
        z = self.pool(self.norm1(self.conv1(self.act0(self.norm0(z)))))
        z = self.norm2(self.conv2(self.act1(z)))
        z = self.norm3(self.conv3(self.act2(z)))
        z = self.pool(self.norm4(self.conv4(self.act3(z))))
        z = self.norm5(self.linear0(self.act4(z).flatten(1)))
        z = self.norm6(self.linear1(self.act5(z)))
        y: Tensor = self.fc(self.dropout(self.act6(z)))
        return y
