// Limits on the parts of a model file: FORMAT.md, section 4. Used by the reader.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anyprec {

constexpr size_t MAX_HEADER = 100000000; // bytes
constexpr size_t MAX_OPS = 65536, MAX_WEIGHTS = 65536, MAX_PROFILES = 256;
constexpr size_t MAX_INDEX = 65536;                   // positions of a gather
constexpr size_t MAX_NAME = 200;                      // characters
constexpr int MAX_PLANES = 36;                        // eight widths with planes of their own: 1 + 2 + ... + 8
constexpr int64_t DIMENSION_LIMIT = int64_t(1) << 31; // any dimension is below
constexpr int64_t COUNT_LIMIT = int64_t(1) << 40;     // elements of a value, of a weight
// Output pixels of a convolution times its taps. The engine has tables of 4 bytes for each (taps.h), at most 2 GiB, as
// for a value. 3x3 at 8K (7680 x 4320) is 0.56 of it.
constexpr int64_t TAP_LIMIT = int64_t(1) << 29;

} // namespace anyprec
