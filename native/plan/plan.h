// Plan: a graph prepared for one profile and one size of its inputs. In: Graph, profile, shapes, kernels, panels. Out:
// an ordered list of steps over one block of memory (the arena); running it allocates nothing (execute.h). A
// convolution's step fuses the clip, add, clip and quantize that follow it: the arithmetic (ARITHMETIC.md) is the same,
// but intermediate values stay out of memory. Built and kept by model_plans.cpp.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "format/graph.h"
#include "format/shapes.h"
#include "kernels/kernels.h"
#include "plan/axes.h"
#include "plan/panels.h"
#include "plan/shared_prefix.h"
#include "plan/taps.h"

namespace anyprec {

// Where a value lives in the arena. A value of any number of axes is pixels of C numbers, where C is the last axis.
// Each image is a pixel of zeros, which taps outside the image read, followed by its pixels. The images of a batch
// follow each other. A reshaped value is the same memory with pixels of another size: there is room for the largest
// pixel of zeros, and smaller ones are its end.
struct Buffer {
    size_t offset = 0;
    size_t shift = 0; // bytes in front of the pixel of zeros that are part of a larger one
    size_t pixel = 0; // bytes
    size_t image = 0; // bytes, the pixel of zeros included
    int pixels = 0;
};

// A 3x3 convolution by Winograd (kernels.h). Patches of 2x2 outputs are numbered line by line and computed in chunks: V
// of a chunk, then for each block of channels M of the chunk and its outputs.
struct WinogradStep {
    const Winograd *kernel = nullptr;
    int width = 0, height = 0;                    // of the output
    int across = 0, down = 0;                     // patches per line, lines of patches
    int chunk = 0, chunks = 0;                    // patches at a time, chunks per image
    std::vector<int32_t> grid;                    // [2 down + 2][2 across + 2] byte offsets of input pixels
    int32_t row_offsets[kMaxRows];                // byte offsets of patches in V, for tiles
    size_t row = 0, position = 0;                 // V: bytes per patch, and per position
    size_t sums_position = 0;                     // M: accumulators per position
    size_t transformed = 0, sums = 0;             // arena: V and M, one of each per slot
    size_t transformed_bytes = 0, sums_bytes = 0; // of one slot
    int slots = 0;                                // chunks computed at the same time
    std::vector<int32_t> bias;                    // [4][out], or empty
};

// A float convolution by Toom-Cook (kernels.h, ToomCookInput). ToomCookLines (toom_cook.h) defines a slot's memory.
struct ToomCookStep {
    int across = 0;    // tiles per line
    int block = 2;     // lines and columns of pixels that count as one: the stride
    int width = 0;     // floats of a line of a block
    size_t line = 0;   // floats of a transformed input line
    size_t pixels = 0; // floats of an input line with its padding
    size_t memory = 0; // arena: all slots
    size_t bytes = 0;  // of one slot
    int slots = 0;     // runs of lines computed at the same time
};

// A max pool fused with the convolution that only it reads. Both are computed a band of lines at a time: the
// convolution's lines of a band stay in the L2 cache, and the whole result is never in memory.
struct FusedPool {
    const Op *op = nullptr; // the pool
    Shape from, shape;      // of the convolution's result, and of the pool's
    Buffer out;
    int band = 0;     // pool lines at a time
    size_t lines = 0; // arena: one band of convolution lines per slot
    size_t bytes = 0; // of one slot
    int slots = 0;    // bands computed at the same time
};
constexpr int kSlots = 16; // a convolution gains nothing from more threads

struct ConvStep {
    const Op *op = nullptr;
    bool integer = false, depthwise = false;
    bool fits16 = false; // depthwise: as in DepthwiseRow
    bool phases = false; // transposed: outputs that read the same taps are computed together (taps.h)
    const TileKernel *kernel = nullptr;
    std::shared_ptr<const Panel> panel;
    const Panel *next = nullptr; // of the next convolution, for prefetching
    std::vector<Block> blocks;
    int groups = 1, group_in = 0, group_out = 0, taps = 0, steps = 0;
    Buffer input;       // what the kernel reads: the value itself, or what a PrepareStep makes of it
    Buffer sums;        // sum over channels of every input pixel, [1 + pixels][groups]; pixel == 0: not needed
    size_t windows = 0; // arena: window sums, [image][group][output pixel]
    std::shared_ptr<const Offsets> offsets[4];              // by log2 of the vectors of a block
    std::shared_ptr<const std::vector<int32_t>> tap_pixels; // [output pixel][tap] input pixel + 1, 0 outside the image
    std::vector<int32_t> constants, constant_rows;          // correction for signed inputs
    std::vector<int16_t> thresholds;                        // of the epilogue, with flips
    std::vector<uint8_t> flips;
    Epilogue epilogue; // pointers to tables; the buffers below become pointers at run time
    bool has_residual = false, has_out = false, has_codes = false;
    Buffer residual, out, codes;
    int out_channels = 0, out_pixels = 0, out_width = 0, in_width = 0, in_height = 0;
    std::unique_ptr<WinogradStep> winograd;  // nullptr: direct
    std::unique_ptr<ToomCookStep> toom_cook; // nullptr: direct
    std::unique_ptr<FusedPool> fused_pool;   // nullptr: no pool
};

// Converts a value to the form a kernel reads, and sums its channels.
struct PrepareStep {
    Buffer from, to, sums; // to.pixel == 0: only sums
    Input input = Input::codes;
    std::shared_ptr<const PixelPairs> pairs; // Input::lookup_pairs
    int channels = 0, groups = 1, steps = 0, group = 1, bits = 0, entry = 0;
};

// Zero padding stored around the input image, where one float convolution is its only reader. A kernel line then reads
// consecutive floats everywhere, and counts as one tap.
struct PaddedInput {
    int top = 0, left = 0, height = 0, width = 0; // height and width with padding
    bool on = false;
};

struct Step;
struct Plan {
    int images = 0;
    PaddedInput padded_input;
    std::vector<Shape> shapes;
    std::vector<Buffer> buffers; // by value; only values that exist in memory
    std::vector<Step> steps;
    std::vector<bool> codes; // by value: codes, not floats
    std::vector<int> kept;   // parts other than the whole: values that are handed over
    size_t arena_bytes = 0;
    size_t panel_bytes = 0; // of all panels it uses
    size_t table_bytes = 0; // of the tables shared by its steps; they grow with the image
    std::vector<std::shared_ptr<const Panel>> panels;
};

// A pixel of zeros to write before a step runs, at the start of every image of a buffer.
struct ZeroRow {
    size_t offset, image, pixel; // as in Buffer; with `shift`
};

// What a code stands for: factor * code + shift.
struct CodeValue {
    int factor = 1, shift = 0;
};

// A product of two values of codes, by tiles (plan_products.cpp has the formulas). Panels, sums and widened codes are
// made at run time: offsets into the arena.
struct CodesProduct {
    const TileKernel *kernel = nullptr;
    std::vector<Block> blocks;
    int steps = 0, bits = 0; // bits of the second value
    CodeValue left, right;
    bool wide = false;                           // the kernel reads 16-bit integers: what codes stand for
    size_t row = 0;                              // bytes of a row of the first value, as the kernel reads it
    int32_t row_offsets[kMaxRows];               // bytes, for tiles
    int doublings = 0, window_factor = 0;        // as in Epilogue
    int column_factor = 0, constant = 0;         // Epilogue::constants: column_factor * sum of a column + constant
    std::vector<float> scale, shift;             // one number, as often as the widest block has channels
    size_t left_count = 0, right_count = 0;      // matrices of the values, per image
    size_t panel_bytes = 0;                      // of one matrix
    size_t panels = 0, columns = 0, windows = 0; // [image][matrix]; columns where column_factor, windows where
    size_t widened = 0;                          // window_factor, widened where `wide`
};

// A product of matrices: ARITHMETIC.md, section 8. The second matrix is packed into panels of kernels.matmul_width
// columns, [panel][k][width], where that pays or it is transposed.
struct MatmulStep {
    int m = 0, k = 0, n = 0;
    Broadcast matrices; // leading axes: offsets of whole matrices in floats
    bool packs = false;
    int panels = 0;
    size_t packed_count = 0; // matrices to pack per image
    int packed_images = 1;   // 1 where the second value is a constant
    size_t panel_floats = 0, scratch = 0;
    std::shared_ptr<CodesProduct> codes; // nullptr: floats
};

// A reduce or norm over axes. As rows: [outer][terms], contiguous; else [outer][terms][inner], terms added one by one.
// Where the axes are not in that order, the value is first copied into scratch in that order (and back, for a norm).
struct ReduceStep {
    bool rows = false;
    size_t outer = 1, terms = 1, inner = 1;
    bool copies = false;
    Permutation there, back;
    size_t scratch = 0, scratch_image = 0; // arena, bytes per image
};

struct RecurrentStep {
    std::shared_ptr<const Panel> panel;
    int hidden = 0, gates = 0, length = 0;
    int sequences = 1;  // of an image, one after another: its leading axes
    size_t scratch = 0; // arena: sums of the gates and the state c, per sequence
};

struct Step {
    enum class Kind {
        prepare,
        conv,
        elementwise,
        dequantize,
        concat,
        max_pool,
        avg_pool,
        resize,
        softmax,
        flatten,
        pad,
        constant,
        transpose,
        pick, // slice, gather
        pointwise,
        binary,
        reduce,
        norm,
        softmax_single,
        matmul,
        embedding,
        recurrent
    };
    Kind kind;
    const Op *op = nullptr;
    std::vector<Buffer> inputs;
    std::vector<Shape> input_shapes;
    std::vector<const float *> constants; // binary, matmul: by input, its numbers where it is a constant, else nullptr
    Buffer out;
    Shape shape; // of the result
    bool codes = false;
    Epilogue epilogue;               // elementwise
    std::vector<float> scale, shift; // dequantize, per channel
    int row_step = 1;                // dequantize: only every second, third, ... row is read
    std::shared_ptr<ConvStep> conv;
    std::shared_ptr<PrepareStep> prepare;
    const float *weight = nullptr; // constant, embedding
    int weight_rows = 0;           // embedding
    Permutation permutation;       // transpose
    Broadcast broadcast;           // binary
    std::shared_ptr<MatmulStep> matmul;
    std::shared_ptr<ReduceStep> reduce;
    std::shared_ptr<RecurrentStep> recurrent;
    std::vector<ZeroRow> zero_rows;
};

// Returns the panel of a weight (panels.h); model_plans.cpp keeps panels. Without a kernel: that of a depthwise
// convolution, or with groups 0 that of a recurrent layer.
using PanelSource = std::function<std::shared_ptr<const Panel>(int weight, int bits, const TileKernel *kernel,
                                                               int groups, const std::vector<int> &tap_order)>;

// What a plan computes: everything; everything, and the kept values of the shared prefix are in the arena at the end;
// the rest, from kept values that the caller writes into the arena; the prefix of a split batch, or its rest.
enum class PlanPart { whole, keeping, rest, split_prefix, split_rest };

// Parts other than the whole need `prefix`, that of the graph; they are of prefix->graph, which must outlive the plan.
Plan make_plan(const Graph &graph, int profile, const std::vector<Shape> &inputs, const Kernels &kernels,
               const PanelSource &panels, PlanPart part, const SharedPrefix *prefix);

} // namespace anyprec
