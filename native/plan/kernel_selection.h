// Kernel selection: the fastest kernel of an instruction set for a convolution, by a cost model. In: the kernels, the
// op, its weight, bits and sizes. Out: a kernel. Called by plan_conv.cpp and plan_products.cpp.
#pragma once

#include "format/graph.h"
#include "format/shapes.h"
#include "kernels/kernels.h"

namespace anyprec {

struct LayerBits {
    int weights, acts;
};

struct LayerSize {
    int64_t rows; // output pixels of an image
    int taps, in, out;
    bool residual;
};

// The kernel of the fewest cycles for `rows` output pixels. `split`: kernels whose panel has extra steps
// (Coding::split8) are allowed.
const TileKernel *choose_kernel(const Kernels &kernels, const Op &op, const Weight &weight, LayerBits bits, bool split,
                                int64_t rows, bool residual);

// For a product of two values of codes, of `terms` terms; bits.weights are those of the second value.
const TileKernel *choose_product_kernel(const Kernels &kernels, int rows, int terms, int columns, LayerBits bits);

// A Winograd kernel if it is faster than `direct`, else nullptr.
const Winograd *choose_winograd(const Kernels &kernels, const Op &op, LayerBits bits, const Shape &in, const Shape &out,
                                const TileKernel &direct);

// Patches per chunk. With a small panel, V of a chunk stays in the L2 cache beside the panel; with a large one, the
// chunk is large enough that the panel is not read too often.
int patches_at_once(const Winograd &kernel, int in, int out);

} // namespace anyprec
