// Depthwise 3x3 convolution of codes with an epilogue in registers: a line segment of outputs, columns prepared once.
// In: DepthwiseRow with nine taps. Out: codes. Included after epilogue.inl by kernels_<isa>.cpp, which defines Columns.
//
//   column a  b  c        a column is three codes of one channel
//          +--+--+--+     The next output of a line (stride 1) reads columns b, c and a new one;
//   line 0 |  |  |  |     with stride 2, column c and two new ones.
//        1 |  |  |  |
//        2 |  |  |  |
//          +--+--+--+
//
// A Columns object, for one block of channels, has
//   kChannels, kMasked          channels of a block; whether a block may be partial
//   column(top, middle, low, x) three codes of each channel -> four vectors
//   output(x, e, pixel, c)      three columns -> the codes of an output pixel, from channel c on

// How many columns of an output are those of the output before it: 2, 1 (its first is the other's last) or 0.
void count_shared(const DepthwiseRow &d, uint8_t *shared) {
    const auto same = [&](int p, int column, int before) {
        for (int t = 0; t < 9; t += 3)
            if (d.offsets[(t + column) * d.pixels + p] != d.offsets[(t + before) * d.pixels + p - 1])
                return false;
        return true;
    };
    // A whole line of stride 1: the offsets of a column are those of the one before it, shifted by an output.
    const size_t others = static_cast<size_t>(d.pixels - 1);
    bool line = true;
    for (int t = 0; line && t < 9; ++t)
        line = t % 3 == 2 || std::memcmp(d.offsets + t * d.pixels + 1, d.offsets + (t + 1) * d.pixels, 4 * others) == 0;
    shared[0] = 0;
    if (line) {
        std::memset(shared + 1, 2, others);
        return;
    }
    for (int p = 1; p < d.pixels; ++p)
        shared[p] = same(p, 0, 1) && same(p, 1, 2) ? 2 : same(p, 0, 2) ? 1 : 0;
}

// Channels from 0 on; returns the first channel that is left.
template <typename Columns> int depthwise_3x3(const DepthwiseRow &d) {
    uint8_t shared[kDepthwisePixels];
    count_shared(d, shared);
    int c = 0;
    for (; Columns::kMasked ? c < d.channels : c + Columns::kChannels <= d.channels; c += Columns::kChannels) {
        const Columns columns(d, c);
        const uint8_t *base = d.base + c;
        const size_t line = 3 * static_cast<size_t>(d.pixels);
        I x[3][4] = {};
        for (int p = 0; p < d.pixels; ++p) {
            const int32_t *offsets = d.offsets + p;
            const auto read = [&](int column) {
                const int32_t *at = offsets + static_cast<ptrdiff_t>(column) * d.pixels;
                columns.column(base + at[0], base + at[line], base + at[2 * line], x[column]);
            };
            const auto move = [&](int to, int from) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i)
                    x[to][i] = x[from][i];
            };
            if (shared[p] == 2) {
                move(0, 1);
                move(1, 2);
            } else {
                if (shared[p])
                    move(0, 2);
                else
                    read(0);
                read(1);
            }
            read(2);
            columns.output(x, d.epilogue, static_cast<size_t>(p), c);
        }
    }
    return c;
}
