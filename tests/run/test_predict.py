"""`m.predict`: one answer for a picture however it is given, as `anyprec run` gives it; and what is refused.

The network says which of red, green and blue is strongest: of the mean of a picture of 8 x 8 pixels, or of each pixel.
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_segmentation_run import NAMES, strongest

import anyprec
from anyprec.cli import main
from anyprec.errors import InputError
from anyprec.format.file import write
from anyprec.format.graph import Op
from anyprec.run.labels import LabelMap


def classifier(**changes):
    graph = strongest()
    pool = Op("mean", "adaptive_avg_pool", ("c",), {"size": [1, 1]})
    known = {"image_size": (8, 8), "resize": "cover", "resize_to": (8, 8), "filter": "bilinear", **changes}
    return replace(graph, ops=(*graph.ops, pool), outputs=("mean",), **known)


def loaded(graph, folder):
    write(graph, folder / "net.apm")
    return anyprec.load(folder / "net.apm")


@pytest.fixture
def model(tmp_path):
    return loaded(classifier(), tmp_path)


def photograph(height=20, width=31, seed=0):
    """No square and not the network's size; smooth enough that resizing matters little."""
    draw = np.random.default_rng(seed)
    return np.asarray(Image.fromarray(draw.integers(0, 256, (4, 5, 3), np.uint8)).resize((width, height)))


def by_hand(model, array, bits=8):
    """What the training did: covered 8 x 8, the middle cut out; then the engine, then a softmax."""
    height, width = array.shape[:2]
    scale = 8 / min(height, width)
    size = (max(8, int(width * scale)), max(8, int(height * scale)))
    small = np.asarray(Image.fromarray(array).resize(size, Image.Resampling.BILINEAR))
    top, left = round((small.shape[0] - 8) / 2), round((small.shape[1] - 8) / 2)
    y = model(small[top : top + 8, left : left + 8], bits=bits, layout="NHWC").astype(np.float64)
    return y, np.exp(y) / np.exp(y).sum()


def test_labels_with_probabilities(model):
    array = photograph()
    y, likely = by_hand(model, array)
    found = model.predict(array)
    order = np.argsort(-y)
    assert [one.label for one in found] == [NAMES[i] for i in order]
    assert [one.class_index for one in found] == order.tolist()
    np.testing.assert_allclose([one.probability for one in found], likely[order], rtol=1e-5)
    np.testing.assert_allclose([one.score for one in found], y[order], rtol=1e-6)
    assert [one.label for one in model.predict(array, top=1)] == [NAMES[order[0]]]
    assert model.predict(array, bits=1)[0].score == pytest.approx(by_hand(model, array, bits=1)[0].max())


def test_however_it_is_given(model, tmp_path, monkeypatch):
    array = photograph()
    path = tmp_path / "photo.png"
    Image.fromarray(array).save(path)
    np.save(tmp_path / "photo.npy", array)
    wanted = model.predict(path)
    with Image.open(path) as picture:
        for given in (
            str(path), picture, Image.fromarray(array), array, array.transpose(2, 0, 1), tmp_path / "photo.npy",
        ):  # fmt: skip
            assert model.predict(given) == wanted
    assert model.predict([str(path), array]) == [wanted, wanted]
    assert model.predict((array,)) == model.predict(array[None]) == [wanted]
    assert model.predict(array.transpose(2, 0, 1)[None]) == [wanted]
    torch = pytest.importorskip("torch")
    assert model.predict(torch.from_numpy(array.copy())) == wanted


