"""The knapsack against trying everything."""

import itertools

import numpy as np
import pytest

from anyprec.search.knapsack import best_choices


@pytest.mark.parametrize("seed", range(5))
def test_every_choice_is_the_best_of_its_budget(seed):
    draw = np.random.default_rng(seed)
    losses = np.sort(draw.random((4, 3)), axis=1)[:, ::-1]
    costs = np.sort(draw.integers(1, 50, (4, 3)), axis=1).astype(float)
    span = float((costs.max(1) - costs.min(1)).sum())
    choices = best_choices(losses, costs, steps=max(1, int(span)))  # steps of 1: exact
    every = list(itertools.product(range(3), repeat=4))

    def total(table, choice):
        return sum(table[i, c] for i, c in enumerate(choice))

    for choice in choices:
        within = [c for c in every if total(costs, c) <= total(costs, choice) + 1e-9]
        assert total(losses, choice) == pytest.approx(min(total(losses, c) for c in within))
    assert choices[-1] == (2, 2, 2, 2) and choices[0] == tuple(costs.argmin(1))


def test_equal_costs_leave_one_choice():
    assert best_choices(np.array([[2.0, 1.0]]), np.ones((1, 2))) == [(1,)]
