"""Answers of HTTP/1.1 cut out of bytes, however they are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyprec.loadtest import wire

JSON = b'{"model_name":"net","parameters":{"bits":4,"latency_ms":2.1,"queue_ms":1.25,"run_ms":0.8,"batch":2}}'
PLAIN = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(JSON), len(JSON) + 4, JSON + b"\0\1\2\3")
)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nInference-Header-Content-Length: %d\r\n\r\n"
    b"5;x=y\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(JSON), JSON[:5], len(JSON) - 1, JSON[5:] + b"\0\1\2\3")
)


@pytest.mark.parametrize("data", [PLAIN, CHUNKED])
def test_whole(data):
    reply, used = wire.take(data)
    assert used == len(data)
    assert reply.status == 200 and reply.tensor == b"\0\1\2\3" and not reply.close
    assert reply.numbers() == {b"bits": b"4", b"queue_ms": b"1.25", b"run_ms": b"0.8", b"batch": b"2"}


@pytest.mark.parametrize("data", [PLAIN, CHUNKED])
def test_every_prefix_asks_for_more_and_never_for_too_much(data):
    for size in range(1, len(data)):
        wanted = wire.take(data[:size])
        assert isinstance(wanted, int) and size < wanted <= len(data)


def test_what_follows_is_left():
    assert wire.take(PLAIN + b"HTTP/1.1 5")[1] == len(PLAIN)


def test_100_continue_is_skipped():
    reply, used = wire.take(b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN)
    assert reply.status == 200 and used == len(PLAIN) + 25


@pytest.mark.parametrize(
    ("head", "after", "close"),
    [
        (b"429 Too Many\r\nRetry-After: 3\r\nConnection: close", 3.0, True),
        (b"503 Busy\r\nretry-after: 0.05", 0.05, False),
        (b"503 Busy\r\nRetry-After: Wed, 21 Oct 2026 07:28:00 GMT", None, False),
        (b"200 OK\r\nRetry-After: 9\r\nConnection: keep-alive", None, False),
    ],
)
def test_rejections(head, after, close):
    reply, _ = wire.take(b"HTTP/1.1 " + head + b"\r\nContent-Length: 0\r\n\r\n")
    assert reply.retry_after_s == after and reply.close == close
    assert reply.numbers() == {}


def test_advice_in_milliseconds_is_finer():
    body = b'{"error":"busy","retry_after_ms":12.5}'
    reply, _ = wire.take(b"HTTP/1.1 503 X\r\nRetry-After: 1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert reply.retry_after_s == 0.0125


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 " + b"a" * (1 << 17),
    ],
)
def test_what_is_no_answer(data):
    with pytest.raises(wire.BadAnswer):
        wire.take(data)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_an_answer_more_or_bad(data, like_http):
    try:
        found = wire.take(b"HTTP/1.1 200 OK\r\n" + data if like_http else data)
    except wire.BadAnswer:
        return
    assert isinstance(found, int) or found[1] <= len(data) + 17
