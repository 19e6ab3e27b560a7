"""Back to plain torch: a model with any-layers in, the float network it is at 32 bits out.

Any-layers become the torch layers they stand for, switched norms the norm of float, shared activations ReLU. Module
and parameter names stay, but for the norms'. Called by ptq/ (which quantizes float networks) and checkpoint.py.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize

from anyprec.errors import UncalibratedBits, UnsupportedOperation
from anyprec.nn.attention import PROJECTIONS, AnyMultiheadAttention, AttentionProjection
from anyprec.nn.layers import (
    ANY_LAYERS,
    AnyActivation,
    AnyLayer,
    PointwiseConv2d,
    ProductOperand,
    StemConv2d,
    own_method,
)
from anyprec.nn.norms import BatchNorm1d, BatchNorm2d, SwitchNorm, hook_names
from anyprec.nn.own_forward import OwnForwardLayer
from anyprec.nn.products import OwnProducts
from anyprec.nn.switching import widths_of
from anyprec.widths import FLOAT

KINDS: dict[type[nn.Module], type[nn.Module]] = {
    **{any_kind: kind for kind, any_kind in ANY_LAYERS.items()},
    BatchNorm1d: nn.BatchNorm1d,
    BatchNorm2d: nn.BatchNorm2d,
    PointwiseConv2d: nn.Conv2d,
    StemConv2d: nn.Conv2d,
}


@torch.no_grad()
def to_float_network(model: nn.Module) -> nn.Module:
    """A copy of `model` without any-precision parts, that gives what `model` gives at 32 bits.

    A network that has none comes back as a copy. Layers tied together stay tied.
    """
    parts = [m for m in model.modules() if isinstance(m, (AnyLayer, AnyActivation, SwitchNorm))]
    if parts and FLOAT not in widths_of(model):
        raise UncalibratedBits(
            f"{type(model).__name__} has no float width, only {widths_of(model)}; give a model trained with 32 among "
            "its widths"
        )
    net = copy.deepcopy(model)
    for name in ("zoo_name", "zoo_options", "zoo_conversion", "conversion"):
        net.__dict__.pop(name, None)
    _reshape_weights(net)
    stands_for: dict[nn.Module, nn.Module] = {}  # a part with two names is replaced by one module
    for name, module in list(net.named_modules(remove_duplicate=False)):
        _check_forward(name, module)
        if isinstance(module, AnyLayer):
            _plain_layer(module)
        elif isinstance(module, AnyMultiheadAttention):
            for part in (*PROJECTIONS, "scores", "values"):
                module._modules.pop(part, None)
                module.__dict__.pop(part, None)
            own = type(module)
            module.__class__ = nn.MultiheadAttention if own is AnyMultiheadAttention else own.__bases__[-1]
        elif isinstance(module, OwnProducts):
            module._modules.pop("any_products")
            module.__class__ = module.own  # type: ignore[assignment]
        elif isinstance(module, (AnyActivation, SwitchNorm)) and name and not isinstance(module, ProductOperand):
            parent, _, leaf = name.rpartition(".")
            setattr(net.get_submodule(parent), leaf, stands_for.setdefault(module, _stand_in(module)))
    for module in net.modules():
        module.__class__ = KINDS.get(type(module), type(module))
    return net


def _reshape_weights(net: nn.Module) -> None:
    """The float weight of `dorefa` is not w. All are computed before any is set: layers may share one."""
    layers = [m for m in net.modules() if isinstance(m, AnyLayer)]
    full = [(layer, layer.full_weight()) for layer in layers]
    for layer, before, weight in [(layer, w, layer.quantizer.float_weight(w)) for layer, w in full]:
        if weight is before:
            continue
        if not isinstance(layer.weight, nn.Parameter) and not isinstance(layer, AttentionProjection):
            raise UnsupportedOperation(
                f"{type(layer).__name__} computes its weight, and its float weight is another one (dorefa); convert "
                "with quantizer='nested' or 'lsq', or give the float network it was made from"
            )
        layer.weight.copy_(weight)


def _check_forward(name: str, module: nn.Module) -> None:
    """What a part does beyond being that part would be lost with it."""
    if isinstance(module, AnyLayer):
        if isinstance(module, (OwnForwardLayer, AttentionProjection)):
            return
        kind = type(module)
        while kind.__module__ == parametrize.__name__:
            (kind,) = kind.__bases__
        own = kind.__bases__[-1]  # of a layer converted from a subclass, which may have no forward of its own
        plain = "forward" not in vars(module) and (kind in KINDS or issubclass(own, tuple(ANY_LAYERS)))
        plain = plain and not issubclass(own, AnyLayer)
    elif isinstance(module, (AnyActivation, SwitchNorm)):
        part = AnyActivation if isinstance(module, AnyActivation) else SwitchNorm
        plain = own_method(module, part, ("forward", "at_bits", "table")) is None
    else:
        return
    if not plain:
        raise UnsupportedOperation(
            f"{type(module).__name__} in module {name!r} has a forward or parametrization of its own, which a plain "
            "torch layer does not have; give the float network it was made from"
        )


def _stand_in(module: nn.Module) -> nn.Module:
    """With the hooks of the part, which are called around it."""
    if isinstance(module, SwitchNorm):
        made = module.table(str(FLOAT)).train(module.training)
    else:
        assert isinstance(module, AnyActivation)
        made = nn.ReLU() if module.act.rectify and not module.act.signed else nn.Identity()
    for name in hook_names():
        hooks = vars(module)[name]
        if isinstance(hooks, dict) and hooks:
            inner = vars(made)[name]
            first, then = (hooks, inner) if "pre" in name else (inner, hooks)
            vars(made)[name] = type(hooks)([*first.items(), *then.items()])
    return made


def _plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    if kind in KINDS:
        return KINDS[kind]
    if kind.__module__ == parametrize.__name__:  # made by torch for one module: the same of the plain layer
        members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        return type(kind.__name__.removeprefix("Any"), (_plain_class(kind.__bases__[0]),), members)
    return kind.__bases__[-1]  # the subclass of a torch layer that it was converted from


def _plain_layer(layer: AnyLayer) -> None:
    """The layer changes class where it stands, as it did when it was converted."""
    if isinstance(layer, AttentionProjection):
        return  # taken out with its attention
    if isinstance(layer, OwnForwardLayer):
        layer.__class__ = layer.own  # type: ignore[assignment]
        for name in ("shapes", "described"):
            layer.__dict__.pop(name, None)
    elif type(layer) not in KINDS:
        layer.__class__ = _plain_class(type(layer))  # type: ignore[assignment]
    for name in ("quantizer", "act"):
        layer._modules.pop(name, None)
    for name in ("act", "weight_bits", "act_bits", "normalized", "magnitude"):
        layer.__dict__.pop(name, None)
