"""Tuning what each width has of its own: scales, shifts, ranges and norms learn to give float's answers; codes stay.

No labels: the loss of a width is the distance of its outputs from those of the float network on the same images. Each
width is tuned by itself, and none changes what another one gives. Called by methods.py after gptq.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyprec.nn.layers import AnyLayer
from anyprec.nn.norms import SwitchNorm
from anyprec.nn.observe import ModelCall, preserve_state, run_call
from anyprec.nn.quantizers import ChosenCodes
from anyprec.nn.switching import set_bits
from anyprec.post_training.lockstep import first_tensor
from anyprec.progress import Progress
from anyprec.widths import FLOAT

GOOD_ENOUGH = 0.01  # distance from float below which a width is left as it is: at 8 bit ResNet-20 starts at 0.001
JUDGED_CALLS = 4  # at least; of one alone it may fall while it grows over all
STEP = 0.01  # of Adam, times the mean size of what is tuned; a cosine takes it to 0


def tune(
    model: nn.Module,
    calls: Sequence[ModelCall],
    widths: Sequence[int],
    steps: int,
    rate: float = 1.0,
    bar: Progress | None = None,
) -> dict[int, tuple[float, float]]:
    """Width -> mean distance from float on the calls before and after."""
    found = {}
    with preserve_state(model):
        with torch.no_grad():
            set_bits(model, FLOAT)
            wanted = [first_tensor(run_call(model, call, "the images")) for call in calls]
        for bits in widths:
            set_bits(model, bits)
            before = after = mean_distance(model, calls, wanted)
            if before > GOOD_ENOUGH and steps:
                kept = [(p, p.detach().clone()) for p, _ in own_parameters(model, bits)]
                learn(model, calls, wanted, bits, steps, rate, bar)
                after = mean_distance(model, calls, wanted)
                if not after < before:  # NaN as well
                    with torch.no_grad():
                        for parameter, value in kept:
                            parameter.copy_(value)
                    after = before
            elif bar is not None:
                bar.update(steps)
            found[bits] = before, after
    return found


@torch.no_grad()
def mean_distance(model: nn.Module, calls: Sequence[ModelCall], wanted: Sequence[Tensor]) -> float:
    few = min(len(calls), max(JUDGED_CALLS, len(calls) // 8))  # enough to see whether it grew
    pairs = list(zip(calls, wanted, strict=True))[:few]
    return sum(float(distance(first_tensor(run_call(model, c, "the images")), w)) for c, w in pairs) / few


def distance(made: Tensor, wanted: Tensor) -> Tensor:
    """Of class scores: the divergence of their probabilities. Of anything else: the relative squared error."""
    if made.dim() == 2 and made.shape[1] > 1:
        return F.kl_div(made.log_softmax(1), wanted.log_softmax(1), log_target=True, reduction="batchmean")
    return (made - wanted).square().mean() / wanted.square().mean().clamp_min(1e-12)


def own_parameters(model: nn.Module, bits: int) -> list[tuple[nn.Parameter, float]]:
    """What only this width uses, each with its usual size."""
    key, found = str(bits), []
    for module in model.modules():
        tables: list[nn.ParameterDict] = []
        if isinstance(module, AnyLayer):
            tables.append(module.quantizer.scales)
            if module.act is not None:
                tables.append(module.act.ranges)
            if isinstance(module.quantizer, ChosenCodes):
                # A shift has no size of its own to go by; a layer's outputs are about as large as its norm's mean.
                shift = module.quantizer.shifts[key]
                found.append((shift, float(shift.detach().abs().mean())))
        elif isinstance(module, SwitchNorm):
            found += [(parameter, 1.0) for parameter in module.table(key).parameters()]
        found += [(table[key], float(table[key].detach().abs().mean())) for table in tables if key in table]
    return found


@contextmanager
def only_these_learn(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for p, _ in before:
            p.requires_grad_(False)
        for p in parameters:
            p.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for p, flag in before:
            p.requires_grad_(flag)
            p.grad = None


def learn(
    model: nn.Module,
    calls: Sequence[ModelCall],
    wanted: Sequence[Tensor],
    bits: int,
    steps: int,
    rate: float,
    bar: Progress | None,
) -> None:
    own = own_parameters(model, bits)
    groups = [{"params": [p], "lr": STEP * rate * size} for p, size in own if size > 0]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    dice = torch.Generator().manual_seed(bits)
    order: list[int] = []
    with only_these_learn(model, [p for p, _ in own]):
        for _ in range(steps):
            order = order or torch.randperm(len(calls), generator=dice).tolist()
            i = order.pop()
            loss = distance(first_tensor(run_call(model, calls[i], "the images")), wanted[i])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if bar is not None:
                bar.update(bits=bits, distance=f"{loss.item():.3f}")
