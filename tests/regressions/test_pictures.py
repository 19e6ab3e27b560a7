"""Image files are answered as the training run would answer them."""

import json

import numpy as np
import pytest
from blackbox import anyprec
from PIL import Image
from serving import ask, process

from anyprec.data import load_data

pytestmark = pytest.mark.slow

DIGITS = """
net = "resnet8"
data = "digits"
augment = "crop"
widths = [8, 32]
epochs = 6
optimizer = "adam"
lr = 0.005
eval_every = 6
"""
FOLDER = """
net = "resnet8"
data = "folder"
augment = "none"
widths = [8, 32]
epochs = 6
batch_size = 16
optimizer = "adam"
lr = 0.005
eval_every = 6
"""


def trained(folder, recipe, *data):
    (folder / "recipe.toml").write_text(recipe)
    run, file = folder / "run", folder / "net.apm"
    done = anyprec("train", folder / "recipe.toml", "--out", run, *data)
    assert done.returncode == 0, done.stderr
    done = anyprec("pack", run, "--out", file)
    assert done.returncode == 0, done.stderr
    rows = json.loads(anyprec("evaluate", run, "--widths", "8", "--json", *data).stdout)
    return file, float(str(find(rows, "accuracy")))


def find(record, name):
    """The one number called `name`, wherever the JSON has it."""
    if isinstance(record, dict):
        if isinstance(record.get(name), (int, float)):
            return record[name]
        record = list(record.values())
    if isinstance(record, list):
        return next((found for part in record if (found := find(part, name)) is not None), None)
    return None


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The model file of a short run, its accuracy by `evaluate`, the first 60 test pictures as files, their labels."""
    folder = tmp_path_factory.mktemp("digits")
    file, accuracy = trained(folder, DIGITS)
    data = load_data("digits", "test")
    (folder / "pictures").mkdir()
    for i in range(60):
        Image.fromarray(data.images[i].squeeze(-1)).save(folder / "pictures" / f"{i:03}.png")
    return file, accuracy, folder / "pictures", [data.classes[label] for label in data.labels[:60]]


def test_run_on_pictures_is_as_right_as_evaluate(digits):
    """Pictures of 8 x 8 were fed as 32 x 32: 10 of 100 right, where `evaluate` says 98."""
    file, accuracy, pictures, labels = digits
    done = anyprec("run", file, pictures, "--bits", "8", "--top", "1", "--json")
    assert done.returncode == 0, done.stderr
    answers = [image["bits"]["8"][0]["label"] for image in json.loads(done.stdout)["images"]]
    right = 100 * np.mean([a == b for a, b in zip(answers, labels, strict=True)])
    assert accuracy > 70 and right > accuracy - 10, f"evaluate {accuracy:.0f} %, run {right:.0f} %"


def test_classify_is_as_right_as_evaluate(digits):
    """/classify gave wrong answers with a probability near 1."""
    file, accuracy, pictures, labels = digits
    found = []
    with process(file, "--slo", "5s") as (_, port):
        for path in sorted(pictures.iterdir()):
            reply = ask(port, "POST", "/v2/models/net/classify?bits=8&top=1", path.read_bytes())
            assert reply.status == 200
            found.append(reply.json["results"][0]["labels"][0]["label"])
    right = 100 * np.mean([a == b for a, b in zip(found, labels, strict=True)])
    assert right > accuracy - 10, f"evaluate {accuracy:.0f} %, /classify {right:.0f} %"


def test_inspect_says_the_size_of_the_training(digits):
    """`inspect` said "made for 32 x 32" of a network that was trained on 8 x 8."""
    done = anyprec("inspect", digits[0])
    assert "8 x 8" in done.stdout and "32 x 32" not in done.stdout


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory):
    """Three classes of a user's own pictures, stripes of three widths, at 24 x 24 for training."""
    folder, draw = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    for split, count in (("train", 32), ("test", 10)):
        for name, period in (("ant", 2), ("bee", 4), ("cow", 8)):
            (folder / "data" / split / name).mkdir(parents=True)
            for i in range(count):
                stripe = (np.arange(24) + draw.integers(0, 8)) // (period // 2) % 2 * 150
                pixels = stripe[:, None, None] + draw.integers(0, 100, (24, 24, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / "data" / split / name / f"{i}.png")
    return *trained(folder, FOLDER, "--data", folder / "data"), folder / "data"


def test_run_on_a_folder_data_set_is_as_right_as_evaluate(own_folder):
    """Trained at the pictures' size, packed as 32 x 32 and fed 224 x 224."""
    file, accuracy, data = own_folder
    done = anyprec("run", file, "--dataset", "folder", "--data", data, "--bits", "8", "--json")
    assert done.returncode == 0, done.stderr
    found = find(json.loads(done.stdout), "accuracy")
    assert accuracy > 80 and found == pytest.approx(accuracy, abs=4), f"evaluate {accuracy} %, run {found} %"


def test_the_names_of_a_users_own_classes_are_kept(own_folder):
    """They were lost: answers were numbers."""
    file, accuracy, data = own_folder
    pictures = [data / "test" / name / f"{i}.png" for name in ("ant", "bee", "cow") for i in range(5)]
    done = anyprec("run", file, *pictures, "--bits", "8", "--top", "1", "--json")
    assert done.returncode == 0, done.stderr
    answers = [image["bits"]["8"][0]["label"] for image in json.loads(done.stdout)["images"]]
    right = 100 * np.mean([answer == path.parent.name for answer, path in zip(answers, pictures, strict=True)])
    assert right > accuracy - 20, f"evaluate {accuracy:.0f} %, run {right:.0f} %: {answers}"
