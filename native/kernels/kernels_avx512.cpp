// AVX-512 kernels with VNNI: all that Cascade Lake and Cooper Lake have, and what later CPUs use beside the lookups of
// kernels_vbmi.cpp. Flags: -mavx512{f,bw,vl,dq,vnni} -mfma -O2.
// In: Tiles as in kernels.h. Out: outputs through the epilogue. The arithmetic is ARITHMETIC.md, sections 2 to 4.
//
//   tile: up to 6 rows x 4 vectors (or 8 x 2), 24 accumulators in the 32 registers
//            w[0]: 16 channels   w[1]      w[2]      w[3]
//    x[0] -> | acc 0,0         | acc 0,1 | acc 0,2 | acc 0,3 |     x[r] is broadcast: 4 codes
//    ...     | ...             | ...     | ...     | ...     |     or 1 float of row r
//    x[5] -> | acc 5,0         | acc 5,1 | acc 5,2 | acc 5,3 |
//
//   8 to 2 bit vpdpbusd, exact, 64 products per instruction
//   1 bit      vpshufb as a table lookup, of two pixels at a time (lookup_1bit.inl): 512 products per instruction
#include "kernels/kernels.h"

#if defined(ANYPREC_EMULATE)
#include "emulate/avx512.h"
#else
#include <immintrin.h>
#endif

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

