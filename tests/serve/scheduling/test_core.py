"""The core: admission, fairness, bits per request, late requests; no clock, no threads."""

import contextlib

import numpy as np
import pytest

from anyprec.errors import Expired, Overloaded, ServeError, UnsupportedBits
from anyprec.serve.scheduling.core import ArrivalRate, SchedulerCore
from anyprec.serve.scheduling.latency import LatencyTable
from anyprec.serve.scheduling.queue import QueueLimits, Request

TIMES = {str(bits): {n: 1e-3 * ms * n for n in (1, 2, 4, 8, 16, 32)} for bits, ms in ((1, 1), (2, 2), (4, 3), (8, 4))}
ACCURACIES = {"1": 61.0, "2": 69.0, "4": 69.8, "8": 70.0}


def core(**more):
    found = SchedulerCore(ACCURACIES, LatencyTable(TIMES), **{"slo": 0.02, **more})
    found.table.tail = 1.0
    return found


def request(ms=20.0, images=1, **more):
    return Request(None, ms / 1e3, images=images, **more)


def busy(d, now=0.0, bits=8):
    """Let the engine have something to do for a while."""
    d.arrive(request(1000, bits=bits), now)
    return d.next(now)


def test_a_request_goes_in_and_comes_out():
    d = core()
    r = request()
    d.arrive(r, 0.0)
    batch = d.next(0.0)
    assert batch.requests == [r] and batch.level.bits == 8 and batch.images == 1
    assert batch.ends == pytest.approx(0.004)
    d.finish(batch, 0.004, 0.004)
    assert d.next(0.004) is None and not d.running


def test_who_cannot_be_in_time_even_at_the_lowest_width_is_refused_with_a_time_to_wait():
    d = core()
    busy(d)  # until 4 ms
    for _ in range(16):
        d.arrive(request(20), 0.0)  # 16 ms of work at 1 bit: just in time
    with pytest.raises(Overloaded, match="16 images wait") as rejected:
        d.arrive(request(20), 0.0)
    assert rejected.value.retry_after == pytest.approx(0.001) and not rejected.value.over_share
    d.arrive(request(21), 0.0)  # who has more time is let in
    with pytest.raises(Overloaded):
        d.arrive(request(21, bits=8), 0.0)  # at 8 bit it would take longer
    d.arrive(request(10), 0.0)  # more urgent, few are ahead of it


def test_an_idle_server_tries_everything():
    d = core()
    d.arrive(request(0.1), 0.0)  # the table says no, but nobody is in the way, and the table may be wrong
    assert d.next(0.0).level.bits == 1


def test_the_queue_has_an_end():
    d = core(limits=QueueLimits(max_queue=4))
    busy(d)
    for _ in range(4):
        d.arrive(request(1000), 0.0)
    with pytest.raises(Overloaded):
        d.arrive(request(1000), 0.0)


def test_a_greedy_client_gives_way():
    d = core()
    busy(d)
    greedy = [request(20, client="greedy") for _ in range(16)]
    for r in greedy:
        d.arrive(r, 0.0)
    modest = request(20, client="modest")
    d.arrive(modest, 0.0)
    ((victim, error),) = d.take_rejected()
    assert victim is greedy[-1] and error.over_share and isinstance(error, Overloaded)
    with pytest.raises(Overloaded) as rejected:
        d.arrive(request(20, client="greedy"), 0.0)
    assert rejected.value.over_share  # others wait, and it has more than its share
    assert modest.waiting and sum(r.waiting for r in greedy) == 15


def test_shares_become_equal_under_pressure():
    d = core()
    busy(d)
    for i in range(200):
        for client in ("one", "two", "two", "two", "two"):
            with contextlib.suppress(Overloaded):
                d.arrive(request(20, client=client), 0.0)
        if i % 3 == 0:
            d.arrive(request(20, client="three"), 0.0) if d.queue.clients.get("three", 0) < 2 else None
    assert d.queue.clients["three"] == 2  # asks for little, and gets it
    assert abs(d.queue.clients["one"] - d.queue.clients["two"]) <= 1


