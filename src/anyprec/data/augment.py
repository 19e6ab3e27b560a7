"""What is done to an image before it is normalized: the named settings, and the pixel work behind them.

Comes in: (n, H, W, C) uint8 (or open photographs of any size) and, in training, numbers in [0, 1) for each
image. Goes out: (n, H', W', C) uint8. There is no state: the same numbers give the same pixels.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from anyprec.data.masks import VOID
from anyprec.errors import DataError
from anyprec.preprocessing import Preprocessing

Pixels = npt.NDArray[np.uint8]
Draws = npt.NDArray[np.float64]

ATTEMPTS = 10  # tries at a random box that fits into the photograph, before the middle of it is taken


@dataclass(frozen=True)
class Augment:
    """One setting. Fields left at their default do nothing.

    pad:    training: so many pixels on each side, then a random crop back to the size the image had
    fill:   what these are: "zeros" or "reflect", the image mirrored at its edge
    flip:   training: mirror every second image, left to right
    turns:  flip: an image is mirrored in every second epoch, not by chance, so that no image is seen twice alike in
            two epochs that follow each other
    cutout: training: a square of this side, anywhere in the image, is set to gray
    resize: always: squeeze or stretch to resize x resize
    side:   photographs, training: a random box of `area` (share of the image) and `ratio` (width / height),
            resized to side x side; testing: resized to cover short x short, then the middle side x side
    cut:    photographs with masks, training: scaled by a random factor of `scale`, then a random part of height x
            width, filled up where the image is smaller; testing: as they are
    """

    name: str
    pad: int = 0
    fill: str = "zeros"
    flip: bool = False
    turns: bool = False
    cutout: int = 0
    resize: int = 0
    side: int = 0
    short: int = 0
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    cut: tuple[int, int] = (0, 0)  # height, width
    scale: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if min(self.pad, self.resize, self.side) < 0 or (self.side and (self.pad or self.resize)):
            raise DataError(
                f"augment {self.name!r}: pad={self.pad}, resize={self.resize}, side={self.side} must be 0 "
                "or more, and side goes with neither of the others"
            )
        whole = self.pad or not (self.turns or self.cutout or self.fill != "zeros")
        if self.fill not in ("zeros", "reflect") or self.cutout < 0 or not (self.flip or not self.turns) or not whole:
            raise DataError(
                f"augment {self.name!r}: fill={self.fill!r} must be 'zeros' or 'reflect', cutout={self.cutout} 0 or "
                f"more, turns={self.turns} goes with flip, and all three with pad"
            )
        (low, high), (thin, wide) = self.area, self.ratio
        if self.side and not (self.side <= self.short and 0 < low <= high <= 1 and 0 < thin <= wide):
            raise DataError(
                f"augment {self.name!r}: short={self.short} must be at least side={self.side}, "
                f"area={self.area} lie within 0..1, ratio={self.ratio} be above 0, the smaller first in both"
            )
        small, large = self.scale
        both = self.cut[0] > 0 and self.cut[1] > 0 and not (self.pad or self.resize or self.side)
        if self.cut != (0, 0) and not (both and 0 < small <= large <= 16):
            raise DataError(
                f"augment {self.name!r}: cut={self.cut} must be a height and a width, without pad, resize, side, and "
                f"scale={self.scale} lie within 0..16, the smaller first"
            )

    @property
    def each(self) -> int:
        """Random numbers an image needs, rounded up to blocks of 4; 0 where nothing is random."""
        if self.side:
            return 24  # area and ratio of every attempt, left, top, flip
        if self.cutout:
            return 8  # top, left, flip, unused, top and left of the square
        return 4 if self.pad or self.flip or self.cut[0] else 0  # top, left, flip, scale

    def shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Shape of an augmented image, given that of the data set."""
        if self.cut[0]:
            return (*self.cut, shape[2])
        side = self.side or self.resize
        return (side, side, shape[2]) if side else shape

    def preprocessing(
        self, shape: tuple[int, int, int], mean: tuple[float, ...], std: tuple[float, ...]
    ) -> Preprocessing:
        """What testing does to the images of a data set, given their shape (side: that of photographs does not count).

        A square of another size is resized, so that covering and stretching are one; other shapes are stretched.
        """
        if self.side:
            return Preprocessing(mean, std, (self.side, self.side), to=(self.short, self.short))
        if self.resize:
            how = "cover" if shape[0] == shape[1] else "stretch"
            return Preprocessing(mean, std, (self.resize, self.resize), how)
        return Preprocessing(mean, std, shape[:2])

    def apply(self, images: Pixels, draws: Draws | None) -> Pixels:
        """Augment a batch of equal-sized images for training, by `draws` (n, each); None where nothing is random."""
        assert draws is not None or not self.each, "testing goes through Preprocessing"
        assert not self.side and not self.cut[0], "photographs go through view() or cut_pair()"
        if draws is not None and self.pad:
            images = crop(images, self.pad, draws[:, 0], draws[:, 1], self.fill)
        if draws is not None and self.flip:
            images = mirror(images, draws[:, 2] < 0.5)
        if draws is not None and self.cutout:
            images = cut_out(images, self.cutout, draws[:, 4], draws[:, 5])
        if self.resize:
            images = resize(images, self.resize)
        return images

    def view(self, image: Any, draw: Draws | None) -> Pixels:
        """Cut an open photograph down to side x side, by `draw` (each,)."""
        from PIL import Image

        assert draw is not None, "testing goes through Preprocessing"

        left, top, width, height = random_box(image.size, draw, self.area, self.ratio)
        cut = image.crop((left, top, left + width, top + height))
        pixels = np.asarray(cut.resize((self.side, self.side), Image.Resampling.BILINEAR))
        return pixels[:, ::-1] if self.flip and draw[2 * ATTEMPTS + 2] < 0.5 else pixels

    def cut_pair(self, image: Pixels, mask: Pixels, draw: Draws, fill: tuple[int, ...]) -> tuple[Pixels, Pixels]:
        """(H, W, 3) and (H, W) -> the same part of both, cut high and wide; outside the image: `fill` and VOID.

        Only the part is resized. 180 x 240 at scale 1.5 is 270 x 360: a cut of 120 x 160 is 80 x 107 of its pixels.
        """
        from PIL import Image

        factor = self.scale[0] + float(draw[3]) * (self.scale[1] - self.scale[0])
        spans = [
            _span(old, max(1, round(old * factor)), new, float(draw[axis]))
            for axis, (old, new) in enumerate(zip(mask.shape, self.cut, strict=True))
        ]
        (y, height, top, bottom), (x, width, left, right) = spans
        box = (left, top, right, bottom)
        pixels = np.empty((*self.cut, 3), np.uint8)
        pixels[:] = fill
        labels = np.full(self.cut, VOID, np.uint8)
        place = np.s_[y : y + height, x : x + width]
        size = width, height
        pixels[place] = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR, box))
        labels[place] = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST, box))
        if self.flip and draw[2] < 0.5:
            pixels, labels = pixels[:, ::-1], labels[:, ::-1]
        return pixels, labels


