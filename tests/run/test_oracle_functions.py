"""The oracle's functions and sums against double precision: how near ARITHMETIC.md section 8 comes to the true ones."""

import math

import numpy as np
import pytest

from anyprec.format.schema import FUNCTIONS as NAMES
from anyprec.run import oracle_functions as functions

F32, F64 = np.float32, np.float64

erf = np.vectorize(math.erf)
TRUE = {
    "abs": np.abs,
    "sqrt": np.sqrt,
    "reciprocal": lambda x: 1 / x,
    "exp": np.exp,
    "log": np.log,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "erf": erf,
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
}


def numbers(name: str) -> np.ndarray:
    spread = np.concatenate(
        [np.linspace(-30, 30, 20_001), np.linspace(-1.2, 1.2, 20_001), np.geomspace(1e-30, 80, 5_001)]
    )
    if name in ("sqrt", "log", "reciprocal"):
        spread = np.abs(spread[spread != 0])
    return spread.astype(F32)


def test_all_functions_are_here():
    assert set(functions.FUNCTIONS) == set(TRUE) == set(NAMES)


@pytest.mark.parametrize("name", TRUE)
def test_near_the_true_function(name):
    x = numbers(name)
    with np.errstate(all="ignore"):
        got, want = functions.FUNCTIONS[name](x), TRUE[name](x.astype(F64))
    assert got.dtype == F32
    error = np.abs(got - want) / np.maximum(1, np.abs(want))
    assert error.max() < 3e-7, (x[error.argmax()], error.max())


@pytest.mark.parametrize("name", ["exp", "log", "sigmoid", "tanh", "erf", "gelu"])
def test_special_numbers(name):
    x = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e-42, 100, -110], F32)
    with np.errstate(all="ignore"):
        got = functions.FUNCTIONS[name](x)
        want = TRUE[name](x.astype(F64)).astype(F32)
    ends = {"gelu": np.array([np.nan, np.inf, np.nan, 0, 0, 5e-43, 100, 0], F32)}  # -inf * 0 is NaN
    np.testing.assert_allclose(got, ends.get(name, want), rtol=2e-6, atol=1e-43)


def test_sixteen_lanes():
    x = np.arange(1, 41, dtype=F32)[None] ** 3
    lanes = [sum((x[0, i::16].tolist()), 0.0) for i in range(16)]
    assert functions.total(x, lanes=True) == pytest.approx(sum(lanes))
    big = np.array([[2.0**24, *[1.0] * 31]], F32)
    # One by one every 1 is lost; in lanes only those of lane 0 are
    assert functions.total(big, lanes=False)[0] == 2.0**24
    assert functions.total(big, lanes=True)[0] == 2.0**24 + 30


@pytest.mark.parametrize("axes", [(1,), (3,), (1, 2), (2, 3), (1, 2, 3)])
def test_reductions_and_norms(axes):
    x = np.random.default_rng(0).standard_normal((2, 5, 6, 37)).astype(F32)
    for function in ("sum", "mean", "max", "min"):
        np.testing.assert_allclose(
            functions.reduce(x, function, axes), getattr(np, function)(x.astype(F64), axis=axes, keepdims=True),
            rtol=1e-5, atol=1e-5,
        )  # fmt: skip
    wide = x.astype(F64)
    want = (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + 1e-5)
    np.testing.assert_allclose(functions.norm(x, axes, 1e-5), want, rtol=1e-5, atol=1e-5)


def test_softmax_and_matmul():
    rng = np.random.default_rng(1)
    x = 10 * rng.standard_normal((2, 3, 21)).astype(F32)
    e = np.exp(x.astype(F64) - x.max(-1, keepdims=True))
    np.testing.assert_allclose(functions.softmax(x), e / e.sum(-1, keepdims=True), rtol=1e-6, atol=1e-9)
    a, b = (rng.standard_normal(shape).astype(F32) for shape in ((2, 4, 5, 7), (2, 1, 3, 7)))
    want = a.astype(F64) @ b.astype(F64).swapaxes(-1, -2)
    np.testing.assert_allclose(functions.matmul(a, b, True), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(functions.matmul(a, b.swapaxes(-1, -2), False), functions.matmul(a, b, True))


@pytest.mark.parametrize("function", ["lstm", "gru"])
@pytest.mark.parametrize("reverse", [False, True])
def test_recurrent_is_torchs(function, reverse):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[function](5, 6, batch_first=True)
    x = torch.randn(3, 7, 5)
    w_ih, w_hh, b_ih, b_hh = (p.detach() for p in layer.parameters())
    gates = x @ w_ih.T + b_ih
    weight = torch.cat([w_hh, b_hh[:, None]], 1).numpy()
    with torch.no_grad():
        want = layer(x.flip(1))[0].flip(1) if reverse else layer(x)[0]
    np.testing.assert_allclose(
        functions.recurrent(gates.numpy(), weight, function, reverse), want, rtol=1e-5, atol=1e-6
    )
