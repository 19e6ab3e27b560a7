"""VOC 2012 and SBD in their official layouts, made here: which images belong to which set, and whose masks they get."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from anyprec.data import VOID, MaskData, load_data
from anyprec.data.voc import CLASSES
from anyprec.errors import DataError

TRAIN, VAL, SBD_TRAIN, SBD_VAL = ["2007_000032", "2007_000039"], ["2007_000033"], ["2008_000002", "2007_000033"], [
    "2008_000008", "2007_000032",
]  # fmt: skip
SIZE = (6, 9)


def voc_mask(label: int) -> np.ndarray:
    mask = np.full(SIZE, label, np.uint8)
    mask[0] = 255  # the border between objects
    return mask


def make_voc(root: Path) -> Path:
    voc = root / "VOCdevkit" / "VOC2012"
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (voc / folder).mkdir(parents=True)
    for i, name in enumerate([*TRAIN, *VAL, "2008_000002", "2008_000008"]):
        Image.fromarray(np.full((*SIZE, 3), 40 * i, np.uint8)).save(voc / "JPEGImages" / f"{name}.jpg")
        if name in (*TRAIN, *VAL):
            mask = Image.fromarray(voc_mask(i + 1))
            mask.putpalette(bytes(range(256)) * 3)  # VOC's PNGs are palette images
            mask.save(voc / "SegmentationClass" / f"{name}.png")
    for split, names in (("train", TRAIN), ("val", VAL), ("trainval", [*TRAIN, *VAL])):
        (voc / "ImageSets/Segmentation" / f"{split}.txt").write_text("".join(f"{n}\n" for n in names))
    return voc


def make_sbd(root: Path) -> Path:
    sbd = root / "benchmark_RELEASE" / "dataset"
    for folder in ("img", "cls", "inst"):
        (sbd / folder).mkdir(parents=True)
    for name in (*SBD_TRAIN, *SBD_VAL):
        Image.fromarray(np.full((*SIZE, 3), 200, np.uint8)).save(sbd / "img" / f"{name}.jpg")
        # As the authors wrote them: a struct GTcls with fields Boundaries, Segmentation, CategoriesPresent.
        fields = {
            "Boundaries": np.zeros((20, 1)), "Segmentation": np.full(SIZE, 20, np.uint8),
            "CategoriesPresent": np.array([[20]], np.uint8),
        }  # fmt: skip
        scipy.io.savemat(sbd / "cls" / f"{name}.mat", {"GTcls": fields}, do_compression=True)
    (sbd / "train.txt").write_text("".join(f"{n}\n" for n in SBD_TRAIN))
    (sbd / "val.txt").write_text("".join(f"{n}\n" for n in SBD_VAL))
    return sbd


def read(root: Path, split: str) -> MaskData:
    data = load_data("voc", split, root)
    assert isinstance(data, MaskData) and data.classes == CLASSES and len(CLASSES) == 21
    return data


def test_training_is_vocs_train_and_sbd_without_vocs_val(tmp_path: Path) -> None:
    make_voc(tmp_path)
    make_sbd(tmp_path)
    data = read(tmp_path, "train")
    assert [s.name for s in data.samples] == [*TRAIN, "2008_000002", "2008_000008"]
    labels = [set(np.unique(data.pair(i)[1])) for i in range(4)]
    assert labels == [{1, VOID}, {2, VOID}, {20}, {20}]  # VOC's own masks go before SBD's
    assert data.pair(2)[0][0, 0, 0] == pytest.approx(200, abs=2)


def test_testing_is_vocs_val(tmp_path: Path) -> None:
    make_voc(tmp_path)
    data = read(tmp_path, "test")
    assert [s.name for s in data.samples] == VAL and data.shape == (*SIZE, 3)
    assert np.array_equal(data.pair(0)[1], voc_mask(3))


def test_without_sbd_it_warns(tmp_path: Path) -> None:
    make_voc(tmp_path)
    with pytest.warns(UserWarning, match="training only on the 2 images of VOC's train, where the paper takes 10,582"):
        assert len(load_data("voc", "train", tmp_path)) == 2


@pytest.mark.parametrize("folder", ["VOCdevkit/VOC2012", "VOCdevkit"])
def test_the_folder_may_be_given_closer(tmp_path: Path, folder: str) -> None:
    make_voc(tmp_path)
    assert len(load_data("voc", "test", tmp_path / folder)) == 1


def test_images_missing_from_sbd_are_vocs(tmp_path: Path) -> None:
    make_voc(tmp_path)
    (make_sbd(tmp_path) / "img" / "2008_000002.jpg").unlink()
    assert read(tmp_path, "train").pair(2)[0][0, 0, 0] == pytest.approx(120, abs=2)


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no VOCdevkit/VOC2012 with JPEGImages"):
        load_data("voc", "test", tmp_path)
    voc = make_voc(tmp_path)
    (voc / "SegmentationClass" / f"{VAL[0]}.png").unlink()
    with pytest.raises(DataError, match=r"there is no .*2007_000033\.png, though its set lists 2007_000033"):
        load_data("voc", "test", tmp_path)
    (voc / "ImageSets/Segmentation/val.txt").write_text("../../../etc/passwd\n")
    with pytest.raises(DataError, match="not names such as 2007_000032"):
        load_data("voc", "test", tmp_path)
    (voc / "ImageSets/Segmentation/val.txt").unlink()
    with pytest.raises(DataError, match="cannot read"):
        load_data("voc", "test", tmp_path)


@pytest.mark.parametrize("content", [b"", b"junk" * 40, None])
def test_a_broken_mat_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    make_voc(tmp_path)
    path = make_sbd(tmp_path) / "cls" / "2008_000002.mat"
    if content is None:
        scipy.io.savemat(path, {"GTinst": {"Segmentation": np.zeros(SIZE, np.uint8)}})
    else:
        path.write_bytes(content)
    data = read(tmp_path, "train")
    with warnings.catch_warnings(), pytest.raises(DataError, match=r"2008_000002\.mat has no readable GTcls"):
        warnings.simplefilter("ignore")
        data.pair(2)
