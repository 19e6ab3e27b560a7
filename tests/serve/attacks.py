"""What the attack tests share: raw bytes to a server and back, what reached the application, a health probe."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

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

def scheduled(path):  # seconds on a core, seconds of waiting for one, since the thread began
    try:
        with open(path) as file:
            return [1e-9 * int(part) for part in file.read().split()[:2]]
    except OSError:  # not Linux, or gone
        return [0.0, 0.0]

def both():
    return scheduled("/proc/{0}/task/{0}/schedstat".format(sys.argv[2])) + scheduled("/proc/thread-self/schedstat")

print("ready", flush=True)
asked = 0
while not stop.wait(0.02) or asked < 5:  # at least five, however slow the machine
    asked += 1
    before, start, found = both(), time.monotonic(), b""
    try:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) as client:
            client.sendall(b"GET /v2/health/live HTTP/1.1\\r\\nhost: probe\\r\\nconnection: close\\r\\n\\r\\n")
            while chunk := client.recv(65536):
                found += chunk
    except OSError as error:
        found += repr(error).encode()
    took, after = time.monotonic() - start, both()
    cpu, wait, _, own_wait = (y - x for x, y in zip(before, after))
    print(took, cpu, wait, own_wait, found[:12] == b"HTTP/1.1 200" and b"live" in found, found[:60])
"""


@dataclass(frozen=True, order=True)
class Probed:
    """One answer, and what the scheduler of the operating system had to do with it."""

    took_s: float
    server_cpu_s: float  # of the server's event loop, meanwhile
    server_wait_s: float  # in which the server's event loop was ready to run, but other processes had the cores
    own_wait_s: float  # the same of the probe
    is_live: bool
    answer: str


class Probe:
    """Asks for /v2/health/live over a new connection, again and again, as a kubelet does; in a process of its own."""

    def __init__(self, port: int, server_pid: int = 0) -> None:
        self.port, self.server_pid = port, server_pid
        self.found: list[Probed] = []  # slowest last

    def __enter__(self) -> Probe:
        command = [sys.executable, "-I", "-c", PROBE, str(self.port), str(self.server_pid)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        out, _ = self.process.communicate(timeout=30)  # which closes its stdin
        for line in out.splitlines():
            took, cpu, wait, own_wait, is_live, answer = line.split(maxsplit=5)
            self.found.append(Probed(float(took), float(cpu), float(wait), float(own_wait), is_live == "True", answer))
        self.found.sort()

    def check(self) -> None:
        """Every probe was answered. No bound on time but that of a hang: tests share their machine with others.

        A probe that got no core between connecting and asking was an idle connection, which may lose its place.
        """
        assert len(self.found) >= 5
        failed = [one for one in self.found if not (one.is_live or (one.answer == "b''" and one.own_wait_s > 0.25))]
        assert not failed, failed[:3]
        assert self.found[-1].took_s < 5, self.found[-1]
