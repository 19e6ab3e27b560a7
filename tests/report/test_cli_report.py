"""`anyprec report`: where the page is, and folders that hold nothing to report."""

import json

from anyprec.cli import main

LINE = '{"epoch": 1, "train": {"1": {"loss": 2.0, "accuracy": 1.0}}, "test": {"1": {"loss": 2.0, "accuracy": 20.0}}}'


def test_where_the_page_is(tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text(LINE + "\n")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--out", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(page)} and page.exists()


def test_other_folders_are_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds neither results of `anyprec reproduce` nor the log" in capsys.readouterr().err
    (tmp_path / "log.jsonl").write_text("")
    assert main(["report", str(tmp_path)]) == 2
    assert "is empty" in capsys.readouterr().err
