"""Requests whose head was seen before: the same answers as by the ordinary way, and the ordinary way for all else."""

import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest
from attacks import HIDDEN, reached, statuses, take, talk
from serving import SMALL, binary_request, expected, images, running, save, wait_for

from anyprec.serve.connections.connection import ConnectionLimits
from anyprec.serve.connections.table import network_of
from anyprec.serve.http import quick
from anyprec.serve.http.keys import read_keys
from anyprec.serve.models import Settings
from anyprec.serve.scheduling.core import SchedulerCore

PATH = "/v2/models/net/infer"


def request(x, more=b"", path=PATH, **parameters):
    """Head and body of a binary request, with the answer's tensor binary too."""
    body, length = binary_request(x, binary_data_output=True, **parameters)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ninference-header-content-length: {length}\r\n".encode()
    return head + b"content-length: %d\r\n" % len(body) + more + b"\r\n", body


def answers(raw):
    """(status, header fields, body) of each answer."""
    found = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        size = int(fields[b"content-length"])
        found.append((int(head[9:12]), fields, rest[:size]))
        raw = rest[size:]
    return found


def output(answer):
    status, fields, body = answer
    assert status == 200, body
    size = int(fields[b"inference-header-content-length"])
    shape = json.loads(body[:size])["outputs"][0]["shape"]
    return np.frombuffer(body[size:], np.float32).reshape(shape)


@contextlib.contextmanager
def connected(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client


def send(client, *segments):
    """Each segment by itself; the one answer."""
    for number, segment in enumerate(segments):
        if number:
            time.sleep(0.03)
        client.sendall(segment)
    (found,) = answers(take(client, 0.05))
    client.settimeout(10)
    return found


def learn(server, x, **rest):
    """Let the server see this head, and the JSON."""
    head, body = request(x, **rest)
    assert statuses(talk(server.port, head + body)) == [200]
    assert statuses(talk(server.port, head + body)) == [200]
    return head, body


# --- the same answers ---


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3])
def test_the_second_request_passes_the_application_by(server, model_path, bits, count):
    first, second = images(count, seed=1), images(count, seed=2)
    with connected(server.port) as client, reached(server) as paths:
        one = send(client, b"".join(request(first, bits=bits)))
        paths.clear()
        two = send(client, b"".join(request(second, bits=bits)))
        assert paths == []
    assert np.array_equal(output(one), expected(model_path, first, bits))
    assert np.array_equal(output(two), expected(model_path, second, bits))
    assert set(one[1]) == set(two[1])
    assert one[1][b"x-request-id"] != two[1][b"x-request-id"]
    texts = [json.loads(answer[2][: int(answer[1][b"inference-header-content-length"])]) for answer in (one, two)]
    assert texts[0].keys() == texts[1].keys() and texts[0]["parameters"].keys() == texts[1]["parameters"].keys()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float16])
@pytest.mark.parametrize("length", range(4))
def test_every_datatype_behind_json_of_every_length(server, model_path, dtype, length):
    """Floats then lie at any address."""
    x = images(1, seed=3).astype(dtype) / np.asarray(1 if dtype == np.uint8 else 255, dtype)
    x = x.astype(dtype)
    more = b"x-pad: %b\r\n" % (b"a" * length)
    head, body = learn(server, x, more=more, bits=4)
    with reached(server) as paths:
        (answer,) = answers(talk(server.port, head + body))
    assert paths == []
    x = x if dtype == np.uint8 else x.astype(np.float32)
    assert np.array_equal(output(answer), expected(model_path, x, 4))


@pytest.mark.parametrize("cut", [1, 20, -1, 0, 1000])
def test_a_request_in_two_segments(server, model_path, cut):
    """Within the head, at its end, within the body."""
    x = images(1, seed=4)
    head, body = learn(server, x, bits=8)
    whole = head + body
    at = len(head) + cut if cut <= 0 else len(whole) - 1 if cut == 1000 else cut
    with connected(server.port) as client, reached(server) as paths:
        answer = send(client, whole[:at], whole[at:])
        again = send(client, whole)
    assert np.array_equal(output(answer), expected(model_path, x, 8))
    assert np.array_equal(output(again), expected(model_path, x, 8))
    assert len(paths) == (at < len(head))


