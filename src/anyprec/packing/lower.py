"""Lowering: TraceSteps and settings (widths, profiles) in, DraftNodes with numbers for every profile out.

Called by packing.py. A DraftNode is an Op of FORMAT.md to be: its table is float64 here, and rounded once, when fold.py
has multiplied out what can be. The numbers for weight bits k, activation bits a, n = 2^a - 1, range r (1 if fixed):
    weight:     s_k (2c + 1 - 2^k) / d, where d is 2^k (nested, lsq) or 2^k - 1 (dorefa)
    unsigned:   code = round(x n/r),           value = code r/n
    signed:     code = round(x n/2r + n/2),    value = (2 code - n) r/n
    conv table: s_k/d * r/n, and the bias.
    product of two values: r/n * r'/n', where both are codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyprec.errors import AnyprecError, DataError, ProfileError, UncalibratedBits, UnsupportedOperation
from anyprec.format.graph import FIXED_BITS, INPUT, Weight, product_fits
from anyprec.format.shapes import fits_toom_cook
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import ANY_LAYERS, AnyActivation, AnyLayer, AnyLinear, own_method
from anyprec.nn.observe import InputQuantizer, is_undecided
from anyprec.nn.own_forward import ComputedWeightLayer
from anyprec.nn.quantizers import QUANTIZERS, WeightQuantizer
from anyprec.nn.switching import Setting, bits, setting_name
from anyprec.packing.codes import (
    FIXED_LEVELS,
    SUM_LIMIT,
    ActivationGrid,
    CodesByWidth,
    channel_codes,
    layer_weight,
    to_file_order,
    weight_key,
)
from anyprec.packing.operations.layers import layer_pads
from anyprec.packing.steps import NetworkTrace, Shape, TraceStep
from anyprec.packing.views import View
from anyprec.widths import FLOAT

# What lowering takes for granted about the modules it asks for numbers. Their forward is free: trace.py records it.
LAYER_METHODS = ("at_bits", "_conv_forward", "quantized_input", "quantized_weight", "quantized_bias", "codes")
WEIGHT_METHODS = ("normalize", "magnitude", "codes", "scale", "weight", "bias", "float_weight", "_code", "_value")
ACT_METHODS = ("forward", "codes", "range")
CODES_PASS = ("max_pool", "flatten", "reshape", "transpose", "slice", "gather")


@dataclass
class DraftNode:
    """An operation with its numbers; `table` (P, 2, C) or (P, 2) float64, `bits` only of a quantize, one a profile."""

    name: str
    kind: str
    inputs: list[str]
    shape: Shape
    attributes: dict[str, Any] = field(default_factory=dict)
    table: np.ndarray | None = None
    bits: tuple[int, ...] = ()

    @property
    def channels(self) -> int:
        return self.shape[-1]


@dataclass
class ComparisonPoint:
    """A place where module and file can be compared: a quantizer's output, and the value of the file that holds it."""

    value: str
    codes: ActivationGrid
    view: View  # how the module's tensor lies in the value
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, bottom, right: zeros the file leaves to a convolution


@dataclass
class GraphDraft:
    """A Graph in the making; `points` and `rounded` are for verify.py."""

    nodes: list[DraftNode]
    weights: dict[str, Weight]
    weight_bits: dict[str, tuple[int, ...]]  # of quantized weights, one a profile
    outputs: list[str]
    inputs: dict[str, Shape]
    points: dict[
        str, ComparisonPoint
    ]  # by step: the input of an any-layer or of an 8-bit first or last layer, what an activation makes
    rounded: dict[
        str, np.ndarray
    ]  # 8-bit first or last layers -> what their weights' codes stand for, (out, kh, kw, in)


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


def lower(
    trace: NetworkTrace, model: nn.Module, settings: list[Setting], first_last: Mapping[str, ActivationGrid]
) -> GraphDraft:
    """`first_last`: float layers that are to be 8 bit, and what the codes of their inputs stand for (first_last.py)."""
    return Lowering(trace, model, settings, first_last).draft()


