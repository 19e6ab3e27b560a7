"""Requests whose end two servers could see in two places: refused, or read as the standard says; nothing hidden runs.

RFC 9112, 11.2 describes the attack: a proxy and this server disagree on where a request ends, and the rest of one
client's bytes runs as the next request of another.
"""

import asyncio
import itertools
import json
import random
import shutil
import subprocess

import numpy as np
import pytest
from attacks import HIDDEN, INFER, reached, statuses, talk
from serving import Reply, expected, images, output, tensor
from uvicorn.server import ServerState

from anyprec.serve.connections.connection import Connection
from anyprec.serve.connections.server import make_config
from anyprec.serve.connections.table import ConnectionTable

X = images(1)
BODY = json.dumps({"inputs": [tensor(X)], "parameters": {"bits": 8}}).encode()


def is_right(raw, model_path):
    """One answer, to the whole body."""
    head, _, body = raw.partition(b"\r\n\r\n")
    return (
        head.startswith(b"HTTP/1.1 200")
        and raw.count(b"HTTP/1.1 ") == 1
        and np.array_equal(output(Reply(200, {}, body)), expected(model_path, X, 8))
    )


# --- upgrades ---

UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"sec-websocket-version: 13\r\n",
    "anything": b"connection: keep-alive, Upgrade\r\nUPGRADE: x/1, y\r\n",
    "twice": b"upgrade: h2c\r\nconnection: upgrade\r\nupgrade: websocket\r\n",
}


@pytest.mark.parametrize("kind", UPGRADES)
@pytest.mark.parametrize("later", [False, True], ids=["same segment", "later segment"])
def test_an_upgrade_is_ignored_and_its_body_read(server, model_path, kind, later):
    head = INFER + UPGRADES[kind] + b"content-length: %d\r\n\r\n" % len(BODY)
    with reached(server) as paths:
        found = talk(server.port, head, BODY) if later else talk(server.port, head + BODY)
    assert paths == ["/v2/models/net/infer"]
    assert is_right(found, model_path), found[:200]


@pytest.mark.parametrize("kind", UPGRADES)
@pytest.mark.parametrize("later", [False, True], ids=["same segment", "later segment"])
def test_the_body_of_an_upgrade_is_no_request(server, kind, later):
    """The finding: the declared body was left unread, and what came later ran."""
    head = INFER + UPGRADES[kind] + b"content-length: %d\r\n\r\n" % len(HIDDEN)
    with reached(server) as paths:
        found = talk(server.port, head, HIDDEN) if later else talk(server.port, head + HIDDEN)
    assert paths == ["/v2/models/net/infer"] and statuses(found) == [400]
    assert b"JSON" in found  # the body was read, and is not JSON


@pytest.mark.parametrize("kind", UPGRADES)
def test_chunked_upgrades_and_what_follows(server, kind):
    first = INFER + UPGRADES[kind] + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)
    second = b"GET /v2 HTTP/1.1\r\nhost: x\r\n" + UPGRADES[kind] + b"\r\n"
    with reached(server) as paths:
        found = talk(server.port, first + second + second, answers=3)
    assert paths == ["/v2/models/net/infer", "/v2", "/v2"] and statuses(found) == [400, 200, 200]


def test_a_websocket_is_answered_as_http(server):
    found = talk(server.port, b"GET /v2 HTTP/1.1\r\nhost: x\r\n" + UPGRADES["websocket"] + b"\r\n")
    assert statuses(found) == [200]


def test_connect_is_refused(server):
    with reached(server) as paths:
        found = talk(server.port, b"CONNECT 10.0.0.1:80 HTTP/1.1\r\nhost: x\r\n\r\n" + HIDDEN)
    assert statuses(found) == [405] and paths == []


