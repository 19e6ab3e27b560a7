"""`anyprec pack MODEL --out net.apm`: a run folder or a model.pt in, a model file out. The work is packing.py's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from anyprec.bits import FLOAT, Profile, parse_widths
from anyprec.data import DATASETS, annotated, batches, cifar10, digits, idx, load_data, svhn, voc
from anyprec.data.catalog import some_of
from anyprec.data.masks import MaskData
from anyprec.data.sets import PHOTO_MEAN, PHOTO_STD
from anyprec.errors import AnyprecError, DataError
from anyprec.pack.edges import EDGES, Image
from anyprec.pack.packing import pack
from anyprec.train.checkpoint import load_model, load_state
from anyprec.train.cli_evaluate import model_file
from anyprec.train.evaluate import to_tensor
from anyprec.train.run import eval_augment
from anyprec.zoo import ZOO

SEGMENTED = 129  # such networks take any size: what is enough to see that saves seconds over 513
EDGE_IMAGES = 128  # looked at for the ranges of --edges 8bit
# data set -> mean and deviation of x/255 per channel, names of the classes (those of photographs are the user's)
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...], tuple[str, ...]]] = {
    "digits": (digits.MEAN, digits.STD, digits.CLASSES),
    "cifar10": (cifar10.MEAN, cifar10.STD, cifar10.CLASSES),
    "svhn": (svhn.MEAN, svhn.STD, svhn.CLASSES),
    "fashion-mnist": (idx.MEAN, idx.STD, idx.CLASSES),
    "imagenet": (PHOTO_MEAN, PHOTO_STD, ()),
    "folder": (PHOTO_MEAN, PHOTO_STD, ()),
    "camvid": (PHOTO_MEAN, PHOTO_STD, annotated.CAMVID_CLASSES),
    "voc": (PHOTO_MEAN, PHOTO_STD, voc.CLASSES),
    "voc-animals": (PHOTO_MEAN, PHOTO_STD, voc.CLASSES),
    "masks": (PHOTO_MEAN, PHOTO_STD, ()),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run folder of `anyprec train`, or a model file (.pt)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the model file to write, such as net.apm")
    parser.add_argument("--float", action="store_true", help="keep float weights too, so that 32 bits is available")
    parser.add_argument("--widths", help="for example 1,2,4,8 or 1-8 (default: all it has)")
    parser.add_argument("--profile", action="append", default=[], metavar="FILE", help="also this mixed profile (JSON)")
    parser.add_argument("--labels", metavar="FILE", help="names of the classes, one a line (default: the data set's)")
    parser.add_argument("--dataset", help="name of the data set it is for (default: the one of the model's recipe)")
    parser.add_argument("--edges", choices=EDGES, default="float", help="first and last layers (default: float)")
    parser.add_argument("--data", metavar="DIR", help="folder of the data set; --edges 8bit takes ranges from it")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    path = model_file(args.model)
    record = load_state(path)
    dataset = args.dataset or record.get("extra", {}).get("recipe", {}).get("data")
    if dataset is not None and dataset not in DATASETS:
        raise DataError(f"--dataset {dataset!r} is not known; choose one of {', '.join(DATASETS)}")
    model = load_model(path)
    shape = image_shape(record)
    example = torch.zeros(1, *shape)
    if args.edges != "float":
        example = training_images(dataset, args.data, record)
    image, labels = facts(dataset, shape[0], record["net_options"].get("num_classes"))
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
        accuracy=accuracies(record, keep_float, widths) if args.edges == "float" else None,
        edges=args.edges,
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


def training_images(dataset: str | None, folder: str | None, record: dict[str, Any]) -> torch.Tensor:
    """(N, C, H, W) float32: what the network was trained on, for ranges."""
    if dataset is None:
        raise DataError("--edges 8bit takes ranges from training images; name their data set with --dataset, --data")
    recipe = record.get("extra", {}).get("recipe", {})
    augment = eval_augment(recipe.get("augment", DATASETS[dataset].augment))
    data = load_data(dataset, "train", folder)
    if isinstance(data, MaskData):  # photographs of any size: cut to one, as in training
        cut, count = recipe.get("augment", DATASETS[dataset].augment), min(len(data), EDGE_IMAGES // 4)
        images, _ = next(iter(batches(data, count, augment=cut, train=True, prefetch=0)))
        return to_tensor(images)
    some = some_of(data, EDGE_IMAGES)
    images, _ = next(iter(batches(some, len(some), augment=augment, prefetch=0)))
    return to_tensor(images)


def facts(dataset: str | None, channels: int, classes: int | None) -> tuple[Image | None, tuple[str, ...] | None]:
    """How uint8 images become inputs, (x / 255 - mean) / std as one multiplication and addition, and the classes."""
    if dataset is None:
        return None, None
    mean, std, names = STATISTICS[dataset]
    image = [1 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]
    return image if len(mean) == channels else None, names if names and len(names) == classes else None


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
