"""What all verbs print alike: the object of --json on stdout, the next command to type on stderr."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def print_json(record: Mapping[str, Any]) -> None:
    """One object. Results at several widths stand under "results": {"1": {...}, ..., "32": {...}}."""
    print(json.dumps(record, indent=2))


def command_line(*words: str | Path) -> str:
    """'anyprec pack runs/r8 --out runs/r8/r8.apm', quoted for a shell."""
    return shlex.join(["anyprec", *map(str, words)])


def print_next(*words: str | Path) -> None:
    """On stderr: stdout holds the result and nothing else."""
    print(f"next: {command_line(*words)}", file=sys.stderr)
