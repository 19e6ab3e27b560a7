"""Pictures get one answer everywhere: `evaluate` = `run` on image files = `/classify` (what the page posts), image for
image, for every kind of data set, from small files in the official layouts. And what becomes of odd pictures.
"""

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from sampling import sampled

pytest.importorskip("torch")
pytest.importorskip("PIL.Image")

from PIL import Image
from serving import ask, infer_binary, running

import anyprec
import anyprec.run.accuracy
from anyprec.cli import main
from anyprec.data import FileData, MaskData, batches, cifar10, load_data
from anyprec.data.catalog import DATASETS
from anyprec.data.loader import testing_pixels as pixels_of
from anyprec.nn.switching import bits
from anyprec.reproduce import synthetic
from anyprec.run.images import image_file
from anyprec.training.checkpoint import load_model, load_state
from anyprec.training.evaluate import to_tensor
from anyprec.training.recipe import Recipe
from anyprec.training.run import eval_augment, train
from anyprec.training.trained_run import preprocessing_for

MASKS = {"multiplier": 0.5, "pyramid": 8, "rates": [1, 2], "skip": "quantized"}
# data set -> what differs from its usual recipe; (H, W) the network must be fed, None: as the picture is
KINDS = {
    "digits": ({}, (8, 8)),
    "cifar10": ({}, (32, 32)),
    "svhn": ({}, (40, 40)),
    "fashion-mnist": ({}, (28, 28)),
    "imagenet": ({"batch_size": 2, "limit": 2}, (224, 224)),
    "folder": ({"augment": "none"}, (40, 40)),
    "camvid": ({"augment": "camvid-24x24"}, None),
    "voc": ({"augment": "voc-24x24"}, None),
    "masks": ({"augment": "voc-24x24"}, None),
}


def make(name: str, root: Path) -> Path | None:
    draw = np.random.default_rng(1)
    if name == "folder":  # of no square, so that it matters what is cut; the first training image says 40
        for split in ("train", "test"):
            for label, kind in (("ant", "png"), ("bee", "jpg"), ("cow", "png")):
                (root / split / label).mkdir(parents=True)
                for i in range(3):
                    picture = synthetic.photograph(draw, (52, 40) if split == "train" else (90 - i, 71 + i))
                    picture.save(root / split / label / f"{i}.{kind}")
        return root
    if name == "fashion-mnist":
        for stem in ("train", "t10k"):
            images, labels = draw.integers(0, 256, (16, 28, 28), np.uint8), np.arange(16, dtype=np.uint8) % 10
            for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
                head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
                (root / f"{stem}-{kind}-ubyte").write_bytes(head + array.tobytes())
        return root
    if name == "cifar10":
        for stem in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
            records = draw.integers(0, 256, (16, 3073), np.uint8)
            records[:, 0] %= 10
            (root / f"{stem}.bin").write_bytes(records.tobytes())
        return root
    if name == "masks":
        (root / "classes.txt").write_text("red\ngreen\nblue\n")
        synthetic.scenes(root, draw, "test", (40, 30), 3)
        return root
    return synthetic.make(name, root)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """(kind, test data, run folder, model file): one step of training, by the verbs a user would type."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    patch = pytest.MonkeyPatch()
    patch.setattr(cifar10, "RECORDS", 16)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "data").mkdir()
    root = make(name, folder / "data")
    given, _ = KINDS[name]
    masks = DATASETS[name].masks
    recipe = Recipe(
        net="deeplab-small" if masks else "resnet8", data=name, widths=(8, 32), epochs=1,
        net_options=MASKS if masks else {},
        **{"augment": DATASETS[name].augment, "batch_size": 4, "limit": 4, "lr": 0.01, **given},
    )  # fmt: skip
    train(recipe, folder / "run", data_root=root, progress=False)
    assert main(["pack", str(folder / "run"), "--float", "--out", str(folder / "net.apm")]) == 0
    yield name, load_data(name, "test", root), folder / "run", folder / "net.apm"
    patch.undo()


def pictures(data, folder: Path) -> list[Path]:
    """The first test images as the files a user has."""
    rows = range(min(len(data), 6))
    if isinstance(data, FileData):
        return [data.root / data.paths[i] for i in rows]
    if isinstance(data, MaskData):
        return [data.samples[i].image for i in rows]
    for i in rows:
        Image.fromarray(data.images[i].squeeze(-1) if data.shape[2] == 1 else data.images[i]).save(folder / f"{i}.png")
    return [folder / f"{i}.png" for i in rows]


def evaluated(data, run: Path, width: int) -> list[dict[str, float]]:
    """What `evaluate` computes of each image: scores, or the shares of a mask's classes, by class name."""
    model, augment = load_model(run / "model.pt").eval(), load_state(run / "model.pt")["extra"]["recipe"]["augment"]
    source = batches(
        data, 1, augment=eval_augment(augment), preprocessing=preprocessing_for(run / "model.pt", data), prefetch=0
    )
    found = []
    with bits(model, width):
        for images, _ in source:
            y = model(to_tensor(images))[0].detach().numpy()
            if y.ndim == 3:
                y = np.bincount(y.argmax(0).ravel(), minlength=len(y)) / y[0].size
            found.append(dict(zip(data.classes, y.tolist(), strict=False)))
    return found


