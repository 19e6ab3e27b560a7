"""SchedulerStats: counts of requests and batches, since the start and over the last seconds. Filled by scheduler.py.

SLO attainment is the share of requests answered by their deadline. Rejected, expired, failed and late requests count
as missed; cancelled ones do not count, since nobody waited for them. No list of requests is kept, so `record` is cheap
enough to be called every second.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

from anyprec.errors import Expired, Overloaded
from anyprec.serve.monitoring.recent import EXPIRED, FAILED, IN_TIME, LATE, REFUSED, WINDOW, Period, RecentSeconds
from anyprec.serve.scheduling.policy import Level
from anyprec.serve.scheduling.queue import Request


class SchedulerStats:
    def __init__(self) -> None:
        self.arrived = 0
        self.cancelled = 0
        self.over_share = 0  # rejected requests that were dropped for another client
        self.cancelled_runs = 0  # batches stopped between two steps: every client gone, or every deadline long past
        self.total = Period()  # since the start
        self.recent = RecentSeconds(WINDOW + 1)
        self.accuracy_sum, self.accuracy_count = 0.0, 0
        self.engine_s: defaultdict[str, float] = defaultdict(float)  # engine time by level
        self.batches: Counter[str] = Counter()  # by level
        self.last: str | None = None  # level of the last batch that the policy chose
        self.changes = 0  # times that the policy chose another level than for the batch before

    def answer(self, request: Request, level: Level, now: float) -> None:
        """A request was answered."""
        outcome = IN_TIME if now <= request.deadline else LATE
        for period in (self.total, self.recent.second(now)):
            period.count(outcome, now - request.arrived, (level.name,))
        if not math.isnan(level.accuracy):
            self.accuracy_sum += level.accuracy
            self.accuracy_count += 1

    def ran(self, level: str, seconds: float, chosen: bool) -> None:
        """A batch has run; `chosen`: its level was chosen by the policy, not by its requests."""
        self.engine_s[level] += seconds
        self.batches[level] += 1
        if chosen:
            self.changes += self.last not in (None, level)
            self.last = level

    def reject(self, error: Exception, now: float) -> None:
        """A request got an error instead of an answer."""
        outcome = REFUSED if isinstance(error, Overloaded) else EXPIRED if isinstance(error, Expired) else FAILED
        for period in (self.total, self.recent.second(now)):
            period.count(outcome)
        if isinstance(error, Overloaded):
            self.over_share += error.over_share

    @property
    def accuracy(self) -> float | None:
        """Mean expected accuracy of the answers, in percent."""
        return self.accuracy_sum / self.accuracy_count if self.accuracy_count else None

    def record(self, now: float) -> dict[str, Any]:
        total, window = self.total, self.recent.over(now, WINDOW, with_current=True)
        return {
            "requests": {
                "arrived": self.arrived,
                "answered": total.answered,
                "in_time": total.outcomes[IN_TIME],
                "overloaded": total.outcomes[REFUSED],
                "over_share": self.over_share,
                "expired": total.outcomes[EXPIRED],
                "cancelled": self.cancelled,
                "failed": total.outcomes[FAILED],
            },
            "cancelled_runs": self.cancelled_runs,
            "attainment": 1.0 if total.attainment is None else total.attainment,
            "accuracy": self.accuracy,
            "bits_histogram": dict(total.bits),
            "engine_s": dict(self.engine_s),
            "batches": dict(self.batches),
            "last_bits": self.last,
            "precision_changes": self.changes,
            "window": {
                "seconds": WINDOW,
                "requests": window.requests,
                "per_second": window.requests / WINDOW,
                "attainment": 1.0 if window.attainment is None else window.attainment,
                "bits_histogram": dict(window.bits),
                "latency_ms": {f"p{q}": window.quantile_ms(q / 100) for q in (50, 90, 99)} if window.latencies else {},
            },
        }
