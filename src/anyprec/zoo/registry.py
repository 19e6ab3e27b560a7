"""The list of networks, ZOO, and `build`, which turns a name and options into a model. Called by training/.

Strings become objects here and nowhere else in the zoo. A built model knows how to be built again: `zoo_name`
and `zoo_options` (plain JSON values) go into checkpoints; `build(m.zoo_name, **m.zoo_options)` is its like.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import nn

from anyprec.errors import AnyprecError
from anyprec.nn.switching import any_layers, link_norms, set_bits
from anyprec.widths import DEFAULT_WIDTHS, check_widths
from anyprec.zoo.alexnet import AlexNet
from anyprec.zoo.cnn8 import Cnn8
from anyprec.zoo.deeplab import DeepLabResNet18, DeepLabResNet50, DeepLabSmall
from anyprec.zoo.mobilenet import MobileNetV2
from anyprec.zoo.parts import Parts, ZooNetwork
from anyprec.zoo.resnet import CifarResNet, ResNet18, ResNet50
from anyprec.zoo.resnet_he import HeResNet
from anyprec.zoo.vgg import SpeedVgg


@dataclass(frozen=True)
class ZooEntry:
    """One network: its class, what it is, the images it is made for and its row in the paper's Table 1."""

    network: type[ZooNetwork]
    about: str
    shape: tuple[int, int, int]  # (H, W, C)
    row: str | None = None
    fixed: dict[str, Any] = field(default_factory=dict)  # options that make the name what it is
    task: str = "classification"  # or "segmentation": a class for every pixel

    def options(self) -> dict[str, Any]:
        """The options a user may give, with their defaults."""
        parameters = inspect.signature(self.network).parameters.values()
        return {
            p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in self.fixed
        }  # fmt: skip


_CIFAR, _SVHN, _IMAGENET, _VOC = (32, 32, 3), (40, 40, 3), (224, 224, 3), (513, 513, 3)

ZOO: dict[str, ZooEntry] = {
    "resnet8": ZooEntry(
        CifarResNet, "pre-activation ResNet-8, 16/32/64 channels", _CIFAR, "SVHN Resnet-8",
        {"blocks": (1, 1, 1)},
    ),
    "resnet20": ZooEntry(
        CifarResNet, "pre-activation ResNet-20, 16/32/64 channels", _CIFAR, None, {"blocks": (3, 3, 3)}
    ),
    "resnet20x5": ZooEntry(
        CifarResNet, "the paper's ResNet-20: five times as wide", _CIFAR, "Cifar-10 Resnet-20",
        {"blocks": (3, 3, 3), "multiplier": 5},
    ),
    "resnet-cifar": ZooEntry(CifarResNet, "pre-activation CIFAR ResNet of any depth (option blocks)", _CIFAR),
    "alexnet": ZooEntry(AlexNet, "AlexNet for 32x32 images, batch-normalized", _CIFAR, "Cifar-10 AlexNet"),
    "mobilenetv2": ZooEntry(
        MobileNetV2, "pre-activation MobileNetV2, group for depth-wise convolutions", _CIFAR,
        "Cifar-10 MobileNetV2",
    ),
    "cnn8": ZooEntry(Cnn8, "CNN-8, model C of the DoReFa paper", _SVHN, "SVHN CNN-8"),
    "resnet18": ZooEntry(ResNet18, "pre-activation ResNet-18, basic blocks", _IMAGENET, "ImageNet Resnet-18"),
    "resnet50": ZooEntry(ResNet50, "pre-activation ResNet-50, bottlenecks", _IMAGENET, "ImageNet Resnet-50"),
    "resnet20-he": ZooEntry(HeResNet, "textbook ResNet-20, takes float weights", _CIFAR, None, {"depth": 20}),
    "resnet56-he": ZooEntry(HeResNet, "textbook ResNet-56, takes float weights", _CIFAR, None, {"depth": 56}),
    "resnet-he": ZooEntry(HeResNet, "textbook CIFAR ResNet of any depth (option depth)", _CIFAR),
    "vgg-speed": ZooEntry(SpeedVgg, "VGG with a whitening stem, 64/256/256 channels", _CIFAR),
    "vgg-speed-small": ZooEntry(
        SpeedVgg, "the same with 64/128/128 channels", _CIFAR, None, {"channels": (64, 128, 128)}
    ),
    "deeplab-resnet50": ZooEntry(
        DeepLabResNet50, "DeepLab V3 on ResNet-50: the paper's Table 6", _VOC, task="segmentation"
    ),
    "deeplab-resnet18": ZooEntry(DeepLabResNet18, "DeepLab V3 on ResNet-18", _VOC, task="segmentation"),
    "deeplab-small": ZooEntry(
        DeepLabSmall, "DeepLab V3 on a CIFAR ResNet, for small images", (180, 240, 3), task="segmentation"
    ),
}  # fmt: skip


def build(
    name: str,
    *,
    widths: Iterable[int] = DEFAULT_WIDTHS,
    num_classes: int = 10,
    quantizer: str = "nested",
    scale: str = "learned",
    in_channels: int = 3,
    **options: Any,
) -> ZooNetwork:
    """A new, untrained network at its widest width. `options` are those of `ZOO[name].options()`."""
    if name not in ZOO:
        near = get_close_matches(str(name), ZOO, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise AnyprecError(f"network {name!r} is not in the zoo; {hint}There are {', '.join(ZOO)}")
    entry = ZOO[name]
    allowed = entry.options()
    for option in options:
        if option not in allowed:
            raise AnyprecError(f"{name} has no option {option!r}; its options are {', '.join(allowed)}")
    for what, count in (("num_classes", num_classes), ("in_channels", in_channels)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise AnyprecError(f"{what}={count!r} is not a count; give a whole number of at least 1")
    widths = check_widths(widths)
    make: Callable[..., ZooNetwork] = entry.network  # each has its own options
    model = make(Parts(widths, quantizer, scale), num_classes, in_channels, **entry.fixed, **options)
    for layer in any_layers(model).values():
        layer.quantizer.fit(layer.weight, widths)
    link_norms(model, run_order(model))
    set_bits(model, widths[-1])
    settings = {
        "widths": widths, "num_classes": num_classes, "quantizer": quantizer, "scale": scale,
        "in_channels": in_channels, **options,
    }  # fmt: skip
    model.zoo_name = name
    model.zoo_options = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    return model


def run_order(model: nn.Module) -> list[str]:
    """Module names in the order they run: that of definition, but for a block's skip.

    A skip runs after its block's norm0 and is defined last, since an activation shared by main path and skip
    takes the bits of the next layer defined, which should be the main path's.
    """
    order: list[str] = []
    for name, _ in model.named_modules():
        if ".skip_" not in name:
            order.append(name)
        if name.endswith(".norm0"):
            block = name.removesuffix("norm0")
            order += [
                block + "skip_conv",
                block + "skip_norm",
            ]  # link_norms passes over names that do not exist
    return order
