"""A trained run becomes a model that comes with anyprec: NAME.apm and its card NAME.json in src/anyprec/models.

    python bench/ship_model.py RUN --name cifar10-vgg-small --data DIR --summary "..." --core-hours 1.5
    python bench/ship_model.py --again NAME --data DIR   # its file as `pack` would write it today, same weights
    python bench/ship_model.py --times NAME     # later, on a quiet machine: milliseconds into its card
    python bench/ship_model.py --page           # the tables of docs/models.md, from the cards

Widths of 1..8 that the run lacks are calibrated, then the run is packed, without float weights. One pass over the whole
test set gives the engine's own accuracy at every width, which is what file and card note, and how often the engine
answers as the torch module does: less than 99.9 % at any width and nothing is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import anyprec
from anyprec.bench.race import BenchSettings, bench
from anyprec.cli import dispatch as cli
from anyprec.cli.tables import bits_name
from anyprec.data import MaskData, load_data
from anyprec.data.catalog import Data
from anyprec.data.confusion import Counts, confusion, mean_iou, pixel_accuracy
from anyprec.data.loader import normalizer, testing_pixels
from anyprec.errors import AnyprecError
from anyprec.files import write_text, written_whole
from anyprec.format import ModelFile, read, write
from anyprec.models import catalog
from anyprec.models.catalog import MAX_SHIPPED_BYTES, NAME, ModelCard, ProfileFacts
from anyprec.nn.switching import widths_of
from anyprec.packing.packing import plan_packing
from anyprec.packing.unpack import unpack
from anyprec.preprocessing import Preprocessing
from anyprec.progress import Progress
from anyprec.training.build import initial_record, model_file_of
from anyprec.training.checkpoint import load_model, load_record, preprocessing_in
from anyprec.training.evaluate import to_tensor
from anyprec.training.recipe import Recipe
from anyprec.training.trained_run import checkpoint_of
from anyprec.widths import INTEGER_WIDTHS
from anyprec.zoo import build

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
LEAST_AGREEMENT = 99.9  # percent
BATCH = 250
UNPACKED = 2000  # training images that norms are measured on where a network is filled from a file
QUIET_LOAD = 0.5  # load average above which times are not worth noting


@dataclass
class Tally:
    """Of one width, over the images so far: labels against the engine's answers, and answers that are torch's."""

    counts: Counts
    same: int = 0
    answers: int = 0

    @property
    def agreement(self) -> float:
        return 100 * self.same / max(self.answers, 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a run folder of `anyprec train`, or its model.pt")
    parser.add_argument("--name", help="of the model, such as cifar10-vgg-small")
    parser.add_argument("--data", metavar="DIR", help="folder of the data set it was trained on")
    parser.add_argument("--summary", default="", help="one line about it, for its card")
    parser.add_argument("--core-hours", type=float, help="what the training took, all stages together")
    parser.add_argument("--commit", help="of the code that trained it (default: the one checked out)")
    parser.add_argument("--license", default="Apache-2.0")
    parser.add_argument("--note", action="append", default=[], help="a further line of the card")
    parser.add_argument("--float", action="store_true", help="keep float weights too: 32 bits, a larger file")
    parser.add_argument("--out", type=Path, default=catalog.FOLDER, help="folder (default: that of the package)")
    parser.add_argument(
        "--again", metavar="NAME", help="write this model's file anew, with what pack has learned since"
    )
    parser.add_argument("--times", metavar="NAME", help="time this model and note it in its card")
    parser.add_argument("--rounds", type=int, default=100, help="of --times (default: 100)")
    parser.add_argument("--size", type=int, help="of --times: side of the images where the network takes any")
    parser.add_argument("--busy", action="store_true", help="of --times: even while the machine has other work")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/models.md")
    args = parser.parse_args(argv)
    try:
        if args.times:
            time_shipped(args)
        elif args.again:
            ship_again(args)
        elif args.page:
            write_text(PAGE, paged(PAGE.read_text(encoding="utf-8")))
        else:
            if args.run is None or args.name is None:
                raise AnyprecError("give a run and --name, or --again NAME, or --times NAME, or --page")
            ship(args)
    except AnyprecError as error:
        print(f"ship_model: error: {error}", file=sys.stderr)
        return 1
    return 0


# --- A run becomes a file and a card ---


def ship(args: argparse.Namespace) -> None:
    if not NAME.fullmatch(args.name):
        raise AnyprecError(f"--name {args.name!r}: small letters, digits and single - between them only")
    source = checkpoint_of(args.run)
    recipes = recipes_of(source)
    with tempfile.TemporaryDirectory(prefix="anyprec-ship-") as folder:
        checkpoint, packed = Path(folder) / "model.pt", Path(folder) / f"{args.name}.apm"
        missing = sorted(set(INTEGER_WIDTHS) - set(load_record(source)["widths"]))
        place = ["--data", args.data] if args.data else []
        if missing:
            verb("calibrate", source, "--widths", ",".join(map(str, missing)), "--out", checkpoint, *place)
        else:
            checkpoint = source
        verb("pack", checkpoint, "--out", packed, *place, "--widths", "1-8,32" if args.float else "1-8")
        check_room(args.out, args.name, packed.stat().st_size)
        data = load_data(recipes[-1]["data"], "test", args.data)
        tallies = measured(load_model(checkpoint), trained_with(checkpoint), packed, data)
        put(packed, card_of(args, packed, tallies, data, recipes), args.out)


def put(packed: Path, card: ModelCard, folder: Path) -> None:
    target = folder / f"{card.name}.apm"
    with written_whole(target) as file:
        file.write(packed.read_bytes())
    write_card(card, folder)
    print(f"{target}: {card.bytes:,} bytes, and its card {card.name}.json")


def ship_again(args: argparse.Namespace) -> None:
    """The weights and tables of the file there is, computed as `pack` says today: FORMAT.md, `toom_cook`.

    The run that made it may be lost. The torch network it is compared with is filled from the file (packing/unpack.py).
    """
    source, card = args.out / f"{args.again}.apm", read_card(args.again, args.out)
    recipe = Recipe.from_dict({**card.training["recipes"][-1], "init": "", "teacher": []})
    trained_on, data = (load_data(card.data, split, args.data) for split in ("train", "test"))
    model = build(
        recipe.net, widths=card.widths, quantizer=recipe.quantizer, scale=recipe.scale,
        **{"in_channels": card.input[-1], "num_classes": card.classes, **recipe.net_options},
    )  # fmt: skip
    graph = read(source)
    how = graph.preprocessing
    if how is None or isinstance(trained_on, MaskData):
        raise AnyprecError(f"{source}: only classifiers whose file says how pictures are prepared are packed again")
    images = testing_pixels(trained_on, how)(np.arange(min(UNPACKED, len(trained_on))))
    x = to_tensor(normalizer(how.mean, how.std, images.shape[1:])(images))
    unpack(model, source, x.split(BATCH))
    today = plan_packing(
        model.eval(), example=x[:BATCH], keep_float=False, widths=card.widths, profiles=(), labels=None, image=None,
        accuracy=None, name=None, first_last="float",
    ).graph  # fmt: skip
    faster = {op.name for op in today.ops if op.attributes.get("toom_cook")}
    ops = tuple(replace(op, attributes={**op.attributes, "toom_cook": True}) if op.name in faster else op
                for op in graph.ops)  # fmt: skip
    if ops == graph.ops:
        raise AnyprecError(f"{source} is as `pack` would write it today")
    with tempfile.TemporaryDirectory(prefix="anyprec-ship-") as folder:
        packed = Path(folder) / source.name
        write(replace(graph, ops=ops), packed)
        tallies = measured(model, how, packed, data)
        facts, made_by = facts_of_file(packed, tallies, False)
        again = replace(
            card, bytes=packed.stat().st_size, sha256=sha256(packed), profiles=facts, made_by=made_by, timing=None
        )
        put(packed, again, args.out)


def verb(*argv: object) -> None:
    """As a user would type it."""
    line = [str(part) for part in argv]
    print("anyprec", " ".join(line), flush=True)
    if cli.main(line):
        raise AnyprecError(f"anyprec {line[0]} failed")


def recipes_of(path: Path) -> list[dict[str, Any]]:
    """Of all stages, the first one first. Paths of this machine do not go into a card."""
    recipe = dict(load_record(path).get("extra", {}).get("recipe") or {})
    if not recipe:
        raise AnyprecError(f"{path} does not say by which recipe it was trained; train it with `anyprec train`")
    before: list[dict[str, Any]] = []
    recipe["teacher"] = [
        f"model file {file.name}, SHA-256 {sha256(file)}"
        for file in (Path(catalog.find(name)) for name in Recipe.from_dict(recipe).teacher)
    ]
    start = recipe.get("init")
    if start and (file := model_file_of(start)) is not None:  # its checkpoint may be lost: its card has the recipes
        before = list(catalog.card(file.stem).training["recipes"])
        recipe["init"] = "the model file of the stage before"
    elif start:
        if not Path(start).is_file():
            raise AnyprecError(f"{path} began with {start}, which is not here; its recipe belongs into the card")
        if initial_record(start) is None:  # published weights, not a run of ours: named by their content
            recipe["init"] = f"float weights {Path(start).name}, SHA-256 {sha256(Path(start))}"
        else:
            before = recipes_of(Path(start))
            recipe["init"] = "the stage before"
    return [*before, recipe]


def check_room(folder: Path, name: str, size: int) -> None:
    others = sum(path.stat().st_size for path in folder.glob("*.apm") if path.stem != name)
    if others + size > MAX_SHIPPED_BYTES:
        raise AnyprecError(
            f"{name} has {size:,} bytes, the other models {others:,}; together at most {MAX_SHIPPED_BYTES:,} come with "
            "the package"
        )


def trained_with(checkpoint: Path) -> Preprocessing | None:
    return preprocessing_in(load_record(checkpoint), checkpoint)


def measured(model: nn.Module, how: Preprocessing | None, packed: Path, data: Data) -> dict[int, Tally]:
    """Every test image at every width, by the engine and by torch, in one pass; the accuracies go into the file.

    how: images became the network's input so in training; None, of an older run: as its data set says.
    """
    model.eval()
    ours = anyprec.load(packed)
    assert set(ours.widths) <= set(widths_of(model))
    classes = data.num_classes
    tallies = {bits: Tally(np.zeros((classes, classes), np.int64)) for bits in ours.widths}
    how = how or ours.preprocessing
    if how is None:
        raise AnyprecError(f"{packed.stem}: neither its run nor its data set says how training prepared images")
    with Progress("test", total=len(data), unit="img") as bar, torch.no_grad():
        for pixels, labels in batches_of(data, how):
            normalize = normalizer(how.mean, how.std, pixels.shape[1:])
            x = to_tensor(normalize(pixels))
            for bits, tally in tallies.items():
                y = ours(pixels, bits=bits, layout="NHWC")
                answers = np.argmax(y[0] if isinstance(y, tuple) else y, axis=-1)
                with anyprec.bits(model, bits):
                    theirs = model(x).argmax(1).numpy()
                tally.counts += confusion(labels, answers, classes)
                tally.same += int((answers == theirs).sum())
                tally.answers += answers.size
            bar.update(len(labels))
    print(agreement_table(tallies))
    worst = min(tally.agreement for tally in tallies.values())
    if worst < LEAST_AGREEMENT:
        raise AnyprecError(f"the engine answers as torch on {worst:.3f} % only, {LEAST_AGREEMENT} % are needed")
    with_accuracy(packed, {bits: round(pixel_accuracy(tally.counts), 4) for bits, tally in tallies.items()})
    return tallies


def batches_of(data: Data, how: Preprocessing) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(n, H, W, C) uint8 and labels (n,), or masks (n, H, W)."""
    if isinstance(data, MaskData):  # of any size each
        for row in range(len(data)):
            yield data.read([row])
        return
    pixels = testing_pixels(data, how)
    for first in range(0, len(data), BATCH):
        rows = np.arange(first, min(first + BATCH, len(data)))
        yield pixels(rows), data.labels[rows]