def assert_answers(named: dict[str, float], wanted: dict[str, float], masks: bool) -> None:
    assert set(named) <= set(wanted) and (masks or len(named) == len(wanted))
    for label, value in wanted.items():  # torch and the engine add up in another order
        assert named.get(label, 0.0) == pytest.approx(value, abs=0.02 if masks else 1e-3 * max(1, abs(value)))


def by_name(labels: list[dict]) -> dict[str, float]:
    return {one["label"]: one.get("score", one.get("share")) for one in labels}


@pytest.mark.thorough
def test_evaluate_run_and_classify_agree(trained, tmp_path, capsys):
    name, data, run, file = trained
    masks, files = DATASETS[name].masks, pictures(data, tmp_path)
    wanted = evaluated(data, run, 32)
    if masks:  # batches go by size
        order = np.lexsort((data.sizes[:, 1], data.sizes[:, 0])).tolist()
        wanted = [wanted[order.index(i)] for i in range(len(wanted))]
    capsys.readouterr()
    assert main(["run", str(file), *map(str, files), "--bits", "32", "--top", "1000", "--json"]) == 0
    done = capsys.readouterr()
    assert "warning" not in done.err
    answers = [
        by_name(r["bits"]["32"]["classes"] if masks else r["bits"]["32"]) for r in json.loads(done.out)["images"]
    ]
    for answer, want in zip(answers, wanted, strict=False):
        assert_answers(answer, want, masks)
    with running({"net": file}) as server:
        for path, answer in zip(files, answers, strict=True):
            reply = ask(server.port, "POST", "/v2/models/net/classify?bits=32&top=1000", path.read_bytes())
            assert reply.status == 200, reply.body
            assert by_name(reply.json["results"][0]["labels"]) == answer  # the very same numbers
            # what the page posts: the file as it is, for every width
            page = ask(server.port, "POST", "/v2/models/net/classify?bits=all&top=1", path.read_bytes()).json["results"]
            assert [one["bits"] for one in page] == [8, 32]
            assert page[1]["labels"][0]["label"] == max(answer, key=answer.get)


def test_accuracy_of_a_test_set_is_the_one_of_training(trained, capsys):
    name, data, run, file = trained
    model, tested = anyprec.load(file), load_state(run / "model.pt")["extra"]["test"]
    (row,) = anyprec.run.accuracy.measure(model, data, ["32"])
    assert row.accuracy == pytest.approx(tested["32"]["accuracy"], abs=2.0 if DATASETS[name].masks else 1e-6)


def test_pixels_are_exactly_those_of_testing(trained, tmp_path):
    """To the bit: the same Pillow filter, the same rounding, the same cut."""
    name, data, run, file = trained
    model, size = anyprec.load(file), KINDS[name][1]
    assert model.preprocessing.size == size and model.image_size == size
    assert model.labels == data.classes
    for i, path in enumerate(pictures(data, tmp_path)):
        there = image_file(path, model, None)
        if isinstance(data, MaskData):
            here = data.pair(i)[0][None]
        else:
            here = pixels_of(data, preprocessing_for(run / "model.pt", data))(np.array([i]))
        np.testing.assert_array_equal(there, here, strict=True)


