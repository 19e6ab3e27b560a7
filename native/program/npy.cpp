// See npy.h. The header is a Python literal such as {'descr': '<f4', 'fortran_order': False, 'shape': (1, 3, 32, 32),
// }.
#include "program/npy.h"

#include <cstdio>
#include <cstring>
#include <fstream>

namespace anyprec {
namespace {

// The text after 'key': in the header, or an error.
std::string field(const std::string &header, const std::string &key, const std::string &path) {
    const size_t at = header.find("'" + key + "':");
    if (at == std::string::npos)
        throw NpyError(path + " is no .npy file: its header has no '" + key + "'");
    return header.substr(at + key.size() + 3);
}

} // namespace

NpyArray read_npy(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file)
        throw NpyError("cannot open " + path);
    file.seekg(0, std::ios::end);
    const auto total = static_cast<uint64_t>(file.tellg());
    file.seekg(0);
    unsigned char start[12] = {};
    file.read(reinterpret_cast<char *>(start), 10);
    if (!file || std::memcmp(start, "\x93NUMPY", 6) != 0 || start[6] < 1 || start[6] > 3)
        throw NpyError(path + " is not a .npy file; write one with numpy.save");
    uint64_t length = start[8] | start[9] << 8, offset = 10;
    if (start[6] > 1) { // four bytes of length
        file.read(reinterpret_cast<char *>(start + 10), 2);
        length |= static_cast<uint64_t>(start[10]) << 16 | static_cast<uint64_t>(start[11]) << 24;
        offset = 12;
    }
    if (!file || length > 1 << 20 || offset + length > total)
        throw NpyError(path + " is cut off in its header");
    std::string header(length, ' ');
    file.read(header.data(), static_cast<std::streamsize>(length));

    NpyArray array;
    const std::string type = field(header, "descr", path);
    if (type.find("'<f4'") < 3)
        array.bytes = false;
    else if (type.find("'|u1'") < 3)
        array.bytes = true;
    else
        throw NpyError(path + " is neither float32 nor uint8; convert it with astype");
    if (field(header, "fortran_order", path).find("False") > 2)
        throw NpyError(path + " is in Fortran order; save numpy.ascontiguousarray of it");
    std::string shape = field(header, "shape", path);
    const size_t open = shape.find('('), close = shape.find(')');
    if (open == std::string::npos || close == std::string::npos || open > 2)
        throw NpyError(path + " has no shape in its header");
    uint64_t count = 1, number = 0;
    bool digits = false;
    for (size_t i = open + 1; i <= close; ++i) {
        if (shape[i] >= '0' && shape[i] <= '9') {
            number = number * 10 + static_cast<uint64_t>(shape[i] - '0');
            digits = true;
            if (number > INT32_MAX)
                throw NpyError(path + " has an axis of more than 2^31 - 1 entries");
        } else if (digits) {
            array.shape.push_back(number);
            if (number && count > (uint64_t(1) << 40) / number)
                throw NpyError(path + " claims more than 2^40 entries");
            count *= number;
            number = 0;
            digits = false;
        }
    }
    const uint64_t bytes = count * (array.bytes ? 1 : 4);
    if (offset + length + bytes > total)
        throw NpyError(path + " is cut off: it should have " + std::to_string(bytes) + " bytes of data, and has " +
                       std::to_string(total - offset - length));
    array.data.resize(bytes);
    file.read(reinterpret_cast<char *>(array.data.data()), static_cast<std::streamsize>(bytes));
    return array;
}

void write_npy(const std::string &path, const std::vector<size_t> &shape, const float *data) {
    std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (";
    size_t count = 1;
    for (size_t n : shape) {
        header += std::to_string(n) + ", ";
        count *= n;
    }
    header += "), }";
    header.append(63 - (10 + header.size()) % 64, ' '); // so that the data starts at a multiple of 64
    header += '\n';
    std::ofstream file(path, std::ios::binary);
    const char start[10] = {'\x93',
                            'N',
                            'U',
                            'M',
                            'P',
                            'Y',
                            1,
                            0,
                            static_cast<char>(header.size() & 255),
                            static_cast<char>(header.size() >> 8)};
    file.write(start, 10);
    file.write(header.data(), static_cast<std::streamsize>(header.size()));
    file.write(reinterpret_cast<const char *>(data), static_cast<std::streamsize>(4 * count));
    if (!file.flush())
        throw NpyError("cannot write " + path);
}

} // namespace anyprec
