"""Every path over HTTP, on a real server with a small network: right answers, and what each mistake gets."""

import asyncio
import gzip
import http.client
import io
import json
import threading
import time
import zlib

import numpy as np
import pytest
from PIL import Image
from serving import LABELS, SMALL, SlowModel, ask, expected, images, infer, output, running, save, tensor

from anyprec.serve.http.app import make_app
from anyprec.serve.http.bodies import RequestLimits
from anyprec.serve.http.keys import read_keys
from anyprec.serve.models import Settings, make_scheduler

KEY, BOSS = "k" * 20, "b" * 20


def png(size=(8, 8), seed=0):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue(), pixels


# --- metadata and health ---


def test_server_and_model(server):
    found = ask(server.port, "GET", "/v2").json
    assert found["name"] == "anyprec" and "binary_tensor_data" in found["extensions"]
    for path in ("/v2/models/net", "/v2/models/net/versions/1"):
        assert ask(server.port, "GET", path).json["inputs"][0]["name"] == "input"
    assert ask(server.port, "GET", "/v2/health/live").json == {"live": True}
    assert ask(server.port, "GET", "/v2/health/ready").status == 200
    assert ask(server.port, "GET", "/v2/models/net/ready").json == {"name": "net", "ready": True}
    assert ask(server.port, "GET", "/v2/models/net/config").json["max_batch_size"] == 32
    assert ask(server.port, "GET", "/v2/repository/index").json[0]["state"] == "READY"
    assert ask(server.port, "POST", "/v2/repository/index", {}).json[0]["name"] == "net"


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/nope", 404),
        ("GET", "/v2/models/other", 404),
        ("POST", "/v2/models/other/infer", 404),
        ("GET", "/v2/models/net/versions/2", 404),
        ("GET", "/v2/models/net/nope", 404),
        ("GET", "/v2/models//infer", 404),
        ("GET", "/v2/models/../../etc/passwd", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404),
        ("GET", "/%00", 404),
        ("GET", "/page/../app.py", 404),
        ("GET", "/v2/models/net/infer", 405),
        ("POST", "/v2", 405),
        ("DELETE", "/v2/models/net", 405),
        ("PUT", "/", 405),
        ("OPTIONS", "/v2/models/net/infer", 405),
        ("TRACE", "/v2", 405),
        ("GET", "/v2/models/net/live?seconds=0", 400),
        ("GET", "/v2/models/net/live?minutes=3", 400),
        ("GET", "/v2/models/net/live?seconds=%ff", 400),
    ],
)
def test_wrong_paths_and_methods(server, method, path, status):
    found = ask(server.port, method, path)
    assert found.status == status and list(found.json) == ["error"]
    assert (status == 405) == ("allow" in found.headers)


def test_head_and_request_ids(server):
    found = ask(server.port, "HEAD", "/v2")
    assert found.status == 200 and found.body == b""
    assert ask(server.port, "GET", "/v2", x_request_id="abc-1").headers["x-request-id"] == "abc-1"
    own = [ask(server.port, "GET", "/v2", x_request_id="x" * 200).headers["x-request-id"] for _ in range(2)]
    assert own[0] != own[1] and "x" * 9 not in own[0]


def test_the_page(server):
    found = ask(server.port, "GET", "/")
    assert found.status == 200 and found.headers["content-type"].startswith("text/html") and b"<html" in found.body
    assert "default-src 'none'" in found.headers["content-security-policy"]
    again = ask(server.port, "GET", "/", if_none_match=found.headers["etag"])
    assert again.status == 304 and again.body == b""


def test_openapi(server):
    found = ask(server.port, "GET", "/openapi.json").json
    assert found["openapi"].startswith("3.") and "/v2/models/{name}/infer" in found["paths"]


