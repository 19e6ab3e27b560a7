"""The data sets by name: `DATASETS`, and `load_data`, which reads one, and downloads it first if asked to.

Called by the training loop and the command line, which pass names and folders as the user typed them.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from anyprec.data import annotated, cifar10, digits, draws, folder, idx, svhn, voc
from anyprec.data.augment import Augment, find_augment
from anyprec.data.download import RemoteFile, fetch, locked, unpack
from anyprec.data.masks import MaskData
from anyprec.data.sets import PHOTO_MEAN, PHOTO_STD, ArrayData, FileData, check_channels
from anyprec.errors import DataError
from anyprec.preprocessing import Preprocessing

SPLITS = ("train", "test")
Data = ArrayData | FileData | MaskData


@dataclass(frozen=True)
class DatasetSpec:
    """One data set: how it is read, and what the user has to know of it."""

    name: str
    about: str  # one line
    read: Callable[[Any, str], Data]  # (root, split)
    augment: str  # the setting it is usually trained with
    layout: str = ""  # what its folder must hold; empty: embedded, needs no folder
    find: Callable[[Path, str], tuple[list[Path], list[str]]] | None = None  # (files there, names missing)
    archives: Callable[[Path, str], list[RemoteFile]] | None = (
        None  # what a download fetches; None: it cannot be downloaded
    )
    # Known without reading it. shape: H, W, C of its images, None where the user's files say; masks have no size.
    shape: tuple[int, int, int] | None = None
    classes: tuple[str, ...] = ()  # empty: the user's
    mean: tuple[float, ...] = PHOTO_MEAN  # of x/255, per channel
    std: tuple[float, ...] = PHOTO_STD
    masks: bool = False

    def preprocessing(self, augment: str | Augment | None = None) -> Preprocessing | None:
        """What testing does to its images if it is trained with `augment`; None where only the files can say."""
        if self.masks:
            return Preprocessing(self.mean, self.std)
        how = find_augment(self.augment if augment is None else augment)
        if self.shape is None and not (how.side or how.resize):
            return None
        return how.preprocessing(self.shape or (how.resize, how.resize, 3), self.mean, self.std)


DATASETS: dict[str, DatasetSpec] = {
    spec.name: spec
    for spec in (
        DatasetSpec(
            "digits",
            "1,797 handwritten digits, 8x8 gray, embedded in the package",
            digits.read_digits,
            "crop",
            shape=(8, 8, 1),
            classes=digits.CLASSES,
            mean=digits.MEAN,
            std=digits.STD,
        ),
        DatasetSpec(
            "cifar10",
            "60,000 photographs of 10 things, 32x32 color",
            cifar10.read_cifar10,
            "crop-flip",
            cifar10.LAYOUT,
            cifar10.find,
            cifar10.archives,
            shape=(32, 32, 3),
            classes=cifar10.CLASSES,
            mean=cifar10.MEAN,
            std=cifar10.STD,
        ),
        DatasetSpec(
            "svhn",
            "630,420 house-number digits, 32x32 color",
            svhn.read_svhn,
            "svhn",
            svhn.LAYOUT,
            svhn.find,
            svhn.archives,
            shape=(32, 32, 3),
            classes=svhn.CLASSES,
            mean=svhn.MEAN,
            std=svhn.STD,
        ),
        DatasetSpec(
            "fashion-mnist",
            "70,000 pieces of clothing, 28x28 gray",
            idx.read_fashion,
            "crop-flip",
            idx.LAYOUT,
            idx.find,
            idx.archives,
            shape=(28, 28, 1),
            classes=idx.CLASSES,
            mean=idx.MEAN,
            std=idx.STD,
        ),
        DatasetSpec(
            "imagenet",
            "1.3 million photographs of 1,000 things",
            folder.read_imagenet,
            "imagenet",
            folder.IMAGENET_LAYOUT,
            shape=(folder.PHOTO, folder.PHOTO, 3),
        ),
        DatasetSpec("folder", "your own images, one folder a class", folder.read_folder, "imagenet", folder.LAYOUT),
        DatasetSpec(
            "camvid",
            "600 street scenes, 11 classes, a mask each",
            annotated.read_camvid,
            "camvid",
            annotated.CAMVID_LAYOUT,
            classes=annotated.CAMVID_CLASSES,
            masks=True,
        ),
        DatasetSpec(
            "voc",
            "Pascal VOC 2012 and SBD: 12,031 photographs, a mask each",
            voc.read_voc,
            "voc",
            voc.LAYOUT,
            classes=voc.CLASSES,
            masks=True,
        ),
        DatasetSpec(
            "voc-animals",
            "1,421 photographs of VOC 2012 that show animals, a mask each",
            annotated.read_animals,
            "voc",
            annotated.ANIMALS_LAYOUT,
            classes=voc.CLASSES,
            masks=True,
        ),
        DatasetSpec("masks", "your own images, a mask each", annotated.read_masks, "voc", annotated.LAYOUT, masks=True),
    )
}


def load_data(
    name: str, split: str, root: str | Path | None = None, *, download: bool = False, limit: int | None = None
) -> Data:
    """Read a data set.

    split:    "train" or "test"
    root:     its folder; not needed for "digits"
    download: get what is missing of it first, into `root`
    limit:    only so many images: the first of a fixed, class-balanced shuffle, so 100 are part of 200
    """
    if name not in DATASETS:
        close = difflib.get_close_matches(str(name), DATASETS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise DataError(f"data set {name!r} is not known; choose one of {', '.join(DATASETS)}{hint}")
    if split not in SPLITS:
        raise DataError(f"split={split!r} is not known; choose train or test")
    spec = DATASETS[name]
    if not spec.layout:
        return _limited(spec.read(None, split), split, limit)
    if root is None:
        raise DataError(f"{name} needs a folder: give root (on the command line: --data) with {spec.layout}")
    root = Path(root).expanduser()
    if download:
        _download(spec, split, root)
    if not root.is_dir():
        hint = "; or download it with download=True" if spec.archives else ""
        raise DataError(f"there is no folder {root}; {name} needs one with {spec.layout}{hint}")
    return _limited(spec.read(root, split), split, limit)


def _download(spec: DatasetSpec, split: str, root: Path) -> None:
    if spec.archives is None or spec.find is None:
        raise DataError(
            f"{spec.name} cannot be downloaded for you; get it yourself and give a folder with {spec.layout}"
        )
    if not spec.find(root, split)[1]:
        return  # nothing is missing, so a read-only folder will do
    with locked(root):
        if not spec.find(root, split)[1]:
            return  # another process of this run has just fetched it
        for remote in spec.archives(root, split):
            path = fetch(remote.url, root / remote.name, checksum=remote.checksum, size=remote.size)
            if remote.name.endswith((".tar.gz", ".tgz", ".tar")):
                unpack(path, root)


def _limited(data: Data, split: str, limit: int | None) -> Data:
    if limit is None:
        return data
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= len(data):
        raise DataError(
            f"limit={limit!r} is not allowed; {data.name} has {len(data)} {split} images: give 1..{len(data)}"
        )
    return balanced_subset(data, limit)


def renormalized(data: Data, mean: Sequence[float], std: Sequence[float]) -> Data:
    """The same images, normalized by another mean and deviation than those of the data set."""
    if isinstance(data, ArrayData):
        return replace(data, mean=tuple(mean), std=tuple(std))
    other = copy.copy(data)
    other.mean, other.std = check_channels("mean", mean, 3, data.name), check_channels("std", std, 3, data.name)
    return other


def hold_out(data: Data, count: int) -> tuple[Data, Data]:
    """(rest, held out): a fixed choice of `count` images, each class as often as in the whole; both in their order."""
    if not 0 < count < len(data):
        raise DataError(
            f"validation={count} is not allowed; {data.name} has {len(data)} training images: give 1..{len(data) - 1}"
        )
    labels = np.zeros(len(data), np.int64) if isinstance(data, MaskData) else data.labels
    order = draws.stratify(labels)
    return data.take(np.sort(order[:-count])), data.take(np.sort(order[-count:]))


def balanced_subset(data: Data, count: int) -> Data:
    """The first of a fixed, class-balanced shuffle; masks have no one class, so theirs is a shuffle alone."""
    labels = np.zeros(len(data), np.int64) if isinstance(data, MaskData) else data.labels
    return data.take(draws.balance(labels)[:count])
