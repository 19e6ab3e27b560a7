// The header of a safetensors file that contains a GRAPH (FORMAT.md, section 1). In: its JSON. Out: the tensors it
// lists, without gaps or overlaps, and the text of GRAPH, whose checksum matches; or a ModelError. Called by
// reader.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "format/json.h"

namespace anyprec {

struct TensorRow {
    std::string_view name;
    bool is_float = false; // F32, else U8
    std::vector<int64_t> shape;
    size_t begin = 0, end = 0; // counted from the tensor data
};

struct Header {
    std::vector<TensorRow> rows; // in the order of their bytes, without gaps or overlaps
    std::string_view graph;
};

// `json` must outlive the result.
Header parse_header(const Json &json);

[[noreturn]] void bad_tensor(std::string_view name, const std::string &what);

} // namespace anyprec
