"""Does the engine answer as the torch module does? Top-1 of both on a whole test set, at every width.

    python bench/agreement.py MODEL.pt --dataset cifar10 --data DIR [--double]

Differences come from float rounding: torch and the engine add in other orders, and a value next to the border between
two codes then falls on the other side. --double runs the torch module in double precision as well and counts on which
side the exact answer is. Writes bench/results/agreement.csv.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import numpy as np
import torch

import anyprec
from anyprec.data import batches, load_data
from anyprec.training.checkpoint import load_model
from anyprec.training.trained_run import preprocessing_for


def torch_top1(model: torch.nn.Module, images: torch.Tensor, batch: int = 500) -> np.ndarray:
    with torch.no_grad():
        return np.concatenate([model(images[i : i + batch]).argmax(1).numpy() for i in range(0, len(images), batch)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data", required=True)
    parser.add_argument("--double", action="store_true")
    args = parser.parse_args()

    test = load_data(args.dataset, "test", args.data)
    model = load_model(Path(args.model)).eval()
    loaded = list(batches(test, 500, preprocessing=preprocessing_for(Path(args.model), test)))
    x = torch.from_numpy(np.concatenate([images for images, _ in loaded])).permute(0, 3, 1, 2).contiguous()
    labels = np.concatenate([y for _, y in loaded])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/net.apm"
        anyprec.pack(model, path, example=x[:2], keep_float=True)
        packed = anyprec.load(path)
        exact = load_model(Path(args.model)).eval().double() if args.double else None
        for bits in packed.widths:
            anyprec.set_bits(model, bits)
            ours = np.concatenate([packed(x[i : i + 500].numpy(), bits=bits).argmax(1) for i in range(0, len(x), 500)])
            theirs = torch_top1(model, x)
            row = {
                "bits": bits,
                "same top-1 %": 100 * (ours == theirs).mean(),
                "engine %": 100 * (ours == labels).mean(),
                "torch %": 100 * (theirs == labels).mean(),
            }
            if exact is not None:
                anyprec.set_bits(exact, bits)
                truth = torch_top1(exact, x.double())
                row |= {
                    "engine = double %": 100 * (ours == truth).mean(),
                    "torch = double %": 100 * (theirs == truth).mean(),
                }
            rows.append(row)
            print({k: round(float(v), 2) for k, v in row.items()}, flush=True)
    target = Path(__file__).parent / "results" / "agreement.csv"
    with open(target, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.2f}" if k != "bits" else v for k, v in row.items()} for row in rows)


if __name__ == "__main__":
    main()
