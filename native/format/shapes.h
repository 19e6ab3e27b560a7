// Shapes of all values of a graph for one size of its inputs: ARITHMETIC.md, sections 2, 3, 5 and 8. In: a Graph and
// the shapes of its inputs. Out: a Shape per value, or an InputError. Called by the reader (whether a graph of fixed
// size fits together) and by plan.cpp once per new input size.
#pragma once

#include <cstddef>
#include <vector>

#include "anyprec/input_error.h"
#include "format/graph.h"

namespace anyprec {

// Shapes by value number: [0] is the input, [i + 1] the value of op i. Besides what Shape promises: windows, padding
// included, fit an int (so oy * stride - pad + ky * dilation does), output pixels times taps of a convolution are below
// TAP_LIMIT, and every pool window has a tap in the image.
std::vector<Shape> infer_shapes(const Graph &graph, const std::vector<Shape> &inputs);
std::vector<Shape> infer_shapes(const Graph &graph, int n, int h, int w); // of a graph whose one input is images

// The same for inputs as the graph gives them, N = 1: sizes that depend on a free one are 0. Used by the reader.
std::vector<Shape> infer_partial_shapes(const Graph &graph);

// Positions that a slice takes along an axis of `size`: start, start + step, ..., `count` of them; 0: none.
struct SliceRange {
    int start, count;
};
SliceRange slice_range(const Op &op, int size);

} // namespace anyprec
