"""Metrics: counts every request; gives Prometheus text for /metrics, and the last minutes second by second.

http/app.py reports each request here once its answer is sent, always from the event loop's thread. prometheus_client
holds the counters; RecentSeconds the last seconds, which the page, the overload log lines and the gauges read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from anyprec.serve.monitoring.condition import OverloadDetector, PrecisionLog
from anyprec.serve.monitoring.recent import (
    CLIENT_GONE,
    EXPIRED,
    FAILED,
    IN_TIME,
    LATE,
    LEFT,
    REFUSED,
    TURNED_AWAY,
    RecentSeconds,
)

if TYPE_CHECKING:
    from anyprec.serve.scheduling.answer import Answer

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
BUSY = (429, 503)


@dataclass(frozen=True)
class ServedRun:
    """The batch that an answer was computed in."""

    bits: int | str  # the level
    queue_s: float
    run_s: float
    batch: int  # images that ran together
    images: int  # of them, this request's
    went_on: int | None = None  # of those, beyond the first stage; None: no cascade

    @staticmethod
    def of(answer: Answer, images: int) -> ServedRun:
        return ServedRun(answer.bits, answer.queue_s, answer.run_s, answer.batch, images, answer.went_on)


class Metrics:
    """Metrics of one server. Models are registered beforehand, so no request can create a new label."""

    def __init__(self, clock: Callable[[], float]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more line per counter, which nobody reads
        self.clock = clock
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=self.registry)
        own: dict[str, Any] = {"registry": self.registry, "namespace": "anyprec"}
        self.requests = Counter("requests", "HTTP requests by status", ["model", "status"], **own)
        self.seconds = Histogram(
            "latency_seconds",
            "Latency of answers, from a request's last byte to its answer's last byte",
            ["model"],
            buckets=SECONDS,
            **own,
        )
        self.queue_seconds = Histogram("queue_seconds", "Time in the queue", ["model"], buckets=SECONDS, **own)
        self.batches = Histogram("batch_images", "Images in the batch", ["model"], buckets=BATCHES, **own)
        self.bits = Counter("answers", "Answers by level", ["model", "bits"], **own)
        self.cascaded = Counter(
            "cascade_images",
            "Images that ran at the cascade, by whether they went beyond its first stage",
            ["model", "went_on"],
            **own,
        )
        self.in_time = Counter("deadlines", "Answers by whether they met their deadline", ["model", "met"], **own)
        self.outcomes = Counter(
            "outcomes",
            "Inference requests by outcome, as their clients saw it",
            ["model", "outcome"],
            **own,
        )
        self.turned_away = Counter("turned_away", "Connections refused before a request was read", ["status"], **own)
        self.reloads = Counter("reloads", "Model files loaded or refused", ["model", "result"], **own)
        self.connections = Gauge("connections", "Open connections", **own)
        self.killed = Counter(
            "killed_jobs", "Images and long requests killed because they took too long to decode", **own
        )
        self.held = Gauge("held_bytes", "Bytes of request bodies in memory", **own)
        self.recent: dict[str, RecentSeconds] = {}
        self.overloads: dict[str, OverloadDetector] = {}
        self.precisions: dict[str, PrecisionLog] = {}
        self._of: dict[str, _ModelCounters] = {}
        self._no_model: dict[int, Any] = {}

    def add_model(self, name: str) -> None:
        if name not in self.recent:
            self.recent[name] = RecentSeconds()
            self.overloads[name] = OverloadDetector(name)
            self.precisions[name] = PrecisionLog(name)
            self._of[name] = _ModelCounters(self, name)

    def ended(self, model: str, status: int, met: bool, latency_s: float, runs: Sequence[ServedRun]) -> None:
        """An inference request has ended: answered with `runs`, refused, failed, or abandoned by its client.

        latency_s: from the request's last byte to the answer's last byte. met: within its deadline.
        """
        if status == 200 and runs:
            outcome = IN_TIME if met else LATE
        elif status in BUSY:
            outcome = REFUSED
        elif status == 504:
            outcome = EXPIRED
        elif status >= 500:
            outcome = FAILED
        elif status == CLIENT_GONE and not met:
            outcome = LEFT
        else:
            return  # the client's mistake, or it did not wait for its deadline
        now = self.clock()
        of = self._of[model]
        of.outcome(outcome).inc()
        answered = outcome in (IN_TIME, LATE)
        widths = [run.bits for run in runs] if answered else []
        second = self.recent[model].second(now)
        second.count(outcome, latency_s if answered else None, widths)
        if answered:
            of.seconds.observe(latency_s)
            (of.met if met else of.missed).inc()
            of.answered(now, latency_s, runs)
            for run in runs:
                if run.went_on is not None:
                    second.count_cascade(run.images, run.went_on)

    def turn_away(self, status: int) -> None:
        """A connection was refused before its request was read."""
        self.turned_away.labels(str(status)).inc()
        if status in BUSY:
            for recent in self.recent.values():
                recent.second(self.clock()).count(TURNED_AWAY)

    def finished(self, model: str, status: int) -> None:
        """Any HTTP request has ended. model: "" where the path names none, or an unknown one."""
        of = self._of.get(model)
        statuses = self._no_model if of is None else of.statuses
        child = statuses.get(status)
        if child is None:
            child = statuses[status] = self.requests.labels("" if of is None else model, str(status))
        child.inc()
        if of is not None and status >= 400:
            of.totals.failed += 1

    def totals(self, model: str) -> dict[str, Any]:
        return self._of[model].totals.record()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _ModelCounters:
    """The counters of one model, looked up once: looking one up costs as much as counting."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.seconds = metrics.seconds.labels(name)
        self.queue_seconds = metrics.queue_seconds.labels(name)
        self.batches = metrics.batches.labels(name)
        self.met = metrics.in_time.labels(name, "true")
        self.missed = metrics.in_time.labels(name, "false")
        self.outcome = lru_cache(maxsize=None)(lambda outcome: metrics.outcomes.labels(name, outcome))
        self.bits = lru_cache(maxsize=None)(lambda bits: metrics.bits.labels(name, str(bits)))
        self.went_on = metrics.cascaded.labels(name, "true")
        self.stayed = metrics.cascaded.labels(name, "false")
        self.statuses: dict[int, Any] = {}
        self.totals = TritonStatistics()

    def answered(self, now: float, latency_s: float, runs: Sequence[ServedRun]) -> None:
        for run in runs:
            self.queue_seconds.observe(run.queue_s)
            self.batches.observe(run.batch)
            self.bits(run.bits).inc()
            if run.went_on is not None:
                self.went_on.inc(run.went_on)
                self.stayed.inc(run.images - run.went_on)
        self.totals.add(now, latency_s, runs)