namespace anyprec {
namespace {

#include "kernels/avx512.inl"

#include "kernels/vector_kernels.inl"

#include "kernels/functions.inl"

#include "kernels/transpose.inl"

#include "kernels/epilogue.inl"

// Winograd: V as bytes. For 5-bit codes V lies in -62 .. 62, or 0 .. 124 at position 5.
struct ByteForm {
    static constexpr int kLanes = 64, kBias = 62;
    static I load(const uint8_t *p) { return _mm512_loadu_si512(p); }
    static I add(I a, I b) { return _mm512_add_epi8(a, b); }
    static I sub(I a, I b) { return _mm512_sub_epi8(a, b); }
    static I biased(I a) { return _mm512_add_epi8(a, _mm512_set1_epi8(kBias)); }
};
constexpr int kWidest = 64;

// --- Depthwise convolutions ------------------------------------------------------------------------------------------

#include "kernels/depthwise.inl"

#include "kernels/depthwise_3x3.inl"

// Lane j of vector v becomes lane v of vector j; lanes of 128 bits.
inline void swap_lanes(I (&v)[4]) {
    const I a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
    const I c = _mm512_shuffle_i32x4(v[0], v[1], 0xEE), d = _mm512_shuffle_i32x4(v[2], v[3], 0xEE);
    v[0] = _mm512_shuffle_i32x4(a, b, 0x88);
    v[1] = _mm512_shuffle_i32x4(a, b, 0xDD);
    v[2] = _mm512_shuffle_i32x4(c, d, 0x88);
    v[3] = _mm512_shuffle_i32x4(c, d, 0xDD);
}

// 64 channels. A column is four bytes of each channel, the last one 0: one vpdpbusd adds it to 16 sums. Unpacking works
// on 128-bit quarters, so vector v holds channels 4v .. 4v + 3 of each 16; the packs of the epilogue turn that back.
// Doubled: weights that do not fit bytes, all odd, as 2q + 1.
template <bool Doubled> struct DotColumns {
    static constexpr int kChannels = 64;
    static constexpr bool kMasked = true;
    alignas(64) int32_t weights[3][4][W];
    alignas(64) float scale[4][W], shift[4][W], code_scale[4][W], code_shift[4][W];
    __mmask64 some;         // channels that exist
    bool narrow = false;    // thresholds, if there are any, fit bytes
    I thresholds{}, flip{}; // 64 of each

    DotColumns(const DepthwiseRow &d, int c)
        : some(d.channels - c >= kChannels ? ~0ull : (1ull << (d.channels - c)) - 1) {
        const size_t channels = static_cast<size_t>(d.channels);
        const int32_t *from = static_cast<const int32_t *>(d.weights) + c;
        const auto some_of = [&](int v) { return static_cast<__mmask16>(some >> (W * v)); };
        for (size_t column = 0; column < 3; ++column, from += channels) {
            I all[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                const auto byte = [&](size_t line) {
                    const I w = _mm512_maskz_loadu_epi32(some_of(v), from + 3 * line * channels + W * v);
                    return _mm512_and_si512(Doubled ? _mm512_srai_epi32(w, 1) : w, set1(0xFF)); // 2q + 1 -> q
                };
                all[v] = _mm512_or_si512(
                    byte(0), _mm512_or_si512(_mm512_slli_epi32(byte(1), 8), _mm512_slli_epi32(byte(2), 16)));
            }
            swap_lanes(all);
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v)
                store(weights[column][v], all[v]);
        }
        const auto table = [&](const float *values, float (&to)[4][W]) {
            I all[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v)
                all[v] = bits_of(_mm512_maskz_loadu_ps(some_of(v), values + c + W * v));
            swap_lanes(all);
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v)
                store(to[v], all[v]);
        };
        table(d.epilogue.scale, scale);
        table(d.epilogue.shift, shift);
        if (d.epilogue.code_scale) {
            table(d.epilogue.code_scale, code_scale);
            table(d.epilogue.code_shift, code_shift);
        }
        if (d.epilogue.thresholds) {
            const int16_t *at = d.epilogue.thresholds + c;
            const auto half = [&](int first) {
                return _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some >> first), at + first);
            };
            thresholds = bytes_of(half(0), half(32));
            flip = _mm512_maskz_loadu_epi8(some, d.epilogue.flips + c);
            // Sums saturate to bytes; a threshold of 127 or more would then be over none of them.
            const I most = _mm512_set1_epi16(126), least = _mm512_set1_epi16(-128);
            narrow = !(_mm512_cmpgt_epi16_mask(half(0), most) | _mm512_cmpgt_epi16_mask(half(32), most) |
                       _mm512_cmpgt_epi16_mask(least, half(0)) | _mm512_cmpgt_epi16_mask(least, half(32)));
        }
    }
    ANYPREC_INLINE void column(const uint8_t *top, const uint8_t *middle, const uint8_t *low, I (&x)[4]) const {
        const I a = _mm512_maskz_loadu_epi8(some, top), b = _mm512_maskz_loadu_epi8(some, middle);
        const I c = _mm512_maskz_loadu_epi8(some, low);
        const I ab = _mm512_unpacklo_epi8(a, b), c0 = _mm512_unpacklo_epi8(c, I{});
        x[0] = _mm512_unpacklo_epi16(ab, c0);
        x[1] = _mm512_unpackhi_epi16(ab, c0);
        const I more_ab = _mm512_unpackhi_epi8(a, b), more_c0 = _mm512_unpackhi_epi8(c, I{});
        x[2] = _mm512_unpacklo_epi16(more_ab, more_c0);
        x[3] = _mm512_unpackhi_epi16(more_ab, more_c0);
    }
    ANYPREC_INLINE void output(const I (&x)[3][4], const Epilogue &e, size_t pixel, int c) const {
        I acc[4] = {};
#pragma GCC unroll 12
        for (int i = 0; i < 12; ++i)
            acc[i % 4] = _mm512_dpbusd_epi32(acc[i % 4], x[i / 4][i % 4], _mm512_load_si512(weights[i / 4][i % 4]));
        if (Doubled) {
            const I ones = set1(0x010101);
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v)
                acc[v] = add(acc[v], acc[v]);
#pragma GCC unroll 12
            for (int i = 0; i < 12; ++i)
                acc[i % 4] = _mm512_dpbusd_epi32(acc[i % 4], x[i / 4][i % 4], ones);
        }
        if (narrow) {
            const I sums = _mm512_packs_epi16(_mm512_packs_epi32(acc[0], acc[1]), _mm512_packs_epi32(acc[2], acc[3]));
            const __mmask64 over = _mm512_cmpgt_epi8_mask(sums, thresholds);
            return _mm512_mask_storeu_epi8(e.codes + pixel * e.codes_stride + c, some, codes_over(over, flip));
        }
        F y[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
            y[v] = fma(to_float(acc[v]), load(scale[v], W), load(shift[v], W));
        if (e.code_scale)
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v)
                y[v] = fma(y[v], load(code_scale[v], W), load(code_shift[v], W));
        I codes[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
            codes[v] = to_int(smaller(set1(e.levels), y[v]));
        _mm512_mask_storeu_epi8(
            e.codes + pixel * e.codes_stride + c, some,
            _mm512_packus_epi16(_mm512_packs_epi32(codes[0], codes[1]), _mm512_packs_epi32(codes[2], codes[3])));
    }
};

