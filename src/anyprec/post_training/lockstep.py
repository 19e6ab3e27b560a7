"""Lockstep: one forward pass in which every width runs beside float, each on its own share of the batch.

The batch is the same images once per width, float first. Any-layers and switched norms cut it up, work on each share
at its width, and put it together again; all else in a network treats images one by one and needs no change. So a layer
sees, at one moment, what it is given at every width with all layers before it quantized, and what float gives there:
`LockstepVisitor` is shown that, layer by layer in the order of execution, before the layer runs. Used by gptq.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anyprec.errors import UnsupportedOperation
from anyprec.nn.layers import AnyLayer
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.observe import ModelCall, preserve_state, run_call
from anyprec.nn.switching import any_layers, switch_norms
from anyprec.widths import FLOAT

MOST_IMAGES = 256  # in a pass; each is there once for float and once for each width
MOST_VALUES = 40_000_000  # in the input of a pass: 29 photographs of 224 x 224 at 8 widths, up to 4 GB on the way
TOLERANCE = 1e-3  # of the largest output: what float may differ by from a run of its own


class LockstepVisitor:
    """What is done on the way. `given` has one share per setting: float, then the widths."""

    def layer(self, name: str, layer: AnyLayer, given: list[Tensor]) -> None:
        """Called before an any-layer first runs."""

    def correct(self, name: str, layer: AnyLayer, made: list[Tensor]) -> list[Tensor]:
        """Called with what it gave when it first ran; what comes back takes its place."""
        return made

    def norm(self, name: str, norm: SwitchNorm, given: list[Tensor]) -> None:
        """Called before a switched norm first runs."""


@torch.no_grad()
def run_in_lockstep(model: nn.Module, call: ModelCall, widths: Sequence[int], visitor: LockstepVisitor) -> None:
    """`model` in eval mode on one call, float and all `widths` at once."""
    settings = (FLOAT, *widths)
    with preserve_state(model):
        for layer in any_layers(model).values():
            layer.bits = FLOAT
        for norm in switch_norms(model).values():
            norm.key = str(FLOAT)
        alone = first_tensor(run_call(model, call, "the images"))
        with _in_shares(model, settings, visitor):
            together = first_tensor(run_call(model, repeated(call, len(settings)), "the images"))
    share = together[: len(alone)]
    if len(together) != len(alone) * len(settings) or (
        (share - alone).abs().max() > TOLERANCE * alone.abs().max().clamp_min(1e-30)
    ):
        raise UnsupportedOperation(
            f"{type(model).__name__} does not treat the images of a batch one by one, so its widths cannot run side by "
            "side; use method 'bc'"
        )


def joined_calls(calls: Sequence[ModelCall], settings: int) -> ModelCall:
    """One call of the first images of all calls together, as many as a pass can have."""
    args, kwargs = calls[0]
    count = len(next(tensors_of((args, kwargs))))
    values = sum(t.numel() for t in tensors_of((args, kwargs))) // max(count, 1)
    most = max(1, min(MOST_IMAGES, MOST_VALUES // max(1, settings * values)))
    joined: ModelCall = _joined([call for call in calls if _alike(call, calls[0])], most)
    return joined


def split_calls(calls: Sequence[ModelCall], size: int) -> list[ModelCall]:
    """Calls of at most `size` images."""
    small = []
    for call in calls:
        count = len(next(tensors_of(call)))
        small += [_sliced(call, slice(first, first + size)) for first in range(0, count, size)]
    return small


def tensors_of(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor) and item.dim():
        yield item
    elif isinstance(item, (dict, tuple, list)):
        for part in item.values() if isinstance(item, dict) else item:
            yield from tensors_of(part)


def _alike(a: ModelCall, b: ModelCall) -> bool:
    """Calls that differ in more than the number of images cannot be joined."""
    return [t.shape[1:] for t in tensors_of(a)] == [t.shape[1:] for t in tensors_of(b)]


def _joined(items: Sequence[Any], most: int) -> Any:
    first = items[0]
    if isinstance(first, Tensor) and first.dim():
        enough = items[: -(-most // max(1, min(len(item) for item in items)))]
        return torch.cat(list(enough))[:most]
    if isinstance(first, dict):
        return {name: _joined([item[name] for item in items], most) for name in first}
    if isinstance(first, (tuple, list)):
        return type(first)([_joined([item[i] for item in items], most) for i in range(len(first))])
    return first


def _sliced(item: Any, part: slice) -> Any:
    if isinstance(item, Tensor) and item.dim():
        return item[part]
    if isinstance(item, dict):
        return {name: _sliced(value, part) for name, value in item.items()}
    if isinstance(item, (tuple, list)):
        return type(item)([_sliced(value, part) for value in item])
    return item


def repeated(item: Any, times: int) -> Any:
    """Tensors anywhere in `item`, `times` times along their first axis."""
    if isinstance(item, Tensor):
        return item.repeat(times, *(1,) * (item.dim() - 1)) if item.dim() else item
    if isinstance(item, dict):
        return {name: repeated(value, times) for name, value in item.items()}
    if isinstance(item, (tuple, list)):
        return type(item)([repeated(value, times) for value in item])
    return item


def first_tensor(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        if isinstance(output, dict):
            output = list(output.values())
        if not isinstance(output, (tuple, list)) or not output:
            raise UnsupportedOperation(f"the network gives a {type(output).__name__}, in which there is no tensor")
        output = output[0]
    return output


@contextmanager
def _in_shares(model: nn.Module, settings: tuple[int, ...], visitor: LockstepVisitor) -> Iterator[None]:
    """Inside, any-layers and norms work share by share."""
    layers, norms = any_layers(model), switch_norms(model)
    seen: set[nn.Module] = set()

    def shares(x: Tensor) -> list[Tensor]:
        if x.shape[0] % len(settings):
            raise UnsupportedOperation(
                "a layer is given something that is not a batch, so its widths cannot run side by side; use method 'bc'"
            )
        return list(x.chunk(len(settings)))

    def run_layer(name: str, layer: AnyLayer, x: Tensor, *more: Any) -> Tensor:
        given = shares(x)
        if first := layer not in seen:
            seen.add(layer)
            visitor.layer(name, layer, given)
        made = []
        for bits, share in zip(settings, given, strict=True):
            layer.bits = bits
            made.append(type(layer).at_bits(layer, share, *more))
        if first:
            made = visitor.correct(name, layer, made)
        return torch.cat(made)

    def run_norm(name: str, norm: SwitchNorm, x: Tensor) -> Tensor:
        given = shares(x)
        if norm not in seen:
            seen.add(norm)
            visitor.norm(name, norm, given)
        return torch.cat([norm.table(str(bits))(share) for bits, share in zip(settings, given, strict=True)])

    def bound(function: Any, name: str, module: nn.Module) -> Any:
        return lambda *args: function(name, module, *args)

    try:
        # On the instance: found before the methods of the class, and gone again below.
        for name, layer in layers.items():
            layer.__dict__["at_bits"] = bound(run_layer, name, layer)
        for name, norm in norms.items():
            norm.__dict__["forward"] = bound(run_norm, name, norm)
        yield
    finally:
        for layer in layers.values():
            layer.__dict__.pop("at_bits", None)
        for norm in norms.values():
            norm.__dict__.pop("forward", None)
