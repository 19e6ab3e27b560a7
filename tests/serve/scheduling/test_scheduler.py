"""The scheduler under threads: every request gets one answer, its own, whatever models and clients do."""

import json
import random
import threading
import time
from concurrent.futures import CancelledError, wait

import numpy as np
import pytest

from anyprec.errors import (
    AnyprecError,
    Cancelled,
    Draining,
    Expired,
    InputError,
    Overloaded,
    ServeError,
    UnsupportedBits,
)
from anyprec.serve.scheduling.engine import example, measure_latency, served_levels
from anyprec.serve.scheduling.latency import LatencyTable
from anyprec.serve.scheduling.scheduler import Answer, QueueLimits, Request, Scheduler

LONG = 60.0  # seconds: a deadline that no test waits for


class Fake:
    """The call surface of a PackedModel. An image's answer is its first value times the bits, and who answered."""

    layout = "NCHW"
    takes_uint8 = True
    made_for = None

    def __init__(self, name=0, widths=(1, 2, 4, 8), size=(4, 4), seconds=0.0):
        self.name, self.widths, self.size, self.seconds = name, widths, size, seconds
        self.calls = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    @property
    def profiles(self):
        return tuple(map(str, self.widths))

    has_cascade = False

    @property
    def input_shape(self):
        return (*self.size, 1)

    @property
    def image_size(self):
        return self.made_for

    def accuracy(self, bits=None):
        return 90.0 + int(bits)

    def __call__(self, x, bits=None, *, threads=None, cancel=None):
        self.calls.append((len(x), bits))
        self.entered.release()
        self.gate.wait(10)
        if self.seconds:
            time.sleep(self.seconds)
        if (x[:, 0, 0, 0] == 666).any():
            raise RuntimeError("the model does not like this one")
        return np.stack([x[:, 0, 0, 0] * bits, np.full(len(x), self.name)], axis=1)


TIMES = {str(bits): {1: 1e-6 * bits, 32: 16e-6 * bits} for bits in (1, 2, 4, 8)}


def image(value=1.0, n=1, size=4):
    return np.full((n, 1, size, size), value, np.float32)


def request(value=1.0, n=1, deadline=LONG, **more):
    return Request(image(value, n), time.monotonic() + deadline, **more)


def scheduler(model=None, **more):
    return Scheduler(model or Fake(), LatencyTable(TIMES), **{"slo": 1.0, **more})


def held(model, s):
    """Keep the engine in a batch, so that what is submitted next has to wait. Returns that batch's future."""
    model.gate.clear()
    future = s.submit(request())
    assert model.entered.acquire(timeout=5)
    return future


def test_an_answer():
    with scheduler() as s:
        answer = s.submit(request(3.0, n=2)).result(5)
    assert isinstance(answer, Answer) and not answer.late
    np.testing.assert_array_equal(answer.outputs[0], [[24, 0], [24, 0]])
    assert answer.bits == 8 and answer.batch == 2 and answer.queue_s >= 0 and answer.run_s >= 0


def test_answers_by_callback_come_once_a_batch():
    model, batches = Fake(), []
    with scheduler(model, deliver=batches.append) as s:
        s.set_policy("fixed", 2)
        model.gate.clear()
        assert s.submit(request(), print) is None
        assert model.entered.acquire(timeout=5)
        names = [object() for _ in range(5)]
        for i, name in enumerate(names):
            s.submit(request(i), name)
        model.gate.set()
        s.drain(5)
    assert [len(pairs) for pairs in batches] == [1, 5]
    assert [done for done, _ in batches[1]] == names
    assert [a.outputs[0][0, 0] for _, a in batches[1]] == [0, 2, 4, 6, 8]


def test_outputs_of_a_model_with_several():
    class Two(Fake):
        def __call__(self, x, bits=None, *, threads=None, cancel=None):
            y = super().__call__(x, bits)
            return y, y + 1

    with scheduler(Two()) as s:
        outputs = s.submit(request(2.0)).result(5).outputs
    assert [y.shape for y in outputs] == [(1, 2), (1, 2)] and outputs[1][0, 0] == 17


def test_bits_and_policies():
    model = Fake()
    with scheduler(model) as s:
        assert s.policy == ("adaptive", None)
        assert s.submit(request(bits=4)).result(5).bits == 4
        s.set_policy("fixed", 2)
        assert s.policy == ("fixed", 2) and s.submit(request()).result(5).bits == 2
        assert s.submit(request(min_bits=3)).result(5).bits == 4
        s.set_policy("accuracy")
        assert s.submit(request()).result(5).bits == 8
        for bad in (("fixed", 3), ("fixed", None), ("slow", None)):
            with pytest.raises(AnyprecError):
                s.set_policy(*bad)
        assert s.policy == ("accuracy", None)
        for wish in ({"bits": 3}, {"bits": "mixed"}, {"min_bits": 32}):
            with pytest.raises(UnsupportedBits):
                s.submit(request(**wish))


