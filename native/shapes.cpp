// See shapes.h. One function per kind of arithmetic on sizes. A size of 0 means "not known"; only infer_partial_shapes
// produces it.
#include "shapes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "format_limits.h"

namespace anyprec {
namespace {

std::string show(const Shape &shape) {
    std::string text;
    for (int d : {shape.n, shape.h, shape.w, shape.c})
        text += (text.empty() ? "(" : ", ") + (d ? std::to_string(d) : std::string("free"));
    return text + ")";
}

[[noreturn]] void fail(const Op &op, const std::string &what) {
    throw InputError("op '" + op.name + "' " + what);
}

// Checks 64-bit dimensions and converts them to int.
Shape checked(const std::string &who, int64_t n, int64_t h, int64_t w, int64_t c) {
    int64_t count = 1;
    for (int64_t d : {n, h, w, c}) {
        if (d < 0 || d >= DIMENSION_LIMIT)
            throw InputError(who + " has a dimension of " + std::to_string(d) + "; 1 .. 2^31 - 1 are allowed");
        if (d > (COUNT_LIMIT - 1) / count)
            throw InputError(who + " has 2^40 elements or more");
        count *= d ? d : 1;
    }
    return Shape{int(n), int(h), int(w), int(c)};
}

// Number of windows along one axis (0: h, 1: w). An image that is too small for a window is checked in window_output.
int64_t count_windows(const Op &op, int axis, int64_t padded, int64_t reach) {
    int64_t room = padded - reach, stride = op.stride[axis];
    if (op.ceil) {
        // C++ rounds towards 0, which is up for a negative quotient.
        int64_t windows = (room > 0 ? (room + stride - 1) / stride : room / stride) + 1;
        return windows > 1 && (windows - 1) * stride >= padded - op.pad[axis + 2] ? windows - 1 : windows;
    }
    return room < 0 ? 0 : room / stride + 1;
}

// conv and pools, one axis. `in` 0 gives 0.
int64_t window_output(const Op &op, int axis, int64_t in, bool pool) {
    int64_t before = op.pad[axis], after = op.pad[axis + 2], padded = in + before + after;
    int64_t dilation = op.dilation[axis], stride = op.stride[axis];
    int64_t last_tap = dilation * (int64_t(op.kernel[axis]) - 1), reach = last_tap + 1;
    if (pool && (before >= reach || after >= reach))
        fail(op, "has padding " + std::to_string(std::max(before, after)) + ", which holds a whole window of " +
                     std::to_string(reach));
    if (padded + reach >= DIMENSION_LIMIT)
        fail(op, "has windows that need 2^31 or more pixels");
    if (in == 0)
        return 0;
    int64_t out = count_windows(op, axis, padded, reach);
    std::string size = std::to_string(in) + " pixels and " + std::to_string(padded - in) + " of padding";
    if (out < 1)
        fail(op, "needs " + std::to_string(reach) + " pixels, but has " + size + "; use a larger input");
    // A pool needs a tap inside the image: it starts from it, or divides by the number of taps. A window that begins
    // before the image has one, since the padding is smaller than a window, unless dilation jumps over a whole small
    // image. A window that begins after the image has none.
    if (pool && ((out - 1) * stride - before >= in || (before > 0 && dilation > in)))
        fail(op, "has a window that lies in the padding alone: " + size);
    return out;
}

// Limits the outputs of a convolution: padding could make more pixels than fit in memory. h and w 0: not known.
void check_taps(const Op &op, int64_t h, int64_t w) {
    const int64_t taps = int64_t(op.kernel[0]) * op.kernel[1];
    const int64_t pixels = std::max<int64_t>(h, 1) * std::max<int64_t>(w, 1);
    if (pixels > (TAP_LIMIT - 1) / taps)
        fail(op, "reads " + std::to_string(taps) + " taps for each of " + std::to_string(pixels) +
                     " output pixels; together they must be below 2^29, use a smaller input");
}

int64_t resize_output(const Op &op, int axis, int64_t in, int64_t like) {
    if (op.like >= 0)
        return like;
    if (op.size[axis] > 0 || in == 0)
        return op.size[axis];
    double out = std::floor(double(in) * op.scale[axis]);
    if (!(out >= 1 && out < double(DIMENSION_LIMIT)))
        fail(op, "resizes " + std::to_string(in) + " pixels by " + std::to_string(op.scale[axis]) +
                     "; 1 .. 2^31 - 1 pixels must be left");
    return int64_t(out);
}

bool differ(int a, int b) {
    return a && b && a != b;
}

class Inference {
  public:
    Inference(const Graph &graph, int n, int h, int w) : graph_(graph) {
        shapes_.reserve(graph.ops.size() + 1);
        shapes_.push_back(checked("the input", n, h, w, graph.input_c));
        for (const Op &op : graph.ops)
            shapes_.push_back(shape_of(op));
    }

