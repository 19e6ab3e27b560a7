// Convolutions of a plan (plan_builder.h): which ops are fused, which kernel computes it, the inputs prepared for that
// kernel, and the memory of everything.
#include <algorithm>
#include <map>

#include "plan/kernel_selection.h"
#include "plan/plan_builder.h"
#include "run/toom_cook.h"
#include "run/winograd.h"

namespace anyprec {

namespace {

// A linear reads values of any number of axes: a 1x1 convolution of one line of pixels.
Shape as_image(const Shape &shape) {
    return shape.is_image() ? shape : Shape(shape.n, {1, static_cast<int>(shape.pixels()), shape.c()});
}

} // namespace

// --- Fusion -------------------------------------------------------------------------------------------------------

int Builder::sole_reader(int value) const {
    const auto &list = readers[static_cast<size_t>(value)];
    return list.size() == 1 && !is_output[static_cast<size_t>(value)] ? list[0] : -1;
}

bool Builder::acts_as_clip(int op) const {
    const Op &o = graph.ops[static_cast<size_t>(op)];
    return o.kind == OpKind::clip ||
           (o.kind == OpKind::quantize && !o.affine && o.rectify && act_bits(op) == FLOAT_BITS);
}

Fused Builder::fuse(int conv) {
    Fused a;
    a.value = conv + 1;
    int next = sole_reader(a.value);
    const auto take = [&](int &slot) {
        slot = next;
        fused[static_cast<size_t>(next)] = true;
        a.value = next + 1;
        next = sole_reader(a.value);
    };
    if (next >= 0 && acts_as_clip(next))
        take(a.clip_first);
    if (next >= 0 && graph.ops[static_cast<size_t>(next)].kind == OpKind::add) {
        const std::vector<int> &inputs = graph.ops[static_cast<size_t>(next)].inputs;
        const int other = inputs[0] == a.value ? inputs[1] : inputs[0];
        if (other <= conv && inputs[0] != inputs[1]) { // computed before this convolution
            a.residual = other;
            take(a.add);
            if (next >= 0 && acts_as_clip(next))
                take(a.clip_second);
        }
    }
    const std::vector<int> &rest = readers[static_cast<size_t>(a.value)];
    for (int reader : rest)
        if (graph.ops[static_cast<size_t>(reader)].kind == OpKind::quantize && act_bits(reader) != FLOAT_BITS) {
            a.quantize = reader;
            fused[static_cast<size_t>(reader)] = true;
            break;
        }
    a.store = a.quantize < 0 || rest.size() > 1 || is_output[static_cast<size_t>(a.value)];
    return a;
}

// --- Algorithm and kernel -----------------------------------------------------------------------------------------

void Builder::pad_input() {
    const Shape in = as_image(shape(0));
    PaddedInput &f = plan.padded_input;
    f.height = in.h();
    f.width = in.w();
    const int reader = sole_reader(0);
    if (reader < 0 || graph.ops[static_cast<size_t>(reader)].kind != OpKind::conv)
        return;
    const Op &op = graph.ops[static_cast<size_t>(reader)];
    const Shape out = shape(reader + 1);
    if (op.groups > 1 || op.dilation[1] > 1 || op.transposed || uses_toom_cook(op))
        return;
    const auto reach = [&](int axis, int size) { // of the last window, in 64 bits: strides have no limit
        return static_cast<int64_t>(size - 1) * op.stride[axis] +
               static_cast<int64_t>(op.kernel[axis] - 1) * op.dilation[axis] + 1;
    };
    const int64_t height = std::max<int64_t>(op.pad[0] + static_cast<int64_t>(in.h()), reach(0, out.h()));
    const int64_t width = std::max<int64_t>(op.pad[1] + static_cast<int64_t>(in.w()), reach(1, out.w()));
    if (height > 2 * static_cast<int64_t>(in.h()) + 16 || width > 2 * static_cast<int64_t>(in.w()) + 16)
        return; // mostly padding
    if (height * width >= (int64_t(1) << 28) / in.c())
        return; // near the limit of a buffer
    f = {op.pad[0], op.pad[1], static_cast<int>(height), static_cast<int>(width), true};
    plan.buffers[0] = make_buffer(0, 4 * static_cast<size_t>(in.c()), f.height * f.width);
}

void Builder::conv_step(int number) {
    const Op &op = graph.ops[static_cast<size_t>(number)];
    const Weight &weight = graph.weights[static_cast<size_t>(op.weight)];
    const int value = op.inputs[0];
    const Shape in = as_image(shape(value)), out = as_image(shape(number + 1));
    const Fused a = fuse(number);

    auto conv = std::make_shared<ConvStep>();
    conv->op = &op;
    conv->integer = has_codes(value);
    conv->depthwise = op.groups > 1 && weight.shape[3] == 1 && weight.shape[0] == op.groups;
    conv->groups = op.groups;
    conv->group_in = weight.shape[3];
    conv->group_out = weight.shape[0] / op.groups;
    conv->taps = op.kernel[0] * op.kernel[1];
    conv->out_channels = out.c();
    conv->out_pixels = out.h() * out.w();
    conv->out_width = out.w();
    conv->in_width = in.w();
    conv->in_height = in.h();
    conv->phases = conv->integer && !conv->depthwise && has_phases(op);
    conv->has_residual = a.residual >= 0;
    if (conv->integer)
        conv->tap_pixels = taps.pixels(op, in, out, conv->phases);
    choose_algorithm(*conv, value, in, out, fusible_pool(a, out));

    Epilogue &e = conv->epilogue;
    set_scale(op, out.c(), e.scale, e.shift);
    if (a.clip_first >= 0)
        set_clip(a.clip_first, e.clip_first, e.low_first, e.high_first);
    if (a.clip_second >= 0)
        set_clip(a.clip_second, e.clip_second, e.low_second, e.high_second);
    if (a.quantize >= 0)
        set_codes(a.quantize, out.c(), e);

    const int step = step_number(); // after that of prepare
    Step &s = add_step(Step::Kind::conv, &op);
    allocate_conv(*conv, a, s, step);
    if (conv->integer)
        find_thresholds(*conv, layer_bits(op, value));
    s.conv = conv;
}

// The max pool that is the only reader of a convolution's result, if the result is too large for L2; -1: none.
int Builder::fusible_pool(const Fused &a, const Shape &out) const {
    const int reader = sole_reader(a.value);
    const bool large = 4 * static_cast<int64_t>(out.h()) * out.w() * out.c() >= 1 << 20;
    return large && a.quantize < 0 && a.residual < 0 && reader >= 0 &&
                   graph.ops[static_cast<size_t>(reader)].kind == OpKind::max_pool
               ? reader
               : -1;
}

void Builder::plan_pool(ConvStep &conv, int pool, const Shape &out) {
    constexpr size_t kBand = 256 << 10; // bytes, approximately
    conv.fused_pool = std::make_unique<FusedPool>();
    FusedPool &p = *conv.fused_pool;
    p.op = &graph.ops[static_cast<size_t>(pool)];
    p.from = out;
    p.shape = shape(pool + 1);
    const size_t line = 4 * static_cast<size_t>(out.w()) * out.c();
    const int reach = (p.op->kernel[0] - 1) * p.op->dilation[0] + 1, stride = p.op->stride[0];
    p.band = std::clamp((static_cast<int>(kBand / line) - reach) / stride + 1, 1, p.shape.h());
    const int more = conv.toom_cook ? 2 * (kToomCookOutputs - 1) : 0; // whole tiles at both ends
    p.bytes = line * static_cast<size_t>(std::min(out.h(), (p.band - 1) * stride + reach + more));
    // No more memory than the whole result would take.
    const size_t whole = line * static_cast<size_t>(out.h()) * static_cast<size_t>(plan.images);
    p.slots = static_cast<int>(std::min<size_t>(conv.toom_cook ? conv.toom_cook->slots : kSlots, whole / p.bytes));
    fused[static_cast<size_t>(pool)] = true;
}

// Chooses the kernel of an integer convolution. Whether splitting weights (split8) pays is known only after building
// the panel.
const Winograd *Builder::choose_integer_kernel(ConvStep &conv, LayerBits bits, const Shape &in, const Shape &out) {
    const Op &op = *conv.op;
    const Weight &weight = graph.weights[static_cast<size_t>(op.weight)];
    const Winograd *winograd = nullptr;
    for (const bool split : {true, false}) {
        conv.kernel = choose_kernel(kernels, op, weight, bits, split, conv.out_pixels, conv.has_residual);
        winograd = choose_winograd(kernels, op, bits, in, out, *conv.kernel);
        if (winograd || conv.kernel->coding != Coding::split8)
            break;
        constexpr size_t kFew = 5; // at most one step in five may be extra
        const auto panel = panels(op.weight, bits.weights, conv.kernel, op.groups, tap_order(op));
        const int group = conv.kernel->step_channels;
        const size_t steps = static_cast<size_t>((conv.group_in + group - 1) / group) * static_cast<size_t>(conv.taps);
        if (kFew * panel->extra.size() <= steps * panel->extras.size())
            break;
    }
    if (winograd)
        conv.kernel = &winograd->tile;
    return winograd;
}

// Of a convolution's weights, and of the codes it reads; value -1: floats.
LayerBits Builder::layer_bits(const Op &op, int value) const {
    return {profile.weight_bits[static_cast<size_t>(op.weight)], value < 0 ? 0 : act_bits(op_of(value).quantizer)};
}

// Chooses kernel, panel and tables, and sets the integer part of the epilogue. May fuse `pool`.
void Builder::choose_algorithm(ConvStep &conv, int value, const Shape &in, const Shape &out, int pool) {
    const Op &op = *conv.op;
    const LayerBits bits = layer_bits(op, conv.integer ? value : -1);
    Epilogue &e = conv.epilogue;
    if (conv.depthwise) {
        conv.input = buffer(value);
        const auto fits16 = [&] { return conv.taps * ((1 << bits.weights) - 1) * ((1 << bits.acts) - 1) <= INT16_MAX; };
        conv.fits16 = conv.integer && bits.weights < 8 && conv.taps <= kMostDepthwiseTaps && fits16();
        conv.panel = panels(op.weight, bits.weights, nullptr, op.groups, {});
        conv.offsets[0] = taps.offsets(op, in, out, kDepthwisePixels, conv.input.pixel, conv.out_pixels, false);
    } else {
        const bool toom_cook = !conv.integer && uses_toom_cook(op);
        const Winograd *winograd = nullptr;
        if (conv.integer)
            winograd = choose_integer_kernel(conv, bits, in, out);
        else
            conv.kernel = toom_cook                                   ? kernels.toom_cook
                          : kernels.float_row && conv.out_pixels == 1 ? kernels.float_row
                                                                      : kernels.floats;
        const TileKernel &kernel = *conv.kernel;
        if (toom_cook)
            conv.taps = kToomCookPoints * kToomCookPoints;
        const int pixels = toom_cook ? op.stride[0] * op.stride[1] : 1; // that count as one
        conv.steps = (pixels * conv.group_in + kernel.step_channels - 1) / kernel.step_channels;
        conv.blocks = cut_blocks(kernel, conv.group_out, winograd ? 16 : conv.taps, conv.steps);
        conv.panel =
            panels(op.weight, bits.weights, &kernel, op.groups, conv.phases ? tap_order(op) : std::vector<int>());
        if (conv.integer)
            prepare(conv, value, in, out);
        else
            conv.input = buffer(value);
        if (winograd)
            conv.winograd = plan_winograd(conv, *winograd, in, out, plan.images);
        if (toom_cook)
            conv.toom_cook = plan_toom_cook(conv, out, plan.images);
        if (toom_cook && conv.toom_cook->bytes >= size_t(1) << 31) // floats are counted in 32 bits
            too_large(value, conv.toom_cook->bytes);
        const bool in_pairs = kernel.input == Input::lookup_pairs;
        if (pool >= 0 && !winograd && !in_pairs && !conv.phases && conv.panel->bytes <= size_t(256) << 10)
            plan_pool(conv, pool, out);
        const int whole = conv.fused_pool ? out.w() : conv.out_pixels; // no tile crosses a multiple of it
        Op read = op;                                                  // what a tile reads
        Shape from = in;
        if (value == 0 && plan.padded_input.on) {
            conv.taps = op.kernel[0];
            conv.steps = conv.group_in * op.kernel[1];
            read.kernel[1] = 1;
            std::fill(read.pad, read.pad + 4, 0);
            from.size[0] = plan.padded_input.height;
            from.size[1] = plan.padded_input.width;
        }
        for (const Block &block : conv.blocks)
            if (kernel.algorithm == Algorithm::direct)
                conv.offsets[block.log2_vectors] =
                    taps.offsets(read, from, out, kernel.max_rows[block.log2_vectors], conv.input.pixel, whole,
                                 conv.integer, in_pairs, conv.phases);
        if (kernel.window) {
            e.doublings = 1;
            e.window_factor = window_factor(kernel, bits.weights);
        }
    }
    if (op.is_signed && conv.integer) {
        e.doublings += 1;
        e.window_factor *= 2;
        sign_constants(conv, bits.weights, bits.acts);
    }
}

// What a kernel reads instead of codes, and channel sums per pixel. Convolutions of the same value share them.
void Builder::prepare(ConvStep &conv, int value, const Shape &in, const Shape &out) {
    const TileKernel &kernel = *conv.kernel;
    const Buffer from = buffer(value);
    const bool other_form = kernel.input != Input::codes;
    const auto pairs = kernel.input == Input::lookup_pairs ? taps.pairs(*conv.op, in, out) : nullptr;
    const auto form =
        std::make_tuple(value, static_cast<int>(kernel.input), kernel.step_channels, kernel.max_act_bits, pairs.get());
    const auto sums = std::make_pair(value, conv.groups);
    const bool make_form = other_form && !prepared.count(form), make_sums = kernel.window && !summed.count(sums);
    if (make_form || make_sums) {
        auto p = std::make_shared<PrepareStep>();
        p->from = from;
        p->input = kernel.input;
        p->pairs = pairs;
        p->channels = in.c();
        p->groups = conv.groups;
        p->steps = conv.steps;
        p->group = kernel.step_channels;
        p->bits = kernel.max_act_bits;
        p->entry = lookup_entry(kernel);
        const int number = step_number();
        Step &step = add_step(Step::Kind::prepare, conv.op);
        use(number, from);
        if (make_form) {
            const size_t pixel = kernel.input == Input::wide ? 2 * static_cast<size_t>(p->channels)
                                                             : step_bytes(kernel) * static_cast<size_t>(conv.steps);
            prepared[form] = p->to =
                make_buffer(value, pixel, pairs ? static_cast<int>(pairs->all.size()) : in.h() * in.w());
            write(number, step, p->to);
        }
        if (make_sums) {
            summed[sums] = p->sums = make_buffer(value, 4 * static_cast<size_t>(conv.groups), in.h() * in.w());
            write(number, step, p->sums);
        }
        step.prepare = p;
    }
    conv.input = other_form ? prepared[form] : from;
    if (kernel.window)
        conv.sums = summed[sums];
}

// A signed code stands for 2 code - n. So the sum of weight times value is twice the sum of weight times code, minus n
// times the sum of the weights whose taps are inside the image.
void Builder::sign_constants(ConvStep &conv, int weight_bits, int input_bits) const {
    const Weight &weight = graph.weights[static_cast<size_t>(conv.op->weight)];
    const std::vector<uint8_t> codes = weight_codes(graph, weight, weight_bits, kernels);
    const std::vector<int> order = conv.phases ? tap_order(*conv.op) : std::vector<int>();
    const int count = conv.taps, out = weight.shape[0], in = weight.shape[3], levels = (1 << input_bits) - 1;
    std::vector<int64_t> tap_sums(static_cast<size_t>(out) * count);
    for (size_t i = 0; i < codes.size(); ++i)
        tap_sums[i / in] += 2 * codes[i] + 1 - (1 << weight_bits);
    std::map<std::vector<bool>, int32_t> patterns; // set of taps inside the image -> first constant
    for (int p = 0; p < conv.out_pixels; ++p) {
        std::vector<bool> inside(static_cast<size_t>(count));
        for (int t = 0; t < count; ++t)
            inside[static_cast<size_t>(t)] = (*conv.tap_pixels)[static_cast<size_t>(p) * count + t] != 0;
        const auto found = patterns.find(inside);
        if (found != patterns.end()) {
            conv.constant_rows.push_back(found->second);
            continue;
        }
        const int32_t first = static_cast<int32_t>(conv.constants.size());
        patterns[inside] = first;
        conv.constant_rows.push_back(first);
        for (int o = 0; o < out; ++o) {
            int64_t sum = 0;
            for (int t = 0; t < count; ++t)
                if (inside[static_cast<size_t>(t)])
                    sum +=
                        tap_sums[static_cast<size_t>(o) * count + (order.empty() ? t : order[static_cast<size_t>(t)])];
            conv.constants.push_back(static_cast<int32_t>(-levels * sum));
        }
    }
}

// Epilogue::thresholds of a layer that makes only 1-bit codes. A code is a monotonic function of the sum, so we halve
// the interval of all possible sums, for all channels at once, by the kernels' own epilogue. Not monotonic is a layer
// whose largest sums overflow where the quantizer's scale is 0: NaN makes code 0 at both ends. It gets no thresholds.
void Builder::find_thresholds(ConvStep &conv, LayerBits bits) const {
    const Epilogue &whole = conv.epilogue;
    const int64_t most = int64_t(conv.taps) * conv.group_in * ((1 << bits.weights) - 1) * ((1 << bits.acts) - 1);
    if (!kernels.thresholds || !conv.has_codes || whole.levels != 1 || conv.has_out || conv.has_residual ||
        !whole.scale || whole.clip_first || whole.clip_second || conv.op->is_signed || most >= INT16_MAX)
        return;
    const size_t channels = static_cast<size_t>(conv.out_channels);
    std::vector<float> sums(channels);
    std::vector<uint8_t> codes(channels);
    Epilogue e = whole;
    e.doublings = 0;
    e.codes = codes.data();
    const auto compute_codes = [&] { kernels.epilogue(sums.data(), channels, 1, conv.out_channels, e); };
    std::fill(sums.begin(), sums.end(), -static_cast<float>(most));
    compute_codes();
    conv.flips = codes;
    // The code of sum `below` is flips, that of `above` is another (or it is larger than all sums).
    std::vector<int> below(channels, -static_cast<int>(most)), above(channels, static_cast<int>(most) + 1);
    for (int size = 2 * static_cast<int>(most) + 1; size > 1; size = (size + 1) / 2) {
        for (size_t c = 0; c < channels; ++c)
            sums[c] = static_cast<float>((below[c] + above[c]) >> 1);
        compute_codes();
        for (size_t c = 0; c < channels; ++c)
            (codes[c] == conv.flips[c] ? below : above)[c] = (below[c] + above[c]) >> 1;
    }
    std::fill(sums.begin(), sums.end(), static_cast<float>(most));
    compute_codes();
    for (size_t c = 0; c < channels; ++c)
        if ((codes[c] != conv.flips[c]) != (below[c] < most)) {
            conv.flips.clear();
            return;
        }
    conv.thresholds.assign(below.begin(), below.end());
    conv.epilogue.thresholds = conv.thresholds.data();
    conv.epilogue.flips = conv.flips.data();
}

// --- Memory -------------------------------------------------------------------------------------------------------

void Builder::allocate_conv(ConvStep &conv, const Fused &a, Step &s, int step) {
    use(step, conv.input);
    if (conv.sums.pixel) {
        use(step, conv.sums);
        conv.windows =
            scratch(4 * static_cast<size_t>(conv.out_pixels) * conv.groups * static_cast<size_t>(plan.images), step);
    }
    if (conv.winograd) {
        WinogradStep &w = *conv.winograd;
        w.transformed = scratch(w.transformed_bytes * static_cast<size_t>(w.slots) + 128, step);
        w.sums = scratch(w.sums_bytes * static_cast<size_t>(w.slots) + 128, step);
    }
    if (conv.toom_cook)
        conv.toom_cook->memory = scratch(conv.toom_cook->bytes * static_cast<size_t>(conv.toom_cook->slots), step);
    if (a.residual >= 0) {
        conv.residual = buffer(a.residual);
        use(step, conv.residual);
    }
    if (conv.fused_pool) {
        FusedPool &p = *conv.fused_pool;
        p.lines = scratch(p.bytes * static_cast<size_t>(p.slots), step);
        p.out = buffer(static_cast<int>(p.op - graph.ops.data()) + 1);
        write(step, s, p.out);
    } else if (a.store) {
        conv.has_out = true;
        conv.out = buffer(a.value);
        write(step, s, conv.out);
    }
    if (a.quantize >= 0) {
        conv.has_codes = true;
        conv.codes = buffer(a.quantize + 1);
        write(step, s, conv.codes);
    }
}

} // namespace anyprec
