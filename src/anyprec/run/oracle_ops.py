"""The arithmetic of ARITHMETIC.md in numpy: arrays (N, H, W, C) and plain numbers in, an array out.

No Graph in here: oracle.py takes the attributes out of the ops and calls these. Written to be read beside ARITHMETIC.md
and to give its results to the last bit, not to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

F32, F64 = np.float32, np.float64

# A double holds 29 bits more than a single; the first of them set and the others clear is half way between two singles.
_BELOW_SINGLE = np.int64((1 << 29) - 1)
_HALF_WAY = np.int64(1 << 28)
_LEAST_NORMAL = 2.0**-126


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of singles, rounded once. Infinity and NaN as IEEE 754 has them."""
    return add_rounded(np.multiply(a, b, dtype=F64), np.asarray(c, F64))  # 24 + 24 bits: the product is exact


def add_rounded(product: np.ndarray, c: np.ndarray) -> np.ndarray:
    """product + c, both double, as the nearest single to the exact sum.

    Rounding to double and then to single goes wrong only where the double lies half way between two singles and the
    exact sum does not: anywhere else both lie on the same side of every half-way point. Those few are repaired.
    Half-way points between subnormal singles have other low bits, so all sums that small count as doubtful, but for
    zero, which is exact: no sum of a product and a single is too small for a double.
    """
    total = np.asarray(product + c)
    doubtful = (total.view(np.int64) & _BELOW_SINGLE) == _HALF_WAY
    doubtful |= (np.abs(total) < _LEAST_NORMAL) & (total != 0)
    if doubtful.any():
        p, q = (np.broadcast_to(v, total.shape)[doubtful] for v in (product, c))
        total[doubtful] = _add_to_odd(p, q)
    return total.astype(F32)


