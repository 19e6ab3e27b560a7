// 1-bit weights and activations on AVX2: one vpshufb looks up two pixels. Included by kernels_avx2.cpp after tiles.inl.
// In: a Tile with Input::lookup_pairs and Coding::lookup. Out: its accumulators, through the epilogue (ARITHMETIC.md,
// section 3).
//
// A vpshufb looks up the sum over four channels, 0 to 4, for 32 output channels. The sum needs half a byte, so the
// other half holds the sum of a second pixel:
//
//   byte of a result:   | sum of pixel 2 | sum of pixel 1 |      32 bytes = 32 output channels
//                        7    upper    4   3    lower    0
//
// The four activations of both pixels choose the table (256 tables of 16 bytes, 4 KB). The four weights are the index.
// Half a byte holds three lookups (12); then the halves are separated and added to wider sums.

// table[a][w] = sum over four channels of activation bit times weight bit. The lower four bits of a (first pixel) give
// the lower half of the byte, the upper four (second pixel) the upper half.
struct PairProducts {
    alignas(64) uint8_t table[256][16];
    constexpr PairProducts() : table() {
        for (int a = 0; a < 256; ++a)
            for (int w = 0; w < 16; ++w) {
                int sum = 0;
                for (int i = 0; i < 4; ++i)
                    sum += (a >> i & w >> i & 1) + 16 * (a >> (i + 4) & w >> i & 1);
                table[a][w] = static_cast<uint8_t>(sum);
            }
    }
};
constexpr PairProducts pair_products;
alignas(32) constexpr uint8_t kLowerHalves[32] = {15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15,
                                                  15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15};

// Keeps x in a register at this point. Otherwise gcc moves its computation, runs out of registers, and folds loads into
// vpshufb, which is slower than a load and a vpshufb.
ANYPREC_INLINE I keep_in_register(I x) {
#if defined(__GNUC__)
    __asm__ volatile("" : "+x"(x));
#endif
    return x;
}

// `first` sums the first pixels in bytes, which hold Tile::safe_steps steps. `second` sums t >> 4 in 16-bit lanes. For
// a lane with bytes 16 a + b (upper) and 16 c + d that is 256 a + 16 b + c. The b is known from `first` and is
// subtracted once, at the end. That saves one instruction per three lookups.
template <int P, int V> struct PairSums {
    I first[P][V], second[P][V];

    ANYPREC_INLINE PairSums() { clear(); }
    ANYPREC_INLINE void clear() {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v)
                first[p][v] = second[p][v] = I{};
    }

    // N steps, 1 to 3.
    template <int N> ANYPREC_INLINE void add(const uint16_t *const (&in)[P], int s, const uint8_t *panel) {
        I t[P][V];
#pragma GCC unroll 3
        for (int i = 0; i < N; ++i) {
            I w[V];
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v)
                w[v] = keep_in_register(load(panel + 32 * (i * V + v)));
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                const uint8_t *table = &pair_products.table[0][0] + in[p][s + i];
                const I x = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(table)));
#pragma GCC unroll 2
                for (int v = 0; v < V; ++v) {
                    const I sum = _mm256_shuffle_epi8(x, w[v]);
                    t[p][v] = keep_in_register(i ? _mm256_add_epi8(t[p][v], sum) : sum);
                }
            }
        }
        const uint8_t *mask = kLowerHalves;
#if defined(__GNUC__)
        __asm__("" : "+r"(mask)); // load the mask here: no register is left to keep it
#endif
        const I lower = keep_in_register(load(mask));
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) {
                first[p][v] = keep_in_register(_mm256_add_epi8(first[p][v], _mm256_and_si256(t[p][v], lower)));
                second[p][v] = keep_in_register(_mm256_add_epi16(second[p][v], _mm256_srli_epi16(t[p][v], 4)));
            }
    }

    // Adds the sums to 16-bit totals, one row per pixel. Even bytes are channels 0..15 of the vector, odd bytes 16..31.
    template <bool Empty> ANYPREC_INLINE void add_to(uint16_t (*totals)[32 * V]) {
        const auto put = [](uint16_t *to, I sums) { store(to, Empty ? sums : _mm256_add_epi16(load(to), sums)); };
        const I even = _mm256_set1_epi16(0x00ff);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) {
                const I odd = _mm256_srli_epi16(first[p][v], 8);
                const I rest = _mm256_sub_epi16(second[p][v], _mm256_slli_epi16(odd, 4));
                put(totals[2 * p] + 32 * v, _mm256_and_si256(first[p][v], even));
                put(totals[2 * p] + 32 * v + 16, odd);
                put(totals[2 * p + 1] + 32 * v, _mm256_and_si256(rest, even));
                put(totals[2 * p + 1] + 32 * v + 16, _mm256_srli_epi16(rest, 8));
            }
    }
    ANYPREC_INLINE void move_to(uint16_t (*totals)[32 * V], bool &empty) {
        if (empty)
            add_to<true>(totals);
        else
            add_to<false>(totals);
        empty = false;
        clear();
    }
};

