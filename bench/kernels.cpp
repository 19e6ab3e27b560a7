// Checks and times kernels without a network. Check: every tile kernel of every table this CPU can run, at every number
// of rows and vectors, against the scalar table, bit for bit. Speed: multiply-accumulates per cycle against the limit
// of the CPU's ports. Usage: bench_kernels [check|speed [ISA...]]; without an argument, both, of all tables. Exits with
// 1 if anything differs. Linked with anyprec_engine (CMakeLists.txt), which compiles each kernels_<isa>.cpp with its
// own flags.
#include "anyprec/cpu.h"
#include "plan/panels.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using namespace anyprec;

namespace {

std::mt19937 generator(1);
int draw(int below) {
    return static_cast<int>(generator() % static_cast<unsigned>(below));
}
float draw_float() {
    return static_cast<float>(draw(20001) - 10000) / 4096.0f;
}

enum class Draw { any, lowest, highest };
std::vector<uint8_t> draw_codes(size_t count, int bits, Draw from = Draw::any) {
    std::vector<uint8_t> codes(count);
    for (uint8_t &code : codes)
        code = static_cast<uint8_t>(from == Draw::any ? draw(1 << bits) : from == Draw::lowest ? 0 : (1 << bits) - 1);
    return codes;
}
std::vector<float> draw_floats(size_t count) {
    std::vector<float> values(count);
    for (float &value : values)
        value = draw_float();
    return values;
}

// A weight as in a file, with its own memory.
struct TestWeight {
    Graph graph;
    Weight weight;
    std::vector<std::vector<uint8_t>> planes;
    std::vector<float> values;

    TestWeight(int out, int taps, int in, int bits, Draw from = Draw::any) {
        weight.shape[0] = out, weight.shape[1] = 1, weight.shape[2] = taps, weight.shape[3] = in;
        weight.count = static_cast<size_t>(out) * taps * in;
        if (bits == 0) {
            weight.is_float = true;
            values = draw_floats(weight.count);
            weight.values = values.data();
            return;
        }
        graph.planes.resize(9);
        const std::vector<uint8_t> codes = draw_codes(weight.count, bits, from);
        for (int plane = 0; plane < bits; ++plane) {
            graph.planes[static_cast<size_t>(bits)].push_back(plane);
            planes.emplace_back((weight.count + 7) / 8);
            for (size_t i = 0; i < codes.size(); ++i)
                planes.back()[i / 8] |= static_cast<uint8_t>((codes[i] >> (bits - 1 - plane) & 1) << i % 8);
        }
        for (const std::vector<uint8_t> &plane : planes)
            weight.planes.push_back(plane.data());
    }
};

constexpr size_t kReadBeyond = 127; // bytes that kernels may read past the last pixel, as in an engine's buffers

// Pixels in the layout of one kernel, or all pairs of them.
struct Prepared {
    std::vector<uint8_t> bytes;
    size_t stride;
    int count; // of pixels
    bool pairs;

