// See plan.h and plan_builder.h. In reading order: all ops, ops with a step of their own, memory.
#include "plan/plan.h"

#include <algorithm>
#include <limits>

#include "plan/plan_builder.h"

namespace anyprec {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Builder::Builder(const Graph &g, int profile_number, const std::vector<Shape> &inputs, const Kernels &k,
                 const PanelSource &p, PlanPart plan_part, const SharedPrefix *shared_prefix)
    : graph(g), profile(g.profiles[static_cast<size_t>(profile_number)]), row(static_cast<size_t>(profile_number)),
      kernels(k), panels(p), part(plan_part), prefix(shared_prefix) {
    plan.images = inputs[0].n;
    plan.shapes = infer_shapes(g, inputs);
    for (size_t v = 0; v < plan.shapes.size(); ++v) { // so that pixels and byte offsets fit 32 bits
        const int64_t pixels = plan.shapes[v].pixels();
        if (pixels >= int64_t(1) << 31 || (pixels + 1) * plan.shapes[v].c() >= int64_t(1) << 31)
            too_large(static_cast<int>(v), static_cast<uint64_t>(pixels) * plan.shapes[v].c());
    }
}

Plan Builder::build() {
    const size_t values = graph.ops.size() + 1;
    readers.resize(values);
    is_output.assign(values, false);
    fused.assign(graph.ops.size(), false);
    plan.buffers.resize(values);
    for (size_t i = 0; i < graph.ops.size(); ++i)
        for (int input : graph.ops[i].inputs)
            readers[static_cast<size_t>(input)].push_back(static_cast<int>(i));
    for (int value : graph.outputs)
        is_output[static_cast<size_t>(value)] = true;
    for (size_t v = 0; v < values; ++v)
        plan.codes.push_back(has_codes(static_cast<int>(v)));

    find_roots();
    find_kept();
    pad_input();
    for (size_t v = 0; v < values; ++v)
        if (is_given(static_cast<int>(v)))
            use(0, buffer(static_cast<int>(v))); // the caller writes them before the first step
    for (size_t i = 0; i < graph.ops.size(); ++i) {
        const OpKind kind = graph.ops[i].kind;
        if (fused[i] || kind == OpKind::input || root[i + 1] != static_cast<int>(i) + 1)
            continue; // or only another view of a value
        if (kind == OpKind::constant && !needs_memory(static_cast<int>(i) + 1))
            continue;
        if (is_rest() && kind != OpKind::constant && prefix->shared[i + 1])
            continue;
        if (part == PlanPart::split_prefix && !prefix->shared[i + 1])
            continue;
        if (kind == OpKind::conv || kind == OpKind::linear)
            conv_step(static_cast<int>(i));
        else
            plain_step(static_cast<int>(i));
    }
    if (part != PlanPart::split_prefix)
        for (int value : graph.outputs) // the caller reads them after the last step
            use(step_number(), buffer(value));
    if (part == PlanPart::keeping || part == PlanPart::split_prefix)
        for (int value : plan.kept)
            use(step_number(), buffer(value));
    overwrite_residuals();
    lay_out();
    ConvStep *before = nullptr;
    for (const Step &s : plan.steps) {
        if (s.recurrent) {
            plan.panels.push_back(s.recurrent->panel);
            plan.panel_bytes += s.recurrent->panel->held();
        }
        if (s.conv) {
            plan.panels.push_back(s.conv->panel);
            plan.panel_bytes += s.conv->panel->held();
            if (before)
                before->next = s.conv->panel.get();
            before = s.conv.get();
            if (s.conv->winograd)
                plan.table_bytes += 4 * s.conv->winograd->grid.size();
        }
    }
    plan.table_bytes += taps.bytes_in_use();
    return std::move(plan);
}

// Kept values are not fused with what follows, in `rest` as in `keeping`: so their buffers have the same layout. A plan
// has its own constants.
void Builder::find_kept() {
    if (part == PlanPart::whole)
        return;
    for (int value : prefix->kept)
        if (!constant_of(value)) {
            plan.kept.push_back(value);
            is_output[static_cast<size_t>(value)] = true;
        }
}

bool Builder::is_given(int value) const {
    if (is_rest())
        return std::find(plan.kept.begin(), plan.kept.end(), value) != plan.kept.end();
    return value < static_cast<int>(graph.input_count());
}

// --- Steps --------------------------------------------------------------------------------------------------------

Step &Builder::add_step(Step::Kind kind, const Op *op) {
    plan.steps.push_back({});
    plan.steps.back().kind = kind;
    plan.steps.back().op = op;
    return plan.steps.back();
}

void Builder::plain_step(int number) {
    const Op &op = graph.ops[static_cast<size_t>(number)];
    using Kind = Step::Kind;
    Kind kind = Kind::elementwise;
    switch (op.kind) {
    case OpKind::dequantize:
        kind = has_codes(op.inputs[0]) ? Kind::dequantize : Kind::elementwise;
        break;
    case OpKind::concat:
        kind = Kind::concat;
        break;
    case OpKind::max_pool:
        kind = Kind::max_pool;
        break;
    case OpKind::avg_pool:
    case OpKind::adaptive_avg_pool:
        kind = Kind::avg_pool;
        break;
    case OpKind::resize:
        kind = Kind::resize;
        break;
    case OpKind::softmax:
        kind = op.single ? Kind::softmax_single : Kind::softmax;
        break;
    case OpKind::flatten:
        kind = Kind::flatten;
        break;
    case OpKind::pad:
        kind = Kind::pad;
        break;
    case OpKind::constant:
        kind = Kind::constant;
        break;
    case OpKind::transpose:
        kind = Kind::transpose;
        break;
    case OpKind::slice:
    case OpKind::gather:
        kind = Kind::pick;
        break;
    case OpKind::pointwise:
        kind = Kind::pointwise;
        break;
    case OpKind::binary:
        kind = Kind::binary;
        break;
    case OpKind::reduce:
        kind = Kind::reduce;
        break;
    case OpKind::norm:
        kind = Kind::norm;
        break;
    case OpKind::matmul:
        kind = Kind::matmul;
        break;
    case OpKind::embedding:
        kind = Kind::embedding;
        break;
    case OpKind::recurrent:
        kind = Kind::recurrent;
        break;
    default:
        break;
    }
    const int step = step_number();
    Step &s = add_step(kind, &op);
    for (int input : op.inputs) {
        const float *constant = reads_constants(op) ? constant_of(input) : nullptr;
        s.constants.push_back(constant);
        s.inputs.push_back(constant ? Buffer() : buffer(input));
        s.input_shapes.push_back(shape(input));
        if (!constant)
            use(step, s.inputs.back());
    }
    s.out = buffer(number + 1);
    s.shape = shape(number + 1);
    s.codes = has_codes(number + 1);
    write(step, s, s.out);
    plain_epilogue(number, s);
    axes_step(number, s, step);
}

void Builder::plain_epilogue(int number, Step &s) const {
    const Op &op = graph.ops[static_cast<size_t>(number)];
    const int channels = s.shape.c();
    Epilogue &e = s.epilogue;
    if (op.kind == OpKind::affine) {
        set_scale(op, channels, e.scale, e.shift);
    } else if (op.kind == OpKind::clip) {
        set_clip(number, e.clip_first, e.low_first, e.high_first);
    } else if (op.kind == OpKind::quantize && s.codes) {
        set_codes(number, channels, e);
    } else if (op.kind == OpKind::quantize) {
        set_scale(op, channels, e.scale, e.shift);
        if (op.rectify)
            set_clip(number, e.clip_first, e.low_first, e.high_first);
    } else if (s.kind == Step::Kind::dequantize) {
        s.scale.assign(static_cast<size_t>(channels), table(op)[0]);
        s.shift.assign(static_cast<size_t>(channels), table(op)[1]);
        s.row_step = row_step(number + 1);
    }
}

// A shortcut of stride 2 is often all that reads a value, and skips every second row.
int Builder::row_step(int value) const {
    const int reader = sole_reader(value);
    if (reader < 0 || !shape(value).is_image())
        return 1;
    const Op &o = graph.ops[static_cast<size_t>(reader)];
    const bool skips = o.kind == OpKind::conv && !o.transposed && o.kernel[0] == 1 && o.pad[0] == 0 && o.pad[2] == 0;
    return skips ? o.stride[0] : 1;
}

void Builder::set_scale(const Op &op, int channels, const float *&scale, const float *&shift) const {
    if (!op.affine)
        return;
    scale = table(op);
    shift = scale + channels;
}

// A clip, or in a float profile a quantize with `rectify`.
void Builder::set_clip(int op, bool &on, float &low, float &high) const {
    const Op &o = graph.ops[static_cast<size_t>(op)];
    on = true;
    low = o.kind == OpKind::clip ? table(o)[0] : 0.0f;
    high = o.kind == OpKind::clip ? table(o)[1] : kInfinity;
}

void Builder::set_codes(int quantize, int channels, Epilogue &e) const {
    e.levels = static_cast<float>((1 << act_bits(quantize)) - 1);
    set_scale(graph.ops[static_cast<size_t>(quantize)], channels, e.code_scale, e.code_shift);
}

// --- Memory -------------------------------------------------------------------------------------------------------

void Builder::too_large(int value, uint64_t bytes) const {
    throw InputError("one image of '" + (value ? op_of(value).name : std::string("input")) + "' would take " +
                     std::to_string(bytes >> 20) + " MiB; the engine holds at most 2048, give a smaller image");
}

Buffer Builder::make_buffer(int value, size_t bytes, int pixels, size_t shift) {
    Buffer p;
    p.pixels = pixels;
    p.pixel = bytes;
    p.shift = shift;
    p.image = (shift + bytes * (static_cast<size_t>(p.pixels) + 1) + 63) / 64 * 64;
    if (p.image >= size_t(1) << 31)
        too_large(value, p.image);
    // Kernels read whole steps: up to 127 bytes past the last pixel.
    p.offset = memory.add(p.image * static_cast<size_t>(plan.images) + 128);
    return p;
}

// The buffer of a value, made on first use.
Buffer Builder::buffer(int value) {
    Buffer &p = plan.buffers[static_cast<size_t>(value)];
    if (p.pixel)
        return p;
    const int from = root[static_cast<size_t>(value)];
    const size_t bytes = pixel_bytes(value), shift = zeros[static_cast<size_t>(from)] - bytes;
    const int pixels = static_cast<int>(shape(value).pixels());
    if (from == value)
        return p = make_buffer(value, bytes, pixels, shift);
    p = buffer(from);
    p.pixel = bytes;
    p.pixels = pixels;
    p.shift = shift;
    return p;
}

// Memory for the duration of one step.
size_t Builder::scratch(size_t bytes, int step) {
    const size_t object = memory.add(bytes);
    memory.use(object, step);
    return object;
}

void Builder::write(int number, Step &step, const Buffer &p) {
    use(number, p);
    step.zero_rows.push_back({p.offset, p.image, p.shift + p.pixel});
}

// Calls body(offset) for every arena offset in a plan, and of_buffer(buffer) for those in buffers.
template <typename Body, typename OfBuffer> void over_offsets(Plan &plan, Body body, OfBuffer of_buffer) {
    const auto visit = [&](Buffer &p) {
        if (p.pixel)
            of_buffer(p);
    };
    for (Buffer &p : plan.buffers)
        visit(p);
    for (Step &s : plan.steps) {
        for (Buffer &p : s.inputs)
            visit(p);
        visit(s.out);
        for (ZeroRow &zeros : s.zero_rows)
            body(zeros.offset);
        if (s.matmul && s.matmul->packs)
            body(s.matmul->scratch);
        if (s.matmul && s.matmul->codes) {
            CodesProduct &p = *s.matmul->codes;
            body(p.panels);
            if (p.column_factor)
                body(p.columns);
            if (p.window_factor)
                body(p.windows);
            if (p.wide)
                body(p.widened);
        }
        if (s.reduce && s.reduce->copies)
            body(s.reduce->scratch);
        if (s.recurrent)
            body(s.recurrent->scratch);
        if (s.prepare)
            for (Buffer *p : {&s.prepare->from, &s.prepare->to, &s.prepare->sums})
                visit(*p);
        if (!s.conv)
            continue;
        for (Buffer *p : {&s.conv->input, &s.conv->sums, &s.conv->residual, &s.conv->out, &s.conv->codes})
            visit(*p);
        if (s.conv->sums.pixel)
            body(s.conv->windows);
        if (s.conv->winograd) {
            body(s.conv->winograd->transformed);
            body(s.conv->winograd->sums);
        }
        if (s.conv->toom_cook)
            body(s.conv->toom_cook->memory);
        if (s.conv->fused_pool) {
            visit(s.conv->fused_pool->out);
            body(s.conv->fused_pool->lines);
        }
    }
}

// Lets a convolution write over its residual, where it is the last reader of the residual.
void Builder::overwrite_residuals() {
    for (size_t i = 0; i < plan.steps.size(); ++i) {
        const ConvStep *conv = plan.steps[i].conv.get();
        if (!conv || !conv->has_residual || !conv->has_out)
            continue;
        // Not where the convolution also reads it as input: neighboring pixels would see the sum. Reshaped values may
        // have their pixels at different places in objects of one size.
        const size_t old = conv->out.offset, now = conv->residual.offset;
        const bool same_place = conv->out.shift == 0 && conv->residual.shift == 0;
        if (same_place && conv->input.offset != now && memory.hand_over(now, old, static_cast<int>(i))) {
            const auto hand_over = [&](size_t &offset) { offset = offset == old ? now : offset; };
            over_offsets(plan, hand_over, [&](Buffer &p) { hand_over(p.offset); });
        }
    }
}

void Builder::lay_out() {
    plan.arena_bytes = memory.lay_out();
    over_offsets(
        plan, [&](size_t &offset) { offset = memory.offset(offset); },
        [&](Buffer &p) { p.offset = memory.offset(p.offset) + p.shift; });
}

Plan make_plan(const Graph &graph, int profile, const std::vector<Shape> &inputs, const Kernels &kernels,
               const PanelSource &panels, PlanPart part, const SharedPrefix *prefix) {
    const Graph &cut = part == PlanPart::whole ? graph : prefix->graph;
    return Builder(cut, profile, inputs, kernels, panels, part, prefix).build();
}

} // namespace anyprec
