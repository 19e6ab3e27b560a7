// Axes of values, merged as far as the order of their numbers allows, so that loops are few and long. In: shapes, an
// order of axes. Out: sizes and strides, outermost axis first. Made by the planner, read by execute_moves.cpp and
// execute_functions.cpp.
#pragma once

#include <cstddef>

#include "format/graph.h"

namespace anyprec {

// A copy with axes in another order: axis i of the result has `size[i]` positions, `stride[i]` numbers apart in the
// source. Axes of size 1 are left out and neighbors that stay together are one axis, so a copy in the same order has
// one axis of stride 1.
struct Permutation {
    int rank = 0;
    int64_t size[MAX_AXES] = {};
    size_t stride[MAX_AXES] = {};

    bool is_plain() const { return rank == 1 && stride[0] == 1; }
};
Permutation permutation(const Shape &from, const int *order);
Permutation inverse(const Shape &from, const int *order); // from the result back to `from`

// Two values that are read together, each repeated along axes where it has size 1 (stride 0). The last axis of both
// has stride 0 or `unit`.
struct Broadcast {
    int rank = 0;
    int64_t size[MAX_AXES] = {};
    size_t first[MAX_AXES] = {}, second[MAX_AXES] = {}; // strides

    int64_t count(int axes) const { // of positions along the first `axes` axes
        int64_t product = 1;
        for (int i = 0; i < axes; ++i)
            product *= size[i];
        return product;
    }
    // Strides times indices of position `number` along the first `axes` axes.
    void offsets(int64_t number, int axes, size_t &a, size_t &b) const {
        a = b = 0;
        for (int i = axes; i-- > 0; number /= size[i]) {
            a += first[i] * static_cast<size_t>(number % size[i]);
            b += second[i] * static_cast<size_t>(number % size[i]);
        }
    }
};
// Of the first `axes` axes of both; one step along the last of them is `a_unit` and `b_unit` numbers.
Broadcast broadcast(const Shape &a, const Shape &b, int axes, size_t a_unit, size_t b_unit);

} // namespace anyprec
