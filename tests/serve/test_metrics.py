"""Counts: Prometheus text that its own parser reads, seconds for the page, Triton's sums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from anyprec.serve.metrics import KEEP, Metrics, Recent, bucket, mean_accuracy, quantile_ms


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.5

    def __call__(self) -> float:
        return self.now


def samples(metrics):
    families = text_string_to_metric_families(metrics.text().decode())
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def test_prometheus_text():
    metrics = Metrics(Clock())
    metrics.add_model("net")
    metrics.collect_from(lambda: [("net", {"queue_requests": 3})])
    metrics.answered("net", 4, 0.012, 0.002, 0.009, 8, 2, True)
    metrics.answered("net", "fast", 0.2, 0.1, 0.01, 8, 6, False)
    metrics.finished("net", 200)
    metrics.finished("unknown", 404)
    found = samples(metrics)
    assert found["anyprec_answers_total", ("bits", "4"), ("model", "net")] == 1
    assert found["anyprec_answers_total", ("bits", "fast"), ("model", "net")] == 1
    assert found["anyprec_deadlines_total", ("met", "false"), ("model", "net")] == 1
    assert found["anyprec_requests_total", ("model", "net"), ("status", "200")] == 1
    assert found["anyprec_requests_total", ("model", ""), ("status", "404")] == 1
    assert found["anyprec_latency_seconds_count", ("model", "net")] == 2
    assert found["anyprec_latency_seconds_sum", ("model", "net")] == pytest.approx(0.212)
    assert found["anyprec_queue_requests", ("model", "net")] == 3


def test_totals_in_tritons_form():
    metrics = Metrics(Clock())
    metrics.add_model("net")
    for images in (2, 6):  # one batch of 8
        metrics.answered("net", 4, 0.012, 0.002, 0.009, 8, images, True)
    metrics.finished("net", 400)
    found = metrics.totals("net")
    assert (found["inference_count"], found["execution_count"]) == (8, 1)
    assert found["inference_stats"]["success"] == {"count": 2, "ns": 24_000_000}
    assert found["inference_stats"]["compute_output"]["ns"] == 2_000_000
    assert found["inference_stats"]["fail"]["count"] == 1
    assert found["batch_stats"][0]["compute_infer"] == {"count": 1, "ns": 9_000_000}


def test_seconds():
    recent = Recent()
    for at, bits in ((100.2, 8), (100.9, 2), (101.0, 2), (102.5, 1)):
        recent.answered(at, bits, 0.010, met=bits != 1)
    recent.refused(102.7)
    rows = recent.series(103.1, 4, {8: 90.0, 2: 80.0, 1: 70.0}.get)
    assert [row["answered"] for row in rows] == [0, 2, 1, 1] and [row["ago"] for row in rows] == [4, 3, 2, 1]
    assert rows[1]["bits"] == {"8": 1, "2": 1} and rows[1]["accuracy"] == 85.0
    assert rows[3]["missed"] == 1 and rows[3]["refused"] == 1
    assert rows[0]["p50_ms"] is None and rows[1]["p50_ms"] == pytest.approx(10, rel=0.05)


def test_old_seconds_are_forgotten_and_memory_is_bounded():
    recent = Recent()
    for second in range(3 * KEEP):
        recent.answered(float(second), 8, 0.01, True)
    rows = recent.series(3.0 * KEEP, 10 * KEEP)
    assert len(rows) == KEEP - 1 and all(row["answered"] == 1 for row in rows)
    assert all(row["answered"] == 0 for row in recent.series(10.0 * KEEP, KEEP))
    assert len(recent.ring) == KEEP


@given(st.lists(st.floats(3e-5, 60.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_within_four_percent(seconds, q):
    buckets = {}
    for one in seconds:
        buckets[bucket(one)] = buckets.get(bucket(one), 0) + 1
    exact = np.quantile(seconds, q, method="inverted_cdf")
    assert quantile_ms(buckets, q) == pytest.approx(1e3 * exact, rel=0.041)


def test_accuracy_is_unknown_where_one_width_is():
    assert mean_accuracy({8: 1, 4: 3}, {8: 90.0, 4: 80.0}.get) == 82.5
    assert mean_accuracy({8: 1, 4: 3}, {8: 90.0}.get) is None
    assert mean_accuracy({}, {8: 90.0}.get) is None
