"""Numbers of a load worked out by hand, its files and its picture."""

import csv
import json

import numpy as np
import pytest

from anyprec.loadtest.outcome import BROKEN, LoadOutcome, merge, one_after_another
from anyprec.loadtest.report import correct_answers, summarize, table, timeline, write

NAN = float("nan")


def outcome():
    """Six requests, one a second; target 50 ms: two in time, one late, one rejected, one expired, one broken."""
    planned = np.arange(6.0)
    latency = np.array([0.010, 0.030, 0.070, 0.001, 0.060, NAN])
    return LoadOutcome(
        planned=planned,
        sent=planned + np.array([1e-4, 1e-4, 2e-4, 1e-4, 1e-4, NAN]),
        done=planned + latency,
        status=np.array([200, 200, 200, 503, 504, BROKEN], np.int16),
        profile=np.array(["8", "2", "2", "", "", ""]),
        queue_s=np.array([0.001, 0.002, 0.003, NAN, NAN, NAN]),
        run_s=np.array([0.005, 0.001, 0.001, NAN, NAN, NAN]),
        batch=np.array([1, 4, 4, 0, 0, 0]),
        retry_after_s=np.array([NAN, NAN, NAN, 1.0, NAN, NAN]),
        image=np.array([0, 1, 2, 0, 1, 2]),
        outputs={i: np.eye(3, dtype=np.float32)[label].tobytes() for i, label in ((0, 1), (1, 2), (2, 0))},
        cpu_s=6e-4,
        connections=2,
    )


def test_worked_numbers_with_labels():
    found = outcome()
    right = correct_answers(found, np.array([1, 0, 0]), np.dtype(np.float32))
    assert right.tolist() == [1, 0, 1, 0, 0, 0]
    s = summarize(found, 0.05, 6.0, right=right)
    assert s.attainment == pytest.approx(2 / 6)
    assert s.goodput == pytest.approx(2 / 6)
    assert (s.answered, s.late, s.rejected, s.expired, s.errors) == (3, 1, 1, 1, 1)
    assert s.accuracy == pytest.approx(100 * 2 / 3) and s.accuracy_is == "measured"
    assert s.effective_accuracy == pytest.approx(100 / 6)  # request 0 alone: 2 was right and late
    assert s.latency_ms == {"p50": 30, "p90": 70, "p99": 70, "p99.9": 70}
    assert s.bits == {"2": 2, "8": 1} and s.mean_bits == 4 and s.mean_batch == 3
    assert s.send_delay_ms == {"p50": 0.1, "p99": 0.2, "max": 0.2}
    assert s.cpu_us == 100
    assert s.warnings == ["1 connections broke, 0 requests were never answered"]


def test_requests_of_two_images():
    found = outcome()
    found.outputs = {
        i: np.eye(3, dtype=np.float32)[list(said)].tobytes() for i, said in ((0, (1, 2)), (1, (2, 0)), (2, (0, 0)))
    }
    right = correct_answers(found, np.array([[1, 1], [2, 0], [1, 2]]), np.dtype(np.float32))
    assert right.tolist() == [0.5, 1, 0, 0, 0, 0]
    s = summarize(found, 0.05, 6.0, images=2, right=right)
    assert s.accuracy == pytest.approx(50) and s.effective_accuracy == pytest.approx(100 * 1.5 / 6)  # 2 was late
    assert "6 requests of 2 images in 6 s" in table(s)
    # An answer whose size does not fit two images has no classes.
    found.outputs[0] = found.outputs[0][:12]
    assert correct_answers(found, np.array([[1, 1], [2, 0], [1, 2]]), np.dtype(np.float32)).tolist()[0] == 0


def test_worked_numbers_without_labels():
    s = summarize(outcome(), 0.05, 6.0, expected={"8": 93.0, "2": 90.0})
    assert s.accuracy == pytest.approx((93 + 90 + 90) / 3) and s.accuracy_is == "expected"
    assert s.effective_accuracy == pytest.approx((93 + 90) / 6)
    # One width whose accuracy nobody noted: no mean can be given.
    s = summarize(outcome(), 0.05, 6.0, expected={"8": 93.0})
    assert s.accuracy is None and s.effective_accuracy is None and s.accuracy_is == "unknown"
    assert summarize(outcome(), 0.05, 6.0).accuracy is None


