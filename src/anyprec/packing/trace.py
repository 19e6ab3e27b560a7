"""Tracing: a network and an example in, the operations it runs as a list of TraceSteps out. Called by packing.py.

The network runs for real, on the example, and every tensor operation that reads a value made from the input is
recorded (recorder.py; operations/ says as what). So Python control flow, functional calls and outputs of any class need
no care, and whatever does not come from the input is a constant. Two calls are one step each, `AnyLayer.at_bits` and
`AnyActivation.at_bits`: lower.py asks the modules for their numbers. Of other modules only nn.LSTM and nn.GRU are known
by their type, so what a subclass, a hook or a replaced forward adds is recorded like anything else.

It runs once in every profile: the operations must be the same, their constants (those of a switched norm) may differ.
A run on fewer images, with other random numbers and after another run, shows constants that are none. Runs at other
sizes show whether the network takes any size (`NetworkTrace.free`), and which value a resized map takes its size from.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyprec.errors import AnyprecError, DataError, UnsupportedOperation
from anyprec.format.graph import INPUT
from anyprec.nn.observe import move_to_device, preserve_state, run_call
from anyprec.nn.switching import Setting, bits, setting_name
from anyprec.packing.free_sizes import free_steps
from anyprec.packing.operations import SUPPORTED
from anyprec.packing.recorder import Recorder, ShortcutKey, Unusable, tensors_in, watched
from anyprec.packing.rewrites import spelled_out
from anyprec.packing.steps import REFUSED, Example, InputValue, NetworkTrace, Shape, TraceStep
from anyprec.packing.views import View

# Added to H and W so that networks which halve the size five times still fit; and to make sizes odd or, where a network
# with skips across its strides does not take those, no multiple of 4, 8, ...
ALIGNED_SIZE = (32, 64)
ODD_SIZES = ((33, 67), (34, 70), (36, 76), (40, 88), (48, 112))
OTHER_LENGTHS = (5, 12)  # added to the length of sequences
SMALLER = (0.5, 0.75)
LARGEST = 2048  # tried, of a length or a side
WORTH_TRYING = 2**23  # numbers that all operations together may make of one image at the largest size, or
LEAST_LARGER = 2.0  # times as many as at the example's
MEASURED_AT_ONCE = 32  # images
KEPT = 2**22  # numbers of an output: of larger ones (maps) the first image's are kept
LISTED = 10  # operations that an error names
OTHER_SEED = 12345


@dataclass(frozen=True)
class Run:
    """One run of the network: its steps, the values that are its outputs, and the outputs."""

    steps: list[TraceStep]
    outputs: tuple[str, ...]
    made: list[Tensor]
    inputs: dict[str, Shape]
    added: frozenset[str] = frozenset()  # steps that no operation made
    shortcuts: Mapping[ShortcutKey, bool] = field(default_factory=dict)  # Recorder.shortcut: which were open


def trace(model: nn.Module, example: Example, settings: Sequence[Setting]) -> NetworkTrace:
    """The model's steps, with their constants in every setting; its mode, bits and random numbers stay as they were.

    The example has several images, so that no batch of 1 hides what is done to the batch.
    """
    barred: frozenset[ShortcutKey] = frozenset()
    while True:
        every = [run_at(model, setting, example, barred=barred) for setting in settings]
        first = every[0]
        others = [run for run in every[1:] if first_difference(first.steps, run.steps) is not None]
        unlike = {key for run in others for key, _ in first.shortcuts.items() ^ run.shortcuts.items()} - barred
        if not unlike:
            break
        barred |= unlike
    for setting, run in zip(settings, every, strict=True):
        _check_same(first.steps, run.steps, settings[0], setting)
    _check_constant(first.steps, run_at(model, settings[0], fewer(example), OTHER_SEED, barred, again=True).steps)
    all_numbers = [
        replace(step, at=tuple(run.steps[number].constants for run in every)) for number, step in enumerate(first.steps)
    ]
    results = tuple(tuple(t[:1] if t.numel() > KEPT else t for t in run.made) for run in every)
    inputs = tuple(
        InputValue(name, first.inputs[name], not t.is_floating_point())
        for name, t in zip(example.values, example.tensors, strict=True)
    )
    fixed = NetworkTrace(tuple(all_numbers), first.outputs, inputs, False, example, first.added, results, barred)
    return _freed(model, settings[0], fixed, first)


def fewer(example: Example) -> Example:
    """Without the last image, if there are two."""
    return replace(example, tensors=tuple(t[:-1] if len(t) > 1 else t for t in example.tensors))


def _freed(model: nn.Module, setting: Setting, fixed: NetworkTrace, first: Run) -> NetworkTrace:
    """The trace for inputs of any size, if runs at other sizes do the same operations."""
    runs = [first]
    for number, tries in enumerate(other_sizes(fixed.example, sum(math.prod(step.shape) for step in first.steps))):
        for sizes in tries:
            other = replace(fixed.example, tensors=tuple(t[:2] for t in sizes))
            try:
                run = run_at(model, setting, other, barred=fixed.barred)
            except (AnyprecError, AssertionError):
                continue  # odd sizes are more than a network with skips across its strides can take
            same = [a.same_but_for_size(b) for a, b in zip(first.steps, run.steps, strict=False)]
            if len(run.steps) == len(first.steps) and all(same):
                runs.append(run)
                break
            if not shrunk(run, first):
                return fixed
        if number == 0 and len(runs) == 1:
            return fixed
    steps = free_steps([list(fixed.steps), *(run.steps for run in runs[1:])], [run.inputs for run in runs])
    if steps is None:
        return fixed
    inputs = tuple(
        replace(
            value,
            free=tuple(len(set(sizes)) > 1 for sizes in zip(*(run.inputs[value.name] for run in runs), strict=True)),
        )
        for value in fixed.inputs
    )
    return replace(fixed, steps=tuple(steps), inputs=inputs, free=True)


def shrunk(run: Run, first: Run) -> bool:
    """Whether only here a map is one pixel wide or high: then views have other axes, and differences say nothing."""
    least = [min((n for step in r.steps for n in step.shape[:-1]), default=1) for r in (run, first)]
    return least[0] == 1 < least[1]


def other_sizes(example: Example, work: int) -> list[list[list[Tensor]]]:
    """The inputs at other sizes: images of zeros, sequences (N, L) of indices and (N, L, C) of numbers.

    Of each group the first that the network takes is enough; it has to take one of the first group.

    work: numbers that all operations together make of one image of the example.
    """
    first = example.tensors[0]
    larger = math.sqrt(max(WORTH_TRYING / max(work, 1), LEAST_LARGER))  # attention, too, grows with the square
    if first.dim() == 4:
        height, width = first.shape[2:]
        high, wide = (max(n, min(int(n * larger) // 32 * 32, LARGEST)) for n in (height, width))
        groups = [
            [ALIGNED_SIZE],
            list(ODD_SIZES),
            [(int(height * part) - height, int(width * part) - width) for part in SMALLER],
            [(high + 1 - height, wide + 3 - width), (high - height, wide - width)],
        ]
        groups = [[(h, w) for h, w in group if height + h > 0 and width + w > 0] for group in groups]
        return [[at_size(example.tensors, height + h, width + w) for h, w in group] for group in groups]
    if is_sequence(first):
        length = first.shape[1]
        lengths = [[length + n] for n in OTHER_LENGTHS]
        lengths += [[n for part in SMALLER if 0 < (n := int(length * part)) < length]]
        lengths += [[max(length + 1, min(int(length * larger), LARGEST))]]
        return [[at_length(example.tensors, n) for n in group] for group in lengths]
    return []


def at_size(tensors: Sequence[Tensor], height: int, width: int) -> list[Tensor]:
    """All images as large as the first one, at another size."""
    size = tensors[0].shape[2:]
    return [t.new_zeros(*t.shape[:2], height, width) if t.dim() == 4 and t.shape[2:] == size else t for t in tensors]


def is_sequence(x: Tensor) -> bool:
    """(N, L) of whole numbers or (N, L, C): the file's first axis may have any length."""
    return (x.dim() == 2 and not x.is_floating_point()) or x.dim() == 3


