"""What the server says of itself beside what a load generator saw: the same requests, counted at both ends."""

import io
import json
import logging
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serving import ask, images, infer, running, wait_for

from anyprec.serve.models import Settings
from anyprec.serve.scheduling.queue import QueueLimits

SLO_S = 0.2


@pytest.mark.thorough
def test_page_and_generator_agree_under_overload(model_path, tmp_path):
    """One image in 40 ms is 25 a second; 60 a second come, in bursts. The generator counts from the planned time; here
    its own delay is taken off again, for the server cannot know it."""
    settings = Settings(slo_s=SLO_S, warm_up_s=0.2, limits=QueueLimits(max_batch=1))
    with running({"net": model_path}, settings=settings, slow_s=0.04) as server:
        command = [sys.executable, "-m", "anyprec", "loadtest", f"http://127.0.0.1:{server.port}", "--arrivals"]
        command += ["gamma:60:4", "--seconds", "4s", "--slo", f"{SLO_S}s", "--json", "--out", str(tmp_path)]
        report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
        time.sleep(1.1)  # until the last second is a full one
        seen = ask(server.port, "GET", "/v2/models/net/live?window=120").json["window"]
        metrics = ask(server.port, "GET", "/metrics").body.decode()
    assert seen["answered"] == report["answered"] and seen["refused"] == report["rejected"] > 0
    assert seen["expired"] == report["expired"] and report["errors"] == seen["failed"] == 0
    assert seen["requests"] == report["requests"]
    assert seen["accuracy"] == pytest.approx(report["accuracy"], abs=0.01)
    assert seen["mean_bits"] == pytest.approx(report["mean_bits"])
    for name in ("in_time", "late", "refused"):
        assert (
            f'anyprec_outcomes_total{{model="net",outcome="{name}"}} {float(seen[name])}' in metrics or not seen[name]
        )

    rows = np.genfromtxt(tmp_path / "requests.csv", delimiter=",", skip_header=1, usecols=(1, 2, 3))
    delay, latency, status = rows.T
    client_ms = np.sort((latency - delay)[status == 200])  # from when it was sent
    slack_ms = 100  # two processes that share this machine with others: either may stand still before its stamp
    lowest, most = (np.sum(client_ms <= 1e3 * SLO_S + slack) for slack in (-slack_ms, slack_ms))
    assert lowest <= seen["in_time"] <= most
    p99 = np.quantile(client_ms, 0.99, method="inverted_cdf")
    assert p99 - slack_ms <= seen["p99_ms"] <= 1.03 * p99 + slack_ms


def test_a_picture_at_every_width_is_one_request(server):
    buffer = io.BytesIO()
    Image.fromarray(images()[0].transpose(1, 2, 0)).save(buffer, "PNG")
    count = server.app.metrics.outcomes.labels("net", "in_time")._value.get
    before = count()
    assert ask(server.port, "POST", "/v2/models/net/classify?bits=all", buffer.getvalue()).status == 200
    wait_for(lambda: count() > before)  # counted after the answer is out
    assert count() == before + 1


def test_what_is_no_inference_does_not_count(server):
    def counted():
        return sum(sample.value for family in server.app.metrics.outcomes.collect() for sample in family.samples)

    before = counted()
    for path in ("/v2/models/net", "/v2/models/net/live", "/v2/models/net/stats", "/v2/health/ready"):
        assert ask(server.port, "GET", path).status == 200
    assert ask(server.port, "POST", "/v2/models/net/infer", b"no JSON").status == 400
    assert counted() == before
    assert infer(server.port, images()).status == 200
    wait_for(lambda: counted() > before)
    assert counted() == before + 1


def test_a_model_that_is_not_loaded_is_said(model_path):
    with running({"net": model_path}) as server:
        server.models.unload(server.models.get("net"))
        seen = ask(server.port, "GET", "/v2/models/net/live").json
        assert seen["condition"] == {"level": "bad", "words": "not loaded: unloaded", "overloaded": False}
        assert infer(server.port, images()).status == 503
        time.sleep(1.1)
        assert ask(server.port, "GET", "/v2/models/net/live").json["window"]["refused"] == 1
        metrics = ask(server.port, "GET", "/metrics").body.decode()
        assert 'anyprec_model_ready{model="net"} 0.0' in metrics and "anyprec_policy" not in metrics


