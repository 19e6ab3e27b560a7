"""What nobody should send and somebody will: random bytes, slow clients, thousands of connections, half requests.

After each the server must still give the right answer, with nothing left in memory.
"""

import contextlib
import http.client
import json
import random
import socket
import struct
import threading
import time

import numpy as np
import pytest
from serving import expected, images, infer, output, running

from anyprec.serve.connections.connection import ConnectionLimits
from anyprec.serve.http.bodies import RequestLimits
from anyprec.serve.models import Settings


@pytest.fixture(scope="module")
def tough(model_path):
    """Impatient, with small limits."""
    connection_limits = ConnectionLimits(
        header_s=0.4, body_s=0.4, write_s=0.5, connections=60, per_address=60, header_bytes=8192, message_bytes=300_000
    )
    request_limits = RequestLimits(body=50_000, json=40_000, held=500_000)
    with running({"net": model_path}, connection_limits=connection_limits, request_limits=request_limits) as found:
        yield found


@pytest.fixture(autouse=True)
def still_well(tough, model_path):
    yield
    end = time.monotonic() + 20
    while (tough.app.bodies.held or tough.server.server_state.tasks) and time.monotonic() < end:
        time.sleep(0.02)
    assert tough.app.bodies.held == 0 and not tough.server.server_state.tasks
    x = images(2)
    reply = infer(tough.port, x, bits=4)
    assert reply.status == 200
    np.testing.assert_array_equal(output(reply), expected(model_path, x, 4))


