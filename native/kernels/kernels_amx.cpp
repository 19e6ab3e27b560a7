// AMX kernels (Sapphire Rapids and later): products of int8 matrices. Flags of this file only: those of
// kernels_avx512.cpp, -mamx-tile and -mamx-int8.
// In: Tiles as in kernels.h. Out: outputs through the epilogue. The arithmetic is ARITHMETIC.md, sections 2 and 3.
//
//   tile: up to 32 rows x 2 vectors of 16 output channels, 4 accumulators in the 8 tile registers (tmm)
//
//                                       B: 16 channels x 4 bytes a line
//                                       +-----------+-----------+
//                          up to 16     |   tmm 6   |   tmm 7   |   as the panel has it:
//                          steps of 4   |           |           |   [step][vector][16 channels][4]
//      A: 4 bytes a step                +-----------+-----------+
//      +--------------+                 +-----------+-----------+
//   16 |    tmm 4     |                 |   tmm 0   |   tmm 1   |   tdpbusd: codes (unsigned) times weights (signed),
// rows |              |      x     =    |           |           |   sums of 32 bits: exact, 16,384 products per
//      +--------------+                 +-----------+-----------+   instruction
//   16 |    tmm 5     |                 |   tmm 2   |   tmm 3   |
// rows |              |                 |           |           |
//      +--------------+                 +-----------+-----------+
//
// A tile register holds up to 16 lines of up to 64 bytes; their number and length are a thread's configuration. It is
// loaded when the shape of a tile changes, and released at the end of a call (Kernels::release), so that the caller's
// code finds none. Everything else is AVX-512's: kernel_tables.cpp takes it from its table.
#include "kernels/kernels.h"

#if defined(ANYPREC_EMULATE)
#include "emulate/amx.h"
#include "emulate/avx512.h"
#else
#include <immintrin.h>
#endif

#include <cstring>
#include <type_traits>
#include <utility>

namespace anyprec {
namespace {

#include "kernels/avx512.inl"

#include "kernels/epilogue.inl"

#include "kernels/toom_cook.inl"

#include "kernels/tiles.inl"

constexpr int kTileRows = 16, kTileBytes = 64; // of palette 1, whatever CPUID's leaf 0x1D says: some VMs hide it

// What ldtilecfg reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int count, int bytes) {
        if (count == 0)
            return; // not used
        rows[tile] = static_cast<uint8_t>(count);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};
static_assert(sizeof(TileShapes) == 64, "as the instruction reads it");

// The intrinsics of gcc 12 do not tell the compiler which memory tile instructions read (of a configuration 8 bytes of
// 64, of a tile none). After this, all that was stored at `p` is there.
ANYPREC_INLINE void finish_stores([[maybe_unused]] const void *p) {
#if defined(__GNUC__)
    __asm__ volatile("" ::"r"(p) : "memory");
#endif
}

thread_local int configured = 0; // rows, steps and vectors of this thread's configuration; 0: none

void configure(int rows, int steps, int vectors) {
    const int wanted = rows | steps << 8 | vectors << 16;
    if (wanted == configured)
        return;
    TileShapes shapes;
    const int first = rows < kTileRows ? rows : kTileRows, second = rows - first;
    for (int v = 0; v < vectors; ++v) {
        shapes.set(v, first, kTileBytes);
        shapes.set(2 + v, second, kTileBytes);
        shapes.set(6 + v, steps, kTileBytes);
    }
    shapes.set(4, first, 4 * steps);
    shapes.set(5, second, 4 * steps);
    finish_stores(&shapes);
    _tile_loadconfig(&shapes);
    configured = wanted;
}

void release() {
    if (configured)
        _tile_release();
    configured = 0;
}

// Codes of up to 16 rows at one tap, as a tile register reads them: lines of memory that are equally far apart. Where
// the rows are not (at the border of the image, or at the end of a line), each step's codes are copied side by side.
class Rows {
  public:
    ANYPREC_INLINE Rows(const Tile &t, const int32_t *offsets, int rows)
        : base_(t.base), offsets_(offsets), rows_(rows), stride_(rows > 1 ? offsets[1] - offsets[0] : kTileBytes) {
        const I lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const I even = add(set1(offsets[0]), _mm512_mullo_epi32(lanes, set1(static_cast<int32_t>(stride_))));
        const __mmask16 some = lane_mask(rows);
        copies_ = (_mm512_cmpeq_epi32_mask(load(offsets, rows), even) & some) != some;
    }
    // The first line; the next ones are stride() further.
    ANYPREC_INLINE const uint8_t *lines(int byte, int bytes, uint8_t (*copy)[kTileBytes]) const {
        if (!copies_)
            return base_ + offsets_[0] + byte;
        const __mmask64 some = bytes == kTileBytes ? ~0ull : (1ull << bytes) - 1;
        for (int r = 0; r < rows_; ++r)
            _mm512_store_si512(copy[r], _mm512_maskz_loadu_epi8(some, base_ + offsets_[r] + byte));
        finish_stores(copy);
        return copy[0];
    }
    ANYPREC_INLINE ptrdiff_t stride() const { return copies_ ? kTileBytes : stride_; }

