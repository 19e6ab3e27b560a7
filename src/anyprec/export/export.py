"""`export_onnx`: a model file in, one ONNX model for each profile out, each run beside our engine.

Called by users and cli/export.py. qdq.py writes the operations, check.py compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anyprec import __version__
from anyprec.errors import AnyprecError, InputError, UnsupportedBits
from anyprec.export.any_axes import input_shapes, needed_opset
from anyprec.export.check import Agreement, check_models, whole_inputs
from anyprec.export.onnx_writer import import_onnx_package, outer_sizes
from anyprec.export.qdq import QdqWriter
from anyprec.files import written_whole
from anyprec.format.file import read
from anyprec.format.graph import Graph
from anyprec.format.shapes import Shape
from anyprec.models.catalog import find

OPSETS = range(13, 22)  # from per-channel DequantizeLinear to the last before int2 and other types few engines know


@dataclass(frozen=True)
class ExportedModel:
    """One ONNX model: of which profile, where, how large, and how it compares (None: it could not be checked)."""

    profile: str
    path: str
    bytes: int
    int8_layers: int  # with int8 weights; which of them run in integers is up to the engine
    float_layers: int
    agreement: Agreement | None


@dataclass(frozen=True)
class ExportReport:
    """What was written. `unchecked` says why the models were not run; empty where they were."""

    model: str
    inputs: dict[str, tuple[int, ...]]  # by name, without N; images are C, H, W
    whole_numbers: tuple[str, ...]  # inputs that are int64; the others are float32
    opset: int
    files: tuple[ExportedModel, ...]
    unchecked: str = ""

    @property
    def agrees(self) -> bool:
        """False where a model was run and answers otherwise than the engine."""
        return all(file.agreement is None or file.agreement.agrees for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees}

    def __str__(self) -> str:
        given = ", ".join(
            f"{name} (N, {', '.join(map(str, sizes))}) {'int64' if name in self.whole_numbers else 'float32'}"
            for name, sizes in self.inputs.items()
        )
        lines = [f"{self.model}: {given}, opset {self.opset}"]
        for file in self.files:
            layers = f"{file.int8_layers} layers with int8 weights, {file.float_layers} float"
            said = "not checked" if file.agreement is None else str(file.agreement)
            lines.append(f"  {file.profile:>7}  {file.path}  {file.bytes:,} bytes, {layers}; {said}")
        return "\n".join([*lines, *([f"  not checked: {self.unchecked}"] if self.unchecked else [])])


def export_onnx(
    model: str | Path,
    out: str | Path,
    bits: int | str | Iterable[int | str] | None = None,
    *,
    size: Sequence[int] | None = None,
    opset: int | None = None,
    check: bool = True,
) -> ExportReport:
    """Write `model` (a model file, or the name of a shipped one) as ONNX for other engines, a file for each of `bits`.

    out: the file to write. With several bits each gets "-4bit", "-float" or "-NAME" before the suffix: net-4bit.onnx.
    bits: widths (32: float), names of mixed profiles, or a list of both; default: all the file has.
    size: H, W of the images, where the model file takes any and does not say which it was made for; of other inputs
        their free sizes, such as (128,) for texts of 128 tokens.
    opset: 13 to 21; default: the lowest that has all that is needed, 13, or 18 where something is resized, averaged
        over axes or normalized.
    check: runs each model in ONNX Runtime, where it is installed, beside our engine on random images.

    Images are (N, C, H, W) float32, normalized as the model file says ("anyprec.image" in the metadata of the model:
    scale and shift of 0..255); other inputs have the axes of the model file, whole numbers as int64. Outputs are those
    of `anyprec.load(model)`.
    """
    import_onnx_package()
    path = find(model)
    graph = read(path)
    names = profile_names(graph, bits, path)
    shapes = input_shapes(graph, first_shape(graph, size))
    for name, shape in shapes.items():
        if None in shape:
            raise InputError(
                f"input {name!r} has free sizes ({shape}) that no other input tells; pack it with fixed ones"
            )
    needed = needed_opset(graph, OPSETS[0])
    chosen = needed if opset is None else opset
    if chosen not in OPSETS or chosen < needed:
        raise AnyprecError(f"opset={chosen} cannot be written; this network takes {needed} to {OPSETS[-1]}")
    files = [write(graph, name, shapes, chosen, target(Path(out), name, len(names) > 1)) for name in names]
    unchecked = "told not to"
    found: list[Agreement | None] = [None] * len(files)
    if check:
        unchecked, found = check_models(path, graph, [(file.profile, file.path) for file in files], shapes)
    checked = [ExportedModel(**{**file.__dict__, "agreement": one}) for file, one in zip(files, found, strict=True)]
    sizes = {name: tuple(size or 0 for size in outer_sizes(shape)) for name, shape in shapes.items()}
    return ExportReport(graph.name, sizes, tuple(whole_inputs(graph)), chosen, tuple(checked), unchecked)


def profile_names(graph: Graph, bits: int | str | Iterable[int | str] | None, path: str | Path) -> list[str]:
    known = [profile.name for profile in graph.profiles]
    if bits is None:
        return known
    given = [bits] if isinstance(bits, (int, str)) else list(bits)
    for one in given:
        if str(one) not in known:
            hint = "; pack it with --float (keep_float=True) to have 32" if str(one) == "32" else ""
            raise UnsupportedBits(f"bits={one!r} is not in {path}, which has {', '.join(known)}{hint}")
    return list(dict.fromkeys(map(str, given)))


def first_shape(graph: Graph, size: Sequence[int] | None) -> tuple[int, ...]:
    """Of the first input: an ONNX model is for one size."""
    sizes = graph.input_shape
    if len(sizes) == 3:
        assert sizes[2] is not None  # channels of images are known
        return *image_size(graph, size), sizes[2]
    free = sizes.count(None)
    if size is None and free:
        named = ", ".join("any" if n is None else str(n) for n in sizes)
        example = ", ".join(["128", "64", "32", "16", "8", "4"][:free])
        raise InputError(
            f"the model file takes inputs of any size (N, {named}); say for which the ONNX model is: "
            f"size=({example}{',' if free == 1 else ''}), --size {example.replace(' ', '')}"
        )
    given = list(size or ())
    if len(given) != free or any(n < 1 for n in given):
        raise InputError(f"size={tuple(given)} does not fit the model file, whose input has {free} free sizes")
    return tuple(given.pop(0) if n is None else n for n in sizes)


def image_size(graph: Graph, size: Sequence[int] | None) -> tuple[int, int]:
    """H, W of images."""
    fixed = graph.input_shape[:2]
    if size is None:
        size = graph.image_size or (fixed if None not in fixed else None)  # type: ignore[assignment]
    if size is None:
        raise InputError(
            "the model file takes images of any size; say for which the ONNX model is: size=(H, W), --size"
        )
    if len(size) != 2:
        raise InputError(
            f"size={tuple(size)} is not height and width; give both, such as size=(224, 224), --size 224,224"
        )
    if any(want not in (None, have) for want, have in zip(fixed, size, strict=True)):
        raise InputError(
            f"size={tuple(size)} does not fit the model file, which takes {fixed[0] or 'any'} x {fixed[1] or 'any'}"
        )
    return size[0], size[1]


def target(out: Path, profile: str, several: bool) -> Path:
    if not several:
        return out
    name = {"32": "float"}.get(profile, f"{profile}bit" if profile.isdigit() else profile)
    return out.with_name(f"{out.stem}-{name}{out.suffix}")


def write(graph: Graph, profile: str, shapes: Mapping[str, Shape], opset: int, path: Path) -> ExportedModel:
    writer = QdqWriter(graph, shapes, profile)
    made = writer.model(opset)
    made.producer_name, made.producer_version = "anyprec", __version__
    made.graph.doc_string = f"{graph.name} at profile {profile}"
    writer.onnx.helper.set_model_props(made, metadata(graph, profile))
    writer.onnx.checker.check_model(made)
    raw = made.SerializeToString()
    with written_whole(path) as file:
        file.write(raw)
    layers = [op for op in graph.ops if op.kind in ("conv", "linear")]
    return ExportedModel(
        profile, str(path), len(raw), len(writer.int8_layers), len(layers) - len(writer.int8_layers), None
    )


def metadata(graph: Graph, profile: str) -> dict[str, str]:
    """What a user of the ONNX model must know: how pixels become inputs, what outputs mean."""
    facts: dict[str, Any] = {"profile": profile, "made_by": f"anyprec {__version__}"}
    if (accuracy := graph.profiles[graph.profile(profile)].accuracy) is not None:
        facts["accuracy"] = accuracy
    if graph.labels is not None:
        facts["labels"] = list(graph.labels)
    if graph.image_scale is not None and graph.image_shift is not None:
        facts["image"] = {"scale": list(graph.image_scale), "shift": list(graph.image_shift)}
    if graph.preprocessing is not None:
        facts["preprocessing"] = graph.preprocessing.to_dict()
    return {f"anyprec.{key}": value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