def send(port: int, raw: bytes, timeout: float = 5.0) -> bytes:
    """Everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as client:
        found = b""
        with contextlib.suppress(OSError):
            client.sendall(raw)
        with contextlib.suppress(OSError):
            while chunk := client.recv(65536):
                found += chunk
        return found


def error_of(raw: bytes) -> str:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"application/json" in head.lower()
    return json.loads(body)["error"]


GOOD = b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


def test_random_bytes(tough):
    draw = random.Random(0)
    for _ in range(100):
        raw = draw.randbytes(draw.randint(1, 2000))
        found = send(tough.port, raw + b"\r\n\r\n")
        assert not found or (found.startswith(b"HTTP/1.1 4") and "HTTP request" in error_of(found))


def test_requests_with_random_damage(tough):
    draw = random.Random(1)
    for _ in range(50):
        raw = bytearray(GOOD)
        for _ in range(draw.randint(1, 4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        found = send(tough.port, bytes(raw) + b"\r\n\r\n", timeout=3)
        assert not found or (found.startswith(b"HTTP/1.1 ") and b" 500 " not in found[:20])
        assert b"Traceback" not in found


@pytest.mark.parametrize(
    "raw, status",
    [
        (b"GET / HTTP/1.1\r\n" + b"a: " + b"x" * 1_000_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 150_000, 431),
        (b"GET /" + b"x" * 1_000_000, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999\r\n\r\n{}", 413),
        (b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_http_that_is_wrong(tough, raw, status):
    found = send(tough.port, raw)
    assert found.startswith(b"HTTP/1.1 %d " % status), found[:100]
    error_of(found)


def test_endless_trailers_end(tough):
    raw = (
        b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        + b"a: b\r\n" * 100_000
    )
    send(tough.port, raw)


def test_slow_headers_and_bodies_are_408(tough):
    """Slow loris: a byte now and then. And one that sends nothing at all."""
    with contextlib.ExitStack() as stack:
        clients = []
        for start in (
            b"",
            b"GET /v2 HTTP/1.1\r\nhost",
            b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n",
        ):
            for _ in range(5):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", tough.port), timeout=10))
                client.sendall(start)
                clients.append(client)
        for _ in range(30):
            assert infer(tough.port, images(1)).status == 200  # others do not notice
            for client in clients[5:]:
                with contextlib.suppress(OSError):
                    client.sendall(b"x")
            time.sleep(0.05)
        for client in clients:
            with contextlib.suppress(ConnectionError):
                found = client.recv(1000)
                assert found.startswith(b"HTTP/1.1 408") or found == b""


def test_clients_that_do_not_read(tough):
    """Requests whose answers are never taken: after half a second the connection is given up, and its memory."""
    with socket.create_connection(("127.0.0.1", tough.port), timeout=15) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
                time.sleep(0.01)


def test_endless_pipelines_end(tough):
    with socket.create_connection(("127.0.0.1", tough.port), timeout=15) as client, pytest.raises(ConnectionError):
        for _ in range(1000):
            client.sendall(b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)


def test_clients_that_vanish(tough):
    x = images(1)
    body = json.dumps(
        {"inputs": [{"name": "input", "shape": [1, 3, 8, 8], "datatype": "UINT8", "data": x.ravel().tolist()}]}
    ).encode()
    whole = b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    draw = random.Random(2)
    for number in range(60):
        client = socket.create_connection(("127.0.0.1", tough.port))
        client.sendall(whole[: draw.randint(1, len(whole))] if number % 3 else whole)
        if number % 2:  # a reset instead of an end
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()


def test_many_requests_at_once_on_one_connection(tough):
    """Pipelined: answered one by one, in order."""
    with socket.create_connection(("127.0.0.1", tough.port), timeout=10) as client:
        asked = [b"/v2", b"/nope", b"/v2/health/live"] * 20
        client.sendall(b"".join(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path for path in asked))
        found = b""
        while found.count(b"HTTP/1.1 ") < len(asked) or not found.endswith(b"}"):
            found += client.recv(65536)
    statuses = [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"404", b"200"] * 20


def test_more_connections_than_allowed(tough):
    """Those that have asked nothing make way for new ones, the oldest first."""
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", tough.port), timeout=10)) for _ in range(75)
        ]
        assert [ended(client) for client in clients[:15]] == [True] * 15
        newest = clients[-1]
        newest.sendall(b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert newest.recv(1000).startswith(b"HTTP/1.1 200")


def ended(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_websockets_and_other_upgrades(tough):
    found = send(
        tough.port,
        b"GET /v2 HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, close\r\nupgrade: websocket\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n",
        timeout=3,
    )
    assert not found.startswith(b"HTTP/1.1 101") and b" 500 " not in found[:20]


def storm(port: int, connections: int, rounds: int, model_path) -> list[object]:
    """So many connections, all open at the same time, each with `rounds` requests. Gives what went wrong."""
    x = images(1)
    right = expected(model_path, x, 8)
    wrong: list[object] = []
    barrier = threading.Barrier(min(connections, 50))

    def client(count: int) -> None:
        held = [http.client.HTTPConnection("127.0.0.1", port, timeout=120) for _ in range(count)]
        try:
            for connection in held:
                connection.connect()
            barrier.wait(120)
            for _ in range(rounds):
                for connection in held:
                    reply = infer(port, x, connection=connection, bits=8, deadline_ms=60_000)
                    if reply.status not in (200, 429, 503):
                        wrong.append((reply.status, reply.body))
                    elif reply.status == 200 and not np.array_equal(output(reply), right):
                        wrong.append("a wrong answer")
        except (OSError, http.client.HTTPException, threading.BrokenBarrierError) as error:
            wrong.append(error)
            barrier.abort()
        finally:
            for connection in held:
                connection.close()

    threads = [threading.Thread(target=client, args=(connections // barrier.parties,)) for _ in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_a_hundred_connections(model_path):
    with running({"net": model_path}, settings=Settings(slo_s=2.0, warm_up_s=0.05)) as found:
        assert storm(found.port, 100, 2, model_path) == []


@pytest.mark.slow
def test_a_thousand_connections(model_path):
    from anyprec.files import raise_file_limit

    raise_file_limit(2500)  # both ends are in this process
    connection_limits = ConnectionLimits(per_address=1000)
    with running(
        {"net": model_path}, settings=Settings(slo_s=30.0, warm_up_s=0.05), connection_limits=connection_limits
    ) as found:
        assert storm(found.port, 1000, 5, model_path) == []
        assert len(found.server.server_state.connections) <= 1000
