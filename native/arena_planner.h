// ArenaPlanner: objects of a plan and the steps between which they live, laid out in one arena. In: sizes and uses.
// Out: an offset for each object, so that those alive at the same time do not overlap. Called by plan.cpp.
#pragma once

#include <cstddef>
#include <vector>

namespace anyprec {

class ArenaPlanner {
  public:
    // A new object's number; it has no memory until it is used.
    size_t add(size_t bytes);
    void use(size_t object, int step);
    // `next` gets the memory of `object`, if that is as large and no step after `step` uses it.
    bool hand_over(size_t object, size_t next, int step);
    // Gives every object its offset; returns the bytes of the arena.
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
