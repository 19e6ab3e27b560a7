// See plan.h. In reading order: which ops a convolution absorbs, geometry of a convolution, steps, memory.
#include "plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace anyprec {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// --- What a convolution absorbs -----------------------------------------------------------------------------------

struct Absorbed { // op numbers, -1 where there is none
    int clip_first = -1, add = -1, clip_second = -1, quantize = -1;
    int residual = -1; // value
    int value = 0;     // the float value it ends in
    bool store = true; // whether anyone else reads that
};

class Builder {
  public:
    Builder(const Graph &g, int p, int n, int h, int w, const Kernels &k, const PanelSource &s)
        : graph(g), profile(g.profiles[static_cast<size_t>(p)]), row(static_cast<size_t>(p)), kernels(k), panels(s) {
        plan.images = n;
        plan.shapes = infer_shapes(g, n, h, w);
        for (size_t v = 0; v < plan.shapes.size(); ++v) { // so that pixels and byte offsets fit 32 bits
            const int64_t pixels = static_cast<int64_t>(plan.shapes[v].h) * plan.shapes[v].w;
            if ((pixels + 1) * plan.shapes[v].c >= int64_t(1) << 31)
                too_large(static_cast<int>(v), static_cast<uint64_t>(pixels) * plan.shapes[v].c);
        }
    }
    Plan build();

  private:
    const Graph &graph;
    const Profile &profile;
    const size_t row; // of every table
    const Kernels &kernels;
    const PanelSource &panels;
    Plan plan;

    std::vector<std::vector<int>> readers; // by value: op numbers
    std::vector<bool> is_output;           // by value
    std::vector<bool> absorbed;            // by op

    // Memory: objects get an offset once all lifetimes are known. Until then Place::offset is the object's number.
    struct Object {
        size_t bytes = 0;
        int first = -1, last = -1; // steps
        size_t offset = 0;
    };
    std::vector<Object> objects;
    std::vector<int> object_of; // by value, -1 where it is not in memory
    std::map<std::tuple<int, int, int, int>, Place> prepared;
    std::map<std::pair<int, int>, Place> summed;
    std::map<std::vector<int>, std::shared_ptr<const std::vector<int32_t>>> taps_cache;
    std::map<std::vector<int>, std::shared_ptr<const Offsets>> offsets_cache;

    int act_bits(int op) const { return profile.act_bits[static_cast<size_t>(op)]; }
    bool has_codes(int value) const { // in this profile
        return value > 0 && op_of(value).codes && act_bits(op_of(value).quantizer) != FLOAT_BITS;
    }
    const Op &op_of(int value) const { return graph.ops[static_cast<size_t>(value - 1)]; }
    const Shape &shape(int value) const { return plan.shapes[static_cast<size_t>(value)]; }

    int sole_reader(int value) const {
        const auto &list = readers[static_cast<size_t>(value)];
        return list.size() == 1 && !is_output[static_cast<size_t>(value)] ? list[0] : -1;
    }
    bool acts_as_clip(int op) const;
    Absorbed absorb(int conv);
    void set_clip(int op, bool &on, float &low, float &high) const;
    const float *table(const Op &op) const { return op.table ? op.table + row * op.table_row : nullptr; }

    [[noreturn]] void too_large(int value, uint64_t bytes) const;
    int new_object(size_t bytes);
    Place place(int value);
    Place make_place(int value, size_t pixel_bytes);
    void use(int step, const Place &p);
    int step_number() const { return static_cast<int>(plan.steps.size()); }
    Step &add_step(Step::Kind kind, const Op *op);
    void zero_row(Step &step, const Place &p);

    const TileKernel *choose(const Op &op, int weight_bits, int input_bits) const;
    const Winograd *choose_winograd(const Op &op, int weight_bits, int input_bits, const Shape &in, const Shape &out,
                                    const TileKernel &direct) const;
    std::unique_ptr<WinogradStep> winograd_step(const ConvStep &conv, const Winograd &kernel, const Shape &in,
                                                const Shape &out) const;
    std::shared_ptr<const std::vector<int32_t>> taps_of(const Op &op, const Shape &in, const Shape &out);
    std::shared_ptr<const Offsets> offsets_of(const Op &op, const Shape &in, const Shape &out, int rows, size_t pixel);
    void conv_step(int op);
    void prepare(ConvStep &conv, int value);
    void sign_constants(ConvStep &conv, const Op &op, int weight_bits, int input_bits, int taps);
    void plain_step(int op);
    void assign_memory();
};

