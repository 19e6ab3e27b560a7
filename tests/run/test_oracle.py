"""The numpy oracle: fma against exact fractions, every op against torch or a plain loop, and the edges of each."""

import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anyprec.format.graph import Graph, GraphProfile, Op, Weight
from anyprec.run import oracle_ops as ops
from anyprec.run.oracle import OPS, run_graph

F32 = np.float32
RNG = np.random.default_rng


# --- fma ----------------------------------------------------------------------------------------------------


def nearest_single(v: Fraction) -> float:
    """The single nearest to v, ties to even, by integers alone."""
    if v == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(v.numerator)) - math.log2(v.denominator))
    exponent += (abs(v) >= Fraction(2) ** (exponent + 1)) - (abs(v) < Fraction(2) ** exponent)
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(v / quantum) * quantum  # round() of a Fraction goes half to even
    return math.copysign(math.inf, v) if abs(rounded) >= 2**128 else float(rounded)


def check_fma(a: float, b: float, c: float) -> None:
    got = ops.fma(F32(a), F32(b), F32(c))
    assert got.dtype == F32
    if all(map(math.isfinite, (a, b, c))):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        assert float(got) == nearest_single(exact), (a, b, c)
        if exact == 0:  # the sign of an exact zero: that of both terms, or + where they differ
            both = math.copysign(1, a) * math.copysign(1, b) < 0 and math.copysign(1, c) < 0
            assert math.copysign(1, got) == (-1 if both else 1)
        else:
            assert math.copysign(1, got) == math.copysign(1, exact)
    else:
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(float(got), np.float64(a) * np.float64(b) + np.float64(c))


singles = st.floats(width=32, allow_nan=False)
small_steps = st.builds(lambda m, e: float(F32(m * 2.0**e)), st.integers(-(2**24), 2**24), st.integers(-149, 103))


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


@pytest.mark.thorough
@given(singles, singles, singles)
@settings(max_examples=1000)
def test_fma_is_correctly_rounded(a, b, c):
    check_fma(a, b, c)


@given(small_steps, small_steps, small_steps)
@settings(max_examples=500)
def test_fma_on_few_bits(a, b, c):
    check_fma(a, b, c)


def near(v: Fraction, steps: int) -> float:
    return (
        float(np.nextafter(F32(nearest_single(v)), F32(math.copysign(np.inf, steps)))) if steps else nearest_single(v)
    )


@pytest.mark.thorough
@given(
    st.floats(2.0**-60, 2.0**60, width=32),
    st.floats(2.0**-60, 2.0**60, width=32),
    st.integers(-1, 1),
    st.integers(0, 60),
    st.sampled_from([1, -1]),
)
@settings(max_examples=500)
def test_fma_where_the_sum_is_nearly_a_tie(a, b, steps, distance, sign):
    # c about -a*b: all but the last bits cancel; or far above or below it, so that a*b only decides a tie.
    product = Fraction(a) * Fraction(b)
    check_fma(a, b, near(-product, steps))
    check_fma(a, b, near(sign * product * Fraction(2) ** distance, steps))
    check_fma(a, b, near(sign * product / Fraction(2) ** distance, steps))


