"""Multiple-choice knapsack: one width per layer, least loss for every budget. Dynamic programming in numpy.

In: losses and costs (layers, widths). Out: the plans that are best for some budget, as indices of widths.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

STEPS = 2048  # budgets tried between the cheapest and the dearest plan

Table = npt.NDArray[np.float64]  # (layers, widths)


def best_choices(losses: Table, costs: Table, steps: int = STEPS) -> list[tuple[int, ...]]:
    """For rising budgets, the choice of least total loss; costs are rounded up, so none is over its budget."""
    least = costs.min(axis=1, keepdims=True)
    above = costs - least
    span = float(above.max(axis=1).sum())
    unit = span / steps if span > 0 else 1.0
    weight = np.ceil(above / unit - 1e-9).astype(np.int64)  # (layers, widths) steps of the budget
    budgets = int(weight.max(axis=1).sum()) + 1
    best = np.zeros(budgets)  # least loss of the layers so far, within each budget
    taken = np.zeros((len(losses), budgets), np.int64)
    for layer in range(len(losses)):
        options = np.full((losses.shape[1], budgets), np.inf)
        for width in range(losses.shape[1]):
            used = int(weight[layer, width])
            options[width, used:] = best[: budgets - used] + losses[layer, width]
        taken[layer] = options.argmin(axis=0)
        best = options.min(axis=0)
    found: dict[tuple[int, ...], None] = {}
    for budget in range(budgets):
        choice: list[int] = []
        left = budget
        for layer in reversed(range(len(losses))):
            width = int(taken[layer, left])
            choice.append(width)
            left -= int(weight[layer, width])
        found[tuple(reversed(choice))] = None
    return list(found)
