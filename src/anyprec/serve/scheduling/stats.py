"""Tally: what became of the requests, since the start and over the last seconds. The scheduler counts with it.

Attainment is the share of requests answered by their deadline, of all that came: those refused, given up, failed or
late have missed it. Only cancelled ones do not count: nobody waited for them any more. Cheap enough to be asked for
every second while the engine runs: no list of requests is kept.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

from anyprec.errors import Expired, Overloaded
from anyprec.serve.monitoring.histogram import bin_of, quantile
from anyprec.serve.scheduling.policy import Level
from anyprec.serve.scheduling.queue import Request

WINDOW = 10  # seconds


class Second:
    """What ended in one second."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.ended = 0
        self.in_time = 0
        self.bits: Counter[str] = Counter()
        self.bins: Counter[int] = Counter()  # of the latency of answers


class Tally:
    def __init__(self) -> None:
        self.arrived = 0
        self.answered = 0
        self.in_time = 0
        self.overloaded = 0  # refused on arrival, or given up for another client
        self.over_share = 0  # of these, given up for another client
        self.expired = 0
        self.cancelled = 0
        self.failed = 0
        self.cancelled_runs = 0  # ended between two steps: every client gone, or every deadline long past
        self.bits: Counter[str] = Counter()  # answers by profile
        self.accuracy_sum, self.accuracy_count = 0.0, 0
        self.engine_s: defaultdict[str, float] = defaultdict(float)  # seconds of engine time by profile
        self.batches: Counter[str] = Counter()  # by profile
        self.last: str | None = None  # profile of the last batch that the policy chose
        self.changes = 0  # batches whose profile the policy chose other than the one before
        self._seconds = [Second(-1) for _ in range(WINDOW + 1)]  # a ring; the one under way among them

    def add(self, request: Request, level: Level, now: float) -> None:
        """A request has been answered."""
        in_time = now <= request.deadline
        self.answered += 1
        self.in_time += in_time
        self.bits[level.profile] += 1
        if not math.isnan(level.accuracy):
            self.accuracy_sum += level.accuracy
            self.accuracy_count += 1
        second = self._second(now)
        second.ended += 1
        second.in_time += in_time
        second.bits[level.profile] += 1
        second.bins[bin_of(now - request.arrived)] += 1

    def ran(self, profile: str, seconds: float, chosen: bool) -> None:
        """A batch has run; `chosen` by the policy, not asked for by its requests."""
        self.engine_s[profile] += seconds
        self.batches[profile] += 1
        if chosen:
            self.changes += self.last not in (None, profile)
            self.last = profile

    def refuse(self, error: Exception, now: float) -> None:
        """A request has got an error instead."""
        if isinstance(error, Overloaded):
            self.overloaded += 1
            self.over_share += error.over_share
        elif isinstance(error, Expired):
            self.expired += 1
        else:
            self.failed += 1
        self._second(now).ended += 1

    def _second(self, now: float) -> Second:
        start = math.floor(now)
        place = start % len(self._seconds)
        if self._seconds[place].start != start:
            self._seconds[place] = Second(start)
        return self._seconds[place]

    @property
    def ended(self) -> int:
        return self.answered + self.overloaded + self.expired + self.failed

    @property
    def attainment(self) -> float:
        return self.in_time / self.ended if self.ended else 1.0

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy expected of what was answered, in percent."""
        return self.accuracy_sum / self.accuracy_count if self.accuracy_count else None

    def record(self, now: float) -> dict[str, Any]:
        bits: Counter[str] = Counter()
        bins: Counter[int] = Counter()
        ended = in_time = 0
        for second in self._seconds:
            if second.start >= 0 and second.start > now - WINDOW:
                bits.update(second.bits)
                bins.update(second.bins)
                ended += second.ended
                in_time += second.in_time
        return {
            "requests": {
                "arrived": self.arrived,
                "answered": self.answered,
                "in_time": self.in_time,
                "overloaded": self.overloaded,
                "over_share": self.over_share,
                "expired": self.expired,
                "cancelled": self.cancelled,
                "failed": self.failed,
            },
            "cancelled_runs": self.cancelled_runs,
            "attainment": self.attainment,
            "accuracy": self.accuracy,
            "bits_histogram": dict(self.bits),
            "engine_s": dict(self.engine_s),
            "batches": dict(self.batches),
            "last_bits": self.last,
            "precision_changes": self.changes,
            "window": {
                "seconds": WINDOW,
                "requests": ended,
                "per_second": ended / WINDOW,
                "attainment": in_time / ended if ended else 1.0,
                "bits_histogram": dict(bits),
                "latency_ms": {f"p{q}": 1e3 * quantile(bins, q / 100) for q in (50, 90, 99)} if bins else {},
            },
        }
