"""Hints for common mistakes of a first request: the curl command that works, with this server's address in it.

Used by routes.py (wrong method) and classify.py (a form instead of the file).
"""

from __future__ import annotations

import re
from urllib.parse import quote

from anyprec.serve.http.exchange import HttpExchange
from anyprec.serve.http.protocol import HttpError

HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
BODIES = {"classify": "--data-binary @photo.jpg ", "infer": "-d @request.json "}


def curl_command(http: HttpExchange, method: str) -> str:
    """curl --data-binary @photo.jpg http://127.0.0.1:8000/v2/models/net/classify"""
    host = http.headers.get(b"host", b"").decode("latin-1")
    if not HOST.fullmatch(host):
        host = "HOST:PORT"
    path = quote(http.scope.get("root_path", "") + http.path)[:200]
    body = BODIES.get(http.path.rpartition("/")[2], "-X POST ") if method == "POST" else ""
    return f"curl {body}{http.scope.get('scheme', 'http')}://{host}{path}"


def wrong_method(http: HttpExchange, allowed: list[str]) -> HttpError:
    """405 with Allow, and what to type instead."""
    shown = [method for method in allowed if method != "HEAD"]
    return HttpError(
        405,
        f"{http.method} is not for this path, {' or '.join(shown)} is; try: {curl_command(http, shown[0])}",
        ((b"allow", ", ".join(allowed).encode()),),
    )


def refuse_form(http: HttpExchange) -> None:
    """`curl -F image=@photo.jpg` sends a form with the file inside; /classify takes the file itself."""
    kind = http.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind == b"multipart/form-data":
        http.discard = True  # its body has not been read
        raise HttpError(415, f"the body is a form (curl -F); send the file itself: {curl_command(http, 'POST')}")
