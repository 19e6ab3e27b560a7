"""The process: its command line, signals, TLS, logs, the drained end."""

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time

import numpy as np
import pytest
from serving import ask, expected, images, infer, output, process, running, save

from anyprec.cli import main
from anyprec.serve.connections.connection import ConnectionLimits
from anyprec.serve.connections.server import DrainTimes, Tls, listen


def wait_for(done, seconds=20.0):
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    assert done()


# --- options ---


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "required: MODEL"),
        (["none.apm", "--port", "0"], "there is no model file none.apm"),
        (["{model}", "--slo", "fast"], "'fast' is not a time"),
        (["{model}", "--max-body", "0"], "not a number of bytes"),
        (["{model}", "--host", "no.such.host.invalid"], "cannot listen on"),
        (["{model}", "--port", "99999"], "65535"),
        (["{model}", "{model}"], "two models are called 'net'"),
        (["{model}", "--api-key-file", "none"], "cannot be read"),
        (["{model}", "--tls-key", "x"], "--tls-key goes with --tls-cert"),
        (["{model}", "--port", "0", "--tls-cert", "none.pem"], "TLS certificate"),
        (["{model}", "--port", "0", "--bits", "3", "--warm-up", "10ms"], "3"),
        (["{model}", "--port", "0", "--slo", "0s", "--warm-up", "10ms"], "slo"),
    ],
)
def test_mistakes_are_one_line(arguments, says, model_path, capsys):
    assert main(["serve", *(argument.format(model=model_path) for argument in arguments)]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("anyprec: error:")]
    assert len(error) == 1 and says in error[0]


