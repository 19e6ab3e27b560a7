"""The load generator against a server whose every answer is scripted."""

import os
import time

import numpy as np
import pytest

from anyprec.errors import LoadTestError
from anyprec.loadtest.client import NOT_ALLOWED, LoadPlan, Sender, send
from anyprec.loadtest.outcome import BROKEN, UNANSWERED
from anyprec.loadtest.processes import send_from_processes
from anyprec.loadtest.report import correct_answers, summarize
from anyprec.loadtest.target import find, fit_images, messages

FP32 = np.dtype(np.float32)


def images(count):
    x = np.zeros((count, 3, 4, 4), np.uint8)
    x[:, 0, 0, 0] = np.arange(count)
    return x


def plan_for(server, count=20, deadline_ms=20.0, **fields):
    target = find(server.url, "net")
    return LoadPlan(target.host, target.port, messages(target, images(count), deadline_ms=deadline_ms), **fields)


def test_every_request_is_answered_and_belongs_to_its_image(server):
    times = np.linspace(0, 0.1, 60)
    outcome = send(plan_for(server, keep_outputs=True), times)
    assert (outcome.status == 200).all()
    assert outcome.image.tolist() == [i % 20 for i in range(60)]
    assert correct_answers(outcome, np.arange(20) % 10, FP32).all()
    assert not correct_answers(outcome, (np.arange(20) + 1) % 10, FP32).any()
    assert set(outcome.profile) == {"8"}
    assert np.allclose(outcome.queue_s, 0.0015) and np.allclose(outcome.run_s, 0.0025) and (outcome.batch == 3).all()
    assert (outcome.sent >= outcome.planned).all() and (outcome.done > outcome.sent).all()
    assert outcome.cpu_s > 0


def test_what_goes_over_the_wire(server):
    target = find(server.url, "net")
    x = np.arange(2 * 48, dtype=np.uint8).reshape(2, 4, 4, 3)  # NHWC, the model takes NCHW
    sent = fit_images(x, target)
    texts = messages(target, sent, deadline_ms=12.5, bits=4, min_bits=2, headers={"Authorization": "Bearer x"})
    send(LoadPlan(target.host, target.port, texts), np.zeros(2))
    first = server.got[0]
    assert first["inputs"] == [
        {"name": "input", "shape": [1, 3, 4, 4], "datatype": "UINT8", "parameters": {"binary_data_size": 48}}
    ]
    assert first["outputs"] == [{"name": "output", "parameters": {"binary_data": True}}]
    assert first["parameters"] == {"deadline_ms": 12.5, "bits": 4, "min_bits": 2}
    assert "Authorization: Bearer x" in first["head"] and "POST /v2/models/net/infer HTTP/1.1" in first["head"]
    assert sorted(server.bodies) == sorted(x.transpose(0, 3, 1, 2)[i].tobytes() for i in range(2))


def test_never_waits_for_answers(server):
    # Nothing is answered before all 80 have come: a generator that waits for any answer would wait for ever.
    server.barrier = 80
    outcome = send(plan_for(server, timeout_s=20), np.linspace(0, 0.2, 80))
    assert (outcome.status == 200).all()
    assert outcome.connections == 80
    assert len(server.peers) == 81  # and the one that asked about the model


def test_no_coordinated_omission(server, answer):
    # A stall from 0.2 s to 0.5 s: whatever should have been sent in it waited for its end, to the last request.
    times = np.arange(0, 0.8, 0.01)
    sender = Sender(plan_for(server), times)
    sender.warm()
    start = time.perf_counter()
    stall = start + 0.2, start + 0.5

    def script(i):
        return answer(hold=stall[1] if stall[0] <= time.perf_counter() < stall[1] else 0.0)

    server.script = script
    outcome = sender.run(start)
    during = (times >= 0.2) & (times < 0.5)
    assert during.sum() == 30 and (outcome.status == 200).all()
    assert (outcome.latency[during] >= 0.5 - times[during]).all()
    # The same requests timed from their sending to their answer, one after the other, would show one slow answer.
    assert (outcome.latency[during] > 0.1).sum() >= 20


def test_latency_counts_from_the_planned_time(server):
    # The generator starts half a second late: all of that is latency, and a warning says whose fault it was.
    sender = Sender(plan_for(server), np.linspace(0, 0.01, 10))
    sender.warm()
    outcome = sender.run(time.perf_counter() - 0.5)
    assert (outcome.latency >= 0.49).all() and (outcome.send_delay >= 0.49).all()
    summary = summarize(outcome, 0.02, 1.0)
    assert summary.attainment == 0
    assert "the generator itself was late" in summary.warnings[0]


def test_connections_are_kept(server):
    outcome = send(plan_for(server, connections=2), np.arange(5) * 0.05)
    assert (outcome.status == 200).all()
    assert outcome.connections <= 3  # on a busy machine an answer may take longer than the gap
    assert len(server.peers) == outcome.connections + 1  # and the one that asked about the model


