// See taps.h.
#include "plan/taps.h"

#include <algorithm>
#include <utility>

namespace anyprec {
namespace {

std::vector<int> geometry(const Op &op, const Shape &in, const Shape &out) {
    return {op.kernel[0],   op.kernel[1], op.stride[0], op.stride[1], op.pad[0], op.pad[1],    op.dilation[0],
            op.dilation[1], in.h(),       in.w(),       out.h(),      out.w(),   op.transposed};
}

// Input position along one axis (0: h, 1: w) that output `o` reads at tap `k`; -1 where that is none, or outside.
int tap_position(const Op &op, int axis, int o, int k, int size) {
    if (!op.transposed) {
        const int at = o * op.stride[axis] - op.pad[axis] + k * op.dilation[axis];
        return at >= 0 && at < size ? at : -1;
    }
    const int64_t at = static_cast<int64_t>(o) + op.pad[axis] - static_cast<int64_t>(k) * op.dilation[axis];
    return at >= 0 && at % op.stride[axis] == 0 && at / op.stride[axis] < size ? static_cast<int>(at / op.stride[axis])
                                                                               : -1;
}

// Calls body(y, x) for every output, line by line, or phase by phase.
template <typename Body> void over_outputs(const Op &op, const Shape &out, bool phases, Body body) {
    const int64_t down = phases ? op.stride[0] : 1, across = phases ? op.stride[1] : 1;
    for (int64_t py = 0; py < std::min<int64_t>(down, out.h()); ++py)
        for (int64_t px = 0; px < std::min<int64_t>(across, out.w()); ++px)
            for (int64_t y = py; y < out.h(); y += down)
                for (int64_t x = px; x < out.w(); x += across)
                    body(static_cast<int>(y), static_cast<int>(x));
}

} // namespace

bool has_phases(const Op &op) {
    return op.transposed && (op.stride[0] > 1 || op.stride[1] > 1);
}

std::vector<int> tap_order(const Op &op) {
    std::vector<int> order;
    if (!has_phases(op))
        return order;
    const int64_t columns = op.kernel[1];
    for (int tap = 0; tap < op.kernel[0] * op.kernel[1]; ++tap)
        order.push_back(tap);
    const auto residue = [&](int tap) {
        return std::make_pair(tap / columns * op.dilation[0] % op.stride[0],
                              tap % columns * op.dilation[1] % op.stride[1]);
    };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return residue(a) < residue(b); });
    return order;
}

std::shared_ptr<const std::vector<int32_t>> TapTables::pixels(const Op &op, const Shape &in, const Shape &out,
                                                              bool phases) {
    std::vector<int> key = geometry(op, in, out);
    key.push_back(phases);
    auto &entry = pixels_[key];
    if (entry)
        return entry;
    const std::vector<int> order = phases ? tap_order(op) : std::vector<int>();
    auto taps = std::make_shared<std::vector<int32_t>>();
    taps->reserve(static_cast<size_t>(out.h()) * out.w() * op.kernel[0] * op.kernel[1]);
    const int count = op.kernel[0] * op.kernel[1];
    over_outputs(op, out, phases, [&](int y, int x) {
        for (int t = 0; t < count; ++t) {
            const int tap = phases ? order[static_cast<size_t>(t)] : t;
            const int i = tap / op.kernel[1], j = tap % op.kernel[1];
            const int iy = tap_position(op, 0, y, i, in.h()), ix = tap_position(op, 1, x, j, in.w());
            taps->push_back(iy >= 0 && ix >= 0 ? iy * in.w() + ix + 1 : 0);
        }
    });
    entry = taps;
    return entry;
}

std::shared_ptr<const PixelPairs> TapTables::pairs(const Op &op, const Shape &in, const Shape &out) {
    auto &entry = pairs_[geometry(op, in, out)];
    if (entry)
        return entry;
    const auto taps = pixels(op, in, out);
    const size_t outputs = static_cast<size_t>(out.h()) * out.w(),
                 count = static_cast<size_t>(op.kernel[0]) * op.kernel[1];
    auto made = std::make_shared<PixelPairs>();
    made->taps.reserve((outputs + 1) / 2 * count);
    // A hash chain per first pixel (or per second, where the first is outside the image). Chains are short: a pixel is
    // paired with its neighbor and, at the end of a line, with a pixel of the next line per kernel column.
    const size_t pixels = static_cast<size_t>(in.h()) * in.w() + 1;
    std::vector<int32_t> last(2 * pixels, 0), before; // pair numbers; 0: none
    for (size_t output = 0; output < outputs; output += 2)
        for (size_t t = 0; t < count; ++t) {
            const PixelPair pair = {(*taps)[output * count + t],
                                    output + 1 < outputs ? (*taps)[(output + 1) * count + t] : 0};
            int32_t number = 0;
            if (pair.first || pair.second) {
                int32_t &chain = last[pair.first ? static_cast<size_t>(pair.first) : pixels + pair.second];
                for (number = chain; number && made->all[number - 1].second != pair.second;)
                    number = before[number - 1];
                if (!number) {
                    made->all.push_back(pair);
                    before.push_back(chain);
                    number = chain = static_cast<int32_t>(made->all.size());
                }
            }
            made->taps.push_back(number);
        }
    entry = made;
    return entry;
}

