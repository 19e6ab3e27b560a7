"""`anyprec recipes`, and recipes by name: the list, one recipe, what is known of each, names that do not exist."""

import json
import os
from pathlib import Path

import pytest

from anyprec.cli import main
from anyprec.data import DATASETS
from anyprec.errors import RecipeError
from anyprec.training import recipe_catalog
from anyprec.training.recipe import Recipe


def run(capsys, *arguments):
    assert main(["recipes", *arguments]) == 0
    return capsys.readouterr()


def test_the_list_has_every_recipe(capsys):
    rows = {line.split()[0]: line for line in run(capsys).out.splitlines() if line}
    assert set(recipe_catalog.names()) <= set(rows)
    assert "resnet8" in rows["digits"] and "98.50" in rows["digits"] and "core-hours" in rows["digits"]
    assert "accuracy %, paper" in rows["cifar10-resnet20"] and "a GPU" in rows["cifar10-resnet20"]


def test_json(capsys):
    records = {record["name"]: record for record in json.loads(run(capsys, "--json").out)["recipes"]}
    assert list(records) == recipe_catalog.names()
    digits = records["digits"]
    assert (digits["dataset"], digits["network"], digits["widths"]) == ("digits", "resnet8", [1, 2, 4, 8, 32])
    assert digits["expected_from"] == "measured" and digits["core_hours"] < 1
    one = json.loads(run(capsys, "digits", "--json").out)
    assert one.pop("recipe")["epochs"] == 40 and one == digits


def test_one_recipe_is_printed_as_it_is(capsys, tmp_path):
    out, err = run(capsys, "cifar10-vgg-small")
    (tmp_path / "mine.toml").write_text(out)
    assert Recipe.load(tmp_path / "mine.toml") == Recipe.load("cifar10-vgg-small")
    assert err == (
        "next: anyprec train cifar10-vgg-small-float cifar10-vgg-small --data DIR --out runs/cifar10-vgg-small\n"
    )
    assert run(capsys, "digits").err == "next: anyprec train digits --out runs/digits\n"


def test_a_third_stage_names_both_before_it(capsys):
    stages = "cifar10-vgg-float cifar10-vgg cifar10-vgg-longer"
    assert f"next: anyprec train {stages} --data DIR" in run(capsys, "cifar10-vgg-longer").err


@pytest.mark.parametrize("name", recipe_catalog.names())
def test_what_is_known_of_each(name, capsys):
    about, recipe = recipe_catalog.about(name), Recipe.load(name)
    assert about.summary and recipe.data in DATASETS
    assert not about.after or about.after in recipe_catalog.names()
    assert {int(bits) for bits in (*about.accuracy, *about.miou)} <= set(recipe.widths)
    assert json.loads(run(capsys, name, "--json").out)["name"] == name


@pytest.mark.parametrize("given", ["digit", "cifar10_resnet8_cpu", "nothing-like-it"])
def test_unknown_names(given, capsys):
    hints = {"digit": "did you mean digits?", "cifar10_resnet8_cpu": "did you mean cifar10-resnet8-cpu"}
    assert main(["recipes", given]) == 2
    assert hints.get(given, "`anyprec recipes` lists those there are") in capsys.readouterr().err
    assert main(["train", given, "--out", "x"]) == 2
    assert hints.get(given, "`anyprec recipes` lists those there are") in capsys.readouterr().err


def test_a_file_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("cifar10-resnet8-cpu")  # a folder is no recipe
    Path("digits").write_text('net = "resnet20"\ndata = "digits"\n')
    assert Recipe.load("digits").net == "resnet20"
    assert Recipe.load("cifar10-resnet8-cpu").data == "cifar10"


def test_a_path_that_is_gone_names_the_recipe():
    with pytest.raises(RecipeError, match=r"cannot read recipe recipes/digits.toml: .*give digits"):
        Recipe.load("recipes/digits.toml")
