"""`anyprec reproduce` from the command line: one experiment in full, done once, and mistakes in one line."""

import json

import pytest

from anyprec.cli import main
from anyprec.report.record import load
from anyprec.reproduce import store as store_module
from anyprec.reproduce.catalog import EXPERIMENTS, trainings_of


def test_list(capsys):
    assert main(["reproduce", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)
    assert main(["reproduce", "list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["experiments"]) == set(EXPERIMENTS)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tabel1"], "did you mean 'table1'?"),
        (["table1", "--scale", "tiny"], "reproduce needs a folder"),
        (["table1", "--scale", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_mistakes(argv, words, one_line_error):
    assert words in one_line_error("reproduce", *argv)


def test_data_that_is_missing_is_named_before_anything_else(tmp_path, capsys):
    out, data = tmp_path / "run", tmp_path / "data"
    assert main(["reproduce", "table1", "table6", "--scale", "small", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "cifar10 (no --data was given" in error and error.count("\n") == 1
    (data / "camvid").mkdir(parents=True)
    assert main(["reproduce", "table1", "table6", "--scale", "small", "--out", str(out), "--data", str(data)]) == 2
    error = capsys.readouterr().err
    assert f"cifar10 (looked in {data}: " in error and f"camvid (looked in {data / 'camvid'}: " in error
    assert not out.exists()


@pytest.mark.thorough
def test_an_experiment_from_training_to_report(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    argv = ["reproduce", "gaps", "uca", "--scale", "tiny", "--out", str(out), "--jobs", "1", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["experiments"]) == {"gaps", "uca"} and not found["failed"]
    result = load(out / "gaps")
    assert result.trainings[0]["seconds"] > 0 and result.machine["python"]
    assert [len(row.values) for row in result.tables[0].rows] == [9, 9]
    kept = {c["sentence"]: c["holds"] for c in found["experiments"]["gaps"]["claims"]}
    assert kept["Calibration leaves the trained widths as they were."]
    for picture in (*result.pictures, *load(out / "uca").pictures):
        assert list(out.glob(f"*/{picture.name}.png")) and list(out.glob(f"*/{picture.name}.csv"))
    text = (out / "report.html").read_text()
    assert text.count("data:image/png;base64,") == 3 and "Not run yet" in text
    assert json.loads((out / "run.json").read_text())["scale"] == "tiny"

    # Again: nothing is trained or computed, the report is made anew.
    monkeypatch.setattr(store_module.TrainingStore, "train", lambda *_: pytest.fail("it is done"))
    monkeypatch.setattr("anyprec.reproduce.pool.perform", lambda *_: pytest.fail("it is done"))
    (out / "report.html").unlink()
    assert main(argv) == 0
    assert (out / "report.html").read_text() == text
    capsys.readouterr()

    # Another scale in the same folder is refused.
    assert main([*argv[:4], "small", *argv[5:]]) == 2
    assert "holds a run at scale tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_two_seeds_part_by_part(tmp_path, capsys, monkeypatch):
    """--only leaves the rest for later; the experiment is made when all its seeds are trained."""
    first, second = (t.name for t in trainings_of([EXPERIMENTS["gaps"]], "tiny", 2))
    argv = ["reproduce", "gaps", "--scale", "tiny", "--seeds", "2", "--out", str(tmp_path), "--jobs", "1"]
    assert main([*argv, "--only", "no-such-net"]) == 2
    assert f"no training that is left to do has such a name; 2 are left: {first}" in capsys.readouterr().err
    assert main([*argv, "--only", second]) == 0
    error = capsys.readouterr().err
    assert "1 of 2 trainings; 2 jobs stay for later" in error and "core-hours: resnet8 on digits" in error
    assert (tmp_path / "trainings" / second / "model.pt").exists() and not (tmp_path / "gaps" / "result.json").exists()
    assert not (tmp_path / "trainings" / first).exists()
    assert main(argv) == 0
    assert "With 2 of 2 seeds." in capsys.readouterr().out
    labels = [row.labels for row in load(tmp_path / "gaps").tables[0].rows if row.of == "ours"]
    assert [label[-1] for label in labels] == ["1, 2, 4, 8, float", "1, 2, 4, 8, float, deviation"]


@pytest.mark.slow
def test_everything_at_tiny_scale(tmp_path, capsys):
    assert main(["reproduce", "all", "--scale", "tiny", "--out", str(tmp_path), "--jobs", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["experiments"]) == set(EXPERIMENTS) and not found["failed"]
    text = (tmp_path / "report.html").read_text()
    assert "Not run yet" not in text
    for name in EXPERIMENTS:
        result = load(tmp_path / name)
        assert result.tables and result.claims and result.pictures and result.scaled
        for picture in result.pictures:
            assert (tmp_path / name / f"{picture.name}.png").stat().st_size > 4_000
