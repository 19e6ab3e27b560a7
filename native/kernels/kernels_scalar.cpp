// Scalar kernels, the reference: no vectors, run on any CPU. Every other table is compared with this one bit for bit.
// In: Tiles as in kernels.h. Out: outputs through the epilogue. The arithmetic is ARITHMETIC.md, sections 2 to 4.
//
//   tile: 1 row x 8 output channels; a step is one input channel
//            +----+----+-----+----+
//    x[s] -> | a0 | a1 | ... | a7 |   a[c] += x[s] * w[s][c]
//            +----+----+-----+----+
#include "kernels/kernels.h"

#include <cmath>
#include <cstring>

namespace anyprec {
namespace {

constexpr int W = 1;
using F = float;
using I = int32_t;

inline F load(const float *p, int) {
    return *p;
}
inline I load(const int32_t *p, int) {
    return *p;
}
inline I load_codes(const uint8_t *p, int) {
    return *p;
}
inline void store(float *p, F v, int) {
    *p = v;
}
inline void store_codes(uint8_t *p, F v, int) {
    *p = static_cast<uint8_t>(std::nearbyint(v));
} // round half to even
inline F set1(float x) {
    return x;
}
inline I set1(int32_t x) {
    return x;
}
inline F fma(F a, F b, F c) {
    return std::fma(a, b, c);
}
inline F add(F a, F b) {
    return a + b;
}
inline I add(I a, I b) {
    return static_cast<I>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
} // wraps modulo 2^32
inline F larger(F a, F b) {
    return a > b ? a : b;
}
inline F smaller(F a, F b) {
    return a < b ? a : b;
}
inline F to_float(I a) {
    return static_cast<float>(a);
}
inline I multiply_add(I a, I b, I c) {
    return a * b + c;
}

// For functions.inl
using M = bool;
inline F sub(F a, F b) {
    return a - b;
}
inline F mul(F a, F b) {
    return a * b;
}
inline F div(F a, F b) {
    return a / b;
}
inline F square_root(F a) {
    return std::sqrt(a);
}
inline F round_even(F a) {
    return std::nearbyint(a);
}
inline I to_int(F a) { // whole
    return static_cast<I>(a);
}
inline I bits_of(F a) {
    I bits;
    std::memcpy(&bits, &a, 4);
    return bits;
}
inline F from_bits(I a) {
    F value;
    std::memcpy(&value, &a, 4);
    return value;
}
inline I bit_and(I a, I b) {
    return a & b;
}
inline I bit_or(I a, I b) {
    return a | b;
}
inline I halved(I a) { // rounded down
    return a >> 1;
}
inline I minus(I a, I b) {
    return a - b;
}
inline I to_exponent(I a) { // places it where a float has its exponent
    return static_cast<I>(static_cast<uint32_t>(a) << 23);
}
inline I exponent_of(I a) { // of a float that is not negative
    return a >> 23;
}
inline M less(F a, F b) {
    return a < b;
}
inline M is_nan(F a) {
    return a != a;
}
inline F choose(M m, F a, F b) {
    return m ? a : b;
}

#include "kernels/vector_kernels.inl"

#include "kernels/functions.inl"

#include "kernels/toom_cook.inl"

template <typename T>
void transpose(const T *from, size_t from_line, size_t rows, size_t columns, T *to, size_t to_line) {
    for (size_t c = 0; c < columns; ++c)
        for (size_t r = 0; r < rows; ++r)
            to[c * to_line + r] = from[r * from_line + c];
}

constexpr int kLanes = 8; // channels of a block

void dot(const Tile &t) {
    int32_t acc[kLanes] = {};
    const int16_t *w = reinterpret_cast<const int16_t *>(t.panel);
    for (int tap = 0; tap < t.taps; ++tap) {
        const uint8_t *in = t.base + t.offsets[tap];
        for (int s = 0; s < t.steps; ++s, w += kLanes)
            for (int c = 0; c < kLanes; ++c)
                acc[c] += in[s] * w[c];
    }
    for (int c = 0; c < t.channels; ++c)
        epilogue_integer(t.epilogue, 0, c, 1, acc[c]);
}

void multiply(const Tile &t) {
    float acc[kLanes] = {};
    const float *w = reinterpret_cast<const float *>(t.panel);
    for (int tap = 0; tap < t.taps; ++tap) {
        const float *in = reinterpret_cast<const float *>(t.base + t.offsets[tap]);
        for (int s = 0; s < t.steps; ++s, w += kLanes)
            for (int c = 0; c < kLanes; ++c)
                acc[c] = std::fma(in[s], w[c], acc[c]);
    }
    for (int c = 0; c < t.channels; ++c)
        epilogue_float(t.epilogue, 0, c, 1, acc[c]);
}

void multiply_toom_cook(const Tile &t) {
    const ToomCookTile &q = t.toom_cook;
    const size_t block = static_cast<size_t>(q.block);
    float halfway[kLanes][kToomCookOutputs][kToomCookPoints], y[kToomCookOutputs];
    const float *w = reinterpret_cast<const float *>(t.panel);
    for (size_t down = 0; down < kToomCookPoints; ++down) {
        float m[kLanes][kToomCookPoints] = {};
        for (size_t across = 0; across < kToomCookPoints; ++across)
            for (size_t half = 0; half < block; ++half) {
                const float *in =
                    reinterpret_cast<const float *>(t.base + q.line * (block * down + half) + q.position * across);
                for (int s = 0; s < t.steps; ++s, w += kLanes)
                    for (int c = 0; c < kLanes; ++c)
                        m[c][across] = std::fma(in[s], w[c], m[c][across]);
            }
        for (int c = 0; c < kLanes; ++c) {
            toom_cook_output(m[c], y);
            for (int x = 0; x < kToomCookOutputs; ++x)
                halfway[c][x][down] = y[x];
        }
    }
    for (int c = 0; c < t.channels; ++c)
        for (int x = 0; x < q.pixels; ++x) {
            toom_cook_output(halfway[c][x], y);
            for (int line = 0; line < q.lines; ++line)
                epilogue_float(t.epilogue, static_cast<size_t>(line) * q.width + x, c, 1, y[line]);
        }
}

constexpr TileFunction dots[] = {dot}, multiplies[] = {multiply}, toom_cook[] = {multiply_toom_cook};
constexpr TileKernel integer_dot("scalar", {Input::codes, Coding::centered16, 1, kLanes}, {8, 8}, {0, {1}, {dots}}, 1);
constexpr TileKernel float_dot("scalar", {Input::floats, Coding::floats, 1, kLanes}, {0, 0}, {0, {1}, {multiplies}}, 1);
constexpr TileKernel float_toom_cook("toom-cook scalar", {Input::floats, Coding::floats, 1, kLanes}, {0, 0},
                                     {0, {1}, {toom_cook}}, 1, Algorithm::toom_cook);
constexpr const TileKernel *integer[] = {&integer_dot, nullptr};

constexpr Kernels table = {"scalar",
                           integer,
                           &float_dot,
                           &float_toom_cook,
                           toom_cook_input,
                           depthwise_codes,
                           depthwise_floats,
                           epilogue_rows,
                           lookup_offsets,
                           pixel_pair_offsets,
                           widen,
                           to_floats,
                           sums,
                           maximum,
                           maximum_codes,
                           accumulate,
                           interpolate,
                           transpose<float>,
                           transpose<uint8_t>,
                           &functions};

} // namespace

const Kernels *kernels_scalar() {
    return &table;
}

} // namespace anyprec
