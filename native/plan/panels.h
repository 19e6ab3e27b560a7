// Panels: a weight in the order in which one kernel reads it. In: bit planes of the file (FORMAT.md, section 1) or
// floats, a kernel, a width. Out: a block of bytes per group and block of output channels. Built on first use of a
// width, kept by model_plans.cpp.
#pragma once

#include <cstdint>
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

// Memory of panels. Most panels are smaller than a huge page, and as many page faults as they have pages would take
// longer than building them. So panels share chunks; a chunk is freed with the last of its panels.
class PanelMemory {
  public:
    // Zeros from a cache line on, with 64 bytes of slack behind them.
    std::shared_ptr<uint8_t> take(size_t bytes);

  private:
    std::shared_ptr<uint8_t> chunk_;
    size_t left_ = 0;  // bytes of the chunk, at its end
    size_t given_ = 0; // in all
};

struct Panel {
    std::shared_ptr<uint8_t> storage;
    uint8_t *data = nullptr; // of storage, cache-line aligned: [group][block][tap][step][vector]
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

// The first cache line at or after p.
inline uint8_t *at_line(uint8_t *p) {
    return p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64;
}

// Codes of a weight at `bits`, from its planes: (out, kh, kw, in).
std::vector<uint8_t> weight_codes(const Graph &graph, const Weight &weight, int bits, const Kernels &kernels);

// Float values of a weight: its own, or the tail of a quantized weight.
std::vector<float> weight_floats(const Weight &weight);

// `tap_order`: the taps in the order of the panel; empty: as in the file. `memory`: shared with other panels; nullptr:
// the panel's own.
Panel build_panel(const Graph &graph, const Weight &weight, const Kernels &kernels, const TileKernel &kernel, int bits,
                  int groups, const std::vector<int> &tap_order = {}, PanelMemory *memory = nullptr);

// For depthwise_codes and depthwise_floats: [tap][channel], int32 2c + 1 - 2^k, or float (bits 32).
Panel build_depthwise_panel(const Graph &graph, const Weight &weight, int bits, const Kernels &kernels);

// For recurrent layers: biases [panels * width], then weights [panel][hidden][width] of `width` gate rows each.
Panel build_recurrent_panel(const Weight &weight, int width);

} // namespace anyprec
