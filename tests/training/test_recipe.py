"""Recipes: round trip, overrides, and one clear line for every mistake."""

import pytest

from anyprec.errors import RecipeError
from anyprec.training.recipe import Recipe
from anyprec.training.recipe_catalog import FOLDER

RECIPES = sorted(FOLDER.glob("*.toml"))
PLAIN = Recipe(net="resnet8", data="digits")


def test_round_trip(tmp_path):
    recipe = Recipe(net="resnet20", data="cifar10", widths=(8, 1), lr=1, net_options={"multiplier": 5, "skip": "float"},
                    milestones=(3, 7), init='a "quoted" path', compile=True)  # fmt: skip
    recipe.save(tmp_path / "r.toml")
    assert Recipe.load(tmp_path / "r.toml") == recipe
    assert recipe.widths == (1, 8) and recipe.lr == 1.0


def test_override():
    recipe = PLAIN.override(["epochs=3", "loss=hard", "widths=[1,8]", "net_options.multiplier=0.5", "lr=1"])
    assert (recipe.epochs, recipe.loss, recipe.widths, recipe.lr) == (3, "hard", (1, 8), 1.0)
    assert recipe.net_options == {"multiplier": 0.5}
    assert PLAIN.net_options == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["epoch=3"], "unknown field 'epoch'; did you mean 'epochs'?"),
        (["epochs"], "not of the form name=value"),
        (["epochs=0"], "epochs=0 is not allowed; it must be above 0"),
        (["epochs=1.5"], "epochs=1.5 is of the wrong type; it must be a whole number"),
        (["epochs=many"], "epochs='many' is of the wrong type"),
        (["compile=1"], "must be true or false"),
        (["loss=kl"], "loss='kl' is not allowed; choose one of hard, soft, recursive"),
        (["widths=[1,9]"], "widths: bits=9 is not a bit-width; choose 1..8, or 32"),
        (["widths=[0]"], "bits=0"),
        (["widths=[]"], "widths is empty"),
        (["widths=[2,2]"], "twice"),
        (["label_weight=2"], "between 0 and 1"),
        (["sign_window=-0.1"], "between 0 and 1"),
        (["sign_window_end=0.1"], "sign_window_end=0.1 needs a sign_window to start from"),
        (["peak_at=1.5"], "peak_at=1.5 is not allowed; it must be between 0 and 1"),
        (["label_smoothing=1"], "label_smoothing=1.0 is not allowed; it must be 0 or more and below 1"),
        (["average=1"], "average=1.0 is not allowed; it must be 0 or more and below 1"),
        (["validation=-1"], "validation=-1 is not allowed; it must be 0 or more"),
        (["norm_lr=0"], "norm_lr=0.0 is not allowed; it must be above 0"),
        (["gradients=bf16"], "gradients='bf16' is for Winograd convolutions; set winograd to true"),
        (["gradients=fp8", "winograd=true"], "gradients='fp8' is not allowed; choose one of float32, bf16"),
        (["nesterov=true"], "nesterov=true needs optimizer='sgd' and a momentum above 0"),
        (["nesterov=true", "optimizer=sgd", "momentum=0"], "nesterov=true needs optimizer='sgd'"),
        (["schedule=circle"], "choose one of steps, cosine, poly, constant, triangle, one-cycle"),
        (["width_weights.9=1"], "width_weights names '9', which is not a bit-width; write 1..8 or 32"),
        (["width_weights.1=-1"], "width_weights.1=-1 is not allowed; it must be a number, 0 or more"),
        (["width_weights.1=much"], "width_weights.1='much' is not allowed"),
        (["width_weights=2"], "width_weights=2 is of the wrong type; it must be a table"),
        (["seed=-1"], "0 or more"),
        (["loss.x=2"], "'loss' is not a table"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(RecipeError) as caught:
        PLAIN.override(settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("net = 'resnet8'", "field 'data' is missing"),
        ("net = 'resnet8'\ndata = 'digits'\nbatchsize = 3", "did you mean 'batch_size'?"),
        ("net = ", "is not valid TOML"),
    ],
)
def test_broken_files(tmp_path, text, message):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(RecipeError, match=r"r\.toml") as caught:
        Recipe.load(tmp_path / "r.toml")
    assert message in str(caught.value)


def test_missing_file():
    with pytest.raises(RecipeError, match=r"cannot read recipe nowhere\.toml"):
        Recipe.load("nowhere.toml")


@pytest.mark.thorough
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_builds_its_network(path):
    from anyprec.data import DATASETS
    from anyprec.data.augment import find_augment
    from anyprec.nn.switching import widths_of
    from anyprec.zoo import ZOO, build

    recipe = Recipe.load(path)
    assert recipe.net in ZOO and recipe.data in DATASETS and find_augment(recipe.augment)
    model = build(
        recipe.net, widths=recipe.widths, quantizer=recipe.quantizer, scale=recipe.scale, **recipe.net_options
    )
    assert widths_of(model) == recipe.widths
