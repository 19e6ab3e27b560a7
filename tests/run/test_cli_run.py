"""`anyprec run`: what it prints is what the network gives, from arrays, image files and test sets; mistakes in a line.

The network of most tests is a linear classifier of the digits, fitted here by least squares and then quantized.
"""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import anyprec
from anyprec.cli import main
from anyprec.cli.run import chosen_profiles
from anyprec.data import ArrayData, load_data
from anyprec.errors import InputError, NotAModelFile
from anyprec.format.file import write
from anyprec.format.graph import INPUT, Graph, GraphProfile, Op, Weight
from anyprec.run import accuracy
from anyprec.run.accuracy import AccuracyRow, measure
from anyprec.run.accuracy_plot import draw
from anyprec.run.oracle import run_graph

WIDTHS = (1, 2, 8)


def classifier(names=tuple("0123456789"), image=True):
    """pixels -> codes -> linear, at 1, 2 and 8 bits and a mixed profile of 8-bit weights and 2-bit pixels."""
    data = load_data("digits", "train")
    x = np.c_[data.images.reshape(len(data), 64) / 255, np.ones(len(data))]
    fitted = np.linalg.lstsq(x, np.eye(10)[data.labels], rcond=None)[0].T  # (10, 65)
    values, bias = fitted[:, :64], fitted[:, 64]
    most = np.quantile(np.abs(values), 0.98)
    wide = np.clip((values / most + 1) * 128, 0, 255).astype(np.uint8)
    widths = [(k, k) for k in WIDTHS] + [(8, 2)]
    tables = {"q": np.zeros((4, 2, 1), np.float32), "fc": np.zeros((4, 2, 10), np.float32)}
    for row, (weight_bits, act_bits) in enumerate(widths):
        tables["q"][row, 0] = 2**act_bits - 1
        tables["fc"][row] = np.stack([np.full(10, most / (2**weight_bits - 1) / (2**act_bits - 1)), bias])
    ops = (
        Op("q", "quantize", (INPUT,), {"signed": False, "rectify": True, "affine": True}),
        Op("flat", "flatten", ("q",)),
        Op("fc", "linear", ("flat",), {"weight": "w", "signed": False, "affine": True}),
    )
    return Graph(
        "linear", (8, 8, 1), (*(GraphProfile(str(k), k, k) for k in WIDTHS), GraphProfile("fast", {"w": 8}, {"q": 2})),
        {k: tuple(range(k)) for k in WIDTHS},
        {"w": Weight((10, 1, 1, 64), codes={k: wide.reshape(10, 1, 1, 64) >> (8 - k) for k in WIDTHS})},
        ops, ("fc",), tables, (1 / 255,) if image else None, (0.0,) if image else None, names,
    )  # fmt: skip


def painter(channels=3, outputs=("c",)):
    """A 1x1 convolution of images of any size: a map comes out."""
    rng = np.random.default_rng(0)
    codes = {1: rng.integers(0, 2, (2, 1, 1, channels), np.uint8)}
    conv = {"kernel": [1, 1], "stride": [1, 1], "pad": [0] * 4, "dilation": [1, 1], "groups": 1}
    ops = (
        Op("q", "quantize", (INPUT,), {"signed": False, "rectify": True, "affine": False}),
        Op("c", "conv", ("q",), {"weight": "w", **conv, "signed": False, "affine": False}),
        Op("mean", "adaptive_avg_pool", ("c",), {"size": [1, 1]}),
    )
    return Graph(
        "painter", (None, None, channels), (GraphProfile("1", 1, 1),), {1: (0,)},
        {"w": Weight((2, 1, 1, channels), codes=codes)}, ops, outputs, {}, (1 / 255,) * channels, (0.0,) * channels,
    )  # fmt: skip


def as_input(graph, pixels):
    return np.float32(pixels) * np.float32(graph.image_scale[0])


def oracle_accuracy(graph, data, profile):
    y = run_graph(graph, as_input(graph, data.images), profile)["fc"].reshape(len(data), 10)
    return 100 * np.mean(y.argmax(1) == data.labels)


