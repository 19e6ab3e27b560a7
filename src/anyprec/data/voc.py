"""Pascal VOC 2012 segmentation, with SBD where it is there, in their official layouts.

VOC: `VOCdevkit/VOC2012` with JPEGImages, SegmentationClass (palette PNGs, 255 is void) and ImageSets/Segmentation. SBD
(Hariharan et al., 2011): `benchmark_RELEASE/dataset` with img, cls (.mat), train.txt and val.txt. Training is on what
is called trainaug: VOC's train and all of SBD but VOC's val, 10,582 images. Goes out: `MaskData`. Called by `catalog`.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from anyprec.data.masks import MaskData, MaskSample
from anyprec.errors import DataError

CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
LAYOUT = (
    "VOCdevkit/VOC2012/{JPEGImages,SegmentationClass,ImageSets/Segmentation}, and beside it, for the paper's training "
    "set, SBD's benchmark_RELEASE/dataset/{img,cls,train.txt,val.txt}"
)


def read_voc(root: Path, split: str) -> MaskData:
    """10,582 images to train (1,464 without SBD), 1,449 to test: VOC's val, as its test masks are not public."""
    voc = next((root / p for p in ("VOCdevkit/VOC2012", "VOC2012", ".") if (root / p / "JPEGImages").is_dir()), None)
    if voc is None:
        raise DataError(f"{root} has no VOCdevkit/VOC2012 with JPEGImages in it; expected {LAYOUT}")
    val = _names(voc / "ImageSets" / "Segmentation" / "val.txt")
    if split == "test":
        return MaskData([_voc_sample(voc, name) for name in val], CLASSES, name="voc")
    train = _names(voc / "ImageSets" / "Segmentation" / "train.txt")
    samples = [_voc_sample(voc, name) for name in train]
    places = (Path(base) / p for base in (root, voc, voc.parent.parent) for p in ("benchmark_RELEASE/dataset", "sbd"))
    sbd = next((place for place in places if (place / "cls").is_dir()), None)
    if sbd is None:
        warnings.warn(
            f"{root} has no benchmark_RELEASE/dataset (SBD): training only on the {len(train)} images of VOC's train, "
            "where the paper takes 10,582",
            stacklevel=2,
        )
        return MaskData(samples, CLASSES, name="voc")
    taken = {*train, *val}  # VOC's own masks go first, and what is tested on is not trained on
    for name in (*_names(sbd / "train.txt"), *_names(sbd / "val.txt")):
        if name not in taken:
            taken.add(name)
            image = sbd / "img" / f"{name}.jpg"
            image = image if image.is_file() else voc / "JPEGImages" / f"{name}.jpg"
            samples.append(_sample(name, image, sbd / "cls" / f"{name}.mat"))
    return MaskData(samples, CLASSES, name="voc")


def _voc_sample(voc: Path, name: str) -> MaskSample:
    return _sample(name, voc / "JPEGImages" / f"{name}.jpg", voc / "SegmentationClass" / f"{name}.png")


def _sample(name: str, image: Path, mask: Path) -> MaskSample:
    for path in (image, mask):
        if not path.is_file():
            raise DataError(f"there is no {path}, though its set lists {name}; unpack the archive again")
    return MaskSample(name, image, mask)


def _names(path: Path) -> list[str]:
    """Names of a set, one a line; they are parts of paths, so nothing but a plain name will do."""
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} ({error}); expected {LAYOUT}") from error
    bad = next((line for line in lines if not line.replace("_", "").isalnum()), None)
    if bad is not None or not lines:
        raise DataError(f"{path} holds {bad!r}, not names such as 2007_000032, one a line; unpack the archive again")
    return lines
