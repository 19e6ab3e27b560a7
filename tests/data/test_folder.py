"""Image folders and ImageNet's layouts: what is found, in what order, and what is said if it is not."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anyprec.data import FileData, load_data
from anyprec.errors import DataError


def put(path: Path, width: int = 12, height: int = 12, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((height, width, 3), value, np.uint8)).save(path)


def tree(root: Path, *paths: str) -> Path:
    for value, path in enumerate(paths):
        put(root / path, value=value)
    return root


def load(name: str, split: str, root: Path) -> FileData:
    data = load_data(name, split, root)
    assert isinstance(data, FileData)
    return data


def test_folder_sorts_classes_and_files(tmp_path: Path) -> None:
    tree(tmp_path, "train/dog/b.png", "train/dog/a.JPG", "train/cat/z.bmp", "test/cat/1.png", "test/dog/2.png")
    (tmp_path / "train/dog/notes.txt").write_text("not an image")
    (tmp_path / "train/.hidden").mkdir()
    (tmp_path / "train/dog/.hidden.png").write_bytes(b"")
    train, test = load("folder", "train", tmp_path), load("folder", "test", tmp_path)
    assert train.paths == ["cat/z.bmp", "dog/a.JPG", "dog/b.png"] and train.labels.tolist() == [0, 1, 1]
    assert train.classes == test.classes == ("cat", "dog")
    assert test.read([0, 1])[:, 0, 0, 0].tolist() == [3, 4]


def test_val_will_do_for_test_and_test_goes_first(tmp_path: Path) -> None:
    tree(tmp_path, "train/a/1.png", "val/a/2.png", "val/a/3.png")
    assert len(load("folder", "test", tmp_path)) == 2
    tree(tmp_path, "test/a/4.png")
    assert load("folder", "test", tmp_path).paths == ["a/4.png"]


def test_test_needs_no_train(tmp_path: Path) -> None:
    assert load("folder", "test", tree(tmp_path, "test/a/1.png", "test/b/1.png")).classes == ("a", "b")


@pytest.mark.parametrize("width, height, size", [(32, 32, 32), (48, 64, 48), (500, 400, 224), (224, 1000, 224)])
def test_size_follows_the_first_training_image(tmp_path: Path, width: int, height: int, size: int) -> None:
    put(tmp_path / "train/a/1.png", width, height)
    put(tmp_path / "test/a/1.png", 10, 10)
    for split in ("train", "test"):
        data = load("folder", split, tmp_path)
        assert data.shape == (size, size, 3) and data.read([0]).shape == (1, size, size, 3)


def message(name: str, split: str, root: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_data(name, split, root)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", ["folder", "imagenet"])
def test_what_is_missing_is_said(tmp_path: Path, name: str) -> None:
    assert "there is no folder" in message(name, "train", tmp_path / "typo")
    assert "has no train folder, but no folders; expected train/<" in message(name, "train", tmp_path)
    (tmp_path / "cat").mkdir()
    assert "has no train folder, but cat; expected train/<" in message(name, "train", tmp_path)
    (tmp_path / "train").mkdir()
    text = message(name, "train", tmp_path)
    assert f"{tmp_path / 'train'} is empty; put the images of each class into a folder of its own" in text
    tree(tmp_path, "train/1.png", "train/2.png")
    assert "train has 2 images but no class folders" in message(name, "train", tmp_path)
    tree(tmp_path, "train/cat/1.png")
    (tmp_path / "train/dog").mkdir()
    assert f"{tmp_path / 'train/dog'} has no images (.jpg" in message(name, "train", tmp_path)
    wanted = "test or val" if name == "folder" else "val"
    assert f"has no {wanted} folder" in message(name, "test", tmp_path)


@pytest.mark.parametrize("name", ["folder", "imagenet"])
def test_classes_must_be_the_same_in_both_splits(tmp_path: Path, name: str) -> None:
    tree(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/1.png")
    text = message(name, "test", tmp_path)
    train, val = tmp_path / "train", tmp_path / "val"
    assert f"class 'dog' is in {train} but not in {val} (1 and 2 classes, 1 not in both)" in text
    tree(tmp_path, "val/dog/1.png", "val/cow/1.png")
    assert f"class 'cow' is in {val} but not in {train}" in message(name, "test", tmp_path)


def test_a_broken_first_image_is_named(tmp_path: Path) -> None:
    tree(tmp_path, "train/cat/2.png")
    (tmp_path / "train/cat/1.png").write_bytes(b"broken")
    assert "1.png is no image that can be decoded" in message("folder", "train", tmp_path)


def test_an_emptied_training_class_is_named_when_testing(tmp_path: Path) -> None:
    tree(tmp_path, "test/cat/2.png")
    (tmp_path / "train/cat").mkdir(parents=True)
    assert f"{tmp_path / 'train/cat'} has no images" in message("folder", "test", tmp_path)


CAT, DOG = "n02123045", "n02084071"
VAL = "ILSVRC2012_val_0000000"


def test_imagenet_with_class_folders(tmp_path: Path) -> None:
    tree(
        tmp_path,
        f"train/{CAT}/{CAT}_1.JPEG",
        f"train/{DOG}/{DOG}_1.JPEG",
        f"val/{CAT}/{VAL}1.JPEG",
        f"val/{DOG}/{VAL}2.JPEG",
    )
    train, test = load("imagenet", "train", tmp_path), load("imagenet", "test", tmp_path)
    assert train.classes == test.classes == (DOG, CAT)
    assert train.shape == (224, 224, 3) and test.labels.tolist() == [0, 1]


@pytest.mark.parametrize("base", ["", "ILSVRC/Data/CLS-LOC/"])
@pytest.mark.parametrize("table", ["LOC_val_solution.csv", "val_labels.txt"])
def test_imagenet_with_a_flat_val(tmp_path: Path, base: str, table: str) -> None:
    tree(tmp_path, *(f"{base}val/{VAL}{i}.JPEG" for i in (1, 2, 3)))
    text = message("imagenet", "test", tmp_path)
    assert "val has 3 images, no class folders and no labels; move the images to val/<wnid>/, or put" in text
    if table.endswith("csv"):
        rows = f"ImageId,PredictionString\n{VAL}2,{CAT} 1 2 3 4 {DOG} 5 6 7 8 \n{VAL}1,{DOG} 1 2 3 4 \n"
        more = f"{VAL}3,{CAT} 1 2 3 4\n"
    else:
        rows, more = f"{VAL}2.JPEG {CAT}\n{VAL}1.JPEG {DOG}\n\n", f"{VAL}3 {CAT}\n"
    (tmp_path / table).write_text(rows)
    assert f"has no label for {VAL}3.JPEG and 0 more images" in message("imagenet", "test", tmp_path)
    (tmp_path / table).write_text(rows + more)
    data = load("imagenet", "test", tmp_path)
    assert data.classes == (DOG, CAT) and data.labels.tolist() == [0, 1, 1]
    assert data.paths == [f"{VAL}1.JPEG", f"{VAL}2.JPEG", f"{VAL}3.JPEG"]
    tree(tmp_path, f"{base}train/{CAT}/1.JPEG")
    assert f"class '{DOG}' is in" in message("imagenet", "test", tmp_path)


def test_broken_label_tables(tmp_path: Path) -> None:
    tree(tmp_path, f"val/{VAL}1.JPEG")
    (tmp_path / "val_labels.txt").write_text(f"{VAL}1.JPEG\n")
    assert "val_labels.txt, line 1: 'ILSVRC2012_val_00000001.JPEG' is not a file name and a wnid" in message(
        "imagenet", "test", tmp_path
    )
    (tmp_path / "LOC_val_solution.csv").write_text("image,label\na,b\n")
    assert "must have the columns ImageId and PredictionString" in message("imagenet", "test", tmp_path)


def test_imagenet_val_that_is_empty(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    assert f"{tmp_path / 'val'} is empty; expected train/<wnid>/*.JPEG" in message("imagenet", "test", tmp_path)
