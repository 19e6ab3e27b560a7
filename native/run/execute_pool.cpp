// Pools and resize of a Run (execute.h). In and out: the arena, as a Step (plan.h) says. ARITHMETIC.md, sections 2 and
// 5.
#include "run/execute.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace anyprec {
namespace {

struct Window {
    int first, end, count; // taps inside the image; the divisor along this axis
};

Window pool_window(const Op &op, int axis, int i, int in, int out) {
    if (op.kind == OpKind::adaptive_avg_pool) {
        const int first = static_cast<int>(static_cast<int64_t>(i) * in / out);
        const int end = static_cast<int>((static_cast<int64_t>(i + 1) * in + out - 1) / out);
        return {first, end, end - first};
    }
    const int start = i * op.stride[axis] - op.pad[axis];
    const int stop = std::min(start + op.kernel[axis], in + op.pad[axis + 2]);
    const int first = std::max(start, 0), end = std::min(stop, in);
    return {first, end, op.count_pad ? stop - start : end - first};
}

// An output line is interpolated between input lines a and b, with the weight of b: ARITHMETIC.md, section 5.
struct Interpolation {
    int a, b;
    float weight;
};

Interpolation interpolation_at(const Op &op, int axis, int i, int in, int out) {
    const double ratio = op.scale[axis] != 0 ? 1.0 / op.scale[axis] : static_cast<double>(in) / out;
    if (op.mode == ResizeMode::nearest) {
        const int a = static_cast<int>(std::min(std::floor(i * ratio), in - 1.0));
        return {a, a, 0};
    }
    double s = 0;
    if (!op.align)
        s = std::max((i + 0.5) * ratio - 0.5, 0.0);
    else if (out > 1)
        s = static_cast<double>(static_cast<int64_t>(i) * (in - 1)) / (out - 1);
    const int a = static_cast<int>(std::min(std::floor(s), in - 1.0));
    return {a, std::min(a + 1, in - 1), static_cast<float>(s - a)};
}

} // namespace

void PoolLines::run(const Kernels &kernels, const uint8_t *from, int from_line, int first, int end, uint8_t *to) const {
    constexpr int kTaps = 32; // reduced at once
    const int reach = (op.kernel[1] - 1) * op.dilation[1];
    const bool few = op.kernel[0] * op.kernel[1] <= kTaps;
    const auto reduce = [&](const void *const *taps, int count) {
        if (codes)
            kernels.maximum_codes(to, taps, count, out.c());
        else
            kernels.maximum(reinterpret_cast<float *>(to), taps, count, out.c());
    };
    for (int y = first; y < end; ++y) {
        const void *taps[kTaps];
        int count = 0;
        bool whole = false; // the previous window was inside the image along the line
        for (int x = 0; x < out.w(); ++x, to += pixel) {
            const int left = x * op.stride[1] - op.pad[1];
            const bool inside = left >= 0 && left + reach < in.w();
            if (whole && inside && few) { // the same taps, shifted by the stride
                for (int t = 0; t < count; ++t)
                    taps[t] = static_cast<const uint8_t *>(taps[t]) + pixel * static_cast<size_t>(op.stride[1]);
                if (count)
                    reduce(taps, count);
                continue;
            }
            whole = inside;
            count = 0;
            for (int i = 0; i < op.kernel[0]; ++i)
                for (int j = 0; j < op.kernel[1]; ++j) {
                    const int iy = y * op.stride[0] - op.pad[0] + i * op.dilation[0], ix = left + j * op.dilation[1];
                    if (iy < 0 || iy >= in.h() || ix < 0 || ix >= in.w())
                        continue;
                    if (count == kTaps) { // reduce to the maximum so far, which becomes a tap
                        reduce(taps, count);
                        taps[0] = to;
                        count = 1;
                    }
                    taps[count++] = from + pixel * (static_cast<size_t>(iy - from_line) * in.w() + ix);
                }
            if (count)
                reduce(taps, count);
        }
    }
}

void Run::max_pool(const Step &s) const {
    const PoolLines pool{*s.op, s.input_shapes[0], s.shape, s.codes, s.out.pixel};
    const int parts = threads.count > 1 ? std::min(s.shape.h(), threads.count) : 1;
    threads.run(plan.images * parts, [&](int task) {
        const int n = task / parts, first = s.shape.h() * (task % parts) / parts;
        const int end = s.shape.h() * (task % parts + 1) / parts;
        pool.run(kernels, pixels(s.inputs[0], n), 0, first, end,
                 pixels(s.out, n) + s.out.pixel * static_cast<size_t>(first) * static_cast<size_t>(s.shape.w()));
    });
}

