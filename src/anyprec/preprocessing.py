"""Preprocessing: how a picture becomes the pixels a network was trained on. ARITHMETIC.md, section 7.

A frozen record of size, resize, filter, mean and deviation. A training run makes it from its data set and augmentation,
the checkpoint and the model file keep it, and `evaluate`, `run`, `/classify` and segmentation all turn pictures into
pixels by its `pixels`: the same uint8 numbers everywhere. Pillow is imported when a picture is at hand, not before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.errors import DataError, InputError

Pixels = npt.NDArray[np.uint8]
Size = tuple[int, int]  # height, width

RESIZES = ("cover", "stretch", "none")
FILTERS = ("nearest", "bilinear", "bicubic", "lanczos")  # Pillow's, which widen with the factor when they shrink
MAX_PIXELS = 40_000_000  # of a picture once it is resized; a telephone's photograph has 12 to 50 million
ORIENTATION = 0x0112  # EXIF: how a camera was held
CHANNELS = {1: "gray", 3: "color"}


@dataclass(frozen=True)
class Preprocessing:
    """What is done to a picture before a network sees it.

    mean, std: of x/255 per channel. One number each: gray (luma of a color picture); three: red, green, blue (a gray
               picture has the same in all three).
    size:      (height, width) the network gets, or one number for a square; None: a picture keeps the size it has.
    resize:    "cover": resized in proportion until it just covers `to`; "stretch": resized to `to` whatever its shape.
               Then the middle `size` is cut out.
    to:        (height, width), or one number; by default `size`. 256 with size 224 is the customary ImageNet test.
    filter:    "bilinear", "bicubic", "lanczos" or "nearest", as Pillow computes them.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: Size | None = None
    resize: str = "cover"
    to: Size | None = None
    filter: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(n) for n in getattr(self, name)))
        if not self.mean or len(self.std) != len(self.mean):
            raise DataError(
                f"Preprocessing: mean has {len(self.mean)} numbers and std {len(self.std)}; give 1 each for gray "
                "pictures, 3 for color"
            )
        if not all(math.isfinite(n) for n in self.mean) or not all(1e-6 <= n <= 1e6 for n in self.std):
            raise DataError(f"Preprocessing: mean={self.mean}, std={self.std} must be finite, std above 0: of x/255")
        if self.resize not in RESIZES or self.filter not in FILTERS:
            raise DataError(
                f"Preprocessing: resize={self.resize!r}, filter={self.filter!r} are not known; choose resize from "
                f"{', '.join(RESIZES)} and filter from {', '.join(FILTERS)}"
            )
        size = as_size(self.size, "size")
        to = as_size(self.to, "to") or size
        if size is None or self.resize == "none":
            if to is not None:
                raise DataError(f"Preprocessing: size={size}, resize={self.resize!r}, to={to}: 'none' has no sizes")
            object.__setattr__(self, "resize", "none")
        elif to is None or to[0] < size[0] or to[1] < size[1]:
            raise DataError(f"Preprocessing: to={to} is smaller than size={size}, which is cut out of it; give more")
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "to", to)

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def image(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(x/255 - mean) / std as one multiplication and addition: scale and shift per channel."""
        scale = tuple(1 / (255 * s) for s in self.std)
        return scale, tuple(-m / s for m, s in zip(self.mean, self.std, strict=True))

    def at(self, size: Size | None) -> Preprocessing:
        """The same for another size: `to` grows in proportion."""
        if size == self.size:
            return self
        if size is None:
            return replace(self, size=None, to=None, resize="none")
        if self.size is None or self.to is None:
            return replace(self, size=size, resize="cover", to=size)
        (h, w), (to_h, to_w) = self.size, self.to
        return replace(self, size=size, to=(size[0] * to_h // h, size[1] * to_w // w))

    # --- Pixels ---

    def resized(self, size: Size) -> Size:
        """Height and width after resizing, before the middle is cut out. 375 x 500 to cover 256 x 256: 256 x 341."""
        if self.to is None:
            return size
        height, width = size
        to_h, to_w = self.to
        if self.resize == "stretch":
            return self.to
        if width * to_h <= height * to_w:
            return max(to_h, to_w * height // width), to_w
        return to_h, max(to_w, to_h * width // height)

    def corner(self, size: Size) -> tuple[int, int]:
        """Top and left of the middle that is cut out, halves rounded to even."""
        assert self.size is not None
        return round((size[0] - self.size[0]) / 2), round((size[1] - self.size[1]) / 2)

    def pixels(self, picture: Any) -> Pixels:
        """An open Pillow image -> (H, W, C) uint8."""
        from PIL import Image

        picture = upright(picture, self.channels)
        if self.size is None:
            return np.asarray(picture).reshape(picture.height, picture.width, self.channels)
        height, width = self.resized((picture.height, picture.width))
        if height * width > MAX_PIXELS:  # 1 x 100,000 would become 256 x 25,600,000
            raise InputError(
                f"a picture of {picture.width} x {picture.height} is resized to {width} x {height}, more than "
                f"{MAX_PIXELS:,} pixels; cut it to a shape nearer to {self.size[1]} x {self.size[0]} first"
            )
        if picture.size != (width, height):
            picture = picture.resize((width, height), getattr(Image.Resampling, self.filter.upper()))
        top, left = self.corner((height, width))
        picture = picture.crop((left, top, left + self.size[1], top + self.size[0]))
        return np.asarray(picture).reshape(*self.size, self.channels)

    # --- Records ---

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: for checkpoints and reports."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Preprocessing:
        known = {"mean", "std", "size", "resize", "to", "filter"}
        if not isinstance(record, Mapping) or set(record) != known:
            raise DataError(f"{record!r} is no record of preprocessing; it needs {', '.join(sorted(known))}")
        try:
            return cls(**record)
        except (TypeError, ValueError) as error:
            raise DataError(f"{record!r} is no record of preprocessing: {error}") from error

    @classmethod
    def from_image(cls, scale: Sequence[float], shift: Sequence[float], **rest: Any) -> Preprocessing:
        """From the numbers of a model file. They are float32, so mean and std come out good to 7 digits."""
        std = [1 / (255 * s) for s in scale]
        mean = [-float(b) * s for b, s in zip(shift, std, strict=True)]
        return cls(mean=tuple(float(f"{m:.7g}") for m in mean), std=tuple(float(f"{s:.7g}") for s in std), **rest)

    def __str__(self) -> str:
        numbers = "/".join(f"{m:.4g}" for m in self.mean), "/".join(f"{s:.4g}" for s in self.std)
        tail = f"{CHANNELS.get(self.channels, f'{self.channels} channels')}, mean {numbers[0]}, deviation {numbers[1]}"
        if self.size is None or self.to is None:
            return f"at the size they have; {tail}"
        to, size = (f"{h} x {w}" for h, w in (self.to, self.size))
        how = f"resized ({self.filter}) to {'cover ' if self.resize == 'cover' else ''}{to}"
        return f"{how}, the middle {size}; {tail}"


def as_size(given: Any, name: str) -> Size | None:
    """224 -> (224, 224); None stays None."""
    if given is None:
        return None
    pair = (given, given) if isinstance(given, (int, np.integer)) and not isinstance(given, bool) else given
    good = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not good or not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= 1 for n in pair):
        raise DataError(f"Preprocessing: {name}={given!r} is not a number of pixels; give 224, or (height, width)")
    height, width = (int(n) for n in pair)
    if height * width > MAX_PIXELS:
        raise DataError(f"Preprocessing: {name} {height} x {width} has more than {MAX_PIXELS:,} pixels; give less")
    return height, width


def upright(picture: Any, channels: int) -> Any:
    """An open Pillow image -> mode L or RGB, 8 bit, turned as its EXIF orientation says.

    Transparency is dropped, 16-bit gray keeps its high byte (as 16-bit color does in Pillow), a palette is looked up,
    CMYK and others are converted by Pillow. Pixels without a fixed range (float, 32 bit) are refused.
    """
    from PIL import Image

    if channels not in CHANNELS:
        raise InputError(f"the network takes images of {channels} channels, pictures have 1 or 3; give arrays")
    picture.load()
    turn = orientation(picture)
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in ("PNG", "PPM")):
        picture = Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise InputError(f"pixels of mode {picture.mode} (32 bit) have no fixed range; save the picture in 8 or 16 bit")
    if picture.mode in ("P", "PA") and ("transparency" in picture.info or picture.mode == "PA"):
        picture = picture.convert("RGBA")  # straight to RGB, Pillow warns
    if picture.mode not in ("RGB", "L"):
        picture = picture.convert("RGB")
    if picture.mode != ("L" if channels == 1 else "RGB"):
        picture = picture.convert("L" if channels == 1 else "RGB")
    if turn != 1:
        picture = picture.transpose(turns()[turn])
        picture.info = {}  # or its EXIF would say that it has to be turned again
    return picture


def turns() -> dict[int, Any]:
    """EXIF orientation -> what turns the pixels upright."""
    from PIL import Image

    way = Image.Transpose
    kinds = (way.FLIP_LEFT_RIGHT, way.ROTATE_180, way.FLIP_TOP_BOTTOM, way.TRANSPOSE, way.ROTATE_270, way.TRANSVERSE)
    return dict(enumerate((*kinds, way.ROTATE_90), 2))


def orientation(picture: Any) -> int:
    """1..8; 1 (upright) where there is no EXIF, or none that can be read: broken notes do not spoil a good picture."""
    try:
        found = picture.getexif().get(ORIENTATION, 1)
    except Exception:
        return 1
    return found if found in range(2, 9) else 1
