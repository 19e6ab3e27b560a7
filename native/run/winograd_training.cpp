// See winograd_training.h. Tiles of all images are one list. A convolution takes a block of them at a time, so that
// their transforms stay in the cache between the three steps; threads take different blocks. For the gradient of the
// kernel, threads take different channels of y, and each transforms all of x: 6 % of the work with 256 channels.
//
//   V[36][tile][from]   x  U[36][panel][from][channel]  =  M[36][tile][channel]     36 matrix products
//   V'[36][from][tile]  x  D[36][panel][tile][channel]  summed over blocks          of the gradient
#include "run/winograd_training.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "anyprec/cpu.h"
#include "kernels/kernels.h"

namespace anyprec {
namespace {

constexpr int kSide = 4, kWindow = 6, kPositions = kWindow * kWindow;
// Tiles of a block: multiples of 6, the rows of a product's tile, and few enough for the cache. Of the gradient more,
// since each block reads and writes all of the sums once.
constexpr int kConvolveTiles = 48, kGradientTiles = 120;
constexpr int kGroup = 2; // panels that are multiplied before their outputs are made: these stay in the L2 cache, too
constexpr int kManyChannels = 128;
// Added to the distance between arrays whose sizes are powers of two: they must not fall on the same lines of a cache.
constexpr size_t kApart = 16;

struct Tiling {
    explicit Tiling(const WinogradSizes &s)
        : sizes(s), down((s.height + kSide - 1) / kSide), across((s.width + kSide - 1) / kSide) {}
    int count() const { return sizes.images * down * across; }

    // Calls visit(i, pixel) for the Size x Size pixels of a tile; pixel is -1 outside the image. `border`: how many
    // pixels it begins before its outputs.
    template <int Size, typename F> void pixels(int tile, int border, F &&visit) const {
        const int image = tile / (down * across), place = tile % (down * across);
        const int top = place / across * kSide - border, left = place % across * kSide - border;
        for (int i = 0; i < Size; ++i)
            for (int j = 0; j < Size; ++j) {
                const int y = top + i, x = left + j;
                const bool inside = y >= 0 && y < sizes.height && x >= 0 && x < sizes.width;
                const ptrdiff_t pixel = (static_cast<ptrdiff_t>(image) * sizes.height + y) * sizes.width + x;
                visit(Size * i + j, inside ? pixel : ptrdiff_t{-1});
            }
    }

