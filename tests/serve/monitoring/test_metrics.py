"""Counts: Prometheus text that its own parser reads, seconds for the page, Triton's sums."""

import logging
import socket
import sys
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from anyprec.serve.connections import arrival
from anyprec.serve.monitoring.condition import OverloadDetector, Precision, PrecisionLog, percent, verdict
from anyprec.serve.monitoring.histogram import bin_of, quantile
from anyprec.serve.monitoring.metrics import Metrics, ServedRun
from anyprec.serve.monitoring.recent import (
    EXPIRED,
    IN_TIME,
    KEEP,
    LATE,
    REFUSED,
    Period,
    RecentSeconds,
    mean_accuracy,
    window_record,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.5

    def __call__(self) -> float:
        return self.now


def samples(metrics):
    families = text_string_to_metric_families(metrics.text().decode())
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def run(bits, images=1, batch=8):
    return ServedRun(bits, queue_s=0.002, run_s=0.009, batch=batch, images=images)


def test_prometheus_text():
    metrics = Metrics(Clock())
    metrics.add_model("net")
    metrics.ended("net", 200, True, 0.012, [run(4)])
    metrics.ended("net", 200, False, 0.2, [run("fast")])
    metrics.finished("net", 200)
    metrics.finished("unknown", 404)
    metrics.turn_away(503)
    found = samples(metrics)
    assert found["anyprec_answers_total", ("bits", "4"), ("model", "net")] == 1
    assert found["anyprec_answers_total", ("bits", "fast"), ("model", "net")] == 1
    assert found["anyprec_deadlines_total", ("met", "false"), ("model", "net")] == 1
    assert found["anyprec_requests_total", ("model", "net"), ("status", "200")] == 1
    assert found["anyprec_requests_total", ("model", ""), ("status", "404")] == 1
    assert found["anyprec_latency_seconds_count", ("model", "net")] == 2
    assert found["anyprec_latency_seconds_sum", ("model", "net")] == pytest.approx(0.212)
    assert found["anyprec_turned_away_total", ("status", "503")] == 1


@pytest.mark.parametrize(
    "status, met, runs, outcome",
    [
        (200, True, [run(4)], "in_time"),
        (200, False, [run(4)], "late"),
        (429, True, [], "refused"),
        (503, True, [], "refused"),
        (504, False, [], "expired"),
        (500, True, [], "failed"),
        (499, False, [], "left"),
        (499, True, [], None),  # nobody waited
        (400, True, [], None),  # the client's own mistake
        (413, True, [], None),
    ],
)
def test_every_end_of_a_request_is_counted_as_its_client_would(status, met, runs, outcome):
    clock = Clock()
    metrics = Metrics(clock)
    metrics.add_model("net")
    metrics.ended("net", status, met, 0.010, runs)
    total = metrics.recent["net"].over(clock.now + 1)
    assert total.outcomes == ({} if outcome is None else {outcome: 1})
    assert sum(total.latencies.values()) == len(runs)  # refusals have no latency
    counted = {key: value for key, value in samples(metrics).items() if key[0] == "anyprec_outcomes_total"}
    assert sum(counted.values()) == (outcome is not None)


def test_totals_in_tritons_form():
    metrics = Metrics(Clock())
    metrics.add_model("net")
    for images in (2, 6):  # one batch of 8
        metrics.ended("net", 200, True, 0.012, [run(4, images)])
    metrics.finished("net", 400)
    found = metrics.totals("net")
    assert (found["inference_count"], found["execution_count"]) == (8, 1)
    assert found["inference_stats"]["success"] == {"count": 2, "ns": 24_000_000}
    assert found["inference_stats"]["compute_output"]["ns"] == 2_000_000
    assert found["inference_stats"]["fail"]["count"] == 1
    assert found["batch_stats"][0]["compute_infer"] == {"count": 1, "ns": 9_000_000}


def test_seconds_and_their_sum():
    recent = RecentSeconds()
    for at, bits in ((100.2, 8), (100.9, 2), (101.0, 2), (102.5, 1)):
        recent.second(at).count(LATE if bits == 1 else IN_TIME, 0.010, [bits])
    recent.second(102.7).count(REFUSED)
    recent.second(103.05).count(REFUSED)  # of the second under way
    accuracy = {8: 90.0, 2: 80.0, 1: 70.0}.get
    rows = recent.series(103.1, 4, accuracy)
    assert [row["answered"] for row in rows] == [0, 2, 1, 1] and [row["ago"] for row in rows] == [4, 3, 2, 1]
    assert rows[1]["bits"] == {"8": 1, "2": 1} and rows[1]["accuracy"] == 85.0
    assert rows[3]["late"] == 1 and rows[3]["refused"] == 1 and rows[3]["requests"] == 2
    assert rows[0]["p50_ms"] is None and rows[1]["p50_ms"] == pytest.approx(10, rel=0.05)
    total = window_record(recent.over(103.1, 4), 4, accuracy)
    for name in ("requests", "answered", "late", "refused"):
        assert total[name] == sum(row[name] for row in rows), name
    assert total["attainment"] == 3 / 5 and total["per_second"] == 5 / 4 and total["mean_bits"] == 13 / 4
    assert window_record(Period(), 10)["attainment"] is None


def test_old_seconds_are_forgotten_and_memory_is_bounded():
    recent = RecentSeconds()
    for second in range(3 * KEEP):
        recent.second(float(second)).count(IN_TIME, 0.01, [8])
    rows = recent.series(3.0 * KEEP, 10 * KEEP)
    assert len(rows) == KEEP - 1 and all(row["answered"] == 1 for row in rows)
    assert all(row["answered"] == 0 for row in recent.series(10.0 * KEEP, KEEP))
    assert len(recent.ring) == KEEP


@given(st.lists(st.floats(3e-5, 60.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_at_most_three_percent_too_much(seconds, q):
    bins = Counter(map(bin_of, seconds))
    exact = np.quantile(seconds, q, method="inverted_cdf")
    assert exact * (1 - 1e-9) <= quantile(bins, q) <= 1.0301 * exact


def test_accuracy_is_unknown_where_one_width_is():
    assert mean_accuracy(Counter({8: 1, 4: 3}), {8: 90.0, 4: 80.0}.get) == 82.5
    assert mean_accuracy(Counter({8: 1, 4: 3}), {8: 90.0}.get) is None
    assert mean_accuracy(Counter(), {8: 90.0}.get) is None


# --- words and log lines ---


def total(**outcomes):
    found = Period()
    found.outcomes.update(outcomes)
    return found


def test_the_state_is_said_in_words():
    assert verdict(total(), False) == ("idle", "no requests in the last 10 s")
    assert verdict(total(in_time=1000), False) == ("good", "100 % of 1,000 requests in time over the last 10 s")
    level, words = verdict(total(in_time=270, late=600, refused=130), False)
    assert level == "bad"
    assert (
        words == "overloaded: 73 % of 1,000 requests not in time over the last 10 s (60 % late, 13 % refused)"
    )  # however "ready" the model is
    assert verdict(total(in_time=95, late=5), False)[0] == "warn"
    assert verdict(total(in_time=95, late=5), True)[0] == "bad"  # an overload has not ended yet
    assert verdict(total(in_time=1, late=1), False)[0] == "warn"  # two requests are no load


def test_shares_are_never_rounded_to_all_or_to_none():
    assert [percent(x) for x in (0, 1, 0.99999, 0.00001, 0.5)] == ["0.00 %", "100 %", "99.99 %", "under 0.01 %", "50 %"]


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("anyprec.serve"), "propagate", True)
    caplog.set_level(logging.INFO, "anyprec.serve")
    return lambda: [(record.message, record.fields) for record in caplog.records]


def test_overload_is_logged_when_it_begins_and_when_it_ends(lines):
    overload = OverloadDetector("net")
    overload.look(1.0, total(in_time=5, late=4))  # too few
    overload.look(2.0, total(in_time=30, late=60, expired=10))
    overload.look(3.0, total(in_time=20, late=80))
    overload.look(9.0, total(in_time=95, late=5))  # better, but not over
    overload.look(14.0, total(in_time=100))
    overload.look(15.0, total())
    (begun, first), (ended, last) = lines()
    assert (begun, ended) == ("overload begins", "overload ended")
    assert first["in_time"] == "30 %" and first["late"] == 60 and first[EXPIRED] == 10 and first["model"] == "net"
    assert last["lasted_s"] == 12.0 and overload.since is None


def test_a_change_of_precision_is_logged_and_flapping_is_summed_up(lines):
    log = PrecisionLog("net")
    log.look(100.0, Precision("8", 0, {"8": 5}))
    log.look(101.0, Precision("4", 1, {"8": 5, "4": 1}))
    assert lines() == [("precision changed", {"model": "net", "before": "8", "now": "4"})]
    for second in range(600):  # ten changes a second
        changes = 1 + 10 * (second + 1)
        log.look(102.0 + second, Precision("8" if second % 2 else "4", changes, {"8": 5 * second, "4": 5 * second}))
    assert len(lines()) <= 7
    message, fields = lines()[1]
    assert message == "precision keeps changing" and fields["changes"] >= 50 and "4:" in fields["batches"]
    told = sum(fields.get("changes", 1) for _, fields in lines())
    assert told >= 3000  # what was not told is told later
    log.look(10_000.0, Precision("8", 7000, {"8": 1}))
    log.look(20_000.0, Precision("8", 7000, {"8": 1}))  # calm for long
    log.look(20_001.0, Precision("2", 7001, {"8": 1, "2": 1}))
    assert lines()[-1] == ("precision changed", {"model": "net", "before": "8", "now": "2"})


# --- arrival ---


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when data came")
def test_arrival_is_when_the_bytes_came_not_when_they_were_read():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with socket.create_connection(listener.getsockname()) as client:
            served, _ = listener.accept()
            with served:
                before = time.monotonic()
                client.sendall(b"x")
                after = time.monotonic()
                time.sleep(0.2)
                assert served.recv(1) == b"x"
                found = arrival.arrival_time(served)
                assert before <= found <= after + 2 * arrival.TICK_S


def test_arrival_of_what_is_no_tcp_socket_is_now():
    one, other = socket.socketpair()
    with one, other:
        before = time.monotonic()
        assert before <= arrival.arrival_time(one) <= time.monotonic()
    assert arrival.arrival_time(None) >= before
