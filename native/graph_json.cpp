// See graph_json.h. Every number is compared with its limit before it is stored; nothing is allocated that the text
// does not pay for byte by byte, except the bits of profiles: at most 256 x 65,536 bytes, twice.
#include "graph_json.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "json.h"
#include "reader.h"
#include "shapes.h"

namespace anyprec {
namespace {

using Type = Json::Type;
using Value = Json::Value;

constexpr size_t MAX_OPS = 65536, MAX_WEIGHTS = 65536, MAX_PROFILES = 256, MAX_NAME = 200;
constexpr int MAX_PLANES = 36; // eight widths with planes of their own: 1 + 2 + ... + 8
constexpr int64_t DIMENSION_LIMIT = int64_t(1) << 31;
constexpr size_t COUNT_LIMIT = size_t(1) << 40;

[[noreturn]] void bad(const std::string &what) {
    throw ModelError(ModelErrorKind::BadGraph, what);
}

std::string quote(std::string_view text) {
    std::string shown(text.substr(0, 60));
    for (char &c : shown)
        if (c < 0x20 || c == 0x7f)
            c = '?';
    return "'" + shown + "'";
}

// Names to numbers, by binary search: nobody can choose names that make it slow.
class NameIndex {
  public:
    void add(std::string_view name, int number) { names_.emplace_back(name, number); }

    // False if a name stands twice.
    bool sort() {
        std::sort(names_.begin(), names_.end());
        return std::adjacent_find(names_.begin(), names_.end(),
                                  [](const auto &a, const auto &b) { return a.first == b.first; }) == names_.end();
    }

    int find(std::string_view name) const { // -1 if there is none
        auto found = std::lower_bound(names_.begin(), names_.end(), name,
                                      [](const auto &entry, std::string_view wanted) { return entry.first < wanted; });
        return found != names_.end() && found->first == name ? found->second : -1;
    }

  private:
    std::vector<std::pair<std::string_view, int>> names_;
};

// One JSON object and the words that say where it stands. Members are taken by name; done() refuses those nobody
// took: an attribute we do not know may change what the op computes.
class Fields {
  public:
    Fields(Value object, std::string where) : where_(std::move(where)) {
        if (!object.is(Type::object))
            bad(where_ + " is not a JSON object");
        if (object.size() > 64)
            bad(where_ + " has " + std::to_string(object.size()) + " members");
        for (auto member = object.begin(); member != object.end(); ++member)
            members_.push_back({member.key(), *member, false});
    }

    const std::string &where() const { return where_; }
    [[noreturn]] void fail(const char *key, const std::string &allowed) const {
        bad(where_ + ": '" + key + "' must be " + allowed);
    }

    Value take(const char *key) {
        for (Member &member : members_)
            if (member.key == key) {
                member.taken = true;
                return member.value;
            }
        bad(where_ + " has no '" + key + "'");
    }

    // A member that may be left out.
    bool has(const char *key) const {
        return std::any_of(members_.begin(), members_.end(), [&](const Member &member) { return member.key == key; });
    }

    bool flag(const char *key) {
        Value value = take(key);
        if (!value.is(Type::boolean))
            fail(key, "true or false");
        return value.boolean();
    }

    std::string_view text(const char *key) {
        Value value = take(key);
        if (!value.is(Type::string))
            fail(key, "a string");
        return value.string();
    }

    // 1 to 200 printable ASCII characters.
    std::string_view name(const char *key) { return checked_name(take(key), where_ + ": '" + key + "'"); }

    static std::string_view checked_name(Value value, const std::string &where) {
        if (!value.is(Type::string))
            bad(where + " is not a string");
        return checked_name(value.string(), where);
    }

