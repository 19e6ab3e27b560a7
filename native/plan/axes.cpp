// See axes.h.
#include "plan/axes.h"

namespace anyprec {

Permutation permutation(const Shape &from, const int *order) {
    size_t stride[MAX_AXES], next = 1;
    for (int i = from.rank; i-- > 0; next *= static_cast<size_t>(from.size[i]))
        stride[i] = next;
    Permutation p;
    for (int i = 0; i < from.rank; ++i) {
        const int axis = order[i];
        const size_t size = static_cast<size_t>(from.size[axis]);
        if (size == 1)
            continue;
        if (p.rank && p.stride[p.rank - 1] == stride[axis] * size) {
            p.size[p.rank - 1] *= from.size[axis];
            p.stride[p.rank - 1] = stride[axis];
            continue;
        }
        p.size[p.rank] = from.size[axis];
        p.stride[p.rank++] = stride[axis];
    }
    if (!p.rank) { // a single number
        p.rank = 1;
        p.size[0] = 1;
        p.stride[0] = 1;
    }
    return p;
}

Permutation inverse(const Shape &from, const int *order) {
    Shape to;
    to.n = from.n;
    to.rank = from.rank;
    int back[MAX_AXES];
    for (int i = 0; i < from.rank; ++i) {
        to.size[i] = from.size[order[i]];
        back[order[i]] = i;
    }
    return permutation(to, back);
}

Broadcast broadcast(const Shape &a, const Shape &b, int axes, size_t a_unit, size_t b_unit) {
    size_t first[MAX_AXES], second[MAX_AXES];
    for (int i = axes; i-- > 0;) {
        first[i] = a.size[i] == 1 ? 0 : a_unit;
        second[i] = b.size[i] == 1 ? 0 : b_unit;
        a_unit *= static_cast<size_t>(a.size[i]);
        b_unit *= static_cast<size_t>(b.size[i]);
    }
    Broadcast r;
    for (int i = 0; i < axes; ++i) {
        const int size = a.size[i] == 1 ? b.size[i] : a.size[i];
        if (size == 1)
            continue;
        const int last = r.rank - 1;
        const size_t count = static_cast<size_t>(size);
        if (r.rank && r.first[last] == first[i] * count && r.second[last] == second[i] * count) {
            r.size[last] *= size;
            r.first[last] = first[i];
            r.second[last] = second[i];
            continue;
        }
        r.size[r.rank] = size;
        r.first[r.rank] = first[i];
        r.second[r.rank++] = second[i];
    }
    if (!r.rank) {
        r.rank = 1;
        r.size[0] = 1;
    }
    return r;
}

} // namespace anyprec
