"""What a recipe says about optimisation, as objects: optimisers, parameter groups, the learning rate of a step.

Called by run.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anyprec.train.recipe import Recipe

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda groups, r: torch.optim.Adam(groups, r.lr, weight_decay=r.weight_decay),
    "adamw": lambda groups, r: torch.optim.AdamW(groups, r.lr, weight_decay=r.weight_decay),
    "sgd": lambda groups, r: torch.optim.SGD(groups, r.lr, momentum=r.momentum, weight_decay=r.weight_decay),
}


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Weights, and apart from them learned scales and ranges: no weight decay there, and a rate of their own."""
    scales: list[nn.Parameter] = []
    weights: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            learned = any(part in name.split(".") for part in ("scales", "ranges")) or name.endswith("quantizer.range")
            (scales if learned else weights).append(parameter)
    groups = [{"params": weights, "rate_factor": 1.0}]
    if scales:
        groups.append({"params": scales, "rate_factor": recipe.scale_lr, "weight_decay": 0.0})
    return groups


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """The rate of global step `step`, with `steps` an epoch: a pure function, so nothing of it needs saving."""
    epoch = step / steps
    if epoch < recipe.warmup_epochs:
        return recipe.lr * (step + 1) / (recipe.warmup_epochs * steps)
    if recipe.schedule == "steps":
        return recipe.lr * recipe.decay ** sum(int(epoch) >= m for m in recipe.milestones)
    done = min((epoch - recipe.warmup_epochs) / max(recipe.epochs - recipe.warmup_epochs, 1e-9), 1.0)
    if recipe.schedule == "cosine":
        return recipe.lr * 0.5 * (1 + math.cos(math.pi * done))
    if recipe.schedule == "poly":
        return recipe.lr * (1 - done) ** recipe.power
    return recipe.lr
