"""Your own network at any precision: train it in float, convert, train jointly, calibrate, choose bits at run time.

    python examples/convert_your_net.py            # about 20 seconds on one core; the data set is embedded

Replace `Net` by yours; nothing in it knows about bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anyprec
from anyprec.data import batches, load_data
from anyprec.training.evaluate import accuracy_table, evaluate, to_tensor
from anyprec.training.joint import joint_step

WIDTHS = (1, 2, 4, 8, 32)


class Net(nn.Module):
    """An ordinary residual network: functional activations, an identity shortcut, a depth-wise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 24, 3, padding=1)
        self.norm0 = nn.BatchNorm2d(24)
        self.conv1 = nn.Conv2d(24, 24, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(24)
        self.depthwise = nn.Conv2d(24, 24, 3, stride=2, padding=1, groups=24, bias=False)
        self.norm2 = nn.BatchNorm2d(24)
        self.conv2 = nn.Conv2d(24, 48, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(48)
        self.fc = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm0(self.stem(x)))
        x = x + F.relu(self.norm1(self.conv1(x)))
        x = F.relu6(self.norm2(self.depthwise(x)))
        x = F.silu(self.norm3(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def epochs(count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = load_data("digits", "train")
    for epoch in range(count):
        for images, labels in batches(data, 64, augment="crop", train=True, seed=seed, epoch=epoch):
            yield to_tensor(images), torch.from_numpy(labels)


def train_float(net: nn.Module, count: int) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), 5e-3)
    for x, y in epochs(count, seed=0):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def train_jointly(model: nn.Module, count: int) -> None:
    """One step trains all widths, each from the labels; `loss="recursive"` lets wider widths teach narrower ones."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count * 21)
    for x, y in epochs(count, seed=1):
        optimizer.zero_grad()
        joint_step(model, x, y, WIDTHS)
        optimizer.step()
        schedule.step()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Net()
    train_float(net, count=8)

    example = next(epochs(1, seed=0))[0]
    model = anyprec.convert(net, WIDTHS, example, group_depthwise=8)
    print(model.conversion, "\n")
    test = load_data("digits", "test")
    print("converted, not yet trained", accuracy_table(evaluate(model, test)), sep="\n", end="\n\n")

    train_jointly(model, count=12)
    anyprec.calibrate(model, [x for x, _ in epochs(1, seed=2)], widths=(3, 5, 6, 7))
    print("trained at 1, 2, 4, 8, 32; calibrated at 3, 5, 6, 7", accuracy_table(evaluate(model, test)), sep="\n")


if __name__ == "__main__":
    main()
