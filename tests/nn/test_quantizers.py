"""One contract for every weight quantizer at every width, and the activation quantizer.

The references here are written from the equations alone, in float64, with the straight-through estimator
spelled out as x + (q - x).detach(): they share no code with what they check.
"""

import copy
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sampling import sampled
from torch import Tensor, nn

from anyprec.errors import AnyprecError, DataError, UncalibratedBits, UnsupportedBits
from anyprec.nn.act_quantizer import ActQuantizer, best_range, sample_values
from anyprec.nn.gradients import clip_round, clip_round_in_range
from anyprec.nn.quantizers import QUANTIZERS, Lsq, kurtosis_penalty, make_quantizer, set_sign_window
from anyprec.nn.width_tables import nearest_width

NAMES = sorted(QUANTIZERS)
NESTING = sorted(name for name in NAMES if QUANTIZERS[name].nests)
WIDTHS = range(1, 9)

every_quantizer = pytest.mark.parametrize("name", NAMES)
every_width = pytest.mark.parametrize("bits", WIDTHS)


def weights(n: int = 4000, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(0.1).to(dtype)


def fitted(name: str, w: Tensor, scale: str = "mean"):
    """A quantizer of w's dtype with its learned parts, if any, started at w."""
    quantizer = make_quantizer(name, WIDTHS, scale).to(w.dtype)
    quantizer.fit(w, WIDTHS)
    return quantizer


def ste(x: Tensor, q: Tensor) -> Tensor:
    return x + (q - x).detach()


def reference(name: str, w: Tensor, bits: int, scale: Tensor, r: Tensor | None = None) -> Tensor:
    """The weight at `bits` from the equations, differentiable by plain autograd."""
    t = torch.tanh(w)
    x = torch.clamp(w / (2 * r) + 0.5, 0, 1) if name == "lsq" else t / (2 * t.abs().max()) + 0.5
    if name == "dorefa":
        top = 2**bits - 1
        return scale * (2 * ste(x * top, torch.round(x * top)) / top - 1)
    code = torch.clamp(torch.floor(256 * x), max=255).long() >> (8 - bits)
    return scale * ste(2 * x - 1, (2 * code + 1 - 2**bits) / 2**bits)


# --- The contract of weight quantizers ----------------------------------------------------------------------


@every_quantizer
@every_width
def test_codes_fill_their_range_and_no_more(name, bits):
    w = torch.cat([weights(), -weights()])  # so that both ends are met
    codes = fitted(name, w).codes(w, bits)
    assert codes.dtype == torch.uint8 and codes.shape == w.shape
    assert codes.min() == 0 and codes.max() == 2**bits - 1


@every_quantizer
@every_width
def test_values_are_distinct_symmetric_and_within_one(name, bits):
    quantizer = make_quantizer(name, WIDTHS)
    values = quantizer.values(torch.arange(2**bits), bits)
    assert values.abs().max() <= 1
    assert (values.diff() > 0).all()
    assert torch.allclose(values, -values.flip(0), atol=1e-6)
    assert (values != 0).all()  # no code is wasted on zero: 1 bit is the sign


@every_quantizer
@every_width
def test_codes_to_values_to_codes(name, bits):
    """Weights that sit on the values of all codes get those codes back."""
    quantizer = make_quantizer(name, WIDTHS).double()
    codes = torch.arange(2**bits)
    values = quantizer.values(codes, bits).double()
    pin = torch.ones(1, dtype=torch.float64)  # the largest weight of the layer, which maps to 1
    w = torch.cat([values, pin]) if name == "lsq" else torch.atanh(0.9 * torch.cat([values, pin]))
    assert quantizer.codes(w, bits)[:-1].tolist() == codes.tolist()


@every_quantizer
@every_width
def test_monotone_in_the_weight(name, bits):
    w = weights().sort().values
    codes = fitted(name, w).codes(w, bits).int()
    assert (codes.diff() >= 0).all()
    assert torch.equal(codes > 2**bits / 2 - 1, w > 0)  # the first bit is the sign


@every_quantizer
def test_the_error_does_not_grow_with_the_width(name):
    quantizer = fitted(name, w := weights())
    x = quantizer.normalize(w).detach()
    errors = [float((quantizer.values(quantizer.codes(w, k), k) - (2 * x - 1)).abs().mean()) for k in WIDTHS]
    assert errors == sorted(errors, reverse=True)
    assert errors[7] < errors[0] / 64


@every_quantizer
@every_width
@pytest.mark.parametrize("scale", ["mean", "learned"])
def test_value_and_gradient_are_those_of_the_equations(name, bits, scale):
    w = weights(500).requires_grad_()
    quantizer = fitted(name, w, scale)
    s = quantizer.scales[str(bits)].detach() if quantizer.learned else w.detach().abs().mean()
    r = quantizer.range.detach() if name == "lsq" else None
    ours = quantizer.weight(quantizer.normalize(w), w, bits)
    theirs = reference(name, w, bits, s, r)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    toward = torch.randn(w.shape, generator=torch.Generator().manual_seed(1), dtype=w.dtype)
    (mine,) = torch.autograd.grad(ours, w, toward)
    (plain,) = torch.autograd.grad(theirs, w, toward)
    assert mine.abs().max() > 0
    assert torch.allclose(mine, plain, rtol=1e-12, atol=1e-14)


@every_quantizer
@every_width
def test_a_learned_scale_below_zero_turns_no_weight_round(name, bits):
    w = weights(500)
    quantizer = fitted(name, w, "learned")
    before = quantizer.weight(quantizer.normalize(w), w, bits)
    with torch.no_grad():
        quantizer.scales[str(bits)].neg_()
    assert torch.equal(quantizer.weight(quantizer.normalize(w), w, bits), before)
    assert quantizer.scale(w, bits) > 0


@every_quantizer
@pytest.mark.parametrize("scale", ["mean", "learned"])
def test_a_sign_window_shapes_the_gradient_of_1_bit_alone(name, scale):
    w = weights(500).requires_grad_()
    quantizer = fitted(name, w, scale)

    def gradient(bits, window):
        set_sign_window(torch.nn.Sequential(quantizer), window)
        x = quantizer.normalize(w).detach().requires_grad_()
        value = quantizer.weight(x, w, bits)
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    for bits in (1, 2, 8):
        value, plain = gradient(bits, 0.0)
        same, shaped = gradient(bits, 0.25)
        assert torch.equal(value, same)
        distance = (2 * quantizer.normalize(w) - 1).abs().detach()
        factor = (1 - distance / 0.25).clamp(min=0) if bits == 1 else torch.ones_like(distance)
        assert torch.allclose(shaped, plain * factor, rtol=1e-12, atol=1e-14)
        assert (factor == 0).any() == (bits == 1)


@every_quantizer
def test_the_weight_is_scale_times_the_value_of_its_code(name):
    w = weights(dtype=torch.float32)
    for scale in ("mean", "learned"):
        quantizer = fitted(name, w, scale)
        for bits in WIDTHS:
            ours = quantizer.weight(quantizer.normalize(w), w, bits)
            packed = quantizer.scale(w, bits) * quantizer.values(quantizer.codes(w, bits), bits)
            assert torch.equal(ours, packed)


def test_the_gradient_goes_through_the_maximum_too():
    """Equation 4 divides by max|tanh(w)|: the largest weight is pushed by all others."""
    w = torch.tensor([0.5, 0.1, -0.2], dtype=torch.float64, requires_grad=True)
    quantizer = make_quantizer("dorefa", WIDTHS)
    quantizer.weight(quantizer.normalize(w), w, 4)[1].backward()  # the second weight alone
    assert w.grad[0] < 0 and w.grad[1] > 0 and w.grad[2] == 0


@every_quantizer
def test_float_weight(name):
    quantizer = fitted(name, w := weights())
    ours = quantizer.float_weight(w)
    if name == "dorefa":  # as the authors run it
        t = torch.tanh(w)
        assert torch.allclose(ours, t / t.abs().max() * w.abs().mean(), rtol=1e-12)
        x, m = quantizer.normalize(w), quantizer.magnitude(w)
        assert torch.equal(quantizer.float_weight(w, x, m), ours)
    else:
        assert ours is w


# --- Nesting ------------------------------------------------------------------------------------------------

ANY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
EXTREMES = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.2e-38, 3.4e38, -3.4e38, 1.0, -1.0, 1e-7])


