"""`anyprec calibrate`: widths that were not trained, and its mistakes."""

import json

import pytest

from anyprec.cli import main


@pytest.mark.thorough
def test_calibrate_then_evaluate(run_folder, tmp_path, capsys):
    assert main(["evaluate", str(run_folder), "--json", "--limit", "100"]) == 0
    before = json.loads(capsys.readouterr().out)["results"]
    full = tmp_path / "full.pt"
    arguments = ["--widths", "3,5-7", "--batches", "2", "--out", str(full), "--json"]
    assert main(["calibrate", str(run_folder), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["widths"] == [1, 2, 3, 4, 5, 6, 7, 8, 32]
    assert main(["evaluate", str(full), "--json", "--limit", "100"]) == 0
    after = json.loads(capsys.readouterr().out)["results"]
    assert set(after) == {str(k) for k in (*range(1, 9), 32)}
    assert {k: after[k] for k in before} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "RUN", "--profile", "nowhere.json"], "cannot read profile nowhere.json"),
    ],
)
def test_mistakes_end_with_one_line(run_folder, tmp_path, one_line_error, arguments, message):
    paths = {"RUN": run_folder, "x": tmp_path / "x"}
    assert message in one_line_error(*(paths.get(a, a) for a in arguments))