def test_inspect_says_what_is_done_to_pictures(trained, capsys):
    name, data, _, file = trained
    capsys.readouterr()
    assert main(["inspect", str(file)]) == 0
    text, size = capsys.readouterr().out, KINDS[name][1]
    assert ("at the size they have" if size is None else f"the middle {size[0]} x {size[1]}") in text
    assert data.classes[0] in text
    assert main(["inspect", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["preprocessing"]["size"] == (None if size is None else list(size)) and found["format"] == 2
    np.testing.assert_allclose(found["preprocessing"]["mean"], data.mean, rtol=1e-5)
    np.testing.assert_allclose(found["preprocessing"]["std"], data.std, rtol=1e-5)


# --- Pictures that are not like those of the training ---


def png(picture: Image.Image, kind: str = "PNG", **rest) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **rest)
    return buffer.getvalue()


def odd_pictures() -> dict[str, tuple[bytes, Image.Image]]:
    """Name -> the bytes of a file, and the plain 8-bit picture it has to be taken for."""
    draw = np.random.default_rng(2)
    color = Image.fromarray(draw.integers(0, 256, (11, 17, 3), np.uint8))
    gray = Image.fromarray(draw.integers(0, 256, (11, 17), np.uint8))
    deep = draw.integers(0, 65536, (11, 17), np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: rows of the file are columns of the picture, from right to left
    indexed = color.quantize(16)
    cmyk = color.convert("CMYK")
    with_alpha = color.copy()
    with_alpha.putalpha(Image.fromarray(draw.integers(0, 256, (11, 17), np.uint8)))
    jpeg = png(cmyk, "JPEG", quality=95)
    return {
        "color": (png(color), color),
        "gray": (png(gray), gray.convert("RGB")),
        "bilevel": (png(gray.convert("1")), gray.convert("1").convert("RGB")),
        "RGBA": (png(with_alpha), color),
        "LA": (png(gray.convert("LA")), gray.convert("RGB")),
        "palette": (png(indexed), indexed.convert("RGB")),
        "palette with a clear color": (png(indexed, transparency=3), indexed.convert("RGB")),
        "16 bit": (png(Image.fromarray(deep)), Image.fromarray((deep >> 8).astype(np.uint8)).convert("RGB")),
        "CMYK": (jpeg, Image.open(io.BytesIO(jpeg)).convert("RGB")),
        "turned": (png(color, exif=exif), color.transpose(Image.Transpose.ROTATE_270)),
        "turned gray": (png(gray, exif=exif), gray.transpose(Image.Transpose.ROTATE_270).convert("RGB")),
    }


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """channels -> a model file of 12 x 12 pictures, packed by the Python interface."""
    import torch

    from anyprec.zoo import build

    folder, files = tmp_path_factory.mktemp("odd"), {}
    for channels in (1, 3):
        net = build("resnet8", widths=(8,), in_channels=channels, num_classes=3, multiplier=0.25).eval()
        how = anyprec.Preprocessing((0.5,) * channels, (0.25,) * channels, size=12, to=14)
        files[channels] = folder / f"{channels}.apm"
        anyprec.pack(
            net, files[channels], example=torch.zeros(1, channels, 12, 12), image=how, labels=("ant", "bee", "cow")
        )
    return files


def by_hand(picture: Image.Image, channels: int) -> np.ndarray:
    """To cover 14 x 14 in proportion, rounded down; the middle 12 x 12."""
    width, height = picture.size
    new = (14, 14 * height // width) if width <= height else (14 * width // height, 14)
    picture = picture.convert("L" if channels == 1 else "RGB").resize(new, Image.Resampling.BILINEAR)
    left, top = round((new[0] - 12) / 2), round((new[1] - 12) / 2)
    return np.asarray(picture.crop((left, top, left + 12, top + 12))).reshape(1, 12, 12, channels)


@pytest.mark.thorough
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", sampled(odd_pictures()))
def test_odd_pictures(name, channels, networks, tmp_path):
    raw, plain = odd_pictures()[name]
    path = tmp_path / ("x.jpg" if raw.startswith(b"\xff\xd8") else "x.png")
    path.write_bytes(raw)
    model = anyprec.load(networks[channels])
    x = image_file(path, model, None)
    np.testing.assert_array_equal(x, by_hand(plain, channels), strict=True)
    with running({"net": networks[channels]}) as server:
        reply = ask(server.port, "POST", "/v2/models/net/classify?bits=8&top=3", raw).json
        wanted = dict(zip(model.labels, model(x, layout="NHWC")[0], strict=True))
        assert by_name(reply["results"][0]["labels"]) == pytest.approx(wanted, rel=1e-6)


def test_pictures_that_are_refused(networks, tmp_path, capsys):
    Image.fromarray(np.ones((9, 9), np.float32)).save(tmp_path / "float.tif")
    assert main(["run", str(networks[3]), str(tmp_path / "float.tif")]) == 2
    assert "mode F (32 bit) have no fixed range" in capsys.readouterr().err
    thin = Image.new("L", (3_000_000, 1))  # 3 MB; covering 14 x 14 it would have 588 million pixels
    thin.save(tmp_path / "thin.png")
    assert main(["run", str(networks[3]), str(tmp_path / "thin.png")]) == 2
    assert "is resized to 42000000 x 14, more than 40,000,000 pixels" in capsys.readouterr().err
    with running({"net": networks[3]}) as server:
        reply = ask(server.port, "POST", "/v2/models/net/classify", (tmp_path / "thin.png").read_bytes())
        assert reply.status == 400 and "more than 40,000,000 pixels" in reply.json["error"]


def test_nan_is_refused_by_the_server_and_spoils_no_other_request(networks):
    with running({"net": networks[3]}) as server:
        x = np.zeros((1, 3, 12, 12), np.float32)
        x[0, 1, 2, 3] = np.nan
        for value, status in ((np.nan, 400), (np.inf, 400), (0.0, 200)):
            x[0, 1, 2, 3] = value
            reply = infer_binary(server.port, x)
            assert reply.status == status, reply.body
            assert status == 200 or "NaN or infinity" in reply.json["error"]


# --- A network of the user's own, old files, mistakes ---


def test_pack_takes_the_size_of_the_example(networks, tmp_path):
    import torch

    from anyprec.errors import AnyprecError
    from anyprec.zoo import build

    net = build("resnet8", widths=(8,), num_classes=3, multiplier=0.25).eval()
    how = anyprec.Preprocessing((0.5,) * 3, (0.25,) * 3)
    anyprec.pack(net, tmp_path / "a.apm", example=torch.zeros(1, 3, 20, 24), image=how)
    assert anyprec.load(tmp_path / "a.apm").preprocessing == anyprec.Preprocessing(
        (0.5,) * 3, (0.25,) * 3, size=(20, 24)
    )
    stretched = anyprec.Preprocessing((0.5,) * 3, (0.25,) * 3, size=20, resize="stretch", to=22, filter="bicubic")
    anyprec.pack(net, tmp_path / "b.apm", example=torch.zeros(1, 3, 20, 20), image=stretched)
    assert anyprec.load(tmp_path / "b.apm").preprocessing == stretched
    assert anyprec.format.read(tmp_path / "b.apm").preprocessing == stretched
    with pytest.raises(AnyprecError, match="1 scales and 1 shifts for 3 channels"):
        anyprec.pack(
            net, tmp_path / "c.apm", example=torch.zeros(1, 3, 20, 20), image=anyprec.Preprocessing((0.5,), (0.5,))
        )


@pytest.mark.thorough
def test_old_files_warn_and_old_checkpoints_know_their_data_set(tmp_path, capsys):
    from anyprec.training.checkpoint import save_model
    from anyprec.zoo import build

    net = build("resnet8", widths=(8,), in_channels=1, num_classes=10, multiplier=0.25)
    save_model(net, tmp_path / "digits.pt", {"recipe": {"net": "resnet8", "data": "digits", "augment": "crop"}})
    assert main(["pack", str(tmp_path / "digits.pt"), "--out", str(tmp_path / "digits.apm")]) == 0
    assert anyprec.load(tmp_path / "digits.apm").preprocessing.size == (8, 8)  # what its data set says
    color = build("resnet8", widths=(8,), num_classes=3, multiplier=0.25)
    save_model(color, tmp_path / "own.pt", {"recipe": {"net": "resnet8", "data": "folder", "augment": "none"}})
    capsys.readouterr()
    assert main(["pack", str(tmp_path / "own.pt"), "--out", str(tmp_path / "own.apm")]) == 2
    assert "does not say at which size it was trained" in capsys.readouterr().err
    root = make("folder", tmp_path / "data")
    assert main(["pack", str(tmp_path / "own.pt"), "--out", str(tmp_path / "own.apm"), "--data", str(root)]) == 0
    assert anyprec.load(tmp_path / "own.apm").preprocessing.size == (40, 40)
    assert anyprec.load(tmp_path / "own.apm").labels == ("ant", "bee", "cow")
    # A file of format 1: no record, so a warning.
    import torch

    anyprec.pack(
        color.eval(), tmp_path / "old.apm", example=torch.zeros(1, 3, 16, 16), image=((1 / 255,) * 3, (0.0,) * 3)
    )
    assert anyprec.load(tmp_path / "old.apm").preprocessing is None
    capsys.readouterr()
    assert main(["run", str(tmp_path / "old.apm"), str(root / "test" / "ant" / "0.png")]) == 0
    assert "warning: resnet8 does not say how its training prepared pictures" in capsys.readouterr().err


def test_data_the_network_cannot_take_is_one_line(tmp_path, capsys, monkeypatch):
    from anyprec.training.checkpoint import save_model
    from anyprec.zoo import build

    monkeypatch.setattr(cifar10, "RECORDS", 16)
    (tmp_path / "cifar").mkdir()
    root = make("cifar10", tmp_path / "cifar")
    net = build("resnet8", widths=(8, 32), in_channels=1, num_classes=10, multiplier=0.25)
    extra = {"recipe": {"net": "resnet8", "data": "digits", "augment": "crop"}}
    how = anyprec.Preprocessing((0.3,), (0.4,), size=8).to_dict()
    for known in ({}, {"preprocessing": how, "classes": list("0123456789")}):
        save_model(net, tmp_path / "gray.pt", {**extra, **known})
        for verb in ("evaluate", "attack", "calibrate", "ptq"):
            given = [str(tmp_path / "gray.pt"), "--dataset", "cifar10", "--data", str(root)]
            given += ["--images", "16"] if verb == "ptq" else []
            assert main([verb, *given]) == 2, verb
            err = capsys.readouterr().err.strip().splitlines()[-1]
            assert "cifar10 has color images, the network takes gray ones" in err, verb
    other = make("folder", tmp_path / "folder")
    color = build("resnet8", widths=(8, 32), num_classes=3, multiplier=0.25)
    facts = {
        "preprocessing": anyprec.Preprocessing((0.5,) * 3, (0.5,) * 3, size=8).to_dict(),
        "classes": ["x", "y", "z"],
    }
    save_model(color, tmp_path / "color.pt", {"recipe": {"net": "resnet8", "data": "folder"}, **facts})
    assert main(["evaluate", str(tmp_path / "color.pt"), "--data", str(other)]) == 2
    assert "was trained for the 3 classes x, y, z, ..., folder has 3: ant, bee, cow" in capsys.readouterr().err


def test_sizes_beyond_reason_are_refused_at_once(networks, tmp_path, capsys):
    Image.new("RGB", (20, 20)).save(tmp_path / "x.png")
    assert main(["run", str(networks[3]), str(tmp_path / "x.png"), "--size", "100000"]) == 2
    assert "--size 100000 is not a side in pixels; give 1 to 6,324" in capsys.readouterr().err
