// Runs the steps of a plan. In: a Plan and an arena with the input in place. Out: the arena with all outputs in place.
// Convolutions are in execute_conv.cpp, pools and resize in execute_window.cpp, the rest in execute.cpp; the arithmetic
// is in the kernels, or portable and exact as FORMAT.md section 3 has it. Called by engine.cpp. Allocates nothing.
#pragma once

#include <algorithm>

#include "anyprec/engine.h"
#include "plan.h"
#include "threads.h"

namespace anyprec {

// Computes all steps; value 0 must be in the arena already. `seconds`, if given, gets the time of every step. False:
// `cancel` said so between two steps, and the outputs are not there.
bool run_plan(const Plan &plan, const Kernels &kernels, uint8_t *arena, Threads &threads, double *seconds = nullptr,
              const CancelToken *cancel = nullptr);

// The epilogue of a convolution for image n, from output pixel `row` and channel `channel` on; without window sums.
Epilogue epilogue_at(const ConvStep &c, uint8_t *arena, int n, int row, int channel);

// Sets what `turns` tiles fetch while they read `bytes` of a convolution's panel, from tile.panel on: weights that lie
// a certain way ahead, in this panel while the first rows are computed, in the next one while the last are. `first` and
// `last` say which these are. Returns how much tile.ahead moves from one of the tiles to the next.
size_t set_prefetch(Tile &tile, const ConvStep &c, size_t bytes, int turns, bool first, bool last);

// Lines first .. end of a max pool's result, out of lines of its input: `from` is line `from_line` of that.
struct PoolLines {
    const Op &op;
    Shape in, out;
    bool codes;
    size_t pixel; // bytes, of input and result
    void run(const Kernels &kernels, const uint8_t *from, int from_line, int first, int end, uint8_t *to) const;
};

class ToomCookLines;

// One run; everything in it works on whole rows of channels.
struct Run {
    const Plan &plan;
    const Kernels &kernels;
    uint8_t *arena;
    Threads &threads;

    uint8_t *image(const Buffer &p, int n) const { return arena + p.offset + p.image * static_cast<size_t>(n); }
    uint8_t *pixels(const Buffer &p, int n) const { return image(p, n) + p.pixel; } // behind the row of zeros

    // Calls body(image, first pixel, end pixel) for pieces of all images' pixels.
    template <typename Body> void over_pixels(int count, Body &&body) const {
        if (count == 0)
            return; // pairs of pixels, where every tap is outside the image
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

    // execute_window.cpp
    void max_pool(const Step &s) const;
    void avg_pool(const Step &s) const;
    void resize(const Step &s) const;

    void step(const Step &s) const;
    void elementwise(const Step &s) const;
    void dequantize(const Step &s) const;
    void concat(const Step &s) const;
    void softmax(const Step &s) const;
    void flatten(const Step &s) const;
    void pad(const Step &s) const;
};

} // namespace anyprec