def test_it_is_what_run_prints(model, tmp_path, capsys):
    Image.fromarray(photograph()).save(tmp_path / "photo.png")
    best = model.predict(tmp_path / "photo.png", bits=1, top=2)
    net, photo = str(tmp_path / "net.apm"), str(tmp_path / "photo.png")
    assert main(["run", net, photo, "--bits", "1", "--top", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["images"][0]["bits"]["1"]
    assert [(one["label"], one["probability"], one["class"], one["score"]) for one in told] == best
    assert main(["run", net, photo, "--bits", "1", "--top", "2"]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()[2:]
    assert cells == [part for one in best for part in (one.label, f"{100 * one.probability:.1f}", "%")]


def test_many_pictures_keep_their_order(model):
    pictures = [photograph(9 + i % 3, 12, seed=i) for i in range(21)]  # more than two batches
    assert model.predict(pictures) == [model.predict(one) for one in pictures]
    assert model.predict([]) == []


def test_three_gray_arrays_are_no_color_picture(tmp_path):
    """(3, H, W) may be one picture or three where the network takes gray ones."""
    graph = classifier()
    weight = replace(
        graph.weights["w"], shape=(3, 1, 1, 1), codes={k: c[..., :1] for k, c in graph.weights["w"].codes.items()}
    )
    tables = {**graph.tables, "q": graph.tables["q"][..., :1]}
    gray = replace(
        graph, input_shape=(None, None, 1), weights={"w": weight}, tables=tables, image_scale=(1 / 255,),
        image_shift=(0.0,),
    )  # fmt: skip
    model = loaded(gray, tmp_path)
    stack = np.stack([photograph(8, 8, seed)[:, :, 0] for seed in range(3)])
    with pytest.raises(InputError, match=r"\(3, 8, 8\) is one color picture or three gray ones"):
        model.predict(stack)
    assert len(model.predict(stack[..., None])) == len(model.predict(list(stack))) == 3
    assert isinstance(model.predict(stack, layout="NCHW")[0].label, str)


def test_gray_and_transparent_pictures(model):
    gray = photograph()[:, :, 0]
    wanted = model.predict(np.repeat(gray[:, :, None], 3, axis=2))
    assert model.predict(gray) == model.predict(gray[:, :, None]) == model.predict(Image.fromarray(gray)) == wanted
    array = photograph()
    clear = np.concatenate([array, np.full((*array.shape[:2], 1), 7, np.uint8)], axis=2)
    assert model.predict(clear) == model.predict(array)


def test_pixels_of_the_right_size_need_no_pillow(model, monkeypatch):
    array = photograph(8, 8)
    wanted = model.predict(array)
    for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert model.predict(array) == wanted


def test_random_bits_are_drawn_for_each_picture(model):
    drawn = []

    class Recorded(random.Random):
        def choice(self, seq):
            drawn.append(super().choice(seq))
            return drawn[-1]

    model.random = Recorded(1)
    pictures = [photograph(seed=i) for i in range(12)]
    found = model.predict(pictures, bits="random")
    assert len(drawn) == 12 and set(drawn) == {1, 8}
    assert found == [model.predict(one, bits=bits) for one, bits in zip(pictures, drawn, strict=True)]
    model.bits = "random"
    model.predict(pictures)
    assert len(drawn) == 24


def test_a_segmentation_gives_a_label_map(tmp_path):
    m = loaded(replace(strongest(), resize="none"), tmp_path)
    pictures = [photograph(9, 7), photograph(6, 11, seed=1)]
    for array, found in zip(pictures, m.predict(pictures), strict=True):
        wanted = np.argmax(m(array, layout="NHWC"), axis=2)
        assert isinstance(found, LabelMap) and found.labels == NAMES
        np.testing.assert_array_equal(found.classes, wanted)
        assert sum(found.shares.values()) == pytest.approx(1, abs=1e-5)
        assert found.shares.get("red", 0) == pytest.approx((wanted == 0).mean(), abs=1e-6)
    Image.fromarray(pictures[0]).save(tmp_path / "a.png")
    np.testing.assert_array_equal(m.predict(tmp_path / "a.png").classes, m.predict(pictures[0]).classes)


def test_a_model_that_takes_no_pictures_takes_arrays_as_a_call_does(tmp_path):
    plain = {"image_size": None, "resize": None, "resize_to": None, "filter": None}
    m = loaded(classifier(image_scale=None, image_shift=None, **plain), tmp_path)
    x = np.random.default_rng(0).random((2, 3, 8, 8), np.float32)
    found = m.predict(x)
    y = m(x)
    assert [one[0].score for one in found] == pytest.approx(y.max(axis=1).tolist(), rel=1e-6)
    assert m.predict(x[0]) == m.predict([x[0]])[0] == found[0]
    assert m.predict(x[0].transpose(1, 2, 0), layout="NHWC") == found[0]
    Image.fromarray(photograph()).save(tmp_path / "photo.png")
    for given in (tmp_path / "photo.png", Image.fromarray(photograph())):
        with pytest.raises(InputError, match="does not say how pixels become its input"):
            m.predict(given)
    with pytest.raises(InputError, match=r"an array of shape \(8, 8\) is no input"):
        m.predict(x[0, 0])


def test_a_file_that_does_not_say_how_pictures_were_prepared(tmp_path):
    old = {"resize": None, "resize_to": None, "filter": None}
    m = loaded(classifier(**old), tmp_path)
    with pytest.warns(UserWarning, match="does not say how its training prepared pictures"):
        assert m.predict(photograph())[0].label in NAMES
    m = loaded(classifier(image_size=None, **old), tmp_path)
    with (
        pytest.warns(UserWarning, match="does not say how"),
        pytest.raises(InputError, match="does not say at which size it was trained"),
    ):
        m.predict(photograph())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((8, 8, 3), np.float32), "predict takes pixels, 0 to 255 as uint8.*this array is float32"),
        (np.zeros((8, 8, 3), np.int64), "this array is int64"),
        (np.zeros((8, 8, 5), np.uint8), r"an array of shape \(8, 8, 5\) is no picture"),
        (np.zeros((2, 2, 8, 8, 3), np.uint8), "is no picture"),
        (np.zeros((0, 8, 3), np.uint8), "is no picture"),
        ([np.zeros((1, 8, 8, 3), np.uint8)], r"an array of shape \(1, 8, 8, 3\) is no picture"),
        (7, "int is no picture; give a path, a Pillow image, an array, or a list of those"),
        ([None], "NoneType is no picture"),
        ({"a": 1}, "dict is no picture"),
        ("missing.jpg", "missing.jpg is no file"),
        (Path("."), "is a folder"),
    ],
)
def test_what_is_no_picture(model, given, message):
    with pytest.raises(InputError, match=message):
        model.predict(given)