@pytest.mark.parametrize(
    "x",
    [
        None,
        np.zeros((4, 4), np.float32),
        np.zeros((1, 1, 4, 4), np.float64),
        np.zeros((1, 1, 4, 4), np.int8),
        np.zeros((1, 1, 5, 4), np.float32),
        np.zeros((1, 2, 4, 4), np.float32),
        np.zeros((0, 1, 4, 4), np.float32),
        np.zeros((33, 1, 4, 4), np.float32),
    ],
)
def test_wrong_inputs_are_refused_before_they_reach_a_batch(x):
    s = scheduler()
    with pytest.raises(InputError):
        s.submit(Request(x, time.monotonic() + LONG))
    assert s.stats()["requests"]["arrived"] == 0


def test_bytes_need_a_model_that_takes_them():
    model = Fake()
    model.takes_uint8 = False
    with pytest.raises(InputError, match="float32"):
        scheduler(model).submit(Request(np.zeros((1, 1, 4, 4), np.uint8), LONG))


def test_a_failing_batch_is_told_to_its_callers_and_the_scheduler_lives_on(caplog):
    model = Fake()
    with scheduler(model) as s:
        s.set_policy("fixed", 1)
        first = held(model, s)
        bad = [s.submit(request(666.0)), s.submit(request(1.0))]  # one batch
        model.gate.set()
        assert first.result(5).bits == 1
        for future in bad:
            with pytest.raises(RuntimeError, match="does not like"):
                future.result(5)
        assert s.submit(request(5.0)).result(5).outputs[0][0, 0] == 5
        assert s.stats()["requests"]["failed"] == 2
    assert "a batch of 2 images failed" in caplog.text


def test_a_failing_callback_costs_nobody_else_their_answer(caplog):
    answers = []

    def bad(_):
        raise ZeroDivisionError

    with scheduler() as s:
        s.submit(request(), bad)
        s.submit(request(7.0), answers.append)
        assert s.drain(5)
    assert len(answers) == 1 and "a callback failed" in caplog.text


def test_delivery_that_fails_does_not_end_the_engine(caplog):
    def gone(_):
        raise RuntimeError("event loop is closed")

    s = scheduler(deliver=gone)
    s.submit(request())
    s.submit(request())
    assert s.drain(5)
    assert "could not be delivered" in caplog.text and s.stats()["requests"]["answered"] == 2


def test_cancelled_requests_cost_no_engine_time():
    model = Fake()
    with scheduler(model) as s:
        first = held(model, s)
        kept, by_future, by_request = request(2.0), s.submit(request(3.0)), request(4.0)
        futures = [s.submit(kept), s.submit(by_request)]
        assert by_future.cancel()
        assert s.cancel(by_request) and not s.cancel(by_request)
        model.gate.set()
        assert futures[0].result(5).outputs[0][0, 0] == 16
        assert first.result(5)
        assert not s.cancel(kept)
        with pytest.raises(CancelledError):
            by_future.result(5)
        assert s.stats()["requests"]["cancelled"] == 2
    assert sum(n for n, _ in model.calls) == 2 and not futures[1].done()


def test_too_much_is_refused_at_once_with_a_time_to_wait():
    model = Fake()
    with scheduler(model, limits=QueueLimits(max_queue=3)) as s:
        held(model, s)
        futures = [s.submit(request()) for _ in range(3)]
        with pytest.raises(Overloaded) as refused:
            s.submit(request())
        assert refused.value.retry_after > 0
        model.gate.set()
        assert all(f.result(5) for f in futures)
        assert s.stats()["requests"]["overloaded"] == 1


def test_a_displaced_request_is_told_so():
    model = Fake()
    with scheduler(model, limits=QueueLimits(max_queue=3)) as s:
        held(model, s)
        greedy = [s.submit(request(client="greedy")) for _ in range(3)]
        modest = s.submit(request(client="modest"))
        with pytest.raises(Overloaded) as error:
            greedy[-1].result(5)
        assert error.value.over_share
        model.gate.set()
        assert modest.result(5) and greedy[0].result(5) and greedy[1].result(5)
        assert s.stats()["requests"]["over_share"] == 1


