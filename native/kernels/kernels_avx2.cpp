// AVX2 and FMA kernels (Haswell, Zen and later). Flags of this file only: -mavx2 -mfma -O2 -ffp-contract=off.
// In: Tiles as in kernels.h. Out: outputs through the epilogue. The arithmetic is ARITHMETIC.md, sections 2 to 4.
//
//   tile: up to 6 rows x 2 vectors (or 8 x 1), 12 accumulators in the 16 registers
//            w[0]: 8 output channels   w[1]: 8 output channels
//    x[0] -> | acc 0,0               | acc 0,1               |     x[r] is broadcast: 4 codes (8 bits each),
//    ...     | ...                   | ...                   |     2 codes (16 bits) or 1 float of row r
//    x[5] -> | acc 5,0               | acc 5,1               |
//
//   8 bit      vpmaddwd on 16-bit integers, or vpmaddubsw on bytes where few weights are large
//   7 to 3 bit vpmaddubsw; its 16-bit sums are widened before they can overflow
//   2, 1 bit   vpshufb as a table lookup of 16 entries. Four activations choose the table (256 tables of
//              16 bytes); four weight bits of one plane are the index. 1 bit is in lookup_1bit.inl.
//
// Wider totals, which are touched rarely, live on the stack.
#include "kernels/kernels.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

namespace anyprec {
namespace {

#include "kernels/avx2.inl"

#include "kernels/vector_kernels.inl"

#include "kernels/functions.inl"

#include "kernels/transpose.inl"

#include "kernels/epilogue.inl"

#include "kernels/depthwise_avx2.inl"

// Winograd: V as 16-bit integers, or as bytes.
struct WideForm {
    static constexpr int kLanes = 16, kBias = 0;
    static I load(const uint8_t *p) {
        return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static I add(I a, I b) { return _mm256_add_epi16(a, b); }
    static I sub(I a, I b) { return _mm256_sub_epi16(a, b); }
    static I biased(I a) { return a; }
};
struct ByteForm { // for 4-bit codes: V in 0 .. 60
    static constexpr int kLanes = 32, kBias = 30;
    static I load(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const I *>(p)); }
    static I add(I a, I b) { return _mm256_add_epi8(a, b); }
    static I sub(I a, I b) { return _mm256_sub_epi8(a, b); }
    static I biased(I a) { return _mm256_add_epi8(a, _mm256_set1_epi8(kBias)); }
};
constexpr int kWidest = 16;

#include "kernels/winograd.inl"

// The lookup index of sixteen groups of four channels, a byte each. Codes past a pixel's channels meet zero weights.
template <int Bits> inline __m128i group_codes(const uint8_t *codes, int steps) {
    __m128i index = _mm_setzero_si128();
#pragma GCC unroll 4
    for (int part = 3; part >= 0; --part) {
        const uint8_t *from = codes + static_cast<ptrdiff_t>(part) * steps;
        for (int i = 0; i < Bits; ++i)
            index = _mm_add_epi8(index, index);
        index = _mm_or_si128(index, _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    }
    return index;
}
inline void store_offsets(uint16_t *to, __m128i index) { // into tables of 16 bytes
    _mm256_storeu_si256(reinterpret_cast<I *>(to), _mm256_slli_epi16(_mm256_cvtepu8_epi16(index), 4));
}

// The same for 4 or 8 groups, in the first bytes, of a pixel that has all four codes of each: group g is made of codes
// g, g + Steps, g + 2 Steps and g + 3 Steps, so whole words of the pixel are shifted and joined.
template <int Bits, int Steps> inline __m128i few_group_codes(const uint8_t *codes) {
    const __m128i mask = _mm_set1_epi8((1 << Bits) - 1);
    const auto part = [&](int at) {
        return _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + at)), mask);
    };
    if constexpr (Steps == 4) {
        const __m128i words = _mm_sllv_epi32(part(0), _mm_setr_epi32(0, Bits, 2 * Bits, 3 * Bits));
        const __m128i two = _mm_or_si128(words, _mm_srli_si128(words, 8));
        return _mm_or_si128(two, _mm_srli_si128(two, 4));
    }
    const __m128i words = _mm_or_si128(_mm_sllv_epi64(part(0), _mm_set_epi64x(Bits, 0)),
                                       _mm_sllv_epi64(part(16), _mm_set_epi64x(3 * Bits, 2 * Bits)));
    return _mm_or_si128(words, _mm_srli_si128(words, 8));
}
template <int Steps> inline void store_few_offsets(uint16_t *to, __m128i index) {
    const __m128i offsets = _mm_slli_epi16(_mm_cvtepu8_epi16(index), 4);
    if (Steps == 4)
        _mm_storel_epi64(reinterpret_cast<__m128i *>(to), offsets);
    else
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to), offsets);
}

