"""Attacks by what a request holds: pictures and JSON that cost the server far more than their sender.

All along a probe asks for /v2/health/live. The limits asserted are generous: they tell a server that answers from one
that does not, on a machine with other work to do.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from attacks import Probe
from bombs import chunk, mask_graph, photo, png, save_mask, scan_bomb, segment
from serving import (
    Reply,
    ask,
    binary_request,
    expected,
    images,
    infer,
    infer_binary,
    memory_mb,
    output,
    process,
    running,
    save,
    wait_for,
)

from anyprec.format import write
from anyprec.run.image_limits import ImageTooLarge, check_bytes
from anyprec.run.images import image_file
from anyprec.run.model import load
from anyprec.serve.connections.server import DrainTimes
from anyprec.serve.http import worker_main
from anyprec.serve.http.bodies import RequestLimits
from anyprec.serve.http.keys import read_keys
from anyprec.serve.models import Settings
from anyprec.serve.scheduling.queue import QueueLimits

SILENT_S = 2.0  # of the probe; before, one answer silenced it for 17 s, and one picture for as long as it liked


@contextlib.contextmanager
def health_answers(port: int) -> Iterator[None]:
    """The server answers every health probe in time while the block runs."""
    with Probe(port) as probe:
        yield
    probe.check()
    assert probe.found[-1].took_s < SILENT_S, probe.found[-1]


def classify(port: int, body: bytes, query: str = "", model: str = "net") -> Reply:
    return ask(port, "POST", f"/v2/models/{model}/classify{query}", body)


def ask_mask(port: int, x: np.ndarray, **parameters) -> Reply:
    return infer_binary(port, x, "mask", **{"deadline_ms": 60_000, **parameters})


@pytest.fixture(scope="module")
def mask_path(tmp_path_factory):
    return save_mask(tmp_path_factory.mktemp("mask") / "mask.apm")


# --- answers ---


def test_a_large_json_answer_is_refused_before_the_run(mask_path):
    with running({"mask": mask_path}) as found, health_answers(found.port):
        reply = ask_mask(found.port, np.zeros((1, 3, 1024, 1024), np.uint8))
        assert reply.status == 413
        error = reply.json["error"]
        for word in ("22,020,096 numbers", "374,341,632", "67,108,864", "--max-answer-json", "binary_data_output"):
            assert word in error
        assert found.models.get("mask").now.scheduler.stats()["requests"]["arrived"] == 0


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_large_answers_hold_up_nobody(mask_path):
    """5.5 million numbers, as JSON and as bytes: right to the last bit, with the probe answered meanwhile."""
    x = np.random.default_rng(0).integers(0, 256, (1, 3, 512, 512), np.uint8)
    right = expected(mask_path, x, 8)
    with process(str(mask_path), "--slo", "5s", "--max-answer-json", "1GiB") as (child, port):
        before = memory_mb(child.pid)
        with health_answers(port):
            text = ask_mask(port, x, bits=8)
            binary = ask_mask(port, x, bits=8, binary_data_output=True)
        assert text.status == 200 and text.headers["transfer-encoding"] == "chunked"
        np.testing.assert_array_equal(output(text), right)
        raw = binary.body[int(binary.headers["inference-header-content-length"]) :]
        np.testing.assert_array_equal(np.frombuffer(raw, "<f4").reshape(right.shape), right)
        peak, after = memory_mb(child.pid, "VmHWM"), memory_mb(child.pid)
        print(f"memory {before:.0f} MB before, {peak:.0f} at the most, {after:.0f} after")
        assert peak < before + 200  # the outputs have 22 MB; before, the JSON of it took 500
        assert after < before + 150  # working memory of up to 64 MiB, and as much of tables, may stay


def test_clients_that_leave_in_the_middle_of_a_large_answer(mask_path):
    with running({"mask": mask_path}, request_limits=RequestLimits(answer_json=1 << 30)) as found:
        body, length = binary_request(np.zeros((1, 3, 256, 256), np.uint8))
        start = f"POST /v2/models/mask/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        start += f"inference-header-content-length: {length}\r\n\r\n"
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", found.port), timeout=20) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.sendall(start.encode() + body)
                assert b"200" in client.recv(1000)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_for(lambda: not found.server.server_state.tasks and found.app.bodies.held == 0)
        assert ask_mask(found.port, np.zeros((1, 3, 8, 8), np.uint8)).status == 200


def test_old_clients_get_large_answers_whole(mask_path):
    """HTTP/1.0 knows no chunks."""
    with running({"mask": mask_path}) as found:
        x = np.zeros((1, 3, 64, 64), np.uint8)
        body = json.dumps({"inputs": [{"name": "input", "shape": list(x.shape), "datatype": "UINT8",
                                       "data": x.ravel().tolist()}]}).encode()  # fmt: skip
        with socket.create_connection(("127.0.0.1", found.port), timeout=20) as client:
            client.sendall(b"POST /v2/models/mask/infer HTTP/1.0\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
            client.sendall(body)
            raw = b""
            while part := client.recv(1 << 16):
                raw += part
        head, _, text = raw.partition(b"\r\n\r\n")
        assert b"chunked" not in head and len(json.loads(text)["outputs"][0]["data"]) == 21 * 64 * 64


def test_outputs_count_among_the_bytes_held(mask_path):
    """One client's outputs are too many for the server; those of several together wait for each other."""
    with running({"mask": mask_path}, request_limits=RequestLimits(held=4 << 20), slow_s=0.3) as found:
        reply = ask_mask(found.port, np.zeros((1, 3, 256, 256), np.uint8), binary_data_output=True)
        assert reply.status == 413 and "--max-held" in reply.json["error"]
        replies: list[int] = []
        x = np.zeros((1, 3, 160, 160), np.uint8)
        threads = [
            threading.Thread(target=lambda: replies.append(ask_mask(found.port, x, binary_data_output=True).status))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(replies) == {200, 503}
        wait_for(lambda: found.app.bodies.held == 0)


def test_many_labels_are_written_aside(tmp_path):
    """Scores of 20,000 classes as labels, for 8 images: as many texts as a small model has answers in an hour."""
    path = tmp_path / "wide.apm"
    write(wide_graph(20_000), path)
    with running({"net": path}) as found, health_answers(found.port):
        body = {"inputs": [tensor_of(images(8))], "outputs": [{"name": "head"}]}
        body["outputs"][0]["parameters"] = {"classification": 20_000}
        reply = ask(found.port, "POST", "/v2/models/net/infer", body)
        assert reply.status == 200 and reply.json["outputs"][0]["shape"] == [8, 20_000]


def wide_graph(classes: int):
    from dataclasses import replace

    from serving import graph

    from anyprec.format import Weight

    found = graph()
    draw = np.random.default_rng(0)
    weights = {
        **found.weights,
        "head": Weight((classes, 1, 1, 6), draw.standard_normal((classes, 1, 1, 6), np.float32)),
    }
    return replace(found, weights=weights, labels=())


def tensor_of(x: np.ndarray) -> dict:
    return {"name": "input", "shape": list(x.shape), "datatype": "UINT8", "data": x.ravel().tolist()}


# --- JSON requests ---


@pytest.mark.thorough
def test_long_json_is_read_aside(tmp_path):
    """As much JSON as is taken, again and again; honest requests and the probe are answered meanwhile."""
    path = save(tmp_path / "net.apm")
    x = images(1)
    right = expected(path, x, 8)
    numbers = b"[" + b"1," * ((4 << 20) // 2 - 200) + b"1]"
    deep = b"[" * 1000 + b"1," * 2_000_000 + b"1" + b"]" * 1000
    bombs = [
        b'{"inputs":[{"name":"input","shape":[1,3,8,8],"datatype":"UINT8","data":' + what + b"}]}"
        for what in (numbers, deep[: 4 << 20], b'"' + b"\\u0000" * 600_000 + b'"')
    ]
    with running({"net": path}, request_limits=RequestLimits(json=5 << 20)) as found, health_answers(found.port):
        statuses: list[int] = []

        def attack(body: bytes) -> None:
            statuses.append(ask(found.port, "POST", "/v2/models/net/infer", body).status)

        threads = [threading.Thread(target=attack, args=(body,)) for body in bombs * 2]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            reply = infer(found.port, x, bits=8)
            assert reply.status == 200
            np.testing.assert_array_equal(output(reply), right)
        assert set(statuses) <= {400, 504}


def test_long_json_gives_the_same_answer(mask_path):
    """150,528 numbers of JSON, read by another process."""
    x = np.random.default_rng(0).integers(0, 256, (1, 3, 224, 224), np.uint8)
    with running({"mask": mask_path}) as found:
        body = {"inputs": [tensor_of(x)], "id": "long", "parameters": {"bits": 2, "deadline_ms": 20_000}}
        reply = ask(found.port, "POST", "/v2/models/mask/infer", body)
        assert reply.status == 200 and reply.json["id"] == "long" and reply.json["parameters"]["bits"] == 2
        np.testing.assert_array_equal(output(reply), expected(mask_path, x, 2))
        body["parameters"]["bits"] = 4
        reply = ask(found.port, "POST", "/v2/models/mask/infer", body)
        assert reply.status == 400 and "bits='4'" in reply.json["error"]


# --- pictures ---


def metadata_bomb() -> bytes:
    return b"\xff\xd8" + segment(0xFE, b"") * 100_000 + photo(16, 16)[2:]


def profile_bomb() -> bytes:
    one = chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1_000_000), 9))
    return png(8, 8, *[one] * 2000)


