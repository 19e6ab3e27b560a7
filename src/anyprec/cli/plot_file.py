"""--picture FILE.png: whether it can be drawn and written, asked before the work it shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from anyprec.errors import AnyprecError, MissingExtra


def check_picture(path: str) -> None:
    """Before minutes of timing, not after them."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("--picture needs Matplotlib: pip install 'anyprec[report]'")
    if Path(path).suffix not in (".png", ".svg", ".pdf") or not Path(path).absolute().parent.is_dir():
        raise AnyprecError(f"--picture {path}: give a file .png, .svg or .pdf in a folder that is there")
