"""Policies: the level and the size of the next batch. Pure functions of their input, shared by server and simulator.

In: PolicyInput (the queue, most urgent request first; the latency table; the time). Out: Choice. Called by core.py.
docs/concepts/policy.md explains how `adaptive` decides and what it was measured against.
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
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # batch sizes tried, besides the whole queue
CHECKS = 64  # deadlines checked per candidate; of a longer queue only every second, third, ... one

MISS = 100.0  # points of accuracy that an answer in time is worth by itself
LEARN = 0.003  # learning rate of prices: about three hundred decisions
TRUST = 0.5  # factor on the learned price: time saved now is not always still there when needed
LONG = 512  # decisions after which prices are updated even within a busy period
CROWD = 8  # queue lengths from here on share one price
Situation = tuple[int, int]  # queue length, arrival rate as a power of two: each situation has its own price
WORTH_IT = 0.9  # a larger batch must take less than this fraction of a smaller one's time per image


@dataclass(frozen=True)
class Level:
    """What a batch may run at: a width, a mixed profile (a plan), or the file's cascade. Its cost is the table's."""

    name: str
    accuracy: float  # percent, or a stand-in that grows with the width

    @property
    def bits(self) -> int | str:
        return int(self.name) if self.name.isdigit() else self.name


@dataclass(frozen=True)
class Choice:
    level: Level
    images: int  # at most so many


@dataclass
class PolicyInput:
    """What a policy decides by. The queue is not empty."""

    now: float
    queue: Queue
    table: LatencyTable  # for images of the most urgent request's size
    rate: float = 0.0  # recent arrivals, images a second
    margin: float = 0.0  # seconds kept back from every deadline
    engines: int = 1
    max_batch: int = 32
    # For queues that are not uniform: the cost of each request at a level, in images of the first request's size.
    # Covers only the first requests of a long queue.
    weights: Callable[[Level], list[float]] | None = None

    @property
    def slack(self) -> float:
        """Seconds until the most urgent request must be answered."""
        return self.queue.deadlines[0] - self.margin - self.now


class Policy:
    name = ""

    def choose(self, state: PolicyInput, levels: Sequence[Level]) -> Choice:
        """`levels` are those that the most urgent request allows, least accurate first; never empty."""
        raise NotImplementedError

    def missed(self) -> None:
        """A request that could have been answered in time was rejected, or is now too late."""

    def idle(self) -> None:
        """The queue is empty."""


class Fixed(Policy):
    """One width (the core offers no other); the batch is as large as the most urgent deadline permits."""

    name = "fixed"

    def choose(self, state: PolicyInput, levels: Sequence[Level]) -> Choice:
        return Choice(levels[0], largest_batch(state, levels[0]))


class AccuracyFirst(Policy):
    """The most accurate level at which the most urgent request can meet its deadline."""

    name = "accuracy"

    def choose(self, state: PolicyInput, levels: Sequence[Level]) -> Choice:
        images = state.queue.waiting[0].images
        for level in reversed(levels):
            if state.table.typical(level.name, images) <= state.slack:
                return Choice(level, largest_batch(state, level))
        return Choice(levels[0], largest_batch(state, levels[0]))


class Adaptive(Policy):
    """Maximizes expected accuracy minus the learned cost of engine time, among levels that meet all queued deadlines.

    1. A level is feasible if some batch size meets every queued deadline at that level.
    2. Among feasible levels we choose the highest accuracy minus price times engine time per image. The price of a
       second of engine time is learned: at the end of a busy period, each decision in it is given what one more second
       would have been worth to the tightest later decision. Bursts raise the price, so widths fall before the queue
       grows long.
    """

    name = "adaptive"

    def __init__(self) -> None:
        self.prices: dict[Situation, float] = {}  # points of accuracy for a second of engine time
        self._trail: list[tuple[Situation, float]] = []  # this busy period's decisions, and the value of a second
        self._worst = 0.0  # value of a second where even the lowest level is too slow

    def choose(self, state: PolicyInput, levels: Sequence[Level]) -> Choice:
        situation = min(len(state.queue), CROWD), math.frexp(state.rate)[1]
        price = TRUST * self.price(situation)
        best: Choice | None = None
        best_worth = -math.inf
        top = -1
        for place, level in enumerate(levels):
            row, drift = state.table.rows[level.name], state.table.drift
            for images in possible_batches(state, level, larger=price > 0):
                top = place
                worth = level.accuracy - price * row[images] * drift / images
                if worth > best_worth:
                    best, best_worth = Choice(level, images), worth
        self._trail.append((situation, self._scarcity(state.table, levels, top)))
        if len(self._trail) > LONG:
            self.idle()
        return best or Choice(levels[0], largest_batch(state, levels[0]))

    def price(self, situation: Situation) -> float:
        """The learned price; for an arrival rate never seen, that of the next lower rate, a lower bound."""
        price = self.prices.get(situation)
        if price is None:
            crowd, rate = situation
            lower = max((r for c, r in self.prices if c == crowd and r < rate), default=None)
            price = 0.0 if lower is None else self.prices[crowd, lower]
            self.prices[situation] = price
        return price

    def _scarcity(self, table: LatencyTable, levels: Sequence[Level], top: int) -> float:
        """The value of one more second where levels[top] is the best feasible level; -1: none is feasible."""
        self._worst = MISS / table.typical(levels[0].name, 1)
        if top < 0:
            return self._worst
        if top == len(levels) - 1:
            return 0.0
        low, high = levels[top], levels[top + 1]
        more = table.typical(high.name, 1) - table.typical(low.name, 1)
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
    """Batch sizes that meet every queued deadline at this level, smallest first.

    Without `larger` only the smallest is returned: after a small batch we soon decide again, and can choose a wider
    level if nobody else has arrived. Larger ones are returned only where they save time per image.
    """
    queue, table = state.queue, state.table
    row, high = table.rows[level.name], table.highs[level.name]
    drift, upper = table.drift, table.drift * table.tail
    least = queue.waiting[0].images
    most = max(least, min(queue.images, state.max_batch))
    weights = None if queue.uniform or state.weights is None else state.weights(level)
    found: list[int] = []
    for images in (*(size for size in SIZES if least <= size < most), most):
        each, first = row[images] * drift, high[images] * upper
        if first > state.slack:
            break  # larger ones take longer still
        if found and row[images] / images > WORTH_IT * row[found[-1]] / found[-1]:
            continue
        if weights is None:
            fits = uniform_fits(state, images, each, first)
        else:
            fits = weighted_fits(state, weights, images, each, first)
        if fits:
            found.append(images)
            if not larger:
                break
    return found


def uniform_fits(state: PolicyInput, images: int, each: float, first: float) -> bool:
    """Whether batches of this many images, `each` seconds long, meet all deadlines. The first batch is assumed to take
    `first` seconds, an upper quantile, since it is certain to run this way."""
    deadlines, engines = state.queue.deadlines, state.engines
    stride = images * engines  # requests served in `each` seconds
    skip = 1 + len(deadlines) // (CHECKS * stride)
    end = state.now + state.margin + first + (skip - 1) * each
    for at in range(0, len(deadlines), stride * skip):
        if end > deadlines[at]:
            return False
        end += skip * each
    return True


def weighted_fits(state: PolicyInput, weights: Sequence[float], images: int, each: float, first: float) -> bool:
    """The same for requests that cost more or less than one image."""
    start = state.now + state.margin + first
    total, before = sum(weights), 0.0
    for deadline, weight in zip(state.queue.deadlines, weights, strict=False):
        before += weight
        end = min(total, images * math.ceil(before / images))  # images done when this request's last batch is
        if start + max(0.0, end / images - 1) * each / state.engines > deadline:
            return False
    return True


def largest_batch(state: PolicyInput, level: Level) -> int:
    """All queued images, or as many as end before the most urgent deadline; at least the most urgent request."""
    row, factor = state.table.highs[level.name], state.table.drift * state.table.tail
    least = state.queue.waiting[0].images
    images = max(least, min(state.queue.images, state.max_batch))
    while images > least and row[images] * factor > state.slack:
        images -= 1
    return images


def pareto_front(
    names: Sequence[str], accuracies: Mapping[str, float | None], table: LatencyTable
) -> tuple[Level, ...]:
    """The levels that no other of these names is better than in both speed and accuracy, least accurate first.

    Where the file has no accuracies, 100 (1 - 4^-k) stands for that of k bits: each bit is worth a quarter of the one
    before it. Float, and plans and cascades of unknown accuracy, run only on request.
    """
    levels = []
    for name in names:
        accuracy = accuracies.get(name)
        if name == str(FLOAT) or (accuracy is None and not name.isdigit()):
            continue
        levels.append(Level(name, 100 * (1 - 4.0 ** -int(name)) if accuracy is None else accuracy))
    if not levels:
        raise ServeError(
            f"no policy can choose among {', '.join(names)}; it needs a width of 1..8, or a level of known accuracy"
        )
    levels.sort(key=lambda level: (table.typical(level.name, 1), -level.accuracy))
    front: list[Level] = []
    for level in levels:
        if not front or level.accuracy > front[-1].accuracy:
            front.append(level)
    return tuple(front)
