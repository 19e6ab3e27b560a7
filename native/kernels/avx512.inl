// Vectors of AVX-512: what vector_kernels.inl, epilogue.inl, tiles.inl and the other .inl files are written over. In:
// nothing. Out: F (16 floats), I (16 int32) and functions of them. Included first, by kernels_avx512.cpp and
// kernels_amx.cpp, in their anonymous namespaces.

constexpr bool kResidualsInRegisters = true;
constexpr int W = 16;
using F = __m512;
using I = __m512i;

inline __mmask16 lane_mask(int n) {
    return n >= W ? 0xffff : static_cast<__mmask16>((1u << n) - 1);
}
inline F load(const float *p, int n) {
    return n >= W ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(lane_mask(n), p);
}
inline I load(const int32_t *p, int n) {
    return n >= W ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi32(lane_mask(n), p);
}
inline I load_codes(const uint8_t *p, int n) {
    return _mm512_cvtepu8_epi32(n >= W ? _mm_loadu_si128(reinterpret_cast<const __m128i *>(p))
                                       : _mm_maskz_loadu_epi8(lane_mask(n), p));
}
inline void store(float *p, F v, int n) {
    if (n >= W)
        _mm512_storeu_ps(p, v);
    else
        _mm512_mask_storeu_ps(p, lane_mask(n), v);
}
inline void store_codes(uint8_t *p, F v, int n) { // v lies in 0..255
    const __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v));
    if (n >= W)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), codes);
    else
        _mm_mask_storeu_epi8(p, lane_mask(n), codes);
}
// The pack instructions work on 128-bit quarters: their dwords hold lanes 0..3 of all vectors, then lanes 4..7, and so
// on.
inline I packed(I a, I b) {
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b));
}
inline void store_codes(uint8_t *p, const F (&v)[4]) {
    const I low = _mm512_packs_epi32(_mm512_cvtps_epi32(v[0]), _mm512_cvtps_epi32(v[1]));
    const I high = _mm512_packs_epi32(_mm512_cvtps_epi32(v[2]), _mm512_cvtps_epi32(v[3]));
    _mm512_storeu_si512(p, packed(low, high));
}
inline void store_codes(uint8_t *p, const F (&v)[2]) {
    const I words = _mm512_packs_epi32(_mm512_cvtps_epi32(v[0]), _mm512_cvtps_epi32(v[1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_castsi512_si256(packed(words, words)));
}
inline void store_codes(uint8_t *p, const F (&v)[1]) {
    const __m128i codes = _mm512_cvtepi32_epi8(_mm512_max_epi32(_mm512_cvtps_epi32(v[0]), _mm512_setzero_si512()));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), codes);
}
inline F set1(float x) {
    return _mm512_set1_ps(x);
}
inline I set1(int32_t x) {
    return _mm512_set1_epi32(x);
}
inline F fma(F a, F b, F c) {
    return _mm512_fmadd_ps(a, b, c);
}
inline F add(F a, F b) {
    return _mm512_add_ps(a, b);
}
inline I add(I a, I b) {
    return _mm512_add_epi32(a, b);
}
inline F larger(F a, F b) {
    return _mm512_max_ps(a, b);
} // a > b ? a : b, NaN gives b
inline F smaller(F a, F b) {
    return _mm512_min_ps(a, b);
} // a < b ? a : b
inline F to_float(I a) {
    return _mm512_cvtepi32_ps(a);
}
// Both factors fit 16 bits and a is not negative: its upper half is 0, so one vpmaddwd is a 32-bit product.
inline I multiply_add(I a, I b, I c) {
    return _mm512_add_epi32(_mm512_madd_epi16(a, b), c);
}

inline I broadcast4(const uint8_t *p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

inline I load_sum(const int32_t *p) {
    return _mm512_load_si512(p);
}
inline I load_sum(const uint16_t *p) {
    return _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i *>(p)));
}
ANYPREC_INLINE void prefetch_far(const void *p) {
    _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T1);
}