    std::vector<Shape> take() { return std::move(shapes_); }

  private:
    Shape shape_of(const Op &op) const {
        Shape in = shapes_[size_t(op.inputs[0])];
        auto made = [&](int64_t h, int64_t w, int64_t c) { return checked("op '" + op.name + "'", in.n, h, w, c); };
        switch (op.kind) {
        case OpKind::conv:
        case OpKind::linear: {
            const Weight &weight = graph_.weights[size_t(op.weight)];
            int64_t channels = int64_t(weight.shape[3]) * op.groups;
            if (in.c && in.c != channels)
                fail(op, "has weights for " + std::to_string(channels) + " channels, its input is " + show(in));
            const int64_t h = window_output(op, 0, in.h, false), w = window_output(op, 1, in.w, false);
            check_taps(op, h, w);
            return made(h, w, weight.shape[0]);
        }
        case OpKind::max_pool:
        case OpKind::avg_pool:
            return made(window_output(op, 0, in.h, true), window_output(op, 1, in.w, true), in.c);
        case OpKind::adaptive_avg_pool:
            return made(op.size[0], op.size[1], in.c);
        case OpKind::resize: {
            Shape like = op.like >= 0 ? shapes_[size_t(op.like)] : in;
            return made(resize_output(op, 0, in.h, like.h), resize_output(op, 1, in.w, like.w), in.c);
        }
        case OpKind::add:
            return add(op);
        case OpKind::concat:
            return concat(op);
        case OpKind::flatten:
            return flatten(op, in);
        case OpKind::pad: {
            auto padded = [](int64_t size, int before, int after) { return size ? size + before + after : 0; };
            return made(padded(in.h, op.pad[0], op.pad[2]), padded(in.w, op.pad[1], op.pad[3]),
                        padded(in.c, op.pad_c[0], op.pad_c[1]));
        }
        case OpKind::quantize:
        case OpKind::affine:
        case OpKind::dequantize:
        case OpKind::clip:
        case OpKind::softmax:
            return in;
        }
        return in;
    }

    Shape add(const Op &op) const {
        Shape a = shapes_[size_t(op.inputs[0])], b = shapes_[size_t(op.inputs[1])];
        if (differ(a.h, b.h) || differ(a.w, b.w) || differ(a.c, b.c))
            fail(op, "adds " + show(a) + " and " + show(b) + "; equal shapes are needed");
        return Shape{a.n, a.h ? a.h : b.h, a.w ? a.w : b.w, a.c ? a.c : b.c};
    }

    Shape concat(const Op &op) const {
        Shape all = shapes_[size_t(op.inputs[0])];
        int64_t channels = 0;
        bool known = true;
        for (int input : op.inputs) {
            Shape shape = shapes_[size_t(input)];
            if (differ(shape.h, all.h) || differ(shape.w, all.w))
                fail(op, "joins " + show(all) + " and " + show(shape) + "; equal H and W are needed");
            all.h = all.h ? all.h : shape.h;
            all.w = all.w ? all.w : shape.w;
            known = known && shape.c;
            channels += shape.c;
        }
        return checked("op '" + op.name + "'", all.n, all.h, all.w, known ? channels : 0);
    }

    Shape flatten(const Op &op, const Shape &in) const {
        // checked() limited H W C to below 2^40, so the product fits.
        int64_t channels = int64_t(in.h) * in.w * in.c;
        return checked("op '" + op.name + "'", in.n, 1, 1, channels);
    }

    const Graph &graph_;
    std::vector<Shape> shapes_;
};

} // namespace

std::vector<Shape> infer_partial_shapes(const Graph &graph, int n, int h, int w) {
    return Inference(graph, n, h, w).take();
}

std::vector<Shape> infer_shapes(const Graph &graph, int n, int h, int w) {
    auto allowed = [](int size) { return size ? std::to_string(size) : std::string("any size"); };
    if (n < 1 || h < 1 || w < 1 || (graph.input_h && h != graph.input_h) || (graph.input_w && w != graph.input_w))
        throw InputError("an input of " + std::to_string(n) + " images of " + std::to_string(h) + " x " +
                         std::to_string(w) + " pixels is not what the model takes: 1 or more of " +
                         allowed(graph.input_h) + " x " + allowed(graph.input_w));
    return infer_partial_shapes(graph, n, h, w);
}

} // namespace anyprec
