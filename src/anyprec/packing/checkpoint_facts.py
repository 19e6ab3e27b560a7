"""What a checkpoint of `anyprec train` says besides its weights: image size, preprocessing, classes, accuracies.

The record of a checkpoint in; arguments of `anyprec.pack` out. Called by `anyprec pack`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from anyprec.data import DATASETS, batches, load_data, preprocessing_of
from anyprec.data.catalog import balanced_subset
from anyprec.data.masks import MaskData
from anyprec.errors import DataError
from anyprec.preprocessing import Preprocessing
from anyprec.training.checkpoint import preprocessing_in
from anyprec.training.evaluate import to_tensor
from anyprec.training.run import eval_augment
from anyprec.training.trained_run import as_trained
from anyprec.widths import FLOAT
from anyprec.zoo import ZOO

SEGMENTED = 129  # such networks take any size: what is enough to see that saves seconds over 513
RANGE_IMAGES = 128  # looked at for the ranges of --first-last 8bit


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
        images, _ = next(iter(batches(as_trained(data, image), count, augment=cut, train=True, prefetch=0)))
        return to_tensor(images)
    some = balanced_subset(data, RANGE_IMAGES)
    images, _ = next(iter(batches(some, len(some), augment=augment, preprocessing=image, prefetch=0)))
    return to_tensor(images)


def known_facts(
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
            f"{dataset or 'the data set'} gives images of {how.size[0]} x {how.size[1]}, the network takes "
            f"only {height} x {width}; name the data set it was trained on"
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
