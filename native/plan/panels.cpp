// See panels.h.
#include "plan/panels.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>

#include "format/large_pages.h"
#include "run/toom_cook.h"

namespace anyprec {

namespace {

// Fresh pages of calloc are left as they are.
std::shared_ptr<uint8_t> own_memory(size_t bytes) {
    std::shared_ptr<uint8_t> all(static_cast<uint8_t *>(std::calloc(bytes + 128, 1)), std::free);
    if (!all)
        throw std::bad_alloc();
    uint8_t *first = at_line(all.get());
    use_large_pages(first, bytes);
    return std::shared_ptr<uint8_t>(std::move(all), first);
}

} // namespace

// The first panels have memory of their own: a small model would pay for a huge page that it does not fill. So have
// large ones.
std::shared_ptr<uint8_t> PanelMemory::take(size_t bytes) {
    constexpr size_t kAlone = size_t(1) << 20, kChunk = size_t(16) << 20;
    const size_t lines = (bytes + 64 + 63) / 64 * 64;
    given_ += lines;
    if (given_ < kAlone || lines > kChunk / 4)
        return own_memory(bytes);
    if (left_ < lines) {
        chunk_ = own_memory(kChunk);
        left_ = kChunk;
    }
    std::shared_ptr<uint8_t> panel(chunk_, chunk_.get() + (kChunk - left_));
    left_ -= lines;
    return panel;
}

namespace {

// Plain loops that gcc vectorizes at O3.
#if defined(__GNUC__) && !defined(__clang__)
#define ANYPREC_VECTORIZE __attribute__((optimize("O3")))
#else
#define ANYPREC_VECTORIZE
#endif

Panel allocate(size_t bytes, PanelMemory *memory = nullptr) {
    Panel panel;
    panel.bytes = bytes;
    panel.storage = memory ? memory->take(bytes) : own_memory(bytes);
    panel.data = panel.storage.get();
    return panel;
}

// Elements of all steps of the channels of one vector, a line for each lane, before they go to the panel: written step
// by step, a vector at a time. Channel by channel, every line of the cache would be written as often as it has lanes.
class VectorLines {
  public:
    VectorLines(int lanes, size_t size, size_t count)
        : lanes_(static_cast<size_t>(lanes)), size_(size), count_(count),
          line_((size * count + 63) / 64 * 64 + 64), // one more: lines of 4 KiB would share a set of the cache
          bytes_(lanes_ * line_) {}
    uint8_t *line(int lane) { return bytes_.data() + line_ * static_cast<size_t>(lane); }
    void clear() { std::fill(bytes_.begin(), bytes_.end(), uint8_t(0)); }
    // To the vector's place in the first step; `stride` bytes lead to the next step.
    void write(const Kernels &kernels, uint8_t *to, size_t stride) const {
        switch (size_) {
        case 1:
            return kernels.transpose_codes(bytes_.data(), line_, lanes_, count_, to, stride);
        case 2:
            return write<2>(to, stride);
        case 4:
            return kernels.transpose_floats(reinterpret_cast<const float *>(bytes_.data()), line_ / 4, lanes_, count_,
                                            reinterpret_cast<float *>(to), stride / 4);
        default:
            return write<8>(to, stride);
        }
    }

