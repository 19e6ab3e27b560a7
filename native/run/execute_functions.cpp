// Functions, reductions, matrices and recurrent layers of a Run (execute.h). In and out: the arena. The loops inside
// are kernels (functions.inl); here work is split over images, rows and threads. ARITHMETIC.md, section 8.
#include "run/execute.h"

#include <cstring>

namespace anyprec {

constexpr size_t kTaskNumbers = 8192; // fewer are not worth a task of their own

void Run::pointwise(const Step &s) const {
    over(static_cast<size_t>(s.shape.product(0, s.shape.rank)), kTaskNumbers, [&](int n, size_t first, size_t end) {
        kernels.functions->pointwise(s.op->function, floats(s, 0, n) + first, result(s, n) + first, end - first);
    });
}

void Run::binary(const Step &s) const {
    const Broadcast &b = s.broadcast;
    const int last = b.rank - 1;
    const size_t run = static_cast<size_t>(b.size[last]);
    if (last == 0) { // equal shapes, or one number for all
        over(run, kTaskNumbers, [&](int n, size_t first, size_t end) {
            kernels.functions->binary(s.op->function, floats(s, 0, n) + b.first[0] * first, b.first[0],
                                      floats(s, 1, n) + b.second[0] * first, b.second[0], result(s, n) + first,
                                      end - first);
        });
        return;
    }
    over(static_cast<size_t>(b.count(last)), (kTaskNumbers + run - 1) / run, [&](int n, size_t first, size_t end) {
        const float *x = floats(s, 0, n), *y = floats(s, 1, n);
        float *out = result(s, n) + run * first;
        for (size_t i = first; i < end; ++i, out += run) {
            size_t a = 0, c = 0;
            b.offsets(static_cast<int64_t>(i), last, a, c);
            kernels.functions->binary(s.op->function, x + a, b.first[last], y + c, b.second[last], out, run);
        }
    });
}

namespace {

// Columns of an inner axis that one task takes: whole cache lines, and enough numbers.
size_t column_piece(size_t terms) {
    return std::max<size_t>(64, (kTaskNumbers / std::max<size_t>(terms, 1) + 63) / 64 * 64);
}

} // namespace

// Calls body(source, target, first, end) per image for rows, or body for columns; the source may be a copy in scratch.
void Run::reduce(const Step &s) const {
    const ReduceStep &r = *s.reduce;
    const size_t numbers = r.terms * r.inner;
    if (r.copies)
        over(static_cast<size_t>(r.there.size[0]), 1, [&](int n, size_t first, size_t end) {
            permute(kernels, r.there, 4, static_cast<int64_t>(first), static_cast<int64_t>(end), pixels(s.inputs[0], n),
                    arena + r.scratch + r.scratch_image * static_cast<size_t>(n));
        });
    const auto source = [&](int n) {
        return r.copies ? reinterpret_cast<const float *>(arena + r.scratch + r.scratch_image * static_cast<size_t>(n))
                        : floats(s, 0, n);
    };
    const FunctionKernels &f = *kernels.functions;
    if (r.rows) {
        over(r.outer, (kTaskNumbers + numbers - 1) / numbers, [&](int n, size_t first, size_t end) {
            f.reduce_rows(s.op->function, source(n) + first * r.terms, end - first, r.terms, result(s, n) + first);
        });
        return;
    }
    const size_t piece = column_piece(r.terms), pieces = (r.inner + piece - 1) / piece;
    over(r.outer * pieces, 1, [&](int n, size_t first, size_t end) {
        for (size_t i = first; i < end; ++i) {
            const size_t outer = i / pieces, column = i % pieces * piece;
            f.reduce_columns(s.op->function, source(n) + outer * numbers + column, r.terms, r.inner,
                             std::min(piece, r.inner - column), result(s, n) + outer * r.inner + column);
        }
    });
}

void Run::norm(const Step &s) const {
    const ReduceStep &r = *s.reduce;
    const size_t numbers = r.terms * r.inner;
    const auto scratch = [&](int n) { return arena + r.scratch + r.scratch_image * static_cast<size_t>(n); };
    if (r.copies)
        over(static_cast<size_t>(r.there.size[0]), 1, [&](int n, size_t first, size_t end) {
            permute(kernels, r.there, 4, static_cast<int64_t>(first), static_cast<int64_t>(end), pixels(s.inputs[0], n),
                    scratch(n));
        });
    const auto source = [&](int n) { return r.copies ? reinterpret_cast<const float *>(scratch(n)) : floats(s, 0, n); };
    const auto target = [&](int n) { return r.copies ? reinterpret_cast<float *>(scratch(n)) : result(s, n); };
    const FunctionKernels &f = *kernels.functions;
    if (r.rows) {
        over(r.outer, (kTaskNumbers + numbers - 1) / numbers, [&](int n, size_t first, size_t end) {
            f.norm_rows(source(n) + first * r.terms, end - first, r.terms, s.op->eps, target(n) + first * r.terms);
        });
    } else {
        const size_t piece = column_piece(r.terms), pieces = (r.inner + piece - 1) / piece;
        over(r.outer * pieces, 1, [&](int n, size_t first, size_t end) {
            for (size_t i = first; i < end; ++i) {
                const size_t at = i / pieces * numbers + i % pieces * piece;
                f.norm_columns(source(n) + at, r.terms, r.inner, std::min(piece, r.inner - i % pieces * piece),
                               s.op->eps, target(n) + at);
            }
        });
    }
    if (r.copies)
        over(static_cast<size_t>(r.back.size[0]), 1, [&](int n, size_t first, size_t end) {
            permute(kernels, r.back, 4, static_cast<int64_t>(first), static_cast<int64_t>(end), scratch(n),
                    pixels(s.out, n));
        });
}

void Run::softmax_single(const Step &s) const {
    const size_t channels = static_cast<size_t>(s.shape.c());
    over(static_cast<size_t>(s.out.pixels), (kTaskNumbers / 4 + channels - 1) / channels,
         [&](int n, size_t first, size_t end) {
             kernels.functions->softmax_rows(floats(s, 0, n) + first * channels, end - first, channels,
                                             result(s, n) + first * channels);
         });
}

namespace {

// Columns first .. of a matrix (terms, n), or (n, terms) if transposed, into a panel [terms][width]; columns past the
// end are 0.
void pack_panel(const Kernels &kernels, const float *b, bool transposed, size_t terms, size_t n, size_t first,
                size_t width, float *to) {
    const size_t columns = std::min(width, n - first);
    if (!transposed) {
        for (size_t k = 0; k < terms; ++k, to += width) {
            std::memcpy(to, b + k * n + first, 4 * columns);
            std::fill(to + columns, to + width, 0.0f);
        }
        return;
    }
    kernels.transpose_floats(b + first * terms, terms, columns, terms, to, width);
    if (columns < width)
        for (size_t k = 0; k < terms; ++k)
            std::fill(to + k * width + columns, to + (k + 1) * width, 0.0f);
}

} // namespace

void Run::pack_matrices(const Step &s) const {
    const MatmulStep &m = *s.matmul;
    const size_t panels = static_cast<size_t>(m.panels), each = m.packed_count * panels;
    const size_t width = static_cast<size_t>(kernels.functions->matmul_width), k = static_cast<size_t>(m.k);
    const size_t columns = static_cast<size_t>(m.n);
    threads.run(static_cast<int>(std::min<size_t>(static_cast<size_t>(m.packed_images) * each, 1024)), [&](int task) {
        const size_t all = static_cast<size_t>(m.packed_images) * each, tasks = std::min<size_t>(all, 1024);
        for (size_t i = static_cast<size_t>(task); i < all; i += tasks) {
            const size_t n = i / each, matrix = i % each / panels, panel = i % panels;
            pack_panel(kernels, floats(s, 1, static_cast<int>(n)) + matrix * k * columns, s.op->transposed, k, columns,
                       panel * width, width, reinterpret_cast<float *>(arena + m.scratch) + i * m.panel_floats);
        }
    });
}

void Run::matmul(const Step &s) const {
    const MatmulStep &m = *s.matmul;
    if (m.packs)
        pack_matrices(s);
    const size_t rows = static_cast<size_t>(m.m), k = static_cast<size_t>(m.k), columns = static_cast<size_t>(m.n);
    const size_t width = static_cast<size_t>(kernels.functions->matmul_width), panels = (columns + width - 1) / width;
    // A task is some rows of one matrix, at most 256 KiB of them: they stay in L2 while panel after panel passes.
    const size_t matrices = static_cast<size_t>(m.matrices.count(m.matrices.rank));
    const size_t team = static_cast<size_t>(threads.count);
    size_t chunks = (rows + std::max<size_t>(65536 / k, 24) - 1) / std::max<size_t>(65536 / k, 24);
    if (team > 1 && matrices * chunks < 2 * team) // enough tasks for all threads
        chunks = std::max(chunks, std::min((rows + 11) / 12, (2 * team + matrices - 1) / matrices));
    const size_t at_once = ((rows + chunks - 1) / chunks + 5) / 6 * 6; // in whole tiles
    over(matrices * chunks, 1, [&](int n, size_t first, size_t end) {
        const float *x = floats(s, 0, n), *y = floats(s, 1, n);
        const float *packed = reinterpret_cast<const float *>(arena + m.scratch) +
                              (m.packed_images > 1 ? static_cast<size_t>(n) : 0) * m.packed_count *
                                  static_cast<size_t>(m.panels) * m.panel_floats;
        for (size_t i = first; i < end; ++i) {
            const size_t matrix = i / chunks, row = i % chunks * at_once;
            if (row >= rows)
                continue;
            size_t a = 0, b = 0;
            m.matrices.offsets(static_cast<int64_t>(matrix), m.matrices.rank, a, b);
            MatmulTile t{};
            t.a = x + a + row * k;
            t.a_stride = k;
            t.c_stride = columns;
            t.rows = static_cast<int>(std::min(at_once, rows - row));
            t.terms = m.k;
            t.whole = m.packs;
            t.b_stride = m.packs ? width : columns;
            for (size_t panel = 0; panel < panels; ++panel) {
                t.columns = static_cast<int>(std::min(width, columns - panel * width));
                t.b = m.packs ? packed + (b / (k * columns) * panels + panel) * m.panel_floats : y + b + panel * width;
                t.c = result(s, n) + matrix * rows * columns + row * columns + panel * width;
                kernels.functions->matmul(t);
            }
        }
    });
}

// All sequences of a task go through a position together: the weights are read once for all of them. Without leading
// axes they are of several images; else of one, where they lie one after another.
void Run::recurrent(const Step &s) const {
    const RecurrentStep &r = *s.recurrent;
    const FunctionKernels &f = *kernels.functions;
    const size_t gates = static_cast<size_t>(r.gates), hidden = static_cast<size_t>(r.hidden);
    const size_t length = static_cast<size_t>(r.length), sequences = static_cast<size_t>(r.sequences);
    const size_t images = static_cast<size_t>(plan.images), team = static_cast<size_t>(threads.count);
    const size_t width = static_cast<size_t>(f.matmul_width), panels = (gates + width - 1) / width;
    const float *bias = reinterpret_cast<const float *>(r.panel->data), *weights = bias + panels * width;
    float *sums = reinterpret_cast<float *>(arena + r.scratch);
    float *states = sums + gates * images * sequences;
    std::fill(states, states + hidden * images * sequences, 0.0f);
    const bool alone = sequences == 1;
    const size_t groups = alone ? 1 : images, rows = alone ? images : sequences, parts = std::min(team, rows);
    threads.run(static_cast<int>(groups * parts), [&](int task) {
        const size_t group = static_cast<size_t>(task) / parts, part = static_cast<size_t>(task) % parts;
        const size_t first = group * rows + rows * part / parts, end = group * rows + rows * (part + 1) / parts;
        const auto image_of = [&](size_t row) { return static_cast<int>(row / sequences); };
        const auto out = [&](size_t row) { return result(s, image_of(row)) + row % sequences * length * hidden; };
        MatmulTile t{};
        t.b_stride = width;
        t.c_stride = gates;
        t.rows = static_cast<int>(end - first);
        t.terms = r.hidden;
        t.whole = true;
        // h of the position before; the pixel of zeros at the start
        t.a = reinterpret_cast<const float *>(image(s.out, image_of(first)));
        t.a_stride = alone ? s.out.image / 4 : 0;
        for (size_t i = 0; i < length; ++i) {
            const size_t position = s.op->reverse ? length - 1 - i : i;
            for (size_t panel = 0; panel < panels; ++panel) {
                t.b = weights + panel * hidden * width;
                t.c = sums + gates * first + panel * width;
                t.columns = static_cast<int>(std::min(width, gates - panel * width));
                t.start = bias + panel * width;
                f.matmul(t);
            }
            for (size_t row = first; row < end; ++row) {
                RecurrentCell cell{};
                cell.x = floats(s, 0, image_of(row)) + (row % sequences * length + position) * gates;
                cell.u = sums + gates * row;
                cell.before = t.a + t.a_stride * (row - first);
                cell.state = states + hidden * row;
                cell.h = out(row) + position * hidden;
                cell.hidden = r.hidden;
                (s.op->function == Function::lstm ? f.lstm : f.gru)(cell);
            }
            t.a = out(first) + position * hidden;
            t.a_stride = alone ? s.out.image / 4 : length * hidden;
        }
    });
}

} // namespace anyprec
