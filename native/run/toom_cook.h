// A float convolution by Toom-Cook (kernels.h, ToomCookInput; ARITHMETIC.md, section 4), planned and run. In: floats in
// the arena. Out: outputs through the epilogue. Called by plan_conv.cpp and execute_conv.cpp.
#pragma once

#include <memory>

#include "plan/plan.h"

namespace anyprec {

// Whether a float convolution is computed by Toom-Cook. The choice changes rounding, so it depends only on the op:
// ARITHMETIC.md, section 4.
bool uses_toom_cook(const Op &op);

// Lines and columns of pixels that count as one pixel, which is the stride; the kernel's size tells it.
int toom_cook_block(const int (&weight_shape)[4]);

// G g G' for blocks of b x b pixels: weights (out, kh, kw, in) -> (out, position down, position across, b b in).
std::vector<float> toom_cook_weights(const std::vector<float> &weights, const int (&shape)[4]);

// conv must have its kernel, blocks, panel and input.
std::unique_ptr<ToomCookStep> plan_toom_cook(const ConvStep &conv, const Shape &out, int images);

// Computes output lines of one image, fastest in order: input lines shared by two tiles, one above the other, are
// transformed horizontally once. `memory` is one of the step's slots. Allocates nothing.
class ToomCookLines {
  public:
    ToomCookLines(const ConvStep &conv, const Kernels &k, uint8_t *arena, int image, uint8_t *memory);
    void lines(int y,
               float *out = nullptr) const; // lines y .. y + 4, y a multiple of 4; `out`: where line y goes, if given

  private:
    const ConvStep &c;
    const ToomCookStep &q;
    const Kernels &kernels;
    uint8_t *arena;
    int n;
    int lines_held; // by the ring: the input lines that a tile reads
    float *zeros, *ring,
        *v;        // lines after the horizontal transform: of zeros, the most recent ones; v: after both transforms
    float *pixels; // one input line, padded with zeros
    int32_t *held; // by position in the ring: number of the line it holds, -1: none

    const float *line(int number) const;
};

} // namespace anyprec
