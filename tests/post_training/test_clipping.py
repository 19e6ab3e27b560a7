"""The analytical clip against the published constants, a minimisation of the closed form, and of the true error."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from anyprec.errors import AnyprecError
from anyprec.post_training.clipping import ERRORS, PRIORS, best_clip, check_prior

# Banner et al. (2019): alpha / b and alpha / sigma; they print two digits behind the point, rounded or cut.
PUBLISHED = {"laplace": {2: 2.83, 3: 3.89, 4: 5.03}, "gauss": {2: 1.71, 3: 2.15, 4: 2.55}}
DENSITIES = {
    "laplace": lambda x: math.exp(-abs(x)) / 2,
    "gauss": lambda x: math.exp(-x * x / 2) / math.sqrt(2 * math.pi),
}
CASES = [(prior, bits) for prior in PRIORS for bits in (2, 3, 4)]


def cut_off(prior, clip):
    return 2 * quad(lambda x: (x - clip) ** 2 * DENSITIES[prior](x), clip, clip + 60)[0]


def at_middles(prior, clip, bits):
    """True error of 2^bits equal bins over [-clip, clip], each rounded to its middle; what is beyond, to the last."""
    step, bins = 2 * clip / 2**bits, 2 ** (bits - 1)  # the other half is the same
    error = lambda x, middle: (x - middle) ** 2 * DENSITIES[prior](x)  # noqa: E731
    inside = sum(quad(error, i * step, (i + 1) * step, args=((i + 0.5) * step,))[0] for i in range(bins))
    return 2 * inside + 2 * quad(error, clip, clip + 60, args=(clip - step / 2,))[0]


def at_ends(prior, clip, bits):
    """True error of `channels.snap`: 2^bits levels from -clip to clip, both ends among them."""
    step, above = 2 * clip / (2**bits - 1), 2 ** (bits - 1)
    levels = [(i + 0.5) * step for i in range(above)]
    error = lambda x, level: (x - level) ** 2 * DENSITIES[prior](x)  # noqa: E731
    spans = [(level - step / 2, min(level + step / 2, clip)) for level in levels]
    return 2 * sum(quad(error, *span, args=(m,))[0] for span, m in zip(spans, levels, strict=True)) + cut_off(
        prior, clip
    )


@pytest.mark.parametrize(("prior", "bits"), CASES)
def test_published_constants(prior, bits):
    assert best_clip(prior, bits) == pytest.approx(PUBLISHED[prior][bits], abs=0.01)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("bits", range(1, 10))
def test_the_root_is_the_minimum_of_the_closed_form(prior, bits):
    least = minimize_scalar(lambda clip: ERRORS[prior](clip, bits), bounds=(0.1, 20), method="bounded")
    assert best_clip(prior, bits) == pytest.approx(least.x, rel=1e-3)


@pytest.mark.parametrize("bits", range(1, 10))
def test_laplace_has_a_closed_form(bits):
    """alpha / b = W(3 * 4^bits): z e^z = 3 * 4^bits is what makes the slope zero."""
    assert best_clip("laplace", bits) == pytest.approx(lambertw(3 * 4**bits).real, rel=1e-9)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("clip", [0.5, 1.7, 4.0])
def test_the_cut_off_part_is_the_integral(prior, clip):
    rounding = clip**2 / (3 * 4**3)
    assert ERRORS[prior](clip, 3) - rounding == pytest.approx(cut_off(prior, clip), rel=1e-6)


@pytest.mark.parametrize("true_error", [at_middles, at_ends])
@pytest.mark.parametrize(("prior", "bits"), CASES)
def test_close_to_the_best_clip_of_the_true_error(prior, bits, true_error):
    """The closed form takes the density as flat inside a bin, and what is cut off as rounded to the very end.

    What that costs, against the best clip of a real quantizer: 10 % of the error at 2 bit, 4 % at 3, 2 % at 4.
    """
    least = minimize_scalar(lambda clip: true_error(prior, clip, bits), bounds=(0.5, 9), method="bounded")
    assert true_error(prior, best_clip(prior, bits), bits) <= {2: 1.1, 3: 1.04, 4: 1.02}[bits] * least.fun
    assert best_clip(prior, bits) == pytest.approx(least.x, rel={2: 0.25, 3: 0.1, 4: 0.05}[bits])


@pytest.mark.parametrize(("bits", "step"), [(2, 0.9957), (3, 0.5860), (4, 0.3352)])
def test_the_true_error_is_right(bits, step):
    """Steps of the best uniform quantizer of a Gaussian, after J. Max (1960), table II."""
    least = minimize_scalar(lambda clip: at_middles("gauss", clip, bits), bounds=(0.5, 9), method="bounded")
    assert 2 * least.x / 2**bits == pytest.approx(step, abs=1e-3)


@pytest.mark.parametrize(("prior", "bits"), CASES)
def test_behind_a_relu_it_is_one_bit_more(prior, bits):
    """Half a density over [0, clip] in 2^bits bins: half the error of a whole one in twice as many bins."""
    assert best_clip(prior, bits, half=True) == best_clip(prior, bits + 1)
    clip, step = best_clip(prior, bits, half=True), best_clip(prior, bits, half=True) / 2**bits
    error = lambda x, middle: (x - middle) ** 2 * DENSITIES[prior](x)  # noqa: E731
    half = sum(quad(error, i * step, (i + 1) * step, args=((i + 0.5) * step,))[0] for i in range(2**bits))
    half += quad(error, clip, clip + 60, args=(clip - step / 2,))[0]
    assert half == pytest.approx(at_middles(prior, clip, bits + 1) / 2, rel=1e-9)


@given(st.sampled_from(PRIORS), st.integers(0, 8), st.floats(0.01, 40))
def test_no_other_clip_is_better(prior, bits, clip):
    assert ERRORS[prior](best_clip(prior, bits), bits) <= ERRORS[prior](clip, bits) * (1 + 1e-12)


@pytest.mark.parametrize("prior", PRIORS)
def test_more_bits_clip_further_out_and_err_less(prior):
    clips = [best_clip(prior, bits) for bits in range(10)]
    errors = [ERRORS[prior](clip, bits) for bits, clip in enumerate(clips)]
    assert clips == sorted(clips) and errors == sorted(errors, reverse=True)


def test_an_unknown_prior():
    with pytest.raises(AnyprecError, match="prior='cauchy' is not known; choose one of laplace, gauss"):
        check_prior("cauchy")
    with pytest.raises(AnyprecError, match="prior"):
        best_clip("uniform", 4)
