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
    shared.assign(graph.ops.size() + 1, true); // inputs are
    for (size_t i = 0; i < graph.ops.size(); ++i) {
        Op &op = graph.ops[i];
        const auto is_shared = [&](int value) { return shared[static_cast<size_t>(value)]; };
        const bool same = std::all_of(op.inputs.begin(), op.inputs.end(), is_shared) && same_bits(graph, i);
        const bool is_layer = op.kind == OpKind::conv || op.kind == OpKind::linear;
        if (same && is_layer && !same_table(graph, op) && graph.weights[static_cast<size_t>(op.weight)].is_float)
            if (Op *quantize = quantize_after(graph, static_cast<int>(i) + 1))
                move_table(op, *quantize);
        shared[i + 1] = same && same_table(graph, op);
    }
    find_kept();
}

SharedPrefix::SharedPrefix(const Graph &original, const std::vector<Shape> &shapes) : graph(original) {
    const auto values_of = [&](int value) {
        const Shape &s = shapes[static_cast<size_t>(value)];
        return s.pixels() * s.c();
    };
    size_t end = 0, layer = 0; // ops of the prefix; the first layer after it
    for (size_t i = 0; i < graph.ops.size(); ++i) {
        const Op &op = graph.ops[i];
        if (op.kind != OpKind::conv || op.groups > 1)
            continue;
        const auto weights = static_cast<int64_t>(graph.weights[static_cast<size_t>(op.weight)].count);
        if (weights < values_of(op.inputs[0]) + values_of(static_cast<int>(i) + 1))
            end = i + 1, layer = 0;
        else if (!layer)
            layer = i;
    }
    if (!end || !layer)
        return;
    shared.assign(graph.ops.size() + 1, false);
    std::fill_n(shared.begin(), layer + 1, true); // values of the ops before that layer
    find_kept();
}

void SharedPrefix::find_kept() {
    std::vector<bool> read(shared.size(), false);
    for (size_t i = 0; i < graph.ops.size(); ++i)
        if (!shared[i + 1])
            for (int value : graph.ops[i].inputs)
                read[static_cast<size_t>(value)] = true;
    for (int value : graph.outputs)
        read[static_cast<size_t>(value)] = true;
    for (size_t v = 0; v < shared.size(); ++v)
        if (read[v] && shared[v])
            kept.push_back(static_cast<int>(v));
}

} // namespace anyprec
