"""Simulator: the server's own SchedulerCore in virtual time, for one server or several.

In: arrival times and a SimulationSetup (latency table, accuracies, SLO, policy, servers, noise). Out: a
SimulationResult with the outcome of every request as its client saw it. Called by `anyprec simulate` and capacity.py.

    setup = SimulationSetup(times={"8": {1: 0.0025}, "1": {1: 0.001}}, accuracies={"8": 93.9, "1": 92.1}, slo=0.0075)
    result = simulate(poisson(400, 60), setup)
    result.attainment, result.accuracy, result.percentile(99)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anyprec.errors import Overloaded, ServeError
from anyprec.serve.scheduling.core import Batch, SchedulerCore, default_margin
from anyprec.serve.scheduling.latency import GoesOn, LatencyTable
from anyprec.serve.scheduling.queue import QueueLimits, Request

BALANCES = ("two", "least", "round", "random")
END, START, SCALE, FAIL = range(4)  # kinds of events
DRAWS = 4096  # random numbers drawn at a time


@dataclass(frozen=True)
class TimingNoise:
    """Noise of a real machine, in seconds; `spread` is the standard deviation of the log of a run's time."""

    way: tuple[float, float] = (0.00015, 0.0005)  # network delay each way, uniform
    spread: float = 0.03
    hiccup: float = 0.001  # mean length of a pause during a run ...
    hiccups: float = 0.5  # ... and the number of pauses per second of running


