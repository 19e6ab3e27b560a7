// The loop of a tile (drawn in kernels.h), written once over an Inner, which says what one kernel does in one step.
// In: a Tile. Out: its accumulators, through the epilogue. Included after epilogue.inl by kernels_<isa>.cpp, which
// defines the Inners.
//
//                     V vectors of the panel
//                    w[0]      w[1]
//   x = input[r] --> acc[r][0] acc[r][1]     R rows: the tile keeps R x V accumulators in registers;
//                    ...       ...           each step loads V weights and R inputs for R x V multiplications
//
// An Inner has
//   Vector, Code      type of an accumulator; type of the inputs
//   kSafeSteps        steps before an accumulator may overflow and must be flushed; 0: no limit, -1: Tile::safe_steps
//   input(in, s)      step s of a pixel, broadcast to a vector
//   weights(panel)    a vector of the panel
//   step(acc, x, w)   the accumulator after one more step
//   Totals<R, V>      wider sums: flush(acc) adds the accumulators and clears them, epilogue(tile, acc) ends the tile

// Prefetches the share of later weights that belongs to `steps` steps.
ANYPREC_INLINE void prefetch_weights(const uint8_t *&prefetch_from, int steps, const Tile &t) {
    const size_t bytes = static_cast<size_t>(steps) * t.prefetch_bytes;
    for (size_t i = 0; i < bytes; i += 64)
        prefetch_far(prefetch_from + i);
    prefetch_from += bytes;
}

