"""SVHN, cropped digits: `train_32x32.mat`, `extra_32x32.mat` and `test_32x32.mat`, read with scipy.

A file has `X` (32, 32, 3, N) uint8 and `y` (N, 1), labels 1..10, where 10 is the digit 0. Source: Y. Netzer
et al., "Reading Digits in Natural Images with Unsupervised Feature Learning", 2011. Called by `catalog`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.data.download import RemoteFile, locate
from anyprec.data.sets import ArrayData
from anyprec.errors import DataError, MissingExtra

CLASSES = tuple("0123456789")
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
LAYOUT = "train_32x32.mat, extra_32x32.mat (the paper trains on both) and test_32x32.mat"
_BASE = "http://ufldl.stanford.edu/housenumbers/"
REMOTE = {
    "train_32x32.mat": ("md5:e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794),
    "extra_32x32.mat": ("md5:a93ce644f1a588dc4d68dda5feec44a7", 1_329_278_602),
    "test_32x32.mat": ("md5:eb5a983be6a315427106f1b164d9cef3", 64_275_384),
}


def read_svhn(root: Path, split: str) -> ArrayData:
    """73,257 + 531,131 images to train (1.9 GB in memory, twice that while they are read), 26,032 to test."""
    files, missing = find(root, split)
    if missing and missing != ["extra_32x32.mat"]:
        raise DataError(f"{root} has no {missing[0]}; expected {LAYOUT}; or download it with download=True")
    if missing:
        warnings.warn(
            f"{root} has no extra_32x32.mat: training only on the 73,257 images of train_32x32.mat, where "
            "the paper takes 604,388",
            stacklevel=2,
        )
    sizes = [_count(path) for path in files]  # from the headers, so that the array below is made once, whole
    images = np.empty((sum(sizes), 32, 32, 3), np.uint8)
    labels = np.empty(sum(sizes), np.int64)
    first = 0
    for path, size in zip(files, sizes, strict=True):
        pixels, y = _read_mat(path, size)
        images[first : first + size] = pixels.transpose(3, 0, 1, 2)
        labels[first : first + size] = y % 10  # 10 -> 0
        first += size
    return ArrayData(images, labels, CLASSES, MEAN, STD, "svhn")


def find(root: Path, split: str) -> tuple[list[Path], list[str]]:
    names = ["train_32x32.mat", "extra_32x32.mat"] if split == "train" else ["test_32x32.mat"]
    return locate({name: [root / name] for name in names})


def archives(root: Path, split: str) -> list[RemoteFile]:
    return [RemoteFile(_BASE + name, *REMOTE[name]) for name in find(root, split)[1]]


def _scipy_io() -> Any:
    try:
        import scipy.io
    except ImportError as error:
        raise MissingExtra(
            "reading SVHN's .mat files needs scipy, which is not installed; run: pip install scipy"
        ) from error
    return scipy.io


def _count(path: Path) -> int:
    scipy_io = _scipy_io()
    # scipy fails on damaged files with whatever its parser stumbled over: ValueError, zlib.error, TypeError
    # ...
    try:
        shapes = {name: shape for name, shape, _ in scipy_io.whosmat(path)}
    except Exception as error:
        raise DataError(f"{path} is no readable .mat file ({error}); get it again") from error
    shape = shapes.get("X", ())
    if len(shape) == 3:  # MATLAB drops a last axis of 1
        shape = (*shape, 1)
    if len(shape) != 4 or shape[:3] != (32, 32, 3) or shapes.get("y") != (shape[3], 1):
        raise DataError(
            f"{path} has {', '.join(f'{n} {s}' for n, s in shapes.items()) or 'nothing'}, expected X "
            "(32, 32, 3, N) and y (N, 1): not an SVHN cropped-digits file"
        )
    return int(shape[3])


def _read_mat(path: Path, size: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """-> pixels (32, 32, 3, N) uint8, labels (N,) 1..10."""
    try:
        stored = _scipy_io().loadmat(path, variable_names=["X", "y"])
        pixels, labels = stored["X"].reshape(32, 32, 3, size), stored["y"].reshape(size)
    except Exception as error:  # as in _count
        raise DataError(f"{path} is damaged or truncated ({error}); get it again") from error
    if pixels.dtype != np.uint8 or labels.dtype.kind not in "iu":
        raise DataError(f"{path} has pixels of {pixels.dtype} and labels of {labels.dtype}, must be whole numbers")
    if labels.min() < 1 or labels.max() > 10:
        raise DataError(f"{path} has labels {labels.min()}..{labels.max()}, must be 1..10; get it again")
    return pixels, labels.astype(np.int64)
