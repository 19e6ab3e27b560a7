// See graph_json.h and graph_parser.h. Every number is compared with its limit before it is stored. Allocations are
// bounded by the length of the text, except the bits of profiles: at most 256 x 65,536 bytes, twice.
#include "format/graph_json.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "format/checksum.h"
#include "format/graph_parser.h"
#include "format/shapes.h"

namespace anyprec {

constexpr int64_t LATEST_FORMAT = 3; // 1: without preprocessing; 3: values of any number of axes

ParsedGraph GraphParser::parse() {
    Fields fields(root_, "the graph");
    if (Value format = fields.take("format");
        format.is(Type::integer) && format.integer() >= 1 && format.integer() <= LATEST_FORMAT)
        version_ = format.integer();
    else
        throw ModelError(
            ModelErrorKind::UnsupportedVersion,
            "format version " + (format.is(Type::integer) ? std::to_string(format.integer()) : "?") +
                " is not 1, 2 or 3, those this anyprec reads; use the anyprec that wrote the file, or pack "
                "the model again");
    graph_.name = fields.name("name");
    graph_.made_by = fields.text("made_by");
    if (!graph_.made_by.empty())
        fields.name("made_by");
    parse_input(fields.take("input"));
    parse_labels(fields.take("labels"));
    parse_planes(fields.take("planes"));
    parse_weights(fields.take("weights"));
    parse_ops(fields.take("ops"));
    parse_outputs(fields.take("outputs"));
    infer();
    parse_profiles(fields.take("profiles"));
    for (const Profile &profile : graph_.profiles)
        check_profile(profile);
    parse_checksums(fields.take("checksums"));
    fields.done();
    return std::move(result_);
}

void GraphParser::parse_input(Value value) {
    Fields input(value, "the graph's input");
    if (version_ >= 3 && input.has("integer"))
        graph_.integer_input = input.flag("integer");
    graph_.input = parse_input_shape(input, graph_.integer_input);
    if (version_ < 3 && (!graph_.input.is_image() || !graph_.input.c()))
        input.fail("shape", "[H, W, C], each from 1, below 2^31, or null for a free H or W");
    Value image = input.take("image");
    if (!graph_.input.is_image() || graph_.integer_input) {
        if (!image.is(Type::null) || input.has("size") || input.has("preprocessing"))
            bad_graph("the graph's input is no image; it goes without 'image', 'size' and 'preprocessing'");
        input.done();
        return;
    }
    if (input.has("size"))
        parse_image_size(input);
    if (!image.is(Type::null)) {
        Fields numbers(image, "the graph's image");
        graph_.image_scale = parse_channels(numbers, "scale");
        graph_.image_shift = parse_channels(numbers, "shift");
        numbers.done();
    }
    if (version_ == 2 || (version_ >= 3 && input.has("preprocessing")))
        parse_preprocessing(input.take("preprocessing"));
    input.done();
}

// 1 to 6 sizes, null where free; the last one only if the input holds whole numbers.
Shape GraphParser::parse_input_shape(Fields &fields, bool integer) const {
    const Shape shape = parse_shape(fields, MAX_AXES);
    if (!shape.c() && !integer)
        fields.fail("shape", "known along its last axis, for 'integer' is not true");
    return shape;
}

// 1 to 6 sizes from 1, at most `most_free` of them null, which become 0. Their product is below 2^40.
Shape GraphParser::parse_shape(Fields &fields, int most_free) const {
    Value value = fields.take("shape");
    Shape shape;
    bool good = value.is(Type::array) && value.size() >= 1 && value.size() <= size_t(MAX_AXES);
    int64_t count = 1;
    if (good)
        for (Value item : value) {
            const bool known = item.is(Type::integer);
            const int64_t size = known ? item.integer() : 1;
            good = good && (known || (item.is(Type::null) && most_free-- > 0)) && size >= 1 && size < DIMENSION_LIMIT &&
                   size <= (COUNT_LIMIT - 1) / count;
            if (!good)
                break;
            count *= size;
            shape.size[shape.rank++] = known ? int(size) : 0;
        }
    if (!good)
        fields.fail("shape", "a list of 1 to 6 sizes, each from 1, below 2^31, and below 2^40 together; null only "
                             "where a size may be free");
    return shape;
}

// How pictures become images of the input: always present in format 2.
void GraphParser::parse_preprocessing(Value value) {
    Fields fields(value, "the graph's preprocessing");
    const std::string_view resize = fields.text("resize");
    const bool none = resize == "none";
    if (!none && resize != "cover" && resize != "stretch")
        fields.fail("resize", "'cover', 'stretch' or 'none'");
    graph_.resize = resize;
    bool scales = !graph_.image_scale.empty();
    for (float scale : graph_.image_scale)
        scales = scales && scale > 0;
    if (!scales || (graph_.input.c() != 1 && graph_.input.c() != 3))
        bad_graph("the graph's preprocessing needs an image of 1 or 3 channels whose scales are above 0");
    if (none) {
        if (!fields.take("to").is(Type::null) || !fields.take("filter").is(Type::null) || graph_.image_h ||
            graph_.input.h() || graph_.input.w())
            bad_graph("the graph's preprocessing: 'none' goes with a free H and W, and without 'size', 'to', 'filter'");
        fields.done();
        return;
    }
    int to[2] = {0, 0};
    fields.integers("to", 1, to);
    if (!graph_.image_h || to[0] < graph_.image_h || to[1] < graph_.image_w ||
        double(to[0]) * to[1] * graph_.input.c() >= double(COUNT_LIMIT))
        fields.fail("to", "[H, W], each at least that of the input's 'size', which is needed, and not too large");
    graph_.resize_h = to[0];
    graph_.resize_w = to[1];
    graph_.filter = fields.text("filter");
    if (graph_.filter != "nearest" && graph_.filter != "bilinear" && graph_.filter != "bicubic" &&
        graph_.filter != "lanczos")
        fields.fail("filter", "'nearest', 'bilinear', 'bicubic' or 'lanczos'");
    fields.done();
}

void GraphParser::parse_image_size(Fields &input) {
    Value value = input.take("size");
    int sizes[2] = {0, 0};
    bool good = value.is(Type::array) && value.size() == 2;
    int i = 0;
    if (good)
        for (Value size : value) {
            int fixed = i == 0 ? graph_.input.h() : graph_.input.w();
            good = good && size.is(Type::integer) && size.integer() >= 1 && size.integer() < DIMENSION_LIMIT &&
                   (fixed == 0 || fixed == size.integer());
            if (good)
                sizes[i++] = int(size.integer());
        }
    if (!good || double(sizes[0]) * sizes[1] * graph_.input.c() >= double(COUNT_LIMIT))
        input.fail("size", "[H, W], each from 1, below 2^31, as the shape allows, and not too large together");
    graph_.image_h = sizes[0];
    graph_.image_w = sizes[1];
}

std::vector<float> GraphParser::parse_channels(Fields &fields, const char *key) const {
    Value value = fields.take(key);
    bool good = value.is(Type::array) && value.size() == size_t(graph_.input.c());
    std::vector<float> numbers;
    if (good)
        for (Value item : value) {
            good = good && is_number(item) && std::fabs(item.number()) <= FLT_MAX;
            numbers.push_back(good ? float(item.number()) : 0);
        }
    if (!good)
        fields.fail(key, "a number for each of " + std::to_string(graph_.input.c()) + " channels");
    return numbers;
}

void GraphParser::parse_labels(Value value) {
    if (value.is(Type::null))
        return;
    bool good = value.is(Type::array);
    if (good)
        for (Value label : value) {
            good = good && label.is(Type::string);
            if (good)
                graph_.labels.emplace_back(label.string());
        }
    if (!good)
        bad_graph("the graph: 'labels' must be a list of strings, or null");
}

// Each width has as many planes as bits, in rising order. A wider width ends later, so that each width is a prefix of
// the file. All planes together are 0 .. some number, without a gap.
void GraphParser::parse_planes(Value value) {
    if (!value.is(Type::object))
        bad_graph("the graph: 'planes' must be an object");
    graph_.planes.resize(9);
    for (auto width = value.begin(); width != value.end(); ++width) {
        std::string_view key = width.key();
        if (key.size() != 1 || key[0] < '1' || key[0] > '8')
            bad_graph("the graph: 'planes' has the width " + quote(key) + "; widths are '1' to '8'");
        size_t bits = size_t(key[0] - '0');
        std::vector<int> &planes = graph_.planes[bits];
        bool good = (*width).is(Type::array) && (*width).size() == bits;
        if (good)
            for (Value plane : *width) {
                good = good && plane.is(Type::integer) && plane.integer() < MAX_PLANES &&
                       plane.integer() > (planes.empty() ? -1 : planes.back());
                planes.push_back(good ? int(plane.integer()) : 0);
            }
        if (!good)
            bad_graph("the graph: the planes of width " + std::string(key) + " must be " + std::string(key) +
                      " rising numbers, at most " + std::to_string(MAX_PLANES - 1));
    }
    std::vector<bool> used(MAX_PLANES, false);
    for (const std::vector<int> &planes : graph_.planes) {
        if (planes.empty())
            continue;
        if (size_t(planes.back()) < plane_count_)
            bad_graph("the graph: the planes of width " + std::to_string(planes.size()) +
                      " end no later than those of a narrower one");
        plane_count_ = size_t(planes.back()) + 1;
        for (int plane : planes)
            used[size_t(plane)] = true;
        size_t gap = size_t(std::find(used.begin(), used.end(), false) - used.begin());
        if (gap < plane_count_)
            bad_graph("the graph: no width up to " + std::to_string(planes.size()) + " has plane " +
                      std::to_string(gap));
    }
}

void GraphParser::parse_weights(Value value) {
    if (!value.is(Type::object) || value.size() > MAX_WEIGHTS)
        bad_graph("the graph: 'weights' must be an object of at most 65,536 members");
    graph_.weights.reserve(value.size());
    for (auto member = value.begin(); member != value.end(); ++member) {
        Weight weight;
        weight.name = Fields::checked_name(member.key(), "a weight");
        Fields fields(*member, "weight " + quote(weight.name));
        fields.integers("shape", 1, weight.shape);
        weight.is_float = fields.flag("float");
        weight.fixed_bits = fixed_bits(fields);
        if (weight.is_float && weight.fixed_bits)
            bad_graph(fields.where() + " is float and has bits");
        fields.done();
        weight.count = 1;
        for (int size : weight.shape) {
            if (size_t(size) > (COUNT_LIMIT - 1) / weight.count)
                bad_graph(fields.where() + " has 2^40 numbers or more");
            weight.count *= size_t(size);
        }
        if (!weight.is_float && !weight.fixed_bits)
            weight.planes.assign(plane_count_, nullptr);
        weight_names_.add(member.key(), int(graph_.weights.size()));
        graph_.weights.push_back(std::move(weight));
    }
    weight_names_.sort(); // JSON has no key twice
}

void GraphParser::parse_outputs(Value value) {
    if (!value.is(Type::array) || value.size() < 1 || value.size() > MAX_OPS)
        bad_graph("the graph: 'outputs' must be a list of values");
    for (Value item : value) {
        std::string_view name = Fields::checked_name(item, "an output");
        int number = value_names_.find(name);
        if (number < 1)
            bad_graph("the graph's output " + quote(name) + " is made by no op");
        if (quantizer_of(number) >= 0)
            bad_graph("the graph's output " + quote(name) + " is codes; put a dequantize behind it");
        graph_.outputs.push_back(number);
    }
    std::vector<int> sorted = graph_.outputs;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
        bad_graph("the graph: 'outputs' names one value twice");
}

void GraphParser::infer() {
    try {
        std::vector<Shape> shapes = infer_partial_shapes(graph_);
        for (size_t i = 0; i < graph_.ops.size(); i++)
            graph_.ops[i].channels = shapes[i + 1].c();
        set_table_rows();
    } catch (const InputError &error) {
        bad_graph(error.what());
    }
}

void GraphParser::set_table_rows() {
    for (Op &op : graph_.ops) {
        // quantize and affine keep the channels, conv and linear have a number per output: all 2 x channels.
        if (op.affine && op.channels == 0)
            bad_graph("op " + quote(op.name) +
                      ": its channels follow from a free input size; fix H and W of the input");
        op.table_row = op.affine ? 2 * size_t(op.channels) : has_table(op) ? 2 : 0;
    }
}

void GraphParser::parse_checksums(Value value) {
    if (!value.is(Type::object))
        bad_graph("the graph: 'checksums' must be an object");
    for (auto member = value.begin(); member != value.end(); ++member) {
        uint32_t crc = 0;
        if (!(*member).is(Type::string) || !parse_crc32((*member).string(), crc))
            bad_graph("the checksum of " + quote(member.key()) + " is not 8 hex digits");
        result_.checksums.emplace_back(member.key(), crc);
    }
    std::sort(result_.checksums.begin(), result_.checksums.end());
}

ParsedGraph parse_graph(std::string_view text) {
    try {
        Json json(text);
        return GraphParser(json.root()).parse();
    } catch (const JsonError &error) {
        bad_graph("the graph is not JSON: " + std::string(error.what()));
    }
}

bool has_table(const Op &op) {
    return op.affine || op.kind == OpKind::dequantize || op.kind == OpKind::clip || op.multiplies_codes;
}

} // namespace anyprec
