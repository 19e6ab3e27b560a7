// Kernels: the inner loops of one instruction set, as one table of functions.
// In: prepared inputs and weight panels (panels.h). Out: accumulators that went through an Epilogue, as ARITHMETIC.md
// says. Each kernels_<isa>.cpp defines one table. engine.cpp picks a table when a model is opened, kernel_selection.cpp
// picks a kernel from it for each convolution. All tables give the same bits.
//
// A convolution is a matrix product of output pixels (rows), taps times input channels (K) and output channels. It is
// computed in tiles:
//
//          input, by tap offsets          panel (weights)                   tile (accumulators)
//                                         one block: 1, 2 or 4 vectors
//          K = taps x steps               <------------------->             <------------------->
//        +-----------------------+      ^ +---------+---------+           ^ +---------+---------+
//   rows | pixel 0: c0 c1 c2 ... |    K | | vector 0| vector 1|      rows | | acc 0,0 | acc 0,1 |
//        | pixel 1: c0 c1 c2 ... |  x   | |  lanes  |  lanes  |  =        | | acc 1,0 | acc 1,1 |
//        | ...                   |      | | ...     | ...     |           | | ...     | ...     |
//        +-----------------------+      v +---------+---------+           v +---------+---------+
//
// A row is one output pixel; the rows of a tile, at most 8 (AMX: 32), are neighbors in one image. A step multiplies
// `step_channels` input channels. A tile finds each input pixel by a byte offset from the start of the image (an
// indirection buffer; taps.h makes it), so there is no im2col copy, and kernel size, stride, padding and dilation do
// not change the loop. Offset 0 is a pixel of zeros: taps outside the image read it. A `line` is a row of pixels of an
// image.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/function.h"

// For functions that must be inlined: a call would move accumulators from registers to memory, and gcc 12 drops calls
// of a function that only prefetches.
#if defined(__GNUC__)
#define ANYPREC_INLINE inline __attribute__((always_inline))
#else
#define ANYPREC_INLINE __forceinline
#endif

namespace anyprec {

// What happens to an accumulator on its way to memory, in the order of the members. Pointers lead to the tile's first
// row and the block's first channel. Row r is r strides further; strides count elements.
struct Epilogue {
    int32_t *raw = nullptr; // if set, store the accumulators here, [rows][width of the block], and stop: Winograd tiles
    // Integer part, modulo 2^32: acc 2^doublings + window_factor * window[row] + constants[constant_rows[row] +
    // channel]
    int doublings = 0;
    const int32_t *window = nullptr; // sum of the input codes under the window of each row
    int window_factor = 0;
    const int32_t *constants = nullptr; // correction for signed inputs; depends on which taps are outside the image
    const int32_t *constant_rows = nullptr;
    const float *scale = nullptr, *shift = nullptr; // per-channel: y = fma(acc, scale, shift); nullptr: y = acc
    bool clip_first = false;
    float low_first = 0, high_first = 0;
    const float *residual = nullptr; // y += residual
    size_t residual_stride = 0;
    bool clip_second = false;
    float low_second = 0, high_second = 0;
    float *out = nullptr; // y; nullptr: not stored
    size_t out_stride = 0;
    uint8_t *codes = nullptr; // round(clamp(y * code_scale + code_shift, 0, levels)); nullptr: not stored
    size_t codes_stride = 0;
    const float *code_scale = nullptr, *code_shift = nullptr;
    float levels = 0;
    // 1-bit codes and nothing else: code = (sum > thresholds[channel]) != flips[channel], where sum is the integer
    // part. The same codes as by the members above; kernels with Kernels::thresholds use it where it saves time.
    // nullptr: none
    const int16_t *thresholds = nullptr;
    const uint8_t *flips = nullptr;
};

// The same epilogue, `channel` channels further.
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
    move(e.thresholds);
    move(e.flips);
    return e;
}

// Moves an epilogue to the rows of the next tile.
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

