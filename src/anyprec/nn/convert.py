"""Conversion: any `nn.Module` in, the same network with any-layers and switched norms out, and a Report.

Float weights carry over as the same parameters, so tied ones stay tied, and at 32 bits the converted network
gives what the original gave. Each any-layer quantizes its own input, so functional activations and identity
shortcuts need no change. Which modules change is decided in candidates.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from anyprec.errors import AnyprecError
from anyprec.nn.attention import SEPARATE, AnyMultiheadAttention
from anyprec.nn.calibrate import start_norms
from anyprec.nn.candidates import ConversionPlan, ModuleTrace, torch_kind
from anyprec.nn.layers import ANY_LAYERS, WEIGHT_HOOKS, AnyActivation, AnyLayer
from anyprec.nn.norms import (
    BatchNorm1d,
    BatchNorm2d,
    SwitchBatchNorm1d,
    SwitchBatchNorm2d,
    SwitchGroupNorm,
    SwitchLayerNorm,
    SwitchNorm,
    hook_names,
)
from anyprec.nn.observe import (
    InputQuantizer,
    ModelCall,
    batch_statistics,
    fit_range,
    observe,
    preserve_state,
    run_call,
    untrained_norms,
)
from anyprec.nn.operations import tensors_in
from anyprec.nn.own_forward import ComputedWeightLayer, WeightUse, own_forward_class
from anyprec.nn.products import CHOICES, AnyProduct, OwnProducts, check_choice, own_products_class
from anyprec.nn.products import DEFAULT as DEFAULT_ATTENTION
from anyprec.nn.quantizers import make_quantizer
from anyprec.nn.split import SplitNetwork
from anyprec.nn.switching import any_layers, link_norms, set_bits
from anyprec.widths import DEFAULT_WIDTHS, FLOAT, check_widths

# A torch norm -> its switched norm, and the class of the tables in it. Norms derived from these have tables
# that are copies of themselves.
SWITCHED: dict[type[nn.Module], tuple[type[SwitchNorm], type[nn.Module]]] = {
    nn.BatchNorm1d: (SwitchBatchNorm1d, BatchNorm1d),
    nn.BatchNorm2d: (SwitchBatchNorm2d, BatchNorm2d),
    nn.LayerNorm: (SwitchLayerNorm, nn.LayerNorm),
    nn.GroupNorm: (SwitchGroupNorm, nn.GroupNorm),
}
SILENT, FADED = 1e-12, 1e-3  # spread of an output that carries nothing: absolute; of what it is in float
FEW = 16  # places: fewer may all have one code by chance
FAR_OFF = 0.05  # a layer whose 8-bit weights are further than this from its float ones gets a note


@dataclass
class ConversionReport:
    """What `convert` did, by module name: `str()` is a table to read, `to_dict()` is ready for JSON."""

    network: str
    widths: tuple[int, ...]
    converted: dict[str, str] = field(default_factory=dict)  # name -> what it is now
    kept: dict[str, str] = field(default_factory=dict)  # name -> why it was left alone
    norms: dict[str, str] = field(default_factory=dict)  # name -> what it is now
    products: dict[str, str] = field(default_factory=dict)  # module -> which products of two values are quantized
    notes: list[str] = field(default_factory=list)
    share: float = 0.0  # of all parameters of the original, those that are any-precision weights now
    multiply_adds: dict[str, int] = field(default_factory=dict)  # of the example's run, by module; "": elsewhere
    multiply_add_share: float | None = None  # of all multiply-adds, those of any-precision layers; None: no example

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        widths = ", ".join("float" if k == FLOAT else str(k) for k in self.widths)
        work = "" if self.multiply_add_share is None else f" and {self.multiply_add_share:.1%} of multiply-adds"
        lines = [
            f"{self.network}: {len(self.converted)} layers any-precision ({self.share:.1%} of parameters{work}), "
            f"{len(self.norms)} norms switched, {len(self.kept)} modules left alone; widths {widths}"
        ]
        parts = {
            "converted": self.converted, "left alone": self.kept, "norms": self.norms,
            "products of two values": self.products,
        }  # fmt: skip
        column = max(len(name) for name in (*(name for rows in parts.values() for name in rows), "(itself)"))
        for title, rows in parts.items():
            lines += [f"{title}:"] * bool(rows)
            lines += [f"  {name or '(itself)':<{column}}  {what}{self._work(name)}" for name, what in rows.items()]
        return "\n".join(lines + ["notes:"] * bool(self.notes) + [f"  {note}" for note in self.notes])

    def _work(self, name: str) -> str:
        count, total = self.multiply_adds.get(name, 0), sum(self.multiply_adds.values())
        return f"; {count / total:.1%} of multiply-adds" if count else ""


def convert(
    net: nn.Module,
    widths: Iterable[int] = DEFAULT_WIDTHS,
    example: Any = None,
    *,
    quantizer: str = "nested",
    scale: str = "learned",
    clip: str = "learned",
    keep: Iterable[str] = ("first", "last"),
    group_depthwise: int | None = None,
    attention: str = DEFAULT_ATTENTION,
    inplace: bool = False,
) -> nn.Module:
    """A copy of `net` (or `net` itself: `inplace`) that runs at any of `widths`; `.conversion` is its ConversionReport.

    widths: any of 1 to 8, and 32 for float.
    example: a tensor, a tuple of arguments or a dict of keyword arguments, run to learn the order in which layers run,
        and the sign and range of their inputs. Without an example, `calibrate` has to find these.
    quantizer: how weights become codes: "nested", "dorefa" or "lsq".
    scale: the factor from codes to weights: "learned" or "mean".
    clip: where ranges of activations come from: "learned", "calibrated" or "fixed".
    keep: layers that stay float: the "first" and "last" to run, and name patterns such as "head.*".
    group_depthwise: 8 turns depth-wise convolutions into group convolutions of 8 channels per group.
    attention: which matrix products of two values have quantized operands, and are integer products once packed: none
        ("float"), that of queries and keys ("scores"), or that of softmax and values as well ("integer").
    """
    widths = check_widths(widths)
    _check(net, group_depthwise)
    make_quantizer(quantizer, widths, scale)  # wrong names are refused before anything changes
    InputQuantizer(widths, clip)
    check_choice(attention)
    model = net if inplace else _copy(net)
    with steady_weights(model):
        trace = ModuleTrace(model, example)
        if attention != "float":
            trace.find_products(model)
        plan = ConversionPlan(model, trace, (keep,) if isinstance(keep, str) else tuple(keep), attention)
        report = ConversionReport(type(net).__name__, widths, kept=plan.kept)
        report.share = _share(model, plan)

        if group_depthwise:
            _group_depthwise(plan, group_depthwise, report)
        for layer in plan.layers.values():
            _make_any(layer, trace.uses.get(layer), widths, quantizer, scale, clip)
        for name, multihead in plan.attentions.items():
            _make_any_attention(multihead, widths, quantizer, scale, clip, CHOICES[attention])
            if kinds := CHOICES[attention]:
                report.products[name] = products_line(len(kinds), kinds)
        for name, module in plan.products.items():
            report.products[name] = _quantize_products(module, trace, widths, clip, CHOICES[attention])
        for norm in plan.norms.values():
            _switch(norm, widths)
        _leave_fused_path(model, report)
        _count(model, trace, report)
        if trace.call is not None:
            _fit_to_example(model, trace, widths, report)
        _describe(model, plan, quantizer, report)
    for layer in any_layers(model).values():
        for part in layer.children():
            part.train(layer.training)
    link_norms(model, trace.run_order() if trace.call is not None else None)
    set_bits(model, widths[-1])
    model.conversion = report  # type: ignore[assignment]
    if isinstance(model, SplitNetwork):
        model.shares_stem = False
    return model


def _check(net: object, group: int | None) -> None:
    if not isinstance(net, nn.Module):
        raise AnyprecError(f"convert was given a {type(net).__name__}; give it an nn.Module")
    if any(isinstance(m, (AnyLayer, AnyActivation, SwitchNorm)) for m in net.modules()):
        raise AnyprecError(f"{type(net).__name__} is any-precision already; convert the original network")
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 2):
        raise AnyprecError(f"group_depthwise={group!r} is not a group size; give 2 or more, or None")


def _copy(net: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(net)
    except Exception as error:  # whatever the network's own parts raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise AnyprecError(
            f"{type(net).__name__} cannot be copied ({reason}); convert it itself: convert(..., inplace=True)"
        ) from error


# --- Changing modules -------------------------------------------------------------------------------------
# Modules change class where they stand: whatever holds one (two names, a list, a hook) holds the new one.


def _make_any(
    layer: nn.Module, use: WeightUse | None, widths: tuple[int, ...], quantizer: str, scale: str, clip: str
) -> None:
    kind = torch_kind(layer)
    if use is not None:
        layer.__class__ = own_forward_class(type(layer), use)
        if isinstance(layer, ComputedWeightLayer):
            layer.init_own(use)
    else:
        assert kind is not None
        layer.__class__ = ANY_LAYERS[kind] if type(layer) is kind else _derived(kind, type(layer))
    assert isinstance(layer, AnyLayer)
    device = layer.weight.device
    layer.init_any(make_quantizer(quantizer, widths, scale).to(device), InputQuantizer(widths, clip).to(device))
    _fit_weight(layer, widths)


def _fit_weight(layer: AnyLayer, widths: tuple[int, ...]) -> None:
    if not layer.weight.is_meta:
        layer.quantizer.fit_trained(layer.full_weight(), widths)


def _quantize_products(
    module: nn.Module, trace: ModuleTrace, widths: tuple[int, ...], clip: str, kinds: tuple[str, ...]
) -> str:
    """The module gets quantized operands for its products of these kinds; gives the words for the report."""
    found = {number: kind for number, kind in trace.products[module].items() if kind in kinds}
    device = next((p.device for p in module.parameters()), None)
    module.__class__ = own_products_class(type(module))
    assert isinstance(module, OwnProducts)
    module.init_products({number: AnyProduct(widths, clip).to(device) for number in found})
    module.any_products.train(module.training)
    return products_line(len(found), found.values())


def products_line(count: int, kinds: Iterable[str]) -> str:
    return f"operands of {count} {'product' if count == 1 else 'products'} quantized ({', '.join(sorted(set(kinds)))})"


def _make_any_attention(
    attention: nn.MultiheadAttention,
    widths: tuple[int, ...],
    quantizer: str,
    scale: str,
    clip: str,
    products: tuple[str, ...],
) -> None:
    _make_any(attention.out_proj, None, widths, quantizer, scale, clip)
    own = type(attention)
    name = f"Any{own.__name__}"
    if own not in _derivations:
        _derivations[own] = (
            AnyMultiheadAttention
            if own is nn.MultiheadAttention
            else type(name, (AnyMultiheadAttention, own), {"__module__": __name__})
        )
    attention.__class__ = _derivations[own]  # type: ignore[assignment]
    assert isinstance(attention, AnyMultiheadAttention)
    device = attention.out_proj.weight.device
    attention.init_any(
        lambda: make_quantizer(quantizer, widths, scale).to(device),
        lambda: InputQuantizer(widths, clip).to(device),
        **{kind: AnyProduct(widths, clip).to(device).train(attention.training) for kind in products},
    )
    for layer in attention.projections():
        layer.training = attention.training
        _fit_weight(layer, widths)


@contextmanager
def steady_weights(model: nn.Module) -> Iterator[None]:
    """Inside, reading a computed weight does not change it: spectral norms make no step of theirs."""
    parts = [
        part
        for module in model.modules()
        if parametrize.is_parametrized(module)
        or any(isinstance(h, WEIGHT_HOOKS) for h in module._forward_pre_hooks.values())
        for part in module.modules()
    ]
    modes = [(part, part.training) for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


_derivations: dict[type[nn.Module], type[nn.Module]] = {}


def _derived(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """For a subclass that adds no forward: it keeps its methods, and stays an instance of its class."""
    if own not in _derivations:
        if own.__module__ == parametrize.__name__:  # made by torch for one module: the same of an any-layer
            (inner,) = own.__bases__
            base = ANY_LAYERS[kind] if inner is kind else _derived(kind, inner)
            members = {name: value for name, value in vars(own).items() if name not in ("__dict__", "__weakref__")}
            return type(f"Any{own.__name__}", (base,), members)
        _derivations[own] = type(f"Any{own.__name__}", (ANY_LAYERS[kind], own), {"__module__": __name__})
    return _derivations[own]


def _switch(norm: nn.Module, widths: tuple[int, ...]) -> None:
    """The norm becomes a switch between copies of itself; the widest one holds its own parameters."""
    switched, kind = SWITCHED.get(type(norm), (SwitchNorm, type(norm)))
    table = copy.copy(norm)
    table.__class__ = kind
    before = dict(norm.__dict__)
    fresh = nn.Module().__dict__
    # Hooks stay with the module that the network calls, so the tables have none.
    hooks = hook_names()
    table.__dict__.update({name: fresh[name] for name in hooks})
    norm.__dict__.clear()
    norm.__class__ = switched
    assert isinstance(norm, SwitchNorm)
    SwitchNorm.__init__(norm, widths, lambda: copy.deepcopy(table))
    norm.tables[str(widths[-1])] = table
    # Networks read plain attributes of their norms, such as eps.
    plain = [name for name in before if not name.startswith("_") and name not in norm.__dict__]
    norm.__dict__.update({name: before[name] for name in (*hooks, *plain, "training")})


def _group_depthwise(plan: ConversionPlan, size: int, report: ConversionReport) -> None:
    grouped: dict[int, list[str]] = {}  # channels a group -> names
    for name, layer in plan.layers.items():
        if not isinstance(layer, (nn.Conv1d, nn.Conv2d)) or not 1 < layer.groups == layer.in_channels:
            continue
        channels = layer.in_channels
        group = max(g for g in range(1, min(size, channels) + 1) if channels % g == 0)
        if group == 1:
            report.notes.append(f"{name}: stays depth-wise, as none of 2 to {size} divides {channels} channels")
        elif layer.weight not in plan.holders:
            report.notes.append(f"{name}: stays depth-wise, as its weight is computed")
        elif len(plan.holders[layer.weight]) > 1:
            report.notes.append(f"{name}: stays depth-wise, as it shares its weight")
        else:
            _group(layer, group)
            grouped.setdefault(group, []).append(name)
    for group, names in grouped.items():
        report.notes.append(
            f"depth-wise, now in groups of {group} channels, {group} times the weights, the new ones zero "
            f"(float gives the same but for rounding): {', '.join(names)}"
        )


@torch.no_grad()
def _group(layer: nn.Conv1d | nn.Conv2d, group: int) -> None:
    """Depth-wise to groups of `group` channels: old weights on each block's diagonal, zeros elsewhere."""
    weight, channels = layer.weight, layer.in_channels
    wide = weight.new_zeros(weight.shape[0], group, *weight.shape[2:])  # (out, group, ...)
    outputs = torch.arange(weight.shape[0], device=weight.device)
    inputs = outputs // (weight.shape[0] // channels)  # the one channel each output reads
    wide[outputs, inputs % group] = weight[:, 0]
    layer.weight = nn.Parameter(wide, requires_grad=weight.requires_grad)
    layer.groups = channels // group


