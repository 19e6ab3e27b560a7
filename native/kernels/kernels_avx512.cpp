// AVX-512 kernels with VNNI and VBMI (Ice Lake, Zen 4 and later). Flags: -mavx512{f,bw,vl,dq,vnni,vbmi} -mfma -O2.
// In: Tiles as in kernels.h. Out: outputs through the epilogue. The arithmetic is ARITHMETIC.md, sections 2 to 4.
//
//   tile: up to 6 rows x 4 vectors (or 8 x 2), 24 accumulators in the 32 registers
//            w[0]: 16 channels   w[1]      w[2]      w[3]
//    x[0] -> | acc 0,0         | acc 0,1 | acc 0,2 | acc 0,3 |     x[r] is broadcast: 4 codes
//    ...     | ...             | ...     | ...     | ...     |     or 1 float of row r
//    x[5] -> | acc 5,0         | acc 5,1 | acc 5,2 | acc 5,3 |
//
//   8 to 3 bit vpdpbusd, exact, 64 products per instruction
//   2, 1 bit   vpermb as a table lookup of 64 entries. The activations (three of 2 bits, or six of 1 bit)
//              choose one of 64 tables (4 KB of constants); the weights are the index. One instruction does
//              192 or 384 products.
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

#include "kernels/depthwise.inl"

#include "kernels/winograd.inl"

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
void lookup_offsets_zmm(const uint8_t *codes, size_t pixel, int count, int steps, int group, int bits, int entry,
                        uint16_t *offsets, int32_t *totals) {
    if (group * bits != 6)
        return lookup_offsets(codes, pixel, count, steps, group, bits, entry, offsets, totals);
    if (totals)
        sums(codes, pixel, count, steps * group, totals, 1);
    (bits == 1 ? group_offsets<6, 1> : group_offsets<3, 2>)(codes, pixel, count, steps, offsets);
}

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

inline I broadcast4(const uint8_t *p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
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

// --- 8 to 3 bit: vpdpbusd, four channels per step --------------------------------------------------------------------

struct Dot {
    using Vector = I;
    using Code = uint8_t;
    static constexpr int kSafeSteps = 0;
    static I input(const uint8_t *in, int s) { return broadcast4(in + 4 * s); }
    static I weights(const uint8_t *panel) { return _mm512_loadu_si512(panel); }
    static I step(I acc, I x, I w) { return _mm512_dpbusd_epi32(acc, x, w); }
    template <int R, int V> using Totals = WholeSums<R, V>;
};

// --- 2 and 1 bit: table lookup ---------------------------------------------------------------------------------------

// table[a][w] = sum of the products of the activation codes in a and the weight codes in w.
template <int Bits> struct Products {
    alignas(64) uint8_t table[64][64];
    constexpr Products() : table() {
        for (int a = 0; a < 64; ++a)
            for (int w = 0; w < 64; ++w) {
                int sum = 0;
                for (int i = 0; i < 6; i += Bits)
                    sum += (a >> i & ((1 << Bits) - 1)) * (w >> i & ((1 << Bits) - 1));
                table[a][w] = static_cast<uint8_t>(sum);
            }
    }
};
constexpr Products<1> products1;
constexpr Products<2> products2;

// An 8-bit sum holds at least 255 / (largest entry) steps; the largest entry is 6 at 1 bit and 27 at 2 bits. Then even
// bytes (channels 0..31 of the vector: panels.cpp interleaves them) are added to `low` and odd bytes (32..63) to
// `high`, both in 16 bits. All fit in registers.
template <int Bits> struct LookUp {
    using Vector = I;
    using Code = uint16_t;
    static constexpr int kSafeSteps = -1;
    static I input(const uint16_t *in, int s) {
        const uint8_t *table = Bits == 1 ? &products1.table[0][0] : &products2.table[0][0];
        return _mm512_load_si512(table + in[s]);
    }
    static I weights(const uint8_t *panel) { return _mm512_loadu_si512(panel); }
    static I step(I acc, I x, I w) { return _mm512_add_epi8(acc, _mm512_permutexvar_epi8(w, x)); }

    template <int R, int V> struct Totals {
        I low[R][V] = {}, high[R][V] = {};

        ANYPREC_INLINE void flush(I (&acc)[R][V]) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) {
                    low[r][v] = _mm512_add_epi16(low[r][v], _mm512_and_si512(acc[r][v], _mm512_set1_epi16(0x00ff)));
                    high[r][v] = _mm512_add_epi16(high[r][v], _mm512_srli_epi16(acc[r][v], 8));
                    acc[r][v] = I{};
                }
        }
        ANYPREC_INLINE void epilogue(const Tile &t, I (&acc)[R][V]) {
            flush(acc);
            alignas(64) uint16_t sums[R][64 * V];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) {
                    store(sums[r] + 64 * v, low[r][v]);
                    store(sums[r] + 64 * v + 32, high[r][v]);
                }
            epilogue_tile(t.epilogue, sums[0], 64 * V, R, t.channels);
        }
    };
};