def test_timeline_adds_up():
    found = outcome()
    rows = timeline(found, 0.05, 6.0, window_s=2.0, expected={"8": 93.0, "2": 90.0})
    assert [row["second"] for row in rows] == [0, 2, 4]
    assert [row["load"] for row in rows] == [1, 1, 1]
    assert [row["attainment"] for row in rows] == [1, 0, 0]
    assert [row["rejected"] for row in rows] == [0, 0.5, 0]
    assert [row["mean_bits"] for row in rows] == [5, 2, None]
    assert [row["share_2"] for row in rows] == [0.5, 1, None]
    assert [row["accuracy"] for row in rows] == [91.5, 90, None]
    assert rows[0]["p99_ms"] == 30 and rows[2]["p50_ms"] is None


def test_a_timeline_that_does_not_divide():
    rows = timeline(outcome(), 0.05, 6.0, window_s=4.0)
    assert [row["second"] for row in rows] == [0, 4]
    assert [row["load"] for row in rows] == [1, 1]


def test_nothing_answered():
    found = outcome()
    found.status[:] = BROKEN
    found.outputs.clear()
    s = summarize(found, 0.05, 6.0, right=correct_answers(found, np.zeros(3, np.int64), np.dtype(np.float32)))
    assert s.attainment == 0 and s.accuracy is None and s.latency_ms["p50"] is None
    assert "0.000 %" in table(s) and "latency" not in table(s) and "bits" not in table(s)
    assert timeline(found, 0.05, 6.0)[0]["p50_ms"] is None


def test_merge_brings_processes_together():
    found = outcome()
    parts = []
    for where in (np.array([0, 2, 4]), np.array([1, 3, 5])):
        fields = {name: getattr(found, name)[where] for name in ("planned", "sent", "done", "status", "profile")}
        more = {name: getattr(found, name)[where] for name in ("queue_s", "run_s", "batch", "retry_after_s", "image")}
        kept = {i: found.outputs[int(p)] for i, p in enumerate(where) if int(p) in found.outputs}
        parts.append((where, LoadOutcome(**fields, **more, outputs=kept, cpu_s=3e-4, connections=1, notes={"x": 1})))
    whole = merge(parts)
    assert whole.planned.tolist() == found.planned.tolist() and whole.outputs == found.outputs
    assert whole.profile.tolist() == found.profile.tolist()
    assert whole.connections == 2 and whole.cpu_s == pytest.approx(6e-4) and whole.notes == {"x": 2}


def test_slices_follow_each_other():
    whole = one_after_another([(6.0, outcome()), (6.0, outcome())])
    assert whole.planned.tolist() == list(range(12))
    assert np.allclose(whole.latency[:3], whole.latency[6:9])
    s = summarize(whole, 0.05, 12.0, right=correct_answers(whole, np.array([1, 0, 0]), np.dtype(np.float32)))
    assert s.requests == 12 and s.accuracy == pytest.approx(100 * 2 / 3)


def test_files(tmp_path):
    found = outcome()
    right = correct_answers(found, np.array([1, 0, 0]), np.dtype(np.float32))
    s = summarize(found, 0.05, 6.0, right=right)
    rows = timeline(found, 0.05, 6.0, window_s=2.0, right=right)
    write(tmp_path / "out", s, rows, found, right, {"model": "net"})
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["model"] == "net" and report["attainment"] == s.attainment and len(report["timeline"]) == 3
    lines = list(csv.DictReader((tmp_path / "out" / "requests.csv").read_text().splitlines()))
    assert [line["status"] for line in lines] == ["200", "200", "200", "503", "504", "-1"]
    assert [line["right"] for line in lines] == ["1", "0", "1", "", "", ""]
    assert lines[2]["latency_ms"] == "70" and lines[5]["latency_ms"] == ""
    assert [
        float(row["load"]) for row in csv.DictReader((tmp_path / "out" / "timeline.csv").read_text().splitlines())
    ] == [1, 1, 1]


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from anyprec.loadtest.plots import draw

    rows = timeline(outcome(), 0.05, 6.0, window_s=2.0)
    draw(rows, 50.0, "net", tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_table_tells_the_story():
    text = table(summarize(outcome(), 0.05, 6.0, expected={"8": 93.0, "2": 90.0}))
    assert "6 requests in 6 s (1.0 / s), target 50 ms" in text
    assert "in time    33.333 %   (0.3 / s; 1 late, 1 rejected, 1 expired, 1 errors)" in text
    assert "p50 30.00   p90 70.00" in text
    assert "2: 66.7 %   8: 33.3 %   (mean 4.00)" in text
    assert "accuracy   91.00 % expected from the widths used; right and in time 30.50 %" in text
