// Plan: a graph made ready for one profile and one input size. In: Graph, profile, H, W, kernels, panels.
// Out: an ordered list of steps over one block of memory (the arena), whose run allocates nothing (execute.h).
// Ops that only pass a convolution's result on (clip, add, clip, quantize) become part of its step: the arithmetic is
// the same, the trip through memory is saved. Built and kept by engine.cpp.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "graph.h"
#include "kernels.h"
#include "panels.h"
#include "shapes.h"
#include "taps.h"

namespace anyprec {

// Where a value lives in the arena. An image is a row of zeros (one pixel, what taps outside the image read), then
// its pixels; `images` such blocks follow each other.
struct Buffer {
    size_t offset = 0;
    size_t pixel = 0; // bytes
    size_t image = 0; // bytes, the row of zeros included
    int pixels = 0;
};

// How a 3x3 convolution goes through Winograd's transforms (kernels.h). Its patches, 2x2 outputs each, are numbered
// line by line and taken in chunks: V of a chunk, then for each block of channels M of the chunk and its outputs.
struct WinogradStep {
    const Winograd *kernel = nullptr;
    int width = 0, height = 0;                    // of the output
    int across = 0, down = 0;                     // patches
    int chunk = 0, chunks = 0;                    // patches at a time, chunks per image
    std::vector<int32_t> grid;                    // [2 down + 2][2 across + 2] bytes to a pixel of the input
    int32_t row_offsets[kMaxRows];                // bytes from patch to patch of V, as tiles want them
    size_t row = 0, position = 0;                 // V: bytes per patch, and per position
    size_t sums_position = 0;                     // M: sums per position
    size_t transformed = 0, sums = 0;             // arena: a place for V, and one for M, for each slot
    size_t transformed_bytes = 0, sums_bytes = 0; // of one slot
    int slots = 0;                                // chunks that may be under way at once
    std::vector<int32_t> bias;                    // [4][out], or empty
};

// How a float convolution goes in quads (kernels.h, ToomCookInput). A slot's memory holds what ToomCookLines (quads.h)
// wants.
struct ToomCookStep {
    int across = 0;    // quads of a line
    int width = 0;     // floats of two input pixels
    size_t line = 0;   // floats of what an input line becomes
    size_t pixels = 0; // floats of an input line with zeros around it
    size_t memory = 0; // arena: for each slot
    size_t bytes = 0;  // of one slot
    int slots = 0;     // runs of lines that may be under way at once
};

// A max pool that alone reads the convolution's result. The two go through an image together, a band of lines at a
// time: the result of a band stays in the second-level cache, and is never in memory as a whole.
struct FusedPool {
    const Op *op = nullptr; // the pool
    Shape from, shape;      // of the convolution's result, and of the pool's
    Buffer out;
    int band = 0;     // lines of the pool at a time
    size_t lines = 0; // arena: a band of the convolution's lines for each slot
    size_t bytes = 0; // of one slot
    int slots = 0;    // bands that may be under way at once
};
constexpr int kSlots = 16; // more threads than that do not help a convolution

struct ConvStep {
    const Op *op = nullptr;
    bool integer = false, depthwise = false;
    const TileKernel *kernel = nullptr;
    std::shared_ptr<const Panel> panel;
    const Panel *next = nullptr; // of the convolution that comes next
    std::vector<Block> blocks;
    int groups = 1, group_in = 0, group_out = 0, taps = 0, steps = 0;
    Buffer input;       // what the kernel reads: the value itself, or made of it by a PrepareStep
    Buffer sums;        // channel sums of every input pixel, [1 + pixels][groups]; pixel == 0: not wanted
    size_t windows = 0; // arena: [groups][output pixels] of one image and thread 0 .. images
    std::shared_ptr<const Offsets> offsets[4];              // by log2 of the vectors
    std::shared_ptr<const std::vector<int32_t>> tap_pixels; // [output pixel][tap] input pixel + 1, 0 outside
    std::vector<int32_t> constants, constant_rows;          // signed inputs
    Epilogue epilogue; // pointers to tables; places below become pointers at run time
    bool has_residual = false, has_out = false, has_codes = false;
    Buffer residual, out, codes;
    int out_channels = 0, out_pixels = 0, out_width = 0, in_width = 0, in_height = 0;
    std::unique_ptr<WinogradStep> winograd;  // nullptr: the plain way
    std::unique_ptr<ToomCookStep> toom_cook; // likewise
    std::unique_ptr<FusedPool> fused_pool;   // nullptr: no pool
};

// Brings a value into the form a kernel reads, and sums its channels.
struct PrepareStep {
    Buffer from, to, sums; // to.pixel == 0: sums alone
    Input input = Input::codes;
    std::shared_ptr<const PixelPairs> pairs; // Input::pairs
    int channels = 0, groups = 1, steps = 0, group = 1, bits = 0, entry = 0;
};

// Zeros around the pixels of the input, where one float convolution alone reads it: a line of its kernel is then one
// run of floats, wherever it lies, and counts as one tap.
struct PaddedInput {
    int top = 0, left = 0, height = 0, width = 0; // with the frame
    bool on = false;
};

struct Step;
struct Plan {
    int images = 0;
    PaddedInput padded_input;
    std::vector<Shape> shapes;
    std::vector<Buffer> buffers; // by value; only those that exist in memory
    std::vector<Step> steps;
    std::vector<bool> codes; // by value
    size_t arena_bytes = 0;
    size_t panel_bytes = 0; // of all panels it uses
    size_t table_bytes = 0; // of the tables its steps share, which grow with the image
    std::vector<std::shared_ptr<const Panel>> panels;
};

// A row of zeros to write before a step runs, at the start of every image of a place.
struct ZeroRow {
    size_t offset, image, pixel; // as in Place
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
        pad
    };
    Kind kind;
    const Op *op = nullptr;
    std::vector<Buffer> inputs;
    std::vector<Shape> input_shapes;
    Buffer out;
    Shape shape; // of the result
    bool codes = false;
    Epilogue epilogue;               // finish
    std::vector<float> scale, shift; // dequantize, per channel
    std::shared_ptr<ConvStep> conv;
    std::shared_ptr<PrepareStep> prepare;
    std::vector<ZeroRow> zero_rows;
};

// Gives a panel for a weight; engine.cpp keeps them.
using PanelSource =
    std::function<std::shared_ptr<const Panel>(int weight, int bits, const TileKernel *kernel, int groups)>;

Plan make_plan(const Graph &graph, int profile, int images, int height, int width, const Kernels &kernels,
               const PanelSource &panels);

} // namespace anyprec