@pytest.mark.thorough
@pytest.mark.parametrize("name", NESTING)
@given(st.lists(ANY_FLOAT | EXTREMES, min_size=1, max_size=40))
@example([0.0])
@example([0.0] * 7)
@example([1e-45, -1e-45, 0.0])
@example([3.4e38, 1e-45, -3.4e38])
@example([0.25])
def test_the_codes_of_k_bits_are_the_first_k_bits_of_eight(name, values):
    w = torch.tensor(values, dtype=torch.float32)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        w_ = w.to(dtype)
        if not torch.isfinite(w_).all():
            continue
        quantizer = make_quantizer(name, WIDTHS).to(dtype)
        eight = quantizer.codes(w_, 8).int()
        for k in WIDTHS:
            assert torch.equal(quantizer.codes(w_, k).int(), eight >> (8 - k))


@pytest.mark.parametrize("name", NESTING)
def test_values_are_sums_of_signed_bit_planes(name):
    """v_k = sum of b_i 2^-i, b_i = +1 or -1 the i-th most significant bit: what the engine computes with."""
    quantizer = make_quantizer(name, WIDTHS)
    codes = torch.arange(256)
    for k in WIDTHS:
        planes = [((codes >> (8 - i)) & 1) * 2.0 - 1 for i in range(1, k + 1)]
        expected = sum(plane * 2.0**-i for i, plane in enumerate(planes, 1))
        assert torch.equal(quantizer.values(codes >> (8 - k), k), expected)