// Four pixels at a time: each sum in four 64-bit parts, then two sums in the 32-bit halves of each part.
void sums_ymm(const uint8_t *codes, size_t pixel, int count, int channels, int32_t *sums, size_t stride) {
    const int in_32s = channels / 32 * 32, whole = channels / 16 * 16;
    for (; count >= 4; count -= 4, codes += 4 * pixel, sums += 4 * stride) {
        I parts[4] = {I{}, I{}, I{}, I{}};
        for (int c = 0; c < in_32s; c += 32)
#pragma GCC unroll 4
            for (size_t j = 0; j < 4; ++j)
                parts[j] = _mm256_add_epi64(parts[j], _mm256_sad_epu8(load(codes + pixel * j + c), I{}));
        if (whole > in_32s)
#pragma GCC unroll 4
            for (size_t j = 0; j < 4; ++j) {
                const __m128i *last = reinterpret_cast<const __m128i *>(codes + pixel * j + in_32s);
                const __m128i sum = _mm_sad_epu8(_mm_loadu_si128(last), _mm_setzero_si128());
                parts[j] = _mm256_add_epi64(parts[j], _mm256_zextsi128_si256(sum));
            }
        const I a = _mm256_or_si256(parts[0], _mm256_slli_epi64(parts[1], 32));
        const I b = _mm256_or_si256(parts[2], _mm256_slli_epi64(parts[3], 32));
        const I two = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
        const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
        if (whole == channels && stride == 1) {
            _mm_storeu_si128(reinterpret_cast<__m128i *>(sums), four);
            continue;
        }
        alignas(16) int32_t each[4];
        _mm_store_si128(reinterpret_cast<__m128i *>(each), four);
        for (size_t j = 0; j < 4; ++j)
            sums[stride * j] = each[j] + sum_codes(codes + pixel * j + whole, channels - whole);
    }
    for (; count > 0; --count, codes += pixel, sums += stride)
        *sums = sum_codes(codes, channels);
}

// All codes belong to the pixel, so none is above 3 and shifted codes do not reach their neighbor.
void offsets_and_totals(const uint8_t *codes, size_t pixel, int count, int steps, uint16_t *offsets, int32_t *totals) {
    for (int i = 0; i < count; ++i, codes += pixel, offsets += steps) {
        __m128i total = _mm_setzero_si128();
        for (int g = 0; g < steps; g += 16) {
            const auto part = [&](int j) {
                return _mm_loadu_si128(
                    reinterpret_cast<const __m128i *>(codes + g + static_cast<ptrdiff_t>(j) * steps));
            };
            const __m128i a = part(0), b = part(1), c = part(2), d = part(3);
            const __m128i low = _mm_or_si128(a, _mm_slli_epi16(b, 2)), high = _mm_or_si128(c, _mm_slli_epi16(d, 2));
            store_offsets(offsets + g, _mm_or_si128(low, _mm_slli_epi16(high, 4)));
            const __m128i four = _mm_add_epi8(_mm_add_epi8(a, b), _mm_add_epi8(c, d));
            total = _mm_add_epi64(total, _mm_sad_epu8(four, _mm_setzero_si128()));
        }
        totals[i] = _mm_cvtsi128_si32(total) + _mm_extract_epi32(total, 2);
    }
}

