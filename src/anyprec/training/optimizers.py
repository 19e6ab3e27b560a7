"""What a recipe says about optimization, as objects: optimizers, parameter groups, the learning rate of a step.

Called by run.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from anyprec.choices import OPTIMIZERS
from anyprec.training.recipe import Recipe


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "sgd":
        options |= {"momentum": recipe.momentum, "nesterov": recipe.nesterov}
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, OPTIMIZERS[recipe.optimizer])
    return kind(parameter_groups(model, recipe), **options)


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Weights, and apart from them learned scales and ranges: no weight decay there, and a rate of their own. Norms and
    biases are a third group where the recipe treats them differently.
    """
    scales: list[nn.Parameter] = []
    weights: list[nn.Parameter] = []
    norms: list[nn.Parameter] = []
    apart = recipe.norm_lr != 1 or not recipe.decay_norms
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            learned = any(part in name.split(".") for part in ("scales", "ranges")) or name.endswith("quantizer.range")
            vector = apart and parameter.dim() == 1
            (scales if learned else norms if vector else weights).append(parameter)
    groups: list[dict[str, Any]] = [{"params": weights, "rate_factor": 1.0}]
    if norms:
        groups.append({"params": norms, "rate_factor": recipe.norm_lr})
        if not recipe.decay_norms:
            groups[-1]["weight_decay"] = 0.0
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
        return float(recipe.lr * (1 - done) ** recipe.power)
    if recipe.schedule in ("triangle", "one-cycle"):
        return recipe.lr * _up_and_down(recipe, step / max(recipe.epochs * steps - 1, 1))
    return recipe.lr


def _up_and_down(recipe: Recipe, done: float) -> float:
    """From start_lr up to 1 at peak_at, down to end_lr at the last step: in straight lines, or half cosines."""
    if done < recipe.peak_at:
        edge, way = recipe.start_lr, done / recipe.peak_at
    else:
        edge, way = recipe.end_lr, (1 - done) / max(1 - recipe.peak_at, 1e-9)
    way = min(max(way, 0.0), 1.0)
    if recipe.schedule == "one-cycle":
        way = 0.5 * (1 - math.cos(math.pi * way))
    return edge + (1 - edge) * way
