"""A wide ResNet that starts as a trained narrow one: every channel is repeated, so that all integer widths give the
same answers as before, and a little noise lets the copies grow apart (after Net2Net, Chen et al., ICLR 2016,
arXiv:1511.05641).

A step of a wide network takes many times as long; starting from a narrow one saves most of the steps. Called by
training/run.py when `init` names a narrower network of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from anyprec.errors import CheckpointError
from anyprec.nn.layers import AnyLayer
from anyprec.nn.switching import any_layers
from anyprec.widths import FLOAT
from anyprec.zoo.resnet import CifarResNet, ImageNetResNet

NOISE = 0.1  # of a layer's standard deviation


def widening_factor(model: nn.Module, narrow: Mapping[str, Tensor]) -> int:
    """How many times as wide `model` is as the network of the state dict `narrow`; 0 if it is no multiple."""
    if not isinstance(model, (CifarResNet, ImageNetResNet)) or "conv0.weight" not in narrow:
        return 1
    ours, theirs = len(model.conv0.weight), len(narrow["conv0.weight"])
    return 0 if ours % theirs else ours // theirs


@torch.no_grad()
def widen(model: nn.Module, narrow: Mapping[str, Tensor], where: str, noise: float = NOISE, seed: int = 0) -> None:
    """Fill `model` with the weights of a narrower network, every channel repeated; widths it has not are left out."""
    times = widening_factor(model, narrow)
    layers = any_layers(model)
    if times < 1:
        raise CheckpointError(f"{where} is not narrower by a whole factor; choose a multiple of its multiplier")
    if any(str(FLOAT) in getattr(norm, "tables", {}) for norm in model.modules()):
        # The float weight is the one the codes are made of: it cannot be divided and keep them.
        raise CheckpointError(f"{where} can be widened only for integer widths; set widths without {FLOAT}")
    if not all(layer.quantizer.learned for layer in layers.values()):
        raise CheckpointError(f"{where} can be widened only with learned scales; set scale = 'learned'")
    dice = torch.Generator().manual_seed(seed)
    filled = {}
    for name, ours in model.state_dict().items():
        if name not in narrow or narrow[name].dim() != ours.dim():
            raise CheckpointError(f"{where} was made for another network than {type(model).__name__}: it has no {name}")
        value = narrow[name]
        for axis, (size, have) in enumerate(zip(ours.shape, value.shape, strict=True)):
            if size not in (have, times * have):
                raise CheckpointError(
                    f"{where} was made for another network than {type(model).__name__}: {name} is "
                    f"{list(narrow[name].shape)}, which cannot be widened to {list(ours.shape)}"
                )
            if size != have:
                value = value.repeat_interleave(times, axis)
        owner, _, what = name.rpartition(".")
        layer = model.get_submodule(owner) if owner else model
        if isinstance(layer, AnyLayer) and what == "weight":
            value = value + noise * value.std() * torch.randn(value.shape, generator=dice)
        elif what == "weight" and value.dim() > 1 and value.shape[1] != narrow[name].shape[1]:
            value = value / times  # a float layer that reads every channel `times` times
        filled[name] = value
    for name, layer in layers.items():
        for bits in layer.quantizer.scales:
            filled[f"{name}.quantizer.scales.{bits}"] = filled[f"{name}.quantizer.scales.{bits}"] / times
    model.load_state_dict(filled)
