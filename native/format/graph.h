// Graph: a packed network as plain structs without behavior; FORMAT.md, sections 2 and 3. ModelFile (reader.h) makes
// and checks it; shapes.cpp and the planner read it. Its pointers lead into the copy of the file in its ModelFile, and
// are valid as long as that lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "format/function.h"

namespace anyprec {

constexpr int FLOAT_BITS = 32; // "bits" of a weight or value that is float in a profile
constexpr int MAX_AXES = 6;    // of a value, N not counted

// Sizes of a value: N, and 1 to 6 axes of which the last is its channels. Each is at least 1 and below 2^31, their
// product below 2^40. 0 is a free size (in the reader only).
struct Shape {
    int n = 0;
    int rank = 0;
    int size[MAX_AXES] = {};

    Shape() = default;
    Shape(int images, std::initializer_list<int> sizes) : n(images) {
        for (int each : sizes)
            size[rank++] = each;
    }
    bool is_image() const { return rank == 3; }
    int h() const { return size[0]; } // of an image
    int w() const { return size[1]; } // of an image
    int c() const { return size[rank - 1]; }
    // Product of axes first .. end; a free size counts as 1.
    int64_t product(int first, int end) const {
        int64_t count = 1;
        for (int i = first; i < end; i++)
            count *= size[i] ? size[i] : 1;
        return count;
    }
    int64_t pixels() const { return product(0, rank - 1); } // the engine's pixels: all axes but the channels
    size_t count() const { return size_t(n) * size_t(product(0, rank)); }
    bool known() const { // no size is free
        for (int i = 0; i < rank; i++)
            if (!size[i])
                return false;
        return true;
    }
    bool operator==(const Shape &o) const {
        bool same = n == o.n && rank == o.rank;
        for (int i = 0; same && i < rank; i++)
            same = size[i] == o.size[i];
        return same;
    }
};

enum class OpKind {
    quantize,
    dequantize,
    conv,
    linear,
    affine,
    clip,
    add,
    concat,
    max_pool,
    avg_pool,
    adaptive_avg_pool,
    resize,
    softmax,
    flatten,
    pad,
    // format 3
    constant,
    input,
    reshape,
    transpose,
    slice,
    gather,
    pointwise,
    binary,
    reduce,
    norm,
    matmul,
    embedding,
    recurrent,
};

// Whether integers of 32 bits hold twice the sum of so many products of codes of so many bits: ARITHMETIC.md, 8.6.
inline bool product_fits(int terms, int left_bits, int right_bits) {
    return int64_t(terms) << (left_bits + right_bits) < int64_t(1) << 30;
}

enum class ResizeMode { nearest, bilinear };

// Only the attributes that FORMAT.md lists for the kind are set; the others keep these defaults. A linear has the
// attributes of a 1x1 conv filled in.
struct Op {
    OpKind kind = OpKind::add;
    std::string name;
    std::vector<int> inputs; // value numbers: 0 is the input, i + 1 the value of op i; always smaller than its own

    int weight = -1;           // number in Graph::weights (conv, linear, constant, embedding, recurrent)
    int kernel[2] = {1, 1};    // h, w
    int stride[2] = {1, 1};    // h, w
    int pad[4] = {0, 0, 0, 0}; // top, left, bottom, right; of a pad op too
    int pad_c[2] = {0, 0};     // before, after (pad op)
    int dilation[2] = {1, 1};  // h, w
    int groups = 1;            // input and output channels are split into so many groups
    bool is_signed = false;    // codes stand for 2 code - n (quantize, conv, linear)
    bool rectify = false;      // quantize
    bool affine = false;       // quantize, conv, linear: has a table; true for the affine op
    int fixed_bits = 0;        // quantize: its bits in every profile that is not float; 0: given by the profile
    bool ceil = false;         // pools
    bool count_pad = false;    // avg_pool
    bool align = false;        // resize
    ResizeMode mode = ResizeMode::nearest;
    double scale[2] = {0, 0}; // resize: used if not 0
    int size[2] = {0, 0};     // adaptive_avg_pool; resize: used if not 0
    int like = -1;            // resize: value whose H and W are taken, used if not -1

