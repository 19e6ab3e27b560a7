// Runs the steps of a plan (plan.h). In: an arena with the input in place. Out: the arena with all outputs in place.
// Everything here works on whole rows of channels; the arithmetic is in the kernels, or portable and exact as
// FORMAT.md section 3 has it. Allocates nothing.
#include "plan.h"
#include "winograd.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace anyprec {
namespace {

struct Run {
    const Plan &plan;
    const Kernels &kernels;
    uint8_t *arena;
    Threads &threads;

    uint8_t *image(const Place &p, int n) const { return arena + p.offset + p.image * static_cast<size_t>(n); }
    uint8_t *pixels(const Place &p, int n) const { return image(p, n) + p.pixel; } // behind the row of zeros

    // Calls body(image, first pixel, end pixel) for pieces of all images' pixels.
    template <typename Body> void over_pixels(int count, Body &&body) const {
        const int piece = threads.count > 1 ? std::max(16, (count + threads.count - 1) / threads.count) : count;
        const int pieces = (count + piece - 1) / piece;
        threads.run(plan.images * pieces, [&](int task) {
            const int first = task % pieces * piece;
            body(task / pieces, first, std::min(count, first + piece));
        });
    }

    void prepare(const PrepareStep &p) const;
    void conv(const ConvStep &c) const;
    void windows(const ConvStep &c) const;
    void tiles(const ConvStep &c, int n, int group, const Block &block, int first, int end, bool fetch) const;
    void depth_tiles(const ConvStep &c, int n, int first, int end) const;
    void finish(const Step &s) const;
    void dequantize(const Step &s) const;
    void concat(const Step &s) const;
    void max_pool(const Step &s) const;
    void avg_pool(const Step &s) const;
    void resize(const Step &s) const;
    void softmax(const Step &s) const;
    void flatten(const Step &s) const;
    void pad(const Step &s) const;
};

// --- Convolution --------------------------------------------------------------------------------------------------

void Run::prepare(const PrepareStep &p) const {
    const int in = p.channels / p.groups;
    over_pixels(p.from.pixels, [&](int n, int first, int end) {
        const uint8_t *codes = pixels(p.from, n);
        if (p.to.pixel && p.input == Input::wide)
            kernels.widen(codes + p.from.pixel * first, p.from.pixel * (end - first),
                          reinterpret_cast<int16_t *>(pixels(p.to, n) + p.to.pixel * first));
        for (int i = first; i < end; ++i) {
            const uint8_t *pixel = codes + p.from.pixel * i;
            if (p.to.pixel && p.input == Input::lookup)
                kernels.lookup_offsets(pixel, p.steps, p.group, p.bits, p.entry,
                                       reinterpret_cast<uint16_t *>(pixels(p.to, n) + p.to.pixel * i));
            if (p.sums.pixel)
                for (int g = 0; g < p.groups; ++g)
                    reinterpret_cast<int32_t *>(pixels(p.sums, n) + p.sums.pixel * i)[g] =
                        kernels.sum(pixel + in * g, in);
        }
    });
}

// Plain loops that the compiler turns into vectors, if asked to.
#if defined(__GNUC__) && !defined(__clang__)
#define ANYPREC_VECTORISE __attribute__((optimize("O3")))
#else
#define ANYPREC_VECTORISE
#endif

ANYPREC_VECTORISE void add_sums(const int32_t *__restrict from, int count, int32_t *__restrict to) {
    for (int i = 0; i < count; ++i)
        to[i] += from[i];
}

// Stride 1 and one group: neighbours have neighbouring windows, so a whole line adds a tap at a time. Pixels first ..
// end.
void line_windows(const ConvStep &c, const int32_t *sums, int first, int end, int32_t *out) {
    const Op &op = *c.op;
    while (first < end) {
        const int y = first / c.out_width, left = first % c.out_width;
        const int right = std::min(c.out_width, left + end - first);
        std::fill(out + first, out + first + right - left, 0);
        for (int i = 0; i < op.kernel[0]; ++i) {
            const int iy = y - op.pad[0] + i * op.dilation[0];
            if (iy < 0 || iy >= c.in_height)
                continue;
            for (int j = 0; j < op.kernel[1]; ++j) {
                const int shift = j * op.dilation[1] - op.pad[1]; // from an output's x to its tap's
                const int from = std::max(left, -shift), to = std::min(right, c.in_width - shift);
                if (from < to)
                    add_sums(sums + static_cast<ptrdiff_t>(iy) * c.in_width + from + shift, to - from,
                             out + first + from - left);
            }
        }
        first += right - left;
    }
}

// Sum of the input codes under every output pixel: [image][group][pixel].
void Run::windows(const ConvStep &c) const {
    const int32_t *taps = c.taps_of->data();
    const bool lines = c.groups == 1 && c.op->stride[0] == 1 && c.op->stride[1] == 1;
    over_pixels(c.out_pixels, [&](int n, int first, int end) {
        const int32_t *sums = reinterpret_cast<const int32_t *>(image(c.sums, n)); // pixel 0 is the row of zeros
        int32_t *out =
            reinterpret_cast<int32_t *>(arena + c.windows) + static_cast<size_t>(n) * c.groups * c.out_pixels;
        if (lines)
            return line_windows(c, sums + 1, first, end, out);
        for (int g = 0; g < c.groups; ++g)
            for (int p = first; p < end; ++p) {
                int32_t sum = 0;
                for (int t = 0; t < c.taps; ++t)
                    sum += sums[static_cast<size_t>(taps[static_cast<size_t>(p) * c.taps + t]) * c.groups + g];
                out[static_cast<size_t>(g) * c.out_pixels + p] = sum;
            }
    });
}

} // namespace

