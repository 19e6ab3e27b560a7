"""Channels: statistics, bits, rounding, bias correction."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyprec.post_training.channels import ChannelStatistics, allocate_bits, clip_range, correct_bias, round_to_levels

spreads = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40).map(torch.tensor)


def dice(seed=0):
    return torch.Generator().manual_seed(seed)


def laplace(*shape, seed=0):
    u = torch.rand(*shape, generator=dice(seed)).clamp_min(1e-12) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs().clamp_max(0.4999999))


# --- Bits -------------------------------------------------------------------------------------------------


def test_worked_example():
    assert allocate_bits(torch.tensor([1.0, 8.0]), 2).tolist() == [1, 3]
    assert allocate_bits(torch.tensor([1.0, 1.0, 1.0]), 4).tolist() == [4, 4, 4]
    assert allocate_bits(torch.tensor([0.0, 1.0]), 2).tolist() == [0, 3]
    assert allocate_bits(torch.zeros(3), 4).tolist() == [0, 0, 0]
    assert allocate_bits(torch.tensor([1e-9, 1e9]), 8).tolist() == [0, 8]


def test_no_other_bits_err_less():
    """Of all bits with as many steps in all, those allocated err least.

    Spreads of 2^(1.5 m) make 2^bits a power of two, so that nothing is lost by rounding the logarithm.
    """
    spread = torch.tensor([2.0 ** (1.5 * m) for m in (1, 1, 2, 3)])  # shares 1/8, 1/8, 1/4, 1/2
    got = allocate_bits(spread, 3).tolist()
    assert got == [2, 2, 3, 4]

    def error(bits):
        return sum(float(s) ** 2 / 4**b for s, b in zip(spread, bits, strict=True))

    others = [bits for bits in itertools.product(range(6), repeat=4) if sum(2**b for b in bits) <= 4 * 2**3]
    assert len(others) > 100 and min(map(error, others)) == pytest.approx(error(got))


@given(spreads, st.integers(1, 8), st.sampled_from(["steps", "bits"]))
def test_bits_are_in_range_and_grow_with_the_spread(spread, bits, quota):
    got = allocate_bits(spread, bits, quota)
    assert got.dtype == torch.int64 and got.min() >= 0 and got.max() <= 8
    order = spread.argsort()
    assert got[order].tolist() == sorted(got.tolist())


@given(spreads, st.integers(1, 8))
def test_the_quota_of_steps_holds_but_for_rounding(spread, bits):
    """Rounding a logarithm is at most a factor sqrt(2); a channel of less than a step counts as one."""
    assert float((2.0 ** allocate_bits(spread, bits)).sum()) <= math.sqrt(2) * len(spread) * 2**bits * (1 + 1e-9) + len(
        spread
    )


@given(spreads, st.integers(1, 8))
def test_the_quota_of_bits_holds(spread, bits):
    got = allocate_bits(spread, bits, "bits").double().mean()
    assert got <= bits
    below = allocate_bits(spread, bits, "steps").double().mean()
    assert got >= min(below, bits) - 0.5 or below > bits


@given(spreads, st.integers(1, 4), st.floats(0.01, 100))
def test_only_the_proportion_counts(spread, bits, factor):
    a, b = allocate_bits(spread, bits), allocate_bits(spread.double() * factor, bits)
    assert (a - b).abs().max() <= 1  # a logarithm at .5 may be rounded either way
    assert (a != b).double().mean() <= 0.5 or len(spread) < 3


# --- Statistics -------------------------------------------------------------------------------------------


def test_batches_add_up():
    x = torch.randn(3, 400, generator=dice()) * torch.tensor([[1.0], [10.0], [0.1]]) + 2
    seen, whole = ChannelStatistics(), ChannelStatistics()
    for part in x.split([100, 250, 50], dim=1):
        seen.add(part)
    whole.add(x)
    torch.testing.assert_close(seen.mean, x.double().mean(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen.scale("gauss", False), x.double().std(1, correction=0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(seen.scale("gauss", True), whole.scale("gauss", True), rtol=1e-5, atol=1e-6)
    assert seen.low.tolist() == x.amin(1).double().tolist() and seen.high.tolist() == x.amax(1).double().tolist()
    # Around each batch's own mean: a little less than around that of all.
    torch.testing.assert_close(seen.scale("laplace", False), whole.scale("laplace", False), rtol=0.05, atol=0)


@pytest.mark.parametrize("zeros", [0.1, 0.5, 0.9])
def test_the_scale_behind_a_relu_does_not_see_the_zeros(zeros):
    x = -torch.rand(1, 200_000, generator=dice()).clamp_min(1e-12).log() * 3  # exponential, b = 3
    x = torch.where(torch.rand(x.shape, generator=dice(1)) < zeros, 0.0, x)
    seen = ChannelStatistics()
    seen.add(x)
    assert float(seen.scale("laplace", half=True)) == pytest.approx(3, rel=0.05)


def test_the_clip_is_that_of_the_prior_and_never_beyond_the_data():
    x = laplace(2, 100_000) * torch.tensor([[1.0], [5.0]]) + 1
    seen = ChannelStatistics()
    seen.add(x)
    low, high = clip_range(seen, torch.tensor([4, 2]), "laplace", half=False)
    torch.testing.assert_close(high, 1 + torch.tensor([5.03, 5 * 2.83]).double(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(low, 1 - torch.tensor([5.03, 5 * 2.83]).double(), rtol=0.02, atol=0.02)
    short = ChannelStatistics()
    short.add(torch.tensor([[0.0, 1.0, 1.0, 1.0]]))
    assert [float(end) for end in clip_range(short, torch.tensor([8]), "laplace", half=True)] == [0.0, 1.0]
    assert [float(end) for end in clip_range(short, torch.tensor([8]), None, half=False)] == [0.0, 1.0]


# --- Rounding ---------------------------------------------------------------------------------------------


@given(
    st.integers(1, 8), st.floats(-5, 5), st.floats(0.01, 10), st.lists(st.floats(-20, 20), min_size=1, max_size=50),
    st.booleans(),
)  # fmt: skip
def test_levels(bits, low, span, values, middles):
    x = torch.tensor(values, dtype=torch.float64)[None]
    ends = [torch.tensor([[v]], dtype=torch.float64) for v in (low, low + span, bits, 0.0)]
    y = round_to_levels(x, *ends, middles=middles)
    assert y.min() >= low - 1e-9 and y.max() <= low + span + 1e-9
    inside = (x >= low) & (x <= low + span)
    step = span / (2**bits if middles else 2**bits - 1)
    assert ((y - x)[inside].abs() <= step / 2 + 1e-9).all()
    assert len(y.unique()) <= 2**bits
    torch.testing.assert_close(round_to_levels(y, *ends, middles=middles), y)


def test_zero_is_a_level_behind_a_relu():
    y = round_to_levels(
        torch.tensor([[0.0, 0.3, 9.0]]), torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[2.0]]), torch.ones(1, 1)
    )
    torch.testing.assert_close(y, torch.tensor([[0.0, 1 / 3, 1.0]]))


def test_no_bits_and_no_spread():
    one = torch.ones(1, 1)
    assert round_to_levels(torch.tensor([[3.0, 5.0]]), one, 7 * one, 0 * one, 4 * one).tolist() == [[4.0, 4.0]]
    assert round_to_levels(torch.tensor([[3.0, 5.0]]), 2 * one, 2 * one, 8 * one, 9 * one).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_clipping_a_laplace_channel_beats_its_whole_range(bits):
    x = laplace(1, 50_000)
    seen = ChannelStatistics()
    seen.add(x)
    width = torch.tensor([bits])

    def error(prior):
        low, high = (end.float()[:, None] for end in clip_range(seen, width, prior, half=False))
        return float((round_to_levels(x, low, high, width.float()[:, None], 0 * low, middles=True) - x).square().mean())

    assert error("laplace") < error("gauss") < error(None)
    assert error("laplace") < 0.5 * error(None)


# --- Bias correction --------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(0, 2**31))
def test_mean_and_norm_come_back(bits, seed):
    w = torch.randn(4, 30, generator=dice(seed), dtype=torch.float64) * torch.tensor([[1e-3], [0.1], [1.0], [50.0]])
    low, high, mean = w.amin(1, keepdim=True), w.amax(1, keepdim=True), w.mean(1, keepdim=True)
    made = round_to_levels(w, low, high, torch.full((4, 1), float(bits), dtype=torch.float64), mean)
    after = correct_bias(made, w)
    torch.testing.assert_close(after.mean(1), w.mean(1), rtol=1e-9, atol=1e-12)
    if bits:
        torch.testing.assert_close((after - after.mean(1, keepdim=True)).norm(dim=1), (w - mean).norm(dim=1))
        assert all(len(row.unique()) <= 2**bits for row in made)
        assert all(len((row * 1e9).round().unique()) <= 2**bits for row in after)
    else:
        torch.testing.assert_close(after, mean.expand_as(w))


def test_a_constant_channel_stays():
    w = torch.full((1, 5), 0.25)
    assert correct_bias(w.clone(), w).tolist() == w.tolist()
    assert correct_bias(torch.zeros(1, 5), w).tolist() == w.tolist()