BOMBS = {
    "scans": (lambda: scan_bomb(5000, 5000, 4000), 413, "scans"),
    "segments": (metadata_bomb, 413, "segments"),
    "pixels": (lambda: scan_bomb(65_000, 65_000, 1)[:1000], 413, "pixels"),
    "chunks": (lambda: png(8, 8, *[chunk(b"tEXt", b"")] * 100_000), 413, "chunks"),
    "profiles": (profile_bomb, 413, "chunks"),
    "zip": (lambda: png(1, 1, data=zlib.compress(bytes(200 << 20), 9)), 200, ""),
    "promise": (lambda: png(6000, 6000, data=zlib.compress(bytes(100), 9)), 400, "decoded"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOMBS)
def test_picture_bombs_are_refused(kind, server):
    make, status, word = BOMBS[kind]
    body = make()
    assert len(body) < 4 << 20
    with health_answers(server.port):
        reply = classify(server.port, body, "?deadline_ms=20000")
        assert reply.status == status and word in reply.json.get("error", "")
    assert classify(server.port, photo(20, 20), "?deadline_ms=20000").status == 200


@pytest.mark.thorough
def test_the_same_limits_hold_for_files(model_path, tmp_path):
    """`anyprec run` on a folder of downloaded pictures."""
    model = load(model_path)
    for kind, (make, status, word) in BOMBS.items():
        path = tmp_path / f"{kind}.{'jpg' if kind in ('scans', 'segments', 'pixels') else 'png'}"
        path.write_bytes(make())
        if status == 413:
            with pytest.raises(ImageTooLarge, match=word) as error:
                image_file(path, model, None)
            assert str(path) in str(error.value)
    path = tmp_path / "large.bmp"  # other formats: by the pixels that their header promises
    head = struct.pack("<IiiHHIIiiII", 40, 8000, 8000, 1, 24, 0, 0, 0, 0, 0, 0)
    path.write_bytes(b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head)
    with pytest.raises(ImageTooLarge, match="8000 x 8000 pixels"):
        image_file(path, model, None)


@pytest.mark.parametrize("rest", [{}, {"progressive": True}, {"quality": 100, "progressive": True, "optimize": True}])
def test_honest_pictures_pass(rest):
    check_bytes(photo(300, 200, **rest))
    check_bytes(photo(300, 200, "PNG"))
    check_bytes(b"\xff\xd8\xff")
    check_bytes(photo(64, 64)[:200])


def endless_images(monkeypatch):
    """Decoders that never end, for pictures of 13 x 13 pixels: what no limit has foreseen."""
    job = (
        "import sys, time, io; sys.path[:] = {path!r}; "
        "from anyprec.serve.http import worker_main as m; from PIL import Image; "
        "real = m.JOBS['image']; "
        "m.JOBS['image'] = lambda data, *rest: time.sleep(600) "
        "if Image.open(io.BytesIO(data)).size == (13, 13) else real(data, *rest); m.main()"
    )
    monkeypatch.setattr("anyprec.serve.http.workers.PROGRAM", job)


@pytest.mark.thorough
def test_a_decoder_that_does_not_end_is_ended(model_path, monkeypatch):
    """Those who wait are told at their deadline, the culprit when its time is up; then all is as before."""
    endless_images(monkeypatch)
    settings = Settings(slo_s=0.5, warm_up_s=0.05, limits=QueueLimits(grace=1.0))
    with (
        running({"net": model_path}, settings=settings, request_limits=RequestLimits(image_s=3.0)) as found,
        health_answers(found.port),
    ):
        assert classify(found.port, photo(20, 20), "?deadline_ms=20000").status == 200
        culprits: list[Reply] = []
        threads = [
            threading.Thread(target=lambda: culprits.append(classify(found.port, photo(13, 13), "?deadline_ms=20000")))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        began = time.monotonic()
        reply = classify(found.port, photo(20, 20))
        assert reply.status == 504 and "waited to be read" in reply.json["error"]
        assert time.monotonic() - began < 10
        assert infer(found.port, images(1)).status == 200  # tensors have nothing to do with it
        for thread in threads:
            thread.join()
        assert [reply.status for reply in culprits] == [413, 413]
        assert "more than 3 s" in culprits[0].json["error"]
        reply = classify(found.port, photo(20, 20), "?deadline_ms=20000")
        assert reply.status == 200
        assert "anyprec_killed_jobs_total 2.0" in ask(found.port, "GET", "/metrics").body.decode()


def test_the_deadline_is_kept_while_a_picture_is_decoded(model_path, monkeypatch):
    endless_images(monkeypatch)
    settings = Settings(slo_s=0.2, warm_up_s=0.05, limits=QueueLimits(grace=1.0))
    with running({"net": model_path}, settings=settings, request_limits=RequestLimits(image_s=30.0)) as found:
        assert classify(found.port, photo(20, 20), "?deadline_ms=20000").status == 200
        began = time.monotonic()
        reply = classify(found.port, photo(13, 13))
        assert reply.status == 504 and "while it was read" in reply.json["error"]
        assert time.monotonic() - began < 10


def test_a_decoder_that_crashes_is_replaced(model_path):
    with running({"net": model_path}) as found:
        assert classify(found.port, photo(20, 20), "?deadline_ms=20000").status == 200
        for worker in found.app.readers.images._all:
            os.kill(worker.process.pid, signal.SIGKILL)
        for _ in range(3):  # one that is gone is noticed when it is used
            assert classify(found.port, photo(20, 20), "?deadline_ms=20000").status in (200, 400)
        assert classify(found.port, photo(20, 20), "?deadline_ms=20000").status == 200


def test_workers_end_with_the_server(model_path):
    with process(str(model_path)) as (child, port):
        assert classify(port, photo(20, 20), "?deadline_ms=20000").status == 200
        workers = children(child.pid)
        assert len(workers) == 3
        child.kill()  # no chance to tell them
        child.wait(10)
        wait_for(lambda: not any(is_alive(pid) for pid in workers))


def test_worker_answers():
    """What a worker says of jobs that fail."""
    signature = None
    head, data = worker_main.answer("call", (None, signature), b"{")
    assert head["status"] == 400 and "not JSON" in head["message"] and not data
    head, _ = worker_main.answer("image", (signature,), b"GIF89a")
    assert head["status"] == 415


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return [int(line) for line in found.stdout.split()]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# --- runs and the end ---


def deep_mask(folder: Path) -> Path:
    path = folder / "mask.apm"
    write(mask_graph(depth=24), path)
    return path


def test_a_run_whose_client_is_gone_stops(tmp_path):
    path = deep_mask(tmp_path)
    x = np.zeros((1, 3, 400, 400), np.uint8)
    with running({"mask": path}) as found:
        scheduler = found.models.get("mask").now.scheduler
        body, length = binary_request(x, bits=8, deadline_ms=60_000, binary_data_output=True)
        with socket.create_connection(("127.0.0.1", found.port), timeout=20) as client:
            client.sendall(
                b"POST /v2/models/mask/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n"
                b"inference-header-content-length: %d\r\n\r\n" % (len(body), length)
            )
            client.sendall(body)
            wait_for(lambda: scheduler.stats()["running"] == 1)
        wait_for(lambda: scheduler.stats()["cancelled_runs"] == 1)
        assert 'anyprec_cancelled_runs_total{model="mask"} 1.0' in ask(found.port, "GET", "/metrics").body.decode()
        assert ask_mask(found.port, x[:, :, :8, :8], bits=8).status == 200


@pytest.mark.thorough
def test_sigterm_ends_the_process_whatever_it_does(model_path, tmp_path):
    """An engine and a load that never come back. The threads of both would be waited for when the interpreter ends."""
    program = tmp_path / "hang.py"
    program.write_text(
        "import sys, time\n"
        "from anyprec.cli import main\n"
        "from anyprec.serve import models\n"
        "models.ModelRepository.unload = lambda *_: time.sleep(600)\n"
        "models.PackedModel.__call__ = lambda self, x, *_, **__: time.sleep(600 if len(x) == 3 else 0)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, str(program), "serve", str(model_path), "--port", "0", "--warm-up", "50ms"]
    command += ["--max-batch", "3", "--drain-timeout", "1s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        threads = []
        try:
            port = int(re.search(r":(\d+),", child.stdout.readline())[1])
            threads += [
                threading.Thread(target=quietly, args=(infer, port, images(3))),
                threading.Thread(target=quietly, args=(ask, port, "POST", "/v2/repository/models/net/unload", b"")),
            ]
            for thread in threads:
                thread.start()
            time.sleep(0.5)
            child.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert child.wait(60) == 1
            print(f"ended {time.monotonic() - began:.1f} s after SIGTERM, with 1 s to drain")
        finally:
            child.kill()
            for thread in threads:
                thread.join()


def test_a_busy_decoder_does_not_hold_up_the_end(model_path, monkeypatch):
    endless_images(monkeypatch)
    with running(
        {"net": model_path}, request_limits=RequestLimits(image_s=100.0), drain_times=DrainTimes(timeout_s=0.5)
    ) as found:
        thread = threading.Thread(target=quietly, args=(classify, found.port, photo(13, 13), "?deadline_ms=60000"))
        thread.start()
        wait_for(lambda: found.app.readers.images._jobs)
        began = time.monotonic()
        found.stop()
        assert time.monotonic() - began < 20
        thread.join()


def quietly(work, *args) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        work(*args)


# --- names ---


def test_no_name_of_a_model_without_a_key(tmp_path):
    """Every path, every method, good and bad: nothing that comes back has the name in it."""
    name, key = "hush-4711", "a-long-enough-api-key"
    path = save(tmp_path / f"{name}.apm")
    keys = read_keys(environ={"ANYPREC_API_KEYS": key, "ANYPREC_CONTROL_KEYS": key + "-control"})
    with running({name: path}, keys=keys) as found:
        described = ask(found.port, "GET", "/openapi.json", x_api_key=key).json
        assert name in json.dumps(described)
        plain = ["/", "/nope", "/v2/models", "/v2/models/", "/v2/models//infer", "/v2/models/x/versions/2", "/static/x"]
        for template in [*described["paths"], *plain]:
            for given in (name, "other"):
                asked = template.replace("{name}", given).replace("{version}", "1")
                for method in ("GET", "POST", "PUT", "HEAD", "OPTIONS"):
                    reply = ask(found.port, method, asked, b"{}" if method == "POST" else None)
                    seen = reply.body.decode("utf-8", "replace") + json.dumps(reply.headers)
                    assert name not in seen.replace(asked, ""), (method, asked)
                    if "{name}" in template:  # no guess is confirmed either
                        other = template.replace("{name}", "other").replace("{version}", "1")
                        assert (
                            reply.status == ask(found.port, method, other, b"{}" if method == "POST" else None).status
                        )
        reply = ask(found.port, "GET", "/v2/models/other", x_api_key=key)
        assert reply.status == 404 and name in reply.json["error"]