namespace {

// First rows of tiles that do not cross any of `ends`, then the end. Tiles have rows or rows - 1 rows. With pairs, only
// the last tile of a run is shorter.
std::vector<int> cut_tiles(const std::vector<int> &ends, int rows, bool in_pairs) {
    std::vector<int> first;
    int start = 0;
    for (const int end : ends) {
        const int64_t count = end - start, tiles = (count + rows - 1) / rows;
        for (int64_t t = 0; t < tiles; ++t)
            first.push_back(start + static_cast<int>(in_pairs ? t * rows : count * t / tiles));
        start = end;
    }
    first.push_back(start);
    return first;
}

// Output pixels where the set of kernel lines inside the image changes, and the end.
std::vector<int> where_lines_differ(const Op &op, const Shape &in, const Shape &out, bool in_pairs) {
    const auto inside = [&](int y) {
        int first = 0, end = 0; // lines before the first one inside, and up to the last one
        for (int i = 0; i < op.kernel[0]; ++i)
            if (tap_position(op, 0, y, i, in.h()) >= 0)
                end = i + 1;
            else if (!end)
                first = i + 1;
        return std::make_pair(first, end);
    };
    std::vector<int> ends;
    for (int y = 1; y < out.h(); ++y)
        if (inside(y) != inside(y - 1) && !(in_pairs && y * out.w() % 2))
            ends.push_back(y * out.w());
    ends.push_back(out.h() * out.w());
    return ends;
}

// The range of taps that some row of first .. end has inside the image; at least one tap.
TapRange used_taps(const std::vector<int32_t> &taps, int count, int first, int end) {
    const auto used = [&](int tap) {
        for (int r = first; r < end; ++r)
            if (taps[static_cast<size_t>(r) * count + tap])
                return true;
        return false;
    };
    TapRange range = {0, count};
    while (range.end > 1 && !used(range.end - 1))
        --range.end;
    while (range.first + 1 < range.end && !used(range.first))
        ++range.first;
    return range;
}

} // namespace

std::shared_ptr<const Offsets> TapTables::offsets(const Op &op, const Shape &in, const Shape &out, int rows,
                                                  size_t pixel, int whole, bool trimmed, bool in_pairs, bool phases) {
    std::vector<int> key = geometry(op, in, out);
    key.insert(key.end(), {rows, static_cast<int>(pixel), whole, trimmed, in_pairs, phases});
    auto &entry = offsets_[key];
    if (entry)
        return entry;
    const std::vector<int32_t> &taps = in_pairs ? pairs(op, in, out)->taps : *pixels(op, in, out, phases);
    const int pixel_count = out.h() * out.w(), tap_count = op.kernel[0] * op.kernel[1], each = in_pairs ? 2 : 1;
    std::vector<int> ends;
    std::vector<int> row_pixels; // phases: output pixel of every row
    if (phases) {                // every line of a phase is a run
        over_outputs(op, out, true, [&](int y, int x) {
            if (!row_pixels.empty() && x < op.stride[1])
                ends.push_back(static_cast<int>(row_pixels.size()));
            row_pixels.push_back(y * out.w() + x);
        });
        ends.push_back(pixel_count);
    } else {
        for (int end = whole; end <= pixel_count; end += whole)
            ends.push_back(end);
    }

    const auto fill = [&](const std::vector<int> &runs, Offsets &made) { // returns the cost
        made.first_row = cut_tiles(runs, rows, in_pairs);
        int64_t cost = 0;
        for (size_t tile = 0; tile + 1 < made.first_row.size(); ++tile) {
            const int first = made.first_row[tile] / each, end = (made.first_row[tile + 1] + each - 1) / each;
            const TapRange range = trimmed ? used_taps(taps, tap_count, first, end) : TapRange{0, tap_count};
            made.taps.push_back(range);
            made.first_offset.push_back(made.bytes.size());
            for (int t = range.first; t < range.end; ++t)
                for (int r = first; r < end; ++r)
                    made.bytes.push_back(static_cast<int32_t>(taps[static_cast<size_t>(r) * tap_count + t] *
                                                              static_cast<int64_t>(pixel)));
            cost += static_cast<int64_t>(range.end - range.first) * (each * (end - first) + 1); // approximately
        }
        return cost;
    };
    auto made = std::make_shared<Offsets>();
    const int64_t cost = fill(ends, *made);
    if (phases) {
        made->pixel_step = op.stride[1];
        for (size_t tile = 0; tile + 1 < made->first_row.size(); ++tile)
            made->first_pixel.push_back(row_pixels[static_cast<size_t>(made->first_row[tile])]);
    } else if (trimmed && whole == pixel_count) {
        auto cut = std::make_shared<Offsets>();
        if (fill(where_lines_differ(op, in, out, in_pairs), *cut) < cost)
            made = cut;
    }
    entry = made;
    return entry;
}

size_t TapTables::bytes_in_use() const {
    size_t bytes = 0;
    for (const auto &entry : pixels_)
        if (entry.second.use_count() > 1)
            bytes += 4 * entry.second->size();
    for (const auto &entry : pairs_)
        if (entry.second.use_count() > 1)
            bytes += sizeof(PixelPair) * entry.second->all.size() + 4 * entry.second->taps.size();
    for (const auto &entry : offsets_)
        if (entry.second.use_count() > 1)
            bytes += 4 * entry.second->bytes.size() +
                     (4 + sizeof(size_t) + sizeof(TapRange)) * entry.second->first_row.size();
    return bytes;
}

} // namespace anyprec
