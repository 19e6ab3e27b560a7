"""Segmentation with a packed model: mean IoU over a test set, and masks of images as pictures. No torch.

`measure_masks` is what `measure` of accuracy.py does for data with masks; `save_masks` writes, for one image and
profile, the mask (a palette PNG whose pixels are class numbers) and the image under the mask's colors. Called by
accuracy.py and cli/run.py; colors are for docs and pictures too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from anyprec.data import MaskData
from anyprec.data.annotated import CAMVID_CLASSES
from anyprec.data.confusion import Counts, confusion
from anyprec.data.loader import normalizer
from anyprec.errors import InputError
from anyprec.files import make_folder, written_whole
from anyprec.progress import Progress
from anyprec.run.model import PackedModel

Pixels = npt.NDArray[np.uint8]

# The customary colors of CamVid's classes, in their order.
CAMVID_COLORS = (
    (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0), (192, 128, 128),
    (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192),
)  # fmt: skip


def measure_masks(
    model: PackedModel, data: MaskData, profiles: Sequence[str], *, batch: int = 1, progress: bool = False
) -> tuple[dict[str, Counts], dict[str, list[float]]]:
    """profile -> confusion matrix, and seconds an image of each call. Images stay the size they are; those of one size
    share a call, `batch` of them.
    """
    counts = {profile: np.zeros((data.num_classes,) * 2, np.int64) for profile in profiles}
    times: dict[str, list[float]] = {profile: [] for profile in profiles}
    sizes = data.sizes
    order = np.lexsort((sizes[:, 1], sizes[:, 0]))  # a size is prepared once, not again and again
    groups = np.split(order, np.flatnonzero((np.diff(sizes[order], axis=0) != 0).any(axis=1)) + 1)
    total = len(data) * len(profiles)
    with Progress("run", total=total, unit="img") if progress else contextlib.nullcontext() as bar:
        for group in groups:
            seen: set[tuple[str, int]] = set()  # what was prepared and warmed for this size
            for first in range(0, len(group), batch):
                rows = group[first : first + batch]
                images, masks = data.read(rows)
                x = images if model.takes_uint8 else _normalized(data, images)
                for profile in profiles:
                    if (profile, len(rows)) not in seen:
                        check_map(model, model(x, profile, layout="NHWC"), data)
                        seen.add((profile, len(rows)))
                    start = time.perf_counter()
                    y = model(x, profile, layout="NHWC")
                    times[profile].append((time.perf_counter() - start) / len(rows))
                    counts[profile] += confusion(masks, np.argmax(y, axis=3), data.num_classes)
                if bar:
                    bar.update(len(rows) * len(profiles))
    return counts, times


def _normalized(data: MaskData, images: Pixels) -> npt.NDArray[np.float32]:
    return normalizer(data.mean, data.std, (images.shape[1], images.shape[2], 3))(images)


def check_map(model: PackedModel, y: object, data: MaskData) -> None:
    if not isinstance(y, np.ndarray) or y.ndim != 4:
        raise InputError(f"{model.name} gives no map of classes, which {data.name} needs; name another data set")
    if y.shape[3] != data.num_classes:
        raise InputError(
            f"{model.name} gives {y.shape[3]} scores a pixel, {data.name} has {data.num_classes} classes; name the "
            "data set it was trained on"
        )


# --- Pictures ---


def colors(labels: Sequence[str], classes: int) -> Pixels:
    """(classes, 3): CamVid's own for its classes, else those of VOC."""
    if tuple(labels) == CAMVID_CLASSES:
        return np.array(CAMVID_COLORS, np.uint8)
    return voc_colors(classes)


def voc_colors(classes: int) -> Pixels:
    """VOC's palette: bits 0, 3, 6 of a class are the highest bits of red, 1, 4, 7 of green, 2, 5, 8 of blue.

    Class 15 (person), 001 111 in groups of three: red 11 -> 192, green 1 -> 128, blue 1 -> 128.
    """
    number = np.arange(classes)
    table = np.zeros((classes, 3), np.int64)
    for place in range(8):
        for channel in range(3):
            table[:, channel] |= (number >> (3 * place + channel) & 1) << (7 - place)
    return table.astype(np.uint8)


def painted(mask: npt.NDArray[np.integer], palette: Pixels, void: int | None = None) -> Pixels:
    """(H, W, 3): the colors of a mask, a network's or the truth; pixels of label `void` are black."""
    empty = np.zeros(mask.shape, bool) if void is None else mask == void
    made: Pixels = np.where(empty[:, :, None], 0, palette[np.where(empty, 0, mask)]).astype(np.uint8)
    return made


def overlaid(image: Pixels, mask: npt.NDArray[np.integer], palette: Pixels, share: float = 0.55) -> Pixels:
    """The image (H, W, 3), or (H, W, 1), mixed with `share` of its mask's colors."""
    made: Pixels = np.rint((1 - share) * image + share * painted(mask, palette)).astype(np.uint8)  # (H, W, 3)
    return made


def save_masks(folder: str | Path, stem: str, image: Pixels, mask: npt.NDArray[np.integer], palette: Pixels) -> None:
    """STEM.png and STEM.overlay.png."""
    from PIL import Image

    save_mask(Path(folder) / f"{stem}.png", mask, palette)
    with written_whole(Path(folder) / f"{stem}.overlay.png") as file:
        Image.fromarray(overlaid(image, mask, palette)).save(file, "PNG")


def save_mask(path: str | Path, mask: npt.NDArray[np.integer], palette: Pixels) -> None:
    """A palette PNG whose pixels are class numbers."""
    from PIL import Image

    picture = Image.fromarray(mask.astype(np.uint8))
    picture.putpalette(palette.tobytes())
    with written_whole(path) as file:
        picture.save(file, "PNG")


def check_folder(folder: str) -> None:
    """Before the work, not after it."""
    make_folder(folder)
