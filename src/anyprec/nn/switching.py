"""Switching a model's bits: `set_bits`, the `bits` context manager, and what a model can be switched to.

A setting is one width (4), a dict of layer name to bits (the rest stays as it is) or a Profile. Every setting
is checked whole before anything changes, so a refused one leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches

from torch import nn

from anyprec.errors import AnyprecError, UncalibratedBits, UnknownLayer
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.layers import AnyActivation, AnyLayer, ProductOperand
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.quantizers import WeightQuantizer
from anyprec.widths import FLOAT, INTEGER_WIDTHS, LayerBits, Profile, check_bits, check_layer_bits, split_bits

Setting = int | Mapping[str, LayerBits] | Profile


def setting_name(setting: Setting) -> str:
    """As a message names it: '4 bit', 'float', or a profile's name."""
    if isinstance(setting, Profile):
        return f"profile {setting.name!r}"
    return "float" if setting == FLOAT else f"{setting} bit"


def any_layers(model: nn.Module) -> dict[str, AnyLayer]:
    """The any-precision layers of `model`: name -> layer, in the order of definition."""
    return {name: m for name, m in model.named_modules() if isinstance(m, AnyLayer)}


def switch_norms(model: nn.Module) -> dict[str, SwitchNorm]:
    return {name: m for name, m in model.named_modules() if isinstance(m, SwitchNorm)}


def widths_of(model: nn.Module) -> tuple[int, ...]:
    """The widths every part of this model has norms, learned scales and ranges for; all, where none has."""
    widths = {*INTEGER_WIDTHS, FLOAT}
    for module in model.modules():
        if isinstance(module, SwitchNorm):
            widths &= {int(k) for k in module.tables if k.isdigit()}
        elif isinstance(module, WeightQuantizer) and module.learned:
            widths &= {*map(int, module.scales), FLOAT}
        elif isinstance(module, ActQuantizer) and module.clip != "fixed":
            widths &= {*map(int, module.ranges), FLOAT}
    return tuple(sorted(widths))


def set_bits(model: nn.Module, bits: Setting) -> None:
    """Switch a model to other bits. No weight is copied.

    model: any-precision, changed in place.
    bits: a width for the whole model; a dict of layer name -> width or (weight_bits, act_bits) for some layers; or a
        calibrated Profile.
    """
    layers = any_layers(model)
    if not layers:
        raise AnyprecError(f"{type(model).__name__} has no any-precision layer; make it one with anyprec.convert")
    if isinstance(bits, Profile):
        _set_profile(model, layers, bits)
    elif isinstance(bits, Mapping):
        _set_layers(model, layers, bits)
    else:
        _set_uniform(model, check_bits(bits))


@contextmanager
def bits(model: nn.Module, setting: Setting) -> Iterator[nn.Module]:
    """`with anyprec.bits(model, 2): ...` sets the bits inside the block and restores the earlier setting after it."""
    before = bits_state(model)
    set_bits(model, setting)
    try:
        yield model
    finally:
        _restore(before)


def bits_state(model: nn.Module) -> list[tuple[nn.Module, dict[str, object]]]:
    """What is switched now, module by module: enough to switch back."""
    names = {AnyLayer: ("weight_bits", "act_bits"), AnyActivation: ("act_bits",), SwitchNorm: ("key",)}
    return [
        (m, {n: getattr(m, n) for n in attributes})
        for m in model.modules()
        for kind, attributes in names.items()
        if isinstance(m, kind)
    ]


def _restore(state: list[tuple[nn.Module, dict[str, object]]]) -> None:
    for module, attributes in state:
        for name, value in attributes.items():
            setattr(module, name, value)


def _set_uniform(model: nn.Module, bits: int) -> None:
    if bits not in (known := widths_of(model)):
        raise UncalibratedBits(
            f"bits={bits} is not one of this model's widths {known}; choose one, or calibrate it first: "
            f"anyprec.calibrate(model, loader, widths=({bits},))"
        )
    for module in model.modules():
        if isinstance(module, AnyLayer):
            module.bits = bits
        elif isinstance(module, AnyActivation):
            module.act_bits = bits
        elif isinstance(module, SwitchNorm):
            module.key = str(bits)


def _check_plan(layers: dict[str, AnyLayer], plan: Mapping[str, LayerBits]) -> dict[str, LayerBits]:
    for name in plan:
        if name not in layers:
            near = get_close_matches(str(name), layers, n=1)
            some = ", ".join(list(layers)[:6]) + (", ..." if len(layers) > 6 else "")
            hint = f"did you mean {near[0]!r}?" if near else f"its layers are {some}"
            raise UnknownLayer(f"{name!r} is not an any-precision layer of this model; {hint}")
    checked = {name: check_layer_bits(b) for name, b in plan.items()}
    for name, layer_bits in checked.items():
        _check_tables(name, layers[name], layer_bits)
    return checked


