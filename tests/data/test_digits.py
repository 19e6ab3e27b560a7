"""The embedded digits: the split and the pixels are the same for ever."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from anyprec.data import ArrayData, digits, load_data
from anyprec.errors import DataError

GOLDEN = {"train": "4754e561efdf720b", "test": "dfc0d42b9f070973"}  # start of the SHA-256


def test_counts_shapes_and_statistics() -> None:
    train, test = load_data("digits", "train"), load_data("digits", "test")
    assert isinstance(train, ArrayData) and isinstance(test, ArrayData)
    assert (len(train), len(test), train.shape, train.num_classes) == (1397, 400, (8, 8, 1), 10)
    assert np.bincount(test.labels).tolist() == [40] * 10
    assert np.bincount(train.labels).min() == 134  # the 8s
    assert set(np.unique(train.images)) == {(255 * v + 8) // 16 for v in range(17)}
    assert abs((train.images / 255).mean() - train.mean[0]) < 1e-4
    assert abs((train.images / 255).std() - train.std[0]) < 1e-4


def test_no_image_is_in_both_splits() -> None:
    train, test = load_data("digits", "train"), load_data("digits", "test")
    seen = {image.tobytes() for image in train.read(range(len(train)))}
    assert not any(image.tobytes() in seen for image in test.read(range(len(test))))


def test_the_file_never_changes() -> None:
    assert digits.FILE.stat().st_size < 100_000
    for split, start in GOLDEN.items():
        data = load_data("digits", split)
        content = data.read(range(len(data))).tobytes() + data.labels.astype("<i8").tobytes()
        assert hashlib.sha256(content).hexdigest()[:16] == start


def test_the_held_out_are_drawn_as_stated() -> None:
    with np.load(digits.FILE, allow_pickle=False) as stored:
        labels, test = stored["labels"], stored["test"]
    words = np.random.Philox(key=np.zeros(2, np.uint64), counter=0).random_raw(len(labels))
    of_class = [np.flatnonzero(labels == digit) for digit in range(10)]
    drawn = np.concatenate([rows[np.argsort(words[rows])[:40]] for rows in of_class])
    assert np.array_equal(np.sort(drawn), test)


def test_they_are_the_ones_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is no dependency")
    source = datasets.load_digits()
    with np.load(digits.FILE, allow_pickle=False) as stored:
        assert np.array_equal(stored["images"], source.images) and np.array_equal(stored["labels"], source.target)


def test_a_damaged_file_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"", b"no zip", digits.FILE.read_bytes()[:20_000]):
        broken = tmp_path / "digits.npz"
        broken.write_bytes(content)
        monkeypatch.setattr(digits, "FILE", broken)
        with pytest.raises(DataError, match=r"digits\.npz cannot be read .* reinstall anyprec"):
            load_data("digits", "train")