def _span(old: int, scaled: int, new: int, draw: float) -> tuple[int, int, float, float]:
    """Along one axis: where the image lies in the cut, how far it reaches there, from where to where it is taken.

    An image that is smaller than the cut lies anywhere in it; of a larger one any part is taken.
    """
    at = int(draw * (abs(scaled - new) + 1))
    if scaled < new:
        return at, scaled, 0.0, float(old)
    return 0, new, at * old / scaled, (at + new) * old / scaled


AUGMENTS: dict[str, Augment] = {
    a.name: a
    for a in (
        Augment("none"),
        Augment("crop", pad=1),  # digits: a mirrored 3 is no 3
        Augment("crop-flip", pad=4, flip=True),  # the paper's CIFAR-10 setting
        # Small shifts, for networks that see each image a dozen times, not hundreds.
        Augment("reflect-flip", pad=2, fill="reflect", flip=True, turns=True),
        Augment("reflect-flip-cutout", pad=2, fill="reflect", flip=True, turns=True, cutout=8),
        Augment("svhn", resize=40),  # the input size of CNN-8; nothing random
        Augment("imagenet", side=224, short=256, flip=True),
        Augment("voc", cut=(513, 513), scale=(0.5, 2.0), flip=True),  # DeepLab's
        Augment("camvid", cut=(120, 160), scale=(0.75, 1.5), flip=True),  # of 180 x 240
    )
}


