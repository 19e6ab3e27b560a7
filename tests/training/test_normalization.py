"""Recipes with `normalization`: images as published weights expect them, from training to the model file."""

import numpy as np
import pytest
import torch

import anyprec
from anyprec.data import ArrayData, cifar10
from anyprec.data.sets import PHOTO_MEAN, PHOTO_STD
from anyprec.errors import RecipeError
from anyprec.packing.packing import pack
from anyprec.training import run as run_module
from anyprec.training.build import build_network
from anyprec.training.checkpoint import load_model, load_state, preprocessing_in
from anyprec.training.evaluate import evaluate
from anyprec.training.recipe import Recipe
from anyprec.training.run import load_splits, train
from anyprec.training.trained_run import as_trained, preprocessing_for

SMALL = Recipe(net="resnet8", data="cifar10", net_options={"multiplier": 0.25}, epochs=1, batch_size=16,
               widths=(2, 32), normalization="imagenet", augment="crop-flip")  # fmt: skip


@pytest.fixture
def images(monkeypatch):
    """48 random images in place of CIFAR-10."""
    random = np.random.default_rng(0)
    data = ArrayData(random.integers(0, 256, (48, 32, 32, 3), np.uint8), np.arange(48) % 10, cifar10.CLASSES,
                     cifar10.MEAN, cifar10.STD, "cifar10")  # fmt: skip
    monkeypatch.setattr(run_module, "load_data", lambda *args, limit=None, **rest: data)
    return data


@pytest.mark.parametrize("validation", [0, 8])
def test_both_splits_are_normalized_so(images, validation):
    for data in load_splits(SMALL.override([f"validation={validation}"]), None):
        assert (data.mean, data.std) == (PHOTO_MEAN, PHOTO_STD)
    plain, _ = load_splits(SMALL.override(["normalization=dataset"]), None)
    assert plain.mean == cifar10.MEAN


def test_it_is_what_the_checkpoint_and_the_file_say(images, tmp_path):
    train(SMALL, tmp_path, progress=False)
    path = tmp_path / "model.pt"
    how = preprocessing_for(path, images)
    assert (how.mean, how.std) == (PHOTO_MEAN, PHOTO_STD)
    again = as_trained(images, how)  # calibration batches of later commands
    assert (again.mean, again.std, images.mean) == (PHOTO_MEAN, PHOTO_STD, cifar10.MEAN)
    assert as_trained(images, None) is images
    pack(load_model(path), tmp_path / "net.apm", example=torch.rand(8, 3, 32, 32), image=how)
    assert anyprec.load(tmp_path / "net.apm").preprocessing.mean == pytest.approx(PHOTO_MEAN, abs=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["model.pt", "net.apm"])
def test_going_on_with_another_normalization_is_refused(images, tmp_path, kind):
    train(SMALL, tmp_path / "first", progress=False)
    record = load_state(tmp_path / "first" / "model.pt")
    init = tmp_path / "first" / kind
    if kind == "net.apm":
        how = preprocessing_in(record, init)
        pack(load_model(tmp_path / "first" / "model.pt"), init, example=torch.rand(8, 3, 32, 32), image=how)
    words = "was trained with normalization='imagenet', this recipe has 'dataset'; .* --set normalization=imagenet"
    with pytest.raises(RecipeError, match=words):
        train(SMALL.override([f"init='{init}'", "normalization=dataset"]), tmp_path / "other", progress=False)
    if kind == "model.pt":
        train(SMALL.override([f"init='{init}'"]), tmp_path / "same", progress=False)


def test_an_unknown_one_is_refused():
    with pytest.raises(RecipeError, match="normalization='photo' is not allowed; choose one of dataset, imagenet"):
        SMALL.override(["normalization=photo"])


@pytest.mark.thorough
def test_the_recipe_gives_published_weights_what_they_expect(data_root):
    """Before the first step the float width has the weights' own accuracy: 182 of the first 200 test images."""
    weights = data_root / "weights" / "resnet20-12fca82f.th"
    if not weights.is_file():
        pytest.skip(f"no float weights {weights}")
    recipe = Recipe.load("cifar10-resnet20-he").override([f"init='{weights}'", "validation=0", "limit=128"])
    train_data, test = load_splits(recipe, data_root)
    model, new_widths = build_network(recipe, train_data)
    found = evaluate(model, test.take(np.arange(200)), [32], augment="none")
    assert not new_widths and found[32]["accuracy"] == pytest.approx(91.0, abs=0.5)
