// See shared_prefix.h.
#include "plan/shared_prefix.h"

#include <algorithm>
#include <cstring>

namespace anyprec {

namespace {

bool same_table(const Graph &graph, const Op &op) {
    for (size_t p = 1; op.table && p < graph.profiles.size(); ++p)
        if (std::memcmp(op.table, op.table + p * op.table_row, 4 * op.table_row) != 0)
            return false;
    return true;
}

bool same_bits(const Graph &graph, size_t number) {
    const auto weight = static_cast<size_t>(graph.ops[number].weight);
    const Profile &first = graph.profiles[0];
    return std::all_of(graph.profiles.begin(), graph.profiles.end(), [&](const Profile &profile) {
        return profile.act_bits[number] == first.act_bits[number] &&
               (graph.ops[number].weight < 0 || profile.weight_bits[weight] == first.weight_bits[weight]);
    });
}

// The quantize that is the only reader of a value and has no table of its own; nullptr: none.
Op *quantize_after(Graph &graph, int value) {
    if (std::find(graph.outputs.begin(), graph.outputs.end(), value) != graph.outputs.end())
        return nullptr;
    Op *reader = nullptr;
    for (Op &op : graph.ops)
        for (int input : op.inputs)
            if (input == value) {
                if (reader)
                    return nullptr;
                reader = &op;
            }
    return reader && reader->kind == OpKind::quantize && !reader->affine ? reader : nullptr;
}

void move_table(Op &from, Op &to) {
    to.table = from.table;
    to.table_row = from.table_row;
    to.affine = true;
    from.table = nullptr;
    from.table_row = 0;
    from.affine = false;
}

} // namespace

SharedPrefix::SharedPrefix(const Graph &original) : graph(original) {
    const size_t values = graph.ops.size() + 1;
    shared.assign(values, true); // inputs are
    std::vector<bool> read(values, false);
    for (size_t i = 0; i < graph.ops.size(); ++i) {
        Op &op = graph.ops[i];
        const auto is_shared = [&](int value) { return shared[static_cast<size_t>(value)]; };
        const bool same = std::all_of(op.inputs.begin(), op.inputs.end(), is_shared) && same_bits(graph, i);
        const bool is_layer = op.kind == OpKind::conv || op.kind == OpKind::linear;
        if (same && is_layer && !same_table(graph, op) && graph.weights[static_cast<size_t>(op.weight)].is_float)
            if (Op *quantize = quantize_after(graph, static_cast<int>(i) + 1))
                move_table(op, *quantize);
        shared[i + 1] = same && same_table(graph, op);
        if (!shared[i + 1])
            for (int value : op.inputs)
                read[static_cast<size_t>(value)] = true;
    }
    for (int value : graph.outputs)
        read[static_cast<size_t>(value)] = true;
    for (size_t v = 0; v < values; ++v)
        if (read[v] && shared[v])
            kept.push_back(static_cast<int>(v));
}

} // namespace anyprec