def find_augment(augment: str | Augment) -> Augment:
    if isinstance(augment, Augment):
        return augment
    # "voc-321x321" is "voc" with another cut.
    sized = re.fullmatch(r"(\w+)-(\d{1,5})x(\d{1,5})", str(augment))
    if sized and sized[1] in AUGMENTS and AUGMENTS[sized[1]].cut[0]:
        return replace(AUGMENTS[sized[1]], name=augment, cut=(int(sized[2]), int(sized[3])))
    if augment not in AUGMENTS:
        raise DataError(f"augment={augment!r} is not known; choose one of {', '.join(AUGMENTS)}")
    return AUGMENTS[augment]


def crop(images: Pixels, pad: int, tops: Draws, lefts: Draws, fill: str = "zeros") -> Pixels:
    """Pad with zeros (black: it is done before normalizing) or mirrored, then cut the old size at a random offset."""
    n, height, width, channels = images.shape
    if fill == "reflect":
        if pad >= min(height, width):
            raise DataError(f"images of {height}x{width} cannot be mirrored by {pad} pixels; choose another augment")
        padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), "reflect")
    else:
        padded = np.zeros((n, height + 2 * pad, width + 2 * pad, channels), np.uint8)
        padded[:, pad : pad + height, pad : pad + width] = images
    offsets = 2 * pad + 1  # 0..2 pad
    by_image, by_row, by_pixel, _ = padded.strides
    # Every possible window as a view without a copy; one gather then copies n of them, row by row (width *
    # channels bytes).
    windows = as_strided(
        padded,
        (n, offsets, offsets, height, width * channels),
        (by_image, by_row, by_pixel, by_row, 1),
        writeable=False,
    )
    top, left = (tops * offsets).astype(np.intp), (lefts * offsets).astype(np.intp)
    return windows[np.arange(n), top, left].reshape(images.shape)  # (n, H, W, C) uint8


def cut_out(images: Pixels, side: int, tops: Draws, lefts: Draws) -> Pixels:
    """Set a square of side x side to gray (128), whole inside the image. Works in place: pass an array of your own."""
    n, height, width, _ = images.shape
    if side > min(height, width):
        raise DataError(f"a square of {side}x{side} does not fit into images of {height}x{width}")
    top = (tops * (height - side + 1)).astype(np.intp)
    left = (lefts * (width - side + 1)).astype(np.intp)
    rows, columns = top[:, None] + np.arange(side), left[:, None] + np.arange(side)  # (n, side)
    images[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]] = 128
    return images


def mirror(images: Pixels, which: npt.NDArray[np.bool_]) -> Pixels:
    """Left to right, the images where `which` is true. Works in place: pass an array of your own."""
    n, height, width, channels = images.shape
    pixels = images.view(f"V{channels}").reshape(n, height, width)  # moves whole pixels: 2.5 x faster than bytes
    pixels[which] = pixels[which][:, :, ::-1]
    return pixels.view(np.uint8).reshape(images.shape)


def prepared(images: Pixels, how: Preprocessing) -> Pixels:
    """(n, H, W, C) -> what `how.pixels` makes of each as a picture; from square to square without Pillow."""
    old = images.shape[1], images.shape[2]
    new = how.resized(old)
    if new != old and (how.filter != "bilinear" or old[0] != old[1] or new[0] != new[1]):
        from PIL import Image

        gray = images.shape[3] == 1
        return np.stack([how.pixels(Image.fromarray(image[:, :, 0] if gray else image)) for image in images])
    if new != old:
        images = resize(images, new[0])
    if how.size is None or new == how.size:
        return images
    top, left = how.corner(new)
    return images[:, top : top + how.size[0], left : left + how.size[1]]