def at_length(tensors: Sequence[Tensor], length: int) -> list[Tensor]:
    """All sequences as long as the first one, at another length: from the start again."""
    before = tensors[0].shape[1]
    places = torch.arange(length) % before
    return [
        t[:, places.to(t.device)] if t.dim() in (2, 3) and t.shape[1] == before and is_sequence(t) else t
        for t in tensors
    ]


def run_at(
    model: nn.Module,
    setting: Setting,
    example: Example,
    seed: int | None = None,
    barred: Collection[ShortcutKey] = frozenset(),
    again: bool = False,
) -> Run:
    with bits(model, setting):
        return run_recorded(model, example, Recorder(model, barred=barred), seed, again)


def found_problems(model: nn.Module, example: Example) -> list[str]:
    """A line for each operation that cannot be packed; one run, at the bits that are set."""
    recorder = Recorder(model)
    lines = problems(recorder, outputs_of(model, example, recorder))
    if not lines:  # what shows once there is a second run
        run = run_recorded(model, example, Recorder(model))
        _check_constant(run.steps, run_recorded(model, fewer(example), Recorder(model), OTHER_SEED, True).steps)
    return lines


def run_recorded(
    model: nn.Module, example: Example, recorder: Recorder, seed: int | None = None, again: bool = False
) -> Run:
    made = outputs_of(model, example, recorder, seed, again)
    if errors := problems(recorder, made):
        raise UnsupportedOperation(summary(errors))
    outputs, format_3 = _outputs(recorder, made)
    steps = list(recorder.steps.values())
    inputs = dict(recorder.inputs)
    if format_3 and example.tensors[0].dim() == 2 and len(inputs[INPUT]) == 3:
        steps = _vector_input(steps, inputs[INPUT])
        inputs[INPUT] = inputs[INPUT][2:]
    added = frozenset(s.name for s in steps if s.name not in recorder.steps)
    return Run(steps, outputs, made, inputs, added, dict(recorder.shortcuts))


