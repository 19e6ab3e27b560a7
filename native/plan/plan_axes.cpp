// Steps of format 3's operations (plan_builder.h): which values share memory, which are constants, and the loops of
// transposes, broadcasts, reductions and matrix products. ARITHMETIC.md, section 8.
#include <algorithm>

#include "plan/plan_builder.h"

namespace anyprec {

// --- Memory -------------------------------------------------------------------------------------------------------

// Whether the numbers stay in their order: a reshape, or a transpose that only moves axes of size 1, or a slice of all.
bool Builder::acts_as_reshape(const Op &op) const {
    if (op.kind == OpKind::reshape)
        return true;
    if (op.kind == OpKind::transpose)
        return permutation(shape(op.inputs[0]), op.axes.data()).is_plain();
    if (op.kind != OpKind::slice)
        return false;
    const int size = shape(op.inputs[0]).size[op.axis];
    return slice_range(op, size).count == size;
}

void Builder::find_roots() {
    const size_t values = graph.ops.size() + 1;
    root.resize(values);
    zeros.assign(values, 0);
    for (size_t v = 0; v < values; ++v) {
        root[v] = static_cast<int>(v);
        if (v && acts_as_reshape(graph.ops[v - 1]))
            root[v] = root[static_cast<size_t>(graph.ops[v - 1].inputs[0])];
        size_t &most = zeros[static_cast<size_t>(root[v])];
        most = std::max(most, pixel_bytes(static_cast<int>(v)));
    }
}

// The numbers of a value that is a constant, perhaps reshaped; nullptr: it is none.
const float *Builder::constant_of(int value) const {
    const int from = root[static_cast<size_t>(value)];
    if (from == 0 || op_of(from).kind != OpKind::constant)
        return nullptr;
    return graph.weights[static_cast<size_t>(op_of(from).weight)].values;
}

// Whether some op reads a constant, or a reshape of it, from the arena.
bool Builder::needs_memory(int constant) const {
    for (size_t v = 0; v < root.size(); ++v) {
        if (root[v] != constant)
            continue;
        if (is_output[v])
            return true;
        for (int reader : readers[v])
            if (!reads_constants(graph.ops[static_cast<size_t>(reader)]) &&
                root[static_cast<size_t>(reader) + 1] != constant)
                return true;
    }
    return false;
}

// --- Steps --------------------------------------------------------------------------------------------------------

void Builder::axes_step(int number, Step &s, int step) {
    const Op &op = graph.ops[static_cast<size_t>(number)];
    switch (s.kind) {
    case Step::Kind::constant:
    case Step::Kind::embedding:
        s.weight = graph.weights[static_cast<size_t>(op.weight)].values;
        s.weight_rows = graph.weights[static_cast<size_t>(op.weight)].shape[0];
        break;
    case Step::Kind::transpose:
        s.permutation = permutation(s.input_shapes[0], op.axes.data());
        break;
    case Step::Kind::binary:
        s.broadcast = broadcast(s.input_shapes[0], s.input_shapes[1], s.shape.rank, 1, 1);
        break;
    case Step::Kind::reduce:
    case Step::Kind::norm:
        reduce_step(s, step);
        break;
    case Step::Kind::matmul:
        matmul_step(s, step);
        break;
    case Step::Kind::recurrent:
        recurrent_step(s, step);
        break;
    default:
        break;
    }
}

void Builder::matmul_step(Step &s, int step) {
    const Shape &a = s.input_shapes[0], &b = s.input_shapes[1];
    const int leading = a.rank - 2;
    auto p = std::make_shared<MatmulStep>();
    p->m = a.size[leading];
    p->k = a.size[leading + 1];
    p->n = s.shape.c();
    p->matrices = broadcast(a, b, leading, static_cast<size_t>(p->m) * static_cast<size_t>(p->k),
                            static_cast<size_t>(p->k) * static_cast<size_t>(p->n));
    s.matmul = p;
    if (has_codes(s.op->inputs[0]))
        return codes_product_step(s, step);
    constexpr int kFewRows = 12; // fewer rows are done before the second matrix is packed
    p->packs = s.op->transposed || p->m > kFewRows;
    if (p->packs) {
        const int width = kernels.functions->matmul_width;
        p->panels = (p->n + width - 1) / width;
        p->panel_floats = static_cast<size_t>(p->k) * static_cast<size_t>(width);
        p->packed_count = static_cast<size_t>(b.product(0, leading));
        p->packed_images = s.constants[1] ? 1 : plan.images;
        const size_t bytes = 4 * p->panel_floats * static_cast<size_t>(p->panels) * p->packed_count;
        if (bytes >= size_t(1) << 33)
            too_large(static_cast<int>(s.op - graph.ops.data()) + 1, bytes);
        p->scratch = scratch(bytes * static_cast<size_t>(p->packed_images), step);
    }
}

// [outer][terms], or [outer][terms][inner] where the last axis is none of `axes`.
void Builder::reduce_step(Step &s, int step) {
    const Shape &in = s.input_shapes[0];
    const std::vector<int> &axes = s.op->axes;
    const auto reduced = [&](int axis) { return std::find(axes.begin(), axes.end(), axis) != axes.end(); };
    auto p = std::make_shared<ReduceStep>();
    p->rows = axes.back() == in.rank - 1;
    int first_inner = in.rank; // axes from here on are `inner`
    while (!p->rows && !reduced(first_inner - 1))
        --first_inner;
    int order[MAX_AXES], count = 0;
    for (int i = 0; i < first_inner; ++i)
        if (!reduced(i)) {
            order[count++] = i;
            p->outer *= static_cast<size_t>(in.size[i]);
        }
    for (int axis : axes) {
        order[count++] = axis;
        p->terms *= static_cast<size_t>(in.size[axis]);
    }
    for (int i = first_inner; i < in.rank; ++i) {
        order[count++] = i;
        p->inner *= static_cast<size_t>(in.size[i]);
    }
    p->there = permutation(in, order);
    p->copies = !p->there.is_plain();
    if (p->copies) {
        p->back = inverse(in, order);
        p->scratch_image = (4 * p->outer * p->terms * p->inner + 63) / 64 * 64;
        p->scratch = scratch(p->scratch_image * static_cast<size_t>(plan.images), step);
    }
    s.reduce = p;
}

void Builder::recurrent_step(Step &s, int step) {
    const Weight &weight = graph.weights[static_cast<size_t>(s.op->weight)];
    auto p = std::make_shared<RecurrentStep>();
    p->panel = panels(s.op->weight, FLOAT_BITS, nullptr, 0, {});
    p->hidden = weight.shape[3] - 1;
    p->gates = weight.shape[0];
    p->length = s.shape.size[s.shape.rank - 2];
    p->sequences = static_cast<int>(s.shape.product(0, s.shape.rank - 2));
    p->scratch = scratch(4 * (static_cast<size_t>(p->gates) + static_cast<size_t>(p->hidden)) *
                             static_cast<size_t>(plan.images) * static_cast<size_t>(p->sequences),
                         step);
    s.recurrent = p;
}

} // namespace anyprec
