"""Unpacked files in the user's cache folder: source file in, its unpacked bytes out. Called by `cifar10`. Downloaded
models (anyprec.models) lie in the same folder.

Unpacking a CIFAR-10 batch takes 3.5 s, reading it back 0.05 s. An entry is named after the SHA-256 of its
source, so a changed source is another entry; it ends in the SHA-256 of its content, so a damaged entry is
never used. Where the folder cannot be written, everything works, only slower.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """$ANYPREC_CACHE, else $XDG_CACHE_HOME/anyprec, else ~/.cache/anyprec. Safe to delete at any time.

    A relative XDG_CACHE_HOME counts as none, as its specification has it.
    """
    if own := os.environ.get("ANYPREC_CACHE"):
        return Path(own).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")) / "anyprec"


def unpacked(source: Path, size: int, unpack: Callable[[bytes], bytes]) -> bytes:
    """The unpacked bytes of `source`, from the store if it has them; only `size` bytes exactly are stored."""
    packed = source.read_bytes()
    entry = cache_folder() / "unpacked" / f"{hashlib.sha256(packed).hexdigest()}.bin"
    found = _load(entry, size)
    if found is not None:
        return found
    content = unpack(packed)
    if len(content) == size:
        _save(entry, content)
    return content


def _load(entry: Path, size: int) -> bytes | None:
    try:
        if entry.stat().st_size != size + 32:
            return None
        stored = entry.read_bytes()
    except OSError:
        return None
    content, checksum = stored[:-32], stored[-32:]
    return content if hashlib.sha256(content).digest() == checksum else None


def _save(entry: Path, content: bytes) -> None:
    temporary = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=entry.parent, prefix=entry.stem[:16], suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.write(hashlib.sha256(content).digest())
        os.replace(temporary, entry)  # readers see the whole entry or none
    except OSError:  # read-only home, full disk, no home at all
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
