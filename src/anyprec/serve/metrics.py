"""What happened, counted: answers in; Prometheus text for /metrics and the last minutes, second by second, out.

app.py notes every request here, from the event loop's thread alone. prometheus_client holds the counters; Recent holds
what the page draws, in memory that does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
KEEP = 300  # seconds of history for the page

# Latencies of one second fall into buckets 8 % apart: a quantile is off by at most 4 %.
FIRST, GROWTH, BUCKETS = 20e-6, 1.08, 200  # 20 us to 97 s
_PER_LOG = 1 / math.log(GROWTH)


class Metrics:
    """Of one server. Models are known beforehand: no request can make a new label."""

    def __init__(self, clock: Callable[[], float]) -> None:
        disable_created_metrics()  # a line for each counter that nobody reads
        self.clock = clock
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=self.registry)
        own: dict[str, Any] = {"registry": self.registry, "namespace": "anyprec"}
        self.requests = Counter("requests", "HTTP requests by status", ["model", "status"], **own)
        self.seconds = Histogram("latency_seconds", "From arrival to answer", ["model"], buckets=SECONDS, **own)
        self.queue_seconds = Histogram("queue_seconds", "Time in the queue", ["model"], buckets=SECONDS, **own)
        self.batches = Histogram("batch_images", "Images in the batch", ["model"], buckets=BATCHES, **own)
        self.bits = Counter("answers", "Answers by width", ["model", "bits"], **own)
        self.in_time = Counter("deadlines", "Answers by whether they met their deadline", ["model", "met"], **own)
        self.reloads = Counter("reloads", "Model files loaded anew, or refused", ["model", "result"], **own)
        self.connections = Gauge("connections", "Open connections", **own)
        self.held = Gauge("held_bytes", "Bytes of request bodies in memory", **own)
        self.recent: dict[str, Recent] = {}
        self._of: dict[str, _Model] = {}
        self._no_model: dict[int, Any] = {}

    def add_model(self, name: str) -> None:
        if name not in self.recent:
            self.recent[name] = Recent()
            self._of[name] = _Model(self, name)

    def collect_from(self, read: Callable[[], Iterable[tuple[str, dict[str, Any]]]]) -> None:
        """`read` gives each model's name and its scheduler's numbers, whenever /metrics is asked for."""
        self.registry.register(_Schedulers(read))

    def answered(
        self, model: str, bits: int | str, latency_s: float, queue_s: float, run_s: float, batch: int, images: int,
        met: bool,
    ) -> None:  # fmt: skip
        of = self._of[model]
        of.seconds.observe(latency_s)
        of.queue_seconds.observe(queue_s)
        of.batches.observe(batch)
        child = of.bits.get(bits)
        if child is None:
            child = of.bits[bits] = self.bits.labels(model, str(bits))
        child.inc()
        (of.met if met else of.missed).inc()
        of.totals.add(self.clock(), latency_s, queue_s, run_s, batch, images)
        self.recent[model].answered(self.clock(), bits, latency_s, met)

    def finished(self, model: str, status: int) -> None:
        """model: "" where the request was for none, or for one that is not there."""
        of = self._of.get(model)
        statuses = self._no_model if of is None else of.statuses
        child = statuses.get(status)
        if child is None:
            child = statuses[status] = self.requests.labels("" if of is None else model, str(status))
        child.inc()
        if of is not None and status >= 400:
            of.totals.failed += 1

    def refused(self, model: str) -> None:
        self.recent[model].refused(self.clock())

    def totals(self, model: str) -> dict[str, Any]:
        return self._of[model].totals.record()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Model:
    """The children of one model's label, looked up once: a look-up costs as much as the count."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.seconds = metrics.seconds.labels(name)
        self.queue_seconds = metrics.queue_seconds.labels(name)
        self.batches = metrics.batches.labels(name)
        self.met = metrics.in_time.labels(name, "true")
        self.missed = metrics.in_time.labels(name, "false")
        self.bits: dict[int | str, Any] = {}
        self.statuses: dict[int, Any] = {}
        self.totals = Totals()


