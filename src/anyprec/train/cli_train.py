"""`anyprec train RECIPE.toml --out DIR`: train by a recipe. The work is run.py's."""

from __future__ import annotations

import argparse
import json
import os

from anyprec.train.evaluate import accuracy_table
from anyprec.train.recipe import Recipe
from anyprec.train.run import train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="recipe file, such as recipes/digits.toml")
    parser.add_argument("--out", required=True, help="folder for the model, its checkpoint and its logs")
    parser.add_argument("--data", metavar="DIR", help="folder that holds the data set (the embedded digits need none)")
    parser.add_argument("--download", action="store_true", help="download the data set into --data if it is not there")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override a recipe field")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with the run in --out")
    again.add_argument("--overwrite", action="store_true", help="begin anew where --out holds a run already")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps, ... (default: a GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else on stdout")


def run(args: argparse.Namespace) -> int:
    recipe = Recipe.load(args.recipe).override(args.set)
    results = train(
        recipe, args.out, data_root=args.data, download=args.download, resume=args.resume,
        overwrite=args.overwrite, device=args.device, progress=not args.json,
    )  # fmt: skip
    if int(os.environ.get("RANK", 0)) > 0:
        return 0  # of the processes of `torchrun` the first one speaks for all
    print(json.dumps({str(k): v for k, v in results.items()}) if args.json else accuracy_table(results))
    return 0
