// Kernels of format 3 over a vector type: functions, reductions, normalization, softmax and matrix products, as
// ARITHMETIC.md, sections 8.2 to 8.5, defines them. In: `F`, `I` and masks `M` of W lanes (kernels_<isa>.cpp), as for
// vector_kernels.inl. Out: `functions`, a FunctionKernels. Every step is one rounded operation, and lanes mix only in
// `folded`, in one order: all instruction sets agree to the bit.
//
//   sums of a row: 16 lanes: 1 zmm, 2 ymm, 4 neon, 16 floats   matrix product: kTileRows x kTileVectors accumulators
//   x   0 ..  15 | 16 ..  31 | ...                                        b[k]: vector 0 | vector 1 | ...
//       +lane       +lane                                      a[i,k] ->        acc i,0  | acc i,1  | ...

constexpr int kLanes16 = 16, kParts = kLanes16 / W;

// --- Functions, section 8.2 ------------------------------------------------------------------------------------------

inline F poly(F, float c) {
    return set1(c);
}
template <typename... Rest> ANYPREC_INLINE F poly(F z, float c, Rest... rest) {
    return fma(poly(z, rest...), z, set1(c));
}

inline F absolute(F x) {
    return from_bits(bit_and(bits_of(x), set1(int32_t(0x7fffffff))));
}
inline F with_sign_of(F x, F y) { // y is not negative
    return from_bits(bit_or(bits_of(y), bit_and(bits_of(x), set1(INT32_MIN))));
}
inline F power_of_2(I n) {
    return from_bits(to_exponent(add(n, set1(int32_t(127)))));
}

ANYPREC_INLINE F exponential(F x) {
    const F t = larger(smaller(x, set1(89.0f)), set1(-104.0f));
    const F n = round_even(mul(t, set1(1.44269502f)));
    const F r = fma(n, set1(-1.42860677e-6f), fma(n, set1(-0.693145752f), t));
    const F p = poly(r, 1.0f, 1.0f, 0.5f, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040);
    const I whole = to_int(n), m = halved(whole);
    return choose(is_nan(x), x, mul(mul(p, power_of_2(m)), power_of_2(minus(whole, m))));
}

ANYPREC_INLINE F logarithm(F x) {
    const M subnormal = less(x, set1(1.17549435e-38f));
    const I bits = bits_of(choose(subnormal, mul(x, set1(8388608.0f)), x));
    F e = to_float(minus(exponent_of(bits), set1(int32_t(126))));
    e = choose(subnormal, sub(e, set1(23.0f)), e);
    F f = from_bits(bit_or(bit_and(bits, set1(int32_t(0x007fffff))), set1(int32_t(0x3f000000))));
    const M low = less(f, set1(0.707106769f));
    f = choose(low, add(f, f), f);
    e = choose(low, sub(e, set1(1.0f)), e);
    const F g = sub(f, set1(1.0f)), z = mul(g, g);
    const F p = poly(g, 0.3333333134651184f, -0.24999965727329254f, 0.20000135898590088f, -0.16669465601444244f,
                     0.14283975958824158f, -0.12422750890254974f, 0.11048196256160736f, -0.10839050263166428f,
                     0.105868861079216f, -0.058943308889865875f);
    F y = mul(mul(g, z), p);
    y = fma(e, set1(-2.12194442e-4f), y);
    y = fma(set1(-0.5f), z, y);
    y = fma(e, set1(0.693359375f), add(g, y));
    const float infinity = HUGE_VALF;
    const F special = choose(less(x, set1(0.0f)), set1(NAN), choose(is_nan(x), x, set1(-infinity)));
    return choose(less(set1(0.0f), x), choose(less(x, set1(infinity)), y, x), special);
}

ANYPREC_INLINE F sigmoid(F x) {
    return div(set1(1.0f), add(set1(1.0f), exponential(mul(x, set1(-1.0f)))));
}

ANYPREC_INLINE F hyperbolic_tangent(F x) {
    const F a = absolute(x), z = mul(x, x);
    const F p = poly(z, -0.333332819422f, 0.133314422036f, -0.0537397155531f, 0.0206390887954f, -0.00570498872745f);
    const F near = fma(mul(x, z), p, x);
    const F far = sub(set1(1.0f), div(set1(2.0f), add(exponential(add(a, a)), set1(1.0f))));
    return choose(is_nan(x), x, choose(less(a, set1(0.625f)), near, with_sign_of(x, far)));
}