QUIET = TimingNoise((0.0, 0.0), 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Autoscale:
    """Adds and removes servers; meanwhile the width absorbs the load. docs/cli/simulate.md has the rule."""

    most: int
    least: int = 1
    busy: float = 0.6  # target utilization of engines if all ran at the widest level
    every: float = 5.0  # seconds between decisions
    starts_in: float = 30.0  # seconds until a new server takes requests
    cool: float = 60.0  # seconds of surplus before a server is removed


@dataclass(frozen=True)
class SimulationSetup:
    times: Mapping[str, Mapping[int, float]]  # level -> batch -> seconds
    accuracies: Mapping[str, float | None] = field(default_factory=dict)  # percent
    cascades: Mapping[str, GoesOn] = field(default_factory=dict)
    levels: Sequence[str] | None = None  # names of those that may run; None: all
    slo: float = 0.05
    policy: str = "adaptive"
    bits: int | str | None = None
    limits: QueueLimits = field(default_factory=QueueLimits)
    margin: float | None = None  # seconds; None: as the scheduler's own
    engines: int = 1
    servers: int = 1
    balance: str = "two"
    noise: TimingNoise = field(default_factory=TimingNoise)
    autoscale: Autoscale | None = None
    failures: Sequence[float] = ()  # times at which a server fails for good; its requests go to others


class SimulatedServer:
    """One server of the simulation: a SchedulerCore and its engines."""

    def __init__(self, setup: SimulationSetup) -> None:
        self.core = SchedulerCore(
            setup.accuracies,
            LatencyTable(setup.times, setup.limits.max_batch, setup.cascades),
            policy=setup.policy,
            bits=setup.bits,
            slo=setup.slo,
            limits=setup.limits,
            margin=default_margin(setup.slo) if setup.margin is None else setup.margin,
            engines=setup.engines,
            levels=setup.levels,
        )
        self.load = 0  # accepted requests not yet answered
        self.alive = True


@dataclass
class SimulationResult:
    """Arrays with one entry per request, in the order of sending."""

    setup: SimulationSetup
    sent: np.ndarray  # seconds
    latency: np.ndarray  # seconds, as the client saw it; inf: no answer
    level: np.ndarray  # index into `levels`; -1: no answer
    levels: tuple[str, ...]
    accuracies: np.ndarray  # of `levels`, percent
    batches: int = 0
    busy: float = 0.0  # engine seconds
    server_seconds: float = 0.0
    servers: list[tuple[float, int]] = field(default_factory=list)  # (time, how many from then on)

    @property
    def in_time(self) -> np.ndarray:
        in_time: np.ndarray = self.latency <= self.setup.slo
        return in_time

    @property
    def answered(self) -> np.ndarray:
        answered: np.ndarray = self.level >= 0
        return answered

    @property
    def seconds(self) -> float:
        return float(self.sent[-1]) if len(self.sent) else 0.0

    @property
    def attainment(self) -> float:
        """Share of all requests whose answer came within the SLO."""
        return float(self.in_time.mean()) if len(self.sent) else 1.0

    @property
    def accuracy(self) -> float:
        """Mean accuracy expected of the answers."""
        levels = self.level[self.answered]
        return float(self.accuracies[levels].mean()) if len(levels) else math.nan

    @property
    def effective(self) -> float:
        """Expected share of all requests answered correctly and in time, in percent."""
        return float(self.accuracies[self.level[self.in_time]].sum() / max(1, len(self.sent)))

    @property
    def goodput(self) -> float:
        """Answers in time per second."""
        return float(self.in_time.sum()) / self.seconds if self.seconds else 0.0

    def percentile(self, q: float) -> float:
        """Of the latency of answers, in seconds."""
        answered = self.latency[self.answered]
        return float(np.percentile(answered, q)) if len(answered) else math.nan

    @property
    def histogram(self) -> dict[str, float]:
        """Share of the answers at each level."""
        counts = np.bincount(self.level[self.answered], minlength=len(self.levels))
        return {p: float(c) / max(1, counts.sum()) for p, c in zip(self.levels, counts, strict=True) if c}

    def timeline(self, window: float | None = None) -> list[dict[str, float | None]]:
        """A row for each `window` seconds (by default a sixtieth of the whole), as loadtest.plots draws them."""
        window = window or max(0.1, self.seconds / 60)
        count = max(1, math.ceil(self.seconds / window - 1e-9)) if len(self.sent) else 0
        number = np.minimum(self.sent / window, count - 1).astype(np.int64)  # the last request is in the last row
        used = sorted(set(self.level[self.answered].tolist()))
        rows = []
        for i in range(count):
            here = number == i
            answered = here & self.answered
            latency = 1e3 * self.latency[answered]
            row: dict[str, float | None] = {
                "second": i * window,
                "load": here.sum() / window,
                "in_time": (here & self.in_time).sum() / window,
                "rejected": (here & ~self.answered).sum() / window,
                "p50_ms": float(np.percentile(latency, 50)) if len(latency) else None,
                "p99_ms": float(np.percentile(latency, 99)) if len(latency) else None,
                "accuracy": float(self.accuracies[self.level[answered]].mean()) if len(latency) else None,
            }
            for level in used:
                share = float((self.level[answered] == level).mean()) if len(latency) else None
                row[f"share_{self.levels[level]}"] = share
            rows.append(row)
        return rows

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": self.setup.policy,
            "bits": self.setup.bits,
            "requests": len(self.sent),
            "seconds": self.seconds,
            "per_second": len(self.sent) / self.seconds if self.seconds else 0.0,
            "attainment": self.attainment,
            "accuracy": finite(self.accuracy),
            "effective_accuracy": self.effective,
            "goodput": self.goodput,
            "p50_ms": finite(1e3 * self.percentile(50)),
            "p99_ms": finite(1e3 * self.percentile(99)),
            "bits_histogram": self.histogram,
            "mean_batch": float(self.answered.sum()) / self.batches if self.batches else 0.0,
            "busy": self.busy / (self.server_seconds * self.setup.engines) if self.server_seconds else 0.0,
            "servers": self.server_seconds / self.seconds if self.seconds else float(self.setup.servers),
        }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def simulate(
    arrivals: np.ndarray, setup: SimulationSetup, seed: int = 0, tick: Callable[[int], None] | None = None
) -> SimulationResult:
    """Send a request at each of these times (ascending seconds). `tick` is called with the number done since."""
    return Simulation(np.asarray(arrivals, np.float64), setup, seed).run(tick)


