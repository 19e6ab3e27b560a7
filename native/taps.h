// Taps: which pixels of its input each output pixel of a convolution reads, as tables. In: a conv op, the sizes of its
// input and output. Out: tables that layers of the same geometry share. Called by plan_conv.cpp, read by
// execute_conv.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "graph.h"
#include "shapes.h"

namespace anyprec {

// The pixels that every tile of an output size reads, as byte offsets: [tile][tap][row].
struct Offsets {
    std::vector<int32_t> bytes;
    std::vector<int> first_row; // of each tile, and the end
};

class Taps {
  public:
    // [output pixel][tap]: input pixel + 1, 0 outside the image.
    std::shared_ptr<const std::vector<int32_t>> pixels(const Op &op, const Shape &in, const Shape &out);
    // For tiles of at most `rows` output pixels, and `pixel` bytes from one input pixel to the next.
    std::shared_ptr<const Offsets> offsets(const Op &op, const Shape &in, const Shape &out, int rows, size_t pixel);

  private:
    std::map<std::vector<int>, std::shared_ptr<const std::vector<int32_t>>> pixels_; // by geometry
    std::map<std::vector<int>, std::shared_ptr<const Offsets>> offsets_;
};

} // namespace anyprec
