// See winograd.h; the transforms are in winograd.inl. Patches are computed in chunks: V of a chunk, then for each block
// of channels M of the chunk and its outputs.
#include "run/winograd.h"

#include <algorithm>

#include "plan/kernel_selection.h"
#include "run/execute.h"

namespace anyprec {

std::unique_ptr<WinogradStep> plan_winograd(const ConvStep &conv, const Winograd &kernel, const Shape &in,
                                            const Shape &out, int images) {
    const Op &op = *conv.op;
    auto w = std::make_unique<WinogradStep>();
    w->kernel = &kernel;
    w->width = out.w(), w->height = out.h();
    w->across = (out.w() + 1) / 2, w->down = (out.h() + 1) / 2;
    const int patches = w->across * w->down;
    const int most = patches_at_once(kernel, in.c(), out.c());
    w->chunks = (patches + most - 1) / most;
    w->chunk = (patches + w->chunks - 1) / w->chunks;
    w->chunks = (patches + w->chunk - 1) / w->chunk; // none is empty
    for (int y = 0; y < 2 * w->down + 2; ++y)
        for (int x = 0; x < 2 * w->across + 2; ++x) {
            const int iy = y - op.pad[0], ix = x - op.pad[1];
            const bool inside = iy >= 0 && iy < in.h() && ix >= 0 && ix < in.w();
            w->grid.push_back(inside ? static_cast<int32_t>((iy * int64_t(in.w()) + ix + 1) * conv.input.pixel) : 0);
        }
    const size_t lanes = static_cast<size_t>(kernel.lanes), chunk = static_cast<size_t>(w->chunk);
    w->row = (static_cast<size_t>(in.c()) + lanes - 1) / lanes * lanes * kernel.element;
    for (int r = 0; r < kMaxRows; ++r)
        w->row_offsets[r] = static_cast<int32_t>(w->row * static_cast<size_t>(r));
    // One more cache line, so that the 16 positions of a patch do not map to the same cache set.
    w->position = (chunk * w->row + 63) / 64 * 64 + 64;
    size_t widest = 0;
    for (const Block &block : conv.blocks)
        widest = std::max(widest, static_cast<size_t>(kernel.tile.lanes) << block.log2_vectors);
    w->sums_position = chunk * widest + 16;
    w->transformed_bytes = 16 * w->position;
    w->sums_bytes = (16 * 4 * w->sums_position + 63) / 64 * 64 + 64;
    w->slots = std::min(kSlots, w->chunks * images * static_cast<int>(conv.blocks.size()));
    if (kernel.bias)
        for (int32_t sum : conv.panel->bias)
            w->bias.push_back(static_cast<int32_t>(static_cast<uint32_t>(kernel.bias) * static_cast<uint32_t>(sum)));
    return w;
}

namespace {

struct Chunk {
    int image, first, end; // patches
};

class WinogradRun {
  public:
    WinogradRun(const ConvStep &conv, uint8_t *memory) : c(conv), w(*conv.winograd), arena(memory) {}
    void input(const Chunk &chunk, int first, int end, uint8_t *transformed) const;
    void block(const Chunk &chunk, const Block &block, const uint8_t *transformed, int32_t *sums) const;

  private:
    const ConvStep &c;
    const WinogradStep &w;
    uint8_t *arena;

