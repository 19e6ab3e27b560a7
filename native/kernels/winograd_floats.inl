// The transforms of Winograd F(4x4, 3x3) in float, for training, over the vectors that the including kernels_<isa>.cpp
// defines: each is one small matrix T applied along both axes, T d T', to `count` channels at a time. In: N x N arrays.
// Out: M x M arrays. Included by functions.inl; run/winograd_training.cpp calls them.
//
//   inputs 6 x 6 --B'--> 36 values     kernel 3 x 3 --G--> 36     36 sums --A'--> outputs 4 x 4
//   gradient of outputs 4 x 4 --A--> 36                            36 --G'--> gradient of the kernel 3 x 3

constexpr float kFromInput[6][6] = {{4, 0, -5, 0, 1, 0},  {0, -4, -4, 1, 1, 0}, {0, 4, -4, -1, 1, 0},
                                    {0, -2, -1, 2, 1, 0}, {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}};
constexpr float kFromKernel[6][3] = {{1 / 4.0f, 0, 0},
                                     {-1 / 6.0f, -1 / 6.0f, -1 / 6.0f},
                                     {-1 / 6.0f, 1 / 6.0f, -1 / 6.0f},
                                     {1 / 24.0f, 1 / 12.0f, 1 / 6.0f},
                                     {1 / 24.0f, -1 / 12.0f, 1 / 6.0f},
                                     {0, 0, 1}};
constexpr float kToOutput[4][6] = {{1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}};

constexpr float kFromGradient[6][4] = {{1, 0, 0, 0}, {1, 1, 1, 1},   {1, -1, 1, -1}, // A
                                       {1, 2, 4, 8}, {1, -2, 4, -8}, {0, 0, 0, 1}};
constexpr float kToKernel[3][6] = {{1 / 4.0f, -1 / 6.0f, -1 / 6.0f, 1 / 24.0f, 1 / 24.0f, 0}, // G'
                                   {0, -1 / 6.0f, 1 / 6.0f, 1 / 12.0f, -1 / 12.0f, 0},
                                   {0, -1 / 6.0f, -1 / 6.0f, 1 / 6.0f, 1 / 6.0f, 1}};

// y[i] = sum of matrix[i][j] x[j]; zeros cost nothing.
template <int N, int M> ANYPREC_INLINE void along(const float (&matrix)[M][N], const F *x, int step, F *y, int to) {
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
        F sum = set1(0.0f);
        bool first = true;
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j)
            if (matrix[i][j] != 0) {
                sum = first ? mul(set1(matrix[i][j]), x[step * j]) : fma(set1(matrix[i][j]), x[step * j], sum);
                first = false;
            }
        y[to * i] = sum;
    }
}

// The first n of the channels from c on.
template <int N, int M, const float (&T)[M][N]>
ANYPREC_INLINE void channels_both_axes(const WinogradArrays &a, size_t c, size_t to, int n) {
    F d[N * N], half[M * N], made[M];
#pragma GCC unroll 36
    for (int i = 0; i < N * N; ++i)
        d[i] = load(a.in[i] + c, n);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) // down
        along<N, M>(T, d + j, N, half + j, N);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) { // across
        along<N, M>(T, half + N * i, 1, made, 1);
#pragma GCC unroll 8
        for (int j = 0; j < M; ++j)
            store(a.out[M * i + j] + to, made[j], n);
    }
}

template <int N, int M, const float (&T)[M][N]> void both_axes(const WinogradArrays &given) {
    const WinogradArrays a = given; // a copy: stores cannot change it
    size_t c = 0;
    for (size_t panel = 0; c < static_cast<size_t>(a.count); panel += a.next_panel) {
        const int left = a.count - static_cast<int>(c), end = left < a.width ? left : a.width;
        int at = 0;
        for (; at + W <= end; at += W, c += W)
            channels_both_axes<N, M, T>(a, c, panel + static_cast<size_t>(at), W);
        if (at < end)
            channels_both_axes<N, M, T>(a, c, panel + static_cast<size_t>(at), end - at);
        c += static_cast<size_t>(end - at);
    }
}

constexpr WinogradFloats winograd_floats = {both_axes<6, 6, kFromInput>, both_axes<4, 6, kFromGradient>,
                                            both_axes<3, 6, kFromKernel>, both_axes<6, 4, kToOutput>,
                                            both_axes<6, 3, kToKernel>};
