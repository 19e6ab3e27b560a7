// Depthwise convolutions of codes for AVX2: two taps at a time, or nine with columns prepared once.
// In: DepthwiseRow. Out: codes or floats through the epilogue. Included after epilogue.inl by kernels_avx2.cpp.

// Depthwise, two taps at a time: vpmaddwd adds the products of neighbors, here the codes of one channel at both taps.
// Weights (w[t], w[t + 1]) are 16-bit integers side by side; codes are interleaved as bytes, then widened.
template <int V> struct PairBlock {
    alignas(32) int16_t pairs[kMostDepthwiseTaps / 2][V * W][2];

    PairBlock(const DepthwiseRow &d, int c) {
        const int32_t *weights = static_cast<const int32_t *>(d.weights) + c;
        const size_t stride = static_cast<size_t>(d.channels);
        for (int t = 0; t < d.taps; t += 2, weights += 2 * stride)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                const I second = t + 1 < d.taps ? _mm256_slli_epi32(load(weights + stride + W * v), 16) : I{};
                store(pairs[t / 2][W * v], _mm256_blend_epi16(load(weights + W * v), second, 0xAA));
            }
    }

    ANYPREC_INLINE void sums(const DepthwiseRow &d, int p, int c, I (&acc)[V]) const {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
            acc[v] = I{};
        const uint8_t *base = d.base + c;
        const int32_t *offset = d.offsets + p;
        int t = 0;
        for (; t + 1 < d.taps; t += 2, offset += 2 * d.pixels)
            add_pair(base + offset[0], base + offset[d.pixels], pairs[t / 2][0], acc);
        if (t < d.taps)
            add_pair(base + offset[0], nullptr, pairs[t / 2][0], acc);
    }

    static ANYPREC_INLINE void add_pair(const uint8_t *a, const uint8_t *b, const int16_t *w, I (&acc)[V]) {
#pragma GCC unroll 2
        for (int half = 0; half < V / 2; ++half) { // 16 channels
            const auto codes = [half](const uint8_t *x) {
                return x ? _mm_loadu_si128(reinterpret_cast<const __m128i *>(x + 16 * half)) : __m128i{};
            };
            const __m128i x = codes(a), y = codes(b);
            const I low = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(x, y));
            const I high = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(x, y));
            acc[2 * half] = add(acc[2 * half], _mm256_madd_epi16(low, load(w + 32 * half)));
            acc[2 * half + 1] = add(acc[2 * half + 1], _mm256_madd_epi16(high, load(w + 32 * half + 16)));
        }
    }
};