def test_nobody_gives_way_in_vain():
    d = core()
    busy(d)
    greedy = [request(20, client="greedy", images=1) for _ in range(16)]
    for r in greedy:
        d.arrive(r, 0.0)
    with pytest.raises(Overloaded):
        d.arrive(request(4.5, client="modest"), 0.0)  # the engine is not free before 4 ms: no place helps
    assert all(r.waiting for r in greedy) and not d.rejected


def test_bits_and_min_bits_of_a_request():
    d = core()
    for wish, bits in (({"bits": 2}, 2), ({"min_bits": 4}, 8), ({}, 8)):
        d.arrive(request(1000, **wish), 0.0)
        assert d.next(0.0).level.bits == bits
        d.finish(d.running[0], None, 0.0)
    d.arrive(request(2.5, min_bits=3), 0.0)  # no time for 4 bit, but less was not allowed
    assert d.next(0.0).level.bits == 4
    d.finish(d.running[0], None, 0.0)
    for wish in ({"bits": 3}, {"min_bits": 9}, {"bits": "mixed"}):
        with pytest.raises(UnsupportedBits):
            d.arrive(request(1000, **wish), 0.0)


def test_requests_of_other_widths_are_left_for_the_next_batch():
    d = core()
    requests = [request(30), request(30.1, bits=8), request(30.2), request(30.3, min_bits=2)]
    for r in requests:
        d.arrive(r, 0.0)
    d.set_policy("fixed", 1)
    first = d.next(0.0)
    assert first.level.bits == 1 and first.requests == [requests[0], requests[2]]
    d.finish(first, None, 0.0)
    second = d.next(0.0)
    assert second.level.bits == 8 and second.requests == [requests[1]]
    d.finish(second, None, 0.0)
    assert d.next(0.0).level.bits == 2  # the lowest that is allowed, where the policy's own is not


def test_mixed_bits_are_weighed_when_looking_ahead():
    d = core()
    d.arrive(request(8.5), 0.0)
    d.arrive(request(8.6, bits=8), 0.0)  # takes 4 ms whatever happens
    assert d.next(0.0).level.bits == 8  # 4 + 4 fits
    d = core()
    d.arrive(request(7.0), 0.0)
    d.arrive(request(7.1, bits=8), 0.0)
    assert d.next(0.0).level.bits == 4  # 3 + 4 fits


def test_a_width_that_a_narrower_one_beats_runs_when_asked_for():
    d = SchedulerCore({"1": 60.0, "2": 70.0, "8": 69.0}, LatencyTable({p: TIMES[p] for p in ("1", "2", "8")}), slo=0.02)
    assert [level.name for level in d.levels] == ["1", "2"]
    d.arrive(request(1000, min_bits=4), 0.0)
    assert d.next(0.0).level.bits == 8
    d.arrive(request(1000, bits=8), 0.0)


def test_policies_have_names_and_fixed_has_bits():
    d = core(policy="fixed", bits=4)
    d.arrive(request(1000), 0.0)
    assert d.next(0.0).level.bits == 4
    for bad in (("fast", None), ("fixed", None), ("adaptive", 4)):
        with pytest.raises(ServeError):
            d.set_policy(*bad)
    with pytest.raises(UnsupportedBits):
        d.set_policy("fixed", 3)
    assert (d.policy_name, d.bits) == ("fixed", 4)


def test_late_requests_run_when_nobody_else_waits_and_expire_in_the_end():
    d = core(limits=QueueLimits(grace=2.0))
    batch = busy(d)
    late = [request(4.5), request(4.6), request(4.7, expires=0.0047)]
    for r in late:
        d.queue.add(r)
        r.expires = r.expires or r.deadline + 2.0 * d.slo
    d.finish(batch, 0.0045, 0.0045)
    timely = request(100)
    d.arrive(timely, 0.0045)
    first = d.next(0.0048)
    assert first.requests == [timely]  # before those who have missed theirs
    ((gone, error),) = d.take_rejected()
    assert gone is late[2] and isinstance(error, Expired)
    d.finish(first, 0.004, 0.009)
    second = d.next(0.009)
    assert second.requests == late[:2] and second.level.bits == 1
    d.finish(second, 0.002, 0.011)
    assert d.next(0.011) is None
    d.queue.add(r := request(12, expires=0.013))
    assert d.next(0.02) is None
    assert d.take_rejected()[0][0] is r


