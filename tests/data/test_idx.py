"""Fashion-MNIST's idx files: plain and gzipped, in all its places, and every way they can be wrong."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from anyprec.data import load_data
from anyprec.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 28, 28), dtype=np.uint8)
LABELS = np.array([0, 9, 1, 2, 3, 4], np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(folder: Path, zipped: bool = False, images: bytes = idx(IMAGES), labels: bytes = idx(LABELS)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem in ("train", "t10k"):
        for name, content in ((f"{stem}-images-idx3-ubyte", images), (f"{stem}-labels-idx1-ubyte", labels)):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", [".", "fashion-mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_reads_every_layout(tmp_path: Path, zipped: bool, place: str, split: str) -> None:
    write(tmp_path / place, zipped=zipped)
    data = load_data("fashion-mnist", split, tmp_path)
    assert np.array_equal(data.read(range(6)), IMAGES[..., None]) and np.array_equal(data.labels, LABELS)
    assert data.shape == (28, 28, 1) and data.num_classes == 10


WRONG: list[tuple[dict[str, bytes], str]] = [
    ({"images": idx(IMAGES)[:-1]}, "holds 4719 bytes, expected 4720 for shape (6, 28, 28)"),
    ({"images": idx(IMAGES) + b"x"}, "holds 4721 bytes, expected 4720"),
    ({"images": idx(IMAGES)[:10]}, "starts with 00 00 08 03, expected 00 00 08 03"),
    (
        {"images": idx(LABELS)},
        "starts with 00 00 08 01, expected 00 00 08 03: not an idx file of uint8 with 3 axes",
    ),
    ({"images": b""}, "starts with nothing, expected 00 00 08 03"),
    ({"labels": idx(LABELS[:5])}, "has 6 images but"),
    ({"labels": idx(LABELS + 1)}, "label 10 is out of range"),
    ({"images": idx(IMAGES[:0]), "labels": idx(LABELS[:0])}, "images have shape (0, 28, 28, 1)"),
]


@pytest.mark.parametrize("contents, message", WRONG, ids=[m[:30] for _, m in WRONG])
def test_wrong_files(tmp_path: Path, contents: dict[str, bytes], message: str) -> None:
    write(tmp_path, False, **contents)
    with pytest.raises(DataError) as caught:
        load_data("fashion-mnist", "train", tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(idx(IMAGES))[:-20], gzip.compress(idx(IMAGES))[:-6] + b"wrong!"]
)
def test_damaged_gzip(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, zipped=True)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is damaged .* get it again"):
        load_data("fashion-mnist", "train", tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no train-images-idx3-ubyte; expected train-images-idx3-ubyte"):
        load_data("fashion-mnist", "train", tmp_path)
