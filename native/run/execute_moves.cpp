// Copies of a Run (execute.h): concat, constants, transpose, slice, gather, embedding. In and out: the arena. Numbers
// are 1 byte (codes) or 4; runs that stay together are copied at once. FORMAT.md, section 3.
#include "run/execute.h"

#include <atomic>
#include <cstring>

namespace anyprec {
namespace {

// Bytes of axes first .. rank of a value.
size_t bytes_from(const Shape &shape, int first, bool codes) {
    return static_cast<size_t>(shape.product(first, shape.rank)) * (codes ? 1 : 4);
}

void transpose_plane(const Kernels &kernels, const float *from, size_t stride, size_t lines, size_t to_line,
                     size_t count, float *to) {
    kernels.transpose_floats(from, stride, count, lines, to, to_line);
}
void transpose_plane(const Kernels &kernels, const uint8_t *from, size_t stride, size_t lines, size_t to_line,
                     size_t count, uint8_t *to) {
    kernels.transpose_codes(from, stride, count, lines, to, to_line);
}

// Two axes of which neither has neighbors in the source: a line of the result is `stride` numbers apart there, and
// neighboring lines are `line` apart.
template <typename T>
void pick_plane(const T *from, size_t stride, size_t line, int64_t lines, size_t to_line, int64_t count, T *to) {
    for (int64_t i = 0; i < lines; ++i, from += line, to += to_line)
        for (int64_t j = 0; j < count; ++j)
            to[j] = from[stride * static_cast<size_t>(j)];
}

template <typename T>
void permute_numbers(const Kernels &kernels, const Permutation &p, int64_t first, int64_t end, const T *from, T *to) {
    size_t next[MAX_AXES]; // numbers of the result from one position of an axis to the next
    size_t product = 1;
    for (int i = p.rank; i-- > 0; product *= static_cast<size_t>(p.size[i]))
        next[i] = product;
    const int last = p.rank - 1;
    if (p.rank == 1) { // one run, or every stride-th number
        const size_t count = static_cast<size_t>(end - first);
        from += p.stride[0] * static_cast<size_t>(first);
        to += first;
        if (p.stride[0] == 1)
            std::memcpy(to, from, sizeof(T) * count);
        else
            for (size_t i = 0; i < count; ++i)
                to[i] = from[p.stride[0] * i];
        return;
    }
    // The last axis of the result, and the axis whose numbers are neighbors in the source (or the one before the last).
    int plane = last - 1;
    for (int i = 0; i < last; ++i)
        if (p.stride[i] == 1)
            plane = i;
    int64_t begin[MAX_AXES] = {first}, stop[MAX_AXES];
    for (int i = 0; i < p.rank; ++i)
        stop[i] = i == 0 ? end : p.size[i];
    int64_t at[MAX_AXES];
    std::copy(begin, begin + p.rank, at);
    for (;;) {
        const T *f = from;
        T *t = to;
        for (int i = 0; i < last; ++i) {
            const size_t position = static_cast<size_t>(i == plane ? begin[i] : at[i]);
            f += p.stride[i] * position;
            t += next[i] * position;
        }
        const int64_t lines = stop[plane] - begin[plane];
        if (p.stride[last] == 1)
            for (int64_t i = 0; i < lines; ++i)
                std::memcpy(t + next[plane] * static_cast<size_t>(i), f + p.stride[plane] * static_cast<size_t>(i),
                            sizeof(T) * static_cast<size_t>(p.size[last]));
        else if (p.stride[plane] == 1)
            transpose_plane(kernels, f, p.stride[last], static_cast<size_t>(lines), next[plane],
                            static_cast<size_t>(p.size[last]), t);
        else
            pick_plane(f, p.stride[last], p.stride[plane], lines, next[plane], p.size[last], t);
        int axis = last - 1; // the next position of all other axes
        for (; axis >= 0; --axis) {
            if (axis == plane)
                continue;
            if (++at[axis] < stop[axis])
                break;
            at[axis] = begin[axis];
        }
        if (axis < 0)
            return;
    }
}

} // namespace

void permute(const Kernels &kernels, const Permutation &p, size_t element, int64_t first, int64_t end,
             const uint8_t *from, uint8_t *to) {
    if (element == 1)
        permute_numbers(kernels, p, first, end, from, to);
    else
        permute_numbers(kernels, p, first, end, reinterpret_cast<const float *>(from), reinterpret_cast<float *>(to));
}

void Run::transpose(const Step &s) const {
    const size_t numbers = static_cast<size_t>(s.shape.product(0, s.shape.rank)), element = s.codes ? 1 : 4;
    const size_t size = static_cast<size_t>(s.permutation.size[0]);
    over(size, (4096 * size + numbers - 1) / numbers, [&](int n, size_t first, size_t end) {
        permute(kernels, s.permutation, element, static_cast<int64_t>(first), static_cast<int64_t>(end),
                pixels(s.inputs[0], n), pixels(s.out, n));
    });
}

// Joins along an axis: for every position of the axes before it, a run of each input.
void Run::concat(const Step &s) const {
    const int axis = s.op->axis < 0 ? s.shape.rank - 1 : s.op->axis;
    const size_t line = bytes_from(s.shape, axis, s.codes);
    const bool last = axis == s.shape.rank - 1;
    over(static_cast<size_t>(s.shape.product(0, axis)), 16, [&](int n, size_t first, size_t end) {
        uint8_t *to = pixels(s.out, n) + line * first;
        for (size_t p = first; p < end; ++p)
            for (size_t i = 0; i < s.inputs.size(); ++i) {
                const size_t run = last ? s.inputs[i].pixel : bytes_from(s.input_shapes[i], axis, s.codes);
                std::memcpy(to, pixels(s.inputs[i], n) + run * p, run);
                to += run;
            }
    });
}

void Run::constant(const Step &s) const {
    threads.run(plan.images, [&](int n) { std::memcpy(pixels(s.out, n), s.weight, bytes_from(s.shape, 0, false)); });
}

// slice, gather: positions along an axis.
void Run::pick(const Step &s) const {
    const Op &op = *s.op;
    const Shape &in = s.input_shapes[0];
    const size_t run = bytes_from(in, op.axis + 1, s.codes), from_line = run * static_cast<size_t>(in.size[op.axis]);
    const size_t count = static_cast<size_t>(s.shape.size[op.axis]), line = run * count;
    const SliceRange range = op.kind == OpKind::slice ? slice_range(op, in.size[op.axis]) : SliceRange{0, 0};
    const bool together = op.kind == OpKind::slice && op.step == 1;
    over(static_cast<size_t>(s.shape.product(0, op.axis)), 4, [&](int n, size_t first, size_t end) {
        const uint8_t *from = pixels(s.inputs[0], n) + from_line * first;
        uint8_t *to = pixels(s.out, n) + line * first;
        for (size_t p = first; p < end; ++p, from += from_line, to += line) {
            if (together) {
                std::memcpy(to, from + run * static_cast<size_t>(range.start), line);
                continue;
            }
            for (size_t i = 0; i < count; ++i) {
                const size_t at = op.kind == OpKind::gather
                                      ? static_cast<size_t>(op.index[i])
                                      : static_cast<size_t>(range.start) + static_cast<size_t>(op.step) * i;
                std::memcpy(to + run * i, from + run * at, run);
            }
        }
    });
}

bool Run::embedding(const Step &s) const {
    const size_t row = static_cast<size_t>(s.shape.c());
    const float rows = static_cast<float>(s.weight_rows);
    std::atomic<bool> good{true};
    over(static_cast<size_t>(s.input_shapes[0].product(0, s.input_shapes[0].rank)), 64,
         [&](int n, size_t first, size_t end) {
             const float *x = floats(s, 0, n);
             float *y = result(s, n);
             for (size_t i = first; i < end; ++i) {
                 const int64_t number = x[i] >= 0 && x[i] <= rows ? static_cast<int64_t>(x[i]) : -1;
                 if (number < 0 || number >= s.weight_rows || static_cast<float>(number) != x[i]) {
                     good.store(false, std::memory_order_relaxed);
                     return;
                 }
                 std::memcpy(y + row * i, s.weight + row * static_cast<size_t>(number), 4 * row);
             }
         });
    return good.load();
}

} // namespace anyprec