// --- The table of kernels --------------------------------------------------------------------------------------------

constexpr Tiles dots = tiles_of<Loop<Dot>, 8, 8, 6>(), multiplies = tiles_of<Loop<Multiply>, 8, 8, 6>();
template <int Bits> constexpr Tiles look_ups = tiles_of<Loop<LookUp<Bits>>, 8, 4>();

constexpr Operands groups1 = {Input::lookup, Coding::lookup, 6, 64}, groups2 = {Input::lookup, Coding::lookup, 3, 64};
constexpr Operands centered = {Input::codes, Coding::centered8, 4, 16}, offset = {Input::codes, Coding::offset8, 4, 16};
constexpr Operands floats = {Input::floats, Coding::floats, 1, 16};

constexpr TileKernel lookup_1bit("vpermb, 1 bit", groups1, {1, 1, 6 * (65535 / 6)}, look_ups<1>, 215);
constexpr TileKernel lookup_2bit("vpermb, 2 bit", groups2, {2, 2, 3 * (65535 / 27)}, look_ups<2>, 114);
constexpr TileKernel dot_7bit("vpdpbusd", centered, {7, 8}, dots, 108);
constexpr TileKernel dot_8bit("vpdpbusd, 8 bit", offset, {8, 8}, dots, 107);
constexpr TileKernel float_fma("fma", floats, {0, 0}, multiplies, 1);
constexpr TileKernel float_toom_cook("toom-cook fma", floats, {0, 0}, tiles_of<ToomCookTiles, 8, 8>(), 1,
                                     Algorithm::toom_cook);
constexpr const TileKernel *integer[] = {&lookup_1bit, &lookup_2bit, &dot_7bit, &dot_8bit, nullptr};

// U must fit 8 bits. Nine 3-bit weights add up to at most 63; nine 4-bit ones to 135, but to 72 as c - 8.
constexpr Winograd winograd_3bit =
    winograd_of<ByteForm>({"winograd vpdpbusd, 3 bit", centered, {3, 5}, dots, 108, Algorithm::winograd}, 4.5);
constexpr Winograd winograd_4bit =
    winograd_of<ByteForm>({"winograd vpdpbusd, 4 bit", offset, {4, 5}, dots, 108, Algorithm::winograd}, 4.5);
constexpr const Winograd *winograd[] = {&winograd_3bit, &winograd_4bit, nullptr};

constexpr Kernels table = {"avx512",
                           integer,
                           &float_fma,
                           &float_toom_cook,
                           toom_cook_input_zmm,
                           depthwise_by_blocks<PlainBlock>,
                           depthwise_floats,
                           epilogue_floats,
                           lookup_offsets_zmm,
                           pixel_pair_offsets,
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
                           winograd};

} // namespace

const Kernels *kernels_avx512() {
    return &table;
}

} // namespace anyprec
