// Kernels: the inner loops for one instruction set, as one table of functions. kernels_<isa>.cpp make them, engine.cpp
// picks a table once (kernels_for), plan.cpp picks from it for each convolution. All tables give the same bits.
//
// An integer convolution is cut into tiles: `rows` neighbouring output pixels of one image times one block of output
// channels. Each input pixel a tile reads is a byte offset from the image's first byte (offset 0 is a row of zeros, for
// taps outside the image), so any kernel size, stride, padding and dilation is the same loop and nothing is copied.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anyprec {

// What happens to an accumulator on its way to memory, in this order. Pointers stand at the tile's first row and the
// block's first channel; row r is r strides further (strides count elements).
struct Epilogue {
    // Integers first, modulo 2^32: acc 2^doublings + window_factor * window[row] + constants[constant_rows[row] + channel]
    int doublings = 0;
    const int32_t *window = nullptr; // sum of the input codes under each row
    int window_factor = 0;
    const int32_t *constants = nullptr; // for signed inputs; depends on the taps outside the image
    const int32_t *constant_rows = nullptr;
    const float *scale = nullptr, *shift = nullptr; // y = fma(acc, scale, shift), or acc without
    bool clip_first = false;
    float low_first = 0, high_first = 0;
    const float *residual = nullptr; // y += residual
    size_t residual_stride = 0;
    bool clip_second = false;
    float low_second = 0, high_second = 0;
    float *out = nullptr; // y, if wanted
    size_t out_stride = 0;
    uint8_t *codes = nullptr; // round(clamp(y * code_scale + code_shift, 0, levels)), if wanted
    size_t codes_stride = 0;
    const float *code_scale = nullptr, *code_shift = nullptr;
    float levels = 0;
};

struct Tile {
    const uint8_t *base;    // the image's prepared input, at the group's first channel
    const int32_t *offsets; // [taps][rows] bytes from base
    int taps, steps;        // steps of the kernel's `group` channels per tap
    const uint8_t *panel;   // the block's weights, in the order taps, steps
    int channels;           // of the block that exist; the rest is padding
    const uint8_t *ahead;   // a line a step from here on is fetched into the cache: the next block's panel
    Epilogue epilogue;
};

using TileFunction = void (*)(const Tile &);

// What a kernel reads: the codes themselves, codes as 16 bit integers, floats, or table offsets for a group of channels.
enum class Input : uint8_t { codes, wide, floats, lookup };
// What a panel holds for code c at k bits: 2c+1-2^k, c-2^(k-1), the float, the codes of a group side by side, or (two
// planes) the upper and the lower bits of a group in neighbouring bytes.
enum class Coding : uint8_t { centred8, centred16, offset8, floats, lookup, lookup_planes };

constexpr int kMaxRows = 8;

struct TileKernel {
    const char *name;
    Input input;
    Coding coding;
    int group;            // input channels per step
    int lanes;            // output channels per vector
    int max_weight_bits;  // 0: floats
    int max_act_bits;
    int64_t max_k;        // longest sum it can hold
    bool window;          // its sum is S = sum q a with 2q + 1 or 2q + 1 - 2^k the weight: wants window sums
    int shifts;           // blocks are 1, 2, .. 2^shifts vectors wide
    int rows[4];          // most rows of a tile, by log2 of the vectors
    const TileFunction *tiles[4]; // [log2 vectors][rows - 1]
    int rate = 1; // products per cycle with full vectors, as measured; plan.cpp weighs kernels by it
};

// Bytes a step reads of one input pixel, and of one vector of the panel.
inline size_t step_bytes(const TileKernel &k) {
    switch (k.input) {
    case Input::codes:
        return static_cast<size_t>(k.group);
    case Input::lookup:
        return 2; // an offset, whatever the group
    case Input::wide:
        return 2 * static_cast<size_t>(k.group);
    default:
        return 4 * static_cast<size_t>(k.group);
    }
}
inline size_t vector_bytes(const TileKernel &k) {
    switch (k.coding) {
    case Coding::lookup:
        return static_cast<size_t>(k.lanes);
    case Coding::lookup_planes:
        return 2 * static_cast<size_t>(k.lanes);
    case Coding::centred16:
        return 2 * static_cast<size_t>(k.lanes) * k.group;
    case Coding::floats:
        return 4 * static_cast<size_t>(k.lanes) * k.group;
    default:
        return static_cast<size_t>(k.lanes) * k.group;
    }
}

// A row of a depth-wise convolution: `pixels` outputs, all channels. Weights are int32 [taps][channels] (2c+1-2^k), or
// floats for float inputs.
struct DepthRow {
    const uint8_t *base;
    const int32_t *offsets; // [taps][pixels] bytes
    int taps, pixels, channels;
    const void *weights;
    Epilogue epilogue;
};

struct Kernels {
    const char *isa;
    const TileKernel *const *integer; // the best first, ends with nullptr; the last takes everything
    const TileKernel *floats;
    void (*depth_codes)(const DepthRow &);
    void (*depth_floats)(const DepthRow &);
    // y = fma(x, scale, shift) and what follows, over rows of `channels` values; `rows` of them.
    void (*finish)(const float *x, size_t stride, int rows, int channels, const Epilogue &);
    // The lookup input: offsets[g] = (c[g] | c[g+G] << bits | ...) * entry for G = steps groups of one pixel.
    void (*lookup_offsets)(const uint8_t *codes, int steps, int group, int bits, int entry, uint16_t *offsets);
    void (*widen)(const uint8_t *codes, size_t count, int16_t *wide);
    int32_t (*sum)(const uint8_t *codes, int count);
    void (*maximum)(float *best, const float *x, int count);         // best = x > best ? x : best
    void (*maximum_codes)(uint8_t *best, const uint8_t *x, int count);
    void (*accumulate)(float *sum, const float *x, int count);       // sum += x
    void (*mix)(const float *a, const float *b, float weight, float *out, int count); // fma(weight, b - a, a)
};

const Kernels *kernels_scalar();
const Kernels *kernels_avx2();
const Kernels *kernels_avx512();

} // namespace anyprec