@given(st.integers(1, 2047), st.integers(0, 2**24), st.integers(29, 100), st.booleans(), st.sampled_from([1, -1]))
def test_fma_breaks_ties_by_what_a_double_forgets(half, more, gap, up, sign):
    # The product is odd and in 2^24 .. 2^25, so half way between two singles; c = +-2^-gap decides, lost in double.
    a = 2 * half + 1
    b = (2**24 // a + more % (2**24 // a)) | 1
    if not 2**24 < a * b < 2**25:
        return
    check_fma(sign * a, b, (1 if up else -1) * 2.0**-gap)
    check_fma(sign * a * 2.0**-90, b * 2.0**-20, (1 if up else -1) * 2.0 ** -(gap + 48))


@given(st.integers(2**20, 2**23), st.integers(17, 23))
def test_fma_breaks_ties_between_subnormals(steps, j):
    # a b = 2^-150 (1 - 2^-2j): just less than half a step, which a double that holds c as well takes for the half.
    a, b, c = (1 + 2.0**-j) * 2.0**-75, (1 - 2.0**-j) * 2.0**-75, steps * 2.0**-149
    assert ops.fma(F32(a), F32(b), F32(c)) == F32(c)
    check_fma(a, b, c)
    check_fma(a, -b, c)


@example(1 + 2.0**-12, 2.0**-75, 2.0**-149)
@example(2.0**-75, 2.0**-75, 0.0)  # 2^-150: half of the least subnormal, to even: 0
@example(2.0**-75, 2.0**-75, 2.0**-149)  # one and a half, to even: 2
@example(2.0**-75, -(2.0**-75), 2.0**-149)  # one half, to even: 0
@example(2.0**-75, 1.5 * 2.0**-75, 0.0)
@example(2.0**-100, 2.0**-100, 2.0**-127)
@given(
    st.floats(2.0**-80, 2.0**-60, width=32),
    st.floats(2.0**-90, 2.0**-60, width=32),
    st.floats(0, 2.0**-124, width=32),
)
def test_fma_among_subnormals(a, b, c):
    check_fma(a, b, c)
    check_fma(a, -b, c)


def test_fma_at_the_edges():
    big, inf, nan = float(np.finfo(F32).max), math.inf, math.nan
    edges = [0.0, -0.0, 1.0, -1.0, big, -big, 2.0**-149, -(2.0**-149), 2.0**-126, inf, -inf, nan, 2.0**64, 3.0]
    for a in edges:
        for b in edges:
            for c in edges:
                check_fma(a, b, c)
    # The sum rounds to infinity from half a step above the greatest single on, and not below.
    assert ops.fma(F32(2.0**52), F32(2.0**51), F32(big)) == inf
    assert ops.fma(F32(2.0**52), F32(2.0**51 - 2.0**27), F32(big)) == F32(big)
    check_fma(2.0**52, 2.0**51, big)
    check_fma(2.0**52, 2.0**51 - 2.0**27, big)


def test_fma_broadcasts_and_repairs_in_place():
    # 2^24 + 1 is a tie between 2^24 and 2^24 + 2; the third number decides.
    a, c = np.array([[4097], [1]], F32), np.array([2.0**-40, 0, -(2.0**-40)], F32)
    got = ops.fma(a, F32(4097), c)  # 4097^2 = 2^24 + 2^13 + 1
    even = float(2**24 + 2**13)
    np.testing.assert_array_equal(got, [[even + 2, even, even], [4097, 4097, 4097]])


# --- Graphs of one op ---------------------------------------------------------------------------------------


def single(kind, inputs=("input",), channels=3, bits=(8, 8), table=None, weights=(), **attributes):
    """A graph of one op on the input, with one profile."""
    profile = GraphProfile("p", bits[0], bits[1])
    tables = {} if table is None else {"y": np.asarray(table, F32)[None]}
    op = Op("y", kind, inputs, attributes)
    planes = {k: tuple(range(k)) for k in range(1, 9)}
    return Graph("one", (None, None, channels), (profile,), planes, dict(weights), (op,), ("y",), tables)


def compute(x, kind, **options):
    x = np.asarray(x, F32)
    return run_graph(single(kind, channels=x.shape[3], **options), x, "p")["y"]


def drawn(*shape, seed=0):
    return RNG(seed).standard_normal(shape).astype(F32)


def row(*values):
    """(1, 1, n, 1)"""
    return np.array(values, F32).reshape(1, 1, -1, 1)


def quantized_conv(x, codes, bits, acts, signed=False, affine=None, conv=None, act_table=None):
    """quantize, then conv with weight codes; the value of each."""
    table = np.ones((2, x.shape[3]), F32) * [[1], [0]] if act_table is None else act_table
    weight = Weight(codes.shape, None, {bits: codes})
    window = dict(stride=[1, 1], pad=[0, 0, 0, 0], dilation=[1, 1], groups=1) | (conv or {})
    oplist = (
        Op("a", "quantize", ("input",), {"signed": signed, "rectify": False, "affine": True}),
        Op(
            "y",
            "conv",
            ("a",),
            {"weight": "w", "kernel": list(codes.shape[1:3]), "signed": signed, "affine": affine is not None, **window},
        ),
    )
    tables = {"a": np.asarray(table, F32)[None]} | ({} if affine is None else {"y": np.asarray(affine, F32)[None]})
    profile = GraphProfile("p", bits, acts)
    planes = {bits: tuple(range(bits))}
    graph = Graph("two", (None, None, x.shape[3]), (profile,), planes, {"w": weight}, oplist, ("y",), tables)
    return run_graph(graph, x, "p", all_values=True)


# --- Codes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_quantize_is_round_half_even_of_a_clip(bits):
    n = 2**bits - 1
    x = np.arange(-4, 2 * n + 6, dtype=F32).reshape(1, 1, -1, 1) / 2  # every half step, beyond both ends
    got = compute(x, "quantize", bits=(bits, bits), signed=False, rectify=True, affine=False)
    assert got.dtype == np.uint8
    assert got.ravel().tolist() == [round(min(max(v, 0), n)) for v in x.ravel().tolist()]


def test_quantize_gives_nan_and_minus_infinity_the_code_0():
    x = row(np.nan, -np.nan, -np.inf, np.inf, -0.0, 1e30, 2.0**-149)
    got = compute(x, "quantize", bits=(4, 4), signed=True, rectify=False, affine=False)
    assert got.ravel().tolist() == [0, 0, 0, 15, 0, 15, 0]


def test_quantize_scales_and_shifts_with_one_rounding():
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, so t = 1/2 + 2^-24 and the code 1. Rounded twice, t = 1/2: code 0.
    a = F32(1 + 2.0**-12)
    table = [[a], [-0.5 - 2.0**-11]]
    got = compute(row(a), "quantize", bits=(2, 2), table=table, signed=False, rectify=False, affine=True)
    assert got.item() == 1


@pytest.mark.parametrize("scale", [2.0**-149, 1e-38, 1e38])
def test_quantize_with_huge_and_tiny_scales(scale):
    x = row(-1e38, -1, 0, 1e-38, 1, 1e38)
    got = compute(x, "quantize", bits=(8, 8), table=[[scale], [7.5]], signed=False, rectify=False, affine=True)
    t = [nearest_single(Fraction(float(v)) * Fraction(float(F32(scale))) + Fraction(15, 2)) for v in x.ravel()]
    assert got.ravel().tolist() == [round(min(max(v, 0), 255)) for v in t]


def test_quantize_of_the_float_profile():
    x = row(-2, -0.0, 3, np.nan, np.inf)
    table = [[2], [0]]
    rectified = compute(x, "quantize", bits=(32, 32), table=table, signed=False, rectify=True, affine=True)
    assert rectified.dtype == F32 and rectified.ravel().tolist() == [0, 0, 6, 0, np.inf]
    assert not np.signbit(rectified).any()
    plain = compute(x, "quantize", bits=(32, 32), signed=False, rectify=False, affine=False)
    np.testing.assert_array_equal(plain, x)


@pytest.mark.parametrize("float_profile", [False, True])
def test_dequantize(float_profile):
    bits = 32 if float_profile else 3
    x = row(-1, 0.4, 2.5, 3.5, 99)
    oplist = (
        Op("a", "quantize", ("input",), {"signed": True, "rectify": False, "affine": False}),
        Op("y", "dequantize", ("a",)),
    )
    tables = {"y": np.array([[2 * 0.3, -7 * 0.3]], F32)}
    graph = Graph("g", (None, None, 1), (GraphProfile("p", bits, bits),), {}, {}, oplist, ("y",), tables)
    got = run_graph(graph, x, "p")["y"].ravel()
    want = x.ravel() if float_profile else [0.3 * (2 * c - 7) for c in (0, 0, 2, 4, 7)]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_uint8_images_become_floats():
    x = RNG(0).integers(0, 256, (1, 2, 3, 2), dtype=np.uint8)
    oplist = (Op("y", "clip", ("input",)),)
    tables = {"y": np.array([[-np.inf, np.inf]], F32)}
    scale, shift = (0.01, 1 / 255), (-0.5, 0.25)
    graph = Graph("g", (None, None, 2), (GraphProfile("p", 8, 8),), {}, {}, oplist, ("y",), tables, scale, shift)
    got = run_graph(graph, x, "p")["y"]
    for c in (0, 1):
        want = nearest_single(int(x[0, 1, 2, c]) * Fraction(float(F32(scale[c]))) + Fraction(shift[c]))
        assert got[0, 1, 2, c] == want


# --- Convolution --------------------------------------------------------------------------------------------

WINDOWS = [
    # in, out, groups, kernel, stride, pad (top, left, bottom, right), dilation, height, width
    (3, 5, 1, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1, 1),
    (3, 5, 1, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1, 1),
    (4, 6, 2, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 7, 5),
    (5, 5, 5, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 6, 7),
    (5, 10, 5, (5, 3), (2, 1), (2, 1, 2, 1), (1, 1), 9, 4),
    (2, 3, 1, (1, 1), (3, 2), (0, 0, 0, 0), (1, 1), 8, 8),  # stride beyond the kernel
    (2, 3, 1, (2, 2), (3, 3), (0, 0, 0, 0), (1, 1), 7, 7),
    (3, 4, 1, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2), 5, 6),
    (3, 4, 1, (3, 3), (2, 1), (0, 2, 3, 1), (1, 3), 8, 9),  # other padding on each side
    (1, 130, 1, (2, 5), (1, 1), (0, 4, 1, 0), (1, 1), 3, 2),
    (2, 2, 1, (3, 3), (1, 1), (5, 5, 5, 5), (1, 1), 2, 2),  # windows that lie in the padding altogether
]


