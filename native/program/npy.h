// .npy files (numpy's array format, versions 1 to 3): reads float32 and uint8 arrays in C order, writes float32 arrays.
// Used only by anyprec-run.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace anyprec {

struct NpyError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct NpyArray {
    bool bytes = false; // uint8 instead of float32
    std::vector<size_t> shape;
    std::vector<uint8_t> data;
};

NpyArray read_npy(const std::string &path);
void write_npy(const std::string &path, const std::vector<size_t> &shape, const float *data);

} // namespace anyprec
