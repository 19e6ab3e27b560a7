// See arena_planner.h.
#include "plan/arena_planner.h"

#include <algorithm>
#include <utility>

namespace anyprec {

size_t ArenaPlanner::add(size_t bytes) {
    objects_.push_back({bytes, -1, -1, 0});
    return objects_.size() - 1;
}

void ArenaPlanner::use(size_t object, int step) {
    Object &o = objects_[object];
    o.first = o.first < 0 ? step : std::min(o.first, step);
    o.last = std::max(o.last, step);
}

bool ArenaPlanner::hand_over(size_t object, size_t next, int step) {
    Object &from = objects_[object], &to = objects_[next];
    if (from.last != step || from.bytes != to.bytes)
        return false;
    from.last = to.last;
    to.first = to.last = -1;
    return true;
}

// Greedy, largest first: each object gets the lowest offset that no object alive at the same time occupies.
size_t ArenaPlanner::lay_out() {
    std::vector<size_t> order;
    for (size_t i = 0; i < objects_.size(); ++i)
        if (objects_[i].last >= 0)
            order.push_back(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return objects_[a].bytes > objects_[b].bytes; });
    std::vector<size_t> placed;
    size_t bytes = 0;
    for (size_t i : order) {
        Object &object = objects_[i];
        std::vector<std::pair<size_t, size_t>> taken; // [begin, end)
        for (size_t j : placed)
            if (objects_[j].first <= object.last && object.first <= objects_[j].last)
                taken.emplace_back(objects_[j].offset, objects_[j].offset + objects_[j].bytes);
        std::sort(taken.begin(), taken.end());
        size_t at = 0;
        for (const auto &[begin, end] : taken) {
            if (at + object.bytes <= begin)
                break;
            at = std::max(at, (end + 63) / 64 * 64); // aligned to a cache line
        }
        object.offset = at;
        bytes = std::max(bytes, at + object.bytes);
        placed.push_back(i);
    }
    return bytes;
}

} // namespace anyprec
