"""ArrayData and FileData: what they take, what they refuse and why, and how files are decoded."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anyprec.data import ArrayData, FileData
from anyprec.errors import DataError, MissingExtra


def arrays(**changes: Any) -> ArrayData:
    fields: dict[str, Any] = {
        "images": np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3),
        "labels": np.array([0, 1]),
        "classes": ("cat", "dog"),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.2, 0.2, 0.2),
        "name": "mine",
    }
    return ArrayData(**(fields | changes))


def test_array_data_has_the_common_surface() -> None:
    data = arrays(labels=np.array([0, 1], dtype=np.uint8))
    assert (len(data), data.num_classes, data.shape, data.name) == (2, 2, (4, 4, 3), "mine")
    assert data.labels.dtype == np.int64
    assert np.array_equal(data.read([1, 0, 1]), data.images[[1, 0, 1]])
    assert data.read([]).shape == (0, 4, 4, 3)
    assert np.array_equal(data.take([1]).images, data.images[1:]) and data.take([1]).labels.tolist() == [1]


def test_read_gives_a_copy() -> None:
    data = arrays()
    data.read([0])[:] = 7
    assert data.images[0, 0, 0, 0] == 0


NAN = np.full((2, 4, 4, 3), np.nan, np.float32)
BAD_ARRAYS = [
    ({"images": NAN}, "mine: images are float32 with NaN or infinity in it, must be uint8 0..255"),
    ({"images": np.zeros((2, 4, 4, 3))}, "mine: images are float64, must be uint8 0..255"),
    ({"images": np.zeros((2, 4, 4), np.uint8)}, "images have shape (2, 4, 4), must be (N, H, W, C)"),
    (
        {"images": np.zeros((0, 4, 4, 3), np.uint8)},
        "images have shape (0, 4, 4, 3), must be (N, H, W, C), none of them 0",
    ),
    ({"labels": np.array([0])}, "labels have shape (1,), must be (2,), one for each image"),
    ({"labels": np.array([0.0, 1.0])}, "labels are float64, must be integers 0..1"),
    ({"labels": np.array([0, 2])}, "label 2 is out of range; the 2 classes are 0..1"),
    ({"labels": np.array([-1, 0])}, "label -1 is out of range; the 2 classes are 0..1"),
    ({"mean": (0.5,)}, "mean has 1 values for 3 channels; give one per channel"),
    ({"mean": (0.5, np.nan, 0.5)}, "is not within -1e+06..1e+06; compute it from x/255"),
    ({"std": (0.2, 0.0, 0.2)}, "std=(0.2, 0.0, 0.2) is not within 1e-06..1e+06"),
    ({"std": (0.2, np.inf, 0.2)}, "is not within 1e-06..1e+06"),
]


@pytest.mark.parametrize("changes, message", BAD_ARRAYS, ids=[m[:40] for _, m in BAD_ARRAYS])
def test_array_data_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        arrays(**changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "indices, message",
    [
        ([0, 2], "indices are 0..2 of shape (2,), must be a list of numbers 0..1"),
        ([-1], "indices are -1..-1"),
        ([[0]], "of shape (1, 1)"),
        ([0.5], "indices are float64"),
    ],
)
def test_read_refuses(indices: Any, message: str) -> None:
    for method in (arrays().read, arrays().take):
        with pytest.raises(DataError) as caught:
            method(indices)
        assert message in str(caught.value)


def write_images(root: Path) -> list[str]:
    """One image of every kind of mode; lossless, so pixels can be compared."""
    rng = np.random.default_rng(0)
    color = Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8))
    gray = Image.fromarray(rng.integers(0, 256, (40, 20), dtype=np.uint8))
    palette = color.convert("P")
    palette.info["transparency"] = bytes(range(256))
    for name, image in {
        "rgb": color,
        "gray": gray,
        "alpha": color.convert("RGBA"),
        "palette": palette,
    }.items():
        image.save(root / f"{name}.png")
    return ["rgb.png", "gray.png", "alpha.png", "palette.png"]


def files(root: Path, paths: list[str], **options: Any) -> FileData:
    return FileData(root, paths, np.zeros(len(paths), np.int64), ("thing",), **options)


def test_file_data_decodes_every_mode_to_a_square_of_rgb(tmp_path: Path) -> None:
    data = files(tmp_path, write_images(tmp_path), size=10)
    out = data.read([3, 0, 1, 2])
    assert out.shape == (4, 10, 10, 3) and out.dtype == np.uint8
    assert (len(data), data.num_classes, data.shape) == (4, 1, (10, 10, 3))
    with Image.open(tmp_path / "rgb.png") as image:  # 30 x 20: short side to 10 gives 15 x 10, middle from column 2
        expected = np.asarray(image.resize((15, 10), Image.Resampling.BILINEAR))[:, 2:12]
    assert np.array_equal(out[1], expected)
    assert np.array_equal(out[1], out[3])  # transparency dropped
    assert np.array_equal(out[2][..., 0], out[2][..., 2])  # gray
    assert np.array_equal(out, np.concatenate([data.read([i]) for i in (3, 0, 1, 2)]))
    assert data.read([]).shape == (0, 10, 10, 3)


def test_images_of_the_right_size_pass_untouched(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.array_equal(files(tmp_path, ["a.png"], size=8).read([0])[0], pixels)


@pytest.mark.parametrize("kind", ["text", "cut", "empty", "missing"])
def test_a_broken_image_is_named(tmp_path: Path, kind: str) -> None:
    names = write_images(tmp_path)
    broken = tmp_path / "broken.jpg"
    if kind == "cut":
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(broken)
        broken.write_bytes(broken.read_bytes()[:700])
    elif kind != "missing":
        broken.write_bytes(b"no image" if kind == "text" else b"")
    with pytest.raises(DataError) as caught:
        files(tmp_path, [*names, "broken.jpg"]).read(range(5))
    message = str(caught.value)
    assert str(broken) in message and "replace or delete the file" in message and "\n" not in message


def test_file_data_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no image files given"):
        files(tmp_path, [])
    with pytest.raises(DataError, match="size=0 is not a number of pixels"):
        files(tmp_path, ["a.png"], size=0)
    with pytest.raises(DataError, match="label 3 is out of range"):
        FileData(tmp_path, ["a.png"], [3], ("thing",))


def test_without_pillow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = files(tmp_path, write_images(tmp_path))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match="pip install pillow"):
        data.read([0])