template <typename Inner> struct Loop {
    using Vector = typename Inner::Vector;
    using Code = typename Inner::Code;
    using Weights = decltype(Inner::weights(nullptr));

    template <int R, int V>
    static ANYPREC_INLINE void step(const Code *const (&in)[R], int s, const uint8_t *&panel, Vector (&acc)[R][V]) {
        Weights w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
            w[v] = Inner::weights(panel + sizeof(Weights) * v);
        panel += sizeof(Weights) * V;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const auto x = Inner::input(in[r], s);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                acc[r][v] = Inner::step(acc[r][v], x, w[v]);
        }
    }

    // All steps of all taps, for accumulators that cannot overflow.
    template <int R, int V> static ANYPREC_INLINE void sum(const Tile &t, const uint8_t *&panel, Vector (&acc)[R][V]) {
        const uint8_t *prefetch_from = t.prefetch_from;
        for (int tap = 0; tap < t.taps; ++tap) {
            const Code *in[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                in[r] = reinterpret_cast<const Code *>(t.base + t.offsets[tap * R + r]);
            for (int s = 0; s < t.steps; ++s, prefetch_from += t.prefetch_bytes) {
                prefetch_far(prefetch_from);
                step(in, s, panel, acc);
            }
        }
    }

    template <int R, int V, typename Totals>
    static ANYPREC_INLINE void sum_in_parts(const Tile &t, const uint8_t *&panel, Vector (&acc)[R][V], Totals &totals) {
        const uint8_t *prefetch_from = t.prefetch_from;
        const int safe_steps = Inner::kSafeSteps > 0 ? Inner::kSafeSteps : t.safe_steps;
        int room = safe_steps;
        for (int tap = 0; tap < t.taps; ++tap) {
            const Code *in[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                in[r] = reinterpret_cast<const Code *>(t.base + t.offsets[tap * R + r]);
            for (int s = 0; s < t.steps;) {
                const int end = t.steps - s < room ? t.steps : s + room;
                room -= end - s;
                prefetch_weights(prefetch_from, end - s, t);
                for (; s < end; ++s)
                    step(in, s, panel, acc);
                if (room == 0) {
                    totals.flush(acc);
                    room = safe_steps;
                }
            }
        }
    }

    template <int R, int V> static void tile(const Tile &t) {
        typename Inner::template Totals<R, V> totals;
        Vector acc[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                acc[r][v] = Vector{};
        const uint8_t *panel = t.panel;
        if constexpr (Inner::kSafeSteps == 0)
            sum(t, panel, acc);
        else
            sum_in_parts(t, panel, acc, totals);
        totals.epilogue(t, acc);
    }
};

// For accumulators that cannot overflow: stores them once, raw for Winograd or for the epilogue.
template <int R, int V> struct WholeSums {
    template <typename Vector> ANYPREC_INLINE void epilogue(const Tile &t, Vector (&acc)[R][V]) {
        constexpr int kLanes = sizeof(Vector) / sizeof(int32_t);
        alignas(64) int32_t sums[R * kLanes * V];
        int32_t *to = t.epilogue.raw ? t.epilogue.raw : sums;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                store(to + kLanes * (r * V + v), acc[r][v]);
        if (to == sums)
            epilogue_tile(t.epilogue, sums, kLanes * V, R, t.channels);
    }
};

// An epilogue from registers (epilogue.inl) of 32-bit sums, as the kernels without windows (doublings 0) and with them
// (1) have them.
template <int Doublings, int R, int V> ANYPREC_INLINE bool end_in_registers(const Tile &t, const I (&acc)[R][V]) {
    const Epilogue &e = t.epilogue;
    if (t.channels != W * V || !e.scale || !ends_in_registers(e, Doublings, V) || !e.window != !Doublings)
        return false;
    F y[R][V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        const F scale = load(e.scale + W * v, W), shift = load(e.shift + W * v, W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const I sum = Doublings ? add(add(acc[r][v], acc[r][v]), set1(e.window_factor * e.window[r])) : acc[r][v];
            y[r][v] = fma(to_float(sum), scale, shift);
        }
    }
    end_rows(e, y);
    return true;
}

// WholeSums that stay in registers where they can. kAnyDoublings: with windows or without, as the tile says.
constexpr int kAnyDoublings = -1;
template <int Doublings, int R, int V> struct RegisterSums {
    template <typename Vector> ANYPREC_INLINE void epilogue(const Tile &t, Vector (&acc)[R][V]) {
        if (t.epilogue.raw || !ends(t, acc))
            WholeSums<R, V>().epilogue(t, acc);
    }

  private:
    template <typename Vector> static ANYPREC_INLINE bool ends(const Tile &t, const Vector (&acc)[R][V]) {
        if (Doublings != kAnyDoublings)
            return end_in_registers<Doublings>(t, acc);
        return t.epilogue.window ? end_in_registers<1>(t, acc) : end_in_registers<0>(t, acc);
    }
};

// Totals that are touched rarely live on the stack, so that accumulators keep the registers.
template <typename Inner, int R, int V> struct StackTotals {
    using Vector = typename Inner::Vector;
    alignas(64) typename Inner::Total totals[R][Inner::kLanes * V]; // valid after the first flush
    bool empty = true;

    ANYPREC_INLINE void flush(Vector (&acc)[R][V]) {
#if defined(__GNUC__)
        __asm__ volatile("" : "+m"(totals)); // otherwise gcc keeps totals in registers and moves them at every tap
#endif
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                if (empty)
                    Inner::template add_to<true>(totals[r] + Inner::kLanes * v, acc[r][v]);
                else
                    Inner::template add_to<false>(totals[r] + Inner::kLanes * v, acc[r][v]);
                acc[r][v] = Vector{};
            }
        empty = false;
    }
    ANYPREC_INLINE void epilogue(const Tile &t, Vector (&acc)[R][V]) {
        flush(acc);
        if constexpr (std::is_same_v<typename Inner::Total, int32_t>)
            if (t.epilogue.raw) {
                std::memcpy(t.epilogue.raw, totals, sizeof totals);
                return;
            }
        epilogue_tile(t.epilogue, totals[0], Inner::kLanes * V, R, t.channels);
    }
};

// Whether the epilogue only stores the sums, as in a float stem before a pool.
inline bool stores_sums_only(const Epilogue &e) {
    return e.out && !(e.scale || e.residual || e.codes || e.clip_first || e.clip_second);
}

// Whether it stores floats, perhaps scaled and clipped, as most float layers do.
inline bool stores_floats_only(const Epilogue &e) {
    return e.out && !(e.residual || e.codes || e.clip_second);
}

// Float: one fma per product, in the order of K.
struct Multiply {
    using Vector = F;
    using Code = float;
    static constexpr int kSafeSteps = 0;
    static F input(const float *in, int s) { return set1(in[s]); }
    static F weights(const uint8_t *panel) { return load(reinterpret_cast<const float *>(panel), W); }
    static F step(F acc, F x, F w) { return fma(x, w, acc); }
    template <int R, int V> struct Totals {
        ANYPREC_INLINE void epilogue(const Tile &t, F (&acc)[R][V]) {
            const Epilogue &e = t.epilogue;
            if (stores_floats_only(e) && t.channels == W * V)
                return stored(e, acc);
            alignas(64) float sums[R][W * V];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v)
                    store(sums[r] + W * v, acc[r][v], W);
            epilogue_tile(t.epilogue, sums[0], W * V, R, t.channels);
        }

      private:
        static ANYPREC_INLINE void stored(const Epilogue &e, F (&acc)[R][V]) {
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                if (e.scale) {
                    const F scale = load(e.scale + W * v, W), shift = load(e.shift + W * v, W);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r)
                        acc[r][v] = fma(acc[r][v], scale, shift);
                }
                if (e.clip_first) {
                    const F low = set1(e.low_first), high = set1(e.high_first);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r)
                        acc[r][v] = smaller(larger(acc[r][v], low), high);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    store(e.out + static_cast<size_t>(r) * e.out_stride + W * v, acc[r][v], W);
            }
        }
    };
};

struct MultiplyInRegisters : Multiply {
    template <int R, int V> struct Totals : Multiply::Totals<R, V> {
        ANYPREC_INLINE void epilogue(const Tile &t, F (&acc)[R][V]) {
            const Epilogue &e = t.epilogue;
            if (V > 4 || t.channels != W * V || !ends_in_registers(e, 0, V) || e.window)
                return Multiply::Totals<R, V>::epilogue(t, acc);
            if (e.scale)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) {
                    const F scale = load(e.scale + W * v, W), shift = load(e.shift + W * v, W);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r)
                        acc[r][v] = fma(acc[r][v], scale, shift);
                }
            end_rows(e, acc);
        }
    };
};

