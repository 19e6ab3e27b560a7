"""Preprocessing: sizes worked out by hand, records there and back, what is refused."""

import numpy as np
import pytest

from anyprec.errors import DataError, InputError
from anyprec.preprocessing import Preprocessing, orientation, upright

GRAY, COLOR = ((0.5,), (0.25,)), ((0.5,) * 3, (0.25,) * 3)


@pytest.mark.parametrize(
    ("picture", "size", "to", "resized", "corner"),
    [  # heights first
        ((375, 500), 224, 224, (224, 298), (0, 37)),
        ((500, 375), 224, 224, (298, 224), (37, 0)),
        ((375, 500), 224, 256, (256, 341), (16, 58)),  # 58.5 to even
        ((100, 100), (50, 80), (50, 80), (80, 80), (15, 0)),
        ((8, 8), 8, 8, (8, 8), (0, 0)),
        ((10, 20), 10, 10, (10, 20), (0, 5)),
        ((1, 1000), 4, 4, (4, 4000), (0, 1998)),
        ((3, 2), 7, 9, (13, 9), (3, 1)),
    ],
)
def test_covering_and_the_middle(picture, size, to, resized, corner):
    how = Preprocessing(*COLOR, size=size, to=to)
    assert how.resized(picture) == resized and how.corner(resized) == corner


def test_stretching_and_no_size():
    how = Preprocessing(*COLOR, size=(10, 12), resize="stretch")
    assert how.resized((3, 70)) == (10, 12) and how.to == (10, 12)
    free = Preprocessing(*COLOR)
    assert free.resized((3, 70)) == (3, 70) and free.resize == "none" and free.channels == 3


@pytest.mark.parametrize("size", [(9, 31), (31, 9), (16, 16), (12, 12)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("rest", [{}, {"resize": "stretch"}, {"to": 15, "filter": "bicubic"}, {"filter": "nearest"}])
def test_pixels_by_hand(size, channels, rest):
    pil = pytest.importorskip("PIL.Image")
    picture = pil.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8))
    how = Preprocessing(*(GRAY if channels == 1 else COLOR), size=12, **rest)
    plain = picture.convert("L" if channels == 1 else "RGB")
    to = rest.get("to", 12)
    short = min(size)
    new = (to, to) if "resize" in rest else tuple(max(to, to * n // short) for n in size)  # height, width
    plain = plain.resize(new[::-1], getattr(pil.Resampling, rest.get("filter", "bilinear").upper()))
    top, left = (round((n - 12) / 2) for n in new)
    wanted = np.asarray(plain)[top : top + 12, left : left + 12].reshape(12, 12, channels)
    np.testing.assert_array_equal(how.pixels(picture), wanted, strict=True)


def test_numbers_of_a_file():
    scale, shift = Preprocessing((0.5, 0.1, 0.2), (0.25, 0.5, 1.0)).image
    assert scale == pytest.approx((1 / (255 * 0.25), 1 / (255 * 0.5), 1 / 255)) and shift == (-2.0, -0.2, -0.2)
    again = Preprocessing.from_image(np.float32(scale), np.float32(shift))
    np.testing.assert_allclose(again.mean, (0.5, 0.1, 0.2), rtol=1e-6)
    np.testing.assert_allclose(again.std, (0.25, 0.5, 1.0), rtol=1e-6)


@pytest.mark.parametrize(
    "how",
    [
        Preprocessing(*GRAY),
        Preprocessing(*COLOR, size=224, to=256, filter="lanczos"),
        Preprocessing(*COLOR, size=(3, 4), resize="stretch"),
    ],
    ids=str,
)
def test_there_and_back(how):
    assert Preprocessing.from_dict(how.to_dict()) == how


def test_another_size_keeps_the_margin():
    how = Preprocessing(*COLOR, size=224, to=256)
    assert (how.at((448, 448)).size, how.at((448, 448)).to) == ((448, 448), (512, 512))
    assert how.at((224, 224)) is how and how.at(None).resize == "none"
    assert Preprocessing(*COLOR).at((5, 6)).to == (5, 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mean": (), "std": ()}, "give 1 each for gray"),
        ({"mean": (0.5,), "std": (0.5, 0.5)}, "mean has 1 numbers and std 2"),
        ({"mean": (np.nan,), "std": (0.5,)}, "must be finite"),
        ({"mean": (0.5,), "std": (0.0,)}, "std above 0"),
        ({"size": 0}, "size=0 is not a number of pixels"),
        ({"size": (3, 4, 5)}, "not a number of pixels"),
        ({"size": True}, "not a number of pixels"),
        ({"size": 100_000}, "more than 40,000,000 pixels"),
        ({"size": 224, "to": 200}, "to=\\(200, 200\\) is smaller than size"),
        ({"to": 200}, "'none' has no sizes"),
        ({"size": 224, "resize": "crop"}, "resize='crop'"),
        ({"size": 224, "filter": "area"}, "filter='area'"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(DataError, match=message):
        Preprocessing(**{"mean": (0.5,), "std": (0.5,), **given})


@pytest.mark.parametrize("record", [{}, {"mean": [0.5]}, [], {**Preprocessing(*GRAY).to_dict(), "more": 1}])
def test_records_that_are_none(record):
    with pytest.raises(DataError, match="is no record of preprocessing"):
        Preprocessing.from_dict(record)


@pytest.mark.parametrize("turn", range(1, 9))
def test_orientation_is_pillows_and_turned_once(turn, tmp_path):
    pil, ops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
    picture = pil.fromarray(np.random.default_rng(0).integers(0, 256, (5, 9, 3), np.uint8))
    exif = pil.Exif()
    exif[0x0112] = turn
    picture.save(tmp_path / "x.png", exif=exif)
    with pil.open(tmp_path / "x.png") as stored, pil.open(tmp_path / "x.png") as again:
        assert orientation(stored) == turn
        done = upright(stored, 3)
        np.testing.assert_array_equal(np.asarray(done), np.asarray(ops.exif_transpose(again)))
    np.testing.assert_array_equal(np.asarray(upright(done, 3)), np.asarray(done))


def test_broken_exif_does_not_spoil_a_picture():
    class Broken:
        def getexif(self):
            raise SyntaxError("not a TIFF header")

    assert orientation(Broken()) == 1


def test_networks_that_take_no_pictures():
    pil = pytest.importorskip("PIL.Image")
    with pytest.raises(InputError, match="takes images of 4 channels, pictures have 1 or 3"):
        Preprocessing((0.5,) * 4, (0.5,) * 4, size=4).pixels(pil.new("RGB", (4, 4)))
