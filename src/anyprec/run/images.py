"""Images as a user names them, arrays (.npy), image files and folders, in; batches a packed model takes, out.

`find_files` expands folders, `read_batches` reads one file. Pillow, for image files, is an extra. Called by cli_run.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.data import FileData
from anyprec.data.folder import SUFFIXES
from anyprec.errors import InputError
from anyprec.run.model import PackedModel

BATCH = 8  # images of an array that run together; results do not depend on it


@dataclass(frozen=True)
class Batch:
    names: tuple[str, ...]  # "cat.jpg", or "x.npy[3]" for an image of an array
    images: npt.NDArray[Any]  # NCHW or NHWC, or (N, F)
    layout: str


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


def count(path: Path) -> int:
    if path.suffix.lower() != ".npy":
        return 1
    array = open_array(path)
    return 1 if array.ndim == 3 else len(array)


def read_batches(path: Path, model: PackedModel, layout: str | None, size: int | None) -> Iterator[Batch]:
    """`layout` is that of arrays (None: seen from the channels), `size` what image files are brought to."""
    if path.suffix.lower() == ".npy":
        yield from array_batches(path, model, layout)
    else:
        yield Batch((path.name,), image_file(path, model, size), "NHWC")


# --- Arrays ---


def array_batches(path: Path, model: PackedModel, layout: str | None) -> Iterator[Batch]:
    array = open_array(path)
    if array.ndim == 3:
        array = array[None]
    if layout is None:
        layout = seen_layout(array.shape, model.input_shape[2])
    if 0 in array.shape:
        raise InputError(f"{path} has shape {array.shape}, no image at all; give at least one")
    for first in range(0, len(array), BATCH):
        part = array[first : first + BATCH]
        names = (f"{path.name}[{first + i}]" for i in range(len(part)))
        yield Batch(tuple(names) if len(array) > 1 else (path.name,), part, layout)


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


def seen_layout(shape: tuple[int, ...], channels: int) -> str:
    """The layout whose channel axis has the model's number of channels; NCHW where both have."""
    return "NHWC" if len(shape) == 4 and shape[1] != channels and shape[3] == channels else "NCHW"


# --- Image files ---


def image_file(path: Path, model: PackedModel, size: int | None) -> npt.NDArray[np.uint8]:
    height, width, channels = target(model, size)
    if model.image_size is not None:
        height, width = height or model.image_size[0], width or model.image_size[1]
    if not model.takes_uint8:
        raise InputError(
            f"{model.name} does not say how pixels become its input, so image files cannot be used; give float32 "
            "arrays (.npy), or pack it with a data set's statistics (--dataset, or image= in Python)"
        )
    if channels not in (1, 3):
        raise InputError(f"{model.name} takes images of {channels} channels, image files have 1 or 3; give .npy arrays")

    def view(image: Any, _: object) -> npt.NDArray[np.uint8]:
        pixels = np.asarray(fit(image.convert("L") if channels == 1 else image, height, width))
        return pixels[:, :, None] if channels == 1 else pixels  # (H, W, C) uint8

    return FileData(path.parent, [path.name], [0], ("image",)).read([0], view)  # (1, H, W, C) uint8


def target(model: PackedModel, size: int | None) -> tuple[int | None, int | None, int]:
    """H, W, C images are brought to: the model's own, or `size` where the model leaves them free."""
    height, width, channels = model.input_shape
    if size is None:
        return height, width, channels
    if size < 1:
        raise InputError(f"--size {size} is not a number of pixels; give 1 or more, such as 224")
    if {height, width} - {None, size}:
        takes = f"{height or 'any'} x {width or 'any'}"
        raise InputError(f"--size {size} does not fit {model.name}, which takes images of {takes}; leave it out")
    return size, size, channels


def fit(image: Any, height: int | None, width: int | None) -> Any:
    """Resized, in proportion, until it just covers height x width, then the middle of it.

    500 x 375 to 224 x 224: resized to 299 x 224, and 37 columns cut off on the left, 38 on the right.
    """
    height, width = height or image.height, width or image.width
    if (image.width, image.height) == (width, height):
        return image
    from PIL import Image

    scale = max(width / image.width, height / image.height)
    covering = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    if covering != image.size:
        image = image.resize(covering, Image.Resampling.BILINEAR)
    left, top = (covering[0] - width) // 2, (covering[1] - height) // 2
    return image.crop((left, top, left + width, top + height))
