"""`anyprec simulate` on the command line: tables in, answers out, mistakes in one line."""

import json

import pytest

from anyprec.cli import main

TABLE = {
    "ms": {"8": {"1": 2.5, "8": 18.0}, "2": {"1": 1.5, "8": 11.0}, "1": {"1": 1.0, "8": 7.5}},
    "accuracy": {"8": 70.0, "2": 69.0, "1": 61.0},
}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "net.json"
    path.write_text(json.dumps(TABLE))
    return str(path)


def run(capsys, *words):
    code = main(["simulate", *words])
    found = capsys.readouterr()
    assert code == 0, found.err
    return found.out


def test_a_table_of_policies(capsys, table):
    out = run(capsys, table, "--arrivals", "gamma:100:4", "--seconds", "5s", "--slo", "3x", "--policy", "adaptive,8,1")
    lines = out.splitlines()
    assert "target 7.5 ms" in lines[0] and lines[1].startswith("policy")
    assert [line.split()[0] for line in lines[2:]] == ["adaptive", "8", "1"]


def test_as_json(capsys, table):
    found = json.loads(run(capsys, table, "--seconds", "3", "--slo", "10ms", "--json", "--quiet", "--servers", "2"))
    (result,) = found["results"]
    assert found["slo_ms"] == 10.0 and result["attainment"] == 1.0 and result["servers"] == pytest.approx(2, rel=0.1)
    assert found["table"]["accuracy"]["8"] == 70.0


@pytest.mark.slow
def test_how_many_replicas(capsys, table):
    words = (table, "--arrivals", "poisson:2000", "--seconds", "2s", "--slo", "10ms")
    out = run(capsys, *words, "--find-servers", "99", "--accuracy", "69")
    servers = int(out.splitlines()[-1].split(": ")[1].split()[0])
    assert out.splitlines()[-1].startswith("adaptive: ") and 2 <= servers <= 16
    found = json.loads(run(capsys, *words, "--find-servers", "99", "--json"))
    assert found["results"][0]["attainment"] >= 0.99 and found["results"][0]["servers"] <= servers + 0.1


@pytest.mark.thorough
def test_what_load(capsys, table):
    words = (table, "--find-rate", "99", "--slo", "3x", "--requests", "1000", "--policy", "adaptive,8")
    rates = json.loads(run(capsys, *words, "--json"))["rates"]
    assert rates["adaptive"] > rates["8 bit"] > 20
    assert "requests a second with 99 % in time" in run(capsys, *words)


def test_the_grid(capsys, table):
    words = (table, "--grid", "0.5,1@1,4", "--slo", "3x", "--requests", "300")
    out = run(capsys, *words)
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("1 ", "4 "))]
    assert [row[:2] for row in rows] == [["1", "0.5"], ["1", "1"], ["4", "0.5"], ["4", "1"]]
    found = json.loads(run(capsys, *words, "--json"))
    assert len(found["cells"]) == 4 * 4 and found["base_rate"] > 0


@pytest.mark.slow
def test_servers_that_come_and_go(capsys, table):
    out = run(
        capsys, table, "--arrivals", "steps:50@10,900@25", "--slo", "10ms", "--autoscale", "1-4", "--starts-in", "5s",
        "--fail", "30s",
    )  # fmt: skip
    assert "servers 1 from 0 s, " in out and "on average" in out


def test_a_model_file_is_timed_and_its_table_can_be_kept(capsys, model_path, tmp_path):
    kept = tmp_path / "kept.json"
    out = run(capsys, str(model_path), "--seconds", "2s", "--max-batch", "4", "--save-table", str(kept))
    assert "adaptive" in out
    assert set(json.loads(kept.read_text())["ms"]) == {"1", "2", "4", "8"}
    assert "adaptive" in run(capsys, str(kept), "--seconds", "2s")


def test_a_picture(capsys, table, tmp_path):
    pytest.importorskip("matplotlib")
    run(capsys, table, "--seconds", "3", "--picture", str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "words, says",
    [
        (["--slo", "fast"], "--slo"),
        (["--slo", "-3x"], "--slo"),
        (["--policy", "quick"], "'quick'"),
        (["--policy", "3"], "3"),
        (["--arrivals", "poisson:x"], "arrivals"),
        (["--arrivals", "poisson:0"], "no request"),
        (["--autoscale", "5"], "--autoscale"),
        (["--find-servers", "0"], "percentage"),
        (["--find-rate", "101"], "percentage"),
        (["--find-rate", "99", "--arrivals", "ramp:1:2"], "--find-rate"),
        (["--grid", "a@b"], "--grid"),
        (["--grid", "0@1"], "--grid"),
        (["--servers", "0"], "from 1 to 10000"),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, table, words, says):
    assert main(["simulate", table, *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("anyprec: error:") and says in error


def test_files_that_are_no_tables(capsys, tmp_path):
    assert main(["simulate", str(tmp_path / "none.json")]) == 2
    assert main(["simulate", str(tmp_path / "none.apm")]) == 2
    assert capsys.readouterr().err.count("anyprec: error:") == 2
