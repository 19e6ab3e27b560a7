"""`unpack`: a model file and an untrained network of the same kind in, the network that answers as the file does out.

The opposite of pack, as far as there is one: the float weights are gone, so each becomes the middle of its widest code.
A file has no norms either, only tables (scale, shift) per op and width, into which pack has multiplied them. Which norm
went into which table is asked of pack itself: the network is packed with marks in its norms, and the marks are looked
up in the tables. FORMAT.md, section 3. Called by training/build.py, for recipes whose `init` names a model file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyprec.errors import CheckpointError
from anyprec.format.graph import Graph
from anyprec.format.model_file import ModelFile
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import AnyLayer
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.quantizers import Lsq, Nested, WeightQuantizer
from anyprec.nn.switching import any_layers, bits, switch_norms, widths_of
from anyprec.packing.codes import layer_weight, to_file_order
from anyprec.packing.packing import make_graph
from anyprec.widths import FLOAT

SAME = 1e-5  # relative: numbers that went through float32 tables
LEAST_SAME_ANSWERS = 0.99  # of the images; float sums in another order move codes across a border


@dataclass(frozen=True)
class UnpackedWidths:
    """What came from the file, what is new, and how the network compares with the file, width by width."""

    widths: tuple[int, ...]
    new_widths: tuple[int, ...]
    same_answers: dict[int, float]  # share of the images


@torch.no_grad()
def unpack(model: nn.Module, path: str | Path, batches: Sequence[Tensor]) -> UnpackedWidths:
    """Fill `model`, made for the same network, with a model file. It answers as the file at every width both have.

    batches: training images (N, C, H, W). The statistics of the norms are measured on them.

    Widths that the file lacks, such as float, start with gamma and beta of the widest width it has, and statistics of
    their own. Raises CheckpointError where network and file do not fit.
    """
    with ModelFile(path) as file:
        graph = file.graph()
    was_training = model.training
    model.eval()
    try:
        unpacking = Unpacking(model, graph, str(path), batches[0][:4])
        unpacking.set_weights()
        unpacking.set_tables()
        unpacking.measure(batches)
        same = unpacking.compare(batches)
    finally:
        model.train(was_training)
    return UnpackedWidths(tuple(unpacking.widths), tuple(unpacking.new_widths), same)


class Unpacking:
    def __init__(self, model: nn.Module, graph: Graph, path: str, example: Tensor) -> None:
        self.model, self.graph, self.path, self.example = model, graph, path, example
        self.layers, self.norms = any_layers(model), switch_norms(model)
        uniform = {int(p.name): row for row, p in enumerate(graph.profiles) if p.name.isdigit()}
        self.rows = {k: row for k, row in uniform.items() if k != FLOAT and k in widths_of(model)}
        self.widths = sorted(self.rows)
        self.new_widths = [k for k in widths_of(model) if k not in self.rows]
        self._check_model()

    def refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be where this network starts: {why}")

    def _check_model(self) -> None:
        if not self.widths:
            have = ", ".join(p.name for p in self.graph.profiles)
            raise self.refuse(f"it has {have} bit, the network {', '.join(map(str, widths_of(self.model)))}")
        for name, layer in self.layers.items():
            if not isinstance(layer.quantizer, (Nested, Lsq)):
                kind = type(layer.quantizer).__name__
                raise self.refuse(f"the codes of quantizer {kind} (layer {name!r}) do not nest; use lsq or nested")
        numbers = self.graph.planes
        top = max(numbers)
        if any(tuple(numbers[k]) != tuple(numbers[top])[:k] for k in numbers):
            raise self.refuse("its codes do not nest (it was trained with dorefa)")
        acts = [m for m in self.model.modules() if isinstance(m, ActQuantizer)]
        if any(act.clip != "fixed" for act in acts):
            raise self.refuse("the activations of the network have ranges of their own; only fixed ones fit a file")
        for name, norm in self.norms.items():
            if not all(isinstance(t, nn.modules.batchnorm._BatchNorm) and t.affine for t in norm.tables.values()):
                raise self.refuse(f"{name!r} is not a batch norm with gamma and beta")

    # --- Weights ---

    def set_weights(self) -> None:
        """Codes to the float weights of any-layers, values to those of float layers."""
        reference = self.packed()
        self.check_ops(reference)
        parameters = {name: p for name, p in self.model.named_parameters() if p.dim() > 1}
        for name, weight in self.graph.weights.items():
            own = reference.weights[name]
            if weight.bits is not None:
                raise self.refuse(f"its layer {name!r} has 8 bits at every width (pack --first-last 8bit)")
            if weight.is_float:
                assert own.values is not None and weight.values is not None
                found = [
                    p for p in parameters.values()
                    if p.dim() in (2, 4) and np.array_equal(to_file_order(p.float()), own.values)
                ]  # fmt: skip
                if len(found) != 1:
                    raise self.refuse(f"the float weight {name!r} is not one parameter of the network")
                (p,) = found
                p.copy_(torch.from_numpy(weight.values).permute(0, 3, 1, 2).reshape(p.shape))
            elif name not in self.layers:
                raise self.refuse(f"its quantized weight {name!r} is no layer of the network")
            else:
                self.set_codes(name, self.layers[name], weight.codes)

    def set_codes(self, name: str, layer: AnyLayer, codes: Any) -> None:
        top = max(codes)
        expected = to_file_order(layer_weight(layer, layer.weight.float()))
        assert codes[top].shape == expected.shape  # check_ops has seen to it
        x = (torch.from_numpy(codes[top].astype(np.float64)) + 0.5) / (1 << top)  # the middle, in [0, 1]
        x = x.permute(0, 3, 1, 2).reshape(layer.weight.shape)
        start_weight(layer.quantizer, layer.weight, 2 * x - 1)
        for k in codes:
            if not np.array_equal(to_file_order(layer_weight(layer, layer.codes(k))), codes[k]):
                raise self.refuse(f"quantizer {type(layer.quantizer).__name__} does not give the codes of {name!r}")

    # --- Tables ---

    def packed(self) -> Graph:
        return make_graph(self.model, example=self.example, widths=self.widths)

    def check_ops(self, reference: Graph) -> None:
        """The same operations in the same order; `affine` only says that a table is there."""
        for ours, theirs in zip(reference.ops, self.graph.ops, strict=False):
            if (ours.name, ours.kind, ours.inputs) != (theirs.name, theirs.kind, theirs.inputs):
                raise self.refuse(
                    f"it has {theirs.kind} {theirs.name!r} where the network has {ours.kind} {ours.name!r}"
                )
            for key in {*ours.attributes, *theirs.attributes} - {"affine"}:
                if ours.attributes.get(key) != theirs.attributes.get(key):
                    raise self.refuse(
                        f"{theirs.name!r} has {key} {theirs.attributes.get(key)}, the network "
                        f"{ours.attributes.get(key)}"
                    )
        if len(reference.ops) != len(self.graph.ops):
            raise self.refuse(f"it has {len(self.graph.ops)} operations, the network {len(reference.ops)}")
        for name, weight in self.graph.weights.items():
            if name in reference.weights and reference.weights[name].shape != weight.shape:
                raise self.refuse(
                    f"the weight of {name!r} is {shape_text(weight.shape)}, in the network "
                    f"{shape_text(reference.weights[name].shape)} (out, height, width, in)"
                )
            if name not in reference.weights or reference.weights[name].is_float != weight.is_float:
                raise self.refuse(f"its weight {name!r} is not one of the network's")

    def table(self, graph: Graph, op: str, bits: int) -> np.ndarray:
        """(2, C) or (1, 1): scale and shift at one width; without a table, 1 and 0."""
        row = [p.name for p in graph.profiles].index(str(bits))
        if op not in graph.tables:
            return np.array([[1.0], [0.0]])
        return graph.tables[op][row].astype(np.float64)

    def set_tables(self) -> None:
        """Solve for every norm: y = A x + B becomes the table (U A, V B + W A) of one op."""
        marks = np.random.default_rng(0)
        biases = {n: p for n, p in self.model.named_parameters() if n.endswith("bias") and p.dim() == 1
                  and ".tables." not in n}  # fmt: skip
        for p in biases.values():
            p.zero_()
        first = {name: marks.uniform(1, 2, channels(norm)) for name, norm in self.norms.items()}  # A
        second = {name: marks.uniform(1, 2, channels(norm)) for name, norm in self.norms.items()}  # B
        third = {name: marks.uniform(1, 2, len(p)) for name, p in biases.items()}
        for name, norm in self.norms.items():
            for k in self.widths:
                set_affine(norm.tables[str(k)], first[name], 0 * first[name])
        plain = self.packed()
        self.check_ops(plain)
        for name, norm in self.norms.items():
            for k in self.widths:
                set_affine(norm.tables[str(k)], first[name], second[name])
        shifted = self.packed()
        self.check_ops(shifted)
        for name, norm in self.norms.items():
            for k in self.widths:
                set_affine(norm.tables[str(k)], first[name], 0 * first[name])
        for name, p in biases.items():
            p.copy_(torch.from_numpy(third[name]))
        biased = self.packed()
        for p in biases.values():
            p.zero_()

        with_norm: dict[str, str] = {}  # norm -> op
        done: set[str] = set()
        for op in [op.name for op in plain.ops]:
            moves = {k: self.table(shifted, op, k)[1] - self.table(plain, op, k)[1] for k in self.widths}
            if not any(np.abs(m).max() > SAME for m in moves.values()):
                continue
            found = [n for n, mark in second.items() if all(is_multiple(m, mark) for m in moves.values())]
            if len(found) != 1 or found[0] in with_norm:
                raise self.refuse(f"no single norm makes the table of {op!r}")
            name = found[0]
            with_norm[name] = op
            done.add(op)
            for k in self.widths:
                ours, theirs = self.table(plain, op, k), self.table(self.graph, op, k)
                v = moves[k] / second[name]
                a = theirs[0] / (ours[0] / first[name])
                b = (theirs[1] - ours[1] / first[name] * a) / v
                set_affine(self.norms[name].tables[str(k)], a, b)
        missing = [name for name in self.norms if name not in with_norm]
        if missing:
            raise self.refuse(f"no table of it belongs to norm {missing[0]!r} alone")
        self.set_biases(plain, biased, biases, third, done)
        self.set_scales(plain, done)

    def set_biases(
        self, plain: Graph, biased: Graph, biases: dict[str, Any], marks: dict[str, np.ndarray], done: set[str]
    ) -> None:
        """A bias before a norm stays 0: the norm's own shift has it already."""
        for op in [op.name for op in plain.ops if op.name not in done]:
            moves = {k: self.table(biased, op, k)[1] - self.table(plain, op, k)[1] for k in self.widths}
            if not any(np.abs(m).max() > SAME for m in moves.values()):
                continue
            found = [n for n, mark in marks.items() if all(is_multiple(m, mark) for m in moves.values())]
            if len(found) != 1:
                raise self.refuse(f"no single bias makes the table of {op!r}")
            values = [self.table(self.graph, op, k)[1] * marks[found[0]] / moves[k] for k in self.widths]
            if not all(np.allclose(v, values[-1], rtol=SAME, atol=SAME) for v in values):
                raise self.refuse(f"the bias of {op!r} differs from width to width")
            biases[found[0]].copy_(torch.from_numpy(values[-1]))

    def set_scales(self, plain: Graph, done: set[str]) -> None:
        """A layer without a norm behind it: the scales of its widths, from the table."""
        by_weight = {op.attributes.get("weight"): op.name for op in plain.ops if "weight" in op.attributes}
        for name, layer in self.layers.items():
            op = by_weight.get(name)
            if op is None or op in done:
                continue
            for k in self.widths:
                ratio = self.table(self.graph, op, k)[0] / self.table(plain, op, k)[0]
                if not np.allclose(ratio, ratio.flat[0], rtol=SAME):
                    raise self.refuse(f"layer {name!r} has a scale per channel there, one per layer here")
                factor = float(ratio.flat[0])
                if k == self.widths[-1]:  # the float weight and its range go along
                    layer.weight.mul_(factor)
                    if isinstance(layer.quantizer, Lsq):
                        layer.quantizer.range.mul_(factor)
                if layer.quantizer.learned:
                    layer.quantizer.scales[str(k)].mul_(factor)
                elif abs(factor - 1) > SAME:
                    raise self.refuse(f"the scale of layer {name!r} is not the mean of its weights")

    # --- Statistics ---

    def measure(self, batches: Sequence[Tensor]) -> None:
        """Means and variances of what the norms read, width by width; gamma and beta such that A and B stay."""
        for k in self.widths:
            seen = measured_inputs(self.model, self.norms, k, batches)
            for name, (mean, variance) in seen.items():
                table: Any = self.norms[name].tables[str(k)]
                a = table.weight.double() / (table.running_var.double() + table.eps).sqrt()
                b = table.bias.double() - a * table.running_mean.double()
                set_statistics(table, a, b, mean, variance)
        widest = str(self.widths[-1])
        for k in self.new_widths:
            for norm in self.norms.values():
                norm.tables[str(k)].load_state_dict(norm.tables[widest].state_dict())
            for layer in self.layers.values():
                if layer.quantizer.learned and k != FLOAT:
                    WeightQuantizer.fit(layer.quantizer, layer.weight, [k])
        if self.new_widths:
            from anyprec.nn.calibrate import estimate_norms

            estimate_norms(self.model, self.new_widths, list(batches))

    # --- Check ---

    def compare(self, batches: Sequence[Tensor]) -> dict[int, float]:
        """Share of the images on which network and file have the same largest output, at every width."""
        from anyprec.run.model import load

        file, images = load(self.path), torch.cat([b[:64] for b in batches[:4]])
        same: dict[int, float] = {}
        for k in self.widths:
            with bits(self.model, k):
                ours = self.model(images).argmax(1).cpu().numpy()
            theirs = np.argmax(file(images.cpu().contiguous().numpy(), bits=k), axis=1)
            same[k] = float((ours == theirs).mean())
            if same[k] < LEAST_SAME_ANSWERS:
                raise self.refuse(f"at {k} bit only {100 * same[k]:.1f} % of the answers are the same")
        return same


