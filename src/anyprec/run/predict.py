"""`PackedModel.predict`: pictures as a Python user has them in; labels with probabilities, or a label map, out.

A path, a Pillow image, an array or a list of those is prepared as in training, by what the file says of it (images.py,
preprocessing.py), run in batches, and answered by labels.py. Called by model.py.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.choices import LAYOUTS
from anyprec.errors import InputError
from anyprec.preprocessing import CHANNELS, Preprocessing
from anyprec.run.image_limits import check_open
from anyprec.run.images import (
    BATCH,
    image_file,
    is_array,
    missing_preprocessing,
    open_array,
    preprocessing_for,
    unknown_size,
)
from anyprec.run.labels import LabelMap, Prediction, label_map, predictions
from anyprec.run.model import Bits, PackedModel, is_random

Array = npt.NDArray[Any]
Answer = list[Prediction] | LabelMap

PICTURE_CHANNELS = (1, 3, 4)  # gray, RGB, RGB with transparency
WANTED = "give a path, a Pillow image, an array, or a list of those"


def predict(
    model: PackedModel, x: Any, bits: Bits | None, top: int, layout: str | None, threads: int | None
) -> Answer | list[Answer]:
    check_top(top)
    if layout is not None and layout not in LAYOUTS:
        raise InputError(f"layout={layout!r} is not known; choose 'NCHW' or 'NHWC'")
    if not takes_arrays_only(model) and (warning := missing_preprocessing(model, None)):
        warnings.warn(warning, stacklevel=3)
    if is_path(x) and is_array(Path(os.fsdecode(x))):
        x = open_array(Path(os.fsdecode(x)))
    if isinstance(x, (list, tuple)):
        return list(answers(model, x, bits, top, layout, threads))
    if not is_path(x) and not is_picture(x):
        x = as_array(x)
        if x.ndim == (2 if takes_vectors(model) else 4):
            return list(answers(model, x, bits, top, layout, threads))
    return next(answers(model, [x], bits, top, layout, threads))


def check_top(top: object) -> None:
    if isinstance(top, bool) or not isinstance(top, (int, np.integer)) or top < 1:
        raise InputError(f"top={top!r} is not a number of classes; give 1 or more")


def answers(
    model: PackedModel, items: Sequence[Any] | Array, bits: Bits | None, top: int, layout: str | None,
    threads: int | None,
) -> Iterator[Answer]:  # fmt: skip
    """One for each item, in order. Images of one size run together; each draws its own width where bits is random."""
    step = 1 if is_random(model.bits if bits is None else bits) else BATCH
    for first in range(0, len(items), step):
        images = [pixels(model, item, layout) for item in items[first : first + step]]
        yield from answers_of_pixels(model, images, bits, top, threads)


def answers_of_pixels(
    model: PackedModel, images: Sequence[Array], bits: Bits | None, top: int, threads: int | None = None
) -> Iterator[Answer]:
    """Of images (H, W, C) that `pixels` has made, in order; neighbors of one size run together."""
    for _, group in groupby(images, key=lambda image: (image.shape, image.dtype)):
        y = model(np.stack(list(group)), bits, layout="NHWC", threads=threads)
        for scores in y[0] if isinstance(y, tuple) else y:
            yield answer(model, scores, top)


def answer(model: PackedModel, y: Array, top: int) -> Answer:
    if y.ndim == 1 and not takes_arrays_only(model) and preprocessing_for(model, None).size is None:
        raise unknown_size(model)
    classes, labels = y.shape[-1], model.labels
    if classes < 2 or (labels and len(labels) != classes):
        given = f"{classes} number{'s' * (classes > 1)} {'an image' if y.ndim == 1 else 'a pixel'}"
        wants = f"its file has {len(labels)} labels" if labels else "no scores of classes"
        raise InputError(f"{model.name} gives {given}, {wants}; predict is for classes: call the model itself, m(x)")
    return predictions(y, labels, int(top)) if y.ndim == 1 else label_map(y, labels)


# --- One image, as (H, W, C) ---


def pixels(model: PackedModel, item: Any, layout: str | None) -> Array:
    """uint8 that is prepared as in training; where the file does not say how, the array a call of the model takes."""
    if is_path(item):
        path = Path(os.fsdecode(item))
        if is_array(path):
            return pixels(model, open_array(path), layout)
        if not path.is_file():
            raise InputError(f"{path} is {'a folder' if path.is_dir() else 'no file'}; {WANTED}")
        made: Array = image_file(path, model, None)[0]
        return made
    if is_picture(item):
        return picture_pixels(preprocessing_for(model, None), item)
    array = as_array(item)
    if takes_arrays_only(model):
        return network_input(model, array, layout)
    how = preprocessing_for(model, None)
    if array.dtype != np.uint8:
        raise InputError(
            f"predict takes pixels, 0 to 255 as uint8, and prepares them as in training; this array is {array.dtype}. "
            "An input that is prepared already goes to the model itself: m(x)"
        )
    if how.channels == 1 and layout is None and array.ndim == 3 and len(array) == 3 and array.shape[2] not in CHANNELS:
        raise InputError(
            f"an array of shape {array.shape} is one color picture or three gray ones; give several as a list or as "
            "(N, H, W, 1), or layout='NCHW' for one"
        )
    return array_pixels(how, picture_array(array, layout))


def picture_pixels(how: Preprocessing, picture: Any) -> Array:
    """Of an open Pillow image."""
    check_open(picture)
    try:
        return how.pixels(picture)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise whatever they meet in broken data
        raise InputError(f"the picture cannot be decoded: {error or type(error).__name__}") from error


def array_pixels(how: Preprocessing, array: Array) -> Array:
    """Of the pixels (H, W, C) of a picture: what its file would give. Pillow is needed where they have to change."""
    fits = how.size is None or how.size == how.to == array.shape[:2]
    if fits and array.shape[2] == how.channels:
        return array
    from PIL import Image

    return picture_pixels(how, Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array))


def picture_array(array: Array, layout: str | None) -> Array:
    """(H, W), (H, W, C) or (C, H, W) -> (H, W, C). Without a layout the axis that can be channels is; HWC if both."""
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim == 3 and (
        layout == "NCHW" or (layout is None and array.shape[2] not in PICTURE_CHANNELS and array.shape[0] in CHANNELS)
    ):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in PICTURE_CHANNELS or 0 in array.shape:
        raise InputError(
            f"an array of shape {array.shape} is no picture; give (H, W), (H, W, 3) or (3, H, W), several as a list or "
            "as (N, H, W, C)"
        )
    return np.ascontiguousarray(array)


def network_input(model: PackedModel, array: Array, layout: str | None) -> Array:
    """One image (or vector) as a call of the model takes it -> (H, W, C). The call says what does not fit."""
    vectors = takes_vectors(model)
    if array.ndim != (1 if vectors else 3):
        takes = "(F,), or vectors (N, F)" if vectors else "three axes, or several (N, ...)"
        raise InputError(f"an array of shape {array.shape} is no input of {model.name}; give one of {takes}")
    if vectors:
        return array.reshape(1, 1, -1)
    return array.transpose(1, 2, 0) if (model.layout if layout is None else layout) == "NCHW" else array


def takes_arrays_only(model: PackedModel) -> bool:
    """No pictures: its file does not say how pixels become its input, or pictures have no such channels."""
    return not model.takes_uint8 or takes_vectors(model) or model.input_shape[2] not in CHANNELS


def takes_vectors(model: PackedModel) -> bool:
    return model.input_shape[:2] == (1, 1)


# --- What was given ---


def is_path(x: Any) -> bool:
    return isinstance(x, (str, os.PathLike))


def is_picture(x: Any) -> bool:
    """Of Pillow, which is not imported for this: where nobody has, there is no such image."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(x, module.Image)


def as_array(x: Any) -> Array:
    try:
        array = np.asarray(x)
    except Exception as error:  # a tensor on another device, say
        raise InputError(f"{type(x).__name__} cannot be read as an array ({error}); {WANTED}") from error
    if array.dtype.kind not in "buif" or array.ndim == 0:
        raise InputError(f"{type(x).__name__} is no picture; {WANTED}")
    return array