// The extra members of a Toom-Cook tile (see ToomCookInput below).
struct ToomCookTile {
    size_t position, line; // bytes from one position across to the next, and from one line of blocks to the next, in V
    int block;             // lines of a block: 1, or 2 (even and odd input lines)
    int pixels, lines;     // output pixels and lines inside the image; surplus outputs at the border are discarded
    int width;             // of an output line, in pixels
};

// A step that a tile repeats with the part that Coding::split8 took off its weights.
struct ExtraStep {
    int32_t tap, step;
};

struct Tile {
    const uint8_t *base;    // the image's prepared input, at the group's first channel
    const int32_t *offsets; // [taps][rows] bytes from base; Input::lookup_pairs: [taps][pairs of rows]
    int taps, steps;        // a step reads `step_channels` channels of one tap
    int first_tap;          // taps before it are outside the image for all rows, as are those from first_tap + taps on
    const uint8_t *panel;   // the block's weights, [taps][steps][vectors]
    int safe_steps;         // lookup kernels: steps before an 8-bit sum may overflow (Panel::safe_steps)
    int channels;           // real output channels of the block; the rest is padding
    const uint8_t *prefetch_from; // weights of later tiles; each step prefetches the next prefetch_bytes from here
    size_t prefetch_bytes;
    const ExtraStep *extra; // split8: `extras` steps over all taps, and their weights
    int extras;
    const uint8_t *extra_panel;
    Epilogue epilogue;
    ToomCookTile toom_cook; // Algorithm::toom_cook only
};

using TileFunction = void (*)(const Tile &);

// What a kernel reads: codes, codes widened to 16 bits, floats, offsets into a lookup table, or 1-bit codes as the bits
// of 32-bit words. A lookup offset stands for a group of channels of one pixel; with lookup_pairs for the same channels
// of two pixels. Each pair of input pixels that two neighboring outputs read at the same tap is stored once.
enum class Input : uint8_t { codes, wide, floats, lookup, lookup_pairs, bits };
struct PixelPair {
    int32_t first, second; // input pixel + 1; 0 is the pixel of zeros
};
// How a panel stores the weight with code c at k bits (the weight is 2c + 1 - 2^k):
//   centered8, centered16   2c + 1 - 2^k, as int8 or int16
//   offset8                 c - 2^(k-1), as int8
//   codes8                  c, as uint8
//   split8                  offset8 for vpmaddubsw, whose 16-bit sum of two products overflows if two weights of one
//                           sign add up to more than 128. Part of such weights moves to an extra step.
//   floats                  float32
//   lookup                  the codes of a group of channels side by side in one byte
//   lookup_planes           2 bits: the lower bits of a group in one byte, the upper bits in the next
//   bits                    1 bit: 32 channels in a word, the first one lowest
enum class Coding : uint8_t { centered8, centered16, offset8, codes8, split8, floats, lookup, lookup_planes, bits };

// How a convolution is computed: directly, or position by position on inputs transformed by Winograd or Toom-Cook.
enum class Algorithm : uint8_t { direct, winograd, toom_cook };

constexpr int kMaxRows = 32;     // of a tile: AMX; others have 8
constexpr int kEpilogueRows = 8; // that an epilogue takes at once
constexpr int64_t kNoLimit = int64_t(1) << 40;