class TritonStatistics:
    """Sums since the start, in the form of Triton's statistics extension."""

    def __init__(self) -> None:
        self.last = 0.0  # Unix time
        self.answered = self.images = self.failed = 0
        self.latency_s = self.queue_s = self.run_s = 0.0
        self.executions = 0.0  # a batch shared by several requests counts in parts
        self.batches: dict[int, tuple[float, float]] = {}  # images -> executions, seconds

    def add(self, now: float, latency_s: float, runs: Sequence[ServedRun]) -> None:
        self.last = now
        self.answered += 1
        self.latency_s += latency_s
        for run in runs:
            self.images += run.images
            self.queue_s += run.queue_s
            self.run_s += run.run_s
            part = run.images / run.batch
            self.executions += part
            executions, seconds = self.batches.get(run.batch, (0.0, 0.0))
            self.batches[run.batch] = executions + part, seconds + part * run.run_s

    def record(self) -> dict[str, Any]:
        def sums(count: float, seconds: float) -> dict[str, int]:
            return {"count": round(count), "ns": round(1e9 * seconds)}

        between = max(0.0, self.latency_s - self.queue_s - self.run_s)  # reading and sending
        return {
            "last_inference": round(1e3 * self.last),
            "inference_count": self.images,
            "execution_count": round(self.executions),
            "inference_stats": {
                "success": sums(self.answered, self.latency_s),
                "fail": sums(self.failed, 0.0),
                "queue": sums(self.answered, self.queue_s),
                "compute_input": sums(self.answered, 0.0),
                "compute_infer": sums(self.answered, self.run_s),
                "compute_output": sums(self.answered, between),
            },
            "batch_stats": [
                {
                    "batch_size": batch,
                    "compute_input": sums(executions, 0.0),
                    "compute_infer": sums(executions, seconds),
                    "compute_output": sums(executions, 0.0),
                }
                for batch, (executions, seconds) in sorted(self.batches.items())
            ],
        }
