// The ops of GRAPH (FORMAT.md, section 3), a part of GraphParser: names, inputs and attributes of each op, and that
// codes go only to ops that read codes.
#include <algorithm>

#include "format/graph_parser.h"

namespace anyprec {
namespace {

struct KindName {
    const char *name;
    OpKind kind;
};
constexpr KindName KINDS[] = {
    {"quantize", OpKind::quantize},
    {"dequantize", OpKind::dequantize},
    {"conv", OpKind::conv},
    {"linear", OpKind::linear},
    {"affine", OpKind::affine},
    {"clip", OpKind::clip},
    {"add", OpKind::add},
    {"concat", OpKind::concat},
    {"max_pool", OpKind::max_pool},
    {"avg_pool", OpKind::avg_pool},
    {"resize", OpKind::resize},
    {"adaptive_avg_pool", OpKind::adaptive_avg_pool},
    {"softmax", OpKind::softmax},
    {"flatten", OpKind::flatten},
    {"pad", OpKind::pad},
    {"constant", OpKind::constant},
    {"input", OpKind::input},
    {"reshape", OpKind::reshape},
    {"slice", OpKind::slice},
    {"transpose", OpKind::transpose},
    {"gather", OpKind::gather},
    {"pointwise", OpKind::pointwise},
    {"binary", OpKind::binary},
    {"reduce", OpKind::reduce},
    {"norm", OpKind::norm},
    {"matmul", OpKind::matmul},
    {"embedding", OpKind::embedding},
    {"recurrent", OpKind::recurrent},
};
constexpr OpKind FIRST_OF_FORMAT_3 = OpKind::constant; // those before it are in every format

struct FunctionName {
    const char *name;
    Function function;
};
constexpr FunctionName POINTWISE[] = {
    {"abs", Function::abs},
    {"sqrt", Function::sqrt},
    {"reciprocal", Function::reciprocal},
    {"exp", Function::exp},
    {"log", Function::log},
    {"sigmoid", Function::sigmoid},
    {"tanh", Function::tanh},
    {"erf", Function::erf},
    {"gelu", Function::gelu},
    {"gelu_tanh", Function::gelu_tanh},
    {"silu", Function::silu},
    {"mish", Function::mish},
};
constexpr FunctionName BINARY[] = {{"add", Function::add}, {"sub", Function::sub}, {"mul", Function::mul},
                                   {"div", Function::div}, {"max", Function::max}, {"min", Function::min}};
constexpr FunctionName REDUCE[] = {
    {"sum", Function::sum}, {"mean", Function::mean}, {"max", Function::max}, {"min", Function::min}};
constexpr FunctionName RECURRENT[] = {{"lstm", Function::lstm}, {"gru", Function::gru}};

template <size_t N> Function parse_function(Fields &fields, const FunctionName (&names)[N]) {
    const std::string_view given = fields.text("function");
    std::string allowed;
    for (const FunctionName &each : names) {
        if (given == each.name)
            return each.function;
        allowed += (allowed.empty() ? "" : ", ") + std::string(each.name);
    }
    fields.fail("function", "one of " + allowed);
}

// Whether a conv may have the attribute `toom_cook`: ARITHMETIC.md, section 4.
bool fits_toom_cook(const Op &op) {
    bool fits = op.groups == 1 && !op.transposed;
    for (int axis = 0; axis < 2; ++axis)
        fits = fits && op.stride[axis] == 1 && op.dilation[axis] == 1 && op.kernel[axis] >= 3 && op.kernel[axis] <= 4;
    return fits;
}

// An attribute that is true where it is given.
bool given_true(Fields &fields, const char *key) {
    if (!fields.has(key))
        return false;
    if (!fields.flag(key))
        fields.fail(key, "true, or left out");
    return true;
}

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
    check_constants();
}

// Ops `input` come first, and the weight of a constant is its own.
void GraphParser::check_constants() const {
    std::vector<int> readers(graph_.weights.size(), 0);
    const size_t inputs = graph_.input_count();
    for (size_t i = 0; i < graph_.ops.size(); i++) {
        const Op &op = graph_.ops[i];
        if (op.kind == OpKind::input && i + 1 >= inputs)
            bad_graph("op " + quote(op.name) + " is an input behind another op; inputs come first");
        if (op.weight >= 0)
            readers[size_t(op.weight)]++;
    }
    for (const Op &op : graph_.ops)
        if (op.kind == OpKind::constant && readers[size_t(op.weight)] > 1)
            bad_graph("op " + quote(op.name) + ": its weight is used by another op too; a constant has its own");
}

void GraphParser::parse_op(Value value) {
    Op op;
    int number = int(graph_.ops.size()) + 1;
    op.name = Fields(value, "an op").name("name");
    Fields fields(value, "op " + quote(op.name));
    fields.take("name");
    std::string_view kind = fields.text("op");
    auto known = std::find_if(std::begin(KINDS), std::end(KINDS), [&](const KindName &k) { return k.name == kind; });
    if (known == std::end(KINDS) || (version_ < 3 && known->kind >= FIRST_OF_FORMAT_3))
        bad_graph(fields.where() + " is a " + quote(kind) + ", which is not an operation of format " +
                  std::to_string(version_));
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
    const bool none = op.kind == OpKind::constant || op.kind == OpKind::input;
    const bool two = op.kind == OpKind::add || op.kind == OpKind::binary || op.kind == OpKind::matmul;
    size_t least = none ? 0 : two ? 2 : 1;
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
    case OpKind::concat:
        if (version_ >= 3 && fields.has("axis"))
            op.axis = int(fields.integer("axis", 0, MAX_AXES));
        break;
    case OpKind::softmax:
        op.single = version_ >= 3 && given_true(fields, "single");
        break;
    case OpKind::dequantize:
    case OpKind::clip:
    case OpKind::add:
    case OpKind::flatten:
        break;
    default:
        parse_new_attributes(fields, op);
    }
}