def test_the_whole_request_byte_by_byte_over_several_segments(server, model_path):
    x = images(1, seed=5)
    head, body = learn(server, x, bits=2)
    third = len(body) // 3
    with connected(server.port) as client:
        answer = send(client, head, body[:third], body[third : 2 * third], body[2 * third :])
    assert np.array_equal(output(answer), expected(model_path, x, 2))


def test_counted_as_others(server):
    x = images(1, seed=6)
    head, body = learn(server, x, bits=1)
    recent, totals = server.app.metrics.recent["net"], server.app.metrics.totals("net")
    before = recent.over(time.time(), with_current=True).answered
    (answer,) = answers(talk(server.port, head + body))
    assert answer[0] == 200
    wait_for(lambda: recent.over(time.time(), with_current=True).answered == before + 1)
    assert server.app.metrics.totals("net")["inference_count"] == totals["inference_count"] + 1
    assert server.app.bodies.held == 0


# --- the ordinary way for all else ---


def test_another_head_json_or_length_is_read_anew(server, model_path):
    x = images(1, seed=7)
    head, body = learn(server, x, bits=8)
    others = {
        "another header": request(x, more=b"x-other: 1\r\n", bits=8),
        "another path": request(x, path="/v2/models/net/versions/1/infer", bits=8),
    }
    for what, (other, its) in others.items():
        with reached(server) as paths:
            (answer,) = answers(talk(server.port, other + its))
        assert len(paths) == 1, what
        assert np.array_equal(output(answer), expected(model_path, x, 8))
    changed = body.replace(b'"bits": 8', b'"bits": 2')
    assert len(changed) == len(body)
    (answer,) = answers(talk(server.port, head + changed))
    assert np.array_equal(output(answer), expected(model_path, x, 2))
    refused = body.replace(b'"bits": 8', b'"bits": 3')
    (answer,) = answers(talk(server.port, head + refused))
    assert answer[0] == 400 and b"bits='3' is not in this model" in answer[2]


def test_wrong_values_are_refused_in_the_same_words(server):
    x = images(1, seed=8).astype(np.float32)
    head, _ = learn(server, x, bits=8)
    bad = x.copy()
    bad[0, 0, 0, 0] = np.nan
    wrong = request(bad, bits=8)[1]
    (quickly,) = answers(talk(server.port, head + wrong))
    (slowly,) = answers(talk(server.port, b"".join(request(bad, more=b"x-once: 1\r\n", bits=8))))
    assert quickly[0] == slowly[0] == 400 and quickly[2] == slowly[2] and b"NaN" in quickly[2]


def test_pipelined_requests_are_answered_in_order(server, model_path):
    x, y = images(1, seed=9), images(1, seed=10)
    head, body = learn(server, x, bits=8)
    other = request(y, bits=8)[1]
    found = answers(talk(server.port, head + body + head + other + HIDDEN, answers=3))
    assert [answer[0] for answer in found] == [200, 200, 404]
    assert np.array_equal(output(found[0]), expected(model_path, x, 8))
    assert np.array_equal(output(found[1]), expected(model_path, y, 8))


def test_a_request_that_comes_while_one_is_under_way(model_path):
    x, y = images(1, seed=11), images(1, seed=12)
    with running({"net": model_path}, slow_s=0.15) as server:
        head, body = learn(server, x, bits=8)
        with connected(server.port) as client, reached(server) as paths:
            client.sendall(head + body)
            time.sleep(0.05)
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n" + head + request(y, bits=8)[1])
            found = answers(take(client, 0.3, 3))
        assert paths == ["/v2/health/live", PATH]  # the first passed it by
        assert np.array_equal(output(found[0]), expected(model_path, x, 8))
        assert json.loads(found[1][2]) == {"live": True}
        assert np.array_equal(output(found[2]), expected(model_path, y, 8))


