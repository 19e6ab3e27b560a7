"""`anyprec reproduce` from the command line: one experiment in full, done once, and mistakes in one line."""

import json

import pytest

from anyprec.cli import main
from anyprec.report.record import load
from anyprec.reproduce import store as store_module
from anyprec.reproduce.catalog import EXPERIMENTS


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