  private:
    const uint8_t *base_;
    const int32_t *offsets_;
    int rows_;
    ptrdiff_t stride_;
    bool copies_;
};

// All taps and steps, for one or two times 16 rows and one or two vectors; sums stay in the tile registers.
template <bool TwoRows, int V> void multiply(const Tile &t, int rows, int at_once) {
    constexpr int kLine = kTileBytes * V; // bytes of a step of the panel
    alignas(64) uint8_t copies[2][kTileRows][kTileBytes];
    const uint8_t *panel = t.panel, *prefetch_from = t.prefetch_from;
    const int first = TwoRows ? kTileRows : rows, second = TwoRows ? rows - kTileRows : rows, bytes = 4 * at_once;
    _tile_zero(0);
    if constexpr (V == 2)
        _tile_zero(1);
    if constexpr (TwoRows)
        _tile_zero(2);
    if constexpr (TwoRows && V == 2)
        _tile_zero(3);
    for (int tap = 0; tap < t.taps; ++tap) {
        const int32_t *offsets = t.offsets + static_cast<ptrdiff_t>(tap) * rows;
        const Rows upper(t, offsets, first), lower(t, offsets + rows - second, second); // without two: never read
        for (int s = 0; s < t.steps; s += at_once, panel += static_cast<ptrdiff_t>(at_once) * kLine) {
            prefetch_weights(prefetch_from, at_once, t);
            const uint8_t *a = upper.lines(4 * s, bytes, copies[0]);
            _tile_loadd(6, panel, kLine);
            _tile_loadd(4, a, upper.stride());
            _tile_dpbusd(0, 4, 6);
            if constexpr (V == 2) {
                _tile_loadd(7, panel + kTileBytes, kLine);
                _tile_dpbusd(1, 4, 7);
            }
            if constexpr (TwoRows) {
                const uint8_t *b = lower.lines(4 * s, bytes, copies[1]);
                _tile_loadd(5, b, lower.stride());
                _tile_dpbusd(2, 5, 6);
                if constexpr (V == 2)
                    _tile_dpbusd(3, 5, 7);
            }
        }
    }
}

struct Matrices {
    template <int R, int V> static void tile(const Tile &t) {
        constexpr bool kTwoRows = R > kTileRows;
        constexpr int kWidth = W * V;
        const int at_once = matrix_steps(t.steps);
        configure(R, at_once, V);
        multiply<kTwoRows, V>(t, R, at_once);
        alignas(64) int32_t sums[R * kWidth];
        int32_t *to = t.epilogue.raw ? t.epilogue.raw : sums;
        _tile_stored(0, to, 4 * kWidth);
        if constexpr (V == 2)
            _tile_stored(1, to + W, 4 * kWidth);
        if constexpr (kTwoRows)
            _tile_stored(2, to + kTileRows * kWidth, 4 * kWidth);
        if constexpr (kTwoRows && V == 2)
            _tile_stored(3, to + kTileRows * kWidth + W, 4 * kWidth);
        if (to != sums)
            return;
        Epilogue e = t.epilogue;
        for (int r = 0; r < R; r += kEpilogueRows) {
            const int some = R - r < kEpilogueRows ? R - r : kEpilogueRows;
            epilogue_tile(e, sums + r * kWidth, kWidth, some, t.channels);
            advance(e, some);
        }
    }
};

// --- The kernels that AVX-512 lacks
// ------------------------------------------------------------------------------------

// Fitted to what a prototype reached on an Emerald Rapids whose other threads were idle, 32 x 32 outputs from L2:
//   terms                        64    128   256   512   2304
//   products a cycle, measured   429   589   672   731   675
//   1024 terms / (65 + 1024 terms / 750)
//                                431   546   632   686   735
// A float residual from memory takes 0.7 cycles more per output than AVX-512's epilogue, whose products go on
// meanwhile.
constexpr MatrixCost cost = {kTileRows, 16, 65, 0.7};
constexpr Tiles matrices = tiles_of<Matrices, 2 * kTileRows, 2 * kTileRows>();

constexpr Operands centered = {Input::codes, Coding::centered8, 4, 16}, offset = {Input::codes, Coding::offset8, 4, 16};

constexpr TileKernel matrix_7bit("tdpbusd", centered, {7, 8}, matrices, 750, Algorithm::direct, cost);
constexpr TileKernel matrix_8bit("tdpbusd, 8 bit", offset, {8, 8}, matrices, 745, Algorithm::direct, cost);
constexpr const TileKernel *integer[] = {&matrix_7bit, &matrix_8bit, nullptr};

} // namespace

const IntegerKernels integer_amx = {"amx", integer, nullptr, release};

// 5 rows, 3 steps, one vector: lines of tiles that are neither full nor equal, codes above 127 and weights below 0.
bool amx_multiplies() {
    constexpr int kRows = 5, kSteps = 3;
    alignas(64) uint8_t codes[kRows][kTileBytes] = {}, panel[kSteps][kTileBytes];
    alignas(64) int32_t sums[kRows][W];
    for (int r = 0; r < kRows; ++r)
        for (int k = 0; k < 4 * kSteps; ++k)
            codes[r][k] = static_cast<uint8_t>(255 - 19 * k - 7 * r);
    for (int s = 0; s < kSteps; ++s)
        for (int i = 0; i < kTileBytes; ++i)
            panel[s][i] = static_cast<uint8_t>(37 * i + 101 * s + 90);
    configure(kRows, kSteps, 1);
    finish_stores(codes);
    finish_stores(panel);
    _tile_zero(0);
    _tile_loadd(6, panel, kTileBytes);
    _tile_loadd(4, codes, kTileBytes);
    _tile_dpbusd(0, 4, 6);
    _tile_stored(0, sums, kTileBytes);
    release();
    for (int r = 0; r < kRows; ++r)
        for (int n = 0; n < W; ++n) {
            int32_t sum = 0;
            for (int k = 0; k < 4 * kSteps; ++k)
                sum += codes[r][k] * static_cast<int8_t>(panel[k / 4][4 * n + k % 4]);
            if (sums[r][n] != sum)
                return false;
        }
    return true;
}

} // namespace anyprec