// Operations of format 3.
void GraphParser::parse_new_attributes(Fields &fields, Op &op) const {
    switch (op.kind) {
    case OpKind::constant: {
        const Weight &weight = parse_weight(fields, op);
        op.shape = parse_shape(fields, 0);
        if (size_t(op.shape.product(0, op.shape.rank)) != weight.count)
            bad_graph(fields.where() + ": 'shape' is not that of its weight, which has " +
                      std::to_string(weight.count) + " numbers");
        break;
    }
    case OpKind::input:
        op.integer = fields.flag("integer");
        op.shape = parse_input_shape(fields, op.integer);
        break;
    case OpKind::reshape:
        op.shape = parse_shape(fields, 1);
        break;
    case OpKind::transpose:
        op.axes = parse_axes(fields, "order", false);
        break;
    case OpKind::slice:
        parse_slice(fields, op);
        break;
    case OpKind::gather:
        op.axis = int(fields.integer("axis", 0, MAX_AXES));
        op.index = parse_list(fields, "index", MAX_INDEX, DIMENSION_LIMIT);
        break;
    case OpKind::pointwise:
        op.function = parse_function(fields, POINTWISE);
        break;
    case OpKind::binary:
        op.function = parse_function(fields, BINARY);
        break;
    case OpKind::reduce:
        op.function = parse_function(fields, REDUCE);
        op.axes = parse_axes(fields, "axes", true);
        break;
    case OpKind::norm: {
        op.axes = parse_axes(fields, "axes", true);
        Value eps = fields.take("eps");
        if (!is_number(eps) || !(eps.number() >= 0) || !(eps.number() < 1))
            fields.fail("eps", "a number from 0, below 1");
        op.eps = float(eps.number());
        break;
    }
    case OpKind::matmul:
        op.transposed = fields.flag("transposed");
        break;
    case OpKind::embedding: {
        const Weight &weight = parse_weight(fields, op);
        if (weight.shape[1] != 1 || weight.shape[2] != 1)
            bad_graph(fields.where() + " has a weight that is not (rows, 1, 1, C)");
        break;
    }
    default: { // recurrent
        op.function = parse_function(fields, RECURRENT);
        op.reverse = fields.flag("reverse");
        const Weight &weight = parse_weight(fields, op);
        const int64_t gates = op.function == Function::lstm ? 4 : 3;
        if (weight.shape[1] != 1 || weight.shape[2] != 1 || weight.shape[0] != gates * (weight.shape[3] - 1))
            bad_graph(fields.where() + " has a weight that is not (" + std::to_string(gates) + " H, 1, 1, H + 1)");
    }
    }
}