def _leave_fused_path(model: nn.Module, report: ConversionReport) -> None:
    """torch's encoder layer has a fused path for inference that reads weights without calling the layers: it
    would run in float whatever the bits. What is set here is read by that path alone."""
    changed = []
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer) and any(
            isinstance(m, (AnyLayer, SwitchNorm)) for m in module.modules()
        ):
            module.activation_relu_or_gelu = 0
            changed.append(name or "(itself)")
    if changed:
        report.notes.append(
            f"no longer take torch's fused inference path, which would ignore the bits: {', '.join(changed)}"
        )


# --- Ranges and report ------------------------------------------------------------------------------------


def _fit_to_example(model: nn.Module, trace: ModuleTrace, widths: tuple[int, ...], report: ConversionReport) -> None:
    """Signs and ranges from a run in float on the example, which also shows whether float is what it was."""
    assert trace.call is not None
    fresh = untrained_norms(model)
    try:
        with (
            preserve_state(model),
            torch.no_grad(),
            batch_statistics(fresh.values()) as single,
            observe(model) as seen,
            outputs_of(model) as in_float,
        ):
            output = run_call(model, trace.call, "the example")
    except AttributeError as error:
        raise AnyprecError(
            f"{report.network} reaches into a converted layer ({error}); name that layer in keep=(...)"
        ) from error
    for act, given in seen.items():
        fit_range(act, given, widths)
    if fresh:
        _start_untrained(model, trace.call, fresh, single, widths, report)
    _note_silent(model, trace.call, in_float, widths, report)
    if any(isinstance(m, (AnyMultiheadAttention, OwnProducts)) for m in model.modules()):
        with preserve_state(model), torch.no_grad(), batch_statistics(untrained_norms(model).values()):
            output = run_call(model, trace.call, "the example")  # by torch's own attention, as nobody looks on
    pairs = list(zip(tensors_in(trace.output), tensors_in(output), strict=False))
    gaps = [_gap(a, b) for a, b in pairs if not torch.equal(a, b)]
    if gaps:
        report.notes.append(
            f"at 32 bits the output on the example differs by up to {max(gaps):.1e} of its largest value"
        )


