// Lookups and counts of bits of CPUs with AVX-512 VBMI and VPOPCNTDQ (Ice Lake, Zen 4 and later). Flags of this file
// only: those of kernels_avx512.cpp, -mavx512vbmi and -mavx512vpopcntdq. All else is that file's: kernel_tables.cpp
// takes it from its table. In: Tiles as in kernels.h. Out: outputs through the epilogue. The arithmetic is
// ARITHMETIC.md, sections 2 and 3.
//
//   vpermb looks up one of 64 entries. The activations (three of 2 bits, or six of 1 bit) choose one of 64 tables (4 KB
//   of constants); the weights are the index. One instruction does 192 or 384 products.
//   vpopcntd counts the ones of weight and activation, 32 channels at a time: 512 products. Which is faster at 1 bit
//   differs by CPU and layer (plan/kernel_rates.h).
#include "kernels/kernels.h"

#if defined(ANYPREC_EMULATE)
#include "emulate/avx512.h"
#else
#include <immintrin.h>
#endif

#include <cstring>
#include <type_traits>
#include <utility>

namespace anyprec {
namespace {

#include "kernels/avx512.inl"

#include "kernels/epilogue.inl"

#include "kernels/toom_cook.inl"

#include "kernels/tiles.inl"

#include "kernels/sums_avx512.inl"

#include "kernels/shared_pixels.inl"

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
            const Epilogue &e = t.epilogue;
            if (e.thresholds)
                return compared(e, t.channels);
            if (t.channels == 64 * V && e.scale && ends_in_registers(e, 1, 4))
                return ended(e);
            alignas(64) uint16_t sums[R][64 * V];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) {
                    store(sums[r] + 64 * v, low[r][v]);
                    store(sums[r] + 64 * v + 32, high[r][v]);
                }
            epilogue_tile(e, sums[0], 64 * V, R, t.channels);
        }

      private:
        // 2 sum + window, in 16 bits.
        ANYPREC_INLINE void compared(const Epilogue &e, int channels) const {
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                const int left = channels - 64 * v;
                const __mmask64 some = left >= 64 ? ~0ull : left > 0 ? (1ull << left) - 1 : 0;
                const int16_t *at = e.thresholds + 64 * v;
                const I low_over = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some), at);
                const I high_over = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some >> 32), at + 32);
                const I flips = _mm512_maskz_loadu_epi8(some, e.flips + 64 * v);
#pragma GCC unroll 8
                for (size_t r = 0; r < R; ++r) {
                    const I window = _mm512_set1_epi16(static_cast<int16_t>(e.window_factor * e.window[r]));
                    const auto sum = [&](I half) { return _mm512_add_epi16(_mm512_add_epi16(half, half), window); };
                    const __mmask64 over = _mm512_kunpackd(_mm512_cmpgt_epi16_mask(sum(high[r][v]), high_over),
                                                           _mm512_cmpgt_epi16_mask(sum(low[r][v]), low_over));
                    _mm512_mask_storeu_epi8(e.codes + r * e.codes_stride + 64 * v, some, codes_over(over, flips));
                }
            }
        }
        // 2 sum + window, exact in floats. Four rows at a time.
        ANYPREC_INLINE void ended(const Epilogue &e) const {
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                constexpr int kAtOnce = R < 4 ? R : 4;
                rows<kAtOnce>(e, 0, v);
                if constexpr (R > kAtOnce)
                    rows<R - kAtOnce>(e, kAtOnce, v);
            }
        }
        template <int Count> ANYPREC_INLINE void rows(const Epilogue &e, size_t first, int v) const {
            F y[Count][4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const F scale = load(e.scale + 64 * v + W * i, W), shift = load(e.shift + 64 * v + W * i, W);
#pragma GCC unroll 4
                for (size_t r = 0; r < Count; ++r) {
                    const I words = i < 2 ? low[first + r][v] : high[first + r][v];
                    const __m256i half = i % 2 ? _mm512_extracti64x4_epi64(words, 1) : _mm512_castsi512_si256(words);
                    const F window = set1(static_cast<float>(e.window_factor * e.window[first + r]));
                    y[r][i] = fma(fma(to_float(_mm512_cvtepu16_epi32(half)), set1(2.0f), window), scale, shift);
                }
            }
            end_rows(e, y, first, 64 * v);
        }
    };
};

