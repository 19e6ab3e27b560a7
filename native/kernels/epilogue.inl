// The epilogue of a tile: accumulators in memory -> scale, clip, residual, floats, codes, in the order of Epilogue
// (kernels.h). The arithmetic is ARITHMETIC.md, sections 2 and 3. Included after vector_kernels.inl.
//
//   acc [rows][width]              out [rows][out_stride]       codes [rows][codes_stride]
//   +-----+-----+-----+-----+      +-----+-----+-----+-----+    +-------------------+
//   | v 0 | v 1 | v 2 | v 3 |  ->  |      floats, y        | -> | uint8, requantized|
//   +-----+-----+-----+-----+      +-----------------------+    +-------------------+
//
// There is one function per combination of parts (residual, out, codes, ...). Deciding at every vector took longer than
// the arithmetic.

enum EpilogueParts { kResidual = 1, kOut = 2, kCodes = 4, kCodeScale = 8, kWindow = 16, kAnyParts = 32 };

inline F sum_to_float(const Epilogue &, size_t, int, int n,
                      const float *acc) { // also for whole layers, whose last vector may be partial
    return load(acc, n);
}
// 2 acc + window, or acc. `window` has the type in which the sum is computed.
inline float window_as(const uint16_t *, int32_t window) {
    return static_cast<float>(window);
}
template <typename Sum> int32_t window_as(const Sum *, int32_t window) {
    return window;
}
inline F fast_sum_to_float(const float *acc, const int32_t *) {
    return load(acc, W);
}
inline F fast_sum_to_float(const int32_t *acc, const int32_t *window) {
    const I sum = load_sum(acc);
    return to_float(window ? add(add(sum, sum), set1(*window)) : sum);
}
// Floats hold these sums exactly, and take one instruction less.
inline F fast_sum_to_float(const uint16_t *acc, const float *window) {
    const F sum = to_float(load_sum(acc));
    return window ? fma(sum, set1(2.0f), set1(*window)) : sum;
}
template <typename Sum> inline F sum_to_float(const Epilogue &e, size_t row, int c, int n, const Sum *acc) {
    I sum = load_sum(acc);
    for (int i = 0; i < e.doublings; ++i)
        sum = add(sum, sum);
    if (e.window)
        sum = add(sum, set1(e.window_factor * e.window[row]));
    if (e.constants)
        sum = add(sum, load(e.constants + e.constant_rows[row] + c, n));
    return to_float(sum);
}

// N whole vectors of a row at once, N = 4 or 2: their codes are packed together, without a check for the last channel.
// Starts at channel `first`; returns the first channel it did not compute. `windows` is window_factor * window, by row.
// The saturating pack turns negative codes and NaN into 0.
template <int Parts, int N, bool Scaled, typename Sum, typename Window>
int epilogue_vectors(const Epilogue &e, const Window *windows, const Sum *acc, int width, int rows, int first,
                     int channels) {
    const F levels = set1(e.levels);
    int c = first;
    for (; c + N * W <= channels; c += N * W) {
        F scale[N], shift[N], code_scale[N], code_shift[N];
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) {
            if (Scaled) {
                scale[v] = load(e.scale + c + W * v, W);
                shift[v] = load(e.shift + c + W * v, W);
            }
            if (Parts & kCodeScale) {
                code_scale[v] = load(e.code_scale + c + W * v, W);
                code_shift[v] = load(e.code_shift + c + W * v, W);
            }
        }
        for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
            F y[N];
#pragma GCC unroll 4
            for (int v = 0; v < N; ++v) {
                const int at = c + W * v;
                y[v] = fast_sum_to_float(acc + r * width + at, Parts & kWindow ? windows + r : nullptr);
                if (Scaled)
                    y[v] = fma(y[v], scale[v], shift[v]);
                if (Parts & kResidual)
                    y[v] = add(y[v], load(e.residual + r * e.residual_stride + at, W));
                if (Parts & kOut)
                    store(e.out + r * e.out_stride + at, y[v], W);
                if (Parts & kCodeScale)
                    y[v] = fma(y[v], code_scale[v], code_shift[v]);
                y[v] = smaller(levels, y[v]);
            }
            if (Parts & kCodes)
                store_codes(e.codes + r * e.codes_stride + c, y);
        }
    }
    return c;
}

