// See tensors.h.
#include "format/tensors.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "anyprec/model_error.h"

namespace anyprec {
namespace {

// Walks the tensors that a graph needs, in file order, along those of the header. Allocates nothing for a tensor that
// the header does not list: 65,536 weights with 36 planes each would be 2 million names.
class Placement {
  public:
    Placement(const Header &header, const ParsedGraph &parsed, size_t data_start)
        : header_(header), parsed_(parsed), data_start_(data_start) {}

    std::vector<TensorPlace> place() {
        const Graph &graph = parsed_.graph;
        const int64_t profiles = int64_t(graph.profiles.size());
        std::vector<int> ops = by_name(graph.ops), weights = by_name(graph.weights);
        for (int i : ops) {
            const Op &op = graph.ops[size_t(i)];
            if (op.affine)
                next("table.", op.name, true, {profiles, 2, int64_t(op.table_row / 2)}, {TensorPlace::table, i, 0});
            else if (has_table(op))
                next("table.", op.name, true, {profiles, 2}, {TensorPlace::table, i, 0});
        }
        for (int i : weights)
            if (const Weight &weight = graph.weights[size_t(i)]; weight.is_float)
                next("weight.", weight.name, true, {weight.shape, weight.shape + 4}, {TensorPlace::values, i, 0});
        for (int i : weights)
            if (const Weight &weight = graph.weights[size_t(i)]; weight.fixed_bits)
                next("codes.", weight.name, false, {int64_t(weight.count)}, {TensorPlace::codes, i, 0});
        size_t planes = 0;
        for (const std::vector<int> &numbers : graph.planes)
            planes = numbers.empty() ? planes : size_t(numbers.back()) + 1; // wider widths end later
        for (size_t number = 0; number < planes; number++) {
            std::string prefix = {'p', 'l', 'a', 'n', 'e', char('0' + number / 10), char('0' + number % 10), '.'};
            for (int i : weights)
                if (const Weight &weight = graph.weights[size_t(i)]; !weight.is_float && !weight.fixed_bits)
                    next(prefix, weight.name, false, {int64_t(weight.count + 7) / 8}, {TensorPlace::plane, i, number});
        }
        for (int i : weights)
            if (const Weight &weight = graph.weights[size_t(i)]; !weight.is_float && needs_tail(i))
                next("tail.", weight.name, false, {int64_t(weight.count) * 4}, {TensorPlace::tail, i, 0});
        if (at_ < header_.rows.size())
            bad_tensor(header_.rows[at_].name, "is none that the graph needs, or not in its place");
        if (!without_checksum_.empty())
            throw ModelError(ModelErrorKind::BadGraph, "the graph has no checksum of " + quote(without_checksum_));
        if (at_ < parsed_.checksums.size())
            throw ModelError(ModelErrorKind::BadGraph, "the graph has checksums of tensors it does not need");
        return std::move(places_);
    }

  private:
    struct Whose {
        TensorPlace::Part part;
        int owner;
        size_t number;
    };

    template <class Named> static std::vector<int> by_name(const std::vector<Named> &all) {
        std::vector<int> order(all.size());
        for (size_t i = 0; i < order.size(); i++)
            order[i] = int(i);
        std::sort(order.begin(), order.end(), [&](int a, int b) { return all[size_t(a)].name < all[size_t(b)].name; });
        return order;
    }

    bool needs_tail(int weight) const {
        const std::vector<Profile> &profiles = parsed_.graph.profiles;
        return std::any_of(profiles.begin(), profiles.end(),
                           [&](const Profile &p) { return p.weight_bits[size_t(weight)] == FLOAT_BITS; });
    }

    void next(std::string_view prefix, const std::string &name, bool is_float, const std::vector<int64_t> &shape,
              Whose whose) {
        std::string full = std::string(prefix) + name;
        if (at_ >= header_.rows.size())
            bad_tensor(full, "is missing");
        const TensorRow &row = header_.rows[at_++];
        if (row.name != full)
            bad_tensor(full, "is missing, or not in its place: " + quote(row.name) + " stands there");
        if (row.is_float != is_float || row.shape != shape)
            bad_tensor(full, "is not of the dtype and shape that the graph needs");
        TensorPlace place;
        place.begin = data_start_ + row.begin;
        place.end = data_start_ + row.end;
        place.part = whose.part;
        place.owner = whose.owner;
        place.number = uint8_t(whose.number);
        if (is_float && place.begin % alignof(float))
            bad_tensor(full, "starts at byte " + std::to_string(place.begin) + ", which is not a multiple of 4");
        const auto &checksums = parsed_.checksums;
        auto found =
            std::lower_bound(checksums.begin(), checksums.end(), full,
                             [](const auto &entry, const std::string &wanted) { return entry.first < wanted; });
        if (found != checksums.end() && found->first == full)
            place.crc = found->second;
        else if (without_checksum_.empty())
            without_checksum_ = full;
        places_.push_back(place);
    }

    const Header &header_;
    const ParsedGraph &parsed_;
    size_t data_start_;
    size_t at_ = 0;
    std::string without_checksum_; // the first such tensor; reported last, since a missing tensor is worse
    std::vector<TensorPlace> places_;
};

} // namespace

std::vector<TensorPlace> place_tensors(const Header &header, const ParsedGraph &parsed, size_t data_start) {
    return Placement(header, parsed, data_start).place();
}

} // namespace anyprec
