// Matrix products of bfloat16 pairs (AVX-512 BF16: Zen 4, Cooper Lake, Sapphire Rapids and later): two products in the
// time of one float32 product, sums in float32. For the gradients of training (run/winograd_training.cpp), never for
// models. Comes in: floats, which are rounded to the nearest bfloat16, half to even. A pair takes the place of a float:
//
//   a[i][k], b[k][j]: low half the even term, high half the odd one     c[i][j] += both products
#include <cstring>
#include <immintrin.h>

#include "kernels/kernels.h"

namespace anyprec {
namespace {

#include "kernels/avx512.inl"

#include "kernels/matmul.inl"

struct PairProduct {
    static ANYPREC_INLINE F add(F a, F b, F sum) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
};

// Bits of 32 bfloat16: those of `low`, then those of `high`.
inline __m512i rounded(F low, F high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

void pair_neighbors(const float *x, size_t count, float *pairs) {
    for (size_t i = 0; i < count; i += 2 * W) {
        const int left = static_cast<int>(count - i < 2 * W ? count - i : 2 * W);
        const __m512i made = rounded(load(x + i, left), left > W ? load(x + i + W, left - W) : _mm512_setzero_ps());
        store(pairs + i / 2, _mm512_castsi512_ps(made), (left + 1) / 2);
    }
}

void pair_rows(const float *even, const float *odd, size_t count, float *pairs) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(kOrder);
    for (size_t i = 0; i < count; i += W) {
        const int left = static_cast<int>(count - i < W ? count - i : W);
        const __m512i both = rounded(load(even + i, left), load(odd + i, left));
        store(pairs + i, _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both)), left);
    }
}

} // namespace

const PairKernels pairs_bf16 = {kTileVectors * W, matmul<PairProduct>, pair_neighbors, pair_rows};

} // namespace anyprec
