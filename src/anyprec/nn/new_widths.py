"""Widths that a checkpoint was not trained for, such as all integer ones after a float stage, get their start here.

`load_widths` fills a model with a checkpoint of fewer widths; `fit_widths` then fits the new widths to data, so that
training starts close to what the checkpoint could do. Called by run.py when `init` names such a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyprec.nn.act_quantizer import best_range
from anyprec.nn.calibrate import estimate_norms
from anyprec.nn.layers import ANY_LAYERS, AnyActivation, AnyLayer
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.observe import ObservedValues
from anyprec.nn.switching import any_layers, bits, switch_norms
from anyprec.training.checkpoint import restore
from anyprec.widths import FLOAT


def load_widths(model: nn.Module, state: Mapping[str, Tensor], trained: Sequence[int], path: str | Path) -> None:
    """Load a checkpoint trained for `trained` widths. Norms of all others start as those of the widest of them; what
    quantizers learn starts where it fits the weights, unless some integer width was trained. A checkpoint of float only
    may have been made with another quantizer, which it never used.
    """
    own = model.state_dict()
    if all(k == FLOAT for k in trained):
        state = {name: value for name, value in state.items() if name in own or ".quantizer." not in name}
    filled = {**{n: v for n, v in own.items() if ".quantizer." in n or ".act." in n}, **state}
    for name, norm in switch_norms(model).items():
        for key in norm.tables:
            for leaf in norm.tables[key].state_dict():
                filled.setdefault(f"{name}.tables.{key}.{leaf}", state.get(f"{name}.tables.{max(trained)}.{leaf}"))
    restore(model, {name: value for name, value in filled.items() if value is not None}, path)
    new = [k for k in norm_widths(model) if k not in trained]
    for layer in any_layers(model).values():
        if all(k == FLOAT for k in trained):
            layer.quantizer.fit(layer.weight, new)
        for k in new:
            layer.quantizer.add_width(k)


def norm_widths(model: nn.Module) -> tuple[int, ...]:
    """All widths of the model's norms, float among them."""
    return tuple(sorted({int(k) for norm in switch_norms(model).values() for k in norm.tables if k.isdigit()}))


@torch.no_grad()
def fit_widths(model: nn.Module, widths: Iterable[int], batches: Sequence[Tensor]) -> None:
    """Fit the norms of `widths` to images, given norms copied from a wider width that has run before.

    The paper's activation clips at 1 and trained float norms know nothing of that: where one is read by such an
    activation, gamma and beta of width k are divided by the range r of least squared error at k bits. The layers behind
    see their inputs divided by r, so their scales at k bits are multiplied by it. The statistics of all norms are then
    measured anew, with everything quantized. An activation that a float layer reads as well is left alone: that layer
    has no scale of its own at k bits.
    """
    widths = [k for k in widths if k != FLOAT]
    for clip in _clips(model, batches, widths):
        layers = [layer for layer in clip.readers if isinstance(layer, AnyLayer) and layer.quantizer.learned]
        if len(layers) < len(clip.readers):
            continue
        for k in widths:
            reach = best_range(clip.seen.values(), k, signed=False)
            table: Any = clip.norm.tables[str(k)]
            table.weight.div_(reach)
            table.bias.div_(reach)
            for layer in layers:
                layer.quantizer.scales[str(k)].mul_(reach)
    estimate_norms(model, widths, batches)


@dataclass(eq=False)
class _Clip:
    """An activation of fixed range that reads a norm: what it is given, and the layers that read it.

    Layers behind a pool or a flatten are not among them; in the zoo a norm follows those, and takes any factor out.
    """

    norm: SwitchNorm
    seen: ObservedValues = field(default_factory=ObservedValues)
    readers: set[nn.Module] = field(default_factory=set)


def run_in_float(model: nn.Module) -> None:
    """Layers and activations as at 32 bits, for a model whose norms have no table for it; `bits` undoes it."""
    for module in model.modules():
        if isinstance(module, AnyLayer):
            module.bits = FLOAT
        elif isinstance(module, AnyActivation):
            module.act_bits = FLOAT


def _clips(model: nn.Module, batches: Sequence[Tensor], new: Sequence[int]) -> list[_Clip]:
    """Found by running the model in float and asking who is given the very tensor that another made."""
    clips: dict[nn.Module, _Clip] = {}
    made: dict[int, tuple[nn.Module, Tensor]] = {}  # who made a tensor, by its id; kept alive, so ids are not reused

    def keep(module: nn.Module, given: Any, output: Tensor) -> None:
        made[id(output)] = module, output

    def act_runs(activation: nn.Module, given: tuple[Tensor]) -> None:
        norm, _ = made.get(id(given[0]), (None, None))
        if isinstance(norm, SwitchNorm):
            clips.setdefault(activation, _Clip(norm)).seen.add(given[0].clamp_min(0))

    def layer_runs(layer: nn.Module, given: tuple[Tensor]) -> None:
        source, _ = made.get(id(given[0]), (None, None))
        if source in clips:
            clips[source].readers.add(layer)

    hooks = []
    for module in model.modules():
        if isinstance(module, SwitchNorm):
            hooks.append(module.register_forward_hook(keep))
        elif isinstance(module, AnyActivation) and module.act.clip == "fixed":
            hooks += [module.register_forward_pre_hook(act_runs), module.register_forward_hook(keep)]
        elif isinstance(module, tuple(ANY_LAYERS)):
            hooks.append(module.register_forward_pre_hook(layer_runs))
    was_training = model.training
    model.eval()
    try:
        with bits(model, FLOAT if FLOAT in norm_widths(model) else max(norm_widths(model))):
            if not set(norm_widths(model)) - set(new):  # all tables are still copies: run as what they were made for
                run_in_float(model)
            for images in batches:
                model(images)
                made.clear()
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return list(clips.values())
