// The input and output transforms of Toom-Cook, over the vectors that the including kernels_<isa>.cpp defines. In:
// seven arrays of floats, or seven vectors. Out: seven, or four. ARITHMETIC.md, section 4; kernels.h draws the tile.
// Included after vector_kernels.inl.
//
//   d0 d1 d2 d3 d4 d5 d6  --B'-->  v0 .. v6      (x weights u0 .. u6, summed over channels: m0 .. m6)
//   m0 m1 m2 m3 m4 m5 m6  --A'-->  y0 y1 y2 y3

constexpr float kToomCookInput[kToomCookPoints][kToomCookPoints] = {
    // B', ARITHMETIC.md, section 4
    {2, 4, -2.5f, -5, 0.5f, 1, 0}, {0, -2, -6, -3.5f, 1.5f, 1, 0}, {0, 2, 2, -4.5f, -0.5f, 1, 0},
    {0, -1, -2.5f, 0, 2.5f, 1, 0}, {0, 1, 1.5f, -2, -1.5f, 1, 0},  {0, 4, 0, -5, 0, 1, 0},
    {0, 2, 4, -2.5f, -5, 0.5f, 1}};

// Works on whole vectors: a short array is read and written past its end, by less than 16 floats. The next array
// overwrites the surplus; after the last array there is slack for it.
[[maybe_unused]] void toom_cook_input(const ToomCookInput &given) {
    const ToomCookInput q = given; // a copy: stores through `out` cannot change it
    for (int t = 0; t < q.times; ++t)
        for (int c = 0; c < q.count; c += W) {
            const size_t at = static_cast<size_t>(c + W <= q.count || c == 0 ? c : q.count - W);
            const size_t from = at + q.next_in * static_cast<size_t>(t), to = at + q.next_out * static_cast<size_t>(t);
            F d[kToomCookPoints];
#pragma GCC unroll 7
            for (int i = 0; i < kToomCookPoints; ++i)
                d[i] = load(q.in[i] + from, W);
#pragma GCC unroll 7
            for (size_t p = 0; p < kToomCookPoints; ++p) {
                F v = set1(0.0f);
#pragma GCC unroll 7
                for (int i = 0; i < kToomCookPoints; ++i)
                    if (kToomCookInput[p][i] != 0)
                        v = fma(set1(kToomCookInput[p][i]), d[i], v);
                store(q.out + to + q.next_point * p, v, W);
            }
        }
}

// A'm. The rows of A' are 1 1 1 1 1 1 0, 0 1 -1 2 -2 -1/2 0, 0 1 1 4 4 1/4 0 and 0 1 -1 8 -8 -1/8 1.
ANYPREC_INLINE void toom_cook_output(const F (&m)[kToomCookPoints], F (&y)[kToomCookOutputs]) {
    const F sum1 = add(m[1], m[2]), difference1 = fma(m[2], set1(-1.0f), m[1]);
    const F sum2 = add(m[3], m[4]), difference2 = fma(m[4], set1(-1.0f), m[3]);
    y[0] = add(add(add(m[0], sum1), sum2), m[5]);
    y[1] = fma(m[5], set1(-0.5f), fma(difference2, set1(2.0f), difference1));
    y[2] = fma(m[5], set1(0.25f), fma(sum2, set1(4.0f), sum1));
    y[3] = add(fma(m[5], set1(-0.125f), fma(difference2, set1(8.0f), difference1)), m[6]);
}
