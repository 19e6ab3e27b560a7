"""Free sizes: steps of runs on inputs of several sizes in, steps that serve any size out, or None.

Called by trace.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anyprec.format.graph import INPUT
from anyprec.packing.steps import Shape, TraceStep

Shapes = dict[str, Shape]  # of every value of one run


def free_steps(runs: Sequence[Sequence[TraceStep]], inputs: Sequence[Shapes]) -> list[TraceStep] | None:
    """`runs` have the same steps but for attributes that may follow the size; `inputs` are the shapes of the inputs."""
    shapes = [{**given, **{step.name: step.shape for step in steps}} for steps, given in zip(runs, inputs, strict=True)]
    made = [_free_step([steps[number] for steps in runs], number, runs, shapes) for number in range(len(runs[0]))]
    return None if None in made else [step for step in made if step is not None]


def _free_step(
    steps: list[TraceStep], number: int, runs: Sequence[Sequence[TraceStep]], shapes: list[Shapes]
) -> TraceStep | None:
    step = steps[0]
    attributes: dict[str, Any] | None = step.attributes
    if step.kind == "resize":
        attributes = _resize(step, number, runs, shapes)
    elif step.kind in ("reshape", "input"):
        attributes = _sizes(steps)
    elif step.kind == "slice":
        attributes = _ends(steps, [at[step.inputs[0]][step.attributes["axis"]] for at in shapes])
    elif step.kind == "activation" and len({other.shape[-1] for other in steps}) > 1:
        attributes = {**step.attributes, "free_channels": True}  # a table by channel would not fit
    return None if attributes is None else replace(step, attributes=attributes)


def _resize(
    step: TraceStep, number: int, runs: Sequence[Sequence[TraceStep]], shapes: list[Shapes]
) -> dict[str, Any] | None:
    """To a size that changed with the image's: it is that of the value that changed alike."""
    wanted = [steps[number].shape[:2] for steps in runs]
    if step.attributes["size"] is None or len(set(wanted)) == 1:
        return step.attributes
    earlier = [INPUT, *(other.name for other in reversed(runs[0][:number]))]
    for name in earlier:
        if len(shapes[0][name]) == 3 and [at[name][:2] for at in shapes] == wanted:
            return {**step.attributes, "size": None, "like": name}
    return None


def _sizes(steps: list[TraceStep]) -> dict[str, Any] | None:
    """A size that changed is left open; a reshape has room for one."""
    every = [step.attributes["shape"] for step in steps]
    if len({len(shape) for shape in every}) > 1:
        return None
    shape = [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*every, strict=True)]
    if steps[0].kind == "reshape" and shape.count(None) > 1:
        return None
    return {**steps[0].attributes, "shape": shape}


def _ends(steps: list[TraceStep], sizes: list[int]) -> dict[str, Any] | None:
    """Ends that changed are counted from the end of the axis; one that is the size is None."""
    made = dict(steps[0].attributes)
    for key in ("start", "stop"):
        ends = [step.attributes[key] for step in steps]
        if len(set(ends)) == 1:
            continue
        if any(end is None or end < 0 for end in ends):
            return None
        from_end = {end - size for end, size in zip(ends, sizes, strict=True)}
        if len(from_end) > 1:
            return None
        made[key] = from_end.pop() or None
    return made
