"""CIFAR-10: three layouts, identical arrays; a message for every kind of wrong file; no pickle runs code."""

import hashlib
import lzma
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from anyprec.data import cifar10, load_data
from anyprec.data.cache import cache_folder
from anyprec.errors import DataError

RECORDS = 7  # a file; the real ones have 10,000
REAL_TEST_SHA1 = "67eb016db431130d61cd03c7ad570b013799c88c"  # of test_batch.bin
NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


@pytest.fixture(autouse=True)
def small_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "data_root" not in request.fixturenames:
        monkeypatch.setattr(cifar10, "RECORDS", RECORDS)


def records(part: int) -> np.ndarray:
    rng = np.random.default_rng(part)
    out = rng.integers(0, 256, (RECORDS, 3073), dtype=np.uint8)
    out[:, 0] %= 10
    return out


def python2_pickle(rows: np.ndarray) -> bytes:
    """A batch as Python 2's cPickle wrote the official ones: protocol 2, 8-bit strings, numpy.core."""

    def text(s: bytes) -> bytes:
        return b"U" + bytes((len(s),)) + s if len(s) < 256 else b"T" + struct.pack("<i", len(s)) + s

    def whole(n: int) -> bytes:
        return b"K" + bytes((n,)) if n < 256 else b"M" + struct.pack("<H", n)

    labels = b"](" + b"".join(whole(int(n)) for n in rows[:, 0]) + b"e"
    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R"
        + b"(K\x03"
        + text(b"|")
        + b"NNN"
        + b"J\xff\xff\xff\xff" * 2
    )
    dtype += b"K\x00tb"
    shape = whole(len(rows)) + whole(3072) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + shape + dtype + b"\x89" + text(rows[:, 1:].tobytes()) + b"tb"
    names = b"](" + b"".join(text(b"photo_%d.png" % i) for i in range(len(rows))) + b"e"
    return (
        b"\x80\x02}("
        + (text(b"batch_label") + text(b"training batch 1 of 5"))
        + (text(b"labels") + labels)
        + (text(b"data") + array)
        + (text(b"filenames") + names)
        + b"u."
    )


def write(root: Path, layout: str) -> Path:
    """All six files in one of the layouts; returns the folder they lie in."""
    folder = root / ("cifar-10-batches-py" if layout == "python" else "cifar-10-batches-bin")
    folder.mkdir(parents=True, exist_ok=True)
    for part, name in enumerate(NAMES):
        if layout == "python":
            (folder / name).write_bytes(python2_pickle(records(part)))
        elif layout == "binary":
            (folder / f"{name}.bin").write_bytes(records(part).tobytes())
        else:
            (folder / f"{name}.bin.xz").write_bytes(lzma.compress(records(part).tobytes()))
    return folder


def expected(split: str) -> tuple[np.ndarray, np.ndarray]:
    rows = np.concatenate([records(p) for p in range(5)]) if split == "train" else records(5)
    images = np.empty((len(rows), 32, 32, 3), np.uint8)
    for i, row in enumerate(rows):
        for channel in range(3):
            images[i, :, :, channel] = row[1 + 1024 * channel : 1 + 1024 * (channel + 1)].reshape(32, 32)
    return images, rows[:, 0].astype(np.int64)


@pytest.mark.parametrize("layout", ["binary", "xz", "python"])
@pytest.mark.parametrize("inside", [False, True], ids=["root-above", "root-inside"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_all_layouts_give_the_same_arrays(tmp_path: Path, layout: str, inside: bool, split: str) -> None:
    folder = write(tmp_path, layout)
    data = load_data("cifar10", split, folder if inside else tmp_path)
    images, labels = expected(split)
    assert np.array_equal(data.read(range(len(data))), images) and np.array_equal(data.labels, labels)
    assert data.labels.dtype == np.int64 and data.shape == (32, 32, 3) and data.num_classes == 10
    assert data.mean == (125.3 / 255, 123.0 / 255, 113.9 / 255) and data.std == (
        63.0 / 255,
        62.1 / 255,
        66.7 / 255,
    )


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batches_pickled_by_python_3_are_read_too(tmp_path: Path, protocol: int) -> None:
    folder = write(tmp_path, "python")
    rows = records(5)
    batch = {"labels": rows[:, 0].tolist(), "data": rows[:, 1:].copy()}
    content = pickle.dumps(batch, protocol)
    if protocol == 2:  # bytes go through _codecs.encode there, which the official files do not need
        (folder / "test_batch").write_bytes(content)
        with pytest.raises(DataError, match=r"it asks for _codecs\.encode, which no CIFAR-10 batch does"):
            load_data("cifar10", "test", tmp_path)
        return
    (folder / "test_batch").write_bytes(content)
    assert np.array_equal(load_data("cifar10", "test", tmp_path).labels, rows[:, 0])


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("owned",)


def test_a_pickle_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path, "python")
    (folder / "test_batch").write_bytes(pickle.dumps({"data": Evil(), "labels": []}, 2))
    with pytest.raises(DataError, match=r"cannot be unpickled \(it asks for posix\.mkdir|nt\.mkdir"):
        load_data("cifar10", "test", tmp_path)
    assert not (tmp_path / "owned").exists()


PICKLES: list[tuple[object, str]] = [
    ([1, 2], "holds a list, not a dict"),
    ({"labels": [1]}, "has no 'data' array and 'labels' list"),
    (
        {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]},
        "holds 6144 pixel bytes of shape (2, 3072) and 2 labels",
    ),
    (
        {"data": np.zeros((RECORDS, 3072), np.float32), "labels": [0] * RECORDS},
        "an array that is not C-ordered uint8",
    ),
    (
        {"data": np.zeros((RECORDS, 3072), np.uint8), "labels": ["x"] * RECORDS},
        "has labels that are not 0..9",
    ),
    (
        {"data": np.zeros((RECORDS, 3072), np.uint8), "labels": [11] * RECORDS},
        "record 0 has label 11, must be 0..9",
    ),
]