def _check_tables(name: str, layer: AnyLayer, layer_bits: LayerBits) -> None:
    """A learned scale and an activation range must be there for the bits a layer is to take."""
    weight_bits, act_bits = split_bits(layer_bits)
    tables = []
    if layer.quantizer.learned:
        tables.append(("learned scales", weight_bits, layer.quantizer.scales))
    if layer.act is not None and layer.act.clip != "fixed":
        tables.append(("activation ranges", act_bits, layer.act.ranges))
    for what, width, table in tables:
        if width != FLOAT and str(width) not in table:
            raise UncalibratedBits(
                f"bits={width} for layer {name!r}: it has {what} for {', '.join(table)} only; choose one of "
                f"them, or calibrate it first: anyprec.calibrate(model, loader, widths=({width},))"
            )


def _set_layers(model: nn.Module, layers: dict[str, AnyLayer], plan: Mapping[str, LayerBits]) -> None:
    """Layers named change, the rest stays; each norm takes the width of the layer it follows."""
    plan = _check_plan(layers, plan)
    after = {name: plan.get(name, layer.bits) for name, layer in layers.items()}
    norms = switch_norms(model)
    if all(norm.follows is None for norm in norms.values()):
        link_norms(model)  # a network put together by hand
    keys: dict[SwitchNorm, str] = {}
    for name, norm in norms.items():
        if norm.follows is not None and norm.follows in after:
            keys[norm] = str(split_bits(after[norm.follows])[0])
            if keys[norm] not in norm.tables:
                raise UncalibratedBits(
                    f"bits={keys[norm]} for layer {norm.follows!r}: its norm {name!r} has tables for "
                    f"{', '.join(norm.tables)} only; choose one of them, or calibrate it first"
                )
    for name, layer in layers.items():
        layer.bits = after[name]
    _follow_layers(model)
    for norm, key in keys.items():
        norm.key = key


def _set_profile(model: nn.Module, layers: dict[str, AnyLayer], profile: Profile) -> None:
    """Sets all layers, those not named to the widest integer width; norms use the profile's own tables."""
    plan = _check_plan(layers, profile.bits)
    missing = [name for name, norm in switch_norms(model).items() if profile.name not in norm.tables]
    if missing:
        raise UncalibratedBits(
            f"profile {profile.name!r} has no norm tables yet; calibrate it first: "
            "anyprec.calibrate(model, loader, profiles=(profile,))"
        )
    apply_layer_bits(model, plan)
    for norm in switch_norms(model).values():
        norm.key = profile.name


def apply_layer_bits(model: nn.Module, plan: Mapping[str, LayerBits]) -> None:
    """The bits of a profile without its norms; `calibrate` makes those under this plan."""
    layers = any_layers(model)
    rest = max((k for k in widths_of(model) if k != FLOAT), default=8)
    for name, layer in layers.items():
        layer.bits = plan.get(name, rest)
    _follow_layers(model)


def _follow_layers(model: nn.Module) -> None:
    """A shared activation takes the bits of the layer that reads it: the next any-layer as they are defined.

    The last one, which only the float classifier reads, takes those of the any-layer before it, as operands of products
    do.
    """
    pending: list[AnyActivation] = []
    act_bits = FLOAT
    for module in model.modules():
        if isinstance(module, ProductOperand):
            module.act_bits = act_bits
        elif isinstance(module, AnyActivation):
            pending.append(module)
        elif isinstance(module, AnyLayer):
            act_bits = module.act_bits
            for activation in pending:
                activation.act_bits = act_bits
            pending = []
    for activation in pending:
        activation.act_bits = act_bits


def link_norms(model: nn.Module, order: list[str] | None = None) -> None:
    """Note for each norm which any-layer runs before it (the first one after it, where there is none before).

    `order` lists module names in the order they run; without it the order of definition is taken.
    """
    modules = dict(model.named_modules())
    last: str | None = None
    waiting: list[SwitchNorm] = []
    for name in order if order is not None else modules:
        module = modules.get(name)
        if isinstance(module, SwitchNorm):
            module.follows = last
            if last is None:
                waiting.append(module)
        elif isinstance(module, AnyLayer):
            last = name
            for norm in waiting:
                norm.follows = name
            waiting = []