# --- inference ---


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_answers_are_the_engines(server, model_path, bits):
    x = images(3, seed=bits)
    found = infer(server.port, x, bits=bits)
    assert found.status == 200 and found.json["parameters"]["bits"] == bits
    assert set(found.json["parameters"]) == {"bits", "latency_ms", "queue_ms", "run_ms", "batch"}
    np.testing.assert_array_equal(output(found), expected(model_path, x, bits))


def test_floats_and_free_bits(server, model_path):
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    found = infer(server.port, x, min_bits=4)
    bits = found.json["parameters"]["bits"]
    assert bits >= 4
    np.testing.assert_array_equal(output(found), expected(model_path, x, bits))


def binary_request(x, **parameters):
    record = {key: value for key, value in tensor(x).items() if key != "data"}
    record["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [record], "parameters": {"binary_data_output": True, **parameters}}).encode()
    return head + x.tobytes(), str(len(head))


@pytest.mark.parametrize("encoding", [None, "gzip", "deflate", "raw deflate"])
def test_binary_tensors_plain_and_compressed(server, model_path, encoding):
    x = images(2)
    body, length = binary_request(x, bits=4)
    headers = {"inference_header_content_length": length}
    if encoding == "gzip":
        body = gzip.compress(body)
    elif encoding == "deflate":
        body = zlib.compress(body)
    elif encoding:
        engine = zlib.compressobj(wbits=-15)
        body = engine.compress(body) + engine.flush()
    if encoding:
        headers["content_encoding"] = encoding.split()[-1]
    found = ask(server.port, "POST", "/v2/models/net/infer", body, **headers)
    assert found.status == 200, found.body
    head = int(found.headers["inference-header-content-length"])
    assert json.loads(found.body[:head])["outputs"][0]["parameters"] == {"binary_data_size": 32}
    y = np.frombuffer(found.body[head:], "<f4").reshape(2, 4)
    np.testing.assert_array_equal(y, expected(model_path, x, 4))


def test_a_raw_body(server, model_path):
    x = images(2)
    found = ask(server.port, "POST", "/v2/models/net/infer", x.tobytes(), inference_header_content_length="0")
    head = int(found.headers["inference-header-content-length"])
    bits = json.loads(found.body[:head])["parameters"]["bits"]
    np.testing.assert_array_equal(np.frombuffer(found.body[head:], "<f4").reshape(2, 4), expected(model_path, x, bits))


@pytest.mark.parametrize(
    "body, headers, status, says",
    [
        (b"", {}, 400, "not JSON"),
        (b"{}", {}, 400, "inputs"),
        (b"\x00\xff" * 50, {}, 400, "not JSON"),
        (b"{}", {"inference_header_content_length": "x"}, 400, "not a number"),
        (b"{}", {"inference_header_content_length": "99"}, 400, "length of the JSON"),
        (b"{}", {"content_encoding": "br"}, 415, "gzip or deflate"),
        (b"{}", {"content_encoding": "gzip"}, 400, "cannot be decompressed"),
        (gzip.compress(b"{}" * 100, mtime=0)[:-20], {"content_encoding": "gzip"}, 400, "cut short"),
        (b"{}", {"content_encoding": "deflate"}, 400, "compressed"),
    ],
)
def test_bodies_that_are_wrong(server, body, headers, status, says):
    found = ask(server.port, "POST", "/v2/models/net/infer", body, **headers)
    assert found.status == status and says in found.json["error"]


def test_wrong_shapes_and_types(server):
    for x in (images(1, size=9), images(1)[:, :2], images(33), images(1)[0]):
        assert infer(server.port, x).status == 400
    wrong = {"inputs": [{**tensor(images(1)), "datatype": "INT64"}]}
    assert ask(server.port, "POST", "/v2/models/net/infer", wrong).status == 400
    assert infer(server.port, images(1), bits=3).status == 400
    assert infer(server.port, images(1)).status == 200


# --- limits ---


@pytest.fixture(scope="module")
def narrow(model_path):
    """A server of small limits, whose every call takes 50 ms."""
    request_limits = RequestLimits(body=20_000, json=4_000, held=60_000, image_pixels=400)
    settings = Settings(slo_s=0.5, warm_up_s=0.01, limits=SMALL)
    with running({"net": model_path}, settings=settings, request_limits=request_limits, slow_s=0.05) as found:
        yield found


def test_large_bodies(narrow):
    for body, headers in (
        (bytes(20_001), {}),
        (bytes(30_000_000), {}),  # more than a socket holds: the answer comes while it is still being sent
        (gzip.compress(bytes(1_000_000)), {"content_encoding": "gzip"}),
        (b"[" + b"1," * 3000 + b"1]", {}),
    ):
        found = ask(narrow.port, "POST", "/v2/models/net/infer", body, **headers)
        assert found.status == 413 and "error" in found.json
    connection = http.client.HTTPConnection("127.0.0.1", narrow.port, timeout=20)
    connection.request("POST", "/v2/models/net/infer", iter([bytes(5000)] * 10), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    wait_for_held(narrow.app, lambda bytes_: bytes_ == 0)  # released when the task ends, after its answer is out


def unfinished(port, sent):
    """A request that declares 19,900 bytes and sends fewer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest("POST", "/v2/models/net/infer")
    connection.putheader("content-length", "19900")
    connection.endheaders(bytes(sent))
    return connection


def wait_for_held(app, right):
    for _ in range(300):
        if right(app.bodies.held):
            break
        time.sleep(0.01)
    assert right(app.bodies.held)


def test_bytes_count_when_they_come_not_when_they_are_declared(narrow):
    """A hundred times the memory there is, promised: others do not notice."""
    held = [unfinished(narrow.port, 1) for _ in range(100)]
    wait_for_held(narrow.app, lambda bytes_: bytes_ == 100)
    assert infer(narrow.port, images(1)).status == 200
    for connection in held:
        connection.close()
    wait_for_held(narrow.app, lambda bytes_: bytes_ == 0)


def test_memory_that_is_full_is_503_until_bodies_are_late(narrow):
    held = [unfinished(narrow.port, 19_899) for _ in range(3)]
    wait_for_held(narrow.app, lambda bytes_: bytes_ == 3 * 19_899)
    found = infer(narrow.port, images(1))
    assert found.status == 503 and found.headers["retry-after"] == "1" and found.json["retry_after_ms"] == 1000.0
    time.sleep(1.1)  # they could have come by now, and make way
    assert infer(narrow.port, images(1)).status == 200
    told = [connection.getresponse().status for connection in held[:1]]
    assert told == [503]
    for connection in held:
        connection.close()
    wait_for_held(narrow.app, lambda bytes_: bytes_ == 0)


def test_overload_is_503_with_retry_after(narrow):
    found = []

    def client(number):
        found.append(infer(narrow.port, images(4), deadline_ms=300 + number / 10))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = {reply.status for reply in found}
    assert 200 in statuses and 503 in statuses and statuses <= {200, 503, 504}
    for reply in found:
        if reply.status == 503:
            assert int(reply.headers["retry-after"]) >= 1 and reply.json["retry_after_ms"] > 0


def test_a_deadline_that_cannot_be_met(narrow):
    blocker = threading.Thread(target=infer, args=(narrow.port, images(4)))
    blocker.start()
    time.sleep(0.02)
    assert infer(narrow.port, images(1), deadline_ms=1).status in (200, 503, 504)  # 200 where the blocker came second
    blocker.join()


def test_a_client_that_vanishes_costs_no_engine_time(narrow):
    time.sleep(0.3)
    blocker = threading.Thread(target=infer, args=(narrow.port, images(4)))
    blocker.start()
    time.sleep(0.02)
    before = narrow.models.get("net").now.scheduler.stats()["requests"]["cancelled"]
    body = json.dumps({"inputs": [tensor(images(4))]}).encode()
    gone = []
    for _ in range(2):
        connection = http.client.HTTPConnection("127.0.0.1", narrow.port)
        connection.request("POST", "/v2/models/net/infer", body)
        gone.append(connection)
    time.sleep(0.01)
    for connection in gone:
        connection.close()
    blocker.join()
    for _ in range(200):
        stats = narrow.models.get("net").now.scheduler.stats()
        if stats["requests"]["cancelled"] - before == 2 or stats["running"] == stats["queue"]["requests"] == 0:
            break
        time.sleep(0.01)
    ended = narrow.models.get("net").now.scheduler.stats()["requests"]
    assert ended["arrived"] == sum(ended[name] for name in ("answered", "overloaded", "expired", "cancelled", "failed"))
    assert infer(narrow.port, images(1)).status == 200
    wait_for_held(narrow.app, lambda bytes_: bytes_ == 0)


# --- images ---


def test_posted_images(server, model_path):
    raw, pixels = png()
    found = ask(server.port, "POST", "/v2/models/net/classify?bits=4&top=2", raw).json
    (result,) = found["results"]
    y = expected(model_path, pixels.transpose(2, 0, 1)[None], 4)[0]
    best = np.argsort(-y)[:2]
    assert [one["label"] for one in result["labels"]] == [LABELS[i] for i in best]
    assert result["bits"] == 4 and result["accuracy"] == 84.0
    assert result["labels"][0]["score"] == pytest.approx(float(y[best[0]]), rel=1e-6)
    every = ask(server.port, "POST", "/v2/models/net/classify?bits=all", raw).json["results"]
    assert [one["bits"] for one in every] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    "path, body, status",
    [
        ("classify", b"GIF89a", 415),
        ("classify", b"\xff\xd8\xff" + bytes(50), 400),
        ("classify", b"", 415),
        ("classify?bits=3", png()[0], 400),
        ("classify?bits=", png()[0], 400),
        ("classify?top=0", png()[0], 400),
        ("classify?top=many", png()[0], 400),
        ("classify?min_bits=3000", png()[0], 400),
        ("classify?deadline_ms=nan", png()[0], 400),
        ("classify?deadline_ms=-1", png()[0], 400),
        ("classify?size=9", png()[0], 400),
    ],
)
def test_posted_images_that_are_wrong(server, path, body, status):
    assert ask(server.port, "POST", f"/v2/models/net/{path}", body).status == status


def test_large_images(narrow):
    assert ask(narrow.port, "POST", "/v2/models/net/classify", png((21, 20))[0]).status == 413
    assert ask(narrow.port, "POST", "/v2/models/net/classify", png((20, 20))[0]).status == 200


# --- the page's data, stats, metrics ---


def test_recent_seconds_stats_and_metrics(server):
    for _ in range(3):
        infer(server.port, images(2), bits=2)
    found = ask(server.port, "GET", "/v2/models/net/live?seconds=5").json
    assert len(found["seconds"]) == 5 and found["target_ms"] == 2000 and found["precision"]["policy"] == "adaptive"
    (stats,) = ask(server.port, "GET", "/v2/models/net/stats").json["model_stats"]
    assert stats["inference_count"] >= 6 and stats["anyprec"]["bits_histogram"]["2"] >= 3
    assert ask(server.port, "GET", "/v2/models/stats").json["model_stats"][0]["name"] == "net"
    text = ask(server.port, "GET", "/metrics")
    assert text.headers["content-type"].startswith("text/plain")
    assert b'anyprec_answers_total{bits="2",model="net"}' in text.body
    assert b'anyprec_queue_requests{model="net"}' in text.body


def test_events(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", "/v2/models/net/live", headers={"accept": "text/event-stream"})
    answer = connection.getresponse()
    assert answer.getheader("content-type") == "text/event-stream"
    assert len(json.loads(answer.readline()[6:])["seconds"]) == 60
    assert answer.readline() == b"\n"
    second = json.loads(answer.readline()[6:])
    assert len(second["seconds"]) == 1
    connection.close()
    for _ in range(300):
        if server.app.streams == 0:
            break
        time.sleep(0.01)
    assert server.app.streams == 0


# --- control and keys ---


def test_precision(model_path):
    with running({"net": model_path}) as found:
        path = "/v2/models/net/precision"
        assert ask(found.port, "GET", path).json == {"policy": "adaptive", "bits": None}
        assert ask(found.port, "POST", path, {"bits": 2}).json == {"policy": "fixed", "bits": 2}
        assert infer(found.port, images(1)).json["parameters"]["bits"] == 2
        assert ask(found.port, "POST", path, {"policy": "accuracy"}).json["policy"] == "accuracy"
        assert infer(found.port, images(1)).json["parameters"]["bits"] == 8
        for wrong in (
            {},
            {"bits": 3},
            {"policy": "fixed"},
            {"policy": "adaptive", "bits": 2},
            {"bit": 2},
            {"bits": None},
        ):
            assert ask(found.port, "POST", path, wrong).status == 400
        assert ask(found.port, "POST", path, b"[]").status == 400
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            assert ask(found.port, "POST", path, {"bits": 2}, **headers).status == 403


def test_load_and_unload(model_path):
    with running({"net": model_path}) as found:
        repository = "/v2/repository/models/net"
        assert ask(found.port, "POST", f"{repository}/load", {}).json == {"name": "net", "state": "READY"}
        assert ask(found.port, "POST", f"{repository}/load", {"parameters": {"file:x": "y"}}).status == 400
        assert ask(found.port, "POST", f"{repository}/unload").json["state"] == "UNAVAILABLE"
        for path in ("/v2/health/ready", "/v2/models/net/ready", "/v2/models/net"):
            assert ask(found.port, "GET", path).status == 503
        refused = infer(found.port, images(1))
        assert refused.status == 503 and "unloaded" in refused.json["error"]
        assert ask(found.port, "GET", "/v2/repository/index").json[0] == {
            "name": "net", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded",
        }  # fmt: skip
        assert ask(found.port, "GET", "/v2/health/live").status == 200
        assert ask(found.port, "POST", f"{repository}/load").status == 200
        assert infer(found.port, images(1)).status == 200


def test_keys(model_path):
    keys = read_keys(environ={"ANYPREC_API_KEYS": f"web: {KEY}", "ANYPREC_CONTROL_KEYS": BOSS})
    with running({"net": model_path}, keys=keys) as found:
        port = found.port
        for path in ("/v2/health/live", "/v2/health/ready", "/", "/openapi.json"):
            assert ask(port, "GET", path).status == 200
        for path in ("/v2", "/metrics", "/v2/models/net", "/v2/models/other", "/v2/models/net/ready"):
            refused = ask(port, "GET", path)
            assert refused.status == 401 and refused.headers["www-authenticate"] == "Bearer"
            assert ask(port, "GET", path, authorization=f"Bearer {KEY}").status in (200, 404)
        assert ask(port, "GET", "/v2", x_api_key=KEY).status == 200
        assert ask(port, "GET", "/v2", x_api_key=KEY[:-1]).status == 401
        assert ask(port, "GET", "/v2", authorization=f"Basic {KEY}").status == 401
        precision = "/v2/models/net/precision"
        assert ask(port, "POST", precision, {"bits": 2}).status == 401
        assert ask(port, "POST", precision, {"bits": 2}, x_api_key=KEY).status == 403
        assert ask(port, "POST", precision, {"bits": 2}, x_api_key=BOSS).status == 200
        assert ask(port, "GET", "/v2", x_api_key=BOSS).status == 200


def test_control_is_closed_to_the_network_without_a_key(model_path):
    with running({"net": model_path}, local=False) as found:
        refused = ask(found.port, "POST", "/v2/models/net/precision", {"bits": 2})
        assert refused.status == 403 and "--control-key-file" in refused.json["error"]
        assert infer(found.port, images(1)).status == 200


def test_several_models(model_path, tmp_path):
    other = save(tmp_path / "other.apm", seed=5, size=(None, None))
    with running({"net": model_path, "other": other}) as found:
        x = images(1, size=8)
        for name, path in (("net", model_path), ("other", other)):
            np.testing.assert_array_equal(output(infer(found.port, x, name, bits=4)), expected(path, x, 4))
        large = images(1, size=20)
        np.testing.assert_array_equal(output(infer(found.port, large, "other", bits=2)), expected(other, large, 2))
        assert infer(found.port, large, "net").status == 400
        assert len(ask(found.port, "GET", "/v2/repository/index").json) == 2


def test_no_traceback_reaches_a_client(model_path, caplog, monkeypatch):
    with running({"net": model_path}) as found, caplog.at_level("ERROR", "anyprec.serve"):
        monkeypatch.setattr(found.app.metrics, "text", lambda: 1 / 0)
        refused = ask(found.port, "GET", "/metrics", x_request_id="find-me")
        assert refused.status == 500 and refused.json == {"error": "internal error; request find-me"}
        assert "ZeroDivisionError" in caplog.text
        model = found.models.get("net").now.scheduler._model
        monkeypatch.setattr(type(model), "__call__", lambda *args, **rest: 1 / 0)
        refused = infer(found.port, images(1))
        assert refused.status == 500 and "division" not in refused.json["error"]
        monkeypatch.undo()
        assert infer(found.port, images(1)).status == 200


# --- under another ASGI server ---


class Asgi:
    """The least an ASGI server does, for one request after another."""

    def __init__(self, app):
        self.app = app

    async def request(self, method, path, body=b"", gone=None):
        asked, sent = [{"type": "http.request", "body": body, "more_body": False}], []

        async def receive():
            if asked:
                return asked.pop(0)
            await (asyncio.Event() if gone is None else gone).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "client": None}
        await self.app(scope, receive, send)
        status = sent[0]["status"] if sent else None
        return status, b"".join(message.get("body", b"") for message in sent[1:])

    async def lifespan(self, kind):
        sent = []

        async def receive():
            return {"type": f"lifespan.{kind}"} if not sent else await asyncio.Event().wait()

        async def send(message):
            sent.append(message["type"])

        task = asyncio.ensure_future(self.app({"type": "lifespan"}, receive, send))
        while not sent:
            await asyncio.sleep(0.01)
        task.cancel()
        return sent[0]


@pytest.mark.thorough
def test_any_asgi_server_will_do(model_path):
    """Without our connection: the application sees by itself that a client is gone."""

    def make(model, levels, settings, deliver):
        return make_scheduler(SlowModel(model, 0.05), levels, settings, deliver)

    app = make_app({"net": str(model_path)}, Settings(slo_s=2.0, warm_up_s=0.01), make=make)
    app.models.load_all()
    x = images(1)
    body = json.dumps({"inputs": [tensor(x)], "parameters": {"bits": 8}}).encode()

    async def story():
        asgi = Asgi(app)
        assert await asgi.lifespan("startup") == "lifespan.startup.complete"
        _, raw = await asgi.request("POST", "/v2/models/net/infer", body)
        y = np.array(json.loads(raw)["outputs"][0]["data"], np.float32)
        np.testing.assert_array_equal(y, expected(model_path, x, 8)[0])
        assert (await asgi.request("POST", "/v2/models/net/precision", b'{"bits": 2}'))[0] == 403  # not local
        gone = asyncio.Event()
        first = asyncio.ensure_future(asgi.request("POST", "/v2/models/net/infer", body))
        await asyncio.sleep(0.02)
        second = asyncio.ensure_future(asgi.request("POST", "/v2/models/net/infer", body, gone))
        await asyncio.sleep(0.005)
        gone.set()
        assert (await first)[0] == 200 and (await second)[0] in (None, 200)
        assert await asgi.lifespan("shutdown") == "lifespan.shutdown.complete"
        assert (await asgi.request("POST", "/v2/models/net/infer", body))[0] == 503

    asyncio.run(story())
