"""search(...): which bits each layer should have. A model file and some images in, the Pareto front of plans out.

1. Sensitivity: the loss when one layer alone is narrowed from the widest width, and when one alone is widened from the
   narrowest; 2. a multiple-choice knapsack over each (knapsack.py); 3. greedy rounds on the true loss: neighbors of the
front, one layer one step up or down. Loss is measured in the engine (trial.py), against the widest width: no labels are
needed. Called by cli/search.py; store.py writes a plan into the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from anyprec.errors import InputError
from anyprec.run.model import PackedModel
from anyprec.search.cost import LayerCosts, call_times, layer_bytes, layer_times
from anyprec.search.knapsack import best_choices
from anyprec.search.layers import Plan, PlanLayers
from anyprec.search.tables import Rows
from anyprec.search.trial import PlanTrial

COSTS = ("latency", "bytes")
NO_GAIN = 1.03  # a wider width that costs less than this times a narrower one replaces it
MOST_PLANS = 200  # in one temporary file; FORMAT.md allows 256
FIRST_PLANS = 24  # plans of each knapsack that are tried, spread over the budgets


@dataclass(frozen=True)
class SearchSettings:
    cost: str = "latency"
    batch: int = 1  # images a call when it is timed
    threads: int = 1
    evaluations: int = 200  # plans whose true loss is measured after the sensitivities, at most
    rounds: int = 3  # of greedy changes
    random: int = 16  # random plans, for comparison
    seed: int = 0
    seconds: float = 5.0  # of timing whole calls


@dataclass(frozen=True)
class PlanPoint:
    """One plan with its figures on the images of the search."""

    kind: str  # "plan", "uniform" or "random"
    plan: Plan
    loss: float
    agreement: float  # percent of images answered as at the widest width
    accuracy: float | None  # percent, where labels were given
    latency_ms: float  # of an image, measured
    bytes: int  # of weights and tables it reads

    def cost(self, kind: str) -> float:
        return self.latency_ms if kind == "latency" else float(self.bytes)


@dataclass
class SearchResult:
    layers: PlanLayers
    settings: SearchSettings
    images: int
    loss: str  # "kl" or "mse"
    evaluations: int
    points: list[PlanPoint]
    sensitivity: npt.NDArray[np.float64]  # (layers, widths): loss with one layer alone at this width
    times: npt.NDArray[np.float64]  # (layers, widths) ms an image
    rows: dict[Plan, Rows] = field(repr=False)

    def front(self, *kinds: str) -> list[PlanPoint]:
        """Points that no cheaper one beats, cheapest first; of all kinds, unless some are named."""
        cost = self.settings.cost
        front: list[PlanPoint] = []
        for point in sorted(self.points, key=lambda p: (p.cost(cost), p.loss)):
            if (not kinds or point.kind in kinds) and (not front or point.loss < front[-1].loss):
                front.append(point)
        return front

    def record(self) -> dict[str, Any]:
        """For --json: every point, and which are on the front."""
        front = self.front("plan", "uniform")
        named = [layer.name for layer in self.layers.layers]
        widths = [str(bits) for bits in self.layers.widths]
        return {
            "images": self.images,
            "loss": self.loss,
            "evaluations": self.evaluations,
            "cost": self.settings.cost,
            "layer_ms": {
                n: dict(zip(widths, row, strict=True)) for n, row in zip(named, self.times.tolist(), strict=True)
            },
            "sensitivity": {
                name: {w: loss for w, loss in zip(widths, row, strict=True) if loss == loss}
                for name, row in zip(named, self.sensitivity.tolist(), strict=True)
            },
            "points": [
                {**asdict(p), "plan": dict(self.layers.named(p.plan)), "on_front": p in front} for p in self.points
            ],
        }

    def best(
        self,
        latency_ms: float | None = None,
        bytes: int | None = None,
        accuracy: float | None = None,
        agreement: float | None = None,
    ) -> PlanPoint:
        """The least loss within the limits; the cheapest that has a wanted accuracy. Uniform widths compete."""
        fits = [
            p
            for p in self.points
            if p.kind != "random"
            and (latency_ms is None or p.latency_ms <= latency_ms)
            and (bytes is None or p.bytes <= bytes)
        ]
        cost = self.settings.cost
        if not fits:
            fastest, smallest = (min(p.cost(kind) for p in self.points) for kind in COSTS)
            raise InputError(
                f"no plan is within these limits; the fastest takes {fastest:.3g} ms, the smallest reads "
                f"{int(smallest):,} bytes: allow more"
            )
        if accuracy is None and agreement is None:
            return min(fits, key=lambda p: (p.loss, p.cost(cost)))
        what = "agreement" if accuracy is None else "accuracy"
        wanted = agreement if accuracy is None else accuracy
        assert wanted is not None
        reached = {p: p.agreement if accuracy is None else p.accuracy for p in fits}
        known = {p: value for p, value in reached.items() if value is not None}
        if not known:
            raise InputError("an accuracy needs labels; give --dataset instead of images, or ask for an agreement")
        right = [p for p, value in known.items() if value >= wanted]
        if not right:
            raise InputError(
                f"no plan has an {what} of {wanted:g} %; the best has {max(known.values()):.2f}: ask for less"
            )
        return min(right, key=lambda p: (p.cost(cost), p.loss))


def search(
    model: PackedModel,
    layers: PlanLayers,
    images: npt.NDArray[np.generic],
    labels: npt.NDArray[np.integer[Any]] | None = None,
    settings: SearchSettings | None = None,
    step: Callable[[int], None] = lambda count: None,
) -> SearchResult:
    """`images` (N, H, W, C), uint8 or float32, as the model takes them. `step` is told how many plans were measured."""
    settings = settings or SearchSettings()
    run = Search(model, layers, images, labels, settings, step)
    return run.result()


class Search:
    def __init__(
        self,
        model: PackedModel,
        layers: PlanLayers,
        images: npt.NDArray[np.generic],
        labels: npt.NDArray[np.integer[Any]] | None,
        settings: SearchSettings,
        step: Callable[[int], None],
    ) -> None:
        self.model, self.layers, self.settings, self.step = model, layers, settings, step
        self.labels = labels
        self.trial = PlanTrial(layers, images, threads=settings.threads)
        timed = images[: settings.batch]
        if len(timed) < settings.batch:
            raise InputError(f"--batch {settings.batch} needs as many images, and {len(images)} are given")
        self.timed = timed
        self.times = layer_times(model, layers, timed, rounds=7, threads=settings.threads)
        self.bytes = layer_bytes(layers)
        self.left = settings.evaluations
        self.found: dict[Plan, tuple[float, float, float | None]] = {}  # loss, agreement, accuracy
        self.reference = self.trial.outputs([self.widest])[0]
        self.is_classes = self.reference.ndim == 2 and self.reference.shape[1] > 1

    @property
    def costs(self) -> LayerCosts:
        return self.times if self.settings.cost == "latency" else self.bytes

    @property
    def widest(self) -> Plan:
        return self.layers.uniform(self.layers.widths[-1])

    @property
    def useful(self) -> list[int]:
        """Widths worth their cost: where 3 bit takes the time of 4, only 4 is tried."""
        total = self.costs.table.sum(axis=0)
        return [
            bits
            for i, bits in enumerate(self.layers.widths)
            if not any(total[j] <= NO_GAIN * total[i] for j in range(i + 1, len(total)))
        ]

    def measure(self, plans: Sequence[Plan], everything: bool = False) -> None:
        """True losses of plans that are new; as far as `evaluations` goes, unless all are needed."""
        new = [plan for plan in dict.fromkeys(plans) if plan not in self.found]
        if not everything:
            new = new[: self.left]
            self.left -= len(new)
        new.sort()
        for plan in new:  # sorted: those that begin alike share the beginning
            self.found[plan] = self.figures(self.trial.outputs([plan])[0])
            self.step(1)

    def figures(self, y: npt.NDArray[np.float32]) -> tuple[float, float, float | None]:
        loss = divergence(self.reference, y) if self.is_classes else relative_error(self.reference, y)
        answers = y.argmax(-1)
        agreement = 100 * float((answers == self.reference.argmax(-1)).mean())
        right = None
        if self.labels is not None and self.is_classes:
            right = 100 * float((answers == self.labels).mean())
        return loss, agreement, right

    # --- The three steps ---

    def sensitivity(self, base: Plan) -> npt.NDArray[np.float64]:
        """(layers, useful widths): the loss with one layer alone at another width than in `base`."""
        changed = [[(*base[:i], bits, *base[i + 1 :]) for bits in self.useful] for i in range(len(self.layers.layers))]
        self.measure([plan for row in changed for plan in row], everything=True)
        return np.array([[self.found[plan][0] for plan in row] for row in changed])

    def knapsack(self, losses: npt.NDArray[np.float64]) -> list[Plan]:
        columns = [self.layers.widths.index(bits) for bits in self.useful]
        choices = best_choices(losses, self.costs.table[:, columns])
        spread = np.unique(np.linspace(0, len(choices) - 1, FIRST_PLANS).astype(int))
        return [tuple(self.useful[i] for i in choices[at]) for at in spread]

    def front(self) -> list[Plan]:
        best = np.inf
        front = []
        for plan in sorted(self.found, key=lambda p: (self.costs.of(p, self.layers.widths), self.found[p][0])):
            if self.found[plan][0] < best:
                best = self.found[plan][0]
                front.append(plan)
        return front

    def neighbors(self, plan: Plan) -> list[Plan]:
        """One layer one step up or down."""
        found = []
        for i, bits in enumerate(plan):
            at = self.useful.index(bits)
            for other in self.useful[max(at - 1, 0) : at + 2]:
                if other != bits:
                    found.append((*plan[:i], other, *plan[i + 1 :]))
        return found

    def result(self) -> SearchResult:
        layers, settings = self.layers, self.settings
        uniform = [layers.uniform(bits) for bits in layers.widths]
        draw = np.random.default_rng(settings.seed)
        drawn = [tuple(int(b) for b in draw.choice(self.useful, len(layers.layers))) for _ in range(settings.random)]
        self.measure([*uniform, *drawn], everything=True)
        narrow = layers.uniform(self.useful[0])
        lowered = self.sensitivity(layers.uniform(self.useful[-1]))
        raised = self.sensitivity(narrow)
        self.measure([*self.knapsack(lowered), *self.knapsack(raised)])
        for _ in range(settings.rounds):
            front = [plan for plan in self.front() if set(plan) <= set(self.useful)]
            self.measure([plan for member in front for plan in self.neighbors(member)])
        plans = [plan for plan in self.front() if plan not in uniform]
        kinds = {plan: "random" for plan in drawn} | {plan: "plan" for plan in plans}
        kinds |= {plan: "uniform" for plan in uniform}
        times = self.call_times(list(kinds))
        points = [
            PlanPoint(kind, plan, *self.found[plan], ms, int(self.bytes.of(plan, layers.widths)))
            for (plan, kind), ms in zip(kinds.items(), times, strict=True)
        ]
        rows = {plan: self.trial.rows(plan) for plan in kinds}
        everything = np.full(self.times.table.shape, np.nan)
        everything[:, [layers.widths.index(bits) for bits in self.useful]] = lowered
        return SearchResult(
            layers, settings, len(self.trial.images), "kl" if self.is_classes else "mse", len(self.found), points,
            everything, self.times.table, rows,
        )  # fmt: skip

    def call_times(self, plans: Sequence[Plan]) -> list[float]:
        """Of whole calls, in models as they would be stored."""
        times: list[float] = []
        for first in range(0, len(plans), MOST_PLANS):
            part = plans[first : first + MOST_PLANS]
            with self.trial.opened(part) as model:
                names = [f"p{i}" for i in range(len(part))]
                times += call_times(
                    model, names, self.timed, seconds=self.settings.seconds, threads=self.settings.threads
                )
        return times


def log_softmax(y: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    z = y.astype(np.float64) - y.max(axis=-1, keepdims=True)
    made: npt.NDArray[np.float64] = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return made


def divergence(wanted: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> float:
    """Mean Kullback-Leibler divergence of the probabilities, in nats."""
    p, q = log_softmax(wanted), log_softmax(y)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def relative_error(wanted: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> float:
    """Squared error over the squares of what is wanted."""
    return float(np.square(y - wanted, dtype=np.float64).sum() / max(np.square(wanted, dtype=np.float64).sum(), 1e-30))
