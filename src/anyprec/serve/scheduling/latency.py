"""LatencyTable: seconds for a batch of n images at each profile; measured once, then kept up to date.

In: run times from `measure` (before the first request) and from the engine threads. Out: `typical` and `high`, the
median and an upper quantile of the next run. Has no clock: `now` is passed in. Used by core.py and policy.py.

    seconds(profile, n) = cell[profile][n] * drift            linear between measured batch sizes

All cells share `drift`, since what slows the machine slows every width. One hiccup (a run of 50 ms among runs of 2 ms)
changes nothing: drift follows the median of the last 9 runs, and one run moves a cell by at most 1 %.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyprec.errors import ServeError
from anyprec.progress import Progress

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # measured sizes; those in between are interpolated
MEDIAN_OF = 9  # runs: up to 4 hiccups among them change nothing
FOLLOW = 0.3  # step of drift per run, as an exponent: it follows a lasting change in about 15 runs
CELL_STEP = 0.01  # largest change of a cell per run, in its logarithm
# Each run also pulls its cell this far back to its first measurement. Otherwise drift and the one cell in use could
# move in opposite directions, and every other cell would be wrong.
PULL = 0.01
MEMORY = 256  # runs that the upper quantile is computed from
HIGH = 0.98
HIGH_AT_FIRST = 1.15  # times the median, until 32 runs have been seen
HIGH_RANGE = (1.05, 2.0)  # a quantile beyond twice the median is the machine's fault, which no width cures
STALE_S = 30.0
LEAST_RUNS, MOST_RUNS = 3, 30  # of a cell, when it is measured
RETURN_S = 60.0  # half-life with which an unused cell returns to its first measurement


class LatencyTable:
    """`seconds[profile][batch]`; batch 1 must be there. Profiles keep their order."""

    def __init__(self, seconds: Mapping[str, Mapping[int, float]], max_batch: int = 32) -> None:
        if not seconds:
            raise ServeError("a latency table needs at least one profile")
        for profile, cells in seconds.items():
            if 1 not in cells:
                raise ServeError(f"the latency table has no batch of 1 for profile {profile}; measure or add it")
            if not all(isinstance(n, int) and n >= 1 and 0 < s < math.inf for n, s in cells.items()):
                raise ServeError(f"the latency table of profile {profile} has a batch below 1 or a time of no seconds")
        self.max_batch = max_batch
        self.first = {profile: dict(sorted(cells.items())) for profile, cells in seconds.items()}
        self.cells = {profile: dict(cells) for profile, cells in self.first.items()}
        self.seen = {profile: dict.fromkeys(cells, -math.inf) for profile, cells in self.first.items()}
        self.drift = 1.0
        self.tail = HIGH_AT_FIRST
        self.runs = 0
        # What policies read: rows[profile][n] for n = 0..max_batch, to be multiplied by drift (and tail).
        self.lines = {profile: lines_of(cells, max_batch) for profile, cells in self.cells.items()}
        self.rows = {profile: self._row_of(profile) for profile in self.cells}
        self._ratios: deque[float] = deque(maxlen=MEDIAN_OF)
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self._returned = -math.inf

    @property
    def profiles(self) -> tuple[str, ...]:
        return tuple(self.cells)

    def typical(self, profile: str, batch: int) -> float:
        return self._row(profile, batch) * self.drift

    def high(self, profile: str, batch: int) -> float:
        """The 98th percentile of the recent runs."""
        return self._row(profile, batch) * self.drift * self.tail

    def _row_of(self, profile: str) -> list[float]:
        """Seconds for 0, 1, ... max_batch images, before drift; never decreasing."""
        cells = {0: 0.0, **self.cells[profile]}
        row, last = [0.0], 0.0
        for low, high, share in self.lines[profile]:
            seconds = cells[low] + share * (cells[high] - cells[low])
            if seconds > last:
                last = seconds
            row.append(last)
        return row

    def _row(self, profile: str, batch: int) -> float:
        row = self.rows[profile]
        if batch < len(row):
            return row[batch]
        return row[-1] + (batch - len(row) + 1) * (row[-1] - row[-2] if len(row) > 2 else row[-1])

    # --- Kept up to date ------------------------------------------------------------------------------------------

    def observe(self, profile: str, batch: int, seconds: float, now: float) -> None:
        """One run, timed."""
        expected = self.typical(profile, batch)
        if not 0 < seconds < math.inf:
            return
        ratio = seconds / expected
        self.runs += 1
        self._ratios.append(ratio)
        self._recent.append(ratio)
        if len(self._ratios) == MEDIAN_OF:
            middle = sorted(self._ratios)[MEDIAN_OF // 2]
            step = middle**FOLLOW
            self.drift *= step
            self._ratios = deque((r / step for r in self._ratios), MEDIAN_OF)  # they were relative to the old drift
        self._move_cells(profile, batch, max(-CELL_STEP, min(CELL_STEP, 0.1 * math.log(ratio))), now)
        if self.runs % 16 == 0 and len(self._recent) >= 32:
            ordered = sorted(self._recent)
            low, top = HIGH_RANGE
            self.tail = max(low, min(top, ordered[int(HIGH * (len(ordered) - 1))]))
        if now - self._returned > 1.0:
            self._let_return(now)

    def _move_cells(self, profile: str, batch: int, step: float, now: float) -> None:
        """The two measured sizes around `batch` share the change by distance."""
        cells, first, seen = self.cells[profile], self.first[profile], self.seen[profile]
        below = max(n for n in cells if n <= batch)
        above = min((n for n in cells if n >= batch), default=below)
        share = (batch - below) / (above - below) if above > below else 0.0
        for n, part in ((below, 1 - share), (above, share)):
            if part:
                cells[n] *= math.exp(part * step) * (first[n] / cells[n]) ** (part * PULL)
        seen[below if share < 0.5 else above] = now
        self.rows[profile] = self._row_of(profile)

    def _let_return(self, now: float) -> None:
        """Unused cells return to their first measurement: one that looks too slow would never be tried again."""
        passed = min(now - self._returned, RETURN_S) if self._returned > -math.inf else 0.0
        self._returned = now
        back = 1 - 0.5 ** (passed / RETURN_S)
        for profile, cells in self.cells.items():
            first, seen = self.first[profile], self.seen[profile]
            for n in cells:
                if now - seen[n] > STALE_S:
                    cells[n] *= (first[n] / cells[n]) ** back
            self.rows[profile] = self._row_of(profile)

    def stale(self, now: float, profiles: Iterable[str], longest: float) -> tuple[str, int] | None:
        """The cell not timed for longest (at least 30 s), among those of at most `longest` seconds a run."""
        found, since = None, now - STALE_S
        for profile in profiles:
            for n, at in self.seen[profile].items():
                if at < since and self.typical(profile, n) <= longest:
                    found, since = (profile, n), at
        return found

    def saw(self, profile: str, batch: int, now: float) -> None:
        if batch in self.seen[profile]:
            self.seen[profile][batch] = now

    # --- Other forms ----------------------------------------------------------------------------------------------

    def scaled(self, factor: float) -> LatencyTable:
        """An estimate for images of another size, until they have been timed."""
        times = {p: {n: s * factor for n, s in cells.items()} for p, cells in self.now().items()}
        return LatencyTable(times, self.max_batch)

    def now(self) -> dict[str, dict[int, float]]:
        return {p: {n: s * self.drift for n, s in cells.items()} for p, cells in self.cells.items()}

    def record(self) -> dict[str, Any]:
        """For JSON: milliseconds by profile and batch."""
        return {
            "ms": {p: {str(n): round(1e3 * s, 4) for n, s in cells.items()} for p, cells in self.now().items()},
            "drift": round(self.drift, 4),
            "tail": round(self.tail, 4),
        }


Line = tuple[int, int, float]  # the measured sizes below and above a batch size, and how far it is between them


def lines_of(cells: Iterable[int], max_batch: int) -> list[Line]:
    """For each of 1..max_batch. Extrapolates beyond the last measured size; a single one starts from 0."""
    known = sorted(cells)
    if len(known) == 1:
        known = [0, *known]
    lines, at = [], 0
    for n in range(1, max_batch + 1):
        while at + 2 < len(known) and known[at + 1] < n:
            at += 1
        low, high = known[at], known[at + 1]
        lines.append((low, high, (n - low) / (high - low)))
    return lines


# --- Measuring ----------------------------------------------------------------------------------------------------


def measure(
    run: Callable[[str, int], object],
    profiles: Sequence[str],
    max_batch: int,
    longest: float,
    seconds: float = 3.0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyTable:
    """Time `run(profile, batch)` in rounds over all profiles and batch sizes, for about `seconds`.

    Rounds spread a disturbance of the machine over all cells. A cell is the lower quartile of its runs, since other
    programs only ever add time, and at most 1.2 times what the same images took in smaller batches. We skip batches
    that would take longer than `longest`, which no policy would choose, and those that the first round has no time
    for; the table is extrapolated there. Batch 1 is always timed.
    """
    end = clock() + seconds
    runs: dict[tuple[str, int], list[float]] = {}
    for batch in [n for n in BATCHES if n <= max_batch]:
        for profile in profiles:
            if batch > 1:
                guess = batch * runs[profile, 1][0]
                if guess > longest or clock() + 2 * guess > end:
                    continue
            run(profile, batch)  # the first run at a width prepares weights, at a batch size memory
            runs[profile, batch] = [timed(run, profile, batch, clock)]
    for _ in range(MOST_RUNS - 1):
        for (profile, batch), times in runs.items():
            if batch > 1 and clock() + times[0] > end:
                continue
            if clock() > end and len(times) >= LEAST_RUNS:
                continue
            times.append(timed(run, profile, batch, clock))
            if progress is not None:
                progress.update(1)
    table: dict[str, dict[int, float]] = {profile: {} for profile in profiles}
    for (profile, batch), times in runs.items():  # small batches first
        cells, found = table[profile], sorted(times)[len(times) // 4]
        table[profile][batch] = min([found, *(1.2 * s * batch / n for n, s in cells.items())])
    return LatencyTable(table, max_batch)


def timed(run: Callable[[str, int], object], profile: str, batch: int, clock: Callable[[], float]) -> float:
    start = clock()
    run(profile, batch)
    return clock() - start


# --- Files --------------------------------------------------------------------------------------------------------


def read_table(path: str | Path) -> tuple[dict[str, dict[int, float]], dict[str, float | None]]:
    """Seconds by profile and batch, and accuracies, of a file such as

    {"ms": {"8": {"1": 2.5, "8": 16.0}, "1": {"1": 1.0}}, "accuracy": {"8": 93.9, "1": 92.1}}
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        times = {
            str(profile): {int(n): 1e-3 * float(ms) for n, ms in cells.items()}
            for profile, cells in record["ms"].items()
        }
        given = record.get("accuracy") or {}
        accuracies = {profile: None if given.get(profile) is None else float(given[profile]) for profile in times}
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"{path}: cannot be read as a latency table: {error}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ServeError(
            f'{path}: not a latency table; write {{"ms": {{"8": {{"1": 2.5}}, ...}}, "accuracy": {{"8": 93.9, ...}}}} '
            "(milliseconds by profile and batch)"
        ) from error
    LatencyTable(times)  # says what is wrong with the numbers
    return times, accuracies