def resize(images: Pixels, side: int) -> Pixels:
    """Bilinear, antialiased when shrinking, to side x side; square images come out exactly as from Pillow."""
    n, _, _, channels = images.shape
    out = np.empty((n, side, side, channels), np.uint8)
    for first in range(0, n, 16):  # the int32 sums of 16 images stay in the cache: twice as fast as all at once
        part = images[first : first + 16]
        # Width first, as Pillow does: each pass rounds to uint8. Turned, since whole rows mix faster.
        if part.shape[2] != side:
            part = _turn(_mix_rows(_turn(part), side))
        out[first : first + 16] = _mix_rows(part, side) if part.shape[1] != side else part
    return out


def _turn(images: Pixels) -> Pixels:
    """(n, H, W, C) -> (n, W, H, C)."""
    n, height, width, channels = images.shape
    pixels = images.view(f"V{channels}").reshape(n, height, width).transpose(0, 2, 1)
    return np.ascontiguousarray(pixels).view(np.uint8).reshape(n, width, height, channels)


def _mix_rows(images: Pixels, side: int) -> Pixels:
    """(n, H, W, C) -> (n, side, W, C), each row a weighted sum of some old ones."""
    n, height, width, channels = images.shape
    rows = images.reshape(n, height, width * channels)
    sources, weights = _taps(height, side)
    total = np.full((n, side, width * channels), 1 << 21, np.int32)  # one half: the shift rounds to nearest
    for source, weight in zip(sources, weights, strict=True):
        total += rows.take(source, axis=1) * weight[:, None]  # int32: 255 * 2^22 < 2^31
    total >>= 22
    return total.astype(np.uint8).reshape(n, side, width, channels)


@lru_cache(maxsize=16)
def _taps(old: int, new: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
    """For each output pixel the input pixels it mixes and their weights, in 1/2^22; both (taps, new).

    Output i lies at (i + 0.5) * old / new of the input; a triangle of half-width max(1, old / new) around it
    weighs the pixels. 32 -> 40, i = 1: center 1.2, pixels 0 and 1 (centers 0.5 and 1.5), weights 0.3 and 0.7.
    """
    reach = max(1.0, old / new)
    center = (np.arange(new) + 0.5) * (old / new)
    first = np.maximum((center - reach + 0.5).astype(np.intp), 0)
    last = np.minimum((center + reach + 0.5).astype(np.intp), old)  # exclusive
    source = first[:, None] + np.arange(int((last - first).max()))  # (new, taps)
    weight = np.maximum(1 - np.abs((source + 0.5 - center[:, None]) / reach), 0.0)
    weight[source >= last[:, None]] = 0.0
    weight /= weight.sum(axis=1, keepdims=True)
    fixed = np.floor(weight * (1 << 22) + 0.5).astype(np.int32)
    return np.minimum(source, old - 1).T.copy(), fixed.T.copy()


def random_box(
    size: tuple[int, int], draw: Draws, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """(left, top, width, height) inside an image of `size` (width, height): area uniform, log of the ratio
    uniform.

    A box that does not fit is drawn again, ATTEMPTS times; then comes the largest centered box of an allowed
    ratio.
    """
    width, height = size
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(ATTEMPTS):
        pixels = width * height * (area[0] + draw[2 * attempt] * (area[1] - area[0]))
        shape = math.exp(low + draw[2 * attempt + 1] * (high - low))
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
        if 0 < w <= width and 0 < h <= height:
            left = int(draw[2 * ATTEMPTS] * (width - w + 1))
            top = int(draw[2 * ATTEMPTS + 1] * (height - h + 1))
            return left, top, w, h
    w = min(width, round(height * ratio[1]))
    h = min(height, round(width / ratio[0]))
    return (width - w) // 2, (height - h) // 2, w, h
