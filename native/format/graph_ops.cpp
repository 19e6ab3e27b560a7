// The ops of GRAPH (FORMAT.md, section 3), a part of GraphParser: names, inputs and attributes of each op, and that
// codes go only to ops that read codes.
#include <algorithm>

#include "graph_parser.h"

namespace anyprec {
namespace {

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

} // namespace

void GraphParser::parse_ops(Value value) {
    if (!value.is(Type::array) || value.size() < 1 || value.size() > MAX_OPS)
        bad_graph("the graph: 'ops' must be a list of 1 to 65,536 ops");
    graph_.ops.reserve(value.size());
    value_names_.add("input", 0);
    int number = 0;
    for (Value item : value) {
        Fields fields(item, "op number " + std::to_string(number));
        value_names_.add(fields.name("name"), ++number);
    }
    if (!value_names_.sort())
        bad_graph("the graph has an op called 'input', or two ops of one name");
    for (Value item : value)
        parse_op(item);
    std::vector<bool> used(graph_.weights.size(), false);
    for (const Op &op : graph_.ops)
        if (op.weight >= 0)
            used[size_t(op.weight)] = true;
    auto unused = std::find(used.begin(), used.end(), false);
    if (unused != used.end())
        bad_graph("weight " + quote(graph_.weights[size_t(unused - used.begin())].name) + " is used by no op");
}

void GraphParser::parse_op(Value value) {
    Op op;
    int number = int(graph_.ops.size()) + 1;
    op.name = Fields(value, "an op").name("name");
    Fields fields(value, "op " + quote(op.name));
    fields.take("name");
    std::string_view kind = fields.text("op");
    auto known = std::find_if(std::begin(KINDS), std::end(KINDS), [&](const KindName &k) { return k.name == kind; });
    if (known == std::end(KINDS))
        bad_graph(fields.where() + " is a " + quote(kind) + ", which is not an operation of format 1");
    op.kind = known->kind;
    parse_inputs(fields, number, op);
    parse_attributes(fields, number, op);
    fields.done();
    check_codes(fields.where(), op);
    graph_.ops.push_back(std::move(op));
}

int GraphParser::earlier_value(const Fields &fields, std::string_view name, int number) const {
    int found = value_names_.find(name);
    if (found < 0 || found >= number)
        bad_graph(fields.where() + " reads " + quote(name) + ", which no earlier op makes");
    return found;
}

void GraphParser::parse_inputs(Fields &fields, int number, Op &op) const {
    Value inputs = fields.take("in");
    size_t least = op.kind == OpKind::add ? 2 : 1;
    size_t most = op.kind == OpKind::concat ? MAX_OPS : least;
    if (!inputs.is(Type::array) || inputs.size() < least || inputs.size() > most)
        fields.fail("in", op.kind == OpKind::concat ? "a list of values"
                                                    : "a list of " + std::to_string(least) + " value(s)");
    for (Value input : inputs)
        op.inputs.push_back(earlier_value(fields, Fields::checked_name(input, fields.where() + ": 'in'"), number));
}

void GraphParser::parse_attributes(Fields &fields, int number, Op &op) const {
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

void GraphParser::parse_window(Fields &fields, Op &op) {
    fields.integers("kernel", 1, op.kernel);
    fields.integers("stride", 1, op.stride);
    fields.integers("pad", 0, op.pad);
}

void GraphParser::parse_layer(Fields &fields, Op &op) const {
    std::string_view name = fields.name("weight");
    op.weight = weight_names_.find(name);
    if (op.weight < 0)
        bad_graph(fields.where() + " has the weight " + quote(name) + ", which the graph does not list");
    const Weight &weight = graph_.weights[size_t(op.weight)];
    if (op.kind == OpKind::conv) {
        parse_window(fields, op);
        fields.integers("dilation", 1, op.dilation);
        op.groups = int(fields.integer("groups", 1, DIMENSION_LIMIT));
    }
    op.is_signed = fields.flag("signed");
    op.affine = fields.flag("affine");
    if (weight.shape[1] != op.kernel[0] || weight.shape[2] != op.kernel[1] || weight.shape[0] % op.groups)
        bad_graph(fields.where() + " does not fit its weight " + quote(name) + ": kernel " +
                  std::to_string(op.kernel[0]) + " x " + std::to_string(op.kernel[1]) + ", " +
                  std::to_string(op.groups) + " groups");
}

void GraphParser::parse_resize(Fields &fields, int number, Op &op) const {
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
        bad_graph(fields.where() + " must have exactly one of size, scale and like, the others null");
}

void GraphParser::parse_pad(Fields &fields, Op &op) {
    int h[2], w[2];
    fields.integers("h", 0, h);
    fields.integers("w", 0, w);
    fields.integers("c", 0, op.pad_c);
    op.pad[0] = h[0];
    op.pad[1] = w[0];
    op.pad[2] = h[1];
    op.pad[3] = w[1];
}

// Follows codes from quantize to the ops that may read them; all other ops read floats.
void GraphParser::check_codes(const std::string &where, Op &op) const {
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
            bad_graph(where + " reads floats, it needs codes of a quantize");
        return;
    case OpKind::conv:
    case OpKind::linear:
        if (graph_.weights[size_t(op.weight)].is_float == (source >= 0))
            bad_graph(where + (source >= 0 ? " has a float weight and reads codes"
                                           : " has a quantized weight and reads floats"));
        if (op.is_signed != (source >= 0 && graph_.ops[size_t(source)].is_signed))
            bad_graph(where + ": 'signed' is not what the codes it reads are made with");
        return;
    default:
        break;
    }
    op.codes = op.kind == OpKind::quantize;
    for (int input : op.inputs)
        if (quantizer_of(input) >= 0)
            bad_graph(where + " reads codes of a quantize, it needs floats");
}

} // namespace anyprec
