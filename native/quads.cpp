// See quads.h; the transforms themselves are in quads.inl. V of every input line is made once and kept in a ring for
// as long as output lines read it.
#include "quads.h"

#include <algorithm>
#include <cstring>

#include "execute.h"

namespace anyprec {
namespace {

size_t whole_lines(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}

struct Cut {
    int first, end;
};
// Tile t of a line's quads: of `rows` or rows - 1.
Cut tile_of(int quads, int rows, int t) {
    const int tiles = (quads + rows - 1) / rows;
    return {static_cast<int>(static_cast<int64_t>(quads) * t / tiles),
            static_cast<int>(static_cast<int64_t>(quads) * (t + 1) / tiles)};
}

} // namespace

bool in_quads(const Op &op) {
    return op.kind == OpKind::conv && op.groups == 1 && op.stride[1] == 2 && op.dilation[1] == 1 && op.kernel[1] >= 5 &&
           op.kernel[1] <= 8;
}

// In doubles, and the products by p are exact: FORMAT.md, conv.
std::vector<float> quad_weights(const std::vector<float> &weights, const int (&shape)[4]) {
    static constexpr double kPoints[] = {0, 1, -1, 2, -2, -0.5}, kDivisors[] = {2, -9, 3, 60, -36, -1.40625};
    const int out = shape[0], height = shape[1], width = shape[2], in = shape[3];
    std::vector<float> all(static_cast<size_t>(out) * kQuadPositions * height * 2 * in);
    float *to = all.data();
    for (int o = 0; o < out; ++o)
        for (int position = 0; position < kQuadPositions; ++position)
            for (int y = 0; y < height; ++y)
                for (int pair = 0; pair < 2 * in; ++pair) {
                    double g[4]; // every second column
                    for (int i = 0; i < 4; ++i) {
                        const int x = 2 * i + pair / in;
                        const size_t at = ((static_cast<size_t>(o) * height + y) * width + x) * in + pair % in;
                        g[i] = x < width ? weights[at] : 0;
                    }
                    if (position == kQuadPositions - 1) {
                        *to++ = static_cast<float>(g[3]);
                        continue;
                    }
                    const double p = kPoints[position];
                    *to++ = static_cast<float>((((g[3] * p + g[2]) * p + g[1]) * p + g[0]) / kDivisors[position]);
                }
    return all;
}

std::unique_ptr<QuadStep> plan_quads(const ConvStep &conv, const Shape &in, const Shape &out, int images) {
    const Op &op = *conv.op;
    auto q = std::make_unique<QuadStep>();
    q->across = (out.w + 3) / 4;
    q->width = 2 * in.c;
    q->row = (static_cast<size_t>(q->width) + 7) / 8 * 8;
    q->ring = std::min((op.kernel[0] - 1) * op.dilation[0] + 1, in.h);
    q->line = 4 * q->row * kQuadPositions * static_cast<size_t>(q->across);
    q->pixels = (4 * static_cast<size_t>(q->across) + 3) * static_cast<size_t>(q->width) + 8;
    const size_t zeros = whole_lines(4 * q->row * kQuadPositions), ring = static_cast<size_t>(q->ring);
    q->bytes = zeros + whole_lines(q->line * ring) + whole_lines(4 * q->pixels) + whole_lines(4 * ring) +
               whole_lines(4 * static_cast<size_t>(op.kernel[0]) * q->across);
    // No more memory than the result takes.
    const size_t whole = 4 * static_cast<size_t>(images) * out.h * out.w * out.c;
    q->slots = static_cast<int>(std::clamp<size_t>(whole / q->bytes, 1, kSlots));
    return q;
}

QuadLines::QuadLines(const ConvStep &conv, const Kernels &k, uint8_t *memory, int image, uint8_t *slot)
    : c(conv), q(*conv.quads), kernels(k), arena(memory), n(image) {
    const auto take = [&slot](size_t bytes) {
        uint8_t *here = slot;
        slot += whole_lines(bytes);
        return here;
    };
    const size_t row = 4 * q.row * kQuadPositions;
    zeros = take(row);
    ring = take(q.line * static_cast<size_t>(q.ring));
    pixels = reinterpret_cast<float *>(take(4 * q.pixels));
    held = reinterpret_cast<int32_t *>(take(4 * static_cast<size_t>(q.ring)));
    offsets = reinterpret_cast<int32_t *>(slot);
    std::memset(zeros, 0, row);
    std::fill(held, held + q.ring, -1);
    std::fill(pixels, pixels + q.pixels, 0.0f);
}

// Line iy of the input, which lies inside the image, becomes V in its place of the ring.
void QuadLines::transform(int iy) const {
    const int place = iy % q.ring;
    if (held[place] == iy)
        return;
    held[place] = iy;
    const size_t channels = static_cast<size_t>(c.group_in), left = channels * static_cast<size_t>(c.op->pad[1]);
    const uint8_t *from = arena + c.input.offset + c.input.image * static_cast<size_t>(n) +
                          c.input.pixel * (1 + static_cast<size_t>(iy) * static_cast<size_t>(c.in_width));
    if (left < q.pixels) // what does not fit, no output reads
        std::memcpy(pixels + left, from, 4 * std::min(channels * static_cast<size_t>(c.in_width), q.pixels - left));
    kernels.quad_input(
        {pixels, q.across, q.width, q.row, reinterpret_cast<float *>(ring + q.line * static_cast<size_t>(place))});
}

void QuadLines::set_offsets(int y, int rows) const {
    const Op &op = *c.op;
    const size_t quad = 4 * q.row * kQuadPositions;
    int32_t *to = offsets;
    for (int t = 0; t < (q.across + rows - 1) / rows; ++t) {
        const Cut cut = tile_of(q.across, rows, t);
        for (int i = 0; i < op.kernel[0]; ++i) {
            const int64_t iy = static_cast<int64_t>(y) * op.stride[0] - op.pad[0] + i * op.dilation[0];
            const bool inside = iy >= 0 && iy < c.in_height;
            const size_t line =
                inside ? static_cast<size_t>(ring - zeros) + q.line * static_cast<size_t>(iy % q.ring) : 0;
            for (int r = cut.first; r < cut.end; ++r)
                *to++ = inside ? static_cast<int32_t>(line + quad * static_cast<size_t>(r)) : 0;
        }
    }
}

void QuadLines::line(int y, float *out) const {
    const Op &op = *c.op;
    const TileKernel &kernel = *c.kernel;
    const int rows = kernel.rows[kernel.shifts], tiles = (q.across + rows - 1) / rows; // the widest have fewest
    for (int i = 0; i < op.kernel[0]; ++i) {
        const int64_t iy = static_cast<int64_t>(y) * op.stride[0] - op.pad[0] + i * op.dilation[0];
        if (iy >= 0 && iy < c.in_height)
            transform(static_cast<int>(iy));
    }
    set_offsets(y, rows);
    Tile tile{};
    tile.base = zeros;
    tile.taps = op.kernel[0];
    tile.steps = q.width;
    tile.position = 4 * q.row;
    for (const Block &block : c.blocks) {
        tile.panel = c.panel->data + block.panel;
        tile.channels = block.channels;
        tile.offsets = offsets;
        tile.epilogue = epilogue_at(c, arena, n, y * c.out_width, block.first);
        if (out)
            tile.epilogue.out = out + block.first;
        for (int t = 0; t < tiles; ++t) {
            const Cut cut = tile_of(q.across, rows, t);
            const int quads = cut.end - cut.first;
            tile.pixels = std::min(4 * quads, c.out_width - 4 * cut.first);
            kernel.tiles[block.shift][quads - 1](tile);
            tile.offsets += op.kernel[0] * quads;
            advance(tile.epilogue, tile.pixels);
        }
    }
}

} // namespace anyprec
