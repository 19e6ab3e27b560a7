"""`anyprec models [NAME] [--fetch]`: the models that come with anyprec, the card of one, or its download.

Everything shown is read from the cards (catalog.py); no model file is opened. Called by anyprec.cli.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from anyprec.cli.output import print_json
from anyprec.cli.tables import bits_name, table
from anyprec.errors import AnyprecError
from anyprec.models import catalog
from anyprec.models.catalog import ModelCard, ProfileFacts

EXAMPLE = "anyprec models cifar10-vgg-small"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="show the card of this model (default: list all)")
    parser.add_argument("--fetch", action="store_true", help="download the model if necessary, and print its path")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    if args.fetch:
        if args.name is None:
            raise AnyprecError("--fetch downloads one model; give its name, which `anyprec models` lists")
        path = catalog.fetch(args.name)
        if args.json:
            print_json({"name": args.name, "path": str(path)})
        else:
            print(path)
        return 0
    cards = [catalog.card(name) for name in (catalog.names() if args.name is None else [args.name])]
    if args.json:
        records = [described(one) for one in cards]
        print_json({"models": records} if args.name is None else records[0])
    elif args.name is not None:
        print(card_text(cards[0]))
    else:
        print(list_text(cards) if cards else "this anyprec comes without models")
    return 0


def described(card: ModelCard) -> dict[str, Any]:
    """The card, and where its file is; null where it is not downloaded yet."""
    path = catalog.model_path(card)
    return {**card.to_dict(), "path": str(path) if path.is_file() else None}


# --- As text ---


def list_text(cards: Sequence[ModelCard]) -> str:
    """Two rows a model, accuracy and time, with a column for each width."""
    columns = list(dict.fromkeys(name for card in cards for name in card.profiles))
    columns.sort(key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0))
    rows = [["name", "data", "network", "bytes", "bits", *map(bits_name, columns)]]
    for card in cards:
        of = [card.profiles.get(name) for name in columns]
        rows.append([card.name, card.data, card.network, f"{card.bytes:,}", measure_name(card), *map(percent, of)])
        if card.timing is not None:
            rows.append(["", "", "", "", "ms", *map(milliseconds, of)])
    text = table(rows, right=(3, *range(5, 5 + len(columns))))
    return f"{text}\n\nanyprec models NAME shows all that is known of one; anyprec run NAME photo.jpg uses it"


def card_text(card: ModelCard) -> str:
    path = catalog.model_path(card)
    training = card.training
    size = " x ".join("any" if n is None else str(n) for n in card.input)
    here = path if path.is_file() else f"not downloaded; anyprec models --fetch {card.name}"
    rows = [
        ("name", card.name),
        ("", card.summary),
        ("network", f"{card.network}, {card.parameters:,} weights, input {size}"),
        ("data", f"{card.data}: {card.classes} classes, measured on {card.test_images:,} test images"),
        ("file", f"{here}  ({card.bytes:,} bytes)"),
        ("sha256", card.sha256),
        ("license", card.license),
        ("made by", f"{card.made_by}, commit {training['commit']}"),
        ("training", training_text(training)),
        *(("recipe", recipe_text(recipe)) for recipe in training["recipes"]),
        ("times", timing_text(card)),
        *(("note", note) for note in card.notes),
    ]
    return table(rows) + "\n\n" + profiles_text(card)


def profiles_text(card: ModelCard) -> str:
    masks = card.task == "segmentation"
    rows = [["bits", *(["mIoU"] if masks else []), "pixels right" if masks else "accuracy", "as torch", "ms", "bytes"]]
    for name, facts in card.profiles.items():
        miou = [f"{facts.miou:.2f} %" if facts.miou is not None else ""] if masks else []
        rows.append(
            [
                bits_name(name),
                *miou,
                f"{facts.accuracy:.2f} %",
                f"{facts.agreement:.2f} %",
                milliseconds(facts),
                f"{facts.bytes:,}",
            ]
        )
    return table(rows, right=tuple(range(1, len(rows[0]))))


def training_text(training: Mapping[str, Any]) -> str:
    hours = training.get("core_hours")
    return f"seed {training['seed']}" + ("" if hours is None else f", {hours:g} core-hours")


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """What tells one recipe from another; --json has all of it."""
    shown = ("net", "widths", "epochs", "batch_size", "optimizer", "lr", "schedule", "loss", "quantizer", "augment")
    return ", ".join(f"{key} {short(recipe[key])}" for key in shown if key in recipe)


def short(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def timing_text(card: ModelCard) -> str:
    at = card.timing
    if at is None:
        return f"not measured; anyprec bench {card.name} --rivals none measures them here"
    return f"{at['cpu']}, {at['isa']}; batch 1, one thread, median of {at['rounds']} rounds"


def measure_name(card: ModelCard) -> str:
    return "mIoU %" if card.task == "segmentation" else "accuracy %"


def percent(facts: ProfileFacts | None) -> str:
    return "" if facts is None else f"{facts.accuracy if facts.miou is None else facts.miou:.2f}"


def milliseconds(facts: ProfileFacts | None) -> str:
    return "" if facts is None or facts.ms is None else f"{facts.ms:.3f}"
