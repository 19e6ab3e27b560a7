// Kernels written once over a vector type: epilogue of a vector, depthwise convolution, max, conversions, lookup
// offsets.
// In: `F` (floats) and `I` (int32) of W lanes, with load and store of the first n lanes, fma, add, larger (a > b ? a :
// b, as maxps), smaller and to_float; the including kernels_<isa>.cpp defines them. Out: functions for its table. All
// instruction sets compute the same expressions, and lanes never mix, so results agree to the bit (ARITHMETIC.md). Each
// kernels_<isa>.cpp includes this in its anonymous namespace: the linker must not merge copies compiled with different
// flags.
//
//   channel   c      c+1    ...   c+W-1
//           +------+------+-----+-------+
//   row r   | lane | lane | ... | lane  |    one vector: W channels of one output pixel
//           +------+------+-----+-------+

// Epilogue from the first clip on, for channels c .. c + n of one row: clip, residual, clip, store, requantize.
inline void epilogue_after_scale(const Epilogue &e, size_t row, int c, int n, F y) {
    if (e.clip_first)
        y = smaller(larger(y, set1(e.low_first)), set1(e.high_first));
    if (e.residual)
        y = add(y, load(e.residual + row * e.residual_stride + c, n));
    if (e.clip_second)
        y = smaller(larger(y, set1(e.low_second)), set1(e.high_second));
    if (e.out)
        store(e.out + row * e.out_stride + c, y, n);
    if (e.codes) {
        if (e.code_scale)
            y = fma(y, load(e.code_scale + c, n), load(e.code_shift + c, n));
        store_codes(e.codes + row * e.codes_stride + c, smaller(larger(y, set1(0.0f)), set1(e.levels)), n);
    }
}

inline void epilogue_float(const Epilogue &e, size_t row, int c, int n, F acc) {
    if (e.scale)
        acc = fma(acc, load(e.scale + c, n), load(e.shift + c, n));
    epilogue_after_scale(e, row, c, n, acc);
}

inline void epilogue_integer(const Epilogue &e, size_t row, int c, int n, I acc) {
    for (int i = 0; i < e.doublings; ++i)
        acc = add(acc, acc);
    if (e.window)
        acc = add(acc, set1(e.window_factor * e.window[row]));
    if (e.constants)
        acc = add(acc, load(e.constants + e.constant_rows[row] + c, n));
    epilogue_float(e, row, c, n, to_float(acc));
}

[[maybe_unused]] void epilogue_rows(const float *x, size_t stride, int rows, int channels, const Epilogue &e) {
    for (int row = 0; row < rows; ++row)
        for (int c = 0; c < channels; c += W)
            epilogue_float(e, static_cast<size_t>(row), c, channels - c, load(x + row * stride + c, channels - c));
}

void depthwise_floats(const DepthwiseRow &d) {
    const float *weights = static_cast<const float *>(d.weights);
    for (int p = 0; p < d.pixels; ++p)
        for (int c = 0; c < d.channels; c += W) {
            const int n = d.channels - c;
            F acc = set1(0.0f);
            for (int t = 0; t < d.taps; ++t) {
                const float *x = reinterpret_cast<const float *>(d.base + d.offsets[t * d.pixels + p]);
                acc = fma(load(x + c, n), load(weights + static_cast<size_t>(t) * d.channels + c, n), acc);
            }
            epilogue_float(d.epilogue, static_cast<size_t>(p), c, n, acc);
        }
}

// Channels from `first` on.
void depthwise_codes_from(const DepthwiseRow &d, int first) {
    const int32_t *weights = static_cast<const int32_t *>(d.weights);
    for (int p = 0; p < d.pixels; ++p)
        for (int c = first; c < d.channels; c += W) {
            const int n = d.channels - c;
            I acc = set1(0);
            for (int t = 0; t < d.taps; ++t)
                acc = multiply_add(load_codes(d.base + d.offsets[t * d.pixels + p] + c, n),
                                   load(weights + static_cast<size_t>(t) * d.channels + c, n), acc);
            epilogue_integer(d.epilogue, static_cast<size_t>(p), c, n, acc);
        }
}
[[maybe_unused]] void depthwise_codes(const DepthwiseRow &d) {
    depthwise_codes_from(d, 0);
}

