// ArenaPlanner: places objects (buffers of a plan) in one arena, by the steps between which they live. In: sizes and
// uses. Out: an offset per object; objects alive at the same time do not overlap. Called by plan.cpp.
#pragma once

#include <cstddef>
#include <vector>

namespace anyprec {

class ArenaPlanner {
  public:
    // Returns the number of a new object. It gets memory when it is used.
    size_t add(size_t bytes);
    void use(size_t object, int step);
    // Gives the memory of `object` to `next`, if it is as large and no step after `step` uses it.
    bool hand_over(size_t object, size_t next, int step);
    // Assigns all offsets; returns the size of the arena in bytes.
    size_t lay_out();
    size_t offset(size_t object) const { return objects_[object].offset; }

  private:
    struct Object {
        size_t bytes = 0;
        int first = -1, last = -1; // steps; -1: no memory of its own
        size_t offset = 0;
    };
    std::vector<Object> objects_;
};

} // namespace anyprec