def test_dorefa_does_not_nest():
    """Cutting its 8-bit codes gives other codes than it was trained with, for some per cent of weights."""
    quantizer = make_quantizer("dorefa", WIDTHS)
    w = weights(20000)
    eight = quantizer.codes(w, 8).int()
    wrong = {k: float((quantizer.codes(w, k).int() != eight >> (8 - k)).double().mean()) for k in range(2, 8)}
    assert all(0 < share < 0.15 for share in wrong.values())
    assert wrong[2] > 0.01 and wrong[3] > 0.05 and wrong[4] > 0.05


def test_worked_example():
    """x = 0.7: 179 = 0b10110011, cut to 0b1, 0b10, 0b1011."""
    t = torch.tensor([0.4, 1.0], dtype=torch.float64)  # (1 + 0.4) / 2 = 0.7; the second is the maximum
    w = torch.atanh(t * 0.5)
    quantizer = make_quantizer("nested", WIDTHS)
    assert [int(quantizer.codes(w, k)[0]) for k in (8, 1, 2, 4)] == [179, 1, 2, 11]
    assert [float(quantizer.values(torch.tensor([c]), k)) for c, k in ((1, 1), (2, 2))] == [0.5, 0.25]
    assert int(make_quantizer("dorefa", WIDTHS).codes(w, 2)[0]) == 2  # round(2.1)


def test_worked_numbers_of_the_page():
    """docs/concepts/quantizers.md, "Worked numbers" and "Gradient"."""
    w = torch.tensor([0.80, 0.30, -0.10, -0.45], requires_grad=True)
    nested, dorefa = make_quantizer("nested", WIDTHS), make_quantizer("dorefa", WIDTHS)
    x = nested.normalize(w)
    assert x.tolist() == pytest.approx([1, 0.7193, 0.4250, 0.1823], abs=5e-5)
    table = {
        8: ([255, 184, 108, 46], [0.411, 0.182, -0.063, -0.263], [255, 183, 108, 46]),
        4: ([15, 11, 6, 2], [0.387, 0.180, -0.077, -0.284], [15, 11, 6, 3]),
        2: ([3, 2, 1, 0], [0.309, 0.103, -0.103, -0.309], [3, 2, 1, 1]),
        1: ([1, 1, 0, 0], [0.206, 0.206, -0.206, -0.206], [1, 1, 0, 0]),
    }
    for bits, (codes, values, theirs) in table.items():
        assert nested.codes(w, bits).tolist() == codes
        assert nested.weight(x, w, bits).tolist() == pytest.approx(values, abs=6e-4)
        assert dorefa.codes(w, bits).tolist() == theirs
        (grad,) = torch.autograd.grad(nested.weight(x, w, bits)[1], w, retain_graph=True)
        assert grad.tolist() == pytest.approx([-0.1524, 0.5685, 0, 0], abs=5e-5)


# --- Layers that are odd ------------------------------------------------------------------------------------


@every_quantizer
@pytest.mark.parametrize("scale", ["mean", "learned"])
@pytest.mark.parametrize(
    "values", [[0.0] * 9, [0.3], [0.3] * 9, [1e-45, 0.0], [1e-30, -1e-30], [1e30, -1.0], [-5.0, 5.0]]
)
def test_odd_layers_stay_finite(name, scale, values):
    w = torch.tensor(values, requires_grad=True)
    quantizer = fitted(name, w, scale)
    for k in WIDTHS:
        weight = quantizer.weight(quantizer.normalize(w), w, k)
        assert torch.isfinite(weight).all()
        (grad,) = torch.autograd.grad(weight.sum(), w)
        assert torch.isfinite(grad).all()
        assert grad.abs().max() <= 1e3 * max(1, weight.abs().max())  # an all-zero layer must not explode


@every_quantizer
def test_a_layer_that_becomes_zero_after_its_scales_were_fitted(name):
    """As where a network starts its last layers at zero: 1 / max|tanh(w)| must not blow the gradient up."""
    quantizer = fitted(name, weights(9, torch.float32), "learned")
    w = torch.zeros(9, requires_grad=True)
    for k in WIDTHS:
        (grad,) = torch.autograd.grad(quantizer.weight(quantizer.normalize(w), w, k).sum(), w)
        assert grad.abs().max() < 10


