// Kernels: the inner loops for one instruction set, as one table of functions. kernels_<isa>.cpp make them, engine.cpp
// picks a table once (kernels_for), choose.cpp picks from it for each convolution. All tables give the same bits.
//
// An integer convolution is cut into tiles: `rows` neighboring output pixels of one image times one block of output
// channels. Each input pixel a tile reads is a byte offset from the image's first byte (offset 0 is a row of zeros, for
// taps outside the image), so any kernel size, stride, padding and dilation is the same loop and nothing is copied.
#pragma once

#include <cstddef>
#include <cstdint>

// For what must not become a call: sums in registers would go through memory, and gcc 12 takes a function that only
// prefetches for one that does nothing.
#if defined(__GNUC__)
#define ANYPREC_INLINE inline __attribute__((always_inline))
#else
#define ANYPREC_INLINE __forceinline
#endif

namespace anyprec {

// What happens to an accumulator on its way to memory, in this order. Pointers stand at the tile's first row and the
// block's first channel; row r is r strides further (strides count elements).
struct Epilogue {
    int32_t *raw = nullptr; // the sums as they are, [rows][width of the block], and nothing else: tiles of a Winograd
    // Integers first, modulo 2^32: acc 2^doublings + window_factor * window[row] + constants[constant_rows[row] +
    // channel]
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

// The same at a channel further on.
inline Epilogue from_channel(const Epilogue &whole, int channel) {
    Epilogue e = whole;
    const auto move = [channel](auto *&pointer) {
        if (pointer)
            pointer += channel;
    };
    move(e.constants);
    move(e.scale);
    move(e.shift);
    move(e.residual);
    move(e.out);
    move(e.codes);
    move(e.code_scale);
    move(e.code_shift);
    return e;
}

// To the rows of the next tile.
inline void advance(Epilogue &e, int rows) {
    const size_t count = static_cast<size_t>(rows);
    const auto move = [count](auto *&pointer, size_t stride) {
        if (pointer)
            pointer += count * stride;
    };
    move(e.window, 1);
    move(e.constant_rows, 1);
    move(e.residual, e.residual_stride);
    move(e.out, e.out_stride);
    move(e.codes, e.codes_stride);
}

// What a tile of quads wants beyond that (ToomCookInput, below).
struct ToomCookTile {
    size_t position, line; // bytes from base to the next position across, and to the second half of a V
    int pixels, lines;     // outputs that exist
    int width;             // of a whole line of them
};

// A step that a tile does once more, with what Coding::split8 took off its weights.
struct ExtraStep {
    int32_t tap, step;
};

struct Tile {
    const uint8_t *base;          // the image's prepared input, at the group's first channel
    const int32_t *offsets;       // [taps][rows] bytes from base; [taps][pairs of rows] for Input::pairs
    int taps, steps;              // steps of the kernel's `group` channels per tap
    int first_tap;                // the others are outside the image
    const uint8_t *panel;         // the block's weights, in the order taps, steps
    int safe_steps;               // look-ups: steps whose sums a byte holds (Panel::hold)
    int channels;                 // of the block that exist; the rest is padding
    const uint8_t *prefetch_from; // weights to come: from here on, prefetch_bytes a step are fetched meanwhile
    size_t prefetch_bytes;
    const ExtraStep *extra; // split8: `extras` of them, of all taps, and their weights
    int extras;
    const uint8_t *extra_panel;
    Epilogue epilogue;
    ToomCookTile toom_cook; // quads alone
};

using TileFunction = void (*)(const Tile &);

// What a kernel reads: the codes themselves, codes as 16 bit integers, floats, table offsets for a group of channels,
// or such for two pixels at once, each pair that any two neighboring outputs meet at a tap in a place of its own.
enum class Input : uint8_t { codes, wide, floats, lookup, lookup_pairs };
struct PixelPair {
    int32_t first, second; // input pixel + 1; 0 is the row of zeros
};
// What a panel holds for code c at k bits: 2c+1-2^k, c-2^(k-1), the float, the codes of a group side by side, or (two
// planes) the upper and the lower bits of a group in neighboring bytes. split8 is offset8 for vpmaddubsw, whose 16
// bits hold the sum of two products only if the weights do not add up to more than 128 one way: of two larger ones a
// part goes to an extra step.
enum class Coding : uint8_t { centered8, centered16, offset8, split8, floats, lookup, lookup_planes };

// What a panel's weights meet: codes or floats, or what Winograd or ToomCookInput makes of them, position by position.
enum class Algorithm : uint8_t { direct, winograd, toom_cook };

constexpr int kMaxRows = 8;
constexpr int64_t kNoLimit = int64_t(1) << 40;

// A kernel in four parts, so that a table of them reads line by line: what a step reads, which numbers it can take, a
// function for every size of tile.
struct Operands {
    Input input;
    Coding coding;
    int step_channels; // input channels per step
    int lanes;         // output channels per vector
};
struct Limits {
    int max_weight_bits; // 0: floats
    int max_act_bits;
    int64_t max_k = kNoLimit; // longest sum it can hold
};
struct Tiles {
    int max_log2_vectors;         // blocks are 1, 2, .. 2^shifts vectors wide
    int max_rows[4];              // most rows of a tile, by log2 of the vectors
    const TileFunction *tiles[4]; // [log2 vectors][rows - 1]
};
struct TileKernel : Operands, Limits, Tiles {
    const char *name;
    int products_per_cycle; // products per cycle with full vectors, as measured; choose.cpp weighs kernels by it
    Algorithm algorithm;
    bool window; // its sum is S = sum q a with 2q + 1 or 2q + 1 - 2^k the weight: wants window sums