def agreement_table(tallies: dict[int, Tally]) -> str:
    lines = ["bits   accuracy  answers as torch"]
    for bits, tally in tallies.items():
        same = f"{tally.same} of {tally.answers} ({tally.agreement:.3f} %)"
        lines.append(f"{bits_name(str(bits)):<5}  {pixel_accuracy(tally.counts):>6.2f} %  {same}")
    return "\n".join(lines)


def with_accuracy(path: Path, accuracy: dict[int, float]) -> None:
    """The same file with these accuracies in it."""
    graph = read(path)
    noted = tuple(replace(profile, accuracy=accuracy[int(profile.name)]) for profile in graph.profiles)
    with ModelFile(path) as before:
        write(replace(graph, profiles=noted), path)
        with ModelFile(path) as after:
            assert after.graph_json["checksums"] == before.graph_json["checksums"]


def card_of(
    args: argparse.Namespace, path: Path, tallies: dict[int, Tally], data: Data, recipes: list[dict[str, Any]]
) -> ModelCard:
    with ModelFile(path) as file:
        graph = file.graph_json
    segments = isinstance(data, MaskData)
    profiles, made_by = facts_of_file(path, tallies, segments)
    return ModelCard(
        name=args.name,
        summary=args.summary or f"{recipes[-1]['net']} trained on {recipes[-1]['data']}",
        task="segmentation" if segments else "classification",
        data=recipes[-1]["data"],
        network=recipes[-1]["net"],
        parameters=sum(math.prod(weight["shape"]) for weight in graph["weights"].values()),
        input=tuple(graph["input"]["shape"]),
        classes=data.num_classes,
        test_images=len(data),
        license=args.license,
        bytes=path.stat().st_size,
        sha256=sha256(path),
        profiles=profiles,
        training={
            "recipes": recipes,
            "seed": recipes[-1]["seed"],
            "commit": args.commit or head_commit(),
            "core_hours": args.core_hours,
        },
        made_by=made_by,
        notes=tuple(args.note),
    )


