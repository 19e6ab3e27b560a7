"""`anyprec run` for a segmentation: figures as from counting by hand, masks as pictures, mistakes in a line.

The network gives a pixel the class of its strongest channel: a 1x1 convolution of codes, at 1 and 8 bits.
"""

import io
import json

import numpy as np
import pytest
from PIL import Image

import anyprec
from anyprec.cli import main
from anyprec.data import MaskData, MaskSample
from anyprec.data.annotated import CAMVID_CLASSES
from anyprec.data.confusion import class_iou, confusion, mean_iou, pixel_accuracy
from anyprec.errors import InputError
from anyprec.format.file import write
from anyprec.format.graph import INPUT, Graph, GraphProfile, Op, Weight
from anyprec.run.accuracy import measure
from anyprec.run.accuracy_plot import draw
from anyprec.run.segmentation import CAMVID_COLORS, colors, overlaid, painted, voc_colors

NAMES = ("red", "green", "blue")


def strongest(labels=NAMES, size=(None, None), image=True):
    """y_c = 4 x_c - (the sum of all): largest where x_c is. At 1 bit a channel is on from one half up."""
    wide = np.full((3, 1, 1, 3), 64, np.uint8)
    wide[np.arange(3), 0, 0, np.arange(3)] = 255
    table = np.zeros((2, 2, 3), np.float32)
    conv = {"kernel": [1, 1], "stride": [1, 1], "pad": [0] * 4, "dilation": [1, 1], "groups": 1}
    scale = np.zeros((2, 2, 3), np.float32)
    for row, k in enumerate((1, 8)):
        table[row, 0] = 2**k - 1
        scale[row, 0] = 1 / (2**k - 1) ** 2
    ops = (
        Op("q", "quantize", (INPUT,), {"signed": False, "rectify": True, "affine": True}),
        Op("c", "conv", ("q",), {"weight": "w", **conv, "signed": False, "affine": True}),
    )
    weight = Weight((3, 1, 1, 3), codes={1: wide >> 7, 8: wide})
    return Graph(
        "strongest", (*size, 3), (GraphProfile("1", 1, 1), GraphProfile("8", 8, 8)), {1: (0,), 8: tuple(range(8))},
        {"w": weight}, ops, ("c",), {"q": table, "c": scale}, (1 / 255,) * 3 if image else None,
        (0.0,) * 3 if image else None, labels,
    )  # fmt: skip


def as_png(array):
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    samples = []
    for i, size in enumerate([(6, 8), (5, 5), (6, 8), (6, 8)]):
        image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        mask = image.argmax(axis=2).astype(np.uint8)
        mask[0] = (mask[0] + 1) % 3  # not all can be right
        mask[:, 1] = 255
        samples.append(MaskSample(f"s{i}", as_png(image), as_png(mask)))
    return MaskData(samples, NAMES, mean=(0, 0, 0), std=(1, 1, 1))


@pytest.fixture
def file(tmp_path):
    write(strongest(), tmp_path / "net.apm")
    return str(tmp_path / "net.apm")


def by_hand(data, bits):
    matrix = np.zeros((3, 3), int)
    for i in range(len(data)):
        image, mask = data.pair(i)
        levels = image / 255 if bits == 8 else np.rint(image / 255)
        matrix += confusion(mask, levels.argmax(axis=2), 3)
    return matrix


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("image", [True, False])
def test_figures_are_those_counted_by_hand(data, tmp_path, batch, image):
    write(strongest(image=image), tmp_path / "net.apm")
    rows = measure(anyprec.load(tmp_path / "net.apm"), data, ("1", "8"), batch=batch)
    for row in rows:
        matrix = by_hand(data, int(row.profile))
        assert row.miou == pytest.approx(mean_iou(matrix)) and row.accuracy == pytest.approx(pixel_accuracy(matrix))
        assert row.ious == pytest.approx(tuple(class_iou(matrix))) and row.latency_ms > 0
    assert rows[0].miou < rows[1].miou < 100


def test_what_does_not_fit(data, tmp_path):
    write(strongest(size=(6, 6)), tmp_path / "fixed.apm")
    write(strongest(), tmp_path / "net.apm")
    with pytest.raises(InputError, match="masks has color images of 6 x 8, strongest takes 6 x 6 of 3 channels"):
        measure(anyprec.load(tmp_path / "fixed.apm"), data, ("8",))
    with pytest.raises(InputError, match="--size 4 does not go with masks"):
        measure(anyprec.load(tmp_path / "net.apm"), data, ("8",), size=4)
    more = MaskData(data.samples, ("a", "b", "c", "d"))
    with pytest.raises(InputError, match="strongest gives 3 scores a pixel, masks has 4 classes"):
        measure(anyprec.load(tmp_path / "net.apm"), more, ("8",))