def _start_untrained(
    model: nn.Module,
    call: ModelCall,
    fresh: dict[str, _BatchNorm],
    single: set[_BatchNorm],
    widths: tuple[int, ...],
    report: ConversionReport,
) -> None:
    """Norms that never saw data would give integer widths nothing that fits the ranges: they start with the example's
    statistics. Float keeps what it has."""
    owner = {norm: name.split(".tables.")[0] for name, norm in fresh.items()}  # float's table ran, and says it for all
    unmeasured = {owner[norm] for norm in single}
    norms = [norm for norm in owner if owner[norm] not in unmeasured]
    start_norms(model, norms, [k for k in widths if k != FLOAT], call)
    names = list(dict.fromkeys(owner.values()))
    report.notes.append(
        f"not trained yet: {len(names)} batch norms have no statistics ({names[0]}, ...). Ranges, and the integer "
        "widths' statistics, are those of the example as one training batch; until it is trained, eval mode gives "
        "other outputs at integer widths than in float"
    )
    if unmeasured:
        report.notes.append(
            f"{len(unmeasured)} of them are given one value a channel by this example; give a batch of several"
        )


@contextmanager
def outputs_of(model: nn.Module) -> Iterator[dict[AnyLayer, float]]:
    """Inside, each any-layer's output is measured: how far its values lie apart, over all places, in one channel."""
    spread: dict[AnyLayer, float] = {}

    def measure(layer: nn.Module, given: Any, output: Tensor) -> None:
        assert isinstance(layer, AnyLayer)
        axis = output.dim() - 1 if isinstance(layer, nn.Linear) else output.dim() + 1 - layer.weight.dim()
        rows = output.detach().movedim(axis, 0).flatten(1)
        # A few values may well share a code: then only their size says something.
        apart = rows.amax(1) - rows.amin(1) if rows.shape[1] >= FEW else rows.abs().amax(1)
        spread[layer] = max(spread.get(layer, 0.0), float(apart.amax().nan_to_num(0, 0)) if apart.numel() else 0.0)

    hooks = [layer.register_forward_hook(measure) for layer in any_layers(model).values()]
    try:
        yield spread
    finally:
        for hook in hooks:
            hook.remove()


