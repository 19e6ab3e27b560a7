// The end of a tile of 32-bit sums by AVX-512: 1-bit codes by Epilogue::thresholds, everything else as in tiles.inl.
// In: accumulators in registers. Out: outputs. Included after tiles.inl by kernels_avx512.cpp and kernels_vbmi.cpp.
//
//   sums of 16 channels        thresholds     a bit each      codes
//   | v 0 | v 1 | v 2 | v 3 |  >  (the same) -> 64 bits    -> 64 bytes, 0 or 1

template <int R, int V> struct Sums32 {
    ANYPREC_INLINE void epilogue(const Tile &t, I (&acc)[R][V]) {
        const Epilogue &e = t.epilogue;
        if (e.raw || !e.thresholds || t.channels != W * V)
            return RegisterSums<kAnyDoublings, R, V>().epilogue(t, acc);
        if (e.window)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I window = set1(e.window_factor * e.window[r]);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v)
                    acc[r][v] = add(add(acc[r][v], acc[r][v]), window);
            }
        const I flips = _mm512_maskz_loadu_epi8(~0ull >> (64 - W * V), e.flips);
        I thresholds[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
            thresholds[v] = load_wide(e.thresholds + W * v);
#pragma GCC unroll 8
        for (size_t r = 0; r < R; ++r)
            store_over<V>(e.codes + r * e.codes_stride, larger(acc[r], thresholds), flips);
    }
};