// 2 bits; see lookup_offsets in vector_kernels.inl. The last sixteen groups may overlap those before them.
void lookup_offsets_ymm(const uint8_t *codes, size_t pixel, int count, int steps, int group, int bits, int entry,
                        uint16_t *offsets, int32_t *totals) {
    if (group == 4 && bits == 2 && pixel >= 4 * static_cast<size_t>(steps) && (steps == 4 || steps == 8)) {
        if (totals)
            sums_ymm(codes, pixel, count, 4 * steps, totals, 1);
        for (int i = 0; i < count; ++i, codes += pixel, offsets += steps)
            steps == 4 ? store_few_offsets<4>(offsets, few_group_codes<2, 4>(codes))
                       : store_few_offsets<8>(offsets, few_group_codes<2, 8>(codes));
        return;
    }
    if (steps < 16 || group != 4 || bits != 2)
        return lookup_offsets(codes, pixel, count, steps, group, bits, entry, offsets, totals);
    if (totals && steps % 16 == 0)
        return offsets_and_totals(codes, pixel, count, steps, offsets, totals);
    if (totals)
        sums_ymm(codes, pixel, count, 4 * steps, totals, 1);
    for (int i = 0; i < count; ++i, codes += pixel, offsets += steps)
        for (int g = 0; g < steps; g += 16) {
            const int at = g + 16 <= steps ? g : steps - 16;
            store_offsets(offsets + at, group_codes<2>(codes + at, steps));
        }
}

#include "kernels/toom_cook.inl"

#include "kernels/tiles.inl"

// --- Tiles whose epilogue stays in registers -------------------------------------------------------------------------

// StackTotals that are read back into the accumulators at the end.
template <typename Inner, int R, int V> struct RegisterTotals : StackTotals<Inner, R, V> {
    ANYPREC_INLINE void epilogue(const Tile &t, I (&acc)[R][V]) {
        if (t.epilogue.raw || !Inner::ends(t, V))
            return StackTotals<Inner, R, V>::epilogue(t, acc);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                acc[r][v] = Inner::widened(acc[r][v]);
                if (!this->empty)
                    acc[r][v] = add(acc[r][v], load(this->totals[r] + Inner::kLanes * v));
            }
        Inner::end(t, acc);
    }
};

// --- 1 bit: table lookup of two pixels -------------------------------------------------------------------------------

template <int V> constexpr int kPairsAtOnce = V == 1 ? 4 : 2;
alignas(32) constexpr uint8_t kLowerHalves[32] = {15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15,
                                                  15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15};
ANYPREC_INLINE I lower_halves() {
    const uint8_t *mask = kLowerHalves;
#if defined(__GNUC__)
    __asm__("" : "+r"(mask)); // load the mask where it is used: no register is left to keep it
#endif
    return keep_in_register(load(mask));
}

#include "kernels/lookup_1bit.inl"

template <int Steps>
void few_pair_offsets(const uint8_t *zeros, size_t pixel, const PixelPair *pairs, int count, uint16_t *offsets) {
    for (int i = 0; i < count; ++i, offsets += Steps) {
        const __m128i lower = few_group_codes<1, Steps>(zeros + pixel * static_cast<size_t>(pairs[i].first));
        const __m128i upper = few_group_codes<1, Steps>(zeros + pixel * static_cast<size_t>(pairs[i].second));
        store_few_offsets<Steps>(offsets, _mm_or_si128(lower, _mm_slli_epi16(upper, 4)));
    }
}

// Like lookup_offsets_ymm. The masks keep codes past a pixel's channels out of the other pixel's half.
void pixel_pair_offsets_ymm(const uint8_t *zeros, size_t pixel, const PixelPair *pairs, int count, int steps,
                            uint16_t *offsets) {
    if (steps == 4 && pixel >= 16)
        return few_pair_offsets<4>(zeros, pixel, pairs, count, offsets);
    if (steps == 8 && pixel >= 32)
        return few_pair_offsets<8>(zeros, pixel, pairs, count, offsets);
    if (steps < 16)
        return pixel_pair_offsets(zeros, pixel, pairs, count, steps, offsets);
    for (int i = 0; i < count; ++i, offsets += steps) {
        const uint8_t *first = zeros + pixel * static_cast<size_t>(pairs[i].first);
        const uint8_t *second = zeros + pixel * static_cast<size_t>(pairs[i].second);
        for (int g = 0; g < steps; g += 16) {
            const int at = g + 16 <= steps ? g : steps - 16;
            const __m128i lower = _mm_and_si128(group_codes<1>(first + at, steps), _mm_set1_epi8(15));
            const __m128i upper = _mm_and_si128(group_codes<1>(second + at, steps), _mm_set1_epi8(15));
            store_offsets(offsets + at, _mm_or_si128(lower, _mm_slli_epi16(upper, 4)));
        }
    }
}

