"""`anyprec train RECIPE --out DIR`: train by a recipe, a file or a name of `anyprec recipes`. The work is run.py's.

Several recipes are stages: each starts from the model of the one before. The last one's folder is --out, those of the
others are stage-1, stage-2, ... in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from anyprec.cli.output import command_line, print_json, print_next
from anyprec.training.half_precision import hold_onednn
from anyprec.training.recipe import Recipe

EXAMPLE = "anyprec train digits --out runs/digits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        nargs="+",
        metavar="RECIPE",
        help="a recipe file (.toml), or a name of `anyprec recipes`; several are stages, one after the other",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the model, its checkpoint and its logs")
    parser.add_argument("--data", metavar="DIR", help="folder that holds the data set (the embedded digits need none)")
    parser.add_argument("--download", action="store_true", help="download the data set into --data if it is not there")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override a recipe field")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="continue the run in --out")
    again.add_argument("--overwrite", action="store_true", help="start over if --out already holds a run")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, mps, ... (default: a GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    stages = [Recipe.load(path).override(args.set) for path in args.recipe]  # a mistake in the last shows at once
    half = next((recipe.amp for recipe in stages if recipe.amp != "off"), None)
    if half is not None and (args.device or "cpu").startswith("cpu") and (held := hold_onednn(half)):
        print(held, file=sys.stderr)
    try:
        results = train_stages(stages, args)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"go on with: {resume_command(args)}") from None
    if int(os.environ.get("RANK", 0)) > 0:
        return 0  # of the processes of `torchrun` the first one speaks for all
    if args.json:
        about = {"out": args.out, "network": stages[-1].net, "dataset": stages[-1].data}
        print_json({**about, "results": {str(k): v for k, v in results.items()}})
    else:
        from anyprec.training.evaluate import accuracy_table

        print(accuracy_table(results))
        print_next("pack", args.out, "--out", Path(args.out) / f"{Path(args.out).resolve().name}.apm")
    return 0


def train_stages(stages: list[Recipe], args: argparse.Namespace) -> dict[int | str, dict[str, float]]:
    """Results of the last one."""
    from anyprec.training.run import train  # only now: torch reads what `hold_onednn` sets once

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
    return results


def resume_command(args: argparse.Namespace) -> str:
    """What was typed, to go on with instead of to begin."""
    options = [("--data", args.data), ("--device", args.device), *(("--set", setting) for setting in args.set)]
    words = [word for name, value in options if value is not None for word in (name, value)]
    flags = ["--json"] * args.json + ["--download"] * args.download
    return command_line("train", *args.recipe, "--out", args.out, *words, *flags, "--resume")
