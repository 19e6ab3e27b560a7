"""CIFAR-10 from `*.bin`, `*.bin.xz` or the pickled python batches; all give the same arrays.

A record is 1 label byte and 3072 pixel bytes, planes R, G, B of 32 x 32; a file has 10,000 records. Source:
A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. Called by `catalog`.
"""

from __future__ import annotations

import lzma
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.data.cache import unpacked
from anyprec.data.download import RemoteFile, locate
from anyprec.data.sets import ArrayData
from anyprec.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)  # as in the paper's reference code
STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)
RECORDS = 10_000  # in a file
RECORD = 1 + 3 * 32 * 32  # bytes

BINARY, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
LAYOUT = (
    f"data_batch_1..5.bin and test_batch.bin (or the same with .bin.xz) in the folder or its {BINARY}, "
    f"or the python batches in {PYTHON}"
)
ARCHIVE = RemoteFile(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
    170_052_171,
)
# The same images in the python layout; `archives` takes it when it already lies in the folder.
PYTHON_ARCHIVE = RemoteFile(
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "md5:c58f30108f718f92721af3b95e74349a",
    170_498_071,
)


def read_cifar10(root: Path, split: str) -> ArrayData:
    files, missing = find(root, split)
    if missing:
        raise DataError(f"{root} has no CIFAR-10 {missing[0]}; expected {LAYOUT}; or download it with download=True")
    images = np.empty((len(files) * RECORDS, 32, 32, 3), np.uint8)
    labels = np.empty(len(files) * RECORDS, np.int64)

    def read(part: int) -> None:
        rows = slice(part * RECORDS, (part + 1) * RECORDS)
        labels[rows], planes = _read_file(files[part])
        images[rows] = planes.reshape(RECORDS, 3, 32, 32).transpose(0, 2, 3, 1)

    # lzma, hashing and the copies run without the GIL, so the five files unpack on as many cores as there
    # are.
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as pool:
        list(pool.map(read, range(len(files))))
    return ArrayData(images, labels, CLASSES, MEAN, STD, "cifar10")


def find(root: Path, split: str) -> tuple[list[Path], list[str]]:
    """The files of a split in the order of their images, and the names of those that are missing."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    binary = [(folder, suffix) for suffix in (".bin", ".bin.xz") for folder in (".", BINARY)]
    places = [*binary, (".", ""), (PYTHON, "")]
    return locate({name: [root / folder / (name + suffix) for folder, suffix in places] for name in names})


def archives(root: Path, split: str) -> list[RemoteFile]:
    """What to download and unpack: the binary archive, unless the python one is there already."""
    return [PYTHON_ARCHIVE if (root / PYTHON_ARCHIVE.name).is_file() else ARCHIVE]


def _read_file(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """-> labels (10000,), planes (10000, 3072), both uint8."""
    try:
        if path.suffix == "":
            labels, planes = _read_python(path)
        else:
            content = unpacked(path, RECORDS * RECORD, _unxz) if path.suffix == ".xz" else path.read_bytes()
            if len(content) != RECORDS * RECORD:
                raise DataError(
                    f"{path} holds {_many(len(content), path)} bytes, expected {RECORDS * RECORD} ({RECORDS} "
                    f"records of {RECORD}); the file is truncated or no CIFAR-10 batch: get it again"
                )
            records = np.frombuffer(content, np.uint8).reshape(RECORDS, RECORD)
            labels, planes = records[:, 0], records[:, 1:]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}); get it again") from error
    if labels.max() > 9:
        bad = int(np.argmax(labels > 9))
        raise DataError(
            f"{path}: record {bad} has label {labels[bad]}, must be 0..9; the file is damaged: get it again"
        )
    return labels, planes


def _unxz(packed: bytes) -> bytes:
    """Unpack at most one byte more than a batch has: enough to see that it is too long."""
    limit = RECORDS * RECORD + 1
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    content = unpacker.decompress(packed, limit)
    while len(content) < limit and not unpacker.eof:
        more = unpacker.decompress(b"", limit - len(content))
        if not more:
            if unpacker.needs_input:
                raise EOFError(f"the compressed data end after {len(content)} of {limit - 1} bytes")
            break
        content += more
    return content


def _many(count: int, path: Path) -> str:
    return f"more than {count - 1}" if path.suffix == ".xz" and count > RECORDS * RECORD else str(count)


def _read_python(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    advice = "expected a batch of cifar-10-python.tar.gz: get it again"
    with open(path, "rb") as file:
        try:
            batch = _Unpickler(file, encoding="bytes").load()
        # A damaged pickle can fail in any opcode: UnpicklingError, EOFError, ValueError, KeyError, IndexError
        # ...
        except Exception as error:
            raise DataError(f"{path} cannot be unpickled ({error}); {advice}") from error
    if not isinstance(batch, dict):
        raise DataError(f"{path} holds a {type(batch).__name__}, not a dict; {advice}")
    batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
    data, labels = batch.get("data"), batch.get("labels")
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise DataError(f"{path} has no 'data' array and 'labels' list; {advice}")
    expected = RECORDS * (RECORD - 1)
    if data.shape != (RECORDS, RECORD - 1) or len(data.content) != expected or len(labels) != RECORDS:
        raise DataError(
            f"{path} holds {len(data.content)} pixel bytes of shape {data.shape} and {len(labels)} labels, "
            f"expected {expected} of shape {(RECORDS, RECORD - 1)} and {RECORDS}; {advice}"
        )
    if not all(type(label) is int and 0 <= label <= 255 for label in labels):
        raise DataError(f"{path} has labels that are not 0..9; {advice}")
    return np.array(labels, np.uint8), np.frombuffer(data.content, np.uint8).reshape(data.shape)


class _Unpickler(pickle.Unpickler):
    """Reads dicts, lists, strings, numbers and byte arrays; calls nothing but the two records below."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _Array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _Array if name == "ndarray" else _Dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 batch does")


class _Array:
    """Stands in for numpy.ndarray: keeps what the pickle says of it; takes C-ordered unsigned bytes only."""

    def __init__(self, *rest: object) -> None:
        self.shape: tuple[int, ...] = ()
        self.content = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Dtype) or dtype.name != "u1" or fortran or not isinstance(content, bytes):
            raise ValueError("an array that is not C-ordered uint8")
        self.shape, self.content = tuple(shape), content


class _Dtype:
    """Stands in for numpy.dtype: keeps its name, 'u1' for the bytes of CIFAR-10."""

    def __init__(self, name: bytes | str, *rest: object) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: nothing that matters for single bytes."""