# --- Numbers ---


def start_weight(quantizer: WeightQuantizer, weight: Tensor, v: Tensor) -> None:
    """Weights whose codes are those of v in (-1, 1), with the variance of He's start, 2 / fan_in."""
    rms = math.sqrt(2 / weight[0].numel()) / float(v.square().mean().sqrt())
    if isinstance(quantizer, Lsq):
        quantizer.range.fill_(rms)
        weight.copy_(v * rms)
    else:  # the largest |tanh(w)| is always at the end of the codes
        top = float(v.abs().max())
        weight.copy_(torch.atanh(v / top * math.tanh(min(2.0, 1.0 * rms * top))))
    if quantizer.learned:
        WeightQuantizer.fit(quantizer, weight, [int(k) for k in quantizer.scales])


def channels(norm: SwitchNorm) -> int:
    table: Any = next(iter(norm.tables.values()))
    return int(table.num_features)


def set_affine(table: Any, a: np.ndarray, b: np.ndarray) -> None:
    """In evaluation the norm is a x + b."""
    table.running_mean.zero_()
    table.running_var.fill_(1.0)
    table.weight.copy_(torch.from_numpy(a * math.sqrt(1 + table.eps)))
    table.bias.copy_(torch.from_numpy(np.broadcast_to(b, a.shape).copy()))


