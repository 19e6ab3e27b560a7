"""Settings of `ptq --method gptq` compared on held-out training images of CIFAR-10, by the public ResNet-20.

    python bench/ptq_variants.py --weights resnet20-12fca82f.th --data DIR [--widths 2,3,4,8] [--held-out 4000] \\
        [--variants tune_steps=0 importance=1,tune_steps=0 shrink=0,tune_steps=0 tune_steps=300,images=4096]

A variant names fields of GptqSettings, and `images`, the number of training images that are seen; what it does not name
is as by default. The images that it is measured on are the last of the training set, never seen: settings are chosen
here, and bench/ptq_table.py measures the choice on the test set once. For each width: accuracy (of images the float
network was trained on), share of answers equal to float's, divergence from float. Runs in torch; writes
bench/results/ptq_variants.csv, variant by variant.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import time
from pathlib import Path

import numpy as np
import torch
from ptq_table import inputs, training_images

import anyprec
from anyprec.data import load_data
from anyprec.post_training import GptqSettings, ptq
from anyprec.post_training.tune import distance
from anyprec.zoo.float_weights import from_float
from anyprec.zoo.weights import read_state_dict

OUT = Path(__file__).resolve().parent / "results" / "ptq_variants.csv"
FIELDS = ("variant", "bits", "accuracy", "agreement", "divergence", "held_out", "cpu_seconds")
IMAGES = 1024
VARIANTS = (  # a minute of one core each; tuning (100 steps by default) takes two more
    "tune_steps=0",
    "importance=1,tune_steps=0",
    "importance=4,tune_steps=0",
    "shrink=0,tune_steps=0",
    "search_ranges=False,tune_steps=0",
)


def parse(text: str) -> tuple[GptqSettings, int]:
    """'importance=3,images=4096' -> settings, images"""
    kinds = {field.name: type(field.default) for field in dataclasses.fields(GptqSettings)} | {"images": int}
    found: dict[str, float | bool] = {}
    for part in text.split(",") if text != "default" else []:
        name, _, value = part.partition("=")
        if name not in kinds:
            raise SystemExit(f"{name!r} is no setting; choose from {', '.join(kinds)}")
        found[name] = value == "True" if kinds[name] is bool else kinds[name](value)
    images = int(found.pop("images", IMAGES))
    return GptqSettings(**found), images  # type: ignore[arg-type]


@torch.no_grad()
def outputs(model: torch.nn.Module, x: torch.Tensor, bits: int) -> torch.Tensor:
    with anyprec.bits(model, bits):
        return torch.cat([model(part) for part in x.split(250)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--widths", default="2,3,4,8")
    parser.add_argument("--held-out", type=int, default=4000, help="the last images of the training set")
    args = parser.parse_args()
    widths = [int(k) for k in args.widths.split(",")]
    net = from_float(read_state_dict(Path(args.weights)), None, (32,))
    data = load_data("cifar10", "train", args.data)
    at = np.arange(len(data) - args.held_out, len(data))
    x, labels = inputs(data.read(at)), torch.from_numpy(np.asarray(data.labels)[at])
    rows = list(csv.DictReader(OUT.read_text().splitlines())) if OUT.exists() else []
    for text in args.variants:
        settings, images = parse(text)
        if images + args.held_out > len(data):
            raise SystemExit(f"{text} and {args.held_out} held out are more than the {len(data)} of the training set")
        seen = training_images(load_data("cifar10", "train", args.data, limit=images))
        start = time.process_time()
        model = ptq(net, seen, "gptq", widths, gptq=settings, progress=True)
        seconds = time.process_time() - start
        plain = outputs(model, x, 32)
        rows = [row for row in rows if row["variant"] != text]
        for k in widths:
            made = outputs(model, x, k)
            right = 100 * float((made.argmax(1) == labels).double().mean())
            same = 100 * float((made.argmax(1) == plain.argmax(1)).double().mean())
            figures = (text, k, f"{right:.2f}", f"{same:.2f}", f"{float(distance(made, plain)):.4f}", len(x))
            print(f"{text:>30} {k} bit  {right:6.2f} %  {same:6.2f} % as float, divergence {figures[4]}", flush=True)
            rows.append(dict(zip(FIELDS, map(str, (*figures, f"{seconds:.0f}")), strict=True)))
        with OUT.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
