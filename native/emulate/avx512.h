// AVX-512 in software, for a build that tests kernels on CPUs without it (ANYPREC_EMULATE in CMakeLists.txt; never in
// a wheel). In: the intrinsics that kernels_avx512.cpp and kernels_amx.cpp use. Out: the same results by AVX2 and FMA.
// SIMDe (https://github.com/simd-everywhere/simde) has most of them; those that it lacks are below, as Intel's
// intrinsics guide defines them. Conversions round as the mode says (to nearest even), and give 0x80000000 out of
// range, because AVX2's conversions do.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include <cstdint>
#include <cstring>

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wignored-attributes" // vectors as template arguments: their bytes are copied
#endif

namespace anyprec {
namespace emulated {

// A vector as an array.
template <typename Vector, typename Element> struct Lanes {
    static constexpr int kCount = sizeof(Vector) / sizeof(Element);
    Element at[kCount];
    Lanes() = default;
    explicit Lanes(const Vector &v) { std::memcpy(at, &v, sizeof v); }
    Vector vector() const {
        Vector v;
        std::memcpy(&v, at, sizeof v);
        return v;
    }
};

// Lanes whose mask bit is 0 are neither read nor written: a sanitizer would see it.
template <typename Vector, typename Element, typename Mask> inline Vector maskz_load(Mask mask, const void *from) {
    Lanes<Vector, Element> to;
    for (int i = 0; i < to.kCount; ++i) {
        to.at[i] = 0;
        if (mask >> i & 1)
            std::memcpy(&to.at[i], static_cast<const Element *>(from) + i, sizeof(Element));
    }
    return to.vector();
}
template <typename Element, typename Mask, typename Vector> inline void mask_store(void *to, Mask mask, Vector v) {
    const Lanes<Vector, Element> from(v);
    for (int i = 0; i < from.kCount; ++i)
        if (mask >> i & 1)
            std::memcpy(static_cast<Element *>(to) + i, &from.at[i], sizeof(Element));
}
// Each element to one of another size: zeros or the sign in front, or the lower part.
template <typename To, typename ToElement, typename FromElement, typename From> inline To convert(From v) {
    const Lanes<From, FromElement> from(v);
    Lanes<To, ToElement> to;
    static_assert(from.kCount == to.kCount, "one element to one");
    for (int i = 0; i < to.kCount; ++i)
        to.at[i] = static_cast<ToElement>(from.at[i]);
    return to.vector();
}
inline simde__m512i in_halves(__m256i low, __m256i high) {
    Lanes<simde__m512i, __m256i> to;
    to.at[0] = low, to.at[1] = high;
    return to.vector();
}
inline simde__m512i to_int(simde__m512 v) {
    const Lanes<simde__m512, __m256> from(v);
    return in_halves(_mm256_cvtps_epi32(from.at[0]), _mm256_cvtps_epi32(from.at[1]));
}
inline simde__m512 to_float(simde__m512i v) {
    const Lanes<simde__m512i, __m256i> from(v);
    Lanes<simde__m512, __m256> to;
    to.at[0] = _mm256_cvtepi32_ps(from.at[0]), to.at[1] = _mm256_cvtepi32_ps(from.at[1]);
    return to.vector();
}
inline simde__m512i shift_right(simde__m512i v, int count) { // the sign moves in
    const Lanes<simde__m512i, __m256i> from(v);
    return in_halves(_mm256_srai_epi32(from.at[0], count), _mm256_srai_epi32(from.at[1], count));
}

template <typename Element> inline uint64_t larger(simde__m512i a, simde__m512i b) { // a mask
    const Lanes<simde__m512i, Element> left(a), right(b);
    uint64_t mask = 0;
    for (int i = 0; i < left.kCount; ++i)
        mask |= static_cast<uint64_t>(left.at[i] > right.at[i]) << i;
    return mask;
}

} // namespace emulated
} // namespace anyprec

#undef _mm512_madd_epi16 // that of SIMDe 0.7.4 wants four arguments
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define _mm512_maskz_loadu_ps(mask, p) anyprec::emulated::maskz_load<simde__m512, float>(mask, p)
#define _mm512_maskz_loadu_epi32(mask, p) anyprec::emulated::maskz_load<simde__m512i, int32_t>(mask, p)
#define _mm512_maskz_loadu_epi16(mask, p) anyprec::emulated::maskz_load<simde__m512i, int16_t>(mask, p)
#define _mm512_maskz_loadu_epi8(mask, p) anyprec::emulated::maskz_load<simde__m512i, int8_t>(mask, p)
#define _mm256_maskz_loadu_epi8(mask, p) anyprec::emulated::maskz_load<__m256i, int8_t>(mask, p)
#define _mm_maskz_loadu_epi8(mask, p) anyprec::emulated::maskz_load<__m128i, int8_t>(mask, p)
#define _mm512_mask_storeu_ps(p, mask, v) anyprec::emulated::mask_store<float>(p, mask, v)
#define _mm512_mask_storeu_epi8(p, mask, v) anyprec::emulated::mask_store<int8_t>(p, mask, v)
#define _mm512_mask_storeu_epi16(p, mask, v) anyprec::emulated::mask_store<int16_t>(p, mask, v)
#define _mm_mask_storeu_epi16(p, mask, v) anyprec::emulated::mask_store<int16_t>(p, mask, v)
#define _mm_mask_storeu_epi8(p, mask, v) anyprec::emulated::mask_store<int8_t>(p, mask, v)
#undef _mm512_cmpgt_epi8_mask
#undef _mm512_cmpgt_epi16_mask
#undef _mm512_cmpgt_epi32_mask
#define _mm512_cmpgt_epi8_mask(a, b) anyprec::emulated::larger<int8_t>(a, b)
#define _mm512_cmpgt_epi16_mask(a, b) static_cast<uint32_t>(anyprec::emulated::larger<int16_t>(a, b))
#define _mm512_cmpgt_epi32_mask(a, b) static_cast<uint16_t>(anyprec::emulated::larger<int32_t>(a, b))
#define _mm512_kunpackw(high, low) (static_cast<uint32_t>(high) << 16 | static_cast<uint16_t>(low))
#define _mm512_kunpackd(high, low) (static_cast<uint64_t>(high) << 32 | static_cast<uint32_t>(low))
#define _mm512_cvtepi16_epi32(v) anyprec::emulated::convert<simde__m512i, int32_t, int16_t>(v)
#define _mm512_cvtepu8_epi32(v) anyprec::emulated::convert<simde__m512i, int32_t, uint8_t>(v)
#define _mm512_cvtepu8_epi16(v) anyprec::emulated::convert<simde__m512i, int16_t, uint8_t>(v)
#define _mm512_cvtepu16_epi32(v) anyprec::emulated::convert<simde__m512i, int32_t, uint16_t>(v)
#define _mm512_cvtepi32_epi8(v) anyprec::emulated::convert<__m128i, int8_t, int32_t>(v)
#define _mm512_cvtps_epi32(v) anyprec::emulated::to_int(v)
#define _mm512_cvtepi32_ps(v) anyprec::emulated::to_float(v)
#define _mm512_srai_epi32(v, count) anyprec::emulated::shift_right(v, count)
