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


def test_commands(commands, tmp_path):
    made = commands("--weights", "resnet56.th", "--set", "epochs=1")
    assert [words[0] for words in made] == ["train", "ptq", "pack", "ptq", "pack", "train", "pack", "run"]
    first, last = made[0], made[5]
    assert first[1] == train_vgg.FLOAT and last[1] == train_vgg.JOINT
    settings = [word for before, word in itertools.pairwise(last) if before == "--set"]
    recipe = Recipe.load(train_vgg.JOINT).override(settings)
    out = tmp_path / "vgg"
    assert recipe.teacher == (str(out / "vgg-float.apm"), str(out / "resnet56.apm"))
    assert recipe.init == str(out / "float" / "model.pt") and recipe.epochs == 1
    assert made[3][-5:-3] == ["--normalization", "imagenet"]


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
