// GRAPH, the JSON text inside a model file (FORMAT.md section 2), into a Graph without any tensor.
// In: the text. Out: the graph, checked in itself, and the checksums it lists; or a ModelError. Called by reader.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "format/graph.h"

namespace anyprec {

struct ParsedGraph {
    Graph graph;
    std::vector<std::pair<std::string, uint32_t>> checksums; // tensor name, CRC-32; by name
};

ParsedGraph parse_graph(std::string_view text);

// Whether an op has a tensor of per-profile numbers. Op::table_row is set, Op::table is for the reader to set; shaped
// (profiles, 2, table_row / 2) if Op::affine, else (profiles, 2).
bool has_table(const Op &op);

} // namespace anyprec
