// The loop of a tile (kernels.h), written once over an Inner that the including kernels_<isa>.cpp defines: what one
// kernel does in one step. Included after finish.inl. An Inner has
//   Vector, Code      what is summed and what a panel is read in; what `in` points to
//   kHold             steps a sum holds before it must go to its totals; 0: any number
//   kFetch            whether a line of Tile::ahead is fetched with every step
//   input(in, s)      step s of a pixel, as a vector; weights(panel): a vector of the panel
//   step(acc, x, w)   the sum after one more step
//   Totals<R, V>      where sums go: take(acc) empties them, finish(tile, acc) is the end of the tile

template <typename Inner> struct Loop {
    using Vector = typename Inner::Vector;
    using Code = typename Inner::Code;

    template <int R, int V>
    static ANYPREC_INLINE void step(const Code *const (&in)[R], int s, const uint8_t *&panel, const uint8_t *&ahead,
                                    Vector (&acc)[R][V]) {
        Vector w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
            w[v] = Inner::weights(panel + sizeof(Vector) * v);
        if (R == 1 && !Inner::kFetch) // a classifier's: its panel comes from memory, in pages no hardware looks beyond
            prefetch_far(panel + (8 << 10));
        panel += sizeof(Vector) * V;
        if (Inner::kFetch) {
            prefetch_far(ahead);
            ahead += 64;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vector x = Inner::input(in[r], s);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                acc[r][v] = Inner::step(acc[r][v], x, w[v]);
        }
    }

    template <int R, int V> static void tile(const Tile &t) {
        fetch_next(t.epilogue, R, t.channels);
        typename Inner::template Totals<R, V> totals;
        Vector acc[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                acc[r][v] = Vector{};
        const uint8_t *panel = t.panel, *ahead = t.ahead;
        [[maybe_unused]] int room = Inner::kHold;
        for (int tap = 0; tap < t.taps; ++tap) {
            const Code *in[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                in[r] = reinterpret_cast<const Code *>(t.base + t.offsets[tap * R + r]);
            if constexpr (Inner::kHold == 0) {
                for (int s = 0; s < t.steps; ++s)
                    step(in, s, panel, ahead, acc);
            } else {
                for (int s = 0; s < t.steps;) {
                    const int end = t.steps - s < room ? t.steps : s + room;
                    room -= end - s;
                    for (; s < end; ++s)
                        step(in, s, panel, ahead, acc);
                    if (room == 0) {
                        totals.take(acc);
                        room = Inner::kHold;
                    }
                }
            }
        }
        totals.finish(t, acc);
    }
};

// Sums that hold any number of steps: to memory once, as they are for Winograd, or to the end of the tile.
template <int R, int V> struct WholeSums {
    ANYPREC_INLINE void finish(const Tile &t, I (&acc)[R][V]) {
        alignas(64) int32_t sums[R * W * V];
        int32_t *to = t.epilogue.raw ? t.epilogue.raw : sums;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                store(to + W * (r * V + v), acc[r][v]);
        if (to == sums)
            finish_tile(t.epilogue, sums, W * V, R, t.channels);
    }
};

// Totals that are touched only now and then live on the stack; sums keep the registers to themselves.
template <typename Inner, int R, int V> struct StackTotals {
    alignas(64) typename Inner::Total totals[R][Inner::kLanes * V]; // from the first take on
    bool empty = true;

    ANYPREC_INLINE void take(I (&acc)[R][V]) {
#if defined(__GNUC__)
        __asm__ volatile("" : "+m"(totals)); // or gcc takes them for registers, and moves them about at every tap
#endif
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                if (empty)
                    Inner::template add_to<true>(totals[r] + Inner::kLanes * v, acc[r][v]);
                else
                    Inner::template add_to<false>(totals[r] + Inner::kLanes * v, acc[r][v]);
                acc[r][v] = I{};
            }
        empty = false;
    }
    ANYPREC_INLINE void finish(const Tile &t, I (&acc)[R][V]) {
        take(acc);
        finish_tile(t.epilogue, totals[0], Inner::kLanes * V, R, t.channels);
    }
};

// Floats: one fma a product, in the order of K.
struct Multiply {
    using Vector = F;
    using Code = float;
    static constexpr int kHold = 0;
    static constexpr bool kFetch = false;
    static F input(const float *in, int s) { return set1(in[s]); }
    static F weights(const uint8_t *panel) { return load(reinterpret_cast<const float *>(panel), W); }
    static F step(F acc, F x, F w) { return fma(x, w, acc); }
    template <int R, int V> struct Totals {
        ANYPREC_INLINE void finish(const Tile &t, F (&acc)[R][V]) {
            const Epilogue &e = t.epilogue;
            const bool more = e.scale || e.residual || e.codes || e.clip_first || e.clip_second;
            if (!more && e.out && t.channels == W * V) { // as they are, as those of a stem before a pool
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                    for (int v = 0; v < V; ++v)
                        store(e.out + static_cast<size_t>(r) * e.out_stride + W * v, acc[r][v], W);
                return;
            }
            alignas(64) float sums[R][W * V];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v)
                    store(sums[r] + W * v, acc[r][v], W);
            finish_tile(t.epilogue, sums[0], W * V, R, t.channels);
        }
    };
};

// A function for each number of rows, from 1 to the most; for blocks of 1, 2 (and 4) vectors.
template <typename Inner, int V, typename Rows> struct RowsOf;
template <typename Inner, int V, int... Rows> struct RowsOf<Inner, V, std::integer_sequence<int, Rows...>> {
    static constexpr TileFunction functions[] = {Inner::template tile<Rows + 1, V>...};
};
template <typename Inner, int V, int Most> constexpr const TileFunction *rows_of() {
    return RowsOf<Inner, V, std::make_integer_sequence<int, Most>>::functions;
}
template <typename Inner, int One, int Two> constexpr Tiles tiles_of() {
    return {1, {One, Two, 0, 0}, {rows_of<Inner, 1, One>(), rows_of<Inner, 2, Two>(), nullptr, nullptr}};
}
template <typename Inner, int One, int Two, int Four> constexpr Tiles tiles_of() {
    return {2,
            {One, Two, Four, 0},
            {rows_of<Inner, 1, One>(), rows_of<Inner, 2, Two>(), rows_of<Inner, 4, Four>(), nullptr}};
}
