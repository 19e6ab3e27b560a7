"""Soak: minutes of mixed load against a server process, with its memory watched. Not collected by pytest.

    python tests/serve/soak.py --minutes 30

Good requests (JSON, binary, images, every width), mistakes, clients that vanish, and a model file replaced every ten
seconds. Fails on a wrong answer, an internal error, a growing memory (a line through its size after the first fifth), a
growing number of open files, or an end that is not clean.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

import numpy as np
from serving import ask, expected, images, process, save, tensor

ALLOWED_MB_AN_HOUR = 16.0  # noise of the allocator; a leak of 100 bytes a request would be 100 times that


class Soak:
    def __init__(self, port: int, paths: list[Path]) -> None:
        from PIL import Image

        self.port, self.paths = port, paths
        self.stop = threading.Event()
        self.wrong: list[str] = []
        self.asked = 0
        self.x = images(1)
        self.right = {bits: [expected(path, self.x, bits) for path in paths] for bits in (1, 2, 4, 8)}
        buffer = io.BytesIO()
        Image.fromarray(images(1, size=40)[0].transpose(1, 2, 0)).save(buffer, "PNG")
        self.png = buffer.getvalue()

    def good(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        bits = draw.choice((1, 2, 4, 8))
        parameters = {"bits": bits, "deadline_ms": 5000}
        if draw.random() < 0.5:
            reply = ask(
                self.port,
                "POST",
                "/v2/models/net/infer",
                {"inputs": [tensor(self.x)], "parameters": parameters},
                connection,
            )
            y = np.array(reply.json["outputs"][0]["data"], np.float32).reshape(1, 4) if reply.status == 200 else None
        else:
            record = {key: value for key, value in tensor(self.x).items() if key != "data"}
            record["parameters"] = {"binary_data_size": self.x.nbytes}
            parameters["binary_data_output"] = True
            head = json.dumps({"inputs": [record], "parameters": parameters}).encode()
            reply = ask(
                self.port, "POST", "/v2/models/net/infer", head + self.x.tobytes(), connection,
                inference_header_content_length=str(len(head)),
            )  # fmt: skip
            y = None
            if reply.status == 200:
                y = np.frombuffer(reply.body[int(reply.headers["inference-header-content-length"]) :], "<f4").reshape(
                    1, 4
                )
        if reply.status == 200 and not any(np.array_equal(y, one) for one in self.right[bits]):
            self.wrong.append(f"a wrong answer at {bits} bit")
        elif reply.status not in (200, 429, 503, 504):
            self.wrong.append(f"{reply.status} {reply.body[:200]!r}")

    def bad(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        path, body = draw.choice(
            [
                ("/v2/models/net/infer", draw.randbytes(draw.randint(0, 3000))),
                ("/v2/models/net/infer", b'{"inputs": [' * draw.randint(1, 900)),
                ("/v2/models/other/infer", b"{}"),
                ("/v2/models/net/classify", self.png[: draw.randint(0, len(self.png) - 50)]),
                ("/v2/models/net/classify?bits=9", self.png),
            ]
        )
        reply = ask(self.port, "POST", path, body, connection)
        if not 400 <= reply.status < 500 and reply.status != 503:
            self.wrong.append(f"{reply.status} for a mistake at {path}")

    def other(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        method, path, body = draw.choice(
            [
                ("POST", "/v2/models/net/classify?bits=all", self.png),
                ("GET", "/metrics", None),
                ("GET", "/v2/models/net/live", None),
                ("GET", "/v2/models/net/stats", None),
                ("GET", "/openapi.json", None),
                ("GET", "/", None),
            ]
        )
        reply = ask(self.port, method, path, body, connection)
        if reply.status not in (200, 429, 503, 504):
            self.wrong.append(f"{reply.status} at {path}")

    def vanish(self, draw: random.Random, connection: http.client.HTTPConnection) -> None:
        body = json.dumps({"inputs": [tensor(self.x)]}).encode()
        whole = b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(whole[: draw.randint(1, len(whole))])

    def client(self, seed: int) -> None:
        draw = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        kinds = [self.good] * 80 + [self.bad] * 8 + [self.other] * 8 + [self.vanish] * 4
        while not self.stop.is_set():
            try:
                draw.choice(kinds)(draw, connection)
                self.asked += 1
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(repr(error))
                connection.close()
        connection.close()


def memory_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "net.apm")
        paths = [save(Path(folder) / f"{seed}.apm", seed=seed) for seed in (0, 1)]
        with process(str(path), "--slo", "1s", "--log-level", "error") as (child, port):
            drain = threading.Thread(target=lambda: lines.extend(child.stderr or ()), daemon=True)
            lines: list[str] = []
            drain.start()
            soak = Soak(port, paths)
            threads = [threading.Thread(target=soak.client, args=(seed,)) for seed in range(args.clients)]
            for thread in threads:
                thread.start()
            began, seen, files, replaced = time.monotonic(), [], [], 0
            while (passed := time.monotonic() - began) < 60 * args.minutes and child.poll() is None:
                time.sleep(1.0)
                seen.append((passed, memory_mb(child.pid)))
                files.append(len(list(Path(f"/proc/{child.pid}/fd").iterdir())))
                if len(seen) % 10 == 0:
                    replaced += 1
                    save(path, seed=replaced % 2)
                if len(seen) % 60 == 0:
                    print(
                        f"{passed:6.0f} s  {soak.asked} requests  {seen[-1][1]:.1f} MB  {files[-1]} files", flush=True
                    )
            soak.stop.set()
            for thread in threads:
                thread.join()
            child.send_signal(signal.SIGTERM)
            code = child.wait(60)
            drain.join(5)
    settled = np.array(seen[len(seen) // 5 :])
    growth = float(np.polyfit(settled[:, 0], settled[:, 1], 1)[0] * 3600)
    print(
        f"{soak.asked} requests, {replaced} files replaced, {len(soak.wrong)} wrong; memory {settled[0, 1]:.1f} -> "
        f"{settled[-1, 1]:.1f} MB, {growth:+.1f} MB an hour; files {max(files[:10])} -> {files[-1]}; exit code {code}"
    )
    for line in [*soak.wrong[:10], *lines[:20]]:
        print("  ", line.rstrip())
    rose = settled[-len(settled) // 4 :, 1].mean() - settled[: len(settled) // 4, 1].mean()
    leaks = growth > ALLOWED_MB_AN_HOUR and rose > 2.0  # in short runs the line alone is noise
    return int(bool(soak.wrong) or leaks or code != 0 or files[-1] > max(files[:10]) + 20)


if __name__ == "__main__":
    sys.exit(main())