// For Epilogue::thresholds: a bit for each sum that is over its threshold, and codes from these bits.
inline I load_wide(const int16_t *p) {
    return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline __mmask64 larger(const I (&a)[1], const I (&b)[1]) {
    return _mm512_cmpgt_epi32_mask(a[0], b[0]);
}
inline __mmask64 larger(const I (&a)[2], const I (&b)[2]) {
    return _mm512_kunpackw(_mm512_cmpgt_epi32_mask(a[1], b[1]), _mm512_cmpgt_epi32_mask(a[0], b[0]));
}
inline __mmask64 larger(const I (&a)[4], const I (&b)[4]) {
    const __mmask32 low = _mm512_kunpackw(_mm512_cmpgt_epi32_mask(a[1], b[1]), _mm512_cmpgt_epi32_mask(a[0], b[0]));
    const __mmask32 high = _mm512_kunpackw(_mm512_cmpgt_epi32_mask(a[3], b[3]), _mm512_cmpgt_epi32_mask(a[2], b[2]));
    return _mm512_kunpackd(high, low);
}
inline I codes_over(__mmask64 over, I flips) {
    return _mm512_mask_blend_epi8(over, flips, _mm512_xor_si512(flips, _mm512_set1_epi8(1)));
}
template <int V> inline void store_over(uint8_t *p, __mmask64 over, I flips) { // the codes of V vectors of sums
    const I codes = codes_over(over, flips);
    if (V == 4)
        _mm512_storeu_si512(p, codes);
    else if (V == 2)
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_castsi512_si256(codes));
    else
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_castsi512_si128(codes));
}
// Two vectors of 16-bit integers as bytes, saturated, in order.
inline I bytes_of(I low, I high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtsepi16_epi8(low)), _mm512_cvtsepi16_epi8(high), 1);
}

// For functions.inl
using M = __mmask16;
inline M less(F a, F b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
inline M is_nan(F a) {
    return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
}
inline F choose(M m, F a, F b) {
    return _mm512_mask_blend_ps(m, b, a);
}
inline F sub(F a, F b) {
    return _mm512_sub_ps(a, b);
}
inline F mul(F a, F b) {
    return _mm512_mul_ps(a, b);
}
inline F div(F a, F b) {
    return _mm512_div_ps(a, b);
}
inline F square_root(F a) {
    return _mm512_sqrt_ps(a);
}
inline F round_even(F a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline I to_int(F a) { // whole
    return _mm512_cvtps_epi32(a);
}
inline I bits_of(F a) {
    return _mm512_castps_si512(a);
}
inline F from_bits(I a) {
    return _mm512_castsi512_ps(a);
}
inline I bit_and(I a, I b) {
    return _mm512_and_si512(a, b);
}
inline I bit_or(I a, I b) {
    return _mm512_or_si512(a, b);
}
inline I halved(I a) { // rounded down
    return _mm512_srai_epi32(a, 1);
}
inline I minus(I a, I b) {
    return _mm512_sub_epi32(a, b);
}
inline I to_exponent(I a) { // places it where a float has its exponent
    return _mm512_slli_epi32(a, 23);
}
inline I exponent_of(I a) { // of a float that is not negative
    return _mm512_srli_epi32(a, 23);
}
inline void store(void *p, I v) {
    _mm512_store_si512(p, v);
}
inline I sub(I a, I b) {
    return _mm512_sub_epi32(a, b);
}
inline I quarter(I a) {
    return _mm512_srai_epi32(a, 2);
}

// For lookup_1bit.inl
inline I load(const void *p) {
    return _mm512_loadu_si512(p);
}
inline I every_quarter(const uint8_t *p) { // 16 bytes, in all parts of 128 bits
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(p)));
}
inline I look_up(I table, I index) {
    return _mm512_shuffle_epi8(table, index);
}
inline I add_bytes(I a, I b) {
    return _mm512_add_epi8(a, b);
}
inline I add_words(I a, I b) {
    return _mm512_add_epi16(a, b);
}
inline I sub_words(I a, I b) {
    return _mm512_sub_epi16(a, b);
}
template <int Count> inline I words_left(I a) {
    return _mm512_slli_epi16(a, Count);
}
template <int Count> inline I words_right(I a) {
    return _mm512_srli_epi16(a, Count);
}
// Keeps x in a register at this point: as in avx2.inl.
ANYPREC_INLINE I keep_in_register(I x) {
#if defined(__GNUC__) && !defined(ANYPREC_EMULATE)
    __asm__ volatile("" : "+v"(x));
#endif
    return x;
}