def facts_of_file(path: Path, tallies: dict[int, Tally], segments: bool) -> tuple[dict[str, ProfileFacts], str]:
    """Of every width, and what has written the file."""
    with ModelFile(path) as file:
        bytes_of = {profile.name: file.bytes_for_profile(profile) for profile in file.profiles}
        accuracy = {profile.name: profile.accuracy for profile in file.profiles}
        made_by = str(file.graph_json["made_by"])
    facts = {
        str(bits): ProfileFacts(
            accuracy=float(accuracy[str(bits)] or 0.0),
            bytes=bytes_of[str(bits)],
            agreement=round(tally.agreement, 3),
            miou=round(mean_iou(tally.counts), 4) if segments else None,
        )
        for bits, tally in tallies.items()
    }
    return facts, made_by


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def head_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise AnyprecError("this is no git checkout; name the commit that trained the model with --commit")
    return done.stdout.strip()


def write_card(card: ModelCard, folder: Path) -> None:
    write_text(folder / f"{card.name}.json", json.dumps(card.to_dict(), indent=2) + "\n")


def read_card(name: str, folder: Path) -> ModelCard:
    path = folder / f"{name}.json"
    if not path.is_file():
        raise AnyprecError(f"there is no card {path}")
    return ModelCard.from_dict(json.loads(path.read_text(encoding="utf-8")))


