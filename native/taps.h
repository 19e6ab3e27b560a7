// TapTables: which pixels of its input each output pixel of a convolution reads, as tables. In: a conv op, the sizes of
// its input and output. Out: tables that layers of the same geometry share. Called by plan_conv.cpp, read by
// execute_conv.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "graph.h"
#include "kernels.h"
#include "shapes.h"

namespace anyprec {

// The pixels that every tile of an output size reads, as byte offsets: [tile][tap][row], or [tile][tap][pair of rows].
struct TapRange {
    int first, end;
};
struct Offsets {
    std::vector<int32_t> bytes;
    std::vector<int> first_row;       // of each tile, and the end
    std::vector<size_t> first_offset; // of each tile, in `bytes`
    std::vector<TapRange> taps;       // of each tile: those it reads
};

// What outputs 2k and 2k + 1 of a convolution read together, tap by tap; an odd last output is alone, beside zeros.
struct PixelPairs {
    std::vector<PixelPair> all; // every pair of input pixels once
    std::vector<int32_t> taps;  // [k][tap]: number of the pair + 1; 0 where both are outside the image
};

class TapTables {
  public:
    // [output pixel][tap]: input pixel + 1, 0 outside the image.
    std::shared_ptr<const std::vector<int32_t>> pixels(const Op &op, const Shape &in, const Shape &out);
    std::shared_ptr<const PixelPairs> pairs(const Op &op, const Shape &in, const Shape &out);
    // For tiles of at most `rows` output pixels, none of which reaches from one run of `whole` pixels into the next,
    // and `pixel` bytes from one input pixel, or pair, to the next. `trimmed`: tiles leave out taps, the first and the
    // last, that are outside the image for all of their pixels, and are cut so that there are more of these.
    std::shared_ptr<const Offsets> offsets(const Op &op, const Shape &in, const Shape &out, int rows, size_t pixel,
                                           int whole, bool trimmed, bool in_pairs = false);
    size_t bytes_in_use() const; // of the tables that somebody beside this object holds

  private:
    std::map<std::vector<int>, std::shared_ptr<const std::vector<int32_t>>> pixels_; // by geometry
    std::map<std::vector<int>, std::shared_ptr<const PixelPairs>> pairs_;
    std::map<std::vector<int>, std::shared_ptr<const Offsets>> offsets_;
};

} // namespace anyprec