    static std::string_view checked_name(std::string_view name, const std::string &where) {
        bool printable = std::all_of(name.begin(), name.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
        if (name.empty() || name.size() > MAX_NAME || !printable)
            bad(where + " is the name " + quote(name) + "; 1 to 200 printable ASCII characters are allowed");
        return name;
    }

    int64_t integer(const char *key, int64_t least, int64_t below) {
        Value value = take(key);
        if (!value.is(Type::integer) || value.integer() < least || value.integer() >= below)
            fail(key, "a whole number from " + std::to_string(least) + ", below " + std::to_string(below));
        return value.integer();
    }

    template <size_t N> void integers(const char *key, int64_t least, int (&into)[N]) {
        Value value = take(key);
        bool good = value.is(Type::array) && value.size() == N;
        size_t i = 0;
        if (good)
            for (Value item : value) {
                good = good && item.is(Type::integer) && item.integer() >= least && item.integer() < DIMENSION_LIMIT;
                into[i++] = good ? int(item.integer()) : 0;
            }
        if (!good)
            fail(key, std::to_string(N) + " whole numbers from " + std::to_string(least) + ", below 2^31");
    }

    void done() const {
        for (const Member &member : members_)
            if (!member.taken)
                bad(where_ + " has " + quote(member.key) + ", which is unknown");
    }

  private:
    struct Member {
        std::string_view key;
        Value value;
        bool taken;
    };
    std::string where_;
    std::vector<Member> members_;
};

struct KindName {
    const char *name;
    OpKind kind;
};
constexpr KindName KINDS[] = {
    {"quantize", OpKind::quantize}, {"dequantize", OpKind::dequantize},
    {"conv", OpKind::conv},         {"linear", OpKind::linear},
    {"affine", OpKind::affine},     {"clip", OpKind::clip},
    {"add", OpKind::add},           {"concat", OpKind::concat},
    {"max_pool", OpKind::max_pool}, {"avg_pool", OpKind::avg_pool},
    {"resize", OpKind::resize},     {"adaptive_avg_pool", OpKind::adaptive_avg_pool},
    {"softmax", OpKind::softmax},   {"flatten", OpKind::flatten},
    {"pad", OpKind::pad},
};

class GraphParser {
  public:
    explicit GraphParser(Value root) : root_(root) {}