// --- 8 bit: vpmaddwd, two channels per step --------------------------------------------------------------------------

struct DotWide {
    using Vector = I;
    using Code = uint8_t; // two 16-bit codes per step
    static constexpr int kSafeSteps = 0;
    static I input(const uint8_t *in, int s) { return broadcast4(in + 4 * s); }
    static I weights(const uint8_t *panel) { return load(panel); }
    static I step(I acc, I x, I w) { return add(acc, _mm256_madd_epi16(x, w)); }
    template <int R, int V> using Totals = RegisterSums<0, R, V>;
};

// --- 7 to 3 bit: vpmaddubsw, four channels per step ------------------------------------------------------------------

// A step adds at most 2 x 15 x 15 = 450 at 4 bits, so a 16-bit sum holds 72 steps.
template <int Largest> struct DotNarrow : DotWide {
    static constexpr int kSafeSteps = 32767 / (2 * Largest * Largest), kLanes = W;
    using Total = int32_t;
    static I step(I acc, I x, I w) { return _mm256_add_epi16(acc, _mm256_maddubs_epi16(x, w)); }
    template <bool First> static void add_to(int32_t *total, I acc) {
        const I sums = widened(acc);
        store(total, First ? sums : add(load(total), sums));
    }
    static I widened(I acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
    static bool ends(const Tile &t, int vectors) {
        return !t.epilogue.window && t.channels == W * vectors && makes_only_codes(t.epilogue, 0);
    }
    template <int R, int V> static ANYPREC_INLINE void end(const Tile &t, const I (&acc)[R][V]) {
        end_in_registers<0>(t, acc);
    }
    template <int R, int V> using Totals = RegisterTotals<DotNarrow, R, V>;
};

// Neighboring 16-bit sums added, as 32 bits. The ones stay in memory: in a register they would push an accumulator of
// a 6 x 2 tile onto the stack in every step.
alignas(32) constexpr int16_t kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
inline I widened_pairs(I sums) {
#if defined(__GNUC__)
    I wide;
    __asm__("vpmaddwd %2, %1, %0" : "=x"(wide) : "x"(sums), "m"(kOnes));
    return wide;
#else
    return _mm256_madd_epi16(sums, load(kOnes));
#endif
}

// 2 x 128 x 127 = 32512 leaves room for one step: each step is widened at once, without totals.
template <int Doublings> struct DotSevenOf : DotWide {
    static I step(I acc, I x, I w) { return add(acc, widened_pairs(_mm256_maddubs_epi16(x, w))); }
    template <int R, int V> using Totals = RegisterSums<Doublings, R, V>;
};
using DotSeven = DotSevenOf<0>;

// 8 bits, with extra steps where two weights are too large (Coding::split8).
struct DotSplit {
    template <int R, int V> static void tile(const Tile &t) {
        I acc[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                acc[r][v] = I{};
        const uint8_t *panel = t.panel;
        Loop<DotSeven>::sum(t, panel, acc);
        panel = t.extra_panel;
        for (const ExtraStep *e = t.extra; e < t.extra + t.extras; ++e) {
            const int tap = e->tap - t.first_tap;
            if (tap < 0 || tap >= t.taps) {
                panel += sizeof(I) * V;
                continue;
            }
            const uint8_t *in[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                in[r] = t.base + t.offsets[tap * R + r];
            Loop<DotSeven>::step(in, e->step, panel, acc);
        }
        RegisterSums<1, R, V>().epilogue(t, acc);
    }
};

// Winograd at 4 bits: U is at most 72 and V at most 60, so three steps fit 16 bits (3 x 2 x 72 x 60 = 25920), and are
// then widened at once.
struct DotThree {
    template <int R, int V> static void tile(const Tile &t) {
        I acc[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                acc[r][v] = _mm256_setzero_si256();
        const uint8_t *panel = t.panel, *prefetch_from = t.prefetch_from, *in[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            in[r] = t.base + t.offsets[r];
        int s = 0;
        for (; s + 3 <= t.steps; s += 3, panel += 96 * V) {
            prefetch_weights(prefetch_from, 3, t);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I x0 = broadcast4(in[r] + 4 * s), x1 = broadcast4(in[r] + 4 * s + 4),
                        x2 = broadcast4(in[r] + 4 * s + 8);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) {
                    const I first = _mm256_maddubs_epi16(x0, load(panel + 32 * v));
                    const I second = _mm256_maddubs_epi16(x1, load(panel + 32 * (V + v)));
                    const I third = _mm256_maddubs_epi16(x2, load(panel + 32 * (2 * V + v)));
                    const I sum = _mm256_add_epi16(_mm256_add_epi16(first, second), third);
                    acc[r][v] = add(acc[r][v], widened_pairs(sum));
                }
            }
        }
        for (; s < t.steps; ++s, panel += 32 * V)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I x = broadcast4(in[r] + 4 * s);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v)
                    acc[r][v] = add(acc[r][v], widened_pairs(_mm256_maddubs_epi16(x, load(panel + 32 * v))));
            }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                store(t.epilogue.raw + W * (r * V + v), acc[r][v]);
    }
};

// --- 2 bit: table lookup; 1 bit is in lookup_1bit.inl ----------------------------------------------------------------

#include "kernels/lookup_2bit.inl"

// An 8-bit sum holds at least 255 / 12 steps. Even and odd bytes are the lower and the upper plane of the same channel;
// vpmaddubsw gives lower + 2 upper. Totals have 16 bits.
struct LookUp {
    using Vector = I;
    using Code = uint16_t;
    using Total = uint16_t;
    static constexpr int kSafeSteps = -1, kLanes = 16;
    static I input(const uint16_t *in, int s) {
        const uint8_t *table = &products.table[0][0] + in[s];
        return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(table)));
    }
    static I weights(const uint8_t *panel) { return load(panel); }
    static I step(I acc, I x, I w) { return _mm256_add_epi8(acc, _mm256_shuffle_epi8(x, w)); }
    template <bool First> static void add_to(uint16_t *total, I acc) {
        const I sums = _mm256_maddubs_epi16(acc, _mm256_set1_epi16(0x0201));
        store(total, First ? sums : _mm256_add_epi16(load(total), sums));
    }
    template <int R, int V> using Totals = StackTotals<LookUp, R, V>;
};

