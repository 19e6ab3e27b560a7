"""`anyprec train RECIPE.toml --out DIR`: train by a recipe. The work is run.py's.

Several recipes are stages: each starts from the model of the one before. The last one's folder is --out, those of the
others are stage-1, stage-2, ... in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from anyprec.training.half_precision import hold_onednn
from anyprec.training.recipe import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="+", help="recipe file, such as recipes/digits.toml; several are stages, one after the other"
    )
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
    stages = [Recipe.load(path).override(args.set) for path in args.recipe]  # a mistake in the last shows at once
    half = next((recipe.amp for recipe in stages if recipe.amp != "off"), None)
    if half is not None and (args.device or "cpu").startswith("cpu") and (held := hold_onednn(half)):
        print(held, file=sys.stderr)
    # Only now: torch reads what `hold_onednn` sets once.
    from anyprec.training.evaluate import accuracy_table
    from anyprec.training.run import train

    before: Path | None = None
    results: dict[int | str, dict[str, float]] = {}
    for number, recipe in enumerate(stages, start=1):
        out = Path(args.out) if number == len(stages) else Path(args.out) / f"stage-{number}"
        if before is not None:
            recipe = dataclasses.replace(recipe, init=str(before / "model.pt"))
        if not (args.resume and number < len(stages) and (out / "model.pt").exists()):  # else: done already
            results = train(
                recipe, out, data_root=args.data, download=args.download, resume=args.resume,
                overwrite=args.overwrite, device=args.device, progress=not args.json,
            )  # fmt: skip
        before = out
    if int(os.environ.get("RANK", 0)) > 0:
        return 0  # of the processes of `torchrun` the first one speaks for all
    print(json.dumps({str(k): v for k, v in results.items()}) if args.json else accuracy_table(results))
    return 0
