// The lookup tables of 2-bit weights and activations, 4 KB of constants. In: nothing. Out: `products`. Included by
// kernels_avx2.cpp (vpshufb) and kernels_neon.cpp (tbl), which look up sixteen weights at once.
//
//   four activations of 2 bits choose a table of 16 bytes; four weight bits of one plane are the index

// table[a][w] = sum over four channels of activation code times weight bit.
struct Products {
    alignas(64) uint8_t table[256][16];
    constexpr Products() : table() {
        for (int a = 0; a < 256; ++a)
            for (int w = 0; w < 16; ++w) {
                int sum = 0;
                for (int i = 0; i < 4; ++i)
                    sum += (a >> (2 * i) & 3) * (w >> i & 1);
                table[a][w] = static_cast<uint8_t>(sum);
            }
    }
};
constexpr Products products;