// A kernel is described in four parts, so that the table of kernels reads line by line: what a step reads, which bit
// widths and sums it supports, one function per tile size, and its name and speed.
struct Operands {
    Input input;
    Coding coding;
    int step_channels; // input channels per step
    int lanes;         // output channels per vector
};
struct Limits {
    int max_weight_bits; // 0: floats
    int max_act_bits;
    int64_t max_k = kNoLimit; // longest sum (taps times input channels) that cannot overflow
};
struct Tiles {
    int max_log2_vectors;         // blocks are 1, 2, .. 2^max_log2_vectors vectors wide
    int max_rows[4];              // rows of the largest tile, by log2 of the vectors
    const TileFunction *tiles[4]; // [log2 vectors][rows - 1]
};
// Kernels of whole matrices (AMX): partly filled ones take as long as full ones, and a tile takes time of its own.
struct MatrixCost {
    int rows = 1, steps = 1;    // of a full matrix
    double tile_cycles = 0;     // per tile: its first loads, and storing its sums
    double residual_cycles = 0; // per output to which a residual is added
};
struct TileKernel : Operands, Limits, Tiles {
    const char *name;
    int products_per_cycle; // with full vectors, as measured; kernel_selection.cpp compares kernels by it
    Algorithm algorithm;
    MatrixCost matrix;
    bool window; // its accumulator is sum q a, where 2q + 1 or 2q + 1 - 2^k is the weight; needs window sums

    constexpr TileKernel(const char *title, Operands reads, Limits takes, Tiles all, int speed,
                         Algorithm transformed = Algorithm::direct, MatrixCost cost = {})
        : Operands(reads), Limits(takes), Tiles(all), name(title), products_per_cycle(speed), algorithm(transformed),
          matrix(cost), window(coding == Coding::offset8 || coding == Coding::codes8 || coding == Coding::split8 ||
                               coding == Coding::lookup || coding == Coding::lookup_planes || coding == Coding::bits) {}
};

// Epilogue::window_factor for weights of `bits` bits. The accumulator itself counts twice.
inline int window_factor(const TileKernel &k, int bits) {
    return k.coding == Coding::offset8 || k.coding == Coding::split8 ? 1 : 1 - (1 << bits);
}

// Steps that AMX multiplies at once: the largest divisor of all steps that a matrix has room for, so that no rest is
// left.
inline int matrix_steps(int steps) {
    int most = steps < 16 ? steps : 16;
    while (steps % most)
        --most;
    return most;
}

// Bytes of a lookup table: an offset is its number times this. Kernels that count bits (ARM) have no tables, and take
// the number itself.
inline int lookup_entry(const TileKernel &k) {
    return k.step_channels == 8 ? 1 : k.step_channels == 4 ? 16 : 64;
}

// Bytes that a step reads of one input pixel, and of one vector of the panel.
inline size_t step_bytes(const TileKernel &k) {
    switch (k.input) {
    case Input::codes:
        return static_cast<size_t>(k.step_channels);
    case Input::lookup:
    case Input::lookup_pairs:
        return 2; // an offset, whatever the number of channels
    case Input::bits:
        return 4;
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
    case Coding::bits:
        return 4 * static_cast<size_t>(k.lanes);
    case Coding::centered16:
        return 2 * static_cast<size_t>(k.lanes) * k.step_channels;
    case Coding::floats:
        return 4 * static_cast<size_t>(k.lanes) * k.step_channels;
    default:
        return static_cast<size_t>(k.lanes) * k.step_channels;
    }
}

constexpr int kDepthwisePixels = 32;   // of a row, at most
constexpr int kMostDepthwiseTaps = 64; // for kernels by blocks of channels; 7x7 has 49

// One line segment of a depthwise convolution: `pixels` outputs, all channels. Weights are int32 [taps][channels] (2c +
// 1 - 2^k), or float for float inputs.
struct DepthwiseRow {
    const uint8_t *base;
    const int32_t *offsets; // [taps][pixels] bytes from base
    int taps, pixels, channels;
    const void *weights;
    bool fits16; // weights fit signed bytes, and no sum of an output's products leaves 16 bits
    Epilogue epilogue;
};

