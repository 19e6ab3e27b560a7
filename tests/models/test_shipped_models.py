"""The models that come with the package: each loads, its card says what its file says, and it answers real pictures."""

import hashlib
import json
import math
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import anyprec
from anyprec.data import DATASETS, MaskData, load_data
from anyprec.format import ModelFile
from anyprec.models import catalog
from anyprec.models.catalog import FOLDER, MAX_SHIPPED_BYTES

ROOT = Path(__file__).parents[2]
CARDS = {name: catalog.card(name) for name in catalog.names()}
SHIPPED = {name: card for name, card in CARDS.items() if card.url is None}
# data set -> its folder among the real ones
PLACES = {"cifar10": "cifar-10-batches-bin", "camvid": "camvid", "digits": "."}


def test_together_they_are_small():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.apm")) <= MAX_SHIPPED_BYTES


def test_every_file_has_its_card_and_every_card_its_file():
    assert {path.stem for path in FOLDER.glob("*.apm")} == set(SHIPPED)
    for card in CARDS.values():
        assert card.url is None or card.url.startswith("https://")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_card_says_what_the_file_says(name):
    card, path = CARDS[name], FOLDER / f"{name}.apm"
    assert card.name == name
    assert card.bytes == path.stat().st_size
    assert card.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with ModelFile(path) as file:
        file.verify()
        assert file.complete
        graph = file.graph_json
        assert list(card.profiles) == [profile.name for profile in file.profiles]
        for profile in file.profiles:
            facts = card.profiles[profile.name]
            assert facts.accuracy == profile.accuracy and 0 < facts.accuracy <= 100
            assert facts.bytes == file.bytes_for_profile(profile)
            assert facts.agreement >= 99.9
        assert card.parameters == sum(math.prod(weight["shape"]) for weight in graph["weights"].values())
        assert list(card.input) == graph["input"]["shape"] and card.made_by == graph["made_by"]
        assert card.classes == len(graph["labels"])
    assert set(range(1, 9)) <= set(card.widths)


@pytest.mark.parametrize("name", CARDS)
def test_the_card_tells_how_it_was_made(name):
    card = CARDS[name]
    assert card.data in DATASETS and card.summary and card.license
    last = card.training["recipes"][-1]
    assert last["net"] == card.network and last["data"] == card.data and last["seed"] == card.training["seed"]
    assert len(card.training["commit"]) == 40
    assert "/" not in json.dumps([recipe.get("init", "") for recipe in card.training["recipes"]])
    timed = [facts.ms is not None for facts in card.profiles.values()]
    assert all(timed) if card.timing is not None else not any(timed)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_answers_without_being_told_how(name):
    """Pictures of any size go in: the file knows the rest."""
    m = anyprec.load(name)
    assert m.preprocessing is not None and len(m.labels) == CARDS[name].classes
    found = m.predict(np.random.default_rng(0).integers(0, 256, (48, 70, 3), np.uint8), bits=1)
    if CARDS[name].task == "segmentation":
        assert found.classes.shape == (48, 70)
    else:
        assert sum(one.probability for one in m.predict(np.zeros((9, 9, 3), np.uint8), top=99)) == pytest.approx(1)


@pytest.mark.parametrize("name", SHIPPED)
def test_real_pictures(name, data_root):
    """A few hundred test images: as accurate as the card says, but for chance (four deviations), at 1, 2 and 8 bit."""
    card, m = CARDS[name], anyprec.load(name)
    place = data_root / PLACES[card.data]
    if not place.is_dir():
        pytest.skip(f"no folder {place}")
    data = load_data(card.data, "test", place, limit=8 if card.task == "segmentation" else 300)
    if isinstance(data, MaskData):
        pytest.skip("measured by `anyprec run --dataset`")
    for bits in (1, 2, 8):
        answers = [best.class_index for (best,) in m.predict(data.read(np.arange(len(data))), bits=bits, top=1)]
        share = card.profiles[str(bits)].accuracy / 100
        chance = 4 * math.sqrt(share * (1 - share) / len(data))
        assert np.mean(np.array(answers) == data.labels) == pytest.approx(share, abs=chance)


def test_the_page_shows_the_cards():
    pytest.importorskip("torch")
    from ship_model import paged

    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert paged(page) == page, "docs/models.md is out of date: python bench/ship_model.py --page"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_they_are_in_the_package(kind, tmp_path):
    """What pip installs, built without the engine, which takes minutes."""
    pytest.importorskip("scikit_build_core")
    settings = {"wheel.cmake": "false", "wheel.py-api": "py3"} if kind == "wheel" else {}
    script = f"from scikit_build_core.build import build_{kind} as build; print(build({str(tmp_path)!r}, {settings!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.iterdir()
    if kind == "wheel":
        names, start = zipfile.ZipFile(made).namelist(), "anyprec/models/"
    else:
        with tarfile.open(made) as tar:
            names = tar.getnames()
        start = f"{made.name.removesuffix('.tar.gz')}/src/anyprec/models/"
    inside = {name.removeprefix(start) for name in names if name.startswith(start)}
    wanted = {path.name for path in FOLDER.iterdir() if path.suffix in (".apm", ".json", ".py")}
    assert {"catalog.py"} <= wanted <= inside
