// Kernels of plain NEON, for every 64-bit ARM core (Cortex-A53, A57, A72, A73: Raspberry Pi 3 and 4). No flags of its
// own. In: Tiles as in kernels.h. Out: outputs through the epilogue. The arithmetic is ARITHMETIC.md, sections 2 to 4.
//
//   tile: up to 6 rows x 4 vectors (or 8 x 2), 24 accumulators in the 32 registers; 8 to 3 bit: 6 rows x 2 vectors
//            w[0]            w[1]
//    x[0] -> | acc 0,0 low   | acc 0,1 low   |     x[r] is broadcast: 1 code (3 to 5 bits), 2 codes (8 bits),
//            | acc 0,0 high  | acc 0,1 high  |     the bits of 8 channels or 1 float of row r, or a lookup table
//    ...     | ...           | ...           |
//    x[5] -> | acc 5,0 low   | acc 5,1 low   |     a product is twice as wide as its factors: the lower and upper
//            | acc 5,0 high  | acc 5,1 high  |     half of w[v] have accumulators of their own
//
//   8 to 6 bit umull, products of 16 bits; uadalp adds pairs of them to 32-bit sums. Both take different pipes
//              of a Cortex-A57 or A72
//   5 to 3 bit smlal, 16-bit sums, widened before they can overflow: every 145 steps at 4 bits, 34 at 5. At 6 bits,
//              every 8, that would take longer than umull
//   2 bit      tbl as a table lookup of 16 entries. Four activations choose the table (256 tables of 16 bytes);
//              four weight bits of one plane are the index
//   1 bit      and, cnt: 128 products at once
//
// Vectors, and the kernels that all ARM tables share, are in neon.inl.
#include "kernels/kernels.h"

#include <arm_neon.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

