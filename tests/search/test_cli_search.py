"""`anyprec search`: the front, the stored plan, and mistakes."""

import json

import numpy as np
import pytest

from anyprec.cli import main
from anyprec.format import read
from anyprec.run.model import load

FEW = ("--evaluations", "20", "--random", "2", "--count", "32")


@pytest.fixture
def arrays(tmp_path, images):
    path = tmp_path / "images.npy"
    np.save(path, images[:32])
    return path


@pytest.mark.thorough
def test_a_plan_is_stored_and_runs(vgg_path, arrays, tmp_path, capsys):
    out = tmp_path / "small.apm"
    picture = tmp_path / "front.png"
    command = ["search", vgg_path, arrays, *FEW, "--bytes", "200k", "--out", out, "--name", "small", "--json"]
    assert main([str(word) for word in [*command, "--picture", picture]]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["profile"] == "small" and record["chosen"]["bytes"] <= 200 * 1024
    assert record["cost"] == "bytes" and record["images"] == 32
    assert picture.stat().st_size > 1000
    profile = read(out).profiles[-1]
    assert profile.name == "small" and profile.weights == record["chosen"]["plan"]
    with load(out) as model:
        assert "small" in model.profiles
        assert model(np.load(arrays)[:2].transpose(0, 3, 1, 2), bits="small").shape == (2, 10)


@pytest.mark.slow
def test_without_a_limit_the_front_is_printed(vgg_path, arrays, capsys):
    assert main(["search", str(vgg_path), str(arrays), *FEW]) == 0
    out = capsys.readouterr().out
    assert "plans tried on 32 images" in out
    for title in ("front", "uniform", "random"):
        assert f"\n{title}" in out


@pytest.mark.thorough
def test_a_plan_of_ones_own(vgg_path, arrays, tmp_path, capsys):
    names = [name for name, weight in read(vgg_path).weights.items() if not weight.is_float]
    plan, out = tmp_path / "plan.json", tmp_path / "mine.apm"
    plan.write_text(json.dumps({"name": "mine", "bits": dict(zip(names, [8, 4, 2, 1, 1], strict=False))}))
    assert main(["search", str(vgg_path), str(arrays), "--profile", str(plan), "--out", str(out)]) == 0
    assert "has the profile 'mine'" in capsys.readouterr().out
    assert read(out).profiles[-1].weights == json.loads(plan.read_text())["bits"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--out", "x.apm"), "--out stores one plan; say which with"),
        (("--name", "x"), "--name goes with --out"),
        (("--bytes", "1k", "--out", "x.apm", "--name", "auto"), "profile name 'auto' is not allowed"),
        (("--bytes", "1k", "--out", "x.apm", "--name", "4"), "profile name '4' is not allowed"),
        (("--accuracy", "92"), "--accuracy needs labels; give --dataset NAME"),
        (("--agreement", "120"), "--agreement 120 is not a percentage"),
        (("--latency", "5"), "has no unit; write 5ms or 5s"),
        (("--latency", "5ms", "--bytes", "1k"), "give one of them"),
        (("--test", "--bytes", "1k", "--out", "x.apm"), "--test needs the test images of a data set"),
        (("--data", "x"), "--data goes with --dataset NAME"),
    ],
)
def test_mistakes_are_told_in_one_line(vgg_path, arrays, one_line_error, options, complaint):
    assert complaint in one_line_error("search", vgg_path, arrays, *options)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"name": "mine", "bits": {"conv1": 4}}', "leaves out"),
        ('{"name": "mine", "bits": {"conv1": 9}}', "bits=9 is not a bit-width"),
        ('{"name": "mine", "bits": {"nowhere": 4}}', "has no layer 'nowhere'"),
        ('{"name": "4", "bits": {"conv1": 4}}', "profile name '4' is not allowed"),
        ('{"name": "mine"}', "is not a profile; expected"),
        ("not json", "is not a profile"),
    ],
)
def test_hostile_plans_are_refused(vgg_path, arrays, tmp_path, one_line_error, text, complaint):
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    out = tmp_path / "out.apm"
    assert complaint in one_line_error("search", vgg_path, arrays, "--profile", plan, "--out", out)
    assert not out.exists()


def test_images_of_one_size_are_needed(vgg_path, tmp_path, one_line_error):
    assert "no images; give some hundred" in one_line_error("search", vgg_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no images in it" in one_line_error("search", vgg_path, empty)