ANYPREC_INLINE F error_function(F x) {
    const F a = absolute(x), b = smaller(a, set1(4.0f));
    const F near = mul(x, poly(mul(x, x), 1.128379225730896f, -0.37612637877464294f, 0.11283782869577408f,
                               -0.026865437626838684f, 0.005221053492277861f, -0.0008484396385028958f,
                               0.00011268253729213029f, -0.000009673590284364764f));
    const F p = poly(b, -0.00019147849525325f, 1.1295939683914185f, 0.6331905722618103f, 0.10844884812831879f,
                     -0.02522662840783596f, 0.004211114253848791f, -0.0004426076775416732f, 0.000021790321625303477f);
    const F far = sub(set1(1.0f), exponential(mul(p, set1(-1.0f))));
    return choose(is_nan(x), x, choose(less(a, set1(1.0f)), near, with_sign_of(x, far)));
}

ANYPREC_INLINE F gelu(F x) {
    return mul(mul(set1(0.5f), x), add(set1(1.0f), error_function(mul(x, set1(0.707106769f)))));
}

ANYPREC_INLINE F gelu_tanh(F x) {
    const F inner = fma(mul(set1(0.044715f), mul(x, x)), x, x);
    return mul(mul(set1(0.5f), x), add(set1(1.0f), hyperbolic_tangent(mul(set1(0.797884583f), inner))));
}

ANYPREC_INLINE F mish(F x) {
    const F e = exponential(x), s = mul(e, add(e, set1(2.0f)));
    const F y = mul(x, div(s, add(s, set1(2.0f))));
    return choose(is_nan(x), x, choose(less(set1(20.0f), x), x, y));
}

template <typename Each> ANYPREC_INLINE void over_numbers(const float *x, float *y, size_t count, const Each &each) {
    size_t i = 0;
    for (; i + W <= count; i += W)
        store(y + i, each(load(x + i, W)), W);
    if (const int n = static_cast<int>(count - i); n > 0)
        store(y + i, each(load(x + i, n)), n);
}

void pointwise(Function function, const float *x, float *y, size_t count) {
    switch (function) {
    case Function::abs:
        return over_numbers(x, y, count, [](F v) { return absolute(v); });
    case Function::sqrt:
        return over_numbers(x, y, count, [](F v) { return square_root(v); });
    case Function::reciprocal:
        return over_numbers(x, y, count, [](F v) { return div(set1(1.0f), v); });
    case Function::exp:
        return over_numbers(x, y, count, [](F v) { return exponential(v); });
    case Function::log:
        return over_numbers(x, y, count, [](F v) { return logarithm(v); });
    case Function::sigmoid:
        return over_numbers(x, y, count, [](F v) { return sigmoid(v); });
    case Function::tanh:
        return over_numbers(x, y, count, [](F v) { return hyperbolic_tangent(v); });
    case Function::erf:
        return over_numbers(x, y, count, [](F v) { return error_function(v); });
    case Function::gelu:
        return over_numbers(x, y, count, [](F v) { return gelu(v); });
    case Function::gelu_tanh:
        return over_numbers(x, y, count, [](F v) { return gelu_tanh(v); });
    case Function::silu:
        return over_numbers(x, y, count, [](F v) { return mul(v, sigmoid(v)); });
    default:
        return over_numbers(x, y, count, [](F v) { return mish(v); });
    }
}

template <typename Each>
ANYPREC_INLINE void over_pairs(const float *x, size_t x_step, const float *y, size_t y_step, float *out, size_t count,
                               const Each &each) {
    const F one_x = set1(x[0]), one_y = set1(y[0]);
    for (size_t i = 0; i < count; i += W) {
        const int n = count - i < W ? static_cast<int>(count - i) : W;
        store(out + i, each(x_step ? load(x + i, n) : one_x, y_step ? load(y + i, n) : one_y), n);
    }
}

void binary(Function function, const float *x, size_t x_step, const float *y, size_t y_step, float *out, size_t count) {
    switch (function) {
    case Function::add:
        return over_pairs(x, x_step, y, y_step, out, count, [](F a, F b) { return add(a, b); });
    case Function::sub:
        return over_pairs(x, x_step, y, y_step, out, count, [](F a, F b) { return sub(a, b); });
    case Function::mul:
        return over_pairs(x, x_step, y, y_step, out, count, [](F a, F b) { return mul(a, b); });
    case Function::div:
        return over_pairs(x, x_step, y, y_step, out, count, [](F a, F b) { return div(a, b); });
    case Function::max:
        return over_pairs(x, x_step, y, y_step, out, count, [](F a, F b) { return larger(a, b); });
    default:
        return over_pairs(x, x_step, y, y_step, out, count, [](F a, F b) { return smaller(a, b); });
    }
}

// --- Rows, sections 8.3 and 8.4
// ----------------------------------------------------------------------------------------

inline float folded(float *lanes) {
    for (int width = kLanes16 / 2; width; width /= 2)
        for (int i = 0; i < width; ++i)
            lanes[i] += lanes[i + width];
    return lanes[0];
}

