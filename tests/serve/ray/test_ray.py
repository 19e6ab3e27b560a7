"""The Ray application on a cluster of this machine: a replica killed under load, widths of each, replicas added.

Slow: a cluster takes half a minute to start. tests/serve/ray_cluster.py is its process; networks there are slow by
sleeping, 80 ms an image at 8 bit and 10 ms at 1 bit. What needs no cluster is in test_scaling.py.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import ask, binary_request, expected, has_ray, images, output, save, tensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_ray(), reason="Ray is not installed: pip install anyprec[ray]"),
]

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by Ray's own choice: behind whatever else runs on the machine
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "PYTHONPATH": str(Path(__file__).parent),
}
PATIENCE_S = 240.0


class Cluster:
    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def deploy(self, name: str, user_config: dict[str, Any] | None = None, **args: Any) -> None:
        """New, or in place of the old one."""
        assert self.process.stdin is not None and self.process.stdout is not None
        app: dict[str, Any] = {"name": name, "args": args}
        if user_config is not None:
            app["deployments"] = [{"name": "anyprec", "user_config": user_config}]
        self.process.stdin.write(json.dumps(app) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        line = self.process.stdout.readline() if ready else ""
        assert line and json.loads(line) == {"deployed": name}, self.log.read_text()[-4000:]

    def replicas(self, name: str) -> list[int]:
        """Process ids. Only processes below the cluster's own are looked at."""
        children: dict[int, list[int]] = collections.defaultdict(list)
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children[parent].append(int(entry.name))
        found, left = [], [self.process.pid]
        while left:
            left += children[pid := left.pop()]
            with contextlib.suppress(OSError):
                if f"ServeReplica:{name}:" in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("ray") / "log"
    script = Path(__file__).parents[1] / "ray_cluster.py"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, env={**os.environ, **ENVIRONMENT}, start_new_session=True,
        )  # fmt: skip
        try:
            yield Cluster(process, port, log)
        finally:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: it, and what it started
                process.wait()
            process.stdout.close()


# --- a client that tries again, as docs/guides/deploy.md says ---


@dataclass
class Seen:
    answered: int = 0
    again: collections.Counter[Any] = field(default_factory=collections.Counter)  # statuses that were tried again
    by: collections.Counter[tuple[str, int]] = field(default_factory=collections.Counter)  # (replica, bits)
    wrong: list[str] = field(default_factory=list)

    @property
    def replicas(self) -> set[str]:
        return {replica for replica, _ in self.by}


def answer(port: int, name: str, x: np.ndarray, seen: Seen, **parameters: Any) -> Any:
    """A request is sent until it is answered: the network keeps nothing, so that twice is as good as once."""
    body = {"inputs": [tensor(x)], "parameters": parameters}
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            reply = ask(port, "POST", f"/{name}/v2/models/net/infer", body)
        except (OSError, http.client.HTTPException) as error:
            seen.again[type(error).__name__] += 1
        else:
            if reply.status == 200:
                return reply
            seen.again[reply.status] += 1
            assert reply.status in (500, 502, 503, 504), reply.body
        time.sleep(0.1)
    raise AssertionError(f"no answer in {PATIENCE_S} s: {seen}")


