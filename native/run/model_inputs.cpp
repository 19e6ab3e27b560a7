// The arrays of a call are checked and copied into an arena, in the layout of a plan. See model_impl.h.
#include "run/model_impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

namespace anyprec {

// The shape of an array, in the order of the file.
Shape shape_of(const InputArray &array) {
    const size_t rank = array.shape.size();
    if (rank < 2 || rank > size_t(MAX_AXES) + 1)
        throw InputError("an input has " + std::to_string(rank) + " axes; give N and 1 to 6 more");
    Shape shape;
    shape.n = array.shape[0];
    for (size_t i = 1; i < rank; ++i)
        shape.size[shape.rank++] = array.shape[i];
    if (array.channels_first && shape.is_image())
        std::rotate(shape.size, shape.size + 1, shape.size + 3); // C, H, W
    return shape;
}

std::vector<Shape> shapes_of(const std::vector<InputArray> &arrays) {
    std::vector<Shape> shapes;
    for (const InputArray &array : arrays)
        shapes.push_back(shape_of(array));
    return shapes;
}

InputArray as_array(const Images &images) {
    InputArray array;
    array.data = images.data;
    array.bytes = images.bytes;
    array.channels_first = images.channels_first;
    if (images.channels_first)
        array.shape = {images.n, images.c, images.h, images.w};
    else
        array.shape = {images.n, images.h, images.w, images.c};
    return array;
}

static bool all_whole(const float *x, size_t count) {
    bool whole = true;
    for (size_t i = 0; i < count; ++i)
        whole = whole && std::fabs(x[i]) <= 16777216.0f && x[i] == std::nearbyint(x[i]);
    return whole;
}

void Model::Impl::check_profile(int profile) const {
    const auto count = static_cast<int>(graph().profiles.size());
    if (profile < 0 || profile >= count)
        throw InputError("profile number " + std::to_string(profile) + " does not exist; there are " +
                         std::to_string(count));
    if (!file->available(profile))
        throw InputError("profile '" + graph().profiles[static_cast<size_t>(profile)].name +
                         "' needs planes that are not loaded (max_bits, or a file still growing)");
}

void Model::Impl::check_arrays(const std::vector<InputArray> &arrays) const {
    if (arrays.size() != graph().input_count())
        throw InputError("the model takes " + std::to_string(graph().input_count()) + " input(s), not " +
                         std::to_string(arrays.size()));
    for (size_t i = 0; i < arrays.size(); ++i) {
        if (arrays[i].bytes && (i || byte_values.empty()))
            throw InputError(
                "this model file does not say how uint8 images become floats; give float32, or pack it with image=");
        if (graph().input_is_integer(i) &&
            !all_whole(static_cast<const float *>(arrays[i].data), shape_of(arrays[i]).count()))
            throw InputError("the input '" + graph().input_name(i) + "' holds whole numbers from -2^24 to 2^24");
    }
}

// Writes one line of pixels; at(channel, x) gives each value.
template <typename At> void fill_line(float *to, int width, int channels, const At &at) {
    if (channels == 3) {
        for (int x = 0; x < width; ++x, to += 3) {
            to[0] = at(0, x);
            to[1] = at(1, x);
            to[2] = at(2, x);
        }
    } else {
        for (int x = 0; x < width; ++x)
            for (int c = 0; c < channels; ++c)
                *to++ = at(c, x);
    }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ANYPREC_SHUFFLES
#endif
#endif

// Three planes to pixels of three channels. Four pixels at a time: one by one took 0.1 ms for 224 x 224.
static void interleave(const float *x, size_t plane, int width, float *to) {
    int i = 0;
#if defined(ANYPREC_SHUFFLES)
    typedef float Lanes __attribute__((vector_size(16)));
    typedef float Numbers __attribute__((vector_size(16), aligned(4), may_alias));
    for (; i + 4 <= width; i += 4, to += 12) {
        const Lanes a = *reinterpret_cast<const Numbers *>(x + i);
        const Lanes b = *reinterpret_cast<const Numbers *>(x + plane + i);
        const Lanes c = *reinterpret_cast<const Numbers *>(x + 2 * plane + i);
        const Lanes low = __builtin_shufflevector(a, b, 0, 4, 1, 5), high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        Numbers *out = reinterpret_cast<Numbers *>(to);
        out[0] = __builtin_shufflevector(low, __builtin_shufflevector(c, low, 0, 6, 1, 7), 0, 1, 4, 5);
        out[1] = __builtin_shufflevector(__builtin_shufflevector(low, c, 3, 5, 3, 5), high, 0, 1, 4, 5);
        out[2] = __builtin_shufflevector(__builtin_shufflevector(c, high, 2, 6, 3, 7),
                                         __builtin_shufflevector(high, c, 3, 7, 3, 7), 0, 1, 4, 5);
    }
#endif
    for (; i < width; ++i)
        for (size_t c = 0; c < 3; ++c)
            *to++ = x[plane * c + static_cast<size_t>(i)];
}

void Model::Impl::fill_images(const Plan &plan, size_t value, const InputArray &array, uint8_t *arena) const {
    const Buffer &buffer = plan.buffers[value];
    const Shape &shape = plan.shapes[value];
    const int height = shape.h(), width = shape.w();
    const PaddedInput padded = value ? PaddedInput{0, 0, height, width, false} : plan.padded_input;
    const size_t plane = static_cast<size_t>(height) * width, channels = static_cast<size_t>(shape.c());
    const size_t line = channels * static_cast<size_t>(width),
                 padded_line = channels * static_cast<size_t>(padded.width);
    for (int n = 0; n < shape.n; ++n) {
        uint8_t *image = arena + buffer.offset + buffer.image * static_cast<size_t>(n);
        float *zeros = reinterpret_cast<float *>(image - buffer.shift);
        float *const pixels = reinterpret_cast<float *>(image + buffer.pixel);
        float *to = pixels + padded_line * static_cast<size_t>(padded.top) + channels * padded.left;
        float *const end = pixels + channels * static_cast<size_t>(buffer.pixels);
        std::fill(zeros, to, 0.0f); // the pixel of zeros, and padding up to the first pixel
        for (int y = 0; y < height; ++y, to += padded_line) {
            const size_t at = static_cast<size_t>(n) * plane * channels; // start of the image
            const size_t first = at + static_cast<size_t>(y) * (array.channels_first ? width : line);
            const size_t pixel = array.channels_first ? 1 : channels, channel = array.channels_first ? plane : 1;
            if (array.bytes) {
                const uint8_t *x = static_cast<const uint8_t *>(array.data) + first;
                fill_line(to, width, shape.c(), [&](int c, int i) {
                    return byte_values[static_cast<size_t>(c) * 256 + x[channel * c + pixel * i]];
                });
            } else if (array.channels_first) {
                const float *x = static_cast<const float *>(array.data) + first;
                if (channels == 3)
                    interleave(x, plane, width, to);
                else
                    fill_line(to, width, shape.c(), [&](int c, int i) { return x[plane * c + i]; });
            } else {
                std::memcpy(to, static_cast<const float *>(array.data) + first, 4 * line);
            }
            const bool last = y + 1 == height;
            std::fill(to + line, last ? end : to + padded_line, 0.0f); // padding up to the next line
        }
    }
}

void Model::Impl::fill_inputs(const Plan &plan, const std::vector<InputArray> &arrays, uint8_t *arena) const {
    for (size_t value = 0; value < arrays.size(); ++value) {
        const Buffer &buffer = plan.buffers[value];
        const Shape &shape = plan.shapes[value];
        if (shape.is_image()) {
            fill_images(plan, value, arrays[value], arena);
            continue;
        }
        const size_t bytes = 4 * static_cast<size_t>(shape.product(0, shape.rank));
        for (int n = 0; n < shape.n; ++n) {
            uint8_t *image = arena + buffer.offset + buffer.image * static_cast<size_t>(n);
            std::memset(image - buffer.shift, 0, buffer.shift + buffer.pixel);
            std::memcpy(image + buffer.pixel, static_cast<const uint8_t *>(arrays[value].data) + bytes * n, bytes);
        }
    }
}

// The kept values of one image of a group, to image `to` of a plan's arena. Both plans lay out a kept value alike.
void Model::Impl::copy_kept(const KeptGroup &group, int image, const Plan &plan, int to, uint8_t *arena) const {
    for (int value : plan.kept) {
        const Buffer &from = group.plan->buffers[static_cast<size_t>(value)];
        const Buffer &buffer = plan.buffers[static_cast<size_t>(value)];
        const uint8_t *source = group.arena->data + from.offset + from.image * static_cast<size_t>(image);
        uint8_t *target = arena + buffer.offset + buffer.image * static_cast<size_t>(to);
        std::memset(target - buffer.shift, 0, buffer.shift + buffer.pixel); // the pixel of zeros
        std::memcpy(target + buffer.pixel, source + from.pixel, buffer.pixel * static_cast<size_t>(buffer.pixels));
    }
}

// Kept values of the images rows[0], rows[1], ... as the plan has them.
void Model::Impl::fill_kept(const Plan &plan, const std::vector<KeptGroup> &kept, const int *rows,
                            uint8_t *arena) const {
    for (int n = 0; n < plan.images; ++n) {
        const auto after = std::upper_bound(kept.begin(), kept.end(), rows[n],
                                            [](int row, const KeptGroup &group) { return row < group.first; });
        copy_kept(*std::prev(after), rows[n] - std::prev(after)->first, plan, n, arena);
    }
}

} // namespace anyprec