// --- Codes from planes -----------------------------------------------------------------------------------------------

// 32 codes: four bytes of each plane, every bit of them as a byte. word(k) gives those of plane k.
template <typename Word> ANYPREC_INLINE I joined(int count, Word word) {
    const I spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, //
                                      2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const I bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    I codes = _mm256_setzero_si256();
    for (int k = 0; k < count; ++k) {
        const I each = _mm256_shuffle_epi8(_mm256_set1_epi32(word(k)), spread);
        const I set = _mm256_cmpeq_epi8(_mm256_and_si256(each, bit), bit); // -1 where it is set
        codes = _mm256_sub_epi8(_mm256_add_epi8(codes, codes), set);
    }
    return codes;
}
void join_planes(const uint8_t *const *planes, int count, size_t first, size_t bytes, uint8_t *codes) {
    const auto word = [planes](int k, size_t at, size_t size) {
        int32_t bits = 0;
        std::memcpy(&bits, planes[k] + at, size);
        return bits;
    };
    size_t i = 0;
    for (; i + 4 <= bytes; i += 4)
        _mm256_storeu_si256(reinterpret_cast<I *>(codes + 8 * i),
                            joined(count, [&](int k) { return word(k, first + i, 4); }));
    if (const size_t rest = bytes - i) {
        const I last = joined(count, [&](int k) { return word(k, first + i, rest); });
        std::memcpy(codes + 8 * i, &last, 8 * rest);
    }
}

// --- The table of kernels --------------------------------------------------------------------------------------------

// Tiles of 6 x 2 beat 3 x 4 on whole layers at every width, except for a single row: they read half the panel bytes.
template <typename Inner> constexpr Tiles tiles = tiles_of<Loop<Inner>, 8, 6>();

