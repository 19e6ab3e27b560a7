"""The queue: requests sorted by deadline. No clock and no lock; `now` is passed in. Used by core.py.

In: Request. Out: the requests of one batch, which share shape, type and width; requests that can no longer be answered
in time; and, where the queue is full, the request to drop.
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
    max_batch: int = 32  # images per batch, and per request
    max_queue: int = 1024  # queued images
    grace: float = 4.0  # a late request is still run until deadline + grace * SLO, when no other is queued


@dataclass(eq=False, slots=True)
class Request:
    """One or more images to be answered together. Times are seconds of the scheduler's clock."""

    x: np.ndarray | None  # (n, ...) uint8 or float32; None in the simulator
    deadline: float  # absolute
    bits: int | str | None = None  # only this level
    min_bits: int = 1
    client: str = ""
    arrived: float = 0.0
    expires: float | None = None  # absolute; None: deadline + grace; = deadline: drop it once late
    images: int = 0  # number of images; taken from x where it is given
    kind: Kind = None
    done: Callable[[Any], None] | None = field(default=None, repr=False)  # set by the scheduler
    waiting: bool = field(default=False, repr=False)  # in a queue now

    def __post_init__(self) -> None:
        if self.x is not None:
            self.images = len(self.x)
            self.kind = (self.x.shape[1:], self.x.dtype.char)
        elif not self.images:
            self.images = 1


class RequestFilter(Protocol):
    """Whether a request may run at the width of a batch."""

    def __call__(self, request: Request) -> bool: ...


class Queue:
    """Sorted by deadline, then by arrival. `late` holds the requests that can no longer meet theirs, in order."""

    def __init__(self) -> None:
        self.deadlines: list[float] = []  # of `waiting`, index by index: plain floats for the policy's loops
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
        """Every request is one image of one shape at any width: they differ only in their deadlines."""
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
        self.special += restricts_bits(request)
        self.kinds[request.kind] = self.kinds.get(request.kind, 0) + 1
        self.clients[request.client] = self.clients.get(request.client, 0) + request.images

    def remove(self, request: Request) -> bool:
        """Remove a request; False if it is not queued."""
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

    def take(self, images: int, allowed: RequestFilter | None = None) -> list[Request]:
        """Remove and return the most urgent request and, up to `images`, others that may share its batch."""
        if self.uniform:
            places: Iterable[int] = range(min(images, len(self.waiting)))
        else:
            places = self._places(images, allowed)
        return self._forget(places)

    def _places(self, images: int, allowed: RequestFilter | None) -> list[int]:
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
            self.special -= restricts_bits(request)
            decrement(self.kinds, request.kind, 1)
            decrement(self.clients, request.client, request.images)
        return taken

    def put_late(self, hopeless: Callable[[Request], bool]) -> int:
        """Move hopeless requests from the front to `late`; returns how many."""
        moved = 0
        while self.waiting and hopeless(self.waiting[0]):
            (request,) = self._forget([0])
            request.waiting = True
            self.late.append(request)
            moved += 1
        return moved

    def take_late(self, images: int, allowed: RequestFilter | None = None) -> list[Request]:
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
        """Remove and return the late requests that have expired."""
        if not self.late:
            return []
        dropped = [request for request in self.late if expiry(request) <= now]
        if dropped:
            self.late = [request for request in self.late if expiry(request) > now]
            for request in dropped:
                request.waiting = False
        return dropped

    def greediest(self, client: str, images: int) -> Request | None:
        """The last request of the client with most queued images, if that is more than `client` would then have."""
        if not self.clients:
            return None
        greedy = max(self.clients, key=self.clients.__getitem__)
        if greedy == client or self.clients[greedy] <= self.clients.get(client, 0) + images:
            return None
        return next(request for request in reversed(self.waiting) if request.client == greedy)


def restricts_bits(request: Request) -> bool:
    return request.bits is not None or request.min_bits > 1


def expiry(request: Request) -> float:
    return request.deadline if request.expires is None else request.expires


def decrement(counts: dict[Any, int], key: Any, by: int) -> None:
    counts[key] -= by
    if not counts[key]:
        del counts[key]