// Float by Toom-Cook: a row is a tile of 4x4 outputs. We apply the horizontal output transform once a row's seven
// positions are accumulated, and the vertical one at the end.
struct ToomCookTiles {
    template <int R, int V> static void tile(const Tile &t) {
        constexpr size_t kWidth = W * V, kLine = kToomCookOutputs * R * kWidth;
        const ToomCookTile &q = t.toom_cook;
        alignas(64) float sums[kToomCookPoints][R * kWidth], halfway[kToomCookPoints][kLine]; // [tile], [pixel]
        const uint8_t *panel = t.panel, *base = t.base;
        for (int down = 0; down < kToomCookPoints; ++down, base += static_cast<size_t>(q.block) * q.line) {
            for (size_t across = 0; across < kToomCookPoints; ++across) {
                F acc[R][V];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                    for (int v = 0; v < V; ++v)
                        acc[r][v] = F{};
                for (int half = 0; half < q.block; ++half) {
                    const float *in[R];
#pragma GCC unroll 8
                    for (size_t r = 0; r < R; ++r)
                        in[r] = reinterpret_cast<const float *>(base + q.line * static_cast<size_t>(half) +
                                                                q.position * (kToomCookPoints * r + across));
                    if (t.steps == 6) { // three channels
#pragma GCC unroll 6
                        for (int s = 0; s < 6; ++s)
                            Loop<Multiply>::step(in, s, panel, acc);
                        continue;
                    }
                    for (int s = 0; s < t.steps; ++s)
                        Loop<Multiply>::step(in, s, panel, acc);
                }
#pragma GCC unroll 8
                for (size_t r = 0; r < R; ++r)
#pragma GCC unroll 8
                    for (size_t v = 0; v < V; ++v)
                        store(sums[across] + W * (r * V + v), acc[r][v], W);
            }
            for (size_t r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (size_t v = 0; v < V; ++v)
                    outputs(sums[0] + W * (r * V + v), R * kWidth,
                            halfway[down] + kToomCookOutputs * r * kWidth + W * v, kWidth);
        }
        Epilogue e = t.epilogue;
        if (stores_sums_only(e) && t.channels == kWidth && q.pixels == kToomCookOutputs * R &&
            q.lines == kToomCookOutputs) {
            const size_t line = e.out_stride * static_cast<size_t>(q.width);
            for (size_t i = 0; i < kToomCookOutputs * R; ++i)
#pragma GCC unroll 4
                for (size_t v = 0; v < V; ++v)
                    outputs(halfway[0] + i * kWidth + W * v, kLine, e.out + i * e.out_stride + W * v, line);
            return;
        }
        for (size_t i = 0; i < kLine; i += W)
            outputs(halfway[0] + i, kLine, halfway[0] + i, kLine);
        for (int y = 0; y < q.lines; ++y, advance(e, q.width))
            epilogue_floats(halfway[y], kWidth, q.pixels, t.channels, e);
    }

    // Seven vectors to four.
    static ANYPREC_INLINE void outputs(const float *from, size_t next_from, float *to, size_t next_to) {
        F m[kToomCookPoints], y[kToomCookOutputs];
#pragma GCC unroll 7
        for (size_t p = 0; p < kToomCookPoints; ++p)
            m[p] = load(from + next_from * p, W);
        toom_cook_output(m, y);
#pragma GCC unroll 4
        for (size_t i = 0; i < kToomCookOutputs; ++i)
            store(to + next_to * i, y[i], W);
    }
};

// A function per number of rows, 1 to the maximum, for blocks of 1, 2 (and 4) vectors.
template <typename Inner, int V, typename Rows> struct TileFunctionsOf;
template <typename Inner, int V, int... Rows> struct TileFunctionsOf<Inner, V, std::integer_sequence<int, Rows...>> {
    static constexpr TileFunction functions[] = {Inner::template tile<Rows + 1, V>...};
};
template <typename Inner, int V, int Most> constexpr const TileFunction *tile_functions() {
    return TileFunctionsOf<Inner, V, std::make_integer_sequence<int, Most>>::functions;
}
template <typename Inner, int One, int Two> constexpr Tiles tiles_of() {
    return {1, {One, Two, 0, 0}, {tile_functions<Inner, 1, One>(), tile_functions<Inner, 2, Two>(), nullptr, nullptr}};
}
template <typename Inner, int One, int Two, int Four> constexpr Tiles tiles_of() {
    return {
        2,
        {One, Two, Four, 0},
        {tile_functions<Inner, 1, One>(), tile_functions<Inner, 2, Two>(), tile_functions<Inner, 4, Four>(), nullptr}};
}
// For a single row: blocks of up to 8 vectors, as one row has no others to hide latencies behind.
template <typename Inner> [[maybe_unused]] constexpr Tiles tiles_of_row() {
    return {3,
            {1, 1, 1, 1},
            {tile_functions<Inner, 1, 1>(), tile_functions<Inner, 2, 1>(), tile_functions<Inner, 4, 1>(),
             tile_functions<Inner, 8, 1>()}};
}