// Depthwise at few bits, two taps at a time: vpmaddubsw on codes and weights as bytes, sums of 16 bits. Unpacking works
// on 128-bit halves, so the first vector of sums has channels 0 .. 7 and 16 .. 23, the second 8 .. 15 and 24 .. 31. Of
// 16 channels (V = 2) there is one vector, 0 .. 7 and 8 .. 15.
template <int V> struct ByteBlock {
    static constexpr int kVectors = V / 2;
    alignas(32) int8_t pairs[kMostDepthwiseTaps / 2][kVectors][32];

    ByteBlock(const DepthwiseRow &d, int c) {
        const int32_t *weights = static_cast<const int32_t *>(d.weights) + c;
        const size_t stride = static_cast<size_t>(d.channels);
        for (int t = 0; t < d.taps; t += 2, weights += 2 * stride) {
            I both[V]; // two bytes in each lane of 32 bits
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                const I low = set1(0xFF), second = t + 1 < d.taps ? load(weights + stride + W * v) : I{};
                both[v] = _mm256_or_si256(_mm256_and_si256(load(weights + W * v), low),
                                          _mm256_slli_epi32(_mm256_and_si256(second, low), 8));
            }
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v)
                store(pairs[t / 2][v],
                      _mm256_permute4x64_epi64(_mm256_packus_epi32(both[v], both[v + kVectors]), 0xD8));
        }
    }

    ANYPREC_INLINE void sums(const DepthwiseRow &d, int p, int c, I (&out)[V]) const {
        I acc[kVectors] = {};
        const uint8_t *base = d.base + c;
        const int32_t *offset = d.offsets + p;
        int t = 0;
        for (; t + 1 < d.taps; t += 2, offset += 2 * d.pixels)
            add_pair(codes(base + offset[0]), codes(base + offset[d.pixels]), pairs[t / 2], acc);
        if (t < d.taps)
            add_pair(codes(base + offset[0]), I{}, pairs[t / 2], acc);
        __m128i half[V]; // of 8 channels, in order
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            half[v] = _mm256_castsi256_si128(acc[v]);
            half[v + kVectors] = _mm256_extracti128_si256(acc[v], 1);
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
            out[v] = _mm256_cvtepi16_epi32(half[v]);
    }

    // 32 codes; or 16, the second 8 of them in the upper half.
    static ANYPREC_INLINE I codes(const uint8_t *x) {
        if constexpr (V == 4)
            return load(x);
        const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i *>(x));
        return _mm256_permute4x64_epi64(_mm256_castsi128_si256(all), 0x10);
    }
    static ANYPREC_INLINE void add_pair(I x, I y, const int8_t (*w)[32], I (&acc)[kVectors]) {
        acc[0] = _mm256_add_epi16(acc[0], _mm256_maddubs_epi16(_mm256_unpacklo_epi8(x, y), load(w[0])));
        if constexpr (V == 4)
            acc[1] = _mm256_add_epi16(acc[1], _mm256_maddubs_epi16(_mm256_unpackhi_epi8(x, y), load(w[1])));
    }
};

// --- Depthwise 3x3: columns are prepared once ------------------------------------------------------------------------

#include "kernels/depthwise_3x3.inl"

// A column is four vectors: two codes of each channel as a pair, and one as a pair with zero.
// 8 bits: pairs of 16-bit integers, vpmaddwd. 16 channels: four vectors a column, twelve for three.
struct WideColumns {
    static constexpr int kChannels = 16;
    static constexpr bool kMasked = false;
    alignas(32) int16_t weights[3][4][16];

    WideColumns(const DepthwiseRow &d, int c) {
        const int32_t *from = static_cast<const int32_t *>(d.weights) + c;
        const size_t line = 3 * static_cast<size_t>(d.channels);
        for (size_t column = 0; column < 3; ++column, from += d.channels)
#pragma GCC unroll 2
            for (size_t v = 0; v < 2; ++v) {
                const I second = _mm256_slli_epi32(load(from + line + W * v), 16), none = I{};
                store(weights[column][v], _mm256_blend_epi16(load(from + W * v), second, 0xAA));
                store(weights[column][v + 2], _mm256_blend_epi16(load(from + 2 * line + W * v), none, 0xAA));
            }
    }
    ANYPREC_INLINE void column(const uint8_t *top, const uint8_t *middle, const uint8_t *low, I (&x)[4]) const {
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(top));
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(middle));
        x[0] = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
        x[1] = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));
        x[2] = load_codes(low, W);
        x[3] = load_codes(low + W, W);
    }
    ANYPREC_INLINE void output(const I (&x)[3][4], const Epilogue &e, size_t pixel, int c) const {
        I acc[2] = {I{}, I{}};
#pragma GCC unroll 12
        for (int i = 0; i < 12; ++i)
            acc[i % 2] = add(acc[i % 2], _mm256_madd_epi16(x[i / 4][i % 4], load(weights[i / 4][i % 4])));
        F y[2] = {to_float(acc[0]), to_float(acc[1])};
        end_row(e, pixel, c, y);
    }
};

// Few bits: pairs of bytes, vpmaddubsw, sums of 16 bits. 32 channels; ByteBlock has their order.
struct ByteColumns {
    static constexpr int kChannels = 32;
    static constexpr bool kMasked = false;
    alignas(32) int8_t weights[3][4][32];