@pytest.mark.skipif(
    shutil.which("curl") is None
    or "HTTP2" not in subprocess.run(["curl", "-V"], capture_output=True, text=True).stdout,
    reason="no curl with HTTP/2 here",
)
def test_curl_http2(server, model_path):
    """`curl --http2` asks for h2c and must get an ordinary answer."""
    url = f"http://127.0.0.1:{server.port}/v2/models/net/infer"
    done = subprocess.run(
        ["curl", "-sS", "--http2", "--noproxy", "*", "-m", "10", "--data-binary", "@-",
         "-w", " %{http_code} %{http_version}", url], input=BODY, capture_output=True, timeout=20,
    )  # fmt: skip
    answer, status, version = done.stdout.rsplit(b" ", 2)
    assert (status, version) == (b"200", b"1.1"), done
    np.testing.assert_array_equal(output(Reply(200, {}, answer)), expected(model_path, X, 8))


JAVA = """
import java.net.URI;
import java.net.http.*;
import java.nio.file.*;
class Ask {
    public static void main(String[] given) throws Exception {
        var client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_2).build();
        var body = HttpRequest.BodyPublishers.ofFile(Path.of(given[1]));
        var request = HttpRequest.newBuilder(URI.create(given[0])).POST(body).build();
        var answer = client.send(request, HttpResponse.BodyHandlers.ofString());
        System.out.print(answer.statusCode() + " " + answer.version() + "\\n" + answer.body());
    }
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK here")
def test_java_http_client(server, model_path, tmp_path):
    """Java's HttpClient asks for h2c with every first request, unless told otherwise."""
    (tmp_path / "Ask.java").write_text(JAVA)
    (tmp_path / "body").write_bytes(BODY)
    url = f"http://127.0.0.1:{server.port}/v2/models/net/infer"
    command = ["java", "-XX:TieredStopAtLevel=1", tmp_path / "Ask.java", url, tmp_path / "body"]
    done = subprocess.run(command, capture_output=True, timeout=120)
    said, _, answer = done.stdout.partition(b"\n")
    assert said == b"200 HTTP_1_1", done
    np.testing.assert_array_equal(output(Reply(200, {}, answer)), expected(model_path, X, 8))


# --- Host ---