def _add_to_odd(p: np.ndarray, c: np.ndarray) -> np.ndarray:
    """p + c in double, rounded to odd: of the two doubles around an inexact sum, the one with its last bit set.

    Rounding that to single rounds the exact sum, as a double has two bits more than twice a single's (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    s = p + c
    from_c = s - p
    error = (p - (s - from_c)) + (c - from_c)  # TwoSum: s + error is the exact sum; nothing here leaves double's range
    even = (s.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    made: np.ndarray = np.where(np.isfinite(s) & (error != 0) & even, np.nextafter(s, toward), s)
    return made


def at_least_zero(t: np.ndarray) -> np.ndarray:
    return np.where(t > 0, t, F32(0))  # NaN and -0 give +0


def codes_of(t: np.ndarray, levels: int) -> np.ndarray:
    """round_half_even(min(max(t, 0), levels))."""
    made: np.ndarray = np.rint(np.minimum(at_least_zero(t), F32(levels))).astype(np.uint8)
    return made


def clip(x: np.ndarray, low: np.float32, high: np.float32) -> np.ndarray:
    t = np.where(x > low, x, low)
    return np.where(t < high, t, high)


# --- Windows ------------------------------------------------------------------------------------------------


def window_count(size: int, pads: tuple[int, int], kernel: int, stride: int, dilation: int, ceil: bool = False) -> int:
    """Output size along one axis."""
    span = size + sum(pads) - dilation * (kernel - 1) - 1
    count = (-(-span // stride) if ceil else span // stride) + 1
    if ceil and (count - 1) * stride - pads[0] >= size:
        count -= 1
    assert count >= 1, f"a window of {kernel} (dilation {dilation}) does not fit into {size} with padding {pads}"
    return count


Tap = tuple[int, slice, slice]  # number in the kernel, outputs for which it lies in the image, what they read there


def taps(size: int, count: int, pad: int, kernel: int, stride: int, dilation: int) -> Iterator[Tap]:
    """The taps of a kernel along one axis, in order. Outputs whose tap lies outside the image are not in the slice.

    Size 5, pad 1, kernel 3, stride 2: tap 0 stands at -1, 1, 3, so it is outputs 1..2 that read 1 and 3.
    """
    for k in range(kernel):
        offset = k * dilation - pad
        first = max(0, -(offset // stride))
        last = min(count, (size - 1 - offset) // stride + 1)
        if first < last:
            start = first * stride + offset
            yield k, slice(first, last), slice(start, start + (last - first - 1) * stride + 1, stride)


def transposed_taps(size: int, count: int, pad: int, kernel: int, stride: int, dilation: int) -> Iterator[Tap]:
    """Of a transposed convolution: tap k of output i stride + k dilation - pad reads input i."""
    for k in range(kernel):
        offset = k * dilation - pad
        first = max(0, -(offset // stride))
        last = min(size, (count - 1 - offset) // stride + 1)
        if first < last:
            start = first * stride + offset
            yield k, slice(start, start + (last - first - 1) * stride + 1, stride), slice(first, last)


def window_taps(
    shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    ceil: bool = False,
    output_pad: Sequence[int] | None = None,
) -> tuple[tuple[int, int], list[tuple[Tap, Tap]]]:
    """Output height and width, and the taps of the window in order (h, w); pad is top, left, bottom, right.

    Of a transposed convolution where `output_pad` is given.
    """
    axes, counts = [], []
    for i in (0, 1):
        if output_pad is not None:
            reach = dilation[i] * (kernel[i] - 1) + 1
            counts.append((shape[1 + i] - 1) * stride[i] - pad[i] - pad[2 + i] + reach + output_pad[i])
            assert counts[i] >= 1, f"a transposed convolution makes a size of {counts[i]}"
            axes.append(list(transposed_taps(shape[1 + i], counts[i], pad[i], kernel[i], stride[i], dilation[i])))
            continue
        counts.append(window_count(shape[1 + i], (pad[i], pad[2 + i]), kernel[i], stride[i], dilation[i], ceil))
        axes.append(list(taps(shape[1 + i], counts[i], pad[i], kernel[i], stride[i], dilation[i])))
    return (counts[0], counts[1]), [(h, w) for h in axes[0] for w in axes[1]]


# --- Convolution --------------------------------------------------------------------------------------------


def conv_codes(
    a: np.ndarray,
    codes: np.ndarray,
    bits: int,
    groups: int,
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    output_pad: Sequence[int] | None = None,
) -> np.ndarray:
    """Sum of (2c + 1 - 2^bits) a over K; a: (N, H, W, C) integers. Returns (N, OH, OW, out) int64."""
    w = 2 * codes.astype(F64) + (1 - 2**bits)  # (out, kh, kw, in/groups); odd numbers below 2^8
    out, kh, kw, inside = w.shape
    w = w.reshape(groups, out // groups, kh, kw, inside)
    (oh, ow), window_list = window_taps(a.shape, (kh, kw), stride, pad, dilation, output_pad=output_pad)
    batch = a.shape[0]
    split = a.reshape(*a.shape[:3], groups, inside).astype(F64)
    acc = np.zeros((batch, oh, ow, groups, out // groups))
    for (i, oy, iy), (j, ox, ix) in window_list:
        part = split[:, iy, ix]  # (N, h, w, groups, in/groups)
        # In doubles, since BLAS has no integers: exact below 2^53, in any order.
        pixels = int(np.prod(part.shape[:3]))
        by_group = part.transpose(3, 0, 1, 2, 4).reshape(groups, pixels, inside) @ w[:, :, i, j].transpose(0, 2, 1)
        acc[:, oy, ox] += by_group.reshape(groups, *part.shape[:3], out // groups).transpose(1, 2, 3, 0, 4)
    assert not acc.size or np.abs(acc).max() < 2**31, "the sum leaves 32-bit integers: such a file is refused"
    return acc.reshape(batch, oh, ow, out).astype(np.int64)


def conv_float(
    x: np.ndarray,
    w: np.ndarray,
    groups: int,
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    output_pad: Sequence[int] | None = None,
    toom_cook: bool = False,
) -> np.ndarray:
    """acc = fma(x, w, acc) in the order of K, or by Toom-Cook: (N, OH, OW, out) float32."""
    out, kh, kw, inside = w.shape
    stem = groups == 1 and set(stride) == {2} and set(dilation) == {1} and min(kh, kw) >= 5 and max(kh, kw) <= 8
    if toom_cook or (stem and output_pad is None):
        return conv_toom_cook(x, w, pad, stride[0])
    (oh, ow), window_list = window_taps(x.shape, (kh, kw), stride, pad, dilation, output_pad=output_pad)
    split = x.reshape(*x.shape[:3], groups, inside, 1).astype(F64)
    w = w.reshape(groups, out // groups, kh, kw, inside).astype(F64)
    acc = np.zeros((x.shape[0], oh, ow, groups, out // groups), F32)
    for (i, oy, iy), (j, ox, ix) in window_list:
        for k in range(inside):
            product = split[:, iy, ix, :, k] * w[:, :, i, j, k]  # (N, h, w, groups, out/groups), exact
            acc[:, oy, ox] = add_rounded(product, acc[:, oy, ox].astype(F64))
    return acc.reshape(x.shape[0], oh, ow, out)


TOOM_COOK_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, -0.5)
TOOM_COOK_DIVISORS = (2.0, -9.0, 3.0, 60.0, -36.0, -1.40625)
TOOM_COOK_INPUT = (
    (2, 4, -2.5, -5, 0.5, 1, 0),
    (0, -2, -6, -3.5, 1.5, 1, 0),
    (0, 2, 2, -4.5, -0.5, 1, 0),
    (0, -1, -2.5, 0, 2.5, 1, 0),
    (0, 1, 1.5, -2, -1.5, 1, 0),
    (0, 4, 0, -5, 0, 1, 0),
    (0, 2, 4, -2.5, -5, 0.5, 1),
)


def conv_toom_cook(x: np.ndarray, w: np.ndarray, pad: Sequence[int], b: int) -> np.ndarray:
    """Toom-Cook, 4 x 4 outputs at a time, by 49 products per channel of a block of b x b pixels, b being the stride:
    ARITHMETIC.md, section 4."""
    batch, out, inside = x.shape[0], w.shape[0], w.shape[3]
    (oh, ow), _ = window_taps(x.shape, w.shape[1:3], (b, b), pad, (1, 1))
    high, wide = -(-oh // 4), -(-ow // 4)

    def blocks(values: np.ndarray, rows: int, columns: int) -> np.ndarray:  # (..., b rows, b columns, in)
        split = values.reshape(-1, rows, b, columns, b, inside).transpose(0, 1, 3, 2, 4, 5)
        return split.reshape(-1, rows, columns, b * b * inside)

    framed = np.zeros((batch, b * (4 * high + 3), b * (4 * wide + 3), inside), F32)
    height, width = (max(0, min(x.shape[1 + i], framed.shape[1 + i] - pad[i])) for i in (0, 1))
    framed[:, pad[0] : pad[0] + height, pad[1] : pad[1] + width] = x[:, :height, :width]
    d = blocks(framed, 4 * high + 3, 4 * wide + 3)
    g = np.zeros((out, 4 * b, 4 * b, inside), F64)
    g[:, : w.shape[1], : w.shape[2]] = w
    g = blocks(g, 4, 4)

    u = toom_cook_weights(toom_cook_weights(g, 2), 1).astype(F32)  # (out, 7, 7, b b in)
    v = toom_cook_input(toom_cook_input(d, 2, wide), 1, high)  # (N, high, 7, wide, 7, b b in)
    m = np.zeros((*v.shape[:-1], out), F32)
    for k in range(b * b * inside):
        weights = u[..., k].transpose(1, 2, 0)  # (7, 7, out)
        m = fma(v[..., k, None], weights[None, None, :, None], m)
    y = toom_cook_outputs(toom_cook_outputs(m, 4), 2)  # (N, high, 4, wide, 4, out)
    return y.reshape(batch, 4 * high, 4 * wide, out)[:, :oh, :ow]


def toom_cook_weights(g: np.ndarray, axis: int) -> np.ndarray:
    """G g along an axis: 4 -> 7, in double precision."""
    g0, g1, g2, g3 = np.moveaxis(g, axis, 0)
    points = zip(TOOM_COOK_POINTS, TOOM_COOK_DIVISORS, strict=True)
    return np.stack([(((g3 * p + g2) * p + g1) * p + g0) / f for p, f in points] + [g3], axis)


def toom_cook_input(d: np.ndarray, axis: int, tiles: int) -> np.ndarray:
    """B'd along an axis: 4 tiles + 3 -> (tiles, 7)."""
    d = np.moveaxis(d, axis, 0)
    v = np.zeros((len(TOOM_COOK_INPUT), tiles, *d.shape[1:]), F32)
    for position, factors in enumerate(TOOM_COOK_INPUT):
        for i, factor in enumerate(factors):
            if factor:
                v[position] = fma(np.array(factor, F32), d[i : i + 4 * tiles : 4], v[position])
    return np.moveaxis(v, (1, 0), (axis, axis + 1))