def test_lsq_can_train_a_constant_layer():
    """A range from the standard deviation would be zero here, and clip all gradients away."""
    w = torch.full((8,), 0.3, requires_grad=True)
    quantizer = fitted("lsq", w)
    quantizer.weight(quantizer.normalize(w), w, 2).sum().backward()
    assert (w.grad != 0).all()


@every_quantizer
def test_half_precision_weights_get_the_codes_of_single_precision(name):
    half = weights(dtype=torch.bfloat16)
    single = half.float()
    quantizer = fitted(name, single)
    for k in WIDTHS:
        assert torch.equal(quantizer.codes(half, k), quantizer.codes(single, k))
        weight = quantizer.weight(quantizer.normalize(half), half, k)
        assert weight.dtype == torch.bfloat16
        if name != "lsq":
            expected = quantizer.magnitude(half) * quantizer.values(quantizer.codes(half, k), k)
            assert torch.equal(weight, expected.bfloat16())


@every_quantizer
def test_memory_format_is_kept(name):
    w = weights(8 * 4 * 9).float().view(8, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    quantizer = fitted(name, w)
    weight = quantizer.weight(quantizer.normalize(w), w, 2)
    assert weight.is_contiguous(memory_format=torch.channels_last)


# --- Learned scales -----------------------------------------------------------------------------------------


@every_quantizer
@every_width
def test_fit_is_the_least_squares_scale(name, bits):
    w = weights()
    quantizer = fitted(name, w, "learned")
    v = quantizer.values(quantizer.codes(w, bits), bits)

    def error(factor: float) -> float:
        return float((quantizer.scales[str(bits)].detach() * factor * v - w).square().sum())

    assert error(1.0) < error(1.01) and error(1.0) < error(0.99)


def test_lsq_gradients_of_range_and_scale():
    """The reference's, times 1 / sqrt(n levels), as LSQ balances them."""
    w = weights(300)
    quantizer = fitted("lsq", w)
    assert (w.abs() > quantizer.range).any()  # some weights are clipped
    toward = torch.randn(w.shape, generator=torch.Generator().manual_seed(1), dtype=w.dtype)
    for bits, levels in ((1, 1), (2, 1), (4, 7), (8, 127)):
        quantizer.zero_grad()
        quantizer.weight(quantizer.normalize(w), w, bits).backward(toward)
        s = quantizer.scales[str(bits)].detach().clone().requires_grad_()
        r = quantizer.range.detach().clone().requires_grad_()
        reference("lsq", w, bits, s, r).backward(toward)
        assert torch.allclose(quantizer.scales[str(bits)].grad, s.grad / math.sqrt(w.numel() * levels))
        assert torch.allclose(quantizer.range.grad, r.grad / math.sqrt(w.numel() * 127))


def test_lsq_range_may_pass_through_zero():
    w = weights()
    quantizer = fitted("lsq", w)
    before = quantizer.codes(w, 4)
    with torch.no_grad():
        quantizer.range.neg_()
    assert torch.equal(quantizer.codes(w, 4), before)


def test_a_width_added_later_starts_at_its_neighbor():
    w = weights()
    quantizer = make_quantizer("nested", (1, 2, 8, 32), "learned")
    quantizer.fit(w, (1, 2, 8, 32))
    with pytest.raises(UncalibratedBits, match=r"bits=3 has no learned scale here \(only 1, 2, 8\)"):
        quantizer.weight(quantizer.normalize(w), w, 3)
    quantizer.add_width(3)
    quantizer.add_width(32)  # float has no scale
    assert sorted(quantizer.scales) == ["1", "2", "3", "8"]
    assert quantizer.scales["3"].item() == quantizer.scales["2"].item()
    assert quantizer.scales["3"].data_ptr() != quantizer.scales["2"].data_ptr()


def test_no_neighbor_at_all():
    with pytest.raises(UncalibratedBits, match="no width has a learned scale"):
        make_quantizer("nested", (32,), "learned").add_width(3)


@pytest.mark.parametrize(("bits", "nearest"), [(3, 4), (5, 4), (6, 8), (7, 8), (1, 1)])
def test_nearest_width(bits, nearest):
    assert nearest_width(bits, (1, 2, 4, 8)) == nearest


@pytest.mark.parametrize("name", ["nested", "lsq"])
def test_state_dict_with_widths_the_model_was_not_built_with(name):
    w = weights()
    saved = make_quantizer(name, (2, 8), "learned").double()
    saved.fit(w, (2, 8))
    saved.add_width(5)
    for widths in ((2, 8), (32,)):
        fresh = make_quantizer(name, widths, "learned").double()
        fresh.load_state_dict(saved.state_dict())
        assert torch.equal(fresh.scale(w, 5), saved.scale(w, 5))
        assert fresh.scales["5"].dtype == torch.float64 and fresh.scales["5"].requires_grad
    single = make_quantizer(name, (2, 8), "learned")
    single.load_state_dict(saved.state_dict())
    assert single.scales["5"].dtype == torch.float32  # the model's type, not the checkpoint's


def test_deepcopy_shares_nothing():
    quantizer = fitted("lsq", weights())
    twin = copy.deepcopy(quantizer)
    with torch.no_grad():
        twin.range.zero_()
        twin.scales["2"].zero_()
    assert quantizer.range.item() > 0 and quantizer.scales["2"].item() > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: make_quantizer("int4", WIDTHS),
            "quantizer='int4' is not known; choose one of nested, dorefa",
        ),
        (
            lambda: make_quantizer("nested", WIDTHS, "max"),
            "scale='max' is not known; choose 'mean' or 'learned'",
        ),
        (
            lambda: ActQuantizer(clip="soft"),
            "clip='soft' is not known; choose 'fixed', 'calibrated' or 'learned'",
        ),
    ],
)
def test_unknown_choices(make, words):
    with pytest.raises(AnyprecError) as caught:
        make()
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("bits", [0, 9, -1, 32])
def test_widths_without_codes(bits):
    for call in (
        lambda: make_quantizer("nested", WIDTHS).codes(torch.ones(3), bits),
        lambda: make_quantizer("nested", WIDTHS).values(torch.ones(3), bits),
        lambda: ActQuantizer().codes(torch.ones(3), bits),
    ):
        with pytest.raises(UnsupportedBits, match=rf"bits={bits} has no integer codes; choose 1\.\.8"):
            call()