@pytest.mark.parametrize(
    "head, status",
    [
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: a\r\nHOST: b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: a, b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: a/b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: u@a\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: a:b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\nhost: a\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost:\r\n\r\n", 200),
        (b"GET /v2 HTTP/1.1\r\nhost: my_server.example:8000\r\n\r\n", 200),
        (b"GET /v2 HTTP/1.1\r\nhost: [::1]:8000\r\n\r\n", 200),
        (b"GET http://x/v2 HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"GET /v2 HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_hosts(server, head, status):
    found = talk(server.port, head)
    assert statuses(found) == [status], found[:200]
    if status == 400:
        assert b"Host" in found


# --- two lengths, or one that is none ---

TWO_ENDS = {
    "CL.CL": b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
    "CL.CL same": b"content-length: 0\r\ncontent-length: 0\r\n\r\n",
    "CL list": b"content-length: 0, 0\r\n\r\n",
    "CL plus": b"content-length: +0\r\n\r\n",
    "CL minus": b"content-length: -1\r\n\r\n",
    "CL hex": b"content-length: 0x0\r\n\r\n",
    "CL empty": b"content-length:\r\n\r\n",
    "CL two numbers": b"content-length: 0 0\r\n\r\n",
    "CL vertical tab": b"content-length: 0\x0b\r\n\r\n",
    "CL overflow": b"content-length: 18446744073709551616\r\n\r\n",
    "CL space before colon": b"content-length : 0\r\n\r\n",
    "CL.TE": b"content-length: 6\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE.CL": b"transfer-encoding: chunked\r\ncontent-length: 6\r\n\r\n0\r\n\r\n",
    "TE.TE same": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE.TE identity last": b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "TE.TE identity first": b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE list": b"transfer-encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "TE gzip": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "TE other": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "TE quoted": b'transfer-encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "TE parameter": b"transfer-encoding: chunked;q=1\r\n\r\n0\r\n\r\n",
    "TE identity": b"transfer-encoding: identity\r\n\r\n",
    "TE empty": b"transfer-encoding:\r\n\r\n",
    "TE vertical tab": b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "TE space before colon": b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "obs-fold": b"a: b\r\n c\r\n\r\n",
    "obs-fold CL": b"content-length:\r\n 0\r\n\r\n",
    "obs-fold TE": b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "obs-fold first": b" a: b\r\n\r\n",
    "bare LF": b"a: b\ncontent-length: 0\r\n\r\n",
    "bare LF end": b"a: b\n\n",
    "bare CR": b"a: b\rcontent-length: 0\r\n\r\n",
    "NUL": b"a: b\0\r\n\r\n",
    "no name": b": b\r\n\r\n",
    "no colon": b"content-length\r\n\r\n",
    "chunk hex": b"transfer-encoding: chunked\r\n\r\n0x0\r\n\r\n",
    "chunk plus": b"transfer-encoding: chunked\r\n\r\n+0\r\n\r\n",
    "chunk minus": b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
    "chunk space before": b"transfer-encoding: chunked\r\n\r\n 0\r\n\r\n",
    "chunk space behind": b"transfer-encoding: chunked\r\n\r\n0 \r\n\r\n",
    "chunk overflow": b"transfer-encoding: chunked\r\n\r\n10000000000000000\r\n\r\n",
    "chunk empty": b"transfer-encoding: chunked\r\n\r\n\r\n\r\n",
    "chunk size LF": b"transfer-encoding: chunked\r\n\r\n0\n\r\n",
    "chunk end LF": b"transfer-encoding: chunked\r\n\r\n1\r\nx\n0\r\n\r\n",
    "chunk without end": b"transfer-encoding: chunked\r\n\r\n1\r\nx0\r\n\r\n",
    "chunk too long": b"transfer-encoding: chunked\r\n\r\n1\r\nxyz\r\n0\r\n\r\n",
    "chunk extension LF": b"transfer-encoding: chunked\r\n\r\n1;a\nb\r\nx\r\n0\r\n\r\n",
    "chunk extension quoted": b'transfer-encoding: chunked\r\n\r\n1;a="\r\nx\r\n0\r\n\r\n',
    "trailer CL": b"transfer-encoding: chunked\r\n\r\n0\r\ncontent-length: 9\r\n\r\n",
    "trailer LF": b"transfer-encoding: chunked\r\n\r\n0\r\na: b\n\r\n",
    "last LF": b"transfer-encoding: chunked\r\n\r\n0\r\n\n",
}  # fmt: skip


@pytest.mark.parametrize("form", TWO_ENDS)
@pytest.mark.parametrize("later", [False, True], ids=["same segment", "later segment"])
def test_two_ends_are_none(server, form, later):
    """One refusal, the connection closed, and nothing behind it runs."""
    with reached(server) as paths:
        raw = INFER + TWO_ENDS[form]
        found = talk(server.port, raw, HIDDEN, HIDDEN) if later else talk(server.port, raw + HIDDEN + HIDDEN)
    assert statuses(found) == [400] and b"connection: close" in found.lower(), found[:200]
    assert "/hidden" not in paths


@pytest.mark.parametrize(
    "line, status",
    [
        (b"POST /v2/models/net/infer HTTP/1.0\r\ntransfer-encoding: chunked", 400),
        (b"GET /v2 HTTP/0.9\r\nhost: x", 505),
        (b"GET /v2 HTTP/2.0\r\nhost: x", 505),
        (b"GET /v2 HTTP/1.2\r\nhost: x", 400),
        (b"GET /v2\r\nhost: x", 505),
        (b"GET /v2 HTTP/1.1\nhost: x", 400),
        (b"GET /v2\tHTTP/1.1\r\nhost: x", 400),
        (b"GET /v2 http/1.1\r\nhost: x", 400),
        (b"GET/v2 HTTP/1.1\r\nhost: x", 400),
    ],
)
def test_request_lines(server, line, status):
    with reached(server) as paths:
        found = talk(server.port, line + b"\r\n\r\n" + HIDDEN)
    assert statuses(found) == [status] and paths == [], found[:200]


def test_names_that_only_look_like_a_length(server):
    """A proxy may drop or rename `content_length`: here it means nothing, and what follows is the next request."""
    with reached(server) as paths:
        found = talk(server.port, b"GET /v2 HTTP/1.1\r\nhost: x\r\ncontent_length: 99\r\n\r\n" + HIDDEN, answers=2)
    assert paths == ["/v2", "/hidden"] and statuses(found) == [200, 404]


def test_chunks_as_they_should_be(server, model_path):
    """Extensions, leading zeros and trailers are allowed; trailers change nothing."""
    half = len(BODY) // 2
    raw = INFER + b"transfer-encoding: Chunked\r\n\r\n000%x;a=b\r\n%b\r\n%X\r\n%b\r\n00\r\n" % (
        half, BODY[:half], len(BODY) - half, BODY[half:],
    )  # fmt: skip
    found = talk(server.port, raw + b"host: y\r\nhost: z\r\nx-api-key: z\r\n\r\n")
    assert is_right(found, model_path), found[:200]


# --- pipelines ---


def test_a_good_request_before_a_bad_one_is_answered(server, model_path):
    """First the answer, then the refusal: never a refusal in the place of an answer."""
    good = INFER + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    bad = INFER + b"content-length: 1\r\ncontent-length: 2\r\n\r\n"
    found = talk(server.port, good + good + bad + HIDDEN, answers=3)
    assert statuses(found) == [200, 200, 400]
    assert np.array_equal(
        output(Reply(200, {}, found.split(b"\r\n\r\n")[1].partition(b"HTTP/1.1")[0])), expected(model_path, X, 8)
    )


def test_a_body_that_breaks_off_in_a_pipeline(server):
    good = b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n"
    found = talk(server.port, good + INFER + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n" + HIDDEN, answers=2)
    assert statuses(found) == [200, 400]


@pytest.mark.parametrize("last", [b"connection: close\r\n", b"connection: x, Close\r\n"])
def test_nothing_runs_behind_the_last_request(server, last):
    with reached(server) as paths:
        found = talk(server.port, b"GET /v2 HTTP/1.1\r\nhost: x\r\n" + last + b"\r\n" + HIDDEN, HIDDEN)
    assert statuses(found) == [200] and paths == ["/v2"]


def test_a_refused_body_is_not_run(server):
    """A refusal that comes before the body was read: the body is thrown away, as a body."""
    with reached(server) as paths:
        raw = b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(HIDDEN)
        found = talk(server.port, raw, HIDDEN, b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n", answers=2)
    assert paths == ["/nothing", "/v2"] and statuses(found) == [404, 200]


# --- however the bytes are cut ---


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = close

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        pass

    resume_reading = pause_reading


async def requests_in(pieces):
    """(path, body) of every request that the application got, where the bytes come in these pieces."""
    seen = []

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        seen.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    kind = type("One", (Connection,), {"table": ConnectionTable(10, 10)})
    connection = kind(make_config(app, kind, None), ServerState(), {}, asyncio.get_running_loop())
    transport = Transport()
    connection.connection_made(transport)
    for piece in pieces:
        connection.data_received(piece)
        await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)
    connection._unset_keepalive_if_required()
    connection.connection_lost(None)
    return seen, statuses(transport.written)


UPGRADING = b"POST /%d HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
STREAM = (
    UPGRADING % 1 + b"content-length: 5\r\n\r\nhello"
    b"\r\nPOST /2 HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
    + UPGRADING % 3 + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\nGET \r\n0\r\nx: y\r\n\r\n"
    + UPGRADING % 4 + b"\r\nGET /5 HTTP/1.1\r\nhost: x\r\n\r\n"
    + UPGRADING % 6 + b"content-length: 1\r\nconnection: close\r\n\r\nz" + HIDDEN
)  # fmt: skip
MEANT = [("/1", b"hello"), ("/2", b"abc"), ("/3", b"abcGET "), ("/4", b""), ("/5", b""), ("/6", b"z")]


def test_the_same_requests_however_they_are_cut():
    draw = random.Random(0)
    cuts = [[], range(1, len(STREAM))]  # in one piece, byte by byte
    cuts += [[at] for at in range(1, len(STREAM), 3)]
    cuts += [sorted(draw.sample(range(1, len(STREAM)), draw.randint(2, 12))) for _ in range(100)]
    for cut in cuts:
        at = [0, *cut, len(STREAM)]
        pieces = [STREAM[a:b] for a, b in itertools.pairwise(at)]
        assert asyncio.run(requests_in(pieces)) == (MEANT, [200] * 6), list(cut)
