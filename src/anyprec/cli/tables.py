"""Rows of cells as text in columns, for the verbs that print a table."""

from __future__ import annotations

from collections.abc import Sequence

from anyprec.widths import FLOAT


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns as wide as their content; those in `right` are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def bits_name(profile: str) -> str:
    """The heading of a profile: 'float' for '32'."""
    return "float" if profile == str(FLOAT) else profile
