"""bench/train_vgg.py: the commands it gives, in order, and that it goes on where it stopped."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import train_vgg

from anyprec.training.recipe import Recipe


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Of a call with these arguments; each command leaves the file that it would write."""

    def called(*more):
        made = []

        def run(*argv, processes=1):
            words = [str(part) for part in argv]
            made.append(words)
            out = Path(words[words.index("--out") + 1]) if "--out" in words else None
            if words[0] == "train":
                out.mkdir(exist_ok=True)
                (out / "model.pt").touch()
            elif words[0] == "pack":
                out.touch()

        monkeypatch.setattr(train_vgg, "run", run)
        given = ["train_vgg.py", "--data", "DIR", "--out", str(tmp_path / "vgg"), *more]
        monkeypatch.setattr(sys, "argv", given)
        train_vgg.main()
        return made

    return called


def recipe_of(words):
    return Recipe.load(words[1]).override([word for before, word in itertools.pairwise(words) if before == "--set"])


def test_commands(commands, tmp_path):
    made = commands("--weights", "resnet56.th", "--set", "epochs=1")
    assert [words[0] for words in made] == ["ptq", "pack", "train", "ptq", "pack", "train", "pack", "run"]
    first, last = (recipe_of(made[i]) for i in (2, 5))
    assert made[2][1] == train_vgg.FLOAT and made[5][1] == train_vgg.JOINT
    recipe, out = last, tmp_path / "vgg"
    assert first.teacher == (str(out / "resnet56.apm"),) and first.loss == "wider+label"
    assert first.gradients == last.gradients == ("bf16" if train_vgg.has_bf16() else "float32")
    assert recipe.teacher == (str(out / "vgg-float.apm"), str(out / "resnet56.apm"))
    assert recipe.init == str(out / "float" / "model.pt") and recipe.epochs == 1
    assert made[0][-5:-3] == ["--normalization", "imagenet"]


def test_without_weights_it_is_its_own_teacher(commands, tmp_path):
    made = commands()
    (teacher,) = [word for words in made for word in words if word.startswith("teacher=")]
    assert json.loads(teacher.removeprefix("teacher=")) == [str(tmp_path / "vgg" / "vgg-float.apm")]


def test_it_goes_on_where_it_stopped(commands, tmp_path):
    commands()
    (tmp_path / "vgg" / "joint" / "model.pt").unlink()
    (tmp_path / "vgg" / "joint" / "last.pt").touch()
    made = commands()
    assert [words[0] for words in made] == ["train", "pack", "run"] and "--resume" in made[0]