  private:
    template <size_t Size> void write(uint8_t *to, size_t stride) const {
        for (size_t i = 0; i < count_; ++i, to += stride)
            for (size_t lane = 0; lane < lanes_; ++lane)
                std::memcpy(to + Size * lane, bytes_.data() + line_ * lane + Size * i, Size);
    }
    size_t lanes_, size_, count_, line_;
    std::vector<uint8_t> bytes_;
};

// Position of channel c in a vector, in elements. Lookup kernels widen their 8-bit sums by separating even bytes (first
// half of the channels) and odd bytes (second half).
int lane_of(const TileKernel &kernel, int c) {
    if (kernel.coding != Coding::lookup)
        return c;
    const int half = kernel.lanes / 2;
    return c < half ? 2 * c : 2 * (c - half) + 1;
}

// The bits of a byte as eight bytes, the lowest first.
struct SpreadBits {
    uint64_t of[256] = {};
    constexpr SpreadBits() {
        for (int byte = 0; byte < 256; ++byte)
            for (int bit = 0; bit < 8; ++bit)
                of[byte] |= static_cast<uint64_t>(byte >> bit & 1) << (8 * bit);
    }
};
constexpr SpreadBits kSpread;

template <size_t Planes>
void join_bits(const uint8_t *const *planes, size_t first, size_t bytes, uint8_t *__restrict codes) {
    const uint8_t *from[8];
    std::copy(planes, planes + 8, from); // which stores through `codes` cannot change
    for (size_t i = first; i < first + bytes; ++i, codes += 8) {
        uint64_t eight = 0;
#pragma GCC unroll 8
        for (size_t k = 0; k < Planes; ++k)
            eight = eight << 1 | kSpread.of[from[k][i]];
        std::memcpy(codes, &eight, 8); // the lowest byte first, as on all CPUs that we build for
    }
}

// Reads codes of a weight at `bits` from its planes, some at a time: those of a whole layer would not stay in a cache.
class CodeReader {
  public:
    CodeReader(const Graph &graph, const Weight &weight, int bits, const Kernels &kernels)
        : fixed_(weight.codes), join_planes_(kernels.join_planes) {
        if (fixed_)
            return;
        for (const int number : graph.planes[static_cast<size_t>(bits)])
            planes_[count_++] = weight.planes[static_cast<size_t>(number)];
    }
    // Codes first .. first + count, valid until the next call.
    const uint8_t *read(size_t first, size_t count) {
        if (fixed_) // one byte per code
            return fixed_ + first;
        static constexpr void (*kJoin[])(const uint8_t *const *, size_t, size_t, uint8_t *) = {
            join_bits<0>, join_bits<1>, join_bits<2>, join_bits<3>, join_bits<4>,
            join_bits<5>, join_bits<6>, join_bits<7>, join_bits<8>};
        const size_t begin = first / 8, bytes = (first + count + 7) / 8 - begin;
        codes_.resize(std::max(codes_.size(), 8 * bytes));
        if (join_planes_)
            join_planes_(planes_, static_cast<int>(count_), begin, bytes, codes_.data());
        else
            kJoin[count_](planes_, begin, bytes, codes_.data());
        return codes_.data() + first % 8;
    }

