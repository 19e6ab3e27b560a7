"""Health probes answered at the accept: which ones, with what, and that the answer is the ordinary one."""

import contextlib
import socket
import threading
import time

import pytest
from attacks import statuses, take, talk
from serving import running, save, wait_for

from anyprec.serve.connections.probes import asks_for

LIVE = b"GET /v2/health/live HTTP/1.1\r\n"
KUBELET = LIVE + b"Host: 10.1.2.3:8000\r\nUser-Agent: kube-probe/1.31\r\nAccept: */*\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "head, path",
    [
        (KUBELET, "/v2/health/live"),
        (KUBELET.replace(b"live", b"ready"), "/v2/health/ready"),
        (b"GET /v2/health/live HTTP/1.0\r\n\r\n", "/v2/health/live"),
        (LIVE + b"host: [::1]:80\r\nconnection: close\r\n\r\n", "/v2/health/live"),
    ],
)
def test_simple_probes_are_known(head, path):
    assert asks_for(head, also_kept=False) == path


def test_a_kept_connection_is_given_up_only_when_asked():
    for fields in (b"", b"connection: keep-alive\r\n"):
        head = LIVE + b"host: x\r\n" + fields + b"\r\n"
        assert asks_for(head, also_kept=False) is None
        assert asks_for(head, also_kept=True) == "/v2/health/live"


@pytest.mark.parametrize(
    "head",
    [
        b"",
        LIVE,
        KUBELET[:-1],
        KUBELET + b"G",  # a second request begins
        KUBELET + KUBELET,
        LIVE + b"connection: close\r\n\r\n",  # no host
        LIVE + b"host: x\r\nhost: y\r\n\r\n",
        LIVE + b"host: x y\r\n\r\n",
        LIVE + b"host: x\r\ncontent-length: 5\r\n\r\n",
        LIVE + b"host: x\r\ntransfer-encoding: chunked\r\n\r\n",
        LIVE + b"host: x\r\nconnection: upgrade\r\n\r\n",
        LIVE + b"host: x\r\nconnection: close\r\nconnection: keep-alive\r\n\r\n",
        LIVE + b"host: x\r\nx-forwarded-for: 1.2.3.4\r\n\r\n",
        LIVE + b"host: x\r\nuser-agent: a\r\n folded\r\n\r\n",
        LIVE + b"host: x\nconnection: close\r\n\r\n",
        LIVE.replace(b"1.1", b"1.2") + b"host: x\r\n\r\n",
        LIVE.replace(b"live", b"live?x") + b"host: x\r\n\r\n",
        LIVE.replace(b"live", b"dead") + b"host: x\r\n\r\n",
        LIVE.replace(b"GET", b"POST") + b"host: x\r\n\r\n",
        LIVE + b"host: x\r\nuser-agent: \xff\r\n\r\n",
    ],
)
def test_everything_else_takes_the_ordinary_way(head):
    assert asks_for(head, also_kept=True) is None


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running({"net": save(tmp_path_factory.mktemp("probes") / "net.apm")}) as found:
        yield found


def parts(raw):
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *fields = head.split(b"\r\n")
    return first, dict(field.split(b": ") for field in fields), body


@pytest.mark.parametrize("path", ["live", "ready"])
def test_the_answer_is_the_ordinary_one(server, path):
    probe = KUBELET.replace(b"live", path.encode())
    with_key = probe.replace(b"\r\n\r\n", b"\r\nx-other: 1\r\n\r\n")  # an unknown header: the ordinary way
    (first, fields, body), (first_of_ordinary, ordinary, ordinary_body) = (
        parts(talk(server.port, raw)) for raw in (probe, with_key)
    )
    assert (first, body) == (first_of_ordinary, ordinary_body)
    assert set(fields) == set(ordinary)
    assert {k: v for k, v in fields.items() if k not in (b"date", b"x-request-id")} == {
        k: v for k, v in ordinary.items() if k not in (b"date", b"x-request-id")
    }


@contextlib.contextmanager
def held(loop):
    """The event loop stands still meanwhile."""
    stands, goes_on = threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: (stands.set(), goes_on.wait(5)))
    assert stands.wait(5)
    try:
        yield
    finally:
        goes_on.set()


def test_answered_at_the_accept_and_counted(server):
    def count():
        found = server.app.metrics.registry.get_sample_value("anyprec_requests_total", {"model": "", "status": "200"})
        return found or 0

    before, through_uvicorn = count(), server.server.server_state.total_requests
    with contextlib.ExitStack() as stack:
        with held(server.loop):
            clients = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(3)]
            for client in clients:
                client.sendall(KUBELET)
        assert [statuses(take(client, 0.1)) for client in clients] == [[200]] * 3
    assert server.server.server_state.total_requests == through_uvicorn
    wait_for(lambda: count() == before + 3)


def test_a_probe_that_sends_late_or_in_pieces_is_answered(server):
    assert statuses(talk(server.port, KUBELET[:10], KUBELET[10:])) == [200]
    assert statuses(talk(server.port, b"", KUBELET)) == [200]


@pytest.mark.parametrize("raw, expected", [(KUBELET, [200]), (b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n", []), (b"", [])])
def test_a_probe_that_loses_its_place_before_it_is_read_has_its_answer(server, raw, expected):
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        connections = server.server.server_state.connections
        wait_for(lambda: [one for one in connections if one.client == client.getsockname()])
        stands, sent = threading.Event(), threading.Event()

        def evict():
            (one,) = [one for one in connections if one.client == client.getsockname()]
            stands.set()
            assert sent.wait(5)
            one.evict()

        server.loop.call_soon_threadsafe(evict)
        assert stands.wait(5)
        client.sendall(raw)
        time.sleep(0.02)
        sent.set()
        assert statuses(take(client, 0.1)) == expected


def test_not_ready_is_the_ordinary_answer(server):
    server.app.draining = True
    try:
        raw = talk(server.port, KUBELET.replace(b"live", b"ready"))
        assert statuses(raw) == [503] and b"retry-after" in raw and b"stopping" in raw
        assert statuses(talk(server.port, KUBELET)) == [200]
    finally:
        server.app.draining = False


def test_probes_are_answered_in_the_middle_of_a_long_turn(server):
    """The event loop is busy for a second, and a connection that is read meanwhile lets the acceptor look."""
    answered: list[float] = []
    looked = threading.Event()

    def long_turn():
        end = time.monotonic() + 1
        looked.set()
        while time.monotonic() < end and not answered:
            server.server.look_if_late()
            time.sleep(0.002)
        answered.append(time.monotonic() - end)

    server.loop.call_soon_threadsafe(long_turn)
    assert looked.wait(5)
    for probe in (KUBELET, LIVE + b"host: x\r\n\r\n"):
        assert statuses(talk(server.port, probe)) == [200]
        if not answered:
            answered.append(0.0)
    assert answered[0] == 0.0
