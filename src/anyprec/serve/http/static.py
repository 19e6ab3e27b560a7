"""The files of the page, read once from the folder page/ into memory; no client input is ever used as a path.

Called by app.py at the start. Without an index.html, a few lines of HTML are served instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("page")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}
# Only content of this server may run or be shown; dropped images are previewed from memory (blob:).
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
STAND_IN = b"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>anyprec</title>
<h1>anyprec serve</h1>
<p>This server answers the Open Inference Protocol: see <a href="/v2">/v2</a>, <a href="/v2/repository/index">the
models</a>, <a href="/metrics">/metrics</a> and <a href="/openapi.json">/openapi.json</a>.</p>
"""


@dataclass(frozen=True)
class StaticFile:
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    kind: tuple[bytes, bytes]
    tag: bytes


def read_files(folder: Path = FOLDER) -> dict[str, StaticFile]:
    """'/' and '/index.html', '/page.js', ...: URL path -> file."""
    found = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_file() and path.suffix in TYPES:
            found["/" + path.relative_to(folder).as_posix()] = make_file(path.read_bytes(), path.suffix)
    found.setdefault("/index.html", make_file(STAND_IN, ".html"))
    found["/"] = found["/index.html"]
    return found


def make_file(body: bytes, suffix: str) -> StaticFile:
    tag = b'"%s"' % hashlib.sha256(body).hexdigest()[:20].encode()
    headers = (
        (b"etag", tag),
        (b"cache-control", b"no-cache"),  # revalidated each time, sent again only when it changed
        (b"content-security-policy", POLICY.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    )
    return StaticFile(body, headers, (b"content-type", TYPES[suffix].encode()), tag)
