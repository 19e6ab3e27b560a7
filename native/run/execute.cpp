// See execute.h. This file: the order of the steps, and the steps that compute one pixel at a time.
#include "run/execute.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace anyprec {

void Run::elementwise(const Step &s) const {
    const int channels = s.shape.c();
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
        kernels.epilogue(reinterpret_cast<const float *>(pixels(s.inputs[0], n)) + from, static_cast<size_t>(channels),
                         end - first, channels, e);
    });
}

// In blocks, so that the second pass finds what the first has written in the nearest cache.
void Run::dequantize(const Step &s) const {
    constexpr int kBlock = 2048; // floats
    const int channels = s.shape.c(), block = std::max(1, kBlock / channels);
    const int line = s.shape.is_image() ? s.shape.w() : s.out.pixels;
    over_pixels(s.out.pixels, [&](int n, int first, int end) {
        const uint8_t *codes = pixels(s.inputs[0], n);
        float *out = reinterpret_cast<float *>(pixels(s.out, n));
        Epilogue e;
        e.scale = s.scale.data();
        e.shift = s.shift.data();
        e.out_stride = static_cast<size_t>(channels);
        for (int at = first; at < end;) {
            const int row = at / line, row_end = std::min(end, (row + 1) * line);
            if (row % s.row_step) {
                at = row_end;
                continue;
            }
            const int next = std::min(s.row_step > 1 ? row_end : end, at + block);
            const size_t from = static_cast<size_t>(at) * channels;
            kernels.to_floats(codes + from, static_cast<size_t>(next - at) * channels, out + from);
            e.out = out + from;
            kernels.epilogue(out + from, static_cast<size_t>(channels), next - at, channels, e);
            at = next;
        }
    });
}

namespace {

// exp(t) for t <= 0, by operations that every machine rounds the same way: ARITHMETIC.md, section 6.
double exact_exp(double t) {
    if (!(t >= -700)) // also NaN
        return t < -700 ? 0 : t;
    const double m = std::nearbyint(t * 1.4426950408889634);
    const double r = (t - m * 0.6931471803691238) - m * 1.9082149292705877e-10;
    double q = 1;
    for (int i = 13; i >= 1; --i)
        q = 1 + (r / i) * q;
    return std::ldexp(q, static_cast<int>(m));
}

} // namespace

void Run::softmax(const Step &s) const {
    const int channels = s.shape.c();
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
    const Buffer &from = s.inputs[0];
    const size_t channels = static_cast<size_t>(s.input_shapes[0].c()), rows = static_cast<size_t>(from.pixels);
    threads.run(plan.images, [&](int n) {
        const uint8_t *x = pixels(from, n);
        uint8_t *y = pixels(s.out, n);
        if (s.codes)
            kernels.transpose_codes(x, channels, rows, channels, y, rows);
        else
            kernels.transpose_floats(reinterpret_cast<const float *>(x), channels, rows, channels,
                                     reinterpret_cast<float *>(y), rows);
    });
}

void Run::pad(const Step &s) const {
    const Op &op = *s.op;
    const Shape in = s.input_shapes[0];
    const Buffer &from = s.inputs[0];
    threads.run(plan.images, [&](int n) {
        std::memset(pixels(s.out, n), 0, s.out.pixel * static_cast<size_t>(s.out.pixels));
        for (int y = 0; y < in.h(); ++y)
            for (int x = 0; x < in.w(); ++x) {
                const size_t to = static_cast<size_t>(y + op.pad[0]) * s.shape.w() + (x + op.pad[1]);
                std::memcpy(pixels(s.out, n) + s.out.pixel * to + 4 * static_cast<size_t>(op.pad_c[0]),
                            pixels(from, n) + from.pixel * (static_cast<size_t>(y) * in.w() + x), from.pixel);
            }
    });
}

bool Run::step(const Step &s) const {
    switch (s.kind) {
    case Step::Kind::prepare:
        prepare(*s.prepare);
        break;
    case Step::Kind::conv:
        conv(*s.conv);
        break;
    case Step::Kind::elementwise:
        elementwise(s);
        break;
    case Step::Kind::dequantize:
        dequantize(s);
        break;
    case Step::Kind::concat:
        concat(s);
        break;
    case Step::Kind::max_pool:
        max_pool(s);
        break;
    case Step::Kind::avg_pool:
        avg_pool(s);
        break;
    case Step::Kind::resize:
        resize(s);
        break;
    case Step::Kind::softmax:
        softmax(s);
        break;
    case Step::Kind::flatten:
        flatten(s);
        break;
    case Step::Kind::pad:
        pad(s);
        break;
    case Step::Kind::constant:
        constant(s);
        break;
    case Step::Kind::transpose:
        transpose(s);
        break;
    case Step::Kind::pick:
        pick(s);
        break;
    case Step::Kind::pointwise:
        pointwise(s);
        break;
    case Step::Kind::binary:
        binary(s);
        break;
    case Step::Kind::reduce:
        reduce(s);
        break;
    case Step::Kind::norm:
        norm(s);
        break;
    case Step::Kind::softmax_single:
        softmax_single(s);
        break;
    case Step::Kind::matmul:
        s.matmul->codes ? codes_product(s) : matmul(s);
        break;
    case Step::Kind::embedding:
        return embedding(s);
    case Step::Kind::recurrent:
        recurrent(s);
        break;
    }
    return true;
}

namespace {

// Leaves nothing in the calling thread, however the run ends; workers see to it themselves.
struct Release {
    void (*release)();
    ~Release() {
        if (release)
            release();
    }
};

} // namespace

RunEnd run_plan(const Plan &plan, const Kernels &kernels, uint8_t *arena, Threads &threads, double *seconds,
                const CancelToken *cancel) {
    using Clock = std::chrono::steady_clock;
    threads.after = kernels.release;
    const Release at_the_end{kernels.release};
    const Run run{plan, kernels, arena, threads};
    for (const Step &s : plan.steps) {
        if (cancel && cancel->cancelled())
            return {RunEnd::cancelled};
        const Clock::time_point start = seconds ? Clock::now() : Clock::time_point();
        for (const ZeroRow &row : s.zero_rows)
            for (int n = 0; n < plan.images; ++n)
                std::memset(arena + row.offset + row.image * static_cast<size_t>(n), 0, row.pixel);
        if (!run.step(s))
            return {RunEnd::bad_index, s.op};
        if (seconds)
            *seconds++ = std::chrono::duration<double>(Clock::now() - start).count();
    }
    return {};
}

} // namespace anyprec
