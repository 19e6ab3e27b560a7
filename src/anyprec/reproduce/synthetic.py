"""Tiny data sets of noise in the official layouts: CIFAR-10, SVHN, ImageNet, VOC 2012 with SBD, CamVid. For dry runs.

`make(name, folder)` writes the files that the readers of anyprec.data expect, a few images each, so that a dry run goes
through the readers and augmentations of the real run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

IMAGES = 4  # of a split, where the layout leaves the number open


def make(name: str, folder: Path) -> Path | None:
    """The folder to read `name` from; None for what is embedded."""
    if name not in MAKERS:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    MAKERS[name](folder, np.random.default_rng(0))
    return folder


def cifar10(folder: Path, random: np.random.Generator) -> None:
    """A file has 10,000 records, whatever they hold."""
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        records = np.zeros((10_000, 3073), np.uint8)
        records[:, 0] = np.arange(10_000) % 10
        records[:, 1:] = random.integers(0, 256, 3072, np.uint8)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def svhn(folder: Path, random: np.random.Generator) -> None:
    from scipy.io import savemat

    for name in ("train", "extra", "test"):
        pixels = random.integers(0, 256, (32, 32, 3, 2 * IMAGES), np.uint8)
        labels = (np.arange(2 * IMAGES) % 10 + 1).astype(np.uint8)[:, None]
        savemat(folder / f"{name}_32x32.mat", {"X": pixels, "y": labels})


def imagenet(folder: Path, random: np.random.Generator) -> None:
    """Four classes: the network gets its 1,000 outputs from the dry run."""
    for split, count in (("train", IMAGES), ("val", 1)):
        for i in range(4):
            here = folder / split / f"n{1440764 + i:08d}"
            here.mkdir(parents=True)
            for n in range(count):
                photograph(random, (300, 260)).save(here / f"{split}_{i}_{n}.JPEG")


def voc(folder: Path, random: np.random.Generator) -> None:
    """VOCdevkit/VOC2012 with its lists and indexed masks, SBD beside it with masks as .mat."""
    from scipy.io import savemat

    base = folder / "VOCdevkit" / "VOC2012"
    for sub in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (base / sub).mkdir(parents=True)
    names = {"train": [f"2007_{i:06d}" for i in range(IMAGES)], "val": [f"2007_{i:06d}" for i in range(90, 92)]}
    for split, ids in names.items():
        (base / "ImageSets/Segmentation" / f"{split}.txt").write_text("\n".join(ids) + "\n")
        for name in ids:
            photograph(random, (500, 375)).save(base / "JPEGImages" / f"{name}.jpg")
            indexed(random, (500, 375), 21).save(base / "SegmentationClass" / f"{name}.png")
    (base / "ImageSets/Segmentation" / "trainval.txt").write_text("\n".join([*names["train"], *names["val"]]) + "\n")
    sbd = folder / "benchmark_RELEASE" / "dataset"
    for sub in ("img", "cls"):
        (sbd / sub).mkdir(parents=True)
    ids = [f"2008_{i:06d}" for i in range(IMAGES)]
    (sbd / "train.txt").write_text("\n".join(ids[:-1]) + "\n")
    (sbd / "val.txt").write_text(ids[-1] + "\n")
    for name in ids:
        photograph(random, (500, 375)).save(sbd / "img" / f"{name}.jpg")
        mask = random.integers(0, 21, (375, 500), np.uint8)
        record = np.zeros((1, 1), dtype=[("Segmentation", object)])
        record[0, 0]["Segmentation"] = mask
        savemat(sbd / "cls" / f"{name}.mat", {"GTcls": record})


def camvid(folder: Path, random: np.random.Generator) -> None:
    """The classes are shades of gray, so that there is something to learn; label 11 is none of them."""
    scenes(folder, random, "test", (240, 180), 12)


def animals(folder: Path, random: np.random.Generator) -> None:
    scenes(folder, random, "val", (256, 192), 21)


def scenes(folder: Path, random: np.random.Generator, test: str, size: tuple[int, int], labels: int) -> None:
    for split, count in (("train", IMAGES), (test, 2)):
        for sub in (split, f"{split}annot"):
            (folder / sub).mkdir(parents=True)
        for i in range(count):
            mask = indexed(random, size, labels)
            mask.save(folder / f"{split}annot" / f"{i:04d}.png")
            mask.point(lambda label: 12 * label).convert("RGB").save(folder / split / f"{i:04d}.png")


def photograph(random: np.random.Generator, size: tuple[int, int]) -> Any:
    from PIL import Image

    small = Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8))
    return small.resize(size)


def indexed(random: np.random.Generator, size: tuple[int, int], classes: int) -> Any:
    from PIL import Image

    labels = random.integers(0, classes, (6, 8), np.uint8)
    mask = Image.fromarray(labels).resize(size, Image.Resampling.NEAREST)
    mask.putpalette([i for level in range(256) for i in (level, level, level)])
    return mask


MAKERS: dict[str, Callable[[Path, np.random.Generator], None]] = {
    "cifar10": cifar10,
    "svhn": svhn,
    "imagenet": imagenet,
    "voc": voc,
    "camvid": camvid,
    "voc-animals": animals,
}