# --- Activations --------------------------------------------------------------------------------------------


def calibrated(r: float, clip: str = "calibrated", signed: bool = False) -> ActQuantizer:
    act = ActQuantizer(WIDTHS, signed=signed, clip=clip, rectify=False).double()
    with torch.no_grad():
        for parameter in act.ranges.values():
            parameter.fill_(r)
    return act


def inputs(n: int = 2000, spread: float = 1.0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * spread


@every_width
def test_unsigned_codes_values_and_range(bits):
    act, y = ActQuantizer(), inputs()
    expected = torch.round(y.clamp(0, 1) * (2**bits - 1))
    assert torch.equal(act.codes(y, bits).double(), expected)
    assert torch.equal(act(y, bits), expected / (2**bits - 1))
    assert set(act.codes(torch.linspace(-1, 2, 2000), bits).tolist()) == set(range(2**bits))
    assert torch.equal(act(act(y, bits), bits), act(y, bits))  # what is on the grid stays there


@every_width
def test_halves_round_to_even(bits):
    """Of inputs half way between codes c and c + 1, both of activations and of dorefa weights."""
    top = 2**bits - 1
    c = torch.arange(top, dtype=torch.float64)
    y = (c + 0.5) / top
    exact = y * top == c + 0.5  # division rounds: not all of them are half way
    assert exact[::2].any() and (bits == 1 or exact[1::2].any())
    c, y = c[exact], y[exact]
    even = c + c % 2
    assert torch.equal(ActQuantizer().codes(y, bits).double(), even)
    assert torch.equal(ActQuantizer()(y, bits), even / top)
    zero = torch.tensor([0.0, 1.0])  # x = 1/2: half way between the two middle codes
    assert make_quantizer("dorefa", WIDTHS).codes(zero, bits)[0] == (0 if bits == 1 else 2 ** (bits - 1))


@every_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_passes_inside_ends_included(bits, dtype):
    one = torch.ones((), dtype=dtype)
    above, below = torch.nextafter(one, 2 * one), torch.nextafter(one, 0 * one)
    y = torch.tensor([-3.0, -1e-3, -1e-30, 0.0, -0.0, 1e-30, 0.3, 0.5, float(below), 1.0, float(above), 9.0])
    y = y.to(dtype).requires_grad_() if dtype != torch.float64 else y.double().requires_grad_()
    ActQuantizer()(y, bits).backward(torch.full_like(y, 7))
    inside = (y >= 0) & (y <= 1)
    assert inside.tolist()[3:5] == [True, True] and inside.tolist()[9] is True
    assert y.grad.tolist() == (7.0 * inside).tolist()


def signed_reference(y: Tensor, bits: int, r: Tensor | float = 1.0) -> Tensor:
    top = 2**bits - 1
    a = (torch.clamp(y / r, -1, 1) + 1) / 2
    return r * (2 * ste(a * top, torch.round(a * top)) / top - 1)


def unsigned_reference(y: Tensor, bits: int, r: Tensor | float = 1.0) -> Tensor:
    top = 2**bits - 1
    a = torch.clamp(y / r, 0, 1)
    return r * ste(a * top, torch.round(a * top)) / top


@every_width
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("clip", ["fixed", "calibrated", "learned"])
def test_activations_are_those_of_the_equations(bits, signed, clip):
    r = 1.0 if clip == "fixed" else 1.7
    act = ActQuantizer(signed=signed) if clip == "fixed" else calibrated(r, clip, signed)
    y = inputs(spread=2.0).requires_grad_()
    ours = act(y, bits)
    theirs = (signed_reference if signed else unsigned_reference)(y, bits, r)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    assert ours.min() >= (-r if signed else 0) and ours.max() <= r
    (mine,) = torch.autograd.grad(ours.sum(), y)
    (plain,) = torch.autograd.grad(theirs.sum(), y)
    assert torch.allclose(mine, plain, rtol=1e-12)
    codes = act.codes(y.detach(), bits).double()
    value = codes / (2**bits - 1)
    assert torch.allclose(ours, r * (2 * value - 1 if signed else value), rtol=1e-12)


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("layout", ["channels_last", "contiguous", "transposed"])
def test_a_learned_clip_in_one_pass_is_the_one_in_many(bits, layout):
    """In every layout; the gradient comes in that of the input and in another."""
    torch.manual_seed(bits)
    top, r = 2**bits - 1, torch.tensor(1.3)
    y = torch.randn(5, 7, 12, 10)
    y[0, 0, 0, :4] = torch.tensor([0.0, 1.3, 1.3 * (1 + 2**-23), -0.0])  # the ends are inside
    if layout == "channels_last":
        y = y.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        y = y.transpose(0, 3)
    for grad in (torch.randn(y.shape), torch.randn_like(y)):
        found = []
        for function in (lambda y, r, n: r * clip_round(y / r, n), clip_round_in_range):
            mine, own = y.clone(memory_format=torch.preserve_format).requires_grad_(), r.clone().requires_grad_()
            out = function(mine, own, top)
            out.backward(grad)
            found.append((out.detach(), mine.grad, own.grad))
        (plain, plain_y, plain_r), (ours, ours_y, ours_r) = found
        assert torch.equal(ours, plain)
        assert torch.equal(ours_y != 0, plain_y != 0) and torch.allclose(ours_y, plain_y, rtol=1e-6)
        assert ours_r == pytest.approx(float(plain_r), rel=1e-4, abs=1e-4)
    for count in (0, 1):
        few = y.flatten()[:count].clone().requires_grad_()
        clip_round_in_range(few, r, top).sum().backward()
        assert few.grad.shape == (count,)


def test_signed_one_bit_is_the_sign():
    y = inputs()
    assert torch.equal(ActQuantizer(signed=True)(y, 1), torch.sign(y))


@pytest.mark.parametrize("signed", [False, True])
def test_gradient_of_a_learned_clip(signed):
    """LSQ, for a range r = step * (2^k - 1): q - y / r inside, 1 above, 0 (signed: -1) below."""
    y, bits, r = inputs(spread=2.0), 3, 1.7
    act = calibrated(r, "learned", signed)
    for low, high in ((r, 99.0), (-99.0, -r if signed else 0.0), (-r if signed else 0.0, r)):
        part = y[(y > low) & (y < high)]
        assert len(part) > 50
        act.zero_grad()
        out = act(part, bits)
        out.sum().backward()
        inside = high == r
        formula = out.detach() / r - (part / r if inside else 0)
        assert float(act.ranges["3"].grad) == pytest.approx(float(formula.sum()), rel=1e-10, abs=1e-10)
        if not inside:  # clipped values follow the range as it is: finite differences see the same slope
            step = 1e-6
            wide, narrow = calibrated(r + step, "learned", signed), calibrated(r - step, "learned", signed)
            slope = (wide(part, bits) - narrow(part, bits)).sum().detach() / (2 * step)
            assert float(act.ranges["3"].grad) == pytest.approx(float(slope), rel=1e-6, abs=1e-6)


def test_a_learned_range_may_pass_through_zero():
    """Else all inputs would be clipped to 0 from then on, with no gradient to bring the range back."""
    y = inputs()
    assert torch.equal(calibrated(-1.7, "learned")(y, 2), calibrated(1.7, "learned")(y, 2))


def test_float_activations():
    y = inputs()
    assert torch.equal(ActQuantizer()(y, 32), torch.relu(y))
    assert ActQuantizer(rectify=False)(y, 32) is y
    assert ActQuantizer(signed=True)(y, 32) is y  # a ReLU would undo what the signed form is for


def test_uncalibrated_ranges():
    act = ActQuantizer((1, 2), clip="calibrated")
    for bits in (1, 3):  # known but not set; not known
        with pytest.raises(UncalibratedBits, match=f"bits={bits} has no activation range here") as caught:
            act(torch.ones(2), bits)
        assert "\n" not in str(caught.value)
    act.fit(torch.rand(100), (1,))
    act(torch.ones(2), 1)
    act.load_state_dict(ActQuantizer((1, 2), clip="calibrated").state_dict())  # not set again
    with pytest.raises(UncalibratedBits):
        act(torch.ones(2), 1)


@pytest.mark.parametrize("clip", ["calibrated", "learned"])
def test_ranges_of_widths_added_later_survive_a_checkpoint(clip):
    act = ActQuantizer((2, 8), clip=clip).double()
    act.fit(torch.rand(100), (2, 8, 5, 32))
    assert sorted(act.ranges) == ["2", "5", "8"]
    assert all(p.requires_grad == (clip == "learned") and p.dtype == torch.float64 for p in act.parameters())
    for widths in ((2, 8), (32,)):
        fresh = ActQuantizer(widths, clip=clip).double()
        fresh.load_state_dict(act.state_dict())
        assert torch.equal(fresh(y := inputs(), 5), act(y, 5))
        assert all(p.requires_grad == (clip == "learned") for p in fresh.parameters())
    assert torch.equal(copy.deepcopy(act)(y, 5), act(y, 5))


def test_a_fixed_clip_has_no_ranges():
    act = ActQuantizer((2, 8))
    act.fit(torch.rand(100), (2, 8))
    assert not act.state_dict()


# --- Ranges from data ---------------------------------------------------------------------------------------


def heavy_tailed() -> Tensor:
    torch_rng = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 20000, generator=torch_rng).unbind()
    return a / (b.abs() + 0.05)  # close to Cauchy


