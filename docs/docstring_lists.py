"""A Griffe extension for the API page: `name: text` lines of a docstring become a list, as they read in an editor.

mkdocs.yml names this file under the options of mkdocstrings. Docstrings in, Markdown out; the source stays as it is.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(\w+(?:, \w+)*)(?: \([^)]*\))?:\s+\S")


class DocstringLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """Paragraphs of which every unindented line is an entry become Markdown lists."""
    return "\n\n".join(_listed(part) for part in re.split(r"\n\s*\n", text))


def _listed(paragraph: str) -> str:
    lines = paragraph.split("\n")
    starts = [line for line in lines if line and not line[0].isspace()]
    if not starts or not all(ENTRY.match(line) for line in starts) or len(lines) < 2:
        return paragraph
    items: list[str] = []
    for line in lines:
        if line[:1].isspace():
            items[-1] += " " + line.strip()
        else:
            name, _, rest = line.partition(":")
            items.append(f"- `{name}`: {rest.strip()}")
    return "\n".join(items)
