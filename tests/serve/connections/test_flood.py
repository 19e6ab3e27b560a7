"""Connections that take places, time or memory and give nothing for it. Health is answered all along, and so is work.

How fast it is answered: health_under_attack.py, whose attacks these are.
"""

import contextlib
import socket
import threading
import time

import pytest
from attacks import INFER, Probe, statuses, take
from health_under_attack import ATTACKS, GET, Crowd, is_open
from serving import ask, images, infer, process, running

from anyprec.files import raise_file_limit
from anyprec.serve.connections.connection import ConnectionLimits
from anyprec.serve.http.bodies import RequestLimits


@pytest.fixture(scope="module")
def port(model_path):
    """A server as it is by default."""
    raise_file_limit(3000)  # our ends of the connections
    with process(str(model_path), "--slo", "2s") as (_, found):
        yield found


@pytest.mark.thorough
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_health_and_work_during(attack, port, model_path):
    with Probe(port) as probe:
        attack(port, model_path)
    probe.check()
    assert infer(port, images(1)).status == 200


# --- places ---


def test_a_new_connection_takes_the_place_of_the_longest_idle(model_path):
    connection_limits = ConnectionLimits(connections=10, per_address=10)
    with running({"net": model_path}, connection_limits=connection_limits) as found, Crowd(found.port) as crowd:
        crowd.ask(10)
        first = crowd.sockets[0]
        first.settimeout(5)
        first.sendall(GET)  # now the second is idle for longest
        assert statuses(take(first, 0.05)) == [200]
        assert ask(found.port, "GET", "/v2").status == 200
        left = [0, *range(2, 10)]
        assert crowd.open_ones(left) == left


def test_an_address_at_its_limit_pushes_out_its_own(model_path):
    connection_limits = ConnectionLimits(connections=20, per_address=5)
    with running({"net": model_path}, connection_limits=connection_limits) as found, contextlib.ExitStack() as stack:
        crowd = stack.enter_context(Crowd(found.port))
        other = stack.enter_context(Crowd(found.port, "127.0.0.2"))
        try:
            other.join(b"", 3)
        except OSError:
            pytest.skip("this system has 127.0.0.1 only")
        crowd.ask(12)
        assert crowd.open_ones([7, 8, 9, 10, 11]) == [7, 8, 9, 10, 11]
        assert all(is_open(client) for client in other.sockets)


@pytest.mark.thorough
def test_a_trusted_proxy_has_no_limit_and_names_its_clients(model_path):
    with process(str(model_path), "--slo", "2s", "--max-connections-per-address", "5", "--trusted-proxy", "127.0.0.0/8",
                 "--log-requests") as (child, port):  # fmt: skip
        with Crowd(port) as crowd:
            crowd.join(b"GET /v2 HTTP/1.1\r\nhost: x\r\nx-forwarded-for: 6.6.6.6, 192.0.2.7, 127.0.0.3\r\n\r\n", 12)
            assert [statuses(take(client, 0.05)) for client in crowd.sockets] == [[200]] * 12
            assert all(is_open(client) for client in crowd.sockets)
        child.terminate()
        _, err = child.communicate(timeout=20)
    assert err.count("client=192.0.2.7") == 12 and "6.6.6.6" not in err


def test_an_address_cannot_name_another_as_its_client(model_path):
    with process(str(model_path), "--slo", "2s", "--log-requests") as (child, port):
        assert ask(port, "GET", "/v2", x_forwarded_for="192.0.2.7").status == 200
        child.terminate()
        _, err = child.communicate(timeout=20)
    assert "client=127.0.0.1" in err and "192.0.2.7" not in err


def test_the_reserve_answers_health_and_nothing_else(model_path):
    """Every place is taken by a request that is being worked on: no one is pushed out, and health is answered."""
    with running(
        {"net": model_path}, connection_limits=ConnectionLimits(connections=4, per_address=4), slow_s=0.001
    ) as found:
        found.slow[0].seconds = 0.5
        replies = []
        threads = [threading.Thread(target=lambda: replies.append(infer(found.port, images(1)))) for _ in range(4)]
        for thread in threads:
            thread.start()
        scheduler = found.models.get("net").now.scheduler
        end = time.monotonic() + 10
        while scheduler.stats()["requests"]["arrived"] < 4 and time.monotonic() < end:
            time.sleep(0.005)
        with Crowd(found.port) as crowd:
            crowd.join(b"", 200)  # three times the reserve
            live = ask(found.port, "GET", "/v2/health/live")
            ready = ask(found.port, "GET", "/v2/health/ready?x=y")
            other = ask(found.port, "GET", "/v2")
            for thread in threads:
                thread.join()
        assert live.status == ready.status == 200 and live.headers["connection"] == "close"
        assert other.status == 503 and other.headers["retry-after"] == "1" and "connections" in other.json["error"]
        assert [reply.status for reply in replies] == [200] * 4
        assert ask(found.port, "GET", "/v2").status == 200


# --- time ---


@pytest.fixture(scope="module")
def hasty(model_path):
    connection_limits = ConnectionLimits(header_s=0.3, body_s=0.3, write_s=0.3, idle_s=0.3)
    with running(
        {"net": model_path}, connection_limits=connection_limits, request_limits=RequestLimits(body=8 << 20)
    ) as found:
        yield found


def test_speed_before_is_no_credit_for_a_long_pause(hasty):
    """4 MB at once, and then nothing: it had bought 256 s, at 16 KiB a second."""
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=10) as client:
        client.sendall(INFER + b"content-length: 4194305\r\n\r\n" + bytes(4 << 20))
        assert statuses(take(client, 10)) == [408]


def test_a_body_that_keeps_coming_may_take_long(hasty):
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=10) as client:
        client.sendall(INFER + b"content-length: 160000\r\n\r\n")
        for _ in range(10):
            time.sleep(0.1)
            client.sendall(bytes(16_000))
        assert statuses(take(client, 1)) == [400]  # taken, and no JSON


def test_an_empty_line_does_not_keep_a_connection(hasty):
    """It had switched the time between two requests off, for ever."""
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=10) as client:
        client.sendall(GET)
        assert statuses(client.recv(65536)) == [200]
        client.sendall(b"\r\n")
        assert client.recv(1) == b""


def test_what_is_closed_but_not_taken_is_given_up(hasty):
    """The answer fits into the server's buffer, so that nothing ever waited; its end did, for ever."""
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=10) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.sendall(GET.replace(b"/v2 ", b"/openapi.json ") * 100)
        time.sleep(0.1)
        end = time.monotonic() + 10
        while hasty.server.server_state.connections and time.monotonic() < end:
            time.sleep(0.05)
        assert not hasty.server.server_state.connections