    const WinogradSizes sizes;
    const int down, across;
};

// x of one tile to V: `v` is its place at the first position.
void transform_pixels(const Tiling &tiling, int tile, const float *x, const float *zeros, float *v, size_t next,
                      WinogradFloats::Transform transform) {
    const float *in[kPositions];
    float *out[kPositions];
    const int channels = tiling.sizes.from;
    tiling.pixels<kWindow>(tile, 1, [&](int i, ptrdiff_t pixel) { in[i] = pixel < 0 ? zeros : x + pixel * channels; });
    for (int p = 0; p < kPositions; ++p)
        out[p] = v + next * static_cast<size_t>(p);
    transform({in, out, channels, channels, 0});
}

size_t panels_of(int channels, int width) {
    return static_cast<size_t>((channels + width - 1) / width);
}

// Kept by the thread that calls: fresh memory would cost a page fault for every 4 KiB of every call.
float *buffer(int which, size_t floats) {
    thread_local std::vector<float> kept[4];
    if (kept[which].size() < floats)
        kept[which].resize(floats);
    return kept[which].data();
}

// Runs work(0) .. work(threads - 1). What one of them throws, such as std::bad_alloc, is thrown when all have ended.
template <typename F> void on_threads(int threads, F &&work) {
    std::vector<std::exception_ptr> failed(static_cast<size_t>(threads));
    const auto guarded = [&](int i) {
        try {
            work(i);
        } catch (...) {
            failed[static_cast<size_t>(i)] = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(threads));
    int next = 1;
    try {
        for (; next < threads; ++next)
            others.emplace_back(guarded, next);
    } catch (const std::system_error &) { // no further thread is to be had: the caller does the rest
    }
    guarded(0);
    for (; next < threads; ++next)
        guarded(next);
    for (std::thread &other : others)
        other.join();
    for (const std::exception_ptr &error : failed)
        if (error)
            std::rethrow_exception(error);
}

// How numbers are multiplied: floats, or pairs of bfloat16, each in the place of a float.
struct Products {
    const FunctionKernels &floats;
    const PairKernels *pairs; // nullptr: floats

    int width() const { return pairs ? pairs->matmul_width : floats.matmul_width; } // channels of a panel
    int terms(int numbers) const { return pairs ? (numbers + 1) / 2 : numbers; }
    void multiply(const MatmulTile &tile) const { pairs ? pairs->matmul(tile) : floats.matmul(tile); }
};

class Convolution {
  public:
    Convolution(const float *x, float *y, const WinogradSizes &s, const Products &products)
        : x_(x), y_(y), tiling_(s), products_(products), width_(products.width()), terms_(products.terms(s.from)),
          panels_(panels_of(s.to, width_)), next_u_(panels_ * static_cast<size_t>(terms_ * width_) + kApart),
          next_v_(static_cast<size_t>(kConvolveTiles * terms_) + kApart),
          next_m_(static_cast<size_t>(kConvolveTiles * kGroup * width_) + kApart), zeros_(static_cast<size_t>(s.from)),
          u_(kPositions * next_u_) {}

    void take_kernel(const float *kernel) {
        const int from = tiling_.sizes.from, to = tiling_.sizes.to;
        const auto channel = [&](int c, float *first, size_t next, int width, size_t next_panel) {
            const float *in[9];
            float *out[kPositions];
            for (int tap = 0; tap < 9; ++tap)
                in[tap] = kernel + static_cast<ptrdiff_t>(tap * from + c) * to;
            for (size_t p = 0; p < kPositions; ++p)
                out[p] = first + p * next;
            products_.floats.winograd->kernel({in, out, to, width, next_panel});
        };
        if (!products_.pairs) {
            for (int c = 0; c < from; ++c)
                channel(c, u_.data() + c * width_, next_u_, width_, static_cast<size_t>(from * width_));
            return;
        }
        const size_t row = static_cast<size_t>(to);
        std::vector<float> even(kPositions * row), odd(kPositions * row);
        for (int c = 0; c < from; c += 2) {
            channel(c, even.data(), row, to, 0);
            if (c + 1 < from)
                channel(c + 1, odd.data(), row, to, 0);
            else
                std::fill(odd.begin(), odd.end(), 0.0f);
            for (size_t p = 0; p < kPositions; ++p)
                for (int at = 0; at < to; at += width_)
                    products_.pairs->pair_rows(&even[p * row] + at, &odd[p * row] + at,
                                               static_cast<size_t>(std::min(width_, to - at)),
                                               u_.data() + p * next_u_ + at * terms_ + c / 2 * width_);
        }
    }

    void block(int first) {
        const int count = std::min(kConvolveTiles, tiling_.count() - first), from = tiling_.sizes.from,
                  to = tiling_.sizes.to;
        float *v = buffer(0, kPositions * next_v_), *m = buffer(1, kPositions * next_m_);
        float *surplus = buffer(2, static_cast<size_t>(kGroup * width_));
        const WinogradFloats &transforms = *products_.floats.winograd;
        for (int t = 0; t < count; ++t) {
            if (!products_.pairs) {
                transform_pixels(tiling_, first + t, x_, zeros_.data(), v + t * from, next_v_, transforms.input);
                continue;
            }
            const size_t row = static_cast<size_t>(from);
            float *made = buffer(3, kPositions * row);
            transform_pixels(tiling_, first + t, x_, zeros_.data(), made, row, transforms.input);
            for (size_t p = 0; p < kPositions; ++p)
                products_.pairs->pair_neighbors(made + p * row, row, v + p * next_v_ + t * terms_);
        }
        for (int begin = 0; begin < to; begin += kGroup * width_) {
            const int channels = std::min(kGroup * width_, to - begin);
            for (size_t p = 0; p < kPositions; ++p)
                for (int at = 0; at < channels; at += width_) {
                    MatmulTile tile{};
                    tile.a = v + p * next_v_;
                    tile.b = u_.data() + p * next_u_ + static_cast<size_t>(terms_) * static_cast<size_t>(begin + at);
                    tile.c = m + p * next_m_ + at;
                    tile.a_stride = static_cast<size_t>(terms_);
                    tile.b_stride = static_cast<size_t>(width_);
                    tile.c_stride = static_cast<size_t>(kGroup * width_);
                    tile.rows = count;
                    tile.terms = terms_;
                    tile.columns = std::min(width_, channels - at);
                    tile.whole = true;
                    products_.multiply(tile);
                }
            for (int t = 0; t < count; ++t) {
                const float *in[kPositions];
                float *out[kSide * kSide];
                for (size_t p = 0; p < kPositions; ++p)
                    in[p] = m + p * next_m_ + t * kGroup * width_;
                tiling_.pixels<kSide>(first + t, 0, [&](int i, ptrdiff_t pixel) {
                    out[i] = pixel < 0 ? surplus : y_ + pixel * to + begin;
                });
                transforms.output({in, out, channels, channels, 0});
            }
        }
    }

    void run(int threads) {
        const int blocks = (tiling_.count() + kConvolveTiles - 1) / kConvolveTiles;
        threads = std::max(1, std::min(threads, blocks));
        on_threads(threads, [&](int thread) {
            for (int i = thread; i < blocks; i += threads)
                block(i * kConvolveTiles);
        });
    }

  private:
    const float *x_;
    float *y_;
    const Tiling tiling_;
    const Products products_;
    const int width_, terms_; // channels of a panel; floats or pairs of a product's row
    const size_t panels_, next_u_, next_v_, next_m_;
    const std::vector<float> zeros_;
    std::vector<float> u_;
};

// The gradient of the kernel for channels start .. end of y; start is where a panel begins. Terms of the products are
// tiles; as pairs, two neighbors in the list make one.
void gradient_of_channels(const float *x, const float *grad, float *gradient, const Tiling &tiling,
                          const Products &products, int start, int end) {
    const int from = tiling.sizes.from, to = tiling.sizes.to, width = products.width();
    const WinogradFloats &transforms = *products.floats.winograd;
    // V of many channels does not stay in the L2 cache: better read it once, with all of D, than D from there.
    const int panels = static_cast<int>(panels_of(end - start, width));
    const int group = std::min(from, to) >= kManyChannels ? panels : std::min(panels, kGroup);
    const int tiles = products.pairs ? 2 * kGradientTiles : kGradientTiles;
    const size_t row = static_cast<size_t>(from) + kApart, next_v = static_cast<size_t>(kGradientTiles) * row + kApart;
    const size_t next_panel = static_cast<size_t>(kGradientTiles * width),
                 next_d = static_cast<size_t>(group) * next_panel + kApart;
    const size_t sums_row = static_cast<size_t>(panels * width);
    const size_t next_sum = static_cast<size_t>(from) * sums_row;
    const std::vector<float> zeros(static_cast<size_t>(std::max(from, to)));
    float *v = buffer(0, kPositions * next_v), *d = buffer(1, kPositions * next_d);
    float *sums = buffer(2, kPositions * next_sum);

    const auto transform_gradient = [&](int tile, int at, int channels, float *first, size_t next, int panel_width) {
        const float *in[kSide * kSide];
        float *out[kPositions];
        tiling.pixels<kSide>(
            tile, 0, [&](int i, ptrdiff_t pixel) { in[i] = pixel < 0 ? zeros.data() : grad + pixel * to + at; });
        for (size_t p = 0; p < kPositions; ++p)
            out[p] = first + p * next;
        transforms.gradient({in, out, channels, panel_width, next_panel});
    };
    // Calls make(i, to) for the tiles i and i + 1 of a block, and store(p, even, odd) for what they gave at each
    // position: `numbers` floats each.
    const auto paired = [&](int i, int count, size_t numbers, auto &&make, auto &&store) {
        float *even = buffer(3, 2 * kPositions * numbers), *odd = even + kPositions * numbers;
        make(i, even);
        if (i + 1 < count)
            make(i + 1, odd);
        else
            std::fill(odd, odd + kPositions * numbers, 0.0f);
        for (size_t p = 0; p < kPositions; ++p)
            store(p, even + p * numbers, odd + p * numbers);
    };

    for (int begin = 0; begin < tiling.count(); begin += tiles) {
        const int count = std::min(tiles, tiling.count() - begin);
        const size_t numbers = static_cast<size_t>(from);
        if (!products.pairs)
            for (int t = 0; t < count; ++t)
                transform_pixels(tiling, begin + t, x, zeros.data(), v + static_cast<size_t>(t) * row, next_v,
                                 transforms.input);
        else
            for (int t = 0; t < count; t += 2)
                paired(
                    t, count, numbers,
                    [&](int i, float *made) {
                        transform_pixels(tiling, begin + i, x, zeros.data(), made, numbers, transforms.input);
                    },
                    [&](size_t p, const float *even, const float *odd) {
                        products.pairs->pair_rows(even, odd, numbers,
                                                  v + p * next_v + static_cast<size_t>(t / 2) * row);
                    });
        for (int at = start; at < end; at += group * width) {
            const int channels = std::min(group * width, end - at);
            if (!products.pairs)
                for (int t = 0; t < count; ++t)
                    transform_gradient(begin + t, at, channels, d + t * width, next_d, width);
            else
                for (int t = 0; t < count; t += 2)
                    paired(
                        t, count, static_cast<size_t>(channels),
                        [&](int i, float *made) {
                            transform_gradient(begin + i, at, channels, made, static_cast<size_t>(channels), channels);
                        },
                        [&](size_t p, const float *even, const float *odd) {
                            for (int c = 0; c < channels; c += width)
                                products.pairs->pair_rows(
                                    even + c, odd + c, static_cast<size_t>(std::min(width, channels - c)),
                                    d + p * next_d + static_cast<size_t>(c / width) * next_panel + t / 2 * width);
                        });
            for (size_t p = 0; p < kPositions; ++p)
                for (int panel = 0; panel * width < channels; ++panel) {
                    MatmulTile tile{};
                    tile.a = v + p * next_v;
                    tile.b = d + p * next_d + static_cast<size_t>(panel) * next_panel;
                    tile.c = sums + p * next_sum + (at - start) + panel * width;
                    tile.a_stride = 1;
                    tile.a_column = row;
                    tile.b_stride = static_cast<size_t>(width);
                    tile.c_stride = sums_row;
                    tile.rows = from;
                    tile.terms = products.terms(count);
                    tile.columns = std::min(width, channels - panel * width);
                    tile.whole = true;
                    tile.adds = begin > 0;
                    products.multiply(tile);
                }
        }
    }
    for (int c = 0; c < from; ++c) {
        const float *in[kPositions];
        float *out[9];
        for (size_t p = 0; p < kPositions; ++p)
            in[p] = sums + p * next_sum + static_cast<size_t>(c) * sums_row;
        for (int tap = 0; tap < 9; ++tap)
            out[tap] = gradient + static_cast<ptrdiff_t>(tap * from + c) * to + start;
        transforms.kernel_gradient({in, out, end - start, end - start, 0});
    }
}

const FunctionKernels &kernels_in_use() {
    static const Kernels *const table = find_kernels(isa().c_str());
    return *table->functions;
}

Products products_in_use(bool bf16) {
#if defined(ANYPREC_BF16)
    return {kernels_in_use(), bf16 ? &pairs_bf16 : nullptr};
#else
    (void)bf16;
    return {kernels_in_use(), nullptr};
#endif
}

} // namespace

bool winograd_has_bf16() {
#if defined(ANYPREC_BF16)
    const Features &features = cpu_features();
    const bool held_below = isa() != "avx512vnni" && isa() != "avx512" && isa() != "amx";
    return !held_below && std::find(features.begin(), features.end(), "avx512_bf16") != features.end();
#else
    return false;
#endif
}

void winograd_convolve(const float *x, const float *kernel, float *y, const WinogradSizes &sizes, int threads,
                       bool bf16) {
    Convolution convolution(x, y, sizes, products_in_use(bf16));
    convolution.take_kernel(kernel);
    convolution.run(threads);
}

void winograd_kernel_gradient(const float *x, const float *grad, float *gradient, const WinogradSizes &sizes,
                              int threads, bool bf16) {
    const Tiling tiling(sizes);
    const Products products = products_in_use(bf16);
    if (tiling.count() == 0) {
        std::memset(gradient, 0, sizeof(float) * 9 * static_cast<size_t>(sizes.from) * static_cast<size_t>(sizes.to));
        return;
    }
    const int panels = static_cast<int>(panels_of(sizes.to, products.width()));
    threads = std::max(1, std::min(threads, panels));
    on_threads(threads, [&](int thread) {
        const auto edge = [&](int i) { return std::min(sizes.to, panels * i / threads * products.width()); };
        gradient_of_channels(x, grad, gradient, tiling, products, edge(thread), edge(thread + 1));
    });
}

} // namespace anyprec