@pytest.fixture(scope="module")
def graph():
    return classifier()


@pytest.fixture(scope="module")
def digits():
    return load_data("digits", "test", limit=100)


@pytest.fixture
def model(graph, tmp_path):
    write(graph, tmp_path / "digits.apm")
    return str(tmp_path / "digits.apm")


def run(capsys, *args):
    assert main(["run", *map(str, args)]) == 0
    return capsys.readouterr().out


def error(capsys, *args):
    assert main(["run", *map(str, args)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err.removeprefix("anyprec: error: ").rstrip()


# --- Images ---


def test_arrays_at_several_widths(model, graph, digits, tmp_path, capsys):
    np.save(tmp_path / "x.npy", digits.images[:11])  # more than one batch
    out = run(capsys, model, tmp_path / "x.npy", "--bits", "1,8,fast", "--top", "2").splitlines()
    assert out[0].split() == ["image", "bits", "best", "then"]
    assert len(out) == 1 + 11 * 3
    for i in range(11):
        for row, profile in enumerate(("1", "8", "fast")):
            y = run_graph(graph, as_input(graph, digits.images[i : i + 1]), profile)["fc"].ravel()
            first, second = np.argsort(-y, kind="stable")[:2]
            likely = 100 * np.exp(y.astype(np.float64) - y.max()) / np.exp(y.astype(np.float64) - y.max()).sum()
            cells = [part for k in (first, second) for part in (str(k), f"{likely[k]:.1f}", "%")]
            expected = [f"x.npy[{i}]", profile, *cells]
            assert out[1 + 3 * i + row].split() == expected


def test_the_widest_is_the_default(model, digits, tmp_path, capsys):
    np.save(tmp_path / "x.npy", digits.images[0])
    assert run(capsys, model, tmp_path / "x.npy").splitlines()[1].split()[:2] == ["x.npy", "8"]
    assert run(capsys, model, tmp_path / "x.npy", "--max-bits", 2).splitlines()[1].split()[:2] == ["x.npy", "2"]


def test_options_may_stand_between(model, digits, tmp_path, capsys):
    np.save(tmp_path / "x.npy", digits.images[0])
    after = run(capsys, model, tmp_path / "x.npy", "--bits", "2")
    assert run(capsys, model, "--bits", "2", tmp_path / "x.npy") == after
    assert run(capsys, "--bits", "2", model, tmp_path / "x.npy") == after


def test_every_layout_and_type_gives_the_same(model, digits, tmp_path, capsys):
    nhwc = digits.images[:3]
    for name, array in {"nhwc": nhwc, "nchw": nhwc.transpose(0, 3, 1, 2), "float": np.float32(nhwc) / 255}.items():
        np.save(tmp_path / "x.npy", array)
        run(capsys, model, tmp_path / "x.npy", "--out", tmp_path / f"{name}.npy")
    np.save(tmp_path / "x.npy", nhwc)
    run(capsys, model, tmp_path / "x.npy", "--layout", "NHWC", "--out", tmp_path / "named.npy")
    first = np.load(tmp_path / "nhwc.npy")
    assert first.shape == (3, 10) and first.dtype == np.float32
    for name in ("nchw", "named"):
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), first)
    np.testing.assert_allclose(np.load(tmp_path / "float.npy"), first, atol=1e-2)  # 1/255 is rounded


def test_json(model, graph, digits, tmp_path, capsys):
    np.save(tmp_path / "x.npy", digits.images[:2])
    found = json.loads(run(capsys, model, tmp_path / "x.npy", "--json", "--top", "1", "--bits", "1-2"))
    assert found["model"] == "linear" and [one["image"] for one in found["images"]] == ["x.npy[0]", "x.npy[1]"]
    y = run_graph(graph, as_input(graph, digits.images[1:2]), "2")["fc"].ravel()
    (best,) = found["images"][1]["bits"]["2"]
    assert (best["class"], best["label"]) == (y.argmax(), str(y.argmax()))
    assert best["score"] == pytest.approx(y.max(), rel=1e-6)


