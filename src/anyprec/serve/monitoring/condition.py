"""The condition of a model in words: the last seconds in; "overloaded: 73 % of requests not in time ..." out.

Decides when an overload begins and ends, and logs overloads and changes of precision. The page shows the words,
/metrics the state. App.look calls this once a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyprec.serve.monitoring.logs import log
from anyprec.serve.monitoring.recent import EXPIRED, FAILED, IN_TIME, LATE, LEFT, REFUSED, TURNED_AWAY, WINDOW, Period

BEGINS, ENDS = 0.9, 0.97  # attainment at which an overload begins and ends: hysteresis against flicker
FEW = 10  # fewer requests in the window are never called an overload
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0  # between log lines while the precision keeps changing
GOOD = 0.99  # below this attainment the page says how many were missed, even without an overload

WORDS = {
    LATE: "late",
    REFUSED: "refused",
    EXPIRED: "given up",
    FAILED: "failed",
    LEFT: "left by their clients",
    TURNED_AWAY: "turned away",
}


class OverloadDetector:
    """Whether one model is overloaded; `look` about once a second."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.since: float | None = None  # Unix time

    def look(self, now: float, total: Period) -> None:
        share = total.attainment
        if self.since is None:
            if share is not None and total.requests >= FEW and share < BEGINS:
                self.since = now
                log.warning("overload begins", model=self.model, **log_fields(total))
        elif share is None or share >= ENDS:
            log.info(
                "overload ended", model=self.model, lasted_s=round(now - self.since, 1), **log_fields(total)
            )  # fmt: skip
            self.since = None


@dataclass(frozen=True)
class Precision:
    """The widths a scheduler has chosen: Scheduler.precision."""

    last: str | None  # profile of the last batch that the policy chose
    changes: int  # since the start
    batches: Mapping[str, int]  # by profile, since the start


class PrecisionLog:
    """Logs each change of width; while it keeps changing, a summary after 10 s, 20 s, ... 5 minutes."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._told = Precision(None, 0, {})
        self._told_at = 0.0
        self._pause_s = 0.0

    def look(self, now: float, seen: Precision) -> None:
        told = self._told
        if seen.changes < told.changes or told.last is None:  # another scheduler, or the first batch
            self._told = seen
            return
        changes, passed = seen.changes - told.changes, now - self._told_at
        if not changes:
            if passed >= 2 * self._pause_s:
                self._pause_s = 0.0  # calm: the next change is logged at once
            return
        if passed < self._pause_s:
            return
        if changes == 1:
            log.info("precision changed", model=self.model, before=told.last, now=seen.last)
        else:
            batches = {profile: count - told.batches.get(profile, 0) for profile, count in seen.batches.items()}
            shares = " ".join(f"{name}:{percent(n / sum(batches.values()))}" for name, n in batches.items() if n)
            log.info(
                "precision keeps changing", model=self.model, changes=changes,
                over_s=round(min(passed, max(self._pause_s, 1.0)), 1), before=told.last, now=seen.last,
                batches=shares.replace(" %", "%"),
            )  # fmt: skip
        self._told, self._told_at = seen, now
        self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))


def log_fields(total: Period) -> dict[str, Any]:
    """Fields of a log line; shares are of all requests."""
    found: dict[str, Any] = {"window_s": WINDOW, "requests": total.requests}
    if total.requests:
        found["in_time"] = percent(total.outcomes[IN_TIME] / total.requests)
    found |= {name: total.outcomes[name] for name in WORDS if total.outcomes[name]}
    p99_ms = total.quantile_ms(0.99)
    return found if p99_ms is None else found | {"p99_ms": round(p99_ms, 1)}


def verdict(total: Period, overloaded: bool, seconds: int = WINDOW) -> tuple[str, str]:
    """("good" | "warn" | "bad" | "idle", a sentence about the last seconds)."""
    requests, share = total.requests, total.attainment
    if share is None:
        return "idle", f"no requests in the last {seconds} s"
    missed = ", ".join(
        f"{percent(total.outcomes[name] / requests)} {words}" for name, words in WORDS.items() if total.outcomes[name]
    )
    about = f"{percent(1 - share)} of {requests:,} requests not in time over the last {seconds} s ({missed})"
    if overloaded or (requests >= FEW and share < BEGINS):
        return "bad", f"overloaded: {about}"
    if share < GOOD:
        return "warn", about
    return "good", f"{percent(share)} of {requests:,} requests in time over the last {seconds} s"


def percent(share: float) -> str:
    """Rounded, but never to 0 or 100 %: 99.996 % is not 100 %."""
    value = 100 * share
    if 0 < value < 0.01:
        return "under 0.01 %"
    if value < 1 or 99 < value < 100:
        return f"{min(value, 99.99):.2f} %"
    return f"{value:.0f} %"