// The weight of an op that needs floats in every profile.
const Weight &GraphParser::parse_weight(Fields &fields, Op &op) const {
    std::string_view name = fields.name("weight");
    op.weight = weight_names_.find(name);
    if (op.weight < 0)
        bad_graph(fields.where() + " has the weight " + quote(name) + ", which the graph does not list");
    const Weight &weight = graph_.weights[size_t(op.weight)];
    if (!weight.is_float)
        bad_graph(fields.where() + " has the weight " + quote(name) + ", which is quantized; it must be float");
    return weight;
}

// 1 to `most` whole numbers from 0, below `below`.
std::vector<int> GraphParser::parse_list(Fields &fields, const char *key, size_t most, int64_t below) {
    Value value = fields.take(key);
    bool good = value.is(Type::array) && value.size() >= 1 && value.size() <= most;
    std::vector<int> numbers;
    if (good)
        for (Value item : value) {
            good = good && item.is(Type::integer) && item.integer() >= 0 && item.integer() < below;
            numbers.push_back(good ? int(item.integer()) : 0);
        }
    if (!good)
        fields.fail(key,
                    "a list of 1 to " + std::to_string(most) + " whole numbers from 0, below " + std::to_string(below));
    return numbers;
}

// Different axes: rising ones, or a permutation of all.
std::vector<int> GraphParser::parse_axes(Fields &fields, const char *key, bool rising) {
    std::vector<int> axes = parse_list(fields, key, MAX_AXES, MAX_AXES), sorted = axes;
    std::sort(sorted.begin(), sorted.end());
    bool good = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
    if (rising ? !good || sorted != axes : !good || sorted.back() + 1 != int(sorted.size()))
        fields.fail(key, rising ? "a list of axes that rise" : "a permutation of the axes");
    return axes;
}

void GraphParser::parse_slice(Fields &fields, Op &op) {
    op.axis = int(fields.integer("axis", 0, MAX_AXES));
    op.start = fields.integer("start", 1 - DIMENSION_LIMIT, DIMENSION_LIMIT);
    op.to_end = fields.take("stop").is(Type::null);
    if (!op.to_end)
        op.stop = fields.integer("stop", 1 - DIMENSION_LIMIT, DIMENSION_LIMIT);
    op.step = int(fields.integer("step", 1, DIMENSION_LIMIT));
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
        op.transposed = version_ >= 3 && given_true(fields, "transposed");
        if (op.transposed)
            fields.integers("output_pad", 0, op.output_pad);
        op.toom_cook = version_ >= 3 && given_true(fields, "toom_cook");
        if (op.toom_cook && !fits_toom_cook(op))
            bad_graph(fields.where() + " has toom_cook, which needs groups, strides and dilations of 1, 3 or 4 kernel "
                                       "lines and columns, and no transposition");
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
    int source = op.inputs.empty() ? -1 : quantizer_of(op.inputs[0]);
    switch (op.kind) {
    case OpKind::quantize:
        op.quantizer = int(graph_.ops.size());
        break;
    case OpKind::max_pool:
    case OpKind::flatten:
    case OpKind::reshape:
    case OpKind::transpose:
    case OpKind::slice:
    case OpKind::gather:
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
    case OpKind::matmul:
        if ((source >= 0) != (quantizer_of(op.inputs[1]) >= 0))
            bad_graph(where + " reads codes of a quantize and floats; it needs two of one kind");
        op.multiplies_codes = source >= 0;
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
