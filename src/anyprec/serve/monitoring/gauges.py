"""ModelGauges: values of /metrics that are read when it is scraped: policy, widths, engine time, queue, last 10 s.

A collector for prometheus_client, made by http/app.py. Metrics holds what is counted as it happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anyprec.serve.models import LoadedModel, ModelRepository, ServedModel
from anyprec.serve.monitoring.metrics import Metrics
from anyprec.serve.monitoring.recent import mean_accuracy
from anyprec.serve.scheduling.policy import POLICIES

# Name -> kind, help, labels beside the model.
READ: dict[str, tuple[type[Metric], str, tuple[str, ...]]] = {
    "model_ready": (GaugeMetricFamily, "1 if the model is loaded", ()),
    "model_loads": (GaugeMetricFamily, "Times the model file was loaded", ()),
    "slo_seconds": (GaugeMetricFamily, "The latency target", ()),
    "queue_requests": (GaugeMetricFamily, "Queued requests", ()),
    "queue_images": (GaugeMetricFamily, "Queued images", ()),
    "attainment_ratio": (GaugeMetricFamily, "SLO attainment: share of requests answered in time in the last 10 s", ()),
    "overloaded": (GaugeMetricFamily, "1 while the model is overloaded, as the log and the page say", ()),
    "policy": (GaugeMetricFamily, "1 for the policy in force, 0 for the others", ("policy",)),
    "width_held": (
        GaugeMetricFamily,
        "1 for the width the policy is fixed to; 0 for all under other policies",
        ("bits",),
    ),
    "width_last": (GaugeMetricFamily, "1 for the width the policy chose for the last batch", ("bits",)),
    "width_accuracy_ratio": (GaugeMetricFamily, "Accuracy of a width, from the model file", ("bits",)),
    "expected_accuracy_ratio": (GaugeMetricFamily, "Expected accuracy of the answers of the last 10 s", ()),
    "engine_seconds": (CounterMetricFamily, "Engine time by width", ("bits",)),
    "engine_batches": (CounterMetricFamily, "Batches by width", ("bits",)),
    "cancelled_runs": (
        CounterMetricFamily,
        "Batches stopped between two steps, since no client waited for them any more",
        (),
    ),
    "precision_changes": (CounterMetricFamily, "Times the policy changed the width from one batch to the next", ()),
}
Numbers = Mapping[str, float | Mapping[str, float]]  # by name; by label value where READ has a label


class ModelGauges(Collector):
    def __init__(self, models: ModelRepository, metrics: Metrics) -> None:
        self.models, self.metrics = models, metrics
        metrics.registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # without this, registering would collect at once

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Any] = {}
        for served in self.models:
            for name, value in self.numbers(served).items():
                kind, about, labels = READ[name]
                if name not in families:
                    families[name] = kind(f"anyprec_{name}", about, labels=["model", *labels])  # type: ignore[call-arg]
                for label, one in value.items() if isinstance(value, Mapping) else (("", value),):
                    families[name].add_metric([served.name, label] if labels else [served.name], float(one))
        return families.values()

    def numbers(self, served: ServedModel) -> Numbers:
        found = {"model_ready": float(served.now is not None), "model_loads": float(served.loads)}
        return found if served.now is None else {**found, **self._loaded(served, served.now)}

    def _loaded(self, served: ServedModel, loaded: LoadedModel) -> Numbers:
        stats = loaded.scheduler.stats()
        total = self.metrics.recent[served.name].over(time.time())
        levels = loaded.signature.levels
        known = {name: accuracy / 100 for name, accuracy in loaded.accuracies.items() if accuracy is not None}
        found: dict[str, float | dict[str, float]] = {
            "slo_seconds": self.models.settings.slo_s,
            "queue_requests": stats["queue"]["requests"],
            "queue_images": stats["queue"]["images"],
            "attainment_ratio": 1.0 if total.attainment is None else total.attainment,
            "overloaded": self.metrics.overloads[served.name].since is not None,
            "policy": {name: float(name == stats["policy"]) for name in POLICIES},
            "width_held": {name: float(name == str(stats["bits"])) for name in levels},
            "width_last": {name: float(name == stats["last_bits"]) for name in levels},
            "width_accuracy_ratio": known,
            "engine_seconds": stats["engine_s"],
            "engine_batches": stats["batches"],
            "cancelled_runs": stats["cancelled_runs"],
            "precision_changes": stats["precision_changes"],
        }
        accuracy = mean_accuracy(total.bits, lambda bits: loaded.accuracies.get(str(bits)))
        if accuracy is not None:
            found["expected_accuracy_ratio"] = accuracy / 100
        return found