def test_picture_of_a_segmentation(data, file, tmp_path):
    pytest.importorskip("matplotlib")
    draw(measure(anyprec.load(file), data, ("1", "8")), "title", tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.size[0] > 500


# --- The command --------------------------------------------------------------------------------------------------


def run(capsys, *args):
    assert main(["run", *map(str, args)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def error(capsys, *args):
    assert main(["run", *map(str, args)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def pictures(data, tmp_path):
    root = tmp_path / "set"
    for name in ("test", "testannot", "train", "trainannot"):
        (root / name).mkdir(parents=True)
        for sample in data.samples:
            (root / name / f"{sample.name}.png").write_bytes(sample.mask if name.endswith("annot") else sample.image)
    (root / "classes.txt").write_text("\n".join(NAMES))
    return root


def test_a_test_set(file, data, pictures, capsys):
    out = run(capsys, file, "--dataset", "masks", "--data", pictures).splitlines()
    assert out[0].startswith("net: 4 test images of masks; batch 1, 1 thread")
    assert out[1].split() == ["bits", "mIoU", "pixels", "right", "ms", "an", "image", "bytes"]
    for line, bits in zip(out[2:], (1, 8), strict=True):
        matrix = by_hand(data, bits)
        assert line.split()[:5] == [str(bits), f"{mean_iou(matrix):.2f}", "%", f"{pixel_accuracy(matrix):.2f}", "%"]
    record = json.loads(run(capsys, file, "--dataset", "masks", "--data", pictures, "--json", "--bits", "8"))
    assert record["results"]["8"]["iou"] == pytest.approx(dict(zip(NAMES, class_iou(by_hand(data, 8)), strict=True)))


def test_masks_of_image_files(file, data, pictures, tmp_path, capsys):
    image = pictures / "test" / "s1.png"
    out = run(capsys, file, image, "--bits", "1,8", "--masks", tmp_path / "new" / "masks").splitlines()
    assert [line.split()[:2] for line in out[1:]] == [["s1.png", "1"], ["s1.png", "8"]]
    written = sorted(p.name for p in (tmp_path / "new" / "masks").iterdir())
    assert written == ["s1.1bit.overlay.png", "s1.1bit.png", "s1.8bit.overlay.png", "s1.8bit.png"]
    pixels = data.pair(1)[0]
    mask = Image.open(tmp_path / "new" / "masks" / "s1.8bit.png")
    assert mask.mode == "P" and np.array_equal(np.asarray(mask), pixels.argmax(axis=2))
    assert np.array_equal(np.asarray(mask.convert("RGB")), voc_colors(3)[pixels.argmax(axis=2)])
    mixed = np.asarray(Image.open(tmp_path / "new" / "masks" / "s1.8bit.overlay.png"))
    assert np.array_equal(mixed, overlaid(pixels, pixels.argmax(axis=2), voc_colors(3)))


def test_the_mask_of_one_picture(file, data, pictures, tmp_path, capsys):
    run(capsys, file, pictures / "test" / "s1.png", "--bits", "8", "--out", tmp_path / "mask.png")
    mask = Image.open(tmp_path / "mask.png")
    assert mask.mode == "P" and np.array_equal(np.asarray(mask), data.pair(1)[0].argmax(axis=2))
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".png"] == ["mask.png"]
    for more in ([pictures / "test"], [pictures / "test" / "s1.png", "--bits", "1,8"]):
        words = "takes one picture at one width; for more of them give --masks DIR"
        assert words in error(capsys, file, *more, "--out", tmp_path / "other.png")
    assert "give a file .npy, or .png for a mask" in error(capsys, file, pictures / "test", "--out", tmp_path / "x.jpg")
    assert not (tmp_path / "other.png").exists()


def test_shares_of_classes_are_shown(file, data, pictures, capsys):
    image = pictures / "test" / "s1.png"
    shares = np.bincount(data.pair(1)[0].argmax(axis=2).ravel(), minlength=3) / 25
    order = np.argsort(-shares, kind="stable")
    line = run(capsys, file, image).splitlines()[1].split()
    expected = [part for i in order for part in (NAMES[i], f"{100 * shares[i]:.1f}", "%")]
    assert line == ["s1.png", "8", *expected]
    found = json.loads(run(capsys, file, image, "--json", "--top", "1"))["images"][0]["bits"]["8"]
    assert found["shape"] == [5, 5, 3]
    assert found["classes"] == [{"class": order[0], "label": NAMES[order[0]], "share": shares[order[0]]}]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_masks_of_arrays(file, data, tmp_path, capsys, layout):
    images = data.read([0, 2])[0]
    np.save(tmp_path / "x.npy", images if layout == "NHWC" else images.transpose(0, 3, 1, 2))
    run(capsys, file, tmp_path / "x.npy", "--masks", tmp_path / "m")
    for i in range(2):
        mask = np.asarray(Image.open(tmp_path / "m" / f"x_{i}.8bit.png"))
        assert np.array_equal(mask, images[i].argmax(axis=2))


def test_mistakes(file, data, pictures, tmp_path, capsys):
    assert "--masks goes with images" in error(capsys, file, "--dataset", "masks", "--masks", "m")
    np.save(tmp_path / "x.npy", np.zeros((1, 4, 4, 3), np.float32))
    assert "arrays of floats are no pictures" in error(capsys, file, tmp_path / "x.npy", "--masks", tmp_path / "m")
    (tmp_path / "taken").write_text("")
    image = pictures / "test" / "s1.png"
    assert "cannot write" in error(capsys, file, image, "--masks", tmp_path / "taken" / "m")


# --- Colors ------------------------------------------------------------------------------------------------------


def test_colors():
    table = voc_colors(21)
    assert table[0].tolist() == [0, 0, 0] and table[1].tolist() == [128, 0, 0] and table[15].tolist() == [192, 128, 128]
    assert table[20].tolist() == [0, 64, 128] and len({tuple(c) for c in voc_colors(255).tolist()}) == 255
    assert colors(CAMVID_CLASSES, 11).tolist() == [list(c) for c in CAMVID_COLORS]
    assert np.array_equal(colors(NAMES, 3), voc_colors(3)) and np.array_equal(colors((), 3), voc_colors(3))


def test_the_truth_is_painted_like_an_answer_and_black_where_it_has_no_class():
    palette = voc_colors(3)
    mask = np.array([[0, 1], [2, 255]], np.uint8)
    seen = painted(mask, palette, void=255)
    assert seen.dtype == np.uint8 and seen.shape == (2, 2, 3)
    assert np.array_equal(seen[0], palette[[0, 1]]) and np.array_equal(seen[1, 0], palette[2])
    assert not seen[1, 1].any()
    assert np.array_equal(painted(mask[:1], palette), palette[mask[:1]])
