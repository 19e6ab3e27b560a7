// A float convolution in quads (kernels.h, QuadInput), planned and run. In: floats in the arena. Out: what its Epilogue
// says. Called by plan_conv.cpp and execute_conv.cpp.
#pragma once

#include <memory>

#include "plan.h"

namespace anyprec {

// Whether a float convolution goes in quads. That changes how it rounds, so it depends on nothing but the op itself:
// FORMAT.md, conv.
bool in_quads(const Op &op);

// (G g) of all pairs of pixels: weights (out, kh, kw, in) to [position][kh][2 in] of one output channel after another.
std::vector<float> quad_weights(const std::vector<float> &weights, const int (&shape)[4]);

// conv has its kernel, blocks, panel and input already.
std::unique_ptr<QuadStep> plan_quads(const ConvStep &conv, const Shape &in, const Shape &out, int images);

// Computes lines of one image's output, best in order: what two of them read is transformed once. `memory` is one of
// the step's slots. Allocates nothing.
class QuadLines {
  public:
    QuadLines(const ConvStep &conv, const Kernels &k, uint8_t *arena, int image, uint8_t *memory);
    void line(int y, float *out = nullptr) const; // `out`, if given, is where the line goes

  private:
    const ConvStep &c;
    const QuadStep &q;
    const Kernels &kernels;
    uint8_t *arena;
    int n;
    uint8_t *zeros, *ring; // V of nothing, and of the lines held
    float *pixels;         // a line of the input between zeros
    int32_t *held;         // by place in the ring: which line of the input it is of, -1: none
    int32_t *offsets;      // of the line in the making: [tile][kh][quads of the tile]

    void transform(int iy) const;
    void set_offsets(int y, int rows) const;
};

} // namespace anyprec
