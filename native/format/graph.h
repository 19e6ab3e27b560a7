// Graph: a packed network as plain structs without behavior; FORMAT.md, sections 2 and 3. ModelFile (reader.h) makes
// and checks it; shapes.cpp and the planner read it. Its pointers lead into the copy of the file in its ModelFile, and
// are valid as long as that lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace anyprec {

constexpr int FLOAT_BITS = 32; // "bits" of a weight or value that is float in a profile

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
};

enum class ResizeMode { nearest, bilinear };

// Only the attributes that FORMAT.md lists for the kind are set; the others keep these defaults. A linear has the
// attributes of a 1x1 conv filled in.
struct Op {
    OpKind kind = OpKind::add;
    std::string name;
    std::vector<int> inputs; // value numbers: 0 is the input, i + 1 the value of op i; always smaller than its own

    int weight = -1;           // number in Graph::weights (conv, linear)
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

    int channels = 0;             // C of its value; 0 where it depends on a free input size (flatten)
    bool codes = false;           // its value is codes in profiles that are integer there
    int quantizer = -1;           // the op that made these codes (itself, or seen through max_pool and flatten)
    const float *table = nullptr; // (profiles, table_row), or nullptr for ops without one
    size_t table_row = 0;         // floats of one profile: 2 C, 2 out, or 2
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
    int input_h = 0; // 0 where free
    int input_w = 0;
    int input_c = 0;
    int image_h = 0; // the size it was made for, where it takes others too; 0 where unknown
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
};

} // namespace anyprec
