"""The long description of the package: README.md with absolute links, since a package index has no other files.

scikit-build-core calls `dynamic_metadata` when it builds a wheel or an sdist (pyproject.toml, tool.dynamic-metadata).
The address is `Repository` of [project.urls], the version that of the package: links lead to the files of its tag.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\[\]]*\])*\])\(([^()\s]+)\)")  # ![text](target), [text](target)
DEFINITION = re.compile(r"^(\[[^\]]+\]:\s+)(\S+)", re.MULTILINE)  # [name]: target


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    text = Path("README.md").read_text(encoding="utf-8")
    made = with_absolute_links(text, project["urls"]["Repository"], f"v{project['version']}")
    return {"readme": {"content-type": "text/markdown", "text": made}}


def with_absolute_links(text: str, repository: str, revision: str) -> str:
    """Links to files of the repository lead to its pages at `revision`, images to the files themselves."""

    def absolute(target: str, kind: str) -> str:
        if re.match(r"[a-z][a-z0-9+.-]*:|#", target):
            return target
        return f"{repository}/{kind}/{revision}/{posixpath.normpath(target)}"

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        label = LINK.sub(link, label[1:-1])  # a picture that is a link
        return f"{mark}[{label}]({absolute(target, 'raw' if mark else 'blob')})"

    text = LINK.sub(link, text)
    return DEFINITION.sub(lambda found: found[1] + absolute(found[2], "blob"), text)
