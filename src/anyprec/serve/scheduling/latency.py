"""LatencyTable: seconds for a batch of n images at each level; measured once, then kept up to date.

In: run times from `measure` (before the first request) and from the engine threads. Out: `typical` and `high`, the
mean and an upper quantile of the next run. Has no clock: `now` is passed in. Used by core.py and policy.py.

    seconds(level, n) = cell[level][n] * drift                linear between measured batch sizes

All cells share `drift`, since what slows the machine slows every level. One hiccup (a run of 50 ms among runs of 2 ms)
changes nothing: drift follows the median of the last 9 runs, and one run moves a cell by at most 1 %.

The time of a cascade depends on its inputs. Its cells are the times where every image goes on, and it learns the share
that does. With m of n images going on, where `first` is its first stage:

    seconds(cascade, n, m) = (cell[first][n] + cell[cascade][m] - cell[first][m]) * drift
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.errors import ServeError
from anyprec.progress import Progress

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # measured sizes; those in between are interpolated
MEDIAN_OF = 9  # runs: up to 4 hiccups among them change nothing
FOLLOW = 0.3  # step of drift per run, as an exponent: it follows a lasting change in about 15 runs
FOLLOW_EVERY = 4  # runs: in so few a cell hardly moves, and making the rows anew costs more than all the rest
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
SHARE_MEMORY = 400  # images over which the share of a cascade's inputs that go on is averaged


@dataclass(frozen=True)
class GoesOn:
    """How a cascade runs: every image at the level `first`; a share of them (0 to 1) goes on."""

    first: str
    share: float


class LatencyTable:
    """`seconds[level][batch]`; batch 1 must be there. Levels keep their order.

    cascades: which levels are cascades. Their seconds are those of batches in which every image goes on.
    """

    def __init__(
        self,
        seconds: Mapping[str, Mapping[int, float]],
        max_batch: int = 32,
        cascades: Mapping[str, GoesOn] | None = None,
    ) -> None:
        if not seconds:
            raise ServeError("a latency table needs at least one level")
        for level, cells in seconds.items():
            if 1 not in cells:
                raise ServeError(f"the latency table has no batch of 1 for level {level}; measure or add it")
            if not all(isinstance(n, int) and n >= 1 and 0 < s < math.inf for n, s in cells.items()):
                raise ServeError(f"the latency table of level {level} has a batch below 1 or a time of no seconds")
        self.cascades = dict(cascades or {})
        for level, way in self.cascades.items():
            if level not in seconds or way.first not in seconds or way.first in self.cascades:
                raise ServeError(
                    f"the cascade {level} begins with {way.first}; both need a row of times, and {way.first} must be "
                    "no cascade itself"
                )
            if not 0 <= way.share <= 1:
                raise ServeError(f"of the cascade {level} a share of {way.share:g} goes on; give 0 to 1")
        self.max_batch = max_batch
        self.first = {level: dict(sorted(cells.items())) for level, cells in seconds.items()}
        self.cells = {level: dict(cells) for level, cells in self.first.items()}
        self.seen = {level: dict.fromkeys(cells, -math.inf) for level, cells in self.first.items()}
        self.drift = 1.0
        self.tail = HIGH_AT_FIRST
        self.runs = 0
        # For n = 0..max_batch, to be multiplied by drift: of the cells alone; what policies expect; and an upper
        # quantile, to be multiplied by tail, too. All three are the same unless the level is a cascade.
        self.lines = {level: lines_of(cells, max_batch) for level, cells in self.cells.items()}
        self.whole: dict[str, list[float]] = {}
        self.rows: dict[str, list[float]] = {}
        self.highs: dict[str, list[float]] = {}
        self._chances = {level: Chances(way.share, max_batch) for level, way in self.cascades.items()}
        self._follow(*self.cells)
        self._ratios: deque[float] = deque(maxlen=MEDIAN_OF)
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self._returned = -math.inf
        self._changed: set[str] = set()  # levels whose rows do not follow their cells yet

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(self.cells)

    def typical(self, level: str, batch: int) -> float:
        return beyond(self.rows[level], batch) * self.drift

    def high(self, level: str, batch: int) -> float:
        """The 98th percentile of the recent runs."""
        return beyond(self.highs[level], batch) * self.drift * self.tail

    def share(self, level: str) -> float | None:
        """The share of inputs that go on, of a cascade."""
        return self._chances[level].share if level in self._chances else None

    def _follow(self, *changed: str) -> None:
        """Update the rows after cells of these levels have changed."""
        for level in changed:
            row = self.whole[level] = self._row_of(level)
            if level not in self.cascades:
                self.rows[level] = self.highs[level] = row
        for level, way in self.cascades.items():
            if level in changed or way.first in changed:
                self.rows[level], self.highs[level] = self._chances[level].mixed(
                    self.whole[way.first], self.whole[level]
                )

    def _row_of(self, level: str) -> list[float]:
        """Seconds for 0, 1, ... max_batch images, before drift; never decreasing."""
        cells = {0: 0.0, **self.cells[level]}
        row, last = [0.0], 0.0
        for low, high, share in self.lines[level]:
            seconds = cells[low] + share * (cells[high] - cells[low])
            if seconds > last:
                last = seconds
            row.append(last)
        return row

    # --- Kept up to date ------------------------------------------------------------------------------------------

    def observe(
        self,
        level: str,
        batch: int,
        seconds: float,
        now: float,
        went_on: int | None = None,
        typical_input: bool = True,
    ) -> None:
        """One run, timed. went_on: of a cascade, how many images did; None where that is not known.

        typical_input: whether the images say something about the share that goes on.
        """
        if not 0 < seconds < math.inf:
            return
        moved, images = level, batch
        if level not in self.cascades:
            expected = self.typical(level, batch)
        elif went_on is None:
            return
        else:
            first = self.whole[self.cascades[level].first]
            more = beyond(self.whole[level], went_on) - beyond(first, went_on)
            expected = (beyond(first, batch) + max(0.0, more)) * self.drift
            moved, images = (level, went_on) if went_on else (self.cascades[level].first, batch)
            if typical_input:
                self._chances[level].learn(went_on, batch)
        ratio = seconds / expected
        self.runs += 1
        self._ratios.append(ratio)
        self._recent.append(ratio)
        if len(self._ratios) == MEDIAN_OF:
            middle = sorted(self._ratios)[MEDIAN_OF // 2]
            step = middle**FOLLOW
            self.drift *= step
            self._ratios = deque((r / step for r in self._ratios), MEDIAN_OF)  # they were relative to the old drift
        self._move_cells(moved, images, max(-CELL_STEP, min(CELL_STEP, 0.1 * math.log(ratio))), now)
        if self.runs % 16 == 0 and len(self._recent) >= 32:
            ordered = sorted(self._recent)
            low, top = HIGH_RANGE
            self.tail = max(low, min(top, ordered[int(HIGH * (len(ordered) - 1))]))
        if now - self._returned > 1.0:
            self._let_return(now)

    def _move_cells(self, level: str, batch: int, step: float, now: float) -> None:
        """The two measured sizes around `batch` share the change by distance."""
        cells, first, seen = self.cells[level], self.first[level], self.seen[level]
        below = max(n for n in cells if n <= batch)
        above = min((n for n in cells if n >= batch), default=below)
        share = (batch - below) / (above - below) if above > below else 0.0
        for n, part in ((below, 1 - share), (above, share)):
            if part:
                cells[n] *= math.exp(part * step) * (first[n] / cells[n]) ** (part * PULL)
        seen[below if share < 0.5 else above] = now
        self._changed.add(level)
        if self.runs % FOLLOW_EVERY == 0:
            self._follow(*self._changed)
            self._changed.clear()

    def _let_return(self, now: float) -> None:
        """Unused cells return to their first measurement: one that looks too slow would never be tried again."""
        passed = min(now - self._returned, RETURN_S) if self._returned > -math.inf else 0.0
        self._returned = now
        back = 1 - 0.5 ** (passed / RETURN_S)
        for level, cells in self.cells.items():
            first, seen = self.first[level], self.seen[level]
            for n in cells:
                if now - seen[n] > STALE_S:
                    cells[n] *= (first[n] / cells[n]) ** back
        self._follow(*self.cells)

    def stale(self, now: float, levels: Iterable[str], longest: float) -> tuple[str, int] | None:
        """The cell not timed for longest (at least 30 s), among those of at most `longest` seconds a run."""
        found, since = None, now - STALE_S
        for level in levels:
            for n, at in self.seen[level].items():
                if at < since and self.typical(level, n) <= longest:
                    found, since = (level, n), at
        return found

    def saw(self, level: str, batch: int, now: float) -> None:
        if batch in self.seen[level]:
            self.seen[level][batch] = now

    # --- Other forms ----------------------------------------------------------------------------------------------

    def scaled(self, factor: float) -> LatencyTable:
        """An estimate for images of another size, until they have been timed."""
        times = {p: {n: s * factor for n, s in cells.items()} for p, cells in self.now().items()}
        return LatencyTable(times, self.max_batch, self.ways())

    def ways(self) -> dict[str, GoesOn]:
        """The cascades, with the shares learned so far."""
        return {level: GoesOn(way.first, self._chances[level].share) for level, way in self.cascades.items()}

    def now(self) -> dict[str, dict[int, float]]:
        return {p: {n: s * self.drift for n, s in cells.items()} for p, cells in self.cells.items()}

    def record(self) -> dict[str, Any]:
        """For JSON: expected milliseconds by level and batch; of cascades, what share goes on."""
        return {
            "ms": {p: {str(n): round(1e3 * self.typical(p, n), 4) for n in cells} for p, cells in self.cells.items()},
            "drift": round(self.drift, 4),
            "tail": round(self.tail, 4),
            "cascades": {level: asdict(way) for level, way in self.ways().items()},
        }


class Chances:
    """How many images of a batch go on, if each does with the same chance: a learned share."""

    def __init__(self, share: float, max_batch: int) -> None:
        self.share = share
        self.max_batch = max_batch
        self._settle()

    def _settle(self) -> None:
        """Chances of m among n, and the m that is not exceeded in 98 % of the batches. Costly, so not at each run."""
        size = self.max_batch + 1
        self._at = self.share
        self.chances: npt.NDArray[np.float64] = np.zeros((size, size))  # [n, m]
        self.chances[0, 0] = 1.0
        for n in range(1, size):
            self.chances[n] = (1 - self._at) * self.chances[n - 1]
            self.chances[n, 1:] += self._at * self.chances[n - 1, :-1]
        self.most = (self.chances.cumsum(axis=1) < HIGH).sum(axis=1).clip(0, size - 1)

    def learn(self, went_on: int, images: int) -> None:
        self.share += (went_on - images * self.share) / max(SHARE_MEMORY, images)
        if abs(self.share - self._at) > 0.01:
            self._settle()

    def mixed(self, first: Sequence[float], whole: Sequence[float]) -> tuple[list[float], list[float]]:
        """(expected seconds, upper quantile) by batch, of rows for the first stage and for all going on."""
        start = np.array(first)
        more = np.maximum.accumulate(np.maximum(np.array(whole) - start, 0.0))
        return (start + self.chances @ more).tolist(), (start + more[self.most]).tolist()


def beyond(row: Sequence[float], batch: int) -> float:
    """The entry of a batch; larger ones than the row has go on as its end does."""
    if batch < len(row):
        return row[batch]
    return row[-1] + (batch - len(row) + 1) * (row[-1] - row[-2] if len(row) > 2 else row[-1])


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
    levels: Sequence[str],
    max_batch: int,
    longest: float,
    seconds: float = 3.0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    cascades: Mapping[str, GoesOn] | None = None,
) -> LatencyTable:
    """Time `run(level, batch)` in rounds over all levels and batch sizes, for about `seconds`.

    Rounds spread a disturbance of the machine over all cells. A cell is the lower quartile of its runs, since other
    programs only ever add time, and at most 1.2 times what the same images took in smaller batches. We skip batches
    that would take longer than `longest`, which no policy would choose, and those that the first round has no time
    for; the table is extrapolated there. Batch 1 is always timed.
    """
    end = clock() + seconds
    runs: dict[tuple[str, int], list[float]] = {}
    for batch in [n for n in BATCHES if n <= max_batch]:
        for level in levels:
            if batch > 1:
                guess = batch * runs[level, 1][0]
                if guess > longest or clock() + 2 * guess > end:
                    continue
            run(level, batch)  # the first run at a width prepares weights, at a batch size memory
            runs[level, batch] = [timed(run, level, batch, clock)]
    for _ in range(MOST_RUNS - 1):
        for (level, batch), times in runs.items():
            if batch > 1 and clock() + times[0] > end:
                continue
            if clock() > end and len(times) >= LEAST_RUNS:
                continue
            times.append(timed(run, level, batch, clock))
            if progress is not None:
                progress.update(1)
    table: dict[str, dict[int, float]] = {level: {} for level in levels}
    for (level, batch), times in runs.items():  # small batches first
        cells, found = table[level], sorted(times)[len(times) // 4]
        table[level][batch] = min([found, *(1.2 * s * batch / n for n, s in cells.items())])
    return LatencyTable(table, max_batch, cascades)


def timed(run: Callable[[str, int], object], level: str, batch: int, clock: Callable[[], float]) -> float:
    start = clock()
    run(level, batch)
    return clock() - start


# --- Files --------------------------------------------------------------------------------------------------------


def read_table(
    path: str | Path,
) -> tuple[dict[str, dict[int, float]], dict[str, float | None], dict[str, GoesOn]]:
    """Seconds by level and batch, accuracies, and which levels are cascades, of a file such as

    {"ms": {"8": {"1": 2.5, "8": 16.0}, "1": {"1": 1.0}, "auto": {"1": 3.2}},
     "accuracy": {"8": 93.9, "1": 92.1, "auto": 93.8}, "cascades": {"auto": {"first": "1", "share": 0.2}}}
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        times = {
            str(level): {int(n): 1e-3 * float(ms) for n, ms in cells.items()} for level, cells in record["ms"].items()
        }
        given = record.get("accuracy") or {}
        accuracies = {level: None if given.get(level) is None else float(given[level]) for level in times}
        ways = record.get("cascades") or {}
        cascades = {str(level): GoesOn(str(way["first"]), float(way["share"])) for level, way in ways.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"{path}: cannot be read as a latency table: {error}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ServeError(
            f'{path}: not a latency table; write {{"ms": {{"8": {{"1": 2.5}}, ...}}, "accuracy": {{"8": 93.9, ...}}}} '
            "(milliseconds by level and batch)"
        ) from error
    LatencyTable(times, cascades=cascades)  # says what is wrong with the numbers
    return times, accuracies, cascades
