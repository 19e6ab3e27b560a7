// The profiles of GRAPH (FORMAT.md, section 2), a part of GraphParser: the bits of each weight and each quantize, and
// that integer sums fit 32 bits.
#include <algorithm>

#include "format/graph_parser.h"

namespace anyprec {

void GraphParser::parse_profiles(Value value) {
    if (!value.is(Type::array) || value.size() < 1 || value.size() > MAX_PROFILES)
        bad_graph("the graph: 'profiles' must be a list of 1 to 256 profiles");
    NameIndex names;
    for (Value item : value) {
        Profile profile;
        profile.name = Fields(item, "a profile").name("name");
        Fields fields(item, "profile " + quote(profile.name));
        names.add(fields.name("name"), 0);
        check_profile_name(fields);
        parse_weight_bits(fields, profile);
        parse_act_bits(fields, profile);
        Value accuracy = fields.take("accuracy");
        if (!accuracy.is(Type::null) && !(is_number(accuracy) && accuracy.number() >= 0 && accuracy.number() <= 100))
            fields.fail("accuracy", "a percentage or null");
        if (!accuracy.is(Type::null))
            profile.accuracy = accuracy.number();
        fields.done();
        graph_.profiles.push_back(std::move(profile));
    }
    if (!names.sort())
        bad_graph("the graph has two profiles of one name");
}

// Reserved names: "random" draws a width, and a number is the uniform profile of that width.
void GraphParser::check_profile_name(Fields &fields) {
    const std::string_view name = fields.name("name");
    if (name == "random" || name.substr(0, 7) == "random:")
        bad_graph(fields.where() + ": no profile may be called that, for bits='random' draws a width");
    if (!std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; }))
        return;
    const auto is_it = [&](Value bits) { return bits.is(Type::integer) && std::to_string(bits.integer()) == name; };
    if (!is_it(fields.take("weights")) || !is_it(fields.take("acts")))
        bad_graph(fields.where() + ": a number as its name means that weights and acts have that many bits");
}

uint8_t GraphParser::checked_bits(const Fields &fields, const char *key, Value value) const {
    int64_t bits = value.is(Type::integer) ? value.integer() : 0;
    if (bits != FLOAT_BITS && (bits < 1 || bits > 8))
        fields.fail(key, "1 to 8, or 32 for float, or one such number for each");
    return uint8_t(bits);
}

void GraphParser::parse_weight_bits(Fields &fields, Profile &profile) const {
    Value value = fields.take("weights");
    profile.weight_bits.assign(graph_.weights.size(), FLOAT_BITS);
    auto by_profile = [](const Weight &weight) { return !weight.is_float && !weight.fixed_bits; };
    uint8_t bits = 0; // of all of them
    if (value.is(Type::object)) {
        for (auto member = value.begin(); member != value.end(); ++member) {
            int weight = weight_names_.find(member.key());
            if (weight < 0 || !by_profile(graph_.weights[size_t(weight)]))
                bad_graph(fields.where() + " gives bits to " + quote(member.key()) +
                          ", which is no weight that is quantized by profiles");
            profile.weight_bits[size_t(weight)] = checked_bits(fields, "weights", *member);
        }
        size_t wanted = size_t(std::count_if(graph_.weights.begin(), graph_.weights.end(), by_profile));
        if (value.size() != wanted)
            bad_graph(fields.where() + " gives bits to " + std::to_string(value.size()) + " of " +
                      std::to_string(wanted) + " quantized weights");
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
            bad_graph(fields.where() + " has weights of " + std::to_string(its) +
                      " bits, for which there are no planes");
    }
}

void GraphParser::parse_act_bits(Fields &fields, Profile &profile) const {
    Value value = fields.take("acts");
    profile.act_bits.assign(graph_.ops.size(), 0);
    auto by_profile = [](const Op &op) { return op.kind == OpKind::quantize && !op.fixed_bits; };
    size_t quantizers = size_t(std::count_if(graph_.ops.begin(), graph_.ops.end(), by_profile));
    uint8_t bits = 0; // of all of them
    if (value.is(Type::object)) {
        for (auto member = value.begin(); member != value.end(); ++member) {
            int number = value_names_.find(member.key());
            if (number < 1 || !by_profile(graph_.ops[size_t(number) - 1]))
                bad_graph(fields.where() + " gives bits to " + quote(member.key()) +
                          ", which is no quantize, or one with bits of its own");
            profile.act_bits[size_t(number) - 1] = checked_bits(fields, "acts", *member);
        }
        if (value.size() != quantizers)
            bad_graph(fields.where() + " gives bits to " + std::to_string(value.size()) + " of " +
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

// A layer's weights and input are both float or both integer, and its sums fit 32 bits. Example: 3 x 3 x 512 weights of
// 8 bits with inputs of 8 bits give 4608 * 255 * 255 = 2.996e8, seven times below 2^31.
void GraphParser::check_profile(const Profile &profile) const {
    for (const Op &op : graph_.ops) {
        if (op.multiplies_codes)
            check_product(profile, op);
        if (op.weight < 0 || graph_.weights[size_t(op.weight)].is_float)
            continue;
        const Weight &weight = graph_.weights[size_t(op.weight)];
        int weight_bits = profile.weight_bits[size_t(op.weight)];
        int act_bits = profile.act_bits[size_t(quantizer_of(op.inputs[0]))];
        auto where = [&] { return "profile " + quote(profile.name) + ", op " + quote(op.name) + ": "; };
        if ((weight_bits == FLOAT_BITS) != (act_bits == FLOAT_BITS))
            bad_graph(where() + "weights of " + std::to_string(weight_bits) + " bits and input of " +
                      std::to_string(act_bits) + "; both must be float (32) or neither");
        if (weight_bits == FLOAT_BITS)
            continue;
        size_t taps = weight.count / size_t(weight.shape[0]); // below 2^40, and each product below 2^16
        if (taps * size_t((1 << weight_bits) - 1) * size_t((1 << act_bits) - 1) >= size_t(DIMENSION_LIMIT))
            bad_graph(where() + "sums of " + std::to_string(taps) + " products do not fit 32 bit; give it fewer bits");
    }
}

// A product of two values of codes: both sides are integers in this profile, or none; its sums fit.
void GraphParser::check_product(const Profile &profile, const Op &op) const {
    const int left = profile.act_bits[size_t(quantizer_of(op.inputs[0]))];
    const int right = profile.act_bits[size_t(quantizer_of(op.inputs[1]))];
    auto where = [&] { return "profile " + quote(profile.name) + ", op " + quote(op.name) + ": "; };
    if ((left == FLOAT_BITS) != (right == FLOAT_BITS))
        bad_graph(where() + "inputs of " + std::to_string(left) + " and " + std::to_string(right) +
                  " bits; both must be float (32) or neither");
    const int terms = graph_.ops[size_t(op.inputs[0]) - 1].channels; // 0: not known yet
    if (left != FLOAT_BITS && !product_fits(terms, left, right))
        bad_graph(where() + "sums of " + std::to_string(terms) + " products do not fit 32 bit; give it fewer bits");
}

} // namespace anyprec