    void output(const Chunk &chunk, const Block &block, int width, const int32_t *sums) const;
};

// Calls body(line of patches, first patch in it, number of patches) for the patches first .. end of an image.
template <typename Body> void over_lines(int across, int first, int end, Body &&body) {
    while (first < end) {
        const int x = first % across, count = std::min(across - x, end - first);
        body(first / across, x, count);
        first += count;
    }
}

// V of the patches first .. end of a chunk.
void WinogradRun::input(const Chunk &chunk, int first, int end, uint8_t *transformed) const {
    WinogradInput in{};
    in.base = arena + c.input.offset + c.input.image * static_cast<size_t>(chunk.image);
    in.channels = c.group_in;
    in.row = w.row;
    in.position = w.position;
    in.out = transformed + w.row * static_cast<size_t>(first - chunk.first);
    const size_t line = 2 * static_cast<size_t>(w.across) + 2;
    over_lines(w.across, first, end, [&](int y, int x, int count) {
        for (int i = 0; i < 4; ++i)
            in.offsets[i] = w.grid.data() + static_cast<size_t>(2 * y + i) * line + 2 * x;
        in.patches = count;
        w.kernel->input(in);
        in.out += w.row * static_cast<size_t>(count);
    });
}

// M of one block of channels, and its outputs.
void WinogradRun::block(const Chunk &chunk, const Block &block, const uint8_t *transformed, int32_t *sums) const {
    const TileKernel &kernel = w.kernel->tile;
    const int width = kernel.lanes << block.log2_vectors, patches = chunk.end - chunk.first;
    const int most = kernel.max_rows[block.log2_vectors],
              tiles = (patches + most - 1) / most; // of most or most - 1 rows
    Tile tile{};
    tile.offsets = w.row_offsets;
    tile.taps = 1;
    tile.steps = c.steps;
    tile.channels = block.channels;
    tile.panel = c.panel->data + block.panel;
    const size_t panel = static_cast<size_t>(c.steps) * (vector_bytes(kernel) << block.log2_vectors); // of one position
    for (int position = 0; position < 16; ++position, tile.panel += panel) {
        const size_t share = set_prefetch(tile, c, panel, tiles, chunk.first == 0, chunk.end == w.across * w.down);
        for (int t = 0; t < tiles; ++t, tile.prefetch_from += share) {
            const int first = static_cast<int>(static_cast<int64_t>(patches) * t / tiles);
            const int end = static_cast<int>(static_cast<int64_t>(patches) * (t + 1) / tiles);
            tile.base = transformed + w.position * static_cast<size_t>(position) + w.row * static_cast<size_t>(first);
            tile.epilogue.raw =
                sums + w.sums_position * static_cast<size_t>(position) + static_cast<size_t>(first) * width;
            kernel.tiles[block.log2_vectors][end - first - 1](tile);
        }
    }
    output(chunk, block, width, sums);
}

void WinogradRun::output(const Chunk &chunk, const Block &block, int width, const int32_t *sums) const {
    WinogradOutput out{};
    out.sums = sums;
    out.position = w.sums_position;
    out.width = width;
    out.channels = block.channels;
    if (!w.bias.empty()) {
        out.bias = w.bias.data() + block.first;
        out.bias_stride = static_cast<size_t>(c.out_channels);
    }
    const int32_t *windows =
        reinterpret_cast<const int32_t *>(arena + c.windows) + static_cast<size_t>(chunk.image) * c.out_pixels;
    over_lines(w.across, chunk.first, chunk.end, [&](int y, int x, int count) {
        out.patches = count;
        for (int i = 0; i < 2; ++i) {
            const int pixel = (2 * y + i) * w.width + 2 * x;
            out.pixels[i] = 2 * y + i < w.height ? std::min(2 * count, w.width - 2 * x) : 0;
            if (out.pixels[i] == 0)
                continue;
            out.lines[i] = epilogue_at(c, arena, chunk.image, pixel, block.first);
            if (c.sums.pixel)
                out.lines[i].window = windows + pixel;
        }
        w.kernel->output(out);
        out.sums += static_cast<size_t>(count) * width;
    });
}

} // namespace

// A task is a run of neighboring chunks, so that a thread works on the same part of the image as in the steps before
// and after. With few chunks per thread, threads share rounds of several chunks, which are cut by blocks too. A task's
// number selects its slot of memory, so a round has no more tasks than slots.
void run_winograd(const ConvStep &c, int images, uint8_t *arena, Threads &threads) {
    const WinogradStep &w = *c.winograd;
    const WinogradRun run(c, arena);
    const int patches = w.across * w.down, total = images * w.chunks, blocks = static_cast<int>(c.blocks.size());
    const int slots = threads.count > 1 ? w.slots : 1;
    const int rounds = (total + slots - 1) / slots, most = (total + rounds - 1) / rounds;
    const auto chunk_of = [&](int number) {
        const int i = number % w.chunks;
        return Chunk{number / w.chunks, i * w.chunk, std::min(patches, (i + 1) * w.chunk)};
    };
    const auto transformed = [&](int slot) {
        return arena + w.transformed + w.transformed_bytes * static_cast<size_t>(slot);
    };
    const auto some_blocks = [&](int number, int part, int parts, uint8_t *v, int slot) {
        int32_t *sums = reinterpret_cast<int32_t *>(arena + w.sums + w.sums_bytes * static_cast<size_t>(slot));
        for (int b = blocks * part / parts; b < blocks * (part + 1) / parts; ++b)
            run.block(chunk_of(number), c.blocks[static_cast<size_t>(b)], v, sums);
    };
    if (total >= 4 * threads.count) {
        threads.run(most, [&](int task) {
            for (int number = total * task / most; number < total * (task + 1) / most; ++number) {
                const Chunk chunk = chunk_of(number);
                run.input(chunk, chunk.first, chunk.end, transformed(task));
                some_blocks(number, 0, 1, transformed(task), task);
            }
        });
        return;
    }
    const int parts = std::min(blocks, slots / most);
    for (int first = 0; first < total; first += most) {
        const int tasks = parts * std::min(most, total - first);
        threads.run(tasks, [&](int task) {
            const Chunk chunk = chunk_of(first + task / parts);
            const int part = task % parts, count = chunk.end - chunk.first;
            run.input(chunk, chunk.first + count * part / parts, chunk.first + count * (part + 1) / parts,
                      transformed(task / parts));
        });
        threads.run(tasks, [&](int task) {
            some_blocks(first + task / parts, task % parts, parts, transformed(task / parts), task);
        });
    }
}

} // namespace anyprec