template <int R, int V> struct PairLookUp {
    static constexpr int kAtOnce = V == 1 ? 4 : 2; // pairs at a time; limited by registers
    static constexpr int kPairs = (R + 1) / 2;     // the last pixel of an odd number is paired with zeros
    using Totals = uint16_t[32 * V];

    // Pairs first .. first + P of the tile to rows 0 .. 2 P of the totals.
    template <int P> static ANYPREC_INLINE void sum(const Tile &t, int first, Totals *totals) {
        PairSums<P, V> sums;
        const uint8_t *panel = t.panel, *prefetch_from = t.prefetch_from;
        const int all = t.steps / 3, safe_steps = t.safe_steps / 3; // in groups of three; at least 255 / 12
        int room = safe_steps;
        bool empty = true;
        for (int tap = 0; tap < t.taps; ++tap) {
            const uint16_t *in[P];
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p)
                in[p] = reinterpret_cast<const uint16_t *>(t.base + t.offsets[tap * kPairs + first + p]);
            int s = 0, threes = all;
            while (s < t.steps) {
                const int now = threes < room ? threes : room;
                if (first == 0)
                    prefetch_weights(prefetch_from, 3 * now, t);
                for (int i = 0; i < now; ++i, s += 3, panel += 96 * V)
                    sums.template add<3>(in, s, panel);
                threes -= now;
                room -= now;
                if (room > 0 && s < t.steps) { // one or two steps are left
                    if (s + 2 == t.steps)
                        sums.template add<2>(in, s, panel);
                    else
                        sums.template add<1>(in, s, panel);
                    panel += 32 * V * (t.steps - s);
                    s = t.steps;
                    --room;
                }
                if (room == 0) {
                    sums.move_to(totals, empty);
                    room = safe_steps;
                }
            }
        }
        sums.move_to(totals, empty);
    }

    static void tile(const Tile &t) {
        alignas(64) Totals totals[2 * kPairs];
        constexpr int kLast = kPairs % kAtOnce;
        for (int first = 0; first + kAtOnce <= kPairs; first += kAtOnce)
            sum<kAtOnce>(t, first, totals + 2 * first);
        if constexpr (kLast != 0)
            sum<kLast>(t, kPairs - kLast, totals + 2 * (kPairs - kLast));
        epilogue_tile(t.epilogue, totals[0], 32 * V, R, t.channels);
    }
};
struct PairTiles { // in the form that tiles_of needs
    template <int R, int V> static constexpr TileFunction tile = PairLookUp<R, V>::tile;
};

template <int Steps>
void few_pair_offsets(const uint8_t *zeros, size_t pixel, const PixelPair *pairs, int count, uint16_t *offsets) {
    for (int i = 0; i < count; ++i, offsets += Steps) {
        const __m128i lower = few_group_codes<1, Steps>(zeros + pixel * static_cast<size_t>(pairs[i].first));
        const __m128i upper = few_group_codes<1, Steps>(zeros + pixel * static_cast<size_t>(pairs[i].second));
        store_few_offsets<Steps>(offsets, _mm_or_si128(lower, _mm_slli_epi16(upper, 4)));
    }
}

// Like lookup_offsets_ymm. The masks keep codes past a pixel's channels out of the other pixel's half.
void pixel_pair_offsets_ymm(const uint8_t *zeros, size_t pixel, const PixelPair *pairs, int count, int steps,
                            uint16_t *offsets) {
    if (steps == 4 && pixel >= 16)
        return few_pair_offsets<4>(zeros, pixel, pairs, count, offsets);
    if (steps == 8 && pixel >= 32)
        return few_pair_offsets<8>(zeros, pixel, pairs, count, offsets);
    if (steps < 16)
        return pixel_pair_offsets(zeros, pixel, pairs, count, steps, offsets);
    for (int i = 0; i < count; ++i, offsets += steps) {
        const uint8_t *first = zeros + pixel * static_cast<size_t>(pairs[i].first);
        const uint8_t *second = zeros + pixel * static_cast<size_t>(pairs[i].second);
        for (int g = 0; g < steps; g += 16) {
            const int at = g + 16 <= steps ? g : steps - 16;
            const __m128i lower = _mm_and_si128(group_codes<1>(first + at, steps), _mm_set1_epi8(15));
            const __m128i upper = _mm_and_si128(group_codes<1>(second + at, steps), _mm_set1_epi8(15));
            store_offsets(offsets + at, _mm_or_si128(lower, _mm_slli_epi16(upper, 4)));
        }
    }
}
