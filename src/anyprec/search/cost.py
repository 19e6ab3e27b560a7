"""What a plan costs: milliseconds of each layer at each width, timed in the engine on this CPU, or bytes.

`layer_times` uses the engine's times per step. `plan_times` times whole calls: what is printed and promised.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anyprec.run.model import PackedModel
from anyprec.search.layers import Plan, PlanLayers

LOWER_QUARTILE = 25  # of the times of one thing: other programs only ever add time
STEPS_REPEAT = 5
TURN_S = 0.01  # calls of one plan that follow each other


@dataclass(frozen=True)
class LayerCosts:
    """`table[layer, width]`, and what does not depend on the plan."""

    table: npt.NDArray[np.float64]  # (layers, widths)
    fixed: float

    def of(self, plan: Plan, widths: Sequence[int]) -> float:
        return self.fixed + sum(float(self.table[i, widths.index(bits)]) for i, bits in enumerate(plan))


def layer_times(
    model: PackedModel, layers: PlanLayers, images: npt.NDArray[np.generic], *, rounds: int, threads: int
) -> LayerCosts:
    """Milliseconds an image. Widths take turns; a step belongs to the layer of its op."""
    ops = {op.name: layers.layer_of(op) for op in layers.graph.ops}
    times = np.zeros((rounds, len(layers.widths), len(layers.layers) + 1))  # the last column: no layer's
    whole = np.zeros((rounds, len(layers.widths)))
    for turn in range(rounds):
        for column, bits in enumerate(layers.widths):
            for step in model.steps(images, bits, threads=threads, layout="NHWC", repeat=STEPS_REPEAT):
                layer = ops[step.op]
                times[turn, column, -1 if layer is None else layer] += step.seconds
            start = time.perf_counter()
            model(images, bits=bits, threads=threads, layout="NHWC")
            whole[turn, column] = time.perf_counter() - start
    seconds = np.percentile(times, LOWER_QUARTILE, axis=0)  # (widths, layers + 1)
    call = np.maximum(np.percentile(whole, LOWER_QUARTILE, axis=0) - seconds.sum(axis=1), 0)  # beside the steps
    scale = 1e3 / len(images)
    return LayerCosts(scale * seconds[:, :-1].T, scale * float(np.mean(seconds[:, -1] + call)))


def layer_bytes(layers: PlanLayers) -> LayerCosts:
    """Bytes of the weights that a plan reads: the planes of each layer up to its bits, and whatever has no planes."""
    graph = layers.graph
    counts = [sum(int(np.prod(graph.weights[name].shape)) for name in layer.weights) for layer in layers.layers]
    table = np.array([[bits * -(-count // 8) for bits in layers.widths] for count in counts], np.float64)
    fixed = sum(4 * int(np.prod(w.shape)) for w in graph.weights.values() if w.is_float)
    fixed += sum(int(np.prod(w.shape)) for w in graph.weights.values() if w.bits is not None)
    return LayerCosts(table, float(fixed + sum(4 * array[0].size for array in graph.tables.values())))


def call_times(
    model: PackedModel, profiles: Sequence[str], images: npt.NDArray[np.generic], *, seconds: float, threads: int
) -> list[float]:
    """Milliseconds an image of whole calls, profiles in turn, for about `seconds`."""
    for name in profiles:  # prepares weights and memory
        model(images, bits=name, threads=threads, layout="NHWC")
    times: list[list[float]] = [[] for _ in profiles]
    end = time.perf_counter() + seconds
    while not times[0] or time.perf_counter() < end:
        for name, found in zip(profiles, times, strict=True):
            turn = time.perf_counter() + TURN_S
            while True:
                start = time.perf_counter()
                model(images, bits=name, threads=threads, layout="NHWC")
                now = time.perf_counter()
                found.append(now - start)
                if now > turn:
                    break
    return [1e3 * float(np.percentile(found, LOWER_QUARTILE)) / len(images) for found in times]