def _note_silent(
    model: nn.Module,
    call: ModelCall,
    in_float: dict[AnyLayer, float],
    widths: tuple[int, ...],
    report: ConversionReport,
) -> None:
    """Layers that give the same whatever they are given, at the narrowest or widest integer width or in float."""
    names = {layer: name for name, layer in any_layers(model).items()}
    integers = [k for k in widths if k != FLOAT]
    silent: dict[str, str] = {}
    at_bits: dict[int, dict[AnyLayer, float]] = {}
    for k in sorted({*integers[:1], *integers[-1:]}):
        with preserve_state(model), torch.no_grad(), outputs_of(model) as at_bits[k]:
            set_bits(model, k)
            run_call(model, call, "the example")
    for layer, in_float_apart in in_float.items():
        if in_float_apart < SILENT:
            silent[names[layer]] = "at every width, float too"
            continue
        dead = [k for k, spread in at_bits.items() if spread.get(layer, 0.0) <= FADED * in_float_apart]
        if dead:
            silent[names[layer]] = f"at {', '.join(map(str, dead))} bit"
    if silent:
        shown = [f"{name or '(itself)'} ({where})" for name, where in list(silent.items())[:6]]
        shown += [f"and {len(silent) - 6} more"] * (len(silent) > 6)
        report.notes.append(
            f"carry nothing, the same output wherever one looks on the example: {', '.join(shown)}; give an ordinary "
            "batch as the example, check the weights, or name them in keep=(...)"
        )


