"""How fast /v2/health/live is answered while a server process is under attack.

    python tests/serve/health_under_attack.py [--runs 5] [--attack NAME] ... [--json]

Prints for each attack the number of probes, p50, p99 and worst over all runs, and parts of the worst probe's time: how
long the server's event loop computed meanwhile ("busy"), how long it was ready to but other processes had the cores
("no core"), and how long the probe itself waited for one. "most busy" is the longest the event loop computed during any
one probe: the figure that depends least on what else the machine does. test_flood.py runs each attack once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from attacks import INFER, Probe, Probed, statuses, take
from serving import expected, images, infer, output, process, save

from anyprec.files import raise_file_limit

GET = b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n"


class Crowd:
    """Many sockets of one address, all closed at the end."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self.port, self.address = port, address
        self.stack = contextlib.ExitStack()
        self.sockets: list[socket.socket] = []

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def join(self, raw: bytes = b"", count: int = 1) -> list[socket.socket]:
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", self.port), 5, (self.address, 0))
            self.stack.enter_context(client)
            self.sockets.append(client)
            if raw:
                client.sendall(raw)
        return self.sockets[-count:]

    def send(self, raw: bytes) -> None:
        for client in self.sockets:
            with contextlib.suppress(OSError):
                client.sendall(raw)

    def ask(self, count: int) -> None:
        """So many new connections, each of which has its answer before the next is made: their order is certain."""
        for _ in range(count):
            (client,) = self.join(GET)
            assert statuses(take(client, 0.02)) == [200]

    def open_ones(self, expected: list[int]) -> list[int]:
        """Which connections are open, by number. A close may take a moment to arrive: 5 s for those `expected`."""
        end = time.monotonic() + 5
        while (found := [n for n, client in enumerate(self.sockets) if is_open(client)]) != expected:
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        return found


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        while client.recv(65536):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


# --- the attacks, each on a server with the default limits ---


def served_all_along(port: int, model_path: Path, seconds: float) -> None:
    """Inference from another client, again and again."""
    x = images(1)
    right = expected(model_path, x, 8)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        reply = infer(port, x, bits=8)
        assert reply.status == 200, reply.body
        np.testing.assert_array_equal(output(reply), right)
        time.sleep(0.02)


def idle_connections(port: int, model_path: Path) -> None:
    """1,100 that asked once and keep their connection: more than there are places."""
    with Crowd(port) as crowd:
        for _ in range(11):
            crowd.join(GET, 100)
            served_all_along(port, model_path, 0.05)
        served_all_along(port, model_path, 0.5)


def silent_connections(port: int, model_path: Path) -> None:
    with Crowd(port) as crowd:
        crowd.join(b"", 1100)
        served_all_along(port, model_path, 0.5)


def declared_bodies(port: int, model_path: Path) -> None:
    """33 connections that declared 16 MB and sent nothing once locked everybody out for 30 s."""
    with Crowd(port) as crowd:
        crowd.join(INFER + b"content-length: 16777216\r\n\r\n", 300)
        served_all_along(port, model_path, 1.0)


def slow_requests(raw: bytes, drip: bytes) -> Callable[[int, Path], None]:
    """Slow loris: a byte now and then on 600 connections of each of two addresses, over all places there are."""

    def attack(port: int, model_path: Path) -> None:
        with Crowd(port) as crowd, Crowd(port, "127.0.0.2") as other:
            crowd.join(raw, 600)
            with contextlib.suppress(OSError):  # systems with 127.0.0.1 only
                other.join(raw, 600)
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                crowd.send(drip)
                other.send(drip)
                with contextlib.suppress(OSError):  # for 1 s all places may be taken, by requests that may yet come
                    served = infer(port, images(1))
                    assert served.status == 200 or b"connections" in served.body
            served_all_along(port, model_path, 0.3)

    return attack


def untaken_answers(port: int, model_path: Path) -> None:
    """2,000 answers that nobody takes."""
    with Crowd(port) as crowd:
        for client in crowd.join(b"", 100):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
        served_all_along(port, model_path, 1.0)


def rush_of_connections(port: int, model_path: Path) -> None:
    """As many as can be made, each closed or forgotten: 1.5 s."""
    stop = threading.Event()

    def rush() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), Crowd(port) as crowd:
                crowd.join(b"GET /v2 HTTP/1.1\r\nhost", 50)

    threads = [threading.Thread(target=rush) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    stop.set()
    for thread in threads:
        thread.join()


ATTACKS: dict[str, Callable[[int, Path], None]] = {
    "idle connections": idle_connections,
    "silent connections": silent_connections,
    "declared bodies": declared_bodies,
    "slow headers": slow_requests(b"GET /v2 HTTP/1.1\r\nhost: x\r\na", b"a"),
    "slow bodies": slow_requests(INFER + b"content-length: 1000000\r\n\r\n", b"a"),
    "slow chunks": slow_requests(INFER + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "slow empty lines": slow_requests(b"", b"\r\n"),
    "untaken answers": untaken_answers,
    "rush of connections": rush_of_connections,
}


# --- the figures ---

COLUMNS = {  # title -> figure
    "probes": "probes",
    " p50": "p50",
    "  p99": "p99",
    "worst": "worst",
    "busy": "worst_server_cpu",
    "no core": "worst_server_wait",
    "probe: no core": "worst_probe_wait",
    "most busy": "most_server_cpu",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times of the health probe while a server is under attack.")
    parser.add_argument("--runs", type=int, default=5, help="of each attack (default: 5)")
    parser.add_argument("--attack", action="append", choices=ATTACKS, help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    raise_file_limit(3000)  # our ends of the connections
    names = options.attack or list(ATTACKS)
    runs: dict[str, list[list[Probed]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        model_path = save(Path(folder) / "net.apm")
        with process(str(model_path), "--slo", "2s") as (child, port):
            for _ in range(options.runs):
                for name in names:
                    with Probe(port, child.pid) as probe:
                        ATTACKS[name](port, model_path)
                    runs[name].append(probe.found)
    result = {name: figures(found) for name, found in runs.items()}
    print(json.dumps(result, indent=1) if options.json else table(result))
    return 1 if any(one["failed"] for one in result.values()) else 0


def figures(runs: list[list[Probed]]) -> dict[str, Any]:
    """Milliseconds."""
    every = sorted(one for run in runs for one in run)
    worst = every[-1]
    return {
        "probes": len(every),
        "failed": [one.answer for one in every if not one.is_live],
        "p50": round(1e3 * statistics.median(one.took_s for one in every), 1),
        "p99": round(1e3 * every[int(0.99 * len(every))].took_s, 1),
        "worst": round(1e3 * worst.took_s, 1),
        "worst_of_runs": [round(1e3 * run[-1].took_s) for run in runs],
        "worst_server_cpu": round(1e3 * worst.server_cpu_s, 1),
        "worst_server_wait": round(1e3 * worst.server_wait_s, 1),
        "worst_probe_wait": round(1e3 * worst.own_wait_s, 1),
        "most_server_cpu": round(1e3 * max(one.server_cpu_s for one in every), 1),  # during any one probe
    }


def table(result: dict[str, dict[str, Any]]) -> str:
    rows = [f"{'ms':20} {'  '.join(COLUMNS)}  worst of each run"]
    for name, one in result.items():
        cells = (f"{one[field]:>{len(title)}}" for title, field in COLUMNS.items())
        failed = f"  FAILED: {one['failed']}" if one["failed"] else ""
        rows.append(f"{name:20} {'  '.join(cells)}  {' '.join(map(str, one['worst_of_runs']))}{failed}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
