// Products of two values of codes of a Run (execute.h): packs the second value, sums rows and columns, computes tiles.
// In and out: the arena, as a CodesProduct (plan.h) says. ARITHMETIC.md, section 8.6.
#include <cstring>

#include "run/execute.h"

namespace anyprec {
namespace {

// Plain loops that gcc vectorizes at O3.
#if defined(__GNUC__) && !defined(__clang__)
#define ANYPREC_VECTORIZE __attribute__((optimize("O3")))
#else
#define ANYPREC_VECTORIZE
#endif

// Four codes c side by side -> the four bytes factor * c + shift, each modulo 256; factor is 1 or 2.
struct FourBytes {
    uint32_t factor, shift;
    FourBytes(Coding coding, int bits) : factor(coding == Coding::centered8 ? 2 : 1) {
        const int each = coding == Coding::codes8    ? 0
                         : coding == Coding::offset8 ? -(1 << (bits - 1))
                                                     : 1 - (1 << bits);
        shift = static_cast<uint32_t>(each & 255) * 0x01010101u;
    }
    uint32_t operator()(uint32_t codes) const {
        const uint32_t x = factor == 2 ? codes << 1 & 0xfefefefeu : codes, low = 0x7f7f7f7fu;
        return ((x & low) + (shift & low)) ^ ((x ^ shift) & ~low); // bytes do not carry over
    }
};

// Four rows of codes, `n` columns -> a word per column.
ANYPREC_VECTORIZE void interleave(const uint8_t *const *rows, size_t n, FourBytes form, uint32_t *__restrict to) {
    const uint8_t *a = rows[0], *b = rows[1], *c = rows[2], *d = rows[3];
    for (size_t j = 0; j < n; ++j)
        to[j] = form(static_cast<uint32_t>(a[j]) | static_cast<uint32_t>(b[j]) << 8 |
                     static_cast<uint32_t>(c[j]) << 16 | static_cast<uint32_t>(d[j]) << 24);
}

ANYPREC_VECTORIZE void add_codes(const uint8_t *__restrict codes, size_t n, int32_t *__restrict sums) {
    for (size_t j = 0; j < n; ++j)
        sums[j] += codes[j];
}

// A matrix of codes, (terms, n), or (n, terms) if transposed.
struct Codes {
    const uint8_t *data;
    bool transposed;
    size_t terms, n;
    uint8_t at(size_t k, size_t j) const { return transposed ? data[j * terms + k] : data[k * n + j]; }
};

// Four terms of `n` columns, from term k on, to their places where a step has `group` terms.
void place_words(const uint32_t *words, size_t n, size_t k, size_t width, size_t group, uint8_t *to) {
    if (group == 4) {
        std::memcpy(to + width * k, words, 4 * n);
    } else if (group == 8) {
        for (size_t j = 0; j < n; ++j)
            std::memcpy(to + width * (k / 8 * 8) + 8 * j + k % 8, words + j, 4);
    } else {
        for (size_t i = k; i < k + 4; ++i)
            for (size_t j = 0; j < n; ++j)
                to[width * (i / group * group) + group * j + i % group] =
                    static_cast<uint8_t>(words[j] >> (8 * (i - k)));
    }
}

// Columns of a block, for kernels that read `group` bytes per step: 1, 2, 4 or 8. Terms past the end have the weight 0.
void pack_bytes(const Codes &b, const Block &block, size_t steps, size_t width, size_t group, FourBytes form,
                uint8_t *to) {
    const size_t first = static_cast<size_t>(block.first), n = static_cast<size_t>(block.channels), k = b.terms;
    const size_t whole = k / 4;
    std::memset(to, 0, group * width * steps);
    uint32_t words[256];
    for (size_t s = 0; s < whole; ++s) {
        if (b.transposed) {
            for (size_t j = 0; j < n; ++j) {
                uint32_t codes;
                std::memcpy(&codes, b.data + (first + j) * k + 4 * s, 4);
                words[j] = form(codes);
            }
        } else {
            const uint8_t *row = b.data + 4 * s * b.n + first;
            const uint8_t *rows[4] = {row, row + b.n, row + 2 * b.n, row + 3 * b.n};
            interleave(rows, n, form, words);
        }
        place_words(words, n, 4 * s, width, group, to);
    }
    for (size_t i = 4 * whole; i < k; ++i)
        for (size_t j = 0; j < n; ++j)
            to[width * (i / group * group) + group * j + i % group] = static_cast<uint8_t>(form(b.at(i, first + j)));
}

// The same for kernels that read `group` 16-bit integers per step: what the codes stand for.
void pack_wide(const Codes &b, const Block &block, size_t steps, size_t width, size_t group, CodeValue value,
               uint8_t *to) {
    const size_t first = static_cast<size_t>(block.first), n = static_cast<size_t>(block.channels);
    std::memset(to, 0, 2 * group * width * steps);
    int16_t *out = reinterpret_cast<int16_t *>(to);
    for (size_t k = 0; k < b.terms; ++k) {
        int16_t *row = out + group * width * (k / group) + k % group;
        const uint8_t *codes = b.data + (b.transposed ? first * b.terms + k : k * b.n + first);
        const size_t next = b.transposed ? b.terms : 1;
        for (size_t j = 0; j < n; ++j)
            row[group * j] = static_cast<int16_t>(value.factor * codes[next * j] + value.shift);
    }
}

// Codes to what they stand for.
ANYPREC_VECTORIZE void widen(const uint8_t *__restrict codes, size_t count, CodeValue value, int16_t *__restrict to) {
    for (size_t i = 0; i < count; ++i)
        to[i] = static_cast<int16_t>(value.factor * codes[i] + value.shift);
}

} // namespace

void Run::pack_codes(const Step &s) const {
    const MatmulStep &m = *s.matmul;
    const CodesProduct &p = *m.codes;
    const TileKernel &kernel = *p.kernel;
    const size_t k = static_cast<size_t>(m.k), columns = static_cast<size_t>(m.n), steps = static_cast<size_t>(p.steps);
    const FourBytes form(kernel.coding, p.bits);
    over(p.right_count, 1, [&](int n, size_t first, size_t end) {
        for (size_t i = first; i < end; ++i) {
            const Codes b{pixels(s.inputs[1], n) + i * k * columns, s.op->transposed, k, columns};
            const size_t number = static_cast<size_t>(n) * p.right_count + i;
            uint8_t *panel = arena + p.panels + p.panel_bytes * number;
            for (const Block &block : p.blocks) {
                const size_t width = static_cast<size_t>(kernel.lanes) << block.log2_vectors;
                const size_t group = static_cast<size_t>(kernel.step_channels);
                if (kernel.coding == Coding::centered16)
                    pack_wide(b, block, steps, width, group, p.right, panel + block.panel);
                else
                    pack_bytes(b, block, steps, width, group, form, panel + block.panel);
            }
            if (!p.column_factor)
                continue;
            int32_t *sums = reinterpret_cast<int32_t *>(arena + p.columns) + columns * number;
            if (b.transposed) {
                kernels.sums(b.data, k, m.n, m.k, sums, 1);
            } else {
                std::fill(sums, sums + columns, 0);
                for (size_t row = 0; row < k; ++row)
                    add_codes(b.data + row * columns, columns, sums);
            }
            for (size_t j = 0; j < columns; ++j)
                sums[j] = p.column_factor * sums[j] + p.constant;
        }
    });
}

// The first value as the kernel reads it, and the sums of its rows.
void Run::prepare_rows(const Step &s) const {
    const MatmulStep &m = *s.matmul;
    const CodesProduct &p = *m.codes;
    const size_t k = static_cast<size_t>(m.k), rows = p.left_count * static_cast<size_t>(m.m);
    if (!p.wide && !p.window_factor)
        return;
    over(rows, 64, [&](int n, size_t first, size_t end) {
        const uint8_t *codes = pixels(s.inputs[0], n) + first * k;
        const size_t at = static_cast<size_t>(n) * rows + first;
        if (p.wide)
            widen(codes, k * (end - first), p.left, reinterpret_cast<int16_t *>(arena + p.widened) + at * k);
        if (p.window_factor)
            kernels.sums(codes, k, static_cast<int>(end - first), m.k,
                         reinterpret_cast<int32_t *>(arena + p.windows) + at, 1);
    });
}

void Run::codes_product(const Step &s) const {
    static constexpr int32_t kZeros[kMaxRows] = {}; // all rows of a matrix have the same constants
    const MatmulStep &m = *s.matmul;
    const CodesProduct &p = *m.codes;
    const TileKernel &kernel = *p.kernel;
    pack_codes(s);
    prepare_rows(s);
    const size_t rows = static_cast<size_t>(m.m), k = static_cast<size_t>(m.k), columns = static_cast<size_t>(m.n);
    const size_t matrices = static_cast<size_t>(m.matrices.count(m.matrices.rank));
    const size_t team = static_cast<size_t>(threads.count);
    // A task is some rows of one matrix: enough tasks for all threads, in whole tiles.
    const size_t chunks =
        team > 1 && matrices < 2 * team ? std::min((rows + 23) / 24, (2 * team + matrices - 1) / matrices) : 1;
    const size_t at_once = ((rows + chunks - 1) / chunks + 23) / 24 * 24;
    over(matrices * chunks, 1, [&](int n, size_t first, size_t end) {
        Tile tile{};
        tile.offsets = p.row_offsets;
        tile.taps = 1;
        tile.steps = p.steps;
        tile.epilogue.doublings = p.doublings;
        tile.epilogue.window_factor = p.window_factor;
        tile.epilogue.scale = p.scale.data();
        tile.epilogue.shift = p.shift.data();
        tile.epilogue.out_stride = columns;
        for (size_t i = first; i < end; ++i) {
            const size_t matrix = i / chunks, from = i % chunks * at_once, to = std::min(rows, from + at_once);
            size_t a = 0, b = 0;
            m.matrices.offsets(static_cast<int64_t>(matrix), m.matrices.rank, a, b);
            const size_t left = static_cast<size_t>(n) * p.left_count * rows + a / k; // row
            const size_t right = static_cast<size_t>(n) * p.right_count + b / (k * columns);
            const uint8_t *x = p.wide ? arena + p.widened + left * p.row : pixels(s.inputs[0], n) + a;
            float *out = result(s, n) + matrix * rows * columns;
            for (const Block &block : p.blocks) {
                const size_t most = static_cast<size_t>(kernel.max_rows[block.log2_vectors]);
                tile.panel = tile.prefetch_from = arena + p.panels + p.panel_bytes * right + block.panel;
                tile.channels = block.channels;
                if (p.column_factor) {
                    tile.epilogue.constants =
                        reinterpret_cast<const int32_t *>(arena + p.columns) + columns * right + block.first;
                    tile.epilogue.constant_rows = kZeros;
                }
                for (size_t row = from; row < to; row += most) {
                    tile.base = x + row * p.row;
                    tile.epilogue.out = out + row * columns + block.first;
                    if (p.window_factor)
                        tile.epilogue.window = reinterpret_cast<const int32_t *>(arena + p.windows) + left + row;
                    kernel.tiles[block.log2_vectors][std::min(most, to - row) - 1](tile);
                }
            }
        }
    });
}

} // namespace anyprec