// Winograd F(2x2, 3x3) in integers, for 3x3 convolutions of stride 1. It takes 16 products per channel for a patch of
// 2x2 outputs; the direct algorithm takes 36. An input patch d of 4x4 codes becomes V = B'dB. The weights g become U =
// (2G)g(2G)'. M is the sum of UV over the channels, position by position. The outputs are A'MA / 4; the division is
// exact. Sums may wrap: results are right modulo 2^32 as long as four times the result fits.
struct WinogradInput {         // neighboring patches, all channels -> V
    const uint8_t *base;       // the image's codes
    const int32_t *offsets[4]; // 4 lines of 2 patches + 2 pixels: bytes from base
    int patches, channels;
    uint8_t *out;         // V of the first patch: [position][patch][bytes of a row]
    size_t row, position; // bytes from patch to patch, and from position to position
};
struct WinogradOutput {  // M of neighboring patches, one block of channels -> two output lines through their epilogues
    const int32_t *sums; // [position][patch][width]
    size_t position;     // accumulators from one position to the next
    int patches, width, channels;
    const int32_t *bias; // [4 outputs][channels], subtracted before the division; nullptr: none
    size_t bias_stride;
    Epilogue lines[2];
    int pixels[2]; // of each line that are inside the image
};
struct Winograd {
    TileKernel tile;  // computes the 16 products
    int bias;         // added to V, except at position 5, so that V is not negative; 0 where V is signed
    size_t element;   // bytes of one element of V
    int lanes;        // input channels transformed at a time
    double transform; // cycles per patch and channel of input and output, as measured, without the products
    void (*input)(const WinogradInput &);
    void (*output)(const WinogradOutput &);
};

// Toom-Cook (Winograd over more points) for float convolutions of stride 2 with 5 to 8 kernel lines and columns, and of
// stride 1 with 3 or 4 where the file says so, in tiles of 4x4 outputs. ARITHMETIC.md, section 4, gives the exact
// steps. With stride 1 a block is one pixel; the drawing is of stride 2.
//
// A block of 2x2 pixels counts as one pixel d with four times the channels. The kernel, padded with zeros to 8x8,
// becomes 4x4 and the stride becomes 1. Then y = A' [(G g G') (B'd B)] A, with the points 0, 1, -1, 2, -2, -1/2 and
// infinity along both axes. That is 49 products per channel; the direct algorithm takes up to 256.
//
//   input: 14 x 14 pixels          V, M: 7 x 7 positions         outputs
//   +---------------------+        +-----------+                 +-------+
//   | 7 x 7 blocks of 2x2 |  B'dB  | product   |  A'MA           | 4 x 4 |
//   | pixels              |  --->  | per       |  --->           |       |
//   |                     |        | position  |                 +-------+
//   +---------------------+        +-----------+
//
// A row of the matrix product is one tile of outputs. The panel holds G g G' as [position down][position
// across][channel]. V is laid out as [position down][parity of the line][tile][position across][parity of the column,
// channel].
constexpr int kToomCookOutputs = 4, kToomCookPoints = 7;
struct ToomCookInput { // B': seven arrays to seven, `times` times; first along lines, then down
    const float *in[kToomCookPoints];
    float *out;
    size_t next_point;        // floats from one output array to the next
    int count, times;         // floats of an array; repetitions
    size_t next_in, next_out; // floats from one repetition to the next
};

// Rows of a matrix product, c = a b, over at most `matmul_width` columns: c[i,j] = fma(a[i,k], b[k,j], c[i,j]) in the
// order of k, starting from `start[j]`, from c itself if `adds`, or +0.
struct MatmulTile {
    const float *a, *b;
    float *c;
    size_t a_stride, b_stride, c_stride; // from row to row
    int rows, terms, columns;
    const float *start;  // [columns], or nullptr
    bool whole;          // rows of b can be read up to a multiple of the vectors' lanes
    size_t a_column = 1; // from one term of a to the next
    bool adds = false;
};