void Run::avg_pool(const Step &s) const {
    const Shape in = s.input_shapes[0];
    const Buffer &from = s.inputs[0];
    over_pixels(s.out.pixels, [&](int n, int first, int end) {
        for (int p = first; p < end; ++p) {
            const Window h = pool_window(*s.op, 0, p / s.shape.w(), in.h(), s.shape.h());
            const Window w = pool_window(*s.op, 1, p % s.shape.w(), in.w(), s.shape.w());
            float *sum = reinterpret_cast<float *>(pixels(s.out, n) + s.out.pixel * static_cast<size_t>(p));
            std::fill_n(sum, s.shape.c(), 0.0f);
            for (int y = h.first; y < h.end; ++y)
                for (int x = w.first; x < w.end; ++x)
                    kernels.accumulate(sum,
                                       reinterpret_cast<const float *>(
                                           pixels(from, n) + from.pixel * (static_cast<size_t>(y) * in.w() + x)),
                                       s.shape.c());
            const float count = static_cast<float>(static_cast<int64_t>(h.count) * w.count);
            for (int c = 0; c < s.shape.c(); ++c)
                sum[c] /= count;
        }
    });
}

// Across first, then down: a line of the input is interpolated across once, for all output lines between it and its
// neighbors. In parts of some columns, whose two lines stay in the first-level cache.
void Run::resize(const Step &s) const {
    constexpr int kFloats = 2048, kColumns = 256; // of a line's part
    const Op &op = *s.op;
    const Shape in = s.input_shapes[0];
    const int channels = in.c(), width = s.shape.w();
    const bool nearest = op.mode == ResizeMode::nearest;
    const int piece = std::min(channels, kFloats), columns = std::clamp(kFloats / piece, 1, kColumns);
    const bool dense = s.out.pixel == sizeof(float) * static_cast<size_t>(piece); // pixels follow one another
    over_pixels(s.out.pixels, [&](int n, int first, int end) {
        const float *x = reinterpret_cast<const float *>(pixels(s.inputs[0], n));
        const auto part = [&](int left, int right, int c) { // of all output lines
            const int count = std::min(piece, channels - c);
            Interpolation across[kColumns];
            for (int i = left; i < right; ++i)
                across[i - left] = interpolation_at(op, 1, i, in.w(), width);
            float lines[2][kFloats];
            int known[2] = {-1, -1}; // the input lines that they are of
            const auto line = [&](int y) -> const float * {
                float *made = lines[y % 2];
                if (known[y % 2] == y)
                    return made;
                known[y % 2] = y;
                const float *row = x + static_cast<size_t>(y) * in.w() * channels + c;
                for (int i = 0; i < right - left; ++i) {
                    const float *a = row + static_cast<size_t>(across[i].a) * channels;
                    if (nearest)
                        std::memcpy(made + i * count, a, sizeof(float) * static_cast<size_t>(count));
                    else
                        kernels.interpolate(a, row + static_cast<size_t>(across[i].b) * channels, across[i].weight,
                                            made + i * count, count);
                }
                return made;
            };
            for (int y = first / width; y <= (end - 1) / width; ++y) {
                const int begin = std::max(left, first - y * width), stop = std::min(right, end - y * width);
                if (begin >= stop)
                    continue;
                const Interpolation down = interpolation_at(op, 0, y, in.h(), s.shape.h());
                const float *a = line(down.a) + (begin - left) * count, *b = line(down.b) + (begin - left) * count;
                uint8_t *to = pixels(s.out, n) + s.out.pixel * (static_cast<size_t>(y) * width + begin);
                const int runs = dense ? 1 : stop - begin, run = dense ? (stop - begin) * count : count;
                for (int i = 0; i < runs; ++i, a += run, b += run) {
                    float *made = reinterpret_cast<float *>(to + s.out.pixel * static_cast<size_t>(i)) + c;
                    if (nearest)
                        std::memcpy(made, a, sizeof(float) * static_cast<size_t>(run));
                    else
                        kernels.interpolate(a, b, down.weight, made, run);
                }
            }
        };
        for (int left = 0; left < width; left += columns)
            for (int c = 0; c < channels; c += piece)
                part(left, std::min(width, left + columns), c);
    });
}

} // namespace anyprec
