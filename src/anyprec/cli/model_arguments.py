"""Arguments that `evaluate`, `calibrate` and `attack` share: a trained model, and the data it was trained on."""

from __future__ import annotations

import argparse

from anyprec.arguments import positive


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", help="a run folder of `anyprec train`, or a checkpoint (.pt)")
    parser.add_argument("--data", metavar="DIR", help="folder that holds the data set (the embedded digits need none)")
    parser.add_argument("--dataset", metavar="NAME", help="the data set (default: the one of the model's recipe)")
    parser.add_argument("--limit", type=positive, metavar="N", help="use this many images (default: all)")
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=500,
        metavar="N",
        help="images per batch (default: 500; for segmentation at most the recipe's)",
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, mps, ... (default: cpu)")
