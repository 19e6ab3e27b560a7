"""`anyprec attack`: its table, its JSON, its mistakes."""

import json

import pytest

from anyprec.cli import main
from anyprec.training.checkpoint import save_model
from anyprec.zoo import build


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attack")
    (folder / "run").mkdir()
    save_model(trained, folder / "run" / "model.pt", {"recipe": {"net": "resnet8", "data": "digits"}})
    save_model(build("resnet8", widths=(4,), in_channels=1, multiplier=0.25), folder / "four.pt")
    return folder


def test_verb_prints_a_table(runs, capsys):
    arguments = ["--limit", "40", "--epsilon", "0.2", "--all-widths", "--dedicated", str(runs / "four.pt")]
    assert main(["attack", str(runs / "run"), *arguments]) == 0
    out, err = capsys.readouterr()
    head, columns, *rows = out.splitlines()
    assert head == "40 test images of digits; FGSM, epsilon 0.2 of the normalized input; accuracy in %"
    assert columns.split() == ["1", "4", "float", "random"]
    names = [
        "no attack",
        "attack on 1",
        "attack on 4",
        "attack on float",
        "all widths",
        "dedicated",
        "dedicated, attacked",
    ]
    assert [row[:19].strip() for row in rows] == names
    assert [len(row[19:].split()) for row in rows] == [4, 4, 4, 4, 4, 1, 1]
    assert "attack: 40/40 img" in err


def test_verb_as_json(runs, capsys):
    arguments = ["--limit", "20", "--widths", "1,32", "--attack", "pgd", "--steps", "2", "--scale", "pixel", "--json"]
    assert main(["attack", str(runs / "run"), *arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["attack"]["kind"] == "pgd" and record["attack"]["steps"] == 2 and record["images"] == 20
    assert set(record["matrix"]) == {"1", "32"} and set(record["matrix"]["1"]) == {"1", "32", "random"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "--steps goes with --attack pgd"),
        (["--step-size", "3"], "--step-size goes with --attack pgd"),
        (["--epsilon", "-1"], "epsilon=-1.0 is not allowed"),
        (["--widths", "2"], "bits=2 is not one of this model's widths (1, 4, 32)"),
        (["--dedicated", "RUN"], "has the widths 1, 4, 32; give a model trained for one width"),
        (["--dedicated", "FOUR", "--dedicated", "FOUR"], "is the second model of 4 bit"),
    ],
)
def test_verb_mistakes(runs, one_line_error, arguments, message):
    paths = {"RUN": runs / "run", "FOUR": runs / "four.pt"}
    assert message in one_line_error("attack", runs / "run", *(paths.get(a, a) for a in arguments))
