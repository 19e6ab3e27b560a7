"""MaskData, its cuts and its batches: the same pixels for the same numbers, masks that stay with their images."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from anyprec.data import AUGMENTS, IGNORED, VOID, ArrayData, Augment, MaskData, MaskSample, batches, steps_per_epoch
from anyprec.data.augment import find_augment
from anyprec.errors import DataError


def png(array: np.ndarray, palette: bool = False) -> bytes:
    image, out = Image.fromarray(array), io.BytesIO()
    if palette:
        image.putpalette(bytes(range(256)) * 3)
    image.save(out, "PNG")
    return out.getvalue()


def sample(height: int, width: int, seed: int = 0, classes: int = 4) -> tuple[MaskSample, np.ndarray, np.ndarray]:
    """An image whose red channel says what its mask has: so a cut of both can be compared."""
    rng = np.random.default_rng(seed)
    mask = np.kron(rng.integers(0, classes, (3, 3)), np.ones((height // 3 + 1, width // 3 + 1)))
    mask = mask[:height, :width].astype(np.uint8)
    image = np.dstack([50 * mask + 10, *rng.integers(0, 256, (2, height, width))]).astype(np.uint8)
    return MaskSample(f"s{seed}", png(image), png(mask, palette=True)), image, mask


# Corners of a tetrahedron: no mixture of three of them is the fourth.
PURE = np.array([(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 250)], np.uint8)


def masks(*sizes: tuple[int, int], **options) -> MaskData:
    return MaskData([sample(*size, seed=i)[0] for i, size in enumerate(sizes)], "abcd", **options)


def test_reads_images_and_masks() -> None:
    one, image, mask = sample(9, 13)
    data = MaskData([one], "abcd")
    assert data.task == "segmentation" and len(data) == 1 and data.shape == (9, 13, 3) and data.num_classes == 4
    for _ in range(2):  # decoded, then kept
        got = data.pair(0)
        assert np.array_equal(got[0], image) and np.array_equal(got[1], mask)
    images, labels = data.read([0, 0])
    assert images.shape == (2, 9, 13, 3) and labels.shape == (2, 9, 13)


def test_labels_that_stand_for_no_class() -> None:
    mask = np.array([[0, 3, 4, 255]], np.uint8)
    one = MaskSample("x", png(np.zeros((1, 4, 3), np.uint8)), png(mask))
    assert MaskData([one], "abcd", void=(4, 255)).pair(0)[1].tolist() == [[0, 3, VOID, VOID]]
    with pytest.raises(DataError, match=r"the mask of x has label 4; allowed are 0\.\.3 and 255 for no class"):
        MaskData([one], "abcd").pair(0)


def test_little_room_means_decoding_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyprec.data.masks.ROOM", 2 * 9 * 9 * 4)
    data = masks((9, 9), (9, 9), (9, 9))
    first = data.read([0, 1, 2])
    assert len(data._kept) == 2
    assert all(np.array_equal(a, b) for a, b in zip(first, data.read([0, 1, 2]), strict=True))


def test_take() -> None:
    data = masks((9, 9), (6, 12), (9, 9))
    part = data.take([2, 1])
    assert [s.name for s in part.samples] == ["s2", "s1"] and part.sizes.tolist() == [[9, 9], [6, 12]]
    with pytest.raises(DataError, match=r"must be a list of numbers 0\.\.2"):
        data.take([3])


PICTURE = np.zeros((6, 6, 3), np.uint8)
BROKEN = [
    (MaskSample("a", png(PICTURE), png(PICTURE)), "a is a picture of mode RGB, not a mask"),
    (MaskSample("a", png(PICTURE), png(np.zeros((6, 5), np.uint8))), "image a is 6 x 6, its mask 5 x 6"),
    (MaskSample("a", b"no", png(np.zeros((6, 6), np.uint8))), "a is no image that can be decoded"),
    (MaskSample("a", png(PICTURE), png(PICTURE)[:40]), "a is no image that can be decoded"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN, ids=[m[:24] for _, m in BROKEN])
def test_broken_files_are_named(broken: MaskSample, message: str) -> None:
    with pytest.raises(DataError) as caught:
        MaskData([broken], "abcd").pair(0)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_arguments() -> None:
    with pytest.raises(DataError, match="no samples given"):
        MaskData([], "ab")
    with pytest.raises(DataError, match="256 classes; masks of bytes can have"):
        MaskData([sample(6, 6)[0]], [str(i) for i in range(256)])
    with pytest.raises(DataError, match="mean has 1 values for 3 channels"):
        MaskData([sample(6, 6)[0]], "ab", mean=(0.5,))


# --- Cuts -----------------------------------------------------------------------------------------------------


def test_a_cut_of_the_same_size_is_the_image() -> None:
    _, image, mask = sample(12, 17)
    how = Augment("same", cut=(12, 17))
    out = how.cut_pair(image, mask, np.array([0.3, 0.9, 0.1, 0.5]), (0, 0, 0))
    assert np.array_equal(out[0], image) and np.array_equal(out[1], mask)


def test_a_larger_cut_is_filled_up() -> None:
    _, image, mask = sample(6, 8)
    how = Augment("wide", cut=(10, 12))
    pixels, labels = how.cut_pair(image, mask, np.array([0.99, 0.0, 0.9, 0.0]), (1, 2, 3))
    assert np.array_equal(labels[4:, :8], mask) and np.array_equal(pixels[4:, :8], image)
    outside = np.ones((10, 12), bool)
    outside[4:, :8] = False
    assert (labels[outside] == VOID).all() and (pixels[outside] == (1, 2, 3)).all()


def test_a_smaller_cut_is_a_part_and_may_be_mirrored() -> None:
    _, image, mask = sample(9, 14)
    how = Augment("part", cut=(4, 5), flip=True)
    pixels, labels = how.cut_pair(image, mask, np.array([0.5, 0.99, 0.2, 0.0]), (0, 0, 0))
    assert np.array_equal(pixels, image[3:7, 9:14][:, ::-1]) and np.array_equal(labels, mask[3:7, 9:14][:, ::-1])


@given(
    size=st.tuples(st.integers(3, 40), st.integers(3, 40)),
    cut=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    draw=st.lists(st.floats(0, 1, exclude_max=True), min_size=4, max_size=4),
)
def test_mask_and_image_stay_together(size: tuple[int, int], cut: tuple[int, int], draw: list[float]) -> None:
    """A pixel that bilinear mixing left pure must have the label of its color, without exception."""
    _, _, mask = sample(*size)
    how = Augment("any", cut=cut, scale=(0.5, 2.0), flip=True)
    pixels, labels = how.cut_pair(PURE[mask], mask, np.array(draw), (0, 0, 0))
    assert pixels.shape == (*cut, 3) and labels.shape == cut
    inside = labels != VOID
    assert inside.any() and set(np.unique(labels[inside])) <= set(np.unique(mask))
    pure = (pixels[..., None, :] == PURE).all(-1)  # (H, W, classes)
    assert not (pure.any(-1) & ~inside).any()
    np.testing.assert_array_equal(pure.argmax(-1)[pure.any(-1)], labels[pure.any(-1)])


def test_most_pixels_of_an_enlarged_image_stay_pure() -> None:
    """Or the test above would compare nothing."""
    _, _, mask = sample(30, 30)
    pixels, labels = Augment("any", cut=(60, 60), scale=(2.0, 2.0)).cut_pair(PURE[mask], mask, np.zeros(4), (0, 0, 0))
    assert (pixels == PURE[labels]).all(-1).mean() > 0.8


def test_names_with_a_size() -> None:
    assert find_augment("voc-321x300").cut == (321, 300) and find_augment("voc-321x300").scale == (0.5, 2.0)
    assert AUGMENTS["voc"].cut == (513, 513)
    for bad in ("crop-3x3", "voc-3", "voc-0x5", "zzz-3x3"):
        with pytest.raises(DataError):
            find_augment(bad)
    with pytest.raises(DataError, match="scale="):
        Augment("bad", cut=(4, 4), scale=(2.0, 1.0))


# --- Batches --------------------------------------------------------------------------------------------------


def collect(data: MaskData, size: int, **options) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(batches(data, size, **options))


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True))


def test_training_batches() -> None:
    data = masks(*[(12, 9), (9, 12), (15, 15), (12, 9), (20, 7)], mean=(0, 0, 0), std=(1 / 255,) * 3)
    how = Augment("cut", cut=(8, 6), scale=(0.5, 1.5), flip=True)
    whole = collect(data, 2, augment=how, train=True, seed=1, epoch=2)
    assert len(whole) == 2 == steps_per_epoch(data, 2, True)
    for images, labels in whole:
        assert images.shape == (2, 8, 6, 3) and images.dtype == np.float32
        assert labels.shape == (2, 8, 6) and labels.dtype == np.int64
        assert set(np.unique(labels)) <= {IGNORED, 0, 1, 2, 3}
    assert same(collect(data, 2, augment=how, train=True, seed=1, epoch=2, start=1, prefetch=0), whole[1:])
    ranks = [collect(data, 2, augment=how, train=True, seed=1, epoch=2, rank=r, world=2) for r in (0, 1)]
    for step, (images, labels) in enumerate(whole):
        for r in (0, 1):
            assert np.array_equal(ranks[r][step][0], images[r : r + 1])
            assert np.array_equal(ranks[r][step][1], labels[r : r + 1])
    assert not same(collect(data, 2, augment=how, train=True, seed=1, epoch=3), whole)


def test_testing_batches_hold_images_of_one_size_unpadded() -> None:
    data = masks((12, 9), (9, 12), (12, 9), (12, 9), (9, 12), (6, 6))
    got = collect(data, 2)
    assert [images.shape[:3] for images, _ in got] == [(1, 6, 6), (2, 9, 12), (2, 12, 9), (1, 12, 9)]
    rows = [5, 1, 4, 0, 2, 3]
    labels = [mask for _, batch in got for mask in batch]
    assert all(np.array_equal(mask, data.pair(row)[1]) for mask, row in zip(labels, rows, strict=True))
    shares = [sum(len(y) for _, y in batches(data, 3, rank=r, world=3)) for r in range(3)]
    assert sum(shares) == 6


def test_what_does_not_go_together() -> None:
    data = masks((12, 9), (9, 12))
    with pytest.raises(DataError, match="augment='crop-flip' does not go with masks; choose none, voc"):
        batches(data, 1, augment="crop-flip")
    plain = ArrayData(np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, int), ("a",), (0, 0, 0), (1, 1, 1))
    with pytest.raises(DataError, match="augment='voc' does not go with data"):
        batches(plain, 1, augment="voc")
    with pytest.raises(DataError, match="cannot share a batch; for training choose an augmentation that crops"):
        collect(data, 2, train=True)


def test_a_turned_photograph_with_a_mask_is_refused(tmp_path: Path) -> None:
    """The mask may lie as the pixels are stored or as they are seen: both have the same size here."""
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.new("RGB", (6, 4)).save(tmp_path / "a.png", exif=exif)
    Image.new("L", (6, 4)).save(tmp_path / "m.png")
    data = MaskData([MaskSample("a", tmp_path / "a.png", tmp_path / "m.png")], ("one", "two"))
    with pytest.raises(DataError, match=r"stored turned .EXIF orientation 3.*store both upright"):
        data.pair(0)
