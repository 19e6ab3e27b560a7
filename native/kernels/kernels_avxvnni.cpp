// AVX-VNNI kernels: client CPUs with 256-bit dot products and no AVX-512 (Alder Lake, Gracemont and later; Zen 5 has
// AVX-512 and takes that). Flags of this file only: -mavx2 -mfma -mavxvnni -O2.
// In: Tiles as in kernels.h. Out: outputs through the epilogue. The arithmetic is ARITHMETIC.md, sections 2 to 4.
//
//   tile: up to 6 rows x 2 vectors (or 8 x 1), 12 accumulators in the 16 registers
//            w[0]: 8 output channels   w[1]: 8 output channels
//    x[0] -> | acc 0,0               | acc 0,1               |     x[r] is broadcast: 4 codes of row r
//    ...     | ...                   | ...                   |
//    x[5] -> | acc 5,0               | acc 5,1               |
//
//   8 to 3 bit vpdpbusd, 32 products per instruction. Unlike vpmaddubsw it adds four products in 32 bits: exact
//   2, 1 bit   the lookups of AVX2, as everything else: kernel_tables.cpp takes them from its table
#include "kernels/kernels.h"

#include <immintrin.h>

#include <cstring>
#include <type_traits>
#include <utility>

#if defined(ANYPREC_EMULATE)
#include "emulate/avxvnni.h"
#endif

namespace anyprec {
namespace {

#include "kernels/avx2.inl"

#include "kernels/epilogue.inl"

// Winograd: V as bytes. For 5-bit codes V lies in -62 .. 62, or 0 .. 124 at position 5.
struct ByteForm {
    static constexpr int kLanes = 32, kBias = 62;
    static I load(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const I *>(p)); }
    static I add(I a, I b) { return _mm256_add_epi8(a, b); }
    static I sub(I a, I b) { return _mm256_sub_epi8(a, b); }
    static I biased(I a) { return _mm256_add_epi8(a, _mm256_set1_epi8(kBias)); }
};
constexpr int kWidest = 16;

#include "kernels/winograd.inl"

#include "kernels/toom_cook.inl"

#include "kernels/tiles.inl"

struct Dot {
    using Vector = I;
    using Code = uint8_t;
    static constexpr int kSafeSteps = 0;
    static I input(const uint8_t *in, int s) { return broadcast4(in + 4 * s); }
    static I weights(const uint8_t *panel) { return load(panel); }
    static I step(I acc, I x, I w) { return _mm256_dpbusd_avx_epi32(acc, x, w); }
    template <int R, int V> using Totals = WholeSums<R, V>;
};

// --- The kernels that differ from those of AVX2
// ------------------------------------------------------------------------

// Speeds are on paper: two vpdpbusd a cycle, at the share of it that AVX-512's reaches (108 of 128).
constexpr Tiles dots = tiles_of<Loop<Dot>, 8, 6>();

constexpr Operands centered = {Input::codes, Coding::centered8, 4, 8}, offset = {Input::codes, Coding::offset8, 4, 8};

constexpr TileKernel dot_7bit("vpdpbusd", centered, {7, 8}, dots, 54);
constexpr TileKernel dot_8bit("vpdpbusd, 8 bit", offset, {8, 8}, dots, 53);
constexpr const TileKernel *integer[] = {&dot_7bit, &dot_8bit, nullptr};

// U must fit 8 bits: nine 4-bit weights add up to 72 as c - 8. The transforms are those of AVX2, and take as long.
constexpr Winograd winograd_4bit =
    winograd_of<ByteForm>({"winograd vpdpbusd, 4 bit", offset, {4, 5}, dots, 54, Algorithm::winograd}, 8.6);
constexpr const Winograd *winograd[] = {&winograd_4bit, nullptr};

} // namespace

const IntegerKernels integer_avxvnni = {"avxvnni", integer, winograd, nullptr};

} // namespace anyprec
