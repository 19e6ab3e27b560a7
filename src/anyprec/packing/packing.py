"""`pack`: a trained any-precision module and an example in, a model file and a PackReport out.

Called by users and cli/pack.py. `make_graph` does all but the writing; verify.py compares what was written with the
module before the file gets its name. Bits, mode and buffers of the model are left as they were.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import torch
from torch import nn

from anyprec import __version__
from anyprec.errors import AnyprecError, Diverged, ModelFileError, ProfileError, UncalibratedBits, UnsupportedOperation
from anyprec.files import cannot_write, is_special
from anyprec.format.file import write
from anyprec.format.graph import Graph, GraphProfile, Op
from anyprec.format.model_file import ModelFile
from anyprec.format.planes import nested_planes, separate_planes
from anyprec.nn.layers import normalize_weights_once
from anyprec.nn.switching import Setting, any_layers, setting_name, widths_of
from anyprec.packing.first_last import Image, check_first_last, first_last_grids
from anyprec.packing.fold import fold
from anyprec.packing.images import check_example
from anyprec.packing.lower import GraphDraft, lower
from anyprec.packing.steps import NetworkTrace
from anyprec.packing.trace import example_of, found_problems, trace
from anyprec.packing.verify import VerificationPlan, VerificationReport, make_verification_plan
from anyprec.packing.verify import verify as check_file
from anyprec.preprocessing import CHANNELS, Preprocessing
from anyprec.widths import FLOAT, Profile, check_widths


@dataclass(frozen=True)
class PackReport:
    """What was packed. `bytes` says how much of the file each profile needs, from its start."""

    path: str
    network: str
    input: tuple[int | None, ...]  # H, W, C of images; None where any size will do
    profiles: tuple[str, ...]
    ops: int
    quantized_layers: int
    fixed_layers: int  # 8 bit in every profile but the float one
    float_layers: int
    quantized_weights: int
    fixed_weights: int
    float_weights: int
    bytes: dict[str, int]
    file_bytes: int
    check: VerificationReport | None  # of the file against the module; None: it was left out (verify=False)
    seconds: float  # all of it, the check too

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        sizes = " x ".join("any" if n is None else str(n) for n in self.input)
        lines = [
            f"{self.path}: {self.network}, input {sizes}, {self.ops} operations, {self.file_bytes:,} bytes",
            f"  {self.quantized_layers} layers quantized ({self.quantized_weights:,} weights), "
            + (f"{self.fixed_layers} always 8 bit ({self.fixed_weights:,}), " if self.fixed_layers else "")
            + f"{self.float_layers} float ({self.float_weights:,})",
        ]
        column = max(map(len, ("profile", *self.profiles)))
        if self.check is None:
            lines += [f"  {'profile':<{column}}  bytes of the file it needs"]
            lines += [f"  {name:<{column}}  {count:,}" for name, count in self.bytes.items()]
            return "\n".join([*lines, "  not compared with the module"])
        heads = ("bytes it needs", "largest difference", "codes moved", "same answer")
        lines += [f"  {'profile':<{column}}  " + "  ".join(f"{head:>18}" for head in heads)]
        for name, count in self.bytes.items():
            found = self.check.profiles[name]
            moved, same = f"{found.moved_codes} of {found.codes:,}", f"{found.same_answers} of {found.answers:,}"
            cells = (f"{count:,}", f"{found.difference:.1e}", moved, same)
            lines += [f"  {name:<{column}}  " + "  ".join(f"{cell:>18}" for cell in cells)]
        return "\n".join([*lines, f"  {self.check}"])


def pack(
    model: nn.Module,
    path: str | Path,
    *,
    example: Any,
    keep_float: bool = False,
    widths: Iterable[int] | None = None,
    profiles: Iterable[Profile] = (),
    labels: Sequence[str] | None = None,
    image: Preprocessing | Image | None = None,
    accuracy: Mapping[int | str, float] | None = None,
    name: str | None = None,
    first_last: str = "float",
    verify: bool = True,
) -> PackReport:
    """Write `model` to `path` as integers, for every width it was trained or calibrated for.

    example: an input of the usual shape, such as images (N, C, H, W); several as a tuple, or as a dict by name.
    widths: packs fewer widths than the model has.
    keep_float: keeps float weights beside the integers, as 32 in `widths` does.
    profiles: mixed profiles to add.
    image: the anyprec.Preprocessing of the training (size, resizing, mean and deviation), so that pictures are
        answered as in training; or (scale, shift) per channel, which says how uint8 arrays become the input, and no
        more.
    labels, accuracy (profile -> percent), name: recorded in the file.
    first_last: what the first and last layers are, "float" or "8bit" (a smaller file); ranges are then taken from the
        example, so it must be a batch of real images.
    verify: runs the file and compares it with the module in every profile before the file gets its name. A file that
        disagrees is removed, and an older file at `path` stays.
    """
    start = time.perf_counter()
    if not Path(path).name:
        raise ModelFileError(f"{str(path)!r} is no name of a file; give one, such as net.apm")
    if is_special(path):
        raise ModelFileError(f"{path} is a device or a pipe; give the name of a file, which is read again to check it")
    with torch.no_grad(), normalize_weights_once(model):  # for all runs of the trace and of the check
        plan = plan_packing(
            model, example=example, keep_float=keep_float, widths=widths, profiles=profiles, labels=labels, image=image,
            accuracy=accuracy, name=name, first_last=first_last,
        )  # fmt: skip
        check = write_checked(model, plan, Path(path), verify)
    return report_of(plan.graph, Path(path), check, time.perf_counter() - start)


def write_checked(model: nn.Module, plan: VerificationPlan, path: Path, checked: bool) -> VerificationReport | None:
    """The file under another name, the check, then its name; nothing is left of a file that fails."""
    if not checked:
        write(plan.graph, path)
        return None
    unchecked = path.with_name(f"{path.name}.{os.getpid()}.unchecked")
    try:
        write(plan.graph, unchecked)
        check = check_file(model, unchecked, plan)
        os.replace(unchecked, path)
    except ModelFileError as error:
        raise type(error)(str(error).replace(str(unchecked), str(path))) from None
    except OSError as error:
        raise cannot_write(path, error, ModelFileError) from error
    finally:
        unchecked.unlink(missing_ok=True)
    return check


def make_graph(
    model: nn.Module,
    *,
    example: Any,
    keep_float: bool = False,
    widths: Iterable[int] | None = None,
    profiles: Iterable[Profile] = (),
    labels: Sequence[str] | None = None,
    image: Preprocessing | Image | None = None,
    accuracy: Mapping[int | str, float] | None = None,
    name: str | None = None,
    first_last: str = "float",
) -> Graph:
    """The Graph that `pack` writes; the arguments are its. It is not compared with the module."""
    return plan_packing(
        model, example=example, keep_float=keep_float, widths=widths, profiles=profiles, labels=labels, image=image,
        accuracy=accuracy, name=name, first_last=first_last,
    ).graph  # fmt: skip


def unsupported(model: nn.Module, example: Any) -> list[str]:
    """What `pack` would refuse about the network's operations, a line each; none if it can be packed.

    It runs once, at the bits that are set, so only what `pack` finds by running at other widths or sizes is not seen.
    """
    given = check_example(example_of(model, example), None)
    try:
        return found_problems(model, given)
    except UnsupportedOperation as error:
        return [str(error)]


def plan_packing(
    model: nn.Module,
    *,
    example: Any,
    keep_float: bool,
    widths: Iterable[int] | None,
    profiles: Iterable[Profile],
    labels: Sequence[str] | None,
    image: Preprocessing | Image | None,
    accuracy: Mapping[int | str, float] | None,
    name: str | None,
    first_last: str,
) -> VerificationPlan:
    """The Graph, and what verify.py needs to lead the module along it."""
    check_first_last(first_last)
    check_about(profiles := tuple(profiles), image, accuracy)
    settings = settings_of(model, keep_float, widths, profiles)
    how = image if isinstance(image, Preprocessing) else None
    image = image.image if isinstance(image, Preprocessing) else image
    given = example_of(model, example)
    if image is not None and given.tensors[0].dim() not in (2, 4):
        raise AnyprecError("image is for inputs (N, C, H, W); the example has another number of dimensions")
    scale, shift = image_numbers(image, given.tensors[0].shape[1] if given.tensors[0].dim() > 1 else 1)
    steps = trace(model, check_example(given, image), settings)
    at_8_bit = first_last_grids(steps, model, given, settings, image) if first_last == "8bit" else {}
    draft = lower(steps, model, settings, at_8_bit)
    fold(draft)
    check_finite(draft, steps, settings)
    shape = steps.inputs[0].free_shape
    image_size = steps.size if steps.is_image and steps.free and gives_vectors(steps) else None
    if how is not None and steps.is_image:
        how = fitted(how, (shape[0], shape[1]), steps)
        image_size = how.size
    pictures = how is not None and steps.is_image and how.channels in CHANNELS
    outputs = [node.channels for node in draft.nodes if node.name == draft.outputs[0]]
    if labels is not None and outputs != [len(labels)]:
        raise AnyprecError(f"{len(labels)} labels for a network with {outputs[0]} classes; give one for each, in order")
    graph = Graph(
        name=name or getattr(model, "zoo_name", None) or type(model).__name__,
        input_shape=shape,
        profiles=graph_profiles(draft, settings, dict(accuracy or {})),
        planes=planes_of(model, draft),
        weights=draft.weights,
        ops=tuple(Op(node.name, node.kind, tuple(node.inputs), as_tuples(node.attributes)) for node in draft.nodes),
        outputs=tuple(draft.outputs),
        tables={node.name: node.table.astype(np.float32) for node in draft.nodes if node.table is not None},
        image_scale=scale,
        image_shift=shift,
        labels=None if labels is None else tuple(labels),
        image_size=image_size,
        made_by=f"anyprec {__version__}",
        resize=how.resize if how and pictures else None,
        resize_to=how.to if how and pictures else None,
        filter=how.filter if how and pictures and how.size else None,
        integer_input=steps.inputs[0].integer,
    )
    return make_verification_plan(graph, steps, draft, settings)


def check_about(profiles: tuple[Profile, ...], image: Any, accuracy: Any) -> None:
    if wrong := [p for p in profiles if not isinstance(p, Profile)]:
        raise ProfileError(f"profiles={wrong[0]!r} is not a profile; give anyprec.Profile(name, bits of the layers)")
    pair = hasattr(image, "__len__") and not isinstance(image, str) and len(image) == 2
    if not (image is None or pair or isinstance(image, Preprocessing)):
        raise AnyprecError(
            f"image={image!r} is not known; give anyprec.Preprocessing(mean, std, ...), or (scale, shift) per channel"
        )
    if accuracy is None:
        return
    percents = list(accuracy.values()) if isinstance(accuracy, Mapping) else [accuracy]
    numbers = all(isinstance(p, SupportsFloat) and not isinstance(p, (str, bool)) for p in percents)
    if not numbers or not isinstance(accuracy, Mapping):
        raise AnyprecError(
            f"accuracy={accuracy!r} is not a table of percents; give one for each profile, such as {{8: 93.5}}"
        )


def settings_of(
    model: nn.Module, keep_float: bool, widths: Iterable[int] | None, profiles: tuple[Profile, ...]
) -> list[Setting]:
    """Uniform widths, narrowest first and float last, then mixed profiles: the rows of every table."""
    if not any_layers(model):
        raise AnyprecError(f"{type(model).__name__} has no any-precision layer; make it one with anyprec.convert")
    known = widths_of(model)
    wanted = set(known) - {FLOAT} if widths is None else set(check_widths(widths))
    wanted |= {FLOAT} if keep_float else set()
    missing = sorted(wanted - set(known))
    if missing:
        raise UncalibratedBits(
            f"bits={missing[0]} is not one of this model's widths {known}; leave it out, or calibrate it first: "
            f"anyprec.calibrate(model, loader, widths=({missing[0]},))"
        )
    if not wanted and not profiles:
        raise AnyprecError(
            f"nothing to pack: of the widths {known} none is an integer one; calibrate some, or keep float (keep_float)"
        )
    names = [profile.name for profile in profiles]
    if len(set(names)) != len(names):
        raise ProfileError(f"profiles {names} have a name twice; give each its own")
    return [*sorted(wanted), *profiles]


def graph_profiles(
    draft: GraphDraft, settings: list[Setting], accuracy: Mapping[int | str, float]
) -> tuple[GraphProfile, ...]:
    known = {str(key): float(value) for key, value in accuracy.items()}
    made = []
    for row, setting in enumerate(settings):
        name = setting.name if isinstance(setting, Profile) else str(setting)
        weights: int | dict[str, int]
        acts: int | dict[str, int]
        if isinstance(setting, Profile):
            weights = {weight: widths[row] for weight, widths in draft.weight_bits.items()}
            quantizers = [node for node in draft.nodes if node.kind == "quantize" and "bits" not in node.attributes]
            acts = {node.name: node.bits[row] for node in quantizers}
        else:
            assert isinstance(setting, int)
            weights = acts = setting
        made.append(GraphProfile(name, weights, acts, known.pop(name, None)))
    if known:
        raise AnyprecError(f"accuracy is given for {', '.join(known)}, which is not packed; name one of the profiles")
    return tuple(made)


def planes_of(model: nn.Module, draft: GraphDraft) -> dict[int, tuple[int, ...]]:
    used = sorted({k for widths in draft.weight_bits.values() for k in widths} - {FLOAT})
    nests = all(layer.quantizer.nests for layer in any_layers(model).values())
    return nested_planes(used) if nests else separate_planes(used)


def as_tuples(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in attributes.items()}


def check_finite(draft: GraphDraft, trace: NetworkTrace, settings: Sequence[Setting]) -> None:
    """Tables and float weights fit float32, but for the bounds of a clip, which may be infinite."""
    places = {step.name: step.where for step in trace.steps}
    users = {node.attributes["weight"]: node for node in draft.nodes if "weight" in node.attributes}
    tables = [(node, node.table) for node in draft.nodes if node.table is not None]
    weights = [(users[name], w.values[None]) for name, w in draft.weights.items() if w.values is not None]
    for node, numbers in (*tables, *weights):
        good = np.abs(numbers) <= np.finfo(np.float32).max
        if node.kind == "clip":
            good |= np.isinf(numbers)
        if good.all():
            continue
        row = int(np.argmin(good.reshape(len(good), -1).all(axis=1)))
        found = float(numbers[row][~good[row]][0])
        at = f"at {setting_name(settings[row])} " if node.table is numbers else ""
        raise Diverged(
            f"{node.kind}{places.get(node.name, f' {node.name!r}')}: {at}{found:g} is among its numbers (weight, "
            "scale, bias and the norms around it), which must fit float32; the training has diverged: lower the "
            "learning rate or clip gradients, and train again"
        )


def gives_vectors(steps: NetworkTrace) -> bool:
    """Not maps: then images of the example's size are what it was made for, whatever else it takes."""
    shapes = [step.shape for step in steps.steps if step.name in steps.outputs]
    return all(len(shape) == 1 or shape[:-1] == (1, 1) for shape in shapes)


