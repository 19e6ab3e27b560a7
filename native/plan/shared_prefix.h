// SharedPrefix: the first part of a graph, which is computed apart from the rest. In: a Graph. Out: which values belong
// to it, and which of them the rest reads.
//
// First, the part that no profile changes, such as a float stem: a cascade computes it once per image (engine.h,
// KeptRun).
//
//   as it is:   input -> conv * scale_k + shift_k -> codes_k -> ...            k: the profile
//   here:       input -> conv -> codes_k of (* scale_k + shift_k) -> ...       conv is the same for every k
//
// A norm's scale and shift stand at the convolution before it. Where only a quantize reads that, they move there: one
// fma either way, so codes are the same to the bit.
//
// Second, the layers whose images are larger than their weights: of a large batch, they are computed image by image,
// the rest for all images together (model_run.cpp, run_split).
#pragma once

#include <vector>

#include "format/graph.h"
#include "format/shapes.h"

namespace anyprec {

struct SharedPrefix {
    Graph graph;              // with tables moved; values have the same numbers
    std::vector<bool> shared; // by value: belongs to the prefix
    std::vector<int> kept;    // shared values that are read by an op whose own value is not shared, or are outputs

    explicit SharedPrefix(const Graph &original); // what is the same in every profile
    // Up to the last layer whose images are larger than its weights; `shapes` are those of all values.
    SharedPrefix(const Graph &original, const std::vector<Shape> &shapes);
    bool empty() const { return kept.empty(); } // no such layer, or none after it

  private:
    void find_kept();
};

} // namespace anyprec
