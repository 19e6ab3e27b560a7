// Vectors of AVX2 and FMA: what vector_kernels.inl, epilogue.inl, tiles.inl and the other .inl files are written over.
// In: nothing. Out: F (8 floats), I (8 int32) and functions of them. Included first, by kernels_avx2.cpp and
// kernels_avxvnni.cpp, in their anonymous namespaces.

constexpr bool kResidualsInRegisters = false;
constexpr int W = 8;
using F = __m256;
using I = __m256i;

constexpr int32_t kMask[2 * W] = {-1, -1, -1, -1, -1, -1, -1, -1};
inline I lane_mask(int n) {
    return _mm256_loadu_si256(reinterpret_cast<const I *>(kMask + W - n));
}
inline void store(void *p, I v) {
    _mm256_store_si256(static_cast<I *>(p), v);
}
inline I load(const void *p) {
    return _mm256_loadu_si256(static_cast<const I *>(p));
}
inline F load(const float *p, int n) {
    return n >= W ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, lane_mask(n));
}
inline I load(const int32_t *p, int n) {
    return n >= W ? load(p) : _mm256_maskload_epi32(p, lane_mask(n));
}
inline I load_codes(const uint8_t *p, int n) {
    uint64_t codes = 0;
    if (n >= W)
        std::memcpy(&codes, p, W);
    else
        for (int i = 0; i < n; ++i)
            codes |= static_cast<uint64_t>(p[i]) << (8 * i);
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(codes)));
}
inline void store(float *p, F v, int n) {
    if (n >= W)
        _mm256_storeu_ps(p, v);
    else
        _mm256_maskstore_ps(p, lane_mask(n), v);
}
inline void store_codes(uint8_t *p, F v, int n) { // v lies in 0..255
    const I wide = _mm256_cvtps_epi32(v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    const uint64_t codes = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
    if (n >= W)
        std::memcpy(p, &codes, W);
    else
        for (int i = 0; i < n; ++i)
            p[i] = static_cast<uint8_t>(codes >> (8 * i));
}
// The pack instructions work on 128-bit halves: their dwords hold lanes 0..3 of all vectors, then lanes 4..7.
inline I packed(I a, I b) {
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline void store_codes(uint8_t *p, const F (&v)[4]) {
    const I low = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
    const I high = _mm256_packs_epi32(_mm256_cvtps_epi32(v[2]), _mm256_cvtps_epi32(v[3]));
    _mm256_storeu_si256(reinterpret_cast<I *>(p), packed(low, high));
}
inline void store_codes(uint8_t *p, const F (&v)[1]) {
    store_codes(p, v[0], W);
}
inline void store_codes(uint8_t *p, const F (&v)[2]) {
    const I words = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_castsi256_si128(packed(words, words)));
}
inline F set1(float x) {
    return _mm256_set1_ps(x);
}
inline I set1(int32_t x) {
    return _mm256_set1_epi32(x);
}
inline F fma(F a, F b, F c) {
    return _mm256_fmadd_ps(a, b, c);
}
inline F add(F a, F b) {
    return _mm256_add_ps(a, b);
}
inline I add(I a, I b) {
    return _mm256_add_epi32(a, b);
}
inline F larger(F a, F b) {
    return _mm256_max_ps(a, b);
} // a > b ? a : b, NaN gives b
inline F smaller(F a, F b) {
    return _mm256_min_ps(a, b);
} // a < b ? a : b
inline F to_float(I a) {
    return _mm256_cvtepi32_ps(a);
}
// Both factors fit 16 bits and a is not negative: its upper half is 0, so one vpmaddwd is a 32-bit product.
inline I multiply_add(I a, I b, I c) {
    return _mm256_add_epi32(_mm256_madd_epi16(a, b), c);
}

inline I load_sum(const int32_t *p) {
    return load(p);
}
inline I load_sum(const uint16_t *p) {
    return _mm256_cvtepu16_epi32(_mm_load_si128(reinterpret_cast<const __m128i *>(p)));
}
ANYPREC_INLINE void prefetch_far(const uint8_t *p) {
    _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T1);
}

// For functions.inl
using M = F;
inline M less(F a, F b) {
    return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}
inline M is_nan(F a) {
    return _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
}
inline F choose(M m, F a, F b) {
    return _mm256_blendv_ps(b, a, m);
}
inline F sub(F a, F b) {
    return _mm256_sub_ps(a, b);
}
inline F mul(F a, F b) {
    return _mm256_mul_ps(a, b);
}
inline F div(F a, F b) {
    return _mm256_div_ps(a, b);
}
inline F square_root(F a) {
    return _mm256_sqrt_ps(a);
}
inline F round_even(F a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline I to_int(F a) { // whole
    return _mm256_cvtps_epi32(a);
}
inline I bits_of(F a) {
    return _mm256_castps_si256(a);
}
inline F from_bits(I a) {
    return _mm256_castsi256_ps(a);
}
inline I bit_and(I a, I b) {
    return _mm256_and_si256(a, b);
}
inline I bit_or(I a, I b) {
    return _mm256_or_si256(a, b);
}
inline I halved(I a) { // rounded down
    return _mm256_srai_epi32(a, 1);
}
inline I minus(I a, I b) {
    return _mm256_sub_epi32(a, b);
}
inline I to_exponent(I a) { // places it where a float has its exponent
    return _mm256_slli_epi32(a, 23);
}
inline I exponent_of(I a) { // of a float that is not negative
    return _mm256_srli_epi32(a, 23);
}
inline I sub(I a, I b) {
    return _mm256_sub_epi32(a, b);
}
inline I quarter(I a) {
    return _mm256_srai_epi32(a, 2);
}
inline I broadcast4(const uint8_t *p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

// For lookup_1bit.inl
inline I every_quarter(const uint8_t *p) { // 16 bytes, in all parts of 128 bits
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(p)));
}
inline I look_up(I table, I index) {
    return _mm256_shuffle_epi8(table, index);
}
inline I add_bytes(I a, I b) {
    return _mm256_add_epi8(a, b);
}
inline I add_words(I a, I b) {
    return _mm256_add_epi16(a, b);
}
inline I sub_words(I a, I b) {
    return _mm256_sub_epi16(a, b);
}
template <int Count> inline I words_left(I a) {
    return _mm256_slli_epi16(a, Count);
}
template <int Count> inline I words_right(I a) {
    return _mm256_srli_epi16(a, Count);
}
// Keeps x in a register at this point. Otherwise gcc moves its computation, runs out of registers, and folds loads into
// vpshufb, which is slower than a load and a vpshufb.
ANYPREC_INLINE I keep_in_register(I x) {
#if defined(__GNUC__)
    __asm__ volatile("" : "+x"(x));
#endif
    return x;
}
