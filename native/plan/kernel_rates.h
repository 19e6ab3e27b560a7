// How fast the tiles of a kernel are on this CPU. In: a table of kernels, one of them, the vectors of a block. Out:
// products per cycle for the cost model of kernel_selection.cpp.
#pragma once

#include "kernels/kernels.h"

namespace anyprec {

// Of a full tile of 2^log2_vectors vectors. TileKernel::products_per_cycle, except in tables with Kernels::measured:
// there vpdpbusd with its widest tile keeps its figure, and the other tiles have theirs in proportion to it, as
// measured by the first call (0.2 ms).
double products_per_cycle(const Kernels &kernels, const TileKernel &kernel, int log2_vectors);

} // namespace anyprec
