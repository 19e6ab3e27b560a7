// See shapes.h. One function per kind of arithmetic on sizes. A size of 0 means "not known"; only infer_partial_shapes
// produces it.
#include "format/shapes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "format/format_limits.h"

namespace anyprec {
namespace {

std::string show(const Shape &shape) {
    std::string text = "(" + std::to_string(shape.n);
    for (int i = 0; i < shape.rank; i++)
        text += ", " + (shape.size[i] ? std::to_string(shape.size[i]) : std::string("free"));
    return text + ")";
}

[[noreturn]] void fail(const Op &op, const std::string &what) {
    throw InputError("op '" + op.name + "' " + what);
}

// Sizes in 64 bits, on their way to a Shape.
struct Sizes {
    int rank = 0;
    int64_t size[MAX_AXES + 1] = {};

    Sizes() = default;
    Sizes(std::initializer_list<int64_t> sizes) {
        for (int64_t each : sizes)
            size[rank++] = each;
    }
    explicit Sizes(const Shape &shape) : rank(shape.rank) { std::copy(shape.size, shape.size + rank, size); }
};

// Checks the dimensions and converts them to int.
Shape checked(const std::string &who, int64_t n, const Sizes &sizes) {
    Shape shape;
    int64_t count = 1;
    const auto check = [&](int64_t d) {
        if (d < 0 || d >= DIMENSION_LIMIT)
            throw InputError(who + " has a dimension of " + std::to_string(d) + "; 1 .. 2^31 - 1 are allowed");
        if (d > (COUNT_LIMIT - 1) / count)
            throw InputError(who + " has 2^40 elements or more");
        count *= d ? d : 1;
        return int(d);
    };
    if (sizes.rank > MAX_AXES)
        throw InputError(who + " has " + std::to_string(sizes.rank) + " axes; 6 are the most");
    shape.n = check(n);
    for (; shape.rank < sizes.rank; shape.rank++)
        shape.size[shape.rank] = check(sizes.size[shape.rank]);
    return shape;
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

// A transposed convolution, one axis: ARITHMETIC.md, section 8.1.
int64_t transposed_output(const Op &op, int axis, int64_t in) {
    const int64_t stride = op.stride[axis], reach = int64_t(op.dilation[axis]) * (op.kernel[axis] - 1) + 1;
    if (op.output_pad[axis] >= std::max(op.stride[axis], op.dilation[axis]))
        fail(op, "has output_pad " + std::to_string(op.output_pad[axis]) + "; it must be below stride or dilation");
    if (reach >= DIMENSION_LIMIT)
        fail(op, "has windows that need 2^31 or more pixels");
    if (in == 0)
        return 0;
    const int64_t out = (in - 1) * stride - op.pad[axis] - op.pad[axis + 2] + reach + op.output_pad[axis];
    if (out < 1)
        fail(op, "makes nothing of " + std::to_string(in) + " pixels; use a larger input");
    return out;
}

// Limits the outputs of a convolution: padding could make more pixels than fit in memory.
void check_taps(const Op &op, int64_t pixels) {
    const int64_t taps = int64_t(op.kernel[0]) * op.kernel[1];
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

// What an axis of two values becomes, of which one may be repeated. Of an unknown and a known size, the unknown one
// turns out to be 1 or the same.
int repeated(const Op &op, int a, int b, int axis) {
    if (a == b || b == 1)
        return a;
    if (a == 1 || !a)
        return b;
    if (b)
        fail(op, "joins sizes " + std::to_string(a) + " and " + std::to_string(b) + " of axis " + std::to_string(axis) +
                     "; equal ones are needed, or 1");
    return a;
}

class Inference {
  public:
    Inference(const Graph &graph, const std::vector<Shape> &inputs) : graph_(graph) {
        shapes_.reserve(graph.ops.size() + 1);
        for (size_t i = 0; i < inputs.size(); i++)
            shapes_.push_back(
                checked(i ? "the input '" + graph.input_name(i) + "'" : "the input", inputs[i].n, Sizes(inputs[i])));
        for (size_t i = inputs.size() - 1; i < graph.ops.size(); i++)
            shapes_.push_back(shape_of(graph.ops[i]));
    }

    std::vector<Shape> take() { return std::move(shapes_); }

  private:
    Shape made(const Op &op, const Sizes &sizes) const { return checked("op '" + op.name + "'", shapes_[0].n, sizes); }
    const Shape &input(const Op &op, size_t i = 0) const { return shapes_[size_t(op.inputs[i])]; }

    Shape shape_of(const Op &op) const {
        switch (op.kind) {
        case OpKind::conv:
        case OpKind::max_pool:
        case OpKind::avg_pool:
        case OpKind::adaptive_avg_pool:
        case OpKind::resize:
        case OpKind::flatten:
        case OpKind::pad:
            return of_images(op);
        case OpKind::linear:
            return linear(op);
        case OpKind::add:
            return add(op);
        case OpKind::concat:
            return concat(op);
        case OpKind::constant:
        case OpKind::input:
            return made(op, Sizes(op.shape));
        case OpKind::reshape:
            return reshape(op);
        case OpKind::transpose:
            return transpose(op);
        case OpKind::slice:
        case OpKind::gather:
            return along_axis(op);
        case OpKind::binary:
            return binary(op);
        case OpKind::reduce:
        case OpKind::norm:
            return over_axes(op);
        case OpKind::matmul:
            return matmul(op);
        case OpKind::embedding: {
            Sizes sizes(input(op));
            sizes.size[sizes.rank++] = graph_.weights[size_t(op.weight)].shape[3];
            return made(op, sizes);
        }
        case OpKind::recurrent:
            return recurrent(op);
        case OpKind::quantize:
        case OpKind::affine:
        case OpKind::dequantize:
        case OpKind::clip:
        case OpKind::softmax:
        case OpKind::pointwise:
            return input(op);
        }
        return input(op);
    }

    Shape of_images(const Op &op) const {
        const Shape &in = input(op), &like = op.like >= 0 ? shapes_[size_t(op.like)] : in;
        if (!in.is_image() || !like.is_image())
            fail(op, "reads " + show(in.is_image() ? like : in) + "; it takes images (three axes besides N)");
        switch (op.kind) {
        case OpKind::conv: {
            const Weight &weight = graph_.weights[size_t(op.weight)];
            check_channels(op, in);
            const auto size = [&](int axis) {
                return op.transposed ? transposed_output(op, axis, in.size[axis])
                                     : window_output(op, axis, in.size[axis], false);
            };
            const int64_t h = size(0), w = size(1);
            const Shape out = made(op, {h, w, weight.shape[0]});
            check_taps(op, out.pixels());
            return out;
        }
        case OpKind::max_pool:
        case OpKind::avg_pool:
            return made(op, {window_output(op, 0, in.h(), true), window_output(op, 1, in.w(), true), in.c()});
        case OpKind::adaptive_avg_pool:
            return made(op, {op.size[0], op.size[1], in.c()});
        case OpKind::resize:
            return made(op, {resize_output(op, 0, in.h(), like.h()), resize_output(op, 1, in.w(), like.w()), in.c()});
        case OpKind::flatten: // checked() limited H W C to below 2^40, so the product fits
            return made(op, {1, 1, int64_t(in.h()) * in.w() * in.c()});
        default: { // pad
            auto padded = [](int64_t size, int before, int after) { return size ? size + before + after : 0; };
            return made(op, {padded(in.h(), op.pad[0], op.pad[2]), padded(in.w(), op.pad[1], op.pad[3]),
                             padded(in.c(), op.pad_c[0], op.pad_c[1])});
        }
        }
    }

    void check_channels(const Op &op, const Shape &in) const {
        const int64_t channels = int64_t(graph_.weights[size_t(op.weight)].shape[3]) * op.groups;
        if (in.c() && in.c() != channels)
            fail(op, "has weights for " + std::to_string(channels) + " channels, its input is " + show(in));
    }

    Shape linear(const Op &op) const {
        check_channels(op, input(op));
        Sizes sizes(input(op));
        sizes.size[sizes.rank - 1] = graph_.weights[size_t(op.weight)].shape[0];
        const Shape out = made(op, sizes);
        check_taps(op, out.pixels());
        return out;
    }

    Shape add(const Op &op) const {
        const Shape &a = input(op), &b = input(op, 1);
        bool equal = a.rank == b.rank;
        Sizes sizes(a);
        for (int i = 0; equal && i < a.rank; i++) {
            equal = !differ(a.size[i], b.size[i]);
            sizes.size[i] = a.size[i] ? a.size[i] : b.size[i];
        }
        if (!equal)
            fail(op, "adds " + show(a) + " and " + show(b) + "; equal shapes are needed");
        return made(op, sizes);
    }

    Shape concat(const Op &op) const {
        const Shape &first = input(op);
        Sizes all(first);
        const int axis = op.axis < 0 ? first.rank - 1 : checked_axis(op, op.axis, first);
        int64_t joined = 0;
        bool known = true;
        for (int value : op.inputs) {
            const Shape &shape = shapes_[size_t(value)];
            bool fits = shape.rank == first.rank;
            for (int i = 0; fits && i < first.rank; i++) {
                fits = i == axis || !differ(shape.size[i], int(all.size[i]));
                all.size[i] = all.size[i] ? all.size[i] : shape.size[i];
            }
            if (!fits)
                fail(op, "joins " + show(first) + " and " + show(shape) + "; all sizes but that of axis " +
                             std::to_string(axis) + " must be equal");
            known = known && shape.size[axis];
            joined += shape.size[axis];
        }
        all.size[axis] = known ? joined : 0;
        return made(op, all);
    }

    static int checked_axis(const Op &op, int axis, const Shape &in) {
        if (axis >= in.rank)
            fail(op, "names axis " + std::to_string(axis) + ", its input is " + show(in));
        return axis;
    }

    Shape reshape(const Op &op) const {
        const Shape &in = input(op);
        Sizes sizes(op.shape);
        const int64_t given = op.shape.product(0, op.shape.rank), count = in.product(0, in.rank);
        if (in.known()) {
            if (op.shape.known() ? count != given : count % given)
                fail(op, "cannot make " + show(in) + " that shape: the numbers do not come out even");
            for (int i = 0; i < sizes.rank; i++)
                sizes.size[i] = sizes.size[i] ? sizes.size[i] : count / given;
        }
        return made(op, sizes);
    }

    Shape transpose(const Op &op) const {
        const Shape &in = input(op);
        if (int(op.axes.size()) != in.rank)
            fail(op, "orders " + std::to_string(op.axes.size()) + " axes, its input is " + show(in));
        Sizes sizes(in);
        for (int i = 0; i < in.rank; i++)
            sizes.size[i] = in.size[op.axes[size_t(i)]];
        return made(op, sizes);
    }

    Shape along_axis(const Op &op) const { // slice, gather
        const Shape &in = input(op);
        const int axis = checked_axis(op, op.axis, in), size = in.size[axis];
        Sizes sizes(in);
        if (op.kind == OpKind::gather) {
            const int last = *std::max_element(op.index.begin(), op.index.end());
            if (size && last >= size)
                fail(op, "takes position " + std::to_string(last) + " of an axis of size " + std::to_string(size));
            sizes.size[axis] = int64_t(op.index.size());
        } else if (size) {
            sizes.size[axis] = slice_range(op, size).count;
            if (sizes.size[axis] < 1)
                fail(op, "takes nothing of an axis of size " + std::to_string(size));
        }
        return made(op, sizes);
    }

    Shape binary(const Op &op) const {
        const Shape &a = input(op), &b = input(op, 1);
        if (a.rank != b.rank)
            fail(op, "reads " + show(a) + " and " + show(b) + "; equally many axes are needed");
        Sizes sizes(a);
        for (int i = 0; i < a.rank; i++)
            sizes.size[i] = repeated(op, a.size[i], b.size[i], i);
        return made(op, sizes);
    }

    Shape over_axes(const Op &op) const { // reduce, norm
        const Shape &in = input(op);
        checked_axis(op, op.axes.back(), in);
        Sizes sizes(in);
        if (op.kind == OpKind::reduce)
            for (int axis : op.axes)
                sizes.size[axis] = 1;
        return made(op, sizes);
    }

    Shape matmul(const Op &op) const {
        const Shape &a = input(op), &b = input(op, 1);
        const int rank = a.rank;
        if (rank != b.rank || rank < 2)
            fail(op, "multiplies " + show(a) + " and " + show(b) + "; equally many axes are needed, at least 2");
        const int k = b.size[op.transposed ? rank - 1 : rank - 2], n = b.size[op.transposed ? rank - 2 : rank - 1];
        if (differ(a.c(), k))
            fail(op, "multiplies " + show(a) + " and " + show(b) + "; the axis that is summed differs");
        Sizes sizes(a);
        for (int i = 0; i < rank - 2; i++)
            sizes.size[i] = repeated(op, a.size[i], b.size[i], i);
        sizes.size[rank - 1] = n;
        return made(op, sizes);
    }

    Shape recurrent(const Op &op) const {
        const Shape &in = input(op);
        const Weight &weight = graph_.weights[size_t(op.weight)];
        if (in.rank < 2 || differ(in.c(), weight.shape[0]))
            fail(op, "reads " + show(in) + "; it takes (N, ..., L, " + std::to_string(weight.shape[0]) + ")");
        Sizes sizes(in);
        sizes.size[in.rank - 1] = weight.shape[3] - 1;
        return made(op, sizes);
    }

    const Graph &graph_;
    std::vector<Shape> shapes_;
};

} // namespace

SliceRange slice_range(const Op &op, int size) {
    const auto inside = [size](int64_t at) { return int(std::clamp<int64_t>(at < 0 ? at + size : at, 0, size)); };
    const int start = inside(op.start), stop = op.to_end ? size : inside(op.stop);
    return {start, start < stop ? (stop - start - 1) / op.step + 1 : 0};
}

std::vector<Shape> infer_partial_shapes(const Graph &graph) {
    std::vector<Shape> inputs;
    for (size_t i = 0; i < graph.input_count(); i++) {
        inputs.push_back(graph.input_shape(i));
        inputs.back().n = 1;
    }
    return Inference(graph, inputs).take();
}

std::vector<Shape> infer_shapes(const Graph &graph, const std::vector<Shape> &inputs) {
    if (inputs.size() != graph.input_count())
        throw InputError("the model takes " + std::to_string(graph.input_count()) + " input(s), not " +
                         std::to_string(inputs.size()));
    for (size_t i = 0; i < inputs.size(); i++) {
        const Shape &given = inputs[i], &wanted = graph.input_shape(i);
        bool fits = given.n >= 1 && given.n == inputs[0].n && given.rank == wanted.rank;
        for (int axis = 0; fits && axis < wanted.rank; axis++)
            fits = given.size[axis] >= 1 && !differ(given.size[axis], wanted.size[axis]);
        if (fits)
            continue;
        if (wanted.is_image() && given.is_image() && differ(given.c(), wanted.c()))
            throw InputError("images have " + std::to_string(given.c()) + " channels, the model takes " +
                             std::to_string(wanted.c()));
        if (inputs.size() == 1 && wanted.is_image() && given.is_image() && given.c() == wanted.c()) {
            auto allowed = [](int size) { return size ? std::to_string(size) : std::string("any size"); };
            throw InputError("an input of " + std::to_string(given.n) + " images of " + std::to_string(given.h()) +
                             " x " + std::to_string(given.w()) + " pixels is not what the model takes: 1 or more of " +
                             allowed(wanted.h()) + " x " + allowed(wanted.w()));
        }
        std::string sizes = i ? std::to_string(inputs[0].n) : std::string("N");
        for (int axis = 0; axis < wanted.rank; axis++)
            sizes += ", " + (wanted.size[axis] ? std::to_string(wanted.size[axis]) : std::string("any"));
        throw InputError("the input '" + graph.input_name(i) + "' is " + show(given) + ", the model takes (" + sizes +
                         ")");
    }
    return Inference(graph, inputs).take();
}

std::vector<Shape> infer_shapes(const Graph &graph, int n, int h, int w) {
    return infer_shapes(graph, {Shape(n, {h, w, graph.input.c()})});
}

} // namespace anyprec
