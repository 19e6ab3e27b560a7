"""What an experiment found, as plain data: Result, its tables, claims and pictures; written to a folder and read back.

A folder holds result.json (everything), result.md, one CSV a table, and a PNG with its numbers as CSV a picture. Made
by anyprec.reproduce; the HTML report is made from these files alone.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anyprec.errors import DataError
from anyprec.files import make_folder, write_text

OURS, PAPER = "ours", "paper"
RESULT = "result.json"
FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One line of a table: its labels, its numbers (None: not there), and whose numbers they are."""

    labels: tuple[str, ...]
    values: tuple[float | None, ...]
    of: str = OURS
    note: str = ""  # stands in for the numbers where there are none: "not run at this scale"


@dataclass(frozen=True)
class Table:
    """`labels` heads the columns of words, `columns` those of numbers."""

    name: str  # of its CSV file
    title: str
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    digits: int = 2  # behind the point
    unit: str = "%"
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row.labels) == len(self.labels) and len(row.values) in (0, len(self.columns)), row

    def text(self, value: float | None) -> str:
        return "" if value is None else f"{value:.{self.digits}f}"

    @property
    def both(self) -> bool:
        """Whether the paper's numbers stand beside ours."""
        return len({row.of for row in self.rows}) > 1


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and whether the numbers here bear it out. None: they could not be had."""

    sentence: str
    holds: bool | None
    numbers: str  # what was compared, in words and figures

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "not tested"}[self.holds]


@dataclass(frozen=True)
class Picture:
    name: str  # of its PNG and CSV files
    title: str
    caption: str = ""
    wide: bool = False  # takes the whole width of the page


@dataclass(frozen=True)
class Result:
    name: str
    title: str
    scale: str
    found: str  # what the paper found
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    pictures: tuple[Picture, ...] = ()
    scaled: tuple[str, ...] = ()  # what was scaled down or stands in for something else, a sentence each
    notes: tuple[str, ...] = ()
    trainings: tuple[Mapping[str, Any], ...] = ()  # name, seconds
    command: str = ""
    seconds: float = 0.0  # of the experiment itself, trainings not counted
    key: str = ""  # of the settings it was made with
    machine: Mapping[str, Any] = field(default_factory=dict)


def save(result: Result, folder: Path) -> None:
    """Everything but the pictures, which their experiment has drawn; result.json last, so that it means done."""
    make_folder(folder)
    for table in result.tables:
        write_csv(folder / f"{table.name}.csv", *csv_of(table))
    write_text(folder / "result.md", markdown(result))
    write_text(folder / RESULT, json.dumps({"format": FORMAT, **asdict(result)}, indent=1) + "\n")


def load(folder: Path) -> Result:
    path = folder / RESULT
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("format") != FORMAT:
            raise DataError(f"{path} is of another version of anyprec; run the experiment again")
        return from_dict(record)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged ({error}); remove it and run the experiment again") from error


def from_dict(record: Mapping[str, Any]) -> Result:
    tables = tuple(
        Table(**{**t, "labels": tuple(t["labels"]), "columns": tuple(t["columns"]), "rows": _rows(t["rows"])})
        for t in record["tables"]
    )
    return Result(
        **{
            **record,
            "tables": tables,
            "claims": tuple(Claim(**c) for c in record["claims"]),
            "pictures": tuple(Picture(**p) for p in record["pictures"]),
            **{name: tuple(record[name]) for name in ("scaled", "notes", "trainings")},
        }
    )


def _rows(rows: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
    return tuple(Row(tuple(r["labels"]), tuple(r["values"]), r["of"], r["note"]) for r in rows)


def csv_of(table: Table) -> tuple[list[str], list[list[str]]]:
    head = [*table.labels, "of", *table.columns, "note"]
    rows = []
    for row in table.rows:
        values = row.values or (None,) * len(table.columns)
        rows.append([*row.labels, row.of, *("" if v is None else repr(round(v, 6)) for v in values), row.note])
    return head, rows


def write_csv(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    make_folder(path.parent)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    write_text(path, text.getvalue())


def markdown(result: Result) -> str:
    lines = [f"# {result.title}", "", f"Scale: {result.scale}. `{result.command}`", "", result.found, ""]
    for claim in result.claims:
        lines.append(f"- **{claim.verdict}**: {claim.sentence} {claim.numbers}")
    lines += [""] if result.claims else []
    for table in result.tables:
        lines += [f"## {table.title}", "", *markdown_table(table), ""]
        lines += [table.note, ""] if table.note else []
    for picture in result.pictures:
        lines += [f"![{picture.title}]({picture.name}.png)", "", picture.caption, ""]
    if result.scaled:
        lines += ["## What was scaled down", "", *(f"- {line}" for line in result.scaled), ""]
    lines += [*result.notes, ""] if result.notes else []
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(table: Table) -> list[str]:
    whose = ["of"] if table.both else []
    lines = ["| " + " | ".join([*table.labels, *whose, *table.columns]) + " |"]
    lines.append("|" + "---|" * (len(table.labels) + len(whose) + len(table.columns)))
    for row in table.rows:
        values = [table.text(v) for v in row.values] or [row.note, *[""] * (len(table.columns) - 1)]
        lines.append("| " + " | ".join([*row.labels, *([row.of] if whose else []), *values]) + " |")
    return lines
