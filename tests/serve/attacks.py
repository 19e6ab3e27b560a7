"""What the attack tests share: raw bytes to a server and back, what reached the application, a health probe."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from serving import Running

INFER = b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"  # what a smuggler wants to be run


def talk(port: int, *segments: bytes, answers: int = 1) -> bytes:
    """Each segment in a packet of its own; what comes back until the server closes, or so many answers and no more."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            for number, segment in enumerate(segments):
                if number:
                    time.sleep(0.05)
                client.sendall(segment)
        return take(client, 0.1, answers)


def take(client: socket.socket, silence_s: float, answers: int = 1) -> bytes:
    """What comes until the end, or until nothing more comes for so long after that many answers."""
    found = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while chunk := client.recv(65536):
            found += chunk
            if len(statuses(found)) >= answers:
                client.settimeout(silence_s)
    return found


def statuses(raw: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", raw)]


@contextlib.contextmanager
def reached(server: Running) -> Iterator[list[str]]:
    """The paths of all requests that reach the application."""
    paths: list[str] = []
    find = server.app.find

    def noted(app, http):
        paths.append(http.path)
        return find(app, http)

    server.app.find = noted
    try:
        yield paths
    finally:
        server.app.find = find


PROBE = """
import socket, sys, threading, time
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
print("ready", flush=True)
while not stop.wait(0.02):
    start, found = time.monotonic(), b""
    try:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) as client:
            client.sendall(b"GET /v2/health/live HTTP/1.1\\r\\nhost: probe\\r\\nconnection: close\\r\\n\\r\\n")
            while chunk := client.recv(65536):
                found += chunk
    except OSError as error:
        found += repr(error).encode()
    print(time.monotonic() - start, found[:12] == b"HTTP/1.1 200" and b"live" in found, found[:60])
"""


class Probe:
    """Asks for /v2/health/live over a new connection, again and again, as a kubelet does; in a process of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.lines: list[list[str]] = []

    def __enter__(self) -> Probe:
        command = [sys.executable, "-I", "-c", PROBE, str(self.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        out, _ = self.process.communicate(timeout=30)  # which closes its stdin
        self.lines = [line.split(maxsplit=2) for line in out.splitlines()]

    def check(self, what: str, bound_s: float = 5.0) -> None:
        """A generous bound, for machines are busy; the figures are printed (pytest -s)."""
        assert self.lines
        times = sorted(float(line[0]) for line in self.lines)
        failed = [line for line in self.lines if line[1] != "True"]
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        told = ", ".join(f"{name} {1e3 * times[int(share * len(times))]:.1f}" for name, share in shares.items())
        print(f"\nhealth during {what}: {len(times)} probes, {told}, worst {1e3 * times[-1]:.1f} ms")
        assert not failed, failed[:3]
        assert times[-1] < bound_s, f"{times[-1]:.3f} s"
