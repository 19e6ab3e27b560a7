// Shapes of all values of a graph for one input size: ARITHMETIC.md, sections 2, 3 and 5. In: a Graph and the input's
// N, H, W. Out: a Shape per value, or an InputError. Called by the reader (whether a graph of fixed size fits together)
// and by plan.cpp once per new input size.
#pragma once

#include <cstddef>
#include <vector>

#include "anyprec/input_error.h"
#include "graph.h"

namespace anyprec {

// Every value is (n, h, w, c); each at least 1 and below 2^31, their product below 2^40.
struct Shape {
    int n = 0, h = 0, w = 0, c = 0;
    size_t count() const { return size_t(n) * size_t(h) * size_t(w) * size_t(c); }
    bool operator==(const Shape &o) const { return n == o.n && h == o.h && w == o.w && c == o.c; }
};

// Shapes by value number: [0] is the input, [i + 1] the value of op i. Besides what Shape promises: windows, padding
// included, fit an int (so oy * stride - pad + ky * dilation does), output pixels times taps of a convolution are below
// TAP_LIMIT, and every pool window has a tap in the image.
std::vector<Shape> infer_shapes(const Graph &graph, int n, int h, int w);

// The same where h or w may be 0 for "free": sizes that depend on a free one are 0 too. Used by the reader.
std::vector<Shape> infer_partial_shapes(const Graph &graph, int n, int h, int w);

} // namespace anyprec