class Lowering:
    """`layers` and `acts` hold what the modules say of themselves in each profile; `nodes` grows step by step."""

    def __init__(
        self, trace: NetworkTrace, model: nn.Module, settings: list[Setting], first_last: Mapping[str, ActivationGrid]
    ) -> None:
        self.trace, self.model, self.settings, self.first_last = trace, model, settings, first_last
        self.paths = {module: name for name, module in model.named_modules()}
        self.shape = {INPUT: trace.inputs[0].shape, **{step.name: step.shape for step in trace.steps}}
        self.nodes: dict[str, DraftNode] = {}
        self.codes: dict[str, ActivationGrid] = {}
        self.weights: dict[str, Weight] = {}
        self.weight_bits: dict[str, tuple[int, ...]] = {}
        self.weight_names: dict[object, str] = {}  # an any-layer, or what tells a float tensor from others
        self.values: dict[str, str] = {}  # codes -> the dequantize that reads them
        self.layers: dict[nn.Module, list[tuple[int, np.ndarray]]] = {}  # weight bits, s_k / d
        self.acts: dict[nn.Module, ActivationGrid] = {}
        self.points: dict[str, ComparisonPoint] = {}
        self.rounded: dict[str, np.ndarray] = {}
        self._ask()

    def draft(self) -> GraphDraft:
        lowerings = {"any": self.layer, "activation": self.activation, "affine": self.affine, "clip": self.clip,
                     "conv": self.float_layer, "linear": self.float_layer, "constant": self.constant,
                     "embedding": self.float_weight, "recurrent": self.float_weight,
                     "matmul": self.product}  # fmt: skip
        # In the order of execution, so that what a step reads is there.
        for step in self.trace.steps:
            lowerings.get(step.kind, self.plain)(step)
        outputs = [self.as_float(name) for name in self.trace.outputs]
        return GraphDraft(
            list(self.nodes.values()), self.weights, self.weight_bits, outputs, {INPUT: self.shape[INPUT]}, self.points,
            self.rounded,
        )  # fmt: skip

    # --- Numbers ---

    def _ask(self) -> None:
        used = {step.module for step in self.trace.steps if step.module is not None}
        for module in used:
            check_methods(module, self.paths[module])
        acts: dict[nn.Module, list[tuple[int, float]]] = {}
        for setting in self.settings:
            with bits(self.model, setting), torch.no_grad():
                for module in used:
                    if isinstance(module, AnyLayer):
                        k = module.weight_bits
                        self.layers.setdefault(module, []).append((k, weight_step(module, k)))
                    if isinstance(module, (AnyLayer, AnyActivation)) and module.act is not None:
                        width = module.act_bits
                        acts.setdefault(module, []).append((width, act_range(module.act, width)))
        for module, rows in acts.items():
            assert isinstance(module.act, ActQuantizer)
            ranges = np.array([r for _, r in rows])
            divisors = None if module.act.divisors is None else array(module.act.divisors)
            self.acts[module] = ActivationGrid(tuple(b for b, _ in rows), ranges, module.act.signed, divisors)

    # --- Nodes ---

    def put(self, name: str, kind: str, inputs: list[str], table: np.ndarray | None = None, **more: Any) -> str:
        """A new node; one that is no step has the shape of what it reads, unless `self.shape` says another."""
        self.shape.setdefault(name, self.shape[inputs[0]] if inputs else ())
        self.nodes[name] = DraftNode(name, kind, inputs, self.shape[name], table=table, **more)
        return name

    def fresh(self, name: str) -> str:
        """A name for a node that is no step: no other's."""
        while name in self.shape:
            name += "_"
        return name

    def as_float(self, value: str) -> str:
        """The value itself, or what its codes stand for."""
        if value not in self.codes:
            return value
        if value not in self.values:
            codes = self.codes[value]
            scale = np.where(codes.is_float, 1.0, codes.step * (2 if codes.signed else 1))
            shift = np.where(codes.is_float | (not codes.signed), 0.0, -codes.ranges)
            table = np.stack([scale, shift], axis=1)  # (P, 2)
            self.values[value] = self.put(self.fresh(f"{value}.value"), "dequantize", [value], table)
        return self.values[value]

    def quantize(
        self, name: str, value: str, codes: ActivationGrid, rectify: bool, free: bool = False, **more: Any
    ) -> str:
        """`free`: its channels follow from a free size, so that numbers come as values and not by a table."""
        n, r, plain = codes.levels, codes.ranges, codes.is_float
        scale = np.where(plain, 1.0, n / (2 * r) if codes.signed else n / r)
        shift = np.where(plain | (not codes.signed), 0.0, n / 2)
        table = np.repeat(np.stack([scale, shift], axis=1)[:, :, None], self.shape[value][-1], axis=2)  # (P, 2, C)
        if codes.divisors is not None:
            table[~plain, 0] /= codes.divisors.reshape(-1)
        if free and codes.divisors is None:
            value = self.scaled(self.as_float(value), scale, shift)
            table[:, 0], table[:, 1] = 1.0, 0.0
        attributes = {"signed": codes.signed, "rectify": rectify and not codes.signed, "affine": True, **more}
        self.codes[name] = codes
        return self.put(name, "quantize", [self.as_float(value)], table, bits=codes.bits, attributes=attributes)

    def scaled(self, value: str, scale: np.ndarray, shift: np.ndarray) -> str:
        """value * scale + shift, one number of each a profile, for any number of channels."""
        for function, numbers, idle in (("mul", scale, 1.0), ("add", shift, 0.0)):
            if (numbers == idle).all():
                continue
            zero, one = self.fresh(f"{value}.zero"), (1,) * len(self.shape[value])
            self.weights[zero], self.shape[zero] = Weight((1, 1, 1, 1), np.zeros((1, 1, 1, 1), np.float32)), one
            self.put(zero, "constant", [], attributes={"weight": zero, "shape": list(one)})
            table = np.stack([np.ones_like(numbers), numbers], axis=1)[:, :, None]  # (P, 2, 1)
            number = self.put(self.fresh(f"{value}.number"), "affine", [zero], table)
            attributes = {"function": function}
            value = self.put(self.fresh(f"{value}.{function}"), "binary", [value, number], attributes=attributes)
        return value

    def layer(self, step: TraceStep) -> None:
        layer = step.module
        assert isinstance(layer, AnyLayer)
        (value,), path = step.inputs, self.paths[layer]
        kind, attributes = layer_attributes(layer, path, self.shape[value], step.shape)
        assert step.reads is not None
        if layer.act is not None:
            value = self.quantize(self.fresh(f"{step.name}.act"), value, self.acts[layer], layer.act.rectify)
            self.points[step.name] = ComparisonPoint(value, self.acts[layer], step.reads)
        if value not in self.codes:
            raise UnsupportedOperation(
                f"layer {path!r} has quantized weights but reads {value!r}, which is not quantized; give the layer its "
                "own act, or an AnyActivation (and at most max pools and a flatten) before it"
            )
        value = self.copied_around(value, step.attributes["around"])
        codes = self.codes[value]
        widths, steps = zip(*self.layers[layer], strict=True)
        self._check(path, layer, widths, codes)
        channels = step.shape[-1]
        by_channel = np.stack([np.broadcast_to(s, channels) for s in steps])  # (P, out)
        scale = np.where(codes.is_float[:, None], 1.0, by_channel * codes.step[:, None])
        table = np.stack([scale, np.stack([bias_at(layer, k, channels) for k in widths])], axis=1)  # (P, 2, out)
        if layer not in self.weight_names:
            self.weight_names[layer] = step.name
            self._any_weight(step.name, layer, widths)
        signed = codes.signed
        if self.weight_names[layer] not in self.weight_bits:  # float in every profile
            value, signed = self.as_float(value), False
        attributes = {"weight": self.weight_names[layer], **attributes, "signed": signed, "affine": True}
        self.put(step.name, kind, [value], table, attributes=attributes)

    def copied_around(self, value: str, borders: Mapping[int, list[int]]) -> str:
        """Codes with the border that padding_mode='reflect', 'replicate' or 'circular' puts around them."""
        for axis, index in borders.items():
            name, shape = self.fresh(f"{value}.pad"), self.shape[value]
            self.shape[name] = (*shape[:axis], len(index), *shape[axis + 1 :])
            self.codes[name] = self.codes[value]
            value = self.put(name, "gather", [value], attributes={"axis": axis, "index": index})
        return value

    def _check(self, path: str, layer: AnyLayer, weight_bits: Sequence[int], codes: ActivationGrid) -> None:
        depth = layer_weight(layer, layer.full_weight())[0].numel()
        for setting, k, a in zip(self.settings, weight_bits, codes.bits, strict=True):
            name = setting.name if hasattr(setting, "name") else setting
            if (k == FLOAT) != (a == FLOAT):
                raise ProfileError(
                    f"profile {name!r} gives layer {path!r} {k}-bit weights and a {a}-bit input; 32 is for both or none"
                )
            if k != FLOAT and depth * (2**k - 1) * (2**a - 1) >= SUM_LIMIT:
                raise AnyprecError(
                    f"layer {path!r} sums {depth} products, which at {k} x {a} bits can leave 32-bit integers; leave "
                    f"profile {name!r} out, or convert with keep=({path!r}, ...)"
                )

    def _any_weight(self, name: str, layer: AnyLayer, weight_bits: Sequence[int]) -> None:
        integers = {k for k in weight_bits if k != FLOAT}
        shape = to_file_order(layer_weight(layer, layer.full_weight().float())).shape
        values = None
        if FLOAT in weight_bits:
            values = to_file_order(layer_weight(layer, layer.quantizer.float_weight(layer.full_weight()).float()))
        self.weights[name] = Weight(shape, values, CodesByWidth(layer, integers) if integers else None)
        if integers:
            self.weight_bits[name] = tuple(weight_bits)

    def activation(self, step: TraceStep) -> None:
        module = step.module
        assert isinstance(module, AnyActivation)
        if module.quantize:
            free = step.attributes.get("free_channels", False)
            self.quantize(step.name, step.inputs[0], self.acts[module], module.act.rectify, free)
            assert step.reads is not None
            self.points[step.name] = ComparisonPoint(step.name, self.acts[module], step.reads)
            return
        plain = self.acts[module].is_float
        rectified = module.act.rectify and not module.act.signed
        low = np.where(plain, 0.0 if rectified else -np.inf, 0.0)
        table = np.stack([low, np.where(plain, np.inf, 1.0)], axis=1)
        self.put(step.name, "clip", [self.as_float(step.inputs[0])], table)

    def affine(self, step: TraceStep) -> None:
        rows = [np.stack([array(at["scale"]), array(at["shift"])]) for at in step.at]
        self.put(step.name, "affine", [self.as_float(step.inputs[0])], np.stack(rows))  # (P, 2, C)

    def clip(self, step: TraceStep) -> None:
        table = np.stack([array(at["bounds"]) for at in step.at])  # (P, 2)
        self.put(step.name, "clip", [self.as_float(step.inputs[0])], table)

    def float_layer(self, step: TraceStep) -> None:
        weight = same_weight(step)
        key, values = weight_key(weight), to_file_order(weight.float())
        is_new = key not in self.weight_names
        name = self.weight_names.setdefault(key, step.name)
        table = None
        if "bias" in step.constants:
            table = np.stack([np.stack([np.ones(step.shape[-1]), array(at["bias"])]) for at in step.at])
        if step.name in self.first_last:
            value, signed, table = self._fixed_layer(step, values, table)
        else:
            value, signed = self.as_float(step.inputs[0]), False
        if is_new:
            self.weights[name] = (
                self._fixed_weight(values) if step.name in self.first_last else Weight(values.shape, values)
            )
        attributes = {"weight": name, **step.attributes, "signed": signed, "affine": table is not None}
        if step.kind == "conv" and step.name not in self.first_last and min(step.shape[:2]) >= 4:  # one tile
            attributes |= {"toom_cook": True} if pays_toom_cook(step.attributes, values.shape) else {}
        self.put(step.name, step.kind, [value], table, attributes=attributes)

    def _fixed_weight(self, values: np.ndarray) -> Weight:
        codes, _ = channel_codes(values)
        return Weight(values.shape, values if FLOAT in self.settings else None, {FIXED_BITS: codes}, FIXED_BITS)

    def _fixed_layer(
        self, step: TraceStep, values: np.ndarray, table: np.ndarray | None
    ) -> tuple[str, bool, np.ndarray]:
        """An 8-bit layer: the codes it reads, their sign, and its table."""
        (value,), codes = step.inputs, self.first_last[step.name]
        given = self.codes.get(value)
        if given is not None and np.array_equal(given.is_float, codes.is_float):
            codes = given  # quantized already: to do it again could only lose
        elif not codes.ranges.all():
            raise DataError(
                f"layer {step.name!r} reads only zeros on the example, so the range of its 8-bit input is unknown; "
                "give pack(..., first_last='8bit') a batch of real images as the example"
            )
        else:
            value = self.quantize(self.fresh(f"{step.name}.in"), value, codes, False, bits=FIXED_BITS)
            assert step.reads is not None
            self.points[step.name] = ComparisonPoint(value, codes, step.reads)
        weight_codes, weight_steps = channel_codes(values)
        self.rounded[step.name] = (2.0 * weight_codes - FIXED_LEVELS) * weight_steps[:, None, None, None]
        scale = np.where(codes.is_float[:, None], 1.0, np.outer(codes.step, weight_steps))  # (P, out)
        shift = np.zeros_like(scale) if table is None else table[:, 1]
        return value, codes.signed, np.stack([scale, shift], axis=1)

    def constant(self, step: TraceStep) -> None:
        """A weight of its own; where it differs from profile to profile, the shift of an affine op."""
        every = [array(at["numbers"]) for at in step.at]
        name, size = step.name, every[0].size
        if all(np.array_equal(every[0], other) for other in every):
            self.weights[name] = Weight((1, 1, 1, size), every[0].astype(np.float32).reshape(1, 1, 1, size))
            self.put(name, "constant", [], attributes={"weight": name, **step.attributes})
            return
        zeros = self.fresh(f"{name}.zeros")
        self.weights[zeros] = Weight((1, 1, 1, size), np.zeros((1, 1, 1, size), np.float32))
        self.shape[zeros] = (size,)
        self.put(zeros, "constant", [], attributes={"weight": zeros, "shape": [size]})
        table = np.stack([np.stack([np.ones(size), numbers.reshape(-1)]) for numbers in every])  # (P, 2, size)
        row = self.put(self.fresh(f"{name}.numbers"), "affine", [zeros], table)
        self.put(name, "reshape", [row], attributes=dict(step.attributes))

    def float_weight(self, step: TraceStep) -> None:
        """Embeddings and recurrent layers."""
        weight = same_weight(step)[:, :, None, None]
        key = weight_key(weight)
        if key not in self.weight_names:
            values = to_file_order(weight.float())
            self.weight_names[key] = step.name
            self.weights[step.name] = Weight(values.shape, values)
        attributes = {"weight": self.weight_names[key], **step.attributes}
        self.put(step.name, step.kind, [self.as_float(step.inputs[0])], attributes=attributes)

    def product(self, step: TraceStep) -> None:
        """Of two values: in integers where both are codes."""
        left, right = (self.codes.get(value) for value in step.inputs)
        if left is None or right is None or left.divisors is not None or right.divisors is not None:
            self.plain(step)
            return
        terms = self.shape[step.inputs[0]][-1]
        for setting, a, b in zip(self.settings, left.bits, right.bits, strict=True):
            if (a == FLOAT) != (b == FLOAT):
                raise ProfileError(
                    f"{setting_name(setting)} gives the operands of the product {step.name!r} {a} and {b} bits; 32 is "
                    "for both or none"
                )
            if a != FLOAT and not product_fits(terms, a, b):
                raise AnyprecError(
                    f"the product {step.name!r} sums {terms} terms, which at {a} x {b} bits can leave 32-bit integers; "
                    f"leave {setting_name(setting)} out, or convert with attention='float'"
                )
        scale = np.where(left.is_float, 1.0, left.step * right.step)
        table = np.stack([scale, np.zeros_like(scale)], axis=1)  # (P, 2)
        self.put(step.name, "matmul", list(step.inputs), table, attributes=dict(step.attributes))

    def plain(self, step: TraceStep) -> None:
        inputs = list(step.inputs)
        if step.kind in CODES_PASS and inputs[0] in self.codes:
            self.codes[step.name] = self.codes[inputs[0]]  # the largest code, codes in another order: no float needed
        else:
            inputs = [self.as_float(value) for value in inputs]
        self.put(step.name, step.kind, inputs, attributes=dict(step.attributes))


