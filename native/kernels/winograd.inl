// The input and output transforms of Winograd F(2x2, 3x3) in integers (kernels.h, struct Winograd). In: codes, or
// accumulators M. Out: V, or outputs through the epilogue; the results are those of the direct algorithm
// (ARITHMETIC.md, section 3). Included after epilogue.inl.
//
//   codes d, 4 x 4             V, U, M: 16 positions          outputs, 2 x 2
//   +---+---+---+---+          +----+----+----+----+          +---+---+
//   |   |   |   |   |          |  0 |  1 |  2 |  3 |          |   |   |
//   +---+---+---+---+   B'dB   +----+----+----+----+  A'MA/4  +---+---+
//   |   |   |   |   |   --->   |  4 |  5 |  6 |  7 |   --->   |   |   |
//   +---+---+---+---+          +----+----+----+----+          +---+---+
//   |   |   |   |   |          |  8 |  9 | 10 | 11 |
//   +---+---+---+---+          +----+----+----+----+
//   |   |   |   |   |          | 12 | 13 | 14 | 15 |
//   +---+---+---+---+          +----+----+----+----+
//
// The including kernels_<isa>.cpp defines, for the input, a Form (how V is stored) with load, add, sub and biased on I;
// for the output, sub and quarter (arithmetic shift right by 2) on I.

// B'd for one column of four pixels: d0 - d2, d1 + d2, d2 - d1, d1 - d3; plain, and with the bias added.
struct Column {
    I plain[4], biased[4];
};
template <typename Form> inline Column patch_column(const WinogradInput &w, int x, int c) {
    const I d0 = Form::load(w.base + w.offsets[0][x] + c), d1 = Form::load(w.base + w.offsets[1][x] + c);
    const I d2 = Form::load(w.base + w.offsets[2][x] + c), d3 = Form::load(w.base + w.offsets[3][x] + c);
    Column t;
    t.plain[0] = Form::sub(d0, d2);
    t.plain[1] = Form::add(d1, d2);
    t.plain[2] = Form::sub(d2, d1);
    t.plain[3] = Form::sub(d1, d3);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        t.biased[i] = Form::biased(t.plain[i]);
    return t;
}

// Neighboring patches share two columns, which are computed once. Loads may pass a pixel's channels by less than a
// vector; the surplus meets zero weights. Position 5, a sum of four codes, needs no bias.
template <typename Form> void winograd_input(const WinogradInput &w) {
    for (int c = 0; c < w.channels; c += Form::kLanes) {
        uint8_t *out = w.out + static_cast<size_t>(c / Form::kLanes) * sizeof(I);
        Column a = patch_column<Form>(w, 0, c), b = patch_column<Form>(w, 1, c);
        for (int p = 0; p < w.patches; ++p, out += w.row) {
            const Column d = patch_column<Form>(w, 2 * p + 2, c), e = patch_column<Form>(w, 2 * p + 3, c);
            uint8_t *to = out;
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i, to += 4 * w.position) {
                store(to, Form::sub(a.biased[i], d.plain[i]));
                store(to + w.position, Form::add(i == 1 ? b.plain[i] : b.biased[i], d.plain[i]));
                store(to + 2 * w.position, Form::sub(d.biased[i], b.plain[i]));
                store(to + 3 * w.position, Form::sub(b.biased[i], e.plain[i]));
            }
            a = d, b = e;
        }
    }
}

// A'MA / 4 into two lines of sums, a few patches at a time, then the epilogue. The rows of A' are 1 1 1 0 and 0 1 -1
// -1.
void winograd_output(const WinogradOutput &w) {
    constexpr int kRun = 4;
    alignas(64) int32_t sums[2][2 * kRun * kWidest];
    Epilogue lines[2] = {w.lines[0], w.lines[1]};
    const size_t width = static_cast<size_t>(w.width);
    for (int first = 0; first < w.patches; first += kRun) {
        const int run = w.patches - first < kRun ? w.patches - first : kRun;
        for (int c = 0; c < w.channels; c += W) {
            I bias[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
                bias[i] = w.bias ? load(w.bias + i * w.bias_stride + c, w.channels - c) : set1(0);
            for (int p = 0; p < run; ++p) {
                const int32_t *m = w.sums + static_cast<size_t>(first + p) * width + c;
                I top[4], low[4]; // A'M, by column
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    const I m0 = load_sum(m + j * w.position), m1 = load_sum(m + (j + 4) * w.position);
                    const I m2 = load_sum(m + (j + 8) * w.position), m3 = load_sum(m + (j + 12) * w.position);
                    top[j] = add(m0, add(m1, m2));
                    low[j] = sub(sub(m1, m2), m3);
                }
                int32_t *to = sums[0] + static_cast<size_t>(2 * p) * width + c;
                store(to, quarter(sub(add(top[0], add(top[1], top[2])), bias[0])));
                store(to + width, quarter(sub(sub(sub(top[1], top[2]), top[3]), bias[1])));
                to = sums[1] + static_cast<size_t>(2 * p) * width + c;
                store(to, quarter(sub(add(low[0], add(low[1], low[2])), bias[2])));
                store(to + width, quarter(sub(sub(sub(low[1], low[2]), low[3]), bias[3])));
            }
        }
        for (int line = 0; line < 2; ++line) {
            const int left = w.pixels[line] - 2 * first, pixels = left < 2 * run ? left : 2 * run;
            if (pixels <= 0)
                continue;
            epilogue_tile(lines[line], sums[line], w.width, pixels, w.channels);
            advance(lines[line], 2 * run);
        }
    }
}

template <typename Form> constexpr Winograd winograd_of(const TileKernel &tile, double transform) {
    constexpr size_t kElement = sizeof(I) / Form::kLanes;
    return {tile, Form::kBias, kElement, Form::kLanes, transform, winograd_input<Form>, winograd_output};
}