void depthwise_codes_zmm(const DepthwiseRow &d) {
    if (d.taps != 9 || d.epilogue.window || !makes_only_codes(d.epilogue, 0))
        return depthwise_by_blocks<PlainBlock>(d);
    d.fits16 ? depthwise_3x3<DotColumns<false>>(d) : depthwise_3x3<DotColumns<true>>(d);
}

#include "kernels/winograd.inl"

// Four pixels at a time: each sum in eight 64-bit parts, then two sums in the 32-bit halves of each part.
void sums_zmm(const uint8_t *codes, size_t pixel, int count, int channels, int32_t *sums, size_t stride) {
    const __mmask64 rest = channels % 64 ? (1ull << (channels % 64)) - 1 : ~0ull; // lanes of the last vector
    for (; count > 0; count -= 4, codes += 4 * pixel, sums += 4 * stride) {
        I parts[4] = {I{}, I{}, I{}, I{}};
        for (int c = 0; c < channels; c += 64)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __mmask64 some = j >= count ? 0 : c + 64 >= channels ? rest : ~0ull;
                const I part = _mm512_maskz_loadu_epi8(some, codes + pixel * static_cast<size_t>(j) + c);
                parts[j] = _mm512_add_epi64(parts[j], _mm512_sad_epu8(part, I{}));
            }
        const I a = _mm512_or_si512(parts[0], _mm512_slli_epi64(parts[1], 32));
        const I b = _mm512_or_si512(parts[2], _mm512_slli_epi64(parts[3], 32));
        const I eight = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(eight), _mm512_extracti64x4_epi64(eight, 1));
        const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
        alignas(16) int32_t each[4];
        _mm_store_si128(reinterpret_cast<__m128i *>(each), four);
        for (int j = 0; j < 4 && j < count; ++j)
            sums[stride * static_cast<size_t>(j)] = each[j];
    }
}

// 32 offsets at once, of six 1-bit or three 2-bit channels; lookup_offsets in vector_kernels.inl defines them.
template <int Group, int Bits>
void group_offsets(const uint8_t *codes, size_t pixel, int count, int steps, uint16_t *offsets) {
    for (int i = 0; i < count; ++i, codes += pixel, offsets += steps)
        for (int g = 0; g < steps; g += 32) {
            const __mmask32 some = steps - g >= 32 ? 0xffffffffu : (1u << (steps - g)) - 1;
            __m256i index = _mm256_setzero_si256(); // one byte per offset
#pragma GCC unroll 6
            for (int part = Group - 1; part >= 0; --part) {
                for (int b = 0; b < Bits; ++b)
                    index = _mm256_add_epi8(index, index);
                index = _mm256_or_si256(index, _mm256_maskz_loadu_epi8(some, codes + part * steps + g));
            }
            index = _mm256_and_si256(index, _mm256_set1_epi8(63));
            _mm512_mask_storeu_epi16(offsets + g, some, _mm512_slli_epi16(_mm512_cvtepu8_epi16(index), 6));
        }
}