# --- What modules say of themselves -----------------------------------------------------------------------


def weight_step(layer: AnyLayer, k: int) -> np.ndarray:
    """s_k / d: the weight of a code is this times 2c + 1 - 2^k. One number, or one per output channel."""
    if k == FLOAT:
        return np.ones(1)
    quantizer = layer.quantizer
    return array(quantizer.scale(layer.full_weight(), k)).reshape(-1) / checked_grid(quantizer, k)


def bias_at(layer: AnyLayer, k: int, channels: int) -> np.ndarray:
    bias = layer.bias if k == FLOAT else layer.quantizer.bias(layer.bias, k)  # type: ignore[arg-type]
    return np.zeros(channels) if bias is None else array(bias)  # type: ignore[arg-type]


def checked_grid(quantizer: WeightQuantizer, k: int) -> int:
    """What the quantizer says of itself, as long as no method it says that of was replaced since."""
    kind = next(kind for kind in type(quantizer).__mro__ if "grid" in vars(kind))
    if kind is WeightQuantizer or own_method(quantizer, kind, WEIGHT_METHODS):
        raise UnsupportedOperation(
            f"weight quantizer {type(quantizer).__name__} is not one the model file knows; use "
            f"{', '.join(QUANTIZERS)}, or define `checked_grid`, which says what its codes stand for"
        )
    return quantizer.grid(k)