    ParsedGraph parse() {
        Fields fields(root_, "the graph");
        if (Value format = fields.take("format"); !format.is(Type::integer) || format.integer() != 1)
            throw ModelError(ModelErrorKind::UnsupportedVersion,
                             "format version " + (format.is(Type::integer) ? std::to_string(format.integer()) : "?") +
                                 " is not 1, the one this anyprec reads; use the anyprec that wrote the file, or pack "
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

  private:
    void parse_input(Value value) {
        Fields input(value, "the graph's input");
        Value shape = input.take("shape");
        int sizes[3] = {0, 0, 0};
        bool good = shape.is(Type::array) && shape.size() == 3;
        int i = 0;
        if (good)
            for (Value size : shape) {
                if (size.is(Type::integer) && size.integer() >= 1 && size.integer() < DIMENSION_LIMIT)
                    sizes[i] = int(size.integer());
                else
                    good = good && size.is(Type::null) && i < 2;
                i++;
            }
        if (!good)
            input.fail("shape", "[H, W, C], each from 1, below 2^31, or null for a free H or W");
        graph_.input_h = sizes[0];
        graph_.input_w = sizes[1];
        graph_.input_c = sizes[2];
        Value image = input.take("image");
        input.done();
        if (image.is(Type::null))
            return;
        Fields numbers(image, "the graph's image");
        graph_.image_scale = parse_channels(numbers, "scale");
        graph_.image_shift = parse_channels(numbers, "shift");
        numbers.done();
    }

    std::vector<float> parse_channels(Fields &fields, const char *key) const {
        Value value = fields.take(key);
        bool good = value.is(Type::array) && value.size() == size_t(graph_.input_c);
        std::vector<float> numbers;
        if (good)
            for (Value item : value) {
                good = good && is_number(item) && std::fabs(item.number()) <= FLT_MAX;
                numbers.push_back(good ? float(item.number()) : 0);
            }
        if (!good)
            fields.fail(key, "a number for each of " + std::to_string(graph_.input_c) + " channels");
        return numbers;
    }

    static bool is_number(Value value) { return value.is(Type::integer) || value.is(Type::real); }

    void parse_labels(Value value) {
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
            bad("the graph: 'labels' must be a list of strings, or null");
    }

    // Each width takes as many planes as it has bits, in rising order; a wider one ends later, so that each is a prefix
    // of the file; together they are 0 .. some number, without a gap.
    void parse_planes(Value value) {
        if (!value.is(Type::object))
            bad("the graph: 'planes' must be an object");
        graph_.planes.resize(9);
        for (auto width = value.begin(); width != value.end(); ++width) {
            std::string_view key = width.key();
            if (key.size() != 1 || key[0] < '1' || key[0] > '8')
                bad("the graph: 'planes' has the width " + quote(key) + "; widths are '1' to '8'");
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
                bad("the graph: the planes of width " + std::string(key) + " must be " + std::string(key) +
                    " rising numbers, at most " + std::to_string(MAX_PLANES - 1));
        }
        std::vector<bool> used(MAX_PLANES, false);
        for (const std::vector<int> &planes : graph_.planes) {
            if (planes.empty())
                continue;
            if (size_t(planes.back()) < plane_count_)
                bad("the graph: the planes of width " + std::to_string(planes.size()) +
                    " end no later than those of a narrower one");
            plane_count_ = size_t(planes.back()) + 1;
            for (int plane : planes)
                used[size_t(plane)] = true;
        }
        size_t gap = size_t(std::find(used.begin(), used.end(), false) - used.begin());
        if (gap < plane_count_)
            bad("the graph: no width has plane " + std::to_string(gap));
    }

    void parse_weights(Value value) {
        if (!value.is(Type::object) || value.size() > MAX_WEIGHTS)
            bad("the graph: 'weights' must be an object of at most 65,536 members");
        graph_.weights.reserve(value.size());
        for (auto member = value.begin(); member != value.end(); ++member) {
            Weight weight;
            weight.name = Fields::checked_name(member.key(), "a weight");
            Fields fields(*member, "weight " + quote(weight.name));
            fields.integers("shape", 1, weight.shape);
            weight.is_float = fields.flag("float");
            weight.fixed_bits = fixed_bits(fields);
            if (weight.is_float && weight.fixed_bits)
                bad(fields.where() + " is float and has bits");
            fields.done();
            weight.count = 1;
            for (int size : weight.shape) {
                if (size_t(size) > (COUNT_LIMIT - 1) / weight.count)
                    bad(fields.where() + " has 2^40 numbers or more");
                weight.count *= size_t(size);
            }
            if (!weight.is_float && !weight.fixed_bits)
                weight.planes.assign(plane_count_, nullptr);
            weight_names_.add(member.key(), int(graph_.weights.size()));
            graph_.weights.push_back(std::move(weight));
        }
        weight_names_.sort(); // JSON has no key twice
    }

    // Bits that hold in every profile but float ones: 8 is the one such width; 0 where nothing is said.
    static int fixed_bits(Fields &fields) { return fields.has("bits") ? int(fields.integer("bits", 8, 9)) : 0; }

    void parse_ops(Value value) {
        if (!value.is(Type::array) || value.size() < 1 || value.size() > MAX_OPS)
            bad("the graph: 'ops' must be a list of 1 to 65,536 ops");
        graph_.ops.reserve(value.size());
        value_names_.add("input", 0);
        int number = 0;
        for (Value item : value) {
            Fields fields(item, "op number " + std::to_string(number));
            value_names_.add(fields.name("name"), ++number);
        }
        if (!value_names_.sort())
            bad("the graph has an op called 'input', or two ops of one name");
        for (Value item : value)
            parse_op(item);
        std::vector<bool> used(graph_.weights.size(), false);
        for (const Op &op : graph_.ops)
            if (op.weight >= 0)
                used[size_t(op.weight)] = true;
        auto unused = std::find(used.begin(), used.end(), false);
        if (unused != used.end())
            bad("weight " + quote(graph_.weights[size_t(unused - used.begin())].name) + " is used by no op");
    }

    void parse_op(Value value) {
        Op op;
        int number = int(graph_.ops.size()) + 1;
        op.name = Fields(value, "an op").name("name");
        Fields fields(value, "op " + quote(op.name));
        fields.take("name");
        std::string_view kind = fields.text("op");
        auto known =
            std::find_if(std::begin(KINDS), std::end(KINDS), [&](const KindName &k) { return k.name == kind; });
        if (known == std::end(KINDS))
            bad(fields.where() + " is a " + quote(kind) + ", which is not an operation of format 1");
        op.kind = known->kind;
        parse_inputs(fields, number, op);
        parse_attributes(fields, number, op);
        fields.done();
        check_codes(fields.where(), op);
        graph_.ops.push_back(std::move(op));
    }

    int earlier_value(const Fields &fields, std::string_view name, int number) const {
        int found = value_names_.find(name);
        if (found < 0 || found >= number)
            bad(fields.where() + " reads " + quote(name) + ", which no earlier op makes");
        return found;
    }

    void parse_inputs(Fields &fields, int number, Op &op) const {
        Value inputs = fields.take("in");
        size_t least = op.kind == OpKind::add ? 2 : 1;
        size_t most = op.kind == OpKind::concat ? MAX_OPS : least;
        if (!inputs.is(Type::array) || inputs.size() < least || inputs.size() > most)
            fields.fail("in", op.kind == OpKind::concat ? "a list of values"
                                                        : "a list of " + std::to_string(least) + " value(s)");
        for (Value input : inputs)
            op.inputs.push_back(earlier_value(fields, Fields::checked_name(input, fields.where() + ": 'in'"), number));
    }

    void parse_attributes(Fields &fields, int number, Op &op) const {
        switch (op.kind) {
        case OpKind::quantize:
            op.is_signed = fields.flag("signed");
            op.rectify = fields.flag("rectify");
            op.affine = fields.flag("affine");
            op.fixed_bits = fixed_bits(fields);
            break;
        case OpKind::conv:
        case OpKind::linear:
            parse_layer(fields, op);
            break;
        case OpKind::affine:
            op.affine = true;
            break;
        case OpKind::max_pool:
            parse_window(fields, op);
            fields.integers("dilation", 1, op.dilation);
            op.ceil = fields.flag("ceil");
            break;
        case OpKind::avg_pool:
            parse_window(fields, op);
            op.ceil = fields.flag("ceil");
            op.count_pad = fields.flag("count_pad");
            break;
        case OpKind::adaptive_avg_pool:
            fields.integers("size", 1, op.size);
            break;
        case OpKind::resize:
            parse_resize(fields, number, op);
            break;
        case OpKind::pad:
            parse_pad(fields, op);
            break;
        case OpKind::dequantize:
        case OpKind::clip:
        case OpKind::add:
        case OpKind::concat:
        case OpKind::softmax:
        case OpKind::flatten:
            break;
        }
    }

    static void parse_window(Fields &fields, Op &op) {
        fields.integers("kernel", 1, op.kernel);
        fields.integers("stride", 1, op.stride);
        fields.integers("pad", 0, op.pad);
    }

    void parse_layer(Fields &fields, Op &op) const {
        std::string_view name = fields.name("weight");
        op.weight = weight_names_.find(name);
        if (op.weight < 0)
            bad(fields.where() + " has the weight " + quote(name) + ", which the graph does not list");
        const Weight &weight = graph_.weights[size_t(op.weight)];
        if (op.kind == OpKind::conv) {
            parse_window(fields, op);
            fields.integers("dilation", 1, op.dilation);
            op.groups = int(fields.integer("groups", 1, DIMENSION_LIMIT));
        }
        op.is_signed = fields.flag("signed");
        op.affine = fields.flag("affine");
        if (weight.shape[1] != op.kernel[0] || weight.shape[2] != op.kernel[1] || weight.shape[0] % op.groups)
            bad(fields.where() + " does not fit its weight " + quote(name) + ": kernel " +
                std::to_string(op.kernel[0]) + " x " + std::to_string(op.kernel[1]) + ", " + std::to_string(op.groups) +
                " groups");
    }

    void parse_resize(Fields &fields, int number, Op &op) const {
        std::string_view mode = fields.text("mode");
        if (mode != "bilinear" && mode != "nearest")
            fields.fail("mode", "'bilinear' or 'nearest'");
        op.mode = mode == "nearest" ? ResizeMode::nearest : ResizeMode::bilinear;
        op.align = fields.flag("align");
        int given = 0;
        if (!fields.take("size").is(Type::null)) {
            fields.integers("size", 1, op.size);
            given++;
        }
        if (Value scale = fields.take("scale"); !scale.is(Type::null)) {
            bool good = scale.is(Type::array) && scale.size() == 2;
            int i = 0;
            if (good)
                for (Value item : scale) {
                    good = good && is_number(item) && item.number() > 0 && item.number() < double(DIMENSION_LIMIT);
                    op.scale[i++] = good ? item.number() : 0;
                }
            if (!good)
                fields.fail("scale", "two numbers above 0, below 2^31");
            given++;
        }
        if (Value like = fields.take("like"); !like.is(Type::null)) {
            op.like = earlier_value(fields, Fields::checked_name(like, fields.where() + ": 'like'"), number);
            given++;
        }
        if (given != 1)
            bad(fields.where() + " must have exactly one of size, scale and like, the others null");
    }

    static void parse_pad(Fields &fields, Op &op) {
        int h[2], w[2];
        fields.integers("h", 0, h);
        fields.integers("w", 0, w);
        fields.integers("c", 0, op.pad_c);
        op.pad[0] = h[0];
        op.pad[1] = w[0];
        op.pad[2] = h[1];
        op.pad[3] = w[1];
    }

    int quantizer_of(int value) const { return value == 0 ? -1 : graph_.ops[size_t(value) - 1].quantizer; }

    // Follows codes from quantize to those that may read them; everything else reads floats.
    void check_codes(const std::string &where, Op &op) const {
        int source = quantizer_of(op.inputs[0]);
        switch (op.kind) {
        case OpKind::quantize:
            op.quantizer = int(graph_.ops.size());
            break;
        case OpKind::max_pool:
        case OpKind::flatten:
            op.quantizer = source;
            op.codes = source >= 0;
            return;
        case OpKind::dequantize:
            if (source < 0)
                bad(where + " reads floats, it needs codes of a quantize");
            return;
        case OpKind::conv:
        case OpKind::linear:
            if (graph_.weights[size_t(op.weight)].is_float == (source >= 0))
                bad(where +
                    (source >= 0 ? " has a float weight and reads codes" : " has a quantised weight and reads floats"));
            if (op.is_signed != (source >= 0 && graph_.ops[size_t(source)].is_signed))
                bad(where + ": 'signed' is not what the codes it reads are made with");
            return;
        default:
            break;
        }
        op.codes = op.kind == OpKind::quantize;
        for (int input : op.inputs)
            if (quantizer_of(input) >= 0)
                bad(where + " reads codes of a quantize, it needs floats");
    }

    void parse_outputs(Value value) {
        if (!value.is(Type::array) || value.size() < 1 || value.size() > MAX_OPS)
            bad("the graph: 'outputs' must be a list of values");
        for (Value item : value) {
            std::string_view name = Fields::checked_name(item, "an output");
            int number = value_names_.find(name);
            if (number < 1)
                bad("the graph's output " + quote(name) + " is made by no op");
            if (quantizer_of(number) >= 0)
                bad("the graph's output " + quote(name) + " is codes; put a dequantize behind it");
            graph_.outputs.push_back(number);
        }
        std::vector<int> sorted = graph_.outputs;
        std::sort(sorted.begin(), sorted.end());
        if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
            bad("the graph: 'outputs' names one value twice");
    }

    void infer() {
        try {
            std::vector<Shape> shapes = infer_partial_shapes(graph_, 1, graph_.input_h, graph_.input_w);
            for (size_t i = 0; i < graph_.ops.size(); i++)
                graph_.ops[i].channels = shapes[i + 1].c;
            set_table_rows();
        } catch (const InputError &error) {
            bad(error.what());
        }
    }

    void set_table_rows() {
        for (Op &op : graph_.ops) {
            // quantize and affine keep the channels, conv and linear have a number per output: all 2 x channels.
            if (op.affine && op.channels == 0)
                bad("op " + quote(op.name) + ": its channels follow from a free input size; fix H and W of the input");
            op.table_row = op.affine ? 2 * size_t(op.channels) : has_table(op) ? 2 : 0;
        }
    }

    void parse_profiles(Value value) {
        if (!value.is(Type::array) || value.size() < 1 || value.size() > MAX_PROFILES)
            bad("the graph: 'profiles' must be a list of 1 to 256 profiles");
        NameIndex names;
        for (Value item : value) {
            Profile profile;
            profile.name = Fields(item, "a profile").name("name");
            Fields fields(item, "profile " + quote(profile.name));
            names.add(fields.name("name"), 0);
            parse_weight_bits(fields, profile);
            parse_act_bits(fields, profile);
            Value accuracy = fields.take("accuracy");
            if (!accuracy.is(Type::null) &&
                !(is_number(accuracy) && accuracy.number() >= 0 && accuracy.number() <= 100))
                fields.fail("accuracy", "a percentage or null");
            if (!accuracy.is(Type::null))
                profile.accuracy = accuracy.number();
            fields.done();
            graph_.profiles.push_back(std::move(profile));
        }
        if (!names.sort())
            bad("the graph has two profiles of one name");
    }

    uint8_t checked_bits(const Fields &fields, const char *key, Value value) const {
        int64_t bits = value.is(Type::integer) ? value.integer() : 0;
        if (bits != FLOAT_BITS && (bits < 1 || bits > 8))
            fields.fail(key, "1 to 8, or 32 for float, or one such number for each");
        return uint8_t(bits);
    }

    void parse_weight_bits(Fields &fields, Profile &profile) const {
        Value value = fields.take("weights");
        profile.weight_bits.assign(graph_.weights.size(), FLOAT_BITS);
        auto by_profile = [](const Weight &weight) { return !weight.is_float && !weight.fixed_bits; };
        uint8_t bits = 0; // of all of them
        if (value.is(Type::object)) {
            for (auto member = value.begin(); member != value.end(); ++member) {
                int weight = weight_names_.find(member.key());
                if (weight < 0 || !by_profile(graph_.weights[size_t(weight)]))
                    bad(fields.where() + " gives bits to " + quote(member.key()) +
                        ", which is no weight that is quantised by profiles");
                profile.weight_bits[size_t(weight)] = checked_bits(fields, "weights", *member);
            }
            size_t wanted = size_t(std::count_if(graph_.weights.begin(), graph_.weights.end(), by_profile));
            if (value.size() != wanted)
                bad(fields.where() + " gives bits to " + std::to_string(value.size()) + " of " +
                    std::to_string(wanted) + " quantised weights");
        } else {
            bits = checked_bits(fields, "weights", value);
        }
        for (size_t i = 0; i < graph_.weights.size(); i++) {
            const Weight &weight = graph_.weights[i];
            uint8_t &its = profile.weight_bits[i];
            if (weight.fixed_bits)
                its = bits == FLOAT_BITS ? uint8_t(FLOAT_BITS) : uint8_t(weight.fixed_bits);
            else if (!weight.is_float && bits)
                its = bits;
            if (by_profile(weight) && its != FLOAT_BITS && graph_.planes[its].empty())
                bad(fields.where() + " has weights of " + std::to_string(its) + " bits, for which there are no planes");
        }
    }

    void parse_act_bits(Fields &fields, Profile &profile) const {
        Value value = fields.take("acts");
        profile.act_bits.assign(graph_.ops.size(), 0);
        auto by_profile = [](const Op &op) { return op.kind == OpKind::quantize && !op.fixed_bits; };
        size_t quantizers = size_t(std::count_if(graph_.ops.begin(), graph_.ops.end(), by_profile));
        uint8_t bits = 0; // of all of them
        if (value.is(Type::object)) {
            for (auto member = value.begin(); member != value.end(); ++member) {
                int number = value_names_.find(member.key());
                if (number < 1 || !by_profile(graph_.ops[size_t(number) - 1]))
                    bad(fields.where() + " gives bits to " + quote(member.key()) +
                        ", which is no quantize, or one with bits of its own");
                profile.act_bits[size_t(number) - 1] = checked_bits(fields, "acts", *member);
            }
            if (value.size() != quantizers)
                bad(fields.where() + " gives bits to " + std::to_string(value.size()) + " of " +
                    std::to_string(quantizers) + " quantize ops");
        } else {
            bits = checked_bits(fields, "acts", value);
        }
        for (size_t i = 0; i < graph_.ops.size(); i++)
            if (graph_.ops[i].fixed_bits)
                profile.act_bits[i] = bits == FLOAT_BITS ? uint8_t(FLOAT_BITS) : uint8_t(graph_.ops[i].fixed_bits);
            else if (bits && by_profile(graph_.ops[i]))
                profile.act_bits[i] = bits;
    }

    // A layer's weights and input are both float or both integer, and its sums fit 32 bit:
    // 3 x 3 x 512 weights of 8 bit by inputs of 8 bit are 4608 * 255 * 255 = 2.996e8, seven times below 2^31.
    void check_profile(const Profile &profile) const {
        for (const Op &op : graph_.ops) {
            if (op.weight < 0 || graph_.weights[size_t(op.weight)].is_float)
                continue;
            const Weight &weight = graph_.weights[size_t(op.weight)];
            int weight_bits = profile.weight_bits[size_t(op.weight)];
            int act_bits = profile.act_bits[size_t(quantizer_of(op.inputs[0]))];
            auto where = [&] { return "profile " + quote(profile.name) + ", op " + quote(op.name) + ": "; };
            if ((weight_bits == FLOAT_BITS) != (act_bits == FLOAT_BITS))
                bad(where() + "weights of " + std::to_string(weight_bits) + " bits and input of " +
                    std::to_string(act_bits) + "; both must be float (32) or neither");
            if (weight_bits == FLOAT_BITS)
                continue;
            size_t taps = weight.count / size_t(weight.shape[0]); // below 2^40, and each product below 2^16
            if (taps * size_t((1 << weight_bits) - 1) * size_t((1 << act_bits) - 1) >= size_t(DIMENSION_LIMIT))
                bad(where() + "sums of " + std::to_string(taps) + " products do not fit 32 bit; give it fewer bits");
        }
    }

    void parse_checksums(Value value) {
        if (!value.is(Type::object))
            bad("the graph: 'checksums' must be an object");
        for (auto member = value.begin(); member != value.end(); ++member) {
            uint32_t crc = 0;
            if (!(*member).is(Type::string) || !parse_crc32((*member).string(), crc))
                bad("the checksum of " + quote(member.key()) + " is not 8 hex digits");
            result_.checksums.emplace_back(member.key(), crc);
        }
        std::sort(result_.checksums.begin(), result_.checksums.end());
    }

    Value root_;
    ParsedGraph result_;
    Graph &graph_ = result_.graph;
    size_t plane_count_ = 0;
    NameIndex weight_names_, value_names_; // views into the JSON text
};

} // namespace

ParsedGraph parse_graph(std::string_view text) {
    try {
        Json json(text);
        return GraphParser(json.root()).parse();
    } catch (const JsonError &error) {
        bad("the graph is not JSON: " + std::string(error.what()));
    }
}

bool has_table(const Op &op) {
    return op.affine || op.kind == OpKind::dequantize || op.kind == OpKind::clip;
}

bool parse_crc32(std::string_view digits, uint32_t &crc) {
    crc = 0;
    for (char c : digits) {
        if (c >= '0' && c <= '9')
            crc = crc * 16 + uint32_t(c - '0');
        else if (c >= 'a' && c <= 'f')
            crc = crc * 16 + uint32_t(c - 'a' + 10);
        else
            return false;
    }
    return digits.size() == 8;
}

} // namespace anyprec
