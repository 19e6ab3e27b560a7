"""MaskData: photographs with a class for every pixel, decoded when read. Made by `annotated` and `voc`, or by a user.

A sample is an image and a mask, each a file or the bytes of one. `pair(i)` -> (H, W, 3) uint8 and (H, W) uint8, where
VOID marks pixels that count for nothing; `cut` gives them all one size, for training. Batches are made by `loader`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from anyprec.data.sets import (
    PHOTO_MEAN,
    PHOTO_STD,
    check_channels,
    check_indices,
    pillow_open,
    undecodable,
    upright_size,
)
from anyprec.errors import AnyprecError, DataError, MissingExtra
from anyprec.preprocessing import orientation, upright

if TYPE_CHECKING:
    from anyprec.data.augment import Augment

Pixels = npt.NDArray[np.uint8]

VOID = 255  # of a mask as it is read: unlabeled, or outside the image
IGNORED = -100  # the same in a batch: what torch's cross-entropy passes over, and no class of any data set
ROOM = 256 << 20  # bytes of decoded samples a set keeps: all of CamVid at 240 x 180, a fraction of VOC


@dataclass(frozen=True, eq=False)
class MaskSample:
    name: str
    image: Path | bytes
    mask: Path | bytes  # PNG, or SBD's .mat


class MaskData:
    """Images of any size, and a mask for each of them.

    `void` lists the labels of the files that stand for no class; in what is read they are VOID.
    """

    task = "segmentation"

    def __init__(
        self,
        samples: Sequence[MaskSample],
        classes: Sequence[str],
        *,
        void: Sequence[int] = (VOID,),
        mean: Sequence[float] = PHOTO_MEAN,
        std: Sequence[float] = PHOTO_STD,
        name: str = "masks",
        threads: int | None = None,
    ) -> None:
        if not samples:
            raise DataError(f"{name}: no samples given; give at least one image and its mask")
        if not 1 <= len(classes) <= VOID:
            raise DataError(f"{name}: {len(classes)} classes; masks of bytes can have 1..{VOID}")
        self.samples = list(samples)
        self.classes = tuple(classes)
        self.mean = check_channels("mean", mean, 3, name)
        self.std = check_channels("std", std, 3, name)
        self.name = name
        self.void = tuple(void)
        self.threads = threads or min(8, os.cpu_count() or 1)
        known = np.full(256, -1, np.int16)
        known[: len(self.classes)] = np.arange(len(self.classes))
        known[list(self.void)] = VOID
        self._known = known  # label in a file -> class, VOID, or -1: neither
        self._kept: dict[int, tuple[Pixels, Pixels]] = {}
        self._room = ROOM
        self._sizes: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height and width of the first image: those of all where they are alike."""
        height, width = _header(self.samples[0])
        return height, width, 3

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """(N, 2): height and width of every image, from the headers of the files."""
        if self._sizes is None:
            self._sizes = np.array([_header(sample) for sample in self.samples], np.int64)
        return self._sizes

    def pair(self, row: int) -> tuple[Pixels, Pixels]:
        """An image (H, W, 3) and its mask (H, W), classes or VOID; not to be written into."""
        if row in self._kept:
            return self._kept[row]
        sample = self.samples[row]
        found = decode_image(sample), self._classes_of(decode_mask(sample), sample)
        if found[0].shape[:2] != found[1].shape:
            (h, w), (mh, mw) = found[0].shape[:2], found[1].shape
            raise DataError(f"{self.name}: image {sample.name} is {w} x {h}, its mask {mw} x {mh}; they must be alike")
        size = found[0].nbytes + found[1].nbytes
        if size <= self._room:  # threads may overdraw by a sample each
            self._room -= size
            self._kept[row] = found
        return found

    def read(self, indices: npt.ArrayLike) -> tuple[Pixels, Pixels]:
        """(n, H, W, 3) and (n, H, W): images that must be of one size."""
        rows = check_indices(indices, len(self), self.name)
        pairs = self._each(lambda i: self.pair(int(rows[i])), len(rows))
        odd = next((i for i, (image, _) in enumerate(pairs) if image.shape != pairs[0][0].shape), None)
        if odd is not None:
            first, other = (f"{w} x {h}" for h, w, _ in (pairs[0][0].shape, pairs[odd][0].shape))
            raise DataError(
                f"{self.name}: images of {first} and {other} cannot share a batch; for training choose an augmentation "
                "that crops, such as voc or camvid"
            )
        return _stacked(pairs)

    def cut(self, indices: npt.ArrayLike, how: Augment, draws: npt.NDArray[np.float64]) -> tuple[Pixels, Pixels]:
        """(n, *how.cut, 3) and (n, *how.cut): scaled, cropped and mirrored by rows of `draws`."""
        rows = check_indices(indices, len(self), self.name)
        fill = tuple(round(255 * min(max(m, 0.0), 1.0)) for m in self.mean)
        return _stacked(self._each(lambda i: how.cut_pair(*self.pair(int(rows[i])), draws[i], fill), len(rows)))

    def take(self, indices: npt.ArrayLike) -> MaskData:
        rows = check_indices(indices, len(self), self.name)
        return MaskData(
            [self.samples[i] for i in rows], self.classes, void=self.void, mean=self.mean, std=self.std,
            name=self.name, threads=self.threads,
        )  # fmt: skip

    def _each(self, make: Any, count: int) -> list[tuple[Pixels, Pixels]]:
        with ThreadPoolExecutor(max(1, min(self.threads, count))) as pool:  # as FileData.read, for its reasons
            return list(pool.map(make, range(count)))

    def _classes_of(self, mask: npt.NDArray[Any], sample: MaskSample) -> Pixels:
        found = self._known[mask]
        if found.min() < 0:
            odd = int(mask[found < 0][0])
            raise DataError(
                f"{self.name}: the mask of {sample.name} has label {odd}; allowed are 0..{len(self.classes) - 1} and "
                f"{', '.join(map(str, self.void))} for no class"
            )
        made: Pixels = found.astype(np.uint8)
        return made


