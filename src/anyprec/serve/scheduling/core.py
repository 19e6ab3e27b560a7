"""SchedulerCore: queue, latency table and policy together, without a clock or a thread.

    core.arrive(request, now)           queues the request, or raises Overloaded or UnsupportedBits
    batch = core.next(now)              the next batch to run, or None
    core.finish(batch, seconds, now)    the batch has run
    core.take_rejected()                queued requests dropped since the last call, each with its error

Called by Scheduler (real time, engine threads) and by the simulator (virtual time).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from anyprec.errors import Expired, Overloaded, ServeError, UnsupportedBits
from anyprec.serve.scheduling.latency import LatencyTable
from anyprec.serve.scheduling.policy import (
    POLICIES,
    AccuracyFirst,
    Adaptive,
    Fixed,
    Level,
    Policy,
    PolicyInput,
    pareto_front,
)
from anyprec.serve.scheduling.queue import Kind, Queue, QueueLimits, Request, expiry

RATE_WINDOW = 0.5  # seconds over which the arrival rate is averaged; 50 times the SLO where that is longer
MOST_SHAPES = 64  # image sizes with a latency table of their own
MOST_WEIGHED = 128  # requests a policy looks at where they differ in size or bits
REVIEW_S = 5.0  # between two updates of the levels, as measured times change
LATE_SHARE = 0.25  # longest batch of already-late requests, as a fraction of the SLO

Rejection = tuple[Request, Exception]


@dataclass(eq=False)
class Batch:
    """One batch: its requests and level, when it began and when it should end."""

    requests: list[Request]
    level: Level
    images: int
    began: float
    ends: float
    table: LatencyTable  # that its time updates, even if the model was replaced meanwhile
    gone: set[Request] = field(default_factory=set)  # requests whose clients went away while it ran

    @property
    def expires(self) -> float:
        """When the last of its requests expires."""
        return max(expiry(request) for request in self.requests)


class ArrivalRate:
    """Images a second, as an exponentially weighted average."""

    def __init__(self, window: float) -> None:
        self.window = window
        self._sum = 0.0
        self._at = -math.inf

    def add(self, images: int, now: float) -> None:
        self._sum = self._sum * math.exp(min(0.0, (self._at - now) / self.window)) + images
        self._at = now

    def at(self, now: float) -> float:
        return self._sum * math.exp(min(0.0, (self._at - now) / self.window)) / self.window


class SchedulerCore:
    """The requests and running batches of one model. Not thread-safe.

    accuracies: by level, in percent; None where the model file has none.
    levels: names of those that may run; None: all of the table.
    margin: seconds kept back from every deadline, for sending the answer.
    shape: of one image that the table was measured with.
    """

    def __init__(
        self,
        accuracies: Mapping[str, float | None],
        table: LatencyTable,
        *,
        policy: str = "adaptive",
        bits: int | str | None = None,
        slo: float = 0.05,
        limits: QueueLimits | None = None,
        margin: float = 0.0,
        engines: int = 1,
        shape: tuple[int, ...] | None = None,
        levels: Sequence[str] | None = None,
    ) -> None:
        self.slo = slo
        self.limits = limits or QueueLimits()
        self.margin = margin
        self.sending = 0.0  # seconds that an answer takes from its run's end, as a rule; part of the margin
        self.engines = engines
        self.queue = Queue()
        self.running: list[Batch] = []
        self.rejected: list[Rejection] = []
        self.rate = ArrivalRate(max(RATE_WINDOW, 50 * slo))
        self.set_table(accuracies, table, shape, levels)
        self.set_policy(policy, bits)

    # --- What may run ---------------------------------------------------------------------------------------------

    def set_table(
        self,
        accuracies: Mapping[str, float | None],
        table: LatencyTable,
        shape: tuple[int, ...] | None = None,
        levels: Sequence[str] | None = None,
    ) -> None:
        """Use another model. Queued requests stay; the caller removes those that the new model cannot run."""
        self.accuracies, self.table, self.shape = dict(accuracies), table, shape
        self.names = table.levels if levels is None else tuple(levels)
        self._reviewed = -math.inf
        self.tables: dict[tuple[int, ...], LatencyTable] = {}  # for images of other sizes
        self.levels = pareto_front(self.names, accuracies, table)  # that policies choose among
        self.all_levels = {level.name: level for level in self.levels}
        for name in self.names:
            accuracy = accuracies.get(name)
            self.all_levels.setdefault(name, Level(name, math.nan if accuracy is None else accuracy))

    def set_policy(self, policy: str, bits: int | str | None = None) -> None:
        if policy not in POLICIES:
            raise ServeError(f"policy={policy!r} is not known; choose one of {', '.join(POLICIES)}")
        if (policy == "fixed") != (bits is not None):
            raise ServeError(f"policy={policy!r} with bits={bits!r}; 'fixed' needs bits, the others take none")
        if bits is not None:
            self.find_level(bits)
        self.policy_name, self.bits = policy, bits
        self.policy: Policy = {"adaptive": Adaptive, "accuracy": AccuracyFirst, "fixed": Fixed}[policy]()

    def find_level(self, bits: int | str) -> Level:
        level = self.all_levels.get(str(bits))
        if level is None:
            known = sorted(self.all_levels, key=lambda name: (not name.isdigit(), len(name), name))
            raise UnsupportedBits(f"bits={bits!r} is not served; choose one of {', '.join(known)}")
        return level

    def allowed(self, request: Request) -> Sequence[Level]:
        """Levels this request may run at, least accurate first; raises UnsupportedBits where there is none."""
        if request.bits is not None:
            return (self.find_level(request.bits),)
        least = request.min_bits
        if self.bits is not None:
            level = self.find_level(self.bits)
            if least <= 1 or width(level) >= least:
                return (level,)
        elif least <= 1:
            return self.levels
        levels = [level for level in self.levels if width(level) >= least]
        if not levels:  # only float, or widths slower and less accurate than a narrower one
            wide = [level for level in self.all_levels.values() if width(level) >= least]
            if not wide:
                raise UnsupportedBits(
                    f"min_bits={least} is more than is served; there are {', '.join(self.all_levels)}"
                )
            levels = [min(wide, key=lambda level: self.table.typical(level.name, 1))]
        return levels if self.bits is None else levels[:1]

    def table_for(self, kind: Kind) -> LatencyTable:
        """The latency table for images of this shape; for a new shape, estimated from its number of elements."""
        if kind is None or self.shape is None or kind[0] == self.shape:
            return self.table
        table = self.tables.get(kind[0])
        if table is None:
            if len(self.tables) >= MOST_SHAPES:
                del self.tables[next(iter(self.tables))]
            table = self.tables[kind[0]] = self.table.scaled(math.prod(kind[0]) / math.prod(self.shape))
        return table

    # --- Requests in ----------------------------------------------------------------------------------------------

    def arrive(self, request: Request, now: float) -> None:
        """Queue a request. Raises Overloaded or UnsupportedBits; requests it displaces are added to `rejected`."""
        level = self.allowed(request)[0]
        self.rate.add(request.images, now)
        if request.expires is None:
            request.expires = request.deadline + self.limits.grace * self.slo
        victims: list[Request] = []
        while (late := self.lateness(request, level, now)) > 0:
            victim = self.queue.greediest(request.client, request.images)
            if victim is None:
                for other in victims:  # dropping them was not enough
                    self.queue.add(other)
                self._refuse(request, level, late, now)
            self.queue.remove(victim)
            victims.append(victim)
        self.rejected += [(victim, over_share(self.slo)) for victim in victims]
        self.queue.add(request)

    def _refuse(self, request: Request, level: Level, late: float, now: float) -> NoReturn:
        alone = self.table_for(request.kind).typical(level.name, request.images)
        if now + alone <= request.deadline:  # otherwise no policy could have met it, so there is nothing to learn
            self.policy.missed()
        clients = self.queue.clients
        share = self.queue.images / max(1, len(clients))
        raise Overloaded(
            f"{self.queue.images} images wait: this request would miss its deadline by {1e3 * late:.1f} ms even at "
            f"{level.name}; try again later, or allow more time",
            retry_after=late,
            over_share=len(clients) > 1 and clients.get(request.client, 0) > share,
        )

    def lateness(self, request: Request, level: Level, now: float) -> float:
        """Seconds by which a request would miss its deadline at its lowest level, after all more urgent requests.

        Also positive where the queue is full. An idle server accepts every request, since its table may be wrong.
        """
        queue = self.queue
        if queue.images + request.images > self.limits.max_queue:
            return max(self.share(queue.waiting) / self.engines, 1e-3)
        start = now
        if len(self.running) >= self.engines:
            start = max(now, min(batch.ends for batch in self.running))
        elif not queue.waiting:
            return 0.0
        ahead = bisect_right(queue.deadlines, request.deadline)
        if queue.uniform:
            wait = self.drain(self.table_for(request.kind), self.lowest(queue.waiting[0]), ahead) if ahead else 0.0
        else:
            wait = self.share(queue.waiting[:ahead])
        own = self.table_for(request.kind).typical(level.name, request.images)
        return start + wait / self.engines + own - request.deadline

    def lowest(self, request: Request) -> Level:
        return self.allowed(request)[0]

    def share(self, requests: Sequence[Request]) -> float:
        """Engine seconds for these requests at their lowest levels, in full batches."""
        most = self.limits.max_batch
        each: dict[tuple[object, ...], float] = {}  # seconds per image, by bits and shape
        total = 0.0
        for request in requests:
            key = (request.bits, request.min_bits, request.kind)
            if key not in each:
                each[key] = self.table_for(request.kind).typical(self.lowest(request).name, most) / most
            total += each[key] * request.images
        return total

    def drain(self, table: LatencyTable, level: Level, images: int) -> float:
        """Engine seconds for this many images at this level, in the largest batches allowed."""
        most = self.limits.max_batch
        whole, rest = divmod(images, most)
        return whole * table.typical(level.name, most) + (table.typical(level.name, rest) if rest else 0.0)

    # --- Batches out ----------------------------------------------------------------------------------------------

    def next(self, now: float) -> Batch | None:
        queue = self.queue
        if queue.waiting and queue.put_late(self.is_hopeless(now)):
            self.policy.missed()
        if queue.late:
            for request in queue.drop_expired(now):
                self.rejected.append((request, Expired("its deadline passed while it waited")))
        if not queue.waiting:
            self.policy.idle()
        if queue.waiting:
            head = queue.waiting[0]
            state = PolicyInput(
                now=now,
                queue=queue,
                table=self.table_for(head.kind),
                rate=self.rate.at(now),
                margin=self.margin,
                engines=self.engines,
                max_batch=self.limits.max_batch,
                weights=self.weigh,
            )
            choice = self.policy.choose(state, self.allowed(head))
            level = choice.level
            requests = queue.take(choice.images, lambda request: level in self.allowed(request))
        elif queue.late:
            level = self.lowest(queue.late[0])
            table = self.table_for(queue.late[0].kind)
            images = self.limits.max_batch
            while images > 1 and table.typical(level.name, images) > LATE_SHARE * self.slo:
                images -= 1
            requests = queue.take_late(images, lambda request: level in self.allowed(request))
        else:
            return None
        images = sum(request.images for request in requests)
        table = self.table_for(requests[0].kind)
        batch = Batch(requests, level, images, now, now + table.typical(level.name, images), table)
        self.running.append(batch)
        return batch

    def weigh(self, level: Level) -> list[float]:
        """The cost of each queued request at this level, in images of the most urgent request's size."""
        requests = self.queue.waiting[:MOST_WEIGHED]
        one = self.table_for(requests[0].kind).typical(level.name, 1)
        each: dict[tuple[object, ...], float] = {}
        weights = []
        for request in requests:
            key = (request.bits, request.min_bits, request.kind)
            if key not in each:
                levels = self.allowed(request)
                own = level if level in levels else levels[0]
                each[key] = self.table_for(request.kind).typical(own.name, 1) / one
            weights.append(each[key] * request.images)
        return weights

    def is_hopeless(self, now: float) -> Callable[[Request], bool]:
        def hopeless(request: Request) -> bool:
            level = self.lowest(request)
            return now + self.table_for(request.kind).typical(level.name, request.images) > request.deadline

        return hopeless

    def finish(self, batch: Batch, seconds: float | None, now: float, went_on: int | None = None) -> None:
        """A batch has ended after `seconds`; None where it failed and its time must not update the table.

        went_on: of a cascade, how many images did.
        """
        self.running.remove(batch)
        if any(now + self.sending > request.deadline for request in batch.requests):
            self.policy.missed()
        if seconds is not None:
            batch.table.observe(batch.level.name, batch.images, seconds, now, went_on)
        if now - self._reviewed > REVIEW_S:
            self._reviewed = now
            self.levels = pareto_front(self.names, self.accuracies, self.table)

    def stale(self, now: float, longest: float) -> tuple[str, int] | None:
        """A level and batch size due to be timed again, if one run takes at most `longest` seconds."""
        found = self.table.stale(now, (level.name for level in self.levels), longest)
        if found is not None:
            self.table.saw(*found, now)
        return found

    def front(self) -> list[dict[str, Any]]:
        """For JSON: the levels that policies choose among, least accurate first."""
        return [self.level_record(level) for level in self.levels]

    def level_record(self, level: Level) -> dict[str, Any]:
        """Milliseconds are of one image; `share` is that of a cascade's inputs that goes on."""
        return {
            "name": level.name,
            "accuracy": None if math.isnan(level.accuracy) else level.accuracy,
            "ms": round(1e3 * self.table.typical(level.name, 1), 4),
            "share": self.table.share(level.name),
        }

    def take_rejected(self) -> list[Rejection]:
        rejected, self.rejected = self.rejected, []
        return rejected


def width(level: Level) -> int:
    """The width that min_bits is compared with. Plans and cascades count as 1: some layers, or inputs, may have 1."""
    return int(level.name) if level.name.isdigit() else 1


def over_share(slo: float) -> Overloaded:
    return Overloaded(
        "dropped in favor of clients with fewer queued requests; send fewer at once",
        retry_after=slo,
        over_share=True,
    )


def default_margin(slo: float) -> float:
    """Seconds kept back from every deadline for transfer and hiccups, unless a margin is given."""
    return min(0.005, 0.1 * slo)
