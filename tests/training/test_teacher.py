"""Recipes with `teacher`: a model file whose answers every width learns from."""

import numpy as np
import pytest
import torch
from torch import nn

import anyprec
from anyprec.data import load_data
from anyprec.errors import ModelFileError, RecipeError
from anyprec.packing.packing import pack
from anyprec.preprocessing import Preprocessing
from anyprec.training.checkpoint import load_state
from anyprec.training.joint import joint_step
from anyprec.training.recipe import Recipe
from anyprec.training.run import train
from anyprec.training.teacher import Teacher

SMALL = Recipe(net="resnet8", data="digits", net_options={"multiplier": 0.25}, epochs=1, batch_size=64, limit=128,
               widths=(1, 4, 32), loss="wider+label", eval_every=0)  # fmt: skip


def classifier(classes=10, channels=1):
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes),
    )  # fmt: skip


def packed(path, *, mean=(0.2,), std=(0.5,), classes=10, channels=1, labels=None, image=True):
    torch.manual_seed(0)
    example = torch.rand(4, channels, 8, 8)
    model = anyprec.convert(classifier(classes, channels), (8,), example=example)
    anyprec.calibrate(model, [example])
    how = Preprocessing(mean=mean, std=std, size=8) if image else None
    pack(model, path, example=example, image=how, labels=labels)
    return path


@pytest.fixture
def digits():
    return load_data("digits", "train", None, limit=64)


def test_images_are_normalized_as_in_its_own_training(tmp_path, digits):
    path = packed(tmp_path / "teacher.apm", mean=(0.3,), std=(0.7,))
    pixels = np.random.default_rng(0).random((5, 8, 8, 1), np.float32)
    learner = ((pixels - digits.mean) / digits.std).astype(np.float32)
    own = ((pixels - 0.3) / 0.7).astype(np.float32)
    expected = anyprec.load(path, layout="NHWC")(own)
    assert np.allclose(Teacher([str(path)], digits)(learner).numpy(), expected, atol=2e-2)
    assert not np.allclose(anyprec.load(path, layout="NHWC")(learner), expected, atol=2e-2)


def refused(match, path, digits):
    with pytest.raises(RecipeError, match=match):
        Teacher([str(path)], digits)(np.zeros((1, 8, 8, 1), np.float32))


def test_one_for_other_classes_is_refused(tmp_path, digits):
    refused("gives 7 classes, the data has 10", packed(tmp_path / "t.apm", classes=7), digits)


def test_one_with_other_names_of_classes_is_refused(tmp_path, digits):
    names = [f"thing {i}" for i in range(10)]
    refused("knows the classes thing 0, thing 1", packed(tmp_path / "t.apm", labels=names), digits)


def test_one_for_other_channels_is_refused(tmp_path, digits):
    path = packed(tmp_path / "t.apm", channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    refused("is for 3 channels, digits has 1", path, digits)


def test_one_that_does_not_say_how_images_are_normalized_is_refused(tmp_path, digits):
    refused("does not say how its training normalized", packed(tmp_path / "t.apm", image=False), digits)


def test_a_recipe_needs_a_loss_that_learns_from_answers():
    with pytest.raises(RecipeError, match=r"teacher=net\.apm needs a loss that learns from answers"):
        SMALL.override(["teacher=net.apm", "loss=hard"])


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises((ModelFileError, FileNotFoundError), match=r"none\.apm"):
        train(SMALL.override([f"teacher={tmp_path}/none.apm"]), tmp_path / "run", progress=False)


def test_several_teach_by_the_mean_of_their_probabilities(tmp_path, digits):
    paths = [str(packed(tmp_path / "a.apm")), str(packed(tmp_path / "b.apm", mean=(0.9,), std=(0.1,)))]
    images = np.random.default_rng(0).random((5, 8, 8, 1), np.float32)
    one, other = (Teacher([path], digits)(images).softmax(1) for path in paths)
    assert not torch.allclose(one, other, atol=1e-3)
    assert torch.allclose(Teacher(paths, digits)(images).softmax(1), (one + other) / 2, atol=1e-6)


def test_a_recipe_names_one_or_several(tmp_path):
    for setting, expected in (
        ("teacher=a.apm", ("a.apm",)),
        ('teacher=["a.apm", "b.apm"]', ("a.apm", "b.apm")),
        ('teacher=""', ()),
    ):
        recipe = SMALL.override([setting])
        assert recipe.teacher == expected
        recipe.save(tmp_path / "recipe.toml")
        assert Recipe.load(tmp_path / "recipe.toml") == recipe
    with pytest.raises(RecipeError, match=r"teacher=\[1\] is of the wrong type; it must be a list of strings"):
        SMALL.override(["teacher=[1]"])


def test_it_changes_what_is_learned_and_repeats(tmp_path):
    path = packed(tmp_path / "teacher.apm")

    def weights(name, *settings):
        train(SMALL.override(settings), tmp_path / name, progress=False)
        return load_state(tmp_path / name / "model.pt")["state_dict"]

    alone, taught, again = weights("a"), weights("b", f"teacher={path}"), weights("c", f"teacher={path}")
    assert any(not torch.equal(alone[key], taught[key]) for key in alone)
    assert all(torch.equal(taught[key], again[key]) for key in taught)


def step_losses(loss, teacher):
    torch.manual_seed(0)
    model = anyprec.convert(classifier(), (2, 32), example=torch.rand(4, 1, 8, 8))
    images, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    return {bits: value.item() for bits, (value, _) in joint_step(
        model, images, labels, (2, 32), loss=loss, teacher=teacher).items()}  # fmt: skip


@pytest.mark.parametrize("loss", ["soft", "recursive", "wider", "wider+label"])
def test_the_widest_width_learns_from_it(loss):
    even, sure = torch.zeros(4, 10), 20 * torch.eye(10)[:4]
    assert step_losses(loss, even)[32] != step_losses(loss, sure)[32]
    without = step_losses(loss, None)[32]  # from the labels, which are what `sure` says
    assert step_losses(loss, sure)[32] == pytest.approx(without, abs=1e-4)


def test_who_teaches_the_narrow_width():
    even, sure = torch.zeros(4, 10), 20 * torch.eye(10)[:4]
    assert step_losses("recursive", even)[2] == step_losses("recursive", sure)[2]  # float does
    assert step_losses("soft", even)[2] != step_losses("soft", sure)[2]
    assert step_losses("wider", even)[2] != step_losses("wider", sure)[2]


def test_hard_takes_no_teacher():
    with pytest.raises(RecipeError, match="a teacher needs a loss that learns from answers"):
        step_losses("hard", torch.zeros(4, 10))