// A transform of Winograd F(4x4, 3x3) in float, for training (winograd_floats.inl): N x N arrays of `count` channels to
// M x M of them. Outputs may be cut into panels of `width` channels, `next_panel` floats apart.
struct WinogradArrays {
    const float *const *in;
    float *const *out;
    int count, width;
    size_t next_panel;
};
struct WinogradFloats {
    using Transform = void (*)(const WinogradArrays &);
    Transform input, gradient, kernel; // 6 x 6, 4 x 4 and 3 x 3 arrays to 6 x 6
    Transform output, kernel_gradient; // 6 x 6 to 4 x 4 and 3 x 3
};

// Products of bfloat16 pairs with sums in float32, for the gradients of training (kernels_bf16.cpp). A pair takes the
// place of a float; an odd number of terms is filled up with 0.
struct PairKernels {
    int matmul_width;
    void (*matmul)(const MatmulTile &);                                 // `terms` counts pairs
    void (*pair_neighbors)(const float *x, size_t count, float *pairs); // x[0] and x[1], x[2] and x[3], ...
    void (*pair_rows)(const float *even, const float *odd, size_t count, float *pairs); // even[0] and odd[0], ...
};

// One position of a recurrent layer: gate sums x of the input and u of the state h, both [gates][hidden].
struct RecurrentCell {
    const float *x, *u;
    const float *before; // h of the position before
    float *state, *h;    // c of an lstm; the new h
    int hidden;
};

// Operations of format 3 (functions.inl): ARITHMETIC.md, sections 8.2 to 8.5.
struct FunctionKernels {
    int matmul_width; // columns of a panel
    void (*pointwise)(Function function, const float *x, float *y, size_t count);
    // A step of 0 repeats the first number.
    void (*binary)(Function function, const float *x, size_t x_step, const float *y, size_t y_step, float *out,
                   size_t count);
    // x is [rows][count]: one number, or a normalized row, for each row. Sums have 16 lanes.
    void (*reduce_rows)(Function function, const float *x, size_t rows, size_t count, float *out);
    void (*norm_rows)(const float *x, size_t rows, size_t count, float eps, float *y);
    void (*softmax_rows)(const float *x, size_t rows, size_t count, float *y);
    // x is [terms][stride]: `columns` columns of it, each by itself. Terms are added one by one.
    void (*reduce_columns)(Function function, const float *x, size_t terms, size_t stride, size_t columns, float *out);
    void (*norm_columns)(const float *x, size_t terms, size_t stride, size_t columns, float eps, float *y);
    void (*matmul)(const MatmulTile &);
    void (*lstm)(const RecurrentCell &);
    void (*gru)(const RecurrentCell &);
    const WinogradFloats *winograd; // for training
};

