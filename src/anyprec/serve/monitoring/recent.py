"""RecentSeconds: a ring of one-second periods with the outcomes, widths and latencies of requests.

Metrics keeps one per model, as its clients saw it; the page, /live, the overload lines of the log and the gauges of
/metrics all read that one, so they cannot contradict each other. SchedulerStats keeps one as the scheduler saw it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from anyprec.serve.monitoring.histogram import bin_of, quantile

KEEP = 300  # seconds of history
WINDOW = 10  # seconds that "now" stands for: on the page, in the log and in /metrics

# Outcomes of a request. LEFT: its client went away after the deadline. TURNED_AWAY: its connection was refused before
# it could name a model; counts for every model. Client errors (400, 413, ...) and clients that went away before their
# deadline are not counted.
IN_TIME, LATE, REFUSED, EXPIRED, FAILED, LEFT = "in_time", "late", "refused", "expired", "failed", "left"
TURNED_AWAY = "turned_away"
OUTCOMES = (IN_TIME, LATE, REFUSED, EXPIRED, FAILED, LEFT, TURNED_AWAY)

CLIENT_GONE = 499  # status of a request whose client went away; nothing is sent

Accuracy = Callable[[int | str], float | None]


class Period:
    """One second of one model, or several added up."""

    __slots__ = ("at", "bits", "cascaded", "latencies", "outcomes", "slowest_s", "went_on")

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.outcomes: Counter[str] = Counter()
        self.bits: Counter[int | str] = Counter()  # runs at each level; an image at every level has several
        self.latencies: Counter[int] = Counter()  # of answers, by bin
        self.slowest_s = 0.0
        self.cascaded = self.went_on = 0  # images that ran at the cascade, and those beyond its first stage

    def count(self, outcome: str, latency_s: float | None = None, bits: Iterable[int | str] = ()) -> None:
        """One request has ended; `latency_s` and the bits of its runs where it was answered."""
        self.outcomes[outcome] += 1
        if latency_s is not None:
            self.latencies[bin_of(latency_s)] += 1
            self.slowest_s = max(self.slowest_s, latency_s)
        for width in bits:
            self.bits[width] += 1

    def count_cascade(self, images: int, went_on: int) -> None:
        self.cascaded += images
        self.went_on += went_on

    def add(self, other: Period) -> None:
        self.outcomes.update(other.outcomes)
        self.bits.update(other.bits)
        self.latencies.update(other.latencies)
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.count_cascade(other.cascaded, other.went_on)

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def answered(self) -> int:
        return self.outcomes[IN_TIME] + self.outcomes[LATE]

    @property
    def attainment(self) -> float | None:
        """SLO attainment: the share of all requests answered in time; None where there were none."""
        requests = self.requests
        return self.outcomes[IN_TIME] / requests if requests else None

    def quantile_ms(self, q: float) -> float | None:
        """Quantile of the latency of answers, at most 3 % too high."""
        return round(1e3 * min(self.slowest_s, quantile(self.latencies, q)), 4) if self.latencies else None

    def record(self, accuracy: Accuracy | None = None) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "answered": self.answered,
            **{name: self.outcomes[name] for name in OUTCOMES},
            "bits": {str(bits): count for bits, count in self.bits.items()},
            "p50_ms": self.quantile_ms(0.5),
            "p99_ms": self.quantile_ms(0.99),
            "max_ms": self.quantile_ms(1.0),
            "accuracy": mean_accuracy(self.bits, accuracy),
            "went_on": self.went_on / self.cascaded if self.cascaded else None,
        }


class RecentSeconds:
    """The last `keep` seconds in a ring, so memory does not grow. Times are seconds of the caller's clock."""

    def __init__(self, keep: int = KEEP) -> None:
        self.keep = keep
        self.ring = [Period() for _ in range(keep)]

    def second(self, now: float) -> Period:
        """The period under way."""
        at = int(now)
        if self.ring[at % self.keep].at != at:
            self.ring[at % self.keep] = Period(at)
        return self.ring[at % self.keep]

    def _at(self, second: int) -> Period:
        found = self.ring[second % self.keep]
        return found if found.at == second else Period()

    def series(self, now: float, seconds: int, accuracy: Accuracy | None = None) -> list[dict[str, Any]]:
        """A record for each full second before `now`, oldest first."""
        last = min(seconds, self.keep - 1)
        return [{"ago": ago, **self._at(int(now) - ago).record(accuracy)} for ago in range(last, 0, -1)]

    def over(self, now: float, seconds: int = WINDOW, with_current: bool = False) -> Period:
        """The sum of that many full seconds, or of one less and the second under way."""
        last = min(seconds, self.keep - 1)
        total = Period()
        for ago in range(last) if with_current else range(1, last + 1):
            total.add(self._at(int(now) - ago))
        return total


def window_record(total: Period, seconds: int, accuracy: Accuracy | None = None) -> dict[str, Any]:
    """What the tiles of the page show, all over the same `seconds`."""
    widths = [(int(bits), count) for bits, count in total.bits.items() if str(bits).isdigit()]
    runs = sum(count for _, count in widths)
    return {
        "seconds": seconds,
        "per_second": total.requests / seconds,
        "attainment": total.attainment,
        "mean_bits": sum(bits * count for bits, count in widths) / runs if runs else None,
        **total.record(accuracy),
    }


def mean_accuracy(bits: Counter[int | str], accuracy: Accuracy | None) -> float | None:
    """Expected accuracy of what was served, in percent, from the file's accuracy per width; None if one is unknown."""
    if not bits or accuracy is None:
        return None
    known = [(accuracy(width), count) for width, count in bits.items()]
    if any(value is None for value, _ in known):
        return None
    return round(sum((value or 0.0) * count for value, count in known) / sum(bits.values()), 3)