def toom_cook_outputs(m: np.ndarray, axis: int) -> np.ndarray:
    """A'm along an axis: 7 -> 4."""
    m0, m1, m2, m3, m4, m5, m6 = np.moveaxis(m, axis, 0)
    sum1, difference1, sum2, difference2 = m1 + m2, m1 - m2, m3 + m4, m3 - m4

    def mixed(a: np.ndarray, factor: float, b: np.ndarray, last: float) -> np.ndarray:
        return fma(m5, np.array(last, F32), fma(b, np.array(factor, F32), a))

    y0 = m0 + sum1 + sum2 + m5
    y1, y2 = mixed(difference1, 2, difference2, -0.5), mixed(sum1, 4, sum2, 0.25)
    y3 = mixed(difference1, 8, difference2, -0.125) + m6
    return np.stack([y0, y1, y2, y3], axis)


# --- Pooling ------------------------------------------------------------------------------------------------


def max_pool(
    x: np.ndarray,
    kernel: Sequence[int],
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> np.ndarray:
    """Of floats or codes. A window with no tap inside the image is refused, as the readers do."""
    (oh, ow), window_list = window_taps(x.shape, kernel, stride, pad, dilation, ceil)
    best = np.empty((x.shape[0], oh, ow, x.shape[3]), x.dtype)
    first = np.ones((1, oh, ow, 1), bool)  # has met no tap yet: takes whatever comes, NaN too
    for (_, oy, iy), (_, ox, ix) in window_list:
        v = x[:, iy, ix]
        best[:, oy, ox] = np.where(first[:, oy, ox] | (v > best[:, oy, ox]), v, best[:, oy, ox])
        first[:, oy, ox] = False
    assert not first.any(), "max_pool has a window that lies in the padding alone"
    return best


def avg_pool(
    x: np.ndarray, kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int], ceil: bool, count_pad: bool
) -> np.ndarray:
    """A window with no tap inside the image is refused, as the readers do."""
    (oh, ow), window_list = window_taps(x.shape, kernel, stride, pad, (1, 1), ceil)
    total = np.zeros((x.shape[0], oh, ow, x.shape[3]), F32)
    count = np.zeros((oh, ow, 1), F32)
    for (_, oy, iy), (_, ox, ix) in window_list:
        total[:, oy, ox] += x[:, iy, ix]
        count[oy, ox] += 1
    assert count.all(), "avg_pool has a window that lies in the padding alone"
    if count_pad:
        # A window may reach beyond the padding where ceil adds it.
        ends = [
            np.minimum(np.arange(n) * stride[i] + kernel[i], x.shape[1 + i] + pad[i] + pad[2 + i])
            - np.arange(n) * stride[i]
            for i, n in enumerate((oh, ow))
        ]
        count = np.multiply.outer(*ends)[:, :, None].astype(F32)
    return total / count