def decode_image(sample: MaskSample) -> Pixels:
    try:
        with pillow_open()(_source(sample.image)) as image:
            turned = orientation(image)
            pixels = np.asarray(upright(image, 3))
    except MissingExtra:
        raise
    except Exception as error:  # whatever Pillow stumbles over, the user needs the name
        raise undecodable(_title(sample, sample.image), error) from error
    if turned != 1:  # a mask may have been drawn over the picture as stored or as seen: nobody can tell
        raise DataError(
            f"{_title(sample, sample.image)} is stored turned (EXIF orientation {turned}), and its mask does not say "
            "which way it lies; store both upright, without EXIF"
        )
    return pixels


def decode_mask(sample: MaskSample) -> Pixels:
    """(H, W) uint8, the labels as they are in the file: indices of a palette, or gray levels."""
    if isinstance(sample.mask, Path) and sample.mask.suffix == ".mat":
        return sbd_mask(sample.mask)
    title = _title(sample, sample.mask)
    try:
        with pillow_open()(_source(sample.mask)) as image:
            image.load()
            labels = np.asarray(image)
            mode = image.mode
    except MissingExtra:
        raise
    except Exception as error:
        raise undecodable(title, error) from error
    if mode not in ("P", "L") or labels.dtype != np.uint8 or labels.ndim != 2:
        raise DataError(
            f"{title} is a picture of mode {mode}, not a mask; expected a palette or gray image of class numbers"
        )
    return labels


def sbd_mask(path: Path) -> Pixels:
    """The class of every pixel in a file of SBD's `cls` folder: GTcls.Segmentation."""
    try:
        import scipy.io
    except ImportError as error:
        raise MissingExtra(
            "reading SBD's .mat files needs scipy, which is not installed; run: pip install scipy"
        ) from error
    try:
        labels = scipy.io.loadmat(path, variable_names=["GTcls"])["GTcls"]["Segmentation"][0, 0]
    except Exception as error:  # scipy raises whatever its parser stumbled over
        raise DataError(f"{path} has no readable GTcls.Segmentation ({error}); get it again") from error
    if not isinstance(labels, np.ndarray) or labels.ndim != 2 or labels.dtype != np.uint8:
        raise DataError(f"{path}: GTcls.Segmentation is no (H, W) array of bytes; get it again")
    return np.ascontiguousarray(labels)


def _stacked(pairs: Sequence[tuple[Pixels, Pixels]]) -> tuple[Pixels, Pixels]:
    return np.stack([image for image, _ in pairs]), np.stack([mask for _, mask in pairs])


def _header(sample: MaskSample) -> tuple[int, int]:
    try:
        with pillow_open()(_source(sample.image)) as image:
            width, height = upright_size(image)
            return height, width
    except AnyprecError:
        raise
    except Exception as error:
        raise undecodable(_title(sample, sample.image), error) from error


def _source(item: Path | bytes) -> Any:
    return io.BytesIO(item) if isinstance(item, bytes) else item


def _title(sample: MaskSample, item: Path | bytes) -> str:
    return sample.name if isinstance(item, bytes) else str(item)
