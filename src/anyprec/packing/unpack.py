"""`unpack`: a model file and an untrained network of the same kind in, a network that answers as the file does out.

The opposite of pack, as far as there is one. A file without float weights has codes only, so each weight becomes the
middle of its widest code. It has no norms either, only the tables (scale, shift) into which fold.py has multiplied
them. Which norm went into which table is asked of pack itself: the network is packed with marks in its norms, and the
marks are looked up in the tables. FORMAT.md, section 3. Called by training/run.py where `init` names a model file.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anyprec.errors import CheckpointError, UnsupportedOperation, VerificationFailed
from anyprec.format.file import write
from anyprec.format.graph import Graph, Weight
from anyprec.format.model_file import ModelFile
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.calibrate import estimate_norms
from anyprec.nn.layers import AnyLayer
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.quantizers import Lsq, Nested, WeightQuantizer
from anyprec.nn.switching import any_layers, widths_of
from anyprec.packing.codes import layer_weight, to_file_order
from anyprec.packing.norm_tables import (
    SAME,
    Norm,
    Tables,
    is_multiple,
    measured_inputs,
    norms_of,
    set_affine,
    set_moments,
)
from anyprec.packing.packing import plan_packing
from anyprec.packing.verify import VerificationPlan, VerificationReport, verify
from anyprec.preprocessing import Preprocessing
from anyprec.widths import FLOAT

MOST = 3.0  # the largest weight that is made for `nested`: tanh is flat beyond
EXAMPLES = 16  # images the file and the network are compared on


@dataclass(frozen=True)
class UnpackReport:
    """What the network has from the file, and how the two compare."""

    widths: tuple[int, ...]
    new_widths: tuple[int, ...]  # those the file lacks
    check: VerificationReport


@torch.no_grad()
def unpack(model: nn.Module, path: str | Path, batches: Sequence[Tensor]) -> UnpackReport:
    """Fill `model` with a model file, so that it answers as the file at every width that both have.

    model: of the zoo or converted, on the CPU, with the layers and names of the network that was packed.
    batches: training images (N, C, H, W), on which the statistics of the norms are measured.

    Codes at every width are those of the file. Widths that the file lacks, such as float, start with gamma and beta of
    the widest it has, and statistics of their own. The result is compared with the file as `pack` compares its own.
    Raises CheckpointError where network and file do not fit.
    """
    with ModelFile(path) as file:
        graph = file.graph()
    was_training = model.training
    model.eval()
    try:
        unpacking = Unpacking(model, graph, str(path), batches[0][:EXAMPLES])
        unpacking.set_weights()
        unpacking.set_tables()
        unpacking.set_statistics(batches)
        check = unpacking.check()
    finally:
        model.train(was_training)
    return UnpackReport(tuple(unpacking.widths), tuple(unpacking.new_widths), check)


def preprocessing_in_file(path: str | Path) -> Preprocessing | None:
    """How pictures become images of a model file's input; None where it does not say."""
    with ModelFile(path) as file:
        return file.graph().preprocessing