def test_without_labels_classes_are_numbers(digits, tmp_path, capsys):
    write(classifier(names=None), tmp_path / "net.apm")
    np.save(tmp_path / "x.npy", digits.images[0])
    found = json.loads(run(capsys, tmp_path / "net.apm", tmp_path / "x.npy", "--json"))
    best = found["images"][0]["bits"]["8"][0]
    assert best["label"] is None
    out = run(capsys, tmp_path / "net.apm", tmp_path / "x.npy").splitlines()
    assert out[1].split()[2] == str(best["class"])


def test_out_of_several_widths_is_a_file_each(model, digits, tmp_path, capsys):
    np.save(tmp_path / "x.npy", digits.images[:9])
    run(capsys, model, tmp_path / "x.npy", "--bits", "1,fast", "--out", tmp_path / "y.npy")
    m = anyprec.load(model)
    for name, profile in (("y.1bit.npy", "1"), ("y.fast.npy", "fast")):
        np.testing.assert_array_equal(np.load(tmp_path / name), m(digits.images[:9], profile, layout="NHWC"))
    assert not (tmp_path / "y.npy").exists()


def test_maps_and_several_outputs(tmp_path, capsys):
    write(painter(outputs=("c", "mean")), tmp_path / "net.apm")
    np.save(tmp_path / "x.npy", np.full((2, 3, 4, 5), 255, np.uint8))
    args = (tmp_path / "net.apm", tmp_path / "x.npy", "--out", tmp_path / "y.npy")
    y = np.load(tmp_path / "y.npy") if run(capsys, *args) else None
    assert y.shape == (2, 2, 4, 5) and np.load(tmp_path / "y.1.npy").shape == (2, 2)
    assert run(capsys, *args).splitlines()[1].split()[:5] == ["x.npy[0]", "1", "2", "x", "4"]
    found = json.loads(run(capsys, *args, "--json"))["images"][0]["bits"]["1"]
    assert found == {"shape": [2, 4, 5], "least": y[0].min(), "most": y[0].max()}


def test_nan_is_no_number_in_json(tmp_path, capsys):
    write(painter(1, outputs=("mean",)), tmp_path / "net.apm")
    np.save(tmp_path / "x.npy", np.zeros((1, 1, 2, 2), np.float32))
    assert "nan" not in run(capsys, tmp_path / "net.apm", tmp_path / "x.npy", "--json").lower()
    from anyprec.cli.run import number

    assert number(np.float32("nan")) is None and number(np.float32("inf")) is None
    assert number(np.float32(0.1)) == 0.1


# --- Image files ---


def save_image(path, pixels):
    pytest.importorskip("PIL").Image.fromarray(pixels).save(path)


def test_image_files_and_folders(model, digits, tmp_path, capsys):
    pytest.importorskip("PIL.Image")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("no image")
    for i in range(3):
        save_image(tmp_path / "folder" / f"{i}.png", digits.images[i, :, :, 0])
    color = np.repeat(digits.images[3], 3, axis=2)
    save_image(tmp_path / "color.png", color)
    out = tmp_path / "y.npy"
    lines = run(capsys, model, tmp_path / "folder", tmp_path / "color.png", "--out", out).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["0.png", "1.png", "2.png", "color.png"]
    expected = anyprec.load(model)(digits.images[:4], layout="NHWC")
    np.testing.assert_array_equal(np.load(out), expected)  # gray from equal colors is the same gray


def test_image_files_are_fitted_to_a_fixed_size(model, digits, tmp_path, capsys):
    pytest.importorskip("PIL.Image")
    large = np.repeat(np.repeat(digits.images[0, :, :, 0], 4, 0), 4, 1)  # 32 x 32
    wide = np.zeros((32, 52), np.uint8)
    wide[:, 10:42] = large
    save_image(tmp_path / "large.png", large)
    save_image(tmp_path / "wide.png", wide)
    run(capsys, model, tmp_path / "large.png", tmp_path / "wide.png", "--out", tmp_path / "y.npy")
    y = np.load(tmp_path / "y.npy")
    np.testing.assert_array_equal(y[0].argmax(), digits.labels[0])
    np.testing.assert_array_equal(y[1].argmax(), digits.labels[0])