def test_broken_bytes_behind_a_request_that_is_under_way(model_path):
    x = images(1, seed=13)
    with running({"net": model_path}, slow_s=0.15) as server:
        head, body = learn(server, x, bits=8)
        with connected(server.port) as client:
            client.sendall(head + body)
            time.sleep(0.05)
            client.sendall(b"no HTTP\r\n\r\n")
            found = answers(take(client, 0.3, 2))
        assert [answer[0] for answer in found] == [200, 400]
        assert np.array_equal(output(found[0]), expected(model_path, x, 8))


@pytest.mark.parametrize(
    "change",
    [
        lambda head: b"\r\n" + head,
        lambda head: head.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"),
        lambda head: head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        lambda head: head.replace(b"\r\n\r\n", b"\r\nx-request-id: mine\r\n\r\n"),
        lambda head: head.replace(b"HTTP/1.1", b"HTTP/1.0"),
        lambda head: head.replace(b"\r\n\r\n", b"\r\ncontent-encoding: identity\r\n\r\n"),
        lambda head: head.replace(b"\r\n", b"\n"),
    ],
    ids=["empty line", "expect", "close", "id", "1.0", "encoding", "bare LF"],
)
def test_heads_that_are_not_learned(server, change):
    head, body = request(images(1, seed=14), more=b"x-not-learned: 1\r\n", bits=8)
    known = dict(server.app.quick.heads)
    talk(server.port, change(head) + body)
    assert server.app.quick.heads == known


def test_chunked_bodies_are_not_learned(server):
    head, body = request(images(1, seed=15), bits=8)
    head = head.replace(b"\r\ncontent-length: %d" % len(body), b"\r\ntransfer-encoding: chunked")
    known = dict(server.app.quick.heads)
    assert statuses(talk(server.port, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))) == [200]
    assert server.app.quick.heads == known


def test_what_is_kept_is_bounded(server, monkeypatch):
    monkeypatch.setattr(quick, "MOST_KNOWN", 4)
    x = images(1, seed=16)
    for number in range(12):
        head, body = request(x, more=b"x-number: %d\r\n" % number, deadline_ms=1000 + number)
        assert statuses(talk(server.port, head + body)) == [200]
        assert statuses(talk(server.port, head + body)) == [200]
        assert len(server.app.quick.heads) <= 4 and len(server.app.quick.calls["net"][1]) <= 4
    assert statuses(talk(server.port, b"".join(request(images(40, seed=1))))) == [400]  # above max_batch
    large = request(images(32, seed=1), more=b"x-large: 1\r\n")
    assert len(large[0] + large[1]) < quick.MOST_BYTES
    too_large = request(images(30, seed=1).astype(np.float32), more=b"x-large: 2\r\n")
    known = dict(server.app.quick.heads)
    assert statuses(talk(server.port, b"".join(too_large))) == [200]
    assert server.app.quick.heads == known


# --- keys, models, clients that go ---


def test_a_key_that_is_withdrawn_is_refused(model_path):
    keys = read_keys(environ={"ANYPREC_API_KEYS": "0123456789abcdefgh"})
    x = images(1, seed=17)
    with running({"net": model_path}, keys=keys) as server:
        head, body = learn(server, x, more=b"x-api-key: 0123456789abcdefgh\r\n", bits=8)
        with reached(server) as paths:
            assert statuses(talk(server.port, head + body)) == [200]
        assert paths == []
        assert not any(b"0123456789abcdefgh" in digest for _, digest in server.app.quick.heads)
        wrong = head.replace(b"0123456789abcdefgh", b"0123456789abcdefgX")
        assert statuses(talk(server.port, wrong + body)) == [401]
        server.app.keys = read_keys(environ={"ANYPREC_API_KEYS": "another-key-of-length"})
        assert statuses(talk(server.port, head + body)) == [401]


def test_what_the_control_socket_may_is_not_learned(model_path, monkeypatch):
    keys = read_keys(environ={"ANYPREC_API_KEYS": "0123456789abcdefgh"})
    with running({"net": model_path}, keys=keys) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.server.kind, "control", True)  # as on the control socket, whose owner needs no key
            head, body = learn(server, images(1, seed=22), bits=8)
        assert server.app.quick.heads == {}
        assert statuses(talk(server.port, head + body)) == [401]


