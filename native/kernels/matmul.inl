// Rows of a matrix product (MatmulTile, kernels.h), over the vectors that the including file defines. Product::add
// adds the products of two vectors to a third. Included by functions.inl for floats, and by kernels_bf16.cpp, where a
// number of a or b is a pair of bfloat16 and both products are added.
//
//                        b: V vectors of a panel, one row for each k
//   a: R rows, a number x for each k   x      =    acc[R][V], in registers until all terms are added

// avx512, neon: 6 x 4 of 32 registers; avx2: 6 x 2 of 16; scalar: 1 x 8.
constexpr int kTileRows = W == 1 ? 1 : 6, kTileVectors = W == 1 ? 8 : W == 8 ? 2 : 4;

template <typename Product, int R, int V, bool Whole> void matmul_tile(const MatmulTile &t, const float *a, float *c) {
    const int n = t.columns;
    F acc[R][V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        const F start = t.start ? load(t.start + W * v, n - W * v) : set1(0.0f);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            acc[r][v] = t.adds ? load(c + t.c_stride * static_cast<size_t>(r) + W * v, n - W * v) : start;
    }
    const float *b = t.b;
    for (int k = 0; k < t.terms; ++k, a += t.a_column, b += t.b_stride) {
        F w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
            w[v] = load(b + W * v, Whole ? W : n - W * v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F x = set1(a[t.a_stride * static_cast<size_t>(r)]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                acc[r][v] = Product::add(x, w[v], acc[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
            store(c + t.c_stride * static_cast<size_t>(r) + W * v, acc[r][v], n - W * v);
}

template <typename Product, int R, int V>
void matmul_rows(const MatmulTile &t, bool whole, const float *a, float *c, int rows) {
    if constexpr (R > 1)
        if (rows < R)
            return matmul_rows<Product, R - 1, V>(t, whole, a, c, rows);
    whole ? matmul_tile<Product, R, V, true>(t, a, c) : matmul_tile<Product, R, V, false>(t, a, c);
}

template <typename Product, int V> void matmul_vectors(const MatmulTile &t) {
    if constexpr (V > 1)
        if (t.columns <= W * (V - 1))
            return matmul_vectors<Product, V - 1>(t);
    const bool whole = t.whole || t.columns % W == 0;
    const float *a = t.a;
    float *c = t.c;
    for (int row = 0; row < t.rows; row += kTileRows) {
        const int rows = t.rows - row < kTileRows ? t.rows - row : kTileRows;
        matmul_rows<Product, kTileRows, V>(t, whole, a, c, rows);
        a += t.a_stride * kTileRows;
        c += t.c_stride * kTileRows;
    }
}

template <typename Product> void matmul(const MatmulTile &t) {
    matmul_vectors<Product, kTileVectors>(t);
}
