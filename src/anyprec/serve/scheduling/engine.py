"""ServableModel: what a scheduler needs of a model; its levels and their latency table; checking inputs against it.

PackedModel (anyprec.run.model) has this interface, and so have the fakes of the tests. Used by scheduler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from anyprec.cascade.cascade import Cascade
from anyprec.errors import InputError, ServeError
from anyprec.progress import Progress
from anyprec.run.model import AUTO, CancelToken, all_finite
from anyprec.serve.scheduling.latency import GoesOn, LatencyTable, measure

MEASURED = 2.0  # batches that take longer than this many SLOs are not timed


class ServableModel(Protocol):
    """The part of PackedModel that a scheduler uses."""

    layout: str
    always_cascade: bool

    @property
    def profiles(self) -> tuple[str, ...]: ...

    @property
    def input_shape(self) -> tuple[int | None, int | None, int]: ...

    @property
    def image_size(self) -> tuple[int, int] | None: ...

    @property
    def takes_uint8(self) -> bool: ...

    @property
    def has_cascade(self) -> bool: ...

    @property
    def cascade(self) -> Cascade: ...

    @property
    def last_stages(self) -> tuple[int | str, ...] | None: ...

    def accuracy(self, bits: int | str | None = None) -> float | None: ...

    def __call__(
        self,
        x: np.ndarray,
        bits: int | str | None = None,
        *,
        threads: int | None = None,
        cancel: CancelToken | None = None,
        threshold: float | None = None,
    ) -> Any: ...


@dataclass(frozen=True)
class ServedLevels:
    """The levels that a model is served at: widths, plans (mixed profiles), and its cascade, by name."""

    accuracies: dict[str, float | None]  # percent; None where the file does not say
    cascades: dict[str, GoesOn]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.accuracies)

    @property
    def timed(self) -> tuple[str, ...]:
        """Those that need a row of the latency table: the first stage of a cascade does, served or not."""
        return tuple(dict.fromkeys([*self.names, *(way.first for way in self.cascades.values())]))


def served_levels(model: ServableModel, wanted: Sequence[str] | None = None) -> ServedLevels:
    """Those of `wanted`, or all. A cascade runs its stages from now on: whether that pays, the Pareto front shows.

    Raises ServeError for a name that the file does not have, CascadeError for a cascade that makes no sense.
    """
    names = list(model.profiles)
    cascades = {}
    if model.has_cascade:
        stages = model.cascade.stages
        model.always_cascade = True
        names.append(AUTO)
        cascades[AUTO] = GoesOn(stages[0].profile, stages[1].share)
    for name in wanted or ():
        if name not in names:
            raise ServeError(f"level {name!r} is not in this model, which has {', '.join(names)}")
    chosen = names if wanted is None else list(dict.fromkeys(wanted))
    known = {name: cascade_accuracy(model) if name in cascades else model.accuracy(name) for name in chosen}
    return ServedLevels(known, {name: way for name, way in cascades.items() if name in chosen})


def cascade_accuracy(model: ServableModel) -> float | None:
    """As measured, or at least: each answer that differs from the last stage's costs one right one at most."""
    cascade = model.cascade
    last = model.accuracy(cascade.last)
    if cascade.accuracy is not None or last is None or cascade.agreement is None:
        return cascade.accuracy
    return max(0.0, last - (100.0 - cascade.agreement))


def measure_latency(
    model: ServableModel,
    *,
    slo: float,
    max_batch: int,
    threads: int = 1,
    size: tuple[int, int] | None = None,
    seconds: float = 3.0,
    progress: Progress | None = None,
    levels: ServedLevels | None = None,
) -> LatencyTable:
    """Measure a model's latency table, for about `seconds`; this prepares the engine's weights as well."""
    image = example(model, size)
    levels = levels or served_levels(model)

    def run(name: str, batch: int) -> None:
        run_whole(model, np.repeat(image, batch, axis=0), name, name in levels.cascades, threads)

    return measure(run, levels.timed, max_batch, MEASURED * slo, seconds, progress, cascades=levels.cascades)


def run_whole(model: ServableModel, x: np.ndarray, name: str, cascade: bool, threads: int) -> None:
    """Run a level for its time; of a cascade, with all images going on."""
    bits: int | str = int(name) if name.isdigit() else name
    if cascade:
        model(x, bits, threads=threads, threshold=1.0)
    else:
        model(x, bits, threads=threads)


def example(model: ServableModel, size: tuple[int, int] | None) -> np.ndarray:
    """One image for timing, (1, ...) in the model's layout."""
    height, width, channels = model.input_shape
    rows, columns = size or model.image_size or (32, 32)
    height, width = height or rows, width or columns
    shape = (channels, height, width) if model.layout == "NCHW" else (height, width, channels)
    draw = np.random.default_rng(0)
    if model.takes_uint8:
        return draw.integers(0, 256, (1, *shape), dtype=np.uint8)
    return draw.standard_normal((1, *shape), dtype=np.float32)


def check_fits(model: ServableModel, x: np.ndarray) -> None:
    height, width, channels = model.input_shape
    wanted = (channels, height, width) if model.layout == "NCHW" else (height, width, channels)
    if any(want is not None and want != have for want, have in zip(wanted, x.shape[1:], strict=True)):
        text = ", ".join("any" if want is None else str(want) for want in wanted)
        raise InputError(f"input has shape {x.shape}; this model takes (n, {text}), {model.layout}")
    if x.dtype == np.uint8 and not model.takes_uint8:
        raise InputError("input is uint8; this model does not say how bytes become floats: give float32")
    if not all_finite(x):  # checked here, since other clients' requests share the batch
        raise InputError("the input has NaN or infinity in it; repair the images first")