def squared_error(values: Tensor, r: Tensor, bits: int, signed: bool) -> float:
    q = (signed_reference if signed else unsigned_reference)(values, bits, r)
    return float((q - values).square().mean())


@every_width
@pytest.mark.parametrize("signed", [False, True])
def test_best_range_is_the_best(bits, signed):
    values = heavy_tailed() if signed else heavy_tailed().abs()
    top = values.abs().max()
    found = squared_error(values, best_range(values, bits, signed), bits, signed)
    tried = [squared_error(values, top * f, bits, signed) for f in torch.logspace(-3, 0, 500)]
    assert found <= 1.02 * min(tried)
    assert found <= squared_error(values, top, bits, signed) * (0.9 if bits <= 2 else 1)


def test_one_outlier_does_not_decide():
    """Clipping it costs 110^2 / 16384 = 0.7 of squared error, keeping it nearly all of the others' 1."""
    values = torch.randn(16384, generator=torch.Generator().manual_seed(4)).abs()
    values[17] = 110
    assert best_range(values, 1, signed=False) < 1.7
    assert best_range(values, 2, signed=False) < 2.5


@pytest.mark.parametrize(("bits", "r"), [(1, 1.2), (2, 1.9), (4, 2.9)])
def test_ranges_of_half_normal_inputs(bits, r):
    values = torch.randn(50000, generator=torch.Generator().manual_seed(5)).relu()
    assert float(best_range(values, bits, signed=False)) == pytest.approx(r, rel=0.1)


