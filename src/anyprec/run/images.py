"""Images as a user names them, arrays (.npy), image files and folders, in; batches a packed model takes, out.

`find_files` expands folders, `read_batches` reads one file. Pillow, for image files, is an extra. Called by cli/run.py,
predict.py and accuracy.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.data import FileData
from anyprec.data.folder import SUFFIXES
from anyprec.errors import InputError
from anyprec.preprocessing import CHANNELS, MAX_PIXELS, Preprocessing
from anyprec.run.image_limits import check_file
from anyprec.run.model import PackedModel

BATCH = 8  # images of an array that run together; results do not depend on it


@dataclass(frozen=True)
class ImageBatch:
    names: tuple[str, ...]  # "cat.jpg", or "x.npy[3]" for an image of an array
    images: npt.NDArray[Any]  # NCHW or NHWC, or (N, F)
    layout: str
    any_size: bool = False  # a picture that kept its size since nothing else was said


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files named, and those of the folders named, sorted; folders inside folders are not looked at."""
    files: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
            if not inside:
                raise InputError(f"{path} has no images in it ({' '.join(SUFFIXES)}); give another folder")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"there is no file or folder {path}; give .npy arrays, image files or folders of them")
    return files


def is_array(path: Path) -> bool:
    return path.suffix.lower() == ".npy"


def count_images(path: Path) -> int:
    if not is_array(path):
        return 1
    array = open_array(path)
    return 1 if array.ndim == 3 else len(array)


def read_batches(path: Path, model: PackedModel, layout: str | None, size: int | None) -> Iterator[ImageBatch]:
    """`layout` is that of arrays (None: seen from the channels), `size` what image files are brought to."""
    if is_array(path):
        yield from array_batches(path, model, layout)
    else:
        any_size = model.preprocessing is None and preprocessing_for(model, size).size is None
        yield ImageBatch((path.name,), image_file(path, model, size), "NHWC", any_size)


# --- Arrays ---


def array_batches(path: Path, model: PackedModel, layout: str | None) -> Iterator[ImageBatch]:
    array = open_array(path)
    if array.ndim == 3:
        array = array[None]
    if layout is None:
        layout = guess_layout(array.shape, model.input_shape[2])
    if 0 in array.shape:
        raise InputError(f"{path} has shape {array.shape}, no image at all; give at least one")
    for first in range(0, len(array), BATCH):
        part = array[first : first + BATCH]
        names = (f"{path.name}[{first + i}]" for i in range(len(part)))
        yield ImageBatch(tuple(names) if len(array) > 1 else (path.name,), part, layout)


def open_array(path: Path) -> npt.NDArray[Any]:
    """Mapped, not read: of a large file only the batch in hand is in memory."""
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read as an array ({error}); save it with numpy.save") from error
    if array.ndim not in (2, 3, 4):
        raise InputError(
            f"{path} has shape {array.shape}; give images (N, C, H, W) or (N, H, W, C), one image, or vectors (N, F)"
        )
    return array


def guess_layout(shape: tuple[int, ...], channels: int) -> str:
    """The layout whose channel axis has the model's number of channels; NCHW where both have."""
    return "NHWC" if len(shape) == 4 and shape[1] != channels and shape[3] == channels else "NCHW"


# --- Image files ---


def image_file(path: Path, model: PackedModel, size: int | None) -> npt.NDArray[np.uint8]:
    how = preprocessing_for(model, size)
    check_file(path)
    # FileData names the file in whatever goes wrong.
    return FileData(path.parent, [path.name], [0], ("image",)).read([0], lambda image, _: how.pixels(image))


def preprocessing_for(model: PackedModel, size: int | None) -> Preprocessing:
    """What is done to pictures: what the training did. A file that does not say gets pictures that cover its size.

    `size` (--size) is a side in pixels where the network leaves it free.
    """
    channels = model.input_shape[2]
    if not model.takes_uint8:
        raise InputError(
            f"{model.name} does not say how pixels become its input, so image files cannot be used; give float32 "
            "arrays (.npy), or pack it with a data set's statistics (--dataset, or image= in Python)"
        )
    if channels not in CHANNELS:
        raise InputError(f"{model.name} takes images of {channels} channels, image files have 1 or 3; give .npy arrays")
    how = model.preprocessing or Preprocessing((0.0,) * channels, (1.0,) * channels, model.image_size)
    return how if size is None else how.at(check_side(model, size))


def check_side(model: PackedModel, size: int) -> tuple[int, int]:
    if not 1 <= size * size <= MAX_PIXELS or size < 1:
        raise InputError(
            f"--size {size} is not a side in pixels; give 1 to {math.isqrt(MAX_PIXELS):,}, such as 224: images have at "
            f"most {MAX_PIXELS:,} pixels"
        )
    height, width, _ = model.input_shape
    if {height, width} - {None, size}:
        takes = f"{height or 'any'} x {width or 'any'}"
        raise InputError(f"--size {size} does not fit {model.name}, which takes images of {takes}; leave it out")
    return size, size


def unknown_size(model: PackedModel) -> InputError:
    """Why a classifier that takes any size, and does not say which it was trained at, gives no answer to a picture."""
    return InputError(
        f"{model.name} does not say at which size it was trained, so its answer to a picture of any size is worth "
        "nothing; give the size (run --size), or pack it again from its checkpoint"
    )


def missing_preprocessing(model: PackedModel, size: int | None) -> str | None:
    """One line of warning where a file does not say how its training prepared pictures."""
    if model.preprocessing is not None:
        return None
    how = preprocessing_for(model, size)
    taken = "at the size they have" if how.size is None else f"resized to cover {how.size[0]} x {how.size[1]}"
    return (
        f"{model.name} does not say how its training prepared pictures; they are taken {taken}, which may be wrong: "
        "pack it again from its checkpoint, or with image=anyprec.Preprocessing(...)"
    )
