"""MNIST-style idx files, plain or gzipped: Fashion-MNIST (H. Xiao, K. Rasul, R. Vollgraf, 2017; MIT license).

A file is two zero bytes, a type byte (8 = uint8), the number of axes, each axis as a big-endian uint32, then
the values. `read_idx` gives that as an array. Called by `catalog`.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from anyprec.data.download import RemoteFile, locate
from anyprec.data.sets import ArrayData
from anyprec.errors import DataError

CLASSES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
MEAN, STD = (0.2860,), (0.3530,)  # of x/255 over the 60,000 training images
PLACES = (".", "fashion-mnist", "FashionMNIST/raw")
LAYOUT = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, "
    "plain or .gz, in the folder or its fashion-mnist or FashionMNIST/raw"
)
_BASE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
REMOTE = {
    "train-images-idx3-ubyte": ("md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
    "train-labels-idx1-ubyte": ("md5:25c81989df183df01b3e8a0aad5dffbe", 29_515),
    "t10k-images-idx3-ubyte": ("md5:bef4ecab320f06d8554ea6380940ec79", 4_422_102),
    "t10k-labels-idx1-ubyte": ("md5:bb300cfdad3c16e7a12a480ee83cd310", 5_148),
}


def read_fashion(root: Path, split: str) -> ArrayData:
    files, missing = find(root, split)
    if missing:
        raise DataError(f"{root} has no {missing[0]}; expected {LAYOUT}; or download it with download=True")
    images, labels = read_idx(files[0], axes=3), read_idx(files[1], axes=1)
    if len(images) != len(labels):
        raise DataError(f"{files[0]} has {len(images)} images but {files[1]} {len(labels)} labels; get both again")
    return ArrayData(images[..., None], labels.astype(np.int64), CLASSES, MEAN, STD, "fashion-mnist")


def find(root: Path, split: str) -> tuple[list[Path], list[str]]:
    """The images file and the labels file of a split, and the names of those that are missing."""
    stem = "train" if split == "train" else "t10k"
    names = (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")
    return locate({n: [root / folder / (n + end) for folder in PLACES for end in ("", ".gz")] for n in names})


def archives(root: Path, split: str) -> list[RemoteFile]:
    return [RemoteFile(f"{_BASE}{name}.gz", *REMOTE[name]) for name in find(root, split)[1]]


def read_idx(path: Path, axes: int) -> npt.NDArray[np.uint8]:
    """The uint8 array of an idx file, which must have so many axes."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}); get it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    head = 4 + 4 * axes
    if len(content) < head or content[:4] != bytes((0, 0, 8, axes)):
        raise DataError(
            f"{path} starts with {content[:4].hex(' ') or 'nothing'}, expected 00 00 08 {axes:02x}: not an "
            f"idx file of uint8 with {axes} axes; get it again"
        )
    shape = struct.unpack(f">{axes}I", content[4:head])
    expected = head + math.prod(shape)
    if len(content) != expected:
        raise DataError(f"{path} holds {len(content)} bytes, expected {expected} for shape {shape}; get it again")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape).copy()
