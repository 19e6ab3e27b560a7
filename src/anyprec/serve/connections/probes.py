"""Health probes answered at the accept: a new socket in, True once the probe on it has its answer and is closed.

A probe that goes the ordinary way needs four or five turns of the event loop: accept, open, read, run, write. While a
thousand clients send something, each turn takes tens of milliseconds. Called by acceptor.py.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

PROBE = b"GET /v2/health/"
HEAD_BYTES = 1024
# What kubelet, load balancers and curl send. Whatever has another header, a body or a second request behind it goes the
# ordinary way, which checks all of it.
SIMPLE = re.compile(
    rb"GET (/v2/health/(?:live|ready)) HTTP/1\.([01])\r\n"
    rb"((?:(?i:host|user-agent|accept|accept-encoding|cache-control|pragma|connection): ?[\x20-\x7e]*\r\n)*)\r\n"
)
ONE_HOST = re.compile(rb"^host: ?(?:[\w.-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?$", re.IGNORECASE | re.MULTILINE | re.ASCII)
CONNECTION = re.compile(rb"^connection: ?(.*)$", re.IGNORECASE | re.MULTILINE)


def peek(taken: socket.socket) -> bytes | None:
    """What it has sent so far; None: it has been reset, or its client sends nothing more."""
    try:
        taken.setblocking(False)
        return taken.recv(HEAD_BYTES, socket.MSG_PEEK) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None


def may_be_probe(head: bytes) -> bool:
    """It begins like a health probe, or has sent nothing yet."""
    return head.startswith(PROBE[: len(head)])


def asks_for(head: bytes, also_kept: bool) -> str | None:
    """The path, if this is a whole health probe and nothing else.

    `also_kept`: even if it does not ask for the connection to be closed, which it will be.
    """
    found = SIMPLE.fullmatch(head)
    if found is None:
        return None
    fields = found[3].replace(b"\r\n", b"\n")
    hosts = len(re.findall(rb"^host:", fields, re.IGNORECASE | re.MULTILINE))
    if hosts > 1 or len(ONE_HOST.findall(fields)) != hosts or (hosts == 0 and found[2] == b"1"):
        return None
    wanted = [value.strip().lower() for value in CONNECTION.findall(fields)]
    if wanted not in ([], [b"close"], [b"keep-alive"]):
        return None
    closes = wanted == [b"close"] or (not wanted and found[2] == b"0")
    return found[1].decode() if closes or also_kept else None


def no_answer(path: str, host: str) -> bytes | None:
    return None


def answer_probe(
    taken: socket.socket, head: bytes, answer: Callable[[str, str], bytes | None], also_kept: bool
) -> bool:
    """Answer and close. `answer`: path and client in, the whole answer out; None: it takes the ordinary way."""
    path = asks_for(head, also_kept)
    if path is None:
        return False
    try:
        whole = answer(path, str(taken.getpeername()[0]))
        if whole is None:
            return False
        taken.recv(len(head))  # or closing would reset the connection, and the client lose its answer
        taken.send(whole)  # a few hundred bytes fit into the buffer of a new socket
    except OSError:  # it is gone
        pass
    taken.close()
    return True
