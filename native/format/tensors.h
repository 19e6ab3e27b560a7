// Finds the tensors that a graph needs among those of a header (FORMAT.md, section 1). In: both. Out: where each one
// lies in the file and what it is, in file order; or a ModelError. Called by reader.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "format/graph_json.h"
#include "format/header.h"

namespace anyprec {

// Where a tensor's bytes lie in the file, and what they belong to.
struct TensorPlace {
    enum Part : uint8_t { table, values, codes, plane, tail };
    size_t begin = 0, end = 0;
    uint32_t crc = 0;
    int owner = 0; // number of the op (table) or weight
    Part part = table;
    uint8_t number = 0; // of the plane
};

// data_start: offset of the first tensor in the file. Every listed tensor must be needed, and every needed one listed.
std::vector<TensorPlace> place_tensors(const Header &header, const ParsedGraph &parsed, size_t data_start);

} // namespace anyprec
