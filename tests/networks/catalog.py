"""Public networks by name, built with random weights: networks.csv lists them, `build` makes one with an example.

A row: source (timm, pytorchcv, smp, torchvision, transformers; paper: files here), name, size of the images (tokens of
a text model), what is expected of `pack` ("packs", or a part of the line that refuses it), options of the constructor
as JSON.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision_operators import declare

LIST = Path(__file__).with_name("networks.csv")
MODULES = {
    "timm": "timm", "pytorchcv": "pytorchcv", "smp": "segmentation_models_pytorch", "torchvision": "torchvision",
    "transformers": "transformers", "paper": "unet",
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    source: str
    name: str
    size: int
    expected: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.source}/{self.name}"

    @property
    def missing(self) -> str | None:
        """What has to be installed to build it."""
        wanted = {MODULES[self.source], *({"torchvision"} if self.source in ("timm", "pytorchcv", "smp") else ())}
        return next((name for name in sorted(wanted) if importlib.util.find_spec(name) is None), None)


def networks() -> list[Network]:
    with LIST.open(newline="") as file:
        return [
            Network(row["source"], row["name"], int(row["size"]), row["expected"], json.loads(row["options"] or "{}"))
            for row in csv.DictReader(file)
        ]


def build(network: Network, seed: int = 0) -> tuple[nn.Module, Any]:
    """The network in training mode, and an example of 2 images, or of 2 texts by argument names."""
    declare()
    torch.manual_seed(seed)
    makers = {"timm": _timm, "pytorchcv": _pytorchcv, "smp": _smp, "torchvision": _torchvision,
              "transformers": _transformers, "paper": _paper}  # fmt: skip
    made, example = makers[network.source](network)
    return made, example


def preload(network: Network) -> None:
    """Imports what the network comes from, for processes forked later."""
    declare()
    importlib.import_module(MODULES[network.source])


def images(size: int, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size)


def _timm(network: Network) -> tuple[nn.Module, Any]:
    import timm

    return timm.create_model(network.name, pretrained=False, **network.options), images(network.size)


def _pytorchcv(network: Network) -> tuple[nn.Module, Any]:
    from pytorchcv.model_provider import get_model

    return get_model(network.name, pretrained=False, **network.options), images(network.size)


def _smp(network: Network) -> tuple[nn.Module, Any]:
    import segmentation_models_pytorch as smp

    return getattr(smp, network.name)(encoder_weights=None, **network.options), images(network.size)


def _torchvision(network: Network) -> tuple[nn.Module, Any]:
    import torchvision

    return torchvision.models.get_model(network.name, weights=None, **network.options), images(network.size)


def _paper(network: Network) -> tuple[nn.Module, Any]:
    import unet

    return getattr(unet, network.name)(**network.options), images(network.size)


def _transformers(network: Network) -> tuple[nn.Module, Any]:
    import transformers

    options = dict(network.options)
    config = getattr(transformers, options.pop("config"))(**options)
    made = getattr(transformers, network.name)(config)
    if "image_size" in options or "num_channels" in options:
        return made, {"pixel_values": images(network.size)}
    return made, {"input_ids": torch.randint(0, config.vocab_size, (2, network.size))}