def _count(model: nn.Module, trace: ModuleTrace, report: ConversionReport) -> None:
    """Multiply-adds of the example's run, by module; what an any-layer's parts do counts as its own."""
    total = sum(trace.multiply_adds.values())
    layers = {id(m) for m in any_layers(model).values()}
    converted = 0
    for module, count in trace.multiply_adds.items():
        name = "" if module is None else trace.names.get(module, "")
        report.multiply_adds[name] = report.multiply_adds.get(name, 0) + count
        if module in trace.projected:  # scores and the sum they weigh stay float, unless both are quantized
            whole = isinstance(module, AnyMultiheadAttention) and module.is_integer
            if not whole:
                count = min(count, trace.projected[module]) if isinstance(module, AnyMultiheadAttention) else 0
            converted += count
        elif (isinstance(module, OwnProducts) and len(module.any_products) == len(trace.products[module])) or id(
            module
        ) in layers:
            converted += count
    report.multiply_add_share = converted / total if total else None
    for line, operation in trace.decisions.items():
        report.notes.append(
            f"decides by the values of its input: {line} ({operation}); it trains and runs here, but a packed network "
            "runs the same operations on every input"
        )


def _gap(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))


def _share(model: nn.Module, plan: ConversionPlan) -> float:
    weights = {p for layer in plan.layers.values() if isinstance(p := layer.weight, Tensor)}
    for attention in plan.attentions.values():
        inputs = (attention.in_proj_weight, *(getattr(attention, name) for name in SEPARATE))
        weights |= {w for w in (*inputs, attention.out_proj.weight) if w is not None}
    return sum(w.numel() for w in weights) / sum(p.numel() for p in model.parameters() if not is_lazy(p))


