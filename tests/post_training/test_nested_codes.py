"""Codes chosen for all widths at once: nesting, the error against simpler choices, against all there are."""

import itertools

import pytest
import torch

from anyprec.nn.quantizers import Nested
from anyprec.post_training.nested_codes import (
    NestedProblem,
    all_values,
    cheapest,
    choose_codes,
    errors,
    fit_scales,
    push_errors_on,
    round_in_range,
    summed_error,
    sweep,
)

WIDTHS = (1, 2, 4, 8)


@pytest.fixture
def problem():
    """Two groups of five outputs, twelve weights each, inputs that go together."""
    dice = torch.Generator().manual_seed(0)
    wanted = torch.randn(1, 2, 5, 12, generator=dice) + 0.05 * torch.randn(4, 2, 5, 12, generator=dice)
    mixed = torch.randn(4, 2, 12, 12, generator=dice)
    moments = mixed @ mixed.transpose(2, 3) + 0.1 * torch.eye(12)
    return NestedProblem(WIDTHS, wanted, moments, torch.tensor([1.0, 2.0, 8.0, 128.0]))


def test_values_are_those_of_nested_codes():
    codes = torch.arange(256)
    for k, row in zip(WIDTHS, all_values(WIDTHS), strict=True):
        assert torch.equal(row, Nested((8,)).values(codes >> (8 - k), k))


def test_each_step_lowers_the_summed_error(problem):
    codes, scales = round_in_range(problem)
    plain = summed_error(problem, codes, scales)
    pushed = push_errors_on(problem, scales)
    pushed_error = summed_error(problem, pushed, scales)
    assert pushed_error < 0.95 * plain
    fitted = fit_scales(problem, pushed, scales)
    fitted_error = summed_error(problem, pushed, fitted)
    assert fitted_error <= pushed_error
    swept = sweep(problem, pushed, fitted)
    assert summed_error(problem, swept, fitted) < fitted_error
    codes, scales = choose_codes(problem, sweeps=3)
    assert codes.dtype == torch.uint8 and codes.shape == (2, 5, 12) and (scales > 0).all()
    assert summed_error(problem, codes, scales) < summed_error(problem, swept, fitted)


@pytest.mark.thorough
def test_a_sweep_leaves_no_single_code_that_is_better(problem):
    """Of the last column, which is chosen last: all 256 codes are tried."""
    codes, scales = round_in_range(problem)
    codes = sweep(problem, codes, scales)
    for group, row in itertools.product(range(2), range(5)):
        found = summed_error(problem, codes, scales)
        for code in range(256):
            other = codes.clone()
            other[group, row, -1] = code
            assert summed_error(problem, other, scales) >= found * (1 - 1e-5)


def test_cheapest_is_the_cheapest_of_all_codes():
    dice = torch.Generator().manual_seed(1)
    for widths in (WIDTHS, (3,), (2, 5)):
        target = torch.randn(len(widths), 2, 7, generator=dice)
        scales, cost = torch.rand(len(widths), 2, 7, generator=dice) + 0.5, torch.rand(len(widths), 2, generator=dice)
        off = target[..., None] - scales[..., None] * all_values(widths)[:, None, None]
        total = (cost[:, :, None, None] * off.square()).sum(0)
        chosen = cheapest(target, scales, cost, widths)
        assert torch.allclose(total.gather(-1, chosen[..., None])[..., 0], total.amin(-1))


def test_importance_moves_the_error_between_widths(problem):
    narrow, wide = (
        NestedProblem(WIDTHS, problem.wanted, problem.moments, torch.tensor(importance))
        for importance in ([1.0, 1.0, 1.0, 1.0], [1.0, 4.0, 64.0, 16384.0])
    )
    found = [errors(p, *choose_codes(p)) for p in (narrow, wide)]
    assert found[1][3] < found[0][3] and found[1][1] > found[0][1]


def test_inputs_that_never_vary_do_no_harm():
    moments = torch.zeros(2, 1, 3, 3) + 1e-9 * torch.eye(3)
    wanted = torch.tensor([[[[0.5, -1.0, 0.0]]], [[[0.5, -1.0, 0.0]]]])
    codes, scales = choose_codes(NestedProblem((2, 8), wanted, moments, torch.ones(2)))
    assert torch.isfinite(scales).all() and (scales > 0).all() and codes.shape == (1, 1, 3)
