// Floats as JSON text, for answers of a server. In: floats. Out: the shortest decimals that read back as the same
// floats, with commas between; null for NaN and infinity, which JSON does not have. Called by bindings.cpp.
#pragma once

#include <cstddef>
#include <string>

namespace anyprec {

constexpr size_t kMostDigits = 17; // bytes of one number and its comma: "-1234567890123.0,"

std::string json_numbers(const float *x, size_t count);

} // namespace anyprec