constexpr Operands pixel_pairs = {Input::lookup_pairs, Coding::lookup, 4, 32},
                   planes = {Input::lookup, Coding::lookup_planes, 4, 16};
constexpr Operands centered = {Input::codes, Coding::centered8, 4, 8}, offset = {Input::codes, Coding::offset8, 4, 8};
constexpr Operands split = {Input::codes, Coding::split8, 4, 8};
constexpr Operands wide = {Input::wide, Coding::centered16, 2, 8}, floats = {Input::floats, Coding::floats, 1, 8};

constexpr TileKernel lookup_1bit("vpshufb, 1 bit", pixel_pairs, {1, 1, 4 * (65535 / 4)}, tiles_of<PairTiles, 8, 8>(),
                                 190);
constexpr TileKernel lookup_2bit("vpshufb, 2 bit", planes, {2, 2, 4 * (65535 / 36)}, tiles<LookUp>, 83);
constexpr TileKernel dot_4bit("vpmaddubsw, 4 bit", centered, {4, 4}, tiles<DotNarrow<15>>, 43);
constexpr TileKernel dot_5bit("vpmaddubsw, 5 bit", centered, {5, 5}, tiles<DotNarrow<31>>, 42);
constexpr TileKernel dot_6bit("vpmaddubsw, 6 bit", centered, {6, 6}, tiles<DotNarrow<63>>, 35);
constexpr TileKernel dot_7bit("vpmaddubsw, 7 bit", centered, {7, 7}, tiles<DotSeven>, 28);
constexpr TileKernel dot_8x7bit("vpmaddubsw, 8x7 bit", offset, {8, 7}, tiles<DotSevenOf<1>>, 27);
constexpr TileKernel dot_split("vpmaddubsw, 8 bit", split, {8, 8}, tiles_of<DotSplit, 8, 6>(), 27);
constexpr TileKernel dot_8bit("vpmaddwd", wide, {8, 8}, tiles<DotWide>, 21);
constexpr TileKernel float_fma("fma", floats, {0, 0}, tiles<MultiplyInRegisters>, 15);
// For a single row, as in a classifier: eight chains of additions hide their latency of 4 cycles.
constexpr TileKernel float_row("fma", floats, {0, 0}, tiles_of_row<Loop<Multiply>>(), 15);
constexpr TileKernel float_toom_cook("toom-cook fma", floats, {0, 0}, tiles_of<ToomCookTiles, 8, 6>(), 15,
                                     Algorithm::toom_cook);
constexpr const TileKernel *integer[] = {&lookup_1bit, &lookup_2bit, &dot_4bit,  &dot_5bit, &dot_6bit,
                                         &dot_7bit,    &dot_8x7bit,  &dot_split, &dot_8bit, nullptr};

constexpr Operands transformed = {Input::codes, Coding::centered16, 2, 8}; // V as 16-bit integers, made from codes
constexpr Winograd winograd_4bit = winograd_of<ByteForm>(
    {"winograd vpmaddubsw", offset, {4, 4}, tiles_of<DotThree, 8, 6>(), 37, Algorithm::winograd}, 8.6);
constexpr Winograd winograd_8bit =
    winograd_of<WideForm>({"winograd vpmaddwd", transformed, {8, 8}, tiles<DotWide>, 23, Algorithm::winograd}, 11);
constexpr const Winograd *winograd[] = {&winograd_4bit, &winograd_8bit, nullptr};

constexpr Kernels table = {"avx2",
                           integer,
                           &float_fma,
                           &float_toom_cook,
                           toom_cook_input,
                           depthwise_codes_256,
                           depthwise_floats,
                           epilogue_floats,
                           lookup_offsets_ymm,
                           pixel_pair_offsets_ymm,
                           widen,
                           to_floats,
                           sums_ymm,
                           maximum,
                           maximum_codes,
                           accumulate,
                           interpolate,
                           transpose_floats,
                           transpose_codes,
                           &functions,
                           winograd,
                           &float_row,
                           nullptr,
                           join_planes};

} // namespace

const Kernels *kernels_avx2() {
    return &table;
}

} // namespace anyprec