def set_statistics(table: Any, a: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> None:
    """The same a x + b, with these statistics."""
    table.running_mean.copy_(mean)
    table.running_var.copy_(variance)
    table.weight.copy_(a * (variance + table.eps).sqrt())
    table.bias.copy_(b + a * mean)


def is_multiple(numbers: np.ndarray, mark: np.ndarray) -> bool:
    if numbers.shape != mark.shape:
        return False
    ratio = numbers / mark
    return bool(np.allclose(ratio, ratio[0], rtol=100 * SAME) and abs(ratio[0]) > 0)


def measured_inputs(
    model: nn.Module, norms: dict[str, SwitchNorm], k: int, batches: Iterable[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance (unbiased, as torch keeps it) of each channel of what every norm reads at k bits."""
    sums: dict[str, list[Any]] = {name: [0, 0.0, 0.0] for name in norms}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].double()
            axes = [0, *range(2, x.dim())]
            total = sums[name]
            total[0] += x.numel() // x.shape[1]
            total[1] = total[1] + x.sum(axes)
            total[2] = total[2] + x.square().sum(axes)

        return hook

    hooks = [norm.register_forward_pre_hook(watch(name)) for name, norm in norms.items()]
    try:
        with bits(model, k):
            for images in batches:
                model(images)
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for name, (count, total, squares) in sums.items():
        mean = total / count
        found[name] = mean, ((squares / count - mean.square()) * count / max(count - 1, 1)).clamp_min(0)
    return found


def shape_text(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))