@pytest.mark.parametrize("content, message", PICKLES, ids=[m[:30] for _, m in PICKLES])
def test_a_pickle_of_something_else(tmp_path: Path, content: object, message: str) -> None:
    folder = write(tmp_path, "python")
    (folder / "test_batch").write_bytes(pickle.dumps(content, 4))
    with pytest.raises(DataError) as caught:
        load_data("cifar10", "test", tmp_path)
    assert message in str(caught.value) and str(folder / "test_batch") in str(caught.value)


@pytest.mark.parametrize("cut", [0, 1, 2, 40, 100, 3000, -1])
def test_a_truncated_pickle(tmp_path: Path, cut: int) -> None:
    folder = write(tmp_path, "python")
    (folder / "test_batch").write_bytes(python2_pickle(records(5))[:cut])
    with pytest.raises(DataError, match="test_batch cannot be unpickled"):
        load_data("cifar10", "test", tmp_path)


SIZE = RECORDS * 3073


@pytest.mark.parametrize("size", [0, 1, SIZE - 3073, SIZE - 1, SIZE + 1])
def test_a_binary_file_of_the_wrong_length(tmp_path: Path, size: int) -> None:
    folder = write(tmp_path, "binary")
    (folder / "data_batch_3.bin").write_bytes(bytes(size))
    with pytest.raises(DataError) as caught:
        load_data("cifar10", "train", tmp_path)
    assert f"data_batch_3.bin holds {size} bytes, expected {SIZE} ({RECORDS} records of 3073)" in str(caught.value)


def test_a_label_out_of_range(tmp_path: Path) -> None:
    folder = write(tmp_path, "binary")
    rows = records(5)
    rows[4, 0] = 10
    (folder / "test_batch.bin").write_bytes(rows.tobytes())
    with pytest.raises(DataError, match=r"test_batch\.bin: record 4 has label 10, must be 0\.\.9"):
        load_data("cifar10", "test", tmp_path)


def test_damaged_xz(tmp_path: Path) -> None:
    folder = write(tmp_path, "xz")
    path = folder / "test_batch.bin.xz"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    cases = {
        whole[: len(whole) // 2]: "is damaged (the compressed data end after",
        b"": "is damaged (the compressed data end after 0 of",
        b"no xz at all" * 9: "is damaged (Input format not supported",
        bytes(flipped): "is damaged (Corrupt input data",
        lzma.compress(bytes(SIZE - 5)): f"holds {SIZE - 5} bytes, expected {SIZE}",
        lzma.compress(bytes(50 * SIZE)): f"holds more than {SIZE} bytes, expected {SIZE}",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_data("cifar10", "test", tmp_path)
        assert message in str(caught.value) and "get it again" in str(caught.value)
    assert not cache_folder().exists()  # nothing wrong is ever stored


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"has no CIFAR-10 data_batch_1; expected data_batch_1\.\.5\.bin and test_batch"
    ):
        load_data("cifar10", "train", tmp_path)
    (write(tmp_path, "binary") / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match="has no CIFAR-10 data_batch_4"):
        load_data("cifar10", "train", tmp_path)
    load_data("cifar10", "test", tmp_path)


@pytest.mark.thorough
def test_real_test_images(data_root: Path) -> None:
    if cifar10.find(data_root, "test")[1]:
        pytest.skip(f"no CIFAR-10 in {data_root}")
    data = load_data("cifar10", "test", data_root)
    assert len(data) == 10_000 and np.bincount(data.labels).tolist() == [1000] * 10
    planes = data.read(range(10_000)).transpose(0, 3, 1, 2).reshape(10_000, 3072)
    original = np.concatenate([data.labels.astype(np.uint8)[:, None], planes], axis=1)
    assert hashlib.sha1(original.tobytes()).hexdigest() == REAL_TEST_SHA1


@pytest.mark.slow
def test_real_training_images(data_root: Path) -> None:
    if cifar10.find(data_root, "train")[1]:
        pytest.skip(f"no CIFAR-10 in {data_root}")
    data = load_data("cifar10", "train", data_root)
    assert len(data) == 50_000 and np.bincount(data.labels).tolist() == [5000] * 10
    pixels = data.read(range(50_000)).reshape(-1, 3)
    assert np.abs(pixels.mean(axis=0) / 255 - data.mean).max() < 3e-4  # the reference rounds to 1/2550
    assert np.abs(pixels.std(axis=0) / 255 - data.std).max() < 3e-4