bool Builder::acts_as_clip(int op) const {
    const Op &o = graph.ops[static_cast<size_t>(op)];
    return o.kind == OpKind::clip ||
           (o.kind == OpKind::quantize && !o.affine && o.rectify && act_bits(op) == FLOAT_BITS);
}

void Builder::set_clip(int op, bool &on, float &low, float &high) const {
    const Op &o = graph.ops[static_cast<size_t>(op)];
    on = true;
    low = o.kind == OpKind::clip ? table(o)[0] : 0.0f;
    high = o.kind == OpKind::clip ? table(o)[1] : kInfinity;
}

Absorbed Builder::absorb(int conv) {
    Absorbed a;
    a.value = conv + 1;
    int next = sole_reader(a.value);
    const auto take = [&](int &slot) {
        slot = next;
        absorbed[static_cast<size_t>(next)] = true;
        a.value = next + 1;
        next = sole_reader(a.value);
    };
    if (next >= 0 && acts_as_clip(next))
        take(a.clip_first);
    if (next >= 0 && graph.ops[static_cast<size_t>(next)].kind == OpKind::add) {
        const std::vector<int> &inputs = graph.ops[static_cast<size_t>(next)].inputs;
        const int other = inputs[0] == a.value ? inputs[1] : inputs[0];
        if (other <= conv && inputs[0] != inputs[1]) { // made before this convolution
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
            absorbed[static_cast<size_t>(reader)] = true;
            break;
        }
    a.store = a.quantize < 0 || rest.size() > 1 || is_output[static_cast<size_t>(a.value)];
    return a;
}

// --- Geometry -----------------------------------------------------------------------------------------------------

// The kernel with most useful products a cycle: vectors and groups that stay partly empty count for less.
const TileKernel *Builder::choose(const Op &op, int weight_bits, int input_bits) const {
    const Weight &weight = graph.weights[static_cast<size_t>(op.weight)];
    const int out = weight.shape[0] / op.groups, in = weight.shape[3];
    const int64_t k = static_cast<int64_t>(weight.count) / weight.shape[0];
    const TileKernel *best = nullptr;
    double best_rate = -1;
    for (const TileKernel *const *p = kernels.integer; *p; ++p) {
        const TileKernel &kernel = **p;
        if (weight_bits > kernel.max_weight_bits || input_bits > kernel.max_act_bits || k > kernel.max_k ||
            (kernel.input == Input::lookup && op.groups > 1))
            continue;
        const int steps = (in + kernel.group - 1) / kernel.group;
        int vectors = 0;
        for (const Block &block : cut_blocks(kernel, out, 1, 1))
            vectors += 1 << block.shift;
        const double rate = kernel.rate * (static_cast<double>(out) / (vectors * kernel.lanes)) *
                            (static_cast<double>(in) / (steps * kernel.group));
        if (rate > best_rate)
            best = &kernel, best_rate = rate;
    }
    return best;
}

std::shared_ptr<const std::vector<int32_t>> Builder::taps_of(const Op &op, const Shape &in, const Shape &out) {
    const std::vector<int> key = {op.kernel[0],   op.kernel[1],   op.stride[0], op.stride[1], op.pad[0], op.pad[1],
                                  op.dilation[0], op.dilation[1], in.h,         in.w,         out.h,     out.w};
    auto &entry = taps_cache[key];
    if (!entry) {
        auto taps = std::make_shared<std::vector<int32_t>>();
        taps->reserve(static_cast<size_t>(out.h) * out.w * op.kernel[0] * op.kernel[1]);
        for (int y = 0; y < out.h; ++y)
            for (int x = 0; x < out.w; ++x)
                for (int i = 0; i < op.kernel[0]; ++i)
                    for (int j = 0; j < op.kernel[1]; ++j) {
                        const int iy = y * op.stride[0] - op.pad[0] + i * op.dilation[0];
                        const int ix = x * op.stride[1] - op.pad[1] + j * op.dilation[1];
                        const bool inside = iy >= 0 && iy < in.h && ix >= 0 && ix < in.w;
                        taps->push_back(inside ? iy * in.w + ix + 1 : 0);
                    }
        entry = taps;
    }
    return entry;
}

std::shared_ptr<const Offsets> Builder::offsets_of(const Op &op, const Shape &in, const Shape &out, int rows,
                                                   size_t pixel) {
    const std::vector<int> key = {
        op.kernel[0],   op.kernel[1], op.stride[0], op.stride[1], op.pad[0], op.pad[1], op.dilation[0],
        op.dilation[1], in.h,         in.w,         out.h,        out.w,     rows,      static_cast<int>(pixel)};
    auto &entry = offsets_cache[key];
    if (!entry) {
        const auto taps = taps_of(op, in, out);
        const int pixels = out.h * out.w, count = op.kernel[0] * op.kernel[1];
        const int tiles = (pixels + rows - 1) / rows; // of rows or rows - 1 each
        auto offsets = std::make_shared<Offsets>();
        offsets->bytes.reserve(taps->size());
        for (int tile = 0; tile < tiles; ++tile) {
            const int first = static_cast<int>(static_cast<int64_t>(pixels) * tile / tiles);
            const int end = static_cast<int>(static_cast<int64_t>(pixels) * (tile + 1) / tiles);
            offsets->first_row.push_back(first);
            for (int t = 0; t < count; ++t)
                for (int r = first; r < end; ++r)
                    offsets->bytes.push_back(static_cast<int32_t>((*taps)[static_cast<size_t>(r) * count + t] *
                                                                  static_cast<int64_t>(pixel)));
        }
        offsets->first_row.push_back(pixels);
        entry = offsets;
    }
    return entry;
}

// What a convolution takes, in cycles and per image: products at the kernel's rate, what is done for every pixel (or
// patch) and channel beside, and panels passing by. Fitted to single layers of ResNet-18 and -50 (`anyprec-run
// --steps`, 64 channels at 56 x 56 to 512 at 7 x 7) on an Emerald Rapids at 3.0 GHz, to within a tenth.
constexpr double kFinish = 0.4;        // an output's end, the plain way
constexpr double kPassing = 0.12;      // a byte of a panel that comes from beyond the second-level cache
constexpr double kStaying = 512 << 10; // bytes of a panel that stay there
constexpr int kRowsAtOnce = 1024;      // the plain way: see Run::conv

// Rows that do not fill one tile count as if they did: 3 rows take as long as 6.
double product_cycles(const TileKernel &kernel, double rows, int taps, int in, int out) {
    const std::vector<Block> blocks = cut_blocks(kernel, out, 1, 1);
    int vectors = 0;
    for (const Block &block : blocks)
        vectors += 1 << block.shift;
    const int steps = (in + kernel.group - 1) / kernel.group;
    return std::max(rows, double(kernel.rows[blocks[0].shift])) * taps * steps * kernel.group * vectors * kernel.lanes /
           kernel.rate;
}

double passing_cycles(const TileKernel &kernel, int passes, int taps, int in, int out) {
    const double panel = static_cast<double>(vector_bytes(kernel)) / (kernel.lanes * kernel.group) * taps * in * out;
    return kPassing * passes * std::max(0.0, panel - kStaying);
}

// Patches of V that stay in the second-level cache beside their panel, if that is small, or keep a large one from
// passing by too often.
int patches_at_once(const Winograd &kernel, int in, int out) {
    const double row = 16.0 * in * static_cast<double>(kernel.element);
    return row * out <= 256 << 10 ? 32 : std::clamp(static_cast<int>((512 << 10) / row), 16, 64);
}

// Winograd's transforms where they take less time than `direct`.
const Winograd *Builder::choose_winograd(const Op &op, int weight_bits, int input_bits, const Shape &in,
                                         const Shape &out, const TileKernel &direct) const {
    const bool fits = op.kernel[0] == 3 && op.kernel[1] == 3 && op.stride[0] == 1 && op.stride[1] == 1 &&
                      op.dilation[0] == 1 && op.dilation[1] == 1 && op.groups == 1;
    // Four times the largest sum must fit: at 8 bit that is 917 channels.
    const int64_t largest = int64_t(9) * in.c * ((1 << weight_bits) - 1) * ((1 << input_bits) - 1);
    if (!fits || !kernels.winograd || 4 * largest >= int64_t(1) << 31)
        return nullptr;
    const double pixels = static_cast<double>(out.h) * out.w;
    const double patches = (static_cast<double>(out.h) + out.h % 2) * (out.w + out.w % 2) / 4;
    const Winograd *best = nullptr;
    double least = product_cycles(direct, pixels, 9, in.c, out.c) + kFinish * pixels * out.c +
                   passing_cycles(direct, static_cast<int>(std::ceil(pixels / kRowsAtOnce)), 9, in.c, out.c);
    for (const Winograd *const *p = kernels.winograd; *p; ++p) {
        const Winograd &w = **p;
        if (weight_bits > w.tile.max_weight_bits || input_bits > w.tile.max_act_bits)
            continue;
        const int passes = static_cast<int>(std::ceil(patches / patches_at_once(w, in.c, out.c)));
        const double cycles = product_cycles(w.tile, patches, 16, in.c, out.c) +
                              w.transform * patches * (in.c + out.c) + passing_cycles(w.tile, passes, 16, in.c, out.c);
        if (cycles < least)
            best = &w, least = cycles;
    }
    return best;
}

std::unique_ptr<WinogradStep> Builder::winograd_step(const ConvStep &conv, const Winograd &kernel, const Shape &in,
                                                     const Shape &out) const {
    const Op &op = *conv.op;
    auto w = std::make_unique<WinogradStep>();
    w->kernel = &kernel;
    w->width = out.w, w->height = out.h;
    w->across = (out.w + 1) / 2, w->down = (out.h + 1) / 2;
    const int patches = w->across * w->down;
    const int most = patches_at_once(kernel, in.c, out.c);
    w->chunks = (patches + most - 1) / most;
    w->chunk = (patches + w->chunks - 1) / w->chunks;
    w->chunks = (patches + w->chunk - 1) / w->chunk; // none is empty
    for (int y = 0; y < 2 * w->down + 2; ++y)
        for (int x = 0; x < 2 * w->across + 2; ++x) {
            const int iy = y - op.pad[0], ix = x - op.pad[1];
            const bool inside = iy >= 0 && iy < in.h && ix >= 0 && ix < in.w;
            w->grid.push_back(inside ? static_cast<int32_t>((iy * int64_t(in.w) + ix + 1) * conv.input.pixel) : 0);
        }
    const size_t lanes = static_cast<size_t>(kernel.lanes), chunk = static_cast<size_t>(w->chunk);
    w->row = (static_cast<size_t>(in.c) + lanes - 1) / lanes * lanes * kernel.element;
    for (int r = 0; r < kMaxRows; ++r)
        w->rows[r] = static_cast<int32_t>(w->row * static_cast<size_t>(r));
    // A line more, so that the 16 positions of a patch do not fall on the same lines of the cache.
    w->position = (chunk * w->row + 63) / 64 * 64 + 64;
    size_t widest = 0;
    for (const Block &block : conv.blocks)
        widest = std::max(widest, static_cast<size_t>(kernel.tile.lanes) << block.shift);
    w->sums_position = chunk * widest + 16;
    w->made_bytes = 16 * w->position;
    w->sums_bytes = (16 * 4 * w->sums_position + 63) / 64 * 64 + 64;
    w->slots = std::min(kWinogradSlots, w->chunks * plan.images * static_cast<int>(conv.blocks.size()));
    if (kernel.bias)
        for (int32_t sum : conv.panel->bias)
            w->bias.push_back(static_cast<int32_t>(static_cast<uint32_t>(kernel.bias) * static_cast<uint32_t>(sum)));
    return w;
}

// --- Steps --------------------------------------------------------------------------------------------------------

int Builder::new_object(size_t bytes) {
    objects.push_back({bytes, -1, -1, 0});
    return static_cast<int>(objects.size()) - 1;
}

void Builder::too_large(int value, uint64_t bytes) const {
    throw InputError("one image of '" + (value ? op_of(value).name : std::string("input")) + "' would take " +
                     std::to_string(bytes >> 20) + " MiB; the engine holds at most 2048, give a smaller image");
}

Place Builder::make_place(int value, size_t pixel_bytes) {
    Place p;
    p.pixels = shape(value).h * shape(value).w;
    p.pixel = pixel_bytes;
    p.image = (pixel_bytes * (static_cast<size_t>(p.pixels) + 1) + 63) / 64 * 64;
    if (p.image >= size_t(1) << 31)
        too_large(value, p.image);
    // Kernels read whole steps and may run past the last pixel by less than 128 bytes.
    p.offset = static_cast<size_t>(new_object(p.image * static_cast<size_t>(plan.images) + 128));
    return p;
}

// The place of a value, made on first mention.
Place Builder::place(int value) {
    if (object_of[static_cast<size_t>(value)] < 0) {
        plan.places[static_cast<size_t>(value)] =
            make_place(value, static_cast<size_t>(shape(value).c) * (has_codes(value) ? 1 : 4));
        object_of[static_cast<size_t>(value)] = static_cast<int>(plan.places[static_cast<size_t>(value)].offset);
    }
    return plan.places[static_cast<size_t>(value)];
}

void Builder::use(int step, const Place &p) {
    Object &object = objects[p.offset];
    object.first = object.first < 0 ? step : std::min(object.first, step);
    object.last = std::max(object.last, step);
}

Step &Builder::add_step(Step::Kind kind, const Op *op) {
    plan.steps.push_back({});
    plan.steps.back().kind = kind;
    plan.steps.back().op = op;
    return plan.steps.back();
}

void Builder::zero_row(Step &step, const Place &p) { // resolved with all other places
    step.zero_rows.push_back(p.offset);
    step.zero_rows.push_back(p.image);
    step.zero_rows.push_back(p.pixel);
}

void Builder::prepare(ConvStep &conv, int value) {
    const TileKernel &kernel = *conv.kernel;
    const Place from = place(value);
    const bool other_form = kernel.input != Input::codes;
    const auto form = std::make_tuple(value, static_cast<int>(kernel.input), kernel.group, kernel.max_act_bits);
    const auto sums = std::make_pair(value, conv.groups);
    const bool make_form = other_form && !prepared.count(form), make_sums = kernel.window && !summed.count(sums);
    if (make_form || make_sums) {
        auto p = std::make_shared<PrepareStep>();
        p->from = from;
        p->input = kernel.input;
        p->channels = shape(value).c;
        p->groups = conv.groups;
        p->steps = conv.steps;
        p->group = kernel.group;
        p->bits = kernel.max_act_bits;
        p->entry = kernel.lanes == 64 ? 64 : 16;
        const int number = step_number();
        Step &step = add_step(Step::Kind::prepare, conv.op);
        use(number, from);
        if (make_form) {
            const size_t pixel = kernel.input == Input::lookup ? 2 * static_cast<size_t>(conv.steps)
                                                               : 2 * static_cast<size_t>(p->channels);
            prepared[form] = p->to = make_place(value, pixel);
            use(number, p->to);
            zero_row(step, p->to);
        }
        if (make_sums) {
            summed[sums] = p->sums = make_place(value, 4 * static_cast<size_t>(conv.groups));
            use(number, p->sums);
            zero_row(step, p->sums);
        }
        step.prepare = p;
    }
    conv.input = other_form ? prepared[form] : from;
    if (kernel.window)
        conv.sums = summed[sums];
}

// A signed code stands for 2 code - n, so a sum of weight times value is twice that of weight times code, less n times
// the sum of the weights of those taps that are inside the image.
void Builder::sign_constants(ConvStep &conv, const Op &op, int weight_bits, int input_bits, int taps) {
    const Weight &weight = graph.weights[static_cast<size_t>(op.weight)];
    const std::vector<uint8_t> codes = weight_codes(graph, weight, weight_bits);
    const int out = weight.shape[0], in = weight.shape[3], levels = (1 << input_bits) - 1;
    std::vector<int64_t> tap_sums(static_cast<size_t>(out) * taps);
    for (size_t i = 0; i < codes.size(); ++i)
        tap_sums[i / in] += 2 * codes[i] + 1 - (1 << weight_bits);
    std::map<std::vector<bool>, int32_t> patterns; // of taps inside -> first constant
    for (int p = 0; p < conv.out_pixels; ++p) {
        std::vector<bool> inside(static_cast<size_t>(taps));
        for (int t = 0; t < taps; ++t)
            inside[static_cast<size_t>(t)] = (*conv.taps_of)[static_cast<size_t>(p) * taps + t] != 0;
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
            for (int t = 0; t < taps; ++t)
                sum += inside[static_cast<size_t>(t)] ? tap_sums[static_cast<size_t>(o) * taps + t] : 0;
            conv.constants.push_back(static_cast<int32_t>(-levels * sum));
        }
    }
}