// Of six 1-bit or three 2-bit codes in each byte.
template <int Bits> int32_t sum_of_codes(uint64_t index) {
    if (Bits == 1) // pairs of codes as their sums
        index = (index & 0x5555555555555555u) + (index >> 1 & 0x5555555555555555u);
    const uint64_t lowest = 0x0303030303030303u;
    const uint64_t bytes = (index & lowest) + (index >> 2 & lowest) + (index >> 4 & lowest);
    return static_cast<int32_t>(bytes * 0x0101010101010101u >> 56);
}

// The same for pixels of up to eight offsets, each byte of a 64-bit word one of them: vectors would be mostly empty.
template <int Group, int Bits>
void few_offsets(const uint8_t *codes, size_t pixel, int count, int steps, uint16_t *offsets, int32_t *totals) {
    const uint64_t present = ~uint64_t(0) >> (64 - 8 * steps);
    const uint64_t whole = 0x0101010101010101u * ((1 << Bits) - 1); // what is read past a pixel must not carry
    const __mmask8 some = static_cast<__mmask8>((1u << steps) - 1);
    for (int i = 0; i < count; ++i, codes += pixel, offsets += steps) {
        uint64_t index = 0;
#pragma GCC unroll 6
        for (int part = 0; part < Group; ++part) {
            uint64_t each;
            std::memcpy(&each, codes + part * steps, 8);
            index |= (each & whole) << (Bits * part);
        }
        if (totals)
            *totals++ = sum_of_codes<Bits>(index & present);
        const __m128i bytes = _mm_cvtsi64_si128(static_cast<long long>(index));
        _mm_mask_storeu_epi16(offsets, some, _mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 6));
    }
}

void lookup_offsets_zmm(const uint8_t *codes, size_t pixel, int count, int steps, int group, int bits, int entry,
                        uint16_t *offsets, int32_t *totals) {
    if (group * bits != 6)
        return lookup_offsets(codes, pixel, count, steps, group, bits, entry, offsets, totals);
    if (steps <= 8)
        return (bits == 1 ? few_offsets<6, 1> : few_offsets<3, 2>)(codes, pixel, count, steps, offsets, totals);
    if (totals)
        sums_zmm(codes, pixel, count, steps * group, totals, 1);
    (bits == 1 ? group_offsets<6, 1> : group_offsets<3, 2>)(codes, pixel, count, steps, offsets);
}

#include "kernels/toom_cook.inl"

// A short array would fill half a vector and cross a cache line: AVX2 is faster there.
void toom_cook_input_zmm(const ToomCookInput &q) {
    if (q.count <= W / 2)
        kernels_avx2()->toom_cook_input(q);
    else
        toom_cook_input(q);
}

#include "kernels/tiles.inl"

#include "kernels/sums_avx512.inl"

#include "kernels/shared_pixels.inl"

// --- 8 to 3 bit: vpdpbusd, four channels per step --------------------------------------------------------------------

struct Dot {
    using Vector = I;
    using Code = uint8_t;
    static constexpr int kSafeSteps = 0, kFewSteps = 4;
    static I input(const uint8_t *in, int s) { return broadcast4(in + 4 * s); }
    static I weights(const uint8_t *panel) { return _mm512_loadu_si512(panel); }
    static I step(I acc, I x, I w) { return _mm512_dpbusd_epi32(acc, x, w); }
    template <int R, int V> using Totals = Sums32<R, V>;
};

// --- 1 bit: table lookup of two pixels -------------------------------------------------------------------------------

template <int V> constexpr int kPairsAtOnce = 4;
inline I lower_halves() {
    return set1(0x0f0f0f0f);
}

#include "kernels/lookup_1bit.inl"

void pixel_pair_offsets_ymm(const uint8_t *zeros, size_t pixel, const PixelPair *pairs, int count, int steps,
                            uint16_t *offsets) {
    kernels_avx2()->pixel_pair_offsets(zeros, pixel, pairs, count, steps, offsets);
}

// --- Codes from planes -----------------------------------------------------------------------------------------------