// acc is [rows][width], in whole vectors. The loop over rows is the inner one: scale and shift are loaded once per
// tile.
template <int Parts, typename Sum>
void epilogue_sums(const Epilogue &given, const Sum *acc, int width, int rows, int channels) {
    Epilogue e = given;
    if (Parts != kAnyParts) { // rare parts are off, and the compiler knows which parts are on
        e.doublings = Parts & kWindow ? 1 : 0;
        e.window = Parts & kWindow ? e.window : nullptr;
        e.constants = nullptr;
        e.clip_first = e.clip_second = false;
        e.residual = Parts & kResidual ? e.residual : nullptr;
        e.out = Parts & kOut ? e.out : nullptr;
        e.codes = Parts & kCodes ? e.codes : nullptr;
        e.code_scale = Parts & kCodeScale ? e.code_scale : nullptr;
    }
    int done = 0;
    constexpr bool kFloats = std::is_same_v<Sum, float>; // float sums may have no scale
    if (Parts != kAnyParts && (e.scale || kFloats) && channels >= 2 * W && rows <= kEpilogueRows) {
        decltype(window_as(acc, 0)) windows[kEpilogueRows];
        if (Parts & kWindow)
            for (int r = 0; r < rows; ++r)
                windows[r] = window_as(acc, e.window_factor * e.window[r]);
        if (!kFloats || e.scale) {
            done = epilogue_vectors<Parts, 4, true>(e, windows, acc, width, rows, 0, channels);
            done = epilogue_vectors<Parts, 2, true>(e, windows, acc, width, rows, done, channels);
        } else if constexpr (kFloats) {
            done = epilogue_vectors<Parts, 4, false>(e, windows, acc, width, rows, 0, channels);
            done = epilogue_vectors<Parts, 2, false>(e, windows, acc, width, rows, done, channels);
        }
    }
    for (int c = done; c < channels; c += W) {
        const int n = channels - c;
        const bool scaled = e.scale != nullptr;
        const F scale = scaled ? load(e.scale + c, n) : set1(0.0f), shift = scaled ? load(e.shift + c, n) : scale;
        const bool code_scaled = e.code_scale != nullptr;
        const F code_scale = code_scaled ? load(e.code_scale + c, n) : set1(0.0f);
        const F code_shift = code_scaled ? load(e.code_shift + c, n) : code_scale;
        for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
            F y = sum_to_float(e, r, c, n, acc + r * width + c);
            if (scaled)
                y = fma(y, scale, shift);
            if (e.clip_first)
                y = smaller(larger(y, set1(e.low_first)), set1(e.high_first));
            if (e.residual)
                y = add(y, load(e.residual + r * e.residual_stride + c, n));
            if (e.clip_second)
                y = smaller(larger(y, set1(e.low_second)), set1(e.high_second));
            if (e.out)
                store(e.out + r * e.out_stride + c, y, n);
            if (e.codes) {
                if (code_scaled)
                    y = fma(y, code_scale, code_shift);
                store_codes(e.codes + r * e.codes_stride + c, smaller(larger(y, set1(0.0f)), set1(e.levels)), n);
            }
        }
    }
}

// A signed input and floats only: 2 acc + constants, scaled and stored, where all rows have the same constants.
inline bool is_signed_sum(const Epilogue &e, int rows) {
    if (!e.constants || e.doublings != 1 || e.window || !e.scale || !e.out || e.codes || e.residual || e.clip_first ||
        e.clip_second)
        return false;
    for (int r = 1; r < rows; ++r)
        if (e.constant_rows[r] != e.constant_rows[0])
            return false;
    return true;
}
inline void signed_sums(const Epilogue &e, const int32_t *acc, int width, int rows, int channels) {
    const int32_t *constants = e.constants + e.constant_rows[0];
    for (int c = 0; c < channels; c += W) {
        const int n = channels - c;
        const I constant = load(constants + c, n);
        const F scale = load(e.scale + c, n), shift = load(e.shift + c, n);
        for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
            const I sum = load_sum(acc + r * width + c);
            store(e.out + r * e.out_stride + c, fma(to_float(add(add(sum, sum), constant)), scale, shift), n);
        }
    }
}