void Builder::conv_step(int number) {
    const Op &op = graph.ops[static_cast<size_t>(number)];
    const Weight &weight = graph.weights[static_cast<size_t>(op.weight)];
    const int value = op.inputs[0], weight_bits = profile.weight_bits[static_cast<size_t>(op.weight)];
    const Shape in = shape(value), out = shape(number + 1);
    const Absorbed a = absorb(number);

    auto conv = std::make_shared<ConvStep>();
    conv->op = &op;
    conv->integer = has_codes(value);
    conv->depthwise = op.groups > 1 && weight.shape[3] == 1 && weight.shape[0] == op.groups;
    conv->groups = op.groups;
    conv->group_in = weight.shape[3];
    conv->group_out = weight.shape[0] / op.groups;
    conv->taps = op.kernel[0] * op.kernel[1];
    conv->out_channels = out.c;
    conv->out_pixels = out.h * out.w;
    conv->out_width = out.w;
    conv->in_width = in.w;
    conv->in_height = in.h;
    conv->taps_of = taps_of(op, in, out);
    const int input_bits = conv->integer ? act_bits(op_of(value).quantizer) : 0;
    Epilogue &e = conv->epilogue;

    if (conv->depthwise) {
        conv->input = place(value);
        conv->panel = panels(op.weight, weight_bits, nullptr, op.groups);
        conv->offsets[0] = offsets_of(op, in, out, kMaxRows, conv->input.pixel);
    } else {
        conv->kernel = conv->integer ? choose(op, weight_bits, input_bits) : kernels.floats;
        const Winograd *winograd =
            conv->integer ? choose_winograd(op, weight_bits, input_bits, in, out, *conv->kernel) : nullptr;
        if (winograd)
            conv->kernel = &winograd->tile;
        const TileKernel &kernel = *conv->kernel;
        conv->steps = (conv->group_in + kernel.group - 1) / kernel.group;
        conv->blocks = cut_blocks(kernel, conv->group_out, winograd ? 16 : conv->taps, conv->steps);
        conv->panel = panels(op.weight, weight_bits, &kernel, op.groups);
        if (conv->integer)
            prepare(*conv, value);
        else
            conv->input = place(value);
        if (winograd)
            conv->winograd = winograd_step(*conv, *winograd, in, out);
        for (const Block &block : conv->blocks)
            if (!winograd)
                conv->offsets[block.shift] = offsets_of(op, in, out, kernel.rows[block.shift], conv->input.pixel);
        if (kernel.window) {
            e.doublings = 1;
            e.window_factor = kernel.coding == Coding::offset8 ? 1 : 1 - (1 << weight_bits);
        }
    }
    if (op.is_signed && conv->integer) {
        e.doublings += 1;
        e.window_factor *= 2;
        sign_constants(*conv, op, weight_bits, input_bits, conv->taps);
    }
    if (op.affine) {
        e.scale = table(op);
        e.shift = e.scale + out.c;
    }
    if (a.clip_first >= 0)
        set_clip(a.clip_first, e.clip_first, e.low_first, e.high_first);
    if (a.clip_second >= 0)
        set_clip(a.clip_second, e.clip_second, e.low_second, e.high_second);

    const int step = step_number();
    Step &s = add_step(Step::Kind::conv, &op);
    use(step, conv->input);
    if (conv->sums.pixel) {
        use(step, conv->sums);
        Place windows;
        windows.offset = static_cast<size_t>(
            new_object(4 * static_cast<size_t>(conv->out_pixels) * conv->groups * static_cast<size_t>(plan.images)));
        use(step, windows);
        conv->windows = windows.offset;
    }
    if (conv->winograd) {
        WinogradStep &w = *conv->winograd;
        for (auto [at, bytes] : {std::make_pair(&w.made, w.made_bytes), std::make_pair(&w.sums, w.sums_bytes)}) {
            Place scratch;
            *at = scratch.offset = static_cast<size_t>(new_object(bytes * static_cast<size_t>(w.slots) + 128));
            use(step, scratch);
        }
    }
    if (a.residual >= 0) {
        conv->has_residual = true;
        conv->residual = place(a.residual);
        use(step, conv->residual);
    }
    if (a.store) {
        conv->has_out = true;
        conv->out = place(a.value);
        use(step, conv->out);
        zero_row(s, conv->out);
    }
    if (a.quantize >= 0) {
        const Op &q = graph.ops[static_cast<size_t>(a.quantize)];
        conv->has_codes = true;
        conv->codes = place(a.quantize + 1);
        use(step, conv->codes);
        zero_row(s, conv->codes);
        e.levels = static_cast<float>((1 << act_bits(a.quantize)) - 1);
        if (q.affine) {
            e.code_scale = table(q);
            e.code_shift = e.code_scale + out.c;
        }
    }
    s.conv = conv;
}

