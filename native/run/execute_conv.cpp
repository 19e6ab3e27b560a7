// Convolutions of a Run (execute.h): prepares inputs, sums codes under every window, then computes tiles, directly or
// by Winograd or Toom-Cook. In and out: the arena, as a ConvStep (plan.h) says. ARITHMETIC.md, sections 3 and 4.
#include "run/execute.h"

#include <algorithm>
#include <cstring>

#include "run/toom_cook.h"
#include "run/winograd.h"

namespace anyprec {

void Run::prepare(const PrepareStep &p) const {
    const int in = p.channels / p.groups;
    over_pixels(p.from.pixels, [&](int n, int first, int end) {
        const uint8_t *codes = pixels(p.from, n) + p.from.pixel * first;
        uint8_t *to = pixels(p.to, n) + p.to.pixel * first;
        if (p.to.pixel && p.input == Input::wide)
            kernels.widen(codes, p.from.pixel * (end - first), reinterpret_cast<int16_t *>(to));
        int32_t *sums = p.sums.pixel ? reinterpret_cast<int32_t *>(pixels(p.sums, n) + p.sums.pixel * first) : nullptr;
        if (p.to.pixel && p.input == Input::lookup) {
            const bool both = p.groups == 1 && p.channels == p.steps * p.group; // offsets and sums in one pass
            kernels.lookup_offsets(codes, p.from.pixel, end - first, p.steps, p.group, p.bits, p.entry,
                                   reinterpret_cast<uint16_t *>(to), both ? sums : nullptr);
            sums = both ? nullptr : sums;
        }
        if (p.to.pixel && p.input == Input::bits) {
            kernels.pack_bits(codes, p.from.pixel, end - first, p.channels, p.steps, to, sums);
            sums = nullptr;
        }
        for (int g = 0; sums && g < p.groups; ++g)
            kernels.sums(codes + in * g, p.from.pixel, end - first, in, sums + g, p.groups);
    });
    if (p.to.pixel && p.input == Input::lookup_pairs)
        over_pixels(p.to.pixels, [&](int n, int first, int end) {
            kernels.pixel_pair_offsets(image(p.from, n), p.from.pixel, p.pairs->all.data() + first, end - first,
                                       p.steps, reinterpret_cast<uint16_t *>(pixels(p.to, n) + p.to.pixel * first));
        });
}

namespace {

// Plain loops that gcc vectorizes at O3.
#if defined(__GNUC__) && !defined(__clang__)
#define ANYPREC_VECTORIZE __attribute__((optimize("O3")))
#else
#define ANYPREC_VECTORIZE
#endif

ANYPREC_VECTORIZE void add_sums(const int32_t *__restrict from, int count, int32_t *__restrict to) {
    for (int i = 0; i < count; ++i)
        to[i] += from[i];
}

// Stride 1 and one group: neighboring outputs have neighboring windows, so we add a tap for a whole line at once.
// Pixels first .. end.
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
                const int shift = j * op.dilation[1] - op.pad[1]; // from an output's x to the x of its tap
                const int from = std::max(left, -shift), to = std::min(right, c.in_width - shift);
                if (from < to)
                    add_sums(sums + static_cast<ptrdiff_t>(iy) * c.in_width + from + shift, to - from,
                             out + first + from - left);
            }
        }
        first += right - left;
    }
}

} // namespace