Epilogue epilogue_at(const ConvStep &c, uint8_t *arena, int n, int row, int channel) {
    const auto pixels = [&](const Place &p) { return arena + p.offset + p.image * static_cast<size_t>(n) + p.pixel; };
    Epilogue e = c.epilogue;
    const size_t first = static_cast<size_t>(row), stride = static_cast<size_t>(c.out_channels);
    const auto shifted = [channel](auto *pointer) { return pointer ? pointer + channel : pointer; };
    e.scale = shifted(e.scale);
    e.shift = shifted(e.shift);
    e.code_scale = shifted(e.code_scale);
    e.code_shift = shifted(e.code_shift);
    if (!c.constants.empty()) {
        e.constants = c.constants.data() + channel;
        e.constant_rows = c.constant_rows.data() + row;
    }
    e.residual_stride = e.out_stride = e.codes_stride = stride;
    if (c.has_residual)
        e.residual = reinterpret_cast<const float *>(pixels(c.residual)) + first * stride + channel;
    if (c.has_out)
        e.out = reinterpret_cast<float *>(pixels(c.out)) + first * stride + channel;
    if (c.has_codes)
        e.codes = pixels(c.codes) + first * stride + channel;
    return e;
}

namespace {

// `fetch` asks for the panel that follows this block's to be brought near, a part with each tile.
void Run::tiles(const ConvStep &c, int n, int group, const Block &block, int first, int end, bool fetch) const {
    const TileKernel &kernel = *c.kernel;
    const Offsets &offsets = *c.offsets[block.shift];
    const size_t element = kernel.input == Input::codes ? 1 : kernel.input == Input::wide ? 2 : 4;
    Tile tile{};
    tile.base = image(c.input, n) + (c.groups > 1 ? element * static_cast<size_t>(group) * c.group_in : 0);
    tile.taps = c.taps;
    tile.steps = c.steps;
    tile.panel = c.panel->data + c.panel->group_bytes * static_cast<size_t>(group) + block.panel;
    tile.channels = block.channels;
    const size_t lines = 64 * static_cast<size_t>(c.taps) * c.steps; // bytes fetched with a tile
    const uint8_t *stop = c.panel->data + c.panel->bytes;
    const size_t block_bytes = static_cast<size_t>(c.taps) * c.steps * (vector_bytes(kernel) << block.shift);
    const uint8_t *ahead = tile.panel + block_bytes, *ahead_end = std::min(ahead + block_bytes, stop);
    const int channel = group * c.group_out + block.first;
    const int32_t *windows = reinterpret_cast<const int32_t *>(arena + c.windows) +
                             (static_cast<size_t>(n) * c.groups + group) * c.out_pixels;
    tile.epilogue = epilogue_at(c, arena, n, offsets.first_row[static_cast<size_t>(first)], channel);
    if (c.sums.pixel)
        tile.epilogue.window = windows + offsets.first_row[static_cast<size_t>(first)];
    for (int t = first; t < end; ++t) {
        const int row = offsets.first_row[static_cast<size_t>(t)];
        const int rows = offsets.first_row[static_cast<size_t>(t) + 1] - row;
        tile.offsets = offsets.bytes.data() + static_cast<size_t>(row) * c.taps;
        // Fetching what is here already costs nothing, so there is always something to fetch.
        const bool more = fetch && ahead + lines <= ahead_end;
        tile.ahead = more ? ahead : tile.panel;
        ahead += lines;
        kernel.tiles[block.shift][rows - 1](tile);
        advance(tile.epilogue, rows);
    }
}

void Run::depth_tiles(const ConvStep &c, int n, int first, int end) const {
    const Offsets &offsets = *c.offsets[0];
    DepthRow d{};
    d.base = image(c.input, n);
    d.taps = c.taps;
    d.channels = c.out_channels;
    d.weights = c.panel->data;
    d.epilogue = epilogue_at(c, arena, n, offsets.first_row[static_cast<size_t>(first)], 0);
    for (int t = first; t < end; ++t) {
        const int row = offsets.first_row[static_cast<size_t>(t)];
        d.pixels = offsets.first_row[static_cast<size_t>(t) + 1] - row;
        d.offsets = offsets.bytes.data() + static_cast<size_t>(row) * c.taps;
        (c.integer ? kernels.depth_codes : kernels.depth_floats)(d);
        advance(d.epilogue, d.pixels);
    }
}

void Run::conv(const ConvStep &c) const {
    if (c.sums.pixel)
        windows(c);
    if (c.winograd)
        return run_winograd(c, plan.images, arena, threads);
    // A chunk of rows goes through all blocks before the next one: small panels stay in the caches meanwhile, and
    // what the chunk writes is complete rows. Panels larger than the second-level cache pass by as seldom as possible.
    const size_t panel = c.panel->bytes;
    const int rows = panel <= (size_t(256) << 10) ? 24 : panel <= (size_t(1) << 20) ? 96 : 1024;
    const int chunks = (c.out_pixels + rows - 1) / rows;
    const int blocks = c.depthwise ? 1 : static_cast<int>(c.blocks.size()) * c.groups;
    threads.run(plan.images * chunks * blocks, [&](int task) {
        const int b = task % blocks, chunk = task / blocks % chunks, n = task / blocks / chunks;
        const int shift = c.depthwise ? 0 : c.blocks[static_cast<size_t>(b) % c.blocks.size()].shift;
        const int count = static_cast<int>(c.offsets[shift]->first_row.size()) - 1;
        const int first = static_cast<int>(static_cast<int64_t>(count) * chunk / chunks);
        const int end = static_cast<int>(static_cast<int64_t>(count) * (chunk + 1) / chunks);
        if (c.depthwise)
            depth_tiles(c, n, first, end);
        else
            tiles(c, n, b / static_cast<int>(c.blocks.size()), c.blocks[static_cast<size_t>(b) % c.blocks.size()],
                  first, end, chunk == 0 && panel > (size_t(64) << 10));
    });
}

// --- One value in, one out ------------------------------------------------------------------------------------------

void Run::finish(const Step &s) const {
    const int channels = s.shape.c;
    over_pixels(s.out.pixels, [&](int n, int first, int end) {
        const size_t from = static_cast<size_t>(first) * channels;
        Epilogue e = s.epilogue;
        if (s.inputs.size() == 2) { // add
            e.residual = reinterpret_cast<const float *>(pixels(s.inputs[1], n)) + from;
            e.residual_stride = static_cast<size_t>(channels);
        }
        e.out_stride = e.codes_stride = static_cast<size_t>(channels);
        if (s.codes)
            e.codes = pixels(s.out, n) + from;
        else
            e.out = reinterpret_cast<float *>(pixels(s.out, n)) + from;
        kernels.finish(reinterpret_cast<const float *>(pixels(s.inputs[0], n)) + from, static_cast<size_t>(channels),
                       end - first, channels, e);
    });
}

void Run::dequantize(const Step &s) const {
    const int channels = s.shape.c;
    over_pixels(s.out.pixels, [&](int n, int first, int end) {
        const size_t from = static_cast<size_t>(first) * channels, to = static_cast<size_t>(end) * channels;
        const uint8_t *codes = pixels(s.inputs[0], n);
        float *out = reinterpret_cast<float *>(pixels(s.out, n));
        for (size_t i = from; i < to; ++i)
            out[i] = codes[i];
        Epilogue e;
        e.scale = s.scale.data();
        e.shift = s.shift.data();
        e.out = out + from;
        e.out_stride = static_cast<size_t>(channels);
        kernels.finish(out + from, static_cast<size_t>(channels), end - first, channels, e);
    });
}

void Run::concat(const Step &s) const {
    over_pixels(s.out.pixels, [&](int n, int first, int end) {
        for (int p = first; p < end; ++p) {
            uint8_t *to = pixels(s.out, n) + s.out.pixel * static_cast<size_t>(p);
            for (const Place &input : s.inputs) {
                std::memcpy(to, pixels(input, n) + input.pixel * static_cast<size_t>(p), input.pixel);
                to += input.pixel;
            }
        }
    });
}

void Run::max_pool(const Step &s) const {
    const Op &op = *s.op;
    const Shape in = s.input_shapes[0];
    const Place &from = s.inputs[0];
    over_pixels(s.out.pixels, [&](int n, int first, int end) {
        for (int p = first; p < end; ++p) {
            const int y = p / s.shape.w * op.stride[0] - op.pad[0], x = p % s.shape.w * op.stride[1] - op.pad[1];
            uint8_t *best = pixels(s.out, n) + s.out.pixel * static_cast<size_t>(p);
            bool fresh = true;
            for (int i = 0; i < op.kernel[0]; ++i)
                for (int j = 0; j < op.kernel[1]; ++j) {
                    const int iy = y + i * op.dilation[0], ix = x + j * op.dilation[1];
                    if (iy < 0 || iy >= in.h || ix < 0 || ix >= in.w)
                        continue;
                    const uint8_t *tap = pixels(from, n) + from.pixel * (static_cast<size_t>(iy) * in.w + ix);
                    if (fresh)
                        std::memcpy(best, tap, from.pixel);
                    else if (s.codes)
                        kernels.maximum_codes(best, tap, s.shape.c);
                    else
                        kernels.maximum(reinterpret_cast<float *>(best), reinterpret_cast<const float *>(tap),
                                        s.shape.c);
                    fresh = false;
                }
        }
    });
}

struct Window {
    int first, end, count; // taps inside the image, and what to divide by along this axis
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

void Run::avg_pool(const Step &s) const {
    const Shape in = s.input_shapes[0];
    const Place &from = s.inputs[0];
    over_pixels(s.out.pixels, [&](int n, int first, int end) {
        for (int p = first; p < end; ++p) {
            const Window h = pool_window(*s.op, 0, p / s.shape.w, in.h, s.shape.h);
            const Window w = pool_window(*s.op, 1, p % s.shape.w, in.w, s.shape.w);
            float *sum = reinterpret_cast<float *>(pixels(s.out, n) + s.out.pixel * static_cast<size_t>(p));
            std::fill_n(sum, s.shape.c, 0.0f);
            for (int y = h.first; y < h.end; ++y)
                for (int x = w.first; x < w.end; ++x)
                    kernels.accumulate(sum,
                                       reinterpret_cast<const float *>(
                                           pixels(from, n) + from.pixel * (static_cast<size_t>(y) * in.w + x)),
                                       s.shape.c);
            const float count = static_cast<float>(static_cast<int64_t>(h.count) * w.count);
            for (int c = 0; c < s.shape.c; ++c)
                sum[c] /= count;
        }
    });
}

// Source rows a (and b, at weight) of an output row; FORMAT.md, resize.
struct Source {
    int a, b;
    float weight;
};

Source resize_source(const Op &op, int axis, int i, int in, int out) {
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

void Run::resize(const Step &s) const {
    const Op &op = *s.op;
    const Shape in = s.input_shapes[0];
    const Place &from = s.inputs[0];
    constexpr int kPiece = 256; // channels mixed at a time, on the stack
    over_pixels(s.out.pixels, [&](int n, int first, int end) {
        const float *x = reinterpret_cast<const float *>(pixels(from, n));
        for (int p = first; p < end; ++p) {
            const Source h = resize_source(op, 0, p / s.shape.w, in.h, s.shape.h);
            const Source w = resize_source(op, 1, p % s.shape.w, in.w, s.shape.w);
            float *to = reinterpret_cast<float *>(pixels(s.out, n) + s.out.pixel * static_cast<size_t>(p));
            const auto pixel = [&](int y, int column) { return x + (static_cast<size_t>(y) * in.w + column) * in.c; };
            if (op.mode == ResizeMode::nearest) {
                std::memcpy(to, pixel(h.a, w.a), from.pixel);
                continue;
            }
            for (int c = 0; c < in.c; c += kPiece) {
                const int count = std::min(kPiece, in.c - c);
                float top[kPiece], bottom[kPiece];
                kernels.mix(pixel(h.a, w.a) + c, pixel(h.a, w.b) + c, w.weight, top, count);
                kernels.mix(pixel(h.b, w.a) + c, pixel(h.b, w.b) + c, w.weight, bottom, count);
                kernels.mix(top, bottom, h.weight, to + c, count);
            }
        }
    });
}

// exp(t) for t <= 0 by operations that every machine rounds alike; FORMAT.md, softmax.
double exact_exp(double t) {
    if (!(t >= -700)) // and NaN
        return t < -700 ? 0 : t;
    const double m = std::nearbyint(t * 1.4426950408889634);
    const double r = (t - m * 0.6931471803691238) - m * 1.9082149292705877e-10;
    double q = 1;
    for (int i = 13; i >= 1; --i)
        q = 1 + (r / i) * q;
    return std::ldexp(q, static_cast<int>(m));
}

void Run::softmax(const Step &s) const {
    const int channels = s.shape.c;
    over_pixels(s.out.pixels, [&](int n, int first, int end) {
        for (int p = first; p < end; ++p) {
            const float *x =
                reinterpret_cast<const float *>(pixels(s.inputs[0], n)) + static_cast<size_t>(p) * channels;
            float *y = reinterpret_cast<float *>(pixels(s.out, n)) + static_cast<size_t>(p) * channels;
            float top = x[0];
            for (int c = 1; c < channels; ++c)
                top = x[c] > top ? x[c] : top;
            double sum = 0;
            for (int c = 0; c < channels; ++c)
                sum += exact_exp(static_cast<double>(x[c]) - top);
            for (int c = 0; c < channels; ++c)
                y[c] = static_cast<float>(exact_exp(static_cast<double>(x[c]) - top) / sum);
        }
    });
}

void Run::flatten(const Step &s) const {
    const Place &from = s.inputs[0];
    const int channels = s.input_shapes[0].c;
    threads.run(plan.images, [&](int n) {
        const uint8_t *x = pixels(from, n);
        uint8_t *y = pixels(s.out, n);
        if (s.codes) {
            for (int p = 0; p < from.pixels; ++p)
                for (int c = 0; c < channels; ++c)
                    y[static_cast<size_t>(c) * from.pixels + p] = x[static_cast<size_t>(p) * channels + c];
            return;
        }
        for (int p = 0; p < from.pixels; ++p)
            for (int c = 0; c < channels; ++c)
                std::memcpy(y + 4 * (static_cast<size_t>(c) * from.pixels + p),
                            x + 4 * (static_cast<size_t>(p) * channels + c), 4);
    });
}

void Run::pad(const Step &s) const {
    const Op &op = *s.op;
    const Shape in = s.input_shapes[0];
    const Place &from = s.inputs[0];
    threads.run(plan.images, [&](int n) {
        std::memset(pixels(s.out, n), 0, s.out.pixel * static_cast<size_t>(s.out.pixels));
        for (int y = 0; y < in.h; ++y)
            for (int x = 0; x < in.w; ++x) {
                const size_t to = static_cast<size_t>(y + op.pad[0]) * s.shape.w + (x + op.pad[1]);
                std::memcpy(pixels(s.out, n) + s.out.pixel * to + 4 * static_cast<size_t>(op.pad_c[0]),
                            pixels(from, n) + from.pixel * (static_cast<size_t>(y) * in.w + x), from.pixel);
            }
    });
}

} // namespace

void run_plan(const Plan &plan, const Kernels &kernels, uint8_t *arena, Threads &threads, double *seconds) {
    using Clock = std::chrono::steady_clock;
    const Run run{plan, kernels, arena, threads};
    for (const Step &s : plan.steps) {
        const Clock::time_point start = seconds ? Clock::now() : Clock::time_point();
        for (size_t i = 0; i < s.zero_rows.size(); i += 3)
            for (int n = 0; n < plan.images; ++n)
                std::memset(arena + s.zero_rows[i] + s.zero_rows[i + 1] * static_cast<size_t>(n), 0,
                            s.zero_rows[i + 2]);
        switch (s.kind) {
        case Step::Kind::prepare:
            run.prepare(*s.prepare);
            break;
        case Step::Kind::conv:
            run.conv(*s.conv);
            break;
        case Step::Kind::finish:
            run.finish(s);
            break;
        case Step::Kind::dequantize:
            run.dequantize(s);
            break;
        case Step::Kind::concat:
            run.concat(s);
            break;
        case Step::Kind::max_pool:
            run.max_pool(s);
            break;
        case Step::Kind::avg_pool:
            run.avg_pool(s);
            break;
        case Step::Kind::resize:
            run.resize(s);
            break;
        case Step::Kind::softmax:
            run.softmax(s);
            break;
        case Step::Kind::flatten:
            run.flatten(s);
            break;
        case Step::Kind::pad:
            run.pad(s);
            break;
        }
        if (seconds)
            *seconds++ = std::chrono::duration<double>(Clock::now() - start).count();
    }
}

} // namespace anyprec
