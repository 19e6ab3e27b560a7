// Which kernel computes a convolution: the one that takes least time, of those of an instruction set that can.
// In: the kernels, the op, its weight, bits and sizes. Out: a kernel. Called by plan_conv.cpp.
#pragma once

#include "graph.h"
#include "kernels.h"
#include "shapes.h"

namespace anyprec {

struct LayerBits {
    int weights, acts;
};

// `split`: may be one whose panel has extra steps (Coding::split8).
const TileKernel *choose_kernel(const Kernels &kernels, const Op &op, const Weight &weight, LayerBits bits, bool split);

// Winograd's transforms where they take less time than `direct`, else nullptr.
const Winograd *choose_winograd(const Kernels &kernels, const Op &op, LayerBits bits, const Shape &in, const Shape &out,
                                const TileKernel &direct);

// Patches of V that stay in the second-level cache beside their panel, if that is small, or keep a large one from
// passing by too often.
int patches_at_once(const Winograd &kernel, int in, int out);

} // namespace anyprec
