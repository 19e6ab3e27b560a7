"""The images that `search` and `cascade` decide by: pictures and arrays by name, or training images of a data set."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.arguments import positive
from anyprec.data import load_data
from anyprec.data.catalog import balanced_subset, hold_out
from anyprec.data.masks import MaskData
from anyprec.errors import InputError
from anyprec.run.accuracy import reader
from anyprec.run.images import find_files, read_batches
from anyprec.run.model import PackedModel


@dataclass(frozen=True)
class CalibrationImages:
    images: npt.NDArray[Any]  # (N, H, W, C)
    labels: npt.NDArray[np.int64] | None


def add_image_arguments(parser: argparse.ArgumentParser, count: int) -> None:
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", help=".npy arrays, image files, or folders of them; no labels are needed"
    )
    parser.add_argument("--dataset", metavar="NAME", help="training images of this data set, with their labels")
    parser.add_argument("--data", metavar="DIR", help="folder that holds the data set (the embedded digits need none)")
    parser.add_argument(
        "--validation", type=positive, metavar="N",
        help="only among the N training images that a recipe with `validation = N` holds out",
    )  # fmt: skip
    parser.add_argument("--count", type=positive, default=count, metavar="N", help=f"images used (default: {count})")


def calibration_images(args: argparse.Namespace, model: PackedModel) -> CalibrationImages:
    if args.dataset is None:
        for name in ("data", "validation"):
            if getattr(args, name) is not None:
                raise InputError(f"--{name} goes with --dataset NAME; leave it out")
        if not args.images:
            raise InputError(
                "no images; give some hundred pictures or arrays like those it will see, or --dataset NAME"
            )
        return CalibrationImages(named_images(args.images, model, args.count), None)
    if args.images:
        raise InputError(f"got both images ({args.images[0]}) and --dataset {args.dataset}; give one of them")
    data = load_data(args.dataset, "train", args.data)
    if isinstance(data, MaskData):
        raise InputError(f"{data.name} has masks; give its images by name instead, without labels")
    if args.validation is not None:
        data = hold_out(data, args.validation)[1]
    assert not isinstance(data, MaskData)
    data = balanced_subset(data, args.count)
    assert not isinstance(data, MaskData)
    return CalibrationImages(reader(model, data, None)(np.arange(len(data))), data.labels)


def named_images(paths: list[str], model: PackedModel, count: int) -> npt.NDArray[Any]:
    found: list[npt.NDArray[Any]] = []
    for path in find_files(paths):
        for batch in read_batches(path, model, None, None):
            images = (
                batch.images if batch.layout == "NHWC" or batch.images.ndim != 4 else batch.images.transpose(0, 2, 3, 1)
            )
            if found and images.shape[1:] != found[0].shape[1:]:
                raise InputError(
                    f"{batch.names[0]} is {images.shape[1:]}, the first image {found[0].shape[1:]}; give one size only"
                )
            found.append(np.asarray(images))
            if sum(map(len, found)) >= count:
                return np.concatenate(found)[:count]
    return np.concatenate(found)