def test_a_free_size_is_kept_or_given(tmp_path, capsys):
    pytest.importorskip("PIL.Image")
    save_image(tmp_path / "a.png", np.zeros((6, 9, 3), np.uint8))
    for made_for in (None, (5, 7)):
        write(replace(painter(), image_size=made_for), tmp_path / "net.apm")
        given = {"": made_for or (6, 9), "--size 4": (4, 4)}
        for options, size in given.items():
            found = json.loads(run(capsys, tmp_path / "net.apm", tmp_path / "a.png", "--json", *options.split()))
            assert found["images"][0]["bits"]["1"]["shape"] == [*size, 2]  # NHWC


def test_image_files_need_pillow(model, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"not looked at")
    monkeypatch.setitem(sys.modules, "PIL", None)  # import of it now raises ImportError
    assert error(capsys, model, tmp_path / "a.png").endswith("run: pip install pillow")


# --- A test set ---


def test_accuracy_is_that_of_the_oracle(model, graph, digits):
    rows = measure(anyprec.load(model), digits, ["1", "2", "8", "fast"], batch=7)
    for row in rows:
        assert row.accuracy == oracle_accuracy(graph, digits, row.profile)
        assert row.latency_ms > 0
    assert rows[2].accuracy > 85  # a least-squares fit of the digits
    assert [row.bytes for row in rows] == [anyprec.load(model).bytes_needed(b) for b in (1, 2, 8, "fast")]


@pytest.mark.parametrize("batch", [1, 64, 1000])
def test_accuracy_does_not_depend_on_the_batch(model, graph, digits, batch):
    assert measure(anyprec.load(model), digits, ["8"], batch=batch)[0].accuracy == oracle_accuracy(graph, digits, "8")


def test_a_file_without_statistics_gets_those_of_the_data(graph, digits, tmp_path):
    write(classifier(image=False), tmp_path / "net.apm")
    plain = ArrayData(digits.images, digits.labels, digits.classes, (0.0,), (1.0,), "mine")
    (row,) = measure(anyprec.load(tmp_path / "net.apm"), plain, ["8"])
    assert row.accuracy == oracle_accuracy(graph, digits, "8")


def test_table_and_json(model, graph, digits, capsys):
    out = run(capsys, model, "--dataset", "digits", "--limit", "100").splitlines()
    assert out[0].startswith("digits: 100 test images of digits; batch 1, 1 thread, ")
    assert out[1].split() == ["bits", "accuracy", "ms", "an", "image", "bytes"]
    assert [line.split()[0] for line in out[2:]] == ["1", "2", "8", "fast"]
    args = (model, "--dataset", "digits", "--limit", "100", "--json", "--bits", "8", "--threads", "2", "--batch", "10")
    found = json.loads(run(capsys, *args))
    assert (found["images"], found["threads"], found["batch"]) == (100, 2, 10)
    ((bits, row),) = found["results"].items()
    assert (bits, row["accuracy"]) == ("8", oracle_accuracy(graph, digits, "8"))
    assert f"{row['accuracy']:.2f} %" in out[4] and f"{row['bytes']:,}" in out[4]