def test_images_of_other_sizes_have_their_own_times():
    d = core(shape=(3, 8, 8))

    def of(size, ms):
        return Request(np.zeros((1, 3, size, size), np.float32), ms / 1e3)

    d.arrive(of(16, 1000), 0.0)
    batch = d.next(0.0)
    assert batch.ends == pytest.approx(0.016)  # four times the elements of 8 x 8
    for i in range(50):
        d.finish(batch, 0.032, 0.1 * i)
        d.arrive(of(16, 1e6), 0.1 * i)
        batch = d.next(0.1 * i)
    assert batch.ends - batch.began == pytest.approx(0.032, rel=0.1)
    assert d.table.typical("8", 1) == 0.004  # those of the others are as they were
    d.finish(batch, None, 5.0)
    d.arrive(of(8, 1e6), 5.0)
    d.arrive(of(16, 1e6), 5.0)
    assert [len(d.next(5.0).requests) for _ in range(2)] == [1, 1]
    for size in range(20, 120):
        d.table_for(((3, size, size), "f"))
    assert len(d.tables) <= 64


def test_times_observed_change_what_fits():
    d = core()
    now = 0.0
    for _ in range(40):
        d.arrive(Request(None, now + 1.0), now)
        batch = d.next(now)
        now += 0.008  # twice as slow as the table says
        d.finish(batch, 0.008, now)
        d.policy.idle()
    d.table.tail = 1.0
    d.arrive(Request(None, now + 0.007), now)
    assert d.next(now).level.bits == 4  # 8 bit takes 8 ms now, 4 bit 6


def test_a_failed_batch_teaches_nothing():
    d = core()
    batch = busy(d)
    d.finish(batch, None, 5.0)
    assert d.table.runs == 0 and not d.running


def test_a_new_model_keeps_the_queue():
    d = core()
    d.arrive(request(1000), 0.0)
    d.set_table({"2": 90.0}, LatencyTable({"2": {1: 0.001}}))
    assert d.next(0.0).level.name == "2"


def test_refusals_raise_the_price_of_time_unless_nothing_could_have_helped():
    d = core()
    busy(d)
    with pytest.raises(Overloaded):
        d.arrive(request(0.5), 0.0)  # half a millisecond was never enough
    d.policy.idle()
    calm = sum(d.policy.prices.values())
    for _ in range(16):
        d.arrive(request(20), 0.0)
    d.finish(d.running[0], None, 0.0)
    d.next(0.0)
    with pytest.raises(Overloaded):
        for _ in range(10):
            d.arrive(request(20), 0.0)
    d.policy.idle()
    assert calm == 0 and sum(d.policy.prices.values()) > 0


def test_the_rate_forgets():
    rate = ArrivalRate(1.0)
    assert rate.at(0.0) == 0.0
    for i in range(1000):
        rate.add(1, i * 0.01)
    assert rate.at(10.0) == pytest.approx(100, rel=0.05)
    assert rate.at(20.0) < 0.1


@pytest.mark.parametrize(("ends_ms", "sending_ms", "learns"), [(10, 0, False), (25, 0, True), (18, 4, True)])
def test_an_answer_that_is_late_or_will_be_when_it_is_sent_raises_the_price(ends_ms, sending_ms, learns):
    d = core()
    d.sending = 1e-3 * sending_ms
    d.arrive(request(20), 0.0)
    d.finish(d.next(0.0), 1e-3 * ends_ms, 1e-3 * ends_ms)
    assert d.next(1e-3 * ends_ms) is None  # the busy period is over, and learned from
    assert (sum(d.policy.prices.values()) > 0) == learns
