"""`anyprec recipes [RECIPE]`: the recipes that come with anyprec, or the text of one, from recipe_catalog.py."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from anyprec.cli.output import print_json, print_next
from anyprec.cli.tables import bits_name, table
from anyprec.data import DATASETS
from anyprec.training import recipe_catalog
from anyprec.training.recipe import Recipe
from anyprec.widths import DEFAULT_WIDTHS

EXAMPLE = "anyprec recipes cifar10-resnet8-cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RECIPE", help="print this recipe as TOML (default: list all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        records = [described(name) for name in recipe_catalog.names()]
        if args.json:
            print_json({"recipes": records})
        else:
            print(list_text(records))
        return 0
    record = described(args.name)
    if args.json:
        print_json({**record, "recipe": Recipe.load(args.name).to_dict()})
    else:
        print((recipe_catalog.FOLDER / f"{args.name}.toml").read_text(encoding="utf-8"), end="")
        print_next(*train_command(record))
    return 0


def described(name: str) -> dict[str, Any]:
    """What is known of one; null where it is not."""
    about, path = recipe_catalog.about(name), recipe_catalog.FOLDER / f"{name}.toml"
    recipe = Recipe.load(path)
    measured = about.miou or about.accuracy
    return {
        "name": name,
        "summary": about.summary,
        "dataset": recipe.data,
        "network": recipe.net,
        "widths": list(recipe.widths),
        "epochs": recipe.epochs,
        "core_hours": about.core_hours,
        "needs": about.needs or None,
        "after": about.after or None,
        "measure": "miou" if DATASETS[recipe.data].masks else "accuracy",
        "expected": dict(measured) or paper_results(about.paper) or None,
        "expected_from": "measured" if measured else "paper" if about.paper else None,
        "path": str(path),
    }


def paper_results(row: str) -> Mapping[str, float]:
    """bits -> percent, as the paper has it for its any-precision network."""
    from anyprec.reproduce.paper import TABLE1, TABLE6

    if not row:
        return {}
    _, ours = {**TABLE1, "VOC 2012 DeepLab V3": TABLE6["mIoU"]}[row]
    return dict(zip(map(str, DEFAULT_WIDTHS), ours, strict=True))


def train_command(record: Mapping[str, Any]) -> list[str]:
    stages = [record["name"]]
    while before := recipe_catalog.about(stages[0]).after:
        stages.insert(0, before)
    data = ["--data", "DIR"] if DATASETS[record["dataset"]].layout else []
    return ["train", *stages, *data, "--out", f"runs/{record['name']}"]


def list_text(records: list[dict[str, Any]]) -> str:
    """A row for each; where nothing was measured here, the paper's results, marked."""
    columns = list(map(str, DEFAULT_WIDTHS))
    rows = [["name", "data", "network", "widths", "epochs", "cost", "expected", *map(bits_name, columns)]]
    for record in records:
        expected = record["expected"] or {}
        measure = {"miou": "mIoU %", "accuracy": "accuracy %"}[record["measure"]] if expected else ""
        source = ", paper" if record["expected_from"] == "paper" else ""
        figures = [f"{expected[bits]:.2f}" if bits in expected else "" for bits in columns]
        widths = ",".join(bits_name(str(bits)) for bits in record["widths"])
        name, data, network = record["name"], record["dataset"], record["network"]
        rows.append([name, data, network, widths, str(record["epochs"]), cost(record), measure + source, *figures])
    text = table(rows, right=(4, *range(7, 7 + len(columns))))
    return f"{text}\n\nanyprec recipes RECIPE prints one; anyprec train RECIPE --out DIR trains by it"


def cost(record: Mapping[str, Any]) -> str:
    hours = record["core_hours"]
    return record["needs"] or "" if hours is None else f"{hours:g} core-hours"