def outputs_of(
    model: nn.Module, example: Example, recorder: Recorder, seed: int | None = None, again: bool = False
) -> list[Tensor]:
    """The tensors a recorded run gives. again: it is the second one, so that buffers which each run changes differ.

    The network gets copies: some change their input in place.
    """
    tensors = [t.clone() for t in example.tensors]
    recorder.start(dict(zip(example.values, tensors, strict=True)))
    with preserve_state(model), torch.no_grad():
        if again:
            run_call(model, example.call([t.clone() for t in tensors]), "the example")
        with watched(model, recorder), spelled_out(recorder.looked_at), recorder:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
            output = run_call(model, example.call(tensors), "the example")
    made = tensors_in(output)
    if not made:
        raise UnsupportedOperation(f"the network returns a {type(output).__name__} without tensors; nothing to pack")
    return made


def _outputs(recorder: Recorder, made: list[Tensor]) -> tuple[tuple[str, ...], bool]:
    """Values of the outputs, and whether they need format 3; without it, vectors are images of one pixel."""
    before = dict(recorder.steps)
    format_3 = any(step.needs_format_3 for step in _reached(recorder, made))
    format_3 |= any(len(shape) != 3 for shape in recorder.inputs.values()) or len(recorder.inputs) > 1
    outputs = tuple(recorder.output(t, not format_3) for t in made)
    if not format_3 and any(step.needs_format_3 for name, step in recorder.steps.items() if name not in before):
        recorder.steps, format_3 = before, True
        outputs = tuple(recorder.output(t, False) for t in made)
    for name, tensor in zip(outputs, made, strict=True):
        if name in recorder.inputs and not tensor.is_floating_point():
            raise UnsupportedOperation(f"an output of the network is its input {name!r}, which is whole numbers")
    return outputs, format_3


def _vector_input(steps: list[TraceStep], shape: Shape) -> list[TraceStep]:
    """In format 3 vectors (N, C) come as they are."""
    name = "input.reshape"
    while any(step.name == name for step in steps):
        name += "_"
    first = TraceStep(name, "reshape", (INPUT,), shape, {"shape": list(shape)})
    at = sum(step.kind == "input" for step in steps)
    moved = [replace(step, inputs=tuple(name if i == INPUT else i for i in step.inputs)) for step in steps]
    return [*moved[:at], first, *moved[at:]]


# --- What cannot be packed --------------------------------------------------------------------------------


def _reached(recorder: Recorder, made: list[Tensor]) -> list[TraceStep]:
    """The steps that outputs come from."""
    views = [recorder.value_of(tensor) for tensor in made]
    wanted = {view.value for view in views if isinstance(view, View)}
    found = []
    for step in reversed(list(recorder.steps.values())):
        if step.name in wanted:
            wanted.update(step.inputs)
            found.append(step)
    return found[::-1]


def problems(recorder: Recorder, made: list[Tensor]) -> list[str]:
    """One line for each operation that outputs come from and the file cannot have; those of one kind together."""
    lines = list(dict.fromkeys(recorder.decisions))
    kinds: dict[tuple[str, str], list[str]] = {}
    for step in _reached(recorder, made):
        if step.kind == REFUSED:
            at = step.attributes
            kinds.setdefault((at["what"], at["reason"]), []).append(at["place"])
    for (what, reason), places in kinds.items():
        more = f" (and at {len(places) - 1} other places)" if len(places) > 1 else ""
        lines.append(f"{what}{places[0]}{more}: {reason}")
    for tensor in made:
        view = recorder.value_of(tensor) or Unusable("an output of the network does not depend on its input")
        if isinstance(view, Unusable) and view.why not in lines:
            lines.append(view.why)
    return lines


