// TapTables: which input pixels each output pixel of a convolution reads, as tables (an indirection buffer). In: a conv
// op, the sizes of its input and output. Out: tables, shared by layers of the same geometry. Made by plan_conv.cpp,
// read by execute_conv.cpp. The geometry is that of ARITHMETIC.md, section 3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "format/graph.h"
#include "format/shapes.h"
#include "kernels/kernels.h"

namespace anyprec {

// Input pixels that each tile reads, as byte offsets: [tile][tap][row], or [tile][tap][pair of rows].
struct TapRange {
    int first, end;
};
struct Offsets {
    std::vector<int32_t> bytes;
    std::vector<int> first_row;       // of each tile, then the end
    std::vector<size_t> first_offset; // of each tile, as an index into `bytes`
    std::vector<TapRange> taps;       // of each tile: the taps it reads
    std::vector<int> first_pixel;     // phases: the output pixel of each tile's first row; else empty
    int pixel_step = 1;               // from the output pixel of a row to that of the next
};

// Phases of a transposed convolution. With strides (sy, sx), output (y, x) reads only taps of one residue along each
// axis: about one in sy sx. Rows of a tile are outputs of one phase, (y mod sy, x mod sx), in one line, and taps are
// ordered by residue, so that a phase reads one range of them. Only for integer sums: a float sum of +0 products may
// turn -0 into +0, so none is left out there.
bool has_phases(const Op &op);
std::vector<int> tap_order(const Op &op); // by residue; empty without phases

// What outputs 2k and 2k + 1 read together at each tap. The last output of an odd number is paired with zeros.
struct PixelPairs {
    std::vector<PixelPair> all; // every pair of input pixels once
    std::vector<int32_t> taps;  // [k][tap]: number of the pair + 1; 0 where both are outside the image
};

class TapTables {
  public:
    // [output pixel][tap]: input pixel + 1, 0 outside the image. With phases: outputs phase by phase, taps in
    // tap_order.
    std::shared_ptr<const std::vector<int32_t>> pixels(const Op &op, const Shape &in, const Shape &out,
                                                       bool phases = false);
    std::shared_ptr<const PixelPairs> pairs(const Op &op, const Shape &in, const Shape &out);
    // Offsets for tiles of at most `rows` output pixels. No tile crosses a multiple of `whole` pixels. `pixel` is the
    // distance in bytes between input pixels, or pairs. `trimmed`: a tile leaves out leading and trailing taps that are
    // outside the image for all of its pixels, and tiles are cut to make more such taps.
    std::shared_ptr<const Offsets> offsets(const Op &op, const Shape &in, const Shape &out, int rows, size_t pixel,
                                           int whole, bool trimmed, bool in_pairs = false, bool phases = false);
    size_t bytes_in_use() const; // of tables that are referenced outside this object

  private:
    std::map<std::vector<int>, std::shared_ptr<const std::vector<int32_t>>> pixels_; // by geometry
    std::map<std::vector<int>, std::shared_ptr<const PixelPairs>> pairs_;
    std::map<std::vector<int>, std::shared_ptr<const Offsets>> offsets_;
};

} // namespace anyprec