template <typename Sum> void epilogue_tile(const Epilogue &e, const Sum *acc, int width, int rows, int channels) {
    using Function = void (*)(const Epilogue &, const Sum *, int, int, int);
#define EPILOGUE4(n)                                                                                                   \
    epilogue_sums<n, Sum>, epilogue_sums<n + 1, Sum>, epilogue_sums<n + 2, Sum>, epilogue_sums<n + 3, Sum>
#define EPILOGUE16(n) EPILOGUE4(n), EPILOGUE4(n + 4), EPILOGUE4(n + 8), EPILOGUE4(n + 12)
    static constexpr Function variants[] = {EPILOGUE16(0), EPILOGUE16(16), epilogue_sums<kAnyParts, Sum>};
#undef EPILOGUE16
#undef EPILOGUE4
    if constexpr (std::is_same_v<Sum, int32_t>)
        if (is_signed_sum(e, rows))
            return signed_sums(e, acc, width, rows, channels);
    int parts = kAnyParts;
    if (!e.constants && !e.clip_first && !e.clip_second && e.doublings == (e.window ? 1 : 0))
        parts = (e.residual ? kResidual : 0) | (e.out ? kOut : 0) | (e.codes ? kCodes : 0) |
                (e.code_scale ? kCodeScale : 0) | (e.window ? kWindow : 0);
    variants[parts](e, acc, width, rows, channels);
}

[[maybe_unused]] void epilogue_floats(const float *x, size_t stride, int rows, int channels, const Epilogue &whole) {
    Epilogue e = whole;
    for (int r = 0; r < rows; r += kEpilogueRows) {
        const int some = rows - r < kEpilogueRows ? rows - r : kEpilogueRows;
        epilogue_tile(e, x + stride * static_cast<size_t>(r), static_cast<int>(stride), some, channels);
        advance(e, some);
    }
}

// --- From registers --------------------------------------------------------------------------------------------------

// Whether an epilogue is of the most frequent kind: scale, then codes.
[[maybe_unused]] inline bool makes_only_codes(const Epilogue &e, int doublings) {
    return e.scale && e.codes && e.doublings == doublings && !e.residual && !e.out && !e.constants && !e.clip_first &&
           !e.clip_second;
}

// Whether a tile of so many whole vectors ends in registers: without the detour through memory, and without a call.
// What is rare (clips, signed inputs) is not done here. At AVX2 layers with a residual or floats were slower than by
// epilogue_tile. With AVX-512 (kResidualsInRegisters) only those of wide tiles that read and write floats are: waiting
// for memory then holds up the next tile.
[[maybe_unused]] inline bool ends_in_registers(const Epilogue &e, int doublings, int vectors) {
    if (!kResidualsInRegisters)
        return makes_only_codes(e, doublings);
    return e.doublings == doublings && !e.constants && !e.clip_first && !e.clip_second &&
           (vectors < 4 || !e.residual || !e.out);
}

// N vectors of row r, from channel c on: as epilogue_vectors.
template <int N> [[maybe_unused]] ANYPREC_INLINE void end_row(const Epilogue &e, size_t r, int c, F (&y)[N]) {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v)
        y[v] = fma(y[v], load(e.scale + c + W * v, W), load(e.shift + c + W * v, W));
    if (e.code_scale)
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v)
            y[v] = fma(y[v], load(e.code_scale + c + W * v, W), load(e.code_shift + c + W * v, W));
    const F levels = set1(e.levels);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v)
        y[v] = smaller(levels, y[v]);
    store_codes(e.codes + r * e.codes_stride + c, y);
}

// Scaled rows of a tile, from row `row` and channel `c` on: a residual, floats and codes, whichever there are. Channels
// are the outer loop, so that tables are read once.
template <int R, int V>
[[maybe_unused]] ANYPREC_INLINE void end_rows(const Epilogue &e, F (&y)[R][V], size_t row = 0, int c = 0) {
    if (kResidualsInRegisters && e.residual)
#pragma GCC unroll 8
        for (size_t r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                y[r][v] = add(y[r][v], load(e.residual + (row + r) * e.residual_stride + c + W * v, W));
    if (kResidualsInRegisters && e.out)
#pragma GCC unroll 8
        for (size_t r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                store(e.out + (row + r) * e.out_stride + c + W * v, y[r][v], W);
    if (kResidualsInRegisters && !e.codes)
        return;
    if (e.code_scale)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const F scale = load(e.code_scale + c + W * v, W), shift = load(e.code_shift + c + W * v, W);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                y[r][v] = fma(y[r][v], scale, shift);
        }
    const F levels = set1(e.levels);
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
            y[r][v] = smaller(levels, y[r][v]);
        store_codes(e.codes + (row + r) * e.codes_stride + c, y[r]);
    }
}