// Sum of the input codes under the window of every output pixel: [image][group][pixel].
void Run::windows(const ConvStep &c) const {
    const int32_t *taps = c.tap_pixels->data();
    const bool lines = c.groups == 1 && c.op->stride[0] == 1 && c.op->stride[1] == 1 && !c.op->transposed;
    over_pixels(c.out_pixels, [&](int n, int first, int end) {
        const int32_t *sums = reinterpret_cast<const int32_t *>(image(c.sums, n)); // pixel 0 is the pixel of zeros
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

Epilogue epilogue_at(const ConvStep &c, uint8_t *arena, int n, int row, int channel) {
    const auto pixels = [&](const Buffer &p) { return arena + p.offset + p.image * static_cast<size_t>(n) + p.pixel; };
    Epilogue e = c.epilogue;
    const size_t first = static_cast<size_t>(row), stride = static_cast<size_t>(c.out_channels);
    if (!c.constants.empty()) {
        e.constants = c.constants.data();
        e.constant_rows = c.constant_rows.data() + row;
    }
    e.residual_stride = e.out_stride = e.codes_stride = stride;
    if (c.has_residual)
        e.residual = reinterpret_cast<const float *>(pixels(c.residual)) + first * stride;
    if (c.has_out)
        e.out = reinterpret_cast<float *>(pixels(c.out)) + first * stride;
    if (c.has_codes)
        e.codes = pixels(c.codes) + first * stride;
    return from_channel(e, channel);
}

namespace {

struct ByteRange {
    const uint8_t *from = nullptr;
    size_t count = 0;
};

ByteRange weights_to_prefetch(const ConvStep &c, size_t offset, size_t bytes, bool first, bool last) {
    constexpr size_t kPrefetchDistance = 128 << 10; // small compared with L2, large compared with what a tile reads
    const size_t size = c.panel->bytes;
    if (first && offset + kPrefetchDistance < size)
        return {c.panel->data + offset + kPrefetchDistance, std::min(bytes, size - offset - kPrefetchDistance)};
    if (!last || !c.next)
        return {};
    const size_t most = std::min(kPrefetchDistance, c.next->bytes);
    if (!first || size <= kPrefetchDistance) // all of it, in equal parts
        return {c.next->data + most * offset / size, most * bytes / size};
    const size_t at = offset + kPrefetchDistance - size;
    return at < most ? ByteRange{c.next->data + at, std::min(bytes, most - at)} : ByteRange{};
}

} // namespace

size_t set_prefetch(Tile &tile, const ConvStep &c, size_t bytes, int turns, bool first, bool last) {
    const ByteRange prefetch_from =
        weights_to_prefetch(c, static_cast<size_t>(tile.panel - c.panel->data), bytes, first, last);
    const size_t tiles = static_cast<size_t>(std::max(1, turns)), share = (prefetch_from.count + tiles - 1) / tiles;
    const size_t steps = static_cast<size_t>(tile.taps) * static_cast<size_t>(tile.steps);
    tile.prefetch_from = prefetch_from.count ? prefetch_from.from : tile.panel;
    tile.prefetch_bytes = (share + steps - 1) / steps;
    return share;
}

namespace {

// Prefetches what the next part of some work will read or write into L2, an equal share with each of `turns` tiles of
// the current part. A prefetch from memory takes longer than a tile.
class Prefetcher {
  public:
    void begin(const void *first, size_t bytes, int turns) {
        at_ = static_cast<const uint8_t *>(first);
        share_ = (bytes + static_cast<size_t>(turns) - 1) / static_cast<size_t>(turns);
    }
    void step() {
        for (size_t i = 0; i < share_; i += 64)
            prefetch(at_ + i);
        at_ += share_;
    }

  private:
    const uint8_t *at_ = nullptr;
    size_t share_ = 0;

    static void prefetch([[maybe_unused]] const uint8_t *p) {
#if defined(__GNUC__)
        __builtin_prefetch(p, 0, 2);
#endif
    }
};

// The tiles of part `part` of `parts` of an image's rows, for one block width.
struct TileRange {
    const Offsets *offsets = nullptr;
    int first = 0, end = 0, row = 0; // tiles; the first pixel
    Epilogue epilogue;               // at the first pixel and channel 0
    Prefetcher floats, codes;        // prefetch for the next part, a share per tile

    TileRange() = default;
    TileRange(const Run &run, const ConvStep &c, int n, const Offsets *of, int part, int parts, int blocks)
        : offsets(of) {
        const int64_t count = static_cast<int64_t>(of->first_row.size()) - 1;
        const auto tile = [&](int p) { return static_cast<int>(count * p / parts); };
        const auto pixel = [&](int t) { return of->first_row[static_cast<size_t>(t)]; };
        first = tile(part), end = tile(part + 1);
        row = pixel(first);
        const int next = pixel(end);
        epilogue = epilogue_at(c, run.arena, n, row, 0);
        const int turns = blocks * (end - first);
        if (part + 1 == parts || turns == 0 || blocks < static_cast<int>(c.blocks.size()) * c.groups)
            return;
        const size_t channels = static_cast<size_t>(c.out_channels), here = channels * static_cast<size_t>(next - row);
        const size_t values = channels * static_cast<size_t>(pixel(tile(part + 2)) - next);
        if (const float *read = epilogue.residual ? epilogue.residual : epilogue.out)
            floats.begin(read + here, 4 * values, turns);
        if (epilogue.codes)
            codes.begin(epilogue.codes + here, values, turns);
    }
};

} // namespace

namespace {

// The epilogue of tile `t` of a transposed convolution, whose rows are `pixel_step` output pixels apart.
Epilogue phase_epilogue(const Run &run, const ConvStep &c, int n, const Offsets &offsets, size_t t, int group,
                        int channel) {
    const int row = offsets.first_row[t];
    Epilogue e = epilogue_at(c, run.arena, n, offsets.first_pixel[t], channel);
    e.residual_stride = e.out_stride = e.codes_stride = e.out_stride * static_cast<size_t>(offsets.pixel_step);
    if (e.constant_rows)
        e.constant_rows = c.constant_rows.data() + row;
    if (c.sums.pixel)
        e.window = reinterpret_cast<const int32_t *>(run.arena + c.windows) +
                   (static_cast<size_t>(n) * c.groups + static_cast<size_t>(group)) * c.out_pixels + row;
    return e;
}

} // namespace

// Computes blocks first .. end, numbered across all groups. `out`, if given, receives the result, from the part's first
// pixel on.
void Run::tiles(const ConvStep &c, int n, int part, int parts, int first, int end, float *out) const {
    const TileKernel &kernel = *c.kernel;
    const int blocks = static_cast<int>(c.blocks.size());
    const size_t element = kernel.input == Input::codes ? 1 : kernel.input == Input::wide ? 2 : 4;
    TileRange rows;
    Tile tile{};
    tile.steps = c.steps;
    for (int b = first; b < end; ++b) {
        const int group = b / blocks;
        const Block &block = c.blocks[static_cast<size_t>(b % blocks)];
        if (rows.offsets != c.offsets[block.log2_vectors].get())
            rows = TileRange(*this, c, n, c.offsets[block.log2_vectors].get(), part, parts, end - first);
        tile.base = image(c.input, n) + (c.groups > 1 ? element * static_cast<size_t>(group) * c.group_in : 0);
        set_panel(tile, *c.panel, c.blocks, group, b % blocks);
        tile.channels = block.channels;
        const int channel = group * c.group_out + block.first;
        tile.epilogue = from_channel(rows.epilogue, channel);
        if (out)
            tile.epilogue.out = out + channel;
        if (c.sums.pixel)
            tile.epilogue.window = reinterpret_cast<const int32_t *>(arena + c.windows) +
                                   (static_cast<size_t>(n) * c.groups + group) * c.out_pixels + rows.row;
        const size_t tap =
            static_cast<size_t>(c.steps) * (vector_bytes(kernel) << block.log2_vectors); // bytes of a tap
        tile.taps = c.taps;
        const size_t share = set_prefetch(tile, c, tap * static_cast<size_t>(c.taps), rows.end - rows.first, part == 0,
                                          part + 1 == parts);
        const uint8_t *panel = tile.panel;
        const TileFunction *functions = kernel.tiles[block.log2_vectors];
        for (size_t t = static_cast<size_t>(rows.first); t < static_cast<size_t>(rows.end); ++t) {
            const int count = rows.offsets->first_row[t + 1] - rows.offsets->first_row[t];
            const TapRange &taps = rows.offsets->taps[t];
            tile.offsets = rows.offsets->bytes.data() + rows.offsets->first_offset[t];
            tile.taps = taps.end - taps.first;
            tile.first_tap = taps.first;
            tile.panel = panel + tap * static_cast<size_t>(taps.first);
            if (c.phases)
                tile.epilogue = phase_epilogue(*this, c, n, *rows.offsets, t, group, channel);
            rows.floats.step();
            rows.codes.step();
            functions[count - 1](tile);
            tile.prefetch_from += share;
            advance(tile.epilogue, count);
        }
    }
}

void Run::depthwise_tiles(const ConvStep &c, int n, int part, int parts) const {
    const Offsets &offsets = *c.offsets[0];
    const int64_t count = static_cast<int64_t>(offsets.first_row.size()) - 1;
    const int first = static_cast<int>(count * part / parts), end = static_cast<int>(count * (part + 1) / parts);
    DepthwiseRow d{};
    d.base = image(c.input, n);
    d.taps = c.taps;
    d.channels = c.out_channels;
    d.weights = c.panel->data;
    d.fits16 = c.fits16;
    d.epilogue = epilogue_at(c, arena, n, offsets.first_row[static_cast<size_t>(first)], 0);
    for (int t = first; t < end; ++t) {
        const int row = offsets.first_row[static_cast<size_t>(t)];
        d.pixels = offsets.first_row[static_cast<size_t>(t) + 1] - row;
        d.offsets = offsets.bytes.data() + offsets.first_offset[static_cast<size_t>(t)];
        (c.integer ? kernels.depthwise_codes : kernels.depthwise_floats)(d);
        advance(d.epilogue, d.pixels);
    }
}

// Computes lines first .. end of the pool's result, band by band. Convolution lines shared by two bands are kept.
void Run::conv_pool_lines(const ConvStep &c, int n, int first, int end, uint8_t *lines,
                          const ToomCookLines *toom_cook) const {
    const FusedPool &p = *c.fused_pool;
    const Op &op = *p.op;
    const size_t pixel = 4 * static_cast<size_t>(p.from.c()), line = pixel * static_cast<size_t>(p.from.w());
    const PoolLines pool{op, p.from, p.shape, false, pixel};
    const int at_once = toom_cook ? kToomCookOutputs : 1;
    int have = 0, begin = 0; // lines begin .. have are computed
    for (int y = first; y < end; y += p.band) {
        const int stop = std::min(end, y + p.band);
        const int low = std::clamp(y * op.stride[0] - op.pad[0], 0, p.from.h());
        const int high = std::clamp((stop - 1) * op.stride[0] - op.pad[0] + (op.kernel[0] - 1) * op.dilation[0] + 1,
                                    low, p.from.h());
        if (have > low) {
            std::memmove(lines, lines + line * static_cast<size_t>(low - begin),
                         line * static_cast<size_t>(have - low));
            begin = low;
        } else
            begin = have = low / at_once * at_once;
        for (; have < high; have += at_once) {
            float *out = reinterpret_cast<float *>(lines + line * static_cast<size_t>(have - begin));
            if (toom_cook)
                toom_cook->lines(have, out);
            else
                tiles(c, n, have, p.from.h(), 0, c.groups * static_cast<int>(c.blocks.size()), out);
        }
        have = std::min(have, p.from.h());
        pool.run(kernels, lines, begin, y, stop,
                 pixels(p.out, n) + p.out.pixel * static_cast<size_t>(y) * static_cast<size_t>(p.shape.w()));
    }
}

// A task's number selects its slot of memory, so a round has no more tasks than slots.
void Run::conv_with_pool(const ConvStep &c) const {
    const FusedPool &p = *c.fused_pool;
    const int parts = std::min(p.shape.h(), std::min(threads.count, p.slots)), total = plan.images * parts;
    for (int first = 0; first < total; first += p.slots)
        threads.run(std::min(p.slots, total - first), [&](int task) {
            const int n = (first + task) / parts, part = (first + task) % parts;
            const int first_line = p.shape.h() * part / parts, end_line = p.shape.h() * (part + 1) / parts;
            uint8_t *lines = arena + p.lines + p.bytes * static_cast<size_t>(task);
            if (!c.toom_cook)
                return conv_pool_lines(c, n, first_line, end_line, lines, nullptr);
            const ToomCookLines toom_cook(c, kernels, arena, n, toom_cook_slot(c, task));
            conv_pool_lines(c, n, first_line, end_line, lines, &toom_cook);
        });
}

uint8_t *Run::toom_cook_slot(const ConvStep &c, int task) const {
    return arena + c.toom_cook->memory + c.toom_cook->bytes * static_cast<size_t>(task);
}

void Run::toom_cook_conv(const ConvStep &c) const {
    const int slots = c.toom_cook->slots,
              high = (c.out_pixels / c.out_width + kToomCookOutputs - 1) / kToomCookOutputs; // lines of tiles
    const int parts = std::min(high, std::min(threads.count, slots)), total = plan.images * parts;
    for (int first = 0; first < total; first += slots)
        threads.run(std::min(slots, total - first), [&](int task) {
            const int n = (first + task) / parts, part = (first + task) % parts;
            const ToomCookLines toom_cook(c, kernels, arena, n, toom_cook_slot(c, task));
            for (int y = high * part / parts; y < high * (part + 1) / parts; ++y)
                toom_cook.lines(kToomCookOutputs * y);
        });
}

namespace {

// How many rows (output pixels) go through all blocks before the next ones. A chunk and the one after it stay in L2
// beside a small panel, and there are enough chunks for all threads. With a panel larger than L2, chunks are large, so
// that the panel is read as rarely as possible.
int rows_at_once(const ConvStep &c, int threads) {
    if (c.panel->bytes > size_t(256) << 10)
        return c.panel->bytes <= size_t(1) << 20 ? 96 : 1024;
    const size_t value = (c.has_codes ? 1 : 0) + (c.has_out || c.has_residual ? 4 : 0); // bytes per output value
    const size_t row = c.input.pixel + value * static_cast<size_t>(c.out_channels);
    const int shared = threads > 1 ? c.out_pixels / (16 * threads) : c.out_pixels;
    return std::max(24, std::min({static_cast<int>((size_t(128) << 10) / row), shared, 192}));
}

} // namespace

void Run::conv(const ConvStep &c) const {
    if (c.sums.pixel)
        windows(c);
    if (c.winograd)
        return run_winograd(c, plan.images, arena, threads);
    if (c.fused_pool)
        return conv_with_pool(c);
    if (c.toom_cook)
        return toom_cook_conv(c);
    const int rows = rows_at_once(c, threads.count);
    const int chunks = (c.out_pixels + rows - 1) / rows, total = plan.images * chunks;
    if (c.depthwise) {
        threads.run(total, [&](int task) { depthwise_tiles(c, task / chunks, task % chunks, chunks); });
        return;
    }
    const int blocks = static_cast<int>(c.blocks.size()) * c.groups;
    if (plan.images > 1 && c.panel->bytes > size_t(256) << 10) { // a block's weights stay in L2 for all images
        threads.run(blocks * total, [&](int task) {
            const int chunk = task % total, block = task / total;
            tiles(c, chunk / chunks, chunk % chunks, chunks, block, block + 1);
        });
        return;
    }
    const int parts = threads.count > 1 && total < 8 * threads.count ? blocks : 1;
    threads.run(total * parts, [&](int task) {
        const int chunk = task / parts % chunks, part = task % parts;
        tiles(c, task / parts / chunks, chunk, chunks, blocks * part / parts, blocks * (part + 1) / parts);
    });
}

} // namespace anyprec
