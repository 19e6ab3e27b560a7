"""ServableModel: what a scheduler needs of a model; measuring its latency table; checking inputs against it.

PackedModel (anyprec.run.model) has this interface, and so have the fakes of the tests. Used by scheduler.py.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from anyprec.errors import InputError
from anyprec.progress import Progress
from anyprec.run.model import CancelToken, all_finite
from anyprec.serve.scheduling.latency import LatencyTable, measure

MEASURED = 2.0  # batches that take longer than this many SLOs are not timed


class ServableModel(Protocol):
    """The part of PackedModel that a scheduler uses."""

    layout: str

    @property
    def profiles(self) -> tuple[str, ...]: ...

    @property
    def input_shape(self) -> tuple[int | None, int | None, int]: ...

    @property
    def image_size(self) -> tuple[int, int] | None: ...

    @property
    def takes_uint8(self) -> bool: ...

    def accuracy(self, bits: int | str | None = None) -> float | None: ...

    def __call__(
        self,
        x: np.ndarray,
        bits: int | str | None = None,
        *,
        threads: int | None = None,
        cancel: CancelToken | None = None,
    ) -> Any: ...


def measure_latency(
    model: ServableModel,
    *,
    slo: float,
    max_batch: int,
    threads: int = 1,
    size: tuple[int, int] | None = None,
    seconds: float = 3.0,
    progress: Progress | None = None,
) -> LatencyTable:
    """Measure a model's latency table, for about `seconds`; this prepares the engine's weights as well."""
    image = example(model, size)

    def run(profile: str, batch: int) -> None:
        model(np.repeat(image, batch, axis=0), bits_of(profile), threads=threads)

    return measure(run, model.profiles, max_batch, MEASURED * slo, seconds, progress)


def bits_of(profile: str) -> int | str:
    return int(profile) if profile.isdigit() else profile


def accuracies(model: ServableModel) -> dict[str, float | None]:
    return {profile: model.accuracy(profile) for profile in model.profiles}


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