// The sum of a row, in lanes: lane = each(lane, i, n) for numbers i .. i + n of it.
template <typename Each> ANYPREC_INLINE float lane_sum(size_t count, const Each &each) {
    F acc[kParts];
#pragma GCC unroll 16
    for (int v = 0; v < kParts; ++v)
        acc[v] = set1(0.0f);
    size_t i = 0;
    for (; i + kLanes16 <= count; i += kLanes16)
#pragma GCC unroll 16
        for (int v = 0; v < kParts; ++v)
            acc[v] = each(acc[v], i + static_cast<size_t>(W * v), W);
    float lanes[kLanes16];
#pragma GCC unroll 16
    for (int v = 0; v < kParts; ++v)
        store(lanes + W * v, acc[v], W);
    const int rest = static_cast<int>(count - i);
    for (int at = 0; at < rest; at += W) {
        const int n = rest - at < W ? rest - at : W;
        store(lanes + at, each(load(lanes + at, n), i + static_cast<size_t>(at), n), n);
    }
    return folded(lanes);
}

inline float row_sum(const float *x, size_t count) {
    return lane_sum(count, [x](F lane, size_t i, int n) { return add(lane, load(x + i, n)); });
}

// The first of the largest (or smallest) numbers: all lanes start from the first number, so a NaN later in the row
// never wins, as in a loop over the row. Of zeros with different signs the loop keeps the first.
template <bool Largest> float row_extreme(const float *x, size_t count) {
    const auto better = [](F v, F best) { return Largest ? larger(v, best) : smaller(v, best); };
    F acc[kParts];
    for (int v = 0; v < kParts; ++v)
        acc[v] = set1(x[0]);
    size_t i = 0;
    for (; i + kLanes16 <= count; i += kLanes16)
#pragma GCC unroll 16
        for (int v = 0; v < kParts; ++v)
            acc[v] = better(load(x + i + W * v, W), acc[v]);
    float lanes[kLanes16];
    for (int v = 0; v < kParts; ++v)
        store(lanes + W * v, acc[v], W);
    float best = lanes[0];
    const auto compare = [&best](float v) { best = (Largest ? v > best : v < best) ? v : best; };
    for (int lane = 1; lane < kLanes16; ++lane)
        compare(lanes[lane]);
    for (; i < count; ++i)
        compare(x[i]);
    if (best != 0) // also NaN
        return best;
    while (*x != 0)
        ++x;
    return *x;
}

void reduce_rows(Function function, const float *x, size_t rows, size_t count, float *out) {
    for (size_t r = 0; r < rows; ++r, x += count) {
        if (function == Function::max)
            out[r] = row_extreme<true>(x, count);
        else if (function == Function::min)
            out[r] = row_extreme<false>(x, count);
        else
            out[r] = row_sum(x, count);
        if (function == Function::mean)
            out[r] /= static_cast<float>(count);
    }
}

void norm_rows(const float *x, size_t rows, size_t count, float eps, float *y) {
    const float terms = static_cast<float>(count);
    for (size_t r = 0; r < rows; ++r, x += count, y += count) {
        const F mean = set1(row_sum(x, count) / terms);
        const float squares = lane_sum(count, [x, mean](F lane, size_t i, int n) {
            const F d = sub(load(x + i, n), mean);
            return fma(d, d, lane);
        });
        const F variance = set1(squares / terms);
        const F factor = div(set1(1.0f), square_root(add(variance, set1(eps))));
        over_numbers(x, y, count, [mean, factor](F v) { return mul(sub(v, mean), factor); });
    }
}

void softmax_rows(const float *x, size_t rows, size_t count, float *y) {
    for (size_t r = 0; r < rows; ++r, x += count, y += count) {
        const F top = set1(row_extreme<true>(x, count));
        const F sum = set1(lane_sum(count, [x, y, top](F lane, size_t i, int n) {
            const F e = exponential(sub(load(x + i, n), top));
            store(y + i, e, n);
            return add(lane, e);
        }));
        over_numbers(y, y, count, [sum](F e) { return div(e, sum); });
    }
}

// --- Columns, section 8.3
// ----------------------------------------------------------------------------------------------

// Calls each(first column, lanes, vectors) for all columns, four vectors at a time where they are whole.
template <typename Four, typename One>
ANYPREC_INLINE void over_columns(size_t columns, const Four &four, const One &one) {
    size_t c = 0;
    for (; c + 4 * W <= columns; c += 4 * W)
        four(c);
    for (; c < columns; c += W)
        one(c, columns - c < W ? static_cast<int>(columns - c) : W);
}