void Builder::plain_step(int number) {
    const Op &op = graph.ops[static_cast<size_t>(number)];
    using Kind = Step::Kind;
    Kind kind = Kind::finish;
    switch (op.kind) {
    case OpKind::dequantize:
        kind = has_codes(op.inputs[0]) ? Kind::dequantize : Kind::finish;
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
        kind = Kind::softmax;
        break;
    case OpKind::flatten:
        kind = Kind::flatten;
        break;
    case OpKind::pad:
        kind = Kind::pad;
        break;
    default:
        break;
    }
    const int step = step_number();
    Step &s = add_step(kind, &op);
    for (int input : op.inputs) {
        s.inputs.push_back(place(input));
        s.input_shapes.push_back(shape(input));
        use(step, s.inputs.back());
    }
    s.out = place(number + 1);
    s.shape = shape(number + 1);
    s.codes = has_codes(number + 1);
    use(step, s.out);
    zero_row(s, s.out);

    Epilogue &e = s.epilogue;
    const int channels = s.shape.c;
    if (op.kind == OpKind::affine) {
        e.scale = table(op);
        e.shift = e.scale + channels;
    } else if (op.kind == OpKind::clip) {
        set_clip(number, e.clip_first, e.low_first, e.high_first);
    } else if (op.kind == OpKind::quantize && s.codes) {
        e.levels = static_cast<float>((1 << act_bits(number)) - 1);
        if (op.affine) {
            e.code_scale = table(op);
            e.code_shift = e.code_scale + channels;
        }
    } else if (op.kind == OpKind::quantize) {
        if (op.affine) {
            e.scale = table(op);
            e.shift = e.scale + channels;
        }
        if (op.rectify) {
            e.clip_first = true;
            e.low_first = 0;
            e.high_first = kInfinity;
        }
    } else if (kind == Kind::dequantize) {
        s.scale.assign(static_cast<size_t>(channels), table(op)[0]);
        s.shift.assign(static_cast<size_t>(channels), table(op)[1]);
    }
}

