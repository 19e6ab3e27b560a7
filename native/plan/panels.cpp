// See panels.h.
#include "plan/panels.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "run/toom_cook.h"

namespace anyprec {
namespace {

Panel allocate(size_t bytes) {
    Panel panel;
    panel.bytes = bytes;
    panel.storage = std::make_unique<uint8_t[]>(bytes + 128); // zeros; slack for alignment and for reads past the end
    panel.data = at_line(panel.storage.get());
    return panel;
}

// Position of channel c in a vector, in elements. Lookup kernels widen their 8-bit sums by separating even bytes (first
// half of the channels) and odd bytes (second half).
int lane_of(const TileKernel &kernel, int c) {
    if (kernel.coding != Coding::lookup)
        return c;
    const int half = kernel.lanes / 2;
    return c < half ? 2 * c : 2 * (c - half) + 1;
}

// Winograd weights (2G) g (2G)' of one output channel: codes [9][in] -> [16][in]. The rows of 2G are 2 0 0, 1 1 1, 1 -1
// 1 and 0 0 2. A weight is factor * code + shift. At 8 bits U is at most 9 x 255.
void transform_weights(const uint8_t *codes, int in, int factor, int shift, int16_t *out) {
    for (int c = 0; c < in; ++c) {
        int g[3][3], t[4][3]; // t = 2G g
        for (int i = 0; i < 9; ++i)
            g[i / 3][i % 3] = factor * codes[i * in + c] + shift;
        for (int j = 0; j < 3; ++j) {
            t[0][j] = 2 * g[0][j];
            t[1][j] = g[0][j] + g[1][j] + g[2][j];
            t[2][j] = g[0][j] - g[1][j] + g[2][j];
            t[3][j] = 2 * g[2][j];
        }
        for (int i = 0; i < 4; ++i) {
            const int u[4] = {2 * t[i][0], t[i][0] + t[i][1] + t[i][2], t[i][0] - t[i][1] + t[i][2], 2 * t[i][2]};
            for (int j = 0; j < 4; ++j)
                out[(4 * i + j) * in + c] = static_cast<int16_t>(u[j]);
        }
    }
}

Panel build_winograd_panel(const Graph &graph, const Weight &weight, const TileKernel &kernel, int bits) {
    const std::vector<uint8_t> codes = weight_codes(graph, weight, bits);
    const int out = weight.shape[0], in = weight.shape[3], group = kernel.step_channels, lanes = kernel.lanes;
    const int steps = (in + group - 1) / group;
    const bool offset = kernel.coding == Coding::offset8, wide = kernel.coding == Coding::centered16;
    const int factor = offset ? 1 : 2, shift = offset ? -(1 << (bits - 1)) : 1 - (1 << bits);
    const std::vector<Block> blocks = cut_blocks(kernel, out, 16, steps);
    const size_t vector = vector_bytes(kernel), element = wide ? 2 : 1;

    Panel panel =
        allocate(blocks.back().panel + 16 * static_cast<size_t>(steps) * (vector << blocks.back().log2_vectors));
    panel.group_bytes = panel.bytes;
    panel.bias.resize(4 * static_cast<size_t>(out));
    std::vector<int16_t> u(16 * static_cast<size_t>(in));
    for (const Block &block : blocks)
        for (int c = 0; c < block.channels; ++c) {
            const int channel = block.first + c;
            transform_weights(codes.data() + static_cast<size_t>(channel) * 9 * in, in, factor, shift, u.data());
            const size_t stride = vector << block.log2_vectors; // from one step to the next
            uint8_t *to =
                panel.data + block.panel + vector * (c / lanes) + static_cast<size_t>(c % lanes) * group * element;
            int32_t sums[16] = {};
            for (int position = 0; position < 16; ++position)
                for (int s = 0; s < steps; ++s, to += stride)
                    for (int j = 0; j < group && s * group + j < in; ++j) {
                        const int16_t value = u[static_cast<size_t>(position) * in + s * group + j];
                        sums[position] += value;
                        if (wide)
                            std::memcpy(to + 2 * j, &value, 2);
                        else
                            to[j] = static_cast<uint8_t>(value);
                    }
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

// The largest number of consecutive steps that cannot overflow 8 bits in any channel. A step adds at most its weights
// times the largest activation. At 2 bits that is 31 steps where half of the weight bits are ones, 21 where all are.
int count_safe_steps(const Panel &panel, const TileKernel &kernel, const std::vector<Block> &blocks, int groups,
                     int steps) {
    const int bits = kernel.coding == Coding::lookup_planes ? 1 : kernel.max_weight_bits;
    const int most = 255 / ((1 << kernel.max_act_bits) - 1);
    int weights[256] = {}; // sum of a step's weights, by byte of the panel
    for (int b = 0; b < 256; ++b)
        for (int i = 0; i < 8; i += bits)
            weights[b] += b >> i & ((1 << bits) - 1);
    int safe_steps = 1 << 30; // no limit
    for (int g = 0; g < groups; ++g)
        for (const Block &block : blocks) {
            const uint8_t *first = panel.data + panel.group_bytes * static_cast<size_t>(g) + block.panel;
            const size_t stride = vector_bytes(kernel) << block.log2_vectors; // from one step to the next
            for (size_t lane = 0; lane < stride; ++lane) {
                const uint8_t *last = first + lane, *begin = last; // window of steps whose sum fits
                int sum = 0;
                for (int s = 0, run = 0; s < steps; ++s, last += stride) {
                    sum += weights[*last];
                    for (++run; sum > most; begin += stride) {
                        safe_steps = std::min(safe_steps, --run);
                        sum -= weights[*begin];
                    }
                }
            }
        }
    return safe_steps;
}

// Coding::split8 from offset8. Where two neighbors have the same sign and are too large together, the part beyond half
// of the limit moves to an extra step, stored after the panel. Half of the limit is 64, so the remainder fits too.
Panel split_pairs(const Panel &plain, const TileKernel &kernel, const std::vector<Block> &blocks, int groups, int taps,
                  int steps) {
    const int limit = 32767 / ((1 << kernel.max_act_bits) - 1), half = limit / 2;
    const auto too_large = [limit](int a, int b) { return std::abs(a + b) > limit; }; // a single weight is at most 128
    std::vector<ExtraStep> extra;
    std::vector<Extras> extras;
    std::vector<uint8_t> rests;
    for (int g = 0; g < groups; ++g)
        for (const Block &block : blocks) {
            uint8_t *step = plain.data + plain.group_bytes * static_cast<size_t>(g) + block.panel;
            const size_t stride = vector_bytes(kernel) << block.log2_vectors;
            extras.push_back({static_cast<int>(extra.size()), 0, plain.bytes + rests.size()});
            for (int tap = 0; tap < taps; ++tap)
                for (int s = 0; s < steps; ++s, step += stride) {
                    const size_t rest = rests.size();
                    for (size_t i = 0; i < stride; i += 2) {
                        if (!too_large(static_cast<int8_t>(step[i]), static_cast<int8_t>(step[i + 1])))
                            continue;
                        rests.resize(rest + stride);
                        for (size_t j = i; j < i + 2; ++j) {
                            const int weight = static_cast<int8_t>(step[j]), part = std::clamp(weight, -half, half);
                            step[j] = static_cast<uint8_t>(part);
                            rests[rest + j] = static_cast<uint8_t>(weight - part);
                        }
                    }
                    if (rests.size() == rest)
                        continue;
                    extra.push_back({tap, s});
                    ++extras.back().count;
                }
        }
    Panel panel = allocate(plain.bytes + rests.size());
    std::memcpy(panel.data, plain.data, plain.bytes);
    if (!rests.empty())
        std::memcpy(panel.data + plain.bytes, rests.data(), rests.size());
    panel.group_bytes = plain.group_bytes;
    panel.extra = std::move(extra);
    panel.extras = std::move(extras);
    return panel;
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

std::vector<uint8_t> weight_codes(const Graph &graph, const Weight &weight, int bits) {
    if (weight.codes) // fixed weight: one byte per code
        return std::vector<uint8_t>(weight.codes, weight.codes + weight.count);
    // Eight codes at a time: spread[b] has bit i of b in byte i, so one lookup turns a plane's byte into eight bytes.
    uint64_t spread[256];
    for (int b = 0; b < 256; ++b) {
        spread[b] = 0;
        for (int i = 0; i < 8; ++i)
            spread[b] |= static_cast<uint64_t>(b >> i & 1) << (8 * i);
    }
    const std::vector<int> &numbers = graph.planes[static_cast<size_t>(bits)];
    const size_t bytes = (weight.count + 7) / 8;
    std::vector<uint8_t> codes(8 * bytes);
    for (size_t i = 0; i < bytes; ++i) {
        uint64_t eight = 0;
        for (int number : numbers) // most significant first; codes stay below 256, so bytes do not carry over
            eight = eight << 1 | spread[weight.planes[static_cast<size_t>(number)][i]];
        for (int j = 0; j < 8; ++j)
            codes[8 * i + j] = static_cast<uint8_t>(eight >> (8 * j));
    }
    codes.resize(weight.count);
    return codes;
}

std::vector<float> weight_floats(const Weight &weight) {
    std::vector<float> values(weight.count);
    const void *from = weight.is_float ? static_cast<const void *>(weight.values) : weight.tail;
    std::memcpy(values.data(), from, 4 * weight.count);
    return values;
}

Panel build_panel(const Graph &graph, const Weight &weight, const TileKernel &kernel, int bits, int groups,
                  const std::vector<int> &tap_order) {
    if (kernel.algorithm == Algorithm::winograd)
        return build_winograd_panel(graph, weight, kernel, bits);
    const bool floats = kernel.coding == Coding::floats;
    const std::vector<uint8_t> codes = floats ? std::vector<uint8_t>() : weight_codes(graph, weight, bits);
    std::vector<float> values = floats ? weight_floats(weight) : std::vector<float>();
    int out = weight.shape[0] / groups, taps = weight.shape[1] * weight.shape[2], in = weight.shape[3];
    if (kernel.algorithm == Algorithm::toom_cook) {
        values = toom_cook_weights(values, weight.shape);
        taps = kToomCookPoints * kToomCookPoints;
        in = 4 * in;
    }
    const int steps = (in + kernel.step_channels - 1) / kernel.step_channels, group = kernel.step_channels,
              lanes = kernel.lanes;
    const std::vector<Block> blocks = cut_blocks(kernel, out, taps, steps);
    const size_t vector = vector_bytes(kernel);
    const size_t group_bytes =
        blocks.back().panel + static_cast<size_t>(taps) * steps * (vector << blocks.back().log2_vectors);
    const int center = floats ? 0 : (1 << bits) - 1, half = floats ? 0 : 1 << (bits - 1);
    const bool is_lookup = kernel.coding == Coding::lookup || kernel.coding == Coding::lookup_planes;

    Panel panel = allocate(group_bytes * groups);
    panel.group_bytes = group_bytes;
    for (int g = 0; g < groups; ++g)
        for (const Block &block : blocks)
            for (int c = 0; c < block.channels; ++c) {
                const size_t row = (static_cast<size_t>(g) * out + block.first + c) * taps * in;
                const int lane = lane_of(kernel, c % lanes);
                const size_t stride = vector << block.log2_vectors; // from one step to the next
                uint8_t *to = panel.data + g * group_bytes + block.panel + vector * (c / lanes);
                for (int t = 0; t < taps; ++t) {
                    const int tap = tap_order.empty() ? t : tap_order[static_cast<size_t>(t)];
                    for (int s = 0; s < steps; ++s, to += stride)
                        for (int j = 0; j < group; ++j) {
                            // A lookup group takes channels s, s + steps, s + 2 steps, ...: see lookup_offsets.
                            const int i = is_lookup ? s + j * steps : s * group + j;
                            if (i >= in)
                                break;
                            const size_t from = row + static_cast<size_t>(tap) * in + i;
                            const size_t at = static_cast<size_t>(lane) * group + j;
                            switch (kernel.coding) {
                            case Coding::centered8:
                                to[at] = static_cast<uint8_t>(2 * codes[from] - center);
                                break;
                            case Coding::codes8:
                                to[at] = codes[from];
                                break;
                            case Coding::offset8:
                            case Coding::split8:
                                to[at] = static_cast<uint8_t>(codes[from] - half);
                                break;
                            case Coding::centered16: {
                                const int16_t value = static_cast<int16_t>(2 * codes[from] - center);
                                std::memcpy(to + 2 * at, &value, 2);
                                break;
                            }
                            case Coding::floats:
                                std::memcpy(to + 4 * at, &values[from], 4);
                                break;
                            case Coding::lookup:
                                to[lane] = static_cast<uint8_t>(to[lane] | codes[from] << (j * kernel.max_weight_bits));
                                break;
                            case Coding::lookup_planes: // 2 bits: lower bits in the even byte, upper bits in the odd
                                                        // byte
                                to[2 * lane] = static_cast<uint8_t>(to[2 * lane] | (codes[from] & 1) << j);
                                to[2 * lane + 1] = static_cast<uint8_t>(to[2 * lane + 1] | codes[from] >> 1 << j);
                                break;
                            }
                        }
                }
            }
    if (is_lookup)
        panel.safe_steps = count_safe_steps(panel, kernel, blocks, groups, taps * steps);
    if (kernel.coding == Coding::split8)
        return split_pairs(panel, kernel, blocks, groups, taps, steps);
    return panel;
}

Panel build_depthwise_panel(const Graph &graph, const Weight &weight, int bits) {
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
    const std::vector<uint8_t> codes = weight_codes(graph, weight, bits);
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
