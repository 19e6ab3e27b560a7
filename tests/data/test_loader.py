"""`batches`: the determinism contract (start, rank, prefetch), normalization, clean ends, refusals."""

import gc
import hashlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from anyprec.data import ArrayData, Augment, FileData, batches, draws, load_data, steps_per_epoch
from anyprec.errors import DataError


def make(n: int = 53, shape: tuple[int, int, int] = (8, 8, 3), name: str = "made") -> ArrayData:
    rng = np.random.default_rng(n)
    channels = shape[2]
    return ArrayData(
        rng.integers(0, 256, (n, *shape), dtype=np.uint8),
        np.arange(n) % 5,
        tuple("abcde"),
        (0.4, 0.5, 0.6)[:channels],
        (0.2, 0.25, 0.3)[:channels],
        name,
    )


DATA = make()
GOLDEN_LABELS = [3, 1, 8, 2, 8, 4, 9, 9]
GOLDEN_IMAGES = "455c0bbf1d772530"  # start of the SHA-256


def run(data: ArrayData | FileData = DATA, batch_size: int = 12, **options: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(batches(data, batch_size, **({"train": True, "augment": "crop-flip", "seed": 3, "epoch": 2} | options)))


def same(one: list[tuple[np.ndarray, np.ndarray]], other: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, c) and np.array_equal(b, d) for (a, b), (c, d) in zip(one, other, strict=True)
    )


def test_testing_gives_all_images_in_order_normalized() -> None:
    out = list(batches(DATA, 12))
    assert [len(x) for x, _ in out] == [12, 12, 12, 12, 5]
    images, labels = np.concatenate([x for x, _ in out]), np.concatenate([y for _, y in out])
    expected = (DATA.images / 255.0 - np.array(DATA.mean)) / np.array(DATA.std)
    assert np.abs(images - expected).max() < 1e-6
    assert np.array_equal(labels, DATA.labels)
    for x, y in out:
        assert x.dtype == np.float32 and x.flags.c_contiguous and x.flags.writeable and y.dtype == np.int64
        assert np.isfinite(x).all()


def test_training_shuffles_drops_the_rest_and_keeps_images_and_labels_together() -> None:
    data = make(53, (1, 1, 1))
    data.images[:, 0, 0, 0] = np.arange(53)  # the pixel says which image it is
    out = list(batches(data, 12, train=True, seed=1))
    assert [len(x) for x, _ in out] == [12] * 4
    pixels = np.concatenate([x for x, _ in out])[:, 0, 0, 0]
    which = np.rint((pixels * data.std[0] + data.mean[0]) * 255).astype(int)
    assert len(set(which)) == 48 and which.tolist() != sorted(which)
    assert np.array_equal(np.concatenate([y for _, y in out]), data.labels[which])
    assert len(list(batches(data, 12, train=True, drop_last=False))) == 5
    assert len(list(batches(data, 12, train=False, drop_last=True))) == 4


def test_seed_and_epoch_change_the_batches_and_nothing_else_does() -> None:
    assert same(run(), run())
    assert not same(run(), run(epoch=3)) and not same(run(), run(seed=4))
    assert same(run(train=False, seed=1), run(train=False, seed=2, epoch=9))


@settings(max_examples=40)
@given(
    st.integers(1, 53),
    st.integers(0, 60),
    st.booleans(),
    st.sampled_from(["none", "crop", "crop-flip", "svhn"]),
)
def test_start_resumes_bit_identically(batch_size: int, start: int, drop_last: bool, augment: str) -> None:
    options = {"drop_last": drop_last, "augment": augment, "prefetch": 0}
    whole = run(batch_size=batch_size, **options)
    start = min(start, len(whole))
    assert same(run(batch_size=batch_size, start=start, **options), whole[start:])


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.booleans(), st.booleans())
def test_ranks_share_the_batch_of_one_process(world: int, drop_last: bool, train: bool) -> None:
    options = {"drop_last": drop_last, "train": train, "prefetch": 0}
    whole = run(**options)
    ranks = [run(rank=rank, world=world, **options) for rank in range(world)]
    for rank, mine in enumerate(ranks):
        assert same(mine, [(x[rank::world], y[rank::world]) for x, y in whole])


def test_a_rank_may_get_an_empty_last_batch_of_the_right_shape() -> None:
    data = make(13)
    last_x, last_y = run(data, 12, rank=1, world=2, drop_last=False, augment="svhn")[-1]
    assert last_x.shape == (0, 40, 40, 3) and last_y.shape == (0,) and last_x.dtype == np.float32


def test_crops_depend_on_the_position_not_on_the_batch_size() -> None:
    fine, coarse = run(batch_size=4), run(batch_size=16)
    assert np.array_equal(np.concatenate([x for x, _ in fine])[:48], np.concatenate([x for x, _ in coarse]))


@pytest.mark.parametrize("prefetch", [1, 2, 7, 1000])
def test_prefetch_changes_nothing(prefetch: int) -> None:
    assert same(run(prefetch=prefetch), run(prefetch=0))


def test_alternating_flips_mirror_every_image_in_every_second_epoch() -> None:
    data = make(40, (8, 8, 3))
    how = Augment("turning", pad=2, fill="reflect", flip=True, turns=True)
    flips: list[dict[int, bool]] = []
    for epoch in range(3):
        order = draws.shuffle(40, 7, epoch)
        found = {}
        ((images, _),) = batches(data, 40, augment=how, train=True, seed=7, epoch=epoch, prefetch=0)
        plain = replace(how, name="plain", flip=False, turns=False)
        ((straight, _),) = batches(data, 40, augment=plain, train=True, seed=7, epoch=epoch, prefetch=0)
        for row, image, one in zip(order, images, straight, strict=True):
            assert np.array_equal(image, one) or np.array_equal(image, one[:, ::-1])
            found[int(row)] = not np.array_equal(image, one)
        flips.append(found)
    assert flips[0] == flips[2] == {row: not flipped for row, flipped in flips[1].items()}
    assert 8 < sum(flips[0].values()) < 32  # about half of them