    // Format 3
    bool transposed = false;     // conv, matmul
    int output_pad[2] = {0, 0};  // h, w; transposed conv
    bool toom_cook = false;      // conv: computed by Toom-Cook where it is float, stride 1
    bool single = false;         // softmax: in single precision
    int axis = -1;               // concat (-1: the last), slice, gather
    std::vector<int> axes;       // reduce, norm: they rise; transpose: the order
    int64_t start = 0, stop = 0; // slice; negative ones count from the end
    bool to_end = false;         // slice without `stop`
    int step = 1;                // slice
    std::vector<int> index;      // gather
    Function function = Function::abs;
    float eps = 0;        // norm
    bool reverse = false; // recurrent
    bool integer = false; // input: holds whole numbers
    Shape shape;          // constant, input, reshape; 0: free, or what is left

    int channels = 0;              // C of its value; 0 where it depends on a free input size
    bool codes = false;            // its value is codes in profiles that are integer there
    bool multiplies_codes = false; // matmul: so are the values it reads
    int quantizer = -1;            // the op that made these codes (itself, or seen through ops that pass codes on)
    const float *table = nullptr;  // (profiles, table_row), or nullptr for ops without one
    size_t table_row = 0;          // floats of one profile: 2 C, 2 out, or 2
};

struct Weight {
    std::string name;
    int shape[4] = {0, 0, 0, 0};         // out, kh, kw, in / groups
    size_t count = 0;                    // their product
    bool is_float = false;               // float in every profile
    int fixed_bits = 0;                  // its bits in every profile that is not float; 0: given by the profile
    const float *values = nullptr;       // (out, kh, kw, in); is_float weights only
    const uint8_t *codes = nullptr;      // one byte per weight; fixed_bits weights only, which have no planes
    std::vector<const uint8_t *> planes; // by plane number, (count + 7) / 8 bytes each, bits past the end 0; nullptr
                                         // where beyond max_bits or not there yet
    const uint8_t *tail = nullptr;       // count float32 of the float profile, unaligned; nullptr where not there
};

struct Profile {
    std::string name;
    std::vector<uint8_t> weight_bits;                           // by weight: 1..8 or 32; 32 for is_float weights
    std::vector<uint8_t> act_bits;                              // by op: 1..8 or 32; 0 where it is not a quantize
    double accuracy = std::numeric_limits<double>::quiet_NaN(); // in percent; NaN where unknown
};

struct Graph {
    std::string name;
    std::string made_by;
    Shape input;                // of the value 0, without N; 0 where free. Further inputs are ops, before all others
    bool integer_input = false; // it holds whole numbers
    int image_h = 0;            // the size it was made for, where it takes others too; 0 where unknown
    int image_w = 0;
    std::string resize;             // of pictures: "cover", "stretch", "none"; empty where the file does not say
    int resize_h = 0, resize_w = 0; // what is covered, or stretched to
    std::string filter;             // "bilinear", ...; empty with "none"
    std::vector<float> image_scale; // C numbers, or empty: uint8 images are not taken
    std::vector<float> image_shift;
    std::vector<std::string> labels;
    std::vector<Profile> profiles;
    std::vector<std::vector<int>> planes; // [bits], 0..8: plane numbers, most significant first; empty: no such width
    std::vector<Weight> weights;
    std::vector<Op> ops;
    std::vector<int> outputs; // value numbers

    // The inputs are the values 0 .. input_count - 1.
    size_t input_count() const {
        size_t count = 1;
        while (count <= ops.size() && ops[count - 1].kind == OpKind::input)
            count++;
        return count;
    }
    const Shape &input_shape(size_t value) const { return value ? ops[value - 1].shape : input; }
    bool input_is_integer(size_t value) const { return value ? ops[value - 1].integer : integer_input; }
    std::string input_name(size_t value) const { return value ? ops[value - 1].name : "input"; }
};

} // namespace anyprec