def test_connections_turned_away_are_counted(model_path):
    with running({"net": model_path}) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b"no HTTP\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400")
        server.server.kind.on_refused(503)  # as a connection does that is one too many
        metrics = ask(server.port, "GET", "/metrics").body.decode()
        assert 'anyprec_turned_away_total{status="400"} 1.0' in metrics
        assert 'anyprec_turned_away_total{status="503"} 1.0' in metrics
        seen = server.app.metrics.recent["net"].over(time.time() + 1)
        assert seen.outcomes == {"turned_away": 1}  # what is no HTTP is no request


def test_metrics_of_policy_and_widths(model_path):
    with running({"net": model_path}) as server:
        assert infer(server.port, images()).status == 200
        assert ask(server.port, "POST", "/v2/models/net/precision", {"bits": 2}).status == 200
        for _ in range(3):
            assert infer(server.port, images()).json["parameters"]["bits"] == 2
        assert infer(server.port, images(), bits=8).status == 200  # asked for: no change of the policy's
        lines = ask(server.port, "GET", "/metrics").body.decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("anyprec_"))
    assert found['anyprec_policy{model="net",policy="fixed"}'] == "1.0"
    assert found['anyprec_policy{model="net",policy="adaptive"}'] == "0.0"
    assert found['anyprec_width_held{bits="2",model="net"}'] == "1.0"
    assert found['anyprec_width_held{bits="8",model="net"}'] == "0.0"
    assert found['anyprec_width_last{bits="2",model="net"}'] == "1.0"
    assert found['anyprec_engine_batches_total{bits="2",model="net"}'] == "3.0"
    assert float(found['anyprec_engine_seconds_total{bits="2",model="net"}']) > 0
    assert found['anyprec_precision_changes_total{model="net"}'] == "1.0"
    assert found['anyprec_width_accuracy_ratio{bits="2",model="net"}'] == "0.82"


def test_the_docs_list_every_metric_and_no_other(server):
    docs = (Path(__file__).parents[3] / "docs/cli/serve.md").read_text()
    listed = set(re.findall(r"`(anyprec_[a-z_]+)", docs.partition("## Metrics")[2].partition("\n## ")[0]))
    assert infer(server.port, images()).status == 200
    time.sleep(1.1)  # the expected accuracy is that of full seconds
    metrics = ask(server.port, "GET", "/metrics").body.decode()
    kinds = dict(re.findall(r"# TYPE (anyprec_\w+) (\w+)", metrics))
    assert listed == set(kinds)
    assert all(kind == "counter" for name, kind in kinds.items() if name.endswith("_total"))


def test_a_policy_set_by_hand_is_logged(model_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("anyprec.serve"), "propagate", True)
    caplog.set_level(logging.INFO, "anyprec.serve")
    with running({"net": model_path}) as server:
        for _ in range(2):  # the second changes nothing
            assert ask(server.port, "POST", "/v2/models/net/precision", {"bits": 2}).status == 200
    (line,) = [record for record in caplog.records if record.message == "precision set"]
    assert line.fields == {"model": "net", "policy": "fixed", "bits": 2, "before": "adaptive", "client": "127.0.0.1"}


def test_overload_and_precision_changes_reach_the_log(model_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("anyprec.serve"), "propagate", True)
    caplog.set_level(logging.INFO, "anyprec.serve")

    def logged(message: str) -> dict:
        for _ in range(200):
            found = [record.fields for record in caplog.records if record.message == message]
            if found:
                return found[0]
            time.sleep(0.05)
        raise AssertionError(f"{message!r} was not logged in 10 s")

    with running({"net": model_path}) as server:
        for bits in (8, 2):
            assert ask(server.port, "POST", "/v2/models/net/precision", {"bits": bits}).status == 200
            assert infer(server.port, images()).status == 200
            time.sleep(1.6)  # looked at once a second
        assert logged("precision changed") == {"model": "net", "before": "8", "now": "2"}
        server.models.unload(server.models.get("net"))
        for _ in range(30):
            assert infer(server.port, images()).status == 503
        found = logged("overload begins")
    assert found["model"] == "net" and found["refused"] >= 10 and found["window_s"] == 10
