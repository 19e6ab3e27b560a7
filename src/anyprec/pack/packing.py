"""`pack`: a trained any-precision module and an example in, a model file and a PackReport out.

Called by users and cli_pack.py. `make_graph` does all but the writing. Bits, mode and buffers of the model are left
as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from anyprec import __version__
from anyprec.bits import FLOAT, Profile, check_widths
from anyprec.errors import AnyprecError, ProfileError, UncalibratedBits, UnsupportedOperation
from anyprec.format.file import write
from anyprec.format.graph import Graph, GraphProfile, Op
from anyprec.format.model_file import ModelFile
from anyprec.format.planes import nested_planes, separate_planes
from anyprec.pack.edges import Image, check_edges, edge_codes
from anyprec.pack.fold import fold
from anyprec.pack.lower import Draft, lower
from anyprec.pack.steps import Trace
from anyprec.pack.trace import trace
from anyprec.train.switch import Setting, any_layers, bits, widths_of


@dataclass(frozen=True)
class PackReport:
    """What was packed. `bytes` says how much of the file each profile needs, from its start."""

    path: str
    network: str
    input: tuple[int | None, int | None, int]  # H, W, C; None where any size will do
    profiles: tuple[str, ...]
    ops: int
    quantised_layers: int
    fixed_layers: int  # 8 bit in every profile but the float one
    float_layers: int
    quantised_weights: int
    fixed_weights: int
    float_weights: int
    bytes: dict[str, int]
    file_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        height, width, channels = ("any" if n is None else n for n in self.input)
        lines = [
            f"{self.path}: {self.network}, input {height} x {width} x {channels}, {self.ops} operations, "
            f"{self.file_bytes:,} bytes",
            f"  {self.quantised_layers} layers quantised ({self.quantised_weights:,} weights), "
            + (f"{self.fixed_layers} always 8 bit ({self.fixed_weights:,}), " if self.fixed_layers else "")
            + f"{self.float_layers} float ({self.float_weights:,})",
        ]
        column = max(map(len, ("profile", *self.profiles)))
        lines += [f"  {'profile':<{column}}  bytes of the file it needs"]
        lines += [f"  {name:<{column}}  {count:,}" for name, count in self.bytes.items()]
        return "\n".join(lines)


def pack(
    model: nn.Module,
    path: str | Path,
    *,
    example: Any,
    keep_float: bool = False,
    widths: Iterable[int] | None = None,
    profiles: Iterable[Profile] = (),
    labels: Sequence[str] | None = None,
    image: Image | None = None,
    accuracy: Mapping[int | str, float] | None = None,
    name: str | None = None,
    edges: str = "float",
) -> PackReport:
    """Write `model` to `path` as integers, for every width it was trained or calibrated for.

    `example` is one float input of the usual shape, such as images (N, C, H, W). `widths` packs fewer widths,
    `keep_float` (or 32 in `widths`) keeps float weights beside the integers, `profiles` adds mixed bits.
    `image` = (scale, shift) per channel says how uint8 images become the network's input. `accuracy` (profile ->
    percent) and `labels` are kept for whoever reads the file. `edges` is what the first and last layers are: "float" or
    "8bit", a smaller file; ranges are then taken from the example, so it must be a batch of real images.
    """
    graph = make_graph(
        model, example=example, keep_float=keep_float, widths=widths, profiles=profiles, labels=labels, image=image,
        accuracy=accuracy, name=name, edges=edges,
    )  # fmt: skip
    write(graph, path)
    return report_of(graph, Path(path))


def make_graph(
    model: nn.Module,
    *,
    example: Any,
    keep_float: bool = False,
    widths: Iterable[int] | None = None,
    profiles: Iterable[Profile] = (),
    labels: Sequence[str] | None = None,
    image: Image | None = None,
    accuracy: Mapping[int | str, float] | None = None,
    name: str | None = None,
    edges: str = "float",
) -> Graph:
    """The Graph that `pack` writes; the arguments are its."""
    check_edges(edges)
    settings = settings_of(model, keep_float, widths, tuple(profiles))
    # The same operations run at any bits.
    with bits(model, settings[0]):
        steps = trace(model, example)
    scale, shift = image_numbers(image, steps.size[0])
    at_8_bit = edge_codes(steps, model, example, settings, image) if edges == "8bit" else {}
    draft = lower(steps, model, settings, at_8_bit)
    fold(draft)
    channels, height, width = steps.size
    if steps.free:
        height, width = (None if n > 1 else n for n in (height, width))  # type: ignore[assignment]
    image_size = steps.size[1:] if steps.free and gives_vectors(steps) else None
    outputs = [node.channels for node in draft.nodes if node.name == draft.outputs[0]]
    if labels is not None and outputs != [len(labels)]:
        raise AnyprecError(f"{len(labels)} labels for a network with {outputs[0]} classes; give one for each, in order")
    return Graph(
        name=name or getattr(model, "zoo_name", None) or type(model).__name__,
        input_shape=(height, width, channels),
        profiles=graph_profiles(draft, settings, dict(accuracy or {})),
        planes=planes_of(model, draft),
        weights=draft.weights,
        ops=tuple(Op(node.name, node.kind, tuple(node.inputs), as_tuples(node.attributes)) for node in draft.nodes),
        outputs=tuple(draft.outputs),
        tables={node.name: rounded(node.name, node.table) for node in draft.nodes if node.table is not None},
        image_scale=scale,
        image_shift=shift,
        labels=None if labels is None else tuple(labels),
        image_size=image_size,
        made_by=f"anyprec {__version__}",
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
    draft: Draft, settings: list[Setting], accuracy: Mapping[int | str, float]
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


def planes_of(model: nn.Module, draft: Draft) -> dict[int, tuple[int, ...]]:
    used = sorted({k for widths in draft.weight_bits.values() for k in widths} - {FLOAT})
    nests = all(layer.quantizer.nests for layer in any_layers(model).values())
    return nested_planes(used) if nests else separate_planes(used)


def as_tuples(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in attributes.items()}


def rounded(name: str, table: np.ndarray) -> np.ndarray:
    if np.isnan(table).any():
        raise UnsupportedOperation(f"the numbers of {name!r} are not finite; the network has NaN in it")
    with np.errstate(over="ignore"):
        return table.astype(np.float32)


def gives_vectors(steps: Trace) -> bool:
    """Not maps: then images of the example's size are what it was made for, whatever else it takes."""
    return all(step.size[1:] == (1, 1) for step in steps.steps if step.name in steps.outputs)


def image_numbers(image: Image | None, channels: int) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    if image is None:
        return None, None
    scale, shift = (tuple(float(n) for n in numbers) for numbers in image)
    if len(scale) != channels or len(shift) != channels or not np.isfinite([*scale, *shift]).all():
        raise AnyprecError(
            f"image has {len(scale)} scales and {len(shift)} shifts for {channels} channels; give a finite number each"
        )
    return scale, shift


def report_of(graph: Graph, path: Path) -> PackReport:
    weights = graph.weights.values()
    quantised = [weight for weight in weights if weight.codes is not None and weight.bits is None]
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
        quantised_layers=len(quantised),
        fixed_layers=len(fixed),
        float_layers=len(floats),
        quantised_weights=sum(int(np.prod(weight.shape)) for weight in quantised),
        fixed_weights=sum(int(np.prod(weight.shape)) for weight in fixed),
        float_weights=sum(int(np.prod(weight.shape)) for weight in floats),
        bytes=needs,
        file_bytes=path.stat().st_size,
    )
