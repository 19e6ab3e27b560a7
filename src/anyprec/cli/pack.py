"""`anyprec pack MODEL --out net.apm`: a run folder or a model.pt in, a model file out. The work is packing.py's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from anyprec.cli.evaluate import model_file
from anyprec.data import DATASETS, batches, load_data, preprocessing_of
from anyprec.data.catalog import balanced_subset
from anyprec.data.masks import MaskData
from anyprec.errors import AnyprecError, DataError
from anyprec.packing.first_last import FIRST_LAST
from anyprec.packing.images import IMAGES, image_noise
from anyprec.packing.packing import pack
from anyprec.preprocessing import Preprocessing
from anyprec.training.checkpoint import load_model, load_record, preprocessing_in
from anyprec.training.evaluate import to_tensor
from anyprec.training.run import eval_augment
from anyprec.widths import FLOAT, Profile, parse_widths
from anyprec.zoo import ZOO

SEGMENTED = 129  # such networks take any size: what is enough to see that saves seconds over 513
RANGE_IMAGES = 128  # looked at for the ranges of --first-last 8bit


class _Renamed(argparse.Action):
    """--edges, as --first-last was called once."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        print("anyprec: note: --edges is called --first-last now", file=sys.stderr)
        setattr(namespace, self.dest, values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run folder of `anyprec train`, or a model file (.pt)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the model file to write, such as net.apm")
    parser.add_argument("--float", action="store_true", help="keep float weights too, so that 32 bits is available")
    parser.add_argument("--widths", help="for example 1,2,4,8 or 1-8 (default: all it has)")
    parser.add_argument("--profile", action="append", default=[], metavar="FILE", help="also this mixed profile (JSON)")
    parser.add_argument("--labels", metavar="FILE", help="names of the classes, one a line (default: the data set's)")
    parser.add_argument("--dataset", help="name of the data set it is for (default: the one of the model's recipe)")
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
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    path = model_file(args.model)
    record = load_record(path)
    dataset = args.dataset or record.get("extra", {}).get("recipe", {}).get("data")
    if dataset is not None and dataset not in DATASETS:
        raise DataError(f"--dataset {dataset!r} is not known; choose one of {', '.join(DATASETS)}")
    model = load_model(path)
    image, labels = checked_facts(facts(record, path, args.dataset, args.data), record, dataset)
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
    print(json.dumps(report.to_dict()) if args.json else report)
    return 0


def image_shape(record: dict[str, Any]) -> tuple[int, int, int]:
    """(C, H, W) of the images a zoo network is made for."""
    options = record["net_options"]
    entry = ZOO[record["net"]]
    height, width, channels = entry.shape
    if entry.task == "segmentation":
        height, width = (min(n, SEGMENTED) for n in (height, width))
    if "size" in options:
        height = width = options["size"]
    return options.get("in_channels", channels), height, width


def training_images(
    dataset: str | None, folder: str | None, record: dict[str, Any], image: Preprocessing | None
) -> torch.Tensor:
    """(N, C, H, W) float32: what the network was trained on, for ranges."""
    if dataset is None:
        raise DataError(
            "--first-last 8bit takes ranges from training images; name their data set with --dataset, --data"
        )
    recipe = record.get("extra", {}).get("recipe", {})
    augment = eval_augment(recipe.get("augment", DATASETS[dataset].augment))
    data = load_data(dataset, "train", folder)
    if isinstance(data, MaskData):  # photographs of any size: cut to one, as in training
        cut, count = recipe.get("augment", DATASETS[dataset].augment), min(len(data), RANGE_IMAGES // 4)
        images, _ = next(iter(batches(data, count, augment=cut, train=True, prefetch=0)))
        return to_tensor(images)
    some = balanced_subset(data, RANGE_IMAGES)
    images, _ = next(iter(batches(some, len(some), augment=augment, preprocessing=image, prefetch=0)))
    return to_tensor(images)


def facts(
    record: dict[str, Any], path: Path, dataset: str | None, folder: str | None
) -> tuple[Preprocessing | None, tuple[str, ...] | None]:
    """How pictures become inputs and the names of the classes: those of the training run, from its checkpoint.

    `dataset` (--dataset) overrules it. A checkpoint from before these were kept names its data set; where that does not
    settle the size, the folder has to.
    """
    extra = record.get("extra", {})
    kept = preprocessing_in(record, path)
    if dataset is None and kept is not None:
        return kept, tuple(map(str, extra.get("classes", ())))
    recipe = extra.get("recipe", {})
    name = dataset or recipe.get("data")
    if name is None:
        return None, None
    spec = DATASETS[name]
    augment = eval_augment(recipe["augment"] if recipe.get("data") == name else spec.augment)
    how, classes = spec.preprocessing(augment), spec.classes
    if folder is not None and (how is None or not classes):
        data = load_data(name, "train", folder)
        how, classes = preprocessing_of(data, augment), data.classes
    if how is None:
        raise DataError(
            f"{path} does not say at which size it was trained (an older anyprec made it), and {name!r} has images of "
            "any size; give the folder it was trained on: --data DIR"
        )
    return how, classes


def checked_facts(
    facts: tuple[Preprocessing | None, tuple[str, ...] | None], record: dict[str, Any], dataset: str | None
) -> tuple[Preprocessing | None, tuple[str, ...] | None]:
    """As the network can have them: its channels and size, and names only where there is one for each class."""
    how, names = facts
    channels, height, width = image_shape(record)
    if how is not None and how.channels != channels:
        raise DataError(
            f"{dataset or 'the data set'} has images of {how.channels} channels, the network takes {channels}; name "
            "the data set it was trained on"
        )
    if how is not None and how.size is not None and "size" in record["net_options"] and how.size != (height, width):
        raise DataError(
            f"{dataset or 'the data set'} gives images of {how.size[0]} x {how.size[1]}, the network takes {height} x "
            f"{width} alone; name the data set it was trained on"
        )
    return how, names if names and len(names) == record["net_options"].get("num_classes", len(names)) else None


def accuracies(record: dict[str, Any], keep_float: bool, widths: tuple[int, ...] | None) -> dict[int | str, float]:
    """Test accuracy as the run ended, of the widths that are packed."""
    tested = {int(bits): result["accuracy"] for bits, result in record.get("extra", {}).get("test", {}).items()}
    return {
        bits: accuracy
        for bits, accuracy in tested.items()
        if bits in record["widths"] and (keep_float if bits == FLOAT else widths is None or bits in widths)
    }


def read_labels(path: str) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise AnyprecError(f"cannot read labels {path}: {error}; give a text file, one name a line") from error
