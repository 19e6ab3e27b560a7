"""Soak: minutes of mixed traffic against a server process, every answer compared with the library.

    python tests/serve/soak.py --minutes 30 [--json]

Tensors as JSON, binary and gzip, pictures (PNG and JPEG), batches, every width; mistakes; clients that dribble, stall,
or vanish in the middle of a request or an answer; widths held and freed; a model file replaced every ten seconds, now
and then by a broken one; a health probe all along. Prints requests, wrong answers, errors by kind, memory, and the
slowest probe. Exit code 1: a wrong answer, an unexpected status, a growing memory (a line through its size after the
first fifth), a growing number of open files, or an end that is not clean. test_soak.py runs some seconds of it.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import io
import json
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from serving import LABELS, Reply, ask, binary_request, expected, images, memory_mb, process, save, tensor

ALLOWED_MB_AN_HOUR = 16.0  # noise of the allocator; a leak of 100 bytes a request would be 100 times that
WIDTHS = (1, 2, 4, 8)
BUSY = (429, 503, 504)
INFER, CLASSIFY = "/v2/models/net/infer", "/v2/models/net/classify"
CONTROL = "the-control-key-of-the-soak"
KEPT = 100  # descriptions of what went wrong
PROBE_S = 0.05


class Soak:
    def __init__(self, port: int, paths: list[Path]) -> None:
        self.port = port
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.requests: Counter[str] = Counter()  # by kind
        self.answers = 0  # compared with the library
        self.wrong = 0
        self.errors: Counter[str] = Counter()  # unexpected, by kind
        self.refusals: Counter[str] = Counter()  # expected under load, by kind and status
        self.details: list[str] = []
        self.probes: list[float] = []  # ms
        self.inputs = [images(count, seed) for seed, count in enumerate((1, 1, 2, 4))]
        # Either file may be the one that answers while it is being replaced.
        self.right = {
            (i, bits): [expected(path, x, bits) for path in paths]
            for i, x in enumerate(self.inputs) for bits in WIDTHS
        }  # fmt: skip
        self.pictures, self.seen = [], []
        for form in ("PNG", "JPEG"):
            buffer = io.BytesIO()
            Image.fromarray(self.inputs[0][0].transpose(1, 2, 0)).save(buffer, form)
            self.pictures.append(buffer.getvalue())
            pixels = np.asarray(Image.open(buffer)).transpose(2, 0, 1)[None]
            self.seen.append({bits: [likely(expected(path, pixels, bits)[0]) for path in paths] for bits in WIDTHS})

    # --- notes ---

    def error(self, kind: str, detail: str) -> None:
        with self.lock:
            self.errors[kind] += 1
            if len(self.details) < KEPT:
                self.details.append(f"{kind}: {detail}")

    def is_answer(self, kind: str, reply: Reply) -> bool:
        """Whether there is an answer to compare; an unexpected status is an error."""
        if reply.status in BUSY:
            with self.lock:
                self.refusals[f"{kind} {reply.status}"] += 1
        elif reply.status != 200:
            self.error(f"{kind} {reply.status}", repr(reply.body[:200]))
        return reply.status == 200

    def compare(self, kind: str, good: bool, detail: str) -> None:
        with self.lock:
            self.answers += 1
            self.wrong += not good
            if not good and len(self.details) < KEPT:
                self.details.append(f"wrong answer, {kind}: {detail}")

    # --- good requests ---

    def check(self, kind: str, reply: Reply, i: int, bits: int) -> None:
        if not self.is_answer(kind, reply):
            return
        length = reply.headers.get("inference-header-content-length")
        head = json.loads(reply.body if length is None else reply.body[: int(length)])
        out = head["outputs"][0]
        raw = np.array(out["data"], np.float32) if length is None else np.frombuffer(reply.body[int(length) :], "<f4")
        good = any(np.array_equal(raw.reshape(out["shape"]), one) for one in self.right[i, bits])
        self.compare(kind, good and head["parameters"]["bits"] == bits, f"input {i} at {bits} bit")

    def json_tensor(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        i, bits = draw.randrange(len(self.inputs)), draw.choice(WIDTHS)
        body = {"inputs": [tensor(self.inputs[i])], "parameters": {"bits": bits, "deadline_ms": 5000}}
        self.check("JSON", ask(self.port, "POST", INFER, body, connection), i, bits)

    def message(self, i: int, bits: int) -> tuple[bytes, int]:
        """A binary request, and how much of it is JSON."""
        return binary_request(self.inputs[i], bits=bits, deadline_ms=5000, binary_data_output=True)

    def binary_tensor(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        i, bits = draw.randrange(len(self.inputs)), draw.choice(WIDTHS)
        body, length = self.message(i, bits)
        headers = {"inference_header_content_length": str(length)}
        kind = "binary"
        if draw.random() < 0.2:
            kind, body, headers["content_encoding"] = "gzip", gzip.compress(body, 1), "gzip"
        self.check(kind, ask(self.port, "POST", INFER, body, connection, **headers), i, bits)

    def chosen_width(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        """At whatever width the policy takes: the answer must be right for the width it names."""
        i = draw.randrange(len(self.inputs))
        body = {"inputs": [tensor(self.inputs[i])], "parameters": {"deadline_ms": 5000}}
        reply = ask(self.port, "POST", INFER, body, connection)
        if reply.status != 200:
            self.is_answer("policy's width", reply)
            return
        self.check("policy's width", reply, i, reply.json["parameters"]["bits"])

    def picture(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        which, all_ = draw.randrange(2), draw.random() < 0.2
        bits = "all" if all_ else str(draw.choice(WIDTHS))
        path = f"{CLASSIFY}?bits={bits}&top=1&deadline_ms=5000"
        reply = ask(self.port, "POST", path, self.pictures[which], connection)
        if not self.is_answer("picture", reply):
            return
        results = reply.json["results"]
        for result in results:
            best = result["labels"][0]
            known = self.seen[which][result["bits"]]
            good = any(best["label"] == label and abs(best["probability"] - p) < 1e-3 for label, p in known)
            self.compare("picture", good, f"{best} at {result['bits']} bit, not one of {known}")
        if len(results) != (len(WIDTHS) if all_ else 1):
            self.error("picture", f"{len(results)} results for bits={bits}")

    def other(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        path = draw.choice(("/metrics", "/v2/models/net/live", "/v2/models/net/stats", "/openapi.json", "/", "/v2"))
        self.is_answer(path, ask(self.port, "GET", path, None, connection))

    def control(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        wish = draw.choice(({"bits": 2}, {"bits": 8}, {"policy": "adaptive"}, {"policy": "accuracy"}))
        path = "/v2/models/net/precision"
        self.is_answer("control", ask(self.port, "POST", path, wish, connection, authorization=f"Bearer {CONTROL}"))

    # --- bad requests ---

    def bad(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        png = self.pictures[0]
        method, path, body = draw.choice(
            [
                ("POST", INFER, draw.randbytes(draw.randint(0, 3000))),
                ("POST", INFER, b'{"inputs": [' * draw.randint(1, 900)),
                ("POST", INFER, json.dumps({"inputs": [tensor(images(1, size=9))]}).encode()),
                ("POST", INFER, json.dumps({"inputs": [tensor(images(1))], "parameters": {"bits": 9}}).encode()),
                ("POST", "/v2/models/other/infer", b"{}"),
                ("POST", CLASSIFY, png[: draw.randint(0, len(png) - 50)]),
                ("POST", f"{CLASSIFY}?bits=9", png),
                ("POST", "/v2/models/net/precision", b'{"bits": 2}'),  # without the key
                ("DELETE", INFER, b""),
                ("GET", "/v2/models/net/../../etc/passwd", None),
            ]
        )
        reply = ask(self.port, method, path, body, connection)
        if not 400 <= reply.status < 500 and reply.status not in BUSY:
            self.error(f"mistake {reply.status}", f"{method} {path} {reply.body[:100]!r}")

    # --- clients that are slow, or go away ---

    def raw(self, i: int, bits: int) -> bytes:
        body, length = self.message(i, bits)
        head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\ninference-header-content-length: {length}\r\n"
        return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body

    def vanish(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        whole = self.raw(0, draw.choice(WIDTHS))
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            if draw.random() < 0.5:  # in the middle of the request
                client.sendall(whole[: draw.randint(1, len(whole) - 1)])
            else:  # before the answer, or in the middle of it
                client.sendall(whole)
                if draw.random() < 0.5:
                    client.recv(draw.randint(1, 60))

    def dribble(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        """A request in twenty pieces over two seconds, which must be answered; or one that stalls and is given up."""
        i, bits = draw.randrange(len(self.inputs)), draw.choice(WIDTHS)
        whole = self.raw(i, bits)
        pieces = [whole[at : at + len(whole) // 20 + 1] for at in range(0, len(whole), len(whole) // 20 + 1)]
        stalls = draw.random() < 0.3
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as client:
            for piece in pieces[:10] if stalls else pieces:
                client.sendall(piece)
                time.sleep(0.1)
            if stalls:
                time.sleep(draw.random() * 3)
                return
            answer = http.client.HTTPResponse(client)
            answer.begin()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            self.check("slow client", Reply(answer.status, headers, answer.read()), i, bits)

    # --- threads ---

    def client(self, seed: int, kinds: list[tuple[str, Callable[..., None]]]) -> None:
        draw = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.stop.is_set():
            name, kind = draw.choice(kinds)
            try:
                kind(draw, connection)
            except (OSError, http.client.HTTPException) as error:
                if name == "vanish":  # a reset is what it asked for
                    continue
                self.error(f"{name} {type(error).__name__}", str(error))
                connection.close()
            except Exception as error:  # an answer that cannot be read is a wrong one
                self.error(f"{name} unreadable", repr(error))
            with self.lock:
                self.requests[name] += 1
        connection.close()

    def probe(self) -> None:
        """The health probe of a balancer: a new connection each time."""
        while not self.stop.wait(PROBE_S):
            began = time.perf_counter()
            try:
                reply = ask(self.port, "GET", "/v2/health/live")
                if reply.status != 200:
                    self.error(f"probe {reply.status}", repr(reply.body[:100]))
            except (OSError, http.client.HTTPException) as error:
                self.error(f"probe {type(error).__name__}", str(error))
            self.probes.append(1e3 * (time.perf_counter() - began))

    def threads(self, clients: int) -> list[threading.Thread]:
        usual = [("JSON", self.json_tensor)] * 24 + [("binary", self.binary_tensor)] * 24
        usual += [("policy's width", self.chosen_width)] * 12 + [("picture", self.picture)] * 16
        usual += [("mistake", self.bad)] * 10 + [("other path", self.other)] * 8
        usual += [("vanish", self.vanish)] * 5 + [("control", self.control)] * 1
        made = [threading.Thread(target=self.client, args=(seed, usual)) for seed in range(clients)]
        slow = [("slow client", self.dribble)]
        made += [threading.Thread(target=self.client, args=(1000 + seed, slow)) for seed in range(3)]
        return [*made, threading.Thread(target=self.probe)]


def likely(output: np.ndarray) -> tuple[str, float]:
    """The most likely label and its probability."""
    shares = np.exp(output.astype(np.float64) - output.max())
    best = int(shares.argmax())
    return LABELS[best], float(shares[best] / shares.sum())


class Watch:
    """The server's memory and files, second by second; replaces its model file."""

    def __init__(self, pid: int, path: Path) -> None:
        self.pid, self.path = pid, path
        self.began = time.monotonic()
        self.memory: list[tuple[float, float]] = [(0.0, memory_mb(pid))]
        self.files: list[int] = []
        self.replaced = self.broken = 0
        self.peak = 0.0

    def look(self) -> None:
        self.memory.append((time.monotonic() - self.began, memory_mb(self.pid)))
        self.files.append(len(list(Path(f"/proc/{self.pid}/fd").iterdir())))
        self.peak = memory_mb(self.pid, "VmHWM")
        if len(self.files) % 10 == 0:
            if len(self.files) % 70 == 0:  # cut short: the old one must stay
                self.broken += 1
                beside = self.path.with_suffix(".new")
                beside.write_bytes(self.path.read_bytes()[:-100])
                beside.replace(self.path)
            else:
                self.replaced += 1
                save(self.path, seed=self.replaced % 2)

    @property
    def growth(self) -> float:
        """MB an hour, by a line through the memory after the first fifth."""
        settled = np.array(self.memory[len(self.memory) // 5 :])
        return float(np.polyfit(settled[:, 0], settled[:, 1], 1)[0] * 3600) if len(settled) > 1 else 0.0

    @property
    def leaks(self) -> bool:
        settled = np.array(self.memory[len(self.memory) // 5 :])[:, 1]
        quarter = max(1, len(settled) // 4)
        rose = settled[-quarter:].mean() - settled[:quarter].mean()  # in short runs the line alone is noise
        return self.growth > ALLOWED_MB_AN_HOUR and rose > 2.0

    @property
    def leaks_files(self) -> bool:
        return bool(self.files) and self.files[-1] > max(self.files[:10]) + 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="the result as one JSON object, on stdout alone")
    args = parser.parse_args()
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "net.apm")
        paths = [save(Path(folder) / f"{seed}.apm", seed=seed) for seed in (0, 1)]
        # The log has a line for each broken file, each mistake of a client has none: what is left is an error.
        options = [str(path), "--slo", "1s", "--log-level", "error"]
        with process(*options, env={"ANYPREC_CONTROL_KEYS": CONTROL}) as (child, port):
            drain = threading.Thread(target=lambda: lines.extend(child.stderr or ()), daemon=True)
            drain.start()
            soak, watch = Soak(port, paths), Watch(child.pid, path)
            threads = soak.threads(args.clients)
            for thread in threads:
                thread.start()
            while (passed := time.monotonic() - watch.began) < 60 * args.minutes and child.poll() is None:
                time.sleep(1.0)
                watch.look()
                if len(watch.files) % 60 == 0:
                    print(
                        f"{passed:6.0f} s  {sum(soak.requests.values())} requests  {soak.wrong} wrong  "
                        f"{sum(soak.errors.values())} errors  {watch.memory[-1][1]:.1f} MB  {watch.files[-1]} files",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
            soak.stop.set()
            for thread in threads:
                thread.join()
            child.send_signal(signal.SIGTERM)
            code = child.wait(60)
            drain.join(5)
    unexpected = [line.rstrip() for line in lines if "refused, the old one stays" not in line and "measure" not in line]
    result = result_of(soak, watch, code, unexpected)
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0 if result["passed"] else 1


def result_of(soak: Soak, watch: Watch, code: int, log: list[str]) -> dict[str, Any]:
    probes = np.array(soak.probes or [np.nan])
    good = not (soak.wrong or soak.errors or log or watch.leaks or watch.leaks_files or code)
    return {
        "passed": good and soak.answers > 0,
        "seconds": round(watch.memory[-1][0]),
        "requests": sum(soak.requests.values()) + len(soak.probes),
        "by_kind": dict(soak.requests),
        "compared": soak.answers,
        "wrong": soak.wrong,
        "errors": dict(soak.errors),
        "refused_under_load": dict(soak.refusals),
        "files_replaced": watch.replaced,
        "broken_files": watch.broken,
        "memory_mb": {
            "start": round(watch.memory[0][1], 1),
            "peak": round(watch.peak, 1),
            "end": round(watch.memory[-1][1], 1),
            "growth_an_hour": round(watch.growth, 1),
        },
        "open_files": {"first": max(watch.files[:10], default=0), "end": watch.files[-1] if watch.files else 0},
        "probe_ms": {
            "p50": round(float(np.median(probes)), 2),
            "p99.9": round(float(np.quantile(probes, 0.999)), 2),
            "worst": round(float(probes.max()), 2),
        },
        "exit_code": code,
        "details": soak.details[:20],
        "log": log[:20],
    }


def table(result: dict[str, Any]) -> str:
    memory, probe, files = result["memory_mb"], result["probe_ms"], result["open_files"]

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())) or "none"

    rows = [
        f"{'passed' if result['passed'] else 'FAILED'} after {result['seconds']} s",
        f"requests   {result['requests']} ({listed(result['by_kind'])})",
        f"answers    {result['compared']} compared with the library, {result['wrong']} wrong",
        f"errors     {listed(result['errors'])}",
        f"refused    under load: {listed(result['refused_under_load'])}",
        f"files      {result['files_replaced']} replaced, {result['broken_files']} broken ones offered",
        f"memory     {memory['start']} MB at the start, {memory['peak']} at its peak, {memory['end']} at the end, "
        f"{memory['growth_an_hour']:+} an hour",
        f"open files {files['first']} in the first seconds, {files['end']} at the end",
        f"probe      p50 {probe['p50']}, p99.9 {probe['p99.9']}, worst {probe['worst']} ms",
        f"exit code  {result['exit_code']}",
        *(f"  {line}" for line in [*result["details"], *result["log"]]),
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
