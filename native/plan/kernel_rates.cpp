// See kernel_rates.h. CPUs with the same instructions differ: Intel's servers run two vpdpbusd of 512 bits a cycle and
// one vpermb, Zen 4 one of either, Zen 5 two of either, less what its loads cost. So tiles are timed as they are.
#include "plan/kernel_rates.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "plan/panels.h"

namespace anyprec {
namespace {

#if defined(ANYPREC_EMULATE)
constexpr bool kMeasures = false; // the speed of an emulation says nothing
#else
constexpr bool kMeasures = true;
#endif
constexpr int kTaps = 9, kChannels = 64; // a 3x3 layer of ResNets; its panels fit L1
constexpr int kTiles = 8, kRuns = 6;     // of several short runs the shortest counts: interruptions only add time

TileFunction widest_rows(const TileKernel &kernel, int log2_vectors) {
    return kernel.tiles[log2_vectors][kernel.max_rows[log2_vectors] - 1];
}

// Nanoseconds per product of one tile function.
class TileTimer {
  public:
    TileTimer(const TileKernel &kernel, int log2_vectors) : function_(widest_rows(kernel, log2_vectors)) {
        const int rows = kernel.max_rows[log2_vectors], channels = kernel.lanes << log2_vectors;
        const int steps = (kChannels + kernel.step_channels - 1) / kernel.step_channels;
        const size_t panel = vector_bytes(kernel) * static_cast<size_t>(kTaps * steps) << log2_vectors;
        const size_t pixel = step_bytes(kernel) * static_cast<size_t>(steps);
        panel_.assign(panel + 64, 0);
        pixels_.assign(pixel * static_cast<size_t>(rows + kTaps) + 64, 0);
        if (kernel.input == Input::lookup) // all tables in turn
            for (size_t i = 0; i + 1 < pixels_.size(); i += 2) {
                const auto offset = static_cast<uint16_t>(i / 2 * 29 % 64 * static_cast<size_t>(lookup_entry(kernel)));
                std::memcpy(&pixels_[i], &offset, 2);
            }
        for (int tap = 0; tap < kTaps; ++tap)
            for (int row = 0; row < rows; ++row)
                offsets_.push_back(static_cast<int32_t>(pixel) * (row + tap));
        floats_.assign(static_cast<size_t>(channels), 1.0f);
        windows_.assign(static_cast<size_t>(rows), 0);
        codes_.assign(static_cast<size_t>(rows * channels) + 64, 0);
        tile_.base = pixels_.data(), tile_.offsets = offsets_.data();
        tile_.taps = kTaps, tile_.steps = steps, tile_.channels = channels;
        tile_.panel = tile_.prefetch_from = at_line(panel_.data());
        tile_.safe_steps = kernel.max_act_bits == 1 ? 64 : 16; // of ordinary weights
        tile_.epilogue.scale = tile_.epilogue.shift = floats_.data();
        tile_.epilogue.levels = 1;
        tile_.epilogue.codes = codes_.data();
        tile_.epilogue.codes_stride = static_cast<size_t>(channels);
        if (kernel.window)
            tile_.epilogue.doublings = 1, tile_.epilogue.window_factor = 1, tile_.epilogue.window = windows_.data();
        products_ = static_cast<double>(kTiles) * kTaps * steps * kernel.step_channels * rows * channels;
    }

    void run() {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < kTiles; ++i)
            function_(tile_);
        const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
        least_ = least_ == 0 ? time.count() : std::min(least_, time.count());
    }
    TileFunction function() const { return function_; }
    double time() const { return std::max(least_, 1.0) / products_; }

  private:
    TileFunction function_;
    Tile tile_{};
    std::vector<uint8_t> panel_, pixels_, codes_;
    std::vector<int32_t> offsets_, windows_;
    std::vector<float> floats_;
    double products_ = 0, least_ = 0;
};

bool is_dot(const TileKernel &kernel) {
    return kernel.input == Input::codes && kernel.matrix.rows == 1;
}
bool is_measured(const TileKernel &kernel) {
    return is_dot(kernel) || kernel.input == Input::lookup || kernel.input == Input::bits;
}

struct Rate {
    TileFunction function;
    double products_per_cycle;
};

std::vector<Rate> measure(const Kernels &kernels) {
    std::vector<TileTimer> timers;
    const TileKernel *unit = nullptr; // its widest tile keeps products_per_cycle
    for (const TileKernel *const *kernel = kernels.integer; *kernel; ++kernel) {
        if (!is_measured(**kernel))
            continue;
        if (!unit && is_dot(**kernel))
            unit = *kernel;
        for (int log2 = 0; log2 <= (*kernel)->max_log2_vectors; ++log2) {
            const TileFunction function = widest_rows(**kernel, log2);
            if (std::none_of(timers.begin(), timers.end(),
                             [&](const TileTimer &t) { return t.function() == function; }))
                timers.emplace_back(**kernel, log2); // 7 and 8 bit have the same functions
        }
    }
    for (int run = 0; run < kRuns; ++run)
        for (TileTimer &timer : timers)
            timer.run();
    double widest = 0;
    for (const TileTimer &timer : timers)
        if (unit && timer.function() == widest_rows(*unit, unit->max_log2_vectors))
            widest = timer.time();
    std::vector<Rate> rates;
    for (const TileTimer &timer : timers)
        if (unit)
            rates.push_back({timer.function(), unit->products_per_cycle * widest / timer.time()});
    return rates;
}

} // namespace

double products_per_cycle(const Kernels &kernels, const TileKernel &kernel, int log2_vectors) {
    if (kMeasures && kernels.measured && is_measured(kernel)) {
        static const std::vector<Rate> rates = measure(kernels); // the tables that are measured have the same kernels
        const TileFunction function = widest_rows(kernel, log2_vectors);
        for (const Rate &rate : rates)
            if (rate.function == function)
                return rate.products_per_cycle;
    }
    return kernel.products_per_cycle;
}

} // namespace anyprec