def plain_conv(a, w, groups, stride, pad, dilation):
    """A loop over everything, taps outside the image left out."""
    n, height, width, _ = a.shape
    out, kh, kw, inside = w.shape
    oh = (height + pad[0] + pad[2] - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    ow = (width + pad[1] + pad[3] - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((n, oh, ow, out), w.dtype)
    for o in range(out):
        first = o // (out // groups) * inside
        for i in range(oh):
            for j in range(ow):
                for p in range(kh):
                    for q in range(kw):
                        r = i * stride[0] - pad[0] + p * dilation[0]
                        s = j * stride[1] - pad[1] + q * dilation[1]
                        if 0 <= r < height and 0 <= s < width:
                            y[:, i, j, o] += a[:, r, s, first : first + inside] @ w[o, p, q]
    return y


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("bits", "acts"), [(1, 1), (3, 2), (8, 8)])
def test_integer_conv(window, signed, bits, acts):
    channels, out, groups, kernel, stride, pad, dilation, height, width = window
    rng, n = RNG(1), 2**acts - 1
    x = rng.integers(0, n + 1, (2, height, width, channels)).astype(F32)
    codes = rng.integers(0, 2**bits, (out, *kernel, channels // groups)).astype(np.uint8)
    conv = dict(stride=stride, pad=pad, dilation=dilation, groups=groups)
    got = quantized_conv(x, codes, bits, acts, signed, conv=conv)["y"]
    a = x.astype(np.int64)
    a = 2 * a - n if signed else a
    want = plain_conv(a, 2 * codes.astype(np.int64) + 1 - 2**bits, **conv)
    assert got.dtype == F32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_float_conv_is_a_chain_of_fma(window):
    torch = pytest.importorskip("torch")
    channels, out, groups, kernel, stride, pad, dilation, height, width = window
    x, w = drawn(2, height, width, channels), drawn(out, *kernel, channels // groups, seed=1)
    table = np.stack([drawn(out, seed=2), drawn(out, seed=3)])
    conv = dict(stride=stride, pad=pad, dilation=dilation, groups=groups)
    options = dict(kernel=kernel, signed=False, weight="w", weights={"w": Weight(w.shape, w)}, **conv)
    got = compute(x, "conv", affine=False, **options)
    t = torch.nn.functional.pad(torch.from_numpy(x).permute(0, 3, 1, 2), (pad[1], pad[3], pad[0], pad[2]))
    want = torch.nn.functional.conv2d(t, torch.from_numpy(w).permute(0, 3, 1, 2), None, stride, 0, dilation, groups)
    np.testing.assert_allclose(got, want.permute(0, 2, 3, 1), rtol=1e-4, atol=1e-5)
    # One output pixel in exact arithmetic, in the order kh, kw, in.
    o, i, j, acc = out - 1, got.shape[1] - 1, 0, 0.0
    for p, q, c in np.ndindex(*kernel, w.shape[3]):
        r, s = i * stride[0] - pad[0] + p * dilation[0], j * stride[1] - pad[1] + q * dilation[1]
        if 0 <= r < height and 0 <= s < width:
            v = x[0, r, s, o // (out // groups) * w.shape[3] + c]
            acc = nearest_single(Fraction(float(v)) * Fraction(float(w[o, p, q, c])) + Fraction(acc))
    assert got[0, i, j, o] == acc
    np.testing.assert_array_equal(compute(x, "conv", affine=True, table=table, **options), ops.fma(got, *table))


def test_taps_outside_meet_no_weight():
    # Multiplied by a zero of the padding, an infinite weight would give NaN.
    w = np.full((1, 3, 3, 1), np.inf, F32)
    got = compute(
        np.ones((1, 2, 2, 1)), "conv", weight="w", weights={"w": Weight(w.shape, w)}, kernel=[3, 3], stride=[1, 1],
        pad=[1, 1, 1, 1], dilation=[1, 1], groups=1, signed=False, affine=False,
    )  # fmt: skip
    assert np.isposinf(got).all()


def test_conv_affine_rounds_the_sum_to_single_first():
    # 301 * 255 * 255 = 19,572,525 is odd and above 2^24: it becomes 19,572,524 (a tie, to even) before the table.
    x = np.full((1, 1, 1, 301), 255, F32)
    codes = np.full((1, 1, 1, 301), 255, np.uint8)
    values = quantized_conv(x, codes, 8, 8, affine=[[1], [-19572520]])
    assert values["y"].item() == 4
    assert values["a"].dtype == np.uint8


def test_weight_codes_stand_for_odd_numbers():
    # 2 bits: codes 0, 1, 2, 3 are -3, -1, 1, 3.
    x = np.ones((1, 1, 1, 1), F32)
    codes = np.arange(4, dtype=np.uint8).reshape(4, 1, 1, 1)
    assert quantized_conv(x, codes, 2, 1)["y"].ravel().tolist() == [-3, -1, 1, 3]
    assert quantized_conv(x, codes, 2, 2, signed=True)["y"].ravel().tolist() == [3, 1, -1, -3]  # code 1 of 0..3 is -1


def test_sums_beyond_32_bits_are_refused():
    x = np.zeros((1, 1, 1, 33100), F32)
    with pytest.raises(AssertionError, match="32-bit"):
        quantized_conv(x, np.zeros((1, 1, 1, 33100), np.uint8), 8, 8)


@pytest.mark.parametrize("affine", [False, True])
def test_linear(affine):
    x, w = drawn(3, 1, 1, 7), drawn(5, 1, 1, 7, seed=1)
    table = np.stack([np.ones(5), np.arange(5)])
    got = compute(
        x, "linear", weight="w", weights={"w": Weight(w.shape, w)}, signed=False, affine=affine,
        table=table if affine else None,
    )  # fmt: skip
    want = x.reshape(3, 7) @ w.reshape(5, 7).T + (table[1] if affine else 0)
    np.testing.assert_allclose(got.reshape(3, 5), want, rtol=1e-5, atol=1e-6)


def test_a_weight_may_be_float_in_one_profile_alone():
    w = drawn(2, 1, 1, 3)
    weight = Weight(w.shape, w, {1: (w > 0).astype(np.uint8)})
    oplist = (
        Op("a", "quantize", ("input",), {"signed": False, "rectify": True, "affine": False}),
        Op("y", "linear", ("a",), {"weight": "w", "signed": False, "affine": False}),
    )
    profiles = (GraphProfile("1", 1, 1), GraphProfile("32", 32, 32), GraphProfile("m", {"w": 1}, {"a": 2}))
    graph = Graph("g", (None, None, 3), profiles, {1: (0,)}, {"w": weight}, oplist, ("y",), {})
    x = np.array([-1.0, 0.75, 2.0], F32).reshape(1, 1, 1, 3)
    signs = np.where(w > 0, 1, -1).reshape(2, 3)
    np.testing.assert_array_equal(run_graph(graph, x, "1")["y"].ravel(), signs @ [0, 1, 1])
    np.testing.assert_array_equal(run_graph(graph, x, "m")["y"].ravel(), signs @ [0, 1, 2])
    want = w.reshape(2, 3) @ np.array([0, 0.75, 2], F32)
    np.testing.assert_allclose(run_graph(graph, x, "32")["y"].ravel(), want, rtol=1e-6)


# --- Floats -------------------------------------------------------------------------------------------------


def test_affine_add_concat_pad_flatten():
    x = drawn(2, 3, 4, 5)
    table = np.stack([drawn(5, seed=1), drawn(5, seed=2)])
    np.testing.assert_allclose(compute(x, "affine", table=table), x * table[0] + table[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(compute(x, "add", inputs=("input", "input")), x + x)
    np.testing.assert_array_equal(compute(x, "concat", inputs=("input",) * 3), np.concatenate([x] * 3, 3))
    padded = compute(x, "pad", h=[1, 0], w=[0, 2], c=[3, 1])
    assert padded.shape == (2, 4, 6, 9)
    np.testing.assert_array_equal(padded[:, 1:, :4, 3:8], x)
    assert np.count_nonzero(padded) == x.size
    flat = compute(x, "flatten")
    assert flat.shape == (2, 1, 1, 60)
    np.testing.assert_array_equal(flat.reshape(2, 5, 3, 4).transpose(0, 2, 3, 1), x)


def test_clip_sends_nan_to_its_lower_end():
    x = row(-np.inf, -1, 0.5, 7, np.inf, np.nan)
    assert compute(x, "clip", table=[0, 6]).ravel().tolist() == [0, 0, 0.5, 6, 6, 0]
    assert compute(x, "clip", table=[0, np.inf]).ravel().tolist() == [0, 0, 0.5, 7, np.inf, 0]
    assert compute(x, "clip", table=[-np.inf, 6]).ravel().tolist() == [-np.inf, -1, 0.5, 6, 6, -np.inf]


POOLS = [
    # kernel, stride, pad, dilation, ceil, height, width
    ((2, 2), (2, 2), (0, 0), (1, 1), False, 7, 5),
    ((2, 2), (2, 2), (0, 0), (1, 1), True, 7, 5),
    ((3, 3), (2, 2), (1, 1), (1, 1), False, 8, 9),
    ((3, 3), (2, 2), (1, 1), (1, 1), True, 8, 9),
    ((3, 2), (1, 3), (1, 0), (1, 1), True, 6, 6),
    ((3, 3), (2, 2), (1, 1), (2, 2), False, 9, 8),
    ((3, 3), (3, 3), (1, 1), (2, 2), True, 10, 9),
    ((1, 1), (2, 2), (0, 0), (1, 1), True, 1, 1),
    ((2, 2), (5, 5), (1, 1), (1, 1), True, 5, 6),  # ceil adds a window that starts in the padding: dropped
]


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_pools_against_torch(case):
    torch = pytest.importorskip("torch")
    kernel, stride, pad, dilation, ceil, height, width = case
    x = drawn(2, height, width, 3)
    t = torch.from_numpy(x).permute(0, 3, 1, 2)
    options = dict(kernel=kernel, stride=stride, pad=(*pad, *pad), ceil=ceil)
    want = torch.nn.functional.max_pool2d(t, kernel, stride, pad, dilation, ceil_mode=ceil).permute(0, 2, 3, 1)
    np.testing.assert_array_equal(compute(x, "max_pool", dilation=dilation, **options), want)
    if dilation == (1, 1):
        for count_pad in (False, True):
            want = torch.nn.functional.avg_pool2d(t, kernel, stride, pad, ceil, count_pad).permute(0, 2, 3, 1)
            got = compute(x, "avg_pool", count_pad=count_pad, **options)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_max_pool_of_codes_keeps_their_bits():
    x = RNG(0).integers(0, 16, (1, 4, 4, 2)).astype(F32)
    oplist = (
        Op("a", "quantize", ("input",), {"signed": True, "rectify": False, "affine": False}),
        Op(
            "m",
            "max_pool",
            ("a",),
            {"kernel": [2, 2], "stride": [2, 2], "pad": [0] * 4, "dilation": [1, 1], "ceil": False},
        ),
        Op("f", "flatten", ("m",)),
        Op("y", "linear", ("f",), {"weight": "w", "signed": True, "affine": False}),
    )
    weight = Weight((1, 1, 1, 8), None, {1: np.ones((1, 1, 1, 8), np.uint8)})
    graph = Graph("g", (4, 4, 2), (GraphProfile("p", 1, 4),), {1: (0,)}, {"w": weight}, oplist, ("y",), {})
    values = run_graph(graph, x, "p", all_values=True)
    assert values["m"].dtype == values["f"].dtype == np.uint8
    largest = x.reshape(1, 2, 2, 2, 2, 2).max(axis=(2, 4))
    assert values["y"].item() == (2 * largest - 15).sum()


def test_max_pool_takes_nan_as_its_first_tap_alone():
    options = dict(kernel=(1, 2), stride=(1, 2), pad=(0, 0, 0, 0), dilation=(1, 1), ceil=False)
    got = compute(row(np.nan, 1, 1, np.nan, -np.inf, -np.inf), "max_pool", **options).ravel()
    np.testing.assert_array_equal(got, [np.nan, 1, -np.inf])


@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
def test_pool_windows_in_the_padding_are_refused(kind):
    more = {"dilation": (1, 1)} if kind == "max_pool" else {"count_pad": True}
    with pytest.raises(AssertionError, match="in the padding alone"):
        compute(row(3), kind, kernel=(1, 1), stride=(1, 1), pad=(0, 1, 0, 1), ceil=False, **more)


def test_avg_pool_adds_in_order():
    x = row(2.0**24, 1, 1, -(2.0**24))  # in order both ones are lost; in pairs they would not be
    options = dict(kernel=(1, 4), stride=(1, 1), pad=(0, 0, 0, 0), ceil=False, count_pad=False)
    assert compute(x, "avg_pool", **options).item() == 0
    assert compute(x, "adaptive_avg_pool", size=(1, 1)).item() == 0
    zero = compute(row(-0.0, -0.0, -0.0, -0.0), "adaptive_avg_pool", size=(1, 1))
    assert not np.signbit(zero).any()  # 0 + -0 is 0


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 7), (8, 2), (9, 9)])
def test_adaptive_avg_pool(size):
    torch = pytest.importorskip("torch")
    x = drawn(2, 7, 5, 3)
    want = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(x).permute(0, 3, 1, 2), size).permute(0, 2, 3, 1)
    np.testing.assert_allclose(compute(x, "adaptive_avg_pool", size=size), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [(1, 1), (4, 9), (7, 5), (13, 10), (14, 1)])
@pytest.mark.parametrize(("mode", "align"), [("nearest", False), ("bilinear", False), ("bilinear", True)])
def test_resize_to_a_size(size, mode, align):
    torch = pytest.importorskip("torch")
    x = drawn(2, 7, 5, 3)
    corners = {} if mode == "nearest" else {"align_corners": align}
    t = torch.from_numpy(x).permute(0, 3, 1, 2)
    want = torch.nn.functional.interpolate(t, size, mode=mode, **corners).permute(0, 2, 3, 1)
    got = compute(x, "resize", mode=mode, align=align, size=size, scale=None, like=None)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [(2.0, 2.0), (1.5, 0.7), (0.5, 3.3)])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_resize_by_a_scale(scale, mode):
    torch = pytest.importorskip("torch")
    x = drawn(1, 7, 10, 2)
    t = torch.from_numpy(x).permute(0, 3, 1, 2)
    want = torch.nn.functional.interpolate(t, scale_factor=scale, mode=mode).permute(0, 2, 3, 1)
    got = compute(x, "resize", mode=mode, align=False, size=None, scale=scale, like=None)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_resize_like_another_value():
    x = drawn(1, 4, 6, 2)
    oplist = (
        Op("s", "adaptive_avg_pool", ("input",), {"size": [2, 3]}),
        Op("y", "resize", ("s",), {"mode": "nearest", "align": False, "size": None, "scale": None, "like": "input"}),
    )
    graph = Graph("g", (None, None, 2), (GraphProfile("p", 8, 8),), {}, {}, oplist, ("y",), {})
    values = run_graph(graph, x, "p", all_values=True)
    np.testing.assert_array_equal(values["y"], values["s"].repeat(2, 1).repeat(2, 2))


@pytest.mark.parametrize("spread", [0, 1e-3, 1, 30, 1000])
def test_softmax(spread):
    x = (drawn(2, 2, 3, 11) * spread + 5).astype(F32)
    t = x.astype(np.float64)
    e = np.exp(t - t.max(axis=3, keepdims=True))
    got = compute(x, "softmax")
    want = (e / e.sum(axis=3, keepdims=True)).astype(F32)
    # The series is good to about 2e-17 of exp, so a result is off by the last bit of a single at most.
    np.testing.assert_allclose(got, want, rtol=1.2e-7, atol=1e-45)


def test_softmax_at_its_edges():
    x = np.array([[0, -699.9, -700.1, -np.inf], [np.inf, 0, 0, 0], [np.nan, 0, 0, 0]], F32).reshape(1, 1, 3, 4)
    got = compute(x, "softmax")[0, 0]
    assert got[0].tolist() == [1, 0, 0, 0]
    assert np.isnan(got[1:]).all()
    assert compute(np.zeros((1, 1, 1, 1)), "softmax").item() == 1


# --- Whole graphs -------------------------------------------------------------------------------------------


def test_outputs_come_by_name_and_all_values_on_request():
    x = drawn(1, 2, 2, 3)
    oplist = (Op("u", "add", ("input", "input")), Op("v", "add", ("u", "input")), Op("z", "softmax", ("v",)))
    graph = Graph("g", (None, None, 3), (GraphProfile("p", 8, 8),), {}, {}, oplist, ("z", "u"), {})
    assert list(run_graph(graph, x, "p")) == ["z", "u"]
    assert list(run_graph(graph, x, "p", all_values=True)) == ["input", "u", "v", "z"]


def test_an_empty_batch_gives_empty_outputs():
    codes = np.zeros((2, 3, 3, 3), np.uint8)
    x = np.zeros((0, 4, 4, 3), F32)
    assert quantized_conv(x, codes, 1, 1)["y"].shape == (0, 2, 2, 2)
    assert compute(x, "flatten").shape == (0, 1, 1, 48)
    assert compute(x, "adaptive_avg_pool", size=(1, 2)).shape == (0, 1, 2, 3)
    assert compute(x, "softmax").shape == x.shape


@pytest.mark.parametrize("page, sections", [("FORMAT.md", (3,)), ("ARITHMETIC.md", (2, 8))])
def test_every_op_of_the_format_is_here(page, sections):
    text = (Path(__file__).resolve().parents[2] / page).read_text(encoding="utf-8") + "\n## 9."
    parts = [text[text.index(f"## {n}.") : text.index(f"## {n + 1}.")] for n in sections]
    named = {name for part in parts for name in re.findall(r"^\| `(\w+)`", part, re.MULTILINE)}
    assert named - {"input"} == set(OPS) - {"input"}  # an input computes nothing