    // Offsets of a tile whose row r reads pixel(tap, r).
    template <typename Pixel> std::vector<int32_t> offsets(int taps, int rows, Pixel pixel) const {
        std::vector<int32_t> made;
        for (int tap = 0; tap < taps; ++tap)
            for (int r = 0; r < rows; r += pairs ? 2 : 1) {
                const int second = r + 1 < rows ? pixel(tap, r + 1) : count;
                const int place = pairs ? pixel(tap, r) * (count + 1) + second : pixel(tap, r);
                made.push_back(static_cast<int32_t>(place * stride));
            }
        return made;
    }
};

int steps_of(const TileKernel &kernel, int in) {
    return (in + kernel.step_channels - 1) / kernel.step_channels;
}

// `pixels` holds `in` codes or floats per pixel. What a step reads past the last channel is random here: it must not
// matter.
Prepared prepare(const Kernels &kernels, const TileKernel &kernel, const std::vector<uint8_t> &pixels, int count,
                 int in) {
    const int steps = steps_of(kernel, in), padded = steps * kernel.step_channels;
    Prepared to;
    to.stride = static_cast<size_t>(steps) * step_bytes(kernel);
    to.count = count;
    to.pairs = kernel.input == Input::lookup_pairs;
    if (to.pairs) { // pair (p, q) is number p (count + 1) + q; q == count: none
        std::vector<uint8_t> codes(static_cast<size_t>(padded)); // the pixel of zeros
        std::vector<PixelPair> all;
        for (int p = 0; p < count; ++p) {
            const std::vector<uint8_t> beyond = draw_codes(static_cast<size_t>(padded - in), 8);
            codes.insert(codes.end(), pixels.begin() + p * in, pixels.begin() + (p + 1) * in);
            codes.insert(codes.end(), beyond.begin(), beyond.end());
            for (int q = 0; q <= count; ++q)
                all.push_back({p + 1, q == count ? 0 : q + 1});
        }
        to.bytes.resize(to.stride * all.size());
        kernels.pixel_pair_offsets(codes.data(), static_cast<size_t>(padded), all.data(), static_cast<int>(all.size()),
                                   steps, reinterpret_cast<uint16_t *>(to.bytes.data()));
        return to;
    }
    to.bytes.resize(to.stride * count);
    for (int p = 0; p < count; ++p) {
        uint8_t *at = to.bytes.data() + p * to.stride;
        if (kernel.input == Input::floats) {
            std::memcpy(at, pixels.data() + 4 * static_cast<size_t>(p) * in, to.stride);
            continue;
        }
        std::vector<uint8_t> codes = draw_codes(static_cast<size_t>(padded) + kReadBeyond, 8);
        std::memcpy(codes.data(), pixels.data() + static_cast<size_t>(p) * in, static_cast<size_t>(in));
        if (kernel.input == Input::codes)
            std::memcpy(at, codes.data(), static_cast<size_t>(padded));
        else if (kernel.input == Input::wide)
            kernels.widen(codes.data(), static_cast<size_t>(padded), reinterpret_cast<int16_t *>(at));
        else if (kernel.input == Input::bits)
            kernels.pack_bits(codes.data(), 0, 1, in, steps, at, nullptr);
        else
            kernels.lookup_offsets(codes.data(), 0, 1, steps, kernel.step_channels, kernel.max_act_bits,
                                   lookup_entry(kernel), reinterpret_cast<uint16_t *>(at), nullptr);
    }
    return to;
}

// Everything an epilogue may read or write. Outputs have guard values between the rows, which must stay.
struct EpilogueData {
    std::vector<float> scale, shift, residual, out, code_scale, code_shift;
    std::vector<int32_t> constants, constant_rows; // two rows of constants, alternating
    std::vector<uint8_t> codes;
    Epilogue epilogue;
    size_t stride;

