"""`from_float`: float weights made elsewhere in, a zoo network with these weights out.

Which network it is can be told for a textbook CIFAR ResNet; others are named. Called by `anyprec import` and `ptq`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from anyprec.errors import CheckpointError
from anyprec.zoo.reference import indices
from anyprec.zoo.registry import ZOO, build
from anyprec.zoo.weights import load_float


def from_float(state: Mapping[str, Tensor], net: str | None, widths: tuple[int, ...]) -> nn.Module:
    """A zoo network with these float weights; which one is told from the names where `net` does not say."""
    name, options = infer_net(state) if net is None else (net, {})
    kernels = [value.shape[1] for value in state.values() if value.dim() == 4]
    classes = [value.shape[0] for value in state.values() if value.dim() == 2]
    if not kernels or not classes:
        raise CheckpointError("the file has no convolution or no linear layer; expected the weights of a zoo network")
    model = build(name, widths=widths, in_channels=kernels[0], num_classes=classes[-1], **options)
    load_float(model, state)
    return model.eval()


def infer_net(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """A textbook CIFAR ResNet by its names; its depth by the number of blocks in a stage."""
    if not {"conv1.weight", "layer3.0.bn2.weight", "linear.weight"} <= set(state):
        shown = ", ".join(list(state)[:3])
        raise CheckpointError(
            f"cannot tell the network of these {len(state)} tensors ({shown}, ...); expected a checkpoint of "
            "the reference code, or float weights of a textbook CIFAR ResNet (conv1, layer1.0.conv1, ..., "
            "linear); name another network of the zoo with --net"
        )
    depth = 2 + 6 * len(indices({name: tuple(value.shape) for name, value in state.items()}, r"layer3\.(\d+)\."))
    name = f"resnet{depth}-he"
    return (name, {}) if name in ZOO else ("resnet-he", {"depth": depth})
