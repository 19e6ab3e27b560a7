// Panels: a weight in the order in which one kernel reads it. In: bit planes of the file (FORMAT.md, section 1) or
// floats, a kernel, a width. Out: a block of bytes per group and block of output channels. Built on first use of a
// width, kept by model_plans.cpp.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "format/graph.h"
#include "kernels/kernels.h"

namespace anyprec {

// Output channels that one tile computes: 2^log2_vectors vectors, of which `channels` channels are real.
struct Block {
    int first; // channel within the group
    int channels;
    int log2_vectors;
    size_t panel; // bytes from the start of the group's panel
};

std::vector<Block> cut_blocks(const TileKernel &kernel, int channels, int taps, int steps);

struct Extras { // extra steps of one block
    int first, count;
    size_t panel; // bytes from the start of Panel::rests
};

struct FreeMemory {
    void operator()(uint8_t *p) const { std::free(p); }
};

struct Panel {
    std::unique_ptr<uint8_t[], FreeMemory> storage;
    uint8_t *data = nullptr; // cache-line aligned, [group][block][tap][step][vector]
    size_t bytes = 0;
    size_t group_bytes = 0;
    int safe_steps = 0; // lookup kernels: so many consecutive steps cannot overflow 8 bits, whatever the activations
    std::vector<ExtraStep> extra; // split8
    std::vector<Extras> extras;   // by group and block
    std::vector<uint8_t> rests;   // weights of the extra steps
    std::vector<int32_t> bias;    // Winograd: what a bias of 1 on V adds to the four outputs, times 4: [4][out]

    size_t held() const { return bytes + rests.size(); }
};

// Sets what a tile reads of its panel: block number `block` of a group.
inline void set_panel(Tile &tile, const Panel &panel, const std::vector<Block> &blocks, int group, int block) {
    tile.panel = tile.prefetch_from = panel.data + panel.group_bytes * static_cast<size_t>(group) + blocks[block].panel;
    tile.safe_steps = panel.safe_steps;
    if (panel.extras.empty())
        return;
    const Extras &extras = panel.extras[static_cast<size_t>(group) * blocks.size() + block];
    tile.extra = panel.extra.data() + extras.first;
    tile.extras = extras.count;
    tile.extra_panel = panel.rests.data() + extras.panel;
}

// Huge pages (2 MiB) where the memory has whole ones: page faults take a tenth of the time, 0.1 ms per MiB instead
// of 1.
void use_large_pages(uint8_t *data, size_t bytes);

// The first cache line at or after p.
inline uint8_t *at_line(uint8_t *p) {
    return p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64;
}

// Codes of a weight at `bits`, from its planes: (out, kh, kw, in).
std::vector<uint8_t> weight_codes(const Graph &graph, const Weight &weight, int bits);

// Float values of a weight: its own, or the tail of a quantized weight.
std::vector<float> weight_floats(const Weight &weight);

// `tap_order`: the taps in the order of the panel; empty: as in the file.
Panel build_panel(const Graph &graph, const Weight &weight, const TileKernel &kernel, int bits, int groups,
                  const std::vector<int> &tap_order = {});

// For depthwise_codes and depthwise_floats: [tap][channel], int32 2c + 1 - 2^k, or float (bits 32).
Panel build_depthwise_panel(const Graph &graph, const Weight &weight, int bits);

// For recurrent layers: biases [panels * width], then weights [panel][hidden][width] of `width` gate rows each.
Panel build_recurrent_panel(const Weight &weight, int width);

} // namespace anyprec
