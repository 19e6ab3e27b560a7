"""Fragile layers: those that do little of the work and lose most of the accuracy, which post-training leaves float.

A depth-wise convolution behind the first layer of EfficientNet-Lite0 does 1 % of the multiply-adds. Some of its kernels
take differences of neighbors, with weights of up to 18: what 8-bit rounding leaves of their inputs is 40 % of the error
of the whole network, and no range, scale or code mends it. Measured in float, by rounding only the input of one layer.
Called by methods.py before the layers are converted for good; docs/cli/ptq.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from anyprec.nn.act_quantizer import best_range, sample_values
from anyprec.nn.convert import ConversionReport
from anyprec.nn.layers import AnyLayer
from anyprec.nn.observe import ModelCall, preserve_state, run_call
from anyprec.nn.switching import any_layers, set_bits
from anyprec.post_training.lockstep import first_tensor
from anyprec.widths import FLOAT

BITS = 8  # at fewer all layers lose much
MOST_WORK = 0.02  # of the multiply-adds: what a fragile layer may do
LEAST_LOSS = 0.2  # of the squared error that rounding all inputs gives: what it loses by itself
HARMLESS = 1e-4  # squared error of all, relative to the outputs, below which nothing needs mending


@torch.no_grad()
def fragile_layers(model: nn.Module, call: ModelCall) -> list[str]:
    """Names of the any-layers that should stay float; `model` is converted, and runs in float."""
    layers, report = any_layers(model), model.conversion
    assert isinstance(report, ConversionReport)
    total = sum(report.multiply_adds.values())
    cheap = [name for name in layers if report.multiply_adds.get(name, 0) < MOST_WORK * total]
    if not cheap:
        return []
    with preserve_state(model):
        set_bits(model, FLOAT)
        plain = first_tensor(run_call(model, call, "the images"))

        def loss(rounded: Sequence[AnyLayer]) -> float:
            with rounded_inputs(rounded):
                made = first_tensor(run_call(model, call, "the images"))
            return float((made - plain).square().sum() / plain.square().sum().clamp_min(1e-30))

        everything = loss(list(layers.values()))
        if everything < HARMLESS:
            return []
        return [name for name in cheap if loss([layers[name]]) > LEAST_LOSS * everything]


@contextmanager
def rounded_inputs(layers: Sequence[AnyLayer]) -> Iterator[None]:
    """Inside, what these layers are given is rounded to 8 bits first, in the range of least squared error."""

    def hook(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (round_values(given[0]), *given[1:])

    hooks = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def round_values(x: Tensor) -> Tensor:
    signed, levels = bool((x < 0).any()), (1 << BITS) - 1
    r = best_range(sample_values(x), BITS, signed)
    low, span = (-1.0, 2.0) if signed else (0.0, 1.0)
    code = (((x / r).clamp(low, 1) - low) * (levels / span)).round()
    return (code * (span / levels) + low) * r
