"""Your own network at any precision: train it in float, convert, train jointly, calibrate, pack, run without torch.

    python examples/convert_your_net.py [net.apm]   # about 20 seconds on one core; the data set is embedded

Replace `Net` by yours; nothing in it knows about bits. The packed file runs wherever anyprec is, without torch:
`anyprec run net.apm digit.png`, `anyprec serve net.apm`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anyprec
from anyprec.data import batches, load_data, preprocessing_of

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
        x = F.relu(self.norm3(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def epochs(count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = load_data("digits", "train")
    for epoch in range(count):
        for images, labels in batches(data, 64, augment="crop", train=True, seed=seed, epoch=epoch):
            yield torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)


def train_float(net: nn.Module, count: int) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), 5e-3)
    for x, y in epochs(count, seed=0):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def train_jointly(model: nn.Module, count: int) -> None:
    """One step trains all widths: each learns from the labels and from all wider ones."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count * 21)
    for x, y in epochs(count, seed=1):
        optimizer.zero_grad()
        anyprec.joint_step(model, x, y, WIDTHS)
        optimizer.step()
        schedule.step()


def show(title: str, accuracy: Mapping[int | str, float]) -> None:
    print(title)
    print("  ".join(f"{'float' if bits == 32 else bits}: {percent:.1f} %" for bits, percent in accuracy.items()), "\n")


def test_accuracy(model: nn.Module) -> dict[int | str, float]:
    found = anyprec.evaluate(model, load_data("digits", "test"))
    return {bits: values["accuracy"] for bits, values in found.items()}


def main(path: str = "net.apm") -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Net()
    train_float(net, count=8)

    example = next(epochs(1, seed=0))[0]
    model = anyprec.convert(net, WIDTHS, example, group_depthwise=8)
    print(model.conversion, "\n")
    show("converted, not yet trained", test_accuracy(model))

    train_jointly(model, count=12)
    anyprec.calibrate(model, [x for x, _ in epochs(1, seed=2)], widths=(3, 5, 6, 7))
    trained = test_accuracy(model)
    show("trained at 1, 2, 4, 8, 32; calibrated at 3, 5, 6, 7", trained)

    data = load_data("digits", "train")
    accuracy = {bits: percent for bits, percent in trained.items() if bits != 32}
    image = preprocessing_of(data)  # so that pictures are answered as in training
    print(anyprec.pack(model, path, example=example, image=image, labels=data.classes, accuracy=accuracy), "\n")

    test = load_data("digits", "test")
    with anyprec.load(path, layout="NHWC") as packed:  # numpy and the C++ engine
        right = {bits: packed(test.images, bits).argmax(1) == test.labels for bits in packed.widths}
        show(f"{path}, by the engine", {bits: 100 * float(found.mean()) for bits, found in right.items()})
        print("the first test image at 2 bit:", packed.predict(test.images[0], bits=2, top=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
