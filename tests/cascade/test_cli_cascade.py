"""`anyprec cascade`: the curve, the stored cascade, and mistakes."""

import json

import numpy as np
import pytest

from anyprec.cli import main
from anyprec.models.catalog import find
from anyprec.run.model import load


@pytest.fixture
def arrays(tmp_path, images):
    path = tmp_path / "images.npy"
    np.save(path, images)
    return path


@pytest.mark.thorough
def test_a_cascade_is_stored_and_runs(arrays, images, tmp_path, capsys):
    out, picture = tmp_path / "auto.apm", tmp_path / "curve.png"
    command = ["cascade", "cifar10-vgg-small", arrays, "--agreement", "95", "--stages", "1,8", "--out", out, "--json"]
    assert main([str(word) for word in [*command, "--picture", picture]]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["point"]["agreement"] >= 95 and record["widest"] == "8" and record["images"] == len(images)
    assert [stage["profile"] for stage in record["cascade"]["stages"]] == ["1", "8"]
    assert picture.stat().st_size > 1000
    with load(out, layout="NHWC") as model:
        assert model.cascade.stages[0].threshold == record["point"]["threshold"]
        y = model(images, bits="auto", threshold=record["point"]["threshold"])
        agrees = 100 * (y.argmax(1) == model(images, bits=8).argmax(1)).mean()
        assert agrees == pytest.approx(record["point"]["agreement"])
    assert main(["run", str(out), str(arrays), "--bits", "8"]) == 0


@pytest.mark.slow
def test_the_table_shows_widths_and_thresholds(arrays, capsys):
    assert main(["cascade", "cifar10-vgg-small", str(arrays), "--stages", "1,4", "--agreement", "80"]) == 0
    out = capsys.readouterr().out
    assert "\n8 bit" in out and "threshold" in out and "1 bit first, 4 bit for the" in out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--agreement", "0"), "--agreement 0 is not a percentage"),
        (("--agreement", "nan"), "is not a number"),
        (("--agreement", "90", "--accuracy", "90"), "are two aims; give one of them"),
        (("--accuracy", "90"), "--accuracy needs labels; give --dataset NAME"),
        (("--drop", "0.2"), "--drop needs labels"),
        (("--test",), "--test needs labels"),
        (("--stages", "1"), "is not two profiles; write for example 1,8"),
        (("--stages", "8,1"), "needs more bits; write 1,8"),
        (("--stages", "1,9"), "'9' is not in this model file, which has 1, 2"),
        (("--score", "entropy"), "invalid choice: 'entropy'"),
    ],
)
def test_mistakes_are_told_in_one_line(arrays, one_line_error, options, complaint):
    assert complaint in one_line_error("cascade", find("cifar10-vgg-small"), arrays, *options)


@pytest.mark.thorough
def test_an_aim_out_of_reach(arrays, one_line_error, capsys):
    line = main(["cascade", "cifar10-vgg-small", str(arrays), "--stages", "1,2", "--agreement", "100"])
    assert line == 2
    assert "no cascade reaches an agreement of 100 %; the best has" in capsys.readouterr().err
