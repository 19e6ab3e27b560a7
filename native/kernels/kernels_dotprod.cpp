// Kernels of NEON with dot products (ARMv8.2 with asimddp: Cortex-A55, A75, A76 and later, Neoverse N1, Apple M1).
// Flags of this file only: -march=armv8.2-a+dotprod.
// In: Tiles as in kernels.h. Out: outputs through the epilogue. The arithmetic is ARITHMETIC.md, sections 2 to 4.
//
//   tile: up to 6 rows x 4 vectors (or 8 x 2), 24 accumulators in the 32 registers
//            w[0]: 4 output channels   ...   w[3]
//    x[0] -> | acc 0,0               | ... | acc 0,3 |     x[r] holds 16 codes of row r, four steps: the instruction
//    ...     | ...                   | ... | ...     |     takes its four codes from a lane, nothing is broadcast
//    x[5] -> | acc 5,0               | ... | acc 5,3 |
//
//   8 bit      udot on codes; the window sums correct for the sign
//   7 to 2 bit sdot: codes of activations fit 7 bits, so they are signed bytes too
//   1 bit      and, cnt (neon.inl). A lookup by tbl and add at 2 bit does 16 products per instruction, as many as sdot
//              without its tables
#include "kernels/kernels.h"

#include <arm_neon.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

namespace anyprec {
namespace {

#include "kernels/neon.inl"

// --- 8 to 2 bit: sdot and udot, four channels per step ---------------------------------------------------------------

struct Signed {
    template <int Lane> static I step(I acc, uint8x16_t x, uint8x16_t w) {
        return vdotq_laneq_s32(acc, vreinterpretq_s8_u8(w), vreinterpretq_s8_u8(x), Lane);
    }
};
struct Unsigned {
    template <int Lane> static I step(I acc, uint8x16_t x, uint8x16_t w) {
        return vreinterpretq_s32_u32(vdotq_laneq_u32(vreinterpretq_u32_s32(acc), w, x, Lane));
    }
};

template <typename Product> struct Dots {
    // The step whose codes are in one lane of x.
    template <int Lane, int R, int V>
    static ANYPREC_INLINE void step(const uint8x16_t (&x)[R], const uint8_t *&panel, I (&acc)[R][V]) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const uint8x16_t w = vld1q_u8(panel + 16 * v);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                acc[r][v] = Product::template step<Lane>(acc[r][v], x[r], w);
        }
        panel += 16 * V;
    }

    template <int R, int V> static void tile(const Tile &t) {
        I acc[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                acc[r][v] = I{};
        const uint8_t *panel = t.panel, *prefetch_from = t.prefetch_from;
        for (int tap = 0; tap < t.taps; ++tap) {
            const uint8_t *in[R];
            uint8x16_t x[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                in[r] = t.base + t.offsets[tap * R + r];
            int s = 0;
            for (; s + 4 <= t.steps; s += 4) {
                prefetch_weights(prefetch_from, 4, t);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    x[r] = vld1q_u8(in[r] + 4 * s);
                step<0>(x, panel, acc);
                step<1>(x, panel, acc);
                step<2>(x, panel, acc);
                step<3>(x, panel, acc);
            }
            for (; s < t.steps; ++s) { // the last 1 to 3: nothing past them is read
                prefetch_weights(prefetch_from, 1, t);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    uint32_t four;
                    std::memcpy(&four, in[r] + 4 * s, 4);
                    x[r] = vreinterpretq_u8_u32(vdupq_n_u32(four));
                }
                step<0>(x, panel, acc);
            }
        }
        WholeSums<R, V>().epilogue(t, acc);
    }
};

// --- The table of kernels --------------------------------------------------------------------------------------------

// Speeds are for a Cortex-A76 and on paper (docs/internals/kernels.md).
template <typename Product> constexpr Tiles dots = tiles_of<Dots<Product>, 8, 8, 6>();

constexpr Operands centered = {Input::codes, Coding::centered8, 4, 4}, offset = {Input::codes, Coding::offset8, 4, 4};
constexpr Operands codes = {Input::codes, Coding::codes8, 4, 4};

constexpr TileKernel count_1bit("cnt, 1 bit", bits8, {1, 1, 65528}, wide_tiles<CountBits>, 78);
constexpr TileKernel dot_7bit("sdot", centered, {7, 7}, dots<Signed>, 31);
constexpr TileKernel dot_8bit("udot, 8 bit", codes, {8, 8}, dots<Unsigned>, 30);
constexpr TileKernel float_fma("fmla", floats, {0, 0}, wide_tiles<Multiply>, 8);
constexpr TileKernel float_toom_cook("toom-cook fmla", floats, {0, 0}, tiles_of<ToomCookTiles, 8, 8, 6>(), 8,
                                     Algorithm::toom_cook);
constexpr const TileKernel *integer[] = {&count_1bit, &dot_7bit, &dot_8bit, nullptr};

// U must fit 8 bits. Nine 3-bit weights add up to at most 63; nine 4-bit ones to 135, but to 72 as c - 8.
constexpr Winograd winograd_3bit =
    winograd_of<ByteForm>({"winograd sdot, 3 bit", centered, {3, 5}, dots<Signed>, 31, Algorithm::winograd}, 8);
constexpr Winograd winograd_4bit =
    winograd_of<ByteForm>({"winograd sdot, 4 bit", offset, {4, 5}, dots<Signed>, 31, Algorithm::winograd}, 8);
constexpr const Winograd *winograd[] = {&winograd_3bit, &winograd_4bit, nullptr};

constexpr Kernels table = {"dotprod",          integer,         &float_fma,
                           &float_toom_cook,   toom_cook_input, depthwise_codes,
                           depthwise_floats,   epilogue_floats, lookup_offsets_neon,
                           pixel_pair_offsets, widen,           to_floats,
                           sums_neon,          maximum,         maximum_codes,
                           accumulate,         interpolate,     transpose_floats,
                           transpose_codes,    &functions_neon, winograd};

} // namespace

const Kernels *kernels_dotprod() {
    return &table;
}

} // namespace anyprec