    EpilogueData(int rows, int channels, int bits, int kind) : stride(static_cast<size_t>(channels) + 3) {
        const auto n = static_cast<size_t>(channels);
        scale = draw_floats(n), shift = draw_floats(n), code_scale = draw_floats(n), code_shift = draw_floats(n);
        residual = draw_floats(stride * (rows - 1) + n); // ends where the tile ends: a sanitizer sees reads beyond
        for (int i = 0; i < 2 * channels; ++i)
            constants.push_back(draw(2001) - 1000);
        for (int r = 0; r < rows; ++r)
            constant_rows.push_back(r % 2 * channels);
        out.assign(stride * rows, -77.0f), codes.assign(stride * rows, 177);
        const float small = kind == 0 ? 1.0f : 1.0f / 512;
        for (float &value : scale)
            value *= small;
        epilogue.levels = static_cast<float>((1 << bits) - 1);
        if (kind != 0)
            epilogue.clip_first = kind & 1, epilogue.clip_second = kind & 2;
        epilogue.low_first = -20, epilogue.high_first = 30, epilogue.low_second = 0, epilogue.high_second = 6;
    }
    // The same from channel c and row r on, with this object's outputs.
    Epilogue at(int r, int c, int kind, const int32_t *window, int window_factor) {
        Epilogue e = epilogue;
        const size_t i = r * stride + c;
        if (window)
            e.doublings = 1, e.window = window + r, e.window_factor = window_factor;
        if (kind == 2)
            e.constants = constants.data() + c, e.constant_rows = constant_rows.data() + r;
        if (kind != 0) {
            e.scale = scale.data() + c, e.shift = shift.data() + c;
            e.codes = codes.data() + i, e.codes_stride = stride;
            e.residual = kind & 2 ? residual.data() + i : nullptr, e.residual_stride = stride;
            if (kind != 3)
                e.code_scale = code_scale.data() + c, e.code_shift = code_shift.data() + c;
        }
        e.out = out.data() + i, e.out_stride = stride;
        return e;
    }
    bool same(const EpilogueData &other) const {
        return codes == other.codes && std::memcmp(out.data(), other.out.data(), 4 * out.size()) == 0;
    }
};

// One convolution of a few pixels with a kernel of a table. Tap t of row r reads pixel (2 r + t) % count.
void convolve(const Kernels &kernels, const TileKernel &kernel, const TestWeight &source, int bits,
              const std::vector<uint8_t> &pixels, int count, int rows_wanted, EpilogueData &data, int kind) {
    const int out = source.weight.shape[0], taps = source.weight.shape[2], in = source.weight.shape[3];
    const int steps = steps_of(kernel, in);
    const Prepared input = prepare(kernels, kernel, pixels, count, in);
    const Panel panel = build_panel(source.graph, source.weight, kernels, kernel, std::max(1, bits), 1);
    std::vector<int32_t> window(static_cast<size_t>(rows_wanted), 0);
    for (int r = 0; r < rows_wanted && kernel.window; ++r)
        for (int tap = 0; tap < taps; ++tap) {
            int32_t sum;
            kernels.sums(pixels.data() + (2 * r + tap) % count * in, 0, 1, in, &sum, 1);
            window[static_cast<size_t>(r)] += sum;
        }
    const std::vector<Block> blocks = cut_blocks(kernel, out, taps, steps);
    for (int b = 0; b < static_cast<int>(blocks.size()); ++b)
        for (int r = 0; r < rows_wanted;) {
            const Block &block = blocks[static_cast<size_t>(b)];
            const int rows = std::min(kernel.max_rows[block.log2_vectors], rows_wanted - r);
            const std::vector<int32_t> offsets =
                input.offsets(taps, rows, [&](int tap, int i) { return (2 * (r + i) + tap) % count; });
            Tile tile{};
            tile.base = input.bytes.data(), tile.offsets = offsets.data();
            tile.taps = taps, tile.steps = steps, tile.channels = block.channels;
            set_panel(tile, panel, blocks, 0, b);
            tile.epilogue =
                data.at(r, block.first, kind, kernel.window ? window.data() : nullptr, window_factor(kernel, bits));
            kernel.tiles[block.log2_vectors][rows - 1](tile);
            r += rows;
        }
}

// With `weights` lowest or highest, all codes are as large as the kernel allows, so that narrow sums would overflow.
bool check_tile(const Kernels &kernels, const TileKernel &kernel, int rows, int out, int in, int taps, int kind,
                Draw weights = Draw::any) {
    const Kernels &scalar = *kernels_scalar();
    const bool floats = kernel.coding == Coding::floats, any = weights == Draw::any;
    const int bits = floats ? 0 : any ? 1 + draw(kernel.max_weight_bits) : kernel.max_weight_bits;
    const int act_bits = floats ? 8 : any ? 1 + draw(kernel.max_act_bits) : kernel.max_act_bits;
    const TestWeight source(out, taps, in, bits, weights);
    const int count = 2 * rows + 3;
    std::vector<uint8_t> pixels;
    if (floats) {
        const std::vector<float> values = draw_floats(static_cast<size_t>(count) * in);
        pixels.resize(4 * values.size());
        std::memcpy(pixels.data(), values.data(), pixels.size());
    } else {
        pixels = draw_codes(static_cast<size_t>(count) * in, act_bits, any ? Draw::any : Draw::highest);
    }
    EpilogueData expected(rows, out, act_bits, kind), got = expected;
    convolve(scalar, floats ? *scalar.floats : *scalar.integer[0], source, bits, pixels, count, rows, expected, kind);
    convolve(kernels, kernel, source, bits, pixels, count, rows, got, kind);
    if (got.same(expected))
        return true;
    std::printf("DIFFERS: %s %s, rows %d, out %d, in %d, taps %d, epilogue %d, weight bits %d, act bits %d\n",
                kernels.isa, kernel.name, rows, out, in, taps, kind, bits, act_bits);
    return false;
}

std::vector<const TileKernel *> tile_kernels(const Kernels &kernels) {
    std::vector<const TileKernel *> list;
    for (const TileKernel *const *kernel = kernels.integer; *kernel; ++kernel)
        list.push_back(*kernel);
    list.push_back(kernels.floats);
    if (kernels.float_row)
        list.push_back(kernels.float_row);
    return list;
}

int check_tiles(const Kernels &kernels) {
    int wrong = 0, kind = 0;
    for (const TileKernel *kernel : tile_kernels(kernels)) {
        int cases = 0;
        for (int shift = 0; shift <= kernel->max_log2_vectors; ++shift) {
            const int full = kernel->lanes << shift,
                      below = shift ? full / 2 : 0; // below + 1 .. full channels give this block
            for (int rows = 1; rows <= kernel->max_rows[shift]; ++rows)
                for (int out : {full, below + 1, full - 1, full + 3})
                    for (int in : {1, 3, 16, 37, 130})
                        for (int taps : {1, 3, 9}) {
                            wrong += !check_tile(kernels, *kernel, rows, out, in, taps, kind++ % 4);
                            ++cases;
                        }
            const int longest = static_cast<int>(std::min<int64_t>(kernel->max_k, 20000));
            for (Draw weights : {Draw::lowest, Draw::highest})
                for (int rows = 1; rows <= kernel->max_rows[shift]; ++rows, ++cases)
                    wrong += !check_tile(kernels, *kernel, rows, below + 1, longest, 1, 0, weights);
        }
        std::printf("%-10s %-19s %d cases\n", kernels.isa, kernel->name, cases);
    }
    return wrong;
}

// The vector kernels at every count, with partial vectors.
int check_rows(const Kernels &kernels) {
    const Kernels &scalar = *kernels_scalar();
    int wrong = 0;
    const auto expect = [&wrong, &kernels](bool same, const char *what, int n) {
        if (!same)
            std::printf("DIFFERS: %s %s of %d\n", kernels.isa, what, n), ++wrong;
    };
    for (int n = 1; n < 70; ++n) {
        const auto count = static_cast<size_t>(n);
        for (int kind = 0; kind < 4; ++kind) {
            const int pixels = 5, taps = 1 + draw(9), bits = 1 + draw(8);
            const std::vector<uint8_t> codes = draw_codes(count * 7, bits);
            const std::vector<float> values = draw_floats(count * 7), weights = draw_floats(count * taps);
            std::vector<int32_t> integers(count * taps), code_offsets, float_offsets;
            for (int32_t &weight : integers)
                weight = 2 * draw(256) - 255;
            for (int i = 0; i < taps * pixels; ++i) {
                code_offsets.push_back(draw(7) * n);
                float_offsets.push_back(4 * code_offsets.back());
            }
            EpilogueData start(pixels, n, bits, kind);
            const auto compare = [&](const char *what, auto run) {
                EpilogueData expected = start, got = start;
                run(scalar, expected), run(kernels, got);
                expect(got.same(expected), what, n);
            };
            compare("depthwise_codes", [&](const Kernels &k, EpilogueData &f) {
                k.depthwise_codes({codes.data(), code_offsets.data(), taps, pixels, n, integers.data(), false,
                                   f.at(0, 0, kind, nullptr, 0)});
            });
            std::vector<int32_t> small(count * taps); // 9 taps of at most 7 x 255 fit 16 bits
            for (int32_t &weight : small)
                weight = 2 * draw(8) - 7;
            compare("depthwise_codes, 16 bits", [&](const Kernels &k, EpilogueData &f) {
                k.depthwise_codes({codes.data(), code_offsets.data(), taps, pixels, n, small.data(), true,
                                   f.at(0, 0, kind, nullptr, 0)});
            });
            const auto *bytes = reinterpret_cast<const uint8_t *>(values.data());
            compare("depthwise_floats", [&](const Kernels &k, EpilogueData &f) {
                k.depthwise_floats({bytes, float_offsets.data(), taps, pixels, n, weights.data(), false,
                                    f.at(0, 0, kind, nullptr, 0)});
            });
            compare("epilogue", [&](const Kernels &k, EpilogueData &f) {
                k.epilogue(values.data(), count, pixels, n, f.at(0, 0, kind, nullptr, 0));
            });
        }
        const std::vector<float> a = draw_floats(count), b = draw_floats(count);
        const std::vector<uint8_t> codes = draw_codes(count, 8), more = draw_codes(count, 8);
        const auto compare = [&](const char *what, auto start, auto run) {
            auto expected = start, got = start;
            run(scalar, expected), run(kernels, got);
            expect(std::memcmp(got.data(), expected.data(), got.size() * sizeof(got[0])) == 0, what, n);
        };
        for (int taps = 1; taps < 4; ++taps)
            compare("maximum", a, [&](const Kernels &k, auto &to) {
                const void *of[] = {to.data(), b.data(), a.data()};
                k.maximum(to.data(), of, taps, n);
            });
        compare("accumulate", a, [&](const Kernels &k, auto &to) { k.accumulate(to.data(), b.data(), n); });
        compare("interpolate", a,
                [&](const Kernels &k, auto &to) { k.interpolate(a.data(), b.data(), 0.3f, to.data(), n); });
        compare("maximum_codes", codes, [&](const Kernels &k, auto &to) {
            const void *of[] = {more.data(), codes.data()};
            k.maximum_codes(to.data(), of, 2, n);
        });
        compare("widen", std::vector<int16_t>(count),
                [&](const Kernels &k, auto &to) { k.widen(codes.data(), count, to.data()); });
        compare("to_floats", std::vector<float>(count),
                [&](const Kernels &k, auto &to) { k.to_floats(codes.data(), count, to.data()); });
        for (size_t rows : {size_t(1), size_t(7), size_t(8), size_t(21)}) { // of n columns
            const std::vector<float> matrix = draw_floats(rows * (count + 3));
            const std::vector<uint8_t> bytes = draw_codes(rows * (count + 3), 8);
            compare("transpose_floats", std::vector<float>(count * (rows + 2)), [&](const Kernels &k, auto &to) {
                k.transpose_floats(matrix.data(), count + 3, rows, count, to.data(), rows + 2);
            });
            compare("transpose_codes", std::vector<uint8_t>(count * (rows + 2)), [&](const Kernels &k, auto &to) {
                k.transpose_codes(bytes.data(), count + 3, rows, count, to.data(), rows + 2);
            });
        }
        std::vector<std::vector<uint8_t>> planes;
        std::vector<const uint8_t *> starts;
        for (int k = 0; k < 8; ++k) {
            planes.push_back(draw_codes(count + 3, 8));
            starts.push_back(planes.back().data());
        }
        for (int k = 1; kernels.join_planes && k <= 8; ++k) {
            std::vector<uint8_t> codes_of(8 * count), expected;
            for (size_t i = 8 * 3; i < 8 * (count + 3); ++i) {
                int code = 0;
                for (int plane = 0; plane < k; ++plane)
                    code = 2 * code + (planes[static_cast<size_t>(plane)][i / 8] >> i % 8 & 1);
                expected.push_back(static_cast<uint8_t>(code));
            }
            kernels.join_planes(starts.data(), k, 3, count, codes_of.data());
            expect(codes_of == expected, "join_planes", n);
        }
        compare("sums", std::vector<int32_t>(6), [&](const Kernels &k, auto &to) {
            k.sums(codes.data(), 0, 3, n, to.data(), 2); // the same pixel three times
        });
        for (int group : {3, 4, 6}) {
            const int bits = group == 6 ? 1 : 2;
            std::vector<uint8_t> two = draw_codes(2 * count * group, bits);
            two.resize(two.size() + kReadBeyond, 255);
            compare("lookup_offsets", std::vector<uint16_t>(2 * count), [&](const Kernels &k, auto &to) {
                k.lookup_offsets(two.data(), count * group, 2, n, group, bits, group == 4 ? 16 : 64, to.data(),
                                 nullptr);
            });
            compare("lookup_offsets, totals", std::vector<int32_t>(2), [&](const Kernels &k, auto &to) {
                std::vector<uint16_t> offsets(2 * count);
                k.lookup_offsets(two.data(), count * group, 2, n, group, bits, group == 4 ? 16 : 64, offsets.data(),
                                 to.data());
            });
        }
    }
    return wrong;
}

// --- Speed -----------------------------------------------------------------------------------------------------------

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A chain of multiplications, each of which waits for the one before: 3 cycles on every x86 CPU since 2008, whatever
// the clock rate. Additions would not do: newer CPUs add constants without taking a cycle for it, and on a Cascade Lake
// a loop of one addition takes two cycles where its jump crosses 32 bytes of code. ARM: additions, of one cycle.
#if defined(__aarch64__)
constexpr int kLinkCycles = 1;
#else
constexpr int kLinkCycles = 3;
#endif
constexpr int kLinks = 6600; // some 7 microseconds
uint64_t chain() {
    uint64_t x = 3;
    for (int i = 0; i < kLinks; i += 20)
#pragma GCC unroll 20
        for (int link = 0; link < 20; ++link) {
#if defined(__GNUC__)
            __asm__ volatile("" : "+r"(x)); // otherwise the compiler would compute the result
#endif
            x = kLinkCycles == 1 ? x + 1 : x * x;
        }
    return x;
}

// The best tenth of many short slices, for kernel and chain alike. Other processes interrupt some slices, and one on
// the same core takes ports from the kernel but not from the chain: a median would count that against the kernel.
struct Timing {
    double cycles, ghz;
};
template <typename Run> Timing time_of(Run run) {
    double start = seconds();
    run();
    const int repeats = std::max(1, static_cast<int>(3e-5 / (seconds() - start)));
    std::vector<double> kernel, clock;
    for (int slice = 0; slice < 200; ++slice) {
        start = seconds();
        for (int i = 0; i < repeats; ++i)
            run();
        const double middle = seconds();
        chain();
        kernel.push_back((middle - start) / repeats);
        clock.push_back((seconds() - middle) / (kLinks * kLinkCycles));
    }
    std::nth_element(kernel.begin(), kernel.begin() + 20, kernel.end());
    std::nth_element(clock.begin(), clock.begin() + 20, clock.end());
    return {kernel[20] / clock[20], 1e-9 / clock[20]};
}

// Multiply-accumulates of one multiplication or lookup, times instructions per cycle: two, but one lookup of 512 bits,
// and two thirds of a count of bits with its and and its addition.
// CPUs with three vector ports (Intel) reach at most 3/4 of it on AVX2 where an addition follows each. ARM: 0, not
// known; bench/arm_cycles.py has it on paper.
int port_limit([[maybe_unused]] const TileKernel &kernel) {
#if defined(__aarch64__)
    return 0;
#else
    const int products = kernel.lanes * kernel.step_channels;
    if (kernel.input == Input::bits)
        return 2 * products / 3;
    const bool widens =
        kernel.lanes == 8 && kernel.input == Input::codes && kernel.max_act_bits >= 7; // one more multiplication
    const bool pairs = kernel.input == Input::lookup_pairs, lookup = pairs || kernel.input == Input::lookup;
    const int one = widens || (lookup && kernel.lanes == 64) ? products : 2 * products;
    return pairs ? 2 * one : one; // two pixels; Intel's ports reach less: two thirds of the work are additions
#endif
}

void time_tiles(const Kernels &kernels) {
    for (const TileKernel *kernel : tile_kernels(kernels))
        for (int shift = 0; shift <= kernel->max_log2_vectors; ++shift) {
            const int rows = kernel->max_rows[shift], out = kernel->lanes << shift, limit = port_limit(*kernel),
                      taps = 9;
            double ghz = 0;
            std::printf("%-10s %-19s %d x %-3d limit %3d:", kernels.isa, kernel->name, rows, out, limit);
            for (int in : {64, 256}) {
                const int bits = kernel->max_weight_bits, act_bits = std::max(1, kernel->max_act_bits);
                const TestWeight source(out, taps, in, bits);
                const int count = 2 * rows + 3;
                std::vector<uint8_t> pixels(4 * static_cast<size_t>(count) * in); // zeros suffice for floats
                if (bits)
                    pixels = draw_codes(static_cast<size_t>(count) * in, act_bits);
                const Prepared input = prepare(kernels, *kernel, pixels, count, in);
                const Panel panel = build_panel(source.graph, source.weight, kernels, *kernel, std::max(1, bits), 1);
                const std::vector<int32_t> window(kMaxRows, 5);
                const std::vector<int32_t> offsets =
                    input.offsets(taps, rows, [&](int tap, int r) { return (r + tap) % count; });
                EpilogueData data(rows, out, act_bits, 0);
                Tile tile{};
                tile.base = input.bytes.data(), tile.offsets = offsets.data();
                tile.taps = taps, tile.steps = steps_of(*kernel, in), tile.channels = out;
                set_panel(tile, panel, cut_blocks(*kernel, out, taps, tile.steps), 0, 0);
                tile.epilogue = data.at(0, 0, 1, kernel->window ? window.data() : nullptr, -1);
                tile.epilogue.out = nullptr;
                const TileFunction function = kernel->tiles[shift][rows - 1];
                const Timing time = time_of([&] { function(tile); });
                const double rate = static_cast<double>(taps) * in * out * rows / time.cycles;
                std::printf("  K %4d %6.1f", taps * in, rate);
                if (limit)
                    std::printf(" (%3.0f %%)", 100 * rate / limit);
                ghz = time.ghz;
            }
            std::printf("  %.2f GHz\n", ghz);
        }
}

} // namespace

int main(int argc, char **argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12); // lines as they come, also into a file
    const std::string command = argc > 1 ? argv[1] : "";
    int wrong = 0;
    for (const Kernels *const *table = kernel_tables(); *table; ++table) {
        const Kernels *kernels = *table;
        if (argc > 2 && std::find(argv + 2, argv + argc, std::string(kernels->isa)) == argv + argc)
            continue;
        try {
            choose_isa(kernels->isa, cpu_features());
        } catch (const IsaError &) {
            std::printf("%-10s not on this CPU\n", kernels->isa);
            continue;
        }
        if (command != "speed")
            wrong += check_tiles(*kernels) + check_rows(*kernels);
        if (kernels->release)
            kernels->release();
        if (command != "check" && kernels != kernels_scalar())
            time_tiles(*kernels);
    }
    if (command != "speed")
        std::printf(wrong ? "%d cases differ from scalar\n" : "all equal to scalar\n", wrong);
    return wrong != 0;
}