def _describe(model: nn.Module, plan: ConversionPlan, quantizer: str, report: ConversionReport) -> None:
    layers = any_layers(model)
    undecided = False
    for name, layer in layers.items():
        act = layer.act
        assert isinstance(act, InputQuantizer)
        undecided = undecided or act.undecided
        sign = "not seen yet" if act.undecided else "signed" if act.signed else "unsigned"
        shape = " x ".join(map(str, layer.weight.shape))
        report.converted[name] = f"{type(layer).__name__}, weight {shape}, input {sign}"
        tied = [other or "(itself)" for other in plan.holders.get(layer.weight, []) if other != name]
        if tied:
            report.notes.append(f"{name or '(itself)'}: shares its weight with {', '.join(tied)}, as before")
    for name, norm in plan.norms.items():
        report.norms[name] = f"{type(norm).__name__}, {len(report.widths)} tables"
    if quantizer == "dorefa":
        report.notes.append("dorefa: at 32 bits the weight is tanh(w) / max|tanh(w)| * mean|w|, by definition, not w")
    elif 8 in report.widths:
        _note_far_off(layers, quantizer, report)
    if undecided:
        report.notes.append("no example was given: run anyprec.calibrate before using integer bits")


@torch.no_grad()
def _note_far_off(layers: dict[str, AnyLayer], quantizer: str, report: ConversionReport) -> None:
    far = {}
    for name, layer in layers.items():
        weight = layer.full_weight()
        gap = weight - layer.quantizer.weight(layer.quantizer.normalize(weight), weight, 8)
        far[name] = float(gap.norm() / weight.norm().clamp_min(1e-30))
    far = {name: off for name, off in far.items() if off > FAR_OFF}
    if far:
        worst = max(far, key=lambda name: far[name])
        top = float(layers[worst].full_weight().abs().max())
        why = "; tanh flattens large weights, quantizer='lsq' does not" if quantizer == "nested" else ""
        report.notes.append(
            f"before training, the 8-bit weights of {len(far)} layers are over {FAR_OFF:.0%} off, the most "
            f"so {worst or '(itself)'} ({far[worst]:.0%}, weights up to {top:.2g}){why}"
        )
