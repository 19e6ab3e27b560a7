"""Products of attention in the engine: float against integer, at every width.

A vision transformer of random weights (ViT-Tiny's sizes: 196 tokens of 192 numbers, 3 heads; 4 blocks) is converted
with each choice of `attention` and packed. The table has the time of one image in ms, of the whole network, and of the
products of two values with the quantizers of their operands (`PackedModel.steps`). One core, on a machine that does
nothing else; writes bench/results/attention.csv.

    python bench/attention.py [--isa avx2] [--threads 1] [--repeat 30] [--json]
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vit_digits import Block

import anyprec
from anyprec.format import read
from anyprec.nn.products import CHOICES

WIDTHS = (1, 2, 4, 8, 32)
RESULTS = Path(__file__).resolve().parent / "results" / "attention.csv"


class Tiny(nn.Module):
    def __init__(self, dim: int = 192, depth: int = 4, heads: int = 3, size: int = 224) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 16, stride=16)
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // 16) ** 2, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        y: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return y


def measure(path: Path, bits: int, x: np.ndarray, args: argparse.Namespace) -> dict[str, Any]:
    """Medians, in ms."""
    model = anyprec.load(path, isa=args.isa, threads=args.threads)
    kinds = {op.name: op.kind for op in read(path).ops}
    times = []
    for _ in range(args.repeat + 3):
        start = time.perf_counter()
        model(x, bits=bits)
        times.append(time.perf_counter() - start)
    steps = model.steps(x, bits, repeat=args.repeat)
    products = [s for s in steps if kinds.get(s.op) == "matmul"]
    operands = [s for s in steps if kinds.get(s.op) == "quantize" and "any_products" in s.op]
    return {
        "bits": bits,
        "network": round(1e3 * float(np.median(times[3:])), 3),
        "products": round(1e3 * sum(s.seconds for s in products), 3),
        "quantizers": round(1e3 * sum(s.seconds for s in operands), 3),
        "kernels": "; ".join(sorted({s.work for s in products})),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", help="scalar, avx2, avx512vnni or avx512; by default the best")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, x = Tiny().eval(), torch.randn(2, 3, 224, 224)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for attention in CHOICES:
            model = anyprec.convert(net, WIDTHS, example=x, quantizer="lsq", attention=attention)
            path = Path(folder) / f"{attention}.apm"
            anyprec.pack(model, path, example=x, keep_float=True, verify=False)
            for bits in WIDTHS:
                found = measure(path, bits, x[:1].numpy(), args)
                rows.append({"attention": attention, **found})
                print(rows[-1])
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
