"""Policies: which width the next batch runs at, and how many images are in it. Pure; the same in server and simulator.

Comes in: PolicyInput (the queue, most urgent first; the latency table; now). Goes out: Choice. Called by core.py.
docs/policy.md tells how `adaptive` decides, why, and what it was measured against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anyprec.errors import ServeError
from anyprec.serve.scheduling.latency import LatencyTable
from anyprec.serve.scheduling.queue import Queue
from anyprec.widths import FLOAT

POLICIES = ("adaptive", "accuracy", "fixed")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # batches that are tried, beside all that waits
CHECKS = 64  # deadlines looked at in one plan; of a longer queue every second one, every third, ...

MISS = 100.0  # points of accuracy that an answer in time is worth, however poor
LEARN = 0.003  # how fast prices follow: some three hundred decisions
TRUST = 0.5  # of the price learned; time saved now is not always still there when it is needed
LONG = 512  # decisions after which a busy period is judged even if it has not ended
CROWD = 8  # requests waiting from which on one price serves all
Situation = tuple[
    int, int
]  # requests waiting; the rate of arrivals as a power of two, so that a calm has its own prices
WORTH_IT = 0.9  # a larger batch must take less than this much of a smaller one's time for each image


@dataclass(frozen=True)
class Level:
    """A profile that batches may run at."""

    profile: str
    accuracy: float  # percent, or a stand-in that grows with the width

    @property
    def bits(self) -> int | str:
        return int(self.profile) if self.profile.isdigit() else self.profile


@dataclass(frozen=True)
class Choice:
    level: Level
    images: int  # at most so many


@dataclass
class PolicyInput:
    """What a policy looks at. The queue is not empty."""

    now: float
    queue: Queue
    table: LatencyTable  # for images of the most urgent request's size
    rate: float = 0.0  # images a second that came of late
    margin: float = 0.0  # seconds kept back from every deadline
    engines: int = 1
    max_batch: int = 32
    # For queues that are not uniform: how many images of the first one's size each request amounts to at a level
    # (of the first requests only, where there are many).
    weights: Callable[[Level], list[float]] | None = None

    @property
    def slack(self) -> float:
        """Seconds until the answer to the most urgent request must be on its way."""
        return self.queue.deadlines[0] - self.margin - self.now


class Policy:
    name = ""

    def choose(self, state: PolicyInput, levels: Sequence[Level]) -> Choice:
        """`levels` are those that the most urgent request allows, least accurate first; never empty."""
        raise AssertionError("every policy says how it chooses")

    def missed(self) -> None:
        """A request that could have been answered in time was refused, or is too late now."""

    def idle(self) -> None:
        """Nothing waits any more."""


class Fixed(Policy):
    """One width for all (the core offers no other); the batch is as large as the most urgent deadline permits."""

    name = "fixed"

    def choose(self, state: PolicyInput, levels: Sequence[Level]) -> Choice:
        return Choice(levels[0], largest(state, levels[0]))


class AccuracyFirst(Policy):
    """The highest width, unless the most urgent request would then miss its deadline with certainty."""

    name = "accuracy"

    def choose(self, state: PolicyInput, levels: Sequence[Level]) -> Choice:
        images = state.queue.waiting[0].images
        for level in reversed(levels):
            if state.table.typical(level.profile, images) <= state.slack:
                return Choice(level, largest(state, level))
        return Choice(levels[0], largest(state, levels[0]))


class Adaptive(Policy):
    """The most accurate width at which all that waits is in time, less what the time it takes is worth to others.

    1. A level is possible if some batch size lets everyone waiting end by their deadline at that level.
    2. Among the possible ones: the most accuracy for each image, minus the price of the engine time it takes. The
       price is learned: when a busy period is over, each decision in it is told what the tightest decision after it
       would have paid for a little more time. Bursts make time dear, and widths fall before the queue is long.
    """

    name = "adaptive"

    def __init__(self) -> None:
        self.prices: dict[Situation, float] = {}  # points of accuracy for a second of engine time
        self._trail: list[tuple[Situation, float]] = []  # of this busy period, with what a second was worth then
        self._worst = 0.0  # what a second was worth where even the lowest level was too slow

    def choose(self, state: PolicyInput, levels: Sequence[Level]) -> Choice:
        situation = min(len(state.queue), CROWD), math.frexp(state.rate)[1]
        price = TRUST * self.price(situation)
        best: Choice | None = None
        best_worth = -math.inf
        top = -1
        for place, level in enumerate(levels):
            row, drift = state.table.rows[level.profile], state.table.drift
            for images in possible_batches(state, level, larger=price > 0):
                top = place
                worth = level.accuracy - price * row[images] * drift / images
                if worth > best_worth:
                    best, best_worth = Choice(level, images), worth
        self._trail.append((situation, self._scarcity(state.table, levels, top)))
        if len(self._trail) > LONG:
            self.idle()
        return best or Choice(levels[0], largest(state, levels[0]))

    def price(self, situation: Situation) -> float:
        """What was learned; at a rate never met, what holds for the next lower one: it will be at least as much."""
        price = self.prices.get(situation)
        if price is None:
            crowd, rate = situation
            lower = max((r for c, r in self.prices if c == crowd and r < rate), default=None)
            price = 0.0 if lower is None else self.prices[crowd, lower]
            self.prices[situation] = price
        return price

    def _scarcity(self, table: LatencyTable, levels: Sequence[Level], top: int) -> float:
        """What a second more would be worth where levels[top] is the best that is possible; -1: none is."""
        self._worst = MISS / table.typical(levels[0].profile, 1)
        if top < 0:
            return self._worst
        if top == len(levels) - 1:
            return 0.0
        low, high = levels[top], levels[top + 1]
        more = table.typical(high.profile, 1) - table.typical(low.profile, 1)
        return (high.accuracy - low.accuracy) / max(more, 1e-6)

    def missed(self) -> None:
        if self._trail:
            situation, scarcity = self._trail[-1]
            self._trail[-1] = (situation, max(scarcity, self._worst))

    def idle(self) -> None:
        scarcity = 0.0
        for situation, own in reversed(self._trail):
            scarcity = max(scarcity, own)
            old = self.price(situation)
            self.prices[situation] = old + LEARN * (scarcity - old)
        self._trail.clear()


def possible_batches(state: PolicyInput, level: Level, larger: bool) -> list[int]:
    """Batch sizes with which all that waits would end in time at this level, smallest first.

    The smallest is enough where time costs nothing: a small batch is soon followed by a new decision, which may go up
    in width if nobody else has come. `larger` ones are offered only where they save time.
    """
    queue, table = state.queue, state.table
    row, drift, tail = table.rows[level.profile], table.drift, table.tail
    least = queue.waiting[0].images
    most = max(least, min(queue.images, state.max_batch))
    weights = None if queue.uniform or state.weights is None else state.weights(level)
    found: list[int] = []
    for images in (*(size for size in SIZES if least <= size < most), most):
        each = row[images] * drift
        if each * tail > state.slack:
            break  # larger ones take longer still
        if found and row[images] / images > WORTH_IT * row[found[-1]] / found[-1]:
            continue
        if weights is None:
            fits = uniform_fits(state, images, each, each * tail)
        else:
            fits = weighted_fits(state, weights, images, each, each * tail)
        if fits:
            found.append(images)
            if not larger:
                break
    return found


def uniform_fits(state: PolicyInput, images: int, each: float, first: float) -> bool:
    """Whether batches of so many images, `each` seconds long, come in time for all deadlines. The first is given
    some seconds more, for it is the one that is sure to be run like this."""
    deadlines, engines = state.queue.deadlines, state.engines
    stride = images * engines  # requests that are served in `each` seconds
    skip = 1 + len(deadlines) // (CHECKS * stride)
    end = state.now + state.margin + first + (skip - 1) * each
    for at in range(0, len(deadlines), stride * skip):
        if end > deadlines[at]:
            return False
        end += skip * each
    return True


def weighted_fits(state: PolicyInput, weights: Sequence[float], images: int, each: float, first: float) -> bool:
    """The same for requests that weigh more or less than one image."""
    start = state.now + state.margin + first
    total, before = sum(weights), 0.0
    for deadline, weight in zip(state.queue.deadlines, weights, strict=False):
        before += weight
        end = min(total, images * math.ceil(before / images))  # images done when this request's last batch is
        if start + max(0.0, end / images - 1) * each / state.engines > deadline:
            return False
    return True


def largest(state: PolicyInput, level: Level) -> int:
    """As many images as wait, or as still end before the most urgent deadline; at least the most urgent request."""
    row, factor = state.table.rows[level.profile], state.table.drift * state.table.tail
    least = state.queue.waiting[0].images
    images = max(least, min(state.queue.images, state.max_batch))
    while images > least and row[images] * factor > state.slack:
        images -= 1
    return images


def levels_of(accuracies: Mapping[str, float | None], table: LatencyTable) -> tuple[Level, ...]:
    """Profiles worth choosing among, least accurate first: those that no other one beats in both speed and accuracy.

    Without accuracies in the file the width stands for them: 100 (1 - 4^-k), so that each bit is worth a quarter of the
    one before it. Float runs only when it is asked for.
    """
    levels = []
    for profile in table.profiles:
        accuracy = accuracies.get(profile)
        if profile == str(FLOAT) or (accuracy is None and not profile.isdigit()):
            continue
        levels.append(Level(profile, 100 * (1 - 4.0 ** -int(profile)) if accuracy is None else accuracy))
    if not levels:
        raise ServeError("no profile of the latency table can be chosen by a policy; it needs a width of 1..8")
    levels.sort(key=lambda level: (table.typical(level.profile, 1), -level.accuracy))
    front: list[Level] = []
    for level in levels:
        if not front or level.accuracy > front[-1].accuracy:
            front.append(level)
    return tuple(front)
