"""Back to plain torch: a model with any-layers in, the float network it is at 32 bits out.

Any-layers become the torch layers they stand for, switched norms the norm of float, shared activations ReLU. Module
and parameter names stay, but for the norms'. Called by ptq/ (which quantises float networks) and checkpoint.py.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from anyprec.bits import FLOAT
from anyprec.errors import UncalibratedBits
from anyprec.train.layers import ANY_LAYERS, AnyActivation, AnyLayer
from anyprec.train.norms import BatchNorm1d, BatchNorm2d, SwitchNorm
from anyprec.train.switch import widths_of

KINDS: dict[type[nn.Module], type[nn.Module]] = {
    **{any_kind: kind for kind, any_kind in ANY_LAYERS.items()},
    BatchNorm1d: nn.BatchNorm1d,
    BatchNorm2d: nn.BatchNorm2d,
}


@torch.no_grad()
def as_float(model: nn.Module) -> nn.Module:
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
        if isinstance(module, AnyLayer):
            _plain_layer(module)
        elif isinstance(module, (AnyActivation, SwitchNorm)) and name:
            parent, _, leaf = name.rpartition(".")
            setattr(net.get_submodule(parent), leaf, stands_for.setdefault(module, _stand_in(module)))
    for module in net.modules():
        module.__class__ = KINDS.get(type(module), type(module))
    return net


def _reshape_weights(net: nn.Module) -> None:
    """The float weight of `dorefa` is not w. All are computed before any is set: layers may share one."""
    layers = [m for m in net.modules() if isinstance(m, AnyLayer)]
    for layer, weight in [(layer, layer.quantizer.float_weight(layer.weight)) for layer in layers]:
        if weight is not layer.weight:
            layer.weight.copy_(weight)


def _stand_in(module: nn.Module) -> nn.Module:
    if isinstance(module, SwitchNorm):
        return module.table(str(FLOAT)).train(module.training)
    assert isinstance(module, AnyActivation)
    return nn.ReLU() if module.act.rectify and not module.act.signed else nn.Identity()


def _plain_layer(layer: AnyLayer) -> None:
    """The layer changes class where it stands, as it did when it was converted."""
    if type(layer) not in KINDS:  # converted from a subclass of a torch layer, which is its last base
        layer.__class__ = type(layer).__bases__[-1]
    for name in ("quantizer", "act"):
        layer._modules.pop(name, None)
    for name in ("act", "weight_bits", "act_bits", "normalised", "magnitude"):
        layer.__dict__.pop(name, None)
