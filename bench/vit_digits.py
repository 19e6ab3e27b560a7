"""A vision transformer trained at all widths on the digits that come with anyprec: does any width collapse?

A plain torch network goes through `convert` and joint training. Weights and inputs of every linear layer have the
width's bits; which products of attention have quantized operands is `--attention`, as in `convert`. Then it is packed,
and the engine's answers are counted. Some minutes a seed and choice on one core; rows of the same run
are replaced in bench/results/vit_digits.csv. `--keep` keeps the model files, for timing.

    python bench/vit_digits.py [--epochs 60] [--seeds 0,1,2] [--attention float,scores,integer] [--keep FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anyprec
from anyprec.data import batches, load_data
from anyprec.progress import Progress

WIDTHS = (1, 2, 4, 8, 32)
COLUMNS = ["attention", "epochs", "seed", "bits", "torch", "engine", "same top-1"]
RESULTS = Path(__file__).resolve().parent / "results" / "vit_digits.csv"


class Block(nn.Module):
    """Pre-norm: attention, then a multi-layer perceptron, each beside a shortcut."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, dim)
        x = x + self.proj(mixed)
        y: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return y


class VisionTransformer(nn.Module):
    """8 x 8 digits in patches of 2 x 2: 16 tokens."""

    def __init__(self, dim: int = 64, depth: int = 4, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, dim, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        y: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return y


def images_of(split: str) -> tuple[Tensor, Tensor]:
    data = load_data("digits", split)
    images, labels = next(batches(data, len(data), prefetch=0))
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))), torch.from_numpy(labels)


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    return 100 * float((outputs.argmax(1) == labels).double().mean())


def train(seed: int, attention: str, epochs: int, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(seed)
    model = anyprec.convert(VisionTransformer(), WIDTHS, example=x[:64], quantizer="lsq", attention=attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    steps = epochs * (len(x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    model.train()
    with Progress("train", total=steps, unit="step") as bar:
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).split(64)[: len(x) // 64]:
                optimizer.zero_grad()
                anyprec.joint_step(model, x[rows], y[rows], WIDTHS, loss="hard")
                optimizer.step()
                schedule.step()
                bar.update(1)
    return model.eval()


def measure(model: nn.Module, path: Path, x: Tensor, test_x: Tensor, test_y: Tensor) -> list[dict[str, Any]]:
    """Accuracy of the module and of its file at every width, a row each."""
    anyprec.pack(model, path, example=x[:8])
    packed = anyprec.load(path)
    rows = []
    for bits in WIDTHS:
        with torch.no_grad(), anyprec.bits(model, bits):
            in_torch = model(test_x)
        row: dict[str, Any] = {"bits": bits, "torch": round(accuracy(in_torch, test_y), 2)}
        if bits != 32:
            answers = torch.from_numpy(packed(test_x.numpy(), bits=bits))
            row["engine"] = round(accuracy(answers, test_y), 2)
            row["same top-1"] = round(accuracy(answers, in_torch.argmax(1)), 2)
        rows.append(row)
    return rows


def add_to_results(rows: list[dict[str, Any]]) -> None:
    """In the place of earlier rows of the same runs."""
    runs = {(str(row["attention"]), str(row["epochs"]), str(row["seed"])) for row in rows}
    kept: list[dict[str, Any]] = []
    if RESULTS.exists():
        with RESULTS.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if (row["attention"], row["epochs"], row["seed"]) not in runs]

    def order(row: dict[str, Any]) -> tuple[str, int, int, int]:
        return str(row["attention"]), int(row["epochs"]), int(row["seed"]), int(row["bits"])

    everything = sorted([*kept, *rows], key=order)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(everything)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--attention", default="float,scores,integer")
    parser.add_argument("--keep", type=Path, help="folder for the model files")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    (x, y), (test_x, test_y) = images_of("train"), images_of("test")
    rows = []
    for attention in args.attention.split(","):
        for seed in map(int, args.seeds.split(",")):
            model = train(seed, attention, args.epochs, x, y)
            with tempfile.TemporaryDirectory() as folder:
                path = (args.keep or Path(folder)) / f"vit-{attention}-{seed}.apm"
                found = measure(model, path, x, test_x, test_y)
            rows += [{"attention": attention, "epochs": args.epochs, "seed": seed, **row} for row in found]
            print(*rows[-len(found) :], sep="\n", file=sys.stderr)
    add_to_results(rows)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