# --- Times ---


def time_shipped(args: argparse.Namespace) -> None:
    """Batch 1, one thread, every width in turn: medians into the card."""
    load = os.getloadavg()[0]
    if load > QUIET_LOAD and not args.busy:
        raise AnyprecError(
            f"the machine is busy (load {load:.1f}), times would be too long; wait until it is quiet, or give --busy"
        )
    card = read_card(args.times, args.out)
    with Progress("times", total=args.rounds, unit="round") as bar:
        wish = BenchSettings(model=str(args.out / f"{args.times}.apm"), rivals=(), rounds=args.rounds, size=args.size)
        done = bench(wish, bar.update)
    ms = {row.variant: round(row.p50_ms, 4) for row in done.rows}
    profiles = {name: replace(facts, ms=ms.get(name)) for name, facts in card.profiles.items()}
    timing = {key: done.machine[key] for key in ("cpu", "cores", "isa", "rounds")}
    timing |= {"size": list(done.size), "busy": load > QUIET_LOAD}
    write_card(replace(card, profiles=profiles, timing=timing), args.out)
    print("  ".join(f"{bits_name(name)}: {value:.3f} ms" for name, value in ms.items()))


# --- The page ---


def paged(text: str) -> str:
    """docs/models.md with its tables made anew, between the two marks."""
    start, end = "<!-- tables of bench/ship_model.py --page -->\n", "<!-- end of the tables -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise AnyprecError(f"{PAGE} has no pair of marks {start.strip()} ... {end}")
    head, rest = text.split(start)
    made = "\n".join(section(catalog.card(name)) for name in catalog.names())
    return head + start + "\n" + made + "\n" + end + rest.split(end)[1]


