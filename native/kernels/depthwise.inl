// Depthwise convolution of codes by blocks of V vectors of channels: codes of `pixels` outputs in, sums through the
// epilogue of tiles out. Included after epilogue.inl, by kernels_<isa>.cpp; what is left of the channels goes vector by
// vector (vector_kernels.inl). ARITHMETIC.md, section 2.
//
//                 channels c .. c + V W                     pixels
//   tap 0   x x x x x x x x   * w w w w w w w w   \      +---------------+
//   tap 1   x x x x x x x x   * w w w w w w w w    }  -> | sums [8][V W] | -> epilogue_tile
//   ...                                           /      +---------------+
//
// Weights of a block are prepared once for all pixels; a block's sums stay in registers from the first tap to the last.

// One tap at a time, each in lanes of 32 bits.
template <int V> struct PlainBlock {
    const int32_t *weights;
    size_t stride;

    PlainBlock(const DepthwiseRow &d, int c)
        : weights(static_cast<const int32_t *>(d.weights) + c), stride(static_cast<size_t>(d.channels)) {}

    void sums(const DepthwiseRow &d, int p, int c, int32_t *out) const {
        I acc[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
            acc[v] = set1(0);
        for (int t = 0; t < d.taps; ++t) {
            const uint8_t *x = d.base + d.offsets[t * d.pixels + p] + c;
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                acc[v] = multiply_add(load_codes(x + W * v, W),
                                      load(weights + stride * static_cast<size_t>(t) + W * v, W), acc[v]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
            store(out + W * v, acc[v]);
    }
};

template <template <int> class Block, int V> int depthwise_blocks(const DepthwiseRow &d, int first) {
    int c = first;
    for (; c + V * W <= d.channels; c += V * W) {
        const Block<V> block(d, c);
        Epilogue e = from_channel(d.epilogue, c);
        for (int p = 0; p < d.pixels; p += kEpilogueRows) {
            const int rows = d.pixels - p < kEpilogueRows ? d.pixels - p : kEpilogueRows;
            alignas(64) int32_t sums[kEpilogueRows][V * W];
            for (int r = 0; r < rows; ++r)
                block.sums(d, p + r, c, sums[r]);
            epilogue_tile(e, sums[0], V * W, rows, V * W);
            advance(e, rows);
        }
    }
    return c;
}

template <template <int> class Block> void depthwise_by_blocks(const DepthwiseRow &d) {
    int c = 0;
    if (d.taps <= kMostDepthwiseTaps) {
        c = depthwise_blocks<Block, 4>(d, 0);
        c = depthwise_blocks<Block, 2>(d, c);
    }
    depthwise_codes_from(d, c);
}
