"""The data sets of classification: `ArrayData` (pixels in memory) and `FileData` (image files on disk).

Both have len(), labels, classes, mean, std, name, num_classes, shape, `read(indices)` -> (n, H, W, C) uint8
and `take(indices)` -> a smaller set. Made by the readers, or by a user who has arrays of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from anyprec.errors import DataError, InputError, MissingExtra
from anyprec.preprocessing import Preprocessing, orientation, upright

# Channel statistics of x/255 over ImageNet's training images; the customary ones for photographs.
PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# (open image, the image's random numbers or None) -> (side, side, 3) uint8
View = Callable[[Any, "npt.NDArray[np.float64] | None"], "npt.NDArray[np.uint8]"]


@dataclass(frozen=True, eq=False)
class ArrayData:
    """Images in memory, their labels, names of the classes, mean and deviation of x/255 per channel."""

    task: ClassVar[str] = "classification"

    images: npt.NDArray[np.uint8]  # (N, H, W, C) uint8
    labels: npt.NDArray[np.int64]  # (N,) int64
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # (C,)
    std: tuple[float, ...]  # (C,)
    name: str = "data"

    def __post_init__(self) -> None:
        images = np.asarray(self.images)
        if images.dtype != np.uint8:
            broken = images.dtype.kind == "f" and not np.isfinite(images).all()
            what = f"{images.dtype} with NaN or infinity in it" if broken else str(images.dtype)
            raise DataError(f"{self.name}: images are {what}, must be uint8 0..255; repair and convert them first")
        if images.ndim != 4 or 0 in images.shape:
            raise DataError(
                f"{self.name}: images have shape {images.shape}, must be (N, H, W, C), none of them 0; "
                "gray images need a last axis of 1"
            )
        object.__setattr__(self, "images", np.ascontiguousarray(images))
        object.__setattr__(self, "classes", tuple(self.classes))
        object.__setattr__(self, "labels", _check_labels(self.labels, len(images), self.classes, self.name))
        for field in ("mean", "std"):
            object.__setattr__(self, field, check_channels(field, getattr(self, field), images.shape[3], self.name))

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        return self.images.take(check_indices(indices, len(self), self.name), axis=0)  # (n, H, W, C) uint8

    def take(self, indices: npt.ArrayLike) -> ArrayData:
        rows = check_indices(indices, len(self), self.name)
        return replace(self, images=self.images.take(rows, axis=0), labels=self.labels[rows])


class FileData:
    """Image files on disk, decoded when read. Images of any size come out RGB, `size` x `size`."""

    task = "classification"

    def __init__(
        self,
        root: str | Path,
        paths: Sequence[str],
        labels: npt.ArrayLike,
        classes: Sequence[str],
        *,
        size: int = 224,
        mean: Sequence[float] = PHOTO_MEAN,
        std: Sequence[float] = PHOTO_STD,
        name: str = "folder",
        threads: int | None = None,
    ) -> None:
        if not paths:
            raise DataError(f"{name}: no image files given; give at least one path below {root}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise DataError(f"{name}: size={size!r} is not a number of pixels; give 1 or more, such as 224")
        self.root = Path(root)
        self.paths = list(paths)  # relative to root: a million short strings, not a million Path objects
        self.classes = tuple(classes)
        self.labels = _check_labels(np.asarray(labels), len(self.paths), self.classes, name)
        self.size = size
        self.mean = check_channels("mean", mean, 3, name)
        self.std = check_channels("std", std, 3, name)
        self.name = name
        self.threads = threads or min(8, os.cpu_count() or 1)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.size, self.size, 3

    def read(
        self, indices: npt.ArrayLike, view: View | None = None, draws: npt.NDArray[np.float64] | None = None
    ) -> npt.NDArray[np.uint8]:
        """Decode: resized to cover `size` x `size`, the middle of it; or what `view` cuts out, with rows of `draws`."""
        open_image = pillow_open()
        rows = check_indices(indices, len(self), self.name)
        usual = Preprocessing(self.mean, self.std, (self.size, self.size))

        def decode(i: int) -> npt.NDArray[np.uint8]:
            path = self.root / self.paths[rows[i]]
            # Pillow's decoders raise a dozen kinds of exception on broken files (OSError, SyntaxError,
            # struct.error, DecompressionBombError ...): whatever it is, the user needs the name of the file.
            try:
                with open_image(path) as image:
                    rgb = upright(image, 3)
            except Exception as error:
                raise undecodable(path, error) from error
            try:
                return usual.pixels(rgb) if view is None else view(rgb, None if draws is None else draws[i])
            except InputError as error:
                raise DataError(f"{path}: {error}") from error

        if len(rows) == 0:
            return np.empty((0, self.size, self.size, 3), np.uint8)
        # A pool per call: starting threads takes 0.1 ms, decoding a batch 100 ms or more, and nothing
        # outlives the call (so a fork or an abandoned iterator finds no pool to trip over). Pillow decodes
        # and resizes without the GIL.
        with ThreadPoolExecutor(min(self.threads, len(rows))) as pool:
            return np.stack(list(pool.map(decode, range(len(rows)))))  # (n, size, size, 3) uint8

    def take(self, indices: npt.ArrayLike) -> FileData:
        rows = check_indices(indices, len(self), self.name)
        return FileData(
            self.root,
            [self.paths[i] for i in rows],
            self.labels[rows],
            self.classes,
            size=self.size,
            mean=self.mean,
            std=self.std,
            name=self.name,
            threads=self.threads,
        )


def image_size(path: Path) -> tuple[int, int]:
    """(width, height) of an image file as it is seen upright, from its header."""
    try:
        with pillow_open()(path) as image:
            return upright_size(image)
    except MissingExtra:
        raise
    except Exception as error:
        raise undecodable(path, error) from error


def upright_size(image: Any) -> tuple[int, int]:
    """(width, height); a camera held sideways stores them the other way round."""
    width, height = image.size
    return (height, width) if orientation(image) >= 5 else (width, height)


def undecodable(path: Path | str, error: Exception) -> DataError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataError(f"{path} is no image that can be decoded ({reason}); replace or delete the file")


def pillow_open() -> Callable[[Path], Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra(
            "reading image files needs Pillow, which is not installed; run: pip install pillow"
        ) from error
    return Image.open


def _check_labels(labels: npt.NDArray[Any], count: int, classes: tuple[str, ...], name: str) -> npt.NDArray[np.int64]:
    labels = np.asarray(labels)
    if labels.shape != (count,):
        raise DataError(f"{name}: labels have shape {labels.shape}, must be ({count},), one for each image")
    if labels.dtype.kind not in "iu":
        raise DataError(f"{name}: labels are {labels.dtype}, must be integers 0..{len(classes) - 1}")
    if labels.min() < 0 or labels.max() >= len(classes):
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(f"{name}: label {worst} is out of range; the {len(classes)} classes are 0..{len(classes) - 1}")
    return np.ascontiguousarray(labels, dtype=np.int64)


def check_channels(field: str, values: Sequence[float], channels: int, name: str) -> tuple[float, ...]:
    values = tuple(float(v) for v in values)
    if len(values) != channels:
        raise DataError(f"{name}: {field} has {len(values)} values for {channels} channels; give one per channel")
    # Outside of these (x/255 - mean) / std could overflow float32, and 0 * infinity is NaN.
    low, high = (1e-6, 1e6) if field == "std" else (-1e6, 1e6)
    if not all(low <= value <= high for value in values):  # false for NaN
        raise DataError(
            f"{name}: {field}={values} is not within {low:g}..{high:g}; compute it from x/255 of the images"
        )
    return values


def check_indices(indices: npt.ArrayLike, count: int, name: str) -> npt.NDArray[np.int64]:
    rows = np.asarray(indices)
    if rows.size == 0:
        return np.empty(0, np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= count:
        what = f"{rows.min()}..{rows.max()}" if rows.dtype.kind in "iu" else str(rows.dtype)
        raise DataError(f"{name}: indices are {what} of shape {rows.shape}, must be a list of numbers 0..{count - 1}")
    return rows.astype(np.int64, copy=False)
