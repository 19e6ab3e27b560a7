"""Policies on small queues with round numbers: which width, which batch, and what prices learn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyprec.errors import ServeError
from anyprec.serve.scheduling.latency import LatencyTable
from anyprec.serve.scheduling.policy import (
    CHECKS,
    AccuracyFirst,
    Adaptive,
    Fixed,
    Level,
    PolicyInput,
    largest_batch,
    pareto_front,
    possible_batches,
    uniform_fits,
    weighted_fits,
)
from anyprec.serve.scheduling.queue import Queue, Request

ACCURACIES = {"8": 70.0, "4": 69.8, "2": 69.0, "1": 61.0}


def table(fixed=0.0, **each):
    """Milliseconds an image, and for each batch besides."""
    each = each or {"b8": 4.0, "b4": 3.0, "b2": 2.0, "b1": 1.0}
    times = {p[1:]: {n: 1e-3 * (fixed + ms * n) for n in (1, 2, 4, 8, 32)} for p, ms in each.items()}
    found = LatencyTable(times)
    found.tail = 1.0  # round numbers
    return found


def front(accuracies, of):
    return pareto_front(of.levels, accuracies, of)


def levels(of=None):
    return front(ACCURACIES, of or table())


def state(deadlines_ms, of=None, **more):
    queue = Queue()
    for ms in deadlines_ms:
        queue.add(Request(None, ms / 1e3))
    return PolicyInput(0.0, queue, of or table(), **more)


def chosen(policy, s):
    choice = policy.choose(s, levels(s.table))
    return choice.level.name, choice.images


def test_alone_a_request_gets_all_the_bits_its_deadline_has_room_for():
    for slack, profile in ((100, "8"), (4.1, "8"), (3.9, "4"), (2.9, "2"), (1.9, "1")):
        assert chosen(Adaptive(), state([slack])) == (profile, 1)


def test_the_queue_behind_the_first_counts_too():
    assert chosen(Adaptive(), state([8.1, 8.1])) == ("8", 1)
    assert chosen(Adaptive(), state([7.9, 7.9])) == ("4", 1)
    assert chosen(Adaptive(), state([7.9, 8.1])) == ("8", 1)  # the second may end at 8
    assert chosen(Adaptive(), state([4.5] + [43.0] * 10)) == ("4", 1)  # 11 of 4 ms would end at 44


def test_when_it_is_too_much_for_all_the_lowest_width_takes_as_many_as_it_can():
    assert chosen(Adaptive(), state([5.5] * 10)) == ("1", 5)
    assert chosen(Adaptive(), state([0.5] * 10)) == ("1", 1)  # hopeless, but something must run


def test_batches_are_formed_where_they_save_the_deadlines():
    saves = table(fixed=2.0, b8=1.0)
    assert chosen(Adaptive(), state([100.0] * 4, saves)) == ("8", 1)  # no hurry: small batches, new decisions
    assert chosen(Adaptive(), state([6.5] * 4, saves)) == ("8", 4)  # one by one: 12 ms; two by two: 8; at once: 6
    assert chosen(Adaptive(), state([8.5] * 4, saves)) == ("8", 2)


def test_margin_and_engines():
    assert chosen(Adaptive(), state([4.5], margin=0.001)) == ("4", 1)
    assert chosen(Adaptive(), state([4.1, 4.1])) == ("2", 1)
    assert chosen(Adaptive(), state([4.1, 4.1], engines=2)) == ("8", 1)


def test_fixed_and_accuracy_first():
    only = [level for level in levels() if level.name == "4"]
    choice = Fixed().choose(state([7.0] * 5), only)
    assert (choice.level.name, choice.images) == ("4", 2)
    assert chosen(AccuracyFirst(), state([8.5] * 5)) == ("8", 2)  # does not look behind the first
    assert chosen(AccuracyFirst(), state([2.5] * 5)) == ("2", 1)
    assert chosen(AccuracyFirst(), state([0.5] * 5)) == ("1", 1)


@pytest.mark.thorough
def test_prices_make_a_burst_cheaper_before_it_is_there():
    policy = Adaptive()
    assert chosen(policy, state([100.0])) == ("8", 1)
    for _ in range(2000):  # again and again a single request is followed by five at once
        policy.choose(state([10.0]), levels())
        policy.choose(state([6.0] * 5), levels())
        policy.idle()
    # They had to run at 1 bit, where a millisecond more buys the 8 points of 2 bit. Half of that is believed.
    assert policy.prices[1, 0] == pytest.approx(8000, rel=0.01)
    assert chosen(policy, state([100.0])) == ("2", 1)  # 69 - 2 * 4 is more than 70 - 4 * 4
    for _ in range(4000):  # and when that has long been over, the bits come back
        policy.choose(state([10.0]), levels())
        policy.idle()
    assert chosen(policy, state([100.0])) == ("8", 1)


@pytest.mark.thorough
def test_every_rate_has_its_own_prices():
    policy = Adaptive()
    for _ in range(2000):
        policy.choose(state([10.0], rate=100), levels())
        policy.choose(state([6.0] * 5, rate=100), levels())
        policy.idle()
    assert chosen(policy, state([100.0], rate=100)) == ("2", 1)
    assert chosen(policy, state([100.0], rate=400)) == ("2", 1)  # never met: no cheaper than at 100
    assert chosen(policy, state([100.0], rate=10)) == ("8", 1)  # the load has fallen: the bits are back at once


def test_only_what_comes_later_in_the_same_busy_period_raises_a_price():
    policy = Adaptive()
    policy.choose(state([6.0] * 10), levels())
    policy.choose(state([100.0]), levels())
    policy.idle()
    assert policy.prices[8, 0] > 0 and policy.prices[1, 0] == 0


def test_a_miss_is_the_dearest_of_all():
    calm, missed = Adaptive(), Adaptive()
    for policy in (calm, missed):
        policy.choose(state([3.5]), levels())
    missed.missed()
    for policy in (calm, missed):
        policy.idle()
    assert missed.prices[1, 0] > calm.prices[1, 0] > 0
    missed.missed()  # with nothing decided yet there is nothing to learn
    missed.idle()


def test_a_busy_period_without_end_is_judged_all_the_same():
    policy = Adaptive()
    for _ in range(1000):
        policy.choose(state([6.0] * 10), levels())
    assert policy.prices[8, 0] > 0


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.1, 60), min_size=1, max_size=40),
    st.floats(0, 3),
    st.integers(1, 3),
    st.dictionaries(st.integers(1, 8), st.floats(0, 1e5)),
)
def test_whatever_is_chosen_keeps_every_deadline_if_that_can_be(deadlines, fixed, engines, prices):
    of = table(fixed=fixed, b8=4.0, b4=3.0, b2=2.0, b1=1.0)
    policy, s = Adaptive(), state(deadlines, of, engines=engines)
    policy.prices = {(crowd, 0): price for crowd, price in prices.items()}
    choice = policy.choose(s, levels(of))
    assert 1 <= choice.images <= len(deadlines)
    possible = [(level, possible_batches(s, level, larger=True)) for level in levels(of)]
    if any(batches for _, batches in possible):
        each = of.typical(choice.level.name, choice.images)
        assert uniform_fits(s, choice.images, each, each)
    else:
        assert choice.level == levels(of)[0]


@given(st.lists(st.floats(0.1, 500), min_size=1, max_size=400), st.integers(1, 8), st.integers(1, 3))
def test_a_long_queue_is_judged_by_some_of_its_deadlines_never_too_kindly(deadlines, images, engines):
    s = state(deadlines, engines=engines)
    each = 0.001 * images

    def exactly():
        end = each
        for at in range(0, len(deadlines), images * engines):
            if end > s.queue.deadlines[at]:
                return False
            end += each
        return True

    if uniform_fits(s, images, each, each):
        assert exactly()
    elif len(deadlines) < CHECKS:
        assert not exactly()


def test_requests_of_other_sizes_weigh_more():
    s = state([10.0, 10.0])
    assert weighted_fits(s, [1.0, 1.0], 1, 0.004, 0.004)
    assert not weighted_fits(s, [1.0, 2.0], 1, 0.004, 0.004)
    assert weighted_fits(s, [1.0, 2.0], 3, 0.004, 0.004)


def test_largest_holds_the_first_request_whole():
    s = state([3.5])
    s.queue.waiting[0].images = s.queue.images = 5
    assert largest_batch(s, Level("1", 61.0)) == 5


def test_levels_are_those_that_no_other_beats():
    assert [level.name for level in levels()] == ["1", "2", "4", "8"]
    same_kernel = table(b8=4.0, b7=4.01, b4=3.0, b3=3.02, b1=1.0)
    accuracies = {"8": 94.0, "7": 94.0, "4": 93.9, "3": 93.5, "1": 92.0}
    assert [level.name for level in front(accuracies, same_kernel)] == ["1", "4", "8"]
    best_at_two = {"8": 93.8, "4": 93.95, "2": 93.97, "1": 92.15}  # as on CIFAR-10 in the paper
    assert [level.name for level in front(best_at_two, table())] == ["1", "2"]


def test_without_accuracies_the_width_stands_for_them_and_float_is_left_out():
    times = {p: {1: ms} for p, ms in {"1": 1.0, "8": 3.0, "32": 9.0, "mixed": 2.0}.items()}
    found = front({}, LatencyTable(times))
    assert [level.name for level in found] == ["1", "8"]
    assert found[0].accuracy == 75.0 and found[0].bits == 1
    found = front({"mixed": 99.0}, LatencyTable(times))
    assert [level.bits for level in found] == [1, "mixed", 8]
    with pytest.raises(ServeError, match="needs a width of 1"):
        front({}, LatencyTable({"32": {1: 1.0}}))
