// See toom_cook.h; the transforms are in toom_cook.inl. An input line is transformed horizontally once and kept in a
// ring buffer as long as tiles read it.
#include "run/toom_cook.h"

#include <algorithm>
#include <cstring>

#include "run/execute.h"

namespace anyprec {
namespace {

constexpr size_t kSlack = 16; // floats that toom_cook_input may read and write past the end

size_t whole_lines(size_t floats) { // rounded up to cache lines, in bytes
    return (4 * floats + 63) / 64 * 64;
}

} // namespace

bool uses_toom_cook(const Op &op) {
    const auto fits = [&op](int axis) {
        return op.stride[axis] == 2 && op.dilation[axis] == 1 && op.kernel[axis] >= 5 && op.kernel[axis] <= 8;
    };
    return op.toom_cook || (op.kind == OpKind::conv && op.groups == 1 && !op.transposed && fits(0) && fits(1));
}

int toom_cook_block(const int (&weight_shape)[4]) {
    return weight_shape[1] > kToomCookOutputs ? 2 : 1;
}

namespace {

// G g at all points, in double precision. Products by a point are exact: ARITHMETIC.md, section 4.
void at_points(const double *g, size_t next, double (&u)[kToomCookPoints]) {
    static constexpr double kPoints[] = {0, 1, -1, 2, -2, -0.5}, kDivisors[] = {2, -9, 3, 60, -36, -1.40625};
    for (int i = 0; i < kToomCookPoints - 1; ++i) {
        const double p = kPoints[i];
        u[i] = (((g[3 * next] * p + g[2 * next]) * p + g[next]) * p + g[0]) / kDivisors[i];
    }
    u[kToomCookPoints - 1] = g[3 * next];
}

} // namespace

std::vector<float> toom_cook_weights(const std::vector<float> &weights, const int (&shape)[4]) {
    const int out = shape[0], height = shape[1], width = shape[2], in = shape[3];
    const int block = toom_cook_block(shape);
    const size_t channels = static_cast<size_t>(block * block) * static_cast<size_t>(in);
    std::vector<float> all(static_cast<size_t>(out) * kToomCookPoints * kToomCookPoints * channels);
    for (int o = 0; o < out; ++o)
        for (size_t k = 0; k < channels; ++k) {
            const int parity = static_cast<int>(k) / in, c = static_cast<int>(k) % in;
            double lines[kToomCookOutputs][kToomCookPoints], u[kToomCookPoints];
            for (int i = 0; i < kToomCookOutputs; ++i) {
                double g[kToomCookOutputs] = {}; // every block-th column of the kernel
                const int y = block * i + parity / block;
                for (int j = 0; j < kToomCookOutputs; ++j) {
                    const int x = block * j + parity % block;
                    if (y < height && x < width)
                        g[j] = weights[((static_cast<size_t>(o) * height + y) * width + x) * in + c];
                }
                at_points(g, 1, lines[i]);
            }
            for (size_t across = 0; across < kToomCookPoints; ++across) {
                at_points(lines[0] + across, kToomCookPoints, u);
                for (size_t down = 0; down < kToomCookPoints; ++down) {
                    const size_t position =
                        (static_cast<size_t>(o) * kToomCookPoints + down) * kToomCookPoints + across;
                    all[position * channels + k] = static_cast<float>(u[down]);
                }
            }
        }
    return all;
}

std::unique_ptr<ToomCookStep> plan_toom_cook(const ConvStep &conv, const Shape &out, int images) {
    auto q = std::make_unique<ToomCookStep>();
    q->across = (out.w() + kToomCookOutputs - 1) / kToomCookOutputs;
    q->block = conv.op->stride[0];
    q->width = q->block * conv.group_in;
    const size_t across = static_cast<size_t>(q->across), width = static_cast<size_t>(q->width);
    q->line = whole_lines(kToomCookPoints * across * width + kSlack) / 4;
    q->pixels = (kToomCookOutputs * across + kToomCookPoints - kToomCookOutputs) * width + kSlack;
    // A line of zeros, the ring, V, an input line, and the line numbers of the ring.
    const size_t held = static_cast<size_t>(q->block * kToomCookPoints);
    q->bytes = 4 * q->line * (1 + 2 * held) + whole_lines(q->pixels) + whole_lines(held);
    // Slots take no more memory than the result.
    const size_t whole = 4 * static_cast<size_t>(images) * out.h() * out.w() * out.c();
    q->slots = static_cast<int>(std::clamp<size_t>(whole / q->bytes, 1, kSlots));
    return q;
}

ToomCookLines::ToomCookLines(const ConvStep &conv, const Kernels &k, uint8_t *memory, int image, uint8_t *slot)
    : c(conv), q(*conv.toom_cook), kernels(k), arena(memory), n(image), lines_held(q.block * kToomCookPoints) {
    zeros = reinterpret_cast<float *>(slot);
    ring = zeros + q.line;
    v = ring + q.line * static_cast<size_t>(lines_held);
    pixels = v + q.line * static_cast<size_t>(lines_held);
    held = reinterpret_cast<int32_t *>(reinterpret_cast<uint8_t *>(pixels) + whole_lines(q.pixels));
    std::fill(zeros, zeros + q.line, 0.0f);
    std::fill(pixels, pixels + q.pixels, 0.0f);
    std::fill(held, held + lines_held, -1);
}

// `number` counts from the first line of padding, and may lie outside the image.
const float *ToomCookLines::line(int number) const {
    const int64_t y = static_cast<int64_t>(number) - c.op->pad[0];
    if (y < 0 || y >= c.in_height)
        return zeros;
    float *to = ring + q.line * static_cast<size_t>(number % lines_held);
    if (held[number % lines_held] == number)
        return to;
    held[number % lines_held] = number;
    const size_t channels = static_cast<size_t>(c.group_in), left = channels * static_cast<size_t>(c.op->pad[1]);
    const uint8_t *from = arena + c.input.offset + c.input.image * static_cast<size_t>(n) +
                          c.input.pixel * (1 + static_cast<size_t>(y) * static_cast<size_t>(c.in_width));
    const size_t room = q.pixels - kSlack; // no output reads what does not fit
    if (left < room)
        std::memcpy(pixels + left, from, 4 * std::min(channels * static_cast<size_t>(c.in_width), room - left));
    const size_t width = static_cast<size_t>(q.width);
    ToomCookInput across{{}, to, width, q.width, q.across, kToomCookOutputs * width, kToomCookPoints * width};
    for (size_t i = 0; i < kToomCookPoints; ++i)
        across.in[i] = pixels + width * i;
    kernels.toom_cook_input(across);
    return to;
}

void ToomCookLines::lines(int y, float *out) const {
    const int floats = kToomCookPoints * q.across * q.width;
    for (int parity = 0; parity < q.block; ++parity) {
        const size_t next = q.line * static_cast<size_t>(q.block);
        ToomCookInput down{{}, v + q.line * static_cast<size_t>(parity), next, floats, 1, 0, 0};
        for (int i = 0; i < kToomCookPoints; ++i)
            down.in[i] = line(q.block * (y + i) + parity);
        kernels.toom_cook_input(down);
    }
    const TileKernel &kernel = *c.kernel;
    const int rows = kernel.max_rows[kernel.max_log2_vectors],
              tiles = (q.across + rows - 1) / rows; // the widest block has the fewest rows
    Tile tile{};
    tile.steps = q.width;
    tile.toom_cook = {4 * static_cast<size_t>(q.width), 4 * q.line, q.block, 0, 0, c.out_width};
    tile.toom_cook.lines = std::min(kToomCookOutputs, c.out_pixels / c.out_width - y);
    for (const Block &block : c.blocks) {
        tile.panel = c.panel->data + block.panel;
        tile.channels = block.channels;
        tile.epilogue = epilogue_at(c, arena, n, y * c.out_width, block.first);
        if (out)
            tile.epilogue.out = out + block.first;
        for (int t = 0; t < tiles; ++t) {
            const int first = static_cast<int>(static_cast<int64_t>(q.across) * t / tiles);
            const int end = static_cast<int>(static_cast<int64_t>(q.across) * (t + 1) / tiles);
            tile.base = reinterpret_cast<const uint8_t *>(v + static_cast<size_t>(kToomCookPoints * first * q.width));
            tile.toom_cook.pixels = std::min(kToomCookOutputs * end, c.out_width) - kToomCookOutputs * first;
            kernel.tiles[block.log2_vectors][end - first - 1](tile);
            advance(tile.epilogue, tile.toom_cook.pixels);
        }
    }
}

} // namespace anyprec
