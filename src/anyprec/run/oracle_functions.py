"""Functions and sums of ARITHMETIC.md section 8 in numpy: float32 arrays in, a float32 array out, to the last bit.

Called by oracle.py. Every step rounds to single precision, as on every instruction set of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from anyprec.run.oracle_ops import F32, fma

LANES = 16

EXP = (1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
LOG = (
    0.3333333134651184, -0.24999965727329254, 0.20000135898590088, -0.16669465601444244, 0.14283975958824158,
    -0.12422750890254974, 0.11048196256160736, -0.10839050263166428, 0.105868861079216, -0.058943308889865875,
)  # fmt: skip
# Of S. Moshier's Cephes library (tanhf)
TANH = (-0.333332819422, 0.133314422036, -0.0537397155531, 0.0206390887954, -0.00570498872745)
ERF_SMALL = (
    1.128379225730896, -0.37612637877464294, 0.11283782869577408, -0.026865437626838684, 0.005221053492277861,
    -0.0008484396385028958, 0.00011268253729213029, -0.000009673590284364764,
)  # fmt: skip
# -log(1 - erf(a)) for a from 1 to 4
ERF_LARGE = (
    -0.00019147849525325, 1.1295939683914185, 0.6331905722618103, 0.10844884812831879, -0.02522662840783596,
    0.004211114253848791, -0.0004426076775416732, 0.000021790321625303477,
)  # fmt: skip


def poly(z: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    """Horner's rule by fma; coefficients from that of z^0 on."""
    *rest, last = (F32(c) for c in coefficients)
    made = np.full_like(z, last)
    for c in reversed(rest):
        made = fma(made, z, np.asarray(c))
    return made


def exp(x: np.ndarray) -> np.ndarray:
    t = np.where(x < F32(89), x, F32(89))
    t = np.where(t > F32(-104), t, F32(-104))
    n = np.rint(t * F32(1.44269502))
    r = fma(n, np.asarray(F32(-0.693145752)), t)
    r = fma(n, np.asarray(F32(-1.42860677e-6)), r)
    m = np.floor(n / 2).astype(np.int32)
    scaled = poly(r, EXP) * np.ldexp(F32(1), m)
    made = scaled * np.ldexp(F32(1), n.astype(np.int32) - m)
    return np.where(np.isnan(x), x, made)


def log(x: np.ndarray) -> np.ndarray:
    small = x < F32(2.0**-126)
    f, exponent = np.frexp(np.where(small, x * F32(2.0**23), x))
    e = exponent.astype(F32) - np.where(small, F32(23), F32(0))
    low = f < F32(0.707106769)
    f, e = np.where(low, f + f, f), np.where(low, e - 1, e)
    g = f - F32(1)
    z = g * g
    y = (g * z) * poly(g, LOG)
    y = fma(e, np.asarray(F32(-2.12194442e-4)), y)
    y = fma(np.asarray(F32(-0.5)), z, y)
    made = fma(e, np.asarray(F32(0.693359375)), g + y)
    made = np.where(x == 0, F32(-np.inf), made)
    made = np.where(x == F32(np.inf), x, made)
    return np.where(np.isnan(x) | (x < 0), F32(np.nan), made)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return F32(1) / (F32(1) + exp(-x))


def tanh(x: np.ndarray) -> np.ndarray:
    a, z = np.abs(x), x * x
    small = fma(x * z, poly(z, TANH), x)
    large = np.copysign(F32(1) - F32(2) / (exp(F32(2) * a) + F32(1)), x)
    return np.where(np.isnan(x), x, np.where(a < F32(0.625), small, large))


def erf(x: np.ndarray) -> np.ndarray:
    a = np.abs(x)
    small = x * poly(x * x, ERF_SMALL)
    b = np.where(a < F32(4), a, F32(4))
    large = np.copysign(F32(1) - exp(-poly(b, ERF_LARGE)), x)
    return np.where(np.isnan(x), x, np.where(a < F32(1), small, large))


def gelu(x: np.ndarray) -> np.ndarray:
    made: np.ndarray = (F32(0.5) * x) * (F32(1) + erf(x * F32(0.707106769)))
    return made


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = F32(0.797884583) * fma(F32(0.044715) * (x * x), x, x)
    made: np.ndarray = (F32(0.5) * x) * (F32(1) + tanh(inner))
    return made


def silu(x: np.ndarray) -> np.ndarray:
    made: np.ndarray = x * sigmoid(x)
    return made


def mish(x: np.ndarray) -> np.ndarray:
    e = exp(x)
    s = e * (e + F32(2))
    return np.where(x > F32(20), x, x * (s / (s + F32(2))))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "abs": np.abs,
    "sqrt": np.sqrt,
    "reciprocal": lambda x: F32(1) / x,
    "exp": exp,
    "log": log,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "erf": erf,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "mish": mish,
}
BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": lambda x, y: np.where(x > y, x, y),
    "min": lambda x, y: np.where(x < y, x, y),
}


