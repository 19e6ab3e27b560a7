"""The loss modes on digits, a data set that comes with the package: mean accuracy and deviation over seeds.

    python bench/loss_modes.py [--seeds 5]

Two networks: that of docs/tutorial.md, from random weights, and that of examples/convert_your_net.py, from float
weights; trained as they are there, with another seed each time. Under half an hour on one core. Writes
bench/results/loss_modes.csv.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anyprec
from anyprec.choices import LOSSES
from anyprec.data import batches, load_data
from anyprec.progress import Progress

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from convert_your_net import WIDTHS, Net

STEPS = 21  # of an epoch


def epochs(count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = load_data("digits", "train")
    for epoch in range(count):
        for images, labels in batches(data, 64, augment="crop", train=True, seed=seed, epoch=epoch):
            yield torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)


def trained(net: nn.Module, loss: str, seed: int, count: int, lr: float, **options: int) -> list[float]:
    """Percent right at each of WIDTHS."""
    model = anyprec.convert(net, WIDTHS, next(epochs(1, seed))[0], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count * STEPS)
    for x, y in epochs(count, seed + 100):
        optimizer.zero_grad()
        anyprec.joint_step(model, x, y, WIDTHS, loss=loss)
        optimizer.step()
        schedule.step()
    found = anyprec.evaluate(model, load_data("digits", "test"), WIDTHS)
    return [found[bits]["accuracy"] for bits in WIDTHS]


def from_random_weights(loss: str, seed: int) -> list[float]:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return trained(net, loss, seed, count=8, lr=6e-3)


def from_float_weights(loss: str, seed: int) -> list[float]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 5e-3)
    for x, y in epochs(8, seed):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return trained(net, loss, seed, count=12, lr=3e-3, group_depthwise=8)


STARTS: dict[str, Callable[[str, int], list[float]]] = {
    "random weights": from_random_weights,
    "float weights": from_float_weights,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    with Progress("trainings", total=len(STARTS) * len(LOSSES) * args.seeds, unit="training") as progress:
        for start, train in STARTS.items():
            for loss in LOSSES:
                found = []
                for seed in range(args.seeds):
                    found.append(train(loss, seed))
                    progress.update()
                mean, deviation = np.mean(found, 0), np.std(found, 0)
                rows.append(
                    {"start": start, "loss": loss, "seeds": args.seeds, "mean": round(float(mean.mean()), 2)}
                    | {f"{bits}": round(float(mean[i]), 2) for i, bits in enumerate(WIDTHS)}
                    | {f"{bits} deviation": round(float(deviation[i]), 2) for i, bits in enumerate(WIDTHS)}
                )
    path = Path(__file__).parent / "results" / "loss_modes.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        widths = "  ".join(f"{row[f'{bits}']:5.2f} +- {row[f'{bits} deviation']:.2f}" for bits in WIDTHS)
        print(f"{row['start']:15} {row['loss']:16} {widths}   mean {row['mean']}")


if __name__ == "__main__":
    main()
