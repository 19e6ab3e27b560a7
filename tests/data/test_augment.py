"""Augmentation against slow, plain, per-image references; shapes; ranges of what is drawn."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from anyprec.data import AUGMENTS, Augment
from anyprec.data import augment as pixels
from anyprec.errors import DataError

RNG = np.random.default_rng(0)


def batch(n: int, height: int, width: int, channels: int) -> np.ndarray:
    return np.random.default_rng(n).integers(1, 256, (n, height, width, channels), dtype=np.uint8)


def slow_crop_flip(image: np.ndarray, pad: int, flip: bool, draw: np.ndarray, fill: str = "zeros") -> np.ndarray:
    """Pixel by pixel: where does each output pixel come from?"""
    height, width, _ = image.shape
    top, left = int(draw[0] * (2 * pad + 1)), int(draw[1] * (2 * pad + 1))
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            sx = width - 1 - x if flip and draw[2] < 0.5 else x
            row, column = y + top - pad, sx + left - pad
            if fill == "reflect":  # -1 -> 1, height -> height - 2
                row, column = (min(abs(i), 2 * (n - 1) - abs(i)) for i, n in ((row, height), (column, width)))
            if 0 <= row < height and 0 <= column < width:
                out[y, x] = image[row, column]
    return out


@pytest.mark.parametrize("name", ["none", "crop", "crop-flip", "reflect-flip"])
@pytest.mark.parametrize("shape", [(8, 8, 1), (12, 9, 3), (5, 7, 4)])
def test_matches_the_slow_reference(name: str, shape: tuple[int, int, int]) -> None:
    how = AUGMENTS[name]
    images, draws = batch(24, *shape), RNG.random((24, 4))
    expected = [slow_crop_flip(i, how.pad, how.flip, d, how.fill) for i, d in zip(images, draws, strict=True)]
    assert np.array_equal(how.apply(images.copy(), draws), np.stack(expected))


def test_cutout_sets_one_square_inside_the_image_to_gray() -> None:
    images, how = batch(200, 12, 9, 3), AUGMENTS["reflect-flip-cutout"]
    images[images == 128] = 127
    draws = RNG.random((200, how.each))
    out = how.apply(images.copy(), draws)
    whole = AUGMENTS["reflect-flip"].apply(images.copy(), draws)
    corners = set()
    for after, before in zip(out, whole, strict=True):
        gray = (after == 128).all(axis=2)
        rows, columns = np.flatnonzero(gray.any(axis=1)), np.flatnonzero(gray.any(axis=0))
        assert gray.sum() == 64 and len(rows) == len(columns) == 8  # a square of 8 x 8
        assert np.array_equal(after[~gray], before[~gray])
        corners.add((rows[0], columns[0]))
    assert corners == {(y, x) for y in range(5) for x in range(2)}


def test_images_too_small_to_mirror_or_cut() -> None:
    with pytest.raises(DataError, match="images of 2x2 cannot be mirrored by 2 pixels"):
        AUGMENTS["reflect-flip"].apply(batch(1, 2, 2, 3), np.zeros((1, 4)))
    with pytest.raises(DataError, match="a square of 8x8 does not fit into images of 6x7"):
        AUGMENTS["reflect-flip-cutout"].apply(batch(1, 6, 7, 3), np.zeros((1, 8)))


def test_every_offset_and_both_directions_occur_equally() -> None:
    from anyprec.data.draws import uniform

    n = 16_200
    draws = uniform(0, 0, 0, n, 4)
    image = np.arange(1, 65, dtype=np.uint8).reshape(8, 8, 1)
    out = AUGMENTS["crop-flip"].apply(np.repeat(image[None], n, axis=0), draws)
    seen = Counter(row.tobytes() for row in out)
    assert len(seen) == 9 * 9 * 2
    assert min(seen.values()) > 50 and max(seen.values()) < 160  # expected: 100, deviation 10


@pytest.mark.parametrize("name", [n for n, a in AUGMENTS.items() if not a.side and not a.cut[0]])
def test_testing_is_not_random_and_shape_is_as_told(name: str) -> None:
    how, images = AUGMENTS[name], batch(3, 32, 32, 3)
    out = pixels.prepared(images.copy(), how.preprocessing((32, 32, 3), (0.5,) * 3, (0.5,) * 3))
    assert out.shape[1:] == how.shape((32, 32, 3)) and out.dtype == np.uint8
    if not how.resize:
        assert np.array_equal(out, images)


@pytest.mark.parametrize("side", [32, 28, 40, 41, 64, 100, 7, 1])
def test_resize_is_pillows_for_square_images(side: int) -> None:
    images = batch(19, side, side, 3)  # 19: one block of 16, and a rest
    expected = [np.asarray(Image.fromarray(i).resize((40, 40), Image.Resampling.BILINEAR)) for i in images]
    assert np.array_equal(pixels.resize(images, 40), np.stack(expected))


def test_resize_of_oblong_images_is_pillows_but_for_rounding() -> None:
    images = batch(3, 41, 39, 3)
    expected = [np.asarray(Image.fromarray(i).resize((40, 40), Image.Resampling.BILINEAR)) for i in images]
    assert np.abs(pixels.resize(images, 40).astype(int) - np.stack(expected)).max() <= 1


@pytest.mark.parametrize("value", [0, 1, 77, 255])
def test_resize_keeps_flat_images_flat(value: int) -> None:
    flat = np.full((2, 32, 32, 1), value, np.uint8)
    assert (pixels.resize(flat, 40) == value).all()


def test_svhn_draws_nothing() -> None:
    assert AUGMENTS["svhn"].each == 0 and AUGMENTS["none"].each == 0
    assert AUGMENTS["svhn"].shape((32, 32, 3)) == (40, 40, 3)


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(0, 2**32))
def test_random_box_lies_inside(width: int, height: int, seed: int) -> None:
    how = AUGMENTS["imagenet"]
    draw = np.random.default_rng(seed).random(24)
    left, top, w, h = pixels.random_box((width, height), draw, how.area, how.ratio)
    assert 0 <= left <= left + w <= width and 0 <= top <= top + h <= height and w > 0 and h > 0


def test_random_box_has_the_asked_area_and_ratio() -> None:
    how = AUGMENTS["imagenet"]
    boxes = [pixels.random_box((500, 400), RNG.random(24), how.area, how.ratio) for _ in range(3000)]
    areas = np.array([w * h / 200_000 for _, _, w, h in boxes])
    ratios = np.array([w / h for _, _, w, h in boxes])
    assert 0.078 < areas.min() < 0.1 and 0.9 < areas.max() <= 1
    assert 0.74 < ratios.min() < 0.78 and 1.28 < ratios.max() < 1.35
    assert {left == 0 for left, *_ in boxes} == {True, False}


def test_random_box_falls_back_to_the_middle() -> None:
    """No box of 8 % of 1000 x 10 with ratio 3/4..4/3 fits in: it is 24 pixels high at the least."""
    assert pixels.random_box((1000, 10), RNG.random(24), (0.08, 1.0), (3 / 4, 4 / 3)) == (493, 0, 13, 10)
    assert pixels.random_box((10, 1000), RNG.random(24), (0.08, 1.0), (3 / 4, 4 / 3)) == (0, 493, 10, 13)


def test_photograph_in_training_is_the_box_resized_and_mirrored() -> None:
    how = AUGMENTS["imagenet"]
    image = Image.fromarray(batch(1, 300, 400, 3)[0])
    for flip in (0.1, 0.9):
        draw = RNG.random(24)
        draw[22] = flip
        left, top, w, h = pixels.random_box((400, 300), draw, how.area, how.ratio)
        cut = image.crop((left, top, left + w, top + h)).resize((224, 224), Image.Resampling.BILINEAR)
        expected = np.asarray(cut)[:, ::-1] if flip < 0.5 else np.asarray(cut)
        assert np.array_equal(how.view(image, draw), expected)


@pytest.mark.parametrize("size", [(400, 300), (300, 400), (256, 256), (100, 37), (1000, 256)])
def test_photograph_in_testing_is_the_middle(size: tuple[int, int]) -> None:
    image = Image.fromarray(batch(1, size[1], size[0], 3)[0])
    width, height = size
    scale = 256 / min(size)
    wide = (
        256 if width <= height else math.floor(width * scale),
        256 if height <= width else math.floor(height * scale),
    )
    whole = np.asarray(image.resize(wide, Image.Resampling.BILINEAR))
    top, left = round((wide[1] - 224) / 2), round((wide[0] - 224) / 2)
    how = AUGMENTS["imagenet"].preprocessing((1, 1, 3), (0.5,) * 3, (0.5,) * 3)
    assert np.array_equal(how.pixels(image), whole[top : top + 224, left : left + 224])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"pad": -1}, "pad=-1, resize=0, side=0 must be 0 or more"),
        ({"pad": 2, "fill": "edge"}, "fill='edge' must be 'zeros' or 'reflect'"),
        ({"pad": 2, "cutout": -1}, "cutout=-1 0 or more"),
        ({"pad": 2, "turns": True}, "turns=True goes with flip"),
        ({"cutout": 4}, "all three with pad"),
        ({"side": 224, "short": 256, "pad": 4}, "side goes with neither of the others"),
        ({"side": 224}, "short=0 must be at least side=224"),
        ({"side": 8, "short": 8, "area": (0.5, 0.1)}, "area=(0.5, 0.1) lie within 0..1"),
        ({"side": 8, "short": 8, "ratio": (0, 1)}, "ratio=(0, 1) be above 0"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        Augment("mine", **fields)
    assert message in str(caught.value) and "augment 'mine'" in str(caught.value)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(
        DataError, match="augment='flip' is not known; choose one of none, crop, crop-flip, reflect-flip"
    ):
        pixels.find_augment("flip")
    own = Augment("mine", pad=2)
    assert pixels.find_augment(own) is own