def test_a_port_in_use(model_path, capsys):
    with listen("127.0.0.1", 0) as taken:
        assert main(["serve", str(model_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use" in capsys.readouterr().err


# --- life and signals ---


@pytest.mark.thorough
def test_a_life(model_path, tmp_path):
    """Started, asked, told to read anew, told to end."""
    path = save(tmp_path / "net.apm")
    keys = tmp_path / "keys"
    keys.write_text("a" * 20)
    keys.chmod(0o644)
    arguments = [str(path), f"two={model_path}", "--slo", "2s", "--log", "json", "--log-requests", "--no-watch"]
    with process(*arguments, "--api-key-file", str(keys)) as (child, port):
        x = images(1)
        assert ask(port, "GET", "/v2").status == 401
        good = {"x_api_key": "a" * 20}
        assert len(ask(port, "GET", "/v2/repository/index", **good).json) == 2
        save(path, seed=1)
        keys.write_text("b" * 20)
        child.send_signal(signal.SIGHUP)
        good = {"x_api_key": "b" * 20}
        wait_for(lambda: ask(port, "GET", "/v2", **good).status == 200)
        body = {"inputs": [{"name": "input", "shape": [1, 3, 8, 8], "datatype": "UINT8", "data": x.ravel().tolist()}]}
        body["parameters"] = {"bits": 8}

        def answered_by_the_new_file():
            found = ask(port, "POST", "/v2/models/net/infer", body, **good)
            return np.array_equal(output(found), expected(path, x, 8))

        wait_for(answered_by_the_new_file)
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=20)
    assert child.returncode == 0 and out == ""
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    messages = [line["message"] for line in lines]
    assert messages.count("model") == 2 and {"model file replaced", "stopped"} <= set(messages)
    assert any("chmod 600" in message for message in messages)
    (request, *_) = [
        line for line in lines if line["message"] == "request" and line["status"] == 200 and "bits" in line
    ]
    assert request["bits"] == 8 and request["client"] == "api-1" and request["latency_ms"] > 0
    assert "nanobind" not in err and "Traceback" not in err


def test_ctrl_c_ends_it_too(model_path):
    with process(str(model_path)) as (child, port):
        assert ask(port, "GET", "/v2/health/live").status == 200
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=20)
    assert child.returncode == 0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not let a process choose its cores")
def test_pin_gives_http_a_core_of_its_own(model_path, monkeypatch, capsys):
    """Threads that run a model share no core with the one that answers, also those of a model loaded later."""
    ours = os.sched_getaffinity(0)
    if len(ours) > 1:
        with process(str(model_path), "--pin", "--warm-up", "10ms", "--local-control") as (child, port):
            assert ask(port, "POST", "/v2/repository/models/net/load").status == 200
            (http,) = os.sched_getaffinity(child.pid)
            threads = [int(name) for name in os.listdir(f"/proc/{child.pid}/task")]
            apart = [thread for thread in threads if os.sched_getaffinity(thread) == ours - {http}]
            assert len(apart) >= 2  # the engine and the watcher at least; the BLAS of numpy is older than the option
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert main(["serve", str(model_path), "--port", "0", "--pin"]) == 2
    assert "there is 1; leave it out" in capsys.readouterr().err
    monkeypatch.delattr(os, "sched_setaffinity")
    assert main(["serve", str(model_path), "--port", "0", "--pin"]) == 2
    assert "does not let a process choose its cores" in capsys.readouterr().err


def test_the_network_is_warned_of(model_path):
    with process(str(model_path), "--host", "0.0.0.0") as (child, port):
        assert ask(port, "POST", "/v2/models/net/precision", {"bits": 1}).status == 403
        child.terminate()
        _, err = child.communicate(timeout=20)
    assert "everybody who can reach this address" in err and "unencrypted" in err


def test_a_file_replaced_while_it_serves(tmp_path):
    """By rename, found by the watch, under load: every answer is right for one file or the other."""
    path = save(tmp_path / "net.apm")
    x = images(1)
    other = save(tmp_path / "other.apm", seed=1)
    right = [expected(path, x, 8), expected(other, x, 8)]
    with running({"net": path}, watch_s=0.05) as found:
        wrong, seen, stop = [], [0, 0], threading.Event()

        def client():
            connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=20)
            while not stop.is_set():
                reply = infer(found.port, x, connection=connection, bits=8)
                matches = [reply.status == 200 and np.array_equal(output(reply), one) for one in right]
                if any(matches):
                    seen[matches.index(True)] += 1
                else:
                    wrong.append((reply.status, reply.body))
            connection.close()

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        loads = found.models.get("net").loads
        for number, seed in enumerate((1, 0, 1), 1):
            save(path, seed=seed)
            if number == 2:  # a broken one in between changes nothing
                wait_for(lambda: found.models.get("net").loads >= loads + 2)
                (tmp_path / "broken").write_bytes(path.read_bytes()[:-5])
                os.replace(tmp_path / "broken", path)
                wait_for(lambda: found.models.get("net").refused is not None)
            else:
                wait_for(lambda: found.models.get("net").loads >= loads + min(number, 2))  # noqa: B023
        wait_for(lambda: found.models.get("net").loads >= loads + 3)
        time.sleep(0.1)
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong and min(seen) > 0


# --- the end ---


@pytest.mark.thorough
def test_sigterm_under_load_answers_everything(model_path):
    """Clients that ask without a pause: whatever was sent over an open connection is answered, whole and right."""
    x = images(1)
    right = expected(model_path, x, 8)
    broken, answered = [], []
    with process(str(model_path), "--slo", "2s") as (child, port):

        def client():
            while True:
                try:
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                    connection.connect()
                except OSError:
                    return  # no longer accepted: that is as it should be
                try:
                    while connection.sock is not None:  # http.client drops it after "connection: close"
                        reply = infer(port, x, connection=connection, bits=8)
                        if reply.status != 200 or not np.array_equal(output(reply), right):
                            broken.append((reply.status, reply.body))
                        answered.append(time.monotonic())
                except (OSError, http.client.HTTPException) as error:
                    broken.append(error)
                finally:
                    connection.close()

        threads = [threading.Thread(target=client) for _ in range(16)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(answered) > 100)
        child.send_signal(signal.SIGTERM)
        told = time.monotonic()
        _, err = child.communicate(timeout=30)
        for thread in threads:
            thread.join()
    assert child.returncode == 0 and not broken
    assert max(answered) > told and "unanswered=0" in err


