"""The queue: earliest deadline first, batches of one shape, late requests aside, nobody lost or doubled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyprec.serve.scheduling.queue import Queue, Request


def request(deadline=1.0, images=1, **more):
    return Request(None, deadline, images=images, **more)


def test_the_most_urgent_comes_first_and_equals_in_order_of_arrival():
    queue = Queue()
    late, first, second, early = request(3.0), request(2.0), request(2.0), request(1.0)
    for r in (late, first, second, early):
        queue.add(r)
    assert queue.take(3) == [early, first, second]
    assert queue.take(3) == [late]
    assert not queue.waiting and not queue.images and not queue.clients


def test_shapes_and_types_are_never_mixed():
    queue = Queue()
    small = [Request(np.zeros((1, 3, 8, 8), np.float32), 1.0 + i) for i in range(3)]
    large = Request(np.zeros((1, 3, 16, 16), np.float32), 1.5)
    byte = Request(np.zeros((1, 3, 8, 8), np.uint8), 1.7)
    for r in (*small, large, byte):
        queue.add(r)
    assert queue.take(8) == small
    assert queue.take(8) == [large]
    assert queue.take(8) == [byte]


def test_a_batch_holds_at_most_so_many_images_but_always_one_request():
    queue = Queue()
    requests = [request(1.0, 4), request(2.0, 3), request(3.0, 1), request(4.0, 1)]
    for r in requests:
        queue.add(r)
    assert queue.take(6) == [requests[0], requests[2], requests[3]]  # three more would not fit, one and one do
    assert queue.take(1) == [requests[1]]


def test_those_who_may_not_run_at_a_width_stay():
    queue = Queue()
    requests = [request(1.0), request(2.0, bits=8), request(3.0)]
    for r in requests:
        queue.add(r)
    assert queue.take(4, lambda r: r.bits is None) == [requests[0], requests[2]]
    assert list(queue) == [requests[1]]


def test_cancelling():
    queue = Queue()
    requests = [request(1.0) for _ in range(4)]
    for r in requests:
        queue.add(r)
    assert queue.remove(requests[2])
    assert not queue.remove(requests[2])
    queue.put_late(lambda r: r is requests[0])
    assert queue.late == [requests[0]]
    assert queue.remove(requests[0]) and not queue.late
    assert queue.take(8) == [requests[1], requests[3]]
    assert not queue.remove(requests[1])


def test_late_requests_wait_apart_until_they_expire():
    queue = Queue()
    requests = [request(1.0, expires=1.5), request(1.1, expires=5.0), request(9.0)]
    for r in requests:
        queue.add(r)
    assert queue.put_late(lambda r: r.deadline < 2) == 2
    assert queue.drop_expired(1.4) == []
    assert queue.drop_expired(1.6) == [requests[0]]
    assert queue.take_late(4) == [requests[1]]
    assert list(queue) == [requests[2]]


def test_the_greediest_client_gives_up_its_last():
    queue = Queue()
    greedy = [request(1.0 + i, client="greedy") for i in range(5)]
    for r in greedy:
        queue.add(r)
    assert queue.greediest("modest", 1) is greedy[-1]
    queue.add(request(1.0, client="modest"))
    assert queue.greediest("modest", 3) is greedy[-1]
    assert queue.greediest("modest", 4) is None  # then it would be no better
    assert Queue().greediest("modest", 1) is None
    assert queue.greediest("greedy", 1) is None


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "take", "late", "remove", "drop"]), st.integers(1, 5), st.sampled_from("abc"))
    )
)
def test_counts_agree_with_what_is_there(steps):
    queue, seen, number = Queue(), [], 0.0
    alive = []
    for what, n, client in steps:
        number += 1.0
        if what == "add":
            r = request(number * n % 7, images=n, client=client, bits=8 if n == 5 else None, expires=number + 3)
            queue.add(r)
            alive.append(r)
        elif what == "take" and queue.waiting:
            seen += queue.take(n)
        elif what == "late":
            queue.put_late(lambda r, n=n: r.deadline < n)
        elif what == "remove" and alive:
            r = alive[n % len(alive)]
            if queue.remove(r):
                seen.append(r)
        elif what == "drop":
            seen += queue.drop_expired(number)
        assert queue.deadlines == [r.deadline for r in queue.waiting] == sorted(queue.deadlines)
        assert queue.images == sum(r.images for r in queue.waiting)
        assert queue.special == sum(r.bits is not None for r in queue.waiting)
        assert sum(queue.clients.values()) == queue.images
        assert sum(queue.kinds.values()) == len(queue.waiting)
    left = [*seen, *queue.waiting, *queue.late]
    assert len(left) == len(set(map(id, left))) == len(alive)
    assert all(r.waiting for r in (*queue.waiting, *queue.late)) and not any(r.waiting for r in seen)


def test_a_request_knows_its_images_and_kind():
    r = Request(np.zeros((3, 4, 4, 1), np.uint8), 1.0)
    assert r.images == 3 and r.kind == ((4, 4, 1), "B")
    with pytest.raises(TypeError):
        Request(np.zeros((3, 4, 4, 1), np.uint8))