class Unpacking:
    """`rows` says which row of the file's tables a width has."""

    def __init__(self, model: nn.Module, graph: Graph, path: str, example: Tensor) -> None:
        self.model, self.path, self.example = model, path, example
        self.layers = any_layers(model)
        keeps_float = all(w.values is not None for w in graph.weights.values())
        rows = {int(p.name): row for row, p in enumerate(graph.profiles) if p.name.isdigit()}
        self.rows = {k: row for k, row in sorted(rows.items()) if k in widths_of(model)}
        if not keeps_float:
            self.rows.pop(FLOAT, None)
        self.widths = list(self.rows)
        self.new_widths = [k for k in widths_of(model) if k not in self.rows]
        self._check(graph)
        self.graph = replace(
            graph,
            profiles=tuple(graph.profiles[row] for row in self.rows.values()),
            tables={name: table[list(self.rows.values())] for name, table in graph.tables.items()},
        )
        self.norms = norms_of(model, self.widths)

    def refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"a training of this network cannot start from {self.path}: {why}")

    def _check(self, graph: Graph) -> None:
        if not any(k != FLOAT for k in self.widths):
            have, want = (", ".join(map(str, widths)) for widths in (graph.planes, widths_of(self.model)))
            raise self.refused(f"it has codes for {have} bit, the network has the widths {want}")
        top = graph.planes[max(graph.planes)]
        if any(tuple(planes) != tuple(top)[: len(planes)] or planes[0] != 0 for planes in graph.planes.values()):
            raise self.refused("its codes do not nest (quantizer dorefa); choose a file of quantizer lsq or nested")
        for name, layer in self.layers.items():
            if type(layer.quantizer) not in (Nested, Lsq):
                kind = type(layer.quantizer).__name__.lower()
                raise self.refused(f"the codes of quantizer {kind} (layer {name!r}) do not nest; use lsq or nested")
        if any(act.clip != "fixed" for act in self.model.modules() if isinstance(act, ActQuantizer)):
            raise self.refused("its activations have ranges, which cannot be told from a file; zoo networks have none")
        for name, weight in graph.weights.items():
            if weight.bits is not None:
                raise self.refused(f"its layer {name!r} is 8 bit at every width; pack with --first-last float")
        for name, module in self.model.named_modules():
            for table in module.tables.values() if isinstance(module, SwitchNorm) else ():
                if not (isinstance(table, _BatchNorm) and table.affine and table.track_running_stats):
                    raise self.refused(f"{name!r} is not a batch norm with gamma, beta and statistics")

    # --- Weights ---

    def set_weights(self) -> None:
        """Of any-layers and of float layers."""
        own = self.packed().graph
        self.check_ops(own)
        parameters = [p for p in self.model.parameters() if p.dim() in (2, 3, 4)]
        for name, weight in self.graph.weights.items():
            if not weight.is_float:
                if name not in self.layers:
                    raise self.refused(f"its quantized weight {name!r} is not the weight of one layer")
                self.set_codes(name, self.layers[name], weight)
                continue
            now = own.weights[name].values
            assert weight.values is not None and now is not None
            same = [p for p in parameters if p.numel() == now.size and np.array_equal(to_file_order(p.float()), now)]
            if len(same) != 1:
                raise self.refused(f"its float weight {name!r} is not one parameter of the network")
            same[0].copy_(torch_order(weight.values, same[0]))

    def set_codes(self, name: str, layer: AnyLayer, weight: Weight) -> None:
        assert weight.codes is not None
        widest = max(weight.codes)
        if isinstance(layer, nn.modules.conv._ConvTransposeNd) or layer.weight.dim() not in (2, 3, 4):
            raise self.refused(f"layer {name!r} is a transposed convolution, whose weight lies in another order")
        codes = torch_order(weight.codes[widest].astype(np.float64), layer.weight)
        v = (2 * codes + 1) / (1 << widest) - 1  # the middle of what the code stands for, in (-1, 1)
        if FLOAT in self.rows:
            assert weight.values is not None
            layer.weight.copy_(torch_order(weight.values, layer.weight))
            if isinstance(layer.quantizer, Lsq):
                fit_range(layer, v, 1 / (1 << widest))
        else:
            start_weight(layer, v)
        if layer.quantizer.learned:
            WeightQuantizer.fit(layer.quantizer, layer.weight, [int(k) for k in layer.quantizer.scales])
        for k in weight.codes:
            if not np.array_equal(to_file_order(layer_weight(layer, layer.codes(k))), weight.codes[k]):
                kind = type(layer.quantizer).__name__.lower()
                raise self.refused(f"quantizer {kind} cannot give the {k}-bit codes of layer {name!r}; try the other")

    # --- Tables ---

    def packed(self) -> VerificationPlan:
        return plan_packing(
            self.model, example=self.example, keep_float=False, widths=self.widths, profiles=(), labels=None,
            image=None, accuracy=None, name=None, first_last="float",
        )  # fmt: skip

    def check_ops(self, own: Graph) -> None:
        """The same operations in the same order; `affine` only says that there is a table, `toom_cook` how a float
        convolution is computed."""
        for ours, theirs in zip(own.ops, self.graph.ops, strict=False):
            if (ours.name, ours.kind, ours.inputs) != (theirs.name, theirs.kind, theirs.inputs):
                raise self.refused(
                    f"it has {theirs.kind} {theirs.name!r} where the network has {ours.kind} {ours.name!r}"
                )
            for key in sorted({*ours.attributes, *theirs.attributes} - {"affine", "toom_cook"}):
                a, b = theirs.attributes.get(key), ours.attributes.get(key)
                if a != b:
                    raise self.refused(f"{key} of {theirs.name!r} is {a}, in the network {b}")
        if len(own.ops) != len(self.graph.ops):
            raise self.refused(f"it has {len(self.graph.ops)} operations, the network {len(own.ops)}")
        for name, weight in self.graph.weights.items():
            if name not in own.weights or own.weights[name].is_float != weight.is_float:
                raise self.refused(f"its weight {name!r} is none of the network's, or float in one of them only")
            if own.weights[name].shape != weight.shape:
                a, b = (" x ".join(map(str, shape)) for shape in (weight.shape, own.weights[name].shape))
                raise self.refused(f"the weight of {name!r} is {a} (out, height, width, in), in the network {b}")

    def set_tables(self) -> None:
        """Norms, biases and scales such that packing the network gives the tables of the file.

        A norm A x + B becomes the table (U A, V B + W A) of one op. U, V and W, which contain the codes' steps, follow
        from packing known A and B; they differ from width to width. Then the file's table gives A and B.
        """
        dice = np.random.default_rng(0)
        biases = plain_biases(self.model)
        gains = {norm.name: dice.uniform(1, 2, norm.channels) for norm in self.norms}
        shifts = {norm.name: dice.uniform(1, 2, norm.channels) for norm in self.norms}
        moved = {name: dice.uniform(1, 2, len(bias)) for name, bias in biases.items()}
        zeros = {name: np.zeros_like(mark) for name, mark in moved.items()}

        plain = self.packed_with(gains, {n: np.zeros_like(s) for n, s in shifts.items()}, biases, zeros)
        shifted = self.packed_with(gains, shifts, biases, zeros)
        biased = self.packed_with(gains, {n: np.zeros_like(s) for n, s in shifts.items()}, biases, moved)
        for bias in biases.values():
            bias.zero_()
        tables = Tables(self.graph, plain)
        of_norms = self.places(tables, shifted, shifts, "norm")
        for norm in self.norms:
            if norm.name not in of_norms:
                raise self.refused(f"none of its tables has the norm {norm.name!r} in it and no other")
            self.set_norm(norm, tables, of_norms[norm.name], shifted, gains[norm.name], shifts[norm.name])
        # A bias before a norm stays 0: the norm's own shift has it already.
        of_biases = self.places(tables, biased, moved, "bias", leave=set(of_norms.values()))
        for name, op in of_biases.items():
            by_width = [tables.theirs(op, k)[1] * moved[name] / tables.moved(biased, op, k) for k in self.widths]
            if not all(np.allclose(one, by_width[-1], rtol=10 * SAME, atol=10 * SAME) for one in by_width):
                raise self.refused(f"the bias in the table of {op!r} differs from width to width")
            biases[name].copy_(torch.from_numpy(by_width[-1]))
        self.set_scales(tables, leave=set(of_norms.values()))

    def packed_with(
        self,
        gains: Mapping[str, np.ndarray],
        shifts: Mapping[str, np.ndarray],
        biases: Mapping[str, Tensor],
        values: Mapping[str, np.ndarray],
    ) -> Graph:
        for norm in self.norms:
            for table in norm.tables.values():
                set_affine(table, gains[norm.name], shifts[norm.name])
        for name, bias in biases.items():
            bias.copy_(torch.from_numpy(values[name]))
        graph = self.packed().graph
        self.check_ops(graph)
        return graph

    def places(
        self, tables: Tables, other: Graph, marks: Mapping[str, np.ndarray], what: str, leave: Iterable[str] = ()
    ) -> dict[str, str]:
        """Whose marks are in which op's table: those that moved it are a multiple of one mark, at every width."""
        found: dict[str, str] = {}
        for op in tables.affine:
            moves = [tables.moved(other, op, k) for k in self.widths]
            if op in leave or not any(np.abs(move).max() > 0 for move in moves):
                continue
            fit = [name for name, mark in marks.items() if all(is_multiple(move, mark) for move in moves)]
            if len(fit) != 1 or fit[0] in found:
                raise self.refused(f"the table of {op!r} is not made by one {what}, or not by it only")
            found[fit[0]] = op
        return found

    def set_norm(
        self, norm: Norm, tables: Tables, op: str, shifted: Graph, gain: np.ndarray, shift: np.ndarray
    ) -> None:
        solved: list[np.ndarray] = []
        for k, table in norm.tables.items():
            ours, theirs = tables.ours(op, k), tables.theirs(op, k)
            a = gain * theirs[0] / ours[0]
            b = (theirs[1] - ours[1] / gain * a) * shift / tables.moved(shifted, op, k)
            solved.append(np.stack([a, b]))
            set_affine(table, a, b)
        if norm.shared and not all(np.allclose(one, solved[-1], rtol=1e-3, atol=10 * SAME) for one in solved):
            raise self.refused(f"norm {norm.name!r} is one for all widths, but differs in the table of {op!r}")

    def set_scales(self, tables: Tables, leave: Iterable[str]) -> None:
        """A layer without a norm of its own, such as the last one before a sum: its scales are in the table."""
        ops = {op.attributes["weight"]: op.name for op in self.graph.ops if "weight" in op.attributes}
        for name, layer in self.layers.items():
            op = ops[name]
            if op in leave:
                continue
            for k in (k for k in self.widths if k != FLOAT):
                factor = tables.theirs(op, k)[0] / tables.ours(op, k)[0]
                if not np.allclose(factor, factor.flat[0], rtol=10 * SAME):
                    raise self.refused(f"layer {name!r} has a scale for each channel there, and one for all here")
                if layer.quantizer.learned:
                    layer.quantizer.scales[str(k)].mul_(float(factor.flat[0]))
                elif abs(factor.flat[0] - 1) > 10 * SAME:
                    raise self.refused(f"the scale of layer {name!r} is not the mean of its weights; set scale=learned")
            if FLOAT not in self.rows and layer.quantizer.learned:  # the float weight is worth what the widest code is
                widest = self.widths[-1]
                set_size(layer, layer.quantizer.values(layer.codes(widest), widest), self.scale(layer, widest))

    def scale(self, layer: AnyLayer, k: int) -> float:
        return float(layer.quantizer.scale(layer.weight, k))

    # --- Statistics ---

    def set_statistics(self, batches: Sequence[Tensor]) -> None:
        """Means and variances of what norms read; gamma and beta change with them, so that a x + b stays as it is."""
        seen = {k: measured_inputs(self.model, self.norms, k, batches) for k in self.widths}
        for norm in self.norms:
            for k, table in norm.tables.items():
                widths = self.widths if norm.shared else [k]  # in training, it sees the mixture of all widths
                mean = torch.stack([seen[w][norm.name][0] for w in widths]).mean(0)
                square = torch.stack([seen[w][norm.name][1] for w in widths]).mean(0)
                set_moments(table, mean, (square - mean.square()).clamp_min(0))
        widest = max(k for k in self.widths if k != FLOAT)
        for norm in (norm for norm in self.norms if not norm.shared):
            for k in self.new_widths:
                assert isinstance(norm.reads, SwitchNorm)
                norm.reads.tables[str(k)].load_state_dict(norm.tables[widest].state_dict())
        for layer in self.layers.values():
            for k in self.new_widths:
                if layer.quantizer.learned and k != FLOAT:
                    WeightQuantizer.fit(layer.quantizer, layer.weight, [k])
        if self.new_widths:
            estimate_norms(self.model, self.new_widths, list(batches))

    # --- Check ---

    def check(self) -> VerificationReport:
        """The check of `pack`: network and file, layer by layer at every width."""
        plan = replace(self.packed(), graph=self.graph)
        with tempfile.TemporaryDirectory(prefix="anyprec-unpack-") as folder:
            path = Path(folder) / "model.apm"
            write(self.graph, path)
            try:
                return verify(self.model, path, plan)
            except (VerificationFailed, UnsupportedOperation) as error:
                what = str(error).partition("; no file was written")[0]
                raise self.refused(f"the network would answer otherwise ({what})") from error