class Simulation:
    def __init__(self, sent: np.ndarray, setup: SimulationSetup, seed: int) -> None:
        if setup.balance not in BALANCES:
            raise ServeError(f"balance={setup.balance!r} is not known; choose one of {', '.join(BALANCES)}")
        if setup.servers < 1 or setup.engines < 1:
            raise ServeError("a simulation needs at least one server with one engine")
        self.setup = setup
        self.random = np.random.default_rng([seed, 1])  # not the stream of the arrivals
        self.servers = [SimulatedServer(setup) for _ in range(setup.servers)]
        first = self.servers[0].core
        levels = tuple(first.all_levels)
        self.place = {name: i for i, name in enumerate(levels)}
        self.rows, self.whole = dict(first.table.rows), dict(first.table.whole)  # true times; cores keep estimates
        low, high = setup.noise.way
        self.reach = sent + self.random.uniform(low, high, len(sent))
        self.back = self.random.uniform(low, high, len(sent))
        self.order = np.argsort(self.reach, kind="stable")
        self.result = SimulationResult(
            setup,
            sent,
            np.full(len(sent), np.inf),
            np.full(len(sent), -1, np.int32),
            levels,
            np.array([level.accuracy for level in first.all_levels.values()]),
            servers=[(0.0, setup.servers)],
        )
        self.events: list[tuple[float, int, int, Any]] = []
        self.count = 0  # of events, to keep those of one time in order
        self.turn = 0  # of balance "round"
        self.counted_at = 0.0
        self.starting = 0
        self.arrived_before = 0
        self.over_since = math.inf  # start of the current surplus of servers
        self._normal: list[float] = []
        self._uniform: list[float] = []
        if setup.autoscale is not None:
            self.push(setup.autoscale.every, SCALE, None)
        for time in setup.failures:
            self.push(time, FAIL, None)

    def push(self, time: float, kind: int, what: Any) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, kind, what))

    def run(self, tick: Callable[[int], None] | None) -> SimulationResult:
        order, reach, slo, events = self.order, self.reach, self.setup.slo, self.events
        total, at = len(order), 0
        now = 0.0
        while at < total or any(kind == END for _, _, kind, _ in events):
            coming = reach[order[at]] if at < total else math.inf
            if coming < (events[0][0] if events else math.inf):
                now = float(coming)
                self.send(Request(None, now + slo, arrived=now), int(order[at]), now)
                at += 1
                if tick is not None and at % 1000 == 0:
                    tick(1000)
                continue
            now, _, kind, what = heapq.heappop(events)
            if kind == END:
                self.end(now, *what)
            elif kind == START:
                self.starting -= 1
                self.recount(now)
                self.servers.append(SimulatedServer(self.setup))
                self.result.servers.append((now, len(self.servers)))
            elif kind == FAIL:
                self.fail(now)
            elif at < total:
                self.scale(at, now)
        self.recount(max(now, self.result.seconds))
        if tick is not None:
            tick(total % 1000)
        return self.result

    # --- Requests -------------------------------------------------------------------------------------------------

    def send(self, request: Request, number: int, now: float) -> None:
        if not self.servers:
            return
        server = self.pick()
        request.done = number  # type: ignore[assignment]  # its number: nobody is called here
        try:
            server.core.arrive(request, now)
        except Overloaded:
            return
        server.load += 1
        if len(server.core.running) < self.setup.engines:
            self.begin(server, now)

    def pick(self) -> SimulatedServer:
        servers = self.servers
        if len(servers) == 1:
            return servers[0]
        if self.setup.balance == "least":
            return min(servers, key=lambda server: server.load)
        if self.setup.balance == "round":
            self.turn += 1
            return servers[self.turn % len(servers)]
        one = servers[int(self.uniform() * len(servers))]
        if self.setup.balance == "random":
            return one
        other = servers[int(self.uniform() * len(servers))]
        return one if one.load <= other.load else other

    def begin(self, server: SimulatedServer, now: float) -> None:
        batch = server.core.next(now)
        for _ in server.core.take_rejected():
            server.load -= 1
        if batch is None:
            return
        noise = self.setup.noise
        seconds, went_on = self.true_time(batch)
        if noise.spread:
            seconds *= math.exp(noise.spread * self.normal())
        if noise.hiccups and self.uniform() < noise.hiccups * seconds:
            seconds += -noise.hiccup * math.log(1 - self.uniform())
        self.result.busy += seconds
        self.push(now + seconds, END, (server, batch, seconds, went_on))

    def true_time(self, batch: Batch) -> tuple[float, int | None]:
        """Seconds without noise, and how many images of a cascade go on: a draw by its share."""
        way = self.setup.cascades.get(batch.level.name)
        if way is None:
            return self.whole[batch.level.name][batch.images], None
        went_on = sum(self.uniform() < way.share for _ in range(batch.images))
        first = self.whole[way.first]
        return first[batch.images] + max(0.0, self.whole[batch.level.name][went_on] - first[went_on]), went_on

    def end(self, now: float, server: SimulatedServer, batch: Batch, seconds: float, went_on: int | None) -> None:
        if not server.alive:
            return
        server.core.finish(batch, seconds, now, went_on)
        server.load -= len(batch.requests)
        result = self.result
        result.batches += 1
        level = self.place[batch.level.name]
        for request in batch.requests:
            number: Any = request.done
            result.level[number] = level
            result.latency[number] = now + self.back[number] - result.sent[number]
        self.begin(server, now)

    # --- Servers --------------------------------------------------------------------------------------------------

    def fail(self, now: float) -> None:
        """One server fails; the balancer sends its requests to others."""
        if not self.servers:
            return
        self.recount(now)
        server = self.servers.pop()
        server.alive = False
        self.result.servers.append((now, len(self.servers)))
        core = server.core
        running = [request for batch in core.running for request in batch.requests]
        for request in [*running, *core.queue.waiting, *core.queue.late]:
            number: Any = request.done
            self.send(Request(None, request.deadline, arrived=request.arrived), number, now)

    def scale(self, arrived: int, now: float) -> None:
        rule = self.setup.autoscale
        assert rule is not None
        self.push(now + rule.every, SCALE, None)
        rate = (arrived - self.arrived_before) / rule.every
        self.arrived_before = arrived
        # Servers needed if every request ran alone at the widest level.
        top = self.servers[0].core.levels[-1].name if self.servers else next(iter(self.rows))
        needed = rate * self.rows[top][1] / (rule.busy * self.setup.engines)
        wanted = min(rule.most, max(rule.least, math.ceil(needed)))
        have = len(self.servers) + self.starting
        if wanted >= have:
            self.over_since = math.inf
            for _ in range(wanted - have):
                self.starting += 1
                self.push(now + rule.starts_in, START, None)
        elif now - (self.over_since if self.over_since < math.inf else now) >= rule.cool and len(self.servers) > 1:
            self.leave(now)
        elif self.over_since == math.inf:
            self.over_since = now

    def leave(self, now: float) -> None:
        """One server takes no more requests, and ends after its last."""
        self.recount(now)
        self.servers.remove(min(self.servers, key=lambda server: server.load))
        self.result.servers.append((now, len(self.servers)))

    def recount(self, now: float) -> None:
        self.result.server_seconds += len(self.servers) * (now - self.counted_at)
        self.counted_at = now

    # --- Chance ---------------------------------------------------------------------------------------------------

    def uniform(self) -> float:
        if not self._uniform:
            self._uniform = self.random.random(DRAWS).tolist()
        return self._uniform.pop()

    def normal(self) -> float:
        if not self._normal:
            self._normal = self.random.standard_normal(DRAWS).tolist()
        return self._normal.pop()