def adaptive_avg_pool(x: np.ndarray, size: Sequence[int]) -> np.ndarray:
    n, h, w, c = x.shape
    y = np.empty((n, size[0], size[1], c), F32)
    for i in range(size[0]):
        rows = slice(i * h // size[0], -(-(i + 1) * h // size[0]))
        for j in range(size[1]):
            window = x[:, rows, j * w // size[1] : -(-(j + 1) * w // size[1])]
            count = window.shape[1] * window.shape[2]
            y[:, i, j] = sum_in_order(window.reshape(n, count, c), axis=1) / F32(count)
    return y


def sum_in_order(x: np.ndarray, axis: int) -> np.ndarray:
    """0 + x[0] + x[1] + ..., rounded at each step; np.sum adds in pairs instead."""
    zero = np.zeros_like(x.take([0], axis))  # matters for -0 alone
    made: np.ndarray = np.add.accumulate(np.concatenate([zero, x], axis), axis).take(-1, axis)
    return made


# --- Resize and softmax -------------------------------------------------------------------------------------


def resize(x: np.ndarray, mode: str, align: bool, size: Sequence[int], scale: Sequence[float] | None) -> np.ndarray:
    """To height and width `size`; `scale` where that was given, as its reciprocal is the step then."""
    for axis in (2, 1):  # W first, then H
        inside, outside = x.shape[axis], size[axis - 1]
        ratio = inside / outside if scale is None else 1 / scale[axis - 1]
        i = np.arange(outside, dtype=F64)
        if mode == "nearest":
            x = x.take(np.minimum(np.floor(i * ratio).astype(np.int64), inside - 1), axis)
            continue
        if align:
            s = i * (inside - 1) / (outside - 1) if outside > 1 else i * 0
        else:
            s = np.maximum((i + 0.5) * ratio - 0.5, 0)
        i0 = np.minimum(np.floor(s).astype(np.int64), inside - 1)
        i1 = np.minimum(i0 + 1, inside - 1)
        w = (s - i0).astype(F32).reshape((-1, 1, 1) if axis == 1 else (-1, 1))
        a, b = x.take(i0, axis), x.take(i1, axis)
        x = fma(w, b - a, a)
    return x


def scaled_size(shape: Sequence[int], scale: Sequence[float]) -> tuple[int, int]:
    return math.floor(shape[1] * scale[0]), math.floor(shape[2] * scale[1])


def softmax(x: np.ndarray) -> np.ndarray:
    """Over C, by a series of its own: exp differs in its last bit between libraries."""
    t = x.astype(F64) - x.max(axis=-1, keepdims=True).astype(F64)
    m = np.rint(t * 1.4426950408889634)
    r = (t - m * 0.6931471803691238) - m * 1.9082149292705877e-10
    q = np.ones_like(t)
    for i in range(13, 0, -1):
        q = 1 + (r / i) * q
    power = np.where(t < -700, 0, m)
    e = np.where(t < -700, 0.0, np.ldexp(q, np.where(np.isnan(power), 0, power).astype(np.int64)))
    made: np.ndarray = (e / sum_in_order(e, axis=-1)[..., None]).astype(F32)
    return made