def test_a_folder_needs_a_size_where_the_file_has_none(tmp_path, capsys):
    pil = pytest.importorskip("PIL.Image")
    root = tmp_path / "photos"
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            pil.new("RGB", (70, 60), (255 * (name == "dog"), 0, 0)).save(root / split / name / "a.png")
    write(painter(outputs=("mean",)), tmp_path / "net.apm")
    m, data = anyprec.load(tmp_path / "net.apm"), load_data("folder", "test", root)
    assert "give --size" in error(capsys, tmp_path / "net.apm", "--dataset", "folder", "--data", root)
    picture = root / "test" / "cat" / "a.png"
    assert "does not say at which size it was trained" in error(capsys, tmp_path / "net.apm", picture)
    run(capsys, tmp_path / "net.apm", picture, "--size", 28)
    how = accuracy.test_preprocessing(m, data, 28)
    assert (how.size, how.to) == ((28, 28), (32, 32))
    assert accuracy.reader(m, data, 28)(np.arange(2)).shape == (2, 28, 28, 3)
    assert measure(m, data, ["1"], size=28)[0].accuracy in (0, 50, 100)


def test_arrays_of_another_size_are_resized(digits, tmp_path):
    def size(data, wanted=None):
        return accuracy.test_preprocessing(m, data, wanted).size

    write(painter(1, outputs=("mean",)), tmp_path / "net.apm")
    m = anyprec.load(tmp_path / "net.apm")
    assert size(digits) == size(digits, 8) == (8, 8) and size(digits, 16) == (16, 16)
    house_numbers = ArrayData(np.zeros((2, 32, 32, 3), np.uint8), [0, 1], "01", (0,) * 3, (1,) * 3, "svhn")
    assert size(house_numbers) == (40, 40)  # as it is trained
    assert size(house_numbers, 32) == (32, 32)


def test_picture(model, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(capsys, model, "--dataset", "digits", "--limit", "20", "--picture", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    draw([AccuracyRow("32", 0.0, 1.0, 10)], "one row, nothing right", tmp_path / "b.svg")
    assert "<svg" in (tmp_path / "b.svg").read_text()


def test_it_needs_no_torch(model, tmp_path):
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    script = "import sys; from anyprec.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "run", model, "--dataset", "digits", "--limit", "20"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


# --- Mistakes ---


def test_which_bits(model):
    m = anyprec.load(model)
    assert chosen_profiles(m, None, ["8"]) == ["8"]
    assert chosen_profiles(m, "all", ["8"]) == ["1", "2", "8", "fast"]
    assert chosen_profiles(m, "fast, 1-2,1", ["8"]) == ["fast", "1", "2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "9"], "bits=9 is not a bit-width; choose 1..8, or 32 for float"),
        (["--bits", "4"], "bits=4 is not in this model file, which has 1, 2, 8, fast"),
        (["--bits", "fsat"], "bits='fsat' is not in this model file, which has 1, 2, 8, fast; did you mean 'fast'?"),
        (["--max-bits", "2", "--bits", "8"], "bits=8 is in the file but not loaded"),
        (["--threads", "0"], "threads=0 is not a number of threads"),
        (["--top", "0"], "--top 0 is too few"),
        (["--out", "y.txt"], "--out y.txt: give a file .npy, or .png for a mask, in a folder that is there"),
        (["--out", "no/such/y.npy"], "give a file .npy, or .png for a mask, in a folder that is there"),
        (["--layout", "NCHW"], "x.npy: input has shape (2, 8, 8, 1), which is not layout='NCHW'"),
        (["--layout", "CHW"], "argument --layout: invalid choice: 'CHW'"),
        (["--dataset", "digits"], "got both images ("),
        (["--limit", "3"], "--limit goes with --dataset NAME, not with images; leave it out"),
    ],
)
def test_wrong_options(model, digits, tmp_path, capsys, options, message):
    np.save(tmp_path / "x.npy", digits.images[:2])
    assert message in error(capsys, model, tmp_path / "x.npy", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no images; give .npy arrays, image files or folders, or --dataset NAME"),
        (["--dataset", "digitz"], "did you mean digits?"),
        (["--dataset", "digits", "--top", "1"], "--top goes with images, not with --dataset; leave it out"),
        (["--dataset", "digits", "--batch", "0"], "--batch 0 is too few"),
        (["--dataset", "digits", "--limit", "401"], "limit=401 is not allowed"),
        (["--dataset", "digits", "--size", "9"], "--size 9 does not fit linear, which takes images of 8 x 8"),
        (["--dataset", "cifar10"], "cifar10 needs a folder"),
    ],
)
def test_wrong_options_of_a_test_set(model, capsys, options, message):
    assert message in error(capsys, model, *options)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 1, 8, 8), np.int64), "x.npy: input is int64; give float32, or uint8 images"),
        (np.zeros((2, 3, 8, 8), np.uint8), "x.npy: images have 3 channels, the model takes 1"),
        (np.zeros((2, 1, 8, 9), np.uint8), "x.npy: "),
        (np.zeros((0, 1, 8, 8), np.uint8), "no image at all"),
        (np.zeros(8, np.uint8), "has shape (8,); give images"),
        (np.array([{}, 1], object), "cannot be read as an array"),
    ],
)
def test_wrong_arrays(model, tmp_path, capsys, array, message):
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    assert message in error(capsys, model, tmp_path / "x.npy")


