// Transposes of a matrix of 4-byte numbers or of codes, in 8 x 8 blocks in registers; the rest one by one. In: AVX2 or
// NEON (included by kernels_avx2.cpp, kernels_avx512.cpp and neon.inl). Out: `transpose_floats` and `transpose_codes`
// of kernels.h.
//
//   rows 0..7 of the source        pairs of rows            quads                     columns 0..7
//   a0 a1 a2 .. a7     unpack      a0 b0 a1 b1 ..  unpack   a0 b0 c0 d0 ..  halves    a0 b0 c0 d0 e0 f0 g0 h0
//   b0 b1 b2 .. b7     ----->      a2 b2 a3 b3 ..  ----->   a1 b1 c1 d1 ..  ----->    a1 b1 c1 d1 e1 f1 g1 h1

#if defined(__aarch64__)
inline void transpose_quarter(const float *from, size_t from_line, float *to, size_t to_line) { // 4 x 4
    const F a = vld1q_f32(from), b = vld1q_f32(from + from_line), c = vld1q_f32(from + 2 * from_line),
            d = vld1q_f32(from + 3 * from_line);
    const auto pairs = [](F x, F y, bool odd) {
        return vreinterpretq_f64_f32(odd ? vtrn2q_f32(x, y) : vtrn1q_f32(x, y));
    };
#pragma GCC unroll 2
    for (size_t odd = 0; odd < 2; ++odd) { // columns odd and odd + 2
        const float64x2_t ab = pairs(a, b, odd), cd = pairs(c, d, odd);
        vst1q_f32(to + to_line * odd, vreinterpretq_f32_f64(vtrn1q_f64(ab, cd)));
        vst1q_f32(to + to_line * (odd + 2), vreinterpretq_f32_f64(vtrn2q_f64(ab, cd)));
    }
}

inline void transpose_block(const float *from, size_t from_line, float *to, size_t to_line) {
    for (size_t r = 0; r < 8; r += 4)
        for (size_t c = 0; c < 8; c += 4)
            transpose_quarter(from + from_line * r + c, from_line, to + to_line * c + r, to_line);
}

inline void transpose_block(const uint8_t *from, size_t from_line, uint8_t *to, size_t to_line) {
    uint16x8_t pairs[4]; // of rows
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
        const uint8x8_t a = vld1_u8(from + from_line * 2 * i), b = vld1_u8(from + from_line * (2 * i + 1));
        pairs[i] = vreinterpretq_u16_u8(vcombine_u8(vzip1_u8(a, b), vzip2_u8(a, b)));
    }
    const auto quads = [&pairs](size_t i, bool high) {
        return vreinterpretq_u32_u16(high ? vzip2q_u16(pairs[i], pairs[i + 1]) : vzip1q_u16(pairs[i], pairs[i + 1]));
    };
#pragma GCC unroll 2
    for (size_t high = 0; high < 2; ++high) { // columns 4 high .. 4 high + 3
        const uint32x4_t top = quads(0, high), low = quads(2, high);
        const uint8x16_t first = vreinterpretq_u8_u32(vzip1q_u32(top, low));
        const uint8x16_t second = vreinterpretq_u8_u32(vzip2q_u32(top, low));
        uint8_t *column = to + to_line * 4 * high;
        vst1_u8(column, vget_low_u8(first));
        vst1_u8(column + to_line, vget_high_u8(first));
        vst1_u8(column + 2 * to_line, vget_low_u8(second));
        vst1_u8(column + 3 * to_line, vget_high_u8(second));
    }
}
#else
inline void transpose_block(const float *from, size_t from_line, float *to, size_t to_line) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; ++i)
        a[i] = _mm256_loadu_ps(from + from_line * i);
#pragma GCC unroll 4
    for (size_t i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (size_t i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + to_line * i, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(to + to_line * (i + 4), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

inline void transpose_block(const uint8_t *from, size_t from_line, uint8_t *to, size_t to_line) {
    __m128i a[8], b[4];
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; ++i)
        a[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from + from_line * i));
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) // rows 2i and 2i + 1
        b[i] = _mm_unpacklo_epi8(a[2 * i], a[2 * i + 1]);
    const __m128i low = _mm_unpacklo_epi16(b[0], b[1]), high = _mm_unpackhi_epi16(b[0], b[1]);
    const __m128i low2 = _mm_unpacklo_epi16(b[2], b[3]), high2 = _mm_unpackhi_epi16(b[2], b[3]);
    const __m128i columns[4] = {_mm_unpacklo_epi32(low, low2), _mm_unpackhi_epi32(low, low2),
                                _mm_unpacklo_epi32(high, high2), _mm_unpackhi_epi32(high, high2)};
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
        _mm_storel_epi64(reinterpret_cast<__m128i *>(to + to_line * (2 * i)), columns[i]);
        _mm_storel_epi64(reinterpret_cast<__m128i *>(to + to_line * (2 * i + 1)), _mm_srli_si128(columns[i], 8));
    }
}
#endif

template <typename T>
ANYPREC_INLINE void transposed(const T *from, size_t from_line, size_t rows, size_t columns, T *to, size_t to_line) {
    const size_t whole = rows / 8 * 8;
    size_t c = 0;
    for (; c + 8 <= columns; c += 8) {
        size_t r = 0;
        for (; r < whole; r += 8)
            transpose_block(from + from_line * r + c, from_line, to + to_line * c + r, to_line);
        for (; r < rows; ++r)
            for (size_t i = c; i < c + 8; ++i)
                to[to_line * i + r] = from[from_line * r + i];
    }
    for (; c < columns; ++c)
        for (size_t r = 0; r < rows; ++r)
            to[to_line * c + r] = from[from_line * r + c];
}

void transpose_floats(const float *from, size_t from_line, size_t rows, size_t columns, float *to, size_t to_line) {
    transposed(from, from_line, rows, columns, to, to_line);
}

void transpose_codes(const uint8_t *from, size_t from_line, size_t rows, size_t columns, uint8_t *to, size_t to_line) {
    transposed(from, from_line, rows, columns, to, to_line);
}