  private:
    const uint8_t *fixed_;
    decltype(Kernels::join_planes) join_planes_;
    const uint8_t *planes_[8] = {};
    size_t count_ = 0;
    std::vector<uint8_t> codes_;
};

// Winograd weights (2G) g (2G)' of one output channel: codes [9][in] -> [16][in]. The rows of 2G are 2 0 0, 1 1 1, 1 -1
// 1 and 0 0 2. A weight is factor * code + shift. At 8 bits U is at most 9 x 255.
ANYPREC_VECTORIZE void transform_weights(const uint8_t *__restrict codes, size_t in, int factor, int shift,
                                         int16_t *__restrict half, int16_t *__restrict out) {
    for (size_t j = 0; j < 3; ++j) { // half = 2G g: column j of [4][3][in]
        const uint8_t *top = codes + j * in, *middle = top + 3 * in, *low = middle + 3 * in;
        int16_t *t = half + j * in;
        for (size_t c = 0; c < in; ++c) {
            const int16_t a = static_cast<int16_t>(factor * top[c] + shift),
                          b = static_cast<int16_t>(factor * middle[c] + shift),
                          d = static_cast<int16_t>(factor * low[c] + shift);
            t[c] = static_cast<int16_t>(2 * a);
            t[3 * in + c] = static_cast<int16_t>(a + b + d);
            t[6 * in + c] = static_cast<int16_t>(a - b + d);
            t[9 * in + c] = static_cast<int16_t>(2 * d);
        }
    }
    for (size_t i = 0; i < 4; ++i) {
        const int16_t *left = half + 3 * i * in, *middle = left + in, *right = middle + in;
        int16_t *u = out + 4 * i * in;
        for (size_t c = 0; c < in; ++c) {
            const int16_t sum = static_cast<int16_t>(left[c] + right[c]);
            u[c] = static_cast<int16_t>(2 * left[c]);
            u[in + c] = static_cast<int16_t>(sum + middle[c]);
            u[2 * in + c] = static_cast<int16_t>(sum - middle[c]);
            u[3 * in + c] = static_cast<int16_t>(2 * right[c]);
        }
    }
}

ANYPREC_VECTORIZE int32_t sum_of(const int16_t *values, int count) {
    int32_t sum = 0;
    for (int i = 0; i < count; ++i)
        sum += values[i];
    return sum;
}
ANYPREC_VECTORIZE void to_bytes(const int16_t *__restrict values, int count, uint8_t *__restrict bytes) {
    for (int i = 0; i < count; ++i)
        bytes[i] = static_cast<uint8_t>(values[i]);
}

Panel build_winograd_panel(const Graph &graph, const Weight &weight, const Kernels &kernels, const TileKernel &kernel,
                           int bits, PanelMemory *memory) {
    CodeReader codes(graph, weight, bits, kernels);
    const int out = weight.shape[0], in = weight.shape[3], group = kernel.step_channels, lanes = kernel.lanes;
    const int steps = (in + group - 1) / group;
    const bool offset = kernel.coding == Coding::offset8, wide = kernel.coding == Coding::centered16;
    const int factor = offset ? 1 : 2, shift = offset ? -(1 << (bits - 1)) : 1 - (1 << bits);
    const std::vector<Block> blocks = cut_blocks(kernel, out, 16, steps);
    const size_t vector = vector_bytes(kernel), element = wide ? 2 : 1;

    Panel panel = allocate(
        blocks.back().panel + 16 * static_cast<size_t>(steps) * (vector << blocks.back().log2_vectors), memory);
    panel.group_bytes = panel.bytes;
    panel.bias.resize(4 * static_cast<size_t>(out));
    std::vector<int16_t> u(16 * static_cast<size_t>(in)), half(12 * static_cast<size_t>(in));
    const size_t bytes = static_cast<size_t>(group) * element;
    VectorLines lines(lanes, bytes, 16 * static_cast<size_t>(steps)); // what is not written stays zero
    for (const Block &block : blocks)
        for (int c = 0; c < block.channels; ++c) {
            const int channel = block.first + c;
            const size_t nine = 9 * static_cast<size_t>(in);
            transform_weights(codes.read(nine * static_cast<size_t>(channel), nine), static_cast<size_t>(in), factor,
                              shift, half.data(), u.data());
            if (c % lanes == 0 && block.channels - c < lanes)
                lines.clear();
            int32_t sums[16];
            for (int position = 0; position < 16; ++position) {
                const int16_t *values = u.data() + static_cast<size_t>(position) * in;
                uint8_t *line = lines.line(c % lanes) + bytes * static_cast<size_t>(steps * position);
                sums[position] = sum_of(values, in);
                if (wide)
                    std::memcpy(line, values, 2 * static_cast<size_t>(in));
                else
                    to_bytes(values, in, line);
            }
            if (c % lanes == lanes - 1 || c + 1 == block.channels)
                lines.write(kernels, panel.data + block.panel + vector * static_cast<size_t>(c / lanes),
                            vector << block.log2_vectors);
            for (int i = 0; i < 2; ++i) // A' sums A, as for any M
                for (int j = 0; j < 2; ++j) {
                    static constexpr int kRows[2][4] = {{1, 1, 1, 0}, {0, 1, -1, -1}};
                    int32_t sum = 0;
                    for (int position = 0; position < 16; ++position)
                        sum += position == 5 ? 0 : kRows[i][position / 4] * kRows[j][position % 4] * sums[position];
                    panel.bias[static_cast<size_t>(2 * i + j) * out + channel] = sum;
                }
        }
    return panel;
}

// Sum of the weights in each byte of a lookup panel: eight of 1 bit (1 bit, or one plane of 2 bits) or four of 2 bits.
// Bytes are taken eight at a time.
void sum_weights(const uint8_t *bytes, size_t count, bool pairs, uint8_t *sums) {
    constexpr uint64_t kTwo = 0x3333333333333333, kFour = 0x0f0f0f0f0f0f0f0f, kOne = 0x5555555555555555;
    for (size_t i = 0; i < count; i += 8) {
        uint64_t x;
        std::memcpy(&x, bytes + i, 8);
        if (!pairs)
            x = x - (x >> 1 & kOne);
        x = (x & kTwo) + (x >> 2 & kTwo);
        x = (x + (x >> 4)) & kFour;
        std::memcpy(sums + i, &x, 8);
    }
}

// The largest sum of `steps` consecutive steps in any byte of a vector; `sums` is [count][bytes].
ANYPREC_VECTORIZE int largest_run(const uint8_t *__restrict sums, size_t count, size_t bytes, size_t steps) {
    constexpr size_t kAtOnce = 32; // bytes whose runs stay in registers; vectors of lookups have 16, 32 or 64
    uint16_t most = 0;
    for (size_t first = 0; first < bytes; first += kAtOnce) {
        uint16_t run[kAtOnce] = {}, largest[kAtOnce] = {};
        const size_t some = std::min(kAtOnce, bytes - first);
        if (some < kAtOnce) {
            for (size_t s = 0; s < count; ++s)
                for (size_t i = 0; i < some; ++i) {
                    const int left = s < steps ? 0 : sums[(s - steps) * bytes + first + i];
                    run[i] = static_cast<uint16_t>(run[i] + sums[s * bytes + first + i] - left);
                    largest[i] = std::max(largest[i], run[i]);
                }
        } else {
            const size_t begin = std::min(steps, count);
            for (size_t s = 0; s < begin; ++s)
                for (size_t i = 0; i < kAtOnce; ++i)
                    run[i] = static_cast<uint16_t>(run[i] + sums[s * bytes + first + i]);
            std::copy(run, run + kAtOnce, largest);
            for (size_t s = begin; s < count; ++s)
                for (size_t i = 0; i < kAtOnce; ++i) {
                    run[i] = static_cast<uint16_t>(run[i] + sums[s * bytes + first + i] -
                                                   sums[(s - steps) * bytes + first + i]);
                    largest[i] = std::max(largest[i], run[i]);
                }
        }
        most = std::max(most, *std::max_element(largest, largest + kAtOnce));
    }
    return most;
}

// The largest number of consecutive steps that cannot overflow 8 bits in any channel. A step adds at most its weights
// times the largest activation. At 2 bits that is 31 steps where half of the weight bits are ones, 21 where all are.
class SafeSteps {
  public:
    explicit SafeSteps(const TileKernel &kernel)
        : pairs_(kernel.coding == Coding::lookup && kernel.max_weight_bits == 2),
          most_(255 / ((1 << kernel.max_act_bits) - 1)) {}
    // A vector of all its steps, `stride` bytes from one to the next.
    void add(const uint8_t *panel, size_t count, size_t bytes, size_t stride) {
        // A step adds at most 12 (four weights of 2 bits): `good` steps always fit, kMost do not overflow 16 bits.
        constexpr size_t kMost = 5000;
        size_t good = static_cast<size_t>(most_) / 12, bad = std::min({safe_steps, count, kMost});
        sums_.resize(count * bytes);
        for (size_t s = 0; s < count; ++s)
            sum_weights(panel + s * stride, bytes, pairs_, sums_.data() + s * bytes);
        const auto fits = [&](size_t steps) { return largest_run(sums_.data(), count, bytes, steps) <= most_; };
        if (fits(bad)) { // as for most vectors: those before them fit no more steps
            if (bad < count)
                safe_steps = bad;
            return;
        }
        while (bad - good > 1) {
            const size_t middle = good + (bad - good) / 2;
            (fits(middle) ? good : bad) = middle;
        }
        safe_steps = good;
    }
    size_t safe_steps = size_t(1) << 30; // no limit

