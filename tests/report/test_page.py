"""The HTML report: self-contained, made from files alone, of a half-finished run too; and the page of a training."""

import base64
import csv
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from anyprec.cli import main
from anyprec.errors import DataError
from anyprec.report.page import clock, write_report
from anyprec.report.record import PAPER, Claim, Picture, Result, Row, Table, save

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
VOID_TAGS = {"meta", "img", "br", "link", "input", "line", "circle", "polyline"}


def result(name, holds=True, title="Table <1> & more"):
    table = Table("t", "Accuracy", ("net",), ("1",), (Row(("a <b>",), (1.5,)), Row(("p",), (2.0,), PAPER)))
    return Result(
        name, title, "small", "The paper says so.", (table,), (Claim(f"{name} works.", holds, "2 > 1."),),
        (Picture("p", "A picture"),), ("Half the data.",), trainings=({"name": "shared", "seconds": 100.0},),
        seconds=5.0, command=f"anyprec reproduce {name}", machine={"cpu": "A CPU"},
    )  # fmt: skip


def write(folder, *results):
    for one in results:
        save(one, folder / one.name)
        (folder / one.name / "p.png").write_bytes(PNG)


class Balanced(HTMLParser):
    """Every tag that opens closes, in order; every link inside the page leads somewhere."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.ids, self.targets, self.sources = [], set(), [], []
        self.feed(text)
        assert not self.stack
        assert all(target.removeprefix("#") in self.ids for target in self.targets)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.add(found.get("id"))
        if "href" in found:
            self.targets.append(found["href"])
        if "src" in found:
            self.sources.append(found["src"])
        if tag not in VOID_TAGS:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID_TAGS:
            assert self.stack.pop() == tag


def test_one_page_with_everything_in_it(tmp_path):
    write(tmp_path, result("table1"), result("table2", False))
    (tmp_path / "run.json").write_text(
        json.dumps({"scale": "small", "experiments": {"table2": "T2", "table1": "T1", "uca": "Appendix A.1"}})
    )
    page = write_report(tmp_path)
    assert page == tmp_path / "report.html"
    text = page.read_text()
    seen = Balanced(text)
    assert all(source.startswith("data:image/png;base64,") for source in seen.sources) and len(seen.sources) == 2
    assert not re.search(r"https?://|<script|@import|url\(", text)
    assert text.index('id="table2"') < text.index('id="table1"')  # in the order of run.json
    assert "Not run yet" in text and "Appendix A.1" in text  # a half-finished run
    assert "2 of 3 experiments done; 1.8 min of computing time" in text  # 100 s shared, 5 s each
    assert "Table &lt;1&gt; &amp; more" in text and "a &lt;b&gt;" in text
    assert "prefers-color-scheme: dark" in text
    for words in (
        "Half the data.",
        "anyprec reproduce table1",
        "The paper says so.",
        "does not hold",
        "holds",
        "A CPU",
    ):
        assert words in text


def test_the_claims_in_one_table(tmp_path):
    write(tmp_path, result("table1"), result("table2", False))
    write_report(tmp_path, tmp_path / "elsewhere" / "page.html")
    assert not (tmp_path / "claims.csv").exists() and os.listdir(tmp_path / "elsewhere") == ["page.html"]
    write_report(tmp_path)
    with open(tmp_path / "claims.csv", newline="") as file:
        rows = [(row["experiment"], row["verdict"]) for row in csv.DictReader(file)]
    assert rows == [("table1", "holds"), ("table2", "does not hold")]


def test_without_run_json_the_results_are_enough(tmp_path):
    write(tmp_path, result("table1", None))
    text = write_report(tmp_path).read_text()
    Balanced(text)
    assert "not tested" in text and "Not run yet" not in text


def test_a_picture_that_is_gone_is_named(tmp_path):
    write(tmp_path, result("table1"))
    (tmp_path / "table1" / "p.png").unlink()
    with pytest.raises(DataError, match=re.escape("p.png")):
        write_report(tmp_path)


def log_line(epoch, accuracy):
    return json.dumps(
        {"epoch": epoch, "train": {"1": {"loss": 2.0 / epoch, "accuracy": 1.0}}, "test": {
            "1": {"loss": 2.0, "accuracy": accuracy}, "32": {"loss": 1.0, "accuracy": accuracy + 10}}}
    )  # fmt: skip


def test_the_page_of_a_training(tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text(log_line(1, 20.0) + "\n" + log_line(2, 40.0) + "\n")
    (tmp_path / "recipe.toml").write_text('net = "a<b"\n')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    Balanced(text)
    assert text.count("<svg") == 4  # accuracy and loss, test and train
    assert "40.00" in text and "50.00" in text and "a&lt;b" in text and ">float</text>" in text


def test_the_report_needs_no_torch(tmp_path):
    write(tmp_path, result("table1"))
    script = (
        "import sys; from anyprec.cli import main; code = main(['report', sys.argv[1]]); "
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_times_as_people_say_them():
    assert [clock(s) for s in (0, 34.4, 150, 3723)] == ["0 s", "34 s", "2.5 min", "1 h 02 min"]
