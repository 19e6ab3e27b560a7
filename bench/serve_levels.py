"""A model file with more levels than widths, for bench/serve.py: plans per layer and a cascade of a shipped model.

    python bench/serve_levels.py --data DIR --out levels.apm

Plans, thresholds and accuracies are those that bench/plans_cascades.py has found and written to bench/results; nothing
is chosen here, and rows of another version of the model are refused. Rows of the plans' tables are matched on the same
500 held-out images as there. Widths get their accuracies on the half of the test set that plans were tested on, so that
all levels can be compared.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
from plans_cascades import SEARCHED, halves

from anyprec.cascade.cascade import Cascade, Stage
from anyprec.data.catalog import balanced_subset
from anyprec.format.file import read, write
from anyprec.models.catalog import card, find
from anyprec.run.model import load
from anyprec.search import PlanLayers, add_profile
from anyprec.search.trial import PlanTrial

RESULTS = Path(__file__).parent / "results"
PLANS = ("latency-plan-1", "latency-plan-3", "latency-plan-5")
CASCADES = ("cascade-1-4", "cascade-1-8")  # the first of them that the file of results has


def rows_of(name):
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def cascade_of(model):
    rows = {row["cascade"]: row for row in rows_of(f"cascades_{model}.csv")}
    row = next(rows[name] for name in CASCADES if name in rows)
    first = Stage(row["first"], float(row["threshold"]), float(row["temperature"]), 1.0)
    last = Stage(row["last"], None, 1.0, float(row["held_out_share"]))
    return Cascade("margin", (first, last), float(row["agreement"]), float(row["accuracy"]))


def on_half(graph, model, data):
    """The graph, each width's accuracy measured on these images."""
    packed = load(find(model), layout="NHWC")

    def accuracy(name):
        parts = np.array_split(data.images, max(1, len(data.images) // 100))
        classes = np.concatenate([packed(part, bits=name).argmax(1) for part in parts])
        return 100 * float((classes == data.labels).mean())

    found = [replace(p, accuracy=accuracy(int(p.name))) if p.name.isdigit() else p for p in graph.profiles]
    return replace(graph, profiles=tuple(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cifar10-vgg")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    tested, held_out = halves(args.data)
    graph = on_half(read(find(args.model)), args.model, tested)
    images = balanced_subset(held_out, SEARCHED).images
    trial = PlanTrial(PlanLayers(graph), images)
    rows = rows_of(f"plans_{args.model}.csv")
    if rows[0]["model"] != (now := card(args.model).sha256[:12]):
        raise SystemExit(f"bench/results has rows of {args.model} {rows[0]['model']}, not {now}: run plans_cascades.py")
    for row in rows:
        if row["profile"] in PLANS:
            plan = tuple(map(int, row["bits"].split()))
            name = "plan-" + "".join(map(str, plan))
            graph = add_profile(PlanLayers(graph), name, plan, trial.rows(plan), float(row["accuracy"]))
    write(replace(graph, cascade=cascade_of(args.model).text()), args.out)


if __name__ == "__main__":
    main()
