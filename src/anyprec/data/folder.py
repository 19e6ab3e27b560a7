"""Image folders: `root/train/<class>/*`, `root/test|val/<class>/*`; and ImageNet, whose `val` may be flat.

Goes out: `FileData` with the file names, not the pixels. Classes are the sorted folder names, and must be the
same in both splits, or labels would silently mean different things. Called by `catalog`.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

from anyprec.data.sets import FileData, image_size
from anyprec.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
LAYOUT = "train/<class>/*.jpg and test/<class>/*.jpg (or val/<class>/*.jpg), any of " + " ".join(SUFFIXES)
IMAGENET_LAYOUT = (
    "train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, such as train/n01440764/; or Kaggle's layout, where val is "
    "flat and LOC_val_solution.csv, or val_labels.txt with lines 'ILSVRC2012_val_00000001.JPEG n01751748', "
    "lies beside it"
)
PHOTO = 224  # pixels a side; larger images are cut to this
KAGGLE = "ILSVRC/Data/CLS-LOC"

Listing = list[tuple[str, str]]  # (class, path below the split's folder), sorted


def read_folder(root: Path, split: str) -> FileData:
    """Any image folder. Images come out square: the short side of the first training image, at most 224."""
    _check_root(root, LAYOUT)
    names = ("train",) if split == "train" else ("test", "val")
    here = _split_folder(root, names, LAYOUT)
    listing = list_classes(here)
    train = root / "train"
    if split == "test" and train.is_dir():
        train_classes = _class_folders(train)
        _check_same(_classes(listing), train_classes, here, train)
        first = _first_image(train / train_classes[0]) if train_classes else here / listing[0][1]
    else:
        first = here / listing[0][1]
    return _file_data(here, listing, _classes(listing), "folder", min(PHOTO, *image_size(first)))


def read_imagenet(root: Path, split: str) -> FileData:
    """ImageNet (ILSVRC 2012) or a part of it, 224 x 224."""
    _check_root(root, IMAGENET_LAYOUT)
    base = root / KAGGLE if (root / KAGGLE).is_dir() else root
    train = base / "train"
    if split == "train":
        listing = list_classes(_split_folder(base, ("train",), IMAGENET_LAYOUT))
        return _file_data(train, listing, _classes(listing), "imagenet", PHOTO)
    val = _split_folder(base, ("val",), IMAGENET_LAYOUT)
    listing = list_classes(val) if _class_folders(val) else _list_flat(val, (root, base, val))
    classes = _classes(listing)
    if train.is_dir():
        _check_same(classes, _class_folders(train), val, train)
    return _file_data(val, listing, classes, "imagenet", PHOTO)


def list_classes(folder: Path) -> Listing:
    """All images of `folder/<class>/`, sorted by class and name; every class must have some."""
    classes = _class_folders(folder)
    if not classes:
        loose = sum(_is_image(name) for name in os.listdir(folder))
        what = f"has {loose} images but no class folders" if loose else "is empty"
        raise DataError(f"{folder} {what}; put the images of each class into a folder of its own: {folder}/<class>/")
    listing: Listing = []
    for name in classes:
        with os.scandir(folder / name) as entries:
            images = sorted(entry.name for entry in entries if _is_image(entry.name) and entry.is_file())
        if not images:
            raise DataError(f"{folder / name} has no images ({' '.join(SUFFIXES)}); add some or remove the folder")
        listing += [(name, f"{name}/{image}") for image in images]
    return listing


def _list_flat(val: Path, places: tuple[Path, ...]) -> Listing:
    """A validation folder without class folders, and the file that says which image is what."""
    images = sorted(name for name in os.listdir(val) if _is_image(name))
    if not images:
        raise DataError(f"{val} is empty; expected {IMAGENET_LAYOUT}")
    tables = [place / name for name in ("LOC_val_solution.csv", "val_labels.txt") for place in places]
    table = next((path for path in tables if path.is_file()), None)
    if table is None:
        raise DataError(
            f"{val} has {len(images)} images, no class folders and no labels; move the images to "
            f"val/<wnid>/, or put LOC_val_solution.csv or val_labels.txt into {places[0]}"
        )
    wnid = _read_csv(table) if table.suffix == ".csv" else _read_lines(table)
    unknown = [name for name in images if Path(name).stem not in wnid]
    if unknown:
        raise DataError(
            f"{table} has no label for {unknown[0]} and {len(unknown) - 1} more images of {val}; get it again"
        )
    return sorted((wnid[Path(name).stem], name) for name in images)


def _read_csv(table: Path) -> dict[str, str]:
    """Kaggle's: a line is 'ILSVRC2012_val_00048981,n03995372 85 1 499 272', image, wnid, box."""
    wnid = {}
    with open(table, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            image, boxes = row.get("ImageId"), row.get("PredictionString")
            if not image or not boxes:
                raise DataError(f"{table} must have the columns ImageId and PredictionString, filled; got {row}")
            wnid[image] = boxes.split()[0]
    return wnid


def _read_lines(table: Path) -> dict[str, str]:
    wnid = {}
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), 1):
        fields = line.split()
        if len(fields) != 2 and fields:
            raise DataError(f"{table}, line {number}: {line!r} is not a file name and a wnid, such as n01751748")
        if fields:
            wnid[Path(fields[0]).stem] = fields[1]
    return wnid


def _file_data(folder: Path, listing: Listing, classes: list[str], name: str, size: int) -> FileData:
    label = {wnid: i for i, wnid in enumerate(classes)}
    return FileData(
        folder, [path for _, path in listing], [label[c] for c, _ in listing], classes, size=size, name=name
    )


def _classes(listing: Listing) -> list[str]:
    return sorted({name for name, _ in listing})


def _class_folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _first_image(folder: Path) -> Path:
    names = sorted(name for name in os.listdir(folder) if _is_image(name))
    if not names:
        raise DataError(f"{folder} has no images ({' '.join(SUFFIXES)}); add some or remove the folder")
    return folder / names[0]


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _check_root(root: Path, layout: str) -> None:
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; expected one with {layout}")


def _split_folder(root: Path, names: tuple[str, ...], layout: str) -> Path:
    here = next((root / name for name in names if (root / name).is_dir()), None)
    if here is None:
        seen = ", ".join(_class_folders(root)[:5]) or "no folders"
        raise DataError(f"{root} has no {' or '.join(names)} folder, but {seen}; expected {layout}")
    return here


def _check_same(test: list[str], train: list[str], test_folder: Path, train_folder: Path) -> None:
    odd = sorted(set(test) ^ set(train))
    if odd:
        there, not_there = (test_folder, train_folder) if odd[0] in test else (train_folder, test_folder)
        raise DataError(
            f"class {odd[0]!r} is in {there} but not in {not_there} ({len(test)} and {len(train)} classes, "
            f"{len(odd)} not in both); both splits need the same class folders: add or remove some"
        )