// 64 codes: eight bytes of each plane are a mask. word(k) gives those of plane k.
template <typename Word> ANYPREC_INLINE I joined(int count, Word word) {
    I codes = _mm512_setzero_si512();
    for (int k = 0; k < count; ++k) {
        const I doubled = _mm512_add_epi8(codes, codes);
        codes = _mm512_mask_sub_epi8(doubled, word(k), doubled, _mm512_set1_epi8(-1));
    }
    return codes;
}
void join_planes(const uint8_t *const *planes, int count, size_t first, size_t bytes, uint8_t *codes) {
    const auto word = [planes](int k, size_t at, size_t size) {
        uint64_t bits = 0;
        std::memcpy(&bits, planes[k] + at, size);
        return bits;
    };
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8)
        _mm512_storeu_si512(codes + 8 * i, joined(count, [&](int k) { return word(k, first + i, 8); }));
    if (const size_t rest = bytes - i)
        _mm512_mask_storeu_epi8(codes + 8 * i, (1ull << 8 * rest) - 1,
                                joined(count, [&](int k) { return word(k, first + i, rest); }));
}

// --- The table of kernels --------------------------------------------------------------------------------------------

constexpr Tiles dots = tiles_of<SharedPixels<Dot>, SharedPixels<Dot>::kRows, 8, 6>(),
                multiplies = tiles_of<Loop<MultiplyInRegisters>, 8, 8, 6>();

constexpr Operands pixel_pairs = {Input::lookup_pairs, Coding::lookup, 4, 64};
constexpr Operands centered = {Input::codes, Coding::centered8, 4, 16}, offset = {Input::codes, Coding::offset8, 4, 16};
constexpr Operands floats = {Input::floats, Coding::floats, 1, 16};

constexpr TileKernel lookup_1bit("vpshufb, 1 bit", pixel_pairs, {1, 1, 4 * (65535 / 4)}, tiles_of<PairTiles, 8, 8>(),
                                 270);
constexpr TileKernel dot_7bit("vpdpbusd", centered, {7, 8}, dots, 108);
constexpr TileKernel dot_8bit("vpdpbusd, 8 bit", offset, {8, 8}, dots, 107);
constexpr TileKernel float_fma("fma", floats, {0, 0}, multiplies, 1);
constexpr TileKernel float_toom_cook("toom-cook fma", floats, {0, 0}, tiles_of<ToomCookTiles, 8, 8>(), 1,
                                     Algorithm::toom_cook);
constexpr const TileKernel *integer[] = {&lookup_1bit, &dot_7bit, &dot_8bit, nullptr};

// U must fit 8 bits. Nine 3-bit weights add up to at most 63; nine 4-bit ones to 135, but to 72 as c - 8.
constexpr Winograd winograd_3bit =
    winograd_of<ByteForm>({"winograd vpdpbusd, 3 bit", centered, {3, 5}, dots, 108, Algorithm::winograd}, 4.5);
constexpr Winograd winograd_4bit =
    winograd_of<ByteForm>({"winograd vpdpbusd, 4 bit", offset, {4, 5}, dots, 108, Algorithm::winograd}, 4.5);
constexpr const Winograd *winograd[] = {&winograd_3bit, &winograd_4bit, nullptr};

constexpr Kernels table = {"avx512vnni",
                           integer,
                           &float_fma,
                           &float_toom_cook,
                           toom_cook_input_zmm,
                           depthwise_codes_zmm,
                           depthwise_floats,
                           epilogue_floats,
                           lookup_offsets_zmm,
                           pixel_pair_offsets_ymm,
                           widen,
                           to_floats,
                           sums_zmm,
                           maximum,
                           maximum_codes,
                           accumulate,
                           interpolate,
                           transpose_floats,
                           transpose_codes,
                           &functions,
                           winograd,
                           nullptr,
                           nullptr,
                           join_planes,
                           false,
                           true};

} // namespace

const Kernels *kernels_avx512vnni() {
    return &table;
}

} // namespace anyprec
