// A float convolution in quads (kernels.h, ToomCookInput), planned and run. In: floats in the arena. Out: what its
// Epilogue says. Called by plan_conv.cpp and execute_conv.cpp.
#pragma once

#include <memory>

#include "plan.h"

namespace anyprec {

// Whether a float convolution goes in quads. That changes how it rounds, so it depends on nothing but the op itself:
// FORMAT.md, conv.
bool uses_toom_cook(const Op &op);

// G g G' of all two by two pixels: weights (out, kh, kw, in) to [position down][across][4 in] of one output channel
// after another.
std::vector<float> toom_cook_weights(const std::vector<float> &weights, const int (&shape)[4]);

// conv has its kernel, blocks, panel and input already.
std::unique_ptr<ToomCookStep> plan_toom_cook(const ConvStep &conv, const Shape &out, int images);

// Computes lines of one image's output, best in order: what two quads read, one above the other, goes through its first
// transform once. `memory` is one of the step's slots. Allocates nothing.
class ToomCookLines {
  public:
    ToomCookLines(const ConvStep &conv, const Kernels &k, uint8_t *arena, int image, uint8_t *memory);
    void lines(int y, float *out = nullptr) const; // y .. y + 4, y a multiple of 4; `out`: where line y goes, if given

  private:
    static constexpr int kRing = 2 * kToomCookPoints; // input lines under a quad
    const ConvStep &c;
    const ToomCookStep &q;
    const Kernels &kernels;
    uint8_t *arena;
    int n;
    float *zeros, *ring, *v; // lines through the first transform: of nothing, the last ones; and through both
    float *pixels;           // a line of the input between zeros
    int32_t *held;           // by place in the ring: which line it is, -1: none

    const float *line(int number) const;
};

} // namespace anyprec