def test_wrong_files(model, tmp_path, capsys):
    pytest.importorskip("PIL.Image")
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "x.png").write_bytes(b"hello")
    assert "there is no file or folder" in error(capsys, model, tmp_path / "gone.npy")
    assert "has no images in it" in error(capsys, model, tmp_path / "empty")
    assert "cannot be read as an array" in error(capsys, model, tmp_path / "x.npy")
    assert "is no image that can be decoded" in error(capsys, model, tmp_path / "x.png")
    assert "cannot be opened" in error(capsys, tmp_path, tmp_path / "x.npy")
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04")
    for checkpoint in (tmp_path, tmp_path / "model.pt"):
        line = f"this is a checkpoint, not packed yet; pack it first: anyprec pack {checkpoint} --out net.apm"
        assert line in error(capsys, checkpoint, tmp_path / "x.npy")
        with pytest.raises(NotAModelFile, match="not packed yet"):
            anyprec.load(checkpoint)
    assert "cannot be opened" in error(capsys, tmp_path / "gone.apm", tmp_path / "x.npy")


def test_wrong_networks(digits, tmp_path, capsys):
    pytest.importorskip("PIL.Image")
    save_image(tmp_path / "a.png", np.zeros((8, 8), np.uint8))
    save_image(tmp_path / "b.png", np.zeros((4, 8), np.uint8))
    write(classifier(image=False), tmp_path / "plain.apm")
    assert "does not say how pixels become its input" in error(capsys, tmp_path / "plain.apm", tmp_path / "a.png")
    write(painter(4), tmp_path / "four.apm")
    assert "takes images of 4 channels, image files have 1 or 3" in error(
        capsys, tmp_path / "four.apm", tmp_path / "a.png"
    )
    write(painter(1), tmp_path / "map.apm")
    both = (tmp_path / "map.apm", tmp_path / "a.png", tmp_path / "b.png", "--out", tmp_path / "y.npy")
    assert "images of different sizes give outputs of different sizes" in error(capsys, *both)
    assert "does not give one score a class" in error(capsys, tmp_path / "map.apm", "--dataset", "digits")
    assert "--size 0 is not a side in pixels; give 1 to 6,324" in error(
        capsys, tmp_path / "map.apm", tmp_path / "a.png", "--size", 0
    )
    write(painter(1, outputs=("mean",)), tmp_path / "two.apm")
    assert "gives 2 scores, digits has 10 classes" in error(capsys, tmp_path / "two.apm", "--dataset", "digits")
    write(painter(3), tmp_path / "color.apm")
    assert "digits has images of 1 channels, painter takes 3" in error(
        capsys, tmp_path / "color.apm", "--dataset", "digits"
    )
    with pytest.raises(InputError, match="gives images of 8 x 8, tall takes 8 x 9"):
        accuracy.reader(Tall(), digits, None)


class Tall:
    """A model of a fixed size that is no square."""

    name, input_shape, takes_uint8, preprocessing = "tall", (8, 9, 1), True, None
