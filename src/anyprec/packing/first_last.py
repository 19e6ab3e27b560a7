"""The first and last layers at 8 bit: a NetworkTrace, the model and an example in, grids of their inputs out.

Those layers are float in every profile; `pack(..., first_last="8bit")` gives them 8-bit weights and inputs in every
integer profile. Called by packing.py; lower.py makes the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from anyprec.choices import FIRST_LAST
from anyprec.errors import AnyprecError
from anyprec.format.graph import FIXED_BITS, INPUT
from anyprec.nn.switching import Setting, bits
from anyprec.packing.codes import FIXED_LEVELS, SUM_LIMIT, ActivationGrid, weight_key
from anyprec.packing.steps import Example, NetworkTrace, TraceStep
from anyprec.packing.trace import value_ranges
from anyprec.widths import FLOAT

KEEPS_RANGE = (
    "pad",
    "flatten",
    "max_pool",
    "reshape",
    "transpose",
    "slice",
    "gather",
)  # no value outside what they read, but for 0

Image = tuple[Sequence[float], Sequence[float]]  # scale, shift per channel: uint8 images become u8 * scale + shift


def check_first_last(first_last: str) -> str:
    if first_last not in FIRST_LAST:
        raise AnyprecError(f"first_last={first_last!r} is not known; choose one of {', '.join(FIRST_LAST)}")
    return first_last


def first_last_grids(
    trace: NetworkTrace, model: nn.Module, example: Example, settings: Sequence[Setting], image: Image | None
) -> dict[str, ActivationGrid]:
    """Layer -> the codes of its input. Ranges come from `image` for layers that read the image, else from the example.

    A layer that reads values of one sign only gets unsigned codes, twice as fine.
    """
    layers = first_last_layers(trace)
    widths = tuple(FLOAT if setting == FLOAT else FIXED_BITS for setting in settings)
    if not layers or set(widths) == {FLOAT}:
        return {}
    known = {} if image is None else {INPUT: image_range(image)}
    steps = {step.name: step for step in trace.steps}
    sources = {layer.name: source_of(layer.inputs[0], steps) for layer in layers}
    wanted = {source for source in sources.values() if source not in known}
    seen: list[dict[str, tuple[float, float]]] = []
    for setting, width in zip(settings, widths, strict=True):
        if width == FLOAT or not wanted:
            seen.append({})
            continue
        with bits(model, setting):
            seen.append(value_ranges(model, example, wanted, trace.barred))
    made = {}
    for layer, source in sources.items():
        rows = [(0.0, 0.0) if b == FLOAT else {**s, **known}[source] for b, s in zip(widths, seen, strict=True)]
        made[layer] = grid_from_ranges(widths, rows)
    return made


def first_last_layers(trace: NetworkTrace) -> list[TraceStep]:
    """Float layers with no other layer between the input and them, or between them and an output; and convolutions of
    a stem of several, which run before the first quantized layer.

    Left out: a layer whose weight serves another float layer too, and one whose sums could leave 32-bit integers.
    """
    layers = ("conv", "linear", "any", "embedding", "recurrent", "matmul")
    first, stem, last = {INPUT}, {INPUT}, set(trace.outputs)
    before = True  # only convolutions have run, and none of them quantized
    for step in trace.steps:
        before = before and (step.kind == "conv" or step.kind not in layers)
        for values, passes in ((first, step.kind not in layers), (stem, before)):
            if passes and step.inputs and values.issuperset(step.inputs):
                values.add(step.name)
    for step in reversed(trace.steps):
        if step.name in last and step.kind not in layers:
            last.update(step.inputs)
    floats = [step for step in trace.steps if step.kind in ("conv", "linear") and "transposed" not in step.attributes]
    first_last = [
        step
        for step in floats
        if step.inputs[0] in first or step.name in last or (step.kind == "conv" and step.name in stem)
    ]
    inner = {weight_key(step.constants["weight"]) for step in floats if step not in first_last}
    inner |= {weight_key(s.constants["weight"][:, :, None, None]) for s in trace.steps if s.kind == "embedding"}
    weights = {step.name: step.constants["weight"] for step in first_last}
    return [step for step in first_last if sums_fit(weights[step.name]) and weight_key(weights[step.name]) not in inner]


def sums_fit(weight: Tensor) -> bool:
    made: bool = weight[0].numel() * FIXED_LEVELS**2 < SUM_LIMIT
    return made


def source_of(value: str, steps: dict[str, TraceStep]) -> str:
    """The value whose range this one has."""
    while value in steps and steps[value].kind in KEEPS_RANGE:
        value = steps[value].inputs[0]
    return value


def image_range(image: Image) -> tuple[float, float]:
    """Of uint8 images, over all channels."""
    ends = np.array(image[1]) + np.multiply.outer([0, 255], np.array(image[0]))
    return float(ends.min()), float(ends.max())


def grid_from_ranges(widths: tuple[int, ...], rows: Sequence[tuple[float, float]]) -> ActivationGrid:
    """From the least and largest number in each profile. Ranges are 0, not to be used, where all numbers are."""
    signed = min(low for low, _ in rows) < 0
    ranges = np.array([max(-low, high) for low, high in rows])
    # A profile in which the layer reads only zeros has no range of its own; any will do. Float ones have 1.
    ranges = np.where(ranges > 0, ranges, ranges.max())
    return ActivationGrid(widths, np.where(np.array(widths) == FLOAT, 1.0, ranges), signed)