def same_methods(module: nn.Module, kinds: Iterable[type[nn.Module]], methods: Sequence[str]) -> type[nn.Module] | None:
    """The one of `kinds` whose methods this module has, all of them."""
    return next((kind for kind in kinds if isinstance(module, kind) and not own_method(module, kind, methods)), None)


def check_methods(module: nn.Module, path: str) -> None:
    """A subclass may have any forward, but the layer inside it must be the one whose numbers are written."""
    kinds = (AnyActivation,) if isinstance(module, AnyActivation) else ANY_LAYERS.values()
    kind: type[nn.Module] = next(kind for kind in kinds if isinstance(module, kind))
    methods: tuple[str, ...] = LAYER_METHODS
    if isinstance(module, ComputedWeightLayer):
        if not module.described:
            raise UnsupportedOperation(
                f"{type(module).__name__} in module {path!r} multiplies by its weight in another way than its stride, "
                "padding, groups and bias say; only the way they say can be packed"
            )
        kind, methods = ComputedWeightLayer, ("at_bits", "codes", "full_weight", "quantized_input")
    if method := own_method(module, kind, methods):
        raise UnsupportedOperation(
            f"{type(module).__name__} in module {path!r} has a {method} of its own, which the model file does not "
            "know; do it in forward, around super().forward(x)"
        )