    constexpr TileKernel(const char *title, Operands reads, Limits takes, Tiles all, int speed,
                         Algorithm transformed = Algorithm::direct)
        : Operands(reads), Limits(takes), Tiles(all), name(title), products_per_cycle(speed), algorithm(transformed),
          window(coding == Coding::offset8 || coding == Coding::split8 || coding == Coding::lookup ||
                 coding == Coding::lookup_planes) {}
};

// What a window's sum of codes counts, at `bits` of the weights: the kernel's own sum counts twice.
inline int window_factor(const TileKernel &k, int bits) {
    return k.coding == Coding::offset8 || k.coding == Coding::split8 ? 1 : 1 - (1 << bits);
}

// Bytes a step reads of one input pixel, and of one vector of the panel.
inline size_t step_bytes(const TileKernel &k) {
    switch (k.input) {
    case Input::codes:
        return static_cast<size_t>(k.step_channels);
    case Input::lookup:
    case Input::lookup_pairs:
        return 2; // an offset, whatever the group
    case Input::wide:
        return 2 * static_cast<size_t>(k.step_channels);
    default:
        return 4 * static_cast<size_t>(k.step_channels);
    }
}
inline size_t vector_bytes(const TileKernel &k) {
    switch (k.coding) {
    case Coding::lookup:
        return static_cast<size_t>(k.lanes);
    case Coding::lookup_planes:
        return 2 * static_cast<size_t>(k.lanes);
    case Coding::centered16:
        return 2 * static_cast<size_t>(k.lanes) * k.step_channels;
    case Coding::floats:
        return 4 * static_cast<size_t>(k.lanes) * k.step_channels;
    default:
        return static_cast<size_t>(k.lanes) * k.step_channels;
    }
}

// A row of a depth-wise convolution: `pixels` outputs, all channels. Weights are int32 [taps][channels] (2c+1-2^k), or
// floats for float inputs.
struct DepthwiseRow {
    const uint8_t *base;
    const int32_t *offsets; // [taps][pixels] bytes
    int taps, pixels, channels;
    const void *weights;
    Epilogue epilogue;
};

// Winograd's F(2x2, 3x3) in integers, for 3x3 convolutions of stride 1: 16 products per channel make the four outputs
// of a 2x2 patch, where the plain way takes 36. An input patch d of 4x4 codes becomes V = B'dB, the weights U =
// (2G)g(2G)', the sums M over channels of UV (position by position) the outputs A'MA / 4, which divides exactly. Sums
// may wrap: all is right modulo 2^32 as long as four times the result fits.
struct WinogradInput {         // a run of patches beside each other, all channels -> V
    const uint8_t *base;       // the image's codes
    const int32_t *offsets[4]; // a line of 2 patches + 2 pixels each: bytes from base
    int patches, channels;
    uint8_t *out;         // V of the first patch: [position][patch][row bytes]
    size_t row, position; // bytes from patch to patch, from position to position
};
struct WinogradOutput {  // M of a run of patches, one block of channels -> what Epilogue says, two lines of pixels
    const int32_t *sums; // [position][patch][width]
    size_t position;     // sums from one position to the next
    int patches, width, channels;
    const int32_t *bias; // of the 4 outputs, taken off before the division; nullptr: none
    size_t bias_stride;
    Epilogue lines[2];
    int pixels[2]; // of each line that exist
};
struct Winograd {
    TileKernel tile;  // for the 16 products
    int bias;         // on every V but that of position 5, so that none is negative; 0 where V is signed
    size_t element;   // bytes of a V
    int lanes;        // input channels are transformed so many at a time
    double transform; // cycles per patch and channel of input and output, as measured: all but the products
    void (*input)(const WinogradInput &);
    void (*output)(const WinogradOutput &);
};

// A float convolution of stride 2 and of 5 to 8 lines and columns, four by four outputs (a quad) at a time. Even and
// odd lines and columns of the kernel, filled up to four each, meet even and odd pixels; so two by two pixels count as
// one of four times the channels, d, and the stride is 1: y = A' [(G g G') (B'd B)] A, by Toom's and Cook's points 0,
// 1, -1, 2, -2, -1/2 and infinity along both axes. These are 49 products for each of the channels, where the plain way
// takes up to 256. A tile's rows are quads, its panel holds G g G' as [position down][position across][channel], and V
// = B'd B lies as [position down][parity of the line][quad][position across][parity of the column, channel].
constexpr int kToomCookOutputs = 4, kToomCookPoints = 7;
struct ToomCookInput { // B': seven arrays to seven, `times` times; along a line, then down the lines
    const float *in[kToomCookPoints];
    float *out;
    size_t next_point;        // floats from one output array to the next
    int count, times;         // floats of an array
    size_t next_in, next_out; // floats from one time to the next
};

struct Kernels {
    const char *isa;
    const TileKernel *const *integer; // the best first, ends with nullptr; the last takes everything
    const TileKernel *floats, *toom_cook;
    void (*toom_cook_input)(const ToomCookInput &);
    void (*depthwise_codes)(const DepthwiseRow &);
    void (*depthwise_floats)(const DepthwiseRow &);
    // y = fma(x, scale, shift) and what follows, over rows of `channels` values; `rows` of them.
    void (*epilogue)(const float *x, size_t stride, int rows, int channels, const Epilogue &);
    // The lookup input: offsets[g] = (c[g] | c[g+G] << bits | ...) * entry for G = steps groups of a pixel; `count` of
    // them, `pixel` bytes from one to the next. `totals`, if given: the sum of all codes of each pixel.
    void (*lookup_offsets)(const uint8_t *codes, size_t pixel, int count, int steps, int group, int bits, int entry,
                           uint16_t *offsets, int32_t *totals);
    // The pairs input: `zeros` is the row of zeros of an image whose pixels follow it, 1 bit, groups of 4.
    void (*pixel_pair_offsets)(const uint8_t *zeros, size_t pixel, const PixelPair *pairs, int count, int steps,
                               uint16_t *offsets);
    void (*widen)(const uint8_t *codes, size_t count, int16_t *wide);
    void (*to_floats)(const uint8_t *codes, size_t count, float *floats);
    // sums[i stride] = sum of the first `channels` codes of pixel i, of `count` pixels.
    void (*sums)(const uint8_t *codes, size_t pixel, int count, int channels, int32_t *sums, size_t stride);
    // best = the first of `count` taps, then x > best ? x : best for all others in turn. `best` may be a tap.
    void (*maximum)(float *best, const void *const *taps, int count, int channels);
    void (*maximum_codes)(uint8_t *best, const void *const *taps, int count, int channels);
    void (*accumulate)(float *sum, const float *x, int count);                                // sum += x
    void (*interpolate)(const float *a, const float *b, float weight, float *out, int count); // fma(weight, b - a, a)
    const Winograd *const *winograd = nullptr; // the best first, ends with nullptr; may be missing altogether
};

const Kernels *kernels_scalar();
const Kernels *kernels_avx2();
const Kernels *kernels_avx512();

} // namespace anyprec