def test_rejections_and_errors_are_told_apart(server, answer):
    kinds = [
        answer(),
        answer(status=503, headers="Retry-After: 2\r\n"),
        answer(status=429, headers="Retry-After: 0.25\r\n"),
        answer(status=504),
        answer(status=400),
        answer(bits="fast"),
    ]
    server.script = lambda i: kinds[i % 6]
    outcome = send(plan_for(server, connections=1, limit=1), np.zeros(12))  # one connection: in order
    assert outcome.status.tolist() == [200, 503, 429, 504, 400, 200] * 2
    assert outcome.retry_after_s[[1, 2]].tolist() == [2.0, 0.25] and np.isnan(outcome.retry_after_s[[0, 3]]).all()
    assert outcome.profile.tolist()[:6] == ["8", "", "", "", "", "fast"]
    assert outcome.waited == 11
    summary = summarize(outcome, 60.0, 1.0)
    assert (summary.answered, summary.rejected, summary.expired, summary.errors) == (4, 4, 2, 2)
    assert summary.attainment == 4 / 12
    assert summary.bits == {"8": 2, "fast": 2}
    assert outcome.notes['400 {"error":"busy"}'] == 2


@pytest.mark.parametrize("fields", [{"chunked": True}, {"split": 10}, {"split": 80}, {"chunked": True, "split": 95}])
def test_answers_in_pieces(server, answer, fields):
    server.script = lambda i: answer(bits=4, **fields)
    outcome = send(plan_for(server, keep_outputs=True), np.zeros(20))
    assert (outcome.status == 200).all() and set(outcome.profile) == {"4"}
    assert correct_answers(outcome, np.arange(20) % 10, FP32).all()


def test_a_server_that_closes_after_each_answer(server, answer):
    server.script = lambda i: answer(headers="connection: close\r\n")
    outcome = send(plan_for(server, connections=1), np.arange(10) * 0.01)
    assert (outcome.status == 200).all() and outcome.connections >= 10


def test_a_kept_connection_that_was_closed_is_tried_once_more(server, answer):
    # The second request meets a server that closes the kept connection: a fresh one gets its answer.
    server.script = lambda i: answer(vanish=i == 1)
    outcome = send(plan_for(server, connections=1, limit=1), np.zeros(3))
    assert outcome.status.tolist() == [200, 200, 200]
    assert outcome.resent == 1


def test_a_server_that_always_vanishes(server, answer):
    server.script = lambda i: answer(vanish=True)
    outcome = send(plan_for(server), np.zeros(8))
    assert (outcome.status == BROKEN).all()
    assert summarize(outcome, 1.0, 1.0).errors == 8


def test_bytes_that_are_no_answer(server, answer):
    server.script = lambda i: answer(raw=b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    outcome = send(plan_for(server), np.zeros(3))
    assert (outcome.status == BROKEN).all() and outcome.notes == {"the answer is not HTTP/1.1": 3}


def test_an_answer_that_never_comes(server, answer):
    server.script = lambda i: answer(hold=time.perf_counter() + 60)
    outcome = send(plan_for(server, timeout_s=0.2), np.zeros(3))
    assert (outcome.status == UNANSWERED).all()
    assert summarize(outcome, 0.1, 1.0).warnings[-1] == "0 connections broke, 3 requests were never answered"


def test_more_requests_than_the_pool_may_have_connections(server):
    server.barrier = 0
    outcome = send(plan_for(server, limit=3), np.zeros(50))
    assert (outcome.status == 200).all()
    assert len(server.peers) <= 3 + 1
    assert outcome.waited > 0
    assert any("--limit" in text for text in summarize(outcome, 1.0, 1.0).warnings)


def test_real_time_or_a_note_that_it_is_not_allowed(server):
    before = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
    outcome = send(plan_for(server, real_time=True), np.linspace(0, 0.05, 20))
    assert (outcome.status == 200).all()
    assert set(outcome.notes) <= {NOT_ALLOWED}
    assert before is None or os.sched_getscheduler(0) == before


def test_nobody_there():
    with pytest.raises(LoadTestError, match=r"127.0.0.1:9: no connection"):
        send(LoadPlan("127.0.0.1", 9, [b"x"]), np.zeros(1))


def test_times_must_not_fall():
    with pytest.raises(LoadTestError, match="must never fall"):
        send(LoadPlan("127.0.0.1", 9, [b"x"]), np.array([1.0, 0.0]))
    with pytest.raises(LoadTestError, match="nothing to send"):
        send(LoadPlan("127.0.0.1", 9, []), np.zeros(1))


def test_ticks(server):
    seen = []
    send(plan_for(server), np.array([0.0, 0.35]), seen.append)
    assert len(seen) >= 1 and np.diff([0.0, *seen]).min() > 0.099


def test_several_processes_send_the_same_load(server):
    times = np.sort(np.random.default_rng(0).uniform(0, 0.2, 61))
    outcome = send_from_processes(plan_for(server, keep_outputs=True), times, 2)
    assert outcome.planned.tolist() == times.tolist()
    assert (outcome.status == 200).all()
    assert outcome.image.tolist() == [i % 20 for i in range(61)]
    assert correct_answers(outcome, np.arange(20) % 10, FP32).all()
    assert len(server.bodies) == 61


def test_processes_say_what_is_wrong():
    with pytest.raises(LoadTestError, match="no connection"):
        send_from_processes(LoadPlan("127.0.0.1", 9, [b"x"]), np.zeros(4), 2)
