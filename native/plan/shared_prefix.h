// SharedPrefix: the part of a graph that no profile changes, such as a float stem. In: a Graph. Out: which values are
// the same in every profile, and which of them the rest reads. A cascade computes it once per image (engine.h,
// KeptRun).
//
//   as it is:   input -> conv * scale_k + shift_k -> codes_k -> ...            k: the profile
//   here:       input -> conv -> codes_k of (* scale_k + shift_k) -> ...       conv is the same for every k
//
// A norm's scale and shift stand at the convolution before it. Where only a quantize reads that, they move there: one
// fma either way, so codes are the same to the bit.
#pragma once

#include <vector>

#include "format/graph.h"

namespace anyprec {

struct SharedPrefix {
    Graph graph;              // with tables moved; values have the same numbers
    std::vector<bool> shared; // by value: the same in every profile
    std::vector<int> kept;    // shared values that are read by an op whose own value is not shared, or are outputs

    explicit SharedPrefix(const Graph &original);
};

} // namespace anyprec
