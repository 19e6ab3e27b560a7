"""`anyprec info`: versions, CPU and instruction set, as a short table or as JSON. The work is run/machine.py's."""

from __future__ import annotations

import argparse

from anyprec.cli.output import print_json
from anyprec.run.machine import collect

EXAMPLE = "anyprec info"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    found = collect()
    if args.json:
        print_json(found)
        return 0
    for name, value in found.items():
        if isinstance(value, list):
            value = " ".join(value) or "none"
        elif value is None:
            value = "not installed"
            if name == "torch":
                value += " (needed for training: pip install 'anyprec[train]')"
        print(f"{name:<9} {value}")
    return 0