// acc = each(acc, x) down `V` vectors of columns, starting at term `first`.
template <int V, typename Each>
ANYPREC_INLINE void down(const float *x, size_t first, size_t terms, size_t stride, int n, F (&acc)[V],
                         const Each &each) {
    x += stride * first;
    for (size_t t = first; t < terms; ++t, x += stride)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
            acc[v] = each(acc[v], load(x + W * v, n), v);
}

template <int V>
ANYPREC_INLINE void reduce_vectors(Function function, const float *x, size_t terms, size_t stride, int n, float *out) {
    F acc[V];
    const bool extreme = function == Function::max || function == Function::min;
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
        acc[v] = extreme ? load(x + W * v, n) : set1(0.0f);
    if (function == Function::max)
        down<V>(x, 1, terms, stride, n, acc, [](F best, F v, int) { return larger(v, best); });
    else if (function == Function::min)
        down<V>(x, 1, terms, stride, n, acc, [](F best, F v, int) { return smaller(v, best); });
    else
        down<V>(x, 0, terms, stride, n, acc, [](F sum, F v, int) { return add(sum, v); });
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
        store(out + W * v, function == Function::mean ? div(acc[v], set1(static_cast<float>(terms))) : acc[v], n);
}

void reduce_columns(Function function, const float *x, size_t terms, size_t stride, size_t columns, float *out) {
    over_columns(
        columns, [&](size_t c) { reduce_vectors<4>(function, x + c, terms, stride, W, out + c); },
        [&](size_t c, int n) { reduce_vectors<1>(function, x + c, terms, stride, n, out + c); });
}

template <int V>
ANYPREC_INLINE void norm_vectors(const float *x, size_t terms, size_t stride, int n, float eps, float *y) {
    const F count = set1(static_cast<float>(terms));
    F mean[V], factor[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
        mean[v] = factor[v] = set1(0.0f);
    down<V>(x, 0, terms, stride, n, mean, [](F sum, F v, int) { return add(sum, v); });
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
        mean[v] = div(mean[v], count);
    down<V>(x, 0, terms, stride, n, factor, [&mean](F sum, F value, int v) {
        const F d = sub(value, mean[v]);
        return fma(d, d, sum);
    });
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
        factor[v] = div(set1(1.0f), square_root(add(div(factor[v], count), set1(eps))));
    for (size_t t = 0; t < terms; ++t, x += stride, y += stride)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
            store(y + W * v, mul(sub(load(x + W * v, n), mean[v]), factor[v]), n);
}

void norm_columns(const float *x, size_t terms, size_t stride, size_t columns, float eps, float *y) {
    over_columns(
        columns, [&](size_t c) { norm_vectors<4>(x + c, terms, stride, W, eps, y + c); },
        [&](size_t c, int n) { norm_vectors<1>(x + c, terms, stride, n, eps, y + c); });
}

#include "kernels/matmul.inl"

struct FloatProduct {
    static ANYPREC_INLINE F add(F a, F b, F sum) { return fma(a, b, sum); }
};

// --- Recurrent layers, section 8.5
// -------------------------------------------------------------------------------------

void lstm(const RecurrentCell &r) {
    const size_t hidden = static_cast<size_t>(r.hidden);
    for (int i = 0; i < r.hidden; i += W) {
        const int n = r.hidden - i;
        const auto gate = [&](size_t g) { return add(load(r.x + g * hidden + i, n), load(r.u + g * hidden + i, n)); };
        const F input = sigmoid(gate(0)), forget = sigmoid(gate(1)), candidate = hyperbolic_tangent(gate(2));
        const F output = sigmoid(gate(3));
        const F c = fma(forget, load(r.state + i, n), mul(input, candidate));
        store(r.state + i, c, n);
        store(r.h + i, mul(output, hyperbolic_tangent(c)), n);
    }
}

void gru(const RecurrentCell &r) {
    const size_t hidden = static_cast<size_t>(r.hidden);
    for (int i = 0; i < r.hidden; i += W) {
        const int n = r.hidden - i;
        const auto x = [&](size_t g) { return load(r.x + g * hidden + i, n); };
        const auto u = [&](size_t g) { return load(r.u + g * hidden + i, n); };
        const F reset = sigmoid(add(x(0), u(0))), update = sigmoid(add(x(1), u(1)));
        const F candidate = hyperbolic_tangent(fma(reset, u(2), x(2)));
        store(r.h + i, fma(update, sub(load(r.before + i, n), candidate), candidate), n);
    }
}

#include "kernels/winograd_floats.inl"

constexpr FunctionKernels functions = {
    kTileVectors * W,     pointwise, binary, reduce_rows,     norm_rows, softmax_rows, reduce_columns, norm_columns,
    matmul<FloatProduct>, lstm,      gru,    &winograd_floats};