// --- Memory -------------------------------------------------------------------------------------------------------

// Largest first, each at the lowest place that no object alive at the same time occupies.
void Builder::assign_memory() {
    std::vector<size_t> order;
    for (size_t i = 0; i < objects.size(); ++i)
        if (objects[i].first >= 0 || objects[i].last >= 0)
            order.push_back(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return objects[a].bytes > objects[b].bytes; });
    std::vector<size_t> placed;
    for (size_t i : order) {
        Object &object = objects[i];
        std::vector<std::pair<size_t, size_t>> taken; // [begin, end)
        for (size_t j : placed)
            if (objects[j].first <= object.last && object.first <= objects[j].last)
                taken.emplace_back(objects[j].offset, objects[j].offset + objects[j].bytes);
        std::sort(taken.begin(), taken.end());
        size_t at = 0;
        for (const auto &[begin, end] : taken) {
            if (at + object.bytes <= begin)
                break;
            at = std::max(at, (end + 63) / 64 * 64);
        }
        object.offset = at;
        plan.arena_bytes = std::max(plan.arena_bytes, at + object.bytes);
        placed.push_back(i);
    }
    const auto settle = [&](Place &p) {
        if (p.pixel)
            p.offset = objects[p.offset].offset;
    };
    for (Place &p : plan.places)
        settle(p);
    for (Step &s : plan.steps) {
        for (Place &p : s.inputs)
            settle(p);
        settle(s.out);
        for (size_t i = 0; i < s.zero_rows.size(); i += 3)
            s.zero_rows[i] = objects[s.zero_rows[i]].offset;
        if (s.prepare)
            for (Place *p : {&s.prepare->from, &s.prepare->to, &s.prepare->sums})
                settle(*p);
        if (s.conv) {
            if (s.conv->winograd) {
                s.conv->winograd->made = objects[s.conv->winograd->made].offset;
                s.conv->winograd->sums = objects[s.conv->winograd->sums].offset;
            }
            if (s.conv->sums.pixel)
                s.conv->windows = objects[s.conv->windows].offset;
            for (Place *p : {&s.conv->input, &s.conv->sums, &s.conv->residual, &s.conv->out, &s.conv->codes})
                settle(*p);
        }
    }
}

