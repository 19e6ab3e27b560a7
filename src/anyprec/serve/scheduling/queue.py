"""Requests that wait, the most urgent first. Pure data: no clock, no lock; `now` is passed in.

Comes in: Request (from the scheduler or the simulator). Goes out: the requests of one batch, which share a shape, a
type and a width; requests that nobody can answer in time any more; and, where the queue is full, the one to give up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Kind = Any  # what must be equal for requests to share a batch: shape and dtype of one image


@dataclass(frozen=True)
class QueueLimits:
    max_batch: int = 32  # images a batch, and a request
    max_queue: int = 1024  # images that wait
    grace: float = 4.0  # a late answer is still given until the deadline + grace * SLO, when nobody else waits


@dataclass(eq=False, slots=True)
class Request:
    """Some images to be answered together. Times are seconds of the scheduler's clock."""

    x: np.ndarray | None  # (n, ...) uint8 or float32; None in the simulator
    deadline: float  # absolute
    bits: int | str | None = None  # this width (or profile) and no other
    min_bits: int = 1
    client: str = ""
    arrived: float = 0.0
    expires: float | None = None  # absolute; None: the scheduler's grace applies; = deadline: late answers are no use
    images: int = 0  # as many as x has, where it is given
    kind: Kind = None
    done: Callable[[Any], None] | None = field(default=None, repr=False)  # set by the scheduler
    waiting: bool = field(default=False, repr=False)  # in a queue now

    def __post_init__(self) -> None:
        if self.x is not None:
            self.images = len(self.x)
            self.kind = (self.x.shape[1:], self.x.dtype.char)
        elif not self.images:
            self.images = 1


class Allowed(Protocol):
    """Whether a request may run at the width of a batch."""

    def __call__(self, request: Request) -> bool: ...


class Queue:
    """Sorted by deadline; among equal ones, first come first served. `late` holds those that missed it, in order."""

    def __init__(self) -> None:
        self.deadlines: list[float] = []  # beside `waiting`, index by index: plain floats for the policy's loops
        self.waiting: list[Request] = []
        self.late: list[Request] = []
        self.images = 0  # in `waiting`
        self.special = 0  # requests in `waiting` that name bits or min_bits
        self.kinds: dict[Kind, int] = {}  # requests in `waiting` of each shape and type
        self.clients: dict[str, int] = {}  # images in `waiting` of each client

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.waiting)

    @property
    def uniform(self) -> bool:
        """Every request is one image, of one shape, at any width: nothing to be told apart but deadlines."""
        return self.images == len(self.waiting) and not self.special and len(self.kinds) <= 1

    def add(self, request: Request) -> None:
        deadline = request.deadline
        if not self.deadlines or deadline >= self.deadlines[-1]:
            self.deadlines.append(deadline)
            self.waiting.append(request)
        else:
            place = bisect_right(self.deadlines, deadline)
            self.deadlines.insert(place, deadline)
            self.waiting.insert(place, request)
        request.waiting = True
        self.images += request.images
        self.special += is_special(request)
        self.kinds[request.kind] = self.kinds.get(request.kind, 0) + 1
        self.clients[request.client] = self.clients.get(request.client, 0) + request.images

    def remove(self, request: Request) -> bool:
        """Take one out, wherever it stands; False where it does not wait (any more)."""
        if not request.waiting:
            return False
        place = bisect_left(self.deadlines, request.deadline)
        while place < len(self.waiting) and self.deadlines[place] == request.deadline:
            if self.waiting[place] is request:
                self._forget([place])
                return True
            place += 1
        for place, other in enumerate(self.late):
            if other is request:
                del self.late[place]
                request.waiting = False
                return True
        raise AssertionError("a request that waits is in neither list")

    def take(self, images: int, allowed: Allowed | None = None) -> list[Request]:
        """The most urgent request, and those behind it that share its shape and may run with it, up to `images`."""
        if self.uniform:
            places: Iterable[int] = range(min(images, len(self.waiting)))
        else:
            places = self._places(images, allowed)
        return self._forget(places)

    def _places(self, images: int, allowed: Allowed | None) -> list[int]:
        places, kind = [0], self.waiting[0].kind
        room = images - self.waiting[0].images
        for place in range(1, len(self.waiting)):
            if room <= 0:
                break
            request = self.waiting[place]
            if request.kind == kind and request.images <= room and (allowed is None or allowed(request)):
                places.append(place)
                room -= request.images
        return places

    def _forget(self, places: Iterable[int]) -> list[Request]:
        places = list(places)
        taken = [self.waiting[place] for place in places]
        if places == list(range(len(places))):
            del self.waiting[: len(places)]
            del self.deadlines[: len(places)]
        else:
            for place in reversed(places):
                del self.waiting[place]
                del self.deadlines[place]
        for request in taken:
            request.waiting = False
            self.images -= request.images
            self.special -= is_special(request)
            count_down(self.kinds, request.kind, 1)
            count_down(self.clients, request.client, request.images)
        return taken

    def put_late(self, hopeless: Callable[[Request], bool]) -> int:
        """Move requests from the front to `late` as long as they are hopeless; how many."""
        moved = 0
        while self.waiting and hopeless(self.waiting[0]):
            (request,) = self._forget([0])
            request.waiting = True
            self.late.append(request)
            moved += 1
        return moved

    def take_late(self, images: int, allowed: Allowed | None = None) -> list[Request]:
        taken: list[Request] = []
        left: list[Request] = []
        room = images
        for request in self.late:
            fits = not taken or (request.kind == taken[0].kind and (allowed is None or allowed(request)))
            if fits and (not taken or request.images <= room):
                taken.append(request)
                room -= request.images
                request.waiting = False
            else:
                left.append(request)
        self.late = left
        return taken

    def drop_expired(self, now: float) -> list[Request]:
        """Late requests that nobody wants any more."""
        if not self.late:
            return []
        dropped = [request for request in self.late if expiry(request) <= now]
        if dropped:
            self.late = [request for request in self.late if expiry(request) > now]
            for request in dropped:
                request.waiting = False
        return dropped

    def greediest(self, client: str, images: int) -> Request | None:
        """The last request of the client with the most images, if it has more than `client` would with these added."""
        if not self.clients:
            return None
        greedy = max(self.clients, key=self.clients.__getitem__)
        if greedy == client or self.clients[greedy] <= self.clients.get(client, 0) + images:
            return None
        return next(request for request in reversed(self.waiting) if request.client == greedy)


def is_special(request: Request) -> bool:
    return request.bits is not None or request.min_bits > 1


def expiry(request: Request) -> float:
    return request.deadline if request.expires is None else request.expires


def count_down(counts: dict[Any, int], key: Any, by: int) -> None:
    counts[key] -= by
    if not counts[key]:
        del counts[key]