def section(card: ModelCard) -> str:
    masks = card.task == "segmentation"
    heads = ["bits", *(["mIoU"] if masks else []), "pixels right" if masks else "accuracy", "as torch", "bytes", "ms"]
    lines = [f"### {card.name}", "", card.summary, "", "| " + " | ".join(heads) + " |", "|" + "---:|" * len(heads)]
    for name, facts in card.profiles.items():
        cells = [bits_name(name), *([f"{facts.miou:.2f} %"] if facts.miou is not None else [])]
        cells += [f"{facts.accuracy:.2f} %", f"{facts.agreement:.2f} %", f"{facts.bytes:,}"]
        lines.append("| " + " | ".join([*cells, "" if facts.ms is None else f"{facts.ms:.3f}"]) + " |")
    return "\n".join([*lines, "", *facts_of(card), ""])


def facts_of(card: ModelCard) -> list[str]:
    size = " x ".join("any" if n is None else str(n) for n in card.input)
    hours = card.training.get("core_hours")
    trained = [f"- Trained with seed {card.training['seed']}" + (f" in {hours:g} core-hours" if hours else "")]
    stages = len(card.training["recipes"])
    trained[0] += f" at commit `{card.training['commit'][:12]}`, {stages} stage{'s' if stages > 1 else ''}."
    timed = "- Times: not measured yet on a quiet machine."
    if card.timing is not None:
        at = card.timing
        timed = f"- Times: {at['cpu']}, {at['isa']}; batch 1, one thread, median of {at['rounds']} rounds"
        timed += ", while the machine had other work." if at.get("busy") else "."
    return [
        f"- Network `{card.network}`, {card.parameters:,} weights, input {size}; data `{card.data}`, "
        f"{card.classes} classes.",
        f"- Accuracy is the engine's own, over all {card.test_images:,} test images. Repeat it:",
        f"  `anyprec run {card.name} --dataset {card.data} --data DIR`",
        *trained,
        timed,
        f"- License {card.license}. SHA-256 `{card.sha256}`.",
        *(f"- {note}" for note in card.notes),
    ]


if __name__ == "__main__":
    sys.exit(main())
