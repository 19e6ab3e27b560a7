"""Attacks: FGSM against a case worked by hand, limits held exactly, PGD, the matrix, random defense."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anyprec.analysis.attack import (
    ALL,
    RANDOM,
    Attack,
    PixelBounds,
    attack_dedicated,
    attack_matrix,
    input_gradient,
    perturb,
)
from anyprec.data import ArrayData, load_data
from anyprec.errors import AnyprecError, DataError, UncalibratedBits
from anyprec.nn.layers import AnyLinear
from anyprec.nn.switching import set_bits, switch_norms

MEAN, STD = (0.5, 0.25), (0.25, 0.5)  # of two channels


class Linear(nn.Module):
    """Two channels of 1 x 1, two classes, float: the answer can be worked by hand."""

    def __init__(self, weight):
        super().__init__()
        self.flatten = nn.Flatten()
        self.fc = AnyLinear(2, 2, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor(weight))

    def forward(self, x):
        return self.fc(self.flatten(x))


@pytest.fixture
def linear():
    # The gradient of the loss for class 0 is p_1 (w_1 - w_0) = p_1 (1, -3), for class 1 the opposite.
    return Linear([[0.0, 2.0], [1.0, -1.0]])


def column(*values):
    return torch.tensor(values).view(1, -1, 1, 1)


@pytest.fixture(scope="module")
def digits():
    return load_data("digits", "test", limit=60)


# --- One image ------------------------------------------------------------------------------------------------------


def test_fgsm_by_hand(linear):
    images, labels = column(0.5, 0.25).repeat(2, 1, 1, 1), torch.tensor([0, 1])
    moved = perturb(linear, images, labels, 32, Attack(epsilon=0.125), mean=MEAN, std=STD)
    assert torch.equal(moved, torch.cat([column(0.625, 0.125), column(0.375, 0.375)]))


def test_the_gradient_itself(linear):
    x, label = column(0.5, 0.25), torch.tensor([0])
    p1 = torch.softmax(torch.tensor([0.5, 0.25]), 0)[1]  # scores 2 * 0.25 and 0.5 - 0.25
    torch.testing.assert_close(input_gradient(linear, x, label, (32,)), p1 * column(1.0, -3.0))


def test_epsilon_in_pixels_is_divided_by_the_deviation(linear):
    attack = Attack(epsilon=0.03125, scale="pixel")
    moved = perturb(linear, column(0.5, 0.25), torch.tensor([0]), 32, attack, mean=MEAN, std=STD)
    assert torch.equal(
        moved, column(0.625, 0.1875)
    )  # 1/32 is 1/8 of the first channel's deviation, 1/16 of the other's


def test_pixels_stay_between_black_and_white(linear):
    # Channel 0 reaches from -2 to 2, channel 1 from -0.5 to 1.5.
    moved = perturb(linear, column(1.9, -0.4), torch.tensor([0]), 32, Attack(epsilon=0.5), mean=MEAN, std=STD)
    torch.testing.assert_close(moved, column(2.0, -0.5), rtol=0, atol=1e-7)


def test_straight_through_at_one_bit():
    """Inputs are rounded to 0 and 1 there: the true gradient would be zero, and the attack would do nothing."""
    from anyprec.nn.act_quantizer import ActQuantizer
    from anyprec.nn.quantizers import Nested

    model = Linear([[0.0, 2.0], [1.0, -1.0]])
    model.fc = AnyLinear(2, 2, bias=False, quantizer=Nested((1, 32)), act=ActQuantizer())
    with torch.no_grad():
        model.fc.weight.copy_(torch.tensor([[-1.0, 2.0], [1.0, -1.0]]))
    moved = perturb(
        model, column(0.4, 0.6), torch.tensor([0]), 1, Attack(epsilon=0.125), mean=(0.0, 0.0), std=(1.0, 1.0)
    )
    torch.testing.assert_close(moved, column(0.525, 0.475))


@pytest.mark.thorough
def test_epsilon_zero_changes_nothing(trained, digits):
    x = torch.randn(4, 1, 8, 8).clamp(-0.5, 0.5)
    y = torch.zeros(4, dtype=torch.int64)
    for kind in ("fgsm", "pgd"):
        moved = perturb(trained, x, y, 4, Attack(kind, epsilon=0), mean=digits.mean, std=digits.std)
        assert torch.equal(moved, x)


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1.75, 1.75, width=32), min_size=4, max_size=40),
    st.floats(0, 0.5),
    st.sampled_from(["input", "pixel"]),
)
def test_limits_are_exact(values, epsilon, scale):
    """Not even the rounding of x + epsilon goes beyond: differences are taken in double precision."""
    x = torch.tensor(values).view(-1, 1, 1, 1)
    limits = PixelBounds(Attack(epsilon=epsilon, scale=scale), (0.5,), (0.25,))
    low, high = limits.around(x)
    most = epsilon / (0.25 if scale == "pixel" else 1)
    assert (x.double() - low.double()).max() <= most and (high.double() - x.double()).max() <= most
    assert (low <= x).all() and (x <= high).all()


@pytest.mark.parametrize("kind", ["fgsm", "pgd"])
@pytest.mark.parametrize("scale", ["input", "pixel"])
def test_the_bound_holds_for_every_value(trained, digits, kind, scale):
    x = (torch.from_numpy(digits.images).permute(0, 3, 1, 2).float() / 255 - digits.mean[0]) / digits.std[0]
    y = torch.from_numpy(digits.labels)
    attack = Attack(kind, 0.1, scale, steps=5)
    moved = perturb(trained, x, y, 4, attack, mean=digits.mean, std=digits.std)
    away = (moved.double() - x.double()).abs().max().item()
    most = 0.1 if scale == "input" else 0.1 / digits.std[0]
    assert 0.9 * most < away <= most
    pixels = moved * digits.std[0] + digits.mean[0]
    assert pixels.min() > -1e-6 and pixels.max() < 1 + 1e-6


def test_pgd_of_one_step_is_fgsm(trained, digits):
    x, y = torch.randn(8, 1, 8, 8).clamp(-0.5, 0.5), torch.arange(8)
    ranges = {"mean": digits.mean, "std": digits.std}
    for width in (1, 4, 32):
        fgsm = perturb(trained, x, y, width, Attack(epsilon=0.05), **ranges)
        once = Attack("pgd", 0.05, steps=1, step_size=0.05, random_start=False)
        assert torch.equal(perturb(trained, x, y, width, once, **ranges), fgsm)
        assert not torch.equal(perturb(trained, x, y, width, replace(once, random_start=True), **ranges), fgsm)


def test_a_random_start_is_the_images_own(trained, digits):
    """By seed and number of the image, not by batch."""
    x, y = torch.randn(6, 1, 8, 8).clamp(-0.5, 0.5), torch.arange(6)
    options = {"mean": digits.mean, "std": digits.std}
    attack = Attack("pgd", 0.05, steps=1, step_size=1e-9)
    whole = perturb(trained, x, y, 4, attack, first=3, **options)
    parts = [perturb(trained, x[i : i + 2], y[i : i + 2], 4, attack, first=3 + i, **options) for i in (0, 2, 4)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-8)
    assert not torch.allclose(perturb(trained, x, y, 4, replace(attack, seed=1), first=3, **options), whole)


# --- The matrix -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(trained, digits):
    return attack_matrix(trained, digits, attack=Attack(epsilon=0.3), attack_all=True)


def test_matrix(found, trained, digits):
    assert list(found.matrix) == [1, 4, 32, ALL] and found.images == 60
    assert all(list(row) == [1, 4, 32, RANDOM] for row in (found.clean, *found.matrix.values()))
    assert found.clean[32] > 50  # there was something to lose
    for width in (1, 4, 32):
        assert found.matrix[width][width] < found.clean[width] - 10
        row = [found.matrix[width][k] for k in (1, 4, 32)]
        assert min(row) <= found.matrix[width][RANDOM] <= max(row)


def test_matrix_is_the_accuracy_of_each_width_on_anothers_images(found, trained, digits):
    x = (torch.from_numpy(digits.images).permute(0, 3, 1, 2).float() / 255 - digits.mean[0]) / digits.std[0]
    y = torch.from_numpy(digits.labels)
    moved = perturb(trained, x, y, 1, Attack(epsilon=0.3), mean=digits.mean, std=digits.std)
    set_bits(trained, 32)
    with torch.no_grad():
        right = (trained(moved).argmax(1) == y).float().mean().item() * 100
    assert found.matrix[1][32] == pytest.approx(right, abs=2)  # a pixel of 1e-7 may decide an image


@pytest.mark.slow
def test_matrix_repeats_whatever_the_batch(found, trained, digits):
    again = attack_matrix(trained, digits, attack=Attack(epsilon=0.3), attack_all=True)
    assert again == found
    small = attack_matrix(trained, digits, attack=Attack(epsilon=0.3), attack_all=True, batch_size=7)
    for attacked, row in small.matrix.items():
        assert all(row[k] == pytest.approx(found.matrix[attacked][k], abs=4) for k in row)
    other = attack_matrix(trained, digits, attack=Attack(epsilon=0.3, seed=5))
    assert {k: other.clean[k] for k in (1, 4, 32)} == {k: found.clean[k] for k in (1, 4, 32)}
    assert any(other.matrix[k][RANDOM] != found.matrix[k][RANDOM] for k in (1, 4, 32))


def test_pgd_is_the_stronger_attack(found, trained, digits):
    pgd = attack_matrix(trained, digits, [4, 32], Attack("pgd", 0.3, steps=8))
    for width in (4, 32):
        assert pgd.matrix[width][width] <= found.matrix[width][width] + 2
    assert json.loads(json.dumps(pgd.to_dict()))["matrix"]["4"]["random"] == pgd.matrix[4][RANDOM]


def test_the_model_is_left_as_it_was(trained, digits):
    set_bits(trained, 4)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    grads = [None if p.grad is None else p.grad.clone() for p in trained.parameters()]
    trained.train()
    attack_matrix(trained, digits, [1], "pgd")
    assert trained.training and next(iter(switch_norms(trained).values())).key == "4"
    trained.eval()
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    assert all(g is None or torch.equal(p.grad, g) for p, g in zip(trained.parameters(), grads, strict=True))


def test_dedicated_models_are_attacked_at_their_own_width(found, trained, digits):
    dedicated = attack_dedicated({4: trained, 1: trained}, digits, Attack(epsilon=0.3))
    assert dedicated[4] == {"clean": found.clean[4], "attacked": found.matrix[4][4]}
    assert dedicated[1]["attacked"] == found.matrix[1][1]


MISTAKES = {
    "kind": (lambda m, d: Attack("cw"), AnyprecError, "attack='cw' is not known; choose fgsm or pgd"),
    "scale": (lambda m, d: Attack(scale="gray"), AnyprecError, "scale='gray' is not known; choose input or pixel"),
    "epsilon": (lambda m, d: Attack(epsilon=-1), AnyprecError, "epsilon=-1 is not allowed"),
    "no number": (lambda m, d: Attack(epsilon=float("nan")), AnyprecError, "epsilon=nan is not allowed"),
    "steps": (lambda m, d: Attack("pgd", steps=0), AnyprecError, "steps=0 is not allowed; give a whole number of 1"),
    "step size": (lambda m, d: Attack("pgd", step_size=0.0), AnyprecError, "step_size=0.0 is not allowed"),
    "seed": (lambda m, d: Attack(seed=-1), AnyprecError, "seed=-1 is not allowed"),
    "width": (lambda m, d: attack_matrix(m, d, [3]), UncalibratedBits, "bits=3 is not one of this model's widths"),
    "data": (lambda m, d: attack_matrix(m, [1]), DataError, "data is a list; attacks are for images"),
    "shape": (
        lambda m, d: perturb(m, torch.zeros(2, 3), torch.zeros(2), 1, Attack(), mean=(0,), std=(1,)),
        DataError,
        r"images have shape \(2, 3\)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, error, message, trained, digits):
    with pytest.raises(error, match=message):
        call(trained, digits)


def test_maps_are_not_attacked():
    class Maps(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = AnyLinear(2, 2)

        def forward(self, x):
            return self.conv(x)

    data = ArrayData(np.zeros((3, 2, 2, 1), np.uint8), np.zeros(3, np.int64), ("a", "b"), (0.5,), (0.5,))
    with pytest.raises(AnyprecError, match="Maps does not give one score a class; attacks are for classification"):
        attack_matrix(Maps(), data, [1])
