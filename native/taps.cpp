// See taps.h.
#include "taps.h"

namespace anyprec {
namespace {

std::vector<int> geometry(const Op &op, const Shape &in, const Shape &out) {
    return {op.kernel[0],   op.kernel[1],   op.stride[0], op.stride[1], op.pad[0], op.pad[1],
            op.dilation[0], op.dilation[1], in.h,         in.w,         out.h,     out.w};
}

} // namespace

std::shared_ptr<const std::vector<int32_t>> Taps::pixels(const Op &op, const Shape &in, const Shape &out) {
    auto &entry = pixels_[geometry(op, in, out)];
    if (entry)
        return entry;
    auto taps = std::make_shared<std::vector<int32_t>>();
    taps->reserve(static_cast<size_t>(out.h) * out.w * op.kernel[0] * op.kernel[1]);
    for (int y = 0; y < out.h; ++y)
        for (int x = 0; x < out.w; ++x)
            for (int i = 0; i < op.kernel[0]; ++i)
                for (int j = 0; j < op.kernel[1]; ++j) {
                    const int iy = y * op.stride[0] - op.pad[0] + i * op.dilation[0];
                    const int ix = x * op.stride[1] - op.pad[1] + j * op.dilation[1];
                    const bool inside = iy >= 0 && iy < in.h && ix >= 0 && ix < in.w;
                    taps->push_back(inside ? iy * in.w + ix + 1 : 0);
                }
    entry = taps;
    return entry;
}

std::shared_ptr<const Offsets> Taps::offsets(const Op &op, const Shape &in, const Shape &out, int rows, size_t pixel) {
    std::vector<int> key = geometry(op, in, out);
    key.push_back(rows);
    key.push_back(static_cast<int>(pixel));
    auto &entry = offsets_[key];
    if (entry)
        return entry;
    const auto taps = pixels(op, in, out);
    const int pixel_count = out.h * out.w, tap_count = op.kernel[0] * op.kernel[1];
    const int tiles = (pixel_count + rows - 1) / rows; // of rows or rows - 1 each
    auto made = std::make_shared<Offsets>();
    made->bytes.reserve(taps->size());
    for (int tile = 0; tile < tiles; ++tile) {
        const int first = static_cast<int>(static_cast<int64_t>(pixel_count) * tile / tiles);
        const int end = static_cast<int>(static_cast<int64_t>(pixel_count) * (tile + 1) / tiles);
        made->first_row.push_back(first);
        for (int t = 0; t < tap_count; ++t)
            for (int r = first; r < end; ++r)
                made->bytes.push_back(static_cast<int32_t>((*taps)[static_cast<size_t>(r) * tap_count + t] *
                                                           static_cast<int64_t>(pixel)));
    }
    made->first_row.push_back(pixel_count);
    entry = made;
    return entry;
}

} // namespace anyprec