def test_ranges_of_inputs_with_nothing_to_see():
    assert float(best_range(torch.zeros(9), 4, signed=True)) == 1
    assert float(best_range(-torch.rand(9), 4, signed=False)) == 1
    assert best_range(torch.zeros(9).double(), 4, signed=True).dtype == torch.float64


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_ranges_of_broken_inputs(bad):
    with pytest.raises(DataError, match="calibration met NaN or infinity in the activations"):
        ActQuantizer((4,), clip="calibrated").fit(torch.tensor([1.0, bad]), (4,))


def test_samples_see_every_feature_and_leave_the_dice_alone():
    """Every 32nd value of (256, 1024) would show 32 of the 1024 features, always the same."""
    y = torch.arange(1024.0).repeat(256, 1)
    state = torch.get_rng_state()
    seen = sample_values(y)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(seen) == 16384 and len(seen.unique()) > 1000
    assert torch.equal(sample_values(y), seen)
    small = torch.rand(3, 4)
    assert torch.equal(sample_values(small), small.flatten())
    assert sample_values(small).data_ptr() != small.data_ptr()


# --- Other ways to run --------------------------------------------------------------------------------------


class Both(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.w = nn.Parameter(weights(64).float())
        self.quantizer = make_quantizer(name, WIDTHS, "learned" if name == "lsq" else "mean")
        self.quantizer.fit(self.w, WIDTHS)
        self.act = ActQuantizer(WIDTHS, clip="calibrated")
        self.act.fit(torch.rand(50), WIDTHS)

    def forward(self, y: Tensor) -> Tensor:
        return self.act(y, 2) * self.quantizer.weight(self.quantizer.normalize(self.w), self.w, 2)


@pytest.mark.thorough
@every_quantizer
def test_exported_whole(name):
    model, y = Both(name), torch.rand(64)
    expected = model(y)
    exported = torch.export.export(model, (y,)).module()
    assert torch.equal(exported(y), expected)


def test_lsq_is_always_learned():
    assert isinstance(q := make_quantizer("lsq", (2,), "mean"), Lsq) and q.learned


def test_kurtosis_penalty_is_zero_for_even_weights():
    even = torch.linspace(-3, 3, 20_001, dtype=torch.float64)
    assert kurtosis_penalty(even) < 1e-6 and kurtosis_penalty(5 * even + 1) < 1e-6
    normal = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert kurtosis_penalty(normal) == pytest.approx(1.44, abs=0.1)
    assert kurtosis_penalty(normal.exp()) > 100  # skewed
    assert kurtosis_penalty(torch.zeros(9)).isfinite()


def test_kurtosis_penalty_makes_weights_even():
    weight = torch.randn(4000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    optimizer = torch.optim.Adam([weight], 0.02)
    for _ in range(200):
        optimizer.zero_grad()
        kurtosis_penalty(weight).backward()
        optimizer.step()
    assert kurtosis_penalty(weight) < 0.01


def depthwise_like():
    return torch.cat([torch.randn(9) * s for s in torch.logspace(-2, 0.7, 64)])


DISTRIBUTIONS = {
    "normal": lambda: torch.randn(20000) * 0.05,
    "laplace": lambda: torch.distributions.Laplace(0.0, 0.05).sample((20000,)),
    "student": lambda: torch.distributions.StudentT(3.0).sample((20000,)) * 0.05,
    "dirac": lambda: torch.cat([torch.randn(20000) * 1e-3, torch.randn(40)]),
    "sparse": lambda: torch.randn(20000) * (torch.rand(20000) < 0.05),
    "depthwise": depthwise_like,
    "uniform": lambda: torch.rand(20000) * 2 - 1,
}


def lsq_error(w, bits, reach=None):
    """Of lsq at a range: the one for converted weights unless given."""
    quantizer = make_quantizer("lsq", (1, 2, 4, 8, 32))
    quantizer.fit_trained(w, (1, 2, 4, 8, 32))
    if reach is not None:
        with torch.no_grad():
            quantizer.range.copy_(reach)
        super(Lsq, quantizer).fit(w, (1, 2, 4, 8))
    return float(((w - quantizer.weight(quantizer.normalize(w), w, bits)).norm() / w.norm()).detach())


@pytest.mark.thorough
@pytest.mark.parametrize("name", sampled(DISTRIBUTIONS, 3))
def test_lsq_of_given_weights_is_good_at_8_bit_and_better_than_the_largest_weight_below(name):
    torch.manual_seed(0)
    w = DISTRIBUTIONS[name]()
    top, rms = w.abs().max(), w.square().mean().sqrt()
    best = min(lsq_error(w, 8, top * r) for r in torch.logspace(-2.5, 0, 25).tolist())
    found = {k: lsq_error(w, k) for k in (1, 2, 4, 8)}
    assert found[8] <= 1.25 * best
    assert found[8] < 0.75 * lsq_error(w, 8, 3 * rms)
    assert all(found[k] <= 1.02 * lsq_error(w, k, top) for k in (1, 2, 4))


def test_lsq_of_given_weights_looks_at_the_widths_asked_for():
    torch.manual_seed(0)
    w = torch.randn(20000)
    ranges = {}
    for widths in ((2,), (4,), (8,)):
        quantizer = make_quantizer("lsq", widths)
        quantizer.fit_trained(w, widths)
        ranges[widths] = float(quantizer.range.detach())
    assert 1.6 < ranges[2,] < 2.4 < ranges[4,] < 3.1 < ranges[8,] < 4.3  # textbook: 2.0, 2.7, 3.9


@pytest.mark.parametrize("w", [torch.zeros(9), torch.full((9,), 0.25), torch.tensor([[-3.0]]), torch.full((4,), 1e-42)])
def test_lsq_of_weights_without_a_spread(w):
    quantizer = make_quantizer("lsq", (1, 8))
    quantizer.fit_trained(w, (1, 8))
    assert torch.isfinite(quantizer.range) and quantizer.range > 0
    torch.testing.assert_close(quantizer.weight(quantizer.normalize(w), w, 8), w, atol=1e-6, rtol=0.02)


def test_lsq_from_scratch_starts_as_recipes_were_trained():
    w = torch.randn(1000) * 0.1
    assert torch.equal(fitted("lsq", w).range.detach(), 3 * w.square().mean().sqrt())
