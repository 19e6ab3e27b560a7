"""Results on disk: what is written is what is read back, and tables come out as CSV and Markdown."""

import csv
import json

import pytest

from anyprec.errors import DataError
from anyprec.report.record import PAPER, RESULT, Claim, Picture, Result, Row, Table, load, markdown, save

TABLE = Table(
    "accuracy",
    "Test accuracy",
    ("network",),
    ("1", "float"),
    (
        Row(("ResNet-8",), (61.25, None)),
        Row(("ResNet-20",), (92.15, 93.98), PAPER),
        Row(("ResNet-50",), (), note="not run at this scale"),
    ),
)
RESULT_1 = Result(
    "table1",
    "Table 1",
    "small",
    "It works.",
    (TABLE,),
    (Claim("It holds.", True, "1 > 0."), Claim("It does not.", False, "0 < 1."), Claim("Who knows?", None, "")),
    (Picture("curves", "Curves", "Up.", wide=True),),
    ("Everything.",),
    ("A note.",),
    ({"name": "a", "seconds": 3.5},),
    "anyprec reproduce table1",
    12.5,
    "abc",
    {"cpu": "x", "features": ["avx2"]},
)


def test_what_is_written_is_read_back(tmp_path):
    save(RESULT_1, tmp_path)
    assert load(tmp_path) == RESULT_1


def test_tables_as_csv(tmp_path):
    save(RESULT_1, tmp_path)
    with open(tmp_path / "accuracy.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["network", "of", "1", "float", "note"],
        ["ResNet-8", "ours", "61.25", "", ""],
        ["ResNet-20", "paper", "92.15", "93.98", ""],
        ["ResNet-50", "ours", "", "", "not run at this scale"],
    ]


def test_markdown_has_both_numbers_and_the_reason_for_none():
    text = markdown(RESULT_1)
    assert "| ResNet-8 | ours | 61.25 |  |" in text
    assert "| ResNet-20 | paper | 92.15 | 93.98 |" in text
    assert "| ResNet-50 | ours | not run at this scale |  |" in text
    assert "- **does not hold**: It does not. 0 < 1." in text
    assert "- Everything." in text


def test_a_table_must_fit_its_columns():
    with pytest.raises(AssertionError):
        Table("t", "T", ("network",), ("1", "2"), (Row(("a",), (1.0,)),))


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_damaged_result_says_so(tmp_path, damage):
    (tmp_path / RESULT).write_text(damage)
    with pytest.raises(DataError, match=RESULT):
        load(tmp_path)


def test_a_missing_result_says_so(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        load(tmp_path / "nowhere")


def test_json_is_plain(tmp_path):
    save(RESULT_1, tmp_path)
    record = json.loads((tmp_path / RESULT).read_text())
    assert record["tables"][0]["rows"][0] == {"labels": ["ResNet-8"], "values": [61.25, None], "of": "ours", "note": ""}