def test_the_client_that_a_trusted_proxy_names(model_path, monkeypatch):
    seen = []
    arrive = SchedulerCore.arrive
    monkeypatch.setattr(
        SchedulerCore, "arrive", lambda core, request, now: (seen.append(request.client), arrive(core, request, now))
    )
    x = images(1, seed=20)
    with running({"net": model_path}) as server:
        table = server.server.table
        for trusted in ((network_of("127.0.0.1"),), ()):  # then the same head from somebody else
            table.trusted = trusted
            for client in ("203.0.113.7", "203.0.113.8"):
                head, body = learn(server, x, more=b"x-forwarded-for: %b\r\n" % client.encode(), bits=8)
                seen.clear()
                with reached(server) as paths:
                    assert statuses(talk(server.port, head + body)) == [200]
                assert paths == []
                assert seen == [client if trusted else "127.0.0.1"]


def test_two_models_side_by_side(model_path, tmp_path):
    other, x = save(tmp_path / "other.apm", seed=9), images(1, seed=21)
    with running({"net": model_path, "other": other}) as server:
        made = {name: learn(server, x, path=f"/v2/models/{name}/infer", bits=8) for name in ("net", "other")}
        with reached(server) as paths:
            for name, path in (("net", model_path), ("other", other), ("net", model_path)):
                (answer,) = answers(talk(server.port, b"".join(made[name])))
                assert np.array_equal(output(answer), expected(path, x, 8))
        assert paths == []


def test_another_file_and_no_file(tmp_path):
    path, x = save(tmp_path / "net.apm"), images(1, seed=18)
    with running({"net": path}) as server:
        head, body = learn(server, x, bits=8)
        save(path, seed=5)
        (served,) = server.models
        server.models.load(served)
        (answer,) = answers(talk(server.port, head + body))
        assert np.array_equal(output(answer), expected(path, x, 8))
        server.models.unload(served)
        assert statuses(talk(server.port, head + body)) == [503]


def test_an_overload_is_refused_with_its_advice(model_path):
    settings = Settings(slo_s=0.2, warm_up_s=0.05, limits=SMALL)
    with running({"net": model_path}, settings=settings, slow_s=0.05) as server:
        head, body = learn(server, images(4), bits=8, deadline_ms=5000)
        threads, found = [], []
        for _ in range(12):
            threads.append(threading.Thread(target=lambda: found.extend(answers(talk(server.port, head + body)))))
            threads[-1].start()
        for thread in threads:
            thread.join()
        refused = [answer for answer in found if answer[0] == 503]
        assert refused and all(b"retry-after" in fields and b"images wait" in said for _, fields, said in refused)
        assert {answer[0] for answer in found} <= {200, 503}
        wait_for(lambda: server.app.bodies.held == 0)


def test_a_client_that_goes_leaves_the_queue(model_path):
    with running({"net": model_path}, slow_s=0.3) as server:
        head, body = learn(server, images(1), bits=8)
        stats = server.models.get("net").now.scheduler.stats
        with connected(server.port) as busy:
            busy.sendall(head + body)  # the engine is busy with it
            time.sleep(0.1)
            with connected(server.port) as client:
                client.sendall(head + body)
                time.sleep(0.05)
            wait_for(lambda: stats()["requests"]["cancelled"] == 1)
            assert answers(take(busy, 0.1))[0][0] == 200
        wait_for(lambda: server.app.bodies.held == 0)


def test_a_body_that_does_not_come(model_path):
    limits = ConnectionLimits(body_s=0.3)
    with running({"net": model_path}, connection_limits=limits) as server:
        head, body = learn(server, images(1), bits=8)
        with connected(server.port) as client:
            client.sendall(head + body[:10])
            found = take(client, 0.1)
        assert statuses(found) == [408]


def test_the_end_waits_for_its_answer(model_path):
    x = images(1, seed=19)
    with running({"net": model_path}, slow_s=0.4) as server:
        head, body = learn(server, x, bits=8)
        with connected(server.port) as client:
            client.sendall(head + body)
            time.sleep(0.05)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            (answer,) = answers(take(client, 0.1))
            stopping.join()
        assert np.array_equal(output(answer), expected(model_path, x, 8))
        assert answer[1][b"connection"] == b"close"
        assert server.server.unanswered == 0