# --- Numbers ---


def torch_order(values: np.ndarray, like: Tensor) -> Tensor:
    """(out, kh, kw, in) as torch has it."""
    return torch.from_numpy(np.ascontiguousarray(values)).permute(0, 3, 1, 2).reshape(like.shape)


def start_weight(layer: AnyLayer, v: Tensor) -> None:
    """A weight whose codes are those of v in (-1, 1), of the root mean square of He's start, sqrt(2 / fan_in).

    A norm behind takes any factor out, but the step of an optimizer does not grow with the weight: at this size,
    learning rates for a training from scratch are right.
    """
    set_size(layer, v, math.sqrt(2 / v[0].numel()) / max(float(v.square().mean().sqrt()), 1e-3))


def set_size(layer: AnyLayer, v: Tensor, size: float) -> None:
    """The weight with the codes of v that is about size * v."""
    if isinstance(layer.quantizer, Lsq):
        layer.quantizer.range.fill_(size)
        layer.weight.copy_(size * v)
        return
    # Nested: x is tanh(w) over its largest, so some code is the first or the last, and w is bent.
    unit = v.double() / v.abs().max()
    top = size
    for _ in range(8):
        w = torch.atanh(unit * math.tanh(min(top, MOST)))
        top *= size / max(float((w * v).sum() / (v * v).sum()), 1e-12)
    layer.weight.copy_(torch.atanh(unit * math.tanh(min(top, MOST))))


def fit_range(layer: AnyLayer, v: Tensor, half: float) -> None:
    """The range at which a float weight has the codes of v, whose cells reach from v - half to v + half."""
    assert isinstance(layer.quantizer, Lsq)
    w, inner, outer = layer.weight.double().abs(), v.abs() - half, v.abs() + half
    below = (w / outer)[outer < 1]  # r is at least this, unless the code is the last, which clips
    above = (w / inner.clamp_min(1e-12))[inner > 0]  # ... and at most this
    low = float(below.max()) if below.numel() else 0.0
    high = float(above.min()) if above.numel() else max(2 * low, 1e-6)
    layer.quantizer.range.fill_((low + high) / 2 if low else high)


def plain_biases(model: nn.Module) -> dict[str, Tensor]:
    """Those of layers: not of norms."""
    norms = {id(p) for m in model.modules() if isinstance(m, _BatchNorm) for p in m.parameters()}
    return {
        name: p
        for name, p in model.named_parameters()
        if name.rpartition(".")[2] == "bias" and p.dim() == 1 and id(p) not in norms
    }