Plan Builder::build() {
    const size_t values = graph.ops.size() + 1;
    readers.resize(values);
    is_output.assign(values, false);
    absorbed.assign(graph.ops.size(), false);
    object_of.assign(values, -1);
    plan.places.resize(values);
    for (size_t i = 0; i < graph.ops.size(); ++i)
        for (int input : graph.ops[i].inputs)
            readers[static_cast<size_t>(input)].push_back(static_cast<int>(i));
    for (int value : graph.outputs)
        is_output[static_cast<size_t>(value)] = true;
    for (size_t v = 0; v < values; ++v)
        plan.codes.push_back(has_codes(static_cast<int>(v)));

    use(0, place(0));
    objects[static_cast<size_t>(object_of[0])].first = 0;
    for (size_t i = 0; i < graph.ops.size(); ++i) {
        const OpKind kind = graph.ops[i].kind;
        if (absorbed[i])
            continue;
        if (kind == OpKind::conv || kind == OpKind::linear)
            conv_step(static_cast<int>(i));
        else
            plain_step(static_cast<int>(i));
    }
    for (int value : graph.outputs)
        use(step_number(), place(value));
    // A residual that is read for the last time by the convolution that adds to it: write the sum over it.
    for (Step &s : plan.steps)
        if (s.conv && s.conv->has_residual && s.conv->has_out) {
            Object &from = objects[s.conv->residual.offset], &to = objects[s.conv->out.offset];
            const bool last = from.last == static_cast<int>(&s - plan.steps.data());
            // Not where the convolution reads it as well: neighbours would see the sum.
            if (last && from.bytes == to.bytes && s.conv->input.offset != s.conv->residual.offset) {
                from.last = to.last;
                to.first = to.last = -1; // no memory of its own
                const size_t old = s.conv->out.offset, now = s.conv->residual.offset;
                const auto follow = [&](Place &p) {
                    if (p.pixel && p.offset == old)
                        p.offset = now;
                };
                for (Place &p : plan.places)
                    follow(p);
                for (Step &t : plan.steps) {
                    for (Place &p : t.inputs)
                        follow(p);
                    follow(t.out);
                    for (size_t i = 0; i < t.zero_rows.size(); i += 3)
                        if (t.zero_rows[i] == old)
                            t.zero_rows[i] = now;
                    if (t.prepare)
                        for (Place *p : {&t.prepare->from, &t.prepare->to, &t.prepare->sums})
                            follow(*p);
                    if (t.conv)
                        for (Place *p : {&t.conv->input, &t.conv->residual, &t.conv->out, &t.conv->codes})
                            follow(*p);
                }
            }
        }
    assign_memory();
    for (const Step &s : plan.steps)
        if (s.conv) {
            plan.panels.push_back(s.conv->panel);
            plan.panel_bytes += s.conv->panel->bytes;
        }
    return std::move(plan);
}

} // namespace

Plan make_plan(const Graph &graph, int profile, int images, int height, int width, const Kernels &kernels,
               const PanelSource &panels) {
    return Builder(graph, profile, images, height, width, kernels, panels).build();
}

} // namespace anyprec
