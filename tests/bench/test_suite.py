"""`anyprec bench --suite`: six networks, one table, all rows in a CSV; and the page made of such files."""

import csv

import engine
import pytest

from anyprec.bench import suite
from anyprec.bench.race import BenchResult, RaceRow, RivalFailure
from anyprec.bench.random_networks import resnet20_graph
from anyprec.cli import main


def row(engine_name, variant, p50, speedup, kernels=None, **more):
    return RaceRow(engine_name, variant, 1, 1, p50, p50, p50, 1e3 / p50, speedup, 10, 20, 30, kernels=kernels, **more)


def result(rows, failures=()):
    machine = {"cpu": "AMD EPYC (tm)", "isa": "avx2", "rounds": 3, "cores": 2, "versions": {}}
    return BenchResult("net", (32, 32), machine, list(rows), list(failures))


def rows(factor=1.0):
    return [
        row("anyprec", "1", 1.0 * factor, 4.0),
        row("anyprec", "8", 4.0 * factor, 1.25),
        row("openvino", "int8", 5.0 * factor, 1.0, "jit_avx2 (3 of 3)"),
        row("onnxruntime", "int8", 2.0 * factor, 2.5, limited=False),
    ]


def test_the_suite_has_six_known_networks():
    assert len(suite.SUITE) == 6
    assert set(suite.SUITE) <= set(suite.NETS)


def test_a_line_for_each_network_against_the_best_rival_that_can_be_held_back():
    failure = RivalFailure("torch", "int8", 1, 1, "died of SIGILL")
    text = suite.suite_table({"a": result(rows()), "b": result(rows(2), [failure])})
    lines = text.splitlines()
    assert lines[3].split() == ["a", "OpenVINO", "int8", "5.00", "4.00", "1.25", "x", "-", "-", "1.00", "4.00", "x"]
    assert lines[4].split()[:4] == ["b", "OpenVINO", "int8", "10.00"]
    assert "OpenVINO int8: jit_avx2 (3 of 3)" in lines
    assert any("died of SIGILL" in line for line in lines)


def test_without_rivals_there_are_times_only():
    line = suite.suite_table({"a": result([row("anyprec", "8", 4.0, None)])}).splitlines()[3]
    assert line.split() == ["a", "none", "4.00", "-", "-", "-"]


def test_rows_of_networks_not_measured_now_stay(tmp_path):
    path = tmp_path / "engine.csv"
    suite.save(path, {"resnet50": result(rows()), "resnet20": result(rows())})
    suite.save(path, {"resnet20": result(rows(2))})
    with open(path, newline="") as file:
        found = [(r["net"], r["variant"], float(r["p50_ms"])) for r in csv.DictReader(file)]
    assert ("resnet50", "8", 4.0) in found and ("resnet20", "8", 8.0) in found and len(found) == 8


def test_the_page_shows_every_file(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    suite.save(tmp_path / "results" / suite.csv_name(result([]).machine), {"resnet20": result(rows())})
    monkeypatch.setattr(engine, "HERE", tmp_path)
    page = engine.page()
    assert "## amd-epyc, avx2" in page
    assert "| resnet20 | 1 | 1 | OpenVINO 5.00 | 4.00 (1.25) | - | - | 1.00 (4.00) |" in page


def test_the_page_of_the_docs_is_up_to_date():
    assert engine.PAGE.read_text() == engine.page(), "run: python bench/engine.py --page"


@pytest.mark.parametrize("words", [["net.apm"], ["--bits", "1"], ["--batch", "8"], ["--size", "32"]])
def test_what_does_not_go_with_the_suite(words, capsys):
    assert main(["bench", "--suite", *words]) != 0
    assert "does not go with --suite" in capsys.readouterr().err


def test_neither_model_nor_suite(capsys):
    assert main(["bench"]) != 0
    assert "--suite" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_suite_runs(monkeypatch, tmp_path, capsys):
    """With one small network, without rivals: the files are made, timed and kept."""
    monkeypatch.setattr(suite, "SUITE", ("resnet20",))
    monkeypatch.setitem(suite.NETS, "resnet20", suite.Net(resnet20_graph))
    path = tmp_path / "rows.csv"
    assert main(["bench", "--suite", "--rivals", "none", "--rounds", "1", "--csv", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[3].startswith("resnet20")
    with open(path, newline="") as file:
        assert {r["variant"] for r in csv.DictReader(file)} >= {"1", "2", "4", "8"}
