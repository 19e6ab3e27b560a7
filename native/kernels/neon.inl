// The vector type of 64-bit ARM (NEON, 128 bits), and everything that its three tables share: kernels_neon.cpp (any
// ARMv8 core), kernels_dotprod.cpp (dot products) and kernels_i8mm.cpp (products of matrices). In: <arm_neon.h>. Out:
// `F`, `I` and `M` of 4 lanes as vector_kernels.inl and functions.inl need them, the kernels of the former, the byte
// form of Winograd and the kernel of 1 bit. The arithmetic is ARITHMETIC.md, sections 2 to 4.

constexpr bool kResidualsInRegisters = false;
constexpr int W = 4;
using F = float32x4_t;
using I = int32x4_t;

inline void store(void *p, I v) {
    vst1q_s32(static_cast<int32_t *>(p), v);
}
inline F load(const float *p, int n) {
    if (n >= W)
        return vld1q_f32(p);
    const float32x2_t none = vdup_n_f32(0);
    if (n == 1)
        return vcombine_f32(vld1_lane_f32(p, none, 0), none);
    return vcombine_f32(vld1_f32(p), n == 3 ? vld1_lane_f32(p + 2, none, 0) : none);
}
inline I load(const int32_t *p, int n) {
    if (n >= W)
        return vld1q_s32(p);
    const int32x2_t none = vdup_n_s32(0);
    if (n == 1)
        return vcombine_s32(vld1_lane_s32(p, none, 0), none);
    return vcombine_s32(vld1_s32(p), n == 3 ? vld1_lane_s32(p + 2, none, 0) : none);
}
inline I load_codes(const uint8_t *p, int n) {
    uint32_t codes = 0;
    if (n >= W)
        std::memcpy(&codes, p, W);
    else
        for (int i = 0; i < n; ++i)
            codes |= static_cast<uint32_t>(p[i]) << (8 * i);
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(codes)))));
}
inline void store(float *p, F v, int n) {
    if (n >= W)
        return vst1q_f32(p, v);
    if (n == 1)
        return vst1q_lane_f32(p, v, 0);
    vst1_f32(p, vget_low_f32(v));
    if (n == 3)
        vst1q_lane_f32(p + 2, v, 2);
}
// Rounds half to even. Negative numbers and NaN become 0.
inline uint16x8_t rounded(F a, F b) {
    return vuzp1q_u16(vreinterpretq_u16_u32(vcvtnq_u32_f32(a)), vreinterpretq_u16_u32(vcvtnq_u32_f32(b)));
}
inline void store_codes(uint8_t *p, F v, int n) { // v lies in 0..255
    const uint32_t codes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(rounded(v, v))), 0);
    if (n >= W)
        std::memcpy(p, &codes, W);
    else
        for (int i = 0; i < n; ++i)
            p[i] = static_cast<uint8_t>(codes >> (8 * i));
}
inline void store_codes(uint8_t *p, const F (&v)[4]) { // v is at most 255
    const uint8x16_t low = vreinterpretq_u8_u16(rounded(v[0], v[1])), high = vreinterpretq_u8_u16(rounded(v[2], v[3]));
    vst1q_u8(p, vuzp1q_u8(low, high));
}
inline void store_codes(uint8_t *p, const F (&v)[2]) {
    vst1_u8(p, vmovn_u16(rounded(v[0], v[1])));
}
inline F set1(float x) {
    return vdupq_n_f32(x);
}
inline I set1(int32_t x) {
    return vdupq_n_s32(x);
}
inline F fma(F a, F b, F c) {
    return vfmaq_f32(c, a, b);
}
inline F add(F a, F b) {
    return vaddq_f32(a, b);
}
inline I add(I a, I b) {
    return vaddq_s32(a, b);
}
// fmax and fmin treat NaN and zeros in another way.
inline F larger(F a, F b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
} // a > b ? a : b, NaN gives b
inline F smaller(F a, F b) {
    return vbslq_f32(vcltq_f32(a, b), a, b);
} // a < b ? a : b
inline F to_float(I a) {
    return vcvtq_f32_s32(a);
}
inline I multiply_add(I a, I b, I c) {
    return vmlaq_s32(c, a, b);
}

inline I load_sum(const int32_t *p) {
    return vld1q_s32(p);
}
inline I load_sum(const uint16_t *p) {
    return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p)));
}
ANYPREC_INLINE void prefetch_far(const void *p) {
    __builtin_prefetch(p, 0, 2); // pldl2keep
}

// For functions.inl, which kernels_neon.cpp compiles for all three
using M = uint32x4_t;
inline M less(F a, F b) {
    return vcltq_f32(a, b);
}
inline M is_nan(F a) {
    return vmvnq_u32(vceqq_f32(a, a));
}
inline F choose(M m, F a, F b) {
    return vbslq_f32(m, a, b);
}
inline F sub(F a, F b) {
    return vsubq_f32(a, b);
}
inline F mul(F a, F b) {
    return vmulq_f32(a, b);
}
inline F div(F a, F b) {
    return vdivq_f32(a, b);
}
inline F square_root(F a) {
    return vsqrtq_f32(a);
}
inline F round_even(F a) {
    return vrndnq_f32(a);
}
inline I to_int(F a) { // whole
    return vcvtq_s32_f32(a);
}
inline I bits_of(F a) {
    return vreinterpretq_s32_f32(a);
}
inline F from_bits(I a) {
    return vreinterpretq_f32_s32(a);
}
inline I bit_and(I a, I b) {
    return vandq_s32(a, b);
}
inline I bit_or(I a, I b) {
    return vorrq_s32(a, b);
}
inline I halved(I a) { // rounded down
    return vshrq_n_s32(a, 1);
}
inline I minus(I a, I b) {
    return vsubq_s32(a, b);
}
inline I to_exponent(I a) { // places it where a float has its exponent
    return vshlq_n_s32(a, 23);
}
inline I exponent_of(I a) { // of a float that is not negative
    return vshrq_n_s32(a, 23);
}