def test_one_greedy_client_cannot_starve_the_others():
    model = Fake()
    with scheduler(model, limits=QueueLimits(max_queue=40)) as s:
        held(model, s)
        refused = []
        for i in range(400):
            try:
                s.submit(request(client="greedy"), lambda outcome: None)
            except Overloaded as error:
                refused.append(error)
            if i % 40 == 0:
                s.submit(request(client=f"modest {i % 3}"), lambda outcome: None)
        queue = s._core.queue
        assert sum(n for client, n in queue.clients.items() if client != "greedy") == 10
        assert refused
        model.gate.set()


def test_expired_requests_are_told_so():
    model = Fake()
    with scheduler(model) as s:
        held(model, s)
        soon = time.monotonic() + 0.02
        r = Request(image(), soon, expires=soon)
        s._core.table.drift = 1e-9  # so that it is let in, whatever the queue
        future = s.submit(r)
        while time.monotonic() < soon:
            time.sleep(0.005)
        model.gate.set()
        with pytest.raises(Expired):
            future.result(5)
        assert s.stats()["requests"]["expired"] == 1


def test_late_answers_are_given_while_they_may_still_be_wanted():
    model = Fake()
    with scheduler(model) as s:
        held(model, s)
        s._core.table.drift = 1e-9
        deadline = time.monotonic() + 0.02
        future = s.submit(Request(image(), deadline, expires=deadline + LONG))
        while time.monotonic() < deadline:
            time.sleep(0.005)
        model.gate.set()
        assert future.result(5).late
        assert s.stats()["attainment"] == 0.5


def test_draining_answers_what_was_accepted_and_takes_no_more():
    model = Fake(seconds=0.001)
    s = scheduler(model)
    futures = [s.submit(request(i)) for i in range(200)]
    ended = []
    thread = threading.Thread(target=lambda: ended.append(s.drain(10)))
    thread.start()
    refused = 0
    while thread.is_alive():
        try:
            futures.append(s.submit(request(len(futures))))
        except Draining:
            refused += 1
            time.sleep(0.001)
    assert ended == [True] and refused
    assert all(f.done() and not f.exception() for f in futures)
    with pytest.raises(Draining):
        s.submit(request())
    assert not any(t.name.startswith("anyprec-engine") and t in s._threads for t in threading.enumerate())


def test_draining_in_vain_tells_those_who_are_left():
    model = Fake()
    s = scheduler(model)
    first = held(model, s)
    waiting = s.submit(request())
    assert s.drain(0.05) is False
    with pytest.raises(Draining):
        waiting.result(1)
    model.gate.set()
    assert first.result(5)  # it had begun


def test_draining_without_a_single_request():
    assert scheduler().drain(1)


def test_a_new_model_takes_over_between_batches():
    old, new = Fake(name=1), Fake(name=2, widths=(1, 2), size=(None, None))
    with scheduler(old) as s:
        s.set_policy("fixed", 8)
        first = held(old, s)
        waiting, with_bits = s.submit(request(5.0)), s.submit(request(5.0, bits=8))
        s.replace_model(new, LatencyTable({p: TIMES[p] for p in ("1", "2")}))
        with pytest.raises(UnsupportedBits):
            with_bits.result(5)  # the new one has no 8 bit
        old.gate.set()
        assert first.result(5).outputs[0][0, 1] == 1  # begun on the old one
        answer = waiting.result(5)
        assert answer.outputs[0][0, 1] == 2 and answer.bits == 2
        assert s.policy == ("adaptive", None) and s.model is new
        assert s.submit(Request(image(size=6), time.monotonic() + LONG)).result(5).outputs[0][0, 1] == 2


def test_a_new_model_of_another_size_turns_away_those_who_do_not_fit():
    old, new = Fake(), Fake(size=(6, 6))
    with scheduler(old) as s:
        held(old, s)
        waiting = s.submit(request())
        s.replace_model(new)  # measured here
        with pytest.raises(InputError):
            waiting.result(5)
        old.gate.set()


