// GRAPH into a Graph, part by part; each part may rely on those before it. In: the JSON of GRAPH. Out: a ParsedGraph,
// checked in itself, or a ModelError. Made by parse_graph (graph_json.h); the ops are in graph_ops.cpp, profiles in
// graph_profiles.cpp, the rest in graph_json.cpp.
#pragma once

#include "format/graph_json.h"
#include "format/json_fields.h"

namespace anyprec {

class GraphParser {
  public:
    explicit GraphParser(Json::Value root) : root_(root) {}
    ParsedGraph parse();

  private:
    using Value = Json::Value;
    using Type = Json::Type;

    void parse_input(Value value);
    Shape parse_input_shape(Fields &fields, bool integer) const;
    Shape parse_shape(Fields &fields, int most_free) const;
    void parse_image_size(Fields &input);
    void parse_preprocessing(Value value);
    std::vector<float> parse_channels(Fields &fields, const char *key) const;
    void parse_labels(Value value);
    void parse_planes(Value value);
    void parse_weights(Value value);
    void parse_outputs(Value value);
    void infer();
    void set_table_rows();
    void parse_checksums(Value value);

    // graph_ops.cpp
    void parse_ops(Value value);
    void parse_op(Value value);
    int earlier_value(const Fields &fields, std::string_view name, int number) const;
    void parse_inputs(Fields &fields, int number, Op &op) const;
    void parse_attributes(Fields &fields, int number, Op &op) const;
    static void parse_window(Fields &fields, Op &op);
    void parse_layer(Fields &fields, Op &op) const;
    void parse_resize(Fields &fields, int number, Op &op) const;
    static void parse_pad(Fields &fields, Op &op);
    void parse_new_attributes(Fields &fields, Op &op) const;
    const Weight &parse_weight(Fields &fields, Op &op) const;
    static std::vector<int> parse_list(Fields &fields, const char *key, size_t most, int64_t below);
    static std::vector<int> parse_axes(Fields &fields, const char *key, bool rising);
    static void parse_slice(Fields &fields, Op &op);
    void check_constants() const;
    void check_codes(const std::string &where, Op &op) const;

    // graph_profiles.cpp
    void parse_profiles(Value value);
    static void check_profile_name(Fields &fields);
    uint8_t checked_bits(const Fields &fields, const char *key, Value value) const;
    void parse_weight_bits(Fields &fields, Profile &profile) const;
    void parse_act_bits(Fields &fields, Profile &profile) const;
    void check_profile(const Profile &profile) const;
    void check_product(const Profile &profile, const Op &op) const;

    static bool is_number(Value value) { return value.is(Type::integer) || value.is(Type::real); }
    // Bits that hold in every profile but float ones: 8 is the one such width; 0 where nothing is said.
    static int fixed_bits(Fields &fields) { return fields.has("bits") ? int(fields.integer("bits", 8, 9)) : 0; }
    int quantizer_of(int value) const { return value == 0 ? -1 : graph_.ops[size_t(value) - 1].quantizer; }

    Value root_;
    ParsedGraph result_;
    Graph &graph_ = result_.graph;
    int64_t version_ = 1;
    size_t plane_count_ = 0;
    NameIndex weight_names_, value_names_; // views into the JSON text
};

} // namespace anyprec
