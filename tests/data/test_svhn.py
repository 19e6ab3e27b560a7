"""SVHN's .mat files: labels, layout, train + extra, and every way they can be wrong."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from anyprec.data import load_data
from anyprec.errors import DataError, MissingExtra

scipy_io = pytest.importorskip("scipy.io")


def images(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)


def write(path: Path, pixels: np.ndarray, labels: list[int], compress: bool = True) -> None:
    content = {"X": pixels.transpose(1, 2, 3, 0), "y": np.array(labels, np.uint8)[:, None]}
    scipy_io.savemat(path, content, do_compression=compress)


def test_train_and_extra_are_one_set_and_ten_is_zero(tmp_path: Path) -> None:
    train, extra = images(4, 0), images(3, 1)
    write(tmp_path / "train_32x32.mat", train, [10, 1, 2, 9])
    write(tmp_path / "extra_32x32.mat", extra, [5, 10, 3], compress=False)
    data = load_data("svhn", "train", tmp_path)
    assert np.array_equal(data.read(range(7)), np.concatenate([train, extra]))
    assert data.labels.tolist() == [0, 1, 2, 9, 5, 0, 3]
    assert data.mean == data.std == (0.5, 0.5, 0.5) and data.num_classes == 10


def test_without_extra_it_warns_and_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "train_32x32.mat", images(2, 0), [1, 2])
    with pytest.warns(UserWarning, match=r"no extra_32x32\.mat: training only on the 73,257 images"):
        assert len(load_data("svhn", "train", tmp_path)) == 2


def test_test_split(tmp_path: Path) -> None:
    write(tmp_path / "test_32x32.mat", images(1, 3), [7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load_data("svhn", "test", tmp_path)
    assert np.array_equal(data.read([0]), images(1, 3)) and data.labels.tolist() == [7]


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no test_32x32\.mat; expected train_32x32\.mat, extra_32x32\.mat"):
        load_data("svhn", "test", tmp_path)
    with pytest.raises(DataError, match=r"has no train_32x32\.mat"):
        load_data("svhn", "train", tmp_path)


def test_wrong_content(tmp_path: Path) -> None:
    path = tmp_path / "test_32x32.mat"
    good = images(4, 0).transpose(1, 2, 3, 0)
    y = np.array([[1], [2], [3], [4]], np.uint8)
    cases: list[tuple[dict[str, np.ndarray], str]] = [
        ({"X": good, "y": y + 7}, "has labels 8..11, must be 1..10"),
        ({"X": good, "y": y - 1}, "has labels 0..3, must be 1..10"),
        ({"X": good, "y": y[:3]}, "expected X (32, 32, 3, N) and y (N, 1): not an SVHN cropped-digits file"),
        ({"X": good[:28], "y": y}, "expected X (32, 32, 3, N)"),
        ({"digits": good}, "expected X (32, 32, 3, N)"),
        ({}, "has nothing, expected X (32, 32, 3, N)"),
        ({"X": good / 255, "y": y}, "has pixels of float64"),
    ]
    for content, message in cases:
        scipy_io.savemat(path, content)
        with pytest.raises(DataError) as caught:
            load_data("svhn", "test", tmp_path)
        assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.99])
def test_truncated_files(tmp_path: Path, share: float) -> None:
    path = tmp_path / "test_32x32.mat"
    write(path, images(4, 0), [1, 2, 3, 4])
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match=r"test_32x32\.mat .*get it again|not an SVHN"):
        load_data("svhn", "test", tmp_path)


def test_without_scipy_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "test_32x32.mat", images(1, 3), [7])
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(MissingExtra, match="pip install scipy"):
        load_data("svhn", "test", tmp_path)
