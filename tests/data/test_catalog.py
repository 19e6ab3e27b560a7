"""`load_data`: names, splits, limits, downloads into the folder, and the errors of a mistyped call."""

import gzip
import hashlib
import io
import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyprec.data import AUGMENTS, DATASETS, ArrayData, FileData, catalog, cifar10, idx, load_data
from anyprec.data.catalog import hold_out
from anyprec.data.download import RemoteFile
from anyprec.errors import DataError


def test_the_catalog_is_complete() -> None:
    assert set(DATASETS) >= {"digits", "cifar10", "svhn", "imagenet", "folder", "fashion-mnist"}
    for name, spec in DATASETS.items():
        assert spec.name == name and spec.augment in AUGMENTS and spec.about


def test_importing_needs_numpy_alone() -> None:
    heavy = ("torch", "PIL", "scipy", "sklearn")
    program = f"import sys, anyprec.data; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"name": "cifar"}, "data set 'cifar' is not known; choose one of digits, cifar10,"),
    ({"name": "cifar"}, "did you mean cifar10?"),
    ({"split": "val"}, "split='val' is not known; choose train or test"),
    (
        {"name": "cifar10"},
        "cifar10 needs a folder: give root (on the command line: --data) with data_batch_1..5.bin",
    ),
    ({"name": "cifar10", "root": "no/such"}, "there is no folder no/such; cifar10 needs one with"),
    ({"name": "cifar10", "root": "no/such"}, "or download it with download=True"),
    (
        {"name": "imagenet", "root": "x", "download": True},
        "imagenet cannot be downloaded for you; get it yourself",
    ),
    ({"name": "folder", "root": "x", "download": True}, "folder cannot be downloaded for you"),
    ({"limit": 0}, "limit=0 is not allowed; digits has 1397 train images: give 1..1397"),
    ({"limit": 1398}, "limit=1398 is not allowed"),
    ({"limit": 2.0}, "limit=2.0 is not allowed"),
    ({"limit": True}, "limit=True is not allowed"),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=[m[:32] for _, m in REFUSED])
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_data(**({"name": "digits", "split": "train"} | options))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_limit_is_balanced_fixed_and_nested() -> None:
    small, large = load_data("digits", "train", limit=25), load_data("digits", "train", limit=100)
    assert isinstance(small, ArrayData) and isinstance(large, ArrayData)
    assert set(np.bincount(small.labels, minlength=10)) == {2, 3} and np.bincount(large.labels).tolist() == [10] * 10
    assert np.array_equal(small.images, large.images[:25]) and np.array_equal(small.labels, large.labels[:25])
    whole = load_data("digits", "train", limit=1397)
    assert sorted(whole.labels) == sorted(load_data("digits", "train").labels)


def test_images_held_out_are_fixed_and_of_every_class() -> None:
    whole = load_data("digits", "train")
    rest, held_out = hold_out(whole, 100)
    assert len(rest) == len(whole) - 100 and len(held_out) == 100
    share = 100 * np.bincount(whole.labels) / len(whole)
    assert (abs(np.bincount(held_out.labels) - share) <= 1).all()

    def key(data: Any) -> set[bytes]:
        return {image.tobytes() for image in data.images}

    assert not key(held_out) & key(rest) and key(held_out) | key(rest) == key(whole)
    assert np.array_equal(hold_out(whole, 100)[1].images, held_out.images)
    for count in (0, len(whole)):
        with pytest.raises(DataError, match=f"validation={count} is not allowed; .* give 1..{len(whole) - 1}"):
            hold_out(whole, count)


def test_limit_of_files(tmp_path: Path) -> None:
    from PIL import Image

    for i in range(8):
        folder = tmp_path / "train" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(folder / f"{i}.png")
    data = load_data("folder", "train", str(tmp_path), limit=4)
    assert isinstance(data, FileData) and len(data) == 4 and np.bincount(data.labels).tolist() == [2, 2]
    assert (data.read(range(4))[:, 0, 0, 0] % 2 == data.labels).all()


def test_digits_ignore_root_and_download() -> None:
    assert len(load_data("digits", "test", "/no/such/folder", download=True)) == 400


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=f"there is no folder {tmp_path}/data;"):
        load_data("cifar10", "train", "~/data")


class Fetched:
    """Stands in for `fetch`: writes the content it was given for a name, and notes what was asked."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents, self.asked = contents, []  # type: ignore[var-annotated]

    def __call__(self, url: str, path: Path, *, checksum: str, size: int) -> Path:
        self.asked.append((url, checksum, size))
        if not path.exists():
            path.write_bytes(self.contents[path.name])
        return path


def cifar_archive() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = 2 * 3073
            tar.addfile(member, io.BytesIO(bytes(2 * 3073)))
    return out.getvalue()


def test_download_of_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = Fetched({"cifar-10-binary.tar.gz": cifar_archive()})
    monkeypatch.setattr(catalog, "fetch", fetched)
    monkeypatch.setattr(cifar10, "RECORDS", 2)
    for _ in range(2):
        assert len(load_data("cifar10", "train", tmp_path / "new", download=True)) == 10
    assert len(load_data("cifar10", "test", tmp_path / "new", download=True)) == 2
    assert fetched.asked == [
        (
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            170_052_171,
        )
    ]
    assert sorted(os.listdir(tmp_path / "new")) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]


def test_a_python_archive_already_there_is_used(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    [archive] = cifar10.archives(tmp_path, "train")
    assert archive == RemoteFile(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "md5:c58f30108f718f92721af3b95e74349a",
        170_498_071,
    )


def test_download_of_fashion_mnist_gets_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = bytes((0, 0, 8, 3)) + struct.pack(">3I", 2, 28, 28) + bytes(2 * 784)
    labels = bytes((0, 0, 8, 1)) + struct.pack(">I", 2) + bytes((3, 4))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(images)
    fetched = Fetched({"t10k-labels-idx1-ubyte.gz": gzip.compress(labels)})
    monkeypatch.setattr(catalog, "fetch", fetched)
    assert load_data("fashion-mnist", "test", tmp_path, download=True).labels.tolist() == [3, 4]
    assert [url.rsplit("/", 1)[1] for url, _, _ in fetched.asked] == ["t10k-labels-idx1-ubyte.gz"]


def test_download_of_svhn_gets_train_and_extra(tmp_path: Path) -> None:
    spec = DATASETS["svhn"]
    assert spec.archives is not None
    assert [remote.name for remote in spec.archives(tmp_path, "train")] == [
        "train_32x32.mat",
        "extra_32x32.mat",
    ]
    [test] = spec.archives(tmp_path, "test")
    assert test == RemoteFile(
        "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
        "md5:eb5a983be6a315427106f1b164d9cef3",
        64_275_384,
    )


def test_every_published_checksum_is_well_formed(tmp_path: Path) -> None:
    for name in ("cifar10", "svhn", "fashion-mnist"):
        archives = DATASETS[name].archives
        assert archives is not None
        for split in ("train", "test"):
            for remote in archives(tmp_path, split):
                kind, _, digest = remote.checksum.partition(":")
                assert len(digest) == 2 * hashlib.new(kind, usedforsecurity=False).digest_size
    assert len({digest for digest, _ in idx.REMOTE.values()}) == 4