#include "kernels/vector_kernels.inl"

#include "kernels/transpose.inl"

#include "kernels/epilogue.inl"

// Winograd: V as signed bytes. For 5-bit codes V lies in -62 .. 62, or 0 .. 124 at position 5.
struct ByteForm {
    static constexpr int kLanes = 16, kBias = 0;
    static int8x16_t bytes(I a) { return vreinterpretq_s8_s32(a); }
    static I load(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
    static I add(I a, I b) { return vreinterpretq_s32_s8(vaddq_s8(bytes(a), bytes(b))); }
    static I sub(I a, I b) { return vreinterpretq_s32_s8(vsubq_s8(bytes(a), bytes(b))); }
    static I biased(I a) { return a; }
};
constexpr int kWidest = 64;
inline I quarter(I a) {
    return vshrq_n_s32(a, 2);
}
inline I sub(I a, I b) {
    return vsubq_s32(a, b);
}

#include "kernels/winograd.inl"

// The lookup index of sixteen groups, a byte each: eight 1-bit or four 2-bit channels. Codes past a pixel's channels
// reach only higher bits of the index, which belong to channels past the end too and meet zero weights.
template <int Group, int Bits> inline uint8x16_t group_codes(const uint8_t *codes, int steps) {
    uint8x16_t index = vdupq_n_u8(0);
#pragma GCC unroll 8
    for (int part = Group - 1; part >= 0; --part)
        index = vorrq_u8(vshlq_n_u8(index, Bits), vld1q_u8(codes + static_cast<ptrdiff_t>(part) * steps));
    return index;
}

// See lookup_offsets in vector_kernels.inl. The last sixteen groups may overlap those before them.
template <int Group, int Bits, int Shift>
void group_offsets(const uint8_t *codes, size_t pixel, int count, int steps, uint16_t *offsets) {
    for (int i = 0; i < count; ++i, codes += pixel, offsets += steps)
        for (int g = 0; g < steps; g += 16) {
            const int at = g + 16 <= steps ? g : steps - 16;
            const uint8x16_t index = group_codes<Group, Bits>(codes + at, steps);
            vst1q_u16(offsets + at, vshll_n_u8(vget_low_u8(index), Shift));
            vst1q_u16(offsets + at + 8, vshll_high_n_u8(index, Shift));
        }
}

void sums_neon(const uint8_t *codes, size_t pixel, int count, int channels, int32_t *sums, size_t stride) {
    const int whole = channels / 16 * 16;
    for (; count > 0; --count, codes += pixel, sums += stride) {
        uint32x4_t sum = vdupq_n_u32(0);
        for (int c = 0; c < whole; c += 16)
            sum = vpadalq_u16(sum, vpaddlq_u8(vld1q_u8(codes + c)));
        *sums = static_cast<int32_t>(vaddvq_u32(sum)) + sum_codes(codes + whole, channels - whole);
    }
}

void lookup_offsets_neon(const uint8_t *codes, size_t pixel, int count, int steps, int group, int bits, int entry,
                         uint16_t *offsets, int32_t *totals) {
    const bool one = group == 8 && bits == 1 && entry == 1, two = group == 4 && bits == 2 && entry == 16;
    if (steps < 16 || !(one || two))
        return lookup_offsets(codes, pixel, count, steps, group, bits, entry, offsets, totals);
    if (totals)
        sums_neon(codes, pixel, count, steps * group, totals, 1);
    (one ? group_offsets<8, 1, 0> : group_offsets<4, 2, 4>)(codes, pixel, count, steps, offsets);
}

#include "kernels/toom_cook.inl"

#include "kernels/tiles.inl"

// --- 1 bit: and, count, eight channels per step ----------------------------------------------------------------------

// An 8-bit sum holds at least 255 / 8 steps. Even bytes are channels 0..7 of the vector, odd bytes 8..15 (panels.cpp
// interleaves them). Totals have 16 bits.
struct CountBits {
    using Vector = uint8x16_t;
    using Code = uint16_t; // the bits of eight channels
    using Total = uint16_t;
    static constexpr int kSafeSteps = -1, kLanes = 16;
    static uint8x16_t input(const uint16_t *in, int s) {
        return vld1q_dup_u8(reinterpret_cast<const uint8_t *>(in + s)); // the lower byte
    }
    static uint8x16_t weights(const uint8_t *panel) { return vld1q_u8(panel); }
    static uint8x16_t step(uint8x16_t acc, uint8x16_t x, uint8x16_t w) {
        return vaddq_u8(acc, vcntq_u8(vandq_u8(x, w)));
    }
    template <bool First> static void add_to(uint16_t *total, uint8x16_t acc) {
        const uint16x8_t words = vreinterpretq_u16_u8(acc);
        const uint16x8_t even = vandq_u16(words, vdupq_n_u16(255)), odd = vshrq_n_u16(words, 8);
        vst1q_u16(total, First ? even : vaddq_u16(vld1q_u16(total), even));
        vst1q_u16(total + 8, First ? odd : vaddq_u16(vld1q_u16(total + 8), odd));
    }
    template <int R, int V> using Totals = StackTotals<CountBits, R, V>;
};

// A float or a 1-bit tile of 6 x 4 keeps 24 accumulators in the 32 registers.
template <typename Inner> constexpr Tiles wide_tiles = tiles_of<Loop<Inner>, 8, 8, 6>();

constexpr Operands bits8 = {Input::lookup, Coding::lookup, 8, 16}, floats = {Input::floats, Coding::floats, 1, 4};
