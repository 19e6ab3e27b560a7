"""API keys: files or environment in; whether a key may call, and whether it may control, out.

A key file has one key a line, `name: key` or the key alone; `#` starts a comment. Only digests are kept. Called by
app.py for every request, by cli/serve.py at the start and on SIGHUP.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anyprec.errors import ServeError

API_VARIABLE = "ANYPREC_API_KEYS"  # keys, with commas between
CONTROL_VARIABLE = "ANYPREC_CONTROL_KEYS"
SHORTEST = 16  # characters; shorter keys can be guessed

Digests = tuple[tuple[str, bytes], ...]  # (client's name, SHA-256 of the key)


@dataclass(frozen=True)
class Caller:
    name: str | None  # None: not known by a key
    control: bool


OWNER = Caller("control-socket", True)  # only the server's own user and root can open the socket's file


@dataclass(frozen=True)
class Keys:
    """API keys may call; control keys may call and control."""

    api: Digests = ()
    control: Digests = ()
    sources: tuple[str | None, str | None] = field(default=(None, None), compare=False)

    def caller(self, key: bytes | None) -> Caller:
        """Compares with every key in constant time, so that timing reveals nothing."""
        if key is None or not (self.api or self.control):
            return Caller(None, False)
        digest = hashlib.sha256(key).digest()
        name, control = None, False
        for one, held in self.api:
            if hmac.compare_digest(digest, held):
                name = one
        for one, held in self.control:
            if hmac.compare_digest(digest, held):
                name, control = one, True
        return Caller(name, control)

    def again(self, environ: Mapping[str, str] = os.environ) -> Keys:
        """Read the keys again from the same files and variables."""
        return read_keys(*self.sources, environ=environ)


def read_keys(
    api_file: str | None = None, control_file: str | None = None, environ: Mapping[str, str] = os.environ
) -> Keys:
    api = digests("api", lines(api_file), environ.get(API_VARIABLE, ""))
    control = digests("control", lines(control_file), environ.get(CONTROL_VARIABLE, ""))
    if api_file and not api:
        raise ServeError(f"--api-key-file {api_file} has no key in it; write one a line")
    if control_file and not control:
        raise ServeError(f"--control-key-file {control_file} has no key in it; write one a line")
    return Keys(api, control, (api_file, control_file))


def lines(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"the key file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def digests(kind: str, from_file: list[str], from_environ: str) -> Digests:
    given = [*from_file, *(part.strip() for part in from_environ.split(",") if part.strip())]
    found = []
    for number, line in enumerate(given, 1):
        named = re.fullmatch(r"([\w.-]{1,64}):\s+(\S+)", line)
        name, key = (named[1], named[2]) if named else (f"{kind}-{number}", line)
        if not re.fullmatch(r"[\x21-\x7e]+", key) or len(key) < SHORTEST:
            raise ServeError(
                f"{kind} key {number} is not {SHORTEST} or more letters, digits and signs without spaces; make one "
                "with: python -c 'import secrets; print(secrets.token_urlsafe(24))'"
            )
        found.append((name, hashlib.sha256(key.encode()).digest()))
    return tuple(found)


def is_readable_by_all(path: str) -> bool:
    return bool(os.stat(path).st_mode & 0o004)
