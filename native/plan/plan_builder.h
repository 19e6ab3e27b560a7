// Builder: makes a Plan op by op. In: the arguments of make_plan. Out: the plan, from build(). Convolutions and the ops
// fused with them are in plan_conv.cpp, operations of format 3 in plan_axes.cpp, everything else in plan.cpp.
#pragma once

#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/arena_planner.h"
#include "plan/kernel_selection.h"
#include "plan/plan.h"

namespace anyprec {

// What is fused into a convolution: op numbers, -1: none.
struct Fused {
    int clip_first = -1, add = -1, clip_second = -1, quantize = -1;
    int residual = -1; // value
    int value = 0;     // the float value after the fused ops
    bool store = true; // whether another op reads it
};

class Builder {
  public:
    Builder(const Graph &g, int profile_number, const std::vector<Shape> &inputs, const Kernels &k,
            const PanelSource &p, PlanPart plan_part, const SharedPrefix *shared_prefix);
    Plan build();

  private:
    const Graph &graph;
    const Profile &profile;
    const size_t row; // of this profile in every table
    const Kernels &kernels;
    const PanelSource &panels;
    const PlanPart part;
    const SharedPrefix *prefix;
    bool is_rest() const { return part == PlanPart::rest || part == PlanPart::split_rest; }
    Plan plan;
    TapTables taps;

    std::vector<std::vector<int>> readers; // by value: op numbers
    std::vector<bool> is_output;           // by value
    std::vector<bool> fused;               // by op
    std::vector<int> root;                 // by value: the value whose memory it has; itself, unless it is reshaped
    std::vector<size_t> zeros;             // by root: bytes of the largest pixel of zeros

    // Until all lifetimes are known, Buffer::offset is the number of an ArenaPlanner object.
    ArenaPlanner memory;
    std::map<std::tuple<int, int, int, int, const PixelPairs *>, Buffer>
        prepared;                                 // by value, Input, group, bits, pairs
    std::map<std::pair<int, int>, Buffer> summed; // by value, groups

    const Op &op_of(int value) const { return graph.ops[static_cast<size_t>(value - 1)]; }
    const Shape &shape(int value) const { return plan.shapes[static_cast<size_t>(value)]; }
    const float *table(const Op &op) const { return op.table ? op.table + row * op.table_row : nullptr; }
    int act_bits(int op) const { return profile.act_bits[static_cast<size_t>(op)]; }
    bool has_codes(int value) const { // in this profile
        return value > 0 && op_of(value).codes && act_bits(op_of(value).quantizer) != FLOAT_BITS;
    }

    // Steps
    int step_number() const { return static_cast<int>(plan.steps.size()); }
    Step &add_step(Step::Kind kind, const Op *op);
    void plain_step(int op);
    void plain_epilogue(int op, Step &step) const;
    int row_step(int value) const;
    void set_scale(const Op &op, int channels, const float *&scale, const float *&shift) const;
    void set_clip(int op, bool &on, float &low, float &high) const;
    void set_codes(int quantize, int channels, Epilogue &e) const;

    // Operations of format 3, in plan_axes.cpp
    bool acts_as_reshape(const Op &op) const;
    void find_roots();
    const float *constant_of(int value) const;
    bool reads_constants(const Op &op) const { return op.kind == OpKind::binary || op.kind == OpKind::matmul; }
    bool needs_memory(int constant) const;
    void axes_step(int op, Step &step, int number);
    void matmul_step(Step &step, int number);
    void codes_product_step(Step &step, int number); // plan_products.cpp
    void reduce_step(Step &step, int number);
    void recurrent_step(Step &step, int number);

    // Convolutions, in plan_conv.cpp
    int sole_reader(int value) const;
    bool acts_as_clip(int op) const;
    Fused fuse(int conv);
    void conv_step(int op);
    void pad_input();
    LayerBits layer_bits(const Op &op, int value) const;
    const Winograd *choose_integer_kernel(ConvStep &conv, LayerBits bits, const Shape &in, const Shape &out);
    void choose_algorithm(ConvStep &conv, int value, const Shape &in, const Shape &out, int pool);
    int fusible_pool(const Fused &a, const Shape &out) const;
    void plan_pool(ConvStep &conv, int pool, const Shape &out);
    void prepare(ConvStep &conv, int value, const Shape &in, const Shape &out);
    void sign_constants(ConvStep &conv, int weight_bits, int input_bits) const;
    void allocate_conv(ConvStep &conv, const Fused &a, Step &step, int number);
    void find_thresholds(ConvStep &conv, LayerBits bits) const;

    // The shared prefix
    void find_kept();
    bool is_given(int value) const; // by the caller, in the arena

    // Memory
    [[noreturn]] void too_large(int value, uint64_t bytes) const;
    Buffer buffer(int value);
    size_t pixel_bytes(int value) const { return static_cast<size_t>(shape(value).c()) * (has_codes(value) ? 1 : 4); }
    Buffer make_buffer(int value, size_t pixel_bytes, int pixels, size_t shift = 0);
    size_t scratch(size_t bytes, int step);
    void use(int step, const Buffer &p) { memory.use(p.offset, step); }
    void write(int number, Step &step, const Buffer &p); // with its pixel of zeros
    void overwrite_residuals();
    void lay_out();
};

} // namespace anyprec