def act_range(act: ActQuantizer, width: int) -> float:
    if width != FLOAT and is_undecided(act):
        raise UncalibratedBits(
            f"bits={width}: the sign and range of a layer's input are not known yet; give `convert` an example, or run "
            "`calibrate` first"
        )
    r = None if width == FLOAT else act.range(width)
    if same_methods(act, (InputQuantizer, ActQuantizer), ACT_METHODS) is None:
        raise UnsupportedOperation(
            f"activation quantizer {type(act).__name__} is not one the model file knows; use ActQuantizer"
        )
    return 1.0 if r is None else float(r)


def same_weight(step: TraceStep) -> Tensor:
    """The weight of a float layer, which is the same in every profile."""
    weight = step.constants["weight"]
    if not all(at["weight"] is weight or torch.equal(at["weight"], weight) for at in step.at):
        raise UnsupportedOperation(
            f"{step.name!r} has other weights at other widths, and is not an any-precision layer; make it one "
            "(AnyConv2d, AnyLinear), or give it the same weights at every width"
        )
    return weight


def pays_toom_cook(attributes: Mapping[str, Any], weight_shape: Sequence[int]) -> bool:
    """Whether a float conv is expected to be faster by Toom-Cook. With few channels its transforms cost more than the
    products it saves, and the transformed weights, 5.4 times as many as those of a 3x3, must stay in the caches: 3.2 MB
    for 128 x 128."""
    out, _, _, inside = weight_shape
    return fits_toom_cook(attributes) and inside >= 8 and out >= 8 and inside * out <= 128 * 128


