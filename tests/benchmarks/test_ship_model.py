"""bench/ship_model.py on a network of the digits: the file and card it makes, and what it refuses to ship."""

import hashlib
import json
import shutil

import numpy as np
import pytest

pytest.importorskip("torch")

import ship_model
import torch

import anyprec
from anyprec.data import load_data
from anyprec.format import ModelFile, read
from anyprec.format.shapes import fits_toom_cook
from anyprec.models import catalog
from anyprec.reproduce import synthetic
from anyprec.run.accuracy import measure
from anyprec.training.checkpoint import save_model
from anyprec.training.recipe import Recipe
from anyprec.training.run import train
from anyprec.zoo import build


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two stages, so that the card has both recipes."""
    folder = tmp_path_factory.mktemp("runs")
    base = {"net": "resnet8", "data": "digits", "epochs": 1, "batch_size": 64, "eval_every": 0}
    options = {"net_options": {"multiplier": 0.25, "num_classes": 10, "in_channels": 1}}
    train(Recipe.from_dict({**base, **options, "widths": [32], "limit": 64}), folder / "float", progress=False)
    joint = {"init": str(folder / "float" / "model.pt"), "widths": [1, 2, 4, 8, 32], "seed": 5}
    train(Recipe.from_dict({**base, **options, **joint}), folder / "joint", progress=False)
    return folder / "joint"


@pytest.fixture(scope="module")
def made(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    options = ["--summary", "Digits", "--core-hours", "0.01", "--commit", "c" * 40, "--note", "for a test"]
    assert ship_model.main([str(run), "--name", "digits-tiny", "--out", str(folder), *options]) == 0
    return folder


@pytest.fixture
def shipped(made, tmp_path, monkeypatch):
    """A copy of what was made, as the catalog."""
    shutil.copytree(made, tmp_path / "models")
    monkeypatch.setattr(catalog, "FOLDER", tmp_path / "models")
    return tmp_path / "models"


@pytest.mark.thorough
def test_file_and_card(shipped, run):
    assert sorted(path.name for path in shipped.iterdir()) == ["digits-tiny.apm", "digits-tiny.json"]
    card, m = catalog.card("digits-tiny"), anyprec.load("digits-tiny")
    assert m.widths == card.widths == tuple(range(1, 9))  # 3, 5, 6, 7 are calibrated; no float weights
    data = load_data("digits", "test")
    for row in measure(m, data, m.profiles, batch=50):  # the engine's own accuracy, over the whole test set
        facts = card.profiles[row.profile]
        assert facts.accuracy == m.accuracy(row.profile) == pytest.approx(row.accuracy)
        assert facts.bytes == row.bytes and facts.agreement >= 99.9 and facts.ms is None
    assert (card.test_images, card.classes, card.input[2], card.data) == (400, 10, 1, "digits")
    assert card.bytes == (shipped / "digits-tiny.apm").stat().st_size
    assert card.training["core_hours"] == 0.01 and card.training["commit"] == "c" * 40
    first, second = card.training["recipes"]
    assert first["widths"] == [32] and second["seed"] == card.training["seed"] == 5
    assert str(run.parent) not in (shipped / "digits-tiny.json").read_text()  # no path of this machine
    with ModelFile(shipped / "digits-tiny.apm") as file:
        assert file.verify() and not file.sizes.tails


@pytest.mark.slow
def test_a_segmentation(tmp_path, monkeypatch):
    """Pixels instead of images, and mean IoU beside them."""
    pytest.importorskip("PIL.Image")
    root, draw = tmp_path / "data", np.random.default_rng(0)
    root.mkdir()
    (root / "classes.txt").write_text("red\ngreen\nblue\n")
    synthetic.scenes(root, draw, "test", (40, 30), 3)
    options = {"multiplier": 0.5, "pyramid": 8, "rates": [1, 2], "skip": "quantized"}
    recipe = Recipe(
        net="deeplab-small", data="masks", net_options=options, augment="voc-24x24", epochs=1, batch_size=4,
        widths=(1, 2, 4, 8), lr=0.01, limit=4,
    )  # fmt: skip
    train(recipe, tmp_path / "run", data_root=root, progress=False)
    (tmp_path / "models").mkdir()
    command = [str(tmp_path / "run"), "--name", "scenes", "--data", str(root), "--out", str(tmp_path / "models")]
    assert ship_model.main(command) == 0
    monkeypatch.setattr(catalog, "FOLDER", tmp_path / "models")
    card, m = catalog.card("scenes"), anyprec.load("scenes")
    data = load_data("masks", "test", root)
    assert card.task == "segmentation" and card.test_images == len(data) and card.classes == 3
    for row in measure(m, data, m.profiles):
        facts = card.profiles[row.profile]
        assert (facts.accuracy, facts.miou) == (
            pytest.approx(row.accuracy, abs=1e-4),
            pytest.approx(row.miou, abs=1e-4),
        )
    assert "mIoU" in ship_model.section(card)


@pytest.mark.thorough
def test_times_come_later(shipped, monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (7.3, 0.0, 0.0))
    before = catalog.card("digits-tiny")
    command = ["--times", "digits-tiny", "--rounds", "1", "--out", str(shipped)]
    assert ship_model.main(command) == 1
    assert "the machine is busy (load 7.3)" in capsys.readouterr().err
    assert catalog.card("digits-tiny") == before
    assert ship_model.main([*command, "--busy"]) == 0
    after = catalog.card("digits-tiny")
    assert all(facts.ms > 0 for facts in after.profiles.values()) and after.timing["busy"] is True
    assert {**after.to_dict(), "timing": 0, "profiles": 0} == {**before.to_dict(), "timing": 0, "profiles": 0}


@pytest.mark.thorough
def test_a_file_is_packed_again_with_what_pack_has_learned_since(shipped, monkeypatch, capsys):
    before, graph = catalog.card("digits-tiny"), read(shipped / "digits-tiny.apm")
    command = ["--again", "digits-tiny", "--out", str(shipped)]
    assert ship_model.main(command) == 1
    assert "is as `pack` would write it today" in capsys.readouterr().err
    monkeypatch.setattr("anyprec.packing.lower.pays_toom_cook", lambda op, shape: fits_toom_cook(op))
    assert ship_model.main(command) == 0
    after, again = catalog.card("digits-tiny"), read(shipped / "digits-tiny.apm")
    assert [op.name for op in again.ops if "toom_cook" in op.attributes] == ["conv0"]
    assert all(np.array_equal(again.tables[name], table) for name, table in graph.tables.items())
    assert after.training == before.training and after.timing is None and after.sha256 != before.sha256
    assert all(facts.agreement >= 99.9 for facts in after.profiles.values())
    assert ship_model.main(["--again", "nothing", "--out", str(shipped)]) == 1
    assert "there is no card" in capsys.readouterr().err


@pytest.mark.thorough
def test_an_engine_that_disagrees_is_not_shipped(run, tmp_path, monkeypatch, capsys):
    class Wrong:
        def __init__(self, model):
            self.model, self.widths = model, model.widths

        def __call__(self, x, **options):
            y = self.model(x, **options)
            return y[:, ::-1] if options["bits"] == 2 else y

    load = anyprec.load
    monkeypatch.setattr(ship_model.anyprec, "load", lambda path: Wrong(load(path)))
    assert ship_model.main([str(run), "--name", "digits-tiny", "--out", str(tmp_path)]) == 1
    assert "the engine answers as torch on" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_what_is_refused(run, tmp_path, monkeypatch, capsys):
    def error(*args):
        assert ship_model.main([*map(str, args), "--out", str(tmp_path)]) == 1
        return capsys.readouterr().err

    assert "give a run and --name" in error(run)
    assert "--name 'Bad_Name'" in error(run, "--name", "Bad_Name")
    assert "there is no" in error(tmp_path / "nothing", "--name", "a")
    monkeypatch.setattr(ship_model, "MAX_SHIPPED_BYTES", 1000)
    assert "together at most 1,000" in error(run, "--name", "a")


def test_the_page(shipped):
    text = "# Models\n<!-- tables of bench/ship_model.py --page -->\nold\n<!-- end of the tables -->\nrest\n"
    made = ship_model.paged(text)
    assert made.startswith("# Models\n") and made.endswith("<!-- end of the tables -->\nrest\n") and "old" not in made
    card = catalog.card("digits-tiny")
    assert f"| 1 | {card.profiles['1'].accuracy:.2f} % |" in made and "### digits-tiny" in made
    assert "anyprec run digits-tiny --dataset digits" in made and "for a test" in made
    assert ship_model.paged(made) == made
    assert json.dumps(card.to_dict())


def test_recipes_of_a_run_that_began_with_published_weights(tmp_path):
    """They are named by file and content; the path stays out of the card."""
    model = build("resnet8", multiplier=0.25)
    torch.save({"conv.weight": torch.zeros(1)}, tmp_path / "float.th")
    recipe = Recipe(net="resnet8", data="cifar10", init=str(tmp_path / "float.th"))
    save_model(model, tmp_path / "model.pt", {"recipe": recipe.to_dict()})
    (only,) = ship_model.recipes_of(tmp_path / "model.pt")
    digest = hashlib.sha256((tmp_path / "float.th").read_bytes()).hexdigest()
    assert only["init"] == f"float weights float.th, SHA-256 {digest}"


def test_recipes_name_a_teacher_by_its_content(tmp_path):
    teacher = catalog.find("cifar10-vgg-small")
    recipe = Recipe(net="resnet8", data="digits", widths=(1, 32), loss="soft", teacher=str(teacher))
    model = build("resnet8", in_channels=1, multiplier=0.25, widths=(1, 32))
    save_model(model, tmp_path / "model.pt", {"recipe": recipe.to_dict()})
    (only,) = ship_model.recipes_of(tmp_path / "model.pt")
    digest = catalog.card("cifar10-vgg-small").sha256
    assert only["teacher"] == [f"model file cifar10-vgg-small.apm, SHA-256 {digest}"]


def test_recipes_of_a_run_that_began_with_a_model_file(tmp_path):
    """The card of that file has the stages before."""
    model = build("resnet8", multiplier=0.25)
    recipe = Recipe(net="vgg-speed", data="cifar10", init="cifar10-vgg", seed=3)
    save_model(model, tmp_path / "model.pt", {"recipe": recipe.to_dict()})
    *before, last = ship_model.recipes_of(tmp_path / "model.pt")
    assert before == catalog.card("cifar10-vgg").training["recipes"]
    assert last["init"] == "the model file of the stage before" and last["seed"] == 3
