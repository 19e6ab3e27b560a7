// See kernel_selection.h.
#include "plan/kernel_selection.h"

#include <algorithm>
#include <cmath>

#include "plan/kernel_rates.h"
#include "plan/panels.h"
#include "plan/taps.h"

namespace anyprec {
namespace {

bool supports(const TileKernel &kernel, LayerBits bits) {
    return bits.weights <= kernel.max_weight_bits && bits.acts <= kernel.max_act_bits;
}

// Cost model of a convolution, in cycles per image: products at the kernel's rate, the work per pixel (or patch) and
// channel, and reading panels from beyond L2. Fitted to single layers of ResNet-18 and -50 (`anyprec-run --steps`, 64
// channels at 56 x 56 to 512 at 7 x 7) on an Emerald Rapids at 3.0 GHz, to within 10 %.
constexpr double kEpilogueCycles = 0.4;       // epilogue of one output, direct algorithm
constexpr double kCyclesPerPanelByte = 0.12;  // for panel bytes that are not in L2
constexpr double kPanelBytesInL2 = 512 << 10; // part of a panel that stays in L2
constexpr double kPreparePixel = 6;           // lookups: offsets of one input pixel, and of each of its codes
constexpr double kPrepareCode = 0.125;        // (24 to 256 channels on a Zen 5)
constexpr double kPackPixel = 5;              // counts of bits: words of one input pixel, and of each of its codes
constexpr double kPackCode = 0.05;
constexpr int kRowsAtOnce = 1024; // direct algorithm: see Run::conv

bool is_lookup(const TileKernel &kernel) {
    return kernel.input == Input::lookup || kernel.input == Input::lookup_pairs;
}

// Offsets into lookup tables, or words of bits, made from the codes of the input.
double prepare_cycles(const TileKernel &kernel, double pixels, int in) {
    if (kernel.input == Input::bits)
        return pixels * (kPackPixel + kPackCode * in);
    return is_lookup(kernel) ? pixels * (kPreparePixel + kPrepareCode * in) : 0;
}

// Partly filled vectors and steps take as long as full ones.
double block_cycles(const Kernels &kernels, const TileKernel &kernel, double rows, int taps, int steps, int out) {
    double cycles = 0;
    for (const Block &block : cut_blocks(kernel, out, 1, 1))
        cycles += rows * taps * steps * kernel.step_channels * (kernel.lanes << block.log2_vectors) /
                  products_per_cycle(kernels, kernel, block.log2_vectors);
    return cycles;
}

// A partial tile costs as much as a full one: 3 rows take as long as 6.
double product_cycles(const Kernels &kernels, const TileKernel &kernel, double rows, int taps, int in, int out) {
    const int steps = (in + kernel.step_channels - 1) / kernel.step_channels;
    const int widest = cut_blocks(kernel, out, 1, 1)[0].log2_vectors;
    return block_cycles(kernels, kernel, std::max(rows, double(kernel.max_rows[widest])), taps, steps, out);
}

double panel_cycles(const TileKernel &kernel, int passes, int taps, int in, int out) {
    const double panel =
        static_cast<double>(vector_bytes(kernel)) / (kernel.lanes * kernel.step_channels) * taps * in * out;
    return kCyclesPerPanelByte * passes * std::max(0.0, panel - kPanelBytesInL2);
}

} // namespace

namespace {

// Cycles of a layer on one kernel, without what all kernels have in common. Partly filled matrices take as long as full
// ones.
double kernel_cycles(const Kernels &kernels, const TileKernel &kernel, LayerSize size) {
    const MatrixCost &m = kernel.matrix;
    const int steps = (size.in + kernel.step_channels - 1) / kernel.step_channels;
    const int whole_steps = m.steps > 1 ? steps / matrix_steps(steps) * m.steps : steps;
    const std::vector<Block> blocks = cut_blocks(kernel, size.out, 1, 1);
    const auto times = [](int64_t count, int each) { return static_cast<double>((count + each - 1) / each); };
    const double rows = times(size.rows, m.rows) * m.rows;
    double cycles = block_cycles(kernels, kernel, rows, size.taps, whole_steps, size.out) +
                    prepare_cycles(kernel, static_cast<double>(size.rows), size.in);
    for (const Block &block : blocks)
        cycles += m.tile_cycles * times(size.rows, kernel.max_rows[block.log2_vectors]);
    if (size.residual)
        cycles += m.residual_cycles * static_cast<double>(size.rows) * size.out;
    return cycles;
}

// 1 bit on AMX, layer by layer on an Emerald Rapids: faster than the lookups of AVX-512 only in 3x3 layers of up to 256
// channels. Elsewhere bytes instead of bits take longer to read than the products save.
bool matrices_pay(LayerBits bits, LayerSize size) {
    return bits.weights > 1 || bits.acts > 1 || (size.taps > 1 && size.in <= 256);
}

} // namespace

const TileKernel *choose_kernel(const Kernels &kernels, const Op &op, const Weight &weight, LayerBits bits, bool split,
                                int64_t rows, bool residual) {
    const int out = weight.shape[0] / op.groups, in = weight.shape[3];
    const int64_t k = static_cast<int64_t>(weight.count) / weight.shape[0];
    const LayerSize size = {rows, static_cast<int>(k / in), in, out, residual};
    const TileKernel *best = nullptr;
    double least = 0;
    for (const TileKernel *const *p = kernels.integer; *p; ++p) {
        const TileKernel &kernel = **p;
        const bool grouped = !is_lookup(kernel) && kernel.input != Input::bits &&
                             kernel.coding != Coding::split8; // window sums cost more
        if (!supports(kernel, bits) || k > kernel.max_k || (!split && kernel.coding == Coding::split8) ||
            (op.groups > 1 && !grouped) || (kernel.input == Input::lookup_pairs && has_phases(op)) ||
            (kernel.matrix.rows > 1 && !matrices_pay(bits, size)))
            continue;
        const double cycles = kernel_cycles(kernels, kernel, size);
        if (!best || cycles < least)
            best = &kernel, least = cycles;
    }
    return best;
}

// Panels made at run time have no lookup tables and no split weights.
const TileKernel *choose_product_kernel(const Kernels &kernels, int rows, int terms, int columns, LayerBits bits) {
    const TileKernel *best = nullptr;
    double least = 0;
    for (const TileKernel *const *p = kernels.integer; *p; ++p) {
        const TileKernel &kernel = **p;
        const bool plain = kernel.coding == Coding::centered8 || kernel.coding == Coding::centered16 ||
                           kernel.coding == Coding::offset8 || kernel.coding == Coding::codes8;
        if (!plain || !supports(kernel, bits) || terms > kernel.max_k)
            continue;
        const double cycles = kernel_cycles(kernels, kernel, {rows, 1, terms, columns, false});
        if (!best || cycles < least)
            best = &kernel, least = cycles;
    }
    return best;
}

int patches_at_once(const Winograd &kernel, int in, int out) {
    const double row = 16.0 * in * static_cast<double>(kernel.element);
    return row * out <= 256 << 10 ? 32 : std::clamp(static_cast<int>((512 << 10) / row), 16, 64);
}

const Winograd *choose_winograd(const Kernels &kernels, const Op &op, LayerBits bits, const Shape &in, const Shape &out,
                                const TileKernel &direct) {
    const bool fits = op.kernel[0] == 3 && op.kernel[1] == 3 && op.stride[0] == 1 && op.stride[1] == 1 &&
                      op.dilation[0] == 1 && op.dilation[1] == 1 && op.groups == 1 && !op.transposed;
    // Four times the largest sum must fit 32 bits: at 8 bits that is 917 channels.
    const int64_t largest = int64_t(9) * in.c() * ((1 << bits.weights) - 1) * ((1 << bits.acts) - 1);
    if (!fits || !kernels.winograd || 4 * largest >= int64_t(1) << 31)
        return nullptr;
    const double pixels = static_cast<double>(out.h()) * out.w();
    const double patches = (static_cast<double>(out.h()) + out.h() % 2) * (out.w() + out.w() % 2) / 4;
    const Winograd *best = nullptr;
    double least = product_cycles(kernels, direct, pixels, 9, in.c(), out.c()) +
                   prepare_cycles(direct, pixels, in.c()) + kEpilogueCycles * pixels * out.c() +
                   panel_cycles(direct, static_cast<int>(std::ceil(pixels / kRowsAtOnce)), 9, in.c(), out.c());
    for (const Winograd *const *p = kernels.winograd; *p; ++p) {
        const Winograd &w = **p;
        if (!supports(w.tile, bits))
            continue;
        const int passes = static_cast<int>(std::ceil(patches / patches_at_once(w, in.c(), out.c())));
        const double cycles = product_cycles(kernels, w.tile, patches, 16, in.c(), out.c()) +
                              w.transform * patches * (in.c() + out.c()) +
                              panel_cycles(w.tile, passes, 16, in.c(), out.c());
        if (cycles < least)
            best = &w, least = cycles;
    }
    return best;
}

} // namespace anyprec
