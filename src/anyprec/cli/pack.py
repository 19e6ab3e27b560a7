"""`anyprec pack RUN --out net.apm`: a run folder or a checkpoint in, a model file out. The work is packing.py's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from anyprec.choices import FIRST_LAST
from anyprec.cli.output import print_json, print_next
from anyprec.errors import AnyprecError, DataError
from anyprec.widths import FLOAT, Profile, parse_widths

EXAMPLE = "anyprec pack runs/digits --out digits.apm"


class _Renamed(argparse.Action):
    """--edges, as --first-last was called once."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        print("anyprec: note: --edges is called --first-last now", file=sys.stderr)
        setattr(namespace, self.dest, values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", help="a run folder of `anyprec train`, or a checkpoint (.pt)")
    parser.add_argument("--out", required=True, metavar="MODEL.apm", help="the model file to write, such as net.apm")
    parser.add_argument("--float", action="store_true", help="keep float weights too, so that 32 bits is available")
    parser.add_argument("--widths", metavar="BITS", help="for example 1,2,4,8 or 1-8 (default: all it has)")
    parser.add_argument(
        "--profile", action="append", default=[], metavar="FILE.json", help="also this mixed profile; may be repeated"
    )
    parser.add_argument(
        "--labels", metavar="FILE.txt", help="names of the classes, one per line (default: the data set's)"
    )
    parser.add_argument("--dataset", metavar="NAME", help="the data set (default: the one of the model's recipe)")
    parser.add_argument(
        "--first-last", choices=FIRST_LAST, default="float", help="first and last layers (default: float)"
    )
    parser.add_argument(
        "--edges", dest="first_last", choices=FIRST_LAST, default=argparse.SUPPRESS, action=_Renamed,
        help=argparse.SUPPRESS,
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="DIR", help="folder of the data set: for --first-last 8bit, and for checkpoints without sizes"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare the file with the network it was made of"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from anyprec.data import DATASETS
    from anyprec.packing.checkpoint_facts import (
        accuracies,
        checked_facts,
        image_shape,
        known_facts,
        training_images,
    )
    from anyprec.packing.images import IMAGES, image_noise
    from anyprec.packing.packing import pack
    from anyprec.training.checkpoint import load_model, load_record
    from anyprec.training.trained_run import checkpoint_of

    path = checkpoint_of(args.model)
    record = load_record(path)
    dataset = args.dataset or record.get("extra", {}).get("recipe", {}).get("data")
    if dataset is not None and dataset not in DATASETS:
        raise DataError(f"--dataset {dataset!r} is not known; choose one of {', '.join(DATASETS)}")
    model = load_model(path)
    if record["net"] == "onnx":  # imported: it brings the shape of its input, and may not be for images
        image, labels = known_facts(record, path, args.dataset, args.data)
        shape = tuple(record["net_options"]["input_shape"])
    else:
        image, labels = checked_facts(known_facts(record, path, args.dataset, args.data), record, dataset)
        channels, height, width = image_shape(record)
        shape = (channels, *((height, width) if image is None or image.size is None else image.size))
    # Of the range it was trained on: enough to compare the file with it
    example = image_noise(IMAGES, shape, image.image if image else None)
    if args.first_last != "float":
        example = training_images(dataset, args.data, record, image)
    widths = parse_widths(args.widths) if args.widths else None
    keep_float = args.float or (widths is not None and FLOAT in widths)
    report = pack(
        model,
        args.out,
        example=example,
        keep_float=keep_float,
        widths=widths,
        profiles=[Profile.load(p) for p in args.profile],
        labels=read_labels(args.labels) if args.labels else labels,
        image=image,
        accuracy=accuracies(record, keep_float, widths) if args.first_last == "float" else None,
        first_last=args.first_last,
        verify=not args.no_verify,
    )
    if args.json:
        facts = report.to_dict()
        print_json({"model": str(path), "out": facts.pop("path"), **facts})
    else:
        print(report)
        test_set = [] if dataset is None else needed_data(dataset, args.data)
        print_next("run", args.out, *(test_set or ["photo.jpg"]))
    return 0


def needed_data(dataset: str, folder: str | None) -> list[str]:
    """Options of `anyprec run` for the accuracy over this test set; none where its folder is not known."""
    from anyprec.data import DATASETS

    if not DATASETS[dataset].layout:  # embedded
        return ["--dataset", dataset]
    return ["--dataset", dataset, "--data", folder] if folder else []


def read_labels(path: str) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise AnyprecError(f"cannot read labels {path}: {error}; give a text file, one name a line") from error