namespace anyprec {
namespace {

#include "kernels/neon.inl"

#include "kernels/functions.inl"

// --- 8 to 6 bit: umull, uadalp, two channels per step ----------------------------------------------------------------

// Eight channels. A product of codes is at most 255 x 255, which 16 bits hold; the sum of two is not.
struct TwoSums {
    uint32x4_t low, high;
};
inline void store(void *p, const TwoSums &v) {
    vst1q_u32(static_cast<uint32_t *>(p), v.low);
    vst1q_u32(static_cast<uint32_t *>(p) + 4, v.high);
}

struct DotWide {
    using Vector = TwoSums;
    using Code = uint8_t;
    static constexpr int kSafeSteps = 0;
    static uint8x16_t input(const uint8_t *in, int s) {
        uint16_t two;
        std::memcpy(&two, in + 2 * s, 2);
        return vreinterpretq_u8_u16(vdupq_n_u16(two));
    }
    static uint8x16_t weights(const uint8_t *panel) { return vld1q_u8(panel); }
    static TwoSums step(const TwoSums &acc, uint8x16_t x, uint8x16_t w) {
        return {vpadalq_u16(acc.low, vmull_u8(vget_low_u8(x), vget_low_u8(w))),
                vpadalq_u16(acc.high, vmull_high_u8(x, w))};
    }
    template <int R, int V> using Totals = WholeSums<R, V>;
};

// --- 5 to 3 bit: smlal, one channel per step -------------------------------------------------------------------------

// Sixteen channels. At 4 bits a step adds at most 15 x 15, so a 16-bit sum holds 145 steps.
struct TwoNarrowSums {
    int16x8_t low, high;
};

template <int Largest> struct DotNarrow {
    using Vector = TwoNarrowSums;
    using Code = uint8_t;
    using Total = int32_t;
    static constexpr int kSafeSteps = 32767 / Largest, kLanes = 16;
    static int8x16_t input(const uint8_t *in, int s) { return vld1q_dup_s8(reinterpret_cast<const int8_t *>(in + s)); }
    static int8x16_t weights(const uint8_t *panel) { return vld1q_s8(reinterpret_cast<const int8_t *>(panel)); }
    static TwoNarrowSums step(const TwoNarrowSums &acc, int8x16_t x, int8x16_t w) {
        return {vmlal_s8(acc.low, vget_low_s8(x), vget_low_s8(w)), vmlal_high_s8(acc.high, x, w)};
    }
    template <bool First> static void add_to(int32_t *total, const TwoNarrowSums &acc) {
        const auto add_four = [](int32_t *to, int16x4_t sums) {
            store(to, First ? vmovl_s16(sums) : vaddw_s16(vld1q_s32(to), sums));
        };
        add_four(total, vget_low_s16(acc.low));
        add_four(total + 4, vget_high_s16(acc.low));
        add_four(total + 8, vget_low_s16(acc.high));
        add_four(total + 12, vget_high_s16(acc.high));
    }
    template <int R, int V> using Totals = StackTotals<DotNarrow, R, V>;
};

// --- 2 bit: table lookup ---------------------------------------------------------------------------------------------

#include "kernels/lookup_2bit.inl"

// An 8-bit sum holds at least 255 / 12 steps. Even and odd bytes are the lower and the upper plane of the same channel.
// Totals, lower + 2 upper, have 16 bits.
struct LookUp {
    using Vector = uint8x16_t;
    using Code = uint16_t;
    using Total = uint16_t;
    static constexpr int kSafeSteps = -1, kLanes = 8;
    static uint8x16_t input(const uint16_t *in, int s) { return vld1q_u8(&products.table[0][0] + in[s]); }
    static uint8x16_t weights(const uint8_t *panel) { return vld1q_u8(panel); }
    static uint8x16_t step(uint8x16_t acc, uint8x16_t x, uint8x16_t w) { return vaddq_u8(acc, vqtbl1q_u8(x, w)); }
    template <bool First> static void add_to(uint16_t *total, uint8x16_t acc) {
        const uint16x8_t words = vreinterpretq_u16_u8(acc);
        const uint16x8_t lower = vandq_u16(words, vdupq_n_u16(255)), upper = vshrq_n_u16(words, 8);
        const uint16x8_t sums = vaddq_u16(lower, vaddq_u16(upper, upper));
        vst1q_u16(total, First ? sums : vaddq_u16(vld1q_u16(total), sums));
    }
    template <int R, int V> using Totals = StackTotals<LookUp, R, V>;
};

// --- The table of kernels --------------------------------------------------------------------------------------------

// Speeds are for a Cortex-A72 and on paper (docs/internals/kernels.md).
template <typename Inner> constexpr Tiles tiles = tiles_of<Loop<Inner>, 8, 6>();

constexpr Operands planes = {Input::lookup, Coding::lookup_planes, 4, 8};
constexpr Operands centered = {Input::codes, Coding::centered8, 1, 16}, offset = {Input::codes, Coding::offset8, 1, 16};
constexpr Operands codes = {Input::codes, Coding::codes8, 2, 8};

constexpr TileKernel count_1bit("cnt, 1 bit", bits8, {1, 1, 65528}, wide_tiles<CountBits>, 78);
constexpr TileKernel lookup_2bit("tbl, 2 bit", planes, {2, 2, 4 * (65535 / 36)}, wide_tiles<LookUp>, 13);
constexpr TileKernel dot_4bit("smlal, 4 bit", centered, {4, 4}, tiles<DotNarrow<15 * 15>>, 8);
constexpr TileKernel dot_5bit("smlal, 5 bit", centered, {5, 5}, tiles<DotNarrow<31 * 31>>, 8);
constexpr TileKernel dot_8bit("umull, 8 bit", codes, {8, 8}, tiles<DotWide>, 7);
constexpr TileKernel float_fma("fmla", floats, {0, 0}, wide_tiles<Multiply>, 4);
constexpr TileKernel float_toom_cook("toom-cook fmla", floats, {0, 0}, tiles_of<ToomCookTiles, 8, 8, 6>(), 4,
                                     Algorithm::toom_cook);
constexpr const TileKernel *integer[] = {&count_1bit, &lookup_2bit, &dot_4bit, &dot_5bit, &dot_8bit, nullptr};

// At 4 bits U is at most 72 and V at most 60: sums are widened every 7 steps.
constexpr Winograd winograd_4bit =
    winograd_of<ByteForm>({"winograd smlal", offset, {4, 4}, tiles<DotNarrow<72 * 60>>, 6, Algorithm::winograd}, 12);
constexpr const Winograd *winograd[] = {&winograd_4bit, nullptr};

constexpr Kernels table = {"neon",
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
                           &functions,
                           winograd};

} // namespace

const FunctionKernels functions_neon = functions;

const Kernels *kernels_neon() {
    return &table;
}

} // namespace anyprec