def layer_attributes(layer: AnyLayer, path: str, given: Shape, made: Shape) -> tuple[str, dict[str, Any]]:
    """The kind of an any-layer, and its FORMAT attributes but for those the codes decide."""
    if isinstance(layer, AnyLinear):
        return "linear", {}
    assert isinstance(layer, nn.modules.conv._ConvNd)
    if len(layer.kernel_size) > 2:
        raise UnsupportedOperation(
            f"{type(layer).__name__} in module {path!r}: only 1-d and 2-d convolutions have an operation"
        )
    line = len(layer.kernel_size) == 1  # along W: a kernel of [1, k]
    kernel, stride, dilation = ([1, *v] if line else list(v) for v in (layer.kernel_size, layer.stride, layer.dilation))
    before, after = layer_pads(layer) if layer.padding_mode == "zeros" else ([0, 0], [0, 0])
    more: dict[str, Any] = {}
    if layer.transposed:
        reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        least = [(n - 1) * s - 2 * p + r for n, s, p, r in zip(given[:2], stride, before, reach, strict=True)]
        more = {"transposed": True, "output_pad": [m - n for m, n in zip(made[:2], least, strict=True)]}
    pad = [*before, *after]
    return "conv", {
        "kernel": kernel, "stride": stride, "pad": pad, "dilation": dilation, "groups": layer.groups, **more
    }  # fmt: skip