@pytest.mark.thorough
@pytest.mark.parametrize("engines", [1, 3])
def test_stress_no_answer_is_lost_doubled_or_anothers(engines):
    """Thousands of requests from many threads, with cancellations, refusals, failures and new models meanwhile."""
    models = [Fake(name=i) for i in range(4)]
    s = scheduler(models[0], engine_threads=engines, limits=QueueLimits(max_queue=64, max_batch=16))
    count, threads = 400, 8
    outcomes = [[] for _ in range(count * threads)]
    state = ["?"] * (count * threads)
    gone = []

    def client(number):
        draw = random.Random(number)
        for i in range(count):
            key = number * count + i
            value = 666.0 if draw.random() < 0.01 else float(key % 500 + 1)
            bits = draw.choice([None, None, None, 1, 2, 4, 8])
            r = request(value, n=draw.choice([1, 1, 1, 2, 5]), bits=bits, client=str(number))
            try:
                s.submit(r, outcomes[key].append)
                state[key] = (value, bits, r.images)
                if draw.random() < 0.05:
                    if s.cancel(r):
                        state[key] = "cancelled"
                    else:
                        gone.append(key)  # while it ran, or later
            except Overloaded:
                state[key] = "refused"
                time.sleep(0.0005)

    workers = [threading.Thread(target=client, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        s.replace_model(random.choice(models), LatencyTable(TIMES))
        s.set_policy(*random.choice([("adaptive", None), ("fixed", 2), ("accuracy", None)]))
        s.stats()
        time.sleep(0.002)
    assert s.drain(20)
    answered = 0
    for expected, found in zip(state, outcomes, strict=True):
        if isinstance(expected, str):
            assert not found, expected
            continue
        assert len(found) == 1, "one outcome for each"
        value, bits, images = expected
        if isinstance(found[0], Answer):
            answered += 1
            used = found[0].bits
            assert bits is None or used == bits
            assert len(found[0].outputs[0]) == images
            np.testing.assert_array_equal(found[0].outputs[0][:, 0], value * used)
        else:
            assert isinstance(found[0], (RuntimeError, Overloaded))
    assert answered > 100
    counts = s.stats()["requests"]
    # Whose client left while it ran gets an answer that nobody reads, and counts as cancelled.
    assert answered - len(gone) <= counts["answered"] <= answered
    assert counts["cancelled"] - state.count("cancelled") + counts["answered"] >= answered
    assert counts["arrived"] == sum(counts[k] for k in ("answered", "overloaded", "expired", "cancelled", "failed"))


def test_futures_from_many_threads():
    with scheduler(engine_threads=2) as s:
        futures = []
        lock = threading.Lock()

        def client():
            for i in range(100):
                future = s.submit(request(i + 1.0))
                with lock:
                    futures.append((i + 1.0, future))

        workers = [threading.Thread(target=client) for _ in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wait([future for _, future in futures], 10).not_done
    for value, future in futures:
        assert future.result().outputs[0][0, 0] == value * future.result().bits


def test_stats_are_json_and_add_up():
    with scheduler() as s:
        for _ in range(5):
            s.submit(request()).result(5)
        stats = json.loads(json.dumps(s.stats()))
    assert stats["requests"]["answered"] == 5 and stats["attainment"] == 1.0
    assert stats["bits_histogram"] == {"8": 5} and stats["accuracy"] == 98.0
    assert stats["window"]["requests"] == 5 and set(stats["window"]["latency_ms"]) == {"p50", "p90", "p99"}
    assert stats["queue"] == {"requests": 0, "images": 0, "late": 0}
    assert stats["table"]["ms"]["8"]["1"] > 0


def test_measuring_latency_runs_every_width():
    model = Fake()
    table = measure_latency(model, slo=0.5, max_batch=4, seconds=0.05)
    assert set(table.levels) == {"1", "2", "4", "8"} and {bits for _, bits in model.calls} == {1, 2, 4, 8}
    s = Scheduler(model, table, slo=0.5, limits=QueueLimits(max_batch=4))
    assert s.submit(request()).result(5)
    s.drain(5)


def test_an_idle_engine_times_stale_cells():
    model = Fake()
    s = scheduler(model)
    s.submit(request()).result(5)
    before = len(model.calls)
    for _ in range(200):
        if len(model.calls) > before + 1:
            break
        time.sleep(0.02)
    assert len(model.calls) > before + 1
    assert s.drain(5)


def test_settings_that_cannot_be():
    for more in ({"slo": 0}, {"slo": -1}, {"slo": float("nan")}, {"engine_threads": 0}, {"threads_per_call": 0}):
        with pytest.raises(ServeError):
            Scheduler(Fake(), LatencyTable(TIMES), **more)
    s = scheduler(margin=0.25)
    s.margin = 0.5
    assert s.margin == s._core.margin == 0.5


def test_examples_fit_the_model():
    assert example(Fake(), None).shape == (1, 1, 4, 4) and example(Fake(), None).dtype == np.uint8
    free = Fake(size=(None, None))
    free.layout, free.takes_uint8 = "NHWC", False
    assert example(free, (7, 9)).shape == (1, 7, 9, 1) and example(free, None).dtype == np.float32
    free.made_for = (5, 6)
    assert example(free, None).shape == (1, 5, 6, 1)
    assert served_levels(Fake()).accuracies == {"1": 91.0, "2": 92.0, "4": 94.0, "8": 98.0}


def test_with_a_real_model(model_path):
    import anyprec

    model = anyprec.load(model_path)
    x = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 8), np.uint8)
    with Scheduler(model, measure_latency(model, slo=10.0, max_batch=4, seconds=0.1), slo=10.0) as s:
        s.set_policy("fixed", 2)
        futures = [s.submit(Request(x[i : i + 1], time.monotonic() + LONG)) for i in range(3)]
        found = np.concatenate([f.result(10).outputs[0] for f in futures])
    np.testing.assert_array_equal(found, model(x, bits=2))


# --- runs that stop ---


class Endless(Fake):
    """Runs until it is told to stop, as the engine does between two steps; or until `gate` is set."""

    def __call__(self, x, bits=None, *, threads=None, cancel=None):
        self.entered.release()
        end = time.monotonic() + 10
        while time.monotonic() < end and not self.gate.is_set():
            if cancel is not None and cancel.cancelled:
                raise Cancelled("the run was cancelled")
            time.sleep(0.001)
        return np.zeros((len(x), 2))


def endless(**more):
    model = Endless()
    model.gate.clear()
    return model, scheduler(model, **more)


def test_a_run_stops_when_all_its_clients_are_gone():
    model, s = endless(policy="fixed", bits=2)
    with s:
        first = s.submit(request())
        assert model.entered.acquire(timeout=5)
        pair = [request(), request()]
        futures = [s.submit(one) for one in pair]
        first.cancel()
        assert model.entered.acquire(timeout=5)  # the engine is free: the pair runs, in one batch
        assert not s.cancel(pair[0])  # it no longer waits
        time.sleep(0.05)
        assert s.stats()["running"] == 2  # the other client is still there
        s.cancel(pair[1])
        wait_until(lambda: s.stats()["running"] == 0)
        found = s.stats()
        assert found["cancelled_runs"] == 2 and found["requests"]["cancelled"] == 3
        assert found["requests"]["answered"] == found["requests"]["expired"] == 0
        model.gate.set()
        assert s.submit(request()).result(5).batch == 1
    assert all(isinstance(future.exception(5), Expired) for future in futures)


def test_a_run_stops_when_its_answer_is_of_no_use_any_more():
    """At the deadline and the grace behind it; and its width is known to be slow from then on."""
    _, s = endless(slo=0.02)
    with s:
        before = s.stats()["table"]
        for number in range(1, 6):  # one alone might be a hiccup
            with pytest.raises(Expired, match="while it ran"):
                s.submit(request(deadline=0.02, bits=4)).result(5)
            found = s.stats()
            assert found["cancelled_runs"] == found["requests"]["expired"] == number
        assert found["table"]["ms"]["4"]["1"] > before["ms"]["4"]["1"]
        strict = Request(image(), time.monotonic() + 0.02)
        strict.expires = strict.deadline
        began = time.monotonic()
        with pytest.raises(Expired):
            s.submit(strict).result(5)
        assert time.monotonic() - began < 5


def test_a_drain_that_runs_out_of_time_stops_what_runs():
    model, s = endless()
    future = s.submit(request())
    assert model.entered.acquire(timeout=5)
    assert not s.drain(0.05)
    assert isinstance(future.exception(5), Draining)


def wait_until(true, seconds=5.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_margin_follows_what_sending_takes():
    scheduler = Scheduler(
        Fake(), LatencyTable({"8": {1: 0.001}}), slo=0.1, margin=0.002, levels=served_levels(Fake(widths=(8,)))
    )
    for _ in range(64):
        scheduler.sent(0.001)
    assert scheduler.stats()["margin_ms"] == pytest.approx(2.0), "at least what was given"
    for i in range(256):
        scheduler.sent(0.010 if i % 5 else 0.001)
    assert scheduler.stats()["margin_ms"] == pytest.approx(10.0) and scheduler.margin == 0.002
    for _ in range(256):
        scheduler.sent(5.0)
    assert scheduler.stats()["margin_ms"] == pytest.approx(40.0), "never more than 0.4 of the target"
    for _ in range(256):
        scheduler.sent(0.0)
    assert scheduler.stats()["margin_ms"] == pytest.approx(2.0)
