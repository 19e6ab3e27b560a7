"""Accuracy, latency and bytes of a packed model at each of its profiles: a test set in, a row per profile out.

No torch: the engine runs the images, `data` reads them. Called by cli/run.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anyprec.data import DATASETS, ArrayData, FileData, MaskData, preprocessing_of
from anyprec.data.confusion import class_iou, mean_iou, pixel_accuracy
from anyprec.data.loader import testing_pixels, testing_reader
from anyprec.errors import InputError
from anyprec.preprocessing import Preprocessing
from anyprec.progress import Progress
from anyprec.run.images import check_side
from anyprec.run.model import PackedModel
from anyprec.run.segmentation import measure_masks

# Images that are read together. All profiles run through them in turn, so that what slows the machine down for a while
# slows them alike; each in one go, so that its weights stay in the cache.
CHUNK = 64


@dataclass(frozen=True)
class AccuracyRow:
    profile: str  # "4", "32", or the name of a mixed one
    accuracy: float  # percent
    latency_ms: float  # median over the calls, divided by the batch
    bytes: int  # of the file, from its start
    miou: float | None = None  # percent, of masks; accuracy is then that of pixels
    ious: tuple[float, ...] = ()  # percent, a class each; NaN where a class does not occur


def measure(
    model: PackedModel,
    data: ArrayData | FileData | MaskData,
    profiles: Sequence[str],
    *,
    batch: int = 1,
    size: int | None = None,
    progress: bool = False,
) -> list[AccuracyRow]:
    """Every image at every profile, `batch` a call, brought to `size` where the model leaves it free."""
    if isinstance(data, MaskData):
        return segmentation_rows(model, data, profiles, batch, size, progress)
    pixels = reader(model, data, size)
    check_classes(model, data, pixels(np.arange(1)), profiles[0])
    right = dict.fromkeys(profiles, 0)
    times: dict[str, list[float]] = {profile: [] for profile in profiles}
    chunk = max(CHUNK // batch, 1) * batch  # whole batches: another batch size is another plan, prepared anew
    total = len(data) * len(profiles)
    with Progress("run", total=total, unit="img") if progress else contextlib.nullcontext() as bar:
        for first in range(0, len(data), chunk):
            rows = np.arange(first, min(first + chunk, len(data)))
            images, labels = pixels(rows), data.labels[rows]
            for profile in profiles:
                model(images[:batch], profile, layout="NHWC")  # prepares the weights, warms the cache; not timed
                for at in range(0, len(rows), batch):
                    x = images[at : at + batch]
                    start = time.perf_counter()
                    y = model(x, profile, layout="NHWC")
                    seconds = time.perf_counter() - start
                    if len(x) == batch or not times[profile]:
                        times[profile].append(seconds / len(x))
                    right[profile] += int((np.argmax(y, axis=1) == labels[at : at + batch]).sum())
                if bar:
                    bar.update(len(rows))
    return [
        AccuracyRow(p, 100 * right[p] / len(data), 1e3 * float(np.median(times[p])), model.bytes_needed(p))
        for p in profiles
    ]


def segmentation_rows(
    model: PackedModel, data: MaskData, profiles: Sequence[str], batch: int, size: int | None, progress: bool
) -> list[AccuracyRow]:
    if size is not None:
        raise InputError(f"--size {size} does not go with {data.name}: masks are measured at the size they have")
    fixed = {n for n in zip(model.input_shape[:2], data.shape[:2], strict=True) if n[0] is not None and n[0] != n[1]}
    if fixed or model.input_shape[2] != 3:
        height, width, channels = ("any" if n is None else n for n in model.input_shape)
        raise InputError(
            f"{data.name} has color images of {data.shape[0]} x {data.shape[1]}, {model.name} takes {height} x "
            f"{width} of {channels} channels; name the data set it was trained on"
        )
    counts, times = measure_masks(model, data, profiles, batch=batch, progress=progress)
    return [
        AccuracyRow(
            p, pixel_accuracy(counts[p]), 1e3 * float(np.median(times[p])), model.bytes_needed(p), mean_iou(counts[p]),
            tuple(class_iou(counts[p]).tolist()),
        )
        for p in profiles
    ]  # fmt: skip


def reader(
    model: PackedModel, data: ArrayData | FileData, size: int | None
) -> Callable[[npt.NDArray[np.int64]], npt.NDArray[np.uint8] | npt.NDArray[np.float32]]:
    """A function from rows of the data set to images (n, H, W, C): uint8 where the file says what these become."""
    how = test_preprocessing(model, data, size)
    height, width, channels = model.input_shape
    if how.channels != channels or how.size is None:
        raise InputError(f"{data.name} has images of {how.channels} channels, {model.name} takes {channels}")
    if (height or how.size[0], width or how.size[1]) != how.size:
        raise InputError(
            f"{data.name} gives images of {how.size[0]} x {how.size[1]}, {model.name} takes {height} x {width}; "
            "name the data set it was trained on"
        )
    return testing_pixels(data, how) if model.takes_uint8 else testing_reader(data, how)


def test_preprocessing(model: PackedModel, data: ArrayData | FileData, size: int | None) -> Preprocessing:
    """What the training did, from the file; of a file that does not say, what the data set is usually tested with.

    Then a square that the network takes and no other is its size, and a folder of photographs settles nothing.
    """
    side = None if size is None else check_side(model, size)
    how = model.preprocessing
    if how is None or how.size is None:
        height, width, _ = model.input_shape
        fixed = (height, width) if height is not None and height == width else None
        spec = DATASETS.get(data.name)
        if isinstance(data, FileData) and data.name == "folder" and not (fixed or side):
            raise InputError(
                f"{model.name} does not say at which size it was trained, and a folder has images of any size; give "
                "--size, or pack it again from its checkpoint"
            )
        how = preprocessing_of(data, spec.augment if spec else "none")
        side = side or fixed
    return how if side is None else how.at(side)


def check_classes(
    model: PackedModel, data: ArrayData | FileData, images: npt.NDArray[np.generic], profile: str
) -> None:
    y = model(images, profile, layout="NHWC")
    if isinstance(y, tuple) or y.ndim != 2:
        raise InputError(f"{model.name} does not give one score a class, so it has no accuracy; give it images instead")
    if y.shape[1] != data.num_classes:
        raise InputError(
            f"{model.name} gives {y.shape[1]} scores, {data.name} has {data.num_classes} classes; name the data set it "
            "was trained on"
        )