def summary(lines: list[str]) -> str:
    unknown = any("has no such operation" in line for line in lines)
    end = f"; the model file has {SUPPORTED}" if unknown else ""
    if len(lines) == 1:
        return lines[0] + end
    more = f"; and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
    listed = "; ".join(f"({number}) {line}" for number, line in enumerate(lines[:LISTED], 1))
    return f"{len(lines)} operations cannot be packed: {listed}{more}{end}"


def _check_same(first: list[TraceStep], other: list[TraceStep], at_first: Setting, at_other: Setting) -> None:
    if (where := first_difference(first, other)) is None:
        return
    raise UnsupportedOperation(
        f"the network runs other operations at {setting_name(at_other)} than at {setting_name(at_first)} (from "
        f"{where.name!r} on); a packed one runs the same at every width"
    )


def first_difference(first: list[TraceStep], other: list[TraceStep]) -> TraceStep | None:
    same = [a.same_but_for_numbers(b) for a, b in zip(first, other, strict=False)]
    if len(first) == len(other) and all(same):
        return None
    number = same.index(False) if False in same else len(same)
    return next(steps[number] for steps in (first, other) if len(steps) > number)


def _check_constant(first: list[TraceStep], other: list[TraceStep]) -> None:
    """Nothing may follow the number of images, or random numbers of Python and numpy (torch's are seen)."""
    where = first_difference(first, other)
    if where is None:
        where = next((a for a, b in zip(first, other, strict=True) if not a.same_numbers(b)), None)
    if where is not None:
        raise UnsupportedOperation(
            f"{where.kind}{where.where}: its numbers follow the number of images in a batch, or change from run to "
            "run; a packed network gives one answer to one image"
        )


# --- The example ------------------------------------------------------------------------------------------


def example_of(model: nn.Module, example: Any) -> Example:
    """The example's tensors, on the model's device and in its type, and how the network takes them."""
    if hasattr(example, "__array__") and not isinstance(example, Tensor):
        example = torch.as_tensor(np.asarray(example))
    by_name = isinstance(example, Mapping)
    items: dict[str, Any]
    if by_name:
        items = dict(example)
    else:
        parts = list(example) if isinstance(example, (tuple, list)) else [example]
        items = dict(zip(argument_names(model, len(parts)), parts, strict=True))
    items = {
        name: torch.as_tensor(np.asarray(item)) if hasattr(item, "__array__") and not isinstance(item, Tensor) else item
        for name, item in items.items()
    }
    given = {name: item for name, item in items.items() if isinstance(item, Tensor)}
    shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in given.values()) or "none"
    rows = {len(t) for t in given.values() if t.dim()}
    if (
        not given
        or any(not 2 <= t.dim() <= 7 or 0 in t.shape or t.is_complex() for t in given.values())
        or len(rows) > 1
    ):
        raise DataError(
            f"the example holds these tensors: {shapes}; pack needs one or several with the images of a batch as their "
            "first dimension, such as (N, C, H, W)"
        )
    if (first := next(iter(given.values()))).dim() == 4 and not first.is_floating_point():
        raise DataError(
            f"the example is {shapes}; images are float numbers: give them as the network computes with them, and "
            "pack(image=...) says how uint8 pixels become that"
        )
    home = next((p for p in model.parameters() if p.is_floating_point()), None)
    tensors = []
    for t in given.values():
        t = move_to_device(t.detach(), model, "the example")
        tensors.append(t.to(home.dtype) if home is not None and t.is_floating_point() else t)
    others = {name: item for name, item in items.items() if name not in given}
    if others and not by_name:
        raise DataError(f"the example holds {', '.join(type(o).__name__ for o in others.values())}; give tensors only")
    return Example(tuple(tensors), tuple(given), by_name, others)


def argument_names(model: nn.Module, number: int) -> list[str]:
    """Of the first arguments of the network's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        found = [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind in kinds]
    except (TypeError, ValueError):
        found = []
    return found[:number] + [f"input{i + 1}" for i in range(len(found), number)]


def value_ranges(
    model: nn.Module, example: Example, names: Collection[str], barred: Collection[ShortcutKey]
) -> dict[str, tuple[float, float]]:
    """Least and largest number of some values of a trace, over all images of the example, at the bits that are set."""
    tensors = [torch.cat([t, t]) if len(t) == 1 else t for t in example.tensors]
    recorder = Recorder(model, names, barred)
    pieces = -(-len(tensors[0]) // MEASURED_AT_ONCE)
    for some in zip(*(t.tensor_split(pieces) for t in tensors), strict=True):
        recorder.operation = 0
        recorder.steps.clear()  # so that the same steps get the same names again
        run_recorded(model, replace(example, tensors=tuple(some)), recorder)
    return recorder.ranges
