// Tiles of one vector in 3x3 layers of stride 1 by AVX-512. In: a Tile, an Inner as in tiles.inl whose sums have 32
// bits. Out: its accumulators, through the epilogue. Included after sums_avx512.inl by kernels_avx512.cpp and
// kernels_vbmi.cpp.
//
// A tile of one vector loads as many inputs as it multiplies. In a 3x3 layer of stride 1, output r reads pixel r + x at
// tap x of a kernel line: ten pixels for eight outputs, each broadcast once and used by up to three of them.
//
//   pixel    0   1   2   3  ..  9
//   output 0 w0  w1  w2
//          1     w0  w1  w2
//          2         w0  w1  w2
template <typename Inner> struct SharedPixels {
    using Code = typename Inner::Code;
    static constexpr int kRows = 8, kFewSteps = Inner::kFewSteps; // of a layer of 16 channels

    // Whether all taps come in threes of which each reads what the one before it reads, an output further.
    static bool shares(const Tile &t) {
        if (t.taps % 3)
            return false;
        const auto eight = [](const int32_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); };
        __m256i different = _mm256_setzero_si256();
        for (int line = 0; line < t.taps; line += 3) {
            const int32_t *at = t.offsets + kRows * line;
            const __m256i second = eight(at + kRows), third = eight(at + 2 * kRows);
            different = _mm256_or_si256(different, _mm256_xor_si256(eight(at + 1), second));
            different = _mm256_or_si256(different, _mm256_xor_si256(eight(at + kRows + 1), third));
        }
        return _mm256_testz_si256(different, _mm256_setr_epi32(-1, -1, -1, -1, -1, -1, -1, 0)); // seven outputs
    }
    // One step of a kernel line.
    static ANYPREC_INLINE void step(const Code *const (&in)[kRows + 2], int s, const uint8_t *panel, size_t tap,
                                    I (&acc)[kRows][1]) {
        const I w[3] = {Inner::weights(panel), Inner::weights(panel + tap), Inner::weights(panel + 2 * tap)};
#pragma GCC unroll 10
        for (int pixel = 0; pixel < kRows + 2; ++pixel) {
            const I x = Inner::input(in[pixel], s);
#pragma GCC unroll 3
            for (int i = 0; i < 3; ++i)
                if (pixel >= i && pixel - i < kRows)
                    acc[pixel - i][0] = Inner::step(acc[pixel - i][0], x, w[i]);
        }
    }
    template <int R, int V> static void tile(const Tile &t) {
        if constexpr (R == kRows && V == 1)
            if (shares(t)) {
                I acc[R][V];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    acc[r][0] = I{};
                const size_t vector = sizeof(I), tap = vector * static_cast<size_t>(t.steps);
                const uint8_t *panel = t.panel;
                for (int line = 0; line < t.taps; line += 3, panel += 2 * tap) {
                    const int32_t *offsets = t.offsets + R * line;
                    const Code *in[R + 2];
#pragma GCC unroll 10
                    for (int pixel = 0; pixel < R + 2; ++pixel)
                        in[pixel] =
                            reinterpret_cast<const Code *>(t.base + offsets[pixel < R ? pixel : 2 * R + pixel - 2]);
                    if (t.steps == kFewSteps) {
#pragma GCC unroll 4
                        for (int s = 0; s < kFewSteps; ++s, panel += vector)
                            step(in, s, panel, tap, acc);
                        continue;
                    }
                    for (int s = 0; s < t.steps; ++s, panel += vector)
                        step(in, s, panel, tap, acc);
                }
                return Sums32<R, V>().epilogue(t, acc);
            }
        Loop<Inner>::template tile<R, V>(t);
    }
};