def fitted(how: Preprocessing, sides: tuple[int | None, int | None], steps: NetworkTrace) -> Preprocessing:
    """With the size of the example where the network needs one and none is given; a map keeps that of the picture."""
    size = steps.size
    if how.size is None:
        return how if sides == (None, None) and not gives_vectors(steps) else how.at(size)
    if any(side not in (None, want) for side, want in zip(sides, how.size, strict=True)):
        raise AnyprecError(
            f"image.size is {how.size}, the network takes {size} (height, width) and no other size; give that, or an "
            "example of the size it was trained at"
        )
    return how


def image_numbers(image: Image | None, channels: int) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    if image is None:
        return None, None
    scale, shift = (tuple(float(n) for n in numbers) for numbers in image)
    if len(scale) != channels or len(shift) != channels or not np.isfinite([*scale, *shift]).all():
        raise AnyprecError(
            f"image has {len(scale)} scales and {len(shift)} shifts for {channels} channels; give a finite number each"
        )
    return scale, shift


def report_of(graph: Graph, path: Path, check: VerificationReport | None, seconds: float) -> PackReport:
    weights = graph.weights.values()
    quantized = [weight for weight in weights if weight.codes is not None and weight.bits is None]
    fixed = [weight for weight in weights if weight.bits is not None]
    floats = [weight for weight in weights if weight.codes is None]
    with ModelFile(path) as file:
        needs = {profile.name: file.bytes_for_profile(profile) for profile in graph.profiles}
    return PackReport(
        path=str(path),
        network=graph.name,
        input=graph.input_shape,
        profiles=tuple(profile.name for profile in graph.profiles),
        ops=len(graph.ops),
        quantized_layers=len(quantized),
        fixed_layers=len(fixed),
        float_layers=len(floats),
        quantized_weights=sum(int(np.prod(weight.shape)) for weight in quantized),
        fixed_weights=sum(int(np.prod(weight.shape)) for weight in fixed),
        float_weights=sum(int(np.prod(weight.shape)) for weight in floats),
        bytes=needs,
        file_bytes=path.stat().st_size,
        check=check,
        seconds=seconds,
    )
