"""Whether training with random bits per layer (`mixed_bits` of recipes) makes plans better: docs/results.md.

    python bench/mixed_bits.py --data DIR --out runs/mixed [--shares 0,0.5] [--seeds 0,1] [--set limit=10000]

For each seed one run per share, the same recipe otherwise. Then the same random plans for all runs, norms calibrated on
training images, and the accuracy on held-out training images. A run that is done is not repeated. Writes
bench/results/mixed_bits.csv.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import numpy as np

import anyprec
from anyprec.data.loader import batches
from anyprec.nn.switching import any_layers
from anyprec.training.checkpoint import load_model
from anyprec.training.evaluate import evaluate, to_tensor
from anyprec.training.recipe import Recipe
from anyprec.training.run import load_splits, train
from anyprec.widths import FLOAT

RESULTS = Path(__file__).parent / "results" / "mixed_bits.csv"
BASE = "cifar10-resnet8-cpu"
PLANS, CALIBRATED = 12, 1024


def plans_of(names: list[str], widths: tuple[int, ...]) -> list[anyprec.Profile]:
    draw = random.Random(0)
    integers = [bits for bits in widths if bits != FLOAT]
    return [anyprec.Profile(f"plan-{i}", {name: draw.choice(integers) for name in names}) for i in range(PLANS)]


def accuracies(run: Path, recipe: Recipe, data_root: Path) -> dict[str, float]:
    """Setting -> percent of the held-out images; norms of all plans from the same training images."""
    training, held_out = load_splits(recipe, data_root, False)
    model = load_model(run / "model.pt").eval()
    images = []
    for pixels, _ in batches(training, 256, augment=recipe.augment, train=True, seed=0):
        images.append(to_tensor(pixels))
        if 256 * len(images) >= CALIBRATED:
            break
    plans = plans_of(list(any_layers(model)), recipe.widths)
    anyprec.calibrate(model, images, (), profiles=plans)
    results = evaluate(model, held_out, [*recipe.widths, *plans])
    return {str(setting): values["accuracy"] for setting, values in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder that holds CIFAR-10")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="runs")
    parser.add_argument("--shares", default="0,0.5", help="values of mixed_bits (default: 0,0.5)")
    parser.add_argument("--seeds", default="0,1", help="default: 0,1")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the recipe")
    args = parser.parse_args()
    rows = []
    for seed in map(int, args.seeds.split(",")):
        for share in map(float, args.shares.split(",")):
            more = [f"seed={seed}", f"mixed_bits={share}", "validation=5000", *args.set]
            recipe = Recipe.load(BASE).override(more)
            run = args.out / f"share-{share:g}-seed-{seed}"
            if not (run / "model.pt").exists():
                train(recipe, run, data_root=args.data, resume=(run / "last.pt").exists())
            found = accuracies(run, recipe, args.data)
            rows += [{"mixed_bits": share, "seed": seed, "setting": s, "accuracy": a} for s, a in found.items()]
            plans = [value for setting, value in found.items() if setting.startswith("plan-")]
            uniform = "  ".join(f"{s}: {a:.2f}" for s, a in found.items() if not s.startswith("plan-"))
            print(f"mixed_bits={share:g}, seed {seed}: {len(plans)} plans {np.mean(plans):.2f} % "
                  f"({min(plans):.2f} to {max(plans):.2f});  {uniform}", flush=True)  # fmt: skip
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