void maximum(float *best, const void *const *taps, int count, int channels) {
    const auto tap = [taps](int t) { return static_cast<const float *>(taps[t]); };
    int c = 0;
    for (; c + 4 * W <= channels; c += 4 * W) { // four vectors at a time: fewer loads of tap addresses
        F y[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
            y[v] = load(tap(0) + c + W * v, W);
        for (int t = 1; t < count; ++t)
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v)
                y[v] = larger(load(tap(t) + c + W * v, W), y[v]);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
            store(best + c + W * v, y[v], W);
    }
    for (; c < channels; c += W) {
        F y = load(tap(0) + c, channels - c);
        for (int t = 1; t < count; ++t)
            y = larger(load(tap(t) + c, channels - c), y);
        store(best + c, y, channels - c);
    }
}

void to_floats(const uint8_t *codes, size_t count, float *floats) {
    for (size_t i = 0; i < count; i += W) {
        const int n = count - i < W ? static_cast<int>(count - i) : W;
        store(floats + i, to_float(load_codes(codes + i, n)), n);
    }
}

void accumulate(float *sum, const float *x, int count) {
    for (int c = 0; c < count; c += W)
        store(sum + c, add(load(sum + c, count - c), load(x + c, count - c)), count - c);
}

void interpolate(const float *a, const float *b, float weight, float *out, int count) {
    for (int c = 0; c < count; c += W) {
        const F x = load(a + c, count - c);
        const F difference = fma(x, set1(-1.0f), load(b + c, count - c)); // b - a, rounded once
        store(out + c, fma(set1(weight), difference, x), count - c);
    }
}

// Plain loops that gcc vectorizes for the file's instruction set at O3.
#if defined(__GNUC__) && !defined(__clang__)
#define ANYPREC_VECTORIZE __attribute__((optimize("O3")))
#else
#define ANYPREC_VECTORIZE
#endif

ANYPREC_VECTORIZE void larger_codes(uint8_t *__restrict best, const uint8_t *__restrict x, int count) {
    for (int c = 0; c < count; ++c)
        best[c] = x[c] > best[c] ? x[c] : best[c];
}
void maximum_codes(uint8_t *best, const void *const *taps, int count, int channels) {
    if (taps[0] != best)
        std::memcpy(best, taps[0], static_cast<size_t>(channels));
    for (int t = 1; t < count; ++t)
        larger_codes(best, static_cast<const uint8_t *>(taps[t]), channels);
}

ANYPREC_VECTORIZE void widen(const uint8_t *__restrict codes, size_t count, int16_t *__restrict wide) {
    for (size_t i = 0; i < count; ++i)
        wide[i] = codes[i];
}

[[maybe_unused]] ANYPREC_VECTORIZE int32_t sum_codes(const uint8_t *codes, int count) {
    int32_t sum = 0;
    for (int c = 0; c < count; ++c)
        sum += codes[c];
    return sum;
}

[[maybe_unused]] void sums(const uint8_t *codes, size_t pixel, int count, int channels, int32_t *sums, size_t stride) {
    for (size_t i = 0; i < static_cast<size_t>(count); ++i)
        sums[stride * i] = sum_codes(codes + pixel * i, channels);
}

// The last groups of a pixel may read past its channels. These codes meet zero weights, and the mask keeps the offset
// inside the table.
[[maybe_unused]] void lookup_offsets(const uint8_t *codes, size_t pixel, int count, int steps, int group, int bits,
                                     int entry, uint16_t *offsets, int32_t *totals) {
    if (totals)
        sums(codes, pixel, count, steps * group, totals, 1);
    const int mask = (1 << (group * bits)) - 1;
    for (int i = 0; i < count; ++i, codes += pixel)
        for (int g = 0; g < steps; ++g) {
            int index = 0;
            for (int part = group - 1; part >= 0; --part)
                index = index << bits | codes[part * steps + g];
            *offsets++ = static_cast<uint16_t>((index & mask) * entry);
        }
}

// The same for two pixels at 1 bit: the second pixel's four channels are the upper four bits of the index.
[[maybe_unused]] void pixel_pair_offsets(const uint8_t *zeros, size_t pixel, const PixelPair *pairs, int count,
                                         int steps, uint16_t *offsets) {
    const auto bits = [steps](const uint8_t *codes) {
        return (codes[0] | codes[steps] << 1 | codes[2 * steps] << 2 | codes[3 * steps] << 3) & 15;
    };
    for (int i = 0; i < count; ++i) {
        const uint8_t *first = zeros + pixel * static_cast<size_t>(pairs[i].first);
        const uint8_t *second = zeros + pixel * static_cast<size_t>(pairs[i].second);
        for (int g = 0; g < steps; ++g)
            *offsets++ = static_cast<uint16_t>((bits(first + g) | bits(second + g) << 4) * 16);
    }
}