// 1 bit without a table: 512 products are an and, a vpopcntd and an addition. Sums have 32 bits, so nothing has to be
// flushed, and a block of 16 output channels fills a vector.
struct CountBits {
    using Vector = I;
    using Code = uint8_t;
    static constexpr int kSafeSteps = 0, kFewSteps = 1;
    static I input(const uint8_t *in, int s) { return broadcast4(in + 4 * s); }
    static I weights(const uint8_t *panel) { return _mm512_loadu_si512(panel); }
    static I step(I acc, I x, I w) { return add(acc, _mm512_popcnt_epi32(bit_and(x, w))); }
    template <int R, int V> using Totals = Sums32<R, V>;
};

// Pixels of 16 or 32 channels fill a vector together.
void pack_whole_bits(const uint8_t *codes, int count, int channels, uint8_t *words, int32_t *totals) {
    const int at_once = 64 / channels;
    for (int i = 0; i < count; i += at_once, codes += 64, words += 4 * at_once) {
        const int here = count - i < at_once ? count - i : at_once;
        const __mmask64 some = here < at_once ? (1ull << (channels * here)) - 1 : ~0ull;
        const I part = _mm512_maskz_loadu_epi8(some, codes);
        const __m128i bits = _mm_cvtsi64_si128(static_cast<long long>(_mm512_test_epi8_mask(part, part)));
        alignas(16) uint32_t four[4];
        _mm_store_si128(reinterpret_cast<__m128i *>(four), channels == 16 ? _mm_cvtepu16_epi32(bits) : bits);
        std::memcpy(words, four, 4 * static_cast<size_t>(here));
        for (int j = 0; totals && j < here; ++j)
            totals[i + j] = static_cast<int32_t>(_mm_popcnt_u32(four[j]));
    }
}

// The last vector of a pixel has a mask.
void pack_bits(const uint8_t *codes, size_t pixel, int count, int channels, int steps, uint8_t *words,
               int32_t *totals) {
    if (pixel == static_cast<size_t>(channels) && (channels == 16 || channels == 32))
        return pack_whole_bits(codes, count, channels, words, totals);
    const size_t bytes = 4 * static_cast<size_t>(steps);
    const __mmask64 rest = channels % 64 ? (1ull << (channels % 64)) - 1 : ~0ull;
    for (int i = 0; i < count; ++i, codes += pixel, words += bytes) {
        int64_t total = 0;
        for (int c = 0; c < channels; c += 64) {
            const I part = _mm512_maskz_loadu_epi8(c + 64 >= channels ? rest : ~0ull, codes + c);
            const uint64_t bits = _mm512_test_epi8_mask(part, part);
            std::memcpy(words + c / 8, &bits, channels - c > 32 ? 8 : 4);
            total += _mm_popcnt_u64(bits);
        }
        if (totals)
            totals[i] = static_cast<int32_t>(total);
    }
}

// --- The kernels that differ from those of AVX-512 with VNNI ---------------------------------------------------------

template <int Bits> constexpr Tiles look_ups = tiles_of<Loop<LookUp<Bits>>, 8, 4>();

constexpr Operands groups1 = {Input::lookup, Coding::lookup, 6, 64}, groups2 = {Input::lookup, Coding::lookup, 3, 64};

constexpr Operands words = {Input::bits, Coding::bits, 32, 16};

constexpr TileKernel count_bits("vpopcntd, 1 bit", words, {1, 1},
                                tiles_of<SharedPixels<CountBits>, SharedPixels<CountBits>::kRows, 8, 4>(), 205);
constexpr TileKernel lookup_1bit("vpermb, 1 bit", groups1, {1, 1, 6 * (65535 / 6)}, look_ups<1>, 215);
constexpr TileKernel lookup_2bit("vpermb, 2 bit", groups2, {2, 2, 3 * (65535 / 27)}, look_ups<2>, 114);
constexpr const TileKernel *integer[] = {&lookup_1bit, &lookup_2bit, &count_bits, nullptr};

} // namespace

const IntegerKernels integer_vbmi = {"avx512", integer, nullptr, nullptr, true, pack_bits};

} // namespace anyprec