struct Kernels {
    const char *isa;
    const TileKernel *const *integer; // ends with nullptr; one of them supports all widths
    const TileKernel *floats, *toom_cook;
    void (*toom_cook_input)(const ToomCookInput &);
    void (*depthwise_codes)(const DepthwiseRow &);
    void (*depthwise_floats)(const DepthwiseRow &);
    // y = fma(x, scale, shift) and the rest of the epilogue, over `rows` rows of `channels` values.
    void (*epilogue)(const float *x, size_t stride, int rows, int channels, const Epilogue &);
    // Makes Input::lookup. With G = steps: offsets[g] = (c[g] | c[g+G] << bits | ...) * entry, for each group of
    // channels of `count` pixels, `pixel` bytes apart. `totals`, if given, gets the sum of all codes of each pixel.
    void (*lookup_offsets)(const uint8_t *codes, size_t pixel, int count, int steps, int group, int bits, int entry,
                           uint16_t *offsets, int32_t *totals);
    // Makes Input::lookup_pairs, 1 bit, groups of 4 channels. `zeros` is the pixel of zeros in front of an image.
    void (*pixel_pair_offsets)(const uint8_t *zeros, size_t pixel, const PixelPair *pairs, int count, int steps,
                               uint16_t *offsets);
    void (*widen)(const uint8_t *codes, size_t count, int16_t *wide);
    void (*to_floats)(const uint8_t *codes, size_t count, float *floats);
    // sums[i * stride] = sum of the first `channels` codes of pixel i, for `count` pixels.
    void (*sums)(const uint8_t *codes, size_t pixel, int count, int channels, int32_t *sums, size_t stride);
    // best = the first of `count` taps, then x > best ? x : best for the others in order. `best` may be one of the
    // taps.
    void (*maximum)(float *best, const void *const *taps, int count, int channels);
    void (*maximum_codes)(uint8_t *best, const void *const *taps, int count, int channels);
    void (*accumulate)(float *sum, const float *x, int count);                                // sum += x
    void (*interpolate)(const float *a, const float *b, float weight, float *out, int count); // fma(weight, b - a, a)
    // to[c * to_line + r] = from[r * from_line + c], for r < rows and c < columns.
    void (*transpose_floats)(const float *from, size_t from_line, size_t rows, size_t columns, float *to,
                             size_t to_line);
    void (*transpose_codes)(const uint8_t *from, size_t from_line, size_t rows, size_t columns, uint8_t *to,
                            size_t to_line);
    const FunctionKernels *functions;
    const Winograd *const *winograd = nullptr; // fastest first, ends with nullptr; nullptr: none
    const TileKernel *float_row = nullptr;     // `floats` for layers of one output pixel; nullptr: no other
    void (*release)() = nullptr; // called by each thread when it has run its tiles: AMX keeps a configuration
    // Bytes first .. first + bytes of `count` planes, the most significant plane first, as 8 * bytes codes. nullptr:
    // panels.cpp has a loop without vectors.
    void (*join_planes)(const uint8_t *const *planes, int count, size_t first, size_t bytes, uint8_t *codes) = nullptr;
    bool measured = false;   // CPUs with these kernels differ in their rates: see plan/kernel_rates.h
    bool thresholds = false; // these kernels read Epilogue::thresholds
    // Makes Input::bits, `steps` words a pixel, of `count` pixels; channels past the last one are 0. `totals`, if
    // given, gets the sum of all codes of each pixel. nullptr: no kernel of the table reads them.
    void (*pack_bits)(const uint8_t *codes, size_t pixel, int count, int channels, int steps, uint8_t *words,
                      int32_t *totals) = nullptr;
};

// An instruction set that adds integer products to those of another table; all else is that table's.
struct IntegerKernels {
    const char *isa;
    const TileKernel *const *integer; // ends with nullptr
    const Winograd *const *winograd;  // nullptr: those of the other table
    void (*release)();                // as in Kernels
    bool measured = false;            // as in Kernels
    decltype(Kernels::pack_bits) pack_bits = nullptr;
};

const Kernels *kernels_scalar();
const Kernels *kernels_avx2();
const Kernels *kernels_avxvnni(); // kernel_tables.cpp: kernels_avx2 with integer_avxvnni
const Kernels *kernels_avx512vnni();
const Kernels *kernels_avx512(); // kernel_tables.cpp: kernels_avx512vnni with integer_vbmi
const Kernels *kernels_amx();    // kernel_tables.cpp: kernels_avx512 with integer_amx
extern const IntegerKernels integer_avxvnni, integer_vbmi, integer_amx;
extern const PairKernels pairs_bf16; // for CPUs with avx512_bf16; only if ANYPREC_BF16 is defined
bool amx_multiplies(); // whether a small product by AMX is right; an illegal instruction where there is none
const Kernels *kernels_neon();
const Kernels *kernels_dotprod();
const Kernels *kernels_i8mm();
extern const FunctionKernels functions_neon; // the same for all tables of ARM: they need no more than plain NEON

// The tables of this build, ends with nullptr (kernel_tables.cpp): the one list for dispatch, tests and benchmarks.
const Kernels *const *kernel_tables();
// The table of an instruction set by its name; nullptr: not in this build.
const Kernels *find_kernels(const char *isa);

} // namespace anyprec