# --- Sums (section 8.3) ----------------------------------------------------------------------------------


def rows_of(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """(..., K): the terms of every result along the last axis, in row order. `axes` are those of the array."""
    kept = [i for i in range(x.ndim) if i not in axes]
    moved = x.transpose(*kept, *axes)
    return moved.reshape(*(x.shape[i] for i in kept), -1)


def total(terms: np.ndarray, lanes: bool, squares: bool = False) -> np.ndarray:
    """Their sum along the last axis, or that of their squares: 16 lanes, or one by one."""

    def more(term: np.ndarray, so_far: np.ndarray) -> np.ndarray:
        return fma(term, term, so_far) if squares else so_far + term

    # Zeros fill the last turn: they change nothing, as a lane never holds -0.
    count = terms.shape[-1]
    width = LANES if lanes else 1
    padded = np.zeros(
        (*terms.shape[:-1], -(-count // width) * width), F32
    )  # a lane never holds -0: zeros change nothing
    padded[..., :count] = terms
    made = np.zeros((*terms.shape[:-1], width), F32)
    for first in range(0, padded.shape[-1], width):
        made = more(padded[..., first : first + width], made)
    while width > 1:
        width //= 2
        made = made[..., :width] + made[..., width : 2 * width]
    return made[..., 0]


def reduce(x: np.ndarray, function: str, axes: Sequence[int]) -> np.ndarray:
    """`axes` are those of the array, N counted; they stay, with size 1."""
    terms = rows_of(x, axes)
    shape = [1 if i in axes else size for i, size in enumerate(x.shape)]
    if function in ("sum", "mean"):
        made = total(terms, lanes=x.ndim - 1 in axes)
        made = made / F32(terms.shape[-1]) if function == "mean" else made
    else:
        better = np.greater if function == "max" else np.less
        made = terms[..., 0]
        for i in range(1, terms.shape[-1]):
            made = np.where(better(terms[..., i], made), terms[..., i], made)
    return made.reshape(shape)


def norm(x: np.ndarray, axes: Sequence[int], eps: float) -> np.ndarray:
    d = x - reduce(x, "mean", axes)
    terms = rows_of(d, axes)
    variance = total(terms, lanes=x.ndim - 1 in axes, squares=True) / F32(terms.shape[-1])
    scale = F32(1) / np.sqrt(variance + F32(eps))
    made: np.ndarray = d * scale.reshape([1 if i in axes else size for i, size in enumerate(x.shape)])
    return made


def softmax(x: np.ndarray) -> np.ndarray:
    last = (x.ndim - 1,)
    e = exp(x - reduce(x, "max", last))
    made: np.ndarray = e / reduce(e, "sum", last)
    return made


# --- Products --------------------------------------------------------------------------------------------


def matmul(a: np.ndarray, b: np.ndarray, transposed: bool) -> np.ndarray:
    b = b.swapaxes(-1, -2) if transposed else b
    leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    acc = np.zeros((*leading, a.shape[-2], b.shape[-1]), F32)
    for k in range(a.shape[-1]):
        acc = fma(a[..., :, k, None], b[..., k, None, :], acc)
    return acc


def recurrent(x: np.ndarray, w: np.ndarray, function: str, reverse: bool) -> np.ndarray:
    """x: (N, ..., L, G H); w: (G H, H + 1), the last column a bias. Returns (N, ..., L, H)."""
    leading, units = x.shape[:-1], w.shape[1] - 1
    x = x.reshape(-1, *x.shape[-2:])
    batch, length, _ = x.shape
    h = np.zeros((batch, units), F32)
    c = np.zeros_like(h)
    made = np.empty((batch, length, units), F32)
    for at in range(length - 1, -1, -1) if reverse else range(length):
        u = np.broadcast_to(w[:, units], (batch, len(w)))
        for k in range(units):
            u = fma(h[:, k, None], w[None, :, k], u)
        gates = [x[:, at, i : i + units] for i in range(0, len(w), units)]
        shares = [u[:, i : i + units] for i in range(0, len(w), units)]
        if function == "lstm":
            i, f, g, o = (one + share for one, share in zip(gates, shares, strict=True))
            c = fma(sigmoid(f), c, sigmoid(i) * tanh(g))
            h = sigmoid(o) * tanh(c)
        else:
            r, z = (sigmoid(one + share) for one, share in zip(gates[:2], shares[:2], strict=True))
            n = tanh(fma(r, shares[2], gates[2]))
            h = fma(z, h - n, n)
        made[:, at] = h
    return made.reshape(*leading, units)