def test_golden_batch_of_digits_never_changes() -> None:
    """Training on the embedded set is repeatable across releases: pixels, order and crops."""
    images, labels = next(batches(load_data("digits", "train"), 32, augment="crop", train=True, seed=1, epoch=1))
    assert labels[:8].tolist() == GOLDEN_LABELS
    assert hashlib.sha256(images.tobytes()).hexdigest()[:16] == GOLDEN_IMAGES


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "anyprec-batches"]


def test_the_thread_ends_with_the_iterator() -> None:
    for _ in batches(DATA, 12):
        pass
    assert not threads()
    closed = batches(DATA, 2, prefetch=1)
    next(closed)
    assert len(threads()) == 1  # 25 batches are still to come
    closed.close()
    assert not threads()
    abandoned = batches(DATA, 2, prefetch=3)
    next(abandoned)
    del abandoned
    gc.collect()
    assert not threads()
    batches(DATA, 2)  # never asked for a batch: nothing to end
    assert not threads()


def test_no_more_than_prefetch_batches_are_prepared_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = ArrayData.read
    ahead = threading.Semaphore(0)

    def counted(self: ArrayData, indices: Any) -> Any:
        reads.append(1)
        ahead.release()
        return read(self, indices)

    monkeypatch.setattr(ArrayData, "read", counted)
    it = batches(DATA, 2, prefetch=3)
    next(it)
    for _ in range(4):  # the one taken, and three ahead
        assert ahead.acquire(timeout=5)
    assert not ahead.acquire(timeout=0.1) and len(reads) == 4
    it.close()
    assert len(reads) == 4


def photographs(root: Path, n: int = 6, broken: int | None = None) -> FileData:
    rng = np.random.default_rng(0)
    for i in range(n):
        Image.fromarray(rng.integers(0, 256, (40 + i, 60 - i, 3), dtype=np.uint8)).save(root / f"{i}.png")
    if broken is not None:
        (root / f"{broken}.png").write_bytes(b"broken")
    return FileData(root, [f"{i}.png" for i in range(n)], np.arange(n) % 2, ("a", "b"), size=16)


def test_files_keep_the_same_contract(tmp_path: Path) -> None:
    data = photographs(tmp_path)
    for augment, side in (("imagenet", 224), ("crop-flip", 16), ("svhn", 40), ("none", 16)):
        whole = run(data, 4, augment=augment, drop_last=False)
        assert [x.shape for x, _ in whole] == [(4, side, side, 3), (2, side, side, 3)]
        assert all(x.flags.c_contiguous and np.isfinite(x).all() for x, _ in whole)
        assert same(run(data, 4, augment=augment, drop_last=False, start=1, prefetch=0), whole[1:])
        half = run(data, 4, augment=augment, drop_last=False, rank=1, world=2)
        assert same(half, [(x[1::2], y[1::2]) for x, y in whole])
    assert not same(run(data, 4, augment="imagenet"), run(data, 4, augment="imagenet", epoch=5))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_reaches_the_consumer_after_the_good_batches(tmp_path: Path, prefetch: int) -> None:
    it = batches(photographs(tmp_path, broken=5), 2, prefetch=prefetch)
    next(it), next(it)
    with pytest.raises(DataError, match=r"5\.png is no image that can be decoded"):
        next(it)
    assert not threads()


@pytest.mark.parametrize(
    "n, batch_size, drop_last, steps",
    [(100, 32, True, 3), (100, 32, False, 4), (96, 32, False, 3), (5, 8, False, 1)],
)
def test_steps_per_epoch(n: int, batch_size: int, drop_last: bool, steps: int) -> None:
    assert steps_per_epoch(make(n), batch_size, drop_last) == steps


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size=0 is not allowed; give a whole number, 1 or more"),
    ({"batch_size": 2.5}, "batch_size=2.5 is not allowed"),
    ({"batch_size": True}, "batch_size=True is not allowed"),
    (
        {"batch_size": 54},
        "batch_size=54 is more than the 53 images of made, and incomplete batches are dropped",
    ),
    ({"world": 5}, "batch_size=12 cannot be shared by 5 processes; choose a multiple of 5"),
    ({"world": 0}, "world=0 is not allowed; give a whole number, 1 or more"),
    ({"world": 2, "rank": 2}, "rank=2 is not allowed; give a whole number, 0..1"),
    ({"rank": -1}, "rank=-1 is not allowed"),
    ({"seed": -1}, "seed=-1 is not allowed; give a whole number, 0..18446744073709551615"),
    ({"epoch": "1"}, "epoch='1' is not allowed"),
    ({"start": 5}, "start=5 is not allowed; give a whole number, 0..4"),
    ({"prefetch": -1}, "prefetch=-1 is not allowed; give a whole number, 0 or more"),
    ({"augment": "flip"}, "augment='flip' is not known; choose one of none, crop,"),
    (
        {"augment": "imagenet"},
        "augment='imagenet' cuts photographs of any size, but made holds arrays; choose none,",
    ),
    ({"data": [1, 2]}, "data is a list, must be ArrayData, FileData or MaskData; see load_data()"),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=[m[:32] for _, m in REFUSED])
def test_refuses_at_once_and_says_what_is_allowed(options: dict[str, Any], message: str) -> None:
    options = {"data": DATA, "batch_size": 12, "train": True} | options
    with pytest.raises(DataError) as caught:
        batches(options.pop("data"), options.pop("batch_size"), **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)
