// The two transforms of a convolution in quads (kernels.h says which), over vectors that the including
// kernels_<isa>.cpp defines. Included after rows.inl.

constexpr float kQuadInput[kQuadPositions][kQuadPositions] = {
    // B'
    {2, 4, -2.5f, -5, 0.5f, 1, 0}, {0, -2, -6, -3.5f, 1.5f, 1, 0}, {0, 2, 2, -4.5f, -0.5f, 1, 0},
    {0, -1, -2.5f, 0, 2.5f, 1, 0}, {0, 1, 1.5f, -2, -1.5f, 1, 0},  {0, 4, 0, -5, 0, 1, 0},
    {0, 2, 4, -2.5f, -5, 0.5f, 1}};

// Reads past a pair of pixels by less than eight floats; what comes of that is not read.
void quad_input(const QuadInput &q) {
    for (int quad = 0; quad < q.quads; ++quad) {
        float *out = q.out + static_cast<size_t>(quad) * kQuadPositions * q.row;
        for (size_t c = 0; c < q.row; c += W) {
            const int n = static_cast<int>(q.row - c);
            F d[kQuadPositions];
#pragma GCC unroll 7
            for (int i = 0; i < kQuadPositions; ++i)
                d[i] = load(q.line + static_cast<size_t>(4 * quad + i) * q.width + c, n);
#pragma GCC unroll 7
            for (int p = 0; p < kQuadPositions; ++p) {
                F v = set1(0.0f);
#pragma GCC unroll 7
                for (int i = 0; i < kQuadPositions; ++i)
                    if (kQuadInput[p][i] != 0)
                        v = fma(set1(kQuadInput[p][i]), d[i], v);
                store(out + static_cast<size_t>(p) * q.row + c, v, n);
            }
        }
    }
}

// A'm: 1 1 1 1 1 1 0, 0 1 -1 2 -2 -1/2 0, 0 1 1 4 4 1/4 0, 0 1 -1 8 -8 -1/8 1.
ANYPREC_INLINE void quad_outputs(const F (&m)[kQuadPositions], F (&y)[4]) {
    const F sum1 = add(m[1], m[2]), difference1 = fma(m[2], set1(-1.0f), m[1]);
    const F sum2 = add(m[3], m[4]), difference2 = fma(m[4], set1(-1.0f), m[3]);
    y[0] = add(add(add(m[0], sum1), sum2), m[5]);
    y[1] = fma(m[5], set1(-0.5f), fma(difference2, set1(2.0f), difference1));
    y[2] = fma(m[5], set1(0.25f), fma(sum2, set1(4.0f), sum1));
    y[3] = add(fma(m[5], set1(-0.125f), fma(difference2, set1(8.0f), difference1)), m[6]);
}
