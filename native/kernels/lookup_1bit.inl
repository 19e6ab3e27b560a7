// 1-bit weights and activations: one vpshufb looks up two pixels. Included after tiles.inl by kernels_avx2.cpp and
// kernels_avx512.cpp, which define kPairsAtOnce and lower_halves.
// In: a Tile with Input::lookup_pairs and Coding::lookup. Out: its accumulators, through the epilogue (ARITHMETIC.md,
// section 3).
//
// A vpshufb looks up the sum over four channels, 0 to 4, for as many output channels as a vector has bytes. The sum
// needs half a byte, so the other half holds the sum of a second pixel:
//
//   byte of a result:   | sum of pixel 2 | sum of pixel 1 |      32 or 64 bytes, one for each output channel
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
constexpr int kBytes = sizeof(I);

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
                w[v] = keep_in_register(load(panel + kBytes * (i * V + v)));
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                const uint8_t *table = &pair_products.table[0][0] + in[p][s + i];
                const I x = every_quarter(table);
#pragma GCC unroll 2
                for (int v = 0; v < V; ++v) {
                    const I sum = look_up(x, w[v]);
                    t[p][v] = keep_in_register(i ? add_bytes(t[p][v], sum) : sum);
                }
            }
        }
        const I lower = lower_halves();
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) {
                first[p][v] = keep_in_register(add_bytes(first[p][v], bit_and(t[p][v], lower)));
                second[p][v] = keep_in_register(add_words(second[p][v], words_right<4>(t[p][v])));
            }
    }

    // Adds the sums to 16-bit totals, one row per pixel. Even bytes are the first half of the vector's channels.
    template <bool Empty> ANYPREC_INLINE void add_to(uint16_t (*totals)[kBytes * V]) {
        const auto put = [](uint16_t *to, I sums) { store(to, Empty ? sums : add_words(load(to), sums)); };
        const I even = set1(0x00ff00ff);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) {
                const I odd = words_right<8>(first[p][v]);
                const I rest = sub_words(second[p][v], words_left<4>(odd));
                put(totals[2 * p] + kBytes * v, bit_and(first[p][v], even));
                put(totals[2 * p] + kBytes * v + kBytes / 2, odd);
                put(totals[2 * p + 1] + kBytes * v, bit_and(rest, even));
                put(totals[2 * p + 1] + kBytes * v + kBytes / 2, words_right<8>(rest));
            }
    }
    ANYPREC_INLINE void move_to(uint16_t (*totals)[kBytes * V], bool &empty) {
        if (empty)
            add_to<true>(totals);
        else
            add_to<false>(totals);
        empty = false;
        clear();
    }
};

template <int R, int V> struct PairLookUp {
    static constexpr int kAtOnce = kPairsAtOnce<V>; // limited by registers
    static constexpr int kPairs = (R + 1) / 2;      // the last pixel of an odd number is paired with zeros
    using Totals = uint16_t[kBytes * V];

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
                for (int i = 0; i < now; ++i, s += 3, panel += 3 * kBytes * V)
                    sums.template add<3>(in, s, panel);
                threes -= now;
                room -= now;
                if (room > 0 && s < t.steps) { // one or two steps are left
                    if (s + 2 == t.steps)
                        sums.template add<2>(in, s, panel);
                    else
                        sums.template add<1>(in, s, panel);
                    panel += kBytes * V * (t.steps - s);
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
        epilogue_tile(t.epilogue, totals[0], kBytes * V, R, t.channels);
    }
};
struct PairTiles { // in the form that tiles_of needs
    template <int R, int V> static constexpr TileFunction tile = PairLookUp<R, V>::tile;
};