def test_what_waits_is_answered_before_the_end(model_path):
    with running({"net": model_path}, slow_s=0.1) as found:
        replies = []
        threads = [threading.Thread(target=lambda: replies.append(infer(found.port, images(1)))) for _ in range(8)]
        for thread in threads:
            thread.start()
        scheduler = found.models.get("net").now.scheduler
        wait_for(lambda: scheduler.stats()["requests"]["arrived"] == 8)
        found.stop()
        for thread in threads:
            thread.join()
        assert [reply.status for reply in replies] == [200] * 8
        assert found.server.unanswered == 0
        with pytest.raises(ConnectionRefusedError):
            ask(found.port, "GET", "/v2")


def test_a_delay_for_balancers(model_path):
    with running({"net": model_path}, drain_times=DrainTimes(delay_s=1.5, timeout_s=10)) as found:
        connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=20)
        assert infer(found.port, images(1), connection=connection).status == 200
        found.loop.call_soon_threadsafe(found.server.stop)
        wait_for(lambda: found.app.draining)
        assert ask(found.port, "GET", "/v2/health/ready").status == 503
        assert ask(found.port, "GET", "/v2/health/live").status == 200
        assert infer(found.port, images(1), connection=connection).status == 200
        connection.close()
        found.thread.join(20)


def test_a_request_that_never_ends_does_not_hold_up_the_end_for_ever(model_path):
    with running({"net": model_path}, drain_times=DrainTimes(timeout_s=0.5)) as found:
        with socket.create_connection(("127.0.0.1", found.port)) as client:
            client.sendall(b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            wait_for(lambda: found.server.server_state.tasks)
            found.stop()
        assert found.server.unanswered == 1


# --- TLS ---


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder / "cert.pem", folder / "key.pem"


def test_tls(model_path, certificate):
    cert, key = certificate
    with running(
        {"net": model_path}, tls=Tls(str(cert), str(key)), connection_limits=ConnectionLimits(header_s=5)
    ) as found:
        trusting = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.1", found.port, context=trusting, timeout=20)
        assert infer(found.port, images(1), connection=connection).status == 200
        connection.close()
        found.server._read_anew()  # as SIGHUP does
        connection = http.client.HTTPSConnection("127.0.0.1", found.port, context=trusting, timeout=20)
        assert infer(found.port, images(1), connection=connection).status == 200
        connection.close()
        with socket.create_connection(("127.0.0.1", found.port)) as client:
            client.sendall(b"GET /v2 HTTP/1.1\r\n\r\n")
            assert b"200" not in client.recv(1000)


def test_handshakes_that_are_never_finished_take_no_place_from_others(model_path, certificate):
    """They are as many open files, and asyncio's own server does not tell of them."""
    cert, key = certificate
    connection_limits = ConnectionLimits(connections=20, per_address=10)
    with running({"net": model_path}, tls=Tls(str(cert), str(key)), connection_limits=connection_limits) as found:
        trusting = ssl.create_default_context(cafile=str(cert))
        silent = []
        try:
            for raw in (b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") * 30:
                client = socket.create_connection(("127.0.0.1", found.port))
                client.sendall(raw)
                silent.append(client)
            for _ in range(3):
                connection = http.client.HTTPSConnection("127.0.0.1", found.port, context=trusting, timeout=20)
                assert infer(found.port, images(1), connection=connection).status == 200
                connection.close()
            (acceptor,) = found.server.servers
            wait_for(lambda: len(acceptor.handshakes) <= 10)
            assert len(found.server.table.admitted) <= 10
        finally:
            for client in silent:
                client.close()
        wait_for(lambda: not found.server.table.admitted and not acceptor.handshakes)


def test_the_end_does_not_wait_for_handshakes(model_path, certificate):
    cert, key = certificate
    with running({"net": model_path}, tls=Tls(str(cert), str(key))) as found:
        with socket.create_connection(("127.0.0.1", found.port)):
            wait_for(lambda: found.server.table.admitted)
            started = time.monotonic()
            found.stop()
        assert time.monotonic() - started < 8 and found.server.unanswered == 0
