"""Who may call and who may control: an HTTP request and the server's keys in, an error out if it may not.

Called by routes.py for every request to a path that is not open to all.
"""

from __future__ import annotations

from anyprec.serve.http.exchange import LOCAL_HOST, HttpExchange, is_forwarded, key_of
from anyprec.serve.http.keys import OWNER, Keys
from anyprec.serve.http.protocol import HttpError


def authorize(http: HttpExchange, keys: Keys, control: bool, local: bool) -> None:
    """Raise HttpError 401 or 403 unless this request may call, or control where `control` is asked for.

    `local`: without any keys, requests that seem to come from this machine may control.
    """
    own = http.by_socket and not is_forwarded(http.headers)
    http.caller = caller = OWNER if own else keys.caller(key_of(http.headers))
    if keys.api and caller.name is None:
        raise unauthorized()
    if not control or caller.control:
        return
    if keys.control:
        if caller.name is None:
            raise unauthorized()
        raise HttpError(403, "this needs a control key, and the key given is not one")
    if keys.api or not local:
        raise HttpError(
            403, "control is closed here: start the server with --control-key-file or --control-socket"
            + ("" if keys.api else ", or on your own machine with --local-control"),
        )  # fmt: skip
    # Without keys, neither clients of a proxy nor web pages from elsewhere may pass as programs of this machine.
    host = http.headers.get(b"host", b"").decode("latin-1")
    origin = http.headers.get(b"origin")
    other_page = origin is not None and origin.decode("latin-1").partition("://")[2] != host
    if is_forwarded(http.headers) or not LOCAL_HOST.fullmatch(host) or other_page:
        raise HttpError(
            403, "control without a key is only for pages and programs of this machine, and not through a proxy"
        )


def unauthorized() -> HttpError:
    return HttpError(401, "an API key is needed: Authorization: Bearer KEY", ((b"www-authenticate", b"Bearer"),))