def load(
    port: int, name: str, path: Path, clients: int, pause_s: float = 0.0, **parameters: Any
) -> tuple[Seen, Callable[[], None]]:
    """So many clients, each sending one request after the other, with a pause; and a function that ends them."""
    seen, lock, failed = Seen(), threading.Lock(), []
    until = threading.Event()

    def work(client: int) -> None:
        draw = 0
        try:
            while not until.wait(pause_s):
                x = images(1, seed=1000 * client + draw % 50)
                draw += 1
                own = Seen()
                reply = answer(port, name, x, own, **parameters)
                bits = reply.json["parameters"]["bits"]
                right = np.array_equal(output(reply), expected(path, x, bits))
                with lock:
                    seen.answered += 1
                    seen.again += own.again
                    seen.by[reply.headers["x-anyprec-replica"], bits] += 1
                    if not right:
                        seen.wrong.append(f"client {client}, draw {draw}, {bits} bit: {reply.body!r}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()

    def wait() -> None:
        until.set()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    return seen, wait


def wait_for(what: str, true: Any, seen: Seen | None = None) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"{what} did not happen in {PATIENCE_S} s; {seen}"
        time.sleep(0.2)


# --- the tests, in order: they share the cluster ---

PAIR = {"slo": "1s", "transit": "100ms", "warm_up": "1s", "num_cpus": 0.1, "min_replicas": 2, "max_replicas": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "net.apm")


@pytest.fixture(scope="module")
def pair(cluster: Cluster, path: Path) -> Cluster:
    cluster.deploy("pair", model=str(path), **PAIR)
    return cluster


def test_the_protocol_is_there(pair, path):
    assert ask(pair.port, "GET", "/pair/v2/health/ready").status == 200
    assert ask(pair.port, "GET", "/pair/v2/models/net").json["parameters"]["slo_ms"] == 1000.0
    assert b"<title" in ask(pair.port, "GET", "/pair/").body
    assert ask(pair.port, "GET", "/pair/v2/models/other").status == 404
    broken = ask(pair.port, "POST", "/pair/v2/models/net/infer", b"{")
    assert broken.status == 400 and "error" in broken.json
    closed = ask(pair.port, "POST", "/pair/v2/models/net/precision", {"bits": 4})
    assert closed.status == 403
    x = images(3)
    body, length = binary_request(x)
    raw = ask(
        pair.port, "POST", "/pair/v2/models/net/infer", body,
        inference_header_content_length=str(length), content_type="application/octet-stream",
    )  # fmt: skip
    assert raw.status == 200, raw.body
    np.testing.assert_array_equal(output(raw), expected(path, x, raw.json["parameters"]["bits"]))


def test_one_of_two_replicas_is_killed_under_load(pair, path):
    seen, wait = load(pair.port, "pair", path, 12, deadline_ms=60_000)
    wait_for("answers of both replicas", lambda: len(seen.replicas) == 2 and seen.answered > 50, seen)
    first = set(seen.replicas)
    victims = pair.replicas("pair")
    assert len(victims) == 2
    os.kill(victims[0], signal.SIGKILL)
    before = seen.answered
    wait_for("answers after the kill", lambda: seen.answered > before + 50, seen)
    wait_for("a replica in its place", lambda: seen.replicas - first, seen)
    wait()
    print(f"\n{seen.answered} answers, tried again: {dict(seen.again)}")
    assert not seen.wrong
    assert set(seen.again) <= {500, 502, 503, "ConnectionResetError", "RemoteDisconnected"}
    # Only what the dead replica held is sent again: 12 clients, so 12 requests at most, and some when Ray finds out.
    assert sum(seen.again.values()) <= 50
    assert len(seen.replicas) == 3 and len(pair.replicas("pair")) == 2


def test_each_replica_adapts_its_own_width(pair, path):
    calm = Seen()
    for _ in range(4):
        reply = answer(pair.port, "pair", images(), calm)
        assert reply.json["parameters"]["bits"] == 8
    # 20 clients a replica, 80 ms each at 8 bit: the last one would wait for 1.6 s, and may for 1 s.
    seen, wait = load(pair.port, "pair", path, 40)

    def narrow() -> set[str]:
        return {replica for replica, bits in seen.by if bits < 8}

    wait_for("less than 8 bit at both replicas", lambda: len(narrow()) == 2, seen)
    wait()
    assert not seen.wrong
    wait_for("8 bit again", lambda: answer(pair.port, "pair", images(), calm).json["parameters"]["bits"] == 8)


def test_another_width_for_all_needs_no_new_replica(pair, path):
    before = set(pair.replicas("pair"))
    pair.deploy("pair", user_config={"bits": 2}, model=str(path), **PAIR)
    seen = Seen()

    def only(bits: int) -> bool:
        return all(answer(pair.port, "pair", images(), seen).json["parameters"]["bits"] == bits for _ in range(12))

    wait_for("2 bit everywhere", lambda: only(2))
    assert set(pair.replicas("pair")) == before
    pair.deploy("pair", user_config={"policy": "adaptive"}, model=str(path), **PAIR)
    wait_for("8 bit everywhere", lambda: only(8))


def test_only_the_levels_that_are_given(cluster, path):
    cluster.deploy("few", model=str(path), levels=[1, 4], **{**PAIR, "min_replicas": 1, "max_replicas": 1})
    assert ask(cluster.port, "GET", "/few/v2/models/net").json["parameters"]["levels"] == ["1", "4"]
    assert answer(cluster.port, "few", images(), Seen()).json["parameters"]["bits"] == 4


def test_replaced_replicas_fail_no_request(pair, path):
    """A new deployment under load: the old replicas answer what they have, then go."""
    seen, wait = load(pair.port, "pair", path, 6, deadline_ms=60_000)
    wait_for("answers", lambda: len(seen.replicas) == 2, seen)
    first = set(seen.replicas)
    pair.deploy("pair", model=str(path), max_batch=16, **PAIR)
    wait_for("answers of two new replicas", lambda: len(seen.replicas - first) == 2, seen)
    wait()
    assert not seen.wrong and not seen.again


def test_replicas_are_added_when_narrow_is_not_enough(cluster, path):
    args = {**PAIR, "min_replicas": 1, "upscale_delay": "3s", "downscale_delay": "5s", "look_back": "4s", "busy": 1.0}
    cluster.deploy("grow", model=str(path), **args)
    assert len(cluster.replicas("grow")) == 1
    # Up to 40 images a second: at 8 bit that is the work of 3.2 replicas, at 1 bit of 0.4.
    seen, wait = load(cluster.port, "grow", path, 40, pause_s=1.0)
    wait_for("less than 8 bit", lambda: any(bits < 8 for _, bits in seen.by), seen)
    time.sleep(10)  # longer than Ray would wait
    assert len(seen.replicas) == 1 and len(cluster.replicas("grow")) == 1, "bits come first"
    wait()
    # The same load is too much for one replica that shall not stay below 8 bit.
    cluster.deploy("grow", model=str(path), **args, settle=8)
    seen, wait = load(cluster.port, "grow", path, 40, pause_s=1.0)
    wait_for("a second replica", lambda: len(seen.replicas) >= 2 and len(cluster.replicas("grow")) == 2, seen)
    wait()
    assert not seen.wrong
    wait_for("one replica again", lambda: len(cluster.replicas("grow")) == 1)