class Totals:
    """Sums since the start, in Triton's form."""

    def __init__(self) -> None:
        self.last = 0.0  # Unix time
        self.answered = self.images = self.failed = 0
        self.latency_s = self.queue_s = self.run_s = 0.0
        self.executions = 0.0  # a batch shared by several requests counts in parts
        self.batches: dict[int, tuple[float, float]] = {}  # images -> executions, seconds

    def add(self, now: float, latency_s: float, queue_s: float, run_s: float, batch: int, images: int) -> None:
        self.last = now
        self.answered += 1
        self.images += images
        self.latency_s += latency_s
        self.queue_s += queue_s
        self.run_s += run_s
        part = images / batch
        self.executions += part
        executions, seconds = self.batches.get(batch, (0.0, 0.0))
        self.batches[batch] = executions + part, seconds + part * run_s

    def record(self) -> dict[str, Any]:
        def sums(count: float, seconds: float) -> dict[str, int]:
            return {"count": round(count), "ns": round(1e9 * seconds)}

        between = max(0.0, self.latency_s - self.queue_s - self.run_s)  # on the way in and out
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


class _Schedulers(Collector):
    def __init__(self, read: Callable[[], Iterable[tuple[str, dict[str, Any]]]]) -> None:
        self.read = read

    def describe(self) -> Iterable[Metric]:
        return []  # known when asked; without this the registry would ask at once

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, numbers in self.read():
            for key, value in numbers.items():
                if key not in families:
                    families[key] = GaugeMetricFamily(f"anyprec_{key}", f"The scheduler's {key}", labels=["model"])
                families[key].add_metric([name], float(value))
        return families.values()


class Second:
    """One second of one model."""

    __slots__ = ("answered", "at", "bits", "latencies", "missed", "refused")

    def __init__(self) -> None:
        self.at = -1
        self.clear(-1)

    def clear(self, at: int) -> None:
        self.at = at
        self.answered = self.missed = self.refused = 0
        self.bits: dict[int | str, int] = {}
        self.latencies: dict[int, int] = {}  # bucket -> answers


class Recent:
    """The last KEEP seconds, in a ring."""

    def __init__(self) -> None:
        self.ring = [Second() for _ in range(KEEP)]

    def second(self, now: float) -> Second:
        at = int(now)
        found = self.ring[at % KEEP]
        if found.at != at:
            found.clear(at)
        return found

    def answered(self, now: float, bits: int | str, latency_s: float, met: bool) -> None:
        second = self.second(now)
        second.answered += 1
        second.missed += not met
        second.bits[bits] = second.bits.get(bits, 0) + 1
        place = bucket(latency_s)
        second.latencies[place] = second.latencies.get(place, 0) + 1

    def refused(self, now: float) -> None:
        self.second(now).refused += 1

    def series(
        self, now: float, seconds: int, accuracy: Callable[[int | str], float | None] | None = None
    ) -> list[dict[str, Any]]:
        """The `seconds` full seconds before `now`, oldest first; the one that runs is not among them."""
        rows = []
        for ago in range(min(seconds, KEEP - 1), 0, -1):
            at = int(now) - ago
            second = self.ring[at % KEEP]
            rows.append(row(second if second.at == at else None, ago, accuracy))
        return rows


def row(second: Second | None, ago: int, accuracy: Callable[[int | str], float | None] | None = None) -> dict[str, Any]:
    second = Second() if second is None else second
    return {
        "ago": ago,
        "answered": second.answered,
        "missed": second.missed,
        "refused": second.refused,
        "bits": {str(bits): count for bits, count in second.bits.items()},
        "p50_ms": quantile_ms(second.latencies, 0.5),
        "p99_ms": quantile_ms(second.latencies, 0.99),
        "accuracy": mean_accuracy(second.bits, accuracy),
    }


def mean_accuracy(bits: dict[int | str, int], accuracy: Callable[[int | str], float | None] | None) -> float | None:
    """Of what was served, as the file notes it for each width; None where it notes none."""
    if not bits or accuracy is None:
        return None
    known = [(accuracy(width), count) for width, count in bits.items()]
    if any(value is None for value, _ in known):
        return None
    return round(sum((value or 0.0) * count for value, count in known) / sum(bits.values()), 3)


def bucket(seconds: float) -> int:
    if seconds <= FIRST:
        return 0
    return min(BUCKETS - 1, int(math.log(seconds / FIRST) * _PER_LOG) + 1)


def quantile_ms(latencies: dict[int, int], q: float) -> float | None:
    """The middle of the bucket in which the quantile lies."""
    total = sum(latencies.values())
    if not total:
        return None
    rank, seen = max(1, math.ceil(q * total)), 0
    for place in sorted(latencies):
        seen += latencies[place]
        if seen >= rank:
            break
    return round(1e3 * FIRST * GROWTH ** (place - 0.5), 4)
