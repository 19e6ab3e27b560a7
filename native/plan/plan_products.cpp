// Products of two values of codes (plan_builder.h): ARITHMETIC.md, section 8.6. The second value takes the part of a
// layer's weights: it is packed, at run time, into the panel of a tile kernel (kernels.h), and the first value's rows
// are its pixels.
#include <algorithm>

#include "plan/kernel_selection.h"
#include "plan/plan_builder.h"

namespace anyprec {
namespace {

size_t whole_lines(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}

} // namespace

// With na, nb the largest codes, W the sum of a row's codes and S that of a column's, a kernel gives
//     T = sum a (2b - nb), and from that
//     signed x signed       sum (2a - na)(2b - nb)  = 2T - 2 na S + na nb K
//     unsigned x signed     sum a (2b - nb)         = T
//     signed x unsigned     2 sum (2a - na) b       = 2T - 2 na S + 2 nb W
//     unsigned x unsigned   2 sum a b               = T + nb W
// where twice the sum meets half of the scale. With Coding::offset8, T is 2 acc + W; with
// Coding::codes8, 2 acc - nb W. With Coding::centered16 the panel
// holds what the second value's codes stand for, and a kernel that reads 16-bit integers is given what those of the
// first stand for: no correction is left.
void Builder::codes_product_step(Step &s, int step) {
    const int left = op_of(s.op->inputs[0]).quantizer, right = op_of(s.op->inputs[1]).quantizer;
    const int left_bits = act_bits(left), right_bits = act_bits(right);
    MatmulStep &m = *s.matmul;
    if (!product_fits(m.k, left_bits, right_bits))
        throw InputError("the product '" + s.op->name + "' would sum " + std::to_string(m.k) + " terms of " +
                         std::to_string(left_bits) + " x " + std::to_string(right_bits) +
                         " bits, which 32-bit integers do not hold; give a smaller input, or fewer bits");
    auto p = std::make_shared<CodesProduct>();
    p->kernel = choose_product_kernel(kernels, m.m, m.k, m.n, {right_bits, left_bits});
    const TileKernel &kernel = *p->kernel;
    p->steps = (m.k + kernel.step_channels - 1) / kernel.step_channels;
    p->blocks = cut_blocks(kernel, m.n, 1, p->steps);
    p->bits = right_bits;
    p->wide = kernel.input == Input::wide;
    p->row = static_cast<size_t>(m.k) * (p->wide ? 2 : 1);
    for (size_t r = 0; r < kMaxRows; ++r)
        p->row_offsets[r] = static_cast<int32_t>(r * p->row);

    const bool left_signed = graph.ops[static_cast<size_t>(left)].is_signed;
    const bool right_signed = graph.ops[static_cast<size_t>(right)].is_signed;
    const int na = (1 << left_bits) - 1, nb = (1 << right_bits) - 1, twice = left_signed ? 2 : 1;
    const bool exact = right_signed || kernel.coding == Coding::centered16; // not twice the sum
    p->left = {left_signed ? 2 : 1, left_signed ? -na : 0};
    p->right = {right_signed ? 2 : 1, right_signed ? -nb : 0};
    if (!p->wide) {
        p->doublings = (kernel.window ? 1 : 0) + (left_signed ? 1 : 0);
        p->window_factor = twice * ((kernel.window ? window_factor(kernel, right_bits) : 0) + (exact ? 0 : nb));
        p->column_factor = left_signed ? (right_signed || !exact ? -2 : -1) * na : 0;
        p->constant = left_signed && right_signed ? na * nb * m.k : 0;
    }
    const size_t widest = static_cast<size_t>(kernel.lanes) << kernel.max_log2_vectors;
    p->scale.assign(widest, table(*s.op)[0] * (exact ? 1.0f : 0.5f));
    p->shift.assign(widest, table(*s.op)[1]);

    const Block &last = p->blocks.back();
    const size_t images = static_cast<size_t>(plan.images), leading = static_cast<size_t>(s.shape.rank - 2);
    p->left_count = static_cast<size_t>(s.input_shapes[0].product(0, static_cast<int>(leading)));
    p->right_count = static_cast<size_t>(s.input_shapes[1].product(0, static_cast<int>(leading)));
    p->panel_bytes =
        whole_lines(last.panel + static_cast<size_t>(p->steps) * (vector_bytes(kernel) << last.log2_vectors));
    const size_t rows = p->left_count * static_cast<size_t>(m.m), columns = static_cast<size_t>(m.n);
    const size_t bytes = std::max(p->panel_bytes * p->right_count, p->row * rows);
    if (bytes >= size_t(1) << 33)
        too_large(static_cast<int>(s.op - graph.ops.data()) + 1, bytes);
    p->panels = scratch(p->panel_bytes * p->right_count * images + 128, step);
    if (p->column_factor)
        p->columns = scratch(4 * columns * p->right_count * images, step);
    if (p->window_factor)
        p->windows = scratch(4 * rows * images, step);
    if (p->wide)
        p->widened = scratch(p->row * rows * images + 128, step);
    m.codes = p;
}

} // namespace anyprec