    ByteColumns(const DepthwiseRow &d, int c) {
        const int32_t *from = static_cast<const int32_t *>(d.weights) + c;
        const size_t line = 3 * static_cast<size_t>(d.channels);
        for (size_t column = 0; column < 3; ++column, from += d.channels)
            for (int pair = 0; pair < 2; ++pair) {
                I both[4]; // two bytes in each lane of 32 bits
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v) {
                    const I low = set1(0xFF), first = load(from + 2 * pair * line + W * v);
                    const I second = pair ? I{} : load(from + line + W * v);
                    both[v] = _mm256_or_si256(_mm256_and_si256(first, low),
                                              _mm256_slli_epi32(_mm256_and_si256(second, low), 8));
                }
#pragma GCC unroll 2
                for (int v = 0; v < 2; ++v)
                    store(weights[column][2 * pair + v],
                          _mm256_permute4x64_epi64(_mm256_packus_epi32(both[v], both[v + 2]), 0xD8));
            }
    }
    ANYPREC_INLINE void column(const uint8_t *top, const uint8_t *middle, const uint8_t *low, I (&x)[4]) const {
        const I a = load(top), b = load(middle), c = load(low);
        x[0] = _mm256_unpacklo_epi8(a, b);
        x[1] = _mm256_unpackhi_epi8(a, b);
        x[2] = _mm256_unpacklo_epi8(c, I{});
        x[3] = _mm256_unpackhi_epi8(c, I{});
    }
    ANYPREC_INLINE void output(const I (&x)[3][4], const Epilogue &e, size_t pixel, int c) const {
        I acc[2] = {I{}, I{}};
#pragma GCC unroll 12
        for (int i = 0; i < 12; ++i)
            acc[i % 2] =
                _mm256_add_epi16(acc[i % 2], _mm256_maddubs_epi16(x[i / 4][i % 4], load(weights[i / 4][i % 4])));
        F y[4];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            y[v] = to_float(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(acc[v])));
            y[v + 2] = to_float(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(acc[v], 1)));
        }
        end_row(e, pixel, c, y);
    }
};

// Channels from `first` on, in blocks of V vectors; returns the first channel that is left.
template <template <int> class Block, int V>
int depthwise_blocks_256(const DepthwiseRow &d, int first, bool in_registers) {
    int c = first;
    for (; c + V * W <= d.channels; c += V * W) {
        const Block<V> block(d, c);
        Epilogue e = from_channel(d.epilogue, c);
        for (int p = 0; p < d.pixels; ++p) {
            I acc[V];
            block.sums(d, p, c, acc);
            if (!in_registers) {
                alignas(64) int32_t sums[V * W];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v)
                    store(sums + W * v, acc[v]);
                epilogue_tile(e, sums, V * W, 1, V * W);
                advance(e, 1);
                continue;
            }
            F y[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                y[v] = to_float(acc[v]);
            end_row(d.epilogue, static_cast<size_t>(p), c, y);
        }
    }
    return c;
}

template <template <int> class Block, typename Columns> void depthwise_blocks_256(const DepthwiseRow &d) {
    int c = 0;
    if (d.taps <= kMostDepthwiseTaps) {
        const bool in_registers = !d.epilogue.window && makes_only_codes(d.epilogue, 0);
        if (in_registers && d.taps == 9)
            c = depthwise_3x3<Columns>(d);
        c = depthwise_blocks_256<Block, 4>(d, c, in_registers);
        c = depthwise_blocks_256<Block, 2>(d, c, in_registers);
    }
    depthwise_codes_from(d, c);
}
void depthwise_codes_256(const DepthwiseRow &d) {
    d.fits16 ? depthwise_blocks_256<ByteBlock, ByteColumns>(d) : depthwise_blocks_256<PairBlock, WideColumns>(d);
}
