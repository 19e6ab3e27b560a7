// Kernels of NEON with products of 8-bit matrices (ARMv8.6, or 8.2 with i8mm: Cortex-A510, A710, X2 and later, Neoverse
// V1, N2 and V2, Apple M2). Flags of this file only: -march=armv8.2-a+dotprod+i8mm.
// In: Tiles as in kernels.h. Out: outputs through the epilogue. The arithmetic is ARITHMETIC.md, sections 2 to 4.
//
//   tile: up to 6 rows x 4 vectors of 4 output channels (or 8 x 2), 24 accumulators in the 32 registers
//
//                   w: 2 channels x 8 codes
//                   +----------+----------+
//    x: 2 rows      | k 0 .. 7 | k 0 .. 7 |        usmmla multiplies a 2 x 8 by an 8 x 2 matrix, 32 products:
//    +----------+   +----------+----------+        twice those of a dot product. An accumulator holds 2 rows
//    | k 0 .. 7 | ->| 0,0        0,1      |        and 2 channels. Two of them side by side are a vector of
//    | k 0 .. 7 | ->| 1,0        1,1      |        4 channels in 2 rows; the end of a tile zips them.
//    +----------+   +---------------------+
//
//   8 to 2 bit usmmla; Winograd's signed V: smmla
//   1 bit      and, cnt (neon.inl)
#include "kernels/kernels.h"

#include <arm_neon.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

namespace anyprec {
namespace {

#include "kernels/neon.inl"

// --- 8 to 2 bit: usmmla and smmla, eight channels per step -----------------------------------------------------------

struct Mixed { // codes times signed weights
    static I step(I acc, uint8x16_t x, uint8x16_t w) { return vusmmlaq_s32(acc, x, vreinterpretq_s8_u8(w)); }
};
struct Signed {
    static I step(I acc, uint8x16_t x, uint8x16_t w) {
        return vmmlaq_s32(acc, vreinterpretq_s8_u8(x), vreinterpretq_s8_u8(w));
    }
};

template <typename Product> struct Matrices {
    // Step `s` of P pairs of rows. Each vector of the panel is two registers, of two channels each.
    template <int P, int V>
    static ANYPREC_INLINE void step(const uint8x16_t (&x)[P], const uint8_t *&panel, I (&acc)[P][2 * V]) {
#pragma GCC unroll 8
        for (int v = 0; v < 2 * V; ++v) {
            const uint8x16_t w = vld1q_u8(panel + 16 * v);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p)
                acc[p][v] = Product::step(acc[p][v], x[p], w);
        }
        panel += 32 * V;
    }

    template <int R, int V> static void tile(const Tile &t) {
        constexpr int kPairs = (R + 1) / 2; // the last of an odd number of rows is its own partner
        I acc[kPairs][2 * V];
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < 2 * V; ++v)
                acc[p][v] = I{};
        const uint8_t *panel = t.panel, *prefetch_from = t.prefetch_from;
        for (int tap = 0; tap < t.taps; ++tap) {
            const uint8_t *in[2 * kPairs];
#pragma GCC unroll 8
            for (int r = 0; r < 2 * kPairs; ++r)
                in[r] = t.base + t.offsets[tap * R + (r < R ? r : R - 1)];
            uint8x16_t x[kPairs];
            int s = 0;
            for (; s + 2 <= t.steps; s += 2) {
                prefetch_weights(prefetch_from, 2, t);
                uint8x16_t next[kPairs];
#pragma GCC unroll 4
                for (int p = 0; p < kPairs; ++p) {
                    const uint64x2_t a = vreinterpretq_u64_u8(vld1q_u8(in[2 * p] + 8 * s));
                    const uint64x2_t b = vreinterpretq_u64_u8(vld1q_u8(in[2 * p + 1] + 8 * s));
                    x[p] = vreinterpretq_u8_u64(vzip1q_u64(a, b));
                    next[p] = vreinterpretq_u8_u64(vzip2q_u64(a, b));
                }
                step<kPairs, V>(x, panel, acc);
                step<kPairs, V>(next, panel, acc);
            }
            if (s < t.steps) {
                prefetch_weights(prefetch_from, 1, t);
#pragma GCC unroll 4
                for (int p = 0; p < kPairs; ++p)
                    x[p] = vcombine_u8(vld1_u8(in[2 * p] + 8 * s), vld1_u8(in[2 * p + 1] + 8 * s));
                step<kPairs, V>(x, panel, acc);
            }
        }
        I rows[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                const int64x2_t a = vreinterpretq_s64_s32(acc[r / 2][2 * v]);
                const int64x2_t b = vreinterpretq_s64_s32(acc[r / 2][2 * v + 1]);
                rows[r][v] = vreinterpretq_s32_s64(r % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
            }
        WholeSums<R, V>().epilogue(t, rows);
    }
};

// --- The table of kernels --------------------------------------------------------------------------------------------

// Speeds are for a Neoverse V1 and on paper (docs/internals/kernels.md).
template <typename Product> constexpr Tiles matrices = tiles_of<Matrices<Product>, 8, 8, 6>();

constexpr Operands centered = {Input::codes, Coding::centered8, 8, 4}, offset = {Input::codes, Coding::offset8, 8, 4};

constexpr TileKernel count_1bit("cnt, 1 bit", bits8, {1, 1, 65528}, wide_tiles<CountBits>, 157);
constexpr TileKernel matrix_7bit("usmmla", centered, {7, 8}, matrices<Mixed>, 98);
constexpr TileKernel matrix_8bit("usmmla, 8 bit", offset, {8, 8}, matrices<Mixed>, 97);
constexpr TileKernel float_fma("fmla", floats, {0, 0}, wide_tiles<Multiply>, 15);
constexpr TileKernel float_toom_cook("toom-cook fmla", floats, {0, 0}, tiles_of<ToomCookTiles, 8, 8, 6>(), 15,
                                     Algorithm::toom_cook);
constexpr const TileKernel *integer[] = {&count_1bit, &matrix_7bit, &matrix_8bit, nullptr};

// U must fit 8 bits. Nine 3-bit weights add up to at most 63; nine 4-bit ones to 135, but to 72 as c - 8.
constexpr Winograd winograd_3bit =
    winograd_of<ByteForm>({"winograd smmla, 3 bit", centered, {3, 5}, matrices<Signed>, 98, Algorithm::winograd}, 5);
constexpr Winograd winograd_4bit =
    winograd_of<ByteForm>({"winograd smmla, 4 bit", offset, {4, 5}, matrices<Signed>, 98, Algorithm::winograd}, 5);
constexpr const Winograd *winograd[] = {&winograd_3bit, &winograd_4bit, nullptr};

constexpr Kernels table = {"i8mm",
                           integer,
                           &float_fma,
                           &float_toom_cook,
                           toom_cook_input,
                           depthwise_codes,
                           depthwise_floats,
                           epilogue_floats,
                           lookup_offsets_neon,
                           pixel_pair_offsets,
                           widen,
                           to_floats,
                           sums_neon,
                           maximum,
                           maximum_codes,
                           accumulate,
                           interpolate,
                           transpose_floats,
                           transpose_codes,
                           &functions_neon,
                           winograd};

} // namespace

const Kernels *kernels_i8mm() {
    return &table;
}

} // namespace anyprec
