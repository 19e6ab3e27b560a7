// Runs the steps of a plan. In: a Plan, and an arena that holds the input. Out: the arena holds all outputs.
// Convolutions are in execute_conv.cpp, pools and resize in execute_pool.cpp, copies in execute_moves.cpp, functions
// and matrices in execute_functions.cpp, other steps in execute.cpp. The arithmetic is in the kernels, or in portable
// code as ARITHMETIC.md says. Called by model_run.cpp. Allocates nothing.
#pragma once

#include <algorithm>

#include "anyprec/engine.h"
#include "plan/plan.h"
#include "run/threads.h"

namespace anyprec {

// How a run ended. After `cancelled` and `bad_index`, outputs are not computed.
struct RunEnd {
    enum { done, cancelled, bad_index } how = done;
    const Op *op = nullptr; // bad_index: the embedding that read a number that is none of its rows
};

// Computes all steps; the inputs must be in the arena. `seconds`, if given, gets the time of every step. `cancel` is
// looked at between two steps.
RunEnd run_plan(const Plan &plan, const Kernels &kernels, uint8_t *arena, Threads &threads, double *seconds = nullptr,
                const CancelToken *cancel = nullptr);

// The epilogue of a convolution for image n, starting at output pixel `row` and channel `channel`; without window sums.
Epilogue epilogue_at(const ConvStep &c, uint8_t *arena, int n, int row, int channel);

// Sets what `turns` tiles prefetch while they read `bytes` of a convolution's panel, starting at tile.panel. While the
// first rows are computed (`first`) that is a later part of the same panel; while the last rows are (`last`), the panel
// of the next convolution. Returns by how much tile.prefetch_from advances per tile.
size_t set_prefetch(Tile &tile, const ConvStep &c, size_t bytes, int turns, bool first, bool last);

// Lines first .. end of a max pool's result. `from` is line `from_line` of its input.
struct PoolLines {
    const Op &op;
    Shape in, out;
    bool codes;
    size_t pixel; // bytes of a pixel, of input and result
    void run(const Kernels &kernels, const uint8_t *from, int from_line, int first, int end, uint8_t *to) const;
};

class ToomCookLines;

// One run of a plan.
struct Run {
    const Plan &plan;
    const Kernels &kernels;
    uint8_t *arena;
    Threads &threads;

    uint8_t *image(const Buffer &p, int n) const { return arena + p.offset + p.image * static_cast<size_t>(n); }
    uint8_t *pixels(const Buffer &p, int n) const { return image(p, n) + p.pixel; } // after the pixel of zeros

    // Calls body(image, first pixel, end pixel) for pieces of the pixels of all images.
    template <typename Body> void over_pixels(int count, Body &&body) const {
        if (count == 0)
            return; // no pairs of pixels: every tap is outside the image
        const int piece = threads.count > 1 ? std::max(16, (count + threads.count - 1) / threads.count) : count;
        const int pieces = (count + piece - 1) / piece;
        threads.run(plan.images * pieces, [&](int task) {
            const int first = task % pieces * piece;
            body(task / pieces, first, std::min(count, first + piece));
        });
    }

    // execute_conv.cpp
    void prepare(const PrepareStep &p) const;
    void conv(const ConvStep &c) const;
    void windows(const ConvStep &c) const;
    void tiles(const ConvStep &c, int n, int part, int parts, int first, int end, float *out = nullptr) const;
    void conv_with_pool(const ConvStep &c) const;
    void conv_pool_lines(const ConvStep &c, int n, int first, int end, uint8_t *lines,
                         const ToomCookLines *toom_cook) const;
    void toom_cook_conv(const ConvStep &c) const;
    uint8_t *toom_cook_slot(const ConvStep &c, int task) const;
    void depthwise_tiles(const ConvStep &c, int n, int part, int parts) const;

    // execute_pool.cpp
    void max_pool(const Step &s) const;
    void avg_pool(const Step &s) const;
    void resize(const Step &s) const;

    bool step(const Step &s) const; // false: an embedding read a number that is none of its rows
    void elementwise(const Step &s) const;
    void dequantize(const Step &s) const;
    void softmax(const Step &s) const;
    void flatten(const Step &s) const;
    void pad(const Step &s) const;

    // execute_moves.cpp
    void concat(const Step &s) const;
    void constant(const Step &s) const;
    void transpose(const Step &s) const;
    void pick(const Step &s) const;
    bool embedding(const Step &s) const;

    // execute_functions.cpp
    // Calls body(image, first, end) for pieces of `count` things of every image, of which `least` are worth a task.
    template <typename Body> void over(size_t count, size_t least, Body &&body) const {
        const size_t team = static_cast<size_t>(threads.count);
        const size_t piece = team > 1 ? std::max(std::max<size_t>(least, 1), (count + team - 1) / team) : count;
        const int pieces = static_cast<int>((count + piece - 1) / piece);
        threads.run(plan.images * pieces, [&](int task) {
            const size_t first = static_cast<size_t>(task % pieces) * piece;
            body(task / pieces, first, std::min(count, first + piece));
        });
    }
    const float *floats(const Step &s, size_t input, int n) const {
        const bool constant = input < s.constants.size() && s.constants[input];
        return constant ? s.constants[input] : reinterpret_cast<const float *>(pixels(s.inputs[input], n));
    }
    float *result(const Step &s, int n) const { return reinterpret_cast<float *>(pixels(s.out, n)); }
    void pointwise(const Step &s) const;
    void binary(const Step &s) const;
    void reduce(const Step &s) const;
    void norm(const Step &s) const;
    void softmax_single(const Step &s) const;
    void pack_matrices(const Step &s) const;
    void matmul(const Step &s) const;
    void recurrent(const Step &s) const;

    // execute_products.cpp
    void pack_codes(const Step &s) const;
    void prepare_rows(const Step &s) const;
    void codes_product(const Step &s) const;
};

// Positions first .. end along the first axis of a permuted copy of numbers of `element` bytes, 1 or 4.
void permute(const Kernels &kernels, const Permutation &p, size_t element, int64_t first, int64_t end,
             const uint8_t *from, uint8_t *to);

} // namespace anyprec