def test_wrong_options(model, tmp_path):
    for top in (0, -1, True, 1.5):
        with pytest.raises(InputError, match=f"top={top} is not a number of classes"):
            model.predict(photograph(), top=top)
    with pytest.raises(InputError, match="layout='HWC' is not known"):
        model.predict(photograph(), layout="HWC")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    with pytest.raises(ValueError, match=r"broken\.png"):
        model.predict(tmp_path / "broken.png")


def test_what_gives_no_classes(tmp_path):
    m = loaded(classifier(labels=("one", "two", "three", "four")[:3]), tmp_path)
    assert len(m.predict(photograph())) == 3
    graph = strongest(labels=None)
    one = Op("part", "adaptive_avg_pool", ("c",), {"size": [1, 1]})
    narrow = replace(graph.weights["w"], shape=(1, 1, 1, 3))
    narrow = replace(narrow, codes={bits: codes[:1] for bits, codes in narrow.codes.items()})
    tables = {**graph.tables, "c": graph.tables["c"][:, :, :1]}
    m = loaded(
        replace(
            graph, ops=(*graph.ops, one), outputs=("part",), weights={"w": narrow}, tables=tables, image_size=(8, 8)
        ),
        tmp_path,
    )
    with (
        pytest.warns(UserWarning, match="does not say"),
        pytest.raises(InputError, match="gives 1 number an image, no scores of classes"),
    ):
        m.predict(photograph())