  private:
    bool pairs_;
    int most_;
    std::vector<uint8_t> sums_;
};

// Whether the sum of any two neighboring signed bytes is beyond the limit.
ANYPREC_VECTORIZE bool any_large(const uint8_t *bytes, size_t pairs, int16_t limit) {
    int16_t found = 0;
    for (size_t i = 0; i < pairs; ++i) {
        const int16_t sum =
            static_cast<int16_t>(static_cast<int8_t>(bytes[2 * i]) + static_cast<int8_t>(bytes[2 * i + 1]));
        found = static_cast<int16_t>(found | (sum > limit) | (sum < -limit));
    }
    return found != 0;
}

// Coding::split8 from offset8. Where two neighbors have the same sign and are too large together, the part beyond half
// of the limit moves to an extra step. Half of the limit is 64, so the remainder fits too.
void split_pairs(Panel &panel, const TileKernel &kernel, const std::vector<Block> &blocks, int groups, int taps,
                 int steps) {
    const int limit = 32767 / ((1 << kernel.max_act_bits) - 1), half = limit / 2;
    const auto too_large = [limit](int a, int b) { return std::abs(a + b) > limit; }; // a single weight is at most 128
    for (int g = 0; g < groups; ++g)
        for (const Block &block : blocks) {
            uint8_t *step = panel.data + panel.group_bytes * static_cast<size_t>(g) + block.panel;
            const size_t stride = vector_bytes(kernel) << block.log2_vectors;
            panel.extras.push_back({static_cast<int>(panel.extra.size()), 0, panel.rests.size()});
            for (int tap = 0; tap < taps; ++tap)
                for (int s = 0; s < steps; ++s, step += stride) {
                    if (!any_large(step, stride / 2, static_cast<int16_t>(limit)))
                        continue;
                    const size_t rest = panel.rests.size();
                    panel.rests.resize(rest + stride);
                    for (size_t i = 0; i < stride; i += 2) {
                        if (!too_large(static_cast<int8_t>(step[i]), static_cast<int8_t>(step[i + 1])))
                            continue;
                        for (size_t j = i; j < i + 2; ++j) {
                            const int weight = static_cast<int8_t>(step[j]), part = std::clamp(weight, -half, half);
                            step[j] = static_cast<uint8_t>(part);
                            panel.rests[rest + j] = static_cast<uint8_t>(weight - part);
                        }
                    }
                    panel.extra.push_back({tap, s});
                    ++panel.extras.back().count;
                }
        }
}

// factor * code + shift as bytes or 16-bit integers.
ANYPREC_VECTORIZE void scaled_bytes(const uint8_t *__restrict codes, int count, int factor, int shift,
                                    uint8_t *__restrict out) {
    const uint8_t a = static_cast<uint8_t>(factor), b = static_cast<uint8_t>(shift);
    for (int i = 0; i < count; ++i)
        out[i] = static_cast<uint8_t>(a * codes[i] + b);
}
ANYPREC_VECTORIZE void scaled_words(const uint8_t *__restrict codes, int count, int factor, int shift,
                                    int16_t *__restrict out) {
    for (int i = 0; i < count; ++i)
        out[i] = static_cast<int16_t>(factor * codes[i] + shift);
}
// A lookup group takes channels s, s + steps, s + 2 steps, ...: see lookup_offsets. `out` holds zeros, or earlier
// parts.
ANYPREC_VECTORIZE void join_codes(const uint8_t *__restrict codes, int count, int shift, uint8_t *__restrict out) {
    int s = 0;
    for (; s + 8 <= count; s += 8) { // a shifted code stays within its byte
        uint64_t eight, joined;
        std::memcpy(&eight, codes + s, 8);
        std::memcpy(&joined, out + s, 8);
        joined |= eight << shift;
        std::memcpy(out + s, &joined, 8);
    }
    for (; s < count; ++s)
        out[s] = static_cast<uint8_t>(out[s] | codes[s] << shift);
}
// 2 bits: lower bits in the even byte, upper bits in the odd byte.
ANYPREC_VECTORIZE void join_planes(const uint8_t *__restrict codes, int count, int shift, uint8_t *__restrict out) {
    for (int s = 0; s < count; ++s) {
        out[2 * s] = static_cast<uint8_t>(out[2 * s] | (codes[s] & 1) << shift);
        out[2 * s + 1] = static_cast<uint8_t>(out[2 * s + 1] | codes[s] >> 1 << shift);
    }
}

// 1-bit codes as bits, the first one lowest, in `words` words.
ANYPREC_VECTORIZE void pack_codes(const uint8_t *__restrict codes, int count, int words, uint8_t *__restrict out) {
    for (int i = 0; i < 4 * words; ++i) {
        int byte = 0;
        for (int j = 0; j < 8 && 8 * i + j < count; ++j)
            byte |= codes[8 * i + j] << j;
        out[i] = static_cast<uint8_t>(byte);
    }
}

// One tap of one channel as the elements of its steps. `to` holds zeros.
void tap_line(const TileKernel &kernel, int bits, int in, int steps, const uint8_t *codes, const uint8_t *values,
              uint8_t *to) {
    const int center = bits < 32 ? (1 << bits) - 1 : 0; // 32: a float layer, which has none
    const auto lookup_parts = [&](auto &&join) {
        for (int j = 0; j < kernel.step_channels && j * steps < in; ++j)
            join(codes + static_cast<ptrdiff_t>(j) * steps, std::min(steps, in - j * steps), j);
    };
    switch (kernel.coding) {
    case Coding::centered8:
        return scaled_bytes(codes, in, 2, -center, to);
    case Coding::codes8:
        return scaled_bytes(codes, in, 1, 0, to);
    case Coding::offset8:
    case Coding::split8:
        return scaled_bytes(codes, in, 1, -(1 << (bits - 1)), to);
    case Coding::centered16:
        return scaled_words(codes, in, 2, -center, reinterpret_cast<int16_t *>(to));
    case Coding::floats:
        std::memcpy(to, values, 4 * static_cast<size_t>(in));
        return;
    case Coding::lookup:
        return lookup_parts(
            [&](const uint8_t *part, int count, int j) { join_codes(part, count, j * kernel.max_weight_bits, to); });
    case Coding::bits:
        return pack_codes(codes, in, steps, to);
    case Coding::lookup_planes:
        return lookup_parts([&](const uint8_t *part, int count, int j) { join_planes(part, count, j, to); });
    }
}

} // namespace

std::vector<Block> cut_blocks(const TileKernel &kernel, int channels, int taps, int steps) {
    std::vector<Block> blocks;
    size_t offset = 0;
    for (int first = 0; first < channels;) {
        int shift = kernel.max_log2_vectors; // the widest block, or the narrowest that holds the remaining channels
        while (shift > 0 && (kernel.lanes << (shift - 1)) >= channels - first)
            --shift;
        const int width = std::min(kernel.lanes << shift, channels - first);
        blocks.push_back({first, width, shift, offset});
        offset += static_cast<size_t>(taps) * steps * (vector_bytes(kernel) << shift);
        first += width;
    }
    return blocks;
}

std::vector<uint8_t> weight_codes(const Graph &graph, const Weight &weight, int bits, const Kernels &kernels) {
    CodeReader reader(graph, weight, bits, kernels);
    const uint8_t *codes = reader.read(0, weight.count);
    return std::vector<uint8_t>(codes, codes + weight.count);
}

static const uint8_t *float_bytes(const Weight &weight) { // unaligned
    return weight.is_float ? reinterpret_cast<const uint8_t *>(weight.values) : weight.tail;
}

std::vector<float> weight_floats(const Weight &weight) {
    std::vector<float> values(weight.count);
    std::memcpy(values.data(), float_bytes(weight), 4 * weight.count);
    return values;
}

Panel build_panel(const Graph &graph, const Weight &weight, const Kernels &kernels, const TileKernel &kernel, int bits,
                  int groups, const std::vector<int> &tap_order, PanelMemory *memory) {
    if (kernel.algorithm == Algorithm::winograd)
        return build_winograd_panel(graph, weight, kernels, kernel, bits, memory);
    const bool floats = kernel.coding == Coding::floats;
    std::vector<float> transformed;
    const uint8_t *values = floats ? float_bytes(weight) : nullptr;
    int out = weight.shape[0] / groups, taps = weight.shape[1] * weight.shape[2], in = weight.shape[3];
    if (kernel.algorithm == Algorithm::toom_cook) {
        transformed = toom_cook_weights(weight_floats(weight), weight.shape);
        values = reinterpret_cast<const uint8_t *>(transformed.data());
        taps = kToomCookPoints * kToomCookPoints;
        in *= toom_cook_block(weight.shape) * toom_cook_block(weight.shape);
    }
    const int steps = (in + kernel.step_channels - 1) / kernel.step_channels, lanes = kernel.lanes;
    const std::vector<Block> blocks = cut_blocks(kernel, out, taps, steps);
    const size_t vector = vector_bytes(kernel);
    const size_t group_bytes =
        blocks.back().panel + static_cast<size_t>(taps) * steps * (vector << blocks.back().log2_vectors);
    const bool is_lookup = kernel.coding == Coding::lookup || kernel.coding == Coding::lookup_planes;

    Panel panel = allocate(group_bytes * groups, memory);
    panel.group_bytes = group_bytes;
    std::optional<SafeSteps> safe;
    if (is_lookup)
        safe.emplace(kernel);
    const size_t size = vector / static_cast<size_t>(lanes), tap_bytes = size * static_cast<size_t>(steps);
    const size_t count = static_cast<size_t>(taps) * static_cast<size_t>(steps);
    VectorLines lines(lanes, size, count); // [tap][step]
    std::optional<CodeReader> codes;
    if (!floats)
        codes.emplace(graph, weight, bits, kernels);
    for (int g = 0; g < groups; ++g)
        for (const Block &block : blocks)
            for (int c = 0; c < block.channels; ++c) {
                const size_t row = (static_cast<size_t>(g) * out + block.first + c) * taps * in;
                const uint8_t *channel = codes ? codes->read(row, static_cast<size_t>(taps) * in) : nullptr;
                uint8_t *line = lines.line(lane_of(kernel, c % lanes));
                if (c % lanes == 0 && (is_lookup || block.channels - c < lanes))
                    lines.clear(); // others leave their padding zero
                for (int t = 0; t < taps; ++t) {
                    const int tap = tap_order.empty() ? t : tap_order[static_cast<size_t>(t)];
                    const size_t from = static_cast<size_t>(tap) * in;
                    tap_line(kernel, bits, in, steps, channel ? channel + from : nullptr,
                             values ? values + 4 * (row + from) : nullptr, line + tap_bytes * static_cast<size_t>(t));
                }
                if (c % lanes != lanes - 1 && c + 1 != block.channels)
                    continue;
                uint8_t *to = panel.data + g * group_bytes + block.panel + vector * static_cast<size_t>(c / lanes);
                lines.write(kernels, to, vector << block.log2_vectors);
                if (safe)
                    safe->add(to, count, vector, vector << block.log2_vectors);
            }
    if (safe)
        panel.safe_steps = static_cast<int>(safe->safe_steps);
    if (kernel.coding == Coding::split8)
        split_pairs(panel, kernel, blocks, groups, taps, steps);
    return panel;
}

Panel build_depthwise_panel(const Graph &graph, const Weight &weight, int bits, const Kernels &kernels) {
    const int channels = weight.shape[0], taps = weight.shape[1] * weight.shape[2];
    Panel panel = allocate(4 * weight.count);
    panel.group_bytes = panel.bytes;
    if (bits == 32) {
        const std::vector<float> values = weight_floats(weight);
        for (int c = 0; c < channels; ++c)
            for (int t = 0; t < taps; ++t)
                std::memcpy(panel.data + 4 * (static_cast<size_t>(t) * channels + c), &values[c * taps + t], 4);
        return panel;
    }
    const std::vector<uint8_t> codes = weight_codes(graph, weight, bits, kernels);
    for (int c = 0; c < channels; ++c)
        for (int t = 0; t < taps; ++t) {
            const int32_t value = 2 * codes[static_cast<size_t>(c) * taps + t] + 1 - (1 << bits);
            std::memcpy(panel.data + 4 * (static_cast<size_t>(t) * channels + c), &value, 4);
        }
    return panel;
}

Panel build_recurrent_panel(const Weight &weight, int width) {
    const size_t gates = static_cast<size_t>(weight.shape[0]), row = static_cast<size_t>(weight.shape[3]);
    const size_t hidden = row - 1, lanes = static_cast<size_t>(width), padded = (gates + lanes - 1) / lanes * lanes;
    Panel panel = allocate(4 * padded * row);
    panel.group_bytes = panel.bytes;
    float *bias = reinterpret_cast<float *>(panel.data), *weights = bias + padded;
    for (size_t g = 0; g < padded; ++g) {
        const float *from = g < gates ? weight.values + g * row : nullptr;
        bias[g] = from ? from[hidden] : 0.0f;
        float *to = weights + g / lanes * lanes * hidden + g % lanes;
        for (size_t k = 0; k < hidden; ++k)
            to[k * lanes] = from ? from[k] : 0.0f;
    }
    return panel;
}

} // namespace anyprec
