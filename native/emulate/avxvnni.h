// AVX-VNNI in software, for a build that tests kernels on CPUs without it (ANYPREC_EMULATE in CMakeLists.txt; never in
// a wheel). In: what _mm256_dpbusd_avx_epi32 takes. Out: what Intel's intrinsics guide says it gives.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace anyprec {
namespace emulated {

// Each lane of 32 bits gets four products of an unsigned byte of a and a signed byte of b, modulo 2^32.
inline __m256i dpbusd(__m256i sums, __m256i a, __m256i b) {
    uint32_t total[8];
    uint8_t x[32];
    int8_t w[32];
    std::memcpy(total, &sums, 32);
    std::memcpy(x, &a, 32);
    std::memcpy(w, &b, 32);
    for (int i = 0; i < 32; ++i)
        total[i / 4] += static_cast<uint32_t>(x[i] * w[i]);
    std::memcpy(&sums, total, 32);
    return sums;
}

} // namespace emulated
} // namespace anyprec

#define _mm256_dpbusd_avx_epi32(sums, a, b) anyprec::emulated::dpbusd(sums, a, b)
